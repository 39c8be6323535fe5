"""Which heads and layers of a view a notebook shows: those asked for, or what stands in for them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from experiments.analysis.first_frame import first_frame_effect
from experiments.analysis.panels import HeadPanel
from experiments.analysis.published import FIGURE4_HEADS, FIGURE4_MODEL
from experiments.caches.errors import CacheError
from experiments.caches.view import Profiles

Heads = tuple[tuple[int, int, str], ...]  # layer, head, label


class HeadChoice(NamedTuple):
    """What figures.head_curves draws, and the (layer, head, label) that the view does not have."""

    panels: list[HeadPanel]
    missing: list[tuple[int, int, str]]


def heads_of(view: Profiles, heads: Sequence[tuple[int, int, str]] | str, count: int = 2) -> Heads:
    """The heads asked for; of "auto" the paper's where the model is the paper's, else those with the largest
    first-frame effect where a cache has whole matrices. CacheError for another word."""
    if not isinstance(heads, str):
        return tuple((layer, head, label) for layer, head, label in heads)
    if heads != "auto":
        raise CacheError(f'HEADS must be "auto" or a list of (layer, head, label), not {heads!r}')
    matrix = view.frame_matrices() if view.quantity == "mean_logit" and view.model != FIGURE4_MODEL else None
    effect = None if matrix is None else first_frame_effect(matrix, view.block_sizes).effect
    if effect is None or not np.isfinite(effect).any():
        return FIGURE4_HEADS
    order = np.argsort(-np.nan_to_num(effect, nan=-np.inf), axis=None, kind="stable")[:count]
    places = [(view.layers[i // view.num_heads], int(i % view.num_heads)) for i in order]
    return tuple((layer, head, f"L{layer}H{head}") for layer, head in places)


def choose_heads(view: Profiles, heads: Iterable[tuple[int, int, str]]) -> HeadChoice:
    """Panels of some (layer, head, label). One that the view lacks is replaced by head 0 of its first
    layers."""
    panels, missing, first_layers = [], [], iter(view.layers)
    for layer, head, label in heads:
        if layer in view.layers and 0 <= head < view.num_heads:
            panels.append(head_panel(view, layer, head, label))
            continue
        missing.append((layer, head, label))
        if (substitute := next(first_layers, None)) is not None:
            panels.append(head_panel(view, substitute, 0, f"L{substitute}H0"))
    return HeadChoice(panels, missing)


def choose_layer(view: Profiles, layer: int) -> int:
    """The layer, or the first one of a view that lacks it."""
    return layer if layer in view.layers else view.layers[0]


def layers_to_draw(view: Profiles, panels: Iterable[HeadPanel]) -> tuple[int, ...]:
    """Layers drawn head by head: all of a cache of chosen layers; of an atlas, which has every layer, the
    shown ones."""
    shown = sorted({panel.layer for panel in panels})
    return tuple(shown) if view.kind == "atlas" and shown else view.layers


def head_panel(view: Profiles, layer: int, head: int, label: str) -> HeadPanel:
    """A head's profile, and its curve per key token where one axis can hold both."""
    curve, S = view.key_curve(layer), view.frame_seq_length
    if view.quantity == "mass":
        curve = None  # a frame's mass is the sum of its tokens' probabilities: not one axis
    if curve is not None:  # key tokens of a window -> their places among all frames
        spread = np.full((view.num_frames, S), np.nan, np.float32)
        spread[list(view.key_frames)] = curve[head].reshape(-1, S)
        curve = spread.reshape(-1)
    profile, gone = np.split(view.key_profile(layer)[head], [view.num_frames])
    return HeadPanel(
        label,
        layer,
        head,
        profile,
        curve,
        no_preference=no_preference(view),
        averages=gone if gone.size else None,
    )


def no_preference(view: Profiles) -> float | None:
    """What each key frame and average would get if all tokens that the queries see were alike; None for
    logits, which any constant may shift."""
    frames = len(view.key_frames) + view.num_averages
    return {"mass": 1 / frames, "mean_prob": 1 / (frames * view.frame_seq_length)}.get(view.quantity)
