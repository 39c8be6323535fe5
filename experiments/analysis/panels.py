"""What one panel of a figure shows, as plain arrays, and which heads of a view are shown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.caches.files import CacheError
from experiments.caches.view import Profiles

# Why a cache does not hold a number, in words that figures and printed lines share
NO_LOGITS, NO_MASS = "no mean logits in this cache", "no mass in this cache"
NO_CONTEXT, NO_MATRIX = "no context: the queries see no earlier block", "no whole frame matrix in this cache"
NOT_IDENTIFIED = "its cells do not tell frame 0 from rows and distances"
ALL_QUERIES = "all query frames"


class HeadPanel(NamedTuple):
    """One head for head_curves and one_head, and what it is compared with."""

    label: str
    layer: int
    head: int
    profile: np.ndarray  # [F]
    curve: np.ndarray | None  # [F*S] per key token
    reference: np.ndarray | None = None  # [F] read off another figure
    clipped: np.ndarray | None = None  # [F] bool: where that figure cuts it off
    agreement: str = ""  # how well the two agree, in words
    no_preference: float | None = None  # value of every frame if all tokens were alike; None for logits
    averages: np.ndarray | None = None  # [averages] of evicted frames, beside the frames
    group: int = 1  # tokens of which each value of the curve is the mean


class HeadMap(NamedTuple):
    """One number per head [N, H], or None and a line that says why it is absent."""

    name: str
    title: str
    unit: str
    scale: str  # "diverging" around 0, "ratio" around 1, "share" of 0..1, or "sequential"
    values: np.ndarray | None
    missing_reason: str = ""
    queries: str = ""  # queries of the panel, if others than the title's


class LabelMap(NamedTuple):
    """One label per head [N, H], or None and a line that says why they are absent."""

    title: str
    names: Mapping[int, str]
    labels: np.ndarray | None
    missing_reason: str = ""
    differs: np.ndarray | None = None  # [N, H] bool: not the label it is compared with
    queries: str = ""  # queries of the panel, if others than the title's


class ProfileMap(NamedTuple):
    """Profiles [H, F + averages] of a layer in one pass, or None and the reason why."""

    title: str
    quantity: str
    values: np.ndarray | None
    missing_reason: str = ""
    averages: int = 0  # columns after the frames: averages of evicted frames


def choose_heads(
    view: Profiles, heads: Iterable[tuple[int, int, str]]
) -> tuple[list[HeadPanel], list[tuple[int, int, str]]]:
    """Return panels of (layer, head, label), and those that the view lacks: heads 0 replace them."""
    panels, missing, first_layers = [], [], iter(view.layers)
    for layer, head, label in heads:
        if layer in view.layers and 0 <= head < view.num_heads:
            panels.append(head_panel(view, layer, head, label))
            continue
        missing.append((layer, head, label))
        if (substitute := next(first_layers, None)) is not None:
            panels.append(head_panel(view, substitute, 0, f"L{substitute}H0"))
    return panels, missing


def head_panel(view: Profiles, layer: int, head: int, label: str) -> HeadPanel:
    """Return a head's profile, and its curve per key token where one axis can hold both."""
    # [H, Lk]
    curve, S = view.key_curve(layer), view.frame_seq_length
    if view.quantity == "mass":
        curve = None  # a frame's mass is the sum of its tokens' probabilities: not one axis
    if curve is not None:  # key tokens of a window -> their places among all frames
        # [H, Fk S] -> [F S] of this head
        spread = np.full((view.num_frames, S), np.nan, np.float32)
        spread[list(view.key_frames)] = curve[head].reshape(-1, S)
        curve = spread.reshape(-1)
    profile, gone = np.split(view.key_profile(layer)[head], [view.num_frames])
    averages = gone if gone.size else None
    # Without a preference each of so many frames, or of their S tokens, would get the same
    frames = len(view.key_frames) + view.num_averages
    alike = {"mass": 1 / frames, "mean_prob": 1 / (frames * S)}.get(view.quantity)
    return HeadPanel(label, layer, head, profile, curve, no_preference=alike, averages=averages)


def grouped(panels: Iterable[HeadPanel], tokens: int | None) -> list[HeadPanel]:
    """Average each curve over windows of so many tokens, a divisor of a frame's; None: single tokens."""
    shown = []
    for panel in panels:
        if tokens and panel.curve is not None:
            S = len(panel.curve) // len(panel.profile)
            if not 0 < tokens <= S or S % tokens:
                raise CacheError(f"windows of {tokens} tokens do not divide a frame's {S}; choose a divisor")
            panel = panel._replace(curve=panel.curve.reshape(-1, tokens).mean(1), group=tokens)
        shown.append(panel)
    return shown


def profile_maps(view: Profiles, titles: Mapping[int, str] | None = None) -> list[ProfileMap]:
    """A panel for every layer of a view, or for those that titles names."""
    titles = {layer: f"Layer {layer}" for layer in view.layers} if titles is None else titles
    gone = view.num_averages
    return [ProfileMap(t, view.quantity, view.key_profile(n), averages=gone) for n, t in titles.items()]


def rows_of(columns: Mapping[str, Sequence]) -> list[dict]:
    """Turn columns of equal length into rows for tables.table."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
