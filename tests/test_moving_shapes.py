"""The synthetic videos: captions, paths and pictures are what they claim to be."""

import itertools
from dataclasses import replace

import pytest
import torch

from experiments.mini_tokenizer import build_tokenizer
from experiments.moving_shapes import (
    BACKGROUNDS,
    COLORS,
    DIRECTIONS,
    FPS,
    SHAPES,
    Mover,
    Scene,
    combinations,
    positions,
    render,
    render_batch,
    sample_scenes,
)

RED_CIRCLE = Mover("circle", "red", "right", x=0.3, y=0.5, radius=0.2, speed=0.1)
SCENE = Scene((RED_CIRCLE,), "dark blue")


def pixel(rgb: tuple[float, ...]) -> torch.Tensor:
    return 2 * torch.tensor(rgb) - 1


def test_caption_names_everything_that_moves():
    assert SCENE.caption == "a red circle moving right over a dark blue background"
    two = replace(SCENE, movers=(RED_CIRCLE, replace(RED_CIRCLE, color="orange", direction="up")))
    assert two.caption == "a red circle moving right and an orange circle moving up over a dark blue background"


def test_centre_has_the_movers_color_and_corner_the_backgrounds():
    video = render(SCENE, frames=33, size=64)
    assert video.shape == (33, 3, 64, 64)
    for frame, (x, y) in enumerate(positions(SCENE, 33)[:, 0]):
        torch.testing.assert_close(video[frame, :, int(y * 64), int(x * 64)], pixel(COLORS["red"]))
        torch.testing.assert_close(video[frame, :, 0, 0], pixel(BACKGROUNDS["dark blue"]))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_straight_motion_before_the_border(direction):
    scene = replace(SCENE, movers=(replace(RED_CIRCLE, x=0.5, direction=direction),))
    moved = positions(scene, 17)[16, 0] - positions(scene, 17)[0, 0]
    step = torch.tensor(DIRECTIONS[direction], dtype=torch.float32)
    torch.testing.assert_close(moved, 0.1 * 16 / FPS * step / step.norm())


def test_bounce_keeps_the_whole_shape_inside_and_turns_it_around():
    path = positions(replace(SCENE, movers=(replace(RED_CIRCLE, speed=0.4),)), 81)[:, 0, 0]
    assert path.min() >= 0.2 - 1e-6 and path.max() <= 0.8 + 1e-6
    turns = (path.diff().sign().diff() != 0).sum()
    assert turns >= 2
    assert path.max() == pytest.approx(0.8, abs=0.4 / FPS)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_differ_and_edges_are_antialiased(shape):
    masks = {s: render(replace(SCENE, movers=(replace(RED_CIRCLE, shape=s),)), 1, 64)[0, 0] for s in SHAPES}
    others = [(masks[shape] - masks[s]).abs().mean() for s in SHAPES if s != shape]
    assert min(others) > 0.01
    low, high = pixel(BACKGROUNDS["dark blue"])[0], pixel(COLORS["red"])[0]
    between = (masks[shape] > low + 0.1) & (masks[shape] < high - 0.1)
    assert between.any()


def test_later_movers_are_in_front():
    both = replace(SCENE, movers=(RED_CIRCLE, replace(RED_CIRCLE, color="green")))
    torch.testing.assert_close(render(both, 1, 64)[0, :, 32, 19], pixel(COLORS["green"]))


def test_batch_equals_single_scenes():
    scenes = list(itertools.islice(sample_scenes(3), 5))
    batch = render_batch(scenes, 9, 32)
    for scene, video in zip(scenes, batch, strict=True):
        torch.testing.assert_close(render(scene, 9, 32), video.transpose(0, 1))


def test_split_is_fixed_and_disjoint():
    train, held_out = set(combinations(False)), set(combinations(True))
    assert not train & held_out
    assert 0.08 < len(held_out) / len(train | held_out) < 0.12
    first, again = (list(itertools.islice(sample_scenes(1), 20)) for _ in range(2))
    assert first == again
    drawn = {(m.shape, m.color, m.direction, s.background) for s in first for m in s.movers}
    assert drawn <= train


@pytest.mark.parametrize("prompt", [SCENE.caption, "A majestic eagle, 8K; naïve 猫 \U0001f985", ""])
def test_any_prompt_tokenises_and_comes_back(prompt):
    tokenizer = build_tokenizer()
    ids = tokenizer(prompt).input_ids
    assert ids[-1] == tokenizer.eos_token_id == 1 and tokenizer.pad_token_id == 0
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == prompt


def test_caption_words_are_single_tokens():
    assert len(build_tokenizer()(SCENE.caption).input_ids) == len(SCENE.caption.split()) + 1
