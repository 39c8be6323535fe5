"""A whole atlas as maps layers × heads: measures, kinds of heads, agreement of labels."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

import experiments.figures.style as st
from experiments.analysis.panels import HeadMap, LabelMap
from experiments.analysis.taxonomy import LabelAgreement
from experiments.figures.style import BLUE, GREEN, GREY, ORANGE, PURPLE, YELLOW, styled

COLORS = {"anchor": BLUE, "wave": ORANGE, "veil": GREEN, "static": PURPLE, "dynamic": YELLOW}
SHARED = ("logits", "/ seeds")  # units whose panels are to be compared


@styled
def head_maps(
    maps: Sequence[HeadMap], layers: Sequence[int], *, subtitle: str, title="Measures of every head"
) -> Figure:
    """Draw a panel per measure; what a cache does not hold is left out, and a note says so.

    Those in logits around 0 share one scale, as do effects. Scales end at the 2nd and 98th percentile: a few
    heads of the real model's last layers would leave all others in one colour.
    """
    shown = [(m, m.values) for m in maps if m.values is not None and np.isfinite(m.values).any()]
    columns = 3 if len(shown) == 6 else max(1, min(4 if len(shown) <= 8 else 5, len(shown)))
    rows = max(1, -(-len(shown) // columns))
    size = (3.1 * columns, 0.7 + rows * (_height(len(layers)) + 0.15))
    figure, axes = plt.subplots(rows, columns, squeeze=False, figsize=size)
    for axis, (panel, values) in zip(axes.flat, shown, strict=False):
        _title(axis, panel.title, panel.queries, any(m.queries for m in maps))
        alike = [v for m, v in shown if (m.scale, m.unit) == (panel.scale, panel.unit) and m.unit in SHARED]
        cmap, low, high = _range(panel.scale, np.stack(alike) if alike else values)
        mesh = axis.pcolormesh(np.ma.masked_invalid(values), cmap=cmap, vmin=low, vmax=high)
        st.color_bar(
            figure, mesh, axis, panel.unit, extend=st.extend_of(values, low, high), aspect=25, pad=0.03
        )
        _head_axes(axis, layers, values.shape[1])
    for axis in list(axes.flat)[len(shown) :]:
        axis.remove()
    drawn = [id(m) for m, _ in shown]
    missing = [(m.title, m.missing_reason or "no head has one") for m in maps if id(m) not in drawn]
    st.label_figure(figure, [], f"{title}, {subtitle}; grey: N/A", note=st.missing_note(missing))
    return figure


@styled
def label_maps(maps: Sequence[LabelMap], layers: Sequence[int], *, subtitle: str) -> Figure:
    """Draw a panel per map of labels; a dot marks a head whose label differs from the one beside it."""
    shown = [(m, m.labels) for m in maps if m.labels is not None]
    size = (max(4.0, 2.7 * len(shown)), 1.1 + _height(len(layers)))
    figure, axes = plt.subplots(1, max(1, len(shown)), squeeze=False, figsize=size)
    legend: dict[str, Artist] = {}
    for axis, (panel, labels) in zip(axes.flat, shown, strict=False):
        _title(axis, panel.title, panel.queries, any(m.queries for m in maps), fontsize=9)
        legend |= {name: Patch(facecolor=COLORS[name], label=name) for name in panel.names.values()}
        values = np.full(labels.shape, np.nan)
        for i, label in enumerate(panel.names):
            values[labels == label] = i
        cmap, top = ListedColormap([COLORS[n] for n in panel.names.values()]), len(panel.names) - 0.5
        style: dict[str, Any] = {"vmin": -0.5, "vmax": top, "edgecolors": "white", "linewidth": 0.3}
        axis.pcolormesh(np.ma.masked_invalid(values), cmap=cmap, **style)
        _head_axes(axis, layers, labels.shape[1])
        if panel.differs is not None:
            rows, columns = np.nonzero(panel.differs)
            axis.plot(columns + 0.5, rows + 0.5, "o", color="black", markersize=2)
            dot: dict[str, Any] = {"color": "black", "marker": "o", "markersize": 3, "linestyle": ""}
            legend["differs"] = Line2D([], [], label="label differs", **dot)
    for axis in list(axes.flat)[len(shown) :]:
        axis.remove()
    note = st.missing_note([(m.title, m.missing_reason) for m in maps if m.labels is None])
    st.label_figure(figure, [], f"Kinds of heads, {subtitle}", legend=legend, note=note)
    return figure


@styled
def agreement_matrix(names: Sequence[str], values: np.ndarray, *, what: str) -> Figure:
    """Draw the share of heads with the same label for every pair, values [n, n], written into the cells."""
    n = len(names)
    figure, axis = plt.subplots(figsize=(3.2 + 0.62 * n, 1.6 + 0.42 * n))
    axis.grid(False)
    axis.set_facecolor(GREY)
    low = min(0.5, float(np.nanmin(values)) if np.isfinite(values).any() else 0.5)
    mesh = axis.pcolormesh(np.ma.masked_invalid(values), cmap="viridis", vmin=low, vmax=1)
    for (i, j), value in np.ndenumerate(values):
        text = f"{value:.0%}" if np.isfinite(value) else "N/A"
        color = "white" if value < (low + 1) / 2 else "black"
        axis.text(j + 0.5, i + 0.5, text, ha="center", va="center", fontsize=8, color=color)
    axis.set_xticks(np.arange(n) + 0.5, [str(i + 1) for i in range(n)])
    axis.set_yticks(np.arange(n) + 0.5, [f"{i + 1}: {name}" for i, name in enumerate(names)])
    axis.set(ylim=(n, 0))
    st.color_bar(figure, mesh, axis, "share of heads", pad=0.03)
    axis.set_title(f"Same label: {what}")
    return figure


@styled
def label_agreement(found: Sequence[LabelAgreement]) -> Figure:
    """Draw agreement with published labels, a row for each view, beside what the rule must beat."""
    figure, axis = plt.subplots(figsize=(7.4, 1.3 + 0.33 * len(found)))
    rows = np.arange(len(found))
    share = np.array([one.share for one in found])
    ends = np.array([[one.share - one.low, one.high - one.share] for one in found]).T
    dots: dict[str, Any] = {"fmt": "o", "color": BLUE, "markersize": 5}
    axis.errorbar(share, rows, xerr=ends, label="our rule, 95 % over layers", **dots)
    single, majority = [one.single for one in found], [one.majority for one in found]
    axis.plot(single, rows, "D", color=ORANGE, markersize=4, label="best single threshold")
    axis.plot(majority, rows, "s", color="0.5", markersize=4, label="majority class")
    axis.set_yticks(rows, [one.name for one in found])
    axis.set(xlabel="Share of heads with the published label", ylim=(len(found) - 0.5, -0.5), xlim=(None, 1))
    title = "Kinds of heads: agreement with published labels"
    st.label_figure(figure, [], title, legend=st.handles(axis))
    return figure


def _height(layers: int) -> float:
    return max(2.2, min(4.2, 1.0 + 0.105 * layers))


def _title(axis: Axes, title: str, queries: str, room: bool, **font: Any) -> None:
    """Set a panel's title, and under it whose queries it is of; room where another panel says so."""
    axis.set_title(title, pad=14 if room else None, **font)
    axis.text(0.5, 1.01, queries, transform=axis.transAxes, ha="center", va="bottom", fontsize=7)


def _head_axes(axis: Axes, layers: Sequence[int], heads: int) -> None:
    axis.grid(False)
    axis.set_facecolor(GREY)
    axis.set(xlabel="Head", ylabel="Layer", xlim=(0, heads), ylim=(len(layers), 0))
    shown_heads, shown = st.ticks(heads, room=6), st.ticks(len(layers), room=10)
    axis.set_xticks(shown_heads + 0.5, [str(h) for h in shown_heads])
    axis.set_yticks(shown + 0.5, [str(layers[i]) for i in shown])


def _range(scale: str, values: np.ndarray) -> tuple[str, float, float]:
    """Colour map and its ends, by the scale of a HeadMap."""
    if scale in ("share", "ratio"):
        return ("viridis", 0.0, 1.0) if scale == "share" else ("RdBu_r", 0.0, 2.0)
    low, high = np.nanpercentile(values, [2, 98])
    if scale == "diverging":
        high = max(abs(low), abs(high), 1e-9)
        return "RdBu_r", -high, high
    return "viridis", low, max(high, low + 1e-9)
