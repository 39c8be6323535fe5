"""--gpus: the numbers of one process, and whatever goes wrong in one of several is said once and ends all."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from helpers.forked import exit_code

from experiments import run_extraction_all
from experiments.caches import load_cache
from experiments.caches.files import RunError
from experiments.extraction import causal
from experiments.running import cli
from wan.errors import ConfigError

TINY = ["--config_path", "tiny.yaml", "--num_frames", "6", "--device", "cpu"]

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def beside_the_tiny_model(monkeypatch, tiny):
    monkeypatch.chdir(Path(tiny.path).parent)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(1)


def ranks(count: int, run, folder, prepare=lambda rank: None) -> tuple[list[int], str]:
    """Exit codes of count processes of one group, and what they said together.

    As torchrun's agent does, the process that starts them keeps their store: it outlives each of them.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            os.dup2(os.open(folder / f"said{rank}", os.O_WRONLY | os.O_CREAT), 2)
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
            os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
            code = 71
            try:
                prepare(rank)
                code = exit_code(run)()
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    said = "".join((folder / f"said{rank}").read_text() for rank in range(count))
    return codes, said


def extracting(path, *flags):
    return lambda: cli.main(run_extraction_all.run, [*TINY, "--quiet", "--output_path", str(path), *flags])


def test_the_numbers_of_one_process(tmp_path):
    codes, said = ranks(2, extracting(tmp_path / "two.pt", "--cross"), tmp_path)
    assert codes == [0, 0] and not said, said
    extracting(tmp_path / "one.pt", "--cross")()
    two, one = load_cache(tmp_path / "two.pt"), load_cache(tmp_path / "one.pt")
    assert two["gpus"] == 2 and set(two) - set(one) == {"gpus"}
    for name in ("frame_logits", "frame_mass", "cross_mass"):
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=1e-5, equal_nan=True)


def test_one_process_fails(tmp_path):
    def spoil(rank):
        if rank == 1:
            causal.load_pipeline = broken

    def broken(*args):
        raise RunError("block 0: not finite")

    codes, said = ranks(2, extracting(tmp_path / "out.pt"), tmp_path, spoil)
    assert codes[1] == 1 and codes[0] in (1, 70) and said == "error: block 0: not finite\n"
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.beside
def test_ctrl_c_saves_what_is_there(tmp_path, warm):
    """torchrun's agent passes it on, and both processes stop after the same block."""
    command = [warm.python, str(ROOT / "experiments/run_extraction_each.py"), *TINY[:2], "--device", "cpu"]
    command += ["--gpus", "2", "--num_frames", "300", "--output_path", str(tmp_path / "out.pt")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    first = next(line for line in process.stderr if line.startswith("block 1/100"))
    process.send_signal(signal.SIGINT)
    said = first + process.stderr.read()
    assert process.wait(60) == 130
    errors = [line for line in said.splitlines() if not line.startswith("block ")]
    *stopping, error = errors  # none where the other process's signal came first, and they agreed to stop
    assert [line[:25] for line in stopping] in ([], ["stopping after this block"]), said
    assert error.startswith("error: stopped after") and load_cache(tmp_path / "out.pt")["partial"]


TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (["--gpus", "5"], {}, "does not split tiny: its 2 heads and blocks of 48 tokens"),
        (["--gpus", "3"], TWO, "--gpus 3 under 2 ranks"),
    ],
)
def test_what_does_not_split(flags, environment, message, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        run_extraction_all.run([*TINY, *flags])
