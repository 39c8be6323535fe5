"""Held-out captions of head memory, on which heads are chosen, and others on which they are judged."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from experiments.miniature.moving_shapes import KINDS, Scene
from experiments.miniature.tracking import SETS, held_out_scenes
from wan.errors import ConfigError

SEED_STEP = 10_000  # between seeds of a caption; the first is the caption's number, as in evaluation.json

NumberedScenes = list[tuple[int, Scene]]


@dataclass(frozen=True)
class Design:
    """Sizes of the study."""

    captions: int = 96
    selection: int = 24
    seeds: int = 3


def different(
    kinds: Sequence[str], count: int, wanted: Callable[[Scene], bool] = lambda scene: True, among: int = 4
) -> NumberedScenes:
    """Return the first held-out scenes of different captions, with their numbers."""
    found: dict[str, tuple[int, Scene]] = {}
    for number, scene in enumerate(held_out_scenes(kinds, among * count)):
        if wanted(scene):
            found.setdefault(scene.caption, (number, scene))
    if len(found) < count:
        raise ConfigError(f"{count} captions of {', '.join(kinds)} are asked for, {len(found)} are held out")
    return list(found.values())[:count]


def unnamed_captions(count: int, without: Iterable[str] = ()) -> NumberedScenes:
    """Return held-out scenes behind a wall whose captions do not name the colour, and are none of others."""
    others = {*without}

    def wanted(scene: Scene) -> bool:
        return scene.unnamed_color and scene.caption not in others

    return different(SETS["behind a wall"], count, wanted, among=12)


def captions_of_all_kinds(count: int) -> dict[str, int]:
    """Return the first held-out captions of all kinds, each with its number, which is its first seed."""
    return {scene.caption: number for number, scene in different(KINDS, count)}


def captions_behind_a_wall(design: Design) -> tuple[NumberedScenes, NumberedScenes]:
    """Return held-out scenes of different captions with their numbers, of the test and of the selection."""
    chosen = different(SETS["behind a wall"], design.captions + design.selection)
    return chosen[: design.captions], chosen[design.captions :]
