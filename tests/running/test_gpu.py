"""On a GPU: too little memory at each stage of a run, and equal bits with --deterministic."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from experiments import extract_attention_wan, run_extraction_figure4
from experiments.extraction import base as bidirectional
from experiments.extraction import causal, rollout
from experiments.running import cli
from wan import reductions

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: GPU memory and GPU determinism need one"
)

MINI = ["--config_path", "configs/wan_mini.yaml", "--device", "cuda"]
SHORT = [*MINI, "--num_frames", "9", "--quiet"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def no_more_memory(monkeypatch):
    """A function that lets a stage of a run begin with every byte of this process taken."""
    taken = []

    def take_all() -> None:
        torch.cuda.empty_cache()
        share = torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(share)
        for size in (1 << 20, 1 << 14, 1 << 9):
            try:
                while True:
                    taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                pass

    def at(module, name: str) -> None:
        original = getattr(module, name)

        def stage(*args, **more):
            take_all()
            return original(*args, **more)

        monkeypatch.setattr(module, name, stage)

    yield at
    taken.clear()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def said_by(script, flags, capfd) -> str:
    torch.zeros(1, device="cuda")
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(script.run, flags)
    said = capfd.readouterr().err
    assert ended.value.code == 1 and said.startswith("error: out of GPU memory while "), said
    assert said.count("\n") == 1 and "CUDA out of memory" in said
    return said


@pytest.mark.parametrize(
    ("module", "name", "flags", "doing", "remedy"),
    [
        (causal, "encode_prompts", [], "encoding the prompt", "--device cpu"),
        (causal, "load_pipeline", [], "loading the model", "--device cpu"),
        (causal, "roll_out", ["--granularity", "frame"], "rolling out block 0 of 3", "fewer --num_frames"),
        (reductions, "token_matrix", [], "rolling out block 2 of 3", "--granularity frame keeps no token"),
    ],
)
def test_out_of_memory_says_what_was_being_done_and_what_helps(
    module, name, flags, doing, remedy, tmp_path, no_more_memory, capfd
):
    no_more_memory(module, name)
    said = said_by(run_extraction_figure4, [*SHORT, *flags, "--output_path", str(tmp_path / "out.pt")], capfd)
    assert f"while {doing}: " in said and remedy in said and not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("module", "name", "doing"),
    [
        (bidirectional, "encode_prompts", "encoding the prompt"),
        (rollout, "sample", "sampling step 0 of 4"),
    ],
)
def test_out_of_memory_of_the_base_model(module, name, doing, tmp_path, no_more_memory, capfd):
    no_more_memory(module, name)
    flags = [*MINI, "--num_frames", "9", "--num_steps", "4", "--quiet", "--output_dir", str(tmp_path)]
    assert f"while {doing}: " in said_by(extract_attention_wan, flags, capfd) and not os.listdir(tmp_path)


EVERYTHING = """
import sys
from experiments import extract_attention_wan, run_extraction, run_extraction_all, run_extraction_figure4
flags, folder = sys.argv[2:], sys.argv[1]
rollout = ["--deterministic", "--quiet", *flags]
everything = ["--key_curve", "--cross", "--rope_bands"]
run_extraction_all.run([*rollout, *everything, "--output_path", f"{folder}/atlas.pt"])
run_extraction_figure4.run([*rollout, "--output_path", f"{folder}/figure4.pt"])
run_extraction.run([*rollout, "--output_path", f"{folder}/inference.pt"])
short = ["--num_frames", "21", "--num_steps", "6"]
extract_attention_wan.run([*rollout, *short, "--all_layers", "--output_dir", folder])
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deterministic_runs_are_equal_to_the_byte(dtype, tmp_path):
    """In processes of their own: what one has warmed up or tuned is not there for the other."""
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        command = [sys.executable, "-c", EVERYTHING, str(tmp_path / name), *MINI, "--dtype", dtype]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        made.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert len(made[0]) == 5 and made[0].keys() == made[1].keys()
    assert [name for name in made[0] if made[0][name] != made[1][name]] == []
