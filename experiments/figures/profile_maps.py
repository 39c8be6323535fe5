"""Heat maps heads × frames side by side: all layers, all passes, logits beside mass; heads × prompt words;
RoPE bands."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from experiments.analysis.panels import ProfileMap
from experiments.caches.view import NOTHING, Caption
from experiments.figures.style import (
    BLUE,
    GREY,
    LABELS,
    ORANGE,
    color_bar,
    color_scale,
    extend_of,
    frame_axis,
    grey_legend,
    heat_map,
    label_figure,
    mark_averages,
    mark_frames,
    missing_note,
    panel_grid,
    styled,
    ticks,
)

PERCENTILE = 97  # where colours end: a few heads of the real model's last layers would leave all others pale


@styled
def profile_heat_maps(
    panels: Sequence[ProfileMap],
    title: str,
    *,
    columns: int | None = None,
    highlighted_frames: Mapping[str, Sequence[int]] = NOTHING,
) -> Figure:
    """A panel per map, a row per head; panels of one quantity share one colour scale. What is absent is left
    out, with a note."""
    shown = [(p, p.values) for p in panels if p.values is not None]
    H, F = shown[0][1].shape if shown else (1, 1)
    columns = max(1, min(columns or (4 if len(shown) <= 12 else 6), len(shown)))
    width = max(2.0, min(3.4, 0.9 + 0.1 * F), 7.2 / columns)
    lowest = 0.9 if len(shown) > columns else 1.9  # a lone row holds its colour bar
    figure, axes = panel_grid(max(1, len(shown)), columns, (width, max(lowest, 0.55 + 0.065 * H)))
    legend: dict[str, Artist] = {}
    for i, (axis, (panel, values)) in enumerate(zip(axes, shown, strict=False)):
        axis.set_title(panel.title, fontsize=9)
        if i % columns == 0:
            axis.set_ylabel("Head")
        legend |= grey_legend(values)
        for text, frames in highlighted_frames.items():
            style: dict[str, Any] = {"color": ORANGE, "linewidth": 1, "linestyle": "--"}
            axis.axvline(min(frames) - 0.5, **style)
            legend[text] = Line2D([], [], label=f"from here: {text}", **style)
        axis.set_yticks(ticks(H, room=5))
        axis.set_xticks(ticks(values.shape[1] - panel.averages, room=8))
    by_quantity: dict[str, list[tuple[Axes, np.ndarray]]] = {}
    for axis, (panel, values) in zip(axes, shown, strict=False):
        by_quantity.setdefault(panel.quantity, []).append((axis, values))
    for quantity, chosen in by_quantity.items():
        _color(figure, chosen, quantity)
    for axis, (panel, values) in zip(axes, shown, strict=False):
        legend |= mark_averages(axis, values.shape[1] - panel.averages, panel.averages)
    note = missing_note([(p.title, p.missing_reason) for p in panels if p.values is None])
    label_figure(figure, axes, title, legend=legend, note=note)
    return figure


@styled
def prompt_words(mass: np.ndarray, words: Sequence[str], *, layer: int, subtitle: str) -> Figure:
    """Cross-attention mass [H, words] of every head on each word of the prompt, and beside it the share of
    all mass that the prompt gets; the rest lies on the padding after it."""
    H, n = mass.shape
    width = max(4, min(9, 0.42 * n))
    figure, (left, right) = plt.subplots(
        1, 2, sharey=True, width_ratios=[width, 1.6], figsize=(3.6 + width, max(2.8, 1.6 + 0.2 * H))
    )
    colors = color_scale(mass, "mass", PERCENTILE)
    image = heat_map(left, mass, **colors)
    size = 9 if n <= 24 else 6
    left.set_xticks(np.arange(n), words, rotation=45, ha="right", rotation_mode="anchor", fontsize=size)
    left.set(xlabel="Word of the prompt", ylabel="Head")
    left.set_yticks(ticks(H, room=20))
    extend = extend_of(mass, colors["vmin"], colors["vmax"])
    color_bar(figure, image, left, LABELS["mass"], pad=0.02, aspect=25, extend=extend)
    right.barh(np.arange(H), mass.sum(1), color=BLUE, height=0.8, linewidth=0)
    right.set(xlabel="on the whole prompt", xlim=(0, 1), ylim=(H - 0.5, -0.5))
    right.xaxis.set_major_locator(MaxNLocator(3))
    right.grid(False, axis="y")
    figure.suptitle(f"Layer {layer}: attention mass per prompt word, {subtitle}")
    return figure


@styled
def rope_bands(
    values: np.ndarray, names: Sequence[str], caption: Caption, *, layer: int, head: int
) -> Figure:
    """What each RoPE band adds to the mean logit of every key frame: values [F, bands], and their sum on
    top."""
    F, bands = values.shape
    size = (max(7.0, min(12.0, 2.5 + 0.32 * F)), 3.0 + 0.2 * bands)
    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, height_ratios=[1, max(1.2, bands / 9)], figsize=size
    )
    total = values.sum(-1)
    above.bar(np.arange(F), total, width=0.8, color=BLUE, alpha=0.75, linewidth=0)
    above.axhline(0, color="0.4", linewidth=0.8)
    above.set_ylabel("sum of all bands")
    top = max(float(np.nanmax(np.abs(values), initial=0)), 1e-9)
    below.grid(False)
    below.set_facecolor(GREY)
    mesh = below.pcolormesh(
        np.arange(F + 1) - 0.5,
        np.arange(bands + 1) - 0.5,
        np.ma.masked_invalid(values).T,
        cmap="RdBu_r",
        vmin=-top,
        vmax=top,
    )
    below.set_yticks(np.arange(bands), names, fontsize=8)
    below.set_ylim(bands - 0.5, -0.5)
    color_bar(figure, mesh, below, LABELS["mean_logit"], pad=0.02)
    legend = mark_frames(above, total, caption.highlighted_frames)
    for marked in caption.highlighted_frames.values():
        below.axvline(min(marked) - 0.5, color=ORANGE, linestyle="--", linewidth=1.2)
    frame_axis(below, F, room=25)
    below.set_xlim(-0.5, F - 0.5)
    above.tick_params(labelbottom=False)
    title = f"Layer {layer}, head {head}: mean logit by RoPE band, {caption.subtitle}"
    label_figure(figure, [below], title, legend=legend)
    return figure


def _color(figure: Figure, panels: Sequence[tuple[Axes, np.ndarray]], quantity: str) -> None:
    """Draw panels of one quantity in one colour scale, with its bar."""
    everything = np.concatenate([values.ravel() for _, values in panels])
    colors = color_scale(everything, quantity, PERCENTILE)
    for axis, values in panels:
        image = heat_map(axis, values, **colors)
    color_bar(
        figure,
        image,
        [axis for axis, _ in panels],
        LABELS[quantity],
        pad=0.02,
        aspect=30,
        shrink=min(1.0, 3.5 / figure.get_figheight()),
        extend=extend_of(everything, colors["vmin"], colors["vmax"]),
    )
