"""Heads and layers: profiles, frame matrices, keys of a cache policy, words of the prompt, RoPE bands."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import offset_copy

import experiments.figures.style as st
from experiments.analysis.axes import AVERAGE, CHOSEN, EMPTY, NO_SLOT, KeyColumns
from experiments.analysis.panels import HeadPanel, ProfileMap
from experiments.caches.view import NOTHING, Caption
from experiments.figures.style import BLUE, DARK, GREEN, GREY, ORANGE, PURPLE, RED, styled

ROOM = 12  # points between axes and a title over the strip of averages
BARS_UP_TO = 60  # frames: gaps between more bars would be thinner than a pixel


@styled
def head_curves(
    panels: Sequence[HeadPanel], caption: Caption, pictures: Sequence[np.ndarray] | None = None
) -> Figure:
    """Draw Figure 4: a panel per head, tokens where known, a reference, pictures [h, w, 3] below."""
    figure, axes = st.panel_grid(len(panels), columns=2, size=(6.6, 3.5))
    legend: dict[str, Artist] = {}
    for axis, panel in zip(axes, panels, strict=True):
        _draw_profile(axis, panel, caption.quantity)
        name = f"{panel.label}: layer {panel.layer}, head {panel.head}"
        pad = None if panel.averages is None else ROOM
        axis.set_title(f"{name}, {st.NAMES[caption.quantity]}, {caption.subtitle}", pad=pad)
        axis.margins(y=0.12 if panel.reference is None else 0.18)
        marked = _draw_averages(axis, panel)
        F = len(panel.profile)
        tops = panel.profile if panel.curve is None else np.reshape(panel.curve, (F, -1)).max(1)
        if panel.reference is not None and panel.clipped is not None:
            _draw_reference(axis, panel.reference, panel.clipped, str(panel.agreement or ""))
            tops = np.fmax(tops, panel.reference)
        if np.isfinite(panel.profile).any():
            k = int(np.nanargmax(panel.profile))
            style: dict[str, Any] = {"textcoords": "offset points", "weight": "bold", "color": DARK}
            axis.annotate(f"max@{k}", (k, tops[k]), (0, 5), ha=_side(k, F), **style)
        legend |= st.handles(axis) | st.mark_frames(axis, panel.profile, caption.highlighted_frames) | marked
        if pictures and axis.xaxis.get_tick_params()["labelbottom"]:
            st.picture_strip(axis, pictures)
    st.label_figure(figure, axes, "", legend=legend)
    return figure


@styled
def one_head(panel: HeadPanel, caption: Caption) -> Figure:
    """Draw a head's profile over the key frames, highest and lowest frame annotated with their values."""
    F = len(panel.profile)
    figure, axis = plt.subplots(figsize=(max(7.0, min(12.0, 2.5 + 0.32 * F)), 3.6))
    _draw_profile(axis, panel, caption.quantity)
    axis.margins(y=0.16)
    marked = _draw_averages(axis, panel)
    if panel.no_preference is not None:
        style: dict[str, Any] = {"color": RED, "linewidth": 1, "linestyle": ":"}
        axis.axhline(panel.no_preference, label=f"no preference: {panel.no_preference:.3g}", **style)
    if np.isfinite(panel.profile).any():
        for name, find, up in (("max", np.nanargmax, 18), ("min", np.nanargmin, 30)):
            k = int(find(panel.profile))
            value = panel.profile[k]  # the frame's own value, not its highest token
            said: dict[str, Any] = {"va": "bottom", "ha": _side(k, F), "weight": "bold", "color": DARK}
            said["arrowprops"] = {"arrowstyle": "-", "color": DARK, "linewidth": 0.8}
            said["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1}
            said["textcoords"] = "offset points"
            axis.annotate(f"{name}@{k}: {value:.3g}", (k, value), (0, up), **said)
    legend = st.handles(axis) | st.mark_frames(axis, panel.profile, caption.highlighted_frames) | marked
    title = f"Layer {panel.layer}, head {panel.head}: {st.NAMES[caption.quantity]}, {caption.subtitle}"
    st.label_figure(figure, [axis], title, legend=legend)
    return figure


def head_titles(values: np.ndarray, text: str = "H{head}, Δ = {value:+.2f}") -> list[str]:
    """Return panel titles with a value [H] of each head; N/A for NaN."""
    titles = [text.format(head=head, value=value) for head, value in enumerate(values)]
    return [title.replace("+nan", "N/A").replace("nan", "N/A").replace("-", "−") for title in titles]


@styled
def head_grid(
    profiles: np.ndarray, titles: Sequence[str], caption: Caption, *, layer: int, note=""
) -> Figure:
    """Draw a small panel per row of profiles [n, F + averages], each on its own scale."""
    n, F = profiles.shape[0], profiles.shape[1] - caption.averages
    figure, axes = st.panel_grid(n, columns=4 if n <= 16 else 8, size=(2.9, 1.9) if n <= 16 else (2.2, 1.5))
    legend: dict[str, Artist] = {}
    for axis, values, title in zip(axes, profiles, titles, strict=True):
        if F <= BARS_UP_TO:
            axis.bar(np.arange(F), values[:F], width=0.85, color=BLUE, linewidth=0)
        else:
            axis.stairs(values[:F], np.arange(F + 1) - 0.5, fill=True, color=BLUE, linewidth=0)
        st.average_bars(axis, values[F:], F, width=0.85)
        axis.axhline(0, color="0.4", linewidth=0.6)
        axis.set_title(title, fontsize=9)
        axis.yaxis.set_major_locator(MaxNLocator(4))
        st.frame_axis(axis, F, room=8)
        legend |= st.mark_frames(axis, values, caption.highlighted_frames)
        legend |= st.mark_averages(axis, F, caption.averages)
    notes = f"{note}; scales differ" if note else "scales differ"
    title = f"Layer {layer}, {n} heads: {st.NAMES[caption.quantity]}, {caption.subtitle}; {notes}"
    st.label_figure(figure, axes, title, st.LABELS[caption.quantity], legend, f"Key frame ({caption.unit})")
    return figure


@styled
def sweep_curves(profiles: Mapping[str, np.ndarray], caption: Caption, names: Sequence[str]) -> Figure:
    """Draw a panel per head of profiles [atlases, F + averages]: mean, deviation (n − 1), each atlas."""
    figure, axes = st.panel_grid(len(profiles), columns=2, size=(6.6, 3.5))
    legend: dict[str, Any] = {}
    for axis, (title, values) in zip(axes, profiles.items(), strict=True):
        mean, frames, F = values.mean(0), np.arange(values.shape[1]), values.shape[1] - caption.averages
        axis.bar(frames[:F], mean[:F], width=0.8, color=BLUE, alpha=0.6, linewidth=0)
        st.average_bars(axis, mean[F:], F)
        for row in values:
            axis.plot(frames[:F], row[:F], color="0.35", linewidth=0.5)
        style: dict[str, Any] = {"fmt": "o", "color": DARK, "markersize": 3, "capsize": 2}
        legend["mean"] = axis.errorbar(frames, mean, values.std(0, ddof=1), **style)
        legend["mean"].set_label(f"mean ± standard deviation over {len(names)} atlases")
        axis.axhline(0, color="0.4", linewidth=0.8)
        axis.set_title(title, pad=ROOM if caption.averages else None)
        st.frame_axis(axis, F, room=25)
        legend |= st.mark_frames(axis, mean, caption.highlighted_frames)
        legend |= st.mark_averages(axis, F, caption.averages, large=True)
    note = f"grey lines: {', '.join(names)}" if len(names) <= 4 else "grey lines: each atlas"
    title = caption.subtitle[0].upper() + caption.subtitle[1:]
    st.label_figure(figure, axes, title, st.LABELS[caption.quantity], legend, note=note)
    return figure


def _draw_profile(axis: Axes, panel: HeadPanel, quantity: str) -> None:
    """Draw a profile per key frame, over its tokens where they are known."""
    F, label = len(panel.profile), "per key frame"
    if panel.curve is None:
        axis.bar(np.arange(F), panel.profile, width=0.8, color=BLUE, alpha=0.75, linewidth=0)
    else:
        label = "mean per key frame"
        edges = np.linspace(-0.5, F - 0.5, len(panel.curve) + 1)  # frame k covers k - 1/2 .. k + 1/2
        axis.stairs(panel.curve, edges, fill=True, color=BLUE, alpha=0.55, linewidth=0, label="per key token")
    axis.plot(np.arange(F), panel.profile, color=DARK, linewidth=1.2, marker="o", markersize=3, label=label)
    axis.axhline(0, color="0.4", linewidth=0.8)
    axis.set_ylabel((st.LABELS if panel.curve is None else st.TOKEN_LABELS)[quantity])
    st.frame_axis(axis, F, room=25)


def _draw_averages(axis: Axes, panel: HeadPanel) -> dict[str, Artist]:
    if panel.averages is None:
        return {}
    st.average_bars(axis, panel.averages, len(panel.profile))
    return st.mark_averages(axis, len(panel.profile), len(panel.averages), large=True)


def _draw_reference(axis: Axes, reference: np.ndarray, clipped: np.ndarray, agreement: str) -> None:
    frames = np.arange(len(reference))
    drawn = list(np.flatnonzero(~clipped))
    style: dict[str, Any] = {"linewidth": 1.2, "linestyle": "--", "marker": "D", "markersize": 3}
    axis.plot(frames, reference, color=RED, markevery=drawn, label="read off the paper", **style)
    if clipped.any():
        arrows: dict[str, Any] = {"color": RED, "linestyle": "", "marker": "^", "markersize": 7}
        axis.plot(frames[clipped], reference[clipped], label="cut off by the paper's plot", **arrows)
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5}
    said: dict[str, Any] = {"ha": "center", "va": "top", "color": RED, "weight": "bold", "bbox": box}
    axis.text(0.5, 0.98, agreement, transform=axis.transAxes, **said)


def _side(k: int, F: int) -> str:
    """Where the words of an annotation begin: near an edge they stay inside the axes."""
    return "left" if k < 0.06 * F else "right" if k > 0.94 * F else "center"


MARKS = {"sink": BLUE, "average": ORANGE, "memory": GREEN, "chosen tokens": PURPLE, "zeros": "0.45"}
SPECIAL = {AVERAGE: ("average", ORANGE), EMPTY: ("zeros", GREY), CHOSEN: ("chosen tokens", PURPLE)}
MIXED = -98  # position of a slot whose tokens stand at several ones
DASHED: dict[str, Any] = {"color": ORANGE, "linestyle": "--"}

# --- Layers compared: profiles averaged over heads, and first, middle and last frame


@styled
def layer_comparison(profiles: np.ndarray, layers: Sequence[int], caption: Caption) -> Figure:
    """Draw the mean over heads of profiles [N, H, F + averages] in a band: std, or middle 80 % of masses."""
    N, H, F = *profiles.shape[:2], profiles.shape[2] - caption.averages
    columns, size = (2, (5.0, 3.2)) if N <= 4 else (4, (2.9, 1.9)) if N <= 12 else (6, (2.3, 1.7))
    figure, axes = st.panel_grid(N, columns, size)
    legend: dict[str, Artist] = {}
    frames, marker = np.arange(F), "o" if F <= st.THIN_ABOVE else ""
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
        st.frame_axis(axis, F, room=25 if N <= 4 else 8)
        st.average_bars(axis, everything[:, F:].mean(0), F)
        legend |= st.mark_frames(axis, mean, caption.highlighted_frames)
        legend |= st.mark_averages(axis, F, caption.averages)
    scales = "; scales differ" if N > 1 else ""
    band = "mean ± std over" if caption.quantity == "mean_logit" else "mean and middle 80 % of"
    title = f"{st.NAMES[caption.quantity].capitalize()}, {band} {H} heads, {caption.subtitle}{scales}"
    st.label_figure(figure, axes, title, st.LABELS[caption.quantity], legend)
    return figure


@styled
def layers_together(profiles: np.ndarray, layers: Sequence[int], caption: Caption) -> Figure:
    """Draw the mean over heads of profiles [N, H, F + averages], every layer in one axes."""
    N, H, F = *profiles.shape[:2], profiles.shape[2] - caption.averages
    figure, axis = plt.subplots(figsize=(8.4, 4.0))
    colors = plt.get_cmap("viridis")(np.linspace(0, 0.92, N))
    mean, marker = profiles.mean(1), "o" if F <= st.THIN_ABOVE else ""
    for layer, values, color in zip(layers, mean, colors, strict=True):
        axis.plot(values[:F], marker=marker, markersize=2.5, linewidth=1.3, color=color, label=str(layer))
        axis.plot(np.arange(F, len(values)), values[F:], "o", markersize=2.5, color=color)
    axis.axhline(0, color="0.4", linewidth=0.6)
    st.frame_axis(axis, F, room=25)
    legend = st.mark_frames(axis, mean[0], caption.highlighted_frames)
    legend |= st.mark_averages(axis, F, caption.averages, large=True)
    columns = 1 if N <= 12 else 2 if N <= 24 else 3
    axis.legend(title="Layer", loc="center left", bbox_to_anchor=(1.01, 0.5), ncols=columns, fontsize=8)
    name = st.NAMES[caption.quantity].capitalize()
    title = f"{name}, mean over {H} heads, {N} layers, {caption.subtitle}"
    st.label_figure(figure, [axis], title, st.LABELS[caption.quantity], legend)
    return figure


@styled
def layer_statistics(
    first: np.ndarray, middle: np.ndarray, last: np.ndarray, layers: Sequence[int], caption: Caption
) -> Figure:
    """Draw bars of the first, middle and last frame per layer: mean and deviation over heads of [N, H]."""
    N, H = first.shape
    figure, axis = plt.subplots(figsize=(max(7.0, min(13.0, 2.5 + 0.45 * N)), 3.8))
    names = ("first key frame", "middle (all between)", "last key frame")
    style: dict[str, Any] = {"error_kw": {"elinewidth": 0.8, "ecolor": "0.3"}, "capsize": 2 if N <= 12 else 0}
    for i, (values, color) in enumerate(zip((first, middle, last), (BLUE, GREEN, PURPLE), strict=True)):
        style |= {"yerr": values.std(1), "label": names[i], "color": color, "linewidth": 0}
        axis.bar(np.arange(N) + (i - 1) * 0.27, values.mean(1), 0.25, **style)
    axis.axhline(0, color="0.4", linewidth=0.8)
    axis.set_xticks(np.arange(N), [str(layer) for layer in layers])
    axis.set(ylabel=st.LABELS[caption.quantity], xlim=(-0.6, N - 0.4))
    axis.grid(False, axis="x")
    title = f"{st.NAMES[caption.quantity].capitalize()}, mean ± std over {H} heads, {caption.subtitle}"
    st.label_figure(figure, [axis], title, legend=st.handles(axis), x="Layer")
    return figure


@styled
def frame_maps(
    matrices: np.ndarray,
    query_frames: Sequence[int],
    caption: Caption,
    *,
    layer: int,
    heads: Sequence[int] | None = None,
    keys: Sequence[str] | None = None,
    key_axis="frame",
) -> Figure:
    """Draw query × key frames of every head on one colour scale: matrices [H, rows, F + averages].

    A row per entry of query_frames. heads are their numbers, 0, 1, ... by default. keys are labels of columns
    that are not the frames 0, 1, ...; key_axis says whether they are frames or positions.
    """
    gone = caption.averages if keys is None else sum(label.startswith("μ") for label in keys)
    H, rows, F = matrices.shape[0], matrices.shape[1], matrices.shape[2] - gone
    heads = list(heads if heads is not None else range(H))
    which = f"{H} heads" if H > 1 else f"head {heads[0]}"
    title = f"Layer {layer}, {which}: {st.NAMES[caption.quantity]}, query × key frames, {caption.subtitle}"
    if not np.isfinite(matrices).any():
        figure, (axis,) = st.panel_grid(1, columns=1, size=(7.0, 1.0))
        axis.grid(False)
        axis.tick_params(bottom=False, labelbottom=False, left=False, labelleft=False)
        axis.add_patch(Rectangle((0, 0), 1, 1, transform=axis.transAxes, zorder=0, **st.HATCH))
        said: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "transform": axis.transAxes}
        box = {"facecolor": "white", "edgecolor": "none", "pad": 3}
        axis.text(0.5, 0.5, "absent:\nno frame matrix in this cache", bbox=box, **said)
        figure.suptitle(title)
        return figure
    square = rows > F / 2
    figure, axes = st.panel_grid(H, columns=4, size=(2.6, 2.3 if square else 1.8))
    colors, legend = st.color_scale(matrices, caption.quantity), st.grey_legend(matrices)
    labels = [*map(str, range(F))] if keys is None else keys
    for head, axis, values in zip(heads, axes, matrices, strict=True):
        image = st.heat_map(axis, values, equal=square, **colors)
        axis.set_title(f"H{head}" if H > 1 else "", fontsize=9)
        _label_keys(axis, labels)
        legend |= st.mark_averages(axis, F, gone)
        shown = st.ticks(rows, room=8)
        axis.set_yticks(shown, [str(query_frames[i]) for i in shown])
    for axis in axes[:: min(4, H)]:
        axis.set_ylabel(f"Query frame ({caption.unit})")
    shrink = min(1, 4 / figure.get_figheight())
    x = f"Key frame ({caption.unit})" if keys is None else _keys_label(key_axis, keys)
    st.color_bar(figure, image, axes, st.LABELS[caption.quantity], aspect=30, pad=0.02, shrink=shrink)
    st.label_figure(figure, axes, title, legend=legend, x=x)
    return figure


@styled
def compared_maps(
    matrices: Mapping[str, np.ndarray], heads: Sequence[int], quantity: str, *, title: str
) -> Figure:
    """Draw query × key frames, a row for each run (run -> [H, F, F]), a column for each of heads."""
    chosen = {name: values[list(heads)] for name, values in matrices.items()}
    every = np.stack(list(chosen.values()))  # [runs, heads, F, F]
    colors, size = st.color_scale(every, quantity), (1.2 + 1.8 * len(heads), 1.0 + 1.8 * len(chosen))
    grid: dict[str, Any] = {"squeeze": False, "sharex": True, "sharey": True, "figsize": size}
    figure, axes = plt.subplots(len(chosen), len(heads), **grid)
    shown = st.ticks(every.shape[-1], room=6)
    for row, (name, values) in zip(axes, chosen.items(), strict=True):
        for axis, matrix in zip(row, values, strict=True):
            image = st.heat_map(axis, matrix, equal=True, **colors)
            axis.set(xticks=shown, yticks=shown)
        row[0].set_ylabel(f"{name}\nQuery frame (latent)")
    for axis, head in zip(axes[0], heads, strict=True):
        axis.set_title(f"head {head}", fontsize=9)
    st.color_bar(figure, image, list(axes.flat), st.LABELS[quantity], aspect=30, pad=0.02)
    st.label_figure(figure, list(axes[-1]), title, legend=st.grey_legend(every))
    return figure


@styled
def all_heads(profiles: np.ndarray, caption: Caption, *, layer: int) -> Figure:
    """Draw a heat map heads × key frames of profiles [H, F + averages]; grey was not attended."""
    H, columns = profiles.shape
    F = columns - caption.averages
    figure, axis = plt.subplots(figsize=(max(7.0, min(12.0, 2.5 + 0.32 * columns)), max(2.6, 1.4 + 0.24 * H)))
    axis.grid(False)
    axis.set_facecolor(GREY)
    edges = np.arange(columns + 1) - 0.5, np.arange(H + 1) - 0.5
    colors = st.color_scale(profiles, caption.quantity) | {"edgecolors": "face", "linewidth": 0.2}
    mesh = axis.pcolormesh(*edges, np.ma.masked_invalid(profiles), **colors)
    st.frame_axis(axis, F, room=25)
    axis.set(ylabel="Head", xlim=(-0.5, F - 0.5), ylim=(H - 0.5, -0.5), yticks=st.ticks(H, room=20))
    st.color_bar(figure, mesh, axis, st.LABELS[caption.quantity], pad=0.02, aspect=30)
    legend = st.grey_legend(profiles) | st.mark_averages(axis, F, caption.averages, large=True)
    # A line above the axes: shading would change colours
    edge = offset_copy(axis.get_xaxis_transform(), figure, y=4, units="points")
    for text, frames in caption.highlighted_frames.items():
        span = [min(frames) - 0.5, max(frames) + 0.5]
        axis.axvline(span[0], linewidth=1.2, **DASHED)
        style: dict[str, Any] = {"color": ORANGE, "linewidth": 4, "solid_capstyle": "butt", "clip_on": False}
        (legend[text],) = axis.plot(span, [1, 1], transform=edge, label=text, **style)
    title = f"Layer {layer}, {H} heads: {st.NAMES[caption.quantity]}, {caption.subtitle}"
    st.label_figure(figure, [axis], title, legend=legend)
    return figure


@styled
def profile_heat_maps(
    panels: Sequence[ProfileMap],
    title: str,
    *,
    columns: int | None = None,
    highlighted_frames: Mapping[str, Sequence[int]] = NOTHING,
) -> Figure:
    """Draw a panel per map, a row per head; panels of one quantity share one colour scale."""
    shown = [(p, p.values) for p in panels if p.values is not None]
    H, F = shown[0][1].shape if shown else (1, 1)
    figure, axes, columns = _heat_panels(len(shown), H, F, columns, lowest=0.9, base=0.55)
    drawn = list(zip(axes, shown, strict=False))
    legend: dict[str, Artist] = {}
    for i, (axis, (panel, values)) in enumerate(drawn):
        axis.set_title(panel.title, fontsize=9)
        if i % columns == 0:
            axis.set_ylabel("Head")
        legend |= st.grey_legend(values)
        for text, frames in highlighted_frames.items():
            axis.axvline(min(frames) - 0.5, linewidth=1, **DASHED)
            legend[text] = Line2D([], [], label=f"from here: {text}", linewidth=1, **DASHED)
        axis.set_yticks(st.ticks(H, room=5))
        axis.set_xticks(st.ticks(values.shape[1] - panel.averages, room=8))
    for quantity in dict.fromkeys(panel.quantity for panel, _ in shown):
        _color(figure, [(axis, v) for axis, (panel, v) in drawn if panel.quantity == quantity], quantity)
    for axis, (panel, values) in drawn:
        legend |= st.mark_averages(axis, values.shape[1] - panel.averages, panel.averages)
    note = st.missing_note([(p.title, p.missing_reason) for p in panels if p.values is None])
    st.label_figure(figure, axes, title, legend=legend, note=note)
    return figure


@styled
def key_maps(panels: Mapping[str, KeyColumns], quantity: str, title: str) -> Figure:
    """Draw a panel per layer, a row per head; the strip above marks sinks, memories and choices."""
    every = list(panels.values())
    H, n = every[0].values.shape
    figure, axes, columns = _heat_panels(len(every), H, n, None, lowest=1.0, base=0.65)
    _color(figure, [(axis, one.values) for axis, one in zip(axes, every, strict=False)], quantity)
    legend: dict[str, Artist] = {}
    tall = max(1.0, 0.12 * H)
    for i, (axis, (name, one)) in enumerate(zip(axes, panels.items(), strict=False)):
        axis.set_title(name, fontsize=9)
        if i % columns == 0:
            axis.set_ylabel("Head")
        for column, mark in enumerate(one.marks):
            corner, color = (column - 0.5, -0.6 - tall), MARKS.get(mark, "white")
            axis.add_patch(Rectangle(corner, 1, tall, facecolor=color, linewidth=0))
        legend |= st.grey_legend(one.values)
        legend |= {mark: Patch(facecolor=MARKS[mark], label=mark) for mark in MARKS if mark in one.marks}
        axis.set_ylim(H - 0.5, -0.7 - tall)
        axis.set_yticks(st.ticks(H, room=5))
        _label_keys(axis, one.labels)
    st.label_figure(figure, axes, title, legend=legend, x=_keys_label(every[0].axis, every[0].labels))
    return figure


def _heat_panels(
    n: int, H: int, F: int, columns: int | None, lowest: float, base: float
) -> tuple[Figure, list[Axes], int]:
    """Make n panels of H rows and F columns; a lone row of panels is high enough for its colour bar."""
    columns = max(1, min(columns or (4 if n <= 12 else 6), n))
    width = max(2.0, min(3.4, 0.9 + 0.1 * F), 7.2 / columns)
    height = max(lowest if n > columns else 1.9, base + 0.065 * H)
    return *st.panel_grid(max(1, n), columns, (width, height)), columns


def _color(figure: Figure, panels: Sequence[tuple[Axes, np.ndarray]], quantity: str) -> None:
    """Draw panels of one quantity in one colour scale, with its bar."""
    everything = np.concatenate([values.ravel() for _, values in panels])
    colors = st.color_scale(everything, quantity, st.PERCENTILE)
    for axis, values in panels:
        image = st.heat_map(axis, values, **colors)
    bar: dict[str, Any] = {"pad": 0.02, "aspect": 30, "shrink": min(1.0, 3.5 / figure.get_figheight())}
    bar["extend"] = st.extend_of(everything, colors["vmin"], colors["vmax"])
    st.color_bar(figure, image, [axis for axis, _ in panels], st.LABELS[quantity], **bar)


def _label_keys(axis: Axes, labels: Sequence[str], room: int = 8) -> None:
    """Show some of the labels; averages, which stand together, have one."""
    averages = [n for n, label in enumerate(labels) if label.startswith("μ")]
    shown = {int(n): labels[int(n)] for n in st.ticks(len(labels) - len(averages), room)}
    if averages:
        shown[averages[len(averages) // 2]] = "μ"
    axis.set_xticks(list(shown), list(shown.values()))


def _keys_label(key_axis: str, labels: Sequence[str]) -> str:
    """Name the columns, for their axis."""
    if key_axis == "position":
        return "Temporal position"
    return "Key frame, μ averages" if labels and labels[-1].startswith("μ") else "Key frame (latent)"


@styled
def prompt_words(mass: np.ndarray, words: Sequence[str], *, layer: int, subtitle: str) -> Figure:
    """Draw the cross-attention mass [H, words] of every head on each word, and on the whole prompt."""
    H, n = mass.shape
    width = max(4, min(9, 0.42 * n))
    size: dict[str, Any] = {"width_ratios": [width, 1.6], "figsize": (3.6 + width, max(2.8, 1.6 + 0.2 * H))}
    figure, (left, right) = plt.subplots(1, 2, sharey=True, **size)
    colors = st.color_scale(mass, "mass", st.PERCENTILE)
    image = st.heat_map(left, mass, **colors)
    turned: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    left.set_xticks(np.arange(n), words, fontsize=9 if n <= 24 else 6, **turned)
    left.set(xlabel="Word of the prompt", ylabel="Head")
    left.set_yticks(st.ticks(H, room=20))
    extend = st.extend_of(mass, colors["vmin"], colors["vmax"])
    st.color_bar(figure, image, left, st.LABELS["mass"], pad=0.02, aspect=25, extend=extend)
    right.barh(np.arange(H), mass.sum(1), color=BLUE, height=0.8, linewidth=0)
    right.set(xlabel="on the whole prompt", xlim=(0, 1), ylim=(H - 0.5, -0.5))
    right.xaxis.set_major_locator(MaxNLocator(3))
    right.grid(False, axis="y")
    figure.suptitle(f"Layer {layer}: attention mass per prompt word, {subtitle}")
    return figure


@styled
def rope_bands(
    values: np.ndarray, names: Sequence[str], caption: Caption, *, layer: int, head: int
) -> Figure:
    """Draw what each RoPE band adds to a head's mean logits: values [F, bands]; and their sum."""
    F, bands = values.shape
    size = (max(7.0, min(12.0, 2.5 + 0.32 * F)), 3.0 + 0.2 * bands)
    ratios = [1, max(1.2, bands / 9)]
    figure, (above, below) = plt.subplots(2, 1, sharex=True, height_ratios=ratios, figsize=size)
    total = values.sum(-1)
    above.bar(np.arange(F), total, width=0.8, color=BLUE, alpha=0.75, linewidth=0)
    above.axhline(0, color="0.4", linewidth=0.8)
    above.set_ylabel("sum of all bands")
    top = max(float(np.nanmax(np.abs(values), initial=0)), 1e-9)
    below.grid(False)
    below.set_facecolor(GREY)
    edges = np.arange(F + 1) - 0.5, np.arange(bands + 1) - 0.5
    mesh = below.pcolormesh(*edges, np.ma.masked_invalid(values).T, cmap="RdBu_r", vmin=-top, vmax=top)
    below.set_yticks(np.arange(bands), names, fontsize=8)
    below.set_ylim(bands - 0.5, -0.5)
    st.color_bar(figure, mesh, below, st.LABELS["mean_logit"], pad=0.02)
    legend = st.mark_frames(above, total, caption.highlighted_frames)
    for marked in caption.highlighted_frames.values():
        below.axvline(min(marked) - 0.5, linewidth=1.2, **DASHED)
    st.frame_axis(below, F, room=25)
    below.set_xlim(-0.5, F - 0.5)
    above.tick_params(labelbottom=False)
    title = f"Layer {layer}, head {head}: mean logit by RoPE band, {caption.subtitle}"
    st.label_figure(figure, [below], title, legend=legend)
    return figure


def slot_map(frames: np.ndarray, positions: np.ndarray, num_frames: int, title: str) -> Figure:
    """Draw frames and positions [blocks, slots]: a cell a slot, coloured by frame, with its position."""
    blocks, slots = frames.shape
    cmap, shade = plt.get_cmap("viridis"), Normalize(0, max(1, num_frames - 1))
    with st.in_style():
        figure, ax = plt.subplots(figsize=(1.6 + 0.3 * slots, 1.1 + 0.26 * blocks))
        for block, slot in np.argwhere(frames != NO_SLOT).tolist():
            frame, position = int(frames[block, slot]), int(positions[block, slot])
            color = SPECIAL[frame][1] if frame < 0 else cmap(shade(frame))
            ax.add_patch(Rectangle((slot, block), 1, 1, facecolor=color, edgecolor="white", linewidth=0.5))
            if position >= 0:
                ink = "black" if frame < 0 or shade(frame) > 0.6 else "white"
                style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6, "color": ink}
                ax.text(slot + 0.5, block + 0.5, str(position), **style)
        ax.set(xlim=(0, slots), ylim=(blocks, 0), xlabel="Slot of the cache", ylabel="Block", title=title)
        ax.set_xticks(np.arange(slots) + 0.5, [str(slot) for slot in range(slots)], fontsize=7)
        ax.set_yticks(np.arange(blocks) + 0.5, [str(block) for block in range(blocks)], fontsize=7)
        ax.grid(False)
        figure.colorbar(ScalarMappable(shade, cmap), ax=ax, label="Latent frame in the slot")
        special = [(name, color) for code, (name, color) in SPECIAL.items() if code in frames]
        if special:
            patches = [Rectangle((0, 0), 1, 1, color=color, label=name) for name, color in special]
            figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=7)
    return figure


def last_block_attention(mass: np.ndarray, frames: np.ndarray, positions: np.ndarray, title: str) -> Figure:
    """Draw mass [H, slots] of the last block: heads over slots, named by frame and position."""
    codes, said = {AVERAGE: "avg", EMPTY: "0", CHOSEN: "tok"}, {MIXED: "", NO_SLOT: ""}
    pairs = zip(frames.tolist(), positions.tolist(), strict=True)
    labels = [codes.get(f, f"f{f}") + said.get(p, f"\n@{p}") for f, p in pairs]
    H, slots = mass.shape
    with st.in_style():
        figure, ax = plt.subplots(figsize=(1.8 + 0.34 * slots, 1.3 + 0.18 * H))
        image = ax.imshow(mass, aspect="auto", cmap="magma", vmin=0)
        ax.set(xlabel="Slot: frame @ temporal position", ylabel="Head", title=title)
        ax.set_xticks(range(slots), labels, fontsize=6)
        ax.set_yticks(range(H), [str(head) for head in range(H)], fontsize=7)
        ax.grid(False)
        figure.colorbar(image, ax=ax, label="Attention mass (share of 1)")
    return figure


def survival_map(kept: np.ndarray, title: str) -> Figure:
    """Draw kept [layers, F]: how much of each frame the last block still sees, layer by layer."""
    with st.in_style():
        figure, ax = plt.subplots(figsize=(1.8 + 0.2 * kept.shape[1], 1.2 + 0.2 * kept.shape[0]))
        image = ax.imshow(kept, aspect="auto", cmap="viridis", vmin=0, vmax=1)
        ax.set(xlabel="Latent frame", ylabel="Layer", title=title)
        ax.set_yticks(range(len(kept)))
        ax.grid(False)
        figure.colorbar(image, ax=ax, label="Share of its tokens kept")
    return figure
