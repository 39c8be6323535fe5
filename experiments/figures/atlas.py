"""A whole atlas as maps layers × heads: measures, kinds of heads, agreement of labels."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.analysis.panels import HeadMap, LabelMap
from experiments.figures.colors import extend_of
from experiments.figures.style import BLUE, GREEN, GREY, ORANGE, PURPLE, mark_missing, styled, ticks

COLORS = {"anchor": BLUE, "wave": ORANGE, "veil": GREEN, "static": PURPLE, "dynamic": "#E8DFA9"}


@styled
def head_maps(maps: Sequence[HeadMap], layers: Sequence[int], *, subtitle: str) -> Figure:
    """A panel per measure. Those in logits around 0 share one scale, to be compared; the others have their
    own. Scales end at the 2nd and 98th percentile: a few heads of the real model's last layers would leave
    all others in one colour."""
    columns = min(5, len(maps))
    rows = -(-len(maps) // columns)
    heads = next((m.values.shape[1] for m in maps if m.values is not None), 1)
    figure, axes = plt.subplots(
        rows, columns, squeeze=False, figsize=(2.9 * columns, 0.6 + rows * _height(len(layers)))
    )
    around_0 = [m.values for m in maps if m.scale == "diverging" and m.values is not None]
    for axis, panel in zip(axes.flat, maps, strict=False):
        axis.set_title(panel.title)
        if panel.values is None or not np.isfinite(panel.values).any():
            mark_missing(axis, panel.missing_reason or "no head has one")
            continue
        cmap, low, high = _range(
            panel.scale, np.stack(around_0) if panel.scale == "diverging" else panel.values
        )
        mesh = axis.pcolormesh(np.ma.masked_invalid(panel.values), cmap=cmap, vmin=low, vmax=high)
        extend = extend_of(panel.values, low, high)
        figure.colorbar(mesh, ax=axis, label=panel.unit, extend=extend, aspect=25, pad=0.03)
        _head_axes(axis, layers, heads)
    for axis in axes.flat[len(maps) :]:
        axis.remove()
    figure.suptitle(f"Measures of every head, {subtitle}; grey: N/A")
    return figure


@styled
def label_maps(maps: Sequence[LabelMap], layers: Sequence[int], *, subtitle: str) -> Figure:
    """A panel per map of labels; a dot marks a head whose label differs from the one it is compared with."""
    figure, axes = plt.subplots(
        1, len(maps), squeeze=False, figsize=(2.7 * len(maps), 0.9 + _height(len(layers)))
    )
    heads = next((m.labels.shape[1] for m in maps if m.labels is not None), 1)
    legend: dict[str, Artist] = {}
    for axis, panel in zip(axes.flat, maps, strict=True):
        axis.set_title(panel.title, fontsize=9)
        legend |= {name: Patch(facecolor=COLORS[name], label=name) for name in panel.names.values()}
        if panel.labels is None:
            mark_missing(axis, panel.missing_reason)
            continue
        values = np.full(panel.labels.shape, np.nan)
        for i, label in enumerate(panel.names):
            values[panel.labels == label] = i
        axis.pcolormesh(
            np.ma.masked_invalid(values),
            cmap=ListedColormap([COLORS[n] for n in panel.names.values()]),
            vmin=-0.5,
            vmax=len(panel.names) - 0.5,
            edgecolors="white",
            linewidth=0.3,
        )
        _head_axes(axis, layers, heads)
        if panel.differs is not None:
            rows, columns = np.nonzero(panel.differs)
            axis.plot(columns + 0.5, rows + 0.5, "o", color="black", markersize=2)
            legend["differs"] = Line2D(
                [], [], color="black", marker="o", markersize=3, linestyle="", label="label differs"
            )
    figure.suptitle(f"Kinds of heads, {subtitle}")
    figure.legend(handles=list(legend.values()), loc="outside lower center", ncols=len(legend), frameon=False)
    return figure


@styled
def agreement_matrix(names: Sequence[str], values: np.ndarray, *, what: str) -> Figure:
    """Share of heads with the same label for every pair, values [n, n], written into the cells; NaN is
    absent."""
    n = len(names)
    figure, axis = plt.subplots(figsize=(3.2 + 0.62 * n, 1.6 + 0.42 * n))
    axis.grid(False)
    axis.set_facecolor(GREY)
    low = min(0.5, float(np.nanmin(values)) if np.isfinite(values).any() else 0.5)
    mesh = axis.pcolormesh(np.ma.masked_invalid(values), cmap="viridis", vmin=low, vmax=1)
    for i, j in np.ndindex(n, n):
        text = f"{values[i, j]:.0%}" if np.isfinite(values[i, j]) else "N/A"
        axis.text(
            j + 0.5,
            i + 0.5,
            text,
            ha="center",
            va="center",
            fontsize=8,
            color="white" if values[i, j] < (low + 1) / 2 else "black",
        )
    axis.set_xticks(np.arange(n) + 0.5, [str(i + 1) for i in range(n)])
    axis.set_yticks(np.arange(n) + 0.5, [f"{i + 1}: {name}" for i, name in enumerate(names)])
    axis.set(ylim=(n, 0))
    figure.colorbar(mesh, ax=axis, label="share of heads", pad=0.03)
    axis.set_title(f"Same label: {what}")
    return figure


def _height(layers: int) -> float:
    return max(2.2, min(4.2, 1.0 + 0.105 * layers))


def _head_axes(axis: Axes, layers: Sequence[int], heads: int) -> None:
    axis.grid(False)
    axis.set_facecolor(GREY)
    axis.set(xlabel="Head", ylabel="Layer", xlim=(0, heads), ylim=(len(layers), 0))
    shown_heads, shown = ticks(heads, room=6), ticks(len(layers), room=10)
    axis.set_xticks(shown_heads + 0.5, [str(h) for h in shown_heads])
    axis.set_yticks(shown + 0.5, [str(layers[i]) for i in shown])


def _range(scale: str, values: np.ndarray) -> tuple[str, float, float]:
    if scale == "share":
        return "viridis", 0.0, 1.0
    if scale == "ratio":
        return "RdBu_r", 0.0, 2.0
    low, high = np.nanpercentile(values, [2, 98])
    if scale == "diverging":
        high = max(abs(low), abs(high), 1e-9)
        return "RdBu_r", -high, high
    return "viridis", low, max(high, low + 1e-9)
