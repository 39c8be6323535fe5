"""The x0 lens as a strip of pictures, and how alike the heads of two atlases are."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

import experiments.figures.style as st
from experiments.figures.style import styled


@styled
def lens_strip(
    images: Sequence[Sequence[np.ndarray]], layers: Sequence[int], steps: Sequence[int], distance: np.ndarray
) -> Figure:
    """Draw pictures [H, W, 3], layers down and steps across, over the distance [layers, steps] of each."""
    size = (1.1 * len(steps) + 0.6, 1.25 * len(layers) + 0.5)
    figure, axes = plt.subplots(len(layers), len(steps), squeeze=False, figsize=size)
    for row, layer in enumerate(layers):
        for column, step in enumerate(steps):
            axis = axes[row, column]
            axis.imshow(images[row][column], interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_xlabel(f"{distance[row, column]:.2f}", fontsize=7)
            if row == 0:
                axis.set_title(f"step {step}", fontsize=8)
            if column == 0:
                axis.set_ylabel(f"layer {layer}", fontsize=8)
    st.label_figure(figure, [], "x0 that the head reads behind each layer; below: distance to the final x0")
    return figure


@styled
def correlation_map(correlation: np.ndarray, layers: Sequence[int], quantity: str) -> Figure:
    """Draw correlations [layers, heads] from -1 to 1."""
    size = (0.35 * correlation.shape[1] + 1.5, 0.3 * len(layers) + 1)
    figure, axis = plt.subplots(figsize=size)
    mesh = axis.pcolormesh(correlation, cmap="RdBu_r", vmin=-1, vmax=1)
    st.color_bar(figure, mesh, axis, "correlation")
    axis.set_xticks(np.arange(correlation.shape[1]) + 0.5, [str(n) for n in range(correlation.shape[1])])
    axis.set_yticks(np.arange(len(layers)) + 0.5, [str(layer) for layer in layers])
    axis.set_xlabel("head")
    axis.set_ylabel("layer")
    axis.invert_yaxis()
    st.label_figure(figure, [], f"{quantity} of two atlases: correlation of each head")
    return figure


@styled
def lines_by_layer(
    values: Sequence[Sequence[float]] | np.ndarray, layers: Sequence[int], names: Sequence[str], y: str
) -> Figure:
    """Draw values [layers, names] over the layers, a line a name."""
    figure, axis = plt.subplots(figsize=(5, 3))
    for column, name in zip(np.asarray(values).T, names, strict=True):
        axis.plot(layers, column, marker="o", markersize=3, label=name)
    st.label_figure(figure, [axis], f"{y}, by layer", y=y, x="layer", legend=st.handles(axis))
    return figure
