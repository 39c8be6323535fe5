"""Long videos go on with what they were begun with, and with nothing else."""

from pathlib import Path

import pytest
import torch
import yaml
from helpers.forked import stopping_after
from safetensors import safe_open

from experiments import run_rollout
from experiments.caches.files import CacheError, StoppedError
from experiments.extraction.long_rollout import BlockCapture, LongVideo, path_of, read_blocks
from wan.errors import ConfigError

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def beside_the_tiny_model(monkeypatch, tiny):
    monkeypatch.chdir(Path(tiny.path).parent)


def make(folder: Path, *flags: str, config: Path | str = "tiny.yaml") -> LongVideo:
    """Six frames by the script."""
    path = folder / "a.mp4"
    words = ["--config_path", str(config), "--num_frames", "6", "--quiet", "--output_path", str(path)]
    run_rollout.run([*words, *flags])
    return LongVideo(path)


def test_what_is_captured_later_is_captured_as_if_at_once(tmp_path):
    """Also of a video that is finished, which stays as it is; other keys or passes are not mixed in."""
    (tmp_path / "whole").mkdir()
    whole = make(tmp_path / "whole", "--capture", "all")
    place = make(tmp_path)
    before = [path.read_bytes() for path in (place.path, place.latents)]
    run = safe_open(place.latents, "pt").metadata()["made_of"]
    make(tmp_path, "--capture", "last:1")
    assert [block["block"] for block in read_blocks(place.attention)] == [1]
    make(tmp_path, "--capture", "all")
    assert [path.read_bytes() for path in (place.path, place.latents)] == before
    for one, other in zip(read_blocks(place.attention), read_blocks(whole.attention), strict=True):
        assert torch.equal(one["logits"], other["logits"]) and one["block"] == other["block"]
    with pytest.raises(CacheError, match="was captured in another pass or with other keys"):
        make(tmp_path, "--capture", "band:3")
    with pytest.raises(CacheError, match="was captured in another pass or with other keys"):
        BlockCapture.read("last:1", 1).missing(place.attention, 2, run)
    with pytest.raises(CacheError, match=r"belongs to another run .*move .* away, or --overwrite"):
        BlockCapture.read("none", 0).missing(place.attention, 2, "another")
    path_of(place.attention, 0).write_bytes(b"torn")
    assert BlockCapture.read("all", 0).missing(place.attention, 2, run) == [0]


def test_a_rolling_window_goes_on_with_the_same_bits_and_is_not_captured(tmp_path, monkeypatch):
    rolling = {"sampler": "rolling_forcing", "denoising_step_list": [1000, 200]}
    (tmp_path / "rolling.yaml").write_text(
        yaml.safe_dump(yaml.safe_load(Path("tiny.yaml").read_text()) | rolling)
    )
    config = tmp_path / "rolling.yaml"
    with pytest.raises(ConfigError, match=r"--capture knows no rolling_forcing.* run_extraction_all.py"):
        make(tmp_path, "--capture", "last:2", config=config)
    (tmp_path / "whole").mkdir()
    whole = make(tmp_path / "whole", config=config)
    stopping_after(monkeypatch, 0)
    with pytest.raises(StoppedError, match="stopped after block 1 of 2"):
        make(tmp_path, config=config)
    monkeypatch.undo()
    place = make(tmp_path, config=config)
    assert place.latents.read_bytes() == whole.latents.read_bytes()
