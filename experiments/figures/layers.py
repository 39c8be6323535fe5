"""Layers compared: profiles averaged over heads, and first, middle and last frame."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.caches.caption import Caption
from experiments.figures.averages import average_bars, mark_averages
from experiments.figures.style import (
    BLUE,
    GREEN,
    LABELS,
    NAMES,
    PURPLE,
    THIN_ABOVE,
    capitalised,
    frame_axis,
    label_figure,
    mark_frames,
    panel_grid,
    styled,
)


@styled
def layer_comparison(profiles: np.ndarray, layers: Sequence[int], caption: Caption) -> Figure:
    """Mean over heads of profiles [N, H, F + averages] in a band, a panel per layer on its own scale: the
    logits of the real model's last layers would flatten all others. The band is a standard deviation either
    side of logits; of masses and probabilities, where it would reach below 0, it holds the middle 80 % of
    the heads."""
    N, H, F = *profiles.shape[:2], profiles.shape[2] - caption.averages
    columns, size = (2, (5.0, 3.2)) if N <= 4 else (4, (2.9, 1.9)) if N <= 12 else (6, (2.3, 1.7))
    figure, axes = panel_grid(N, columns, size)
    legend: dict[str, Artist] = {}
    frames, marker = np.arange(F), "o" if F <= THIN_ABOVE else ""
    for axis, layer, everything in zip(axes, layers, profiles, strict=True):
        values = everything[:, :F]
        mean, std = values.mean(0), values.std(0)
        if caption.quantity == "mean_logit":
            axis.bar(frames, 2 * std, 0.8, mean - std, color=BLUE, alpha=0.3, linewidth=0)
        else:
            low, high = np.quantile(values, [0.1, 0.9], axis=0)
            axis.fill_between(frames, low, high, color=BLUE, alpha=0.3, linewidth=0)
        axis.plot(frames, mean, color=BLUE, linewidth=1.5, marker=marker, markersize=2)
        axis.axhline(0, color="0.4", linewidth=0.6)
        axis.set_title(f"Layer {layer}")
        axis.yaxis.set_major_locator(MaxNLocator(6 if N <= 4 else 4))
        frame_axis(axis, F, room=25 if N <= 4 else 8)
        average_bars(axis, everything[:, F:].mean(0), F)
        legend |= mark_frames(axis, mean, caption.highlighted_frames)
        legend |= mark_averages(axis, F, caption.averages)
    scales = "; scales differ" if N > 1 else ""
    band = "mean ± std over" if caption.quantity == "mean_logit" else "mean and middle 80 % of"
    title = f"{capitalised(NAMES[caption.quantity])}, {band} {H} heads, {caption.subtitle}{scales}"
    label_figure(figure, axes, title, LABELS[caption.quantity], legend)
    return figure


@styled
def layers_together(profiles: np.ndarray, layers: Sequence[int], caption: Caption) -> Figure:
    """Mean over heads of profiles [N, H, F + averages], every layer in one axes, from dark (early) to bright
    (late)."""
    N, H, F = *profiles.shape[:2], profiles.shape[2] - caption.averages
    figure, axis = plt.subplots(figsize=(8.4, 4.0))
    colors = plt.get_cmap("viridis")(np.linspace(0, 0.92, N))
    mean = profiles.mean(1)
    for layer, values, color in zip(layers, mean, colors, strict=True):
        marker = "o" if F <= THIN_ABOVE else ""
        axis.plot(values[:F], marker=marker, markersize=2.5, linewidth=1.3, color=color, label=str(layer))
        axis.plot(np.arange(F, len(values)), values[F:], "o", markersize=2.5, color=color)
    axis.axhline(0, color="0.4", linewidth=0.6)
    frame_axis(axis, F, room=25)
    legend = mark_frames(axis, mean[0], caption.highlighted_frames)
    legend |= mark_averages(axis, F, caption.averages, large=True)
    columns = 1 if N <= 12 else 2 if N <= 24 else 3
    axis.legend(title="Layer", loc="center left", bbox_to_anchor=(1.01, 0.5), ncols=columns, fontsize=8)
    title = f"{capitalised(NAMES[caption.quantity])}, mean over {H} heads, {N} layers, {caption.subtitle}"
    label_figure(figure, [axis], title, LABELS[caption.quantity], legend)
    return figure


@styled
def layer_statistics(
    first: np.ndarray, middle: np.ndarray, last: np.ndarray, layers: Sequence[int], caption: Caption
) -> Figure:
    """Bars of the first, middle and last frame per layer: mean over heads of [N, H], whisker one standard
    deviation."""
    N, H = first.shape
    figure, axis = plt.subplots(figsize=(max(7.0, min(13.0, 2.5 + 0.45 * N)), 3.8))
    bars = [
        ("first key frame", first, BLUE),
        ("middle (all between)", middle, GREEN),
        ("last key frame", last, PURPLE),
    ]
    for i, (text, values, color) in enumerate(bars):
        axis.bar(
            np.arange(N) + (i - 1) * 0.27,
            values.mean(1),
            0.25,
            yerr=values.std(1),
            label=text,
            color=color,
            linewidth=0,
            error_kw={"elinewidth": 0.8, "ecolor": "0.3"},
            capsize=2 if N <= 12 else 0,
        )
    axis.axhline(0, color="0.4", linewidth=0.8)
    axis.set_xticks(np.arange(N), [str(layer) for layer in layers])
    axis.set(ylabel=LABELS[caption.quantity], xlim=(-0.6, N - 0.4))
    axis.grid(False, axis="x")
    legend = {str(h.get_label()): h for h in axis.get_legend_handles_labels()[0]}
    title = f"{capitalised(NAMES[caption.quantity])}, mean ± std over {H} heads, {caption.subtitle}"
    label_figure(figure, [axis], title, legend=legend, x="Layer")
    return figure
