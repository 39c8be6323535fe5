"""One layer as heat maps: heads × key frames, and query × key frames of every head."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import offset_copy

from experiments.analysis.axes import KeyColumns
from experiments.caches.view import Caption
from experiments.figures.style import (
    BLUE,
    GREEN,
    GREY,
    LABELS,
    NAMES,
    ORANGE,
    PURPLE,
    THIN_ABOVE,
    average_bars,
    capitalised,
    color_bar,
    color_scale,
    extend_of,
    frame_axis,
    grey_legend,
    heat_map,
    in_style,
    label_figure,
    mark_averages,
    mark_frames,
    mark_missing,
    panel_grid,
    styled,
    ticks,
)


# --- Layers compared: profiles averaged over heads, and first, middle and last frame
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


# --- The same heads of several runs under each other: query × key frames on one colour scale
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


# --- Heads × keys of every layer, along frames or temporal positions; sinks, memories and choices are marked
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


# --- One layer as heat maps: heads × key frames, and query × key frames of every head
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


# --- What a cache policy keeps: slot over block, coloured by frame; the last block's attention to it
SPECIAL = {-1: ("average", ORANGE), -2: ("zeros", GREY), -3: ("chosen tokens", PURPLE)}
NO_SLOT, MIXED = -9, -98


def slot_map(frames: np.ndarray, positions: np.ndarray, num_frames: int, title: str) -> Figure:
    """frames and positions [blocks, slots] -> a cell a slot, coloured by frame, its position written in.

    Averages, zeros and chosen tokens, which are of no single frame, have colours of their own.
    """
    blocks, slots = frames.shape
    with in_style():
        figure, ax = plt.subplots(figsize=(1.6 + 0.3 * slots, 1.1 + 0.26 * blocks))
        colours = plt.get_cmap("viridis")
        shade = Normalize(0, max(1, num_frames - 1))
        for block in range(blocks):
            for slot in range(slots):
                _cell(ax, slot, block, int(frames[block, slot]), int(positions[block, slot]), colours, shade)
        ax.set(xlim=(0, slots), ylim=(blocks, 0), xlabel="Slot of the cache", ylabel="Block", title=title)
        ax.set_xticks(np.arange(slots) + 0.5, [str(slot) for slot in range(slots)], fontsize=7)
        ax.set_yticks(np.arange(blocks) + 0.5, [str(block) for block in range(blocks)], fontsize=7)
        ax.grid(False)
        bar = plt.cm.ScalarMappable(shade, colours)
        figure.colorbar(bar, ax=ax, label="Latent frame in the slot")
        _legend(figure, frames)
    return figure


def _cell(ax: Axes, slot: int, block: int, frame: int, position: int, colours, shade) -> None:
    if frame == NO_SLOT:
        return
    colour = SPECIAL[frame][1] if frame < 0 else colours(shade(frame))
    ax.add_patch(Rectangle((slot, block), 1, 1, facecolor=colour, edgecolor="white", linewidth=0.5))
    if position >= 0:
        bright = frame >= 0 and shade(frame) > 0.6
        ax.text(
            slot + 0.5, block + 0.5, str(position), ha="center", va="center", fontsize=6,
            color="black" if bright or frame < 0 else "white",
        )  # fmt: skip


def _legend(figure: Figure, frames: np.ndarray) -> None:
    shown = [
        Rectangle((0, 0), 1, 1, color=c, label=name) for code, (name, c) in SPECIAL.items() if code in frames
    ]
    if shown:
        figure.legend(handles=shown, loc="outside lower center", ncols=len(shown), fontsize=7)


def last_block_attention(mass: np.ndarray, frames: np.ndarray, positions: np.ndarray, title: str) -> Figure:
    """mass [H, slots] of the last block -> heads over slots, named by frame and position."""
    codes = {-1: "avg", -2: "0", -3: "tok"}
    labels = [
        codes.get(int(f), f"f{f}") + ("" if p in (MIXED, NO_SLOT) else f"\n@{p}")
        for f, p in zip(frames, positions, strict=True)
    ]
    with in_style():
        figure, ax = plt.subplots(figsize=(1.8 + 0.34 * mass.shape[1], 1.3 + 0.18 * mass.shape[0]))
        image = ax.imshow(mass, aspect="auto", cmap="magma", vmin=0)
        ax.set(xlabel="Slot: frame @ temporal position", ylabel="Head", title=title)
        ax.set_xticks(range(mass.shape[1]), labels, fontsize=6)
        ax.set_yticks(range(mass.shape[0]), [str(head) for head in range(mass.shape[0])], fontsize=7)
        ax.grid(False)
        figure.colorbar(image, ax=ax, label="Attention mass (share of 1)")
    return figure


def survival_map(kept: np.ndarray, title: str) -> Figure:
    """kept [layers, F] -> how much of each frame the last block still sees, layer by layer."""
    with in_style():
        figure, ax = plt.subplots(figsize=(1.8 + 0.2 * kept.shape[1], 1.2 + 0.2 * kept.shape[0]))
        image = ax.imshow(kept, aspect="auto", cmap="viridis", vmin=0, vmax=1)
        ax.set(xlabel="Latent frame", ylabel="Layer", title=title)
        ax.set_yticks(range(len(kept)))
        ax.grid(False)
        figure.colorbar(image, ax=ax, label="Share of its tokens kept")
    return figure
