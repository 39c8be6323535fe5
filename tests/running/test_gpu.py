"""On a GPU: equal bits with --deterministic."""

import subprocess
import sys

import pytest
import torch
from conftest import ROOT

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: GPU memory and GPU determinism need one"
)

MINI = ["--config_path", "configs/wan_mini.yaml", "--device", "cuda"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


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
