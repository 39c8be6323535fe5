"""One layer as heat maps: heads × key frames, and query × key frames of every head."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.transforms import offset_copy

from experiments.caches.caption import Caption
from experiments.figures.averages import mark_averages
from experiments.figures.colors import color_bar, color_scale, heat_map
from experiments.figures.key_maps import keys_label, label_keys
from experiments.figures.style import (
    GREY,
    LABELS,
    NAMES,
    ORANGE,
    frame_axis,
    grey_legend,
    label_figure,
    mark_missing,
    panel_grid,
    styled,
    ticks,
)


@styled
def frame_maps(
    matrices: np.ndarray,
    query_frames: Sequence[int],
    caption: Caption,
    *,
    layer: int,
    heads: Sequence[int] | None = None,
    keys: Sequence[str] | None = None,
    key_axis: str = "frame",
) -> Figure:
    """Query × key frames of every head on one colour scale: matrices [H, rows, F + averages], a row per entry
    of query_frames. heads are their numbers, 0, 1, ... by default. Logits are coloured symmetrically around
    0, grey was not attended. keys are labels of the columns where they are not the frames 0, 1, ...;
    key_axis says whether they are frames or positions."""
    gone = caption.averages if keys is None else sum(label.startswith("μ") for label in keys)
    H, rows, F = matrices.shape[0], matrices.shape[1], matrices.shape[2] - gone
    heads = list(heads if heads is not None else range(H))
    which = f"{H} heads" if H > 1 else f"head {heads[0]}"
    title = f"Layer {layer}, {which}: {NAMES[caption.quantity]}, query × key frames, {caption.subtitle}"
    if not np.isfinite(matrices).any():
        figure, (axis,) = panel_grid(1, columns=1, size=(7.0, 1.0))
        mark_missing(axis, "no frame matrix in this cache", width=40)
        label_figure(figure, [], title)
        return figure
    square = rows > F / 2
    figure, axes = panel_grid(H, columns=4, size=(2.6, 2.3 if square else 1.8))
    colors, legend = color_scale(matrices, caption.quantity), grey_legend(matrices)
    for head, axis, values in zip(heads, axes, matrices, strict=True):
        image = heat_map(axis, values, equal=square, **colors)
        axis.set_title(f"H{head}" if H > 1 else "", fontsize=9)
        if keys is None:
            _frame_ticks(axis.xaxis, range(F))
        else:
            label_keys(axis, keys)
        legend |= mark_averages(axis, F, gone)
        _frame_ticks(axis.yaxis, query_frames)
    for axis in axes[:: min(4, H)]:
        axis.set_ylabel(f"Query frame ({caption.unit})")
    shrink = min(1, 4 / figure.get_figheight())
    x = f"Key frame ({caption.unit})" if keys is None else keys_label(key_axis, keys)
    color_bar(figure, image, axes, LABELS[caption.quantity], aspect=30, pad=0.02, shrink=shrink)
    label_figure(figure, axes, title, legend=legend, x=x)
    return figure


@styled
def all_heads(profiles: np.ndarray, caption: Caption, *, layer: int) -> Figure:
    """Heat map heads x key frames of profiles [H, F + averages]; grey was not attended."""
    H, columns = profiles.shape
    F = columns - caption.averages
    figure, axis = plt.subplots(figsize=(max(7.0, min(12.0, 2.5 + 0.32 * columns)), max(2.6, 1.4 + 0.24 * H)))
    axis.grid(False)
    axis.set_facecolor(GREY)
    mesh = axis.pcolormesh(
        np.arange(columns + 1) - 0.5,
        np.arange(H + 1) - 0.5,
        np.ma.masked_invalid(profiles),
        edgecolors="face",
        linewidth=0.2,
        **color_scale(profiles, caption.quantity),
    )
    frame_axis(axis, F, room=25)
    axis.set(ylabel="Head", xlim=(-0.5, F - 0.5), ylim=(H - 0.5, -0.5), yticks=ticks(H, room=20))
    color_bar(figure, mesh, axis, LABELS[caption.quantity], pad=0.02, aspect=30)
    legend = grey_legend(profiles) | mark_averages(axis, F, caption.averages, large=True)
    edge = offset_copy(
        axis.get_xaxis_transform(), figure, y=4, units="points"
    )  # shading would change colours
    for text, frames in caption.highlighted_frames.items():
        span = [min(frames) - 0.5, max(frames) + 0.5]
        axis.axvline(span[0], color=ORANGE, linewidth=1.2, linestyle="--")
        style: dict[str, Any] = {"color": ORANGE, "linewidth": 4, "solid_capstyle": "butt", "clip_on": False}
        (legend[text],) = axis.plot(span, [1, 1], transform=edge, label=text, **style)
    title = f"Layer {layer}, {H} heads: {NAMES[caption.quantity]}, {caption.subtitle}"
    label_figure(figure, [axis], title, legend=legend)
    return figure


def _frame_ticks(axis: Axis, frames: Sequence[int]) -> None:
    shown = ticks(len(frames), room=8)
    axis.set_ticks(list(shown), [str(frames[i]) for i in shown])
