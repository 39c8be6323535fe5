"""The synthetic videos: captions, paths and pictures are what they claim to be."""

import itertools
from dataclasses import replace

import pytest
import torch

from experiments.miniature.moving_shapes import (
    BACK_BY,
    COLORS,
    CROSS_BETWEEN,
    DIRECTIONS,
    FPS,
    KINDS,
    STRAIGHT,
    WALL,
    Mover,
    Scene,
    combinations,
    hidden_share,
    positions,
    render,
    sample_scenes,
)

RED_CIRCLE = Mover("circle", "red", "right", x=0.3, y=0.5, radius=0.2, speed=0.1)
SCENE = Scene((RED_CIRCLE,), "dark blue")


def pixel(rgb: tuple[float, ...]) -> torch.Tensor:
    return 2 * torch.tensor(rgb) - 1


@pytest.mark.parametrize("direction", ["right", "left", "up", "down"])
def test_a_wall_hides_the_mover_and_stands_where_it_goes(direction):
    dx, dy = DIRECTIONS[direction]
    mover = replace(
        RED_CIRCLE, direction=direction, radius=0.12, speed=0.3, x=0.5 - 0.2 * dx, y=0.5 - 0.2 * dy
    )
    scene = replace(SCENE, movers=(mover,), wall="white")
    video, hidden = render(scene, 81, 64), hidden_share(scene, 81)
    red = ((video - pixel(COLORS["red"])[:, None, None]).abs().sum(1) < 0.01).sum((1, 2))
    assert red[0] > 100 and hidden[0] == 0 and (red[hidden == 1] == 0).all() and hidden.max() == 1
    white = ((video[0] - pixel(COLORS["white"])[:, None, None]).abs().sum(0) < 0.01).float()
    assert white.mean() == pytest.approx(WALL, abs=1 / 64)
    rows, columns = (64 * white.nonzero().float().mean(0) / 64 - 31.5).tolist()
    assert columns * dx + rows * dy > 10


def test_scenes_keep_the_promises_of_their_kinds():
    for kind in KINDS:
        for scene in itertools.islice(sample_scenes(4, held_out=True, kinds=[kind]), 12):
            assert scene.kind == kind
            path = positions(scene, 81)
            for n, mover in enumerate(scene.movers):  # straight at first, as the caption says
                straight = path[: int(STRAIGHT * FPS) + 1, n]
                expected = straight[0] + torch.arange(len(straight))[:, None] / FPS * torch.tensor(
                    mover.velocity
                )
                torch.testing.assert_close(straight, expected, atol=1e-5, rtol=0)
            if kind == "crossing":
                gap = path.diff(dim=1).norm(dim=-1)[:, 0]
                assert gap[: int(CROSS_BETWEEN[1] * FPS)].min() < 0.08 and gap[0] > 0.08
            if kind == "wall":
                hidden = hidden_share(scene, 81)
                assert (
                    hidden[0] == 0 and (hidden == 1).any() and (hidden[int(BACK_BY * FPS) + 1 :] == 0).all()
                )


def test_split_is_disjoint():
    train, held_out = set(combinations(False)), set(combinations(True))
    assert not train & held_out and 0.08 < len(held_out) / len(train | held_out) < 0.12
