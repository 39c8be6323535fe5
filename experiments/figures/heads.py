"""Arrays in, matplotlib Figure out, in one style. Nothing here reads a file or prints; save_svg writes one.

Every drawing function takes, beside its arrays, what was measured: quantity (mean_logit, mass, mean_prob), taken (pass
and queries, for titles) and shaded (legend text -> key frames to mark, such as those that are noise in that pass).
NaN was not attended. Titles are single lines: an SVG's own font is centred right only then.
"""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import offset_copy

from experiments.analysis.panels import HeadPanel
from experiments.figures.style import (
    BLUE,
    DARK,
    GREEN,
    GREY,
    LABELS,
    NAMES,
    NONE,
    ORANGE,
    PURPLE,
    RED,
    THIN_ABOVE,
    TOKEN_LABELS,
    Shaded,
    _capital,
    frame_axis,
    label_figure,
    mark_frames,
    panel_grid,
    styled,
    ticks,
)


@styled
def head_curves(panels: Sequence[HeadPanel], *, quantity: str, taken: str, shaded: Shaded = NONE) -> Figure:
    """Figure 4: one panel per head. Filled per key token where the curve is known, as in the paper, and the mean of
    each key frame on it; else a bar per key frame. The highest frame is annotated. A reference is drawn over it, with an
    arrow where its own figure cut it off."""
    figure, axes = panel_grid(len(panels), columns=2, size=(6.6, 3.5))
    legend = {}
    for axis, panel in zip(axes, panels, strict=True):
        F = len(panel.profile)
        frames = np.arange(F)
        if panel.curve is not None:
            edges = np.linspace(-0.5, F - 0.5, len(panel.curve) + 1)  # frame k covers k - 1/2 .. k + 1/2
            axis.stairs(
                panel.curve, edges, fill=True, color=BLUE, alpha=0.55, linewidth=0, label="per key token"
            )
        else:
            axis.bar(frames, panel.profile, width=0.8, color=BLUE, alpha=0.75, linewidth=0)
        axis.plot(
            frames,
            panel.profile,
            color=DARK,
            linewidth=1.2,
            marker="o",
            markersize=3,
            label="per key frame" if panel.curve is None else "mean per key frame",
        )
        axis.axhline(0, color="0.4", linewidth=0.8)
        axis.set_title(f"{panel.label}: layer {panel.layer}, head {panel.head}, {NAMES[quantity]}, {taken}")
        axis.set_ylabel((LABELS if panel.curve is None else TOKEN_LABELS)[quantity])
        axis.margins(y=0.12)
        _overlay(axis, panel)
        if np.isfinite(panel.profile).any():
            k = int(np.nanargmax(panel.profile))
            top = panel.profile[k] if panel.curve is None else np.split(panel.curve, F)[k].max()
            top = top if panel.reference is None else np.fmax(top, panel.reference[k])
            side = "left" if k < 0.06 * F else "right" if k > 0.94 * F else "center"
            axis.annotate(
                f"max@{k}", (k, top), (0, 5), textcoords="offset points", ha=side, weight="bold", color=DARK
            )
        frame_axis(axis, F, room=25)
        legend |= {h.get_label(): h for h in axis.get_legend_handles_labels()[0]} | mark_frames(
            axis, panel.profile, shaded
        )
    label_figure(figure, axes, "", legend=legend)
    return figure


def _overlay(axis: Axes, panel: HeadPanel) -> None:
    """The reference of a panel and the words about it, in room made for them at the top."""
    if panel.reference is None:
        return
    frames, cut = np.arange(len(panel.reference)), panel.clipped
    axis.plot(
        frames,
        panel.reference,
        color=RED,
        linewidth=1.2,
        linestyle="--",
        marker="D",
        markersize=3,
        markevery=list(np.flatnonzero(~cut)),
        label="read off the paper",
    )
    if cut.any():
        axis.plot(
            frames[cut],
            panel.reference[cut],
            color=RED,
            linestyle="",
            marker="^",
            markersize=7,
            label="cut off by the paper's plot",
        )
    axis.margins(y=0.18)
    axis.text(
        0.5,
        0.98,
        panel.agreement,
        transform=axis.transAxes,
        ha="center",
        va="top",
        color=RED,
        weight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5},
    )


@styled
def per_head_grid(
    profiles: np.ndarray, delta: np.ndarray, *, layer: int, quantity: str, taken: str, shaded: Shaded = NONE
) -> Figure:
    """One small panel per head of profiles [H, F], each on its own scale; delta [H] = first - middle in the titles."""
    H, F = profiles.shape
    figure, axes = panel_grid(H, columns=4 if H <= 16 else 8, size=(2.9, 1.9) if H <= 16 else (2.2, 1.5))
    legend = {}
    for head, axis in enumerate(axes):
        axis.bar(np.arange(F), profiles[head], width=0.85, color=BLUE, linewidth=0)
        axis.axhline(0, color="0.4", linewidth=0.6)
        number = f"{delta[head]:+.2f}".replace("-", "−") if np.isfinite(delta[head]) else "N/A"
        axis.set_title(f"H{head}, Δ = {number}", fontsize=9)
        axis.yaxis.set_major_locator(MaxNLocator(4))
        frame_axis(axis, F, room=8)
        legend |= mark_frames(axis, profiles[head], shaded)
    label_figure(
        figure,
        axes,
        f"Layer {layer}, {H} heads: {NAMES[quantity]}, {taken}; Δ = first − middle; scales differ",
        LABELS[quantity],
        legend,
    )
    return figure


@styled
def all_heads(
    profiles: np.ndarray, *, layer: int, quantity: str, taken: str, shaded: Shaded = NONE
) -> Figure:
    """Heat map heads x key frames of profiles [H, F]; grey was not attended."""
    H, F = profiles.shape
    figure, axis = plt.subplots(figsize=(max(7.0, min(12.0, 2.5 + 0.32 * F)), max(2.6, 1.4 + 0.24 * H)))
    axis.grid(False)
    axis.set_facecolor(GREY)
    mesh = axis.pcolormesh(
        np.arange(F + 1) - 0.5,
        np.arange(H + 1) - 0.5,
        np.ma.masked_invalid(profiles),
        cmap="viridis",
        edgecolors="face",
        linewidth=0.2,
    )
    frame_axis(axis, F, room=25)
    axis.set(ylabel="Head", xlim=(-0.5, F - 0.5), ylim=(H - 0.5, -0.5), yticks=ticks(H, room=20))
    figure.colorbar(mesh, ax=axis, label=LABELS[quantity], pad=0.02, aspect=30)
    legend = {"not attended": Patch(facecolor=GREY, label="not attended")} if np.isnan(profiles).any() else {}
    edge = offset_copy(
        axis.get_xaxis_transform(), figure, y=4, units="points"
    )  # a shade would change the colours
    for text, frames in shaded.items():
        span = [min(frames) - 0.5, max(frames) + 0.5]
        axis.axvline(span[0], color=ORANGE, linewidth=1.2, linestyle="--")
        legend[text] = axis.plot(
            span,
            [1, 1],
            color=ORANGE,
            linewidth=4,
            solid_capstyle="butt",
            clip_on=False,
            transform=edge,
            label=text,
        )[0]
    label_figure(figure, [axis], f"Layer {layer}, {H} heads: {NAMES[quantity]}, {taken}", legend=legend)
    return figure


@styled
def layer_comparison(
    profiles: np.ndarray, layers: Sequence[int], *, quantity: str, taken: str, shaded: Shaded = NONE
) -> Figure:
    """Mean over heads and one standard deviation either side of profiles [N, H, F], a panel per layer on its own scale:
    the logits of the real model's last layers would flatten all others."""
    N, H, F = profiles.shape
    columns, size = (2, (5.0, 3.2)) if N <= 4 else (4, (2.9, 1.9)) if N <= 12 else (6, (2.3, 1.7))
    figure, axes = panel_grid(N, columns, size)
    legend = {}
    for axis, layer, values in zip(axes, layers, profiles, strict=True):
        mean, std = values.mean(0), values.std(0)
        axis.bar(
            np.arange(F), 2 * std, 0.8, mean - std, color=BLUE, alpha=0.3, linewidth=0
        )  # a frame alone shows too
        axis.plot(
            np.arange(F), mean, color=BLUE, linewidth=1.5, marker="o" if F <= THIN_ABOVE else "", markersize=2
        )
        axis.axhline(0, color="0.4", linewidth=0.6)
        axis.set_title(f"Layer {layer}")
        axis.yaxis.set_major_locator(MaxNLocator(6 if N <= 4 else 4))
        frame_axis(axis, F, room=25 if N <= 4 else 8)
        legend |= mark_frames(axis, mean, shaded)
    scales = "; scales differ" if N > 1 else ""
    label_figure(
        figure,
        axes,
        f"{_capital(NAMES[quantity])}, mean ± std over {H} heads, {taken}{scales}",
        LABELS[quantity],
        legend,
    )
    return figure


@styled
def layer_statistics(
    first: np.ndarray,
    middle: np.ndarray,
    last: np.ndarray,
    layers: Sequence[int],
    *,
    quantity: str,
    taken: str,
) -> Figure:
    """Bars of the first, middle and last frame per layer: mean over heads of [N, H], whisker one standard deviation."""
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
    axis.set(ylabel=LABELS[quantity], xlim=(-0.6, N - 0.4))
    axis.grid(False, axis="x")
    legend = {h.get_label(): h for h in axis.get_legend_handles_labels()[0]}
    label_figure(
        figure,
        [axis],
        f"{_capital(NAMES[quantity])}, mean ± std over {H} heads, {taken}",
        legend=legend,
        x="Layer",
    )
    return figure
