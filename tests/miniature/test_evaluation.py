"""Shares with intervals, an evaluation that goes on where it was killed, what is frozen, and the tracker
of long videos."""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from experiments.miniature import evaluation, tracking
from experiments.miniature.evaluation import wilson
from experiments.miniature.recipe import Counts
from experiments.miniature.tracking import EvalPool, held_out_scenes
from wan.config import RunConfig

# -- shares --


@pytest.mark.parametrize(
    ("yes", "asked", "low", "high"),  # from the table in Newcombe 1998 (doi 10.1002/sim.4780170808), method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_are_the_published_ones(yes, asked, low, high):
    assert wilson(yes, asked) == pytest.approx((low, high), abs=5e-5)


class PerfectMiniature:
    """Its videos are rendered, except those of a window: they are the first caption's."""

    def __init__(self, config):
        self.device, self.calls = torch.device("cpu"), []

    def _videos(self, captions, name: str):
        self.calls.append(name)
        by_caption = {
            s.caption: s for kinds in tracking.SETS.values() for s in tracking.held_out_scenes(kinds, 2)
        }
        return evaluation.rendered([by_caption[caption] for caption in captions], 81)

    def causal(self, captions, size: int = -1, sink: int = 0):
        return self._videos(captions if size < 0 else captions[:1] * len(captions), f"causal {size}")

    def base(self, captions):
        return self._videos(captions, "base")

    def reconstructed(self, videos):
        return iter(videos)


def test_a_killed_evaluation_goes_on_to_the_same_report(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "Miniature", PerfectMiniature)
    monkeypatch.setattr(evaluation, "measure_vae", lambda mini, clips: {"clips": clips})
    monkeypatch.setattr(evaluation, "LONG_SECONDS", 3)
    monkeypatch.setattr(evaluation, "SETTLED", 0)
    monkeypatch.setattr(evaluation, "PASTS", evaluation.PASTS[:2])
    monkeypatch.setattr(evaluation, "SETS", {"behind a wall": tracking.SETS["behind a wall"]})
    config, counts, path = RunConfig(ckpt_dir=str(tmp_path)), Counts(1, 1, 1, 1), tmp_path / "partial"
    undisturbed = evaluation.evaluate(config, counts, path)
    assert not path.exists()

    def killed(self, captions):
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(PerfectMiniature, "base", killed)
        with pytest.raises(SystemExit):
            evaluation.evaluate(config, counts, path)
    done = set(json.loads(path.read_text())["done"])
    assert done == {"vae", *(f"behind a wall, {source}" for source in ("rendered", "vae", "causal"))}
    assert evaluation.evaluate(config, counts, path, workers=2) == undisturbed
    assert undisturbed["captions"]["behind a wall"]["shares"]["causal"]["shape"] == 1.0
    assert (
        undisturbed["past"][0]["same"] == 1.0 and undisturbed["long"]["behind a wall"]["vae"]["right"] == 1.0
    )


# -- what is frozen --


def test_the_hashes_are_of_what_is_evaluated(tmp_path):
    """Another checkpoint than the folder's, and the LoRA that is merged into it."""
    (tmp_path / "vae").mkdir()
    for name in ("vae/v.safetensors", "self_forcing_mini.pt", "other.pt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "lora.pt").write_text("lora")
    given = {"checkpoint_path": str(tmp_path / "other.pt"), "lora_path": str(tmp_path / "lora.pt")}
    config = RunConfig(ckpt_dir=str(tmp_path), lora_alpha=1, **given)
    found = evaluation.weight_hashes(config)
    assert list(found) == ["vae/v.safetensors", "other.pt", "lora.pt"]
    assert found["other.pt"] == sha256(b"other.pt").hexdigest()
    elsewhere = replace(config, ckpt_dir=str(tmp_path / "vae"))
    assert str(tmp_path / "other.pt") in evaluation.weight_hashes(elsewhere)


def test_hashes_follow_the_tracker_and_the_scenes(monkeypatch):
    before = tracking.hashes()
    logged = json.loads(Path("checkpoints/wan-mini/evaluation.json").read_text())["frozen"]
    scenes = {name: value for name, value in logged.items() if name.startswith("scenes, ")}
    assert len(scenes) == 3 and before == before | scenes
    monkeypatch.setattr(tracking, "SMALLEST", 0.5)
    monkeypatch.setattr(tracking, "held_out_scenes", lambda kinds, _: held_out_scenes(kinds, 1))
    assert tracking.hashes.__wrapped__()["tracker"] != before["tracker"]


def test_workers_are_given_every_bit_and_judge_alike():
    scenes = [scene for kinds in tracking.SETS.values() for scene in held_out_scenes(kinds, 1)][:2]
    noise = torch.Generator().manual_seed(0)
    videos = [v + 0.3 * torch.randn(v.shape, generator=noise) for v in evaluation.rendered(scenes, 49)]
    here = [tracking.judge(video, scene) for video, scene in zip(videos, scenes, strict=True)]
    assert len({answer for one in here for answer in one.values()}) == 2  # the noise misleads the tracker
    with EvalPool(2) as pool:
        assert pool.judge_all(iter(videos), scenes) == here
