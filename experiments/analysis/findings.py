"""What a Figure 4 is made of: noise, waves, and what is left for the first frame at equal distance."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from experiments.analysis.measures import (
    Wave,
    distance_profile,
    equal_distance_excess,
    first_frame_effect,
    first_minus_context,
    head_statistics,
    wave,
)
from experiments.analysis.panels import HeadPanel
from experiments.caches.view import Profiles


class Findings(NamedTuple):
    """Per head [layers, H], in logits; None where the view has no whole matrix."""

    delta: np.ndarray  # first − middle
    max_frame: np.ndarray  # int
    waves: Wave
    over_context: np.ndarray  # first − context
    excess: np.ndarray | None  # at equal distance
    effect: np.ndarray | None  # first-frame effect: rows and distances accounted for
    by_distance: np.ndarray | None  # what first − context would be if distance were all that matters


def why_nothing(view: Profiles) -> str:
    """Why a view has no findings, or ""."""
    if view.quantity != "mean_logit":
        return f"it holds {view.quantity}"
    return "" if view.context_frames else "its queries see no earlier block"


def findings(view: Profiles) -> Findings:
    """Of every head of a view of mean logits with context frames."""
    profile, matrix, context = view.profiles(), view.frame_matrices(), view.context_frames
    s = head_statistics(profile)
    excess = effect = by_distance = None
    if matrix is not None:
        excess = equal_distance_excess(matrix, view.block_sizes)
        effect = first_frame_effect(matrix, view.block_sizes).effect
        by_distance = first_minus_context(distance_profile(matrix, view.block_sizes), context)
    over_context = first_minus_context(profile, context)
    return Findings(s.delta, s.max_frame, wave(profile, context), over_context, excess, effect, by_distance)


def places(view: Profiles, panels: Iterable[HeadPanel]) -> list[tuple[HeadPanel, tuple[int, int]]]:
    """Panels with their place [layer, head] in the arrays of findings."""
    return [(panel, (view.layers.index(panel.layer), panel.head)) for panel in panels]
