"""Numbers of all heads: maps layers × heads, the first-frame effect, what interventions did, the x0 lens."""

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
from experiments.figures.style import BLUE, DARK, GREEN, HATCH, ORANGE, PURPLE, RED, YELLOW, styled

COLORS = {"anchor": BLUE, "wave": ORANGE, "veil": GREEN, "static": PURPLE, "dynamic": YELLOW}
SHARED = ("logits", "/ seeds", "share of x0")  # units whose panels are to be compared


# --- Maps layers × heads


@styled
def head_maps(
    maps: Sequence[HeadMap], layers: Sequence[int], *, subtitle: str, title="Measures of every head"
) -> Figure:
    """Draw a panel per measure, scales from the 2nd to 98th percentile, shared by logits and by effects."""
    # Rows of four at most, as even as can be: a sweep's six are two measures in three ways
    shown = [(m, m.values) for m in maps if m.values is not None and np.isfinite(m.values).any()]
    columns = -(-len(shown) // max(1, -(-len(shown) // 4))) or 1
    # At a column's width there are two side by side: low ones, that all may stand on one page
    tall = 1.0 if st.is_narrow() and len(shown) > 4 else _height(len(layers)) + 0.3
    figure, axes = st.panels(len(shown), columns, (3.0, tall))
    for axis, (panel, values) in zip(axes, shown, strict=True):
        name = panel.title if panel.unit in panel.title else f"{panel.title} ({panel.unit})"
        # Units that are compared share a scale; a share of 1 has its own ends
        alike = [v for m, v in shown if (m.scale, m.unit) == (panel.scale, panel.unit) and m.unit in SHARED]
        cmap, low, high = _range(panel.scale, np.stack(alike) if alike else values)
        image = _map(axis, values, layers, f"{name}\n{panel.queries}", cmap=cmap, vmin=low, vmax=high)
        st.color_bar(figure, image, axis, values=values)
    drawn = [id(m) for m, _ in shown]
    missing = [(m.title, m.missing_reason or "no head has one") for m in maps if id(m) not in drawn]
    note = st.missing_note(missing)
    title += "; grey: N/A" * any(np.isnan(values).any() for _, values in shown)
    st.label_figure(figure, axes, title, subtitle, "Layer", note=note, x="Head")
    return figure


@styled
def label_maps(maps: Sequence[LabelMap], layers: Sequence[int], *, subtitle: str) -> Figure:
    """Draw a panel per map of labels; a dot marks a head whose label differs from the one beside it."""
    shown = [(m, m.labels) for m in maps if m.labels is not None]
    figure, axes = st.panels(len(shown), min(4, max(1, len(shown))), (2.4, _height(len(layers)) + 0.4))
    legend: dict[str, Artist] = {}
    for axis, (panel, labels) in zip(axes, shown, strict=True):
        legend |= {name: Patch(facecolor=COLORS[name], label=name) for name in panel.names.values()}
        # Labels are any integers: colours count them in the order of the names
        values = np.full(labels.shape, np.nan)
        for i, label in enumerate(panel.names):
            values[labels == label] = i
        cmap, top = ListedColormap([COLORS[n] for n in panel.names.values()]), len(panel.names) - 0.5
        _map(axis, values, layers, f"{panel.title}\n{panel.queries}", cmap=cmap, vmin=-0.5, vmax=top)
        if panel.differs is not None:
            rows, columns = np.nonzero(panel.differs)
            dot: dict[str, Any] = {"color": "black", "marker": "o", "markersize": 2, "linestyle": ""}
            (legend["differs"],) = axis.plot(columns, rows, label="label differs", **dot)
    note = st.missing_note((m.title, m.missing_reason) for m in maps if m.labels is None)
    st.label_figure(
        figure, axes, "Kinds of heads, by layer and head", subtitle, "Layer", legend, "Head", note
    )
    return figure


@styled
def correlation_map(correlation: np.ndarray, layers: Sequence[int], quantity: str) -> Figure:
    """Draw correlations [layers, heads] from -1 to 1."""
    title = f"{quantity} of two atlases: correlation of each head"
    names = ("Layer", "Head", "correlation")
    return st.one_heat_map(correlation, title, "", names, layers, cmap="RdBu_r", vmin=-1, vmax=1)


@styled
def attribution_maps(maps: Mapping[str, np.ndarray], layers: Sequence[int], *, subtitle: str) -> Figure:
    """Draw the scores of each site, [layers, heads] or [layers, 1]; red adds to the metric."""
    figure, axes = st.panels(len(maps), min(3, len(maps)), (3.0, _height(len(layers)) + 0.3))
    for axis, (site, values) in zip(axes, maps.items(), strict=True):
        limit = float(np.nanmax(np.abs(values))) or 1.0
        image = _map(axis, values, layers, site, cmap="RdBu_r", vmin=-limit, vmax=limit)
        st.color_bar(figure, image, axis, values=values)
    st.label_figure(figure, axes, "Attribution: (source − own) · gradient", subtitle, "Layer", x="Head")
    return figure


@styled
def attribution_against(compared: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """Draw a panel per comparison of scores and effects [pairs, N, H]: a dot per head, the mean of pairs."""
    figure, axes = st.panels(len(compared), 3, (2.9, 2.6))
    for axis, (name, (score, effect)) in zip(axes, compared.items(), strict=True):
        x, y = score.mean(0), effect.mean(0)
        layers = np.broadcast_to(np.arange(len(x))[:, None], x.shape)
        dots = axis.scatter(x, y, c=layers, s=12, linewidth=0, cmap=plt.get_cmap("viridis", len(x)))
        axis.axline((0, 0), slope=1, color="0.6", linewidth=0.8, zorder=0)
        axis.set_title(f"{name}\n{len(score)} pairs", fontsize=st.SMALL)
    st.color_bar(figure, dots, axes, "layer", ticks=range(len(x)))
    st.label_figure(figure, axes, "Attribution against patching", "", "Patch: share of the way", x="Score")
    return figure


def _height(layers: int) -> float:
    return max(1.3, min(2.9, 0.5 + 0.08 * layers))


def _map(axis: Axes, values: np.ndarray, layers: Sequence[int], title: str, **colors: Any):
    """Draw values [layers, heads] -> the image."""
    axis.set_title(title.strip())
    axis.set_xticks(range(values.shape[1]))
    axis.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    return st.heat_map(axis, values, **colors)


def _range(scale: str, values: np.ndarray) -> tuple[str, float, float]:
    """Colour map and its ends, by the scale of a HeadMap."""
    if scale in ("share", "ratio"):
        return ("viridis", 0.0, 1.0) if scale == "share" else ("RdBu_r", 0.0, 2.0)
    low, high = np.nanpercentile(values, [2, 98])
    if scale == "diverging":
        high = max(abs(low), abs(high), 1e-9)
        return "RdBu_r", -high, high
    return "viridis", low, max(high, low + max(1e-6, 0.01 * abs(low)))


# --- The first-frame effect


@styled
def placebo_strips(
    effect: np.ndarray, placebos: np.ndarray, frames: Sequence[int], title: str, subtitle=""
) -> Figure:
    """Draw a strip a head of effects [heads] and placebos [heads, frames], and the mean by frame below."""
    # Column 0 holds the effect, the columns of placebo frames theirs, others stay NaN
    columns = np.concatenate([[0], frames])
    values = np.full((len(effect), columns[-1] + 1), np.nan)
    values[:, columns] = np.concatenate([effect[:, None], placebos], 1)
    options: dict[str, Any] = {"sharex": True, "height_ratios": [2.6, 1]}
    figure, (strips, means) = st.panels(2, 1, (6.0, 1.9), **options)
    # Heads by their effect, the largest on top
    order = np.argsort(-effect, kind="stable")
    image = st.heat_map(strips, values[order], **st.color_scale(values, "mean_logit", 98))
    strips.set(ylabel="Heads, by their effect of frame 0")
    st.color_bar(figure, image, strips, "logits", values)
    mean = _quiet_mean(values)
    means.bar(columns[1:], mean[columns[1:]], color=BLUE, width=0.8, label="placebo: another key frame")
    means.bar([0], mean[:1], color=ORANGE, width=0.8, linewidth=0, label="frame 0")
    means.axhline(0, color="0.4", linewidth=0.8)
    means.set(ylabel="Mean (logits)", xticks=range(columns[-1] + 1))
    _mark_absent(means, columns, mean[columns])
    strips.tick_params(labelbottom=False)
    st.label_figure(figure, [means], title, subtitle, legend=st.handles(means))
    return figure


@styled
def distances_and_contrasts(excess: np.ndarray, contrasts: np.ndarray, title: str, subtitle="") -> Figure:
    """Draw the mean and middle half over heads of excesses [heads, F] and contrasts [heads, first]."""
    figure, (left, right) = st.panels(2, 2, (4.5, 2.4))
    # Left: by distance. Right: by key frame
    there = np.isfinite(excess).any(0)
    distances, values = np.arange(excess.shape[1])[there], excess[:, there]
    low, high = np.nanquantile(values, [0.25, 0.75], axis=0)
    left.fill_between(distances, low, high, color=BLUE, alpha=0.25, linewidth=0)
    left.plot(distances, np.nanmean(values, 0), color=BLUE, linewidth=1.5)
    left.set(xlabel="Distance (latent frames)", ylabel="Excess of frame 0 (logits)", xticks=distances)
    left.set_title("Against other frames at equal distance")
    frames, mean = np.arange(contrasts.shape[1]), _quiet_mean(contrasts)
    right.bar(frames, mean, color=[ORANGE if j == 0 else BLUE for j in frames], width=0.75, linewidth=0)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        right.vlines(frames, *np.nanquantile(contrasts, [0.25, 0.75], axis=0), color="0.3", linewidth=0.9)
    _mark_absent(right, frames, mean)
    right.set(xlabel="Key frame (latent)", ylabel="Contrast c(j) (logits)", xticks=frames)
    right.set_title("Key frames against the line through 3–11")
    for axis in (left, right):
        axis.axhline(0, color="0.4", linewidth=0.8)
    about = f"{subtitle}; " * bool(subtitle) + "mean over heads, half of the heads within the band"
    st.label_figure(figure, [], title, about, legend=st.handles(right))
    return figure


@styled
def effect_by_pass(effects: Mapping[str, np.ndarray], title: str, subtitle="") -> Figure:
    """Draw first-frame effects [heads] of every pass, by its name: a line a head, and their mean."""
    values = np.stack([one.ravel() for one in effects.values()])
    figure, (axis,) = st.panels(1, 1, (max(4.0, 0.9 * len(values) + 1.5), 2.6))
    axis.plot(values, color="0.6", linewidth=0.5)
    axis.plot(np.nanmean(values, 1), "o-", color=DARK, linewidth=1.8, markersize=4, label="mean over heads")
    axis.axhline(0, color="0.4", linewidth=0.8, linestyle=":")
    # Names of passes share the width, less 0.5 inches of the y axis
    room = 0.9 * (figure.get_figwidth() - 0.5) / max(1, len(values))
    axis.set_xticks(range(len(values)), [st.wrapped(name, st.SMALL, room) for name in effects])
    axis.set(ylabel="First-frame effect s (logits)", xlim=(-0.4, len(values) - 0.6))
    st.label_figure(figure, [], title, subtitle, legend=st.handles(axis))
    return figure


def _mark_absent(axis: Axes, frames: np.ndarray, values: np.ndarray) -> None:
    """Hatch the key frames without a value, as a stopped run has them."""
    for i, frame in enumerate(frames[~np.isfinite(values)]):
        label = "not attended by a later block" if i == 0 else None
        axis.axvspan(frame - 0.5, frame + 0.5, **HATCH, label=label)


def _quiet_mean(values: np.ndarray) -> np.ndarray:
    """Mean over heads; NaN, without a warning, for a frame that no head has."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return np.nanmean(values, 0)


# --- Interventions

DASHES = {"direct": ("-", BLUE), "own block": ("-.", ORANGE), "total": ("--", GREEN), "floor": (":", DARK)}
ORDER_COLORS = (DARK, ORANGE, RED, BLUE, GREEN, PURPLE)
FAR_BELOW = 100  # times smaller than the smallest effect: a floor that is only named


@styled
def effects_by_frame(changes: Mapping[str, np.ndarray], *, subtitle: str) -> Figure:
    """Draw a line per effect [F], in units of the distance between two seeds; on a logarithmic scale."""
    figure, (axis,) = st.panels(1, 1, (7.0, 2.5))
    positive = {name: np.where(values > 0, values, np.nan) for name, values in changes.items()}
    # A floor far below all effects would squeeze them: its size goes into the legend
    of_effects = [v for name, v in positive.items() if name != "floor" and np.isfinite(v).any()]
    least = min([np.nanmin(v) for v in of_effects], default=0)
    for name, values in positive.items():  # no change at all has no place on this scale
        line, color = DASHES.get(name, ("-", PURPLE))
        label, largest = name, np.nanmax(values, initial=0)
        if name == "floor" and largest < least / FAR_BELOW:
            label, values = f"floor, at most {largest:.2g}", np.empty(0)
        style: dict[str, Any] = {"color": color, "marker": "o", "markersize": 3, "linewidth": 1.4}
        axis.plot(values, line, label=label, **style)
    axis.axhline(1, color="0.4", linewidth=0.8, label="as far away as another seed")
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    # Ticks between powers of ten only where the range is short
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter("{x:g}")
    F = max(len(values) for values in changes.values())
    axis.set(ylabel="/ distance between seeds", xlim=(-0.6, F - 0.4), xticks=range(F))
    title = "Change of the generated frames (x0) by the edit"
    st.label_figure(figure, [axis], title, subtitle, "", st.handles(axis), "Latent frame")
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
    figure, axes = st.panels(len(measures), 4 if len(measures) == 4 else 3, (2.9, 2.6), sharey=True)
    layers = np.broadcast_to(np.arange(len(effect))[:, None], effect.shape)
    shown = np.where(effect > 0, effect, np.nan)
    labels = np.full(effect.shape, "", object) if kinds is None else kinds
    markers = dict(zip(sorted(set(labels.ravel())), "o^sD", strict=False))
    style: dict[str, Any] = {"cmap": plt.get_cmap("viridis", len(effect))}
    style |= {"vmin": -0.5, "vmax": len(effect) - 0.5, "s": 16, "linewidth": 0}
    for axis, (name, values) in zip(axes, measures.items(), strict=True):
        for kind, marker in markers.items():
            at = labels == kind
            dots = axis.scatter(values[at], shown[at], c=layers[at], marker=marker, **style)
        if np.nanmin(shown) / 10 < floor < np.nanmax(shown):
            axis.axhline(floor, color="0.4", linewidth=0.8, linestyle=":")
        axis.set(xlabel=name, yscale="log")
        axis.set_title(notes.get(name, ""), fontsize=st.SMALL)
    st.color_bar(figure, dots, axes, "layer", ticks=range(0, len(effect), max(1, len(effect) // 8)))
    line: dict[str, Any] = {"color": "0.3", "linestyle": "", "markersize": 5}
    shapes = {kind: Line2D([], [], marker=marker, label=kind, **line) for kind, marker in markers.items()}
    shapes.pop("", None)
    st.label_figure(figure, [], "Direct effect of every head", subtitle, "Direct effect (/ seeds)", shapes)
    return figure


@styled
def knockout_shares(
    panels: Mapping[str, Mapping[str, Sequence[Any]]],
    counts: Mapping[str, int],
    subtitle: str,
    title: str = "Which heads bring a hidden shape back",
    y: str = "Heads without a past",
    note: str = "right: videos in which a shape comes back",
) -> Figure:
    """Draw a panel an outcome, a row a condition: the share with its interval, and a small dot a training.

    panels: title -> condition -> (share, low, high, shares of trainings, None where there is none). counts:
    videos that the last panel's shares are of.
    """
    height = 0.5 + 0.3 * max(map(len, panels.values()))
    figure, axes = st.panels(len(panels), 2, (3.2, height), sharey=True)
    for axis, (name, rows) in zip(axes, panels.items(), strict=True):
        for row, (share, low, high, each) in enumerate(rows.values()):
            known = [value for value in each if value is not None]
            axis.plot(known, [row + 0.26] * len(known), "o", color="0.55", markersize=3)
            axis.errorbar(share, row, xerr=[[share - low], [high - share]], fmt="o", color=BLUE, markersize=6)
        axis.set(title=name, xlim=(-0.03, 1.03), ylim=(len(rows) - 0.4, -0.5))
        axis.set_yticks(range(len(rows)), list(rows))
    ends = axes[-1].secondary_yaxis("right")
    ends.set_yticks(range(len(counts)), [f"of {count}" for count in counts.values()])
    ends.tick_params(length=0)
    note = f"blue: all trainings, 95 % interval; grey: each training; {note}"
    st.label_figure(figure, axes, title, subtitle, y, x="Share of videos", note=note)
    return figure


@styled
def budget_curves(
    panels: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]],
    ceilings: Mapping[str, float],
    subtitle: str,
) -> Figure:
    """Draw a panel for each rule, the best first: of all miniatures a line in a band, of each a thin one.

    panels: miniature, or all -> budget -> (share, low, high), of one (share,). The uniform window is in all.
    """
    mean = {rule: np.mean([row[0] for row in found["all"].values()]) for rule, found in panels.items()}
    rules = sorted((rule for rule in mean if rule != "uniform"), key=lambda rule: -mean[rule])
    figure, axes = st.panels(len(rules), min(4, len(rules)), (2.3, 1.9), sharey=True)
    legend: dict[str, Artist] = {}
    for axis, rule in zip(axes, rules, strict=True):
        for label, which, color in (("uniform windows", "uniform", DARK), ("the rule", rule, BLUE)):
            for name, points in panels[which].items():
                budgets = sorted(points)
                share, *ends = np.array([points[n][:3] for n in budgets]).T
                if name == "all":
                    axis.fill_between(budgets, *ends, color=color, alpha=0.2, linewidth=0)
                    axis.plot(budgets, share, "o-", color=color, markersize=3, linewidth=1.5, label=label)
                elif len(panels[which]) > 2:
                    axis.plot(budgets, share, color=color, linewidth=0.5, label="one miniature")
        _draw_ceilings(axis, "h", ceilings)
        axis.set(title=rule, ylim=(-0.02, 1.02))
        legend |= st.handles(axis)
    x, y = "Cache of the mean head (latent frames)", "Share back in colour and shape"
    st.label_figure(figure, axes, f"{y}, by rule and cache", subtitle, y, legend, x)
    return figure


def _draw_ceilings(axis: Axes, way: str, ceilings: Mapping[str, float]) -> None:
    """Draw a line for each: what the judge says of videos that no model made."""
    draw = axis.axhline if way == "h" else axis.axvline
    for (name, value), line in zip(ceilings.items(), (":", "--", "-."), strict=False):
        draw(value, color="0.4", linewidth=0.8, linestyle=line, label=f"{name}, {value:.2f}")


@styled
def share_bars(
    shares: Mapping[str, Sequence[float]],
    ceilings: Mapping[str, float],
    title: str,
    x: str,
    others: Mapping[str, Sequence[Any]] | None = None,
    about: str = "",
) -> Figure:
    """Draw a dot with its interval for each name -> (share, low, high).

    ceilings are lines; others are further marks, a value or several for each name.
    """
    figure, (axis,) = st.panels(1, 1, (7.0, 0.7 + 0.24 * len(shares)))
    values, rows = np.array([row[:3] for row in shares.values()]), np.arange(len(shares))
    ends = np.stack([values[:, 0] - values[:, 1], values[:, 2] - values[:, 0]])
    axis.errorbar(values[:, 0], rows, xerr=ends, fmt="o", color=BLUE, markersize=5, label="share, 95 %")
    for (name, marks), color, marker in zip((others or {}).items(), (ORANGE, "0.5"), "Ds", strict=False):
        axis.plot(marks, rows, marker, color=color, markersize=4, label=name)
    _draw_ceilings(axis, "v", ceilings)
    axis.set_yticks(rows, [st.wrapped(name, st.SMALL, 2.0) for name in shares])
    axis.set(ylim=(len(shares) - 0.4, -0.6), xlim=(None, 1.02))
    st.label_figure(figure, [axis], title, about, legend=st.handles(axis), x=x)
    return figure


# --- The x0 lens, and numbers by layer


@styled
def lens_strip(
    images: Sequence[Sequence[np.ndarray]], layers: Sequence[int], steps: Sequence[int], distance: np.ndarray
) -> Figure:
    """Draw pictures [H, W, 3], layers down and steps across, over the distance [layers, steps] of each."""
    rows = dict(zip([f"layer {layer}" for layer in layers], images, strict=True))
    figure, axes, shown = st.picture_grid(rows, [f"step {step}" for step in steps])
    for axis, far in zip(axes, distance[:, shown].ravel(), strict=True):
        axis.set_xlabel(f"{far:.2f}")
    st.label_figure(figure, [], "x0 that the head reads behind each layer", "below: distance to the final x0")
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
