"""Shares with intervals, an evaluation that goes on where it was killed, what is frozen, and the tracker
of long videos."""

import json
import os
import signal
import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.miniature import evaluation, tracking
from experiments.miniature.evaluation import intervals
from experiments.miniature.recipe import Counts
from experiments.miniature.tracking import EvalPool, held_out_scenes
from wan.config import RunConfig

# -- shares --


def test_an_interval_resamples_captions_and_not_their_videos():
    dice = np.random.default_rng(1)
    shapes = [{"shape": bool(dice.random() < 0.7)} for _ in range(40)]
    alone = intervals(shapes, [str(n) for n in range(40)])["shape"]
    share, spread = sum(one["shape"] for one in shapes) / 40, alone[1] - alone[0]
    assert alone[0] < share < alone[1] and spread == pytest.approx(
        2 * 1.96 * (share * (1 - share) / 40) ** 0.5, rel=0.1
    )
    often = intervals(shapes * 9, [str(n) for n in range(40)] * 9)["shape"]  # the same again is no news
    assert often == alone
    some = [one | ({"color": n % 2 == 0} if n < 10 else {}) for n, one in enumerate(shapes)]
    found = intervals(some, [str(n) for n in range(40)])
    assert found["shape"] == alone and 0.1 < found["color"][0] < 0.5 < found["color"][1] < 0.9
    assert intervals([{"shape": True}] * 3, ["a", "b", "b"]) == {"shape": [1.0, 1.0]}


class PerfectMiniature:
    """Its videos are rendered, except those of a window: they are the first caption's."""

    def __init__(self, config):
        self.device, self.calls = torch.device("cpu"), []

    def _videos(self, captions, name: str):
        self.calls.append(name)
        scenes = (scene for kinds in tracking.SETS.values() for scene in held_out_scenes(kinds, 2))
        by_caption = {scene.caption: scene for scene in scenes}
        return evaluation.rendered([by_caption[caption] for caption in captions], 81)

    def causal(self, captions, size: int = -1, sink: int = 0):
        return self._videos(captions if size < 0 else captions[:1] * len(captions), f"causal {size}")

    def base(self, captions):
        return self._videos(captions, "base")

    def reconstructed(self, videos):
        return iter(videos)


def test_a_killed_evaluation_goes_on_to_the_same_report(tmp_path, monkeypatch):
    shorter = {"LONG_SECONDS": 3, "SETTLED": 0, "PASTS": evaluation.PASTS[:2]}
    shorter |= {"Miniature": PerfectMiniature, "measure_vae": lambda mini, clips: {"clips": clips}}
    shorter |= {"SETS": {"behind a wall": tracking.SETS["behind a wall"]}}
    for name, value in shorter.items():
        monkeypatch.setattr(evaluation, name, value)
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
    assert undisturbed["past"][0]["same"] == undisturbed["long"]["behind a wall"]["vae"]["right"] == 1.0


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
        assert [task.result() for task in [pool.submit(time.sleep, 0.5) for _ in range(2)]]  # both have begun
        for worker in [*pool._processes]:  # as a scheduler ends a whole group; its parent finishes a block
            os.kill(worker, signal.SIGTERM)
        assert pool.judge_all(iter(videos), scenes) == here
