"""Numbers of all heads: maps layers × heads, the first-frame effect, what interventions did, the x0 lens."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator

import experiments.figures.style as st
from experiments.analysis.panels import HeadMap, LabelMap

COLORS = {"anchor": st.BLUE, "wave": st.ORANGE, "veil": st.GREEN, "static": st.PURPLE, "dynamic": st.YELLOW}
SHARED = ("logits", "/ seeds", "share of x0")  # units whose panels are to be compared


# --- Maps layers × heads


@st.styled
def head_maps(
    maps: Sequence[HeadMap], layers: Sequence[int], *, subtitle: str, title="Measures of every head"
) -> Figure:
    """Draw a panel per measure, scales from the 2nd to 98th percentile, shared by logits and by effects."""
    shown: list[tuple[HeadMap, np.ndarray]] = []
    missing: list[tuple[str, str]] = []
    for panel in maps:
        if panel.values is not None and np.isfinite(panel.values).any():
            shown.append((panel, panel.values))
        else:
            missing.append((panel.title, panel.missing_reason or "no head has one"))
    # 1. Rows of four at most, as even as can be: a sweep's six are two measures in three ways
    rows = max(1, math.ceil(len(shown) / 4))
    columns = max(1, math.ceil(len(shown) / rows))
    # At a column's width there are two side by side: low ones, that all may stand on one page
    height = _height(len(layers)) + 0.3
    if st.is_narrow() and len(shown) > 4:
        height = 1.0
    figure, axes = st.panels(len(shown), columns, (3.0, height))
    # 2. Units that are compared share a scale; a share of 1 has its own ends
    for axis, (panel, values) in zip(axes, shown, strict=True):
        compared = [values]
        if panel.unit in SHARED:
            compared = [v for other, v in shown if (other.scale, other.unit) == (panel.scale, panel.unit)]
        name = panel.title if panel.unit in panel.title else f"{panel.title} ({panel.unit})"
        image = _map(
            axis, values, layers, f"{name}\n{panel.queries}", **_scale(panel.scale, np.stack(compared))
        )
        st.color_bar(figure, image, axis, values=values)
    if any(np.isnan(values).any() for _, values in shown):
        title += "; grey: N/A"
    note = st.missing_note(missing)
    st.label_figure(figure, axes, title, subtitle, "Layer", note=note, x="Head")
    return figure


@st.styled
def label_maps(maps: Sequence[LabelMap], layers: Sequence[int], *, subtitle: str) -> Figure:
    """Draw a panel per map of labels; a dot marks a head whose label differs from the one beside it."""
    shown = [(panel, panel.labels) for panel in maps if panel.labels is not None]
    figure, axes = st.panels(len(shown), min(4, max(1, len(shown))), (2.4, _height(len(layers)) + 0.4))
    legend: dict[str, Artist] = {}
    for axis, (panel, labels) in zip(axes, shown, strict=True):
        names = list(panel.names.values())
        legend |= {name: Patch(facecolor=COLORS[name], label=name) for name in names}
        # Labels are any integers: colours count them in the order of the names
        values = np.full(labels.shape, np.nan)
        for i, label in enumerate(panel.names):
            values[labels == label] = i
        colors = {"cmap": ListedColormap([COLORS[name] for name in names]), "vmin": -0.5}
        _map(axis, values, layers, f"{panel.title}\n{panel.queries}", vmax=len(names) - 0.5, **colors)
        if panel.differs is not None:
            rows, columns = np.nonzero(panel.differs)
            (dots,) = axis.plot(columns, rows, "o", color="black", markersize=2, label="label differs")
            legend["differs"] = dots
    note = st.missing_note((panel.title, panel.missing_reason) for panel in maps if panel.labels is None)
    title = "Kinds of heads, by layer and head"
    st.label_figure(figure, axes, title, subtitle, "Layer", legend, "Head", note)
    return figure


@st.styled
def correlation_map(correlation: np.ndarray, layers: Sequence[int], quantity: str) -> Figure:
    """Draw correlations [layers, heads] from -1 to 1."""
    title = f"{quantity} of two atlases: correlation of each head"
    names = ("Layer", "Head", "correlation")
    return st.one_heat_map(correlation, title, "", names, layers, cmap="RdBu_r", vmin=-1, vmax=1)


@st.styled
def attribution_maps(maps: Mapping[str, np.ndarray], layers: Sequence[int], *, subtitle: str) -> Figure:
    """Draw the scores of each site, [layers, heads] or [layers, 1]; red adds to the metric."""
    figure, axes = st.panels(len(maps), min(3, len(maps)), (3.0, _height(len(layers)) + 0.3))
    for axis, (site, values) in zip(axes, maps.items(), strict=True):
        limit = float(np.nanmax(np.abs(values))) or 1.0
        image = _map(axis, values, layers, site, cmap="RdBu_r", vmin=-limit, vmax=limit)
        st.color_bar(figure, image, axis, values=values)
    st.label_figure(figure, axes, "Attribution: (source − own) · gradient", subtitle, "Layer", x="Head")
    return figure


def _height(layers: int) -> float:
    return max(1.3, min(2.9, 0.5 + 0.08 * layers))


def _map(axis: Axes, values: np.ndarray, layers: Sequence[int], title: str, **colors: Any) -> AxesImage:
    """Draw values [layers, heads]; return the image."""
    axis.set_title(title.strip())
    st.label_places(axis.xaxis, range(values.shape[1]))
    st.label_places(axis.yaxis, layers)
    return st.heat_map(axis, values, **colors)


def _scale(kind: str, values: np.ndarray) -> dict[str, Any]:
    """Return the colour map and its ends, by the scale of a HeadMap."""
    if kind == "share":
        return {"cmap": "viridis", "vmin": 0.0, "vmax": 1.0}
    if kind == "ratio":
        return {"cmap": "RdBu_r", "vmin": 0.0, "vmax": 2.0}
    low, high = np.nanpercentile(values, [2, 98])
    if kind == "diverging":
        limit = max(abs(low), abs(high), 1e-9)
        return {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
    return {"cmap": "viridis", "vmin": low, "vmax": max(high, low + max(1e-6, 0.01 * abs(low)))}


# --- Dots of heads, coloured by layer


@st.styled
def attribution_against(compared: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """Draw a panel per comparison of scores and effects [pairs, N, H]: a dot per head, the mean of pairs."""
    figure, axes = st.panels(len(compared), 3, (2.9, 2.6))
    for axis, (name, (score, effect)) in zip(axes, compared.items(), strict=True):
        dots = np.full(score.shape[1:], "o")
        layers = _scatter_heads(axis, score.mean(0), effect.mean(0), 12, dots)
        axis.axline((0, 0), slope=1, color="0.6", linewidth=0.8, zorder=0)
        axis.set_title(f"{name}\n{len(score)} pairs", fontsize=st.SMALL)
    _layer_bar(figure, layers, axes)
    st.label_figure(figure, axes, "Attribution against patching", "", "Patch: share of the way", x="Score")
    return figure


@st.styled
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
    positive = np.where(effect > 0, effect, np.nan)  # no effect at all has no place on this scale
    legend: dict[str, Artist] = {}
    markers = np.full(effect.shape, "o")
    if kinds is not None:
        for kind, marker in zip(np.unique(kinds).tolist(), "o^sD", strict=False):
            markers[kinds == kind] = marker
            legend[kind] = Line2D([], [], marker=marker, label=kind, color="0.3", linestyle="", markersize=5)
    for axis, (name, values) in zip(axes, measures.items(), strict=True):
        layers = _scatter_heads(axis, values, positive, 16, markers)
        if np.nanmin(positive) / 10 < floor < np.nanmax(positive):
            axis.axhline(floor, color="0.4", linewidth=0.8, linestyle=":")
        axis.set_xlabel(name)
        axis.set_title(notes.get(name, ""), fontsize=st.SMALL)
    _scale_by_logarithm(axes[0])  # of all: they share the axis
    _layer_bar(figure, layers, axes)
    st.label_figure(figure, [], "Direct effect of every head", subtitle, "Direct effect (/ seeds)", legend)
    return figure


def _scatter_heads(
    axis: Axes, x: np.ndarray, y: np.ndarray, size: float, markers: np.ndarray
) -> ScalarMappable:
    """Draw a dot a head at x, y [N, H], with markers [N, H]; return the colours of the N layers."""
    N, H = x.shape
    norm, cmap = Normalize(-0.5, N - 0.5), matplotlib.colormaps["viridis"].resampled(N)
    layers = np.repeat(np.arange(N), H).reshape(N, H)
    for marker in np.unique(markers).tolist():
        at = markers == marker
        dots = axis.scatter(x[at], y[at], size, layers[at], marker=marker, cmap=cmap, norm=norm)
        dots.set_linewidth(0)
    return ScalarMappable(norm, cmap)


def _layer_bar(figure: Figure, layers: ScalarMappable, axes: Sequence[Axes]) -> None:
    """Draw the colour bar of the layers."""
    N = layers.cmap.N
    st.color_bar(figure, layers, axes, "layer", ticks=range(0, N, max(1, N // 8)))


# --- The first-frame effect


@st.styled
def placebo_strips(
    effect: np.ndarray, placebos: np.ndarray, frames: Sequence[int], title: str, subtitle=""
) -> Figure:
    """Draw a strip a head of effects [heads] and placebos [heads, frames], and the mean by frame below."""
    # Column 0 holds the effect, the columns of placebo frames theirs, others stay NaN
    columns = np.concatenate([[0], frames])
    values = np.full((len(effect), columns[-1] + 1), np.nan)
    values[:, columns] = np.concatenate([effect[:, None], placebos], 1)
    figure, (strips, means) = st.panels(2, 1, (6.0, 1.9), sharex=True, height_ratios=[2.6, 1])
    # Heads by their effect, the largest on top
    order = np.argsort(-effect, kind="stable")
    image = st.heat_map(strips, values[order], **st.color_scale(values, "mean_logit", 98))
    strips.set(ylabel="Heads, by their effect of frame 0")
    st.color_bar(figure, image, strips, "logits", values)
    mean = _quiet_mean(values)
    means.bar(columns[1:], mean[columns[1:]], color=st.BLUE, width=0.8, label="placebo: another key frame")
    means.bar([0], mean[:1], color=st.ORANGE, width=0.8, linewidth=0, label="frame 0")
    means.axhline(0, color="0.4", linewidth=0.8)
    means.set_ylabel("Mean (logits)")
    st.label_places(means.xaxis, range(columns[-1] + 1))
    _mark_absent(means, columns, mean[columns])
    strips.tick_params(labelbottom=False)
    st.label_figure(figure, [means], title, subtitle, legend=st.handles(means))
    return figure


@st.styled
def distances_and_contrasts(excess: np.ndarray, contrasts: np.ndarray, title: str, subtitle="") -> Figure:
    """Draw the mean and middle half over heads of excesses [heads, F] and contrasts [heads, first]."""
    figure, (left, right) = st.panels(2, 2, (4.5, 2.4))
    half = {"errorbar": ("pi", 50), "legend": False}
    # Left: by distance
    heads, distances = np.nonzero(np.isfinite(excess))
    band = {"color": st.BLUE, "linewidth": 1.5, "err_kws": {"alpha": 0.25, "linewidth": 0}}
    st.seaborn().lineplot(x=distances, y=excess[heads, distances], ax=left, **band, **half)
    left.set(xlabel="Distance (latent frames)", ylabel="Excess of frame 0 (logits)")
    left.set_title("Against other frames at equal distance")
    distances = np.unique(distances)
    st.label_places(left.xaxis, distances, places=distances)
    # Right: by key frame
    heads, frames = np.nonzero(np.isfinite(contrasts))
    bars = {"hue": frames == 0, "palette": {True: st.ORANGE, False: st.BLUE}, "dodge": False, "width": 0.75}
    bars |= {
        "native_scale": True,
        "saturation": 1,
        "linewidth": 0,
        "err_kws": {"color": "0.3", "linewidth": 0.9},
    }
    st.seaborn().barplot(x=frames, y=contrasts[heads, frames], ax=right, **bars, **half)
    right.set(xlabel="Key frame (latent)", ylabel="Contrast c(j) (logits)")
    right.set_title("Key frames against the line through 3–11")
    st.label_places(right.xaxis, range(contrasts.shape[1]))
    _mark_absent(right, np.arange(contrasts.shape[1]), _quiet_mean(contrasts))
    for axis in (left, right):
        axis.axhline(0, color="0.4", linewidth=0.8)
    about = "mean over heads, half of the heads within the band"
    if subtitle:
        about = f"{subtitle}; {about}"
    st.label_figure(figure, [], title, about, legend=st.handles(right))
    return figure


@st.styled
def effect_by_pass(effects: Mapping[str, np.ndarray], title: str, subtitle="") -> Figure:
    """Draw first-frame effects [heads] of every pass, by its name: a line a head, and their mean."""
    values = np.stack([of_pass.ravel() for of_pass in effects.values()])
    figure, (axis,) = st.panels(1, 1, (max(4.0, 0.9 * len(values) + 1.5), 2.6))
    axis.plot(values, color="0.6", linewidth=0.5)
    axis.plot(
        np.nanmean(values, 1), "o-", color=st.DARK, linewidth=1.8, markersize=4, label="mean over heads"
    )
    axis.axhline(0, color="0.4", linewidth=0.8, linestyle=":")
    # Names of passes share the width, less 0.5 inches of the y axis
    room = 0.9 * (figure.get_figwidth() - 0.5) / max(1, len(values))
    st.label_places(axis.xaxis, [st.wrapped(name, st.SMALL, room) for name in effects])
    axis.set(ylabel="First-frame effect s (logits)", xlim=(-0.4, len(values) - 0.6))
    st.label_figure(figure, [], title, subtitle, legend=st.handles(axis))
    return figure


def _mark_absent(axis: Axes, frames: np.ndarray, values: np.ndarray) -> None:
    """Hatch the key frames without a value, as a stopped run has them."""
    label: str | None = "not attended by a later block"
    for frame in frames[~np.isfinite(values)]:
        axis.axvspan(frame - 0.5, frame + 0.5, **st.HATCH, label=label)
        label = None  # one entry of the legend


def _quiet_mean(values: np.ndarray) -> np.ndarray:
    """Mean over heads; NaN, without a warning, for a frame that no head has."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return np.nanmean(values, 0)


# --- Interventions

DASHES = {
    "direct": ("-", st.BLUE),
    "own block": ("-.", st.ORANGE),
    "total": ("--", st.GREEN),
    "floor": (":", st.DARK),
}
FAR_BELOW = 100  # times smaller than the smallest effect: a floor that is only named


@st.styled
def effects_by_frame(changes: Mapping[str, np.ndarray], *, subtitle: str) -> Figure:
    """Draw a line per effect [F], in units of the distance between two seeds; on a logarithmic scale."""
    figure, (axis,) = st.panels(1, 1, (7.0, 2.5))
    # No change at all has no place on this scale
    positive = {name: np.where(values > 0, values, np.nan) for name, values in changes.items()}
    effects = [values for name, values in positive.items() if name != "floor" and np.isfinite(values).any()]
    least = min((np.nanmin(values) for values in effects), default=0)
    for name, values in positive.items():
        line, color = DASHES.get(name, ("-", st.PURPLE))
        label = name
        # A floor far below all effects would squeeze them: its size goes into the legend
        largest = np.nanmax(values, initial=0)
        if name == "floor" and largest < least / FAR_BELOW:
            label, values = f"floor, at most {largest:.2g}", np.empty(0)
        axis.plot(values, line, color=color, marker="o", markersize=3, linewidth=1.4, label=label)
    axis.axhline(1, color="0.4", linewidth=0.8, label="as far away as another seed")
    _scale_by_logarithm(axis)
    F = max(len(values) for values in changes.values())
    axis.set(ylabel="/ distance between seeds", xlim=(-0.6, F - 0.4))
    st.label_places(axis.xaxis, range(F))
    title = "Change of the generated frames (x0) by the edit"
    st.label_figure(figure, [axis], title, subtitle, "", st.handles(axis), "Latent frame")
    return figure


def _scale_by_logarithm(axis: Axes) -> None:
    """Make the y axis logarithmic, with ticks between powers of ten only where the range is short."""
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter("{x:g}")


@st.styled
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
    columns, row_height = 2, 0.3
    if st.is_narrow():  # names of conditions are long
        columns, row_height = 1, 0.25
    height = 0.5 + row_height * max(map(len, panels.values()))
    figure, axes = st.panels(len(panels), columns, (3.2, height), sharey=True)
    for axis, (name, conditions) in zip(axes, panels.items(), strict=True):
        if st.is_narrow():
            name = st.wrapped(name, st.LABEL, 1.3)
        rows = range(len(conditions))
        st.mark_intervals(axis, rows, list(conditions.values()), size=6)
        for row, (*_, trainings) in enumerate(conditions.values()):
            shares = [share for share in trainings if share is not None]
            strip = {"orient": "h", "native_scale": True, "jitter": False, "size": 3, "color": "0.55"}
            st.seaborn().stripplot(x=shares, y=np.full(len(shares), row + 0.26), ax=axis, **strip)
        axis.set(title=name, xlim=(-0.03, 1.03), ylim=(len(rows) - 0.4, -0.5))
        axis.set_yticks(rows, list(conditions))
    ends = axes[-1].secondary_yaxis("right")
    ends.set_yticks(range(len(counts)), [f"of {count}" for count in counts.values()])
    ends.tick_params(length=0)
    note = f"blue: all trainings, 95 % interval; grey: each training; {note}"
    st.label_figure(figure, axes, title, subtitle, y, x="Share of videos", note=note)
    return figure


@st.styled
def budget_curves(
    panels: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]],
    ceilings: Mapping[str, float],
    subtitle: str,
) -> Figure:
    """Draw a panel for each rule, the best first: of all miniatures a line in a band, of each a thin one.

    panels: miniature, or all -> budget -> (share, low, high), of one (share,). The uniform window is in all.
    """
    means = {rule: np.mean([row[0] for row in curves["all"].values()]) for rule, curves in panels.items()}
    rules = sorted((rule for rule in means if rule != "uniform"), key=lambda rule: -means[rule])
    figure, axes = st.panels(len(rules), min(4, len(rules)), (2.3, 1.9), sharey=True)
    legend: dict[str, Artist] = {}
    for axis, rule in zip(axes, rules, strict=True):
        _draw_budget(axis, panels["uniform"], "uniform windows", st.DARK)
        _draw_budget(axis, panels[rule], "the rule", st.BLUE)
        _draw_ceilings(axis.axhline, ceilings)
        axis.set(title=rule, ylim=(-0.02, 1.02))
        legend |= st.handles(axis)
    x, y = "Cache of the mean head (latent frames)", "Share back in colour and shape"
    st.label_figure(figure, axes, f"{y}, by rule and cache", subtitle, y, legend, x)
    return figure


def _draw_budget(
    axis: Axes, curves: Mapping[str, Mapping[int, Sequence[float]]], label: str, color: str
) -> None:
    """Draw the curve of all miniatures in its band, and of more than one a thin line each."""
    for name, points in curves.items():
        budgets = sorted(points)
        share = [points[budget][0] for budget in budgets]
        if name == "all":
            low, high = zip(*(points[budget][1:3] for budget in budgets), strict=True)
            axis.fill_between(budgets, low, high, color=color, alpha=0.2, linewidth=0)
            axis.plot(budgets, share, "o-", color=color, markersize=3, linewidth=1.5, label=label)
        elif len(curves) > 2:
            axis.plot(budgets, share, color=color, linewidth=0.5, label="one miniature")


def _draw_ceilings(draw_line: Any, ceilings: Mapping[str, float]) -> None:
    """Draw a line for each: what the judge says of videos that no model made."""
    for (name, value), line in zip(ceilings.items(), (":", "--", "-."), strict=False):
        draw_line(value, color="0.4", linewidth=0.8, linestyle=line, label=f"{name}, {value:.2f}")


@st.styled
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
    rows = range(len(shares))
    st.mark_intervals(axis, rows, list(shares.values()), label="share, 95 %")
    for (name, marks), color, marker in zip((others or {}).items(), (st.ORANGE, "0.5"), "Ds", strict=False):
        axis.plot(marks, rows, marker, color=color, markersize=4, label=name)
    _draw_ceilings(axis.axvline, ceilings)
    axis.set_yticks(rows, [st.wrapped(name, st.SMALL, 2.0) for name in shares])
    axis.set(ylim=(len(shares) - 0.4, -0.6), xlim=(None, 1.02))
    st.label_figure(figure, [axis], title, about, legend=st.handles(axis), x=x)
    return figure


# --- The x0 lens, and numbers by layer


@st.styled
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


@st.styled
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
