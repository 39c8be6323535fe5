"""What interventions did: change per frame, videos as strips, effects against measures, knockouts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

import experiments.figures.style as st
from experiments.figures.style import BLUE, DARK, GREEN, ORANGE, PURPLE, RED, styled

LINES = {"direct": ("-", BLUE), "own block": ("-.", ORANGE), "total": ("--", GREEN), "floor": (":", DARK)}
COLORS = (ORANGE, RED, BLUE, GREEN, PURPLE)
MARKERS = ("o", "^", "s", "D")
FAR_BELOW = 100  # times smaller than the smallest effect: a floor that is only named


@styled
def effects_by_frame(changes: Mapping[str, np.ndarray], *, subtitle: str) -> Figure:
    """Draw a line per effect [F], in units of the distance between two seeds; on a logarithmic scale."""
    figure, axis = plt.subplots(figsize=(7, 3.2))
    positive = {name: np.where(values > 0, values, np.nan) for name, values in changes.items()}
    of_effects = [v for name, v in positive.items() if name != "floor" and np.isfinite(v).any()]
    least = min([np.nanmin(v) for v in of_effects], default=0)
    drawn: dict[str, Artist] = {}
    for name, values in positive.items():  # no change at all has no place on this scale
        line, color = LINES.get(name, ("-", PURPLE))
        label, largest = name, np.nanmax(values, initial=0)
        if name == "floor" and largest < least / FAR_BELOW:
            label, values = f"floor, at most {largest:.2g}", np.empty(0)
        style: dict[str, Any] = {"color": color, "marker": "o", "markersize": 3, "linewidth": 1.4}
        (drawn[label],) = axis.plot(values, line, label=label, **style)
    axis.axhline(1, color="0.4", linewidth=0.8)
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter("{x:g}")
    st.frame_axis(axis, max(len(values) for values in changes.values()), 25)
    x, y = "Latent frame; at 1 it is as far away as another seed", "/ distance between seeds"
    st.label_figure(figure, [axis], f"Change of x0, {subtitle}", y, drawn, x)
    return figure


@styled
def video_strips(videos: Mapping[str, np.ndarray], frames: Sequence[int], *, subtitle: str) -> Figure:
    """Draw a row per video [frames, height, width, 3], uint8, of these video frames, their numbers on top."""
    height, width = next(iter(videos.values())).shape[1:3]
    size = (0.95 * len(frames) + 0.4, (0.95 * height / width + 0.06) * len(videos) + 0.5)
    figure, axes = plt.subplots(len(videos), len(frames), squeeze=False, figsize=size)
    figure.set_layout_engine("constrained", wspace=0.02, hspace=0.02, w_pad=0.02, h_pad=0.02)
    for row, (name, video) in zip(axes, videos.items(), strict=True):
        for axis, frame in zip(row, frames, strict=True):
            axis.imshow(video[frame], interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            axis.grid(False)
        row[0].set_ylabel(name, fontsize=8)
    for axis, frame in zip(axes[0], frames, strict=True):
        axis.set_title(str(frame), fontsize=8, pad=3)
    st.label_figure(figure, [], f"Video frames, {subtitle}")
    return figure


@styled
def effect_against(
    effect: np.ndarray,
    measures: Mapping[str, np.ndarray],
    notes: Mapping[str, str],
    *,
    subtitle: str,
    kinds: np.ndarray | None = None,
    floor=float("nan"),
) -> Figure:
    """Draw a panel per measure: a dot per head [N, H], coloured by layer; notes say how they correlate.

    kinds [N, H] are the shapes of the dots. floor is drawn where it is within the effects' range.
    """
    size = (3.0 * len(measures) + 0.7, 3.3)
    figure, axes = plt.subplots(1, len(measures), squeeze=False, figsize=size, sharey=True)
    layers = np.broadcast_to(np.arange(len(effect))[:, None], effect.shape)
    shown = np.where(effect > 0, effect, np.nan)
    labels = np.full(effect.shape, "", object) if kinds is None else kinds
    markers = dict(zip(sorted(set(labels.ravel())), MARKERS, strict=False))
    style: dict[str, Any] = {"cmap": plt.get_cmap("viridis", len(effect))}
    style |= {"vmin": -0.5, "vmax": len(effect) - 0.5, "s": 16, "linewidth": 0}
    for axis, (name, values) in zip(axes[0], measures.items(), strict=True):
        for kind, marker in markers.items():
            at = labels == kind
            dots = axis.scatter(values[at], shown[at], c=layers[at], marker=marker, **style)
        if np.nanmin(shown) / 10 < floor < np.nanmax(shown):
            axis.axhline(floor, color="0.4", linewidth=0.8, linestyle=":")
        axis.set(xlabel=name, yscale="log")
        axis.set_title(notes.get(name, ""), fontsize=8)
    axes[0, 0].set_ylabel("Direct effect (/ seeds)")
    bar = figure.colorbar(dots, ax=axes[0, -1], ticks=st.ticks(len(effect), 8))
    bar.set_label("layer")
    line: dict[str, Any] = {"color": "0.3", "linestyle": "", "markersize": 5}
    named = {kind: marker for kind, marker in markers.items() if kind}
    shapes = {kind: Line2D([], [], marker=marker, label=kind, **line) for kind, marker in named.items()}
    st.label_figure(figure, [], f"Direct effect of every head, {subtitle}", legend=shapes)
    return figure


@styled
def knockout_curves(
    counts: Sequence[int],
    orders: Mapping[str, np.ndarray],
    random: np.ndarray,
    ends: tuple[np.ndarray, np.ndarray],
    subtitle: str,
    what="Share back in colour and shape",
) -> Figure:
    """Draw a line an order [counts, 3] (share, low, high) over the number of heads that lose their past.

    ends are none and all. random [counts, 5] has the lowest and highest draw too: the grey band.
    """
    figure, axis = plt.subplots(figsize=(7.4, 4.0))
    x = np.arange(len(counts) + 2)
    band: dict[str, Any] = {"color": "0.88", "linewidth": 0, "label": "range of random orders"}
    axis.fill_between(x[1:-1], random[:, 3], random[:, 4], **band)
    lines = {"random order, mean": (random, DARK)}
    lines |= {name: (values, color) for (name, values), color in zip(orders.items(), COLORS, strict=False)}
    style: dict[str, Any] = {"fmt": "o-", "markersize": 3.5, "linewidth": 1.4, "elinewidth": 0.8}
    style["capsize"] = 1.5
    for n, (name, (values, color)) in enumerate(lines.items()):
        share, low, high = np.concatenate([ends[0][None, :3], values[:, :3], ends[1][None, :3]]).T
        shifted = x + 0.06 * (n - (len(lines) - 1) / 2) * ((x > 0) & (x < x[-1]))
        axis.errorbar(shifted, share, [share - low, high - share], color=color, label=name, **style)
    axis.set_xticks(x, ["none", *map(str, counts), "all"])
    axis.set(xlabel="Heads that do not see the past", ylabel=what, ylim=(-0.02, 1.02))
    axis.legend(fontsize=8, loc="upper right")
    st.label_figure(figure, [], subtitle)
    return figure
