"""Held-out scenes and hashes of what must not change between a training and its evaluation."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from functools import cache
from hashlib import sha256

from experiments.miniature.moving_shapes import FPS, Scene, render, sample_scenes
from experiments.miniature.recipe import FRAMES, HELD_OUT_SEED, SIDE, Counts
from experiments.miniature.tracking import in_sight, judge, track

SETS = {"one shape": ("single", "landmark"), "two that cross": ("crossing",), "behind a wall": ("wall",)}


def held_out_scenes(kinds: Iterable[str], count: int) -> list[Scene]:
    """Return the first held-out scenes of these kinds, the same for every model."""
    return list(itertools.islice(sample_scenes(HELD_OUT_SEED + 1, True, kinds), count))


@cache
def hashes() -> dict[str, str]:
    """Return SHA-256 of each set's first 96 scenes with their captions, and of what the tracker sees.

    The tracker's is of its answers to one rendered scene of each set and of a centre for every second, to
    the hundredth of a side: the same on every CPU, whatever the code looks like.
    """
    found, seen = {}, []
    for name, kinds in SETS.items():
        scenes = held_out_scenes(kinds, Counts.captions)
        listed = "\n".join(f"{scene.caption}: {scene}" for scene in scenes)
        found[f"scenes, {name}"] = sha256(listed.encode()).hexdigest()
        video = render(scenes[0], FRAMES, SIDE) / 2 + 0.5
        centres = track(video, in_sight(scenes[0], SIDE)).centre[::FPS]
        seen.append([judge(video, scenes[0]), [[round(x, 2) for x in at] for at in centres.tolist()]])
    return {"tracker": sha256(json.dumps(seen).encode()).hexdigest()} | found
