"""The tracker that judges the miniature's videos, right on rendered scenes and able to say no; the scenes."""

import itertools
import json
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import psutil
import pytest
import torch
import torch.nn.functional as F

from experiments.miniature import (
    COLORS,
    FPS,
    KINDS,
    Mover,
    Scene,
    held_out_scenes,
    hidden_share,
    judge,
    judge_by_caption,
    judge_seconds,
    moving_shapes,
    scene_of,
)
from experiments.miniature.judges import exit_with_parent
from experiments.miniature.moving_shapes import render
from wan.errors import ConfigError

MOVER = Mover("square", "red", "right", x=0.3, y=0.5, radius=0.18, speed=0.15)
SCENE = Scene((MOVER,), "dark blue")
HIDING = Scene((replace(MOVER, radius=0.12, speed=0.3, x=0.2),), "dark blue", wall="white")
AGAIN = Scene((replace(MOVER, radius=0.12, speed=0.28, x=0.2),), "dark blue", wall="white")
SQUARE = replace(MOVER, radius=0.12, x=0.2, y=0.3, speed=0.2)
CIRCLE = replace(SQUARE, shape="circle", color="yellow", direction="left", x=0.8, y=0.34)
TWO = Scene((SQUARE, CIRCLE), "dark blue")
LONG = 6  # seconds


def video_of(scene: Scene, frames: int = 81) -> torch.Tensor:
    """Render [frames, 3, 64, 64] in 0..1."""
    return render(scene, frames, 64) / 2 + 0.5


def blurred(video: torch.Tensor) -> torch.Tensor:
    """About as bad as a small VAE: soft edges and noise, 25 dB."""
    noise = torch.randn(video.shape, generator=torch.Generator().manual_seed(0))
    return (F.avg_pool2d(video, 3, 1, 1) + 0.04 * noise).clamp(0, 1)


@pytest.mark.parametrize("kind", ["single", "landmark", "wall"])
def test_what_is_rendered_is_seen(kind):
    """Of the blurred scenes one may be wrong: the smallest shapes lose their corners."""
    wrong: dict[str, list[str]] = {"rendered": [], "blurred": []}
    for scene in itertools.islice(moving_shapes.sample_scenes(21, held_out=True, kinds=[kind]), 3):
        video = video_of(scene)
        for name, shown in (("rendered", video), ("blurred", blurred(video))):
            wrong[name] += [] if all(judge(shown, scene).values()) else [scene.caption]
    assert not wrong["rendered"] and len(wrong["blurred"]) <= 1, wrong


@pytest.mark.parametrize("judged", [judge, judge_seconds])
def test_a_video_of_bytes_is_refused_with_the_way_to_turn_it(judged):
    frames = (255 * video_of(SCENE, 20)).byte().permute(0, 2, 3, 1)
    with pytest.raises(
        ConfigError, match=r"not torch.uint8 \[20, 64, 64, 3\]; .*permute\(0, 3, 1, 2\) / 255"
    ):
        judged(frames, SCENE)


def test_two_shapes_are_told_apart_by_their_colours():
    scenes = list(itertools.islice(moving_shapes.sample_scenes(21, held_out=True, kinds=["crossing"]), 3))
    answers = [judge(video_of(scene), scene) for scene in scenes]
    least = dict.fromkeys(("background", "color", "direction", "crossing"), 3) | {"shape": 2}
    for question, count in least.items():  # shapes that are never apart have no outline to judge
        assert sum(answer[question] for answer in answers) >= count, question


OF_SECONDS = ("color", "shape", "background")
WRONG = [("color", {"color": "green"}), ("shape", {"shape": "circle"}), ("direction", {"speed": 0.001})]
WRONG += [("direction", {"direction": "up and right"}), ("background", {})]


@pytest.mark.parametrize(("question", "mover"), WRONG)
def test_one_wrong_word_is_noticed_and_only_that_and_from_which_second_it_is_wrong(question, mover):
    other = Scene((replace(MOVER, **mover),), SCENE.background if mover else "dark gray")
    assert [q for q, yes in judge(video_of(other), SCENE).items() if not yes] == [question]
    if question in OF_SECONDS:
        good, at = video_of(SCENE, LONG * FPS), 4
        seconds = judge_seconds(torch.cat([good[: at * FPS], video_of(other, LONG * FPS)[at * FPS :]]), SCENE)
        answers = {q: getattr(seconds, q) for q in OF_SECONDS}
        assert all(answer[:at].all() for answer in answers.values())
        assert [q for q, answer in answers.items() if not answer[at:].any()] == [question]


def test_what_comes_back_must_be_what_went():
    video = video_of(HIDING)
    assert judge(video, HIDING) | {"same": True} == dict.fromkeys(judge(video, HIDING), True)
    for change in ({"color": "green"}, {"shape": "circle"}):
        other = replace(HIDING, movers=(replace(HIDING.movers[0], **change),))
        answers = judge(torch.cat([video[:40], video_of(other)[40:]]), HIDING)
        assert answers["comes_back"] and not answers[f"same_{next(iter(change))}"] and not answers["same"]
    gone = torch.cat([video[:40], video[40:41].expand(41, -1, -1, -1)])
    assert not judge(gone, HIDING)["comes_back"]


# -- long videos --


@pytest.mark.parametrize("scene", [AGAIN, TWO], ids=["wall", "two"])
def test_every_second_of_what_is_rendered_is_right(scene):
    seconds = judge_seconds(video_of(scene, LONG * FPS), scene)
    assert len(seconds.right) == LONG and seconds.background.all()
    assert (seconds.right == seconds.visible).all()
    assert seconds.visible.float().mean() > 0.5


# -- captions --


@pytest.mark.parametrize("kind", KINDS)
def test_a_video_is_judged_by_its_caption_as_by_its_scene(kind):
    scenes = held_out_scenes([kind], 4)
    for scene in scenes:
        found = scene_of(scene.caption)
        assert found is not None and found.caption == scene.caption and found.kind == scene.kind
        assert found.unnamed_color == scene.unnamed_color and found.landmark == scene.landmark
    video = video_of(scenes[0], 33)
    other = video.flip(3)  # what it shows moves the other way, or is elsewhere
    answers = judge_by_caption(video, scenes[0].caption)
    assert answers == judge(video, scenes[0])
    assert answers != judge_by_caption(other, scenes[0].caption) or kind == "wall"


def test_other_texts_and_sizes_have_no_answers():
    caption = "a red circle moving right over a dark blue background"
    assert scene_of(caption) is not None
    assert set(judge_by_caption(torch.rand(20, 3, 64, 64), caption)) > {"color"}
    for text in ("", "a red fox", f"{caption}.", f"{caption} at night", caption.replace("a red", "an red")):
        assert scene_of(text) is None and judge_by_caption(torch.rand(20, 3, 64, 64), text) == {}
    assert judge_by_caption(torch.rand(20, 3, 64, 96), caption) == {}


@pytest.mark.parametrize("direction", ["right", "left", "up", "down"])
def test_a_wall_hides_the_mover_and_stands_where_it_goes(direction):
    dx, dy = moving_shapes.DIRECTIONS[direction]
    at = {"radius": 0.12, "speed": 0.3, "x": 0.5 - 0.2 * dx, "y": 0.5 - 0.2 * dy}
    scene = replace(HIDING, movers=(replace(MOVER, direction=direction, **at),))
    video, hidden = render(scene, 81, 64), hidden_share(scene, 81)
    red, white = (2 * torch.tensor(COLORS[name])[:, None, None] - 1 for name in ("red", "white"))
    shown = ((video - red).abs().sum(1) < 0.01).sum((1, 2))
    assert shown[0] > 100 and hidden[0] == 0 and (shown[hidden == 1] == 0).all() and hidden.max() == 1
    wall = ((video[0] - white).abs().sum(0) < 0.01).float()
    assert wall.mean() == pytest.approx(moving_shapes.WALL, abs=1 / 64)
    rows, columns = (wall.nonzero().float().mean(0) - 31.5).tolist()
    assert columns * dx + rows * dy > 10


def test_scenes_keep_the_promises_of_their_kinds():
    for kind in KINDS:
        for scene in itertools.islice(moving_shapes.sample_scenes(4, held_out=True, kinds=[kind]), 12):
            assert scene.kind == kind
            path = moving_shapes.positions(scene, 81)
            for n, mover in enumerate(scene.movers):  # straight at first, as the caption says
                straight = path[: int(moving_shapes.STRAIGHT * FPS) + 1, n]
                moved = torch.arange(len(straight))[:, None] / FPS * torch.tensor(mover.velocity)
                torch.testing.assert_close(straight, straight[0] + moved, atol=1e-5, rtol=0)
            if kind == "crossing":
                gap = path.diff(dim=1).norm(dim=-1)[:, 0]
                assert gap[: int(moving_shapes.CROSS_BETWEEN[1] * FPS)].min() < 0.08 and gap[0] > 0.08
            if kind == "wall":
                hidden, back = hidden_share(scene, 81), int(moving_shapes.BACK_BY * FPS) + 1
                assert hidden[0] == 0 and (hidden == 1).any() and (hidden[back:] == 0).all()


def test_split_is_disjoint():
    train, held_out = set(moving_shapes.combinations(False)), set(moving_shapes.combinations(True))
    assert not train & held_out and 0.08 < len(held_out) / len(train | held_out) < 0.12


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_end_with_the_process_that_was_killed(method):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        pool = ProcessPoolExecutor(2, get_context(method), exit_with_parent, (os.getpid(),))
        pool.submit(os.getpid).result()
        os.write(writing, json.dumps(sorted(pool._processes)).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    workers = json.loads(os.read(reading, 1000))
    os.waitpid(child, 0)
    there = [process for process in psutil.process_iter() if process.pid in workers]
    assert not psutil.wait_procs(there, timeout=20)[1]
