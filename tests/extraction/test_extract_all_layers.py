"""A layer cache for every layer from one rollout."""

import subprocess

import pytest
import torch
from conftest import ROOT

from experiments import run_extraction_each
from experiments.caches import load_cache
from experiments.running import cli

SHORT = ["--config_path", "configs/wan_mini.yaml", "--num_frames", "6"]


def test_every_layer_is_what_its_own_rollout_gives(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    run_extraction_each.run([*SHORT, "--output_dir", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {f"layer{layer}.pt" for layer in range(8)}
    run_extraction_each.run([*SHORT, "--layer_index", "6", "--output_path", str(tmp_path / "alone.pt")])
    alone, together = (load_cache(tmp_path / name) for name in ("alone.pt", "layer6.pt"))
    torch.testing.assert_close(
        together["full_frame_attention"], alone["full_frame_attention"], rtol=0, atol=0, equal_nan=True
    )
    assert (tmp_path / "alone.pt").read_bytes() == (tmp_path / "layer6.pt").read_bytes()


@pytest.mark.beside
def test_the_shell_script(tmp_path):
    script = ["bash", "experiments/extract_all_layers.sh", "configs/wan_mini.yaml", str(tmp_path)]
    done = subprocess.run([*script, "--num_frames", "6"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("layer cache of wan-mini") == 8
    assert {path.name for path in tmp_path.iterdir()} == {f"layer{layer}.pt" for layer in range(8)}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layer_index", "1"], "excludes --layer_index"),
        (["--output_path", "a.pt"], "excludes --layer_index"),
        (["--granularity", "token"], "would not fit in memory"),
    ],
)
def test_flags_that_exclude_each_other(flags, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        cli.main(run_extraction_each.run, [*SHORT, "--output_dir", str(tmp_path), *flags])
    assert ended.value.code == 2 and message in capfd.readouterr().err


def test_the_shell_script_without_a_folder():
    done = subprocess.run(
        ["bash", "experiments/extract_all_layers.sh", "a"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
