"""Drawings of one layer, head by head: frame maps, sinks, one head and its extremes. Arrays in, Figure out.

As in experiments/figures/style.py: quantity, taken and shaded say what was measured, NaN was not attended. unit says which
frames the axes count, "latent" or "video".
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from experiments.figures.style import (
    BLUE,
    DARK,
    GREY,
    LABELS,
    NAMES,
    NONE,
    TOKEN_LABELS,
    Shaded,
    frame_axis,
    label_figure,
    mark_frames,
    panel_grid,
    say_absent,
    styled,
    ticks,
)


@styled
def frame_maps(
    matrices: np.ndarray,
    query_frames: Sequence[int],
    *,
    layer: int,
    quantity: str,
    taken: str,
    heads: Sequence[int] | None = None,
    unit: str = "latent",
) -> Figure:
    """Query × key frames of every head on one colour scale: matrices [H, rows, F], a row per entry of query_frames. heads
    are their numbers, 0, 1, ... by default. Logits are coloured symmetrically around 0, grey was not attended."""
    H, rows, F = matrices.shape
    heads = list(heads if heads is not None else range(H))
    title = f"Layer {layer}, {f'{H} heads' if H > 1 else f'head {heads[0]}'}: {NAMES[quantity]}, query × key frames, {taken}"
    if not np.isfinite(matrices).any():
        figure, (axis,) = panel_grid(1, columns=1, size=(7.0, 1.0))
        say_absent(axis, "no frame matrix in this cache", width=40)
        label_figure(figure, [], title)
        return figure
    square = rows > F / 2
    figure, axes = panel_grid(H, columns=4, size=(2.6, 2.3 if square else 1.8))
    colours = color_scale(matrices, quantity)
    for head, axis, values in zip(heads, axes, matrices, strict=True):
        image = heat_map(axis, values, equal=square, **colours)
        axis.set_title(f"H{head}" if H > 1 else "", fontsize=9)
        _frame_ticks(axis.xaxis, range(F))
        _frame_ticks(axis.yaxis, query_frames)
    for axis in axes[:: min(4, H)]:
        axis.set_ylabel(f"Query frame ({unit})")
    figure.colorbar(
        image, ax=axes, label=LABELS[quantity], aspect=30, pad=0.02, shrink=min(1, 4 / figure.get_figheight())
    )
    legend = (
        {"not attended": Patch(facecolor=GREY, label="not attended")} if np.isnan(matrices).any() else NONE
    )
    label_figure(figure, axes, title, legend=legend, x=f"Key frame ({unit})")
    return figure


@styled
def sink_grid(
    profiles: np.ndarray,
    sinks: np.ndarray,
    *,
    layer: int,
    quantity: str,
    taken: str,
    shaded: Shaded = NONE,
    unit: str = "latent",
) -> Figure:
    """One small panel per head of profiles [H, F], each on its own scale; sinks [H] = first − middle in the titles."""
    H = len(profiles)
    titles = [
        f"H{head} (sink={sink:.2f})" if np.isfinite(sink) else f"H{head} (sink=N/A)"
        for head, sink in enumerate(sinks)
    ]
    figure, axes, legend = _bars(profiles, titles, shaded)
    label_figure(
        figure,
        axes,
        f"Layer {layer}, {H} heads: {NAMES[quantity]}, {taken}; sink = first − middle; scales differ",
        LABELS[quantity],
        legend,
        x=f"Key frame ({unit})",
    )
    return figure


@styled
def head_grid(
    profiles: np.ndarray,
    heads: Sequence[int],
    *,
    layer: int,
    quantity: str,
    taken: str,
    shaded: Shaded = NONE,
) -> Figure:
    """Some heads side by side, 2 × 4 of them: profiles [n, F] of the heads so numbered, each on its own scale."""
    figure, axes, legend = _bars(profiles, [f"H{head}" for head in heads], shaded)
    label_figure(
        figure, axes, f"Layer {layer}: {NAMES[quantity]}, {taken}; scales differ", LABELS[quantity], legend
    )
    return figure


@styled
def one_head(
    profile: np.ndarray,
    curve: np.ndarray | None,
    *,
    layer: int,
    head: int,
    quantity: str,
    taken: str,
    shaded: Shaded = NONE,
) -> Figure:
    """A head's profile [F] over the key frames, highest and lowest frame annotated with their values; filled per key
    token where the curve [F·S] is known."""
    F = len(profile)
    figure, axis = plt.subplots(figsize=(max(7.0, min(12.0, 2.5 + 0.32 * F)), 3.6))
    if curve is not None:
        axis.stairs(
            curve,
            np.linspace(-0.5, F - 0.5, len(curve) + 1),
            fill=True,
            color=BLUE,
            alpha=0.55,
            linewidth=0,
            label="per key token",
        )
    else:
        axis.bar(np.arange(F), profile, width=0.8, color=BLUE, alpha=0.75, linewidth=0)
    axis.plot(
        np.arange(F),
        profile,
        color=DARK,
        linewidth=1.2,
        marker="o",
        markersize=3,
        label="per key frame" if curve is None else "mean per key frame",
    )
    axis.axhline(0, color="0.4", linewidth=0.8)
    axis.margins(y=0.16)
    tokens = np.full((F, 1), -np.inf) if curve is None else np.reshape(curve, (F, -1))
    if np.isfinite(profile).any():
        for name, k in (("max", int(np.nanargmax(profile))), ("min", int(np.nanargmin(profile)))):
            side = "left" if k < 0.06 * F else "right" if k > 0.94 * F else "center"
            axis.annotate(
                f"{name}@{k}: {profile[k]:.3g}",
                (k, max(profile[k], np.nanmax(tokens[k]))),
                (0, 6),
                textcoords="offset points",
                ha=side,
                weight="bold",
                color=DARK,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1},
            )
    frame_axis(axis, F, room=25)
    axis.set_ylabel((LABELS if curve is None else TOKEN_LABELS)[quantity])
    legend = {h.get_label(): h for h in axis.get_legend_handles_labels()[0]} | mark_frames(
        axis, profile, shaded
    )
    label_figure(figure, [axis], f"Layer {layer}, head {head}: {NAMES[quantity]}, {taken}", legend=legend)
    return figure


def color_scale(values: np.ndarray, quantity: str, percentile: float = 100) -> dict:
    """Colours for values of a quantity: red and blue around 0 for logits, viridis from 0 for masses and probabilities.

    percentile of their size is where the colours end: a few heads of the real model would leave all others pale.
    """
    top = max(float(np.nanpercentile(np.abs(values), percentile)), 1e-12)
    return (
        {"cmap": "RdBu_r", "vmin": -top, "vmax": top}
        if quantity == "mean_logit"
        else {"cmap": "viridis", "vmin": 0.0, "vmax": top}
    )


def heat_map(axis: Axes, values: np.ndarray, equal: bool = False, **colours):
    """Values [rows, columns] as one image, cell i, j centred on (j, i); grey where NaN."""
    axis.grid(False)
    axis.set_facecolor(GREY)
    return axis.imshow(
        np.ma.masked_invalid(values), interpolation="nearest", aspect="equal" if equal else "auto", **colours
    )


def _bars(profiles: np.ndarray, titles: Sequence[str], shaded: Shaded) -> tuple[Figure, list[Axes], Mapping]:
    n, F = profiles.shape
    figure, axes = panel_grid(n, columns=4, size=(2.9, 1.9) if n <= 16 else (2.9, 1.5))
    legend = {}
    for axis, values, title in zip(axes, profiles, titles, strict=True):
        if F <= 60:
            axis.bar(np.arange(F), values, width=0.85, color=BLUE, linewidth=0)
        else:  # gaps between bars would be thinner than a pixel
            axis.stairs(values, np.arange(F + 1) - 0.5, fill=True, color=BLUE, linewidth=0)
        axis.axhline(0, color="0.4", linewidth=0.6)
        axis.set_title(title, fontsize=9)
        axis.yaxis.set_major_locator(MaxNLocator(4))
        frame_axis(axis, F, room=8)
        legend |= mark_frames(axis, values, shaded)
    return figure, axes, legend


def _frame_ticks(axis, frames: Sequence[int]) -> None:
    shown = ticks(len(frames), room=8)
    axis.set_ticks(shown, [str(frames[i]) for i in shown])
