"""Strips heads × frames side by side: all layers, all passes, logits beside mass; and heads × prompt words.

As in experiments/figures/style.py: arrays in, Figure out; NaN was not attended and is grey.
"""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from experiments.analysis.panels import Strip
from experiments.figures.layer import color_scale, heat_map
from experiments.figures.style import (
    BLUE,
    GREY,
    LABELS,
    NONE,
    ORANGE,
    Shaded,
    label_figure,
    panel_grid,
    say_absent,
    styled,
    ticks,
)

PERCENTILE = 97  # where colours end: a few heads of the real model's last layers would leave all others pale


@styled
def strips(
    panels: Sequence[Strip], title: str, *, columns: int | None = None, shaded: Shaded = NONE
) -> Figure:
    """A panel per strip, a row per head; panels of one quantity share one colour scale."""
    H, F = next((p.values.shape for p in panels if p.values is not None), (1, 1))
    columns = min(columns or (4 if len(panels) <= 12 else 6), len(panels))
    width = max(2.0, min(3.4, 0.9 + 0.1 * F), 7.2 / columns)
    height = max(
        0.9 if len(panels) > columns else 1.9, 0.55 + 0.065 * H
    )  # a lone row holds the colour bar's label
    figure, axes = panel_grid(len(panels), columns, (width, height))
    legend = {}
    for i, (axis, panel) in enumerate(zip(axes, panels, strict=True)):
        axis.set_title(panel.title, fontsize=9)
        if i % columns == 0:
            axis.set_ylabel("Head")
        if panel.values is None:
            say_absent(axis, panel.absent)
            continue
        if np.isnan(panel.values).any():
            legend["not attended"] = Patch(facecolor=GREY, label="not attended")
        for text, frames in shaded.items():
            axis.axvline(min(frames) - 0.5, color=ORANGE, linewidth=1, linestyle="--")
            legend[text] = Line2D(
                [], [], color=ORANGE, linewidth=1, linestyle="--", label=f"from here: {text}"
            )
        axis.set_yticks(ticks(H, room=5))
        axis.set_xticks(ticks(F, room=8))
    for quantity in dict.fromkeys(p.quantity for p in panels if p.values is not None):
        _color(
            figure,
            [
                (a, p)
                for a, p in zip(axes, panels, strict=True)
                if p.quantity == quantity and p.values is not None
            ],
        )
    label_figure(figure, axes, title, legend=legend)
    return figure


@styled
def prompt_words(mass: np.ndarray, words: Sequence[str], *, layer: int, taken: str) -> Figure:
    """Cross-attention mass [H, words] of every head on each word of the prompt, and beside it the share of all mass that
    the prompt gets; the rest lies on the padding after it."""
    H, n = mass.shape
    figure, (left, right) = plt.subplots(
        1,
        2,
        sharey=True,
        width_ratios=[max(4, min(9, 0.42 * n)), 1.6],
        figsize=(3.6 + max(4, min(9, 0.42 * n)), max(2.8, 1.6 + 0.2 * H)),
    )
    colours = color_scale(mass, "mass", PERCENTILE)
    image = heat_map(left, mass, **colours)
    left.set_xticks(
        np.arange(n), words, rotation=45, ha="right", rotation_mode="anchor", fontsize=9 if n <= 24 else 6
    )
    left.set(xlabel="Word of the prompt", ylabel="Head")
    left.set_yticks(ticks(H, room=20))
    figure.colorbar(image, ax=left, label=LABELS["mass"], pad=0.02, aspect=25, extend=_extend(mass, colours))
    right.barh(np.arange(H), mass.sum(1), color=BLUE, height=0.8, linewidth=0)
    right.set(xlabel="on the whole prompt", xlim=(0, 1), ylim=(H - 0.5, -0.5))
    right.xaxis.set_major_locator(MaxNLocator(3))
    right.grid(False, axis="y")
    figure.suptitle(f"Layer {layer}: attention mass per prompt word, {taken}")
    return figure


def _color(figure: Figure, panels: Sequence[tuple[Axes, Strip]]) -> None:
    """Draw panels of one quantity in one colour scale, with its bar."""
    everything = np.concatenate([panel.values.ravel() for _, panel in panels])
    colours = color_scale(everything, panels[0][1].quantity, PERCENTILE)
    for axis, panel in panels:
        image = heat_map(axis, panel.values, **colours)
    figure.colorbar(
        image,
        ax=[axis for axis, _ in panels],
        label=LABELS[panels[0][1].quantity],
        pad=0.02,
        aspect=30,
        shrink=min(1.0, 3.5 / figure.get_figheight()),
        extend=_extend(everything, colours),
    )


def _extend(values: np.ndarray, colours: dict) -> str:
    """Which ends of a colour bar get an arrow: those that values go beyond."""
    beyond = np.nanmin(values) < colours["vmin"], np.nanmax(values) > colours["vmax"]
    return {(True, False): "min", (False, True): "max", (True, True): "both"}.get(
        tuple(map(bool, beyond)), "neither"
    )
