"""Rollouts that two processes make together are timed by the slowest, and have the bits of the plain one."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.beside
def test_two_processes(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = "--config_path configs/wan_mini.yaml --num_frames 3 --what plain mass --repeats 1 --device cpu"
    script = ["experiments/benchmarks/rollout.py", *flags.split()]
    done = subprocess.run(
        [*torchrun, *script, "--output_path", str(tmp_path / "report.json")],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["gpus"] == 2 and all(row["same_bits"] for row in report["rows"].values())
