"""Numbers of all heads: maps layers × heads, the first-frame effect, what interventions did."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator

import experiments.figures.style as st
from experiments.analysis.panels import HeadMap, LabelMap
from experiments.analysis.taxonomy import LabelAgreement
from experiments.figures.style import BLUE, DARK, GREEN, GREY, HATCH, ORANGE, PURPLE, RED, YELLOW, styled

COLORS = {"anchor": BLUE, "wave": ORANGE, "veil": GREEN, "static": PURPLE, "dynamic": YELLOW}
SHARED = ("logits", "/ seeds")  # units whose panels are to be compared


@styled
def head_maps(
    maps: Sequence[HeadMap], layers: Sequence[int], *, subtitle: str, title="Measures of every head"
) -> Figure:
    """Draw a panel per measure, scales from the 2nd to 98th percentile, shared by logits and by effects."""
    shown = [(m, m.values) for m in maps if m.values is not None and np.isfinite(m.values).any()]
    columns = 3 if len(shown) == 6 else max(1, min(4 if len(shown) <= 8 else 5, len(shown)))
    rows = max(1, -(-len(shown) // columns))
    size = (3.1 * columns, 0.7 + rows * (_height(len(layers)) + 0.15))
    figure, axes = plt.subplots(rows, columns, squeeze=False, figsize=size)
    for axis, (panel, values) in zip(axes.flat, shown, strict=False):
        _title(axis, panel.title, panel.queries, any(m.queries for m in maps))
        alike = [v for m, v in shown if (m.scale, m.unit) == (panel.scale, panel.unit) and m.unit in SHARED]
        cmap, low, high = _range(panel.scale, np.stack(alike) if alike else values)
        mesh = axis.pcolormesh(np.ma.masked_invalid(values), cmap=cmap, vmin=low, vmax=high)
        st.color_bar(
            figure, mesh, axis, panel.unit, extend=st.extend_of(values, low, high), aspect=25, pad=0.03
        )
        _head_axes(axis, layers, values.shape[1])
    st.drop_empty(axes, len(shown))
    drawn = [id(m) for m, _ in shown]
    missing = [(m.title, m.missing_reason or "no head has one") for m in maps if id(m) not in drawn]
    st.label_figure(figure, [], f"{title}, {subtitle}; grey: N/A", note=st.missing_note(missing))
    return figure


@styled
def label_maps(maps: Sequence[LabelMap], layers: Sequence[int], *, subtitle: str) -> Figure:
    """Draw a panel per map of labels; a dot marks a head whose label differs from the one beside it."""
    shown = [(m, m.labels) for m in maps if m.labels is not None]
    size = (max(4.0, 2.7 * len(shown)), 1.1 + _height(len(layers)))
    figure, axes = plt.subplots(1, max(1, len(shown)), squeeze=False, figsize=size)
    legend: dict[str, Artist] = {}
    for axis, (panel, labels) in zip(axes.flat, shown, strict=False):
        _title(axis, panel.title, panel.queries, any(m.queries for m in maps), fontsize=9)
        legend |= {name: Patch(facecolor=COLORS[name], label=name) for name in panel.names.values()}
        values = np.full(labels.shape, np.nan)
        for i, label in enumerate(panel.names):
            values[labels == label] = i
        cmap, top = ListedColormap([COLORS[n] for n in panel.names.values()]), len(panel.names) - 0.5
        style: dict[str, Any] = {"vmin": -0.5, "vmax": top, "edgecolors": "white", "linewidth": 0.3}
        axis.pcolormesh(np.ma.masked_invalid(values), cmap=cmap, **style)
        _head_axes(axis, layers, labels.shape[1])
        if panel.differs is not None:
            rows, columns = np.nonzero(panel.differs)
            axis.plot(columns + 0.5, rows + 0.5, "o", color="black", markersize=2)
            dot: dict[str, Any] = {"color": "black", "marker": "o", "markersize": 3, "linestyle": ""}
            legend["differs"] = Line2D([], [], label="label differs", **dot)
    st.drop_empty(axes, len(shown))
    note = st.missing_note([(m.title, m.missing_reason) for m in maps if m.labels is None])
    st.label_figure(figure, [], f"Kinds of heads, {subtitle}", legend=legend, note=note)
    return figure


@styled
def agreement_matrix(names: Sequence[str], values: np.ndarray, *, what: str) -> Figure:
    """Draw the share of heads with the same label for every pair, values [n, n], written into the cells."""
    n = len(names)
    figure, axis = plt.subplots(figsize=(3.2 + 0.62 * n, 1.6 + 0.42 * n))
    axis.grid(False)
    axis.set_facecolor(GREY)
    low = min(0.5, float(np.nanmin(values)) if np.isfinite(values).any() else 0.5)
    mesh = axis.pcolormesh(np.ma.masked_invalid(values), cmap="viridis", vmin=low, vmax=1)
    for (i, j), value in np.ndenumerate(values):
        text = f"{value:.0%}" if np.isfinite(value) else "N/A"
        color = "white" if value < (low + 1) / 2 else "black"
        axis.text(j + 0.5, i + 0.5, text, ha="center", va="center", fontsize=8, color=color)
    axis.set_xticks(np.arange(n) + 0.5, [str(i + 1) for i in range(n)])
    axis.set_yticks(np.arange(n) + 0.5, [f"{i + 1}: {name}" for i, name in enumerate(names)])
    axis.set(ylim=(n, 0))
    st.color_bar(figure, mesh, axis, "share of heads", pad=0.03)
    axis.set_title(f"Same label: {what}")
    return figure


@styled
def label_agreement(found: Sequence[LabelAgreement]) -> Figure:
    """Draw agreement with published labels, a row for each view, beside what the rule must beat."""
    figure, axis = plt.subplots(figsize=(7.4, 1.3 + 0.33 * len(found)))
    rows = np.arange(len(found))
    share = np.array([one.share for one in found])
    ends = np.array([[one.share - one.low, one.high - one.share] for one in found]).T
    dots: dict[str, Any] = {"fmt": "o", "color": BLUE, "markersize": 5}
    axis.errorbar(share, rows, xerr=ends, label="our rule, 95 % over layers", **dots)
    single, majority = [one.single for one in found], [one.majority for one in found]
    axis.plot(single, rows, "D", color=ORANGE, markersize=4, label="best single threshold")
    axis.plot(majority, rows, "s", color="0.5", markersize=4, label="majority class")
    axis.set_yticks(rows, [one.name for one in found])
    axis.set(xlabel="Share of heads with the published label", ylim=(len(found) - 0.5, -0.5), xlim=(None, 1))
    title = "Kinds of heads: agreement with published labels"
    st.label_figure(figure, [], title, legend=st.handles(axis))
    return figure


def _height(layers: int) -> float:
    return max(2.2, min(4.2, 1.0 + 0.105 * layers))


def _title(axis: Axes, title: str, queries: str, room: bool, **font: Any) -> None:
    """Set a panel's title, and under it whose queries it is of; room where another panel says so."""
    axis.set_title(title, pad=14 if room else None, **font)
    axis.text(0.5, 1.01, queries, transform=axis.transAxes, ha="center", va="bottom", fontsize=7)


def _head_axes(axis: Axes, layers: Sequence[int], heads: int) -> None:
    axis.grid(False)
    axis.set_facecolor(GREY)
    axis.set(xlabel="Head", ylabel="Layer", xlim=(0, heads), ylim=(len(layers), 0))
    shown_heads, shown = st.ticks(heads, room=6), st.ticks(len(layers), room=10)
    axis.set_xticks(shown_heads + 0.5, [str(h) for h in shown_heads])
    axis.set_yticks(shown + 0.5, [str(layers[i]) for i in shown])


def _range(scale: str, values: np.ndarray) -> tuple[str, float, float]:
    """Colour map and its ends, by the scale of a HeadMap."""
    if scale in ("share", "ratio"):
        return ("viridis", 0.0, 1.0) if scale == "share" else ("RdBu_r", 0.0, 2.0)
    low, high = np.nanpercentile(values, [2, 98])
    if scale == "diverging":
        high = max(abs(low), abs(high), 1e-9)
        return "RdBu_r", -high, high
    return "viridis", low, max(high, low + 1e-9)


@styled
def placebo_strips(
    effect: np.ndarray, placebos: np.ndarray, frames: Sequence[int], title: str, *, unit="logits"
) -> Figure:
    """Draw a strip a head of effects [heads] and placebos [heads, frames], and the mean by frame below."""
    order = np.argsort(-effect, kind="stable")
    values = np.concatenate([effect[:, None], placebos], 1)
    columns = np.concatenate([[0], frames])
    figure, (strips, means) = plt.subplots(2, 1, sharex=True, height_ratios=[2.6, 1], figsize=(7.4, 5.6))
    top = max(float(np.nanpercentile(np.abs(values), 98)), 1e-9)
    strips.grid(False)
    strips.set_facecolor(GREY)
    edges = np.concatenate([columns - 0.5, [columns[-1] + 0.5]]), np.arange(len(order) + 1)
    colors: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -top, "vmax": top, "rasterized": True}
    image = strips.pcolormesh(*edges, np.ma.masked_invalid(values[order]), **colors)
    strips.set(ylabel="Heads, by their effect of frame 0", ylim=(len(order), 0))
    st.color_bar(figure, image, strips, unit, extend="both", aspect=25, pad=0.02)
    mean = _quiet_mean(values)
    means.bar(columns[1:], mean[1:], color=BLUE, width=0.8, linewidth=0, label="placebo: another key frame")
    means.bar([0], mean[:1], color=ORANGE, width=0.8, linewidth=0, label="frame 0")
    means.axhline(0, color="0.4", linewidth=0.8)
    means.set(ylabel=f"Mean over heads\n({unit})", xlabel="Key frame (latent)")
    means.set_xticks(st.ticks(int(columns[-1]) + 1, room=15))
    _mark_absent(means, columns, mean)
    means.legend(fontsize=8, loc="upper right")
    figure.suptitle(title)
    return figure


@styled
def distances_and_contrasts(
    excess: np.ndarray, contrasts: np.ndarray, title: str, *, unit="logits"
) -> Figure:
    """Draw the mean and middle half over heads of excesses [heads, F] and contrasts [heads, first]."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.2))
    there = np.isfinite(excess).any(0)
    distances, values = np.arange(excess.shape[1])[there], excess[:, there]
    low, high = np.nanquantile(values, [0.25, 0.75], axis=0)
    left.fill_between(distances, low, high, color=BLUE, alpha=0.25, linewidth=0)
    left.plot(distances, np.nanmean(values, 0), color=BLUE, linewidth=1.5)
    left.axhline(0, color="0.4", linewidth=0.8)
    left.set(xlabel="Distance (latent frames)", ylabel=f"Excess of frame 0 ({unit})")
    left.set_title("Against other frames at equal distance")
    frames = np.arange(contrasts.shape[1])
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        middle = np.nanquantile(contrasts, [0.25, 0.75], axis=0)
    mean = _quiet_mean(contrasts)
    right.bar(frames, mean, color=[ORANGE if j == 0 else BLUE for j in frames], width=0.75, linewidth=0)
    right.vlines(frames, *middle, color="0.3", linewidth=0.9)
    right.axhline(0, color="0.4", linewidth=0.8)
    if _mark_absent(right, frames, mean):
        right.legend(fontsize=8, loc="upper right")
    right.set(xlabel="Key frame (latent)", ylabel=f"Contrast c(j) ({unit})", xticks=st.ticks(len(frames), 12))
    right.set_title("Key frames against the line through 3–11")
    st.label_figure(figure, [], f"{title}; mean over heads, half of the heads within the band")
    return figure


@styled
def effect_by_pass(effects: Mapping[str, np.ndarray], title: str, *, unit: str = "logits") -> Figure:
    """Draw first-frame effects [heads] of every pass, by its name: a line a head, and their mean."""
    values = np.stack([one.ravel() for one in effects.values()])
    figure, axis = plt.subplots(figsize=(max(5.0, 1.1 * len(values) + 2.5), 3.4))
    axis.plot(values, color="0.6", linewidth=0.5)
    axis.plot(np.nanmean(values, 1), "o-", color=DARK, linewidth=1.8, markersize=4, label="mean over heads")
    axis.axhline(0, color="0.4", linewidth=0.8, linestyle=":")
    axis.set_xticks(range(len(values)), [name.replace(" (", "\n(") for name in effects])
    axis.set(ylabel=f"First-frame effect s ({unit})", xlim=(-0.3, len(values) - 0.7))
    axis.legend(fontsize=8)
    figure.suptitle(title)
    return figure


@styled
def score_against_effect(
    panels: Mapping[str, tuple[np.ndarray, np.ndarray]], title: str, x: str, y: str
) -> Figure:
    """Draw one number against another, a dot a head, a panel for each name; the line is equality."""
    figure, axes = st.panel_grid(len(panels), columns=3, size=(3.0, 2.9))
    every = np.concatenate([np.ravel(values) for pair in panels.values() for values in pair])
    low, high = np.nanmin(every), np.nanmax(every)
    for axis, (name, (across, up)) in zip(axes, panels.items(), strict=True):
        axis.plot([low, high], [low, high], color="0.5", linewidth=0.8, linestyle="--")
        axis.plot(np.ravel(across), np.ravel(up), "o", color=BLUE, alpha=0.5, markersize=3, markeredgewidth=0)
        axis.axhline(0, color="0.4", linewidth=0.6)
        axis.axvline(0, color="0.4", linewidth=0.6)
        axis.set(title=name, xlim=(low - 0.3, high + 0.3), ylim=(low - 0.3, high + 0.3))
    axes[0].set_ylabel(y)
    st.label_figure(figure, axes, title, x=x)
    return figure


@styled
def contrasts_by_frame(
    contrasts: Mapping[str, np.ndarray], title: str, *, block: int, unit="logits"
) -> Figure:
    """Draw contrasts by key frame, [3, first]: mean over heads, low, high; every other block shaded."""
    figure, axis = plt.subplots(figsize=(7.4, 3.0))
    colors, markers = (ORANGE, BLUE, GREEN, PURPLE, RED), "osD^v"
    for (name, (values, low, high)), color, marker in zip(contrasts.items(), colors, markers, strict=False):
        axis.fill_between(range(len(values)), low, high, color=color, alpha=0.2, linewidth=0)
        axis.plot(values, marker=marker, color=color, markersize=4, linewidth=1.3, label=name)
    longest = max(values.shape[1] for values in contrasts.values())
    for start in range(0, longest, 2 * block):
        axis.axvspan(start - 0.5, min(start + block, longest) - 0.5, color="0.5", alpha=0.08, linewidth=0)
    axis.axhline(0, color="0.4", linewidth=0.8)
    axis.set(xlabel="Key frame (latent)", ylabel=f"Contrast c(j) ({unit})", xlim=(-0.5, longest - 0.5))
    axis.set_xticks(range(longest))
    axis.legend(fontsize=8)
    figure.suptitle(title)
    return figure


def _mark_absent(axis: Axes, frames: np.ndarray, values: np.ndarray) -> bool:
    """Hatch the key frames without a value, as a stopped run has them; return whether there is one."""
    absent = frames[~np.isfinite(values)]
    for i, frame in enumerate(absent):
        label = "not attended by a later block" if i == 0 else None
        axis.axvspan(frame - 0.5, frame + 0.5, **HATCH, label=label)
    return len(absent) > 0


def _quiet_mean(values: np.ndarray) -> np.ndarray:
    """Mean over heads; NaN, without a warning, for a frame that no head has."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return np.nanmean(values, 0)


DASHES = {"direct": ("-", BLUE), "own block": ("-.", ORANGE), "total": ("--", GREEN), "floor": (":", DARK)}
ORDER_COLORS = (ORANGE, RED, BLUE, GREEN, PURPLE)
MARKERS = ("o", "^", "s", "D")
FAR_BELOW = 100  # times smaller than the smallest effect: a floor that is only named


@styled
def effects_by_frame(changes: Mapping[str, np.ndarray], *, subtitle: str) -> Figure:
    """Draw a line per effect [F], in units of the distance between two seeds; on a logarithmic scale."""
    figure, axis = plt.subplots(figsize=(7, 3.2))
    positive = {name: np.where(values > 0, values, np.nan) for name, values in changes.items()}
    of_effects = [v for name, v in positive.items() if name != "floor" and np.isfinite(v).any()]
    least = min([np.nanmin(v) for v in of_effects], default=0)
    drawn: dict[str, Artist] = {}
    for name, values in positive.items():  # no change at all has no place on this scale
        line, color = DASHES.get(name, ("-", PURPLE))
        label, largest = name, np.nanmax(values, initial=0)
        if name == "floor" and largest < least / FAR_BELOW:
            label, values = f"floor, at most {largest:.2g}", np.empty(0)
        style: dict[str, Any] = {"color": color, "marker": "o", "markersize": 3, "linewidth": 1.4}
        (drawn[label],) = axis.plot(values, line, label=label, **style)
    axis.axhline(1, color="0.4", linewidth=0.8)
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter("{x:g}")
    st.frame_axis(axis, max(len(values) for values in changes.values()), 25)
    x, y = "Latent frame; at 1 it is as far away as another seed", "/ distance between seeds"
    st.label_figure(figure, [axis], f"Change of x0, {subtitle}", y, drawn, x)
    return figure


@styled
def video_strips(videos: Mapping[str, np.ndarray], frames: Sequence[int], *, subtitle: str) -> Figure:
    """Draw a row per video [frames, height, width, 3], uint8, of these video frames, their numbers on top."""
    height, width = next(iter(videos.values())).shape[1:3]
    size = (0.95 * len(frames) + 0.4, (0.95 * height / width + 0.06) * len(videos) + 0.5)
    figure, axes = plt.subplots(len(videos), len(frames), squeeze=False, figsize=size)
    figure.set_layout_engine("constrained", wspace=0.02, hspace=0.02, w_pad=0.02, h_pad=0.02)
    for row, (name, video) in zip(axes, videos.items(), strict=True):
        for axis, frame in zip(row, frames, strict=True):
            axis.imshow(video[frame], interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            axis.grid(False)
        row[0].set_ylabel(name, fontsize=8)
    for axis, frame in zip(axes[0], frames, strict=True):
        axis.set_title(str(frame), fontsize=8, pad=3)
    st.label_figure(figure, [], f"Video frames, {subtitle}")
    return figure


@styled
def effect_against(
    effect: np.ndarray,
    measures: Mapping[str, np.ndarray],
    notes: Mapping[str, str],
    *,
    subtitle: str,
    kinds: np.ndarray | None = None,
    floor=float("nan"),
) -> Figure:
    """Draw a panel per measure, a dot per head [N, H], coloured by layer, shaped by kind, with a note."""
    size = (3.0 * len(measures) + 0.7, 3.3)
    figure, axes = plt.subplots(1, len(measures), squeeze=False, figsize=size, sharey=True)
    layers = np.broadcast_to(np.arange(len(effect))[:, None], effect.shape)
    shown = np.where(effect > 0, effect, np.nan)
    labels = np.full(effect.shape, "", object) if kinds is None else kinds
    markers = dict(zip(sorted(set(labels.ravel())), MARKERS, strict=False))
    style: dict[str, Any] = {"cmap": plt.get_cmap("viridis", len(effect))}
    style |= {"vmin": -0.5, "vmax": len(effect) - 0.5, "s": 16, "linewidth": 0}
    for axis, (name, values) in zip(axes[0], measures.items(), strict=True):
        for kind, marker in markers.items():
            at = labels == kind
            dots = axis.scatter(values[at], shown[at], c=layers[at], marker=marker, **style)
        if np.nanmin(shown) / 10 < floor < np.nanmax(shown):
            axis.axhline(floor, color="0.4", linewidth=0.8, linestyle=":")
        axis.set(xlabel=name, yscale="log")
        axis.set_title(notes.get(name, ""), fontsize=8)
    axes[0, 0].set_ylabel("Direct effect (/ seeds)")
    bar = figure.colorbar(dots, ax=axes[0, -1], ticks=st.ticks(len(effect), 8))
    bar.set_label("layer")
    line: dict[str, Any] = {"color": "0.3", "linestyle": "", "markersize": 5}
    named = {kind: marker for kind, marker in markers.items() if kind}
    shapes = {kind: Line2D([], [], marker=marker, label=kind, **line) for kind, marker in named.items()}
    st.label_figure(figure, [], f"Direct effect of every head, {subtitle}", legend=shapes)
    return figure


@styled
def knockout_curves(
    counts: Sequence[int],
    orders: Mapping[str, np.ndarray],
    random: np.ndarray,
    ends: tuple[np.ndarray, np.ndarray],
    subtitle: str,
    ceilings: Mapping[str, float],
    what="Share back in colour and shape",
) -> Figure:
    """Draw a line an order [counts, 3] over the heads knocked out; random [counts, 5]; ends: none and all.

    ceilings: what the same judge says of videos that no model made.
    """
    figure, axis = plt.subplots(figsize=(7.4, 4.0))
    x = np.arange(len(counts) + 2)
    band: dict[str, Any] = {"color": "0.88", "linewidth": 0, "label": "range of random orders"}
    axis.fill_between(x[1:-1], random[:, 3], random[:, 4], **band)
    lines = {"random order, mean": (random, DARK)}
    lines |= {
        name: (values, color) for (name, values), color in zip(orders.items(), ORDER_COLORS, strict=False)
    }
    style: dict[str, Any] = {"fmt": "o-", "markersize": 3.5, "linewidth": 1.4, "elinewidth": 0.8}
    style["capsize"] = 1.5
    for n, (name, (values, color)) in enumerate(lines.items()):
        share, low, high = np.concatenate([ends[0][None, :3], values[:, :3], ends[1][None, :3]]).T
        shifted = x + 0.06 * (n - (len(lines) - 1) / 2) * ((x > 0) & (x < x[-1]))
        axis.errorbar(shifted, share, [share - low, high - share], color=color, label=name, **style)
    for name, value in ceilings.items():
        axis.axhline(value, color="0.4", linewidth=0.8, linestyle=":")
        axis.text(x[-1] + 0.45, value, name, fontsize=7, ha="right", va="bottom", color="0.3")
    axis.set_xticks(x, ["none", *map(str, counts), "all"])
    axis.set(xlabel="Heads that do not see the past", ylabel=what, ylim=(-0.02, 1.02))
    axis.legend(fontsize=8, loc="upper right")
    st.label_figure(figure, [], subtitle)
    return figure


@styled
def share_bars(
    shares: Mapping[str, Sequence[float]], ceilings: Mapping[str, float], title: str, x: str
) -> Figure:
    """Draw a bar with its interval for each name -> (share, low, high); ceilings as dotted lines."""
    figure, axis = plt.subplots(figsize=(7.4, 1.0 + 0.27 * len(shares)))
    values, rows = np.array([row[:3] for row in shares.values()]), np.arange(len(shares))
    ends = np.stack([values[:, 0] - values[:, 1], values[:, 2] - values[:, 0]])
    axis.barh(rows, values[:, 0], xerr=ends, color=BLUE, height=0.65, error_kw={"linewidth": 0.9})
    for value in ceilings.values():
        axis.axvline(value, color="0.4", linewidth=0.8, linestyle=":")
    axis.set_yticks(rows, list(shares))
    axis.set(xlabel=x, xlim=(0, 1.02), ylim=(len(shares) - 0.4, -0.6))
    said = ", ".join(f"{name} {value:.2f}" for name, value in ceilings.items())
    st.label_figure(figure, [], f"{title}; dotted: {said}")
    return figure


@styled
def budget_curves(
    panels: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]],
    ceilings: Mapping[str, float],
    title: str,
) -> Figure:
    """Draw a panel for each name, a line for each rule: budget -> (share, low, high)."""
    figure, axes = plt.subplots(1, len(panels), squeeze=False, sharey=True, figsize=(4.6 * len(panels), 4.0))
    rules = list(dict.fromkeys(rule for panel in panels.values() for rule in panel))
    legend: dict[str, Artist] = {}
    for axis, (name, panel) in zip(axes[0], panels.items(), strict=True):
        for number, rule in enumerate(rules):
            if rule not in panel:
                continue
            budgets = np.array([*panel[rule]]) + 0.05 * (number - len(rules) / 2)
            share, low, high = np.array([row[:3] for row in panel[rule].values()]).T
            color = DARK if rule == "uniform" else plt.get_cmap("tab10")(number)
            style: dict[str, Any] = {"fmt": "o-", "markersize": 3.5, "linewidth": 1.2, "elinewidth": 0.6}
            ends = [share - low, high - share]
            legend[rule] = axis.errorbar(budgets, share, ends, color=color, label=rule, **style)
        for value in ceilings.values():
            axis.axhline(value, color="0.4", linewidth=0.8, linestyle=":")
        axis.set(title=name, xlabel="Cache of the mean head (latent frames)", ylim=(-0.02, 1.02))
    axes[0, 0].set_ylabel("Share back in colour and shape")
    said = ", ".join(f"{name} {value:.2f}" for name, value in ceilings.items())
    st.label_figure(figure, [], f"{title}; dotted: {said}", legend=legend)
    return figure
