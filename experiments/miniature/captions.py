"""From a caption of the miniature back to its scene: all that the tracker judges by."""

import re
from typing import Any

import torch
from torch import Tensor

from experiments.miniature.moving_shapes import (
    BACKGROUNDS,
    COLORS,
    CORNERS,
    DIRECTIONS,
    SHAPES,
    Landmark,
    Mover,
    Scene,
)
from experiments.miniature.recipe import SIDE
from experiments.miniature.tracking import judge


def _one_of(names: Any) -> str:
    """A group of any of these words, longer ones first."""
    return f"({'|'.join(sorted(names, key=len, reverse=True))})"


MOVER = re.compile(rf"an? (?:{_one_of(COLORS)} )?{_one_of(SHAPES)} moving {_one_of(DIRECTIONS)}")
CAPTION = re.compile(
    rf"(?P<movers>{MOVER.pattern}(?: and {MOVER.pattern})?)"
    rf"(?: behind an? (?P<wall>{_one_of(COLORS)[1:-1]}) wall)?"
    rf" over a (?P<background>{_one_of(BACKGROUNDS)[1:-1]}) background"
    rf"(?: with a small (?P<mark>{_one_of(COLORS)[1:-1]}) (?P<outline>{_one_of(SHAPES)[1:-1]})"
    rf" at the (?P<corner>{_one_of(CORNERS)[1:-1]}))?"
)


def scene_of(caption: str) -> Scene | None:
    """The scene of a caption, with places and sizes 0, which it does not say; None for another text."""
    found = CAPTION.fullmatch(caption)
    if found is None:
        return None
    named = [(m[2], m[1], m[3]) for m in MOVER.finditer(found["movers"])]
    scene = Scene(
        tuple(Mover(shape, color or "", direction, 0, 0, 0, 0) for shape, color, direction in named),
        found["background"],
        Landmark(found["outline"], found["mark"], found["corner"]) if found["mark"] else None,
        found["wall"],
        unnamed_color=named[0][1] is None,
    )
    return scene if scene.caption == caption else None


def answers(caption: str, videos: list[Tensor]) -> dict[str, list[bool]]:
    """What the tracker says of videos [frames, 3, H, W] in 0..1 of a caption, by question.

    Nothing for a text that is no caption of the miniature, and for videos of another size.
    """
    scene = scene_of(caption)
    if scene is None or any(video.shape[-2:] != (SIDE, SIDE) for video in videos):
        return {}
    found = [judge(torch.as_tensor(video), scene) for video in videos]
    return {question: [bool(one[question]) for one in found] for question in found[0]}
