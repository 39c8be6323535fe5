"""The tracker that judges the miniature's videos: right on rendered scenes, and able to say no."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from experiments.miniature.moving_shapes import (
    BACKGROUNDS,
    COLORS,
    FPS,
    Landmark,
    Mover,
    Scene,
    render,
    sample_scenes,
)
from experiments.miniature.tracking import background, in_sight, judge, nearest, track

MOVER = Mover("square", "red", "right", x=0.3, y=0.5, radius=0.18, speed=0.15)
SCENE = Scene((MOVER,), "dark blue")
HIDING = Scene((replace(MOVER, radius=0.12, speed=0.3, x=0.2),), "dark blue", wall="white")


def video_of(scene: Scene) -> torch.Tensor:
    """[81, 3, 64, 64] in 0..1."""
    return render(scene, 81, 64) / 2 + 0.5


def blurred(video: torch.Tensor) -> torch.Tensor:
    """About as bad as a small VAE: soft edges and noise, 25 dB."""
    noise = torch.randn(video.shape, generator=torch.Generator().manual_seed(0))
    return (F.avg_pool2d(video, 3, 1, 1) + 0.04 * noise).clamp(0, 1)


@pytest.mark.parametrize("kind", ["single", "landmark", "wall"])
def test_what_is_rendered_is_seen(kind):
    """Of the blurred scenes one may be wrong: the smallest shapes lose their corners."""
    wrong: dict[str, list[str]] = {"rendered": [], "blurred": []}
    for scene in itertools.islice(sample_scenes(21, held_out=True, kinds=[kind]), 10):
        video = video_of(scene)
        for name, shown in (("rendered", video), ("blurred", blurred(video))):
            wrong[name] += [] if all(judge(shown, scene).values()) else [scene.caption]
    assert not wrong["rendered"] and len(wrong["blurred"]) <= 1, wrong


def test_two_shapes_are_told_apart_by_their_colours():
    scenes = list(itertools.islice(sample_scenes(21, held_out=True, kinds=["crossing"]), 10))
    answers = [judge(video_of(scene), scene) for scene in scenes]
    for question, least in {
        "background": 10,
        "color": 10,
        "direction": 10,
        "crossing": 10,
        "shape": 8,
    }.items():
        assert sum(answer[question] for answer in answers) >= least, (
            question
        )  # never apart: no outline to judge


@pytest.mark.parametrize(
    ("question", "other"),
    [
        ("color", replace(SCENE, movers=(replace(MOVER, color="green"),))),
        ("shape", replace(SCENE, movers=(replace(MOVER, shape="circle"),))),
        ("direction", replace(SCENE, movers=(replace(MOVER, direction="up and right"),))),
        ("direction", replace(SCENE, movers=(replace(MOVER, speed=0.001),))),
        ("background", replace(SCENE, background="dark gray")),
    ],
)
def test_one_wrong_word_is_noticed_and_only_that(question, other):
    answers = judge(video_of(other), SCENE)
    assert [q for q, yes in answers.items() if not yes] == [question]


def test_a_landmark_of_another_colour_is_noticed():
    scene = replace(SCENE, landmark=Landmark("circle", "yellow", "top left"))
    assert judge(video_of(scene), scene)["landmark"]
    assert not judge(video_of(SCENE), scene)["landmark"]


def test_what_comes_back_must_be_what_went():
    video = video_of(HIDING)
    assert judge(video, HIDING) | {"same": True} == dict.fromkeys(judge(video, HIDING), True)
    for change, question in (
        (replace(HIDING.movers[0], color="green"), "same_color"),
        (replace(HIDING.movers[0], shape="circle"), "same_shape"),
    ):
        later = torch.cat([video[:40], video_of(replace(HIDING, movers=(change,)))[40:]])
        answers = judge(later, HIDING)
        assert answers["comes_back"] and not answers[question] and not answers["same"]
    gone = torch.cat([video[:40], video[40:41].expand(41, -1, -1, -1)])
    assert not judge(gone, HIDING)["comes_back"]


def test_an_empty_video_shows_nothing():
    empty = torch.tensor(BACKGROUNDS["dark blue"])[:, None, None].expand(81, 3, 64, 64)
    assert judge(empty, SCENE) == {"background": True, "shape": False, "direction": False, "color": False}


def test_track_measures_place_area_and_colour():
    shape = track(video_of(SCENE), in_sight(SCENE, 64))
    seconds = torch.arange(20) / FPS
    torch.testing.assert_close(shape.centre[:20, 0], 0.3 + 0.15 * seconds, atol=0.005, rtol=0)
    torch.testing.assert_close(shape.centre[:20, 1], torch.full((20,), 0.5), atol=0.005, rtol=0)
    assert shape.area[0] == pytest.approx((2 * 0.82 * 0.18) ** 2, rel=0.05)
    torch.testing.assert_close(shape.color[0], torch.tensor(COLORS["red"]))
    assert nearest(background(video_of(SCENE), in_sight(SCENE, 64)), BACKGROUNDS) == "dark blue"
