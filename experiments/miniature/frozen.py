"""What is fixed before a training and must not change until its evaluation: scenes, held-out captions,
tracker."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from experiments.miniature.moving_shapes import Scene, sample_scenes
from experiments.miniature.recipe import HELD_OUT_SEED, Counts

SETS = {"one shape": ("single", "landmark"), "two that cross": ("crossing",), "behind a wall": ("wall",)}
CODE = ("moving_shapes.py", "tracking.py", "long_tracking.py")


def held_out_scenes(kinds: Iterable[str], count: int) -> list[Scene]:
    """The first held-out scenes of these kinds, the same for every model."""
    return list(itertools.islice(sample_scenes(HELD_OUT_SEED + 1, True, kinds), count))


@cache
def _listed(kinds: tuple[str, ...]) -> bytes:
    """A set's first 96 scenes with their captions, a line each; every stage of a training asks for them."""
    return "\n".join(f"{s.caption}: {s}" for s in held_out_scenes(kinds, Counts.captions)).encode()


def hashes() -> dict[str, str]:
    """SHA-256 of the code of scenes and tracker, and of each set's first 96 scenes with their captions."""
    code = {name: (Path(__file__).with_name(name)).read_bytes() for name in CODE}
    scenes = {f"scenes, {name}": _listed(kinds) for name, kinds in SETS.items()}
    return {name: hashlib.sha256(content).hexdigest() for name, content in (code | scenes).items()}
