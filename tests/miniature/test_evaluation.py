"""The shipped miniature and its evaluation, which goes on where it was killed; what is frozen."""

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
from conftest import ROOT
from diffusers import AutoencoderKLWan

from experiments.miniature import evaluation, moving_shapes, tracking
from experiments.miniature.evaluation import Miniature, intervals
from experiments.miniature.judges import EvalPool
from experiments.miniature.moving_shapes import SETS, held_out_scenes
from experiments.miniature.training import MODEL
from wan.checkpoint import read_model_config, read_self_forcing_state, read_transformer_state
from wan.config import RunConfig, load_config

# -- shares --


def test_an_interval_resamples_captions_and_not_their_videos():
    dice = np.random.default_rng(1)
    shapes = [{"shape": bool(dice.random() < 0.7)} for _ in range(40)]
    some = [one | ({"color": n % 2 == 0} if n < 10 else {}) for n, one in enumerate(shapes)]
    found = intervals(some, [str(n) for n in range(40)])
    (low, high), share = found["shape"], sum(one["shape"] for one in shapes) / 40
    normal = 2 * 1.96 * (share * (1 - share) / 40) ** 0.5
    assert low < share < high and high - low == pytest.approx(normal, rel=0.1)
    assert 0.1 < found["color"][0] < 0.5 < found["color"][1] < 0.9
    often = intervals(shapes * 9, [str(n) for n in range(40)] * 9)  # the same again is no news
    assert often == {"shape": [low, high]}
    assert intervals([{"shape": True}] * 3, ["a", "b", "b"]) == {"shape": [1.0, 1.0]}


class PerfectMiniature:
    """Its videos are rendered, except those of a window: they are the first caption's."""

    def __init__(self, config):
        self.device, self.calls = torch.device("cpu"), []

    def _videos(self, captions, name: str):
        self.calls.append(name)
        scenes = (scene for kinds in SETS.values() for scene in held_out_scenes(kinds, 2))
        by_caption = {scene.caption: scene for scene in scenes}
        return moving_shapes.render_videos([by_caption[caption] for caption in captions], 81)

    def causal(self, captions, size: int = -1, sink: int = 0):
        return self._videos(captions if size < 0 else captions[:1] * len(captions), f"causal {size}")

    def base(self, captions):
        return self._videos(captions, "base")

    def reconstructed(self, videos):
        return iter(videos)


def test_a_killed_evaluation_goes_on_to_the_same_report(tmp_path, monkeypatch):
    shorter = {
        "PASTS": evaluation.PASTS[:2],
        "Miniature": PerfectMiniature,
        "measure_vae": lambda mini, clips: {"clips": clips},
    }
    monkeypatch.setattr(moving_shapes, "SETS", {"behind a wall": SETS["behind a wall"]})
    for name, value in shorter.items():
        monkeypatch.setattr(evaluation, name, value)
    config, path = RunConfig(ckpt_dir=str(tmp_path)), tmp_path / "partial"
    undisturbed = evaluation.evaluate(config, 1, 1, path)
    assert not path.exists()

    def killed(self, captions):
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(PerfectMiniature, "base", killed)
        with pytest.raises(SystemExit):
            evaluation.evaluate(config, 1, 1, path)
    done = set(json.loads(path.read_text())["done"])
    assert done == {"vae", *(f"behind a wall, {source}" for source in ("rendered", "vae", "causal"))}
    assert evaluation.evaluate(config, 1, 1, path, workers=2) == undisturbed
    assert undisturbed["captions"]["behind a wall"]["shares"]["causal"]["shape"] == 1.0
    assert undisturbed["past"][0]["same"] == 1.0


# -- what is frozen --


def test_the_hashes_are_of_what_is_evaluated(tmp_path):
    """Another checkpoint than the folder's, and the LoRA that is merged into it."""
    (tmp_path / "vae").mkdir()
    for name in ("vae/v.safetensors", "self_forcing_mini.pt", "other.pt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "lora.pt").write_text("lora")
    given = {"checkpoint_path": f"{tmp_path}/other.pt", "lora_path": f"{tmp_path}/lora.pt", "lora_alpha": 1}
    config = RunConfig(ckpt_dir=str(tmp_path), **given)
    found = evaluation.weight_hashes(config)
    assert list(found) == ["vae/v.safetensors", "other.pt", "lora.pt"]
    assert found["other.pt"] == sha256(b"other.pt").hexdigest()
    assert f"{tmp_path}/other.pt" in evaluation.weight_hashes(replace(config, ckpt_dir=f"{tmp_path}/vae"))


def test_hashes_follow_the_tracker_and_the_scenes(monkeypatch):
    before = evaluation.hashes()
    logged = json.loads(Path("checkpoints/wan-mini/evaluation.json").read_text())["frozen"]
    scenes = {name: value for name, value in logged.items() if name.startswith("scenes, ")}
    assert len(scenes) == 3 and before == before | scenes
    monkeypatch.setattr(tracking, "SMALLEST", 0.5)
    monkeypatch.setattr(moving_shapes, "held_out_scenes", lambda kinds, _: held_out_scenes(kinds, 1))
    assert evaluation.hashes()["tracker"] != before["tracker"]


def test_workers_are_given_every_bit_and_judge_alike():
    scenes = [scene for kinds in SETS.values() for scene in held_out_scenes(kinds, 1)][:2]
    noise = torch.Generator().manual_seed(0)
    videos = [
        v + 0.3 * torch.randn(v.shape, generator=noise) for v in moving_shapes.render_videos(scenes, 49)
    ]
    here = [tracking.judge(video, scene) for video, scene in zip(videos, scenes, strict=True)]
    assert len({answer for one in here for answer in one.values()}) == 2  # the noise misleads the tracker
    with EvalPool(2) as pool:
        assert [task.result() for task in [pool.submit(time.sleep, 0.5) for _ in range(2)]]  # both have begun
        for worker in [*pool._processes]:  # as a scheduler ends a whole group; its parent finishes a block
            os.kill(worker, signal.SIGTERM)
        assert pool.judge_all(iter(videos), scenes) == here


MINI = ROOT / "checkpoints" / "wan-mini"
EVALUATION = json.loads((MINI / "evaluation.json").read_text())


def test_its_two_weight_sets_are_one_model():
    sizes = read_model_config(MINI)
    base, tuned = read_transformer_state(MINI), read_self_forcing_state(MINI / "self_forcing_mini.pt")
    assert sizes == MODEL  # whose config the training copies
    assert base.keys() == tuned.keys() and 4e6 < sum(t.numel() for t in base.values()) < 6e6
    assert all(t.dtype == torch.bfloat16 for t in (*base.values(), *tuned.values()))
    assert not torch.equal(base["blocks.0.self_attn.q.weight"], tuned["blocks.0.self_attn.q.weight"])


def test_the_receptive_field_is_the_evaluations():
    evaluated = EVALUATION["vae"]["receptive_field"]
    assert evaluation.receptive_field(AutoencoderKLWan.load_config(MINI / "vae")) == evaluated


@pytest.mark.beside
def test_its_evaluation_is_of_these_weights():
    """A caption, measured anew as evaluate_mini.py measures."""
    mini = Miniature(load_config("configs/wan_mini.yaml", {"device": "cpu"}))
    scenes = held_out_scenes(SETS["one shape"], 1)
    assert EVALUATION["weights"] == evaluation.weight_hashes(mini.config)
    (now,) = EvalPool(1).judge_all(mini.causal([scenes[0].caption]), scenes)
    then = EVALUATION["captions"]["one shape"]["each"][0]
    assert scenes[0].caption == then["caption"] and len(then["causal"]) >= 4
    assert sum(now[q] != answer for q, answer in then["causal"].items()) <= 1  # it may be close elsewhere


@pytest.mark.beside
def test_a_video_has_its_own_noise_in_a_batch_of_any_size(tiny):
    mini, videos = Miniature(replace(tiny.config, num_frames=3)), {}
    captions = [scene.caption for scene in held_out_scenes(SETS["one shape"], 2)]
    for mini.batch in (1, 2):
        videos[mini.batch] = torch.stack(list(mini.causal(captions)))
    torch.testing.assert_close(videos[1], videos[2], atol=1e-3, rtol=0)
    assert (videos[2][0] - videos[2][1]).abs().max() > 0.1
    through = [torch.stack(list(mini.reconstructed(list(videos[2])))) for mini.batch in (1, 2)]
    torch.testing.assert_close(*through, atol=1e-3, rtol=0)
