"""Shares with intervals, an evaluation that goes on where it was killed, what is frozen, and the tracker
of long videos."""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from experiments.dev import miniature_tables
from experiments.miniature import evaluation, frozen, tracking
from experiments.miniature.evaluation import Judges, Parts, intervals, shares, wilson
from experiments.miniature.moving_shapes import FPS, Mover, Scene, render
from experiments.miniature.recipe import Counts
from experiments.miniature.tracking import judge_seconds
from wan.config import RunConfig

MOVER = Mover("square", "red", "right", x=0.3, y=0.5, radius=0.18, speed=0.15)
SCENE = Scene((MOVER,), "dark blue")
HIDING = Scene((replace(MOVER, radius=0.12, speed=0.28, x=0.2),), "dark blue", wall="white")
TWO = Scene(
    (
        replace(MOVER, radius=0.12, x=0.2, y=0.3, speed=0.2),
        Mover("circle", "yellow", "left", x=0.8, y=0.34, radius=0.12, speed=0.2),
    ),
    "dark blue",
)
LONG = 20  # seconds


def video_of(scene: Scene, seconds: int = LONG) -> torch.Tensor:
    """[frames, 3, 64, 64] in 0..1."""
    return render(scene, seconds * FPS, 64) / 2 + 0.5


# -- shares --


@pytest.mark.parametrize(
    ("yes", "asked", "low", "high"),  # from the table in Newcombe 1998 (doi 10.1002/sim.4780170808), method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_are_the_published_ones(yes, asked, low, high):
    assert wilson(yes, asked) == pytest.approx((low, high), abs=5e-5)


def test_shares_are_of_the_videos_that_were_asked():
    answers = [{"color": True, "shape": False}, {"shape": True}, {"color": False, "shape": True}]
    assert shares(answers) == {"color": 0.5, "shape": 0.667}
    low, high = intervals(answers)["shape"]
    assert low < 0.667 < high


# -- resume --


def test_what_is_done_is_not_measured_again(tmp_path):
    settings, path = {"weights": "a"}, tmp_path / "evaluation.json.partial"
    assert Parts(path, settings).get("one", lambda: [{"color": True}]) == [{"color": True}]
    again = Parts(path, settings)
    assert again.get("one", lambda: pytest.fail("measured again")) == [{"color": True}]
    assert Parts(path, {"weights": "b"}).get("one", lambda: "of other weights") == "of other weights"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"key": 1}', bytes(range(256))])
def test_a_damaged_partial_file_is_made_anew(tmp_path, content):
    path = tmp_path / "evaluation.json.partial"
    path.write_bytes(content)
    assert Parts(path, {}).get("one", lambda: 1) == 1
    assert json.loads(path.read_text())["done"] == {"one": 1}


class PerfectMiniature:
    """Its videos are rendered, except those of a window: they are the first caption's."""

    def __init__(self, config):
        self.device, self.calls = torch.device("cpu"), []

    def _videos(self, captions, name: str):
        self.calls.append(name)
        by_caption = {
            s.caption: s for kinds in frozen.SETS.values() for s in frozen.held_out_scenes(kinds, 2)
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
    monkeypatch.setattr(evaluation, "measure_vae", lambda mini, clips, judges: {"clips": clips})
    monkeypatch.setattr(evaluation, "LONG_SECONDS", 6)
    monkeypatch.setattr(
        evaluation, "SETS", {name: frozen.SETS[name] for name in ("one shape", "behind a wall")}
    )
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
    assert done == {"vae", *(f"one shape, {source}" for source in ("rendered", "vae", "causal"))}
    assert evaluation.evaluate(config, counts, path, workers=2) == undisturbed
    assert undisturbed["captions"]["one shape"]["shares"]["causal"]["color"] == 1.0
    assert undisturbed["past"][0]["same"] == 1.0 and undisturbed["long"]["one shape"]["vae"]["right"] == 1.0


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


def test_held_out_scenes_are_the_same_whatever_is_asked_for():
    kinds = frozen.SETS["two that cross"]
    assert frozen.held_out_scenes(kinds, 8)[:3] == frozen.held_out_scenes(kinds, 3)


def test_hashes_follow_the_tracker_and_the_scenes(monkeypatch):
    frozen.hashes.cache_clear()
    before = frozen.hashes()
    logged = json.loads(Path("checkpoints/wan-mini/evaluation.json").read_text())["frozen"]
    scenes = {name: value for name, value in logged.items() if name.startswith("scenes, ")}
    assert len(scenes) == 3 and before == before | scenes
    monkeypatch.setattr(tracking, "SMALLEST", 0.5)
    frozen.hashes.cache_clear()
    after = frozen.hashes()
    frozen.hashes.cache_clear()
    assert {name for name in before if before[name] != after[name]} == {"tracker"}


# -- long videos --


@pytest.mark.parametrize("scene", [SCENE, HIDING, TWO], ids=["one", "wall", "two"])
def test_every_second_of_what_is_rendered_is_right(scene):
    seconds = judge_seconds(video_of(scene), scene)
    assert len(seconds.right) == LONG and seconds.background.all()
    assert (seconds.right == seconds.visible).all()
    assert seconds.visible.float().mean() > 0.5


def test_a_shape_that_hides_again_and_again_is_neither_right_nor_wrong_meanwhile():
    seconds = judge_seconds(video_of(HIDING), HIDING)
    hidden = (~seconds.visible).long()
    assert (hidden.diff() == 1).sum() >= 2 and seconds.shares()["right"] == 1.0


def test_the_second_from_which_a_video_is_wrong_is_found():
    good, at = video_of(SCENE), 8
    for other, wrong in (
        (replace(SCENE, movers=(replace(MOVER, color="green"),)), "color"),
        (replace(SCENE, movers=(replace(MOVER, shape="circle"),)), "shape"),
        (replace(SCENE, background="dark gray"), "background"),
    ):
        seconds = judge_seconds(torch.cat([good[: at * FPS], video_of(other)[at * FPS :]]), SCENE)
        answers = {q: getattr(seconds, q) for q in ("color", "shape", "background")}
        assert all(answer[:at].all() for answer in answers.values())
        assert [q for q, answer in answers.items() if not answer[at:].any()] == [wrong]


def test_a_shape_that_never_comes_back_is_not_visible():
    video = video_of(HIDING)
    seconds = judge_seconds(video, HIDING)
    first = int((~seconds.visible).nonzero()[0]) + 1
    gone = torch.cat([video[: first * FPS], video[first * FPS - 1 :][:1].expand(8 * FPS, -1, -1, -1)])
    assert not judge_seconds(gone, HIDING).visible[first:].any()


def test_a_colour_that_is_not_said_is_that_of_the_first_second():
    scene = replace(HIDING, unnamed_color=True)
    other = replace(scene, movers=(replace(HIDING.movers[0], color="yellow"),))
    assert judge_seconds(video_of(other), scene).shares()["color"] == 1.0
    later = torch.cat([video_of(scene)[: 8 * FPS], video_of(other)[8 * FPS :]])
    seconds = judge_seconds(later, scene)
    assert seconds.color[:8].any() and not seconds.color[8:].any()


def test_an_empty_video_is_never_right():
    empty = video_of(SCENE, 1)[:1, :, :1, :1].expand(3 * FPS, 3, 64, 64)
    shown = judge_seconds(empty, SCENE).shares()
    assert shown == {"visible": 0.0, "background": 1.0, "color": 0.0, "shape": 0.0, "right": 0.0}


def test_workers_are_given_every_bit_and_judge_alike():
    scenes = [scene for kinds in frozen.SETS.values() for scene in frozen.held_out_scenes(kinds, 1)]
    noise = torch.Generator().manual_seed(0)
    videos = [v + 0.2 * torch.randn(v.shape, generator=noise) for v in evaluation.rendered(scenes, 81)]
    here = [tracking.judge(video, scene) for video, scene in zip(videos, scenes, strict=True)]
    assert len({answer for one in here for answer in one.values()}) == 2  # the noise misleads the tracker
    for workers, slots in ((1, 1), (3, 2)):  # fewer slots than videos: each waits for an earlier one
        with Judges(workers, slots, videos[0].shape) as judges:
            assert evaluation.judged(iter(videos), scenes, judges) == here
            seen = judges.call(evaluation.judge_rendered, scenes[0]).result()
            assert seen == tracking.judge(evaluation.rendered(scenes[:1], 81)[0], scenes[0])


# -- tables --


def test_tables_show_intervals_and_long_videos_where_there_are_any():
    answers = dict.fromkeys(("color", "shape", "background", "direction", "crossing"), 0.5)
    report = {
        "environment": dict.fromkeys(("device", "torch", "date", "git", "command"), "x"),
        "vae": {"clips": 2, "psnr": 30.0, "psnr_first_second": 30.0, "psnr_last_second": 30.0},
        "captions": {
            "two that cross": {
                "count": 4,
                "shares": {"causal": answers},
                "each": [{"caption": caption} for caption in ("a", "b", "a", "c")],
            }
        },
        "past": [
            {"local_attn_size": -1, "sink_size": 0, "count": 4}
            | dict.fromkeys(("hides", "comes_back", "same_color", "same_shape", "same"), 0.5)
        ],
    }
    table = miniature_tables.table(report)
    assert "| 4 videos, two that cross: causal, 4 steps | 50% | 50% |" in table
    assert "Distinct captions: 3 (two that cross)." in table
    report["captions"]["two that cross"]["intervals"] = {"causal": dict.fromkeys(answers, wilson(2, 4))}
    seconds = {"first_second": 34.84, "last_second": 34.61}
    report["long"] = {
        "one shape": {
            "count": 4,
            "seconds": 60,
            "psnr": seconds,
            "rendered": {"right": 1.0},
            "vae": {"right": 0.93},
        }
    }
    table = miniature_tables.table(report)
    assert "| 50% (15-85) | 50% (15-85) |" in table
    assert "| one shape | 34.8 dB | 34.6 dB | 100% | 93% |" in table
