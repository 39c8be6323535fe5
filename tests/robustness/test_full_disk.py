"""A disk of one megabyte: said before the rollout with the bytes needed, and while writing;
nothing is left behind.
"""

import os
import subprocess

import pytest
import torch
from conftest import ROOT
from helpers import synthetic_caches

from experiments import run_extraction_all, run_extraction_each, run_extraction_figure4
from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError
from experiments.extraction import cache_builders, causal
from experiments.extraction.memory import estimate_bytes
from wan.config import load_config

MINI = ["--config_path", "configs/wan_mini.yaml", "--quiet"]


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is not allowed here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_known_before_the_rollout(small_disk, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(causal, "load_pipeline", lambda *args: pytest.fail("the model was loaded"))
    with pytest.raises(
        CacheError, match=r"out.pt cannot be written: it needs \d{7} bytes, \d{6,7} are free in "
    ):
        run_extraction_all.run([*MINI, "--output_path", str(small_disk / "out.pt")])
    assert os.listdir(small_disk) == []


def test_found_while_writing(small_disk):
    save_cache(small_disk / "out.pt", synthetic_caches.layer())
    before = (small_disk / "out.pt").read_bytes()
    with pytest.raises(
        CacheError, match=r"cannot be written: .*; it needs \d{7} bytes, \d+ are free"
    ) as caught:
        save_cache(small_disk / "out.pt", synthetic_caches.layer() | {"more": torch.zeros(1 << 19)})
    assert "\n" not in str(caught.value)
    assert (small_disk / "out.pt").read_bytes() == before and os.listdir(small_disk) == ["out.pt"]


@pytest.mark.parametrize(
    ("script", "flags", "requests"),
    [
        (run_extraction_figure4, [], lambda c: cache_builders.figure4_requests(c, "token")),
        (
            run_extraction_figure4,
            ["--granularity", "key"],
            lambda c: cache_builders.figure4_requests(c, "key"),
        ),
        (run_extraction_each, [], cache_builders.layer_requests),
        (
            run_extraction_all,
            ["--rope_bands"],
            lambda c: cache_builders.atlas_requests(c, True, False, False, True),
        ),
    ],
)
def test_the_estimate_is_close_and_never_too_small(script, flags, requests, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    script.run([*MINI, *flags, "--output_path", str(tmp_path / "out.pt")])
    config = load_config("configs/wan_mini.yaml")
    estimated, real = estimate_bytes(config, requests(config)), (tmp_path / "out.pt").stat().st_size
    assert real <= estimated <= real * 1.1 + 2**16
    assert load_cache(tmp_path / "out.pt")["read_by"] == "0.1.0"
