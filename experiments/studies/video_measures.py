"""Everything that is measured of one long video, per second and as a whole, as plain numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from experiments.analysis import drift
from experiments.miniature.long_tracking import judge_seconds
from experiments.miniature.moving_shapes import Scene

ANSWERS = ("visible", "color", "shape", "background", "right")  # of the tracker, for each second
DIGITS = 5  # that are kept of a number


def measure(pixels: np.ndarray, scene: Scene | None) -> dict[str, Any]:
    """Of a video uint8 [T, H, W, 3]: "seconds", a list of each measure; "whole"; "tracker", 0 or 1 a second.

    The tracker answers where the scene is known that the prompt describes.
    """
    torch.set_num_threads(1)  # processes beside each other measure one video each
    found: dict[str, Any] = {
        "seconds": {name: [_short(x) for x in values] for name, values in drift.per_second(pixels).items()},
        "whole": {name: _short(value) for name, value in drift.summaries(pixels).items()},
    }
    if scene is not None:
        video = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
        answers = judge_seconds(video, scene)
        found["tracker"] = {name: getattr(answers, name).int().tolist() for name in ANSWERS}
    return found


def _short(value: float) -> float | None:
    """A number with a few digits; None where there is none: JSON has no NaN."""
    return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None
