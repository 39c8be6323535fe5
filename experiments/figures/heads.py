"""Profiles of heads: Figure 4, one head and its extremes, many heads side by side, heads over a sweep."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import experiments.figures.style as st
from experiments.analysis.panels import HeadPanel
from experiments.caches.view import Caption
from experiments.figures.style import BLUE, DARK, LABELS, NAMES, RED, TOKEN_LABELS, styled

ROOM = 12  # points between axes and a title over the strip of averages
BARS_UP_TO = 60  # frames: gaps between more bars would be thinner than a pixel


@styled
def head_curves(
    panels: Sequence[HeadPanel], caption: Caption, pictures: Sequence[np.ndarray] | None = None
) -> Figure:
    """Draw Figure 4: one panel per head, the highest frame annotated.

    Filled per key token where the curve is known, as in the paper, with the mean of each key frame on it;
    else a bar per key frame. A reference is drawn over it, with an arrow where its figure ends. Pictures
    of the video, one [h, w, 3] a frame, stand under the lowest frame axes.
    """
    figure, axes = st.panel_grid(len(panels), columns=2, size=(6.6, 3.5))
    legend: dict[str, Artist] = {}
    for axis, panel in zip(axes, panels, strict=True):
        _draw_profile(axis, panel, caption.quantity)
        name = f"{panel.label}: layer {panel.layer}, head {panel.head}"
        pad = None if panel.averages is None else ROOM
        axis.set_title(f"{name}, {NAMES[caption.quantity]}, {caption.subtitle}", pad=pad)
        axis.margins(y=0.12 if panel.reference is None else 0.18)
        marked = _draw_averages(axis, panel)
        F = len(panel.profile)
        tops = panel.profile if panel.curve is None else np.reshape(panel.curve, (F, -1)).max(1)
        if panel.reference is not None and panel.clipped is not None:
            _draw_reference(axis, panel.reference, panel.clipped, str(panel.agreement or ""))
            tops = np.fmax(tops, panel.reference)
        if np.isfinite(panel.profile).any():
            k = int(np.nanargmax(panel.profile))
            style: dict[str, Any] = {"textcoords": "offset points", "weight": "bold", "color": DARK}
            axis.annotate(f"max@{k}", (k, tops[k]), (0, 5), ha=_side(k, F), **style)
        legend |= st.handles(axis) | st.mark_frames(axis, panel.profile, caption.highlighted_frames) | marked
        if pictures and axis.xaxis.get_tick_params()["labelbottom"]:
            st.picture_strip(axis, pictures)
    st.label_figure(figure, axes, "", legend=legend)
    return figure


@styled
def one_head(panel: HeadPanel, caption: Caption) -> Figure:
    """Draw a head's profile over the key frames, highest and lowest frame annotated with their values."""
    F = len(panel.profile)
    figure, axis = plt.subplots(figsize=(max(7.0, min(12.0, 2.5 + 0.32 * F)), 3.6))
    _draw_profile(axis, panel, caption.quantity)
    axis.margins(y=0.16)
    marked = _draw_averages(axis, panel)
    if panel.no_preference is not None:
        style: dict[str, Any] = {"color": RED, "linewidth": 1, "linestyle": ":"}
        axis.axhline(panel.no_preference, label=f"no preference: {panel.no_preference:.3g}", **style)
    if np.isfinite(panel.profile).any():
        for name, find, up in (("max", np.nanargmax, 18), ("min", np.nanargmin, 30)):
            k = int(find(panel.profile))
            value = panel.profile[k]  # the frame's own value, not its highest token
            said: dict[str, Any] = {"va": "bottom", "ha": _side(k, F), "weight": "bold", "color": DARK}
            said["arrowprops"] = {"arrowstyle": "-", "color": DARK, "linewidth": 0.8}
            said["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1}
            said["textcoords"] = "offset points"
            axis.annotate(f"{name}@{k}: {value:.3g}", (k, value), (0, up), **said)
    legend = st.handles(axis) | st.mark_frames(axis, panel.profile, caption.highlighted_frames) | marked
    title = f"Layer {panel.layer}, head {panel.head}: {NAMES[caption.quantity]}, {caption.subtitle}"
    st.label_figure(figure, [axis], title, legend=legend)
    return figure


def head_titles(values: np.ndarray, text: str = "H{head}, Δ = {value:+.2f}") -> list[str]:
    """Return panel titles with a value [H] of each head; N/A for NaN."""
    titles = [text.format(head=head, value=value) for head, value in enumerate(values)]
    return [title.replace("+nan", "N/A").replace("nan", "N/A").replace("-", "−") for title in titles]


@styled
def head_grid(
    profiles: np.ndarray, titles: Sequence[str], caption: Caption, *, layer: int, note=""
) -> Figure:
    """Draw a small panel per row of profiles [n, F + averages], each on its own scale."""
    n, F = profiles.shape[0], profiles.shape[1] - caption.averages
    figure, axes = st.panel_grid(n, columns=4 if n <= 16 else 8, size=(2.9, 1.9) if n <= 16 else (2.2, 1.5))
    legend: dict[str, Artist] = {}
    for axis, values, title in zip(axes, profiles, titles, strict=True):
        if F <= BARS_UP_TO:
            axis.bar(np.arange(F), values[:F], width=0.85, color=BLUE, linewidth=0)
        else:
            axis.stairs(values[:F], np.arange(F + 1) - 0.5, fill=True, color=BLUE, linewidth=0)
        st.average_bars(axis, values[F:], F, width=0.85)
        axis.axhline(0, color="0.4", linewidth=0.6)
        axis.set_title(title, fontsize=9)
        axis.yaxis.set_major_locator(MaxNLocator(4))
        st.frame_axis(axis, F, room=8)
        legend |= st.mark_frames(axis, values, caption.highlighted_frames)
        legend |= st.mark_averages(axis, F, caption.averages)
    notes = "; ".join(filter(None, (note, "scales differ")))
    title = f"Layer {layer}, {n} heads: {NAMES[caption.quantity]}, {caption.subtitle}; {notes}"
    st.label_figure(figure, axes, title, LABELS[caption.quantity], legend, x=f"Key frame ({caption.unit})")
    return figure


@styled
def sweep_curves(profiles: Mapping[str, np.ndarray], caption: Caption, names: Sequence[str]) -> Figure:
    """Draw a panel per head, of profiles [atlases, F + averages]: mean and standard deviation (n − 1).

    Lines are the atlases, which names names.
    """
    figure, axes = st.panel_grid(len(profiles), columns=2, size=(6.6, 3.5))
    legend: dict[str, Any] = {}
    for axis, (title, values) in zip(axes, profiles.items(), strict=True):
        mean, frames, F = values.mean(0), np.arange(values.shape[1]), values.shape[1] - caption.averages
        axis.bar(frames[:F], mean[:F], width=0.8, color=BLUE, alpha=0.6, linewidth=0)
        st.average_bars(axis, mean[F:], F)
        for row in values:
            axis.plot(frames[:F], row[:F], color="0.35", linewidth=0.5)
        style: dict[str, Any] = {"fmt": "o", "color": DARK, "markersize": 3, "capsize": 2}
        legend["mean"] = axis.errorbar(frames, mean, values.std(0, ddof=1), **style)
        legend["mean"].set_label(f"mean ± standard deviation over {len(names)} atlases")
        axis.axhline(0, color="0.4", linewidth=0.8)
        axis.set_title(title, pad=ROOM if caption.averages else None)
        st.frame_axis(axis, F, room=25)
        legend |= st.mark_frames(axis, mean, caption.highlighted_frames)
        legend |= st.mark_averages(axis, F, caption.averages, large=True)
    note = f"grey lines: {', '.join(names)}" if len(names) <= 4 else "grey lines: each atlas"
    st.label_figure(
        figure, axes, st.capitalised(caption.subtitle), LABELS[caption.quantity], legend, note=note
    )
    return figure


def _draw_profile(axis: Axes, panel: HeadPanel, quantity: str) -> None:
    """Draw a profile per key frame, over its tokens where they are known."""
    F, label = len(panel.profile), "per key frame"
    if panel.curve is None:
        axis.bar(np.arange(F), panel.profile, width=0.8, color=BLUE, alpha=0.75, linewidth=0)
    else:
        label = "mean per key frame"
        edges = np.linspace(-0.5, F - 0.5, len(panel.curve) + 1)  # frame k covers k - 1/2 .. k + 1/2
        axis.stairs(panel.curve, edges, fill=True, color=BLUE, alpha=0.55, linewidth=0, label="per key token")
    axis.plot(np.arange(F), panel.profile, color=DARK, linewidth=1.2, marker="o", markersize=3, label=label)
    axis.axhline(0, color="0.4", linewidth=0.8)
    axis.set_ylabel((LABELS if panel.curve is None else TOKEN_LABELS)[quantity])
    st.frame_axis(axis, F, room=25)


def _draw_averages(axis: Axes, panel: HeadPanel) -> dict[str, Artist]:
    if panel.averages is None:
        return {}
    st.average_bars(axis, panel.averages, len(panel.profile))
    return st.mark_averages(axis, len(panel.profile), len(panel.averages), large=True)


def _draw_reference(axis: Axes, reference: np.ndarray, clipped: np.ndarray, agreement: str) -> None:
    frames = np.arange(len(reference))
    drawn = list(np.flatnonzero(~clipped))
    style: dict[str, Any] = {"linewidth": 1.2, "linestyle": "--", "marker": "D", "markersize": 3}
    axis.plot(frames, reference, color=RED, markevery=drawn, label="read off the paper", **style)
    if clipped.any():
        arrows: dict[str, Any] = {"color": RED, "linestyle": "", "marker": "^", "markersize": 7}
        axis.plot(frames[clipped], reference[clipped], label="cut off by the paper's plot", **arrows)
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5}
    said: dict[str, Any] = {"ha": "center", "va": "top", "color": RED, "weight": "bold", "bbox": box}
    axis.text(0.5, 0.98, agreement, transform=axis.transAxes, **said)


def _side(k: int, F: int) -> str:
    """Where the words of an annotation begin: near an edge they stay inside the axes."""
    return "left" if k < 0.06 * F else "right" if k > 0.94 * F else "center"
