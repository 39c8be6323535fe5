"""The benchmark of several processes: its report, and that it says how to start it."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from experiments.dev import benchmark_parallel
from wan.errors import ConfigError

SMALL = (
    "--device cpu --num_layers 1 --num_frames 6 --accuracy_frames 3 --height 4 --width 4 --repeats 1 "
    "--profile --parts rollouts sweep error long --sweep 2 --sweep_frames 3 --long_frames 6"
)


def test_one_process_has_nothing_to_compare(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="start it by torchrun --nproc-per-node P"):
        benchmark_parallel.run(["--device", "cpu"])


@pytest.mark.beside
def test_two_processes(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [
        "experiments/dev/benchmark_parallel.py",
        "--models",
        "Wan2.1-T2V-1.3B",
        *SMALL.split(),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GIT_COMMIT": "0" * 40}
    done = subprocess.run(
        [*torchrun, *script, "--output_path", str(tmp_path / "report.json")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    rows = report["rollouts"]["Wan2.1-T2V-1.3B"]["rows"]
    assert set(rows) == {"nothing", "mean logits + mass"} and report["gpus"] == 2
    assert report["error"]["between"] < 1e-5 and report["sweep"]["same_bytes"]
    assert not report["error"]["ways_differ"] and report["long"]["num_frames"] == 6
    assert report["rollouts"]["Wan2.1-T2V-1.3B"]["exchange"] == "all-to-all"
    for way, profile in report["rollouts"]["Wan2.1-T2V-1.3B"]["profiles"].items():
        assert any("c10d::alltoall_base_" in line for line in profile["cpu"]), way
    for row in rows.values():
        assert set(row) == {"alone", "together", "graphs"}
        assert all(0 < row[way]["host_seconds"] <= row[way]["median_seconds"] for way in ("alone", "graphs"))
        assert row["alone"]["median_seconds"] <= row["alone"]["other_way_seconds"]
    assert "| 1 GPU | 2 GPUs | ratio |" in done.stdout and "Sweep of 2 captured rollouts" in done.stdout


@pytest.mark.parametrize("name", ["capture_h200", "capture_fa4_graphs_h200"])
def test_the_computed_cost_follows_from_the_measured_rollout(name):
    report = json.loads((ROOT / f"docs/benchmarks/{name}.json").read_text())
    seconds = report["rows"]["mean logits + mass"]["median_seconds"]
    hours = 1000 * 3 * 4 * seconds / 3600
    text = (ROOT / "docs/many_gpus.md").read_text()
    for said in (f"{seconds} s on an H200", f"{hours:.1f} hours on one GPU", f"8 GPUs {hours / 8:.1f} hours"):
        assert said in " ".join(text.split()), said


@pytest.mark.parametrize("name", ["capture_h200", "capture_fa4_h200", "capture_fa4_graphs_h200"])
def test_the_guide_to_the_real_model_says_the_measured_seconds(name):
    rows = json.loads((ROOT / f"docs/benchmarks/{name}.json").read_text())["rows"]
    plain, mass = (rows[row]["median_seconds"] for row in ("plain", "mean logits + mass"))
    text = " ".join((ROOT / "docs/real_model.md").read_text().split())
    said = f"{plain:.2f} s, and {mass:.2f} s" if name == "capture_h200" else f"{plain:.2f} s and {mass:.2f} s"
    assert said in text, said
