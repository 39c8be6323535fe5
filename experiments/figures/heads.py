"""Heads and layers: profiles, frame matrices, keys of a cache policy, words of the prompt, RoPE bands."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize, to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

import experiments.figures.style as st
from experiments.analysis.axes import NO_SLOT, SPECIAL, KeyColumns
from experiments.analysis.panels import BlockPanel, HeadPanel, PartsPanel, ProfileMap
from experiments.caches.view import NOTHING, Caption
from experiments.figures.style import BLUE, DARK, GREEN, GREY, ORANGE, PURPLE, RED, styled

ROOM = 8  # points between axes and a title over the strip of averages
BARS_UP_TO = 60  # frames: gaps between more bars would be thinner than a pixel
MARKERS_UP_TO = 25
SHOWN = 18  # first query frame of the block to point out: the paper's figure shows 18–20 alone
MIXED = -98  # position of a slot whose tokens stand at several ones
MARKS = {"sink": BLUE, "average": ORANGE, "memory": GREEN, "chosen tokens": PURPLE, "zeros": "0.45"}
DASHED: dict[str, Any] = {"color": ORANGE, "linestyle": "--"}

# --- Profiles over key frames


@styled
def head_curves(
    panels: Sequence[HeadPanel],
    caption: Caption,
    pictures: Sequence[np.ndarray] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw Figure 4: a panel per head, tokens where known, a reference, pictures [h, w, 3] below."""
    figure, axes = st.panels(len(panels), columns=2, size=(4.5, 2.6))
    legend: dict[str, Artist] = {}
    for axis, panel in zip(axes, panels, strict=True):
        # 1. The profile over its tokens, with room for the highest of both curves
        F, named = len(panel.profile), f"{panel.label}: layer {panel.layer}, head {panel.head}"
        tops = panel.profile if panel.curve is None else np.reshape(panel.curve, (F, -1)).max(1)
        if panel.reference is not None and panel.clipped is not None:
            tops = np.fmax(tops, panel.reference)
            named += f"\n{panel.agreement or ''}"
        marked = _draw_profile(axis, panel, caption, named)
        # 2. What it is compared with: equal attention to all keys, and the published curve
        if panel.no_preference is not None:
            label = f"no preference: {panel.no_preference:.3g}"
            axis.axhline(panel.no_preference, label=label, color=RED, linewidth=1, linestyle=":")
        if panel.reference is not None and panel.clipped is not None:
            keys, kept = np.arange(F), list(np.flatnonzero(~panel.clipped))
            line: dict[str, Any] = {"linewidth": 1.2, "linestyle": "--", "marker": "D", "markersize": 3}
            axis.plot(keys, panel.reference, color=RED, markevery=kept, label="read off the paper", **line)
            if panel.clipped.any():
                arrows: dict[str, Any] = {"color": RED, "linestyle": "", "marker": "^", "markersize": 7}
                cut = keys[panel.clipped], panel.reference[panel.clipped]
                axis.plot(*cut, label="cut off by the paper's plot", **arrows)
        # 3. Name the highest frame, above the highest token around it
        if np.isfinite(panel.profile).any():
            k, around = int(np.nanargmax(panel.profile)), max(2, F // 8)
            top = np.nanmax(tops[max(0, k - around) : k + around + 1])
            side = "left" if k < 0.1 * F else "right" if k > 0.9 * F else "center"  # stays inside the axes
            style: dict[str, Any] = {"textcoords": "offset points", "weight": "bold", "color": DARK}
            said = f"max@{k}" if len(panels) > 1 else f"max@{k}: {panel.profile[k]:.3g}"
            axis.annotate(said, (k, top), (0, 5), ha=side, **style)
            axis.plot(k, panel.profile[k], "o", color=DARK, markersize=5, markerfacecolor="white")
        axis.margins(y=0.18)
        legend |= st.handles(axis) | marked
        if pictures and axis.xaxis.get_tick_params()["labelbottom"]:
            st.picture_strip(axis, pictures)
    title = title or f"{st.NAMES[caption.quantity].capitalize()} of single heads"
    st.label_figure(figure, axes, title, caption.about, legend=legend)
    return figure


def _draw_profile(axis: Axes, panel: HeadPanel, caption: Caption, title="") -> dict[str, Artist]:
    """Draw a profile per key frame, over its tokens where they are known -> the legend of its marks."""
    F, label = len(panel.profile), "per key frame"
    if panel.curve is None:
        axis.bar(np.arange(F), panel.profile, width=0.8, color=BLUE, alpha=0.75, linewidth=0)
    else:
        label = "mean per key frame"
        edges = np.linspace(-0.5, F - 0.5, len(panel.curve) + 1)  # frame k covers k - 1/2 .. k + 1/2
        named = f"mean of {panel.group} key tokens" if panel.group > 1 else "per key token"
        axis.stairs(panel.curve, edges, fill=True, color=BLUE, alpha=0.55, linewidth=0, label=named)
    # The mean of a frame stands in its middle, over tokens of k - 1/2 .. k + 1/2
    axis.plot(np.arange(F), panel.profile, color=DARK, linewidth=1.2, marker="o", markersize=3, label=label)
    axis.set_ylabel((st.LABELS if panel.curve is None else st.TOKEN_LABELS)[caption.quantity])
    gone = np.empty(0) if panel.averages is None else panel.averages
    return _on_frames(axis, panel.profile, gone, caption, title)


def _on_frames(
    axis: Axes, profile: np.ndarray, gone: np.ndarray, caption: Caption, title=""
) -> dict[str, Artist]:
    """Finish a panel of a profile [F] and of averages of gone frames -> the legend of its marks."""
    axis.axhline(0, color="0.4", linewidth=0.8)
    axis.set_title(title, pad=ROOM if len(gone) else None)
    axis.set(xlim=(-0.6, len(profile) - 0.4), xticks=range(len(profile)))
    legend: dict[str, Artist] = {}
    for text, frames in caption.highlighted_frames.items():
        axis.axvspan(min(frames) - 0.5, max(frames) + 0.5, zorder=0, **st.SHADE)
        legend[text] = Patch(**st.SHADE, label=text)
    # Runs of frames that were not attended: one hatched area each
    missing = np.flatnonzero(np.isnan(profile))
    for run in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1) if len(missing) else []:
        axis.axvspan(run[0] - 0.5, run[-1] + 0.5, zorder=0, **st.HATCH)
        legend[st.NOT_ATTENDED] = Patch(**st.HATCH, label=st.NOT_ATTENDED)
    return legend | st.mark_averages(axis, len(profile), len(gone), gone)


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
    figure, axes = st.panels(n, columns=4 if n <= 16 else 6, size=(2.5, 1.4))
    legend: dict[str, Artist] = {}
    for axis, values, title in zip(axes, profiles, titles, strict=True):
        # [F + averages]
        if F <= BARS_UP_TO:
            axis.bar(np.arange(F), values[:F], width=0.85, color=BLUE, linewidth=0)
        else:
            axis.stairs(values[:F], np.arange(F + 1) - 0.5, fill=True, color=BLUE, linewidth=0)
        axis.yaxis.set_major_locator(MaxNLocator(3))
        legend |= _on_frames(axis, values[:F], values[F:], caption, title)
    title = f"Layer {layer}, {n} heads: {st.NAMES[caption.quantity]}; {note}{'; ' * bool(note)}scales differ"
    x, y = f"Key frame ({caption.unit})", st.LABELS[caption.quantity]
    st.label_figure(figure, axes, title, caption.about, y, legend, x)
    return figure


@styled
def sweep_curves(profiles: Mapping[str, np.ndarray], caption: Caption, names: Sequence[str]) -> Figure:
    """Draw a panel per head of profiles [atlases, F + averages]: mean, deviation (n − 1), each atlas."""
    few = len(profiles) <= 4
    figure, axes = st.panels(len(profiles), columns=2 if few else 4, size=(4.5, 2.4) if few else (2.5, 1.4))
    legend: dict[str, Any] = {}
    for axis, (title, values) in zip(axes, profiles.items(), strict=True):
        # [atlases, F + averages] -> [F + averages]
        mean, frames, F = values.mean(0), np.arange(values.shape[1]), values.shape[1] - caption.averages
        axis.bar(frames[:F], mean[:F], width=0.8, color=BLUE, alpha=0.6, linewidth=0)
        axis.plot(frames[:F], values[:, :F].T, color="0.35", linewidth=0.5)
        style: dict[str, Any] = {"fmt": "o", "color": DARK, "markersize": 3, "capsize": 2 * few}
        legend["mean"] = axis.errorbar(frames, mean, values.std(0, ddof=1), **style)
        legend["mean"].set_label(f"mean ± standard deviation over {len(names)} atlases")
        legend |= _on_frames(axis, mean[:F], mean[F:], caption, title)
    note = f"grey lines: {', '.join(names)}" if len(names) <= 4 else "grey lines: each atlas"
    title = f"{st.NAMES[caption.quantity].capitalize()} over {len(names)} atlases"
    st.label_figure(figure, axes, title, caption.about, st.LABELS[caption.quantity], legend, note=note)
    return figure


@styled
def layer_comparison(profiles: np.ndarray, layers: Sequence[int], caption: Caption) -> Figure:
    """Draw the mean over heads of profiles [N, H, F + averages] in a band: std, or middle 80 % of masses."""
    N, H, F = *profiles.shape[:2], profiles.shape[2] - caption.averages
    columns, size = (2, (4.5, 2.2)) if N <= 4 else (4, (2.2, 1.4)) if N <= 12 else (6, (1.7, 1.2))
    figure, axes = st.panels(N, columns, size)
    legend: dict[str, Artist] = {}
    frames, marker = np.arange(F), "o" if F <= MARKERS_UP_TO else ""
    for axis, layer, everything in zip(axes, layers, profiles, strict=True):
        # Masses are skewed: a deviation around their mean would go below 0
        values, mean = everything[:, :F], everything.mean(0)
        if caption.quantity == "mean_logit":
            std = values.std(0)
            axis.bar(frames, 2 * std, 0.8, mean[:F] - std, color=BLUE, alpha=0.3, linewidth=0)
            axis.use_sticky_edges = False  # else the lowest bar touches the frame, as if it were cut off
        else:
            low, high = np.quantile(values, [0.1, 0.9], axis=0)
            axis.fill_between(frames, low, high, color=BLUE, alpha=0.3, linewidth=0)
        axis.plot(frames, mean[:F], color=BLUE, linewidth=1.3, marker=marker, markersize=2)
        axis.yaxis.set_major_locator(MaxNLocator(6 if N <= 4 else 3))
        legend |= _on_frames(axis, mean[:F], mean[F:], caption, f"Layer {layer}")
    scales = "; scales differ" if N > 1 else ""
    band = "mean ± std over" if caption.quantity == "mean_logit" else "mean and middle 80 % of"
    title = f"{st.NAMES[caption.quantity].capitalize()}, {band} {H} heads{scales}"
    st.label_figure(figure, axes, title, caption.about, st.LABELS[caption.quantity], legend)
    return figure


@styled
def layers_together(profiles: np.ndarray, layers: Sequence[int], caption: Caption) -> Figure:
    """Draw the mean over heads of profiles [N, H, F + averages], every layer in one axes."""
    N, H, F = *profiles.shape[:2], profiles.shape[2] - caption.averages
    figure, (axis,) = st.panels(1, 1, (7.0, 3.2))
    # Few layers are named in the legend, many have a scale
    few, mean = (BLUE, ORANGE, GREEN, PURPLE, RED, DARK), profiles.mean(1)
    cmap = ListedColormap(few[:N]) if len(few) >= N else plt.get_cmap("viridis", N)
    lines: dict[str, Artist] = {}
    for i, values in enumerate(mean):
        marker, color = "os^Dv"[i % 5] if F <= MARKERS_UP_TO else "", cmap(i)
        style: dict[str, Any] = {"marker": marker, "markersize": 2.5, "linewidth": 1, "color": color}
        (lines[str(layers[i])],) = axis.plot(values[:F], label=f"layer {layers[i]}", **style)
        axis.plot(np.arange(F, len(values)), values[F:], "o", markersize=2.5, color=color)
    legend = _on_frames(axis, mean[0, :F], np.full(caption.averages, np.nan), caption)
    if len(few) >= N:
        legend = lines | legend
    else:
        bar = st.color_bar(figure, ScalarMappable(Normalize(-0.5, N - 0.5), cmap), axis, "Layer")
        shown = np.unique(np.linspace(0, N - 1, 8).round().astype(int))
        bar.set_ticks(shown.tolist(), labels=[str(layers[i]) for i in shown])
    title = f"{st.NAMES[caption.quantity].capitalize()}, mean over {H} heads, a line per layer"
    st.label_figure(figure, [axis], title, caption.about, st.LABELS[caption.quantity], legend)
    return figure


@styled
def layer_statistics(
    first: np.ndarray, middle: np.ndarray, last: np.ndarray, layers: Sequence[int], caption: Caption
) -> Figure:
    """Draw bars of the first, middle and last frame per layer: mean and deviation over heads of [N, H]."""
    N, H = first.shape
    figure, (axis,) = st.panels(1, 1, (7.0, 2.6))
    style: dict[str, Any] = {"error_kw": {"elinewidth": 0.8, "ecolor": "0.3"}, "capsize": 2 if N <= 12 else 0}
    columns = {"first key frame": first, "middle (all between)": middle, "last key frame": last}
    for i, ((name, values), color) in enumerate(zip(columns.items(), (BLUE, GREEN, ORANGE), strict=True)):
        style |= {"yerr": values.std(1), "label": name, "color": color, "linewidth": 0}
        axis.bar(np.arange(N) + (i - 1) * 0.27, values.mean(1), 0.25, **style)
    axis.axhline(0, color="0.4", linewidth=0.8)
    axis.set_xticks(np.arange(N), [str(layer) for layer in layers])
    axis.set(ylabel=st.LABELS[caption.quantity], xlim=(-0.6, N - 0.4))
    axis.grid(False, axis="x")
    title = f"{st.NAMES[caption.quantity].capitalize()}, mean ± std over {H} heads"
    st.label_figure(figure, [axis], title, caption.about, legend=st.handles(axis), x="Layer")
    return figure


# --- Frame 0 by block of queries, waves of temporal RoPE, and published curves beside ours


@styled
def first_by_block(blocks: Mapping[str, BlockPanel], title: str, subtitle="", *, of_paper=True) -> Figure:
    """Draw frame 0's excess over the other context frames against the block of queries, a panel a head."""
    figure, axes = st.panels(len(blocks), columns=1, size=(7.0, 1.6))
    for axis, (name, (starts, measured, predicted)) in zip(axes, blocks.items(), strict=True):
        colors = [ORANGE if start == SHOWN else "0.6" for start in starts]
        axis.bar(starts + 1, measured, width=2.2, color=colors, linewidth=0)
        axis.plot(starts + 1, predicted, "o-", color=BLUE, linewidth=1.2, markersize=3)
        axis.axhline(0, color="0.3", linewidth=0.8)
        axis.set(xlim=(starts[0] - 1, starts[-1] + 3), title=name, xticks=starts + 1)
    queries = f"queries {SHOWN}–{SHOWN + 2}" + ", those of the paper" * of_paper
    legend: dict[str, Artist] = {
        "measured": Patch(color="0.6", label="measured"),
        "shown": Patch(color=ORANGE, label=queries),
        "predicted": Line2D([], [], color=BLUE, marker="o", markersize=3, label="waves + s"),
    }
    x, y = "Middle query frame of the block (latent)", "Frame 0 − other context (logits)"
    st.label_figure(figure, axes, title, subtitle, y, legend, x)
    return figure


@styled
def curves_in_parts(parts: Mapping[str, PartsPanel], title: str, subtitle="") -> Figure:
    """Draw context curves beside their waves; a line shows what s adds to frame 0, and the rest follows."""
    figure, axes = st.panels(len(parts), columns=3, size=(2.9, 1.7))
    values = np.concatenate([[p.waves[0] + p.s, *p.measured, *p.waves, 0] for p in parts.values()])
    for axis, (name, (measured, waves, s)) in zip(axes, parts.items(), strict=True):
        _bars_and_line(axis, measured, waves, [ORANGE, *[GREY] * (len(measured) - 1)])
        axis.plot([0, 0], [waves[0], waves[0] + s], color=RED, linewidth=2.5)
        axis.set(ylim=(values.min() - 0.5, values.max() + 0.5), title=name)
    legend: dict[str, Artist] = {
        "first": Patch(color=ORANGE, label="measured, frame 0"),
        "others": Patch(color=GREY, label="measured, other context"),
        "waves": Line2D([], [], color=BLUE, marker="o", markersize=3, label="waves"),
        "s": Line2D([], [], color=RED, linewidth=2.5, label="s, at frame 0"),
    }
    st.label_figure(figure, axes, title, subtitle, "Mean logit", legend)
    return figure


class HeadPair(NamedTuple):
    """Context curves [n] of one head."""

    name: str
    ours: np.ndarray
    published: np.ndarray
    r: float


@styled
def heads_by_agreement(r: Mapping[str, np.ndarray], worst: Sequence[HeadPair], title: str) -> Figure:
    """Draw the sorted r of all heads, a line for each name, and some heads' curves beside the published."""
    figure, axes = st.panels(1 + len(worst), 3, (3.0, 2.0))
    for color, (name, values) in zip((BLUE, GREEN, PURPLE, ORANGE), r.items(), strict=False):
        ordered = np.sort(values[np.isfinite(values)])
        axes[0].plot(np.linspace(0, 1, len(ordered)), ordered, color=color, linewidth=1.4, label=name)
    axes[0].set(title="All heads, ordered", xlabel="Share of heads", ylabel="r of curves", ylim=(-1, 1.02))
    for axis, pair in zip(axes[1:], worst, strict=True):
        _bars_and_line(axis, pair.published, pair.ours, GREY)
        axis.set(title=f"{pair.name}, r = {pair.r:.2f}", xlabel="Key frame (latent)", ylabel="Mean logit")
    legend = st.handles(axes[0]) | {"published": Patch(color=GREY, label="published curve")}
    legend |= {"here": Line2D([], [], color=BLUE, marker="o", markersize=3, label="here")}
    st.label_figure(figure, [], title, legend=legend)
    return figure


def _bars_and_line(axis: Axes, bars: np.ndarray, line: np.ndarray, color: str | list[str]) -> None:
    axis.bar(np.arange(len(bars)), bars, color=color, width=0.8, linewidth=0)
    axis.plot(line, "o-", color=BLUE, markersize=2.5, linewidth=1.1)
    axis.axhline(0, color=DARK, linewidth=0.6)
    axis.set_xticks(range(len(bars)))


# --- Maps: query frames, heads or slots over keys


@styled
def frame_maps(
    matrices: np.ndarray,
    query_frames: Sequence[int],
    caption: Caption,
    *,
    layer: int | str,
    heads: Sequence[int | str] | None = None,
    keys: Sequence[str] | None = None,
    key_axis="frame",
) -> Figure:
    """Draw query × key frames of every head on one colour scale: matrices [H, rows, F + averages].

    A row per entry of query_frames. layer is a number, or what the title says in its place. heads are their
    numbers or names, 0, 1, ... by default; more than 16 are thumbnails, six in a row. keys are labels
    of columns that are not the frames 0, 1, ...; key_axis says whether they are frames or positions.
    """
    # 1. How many of the last columns are averages; what the heads are called
    gone = caption.averages if keys is None else sum(label.startswith("μ") for label in keys)
    H, rows, F = matrices.shape[0], matrices.shape[1], matrices.shape[2] - gone
    heads = range(H) if heads is None else heads
    which = f", {H} heads" if H > 1 else f", head {heads[0]}"
    which *= not isinstance(heads[0], str)
    whose = layer if isinstance(layer, str) else f"Layer {layer}"
    title = f"{whose}{which}: {st.NAMES[caption.quantity]}, query × key frames"
    # 2. A cache of profiles alone: an empty panel says so
    if not np.isfinite(matrices).any():
        figure, (axis,) = st.panels(1, 1, size=(7.0, 1.0))
        axis.grid(False)
        axis.set(xticks=[], yticks=[])
        axis.add_patch(Rectangle((0, 0), 1, 1, transform=axis.transAxes, zorder=0, **st.HATCH))
        st.label_figure(figure, [], title, caption.about, note="absent: no frame matrix in this cache")
        return figure
    # 3. A panel a head; square cells where queries are about as many as keys
    square = rows > F / 2
    size = (2.2, 1.9 if square else 1.4) if H <= 16 else (1.6, 1.5 if square else 1.1)
    size, columns = size if H > 1 else (5.0, 2.4), 4 if H <= 16 else 6
    figure, axes = st.panels(H, columns, size=size, sharex=True, sharey=True)
    if square and H > 1:
        st.shape_square(figure, axes)
    legend = st.grey_legend(matrices)
    for head, axis, values in zip(heads, axes, matrices, strict=True):
        image = st.heat_map(axis, values, equal=square, **st.color_scale(matrices, caption.quantity))
        name = head if isinstance(head, str) else f"H{head}" if H > 1 else ""
        axis.set_title(name, pad=ROOM if gone else None)
        _label_keys(axis, [*map(str, range(F))] if keys is None else keys)
        legend |= st.mark_averages(axis, F, gone)
        axis.set_yticks(range(rows), [str(frame) for frame in query_frames])
    st.color_bar(figure, image, axes, st.LABELS[caption.quantity])
    x = f"Key frame ({caption.unit})" if keys is None else _keys_label(key_axis, keys)
    st.label_figure(figure, axes, title, caption.about, f"Query frame ({caption.unit})", legend, x)
    return figure


@styled
def profile_heat_maps(
    panels: Sequence[ProfileMap],
    title: str,
    subtitle="",
    *,
    columns: int | None = None,
    highlighted_frames: Mapping[str, Sequence[int]] = NOTHING,
) -> Figure:
    """Draw a panel per map, a row per head; panels of one quantity share one colour scale."""
    shown = [(p, p.values) for p in panels if p.values is not None]
    figure, axes = _heat_panels([(p.quantity, values) for p, values in shown], columns)
    legend: dict[str, Artist] = {}
    for axis, (panel, values) in zip(axes, shown, strict=True):
        F = values.shape[1] - panel.averages
        axis.set_title(panel.title, pad=ROOM if panel.averages else None)
        legend |= st.grey_legend(values)
        for text, frames in highlighted_frames.items():
            axis.axvline(min(frames) - 0.5, linewidth=1, **DASHED)
            legend[text] = Line2D([], [], label=f"from here: {text}", linewidth=1, **DASHED)
        axis.set(xticks=range(F))
        legend |= st.mark_averages(axis, F, panel.averages)
    note = st.missing_note((p.title, p.missing_reason) for p in panels if p.values is None)
    st.label_figure(figure, axes, title, subtitle, "Head", legend, note=note)
    return figure


@styled
def key_maps(panels: Mapping[str, KeyColumns], quantity: str, title: str, subtitle="") -> Figure:
    """Draw a panel per layer, a row per head; the strip above marks sinks, memories and choices."""
    figure, axes = _heat_panels([(quantity, one.values) for one in panels.values()], None)
    legend: dict[str, Artist] = {}
    for axis, (name, one) in zip(axes, panels.items(), strict=True):
        axis.set_title(name)
        H = len(one.values)
        # The strip lies above row 0, whose upper edge is at -0.5
        tall = max(1.0, 0.12 * H)
        for column, mark in enumerate(one.marks):
            corner, color = (column - 0.5, -0.6 - tall), MARKS.get(mark, "white")
            axis.add_patch(Rectangle(corner, 1, tall, facecolor=color, linewidth=0))
        legend |= st.grey_legend(one.values)
        legend |= {mark: Patch(facecolor=MARKS[mark], label=mark) for mark in MARKS if mark in one.marks}
        axis.set_ylim(H - 0.5, -0.7 - tall)
        _label_keys(axis, one.labels)
    st.label_figure(figure, axes, title, subtitle, "Head", legend, _keys_label(one.axis, one.labels))
    return figure


def _heat_panels(maps: Sequence[tuple[str, np.ndarray]], columns: int | None) -> tuple[Figure, list[Axes]]:
    """Draw a panel for each (quantity, [H, F]); those of one quantity share a colour scale and its bar."""
    n, H = len(maps), len(maps[0][1]) if maps else 1
    columns = max(1, min(columns or (4 if n <= 12 else 6), n))
    size = (max(2.0, min(4.0, 7.0 / columns)), max(1.0 if n > columns else 1.7, 0.5 + 0.06 * H))
    figure, axes = st.panels(n, columns, size)
    # Logits and masses have scales and bars of their own
    for quantity in dict.fromkeys(quantity for quantity, _ in maps):
        of = [(axis, values) for axis, (q, values) in zip(axes, maps, strict=True) if q == quantity]
        everything = np.concatenate([values.ravel() for _, values in of])
        for axis, values in of:
            image = st.heat_map(axis, values, **st.color_scale(everything, quantity, st.PERCENTILE))
            axis.set_yticks(range(len(values)))
        st.color_bar(figure, image, [axis for axis, _ in of], st.LABELS[quantity], everything)
    return figure, axes


def _label_keys(axis: Axes, labels: Sequence[str]) -> None:
    """Label the columns; averages, which stand together, have one label."""
    averages = [n for n, label in enumerate(labels) if label.startswith("μ")]
    shown = {n: label for n, label in enumerate(labels) if n not in averages}
    if averages:
        shown[averages[len(averages) // 2]] = "μ"
    axis.set_xticks(list(shown), list(shown.values()))


def _keys_label(key_axis: str, labels: Sequence[str]) -> str:
    """Name the columns, for their axis."""
    frame = "Key frame, μ averages" if labels and labels[-1].startswith("μ") else "Key frame (latent)"
    return "Temporal position" if key_axis == "position" else frame


@styled
def prompt_words(mass: np.ndarray, words: Sequence[str], *, layer: int, subtitle: str) -> Figure:
    """Draw the cross-attention mass [H, words] of every head on each word, and on the whole prompt."""
    H, n = mass.shape
    size = (3.8, max(2.4, 1.2 + 0.16 * H))
    figure, (left, right) = st.panels(2, 2, size, keep=True, sharey=True, width_ratios=[3, 1])
    image = st.heat_map(left, mass, **st.color_scale(mass, "mass", st.PERCENTILE))
    # A word takes 0.13 inches; the left panel has 0.45 of the width
    room = max(1, round(n * 0.13 / (0.45 * figure.get_figwidth())))  # every such word has a place
    left.set_xticks(np.arange(n)[::room], words[::room], fontsize=st.TINY, rotation=90)
    left.set(xlabel="Word of the prompt", ylabel="Head", yticks=range(H))
    st.color_bar(figure, image, [left, right], st.LABELS["mass"], mass)
    right.barh(np.arange(H), mass.sum(1), color=BLUE, height=0.8, linewidth=0)
    right.set(xlabel="whole prompt", xlim=(0, 1), ylim=(H - 0.5, -0.5), xticks=[0, 1])
    right.grid(False, axis="y")
    st.label_figure(figure, [], f"Layer {layer}: attention mass per prompt word", subtitle)
    return figure


@styled
def rope_bands(
    values: np.ndarray, names: Sequence[str], caption: Caption, *, layer: int, head: int
) -> Figure:
    """Draw what each RoPE band adds to a head's mean logits: values [F, bands]; and their sum."""
    F, bands = values.shape
    options: dict[str, Any] = {"sharex": True, "height_ratios": [1, max(1.2, bands / 9)]}
    figure, (above, below) = st.panels(2, 1, (7.0, 1.2 + 0.1 * bands), **options)
    above.bar(np.arange(F), values.sum(-1), width=0.8, color=BLUE, alpha=0.75, linewidth=0)
    above.set_ylabel("sum of all")
    legend = _on_frames(above, values.sum(-1), np.empty(0), caption)
    image = st.heat_map(below, values.T, **st.color_scale(values, "mean_logit"))
    below.set_yticks(np.arange(bands), names, fontsize=st.TINY)
    st.color_bar(figure, image, below, st.LABELS["mean_logit"])
    for marked in caption.highlighted_frames.values():
        below.axvline(min(marked) - 0.5, linewidth=1.2, **DASHED)
    below.set(xlim=(-0.5, F - 0.5), xticks=range(F))
    above.tick_params(labelbottom=False)
    title = f"Layer {layer}, head {head}: mean logit by RoPE band"
    st.label_figure(figure, [below], title, caption.about, legend=legend)
    return figure


@styled
def slot_map(frames: np.ndarray, positions: np.ndarray, num_frames: int, title: str, subtitle="") -> Figure:
    """Draw frames and positions [blocks, slots]: a cell a slot, coloured by frame, with its position."""
    blocks, slots = frames.shape
    figure, (ax,) = st.panels(1, 1, (1.4 + 0.26 * slots, 0.6 + 0.17 * blocks))
    colors = ScalarMappable(Normalize(0, max(1, num_frames - 1)), plt.get_cmap("viridis"))
    # Special slots have colours of their own, which no frame has
    cells = colors.to_rgba(frames)
    for code, name in SPECIAL.items():
        cells[frames == code] = to_rgba(MARKS[name])
    cells[frames == NO_SLOT] = to_rgba("white")
    ax.imshow(cells, interpolation="nearest", aspect="auto")
    with_numbers = bool(figure.get_figwidth() - 1.2 >= 0.15 * slots)
    for block, slot in np.argwhere((frames != NO_SLOT) & (positions >= 0) & with_numbers).tolist():
        ink = "black" if frames[block, slot] < 0 or frames[block, slot] > 0.6 * num_frames else "white"
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": st.TINY, "color": ink}
        ax.text(slot, block, str(positions[block, slot]), gid="cell", **style)
    ax.set(xticks=range(slots), yticks=range(blocks), ylabel="Block")
    ax.grid(False)
    st.color_bar(figure, colors, ax, "Latent frame")
    special = [name for code, name in SPECIAL.items() if code in frames]
    legend: dict[str, Artist] = {name: Patch(color=MARKS[name], label=name) for name in special}
    title += ": slots of the cache" + "; numbers: temporal positions" * with_numbers
    st.label_figure(figure, [ax], title, subtitle, legend=legend, x="Slot of the cache")
    return figure


@styled
def last_block_attention(
    mass: np.ndarray, frames: np.ndarray, positions: np.ndarray, title: str, subtitle=""
) -> Figure:
    """Draw mass [H, slots] of the last block: heads over slots, named by frame and position."""
    # Codes of slot_frame beside frames, see experiments/caches/formats.py
    codes, said = {-1: "avg", -2: "0", -3: "tok"}, {MIXED: "", NO_SLOT: ""}
    pairs = zip(frames.tolist(), positions.tolist(), strict=True)
    labels = [codes.get(f, f"f{f}") + said.get(p, f"\n@{p}") for f, p in pairs]
    names = ("Head", "Slot: frame @ temporal position", st.LABELS["mass"])
    return st.one_heat_map(mass, title, subtitle, names, columns=labels, **st.color_scale(mass, "mass"))


@styled
def survival_map(kept: np.ndarray, title: str, subtitle="") -> Figure:
    """Draw kept [layers, F]: how much of each frame the last block still sees, layer by layer."""
    names = ("Layer", "Latent frame", "Share of its tokens kept")
    return st.one_heat_map(kept, title, subtitle, names, cmap="viridis", vmin=0, vmax=1)
