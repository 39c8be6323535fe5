"""What an atlas says about the first frame: its effect in every head, placebos, contrasts, every pass, and
mass."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.analysis.first_frame import (
    FirstFrameEffect,
    first_frame_effect,
    key_frame_contrasts,
    placebo_effects,
    placebo_frames,
)
from experiments.analysis.measures import excess_by_distance
from experiments.analysis.panels import NO_CONTEXT, NO_LOGITS, NO_MATRIX, NOT_IDENTIFIED
from experiments.caches.view import Profiles

LAST_PLACEBO = 24  # key frames within what the model was trained on, at any length

FIRST_CONTRASTS = 24


class FirstFrame(NamedTuple):
    """Of every head [layers, heads, ...] of a view with whole matrices, in the view's unit."""

    fit: FirstFrameEffect
    frames: tuple[int, ...]  # key frames of the placebos
    placebos: np.ndarray  # [layers, heads, frames]
    contrasts: np.ndarray  # of frames 0..11, for numbers: [layers, heads, 12]
    more_contrasts: np.ndarray  # of frames 0..23, for figures: [layers, heads, 24]
    excess: np.ndarray  # at equal distance, by distance: [layers, heads, F]

    @property
    def above_placebos(self) -> np.ndarray:
        """Whether a head's effect exceeds the size of every placebo of frames 1..24 [layers, heads]."""
        chosen = [i for i, frame in enumerate(self.frames) if frame <= LAST_PLACEBO]
        return self.fit.effect > np.abs(self.placebos[..., chosen]).max(-1, initial=0)

    @property
    def rank(self) -> np.ndarray:
        """Place of an effect among its placebos' sizes, 1 the highest; NaN without one [layers, heads]."""
        place = 1 + (np.abs(self.placebos) >= self.fit.effect[..., None]).sum(-1)
        return np.where(np.isnan(self.fit.effect), np.nan, place)

    @property
    def num_placebos(self) -> int:
        """Frames that above_placebos compares with."""
        return sum(frame <= LAST_PLACEBO for frame in self.frames)


def first_frame(view: Profiles | None) -> FirstFrame | None:
    """All of it; None where a view has no whole matrix or frame 0 cannot be told from rows and distances."""
    matrix = view.frame_matrices() if view else None
    if view is None or matrix is None:
        return None
    fit = first_frame_effect(matrix, view.block_sizes)
    if not np.isfinite(fit.effect).any():
        return None
    frames = placebo_frames(view.block_sizes)
    return FirstFrame(
        fit,
        tuple(frames),
        placebo_effects(matrix, view.block_sizes, frames),
        key_frame_contrasts(matrix, view.block_sizes),
        key_frame_contrasts(matrix, view.block_sizes, FIRST_CONTRASTS),
        excess_by_distance(matrix, view.block_sizes),
    )


def why_no_first_frame(view: Profiles | None) -> str:
    """One line on why first_frame gave nothing."""
    if view is None:
        return NO_LOGITS
    if not view.context_frames:
        return NO_CONTEXT
    if len(view.matrix_rows) < view.num_frames:
        return NO_MATRIX
    return NOT_IDENTIFIED


def log_mass_effect(mass: Profiles | None) -> np.ndarray | None:
    """The same regression on log mass [layers, heads]: how much more mass frame 0 gets at equal distance, as
    a log ratio.

    Unlike the effect on mean logits it depends on the spread of logits within a frame. None where there is no
    mass."""
    matrix = mass.frame_matrices() if mass else None
    if mass is None or matrix is None:
        return None
    with np.errstate(divide="ignore"):
        return first_frame_effect(np.log(matrix), mass.block_sizes).effect


def effects_by_pass(passes: Sequence[Profiles]) -> dict[str, np.ndarray]:
    """First-frame effects [layers, heads] of every pass that has them, by the pass's name."""
    found = {}
    for view in passes:
        if (matrix := view.frame_matrices()) is not None:
            found[view.pass_label] = first_frame_effect(matrix, view.block_sizes).effect
    return found
