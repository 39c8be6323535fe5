"""Heads × keys of every layer, along frames or temporal positions; sinks, memories and choices are marked."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from experiments.analysis.key_axes import KeyColumns
from experiments.figures.colors import color_bar, color_scale, extend_of, heat_map
from experiments.figures.style import (
    BLUE,
    GREEN,
    LABELS,
    ORANGE,
    PURPLE,
    grey_legend,
    label_figure,
    panel_grid,
    styled,
    ticks,
)

MARKS = {"sink": BLUE, "average": ORANGE, "memory": GREEN, "chosen tokens": PURPLE, "zeros": "0.45"}
PERCENTILE = 97  # where colours end


@styled
def key_maps(panels: Mapping[str, KeyColumns], quantity: str, title: str) -> Figure:
    """A panel per layer, a row per head, on one colour scale; the strip above says what is special."""
    every = list(panels.values())
    H, n = every[0].values.shape
    columns = max(1, min(4 if len(every) <= 12 else 6, len(every)))
    width = max(2.0, min(3.4, 0.9 + 0.1 * n), 7.2 / columns)
    lowest = 1.0 if len(every) > columns else 1.9
    figure, axes = panel_grid(len(every), columns, (width, max(lowest, 0.65 + 0.065 * H)))
    everything = np.concatenate([one.values.ravel() for one in every])
    colors = color_scale(everything, quantity, PERCENTILE)
    legend: dict[str, Artist] = {}
    for i, (axis, (name, one)) in enumerate(zip(axes, panels.items(), strict=False)):
        image = heat_map(axis, one.values, **colors)
        axis.set_title(name, fontsize=9)
        if i % columns == 0:
            axis.set_ylabel("Head")
        legend |= grey_legend(one.values) | _mark(axis, one.marks, H)
        axis.set_yticks(ticks(H, room=5))
        label_keys(axis, one.labels)
    shrink = min(1.0, 3.5 / figure.get_figheight())
    extend = extend_of(everything, colors["vmin"], colors["vmax"])
    color_bar(figure, image, axes, LABELS[quantity], pad=0.02, aspect=30, shrink=shrink, extend=extend)
    label_figure(figure, axes, title, legend=legend, x=keys_label(every[0].axis, every[0].labels))
    return figure


def label_keys(axis: Axes, labels: Sequence[str], room: int = 8) -> None:
    """Some of the labels; averages, which stand together, have one."""
    averages = [n for n, label in enumerate(labels) if label.startswith("μ")]
    shown = {int(n): labels[int(n)] for n in ticks(len(labels) - len(averages), room)}
    if averages:
        shown[averages[len(averages) // 2]] = "μ"
    axis.set_xticks(list(shown), list(shown.values()))


def keys_label(key_axis: str, labels: Sequence[str]) -> str:
    """What the columns are, for their axis."""
    if key_axis == "position":
        return "Temporal position"
    return "Key frame, μ averages" if labels and labels[-1].startswith("μ") else "Key frame (latent)"


def _mark(axis: Axes, marks: Sequence[str], num_heads: int) -> dict[str, Artist]:
    """A strip above the heads -> its legend."""
    tall = max(1.0, 0.12 * num_heads)
    for n, mark in enumerate(marks):
        color = MARKS.get(mark, "white")
        axis.add_patch(Rectangle((n - 0.5, -0.6 - tall), 1, tall, facecolor=color, linewidth=0))
    axis.set_ylim(num_heads - 0.5, -0.7 - tall)
    return {mark: Patch(facecolor=MARKS[mark], label=mark) for mark in MARKS if mark in marks}
