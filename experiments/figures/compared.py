"""The same heads of several runs under each other: query × key frames on one colour scale."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments.figures.colors import color_bar, color_scale, heat_map
from experiments.figures.style import LABELS, grey_legend, label_figure, styled, ticks


@styled
def compared_maps(
    matrices: Mapping[str, np.ndarray], heads: Sequence[int], quantity: str, *, title: str
) -> Figure:
    """A row for each run, a column for each of heads: matrices run -> [H, F, F]. Axes are aligned and shared,
    so that a cell is at the same place in every panel; grey was not attended."""
    chosen = {name: values[list(heads)] for name, values in matrices.items()}
    every = np.stack(list(chosen.values()))  # [runs, heads, F, F]
    colors = color_scale(every, quantity)
    figure, axes = plt.subplots(
        len(chosen),
        len(heads),
        squeeze=False,
        sharex=True,
        sharey=True,
        figsize=(1.2 + 1.8 * len(heads), 1.0 + 1.8 * len(chosen)),
    )
    shown = ticks(every.shape[-1], room=6)
    for row, (name, values) in zip(axes, chosen.items(), strict=True):
        for axis, matrix in zip(row, values, strict=True):
            image = heat_map(axis, matrix, equal=True, **colors)
            axis.set(xticks=shown, yticks=shown)
        row[0].set_ylabel(f"{name}\nQuery frame (latent)")
    for axis, head in zip(axes[0], heads, strict=True):
        axis.set_title(f"head {head}", fontsize=9)
    color_bar(figure, image, list(axes.flat), LABELS[quantity], aspect=30, pad=0.02)
    label_figure(figure, list(axes[-1]), title, legend=grey_legend(every))
    return figure
