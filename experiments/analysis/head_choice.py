"""Which heads and layers of a view a notebook shows: those asked for, or what stands in for them."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from experiments.analysis.panels import HeadPanel
from experiments.caches.view import Profiles


class HeadChoice(NamedTuple):
    """What figures.head_curves draws, and the (layer, head, label) that the view does not have."""

    panels: list[HeadPanel]
    missing: list[tuple[int, int, str]]


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
    return HeadPanel(label, layer, head, view.frame_profile(layer)[head], curve)
