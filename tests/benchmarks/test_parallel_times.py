"""The benchmark of several processes: its report, and that it says how to start it."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from experiments.benchmarks import parallel
from wan.errors import ConfigError

SMALL = "--models Wan2.1-T2V-1.3B --device cpu --num_layers 1 --num_frames 3 --height 4 --width 4 --repeats 1"


def test_one_process_has_nothing_to_compare(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="start it by torchrun --nproc-per-node P"):
        parallel.run(["--device", "cpu"])


@pytest.mark.beside
def test_two_processes(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = ["experiments/benchmarks/parallel.py", *SMALL.split()]
    done = subprocess.run(
        [*torchrun, *script, "--output_path", str(tmp_path / "report.json")],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    found = report["Wan2.1-T2V-1.3B"]
    assert report["gpus"] == 2 and found["exchange"] == "all-to-all"
    ways = ("1 GPU", "1 GPU, graphs", "2 GPUs", "2 GPUs, graphs")
    assert list(found["rows"]) == [f"{name}, {way}" for way in ways for name in ("plain", "mass")]
