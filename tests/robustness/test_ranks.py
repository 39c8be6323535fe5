"""A sweep by several processes: one is killed, one joins, and every file has the bytes of one process."""

import json
import os
import signal
import subprocess
import time

import pytest
import torch
from conftest import ROOT
from helpers.forked import exit_code

from experiments import run_extraction_all
from experiments.running import cli
from wan.errors import ConfigError

MINI = ["--config_path", "configs/wan_mini.yaml", "--num_frames", "6", "--quiet"]
PROMPTS = ["a red circle moving right", "a blue square moving up", "a green triangle moving left"]
SEEDS = ["0", "1", "2", "3"]
ALONE: dict[str, str] = {}


@pytest.fixture(autouse=True)
def at_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    torch.set_num_threads(1)


def rank(number: int, count: int) -> dict[str, str]:
    return {"RANK": str(number), "WORLD_SIZE": str(count), "LOCAL_RANK": str(number)}


def flags_of(folder, *more: str) -> list[str]:
    prompts = str(folder.parent / "prompts.txt")
    return [*MINI, "--prompts", prompts, "--seeds", *SEEDS, "--output_dir", str(folder), *more]


def start(folder, environment: dict[str, str]) -> int:
    """The process id of a sweep that runs as the environment says."""
    child = os.fork()
    if child == 0:
        os.environ.update(environment)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        code = 70
        try:
            code = exit_code(lambda: cli.main(run_extraction_all.run, flags_of(folder)))()
        finally:
            os._exit(code)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def wait_for(folder, pattern: str) -> None:
    deadline = time.monotonic() + 60
    while not list(folder.glob(pattern)):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def files_below(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.beside
def test_three_ranks_one_killed_one_added(tmp_path):
    assert ended(start(tmp_path / "one", ALONE)) == 0
    whole = files_below(tmp_path / "one")
    assert len([name for name in whole if name.endswith(".pt")]) == 12

    out = tmp_path / "three"
    ranks = [start(out, rank(number, 3)) for number in range(3)]
    wait_for(out, "*.pt")
    os.kill(ranks[1], signal.SIGKILL)
    assert ended(ranks.pop(1)) == -signal.SIGKILL
    ranks.append(start(out, ALONE))  # without a launcher, such as a task of a SLURM array
    assert [ended(child) for child in ranks] == [0, 0, 0]
    assert {name: data for name, data in files_below(out).items() if not name.endswith(".lock")} == whole
    assert [run["state"] for run in json.loads((out / "manifest.json").read_text())["runs"]] == ["done"] * 12


@pytest.mark.beside
def test_requeued_with_another_number_of_ranks(tmp_path):
    """SLURM ends a task by SIGTERM and starts it again: here two processes, then one, then three."""
    out = tmp_path / "out"
    first = [start(out, rank(number, 2)) for number in range(2)]
    wait_for(out, "*.pt")
    for child in first:
        os.kill(child, signal.SIGTERM)
    assert {ended(child) for child in first} == {130}
    assert 0 < len(list(out.glob("items/*.json"))) < 12 and not list(out.rglob("*.claim"))
    assert ended(start(out, rank(0, 1))) == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert [run["state"] for run in manifest["runs"]] == ["done"] * 12
    before = files_below(out)
    assert [ended(child) for child in [start(out, rank(number, 3)) for number in range(3)]] == [0, 0, 0]
    assert files_below(out) == before


def test_the_slurm_script(tmp_path):
    """It goes where it was submitted, and becomes the Python that the signals are for."""
    script = ["bash", str(ROOT / "experiments/running/slurm_sweep.sh")]
    few = subprocess.run([*script, "x"], capture_output=True, text=True)
    assert (
        few.returncode == 2 and few.stderr.startswith("error: usage: sbatch") and few.stderr.count("\n") == 1
    )
    (tmp_path / "python").write_text("#!/bin/sh\npwd\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "python").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT)}
    words = ["c.yaml", "p.txt", "out", "--seeds", "0", "1"]
    done = subprocess.run([*script, *words], env=environment, cwd=tmp_path, capture_output=True, text=True)
    expected = ["experiments/run_extraction_all.py", "--config_path", "c.yaml", "--prompts", "p.txt"]
    assert done.stdout.split() == [str(ROOT), *expected, "--output_dir", "out", "--seeds", "0", "1"]


@pytest.mark.parametrize(
    ("environment", "flags", "message"),
    [
        ({"RANK": "1"}, [], "RANK is set and WORLD_SIZE is not: start ranks by torchrun"),
        ({"WORLD_SIZE": "8"}, [], "WORLD_SIZE is set and RANK is not"),
        (rank(0, 2) | {"LOCAL_RANK": ""}, [], "LOCAL_RANK is not set beside RANK and WORLD_SIZE"),
        (rank(7, 2), [], "RANK 7 is not one of WORLD_SIZE 2"),
        (rank(0, 2), ["--overwrite"], "--overwrite and 2 ranks exclude each other"),
        (rank(1, 2), ["--device", "cuda:0"], "device cuda:0 was asked for 2 ranks"),
    ],
)
def test_what_several_ranks_refuse(environment, flags, message, tmp_path, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        run_extraction_all.run(flags_of(tmp_path / "out", *flags))
    assert not (tmp_path / "out").exists()
