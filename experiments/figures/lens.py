"""The x0 lens as a strip of pictures, and how alike the heads of two atlases are."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

import experiments.figures.style as st
from experiments.figures.style import styled


@styled
def lens_strip(
    images: Sequence[Sequence[np.ndarray]], layers: Sequence[int], steps: Sequence[int], distance: np.ndarray
) -> Figure:
    """Draw pictures [H, W, 3], layers down and steps across, over the distance [layers, steps] of each."""
    shown = st.columns_with_room(len(steps), 0.62)
    figure, axes = st.panels(len(layers) * len(shown), len(shown), (1.1, 1.25), keep=True)
    for n, axis in enumerate(axes):
        row, column = n // len(shown), shown[n % len(shown)]
        axis.imshow(images[row][column], interpolation="nearest")
        axis.grid(False)
        axis.set(xticks=[], yticks=[], xlabel=f"{distance[row, column]:.2f}")
        if row == 0:
            axis.set_title(f"step {steps[column]}")
        if column == shown[0]:
            axis.set_ylabel(f"layer {layers[row]}")
    st.label_figure(figure, [], "x0 that the head reads behind each layer", "below: distance to the final x0")
    return figure


@styled
def correlation_map(correlation: np.ndarray, layers: Sequence[int], quantity: str) -> Figure:
    """Draw correlations [layers, heads] from -1 to 1."""
    figure, (axis,) = st.panels(1, 1, (0.35 * correlation.shape[1] + 1.5, 0.18 * len(layers) + 0.7))
    image = st.heat_map(axis, correlation, cmap="RdBu_r", vmin=-1, vmax=1)
    st.color_bar(figure, image, axis, "correlation")
    axis.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axis.set(xticks=range(correlation.shape[1]), ylabel="Layer")
    title = f"{quantity} of two atlases: correlation of each head"
    st.label_figure(figure, [axis], title, x="Head")
    return figure


@styled
def lines_by_layer(
    values: Sequence[Sequence[float]] | np.ndarray, layers: Sequence[int], names: Sequence[str], y: str
) -> Figure:
    """Draw values [layers, names] over the layers, a line a name."""
    figure, (axis,) = st.panels(1, 1, (5.0, 2.4))
    for n, (column, name) in enumerate(zip(np.asarray(values).T, names, strict=True)):
        axis.plot(layers, column, marker="osD^v"[n % 5], markersize=3, label=name)
    axis.set_ylabel(y)
    st.label_figure(figure, [axis], f"{y}, by layer", x="Layer", legend=st.handles(axis))
    return figure
