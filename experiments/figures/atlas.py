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
from experiments.analysis.stats import percent, signed, spearman

KINDS = ("anchor", "static", "wave", "dynamic", "veil")  # from dark to light: each set of kinds is far apart
MEANING = {  # of kinds of heads, by published rules (experiments/analysis/taxonomy.py)
    "anchor": "nearly all logits of the past are above 0",
    "wave": "some logits of the past are above 0",
    "veil": "almost no logit of the past is above 0",
    "static": "the mass is on the newest frames",
    "dynamic": "the mass reaches further back",
}
OTHER_KIND = "the head is of another kind in what it is compared with"
SHARED = ("logits", "1: another seed", "share of x0")  # units whose panels are to be compared


# --- Maps layers × heads


@st.styled
def head_maps(
    maps: Sequence[HeadMap], layers: Sequence[int], *, subtitle: str, title="Measures of every head"
) -> Figure:
    """Draw a panel per measure, scales from the 5th to 95th percentile, shared by logits and by effects."""
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
    if st.is_narrow():
        height = 1.0
        if len(shown) <= 4:
            height = min(_height(len(layers)) + 0.3, 2.0)
    figure, axes = st.panels(len(shown), columns, (3.0, height))
    # 2. Units that are compared share a scale; a share of 1 has its own ends
    legend: dict[str, Artist] = {}
    scales = {(panel.scale, panel.unit) for panel, _ in shown}
    is_shared = len(shown) > 1 and len(scales) == 1 and shown[0][0].unit in SHARED
    for axis, (panel, values) in zip(axes, shown, strict=True):
        compared = [values]
        if panel.unit in SHARED:
            compared = [v for other, v in shown if (other.scale, other.unit) == (panel.scale, panel.unit)]
        colors = _scale(panel.scale, np.stack(compared))
        image = _map(axis, values, layers, f"{capitalized(panel.title)}\n{panel.queries}", **colors)
        if not is_shared:
            st.color_bar(figure, image, axis, panel.unit, values)
        if np.isnan(values).any():
            legend["absent"] = Patch(facecolor=st.GREY, label="no value")
    if is_shared:
        st.color_bar(figure, image, axes, shown[0][0].unit, np.stack(compared))
    note = st.missing_note(missing)
    st.label_figure(figure, axes, title, subtitle, "Layer", legend, "Head", note)
    return figure


@st.styled
def label_maps(maps: Sequence[LabelMap], layers: Sequence[int], *, subtitle: str, title="") -> Figure:
    """Draw a panel per map of labels; a dot marks a head whose label is another in what it is compared with.

    Maps without labels are left out. The title counts the labels of the first map, unless one is given.
    """
    shown = [(panel, panel.labels) for panel in maps if panel.labels is not None]
    figure, axes = st.panels(len(shown), min(4, max(1, len(shown))), (2.4, _height(len(layers)) + 0.4))
    legend: dict[str, Artist] = {}
    color_of = dict(zip(KINDS, st.series(len(KINDS)), strict=True))
    for axis, (panel, labels) in zip(axes, shown, strict=True):
        names = list(panel.names.values())
        legend |= {name: Patch(facecolor=color_of[name], label=f"{name}: {MEANING[name]}") for name in names}
        # Labels are any integers: colours count them in the order of the names
        values = np.full(labels.shape, np.nan)
        for i, label in enumerate(panel.names):
            values[labels == label] = i
        colors = {"cmap": ListedColormap([color_of[name] for name in names]), "vmin": -0.5}
        _map(axis, values, layers, f"{panel.title}\n{panel.queries}", vmax=len(names) - 0.5, **colors)
        if panel.differs is not None:
            rows, columns = np.nonzero(panel.differs)
            (dots,) = axis.plot(columns, rows, "o", color="black", markersize=3, label=OTHER_KIND)
            dots.set(markeredgecolor="white", markeredgewidth=0.6)
            legend["differs"] = dots
    if not title and shown:
        panel, labels = shown[0]
        counts = [f"{(labels == label).sum()} {name}" for label, name in panel.names.items()]
        title = f"Kinds of {labels.size} heads: {', '.join(counts)}"
    reasons = [panel.missing_reason for panel in maps if panel.labels is None and panel.missing_reason]
    note = reasons[0] if reasons and not shown else ""
    st.label_figure(figure, axes, title or "Kinds of heads", subtitle, "Layer", legend, "Head", note)
    return figure


@st.styled
def correlation_map(correlation: np.ndarray, layers: Sequence[int], quantity: str) -> Figure:
    """Draw correlations [layers, heads] from -1 to 1."""
    known = correlation[np.isfinite(correlation)]
    title = f"{quantity}: how alike each head is in two atlases"
    if known.size:
        title += f", r = {signed(float(known.mean()))} on average, at least {signed(float(known.min()))}"
    names = ("Layer", "Head", "correlation r")
    return st.one_heat_map(correlation, title, "", names, layers, cmap="RdBu_r", vmin=-1, vmax=1)


@st.styled
def attribution_maps(maps: Mapping[str, np.ndarray], layers: Sequence[int], *, subtitle: str) -> Figure:
    """Draw the scores of each site, [layers, heads] or [layers, 1]; red adds to the metric."""
    figure, axes = st.panels(len(maps), min(3, len(maps)), (3.0, _height(len(layers)) + 0.3))
    for axis, (site, values) in zip(axes, maps.items(), strict=True):
        limit = float(np.nanmax(np.abs(values))) or 1.0
        image = _map(axis, values, layers, site, cmap="RdBu_r", vmin=-limit, vmax=limit)
        st.color_bar(figure, image, axis, "score", values)
    title = "Estimated effect of taking each activation from the other run: (source − own) · gradient"
    st.label_figure(figure, axes, title, subtitle, "Layer", x="Head")
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
    low, high = np.nanpercentile(values, [5, 95])  # a few heads would leave all others pale
    if kind == "diverging":
        limit = max(abs(low), abs(high), 1e-9)
        return {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
    return {"cmap": "viridis", "vmin": low, "vmax": max(high, low + max(1e-6, 0.01 * abs(low)))}


# --- Dots of heads, coloured by layer


def _panels_of_dots(n: int) -> tuple[st.StyledFigure, list[Axes]]:
    """Make panels of dots; a few in a column lie one below the other: hundreds of dots need room."""
    if st.is_narrow() and n <= 3:
        return st.panels(n, 1, (2.9, 1.9))
    return st.panels(n, 3, (2.9, 2.6))


@st.styled
def attribution_against(compared: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """Draw a panel per comparison of scores and effects [pairs, N, H]: a dot per head, the mean of pairs."""
    figure, axes = _panels_of_dots(len(compared))
    agreements = {}
    for axis, (name, (score, effect)) in zip(axes, compared.items(), strict=True):
        dots = np.full(score.shape[1:], "o")
        layers = _scatter_heads(axis, score.mean(0), effect.mean(0), 12, dots)
        axis.axline((0, 0), slope=1, color="0.6", linewidth=0.8, zorder=0)
        of_pairs = [spearman(a.ravel(), b.ravel()) for a, b in zip(score, effect, strict=True)]
        agreements[name] = float(np.mean(of_pairs))
        axis.set_title(f"{name}\nρ = {agreements[name]:.2f}", fontsize=st.SMALL)
    _layer_bar(figure, layers, axes)
    best, worst = (choose(agreements, key=agreements.__getitem__) for choose in (max, min))
    title = f"Estimates rank heads as exact patches do by ρ = {agreements[best]:.2f} ({best}) down to "
    title += f"{agreements[worst]:.2f} ({worst})"
    pairs = len(next(iter(compared.values()))[0])
    about = f"a dot is a head, the mean of {pairs} pairs of captions; ρ is the mean over pairs; line: equal"
    x, y = "Estimated effect (share of the way)", "Exact effect: share of the way to the other caption's x0"
    st.label_figure(figure, axes, title, about, y, x=x)
    return figure


@st.styled
def preference_dots(
    older: HeadMap, newer: Sequence[HeadMap], *, border: float, title: str, subtitle=""
) -> Figure:
    """Draw a panel per newer measure of the preference for frame 0 over an older one, a dot a head [N, H].

    Lines stand at the border above which a head is said to prefer frame 0. Nothing is drawn where the older
    measure is absent.
    """
    missing = [panel for panel in (older, *newer) if panel.values is None]
    shown = []
    if older.values is not None:
        shown = [(panel, panel.values) for panel in newer if panel.values is not None]
    figure, axes = _panels_of_dots(len(shown))
    for axis, (panel, values) in zip(axes, shown, strict=True):
        layers = _scatter_heads(axis, np.asarray(older.values), values, 14, np.full(values.shape, "o"))
        for draw_line in (axis.axhline, axis.axvline):
            draw_line(border, color="0.4", linewidth=0.8, linestyle=":")
        if panel.unit == older.unit:
            axis.axline((0, 0), slope=1, color="0.6", linewidth=0.8, zorder=0)
        axis.set_ylabel(f"{capitalized(panel.title)} ({panel.unit})")
    notes = [st.missing_note((panel.title, panel.missing_reason) for panel in missing)]
    if shown:
        _layer_bar(figure, layers, axes)
        notes.insert(0, f"a dot is a head; dotted: {border:g} {older.unit}; line: equal")
    note = "; ".join(filter(None, notes))
    x = f"{capitalized(older.title)} ({older.unit})"
    st.label_figure(figure, axes, title, subtitle, x=x, note=note)
    return figure


def capitalized(text: str) -> str:
    """Return text with its first letter large, the rest as it is; a symbol such as s stays small."""
    if text[1:2] == " ":
        return text
    return text[:1].upper() + text[1:]


@st.styled
def effect_against(
    effect: np.ndarray,
    measures: Mapping[str, np.ndarray],
    notes: Mapping[str, str],
    *,
    title: str,
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
        axis.set_xlabel(capitalized(name))
        axis.set_title(notes.get(name, "").replace("-", "−"), fontsize=st.SMALL)
    _scale_by_logarithm(axes[0])  # of all: they share the axis
    _layer_bar(figure, layers, axes)
    y = "Direct effect on x0 (1: another seed)"
    note = "a dot is a head; partial ρ: given layer and size of the head's output"
    st.label_figure(figure, [], title, subtitle, y, legend, note=note)
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
    st.color_bar(figure, layers, axes, "Layer", ticks=range(0, N, max(1, N // 8)))


# --- The first-frame effect


@st.styled
def placebo_strips(effect: np.ndarray, placebos: np.ndarray, frames: Sequence[int], subtitle="") -> Figure:
    """Draw a strip a head of effects [heads] and placebos [heads, frames], and the mean by frame below.

    A placebo is the same fit for another key frame.
    """
    # Column 0 holds the effect, the columns of placebo frames theirs, others stay NaN
    columns = np.concatenate([[0], frames])
    values = np.full((len(effect), columns[-1] + 1), np.nan)
    values[:, columns] = np.concatenate([effect[:, None], placebos], 1)
    figure, (strips, means) = st.panels(2, 1, (6.0, 1.9), sharex=True, height_ratios=[2.6, 1])
    # Heads by their effect, the largest on top
    order = np.argsort(-effect, kind="stable")
    image = st.heat_map(strips, values[order], **st.color_scale(values, "mean_logit", 98))
    strips.set(ylabel="Heads, sorted by frame 0")
    st.color_bar(figure, image, strips, "Effect of a key frame (logits)", values)
    mean = _quiet_mean(values)
    means.bar(columns[1:], mean[columns[1:]], color=st.PAST, width=0.8, label="placebo: another key frame")
    means.bar([0], mean[:1], color=st.FIRST, width=0.8, linewidth=0, label="frame 0")
    means.axhline(0, color="0.4", linewidth=0.8)
    means.set_ylabel("Mean (logits)")
    st.label_places(means.xaxis, range(columns[-1] + 1))
    _mark_absent(means, columns, mean[columns])
    strips.tick_params(labelbottom=False)
    title = f"Frame 0 gets {_more_or_less(mean[0], 'more', 'less')} than its distance explains"
    others = np.abs(mean[columns[1:]])
    if np.isfinite(others).any():
        title += f"; other early key frames, the placebos, at most {np.nanmax(others):.2f} in size"
    st.label_figure(figure, [means], title, subtitle, legend=st.handles(means))
    return figure


def _more_or_less(logits: float, more: str, less: str) -> str:
    """Say how many logits something is above or below."""
    if logits < 0:
        return f"{-logits:.2f} logits {less}"
    return f"{logits:.2f} logits {more}"


@st.styled
def distances_and_contrasts(excess: np.ndarray, contrasts: np.ndarray, subtitle="") -> Figure:
    """Draw means over heads of excesses [heads, F] and contrasts [heads, first], with 95 % intervals."""
    figure, (left, right) = st.panels(2, 2, (4.5, 2.4))
    of_mean = {"errorbar": ("se", 1.96), "legend": False}
    # Left: by distance
    heads, distances = np.nonzero(np.isfinite(excess))
    band = {"color": st.FIRST, "linewidth": 1.5, "err_kws": {"alpha": 0.25, "linewidth": 0}}
    st.seaborn().lineplot(x=distances, y=excess[heads, distances], ax=left, **band, **of_mean)
    left.set(xlabel="Distance to the query (latent frames)", ylabel="Frame 0 − others (logits)")
    left.set_title("Frame 0 against other frames at equal distance")
    distances = np.unique(distances)
    st.label_places(left.xaxis, distances, places=distances)
    # Right: by key frame
    heads, frames = np.nonzero(np.isfinite(contrasts))
    bars = {"hue": frames == 0, "palette": {True: st.FIRST, False: st.PAST}, "dodge": False, "width": 0.75}
    bars |= {
        "native_scale": True,
        "saturation": 1,
        "linewidth": 0,
        "err_kws": {"color": "0.3", "linewidth": 0.9},
    }
    st.seaborn().barplot(x=frames, y=contrasts[heads, frames], ax=right, **bars, **of_mean)
    right.set(xlabel="Key frame (latent)", ylabel="Above the line (logits)")
    right.set_title("Key frames above the line through 3–11")
    st.label_places(right.xaxis, range(contrasts.shape[1]))
    mean = _quiet_mean(contrasts)
    _mark_absent(right, np.arange(contrasts.shape[1]), mean)
    for axis in (left, right):
        axis.axhline(0, color="0.4", linewidth=0.8)
    title = "Frame 0 against other frames"
    if np.isfinite(mean[0]):
        difference = _more_or_less(mean[0], "above", "below")
        title = f"Frame 0 is {difference} what the frames after it lead to expect"
    note = "mean over heads, all query frames; bands and lines: 95 % interval of the mean"
    st.label_figure(figure, [], title, subtitle, legend=st.handles(right), note=note)
    return figure


@st.styled
def effect_by_pass(effects: Mapping[str, np.ndarray], subtitle="") -> Figure:
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
    means = [f"{signed(float(np.nanmean(of_pass)))} in {name}" for name, of_pass in effects.items()]
    title = f"Mean first-frame effect over heads, in logits: {means[0]}, {means[-1]}"
    st.label_figure(figure, [], title, subtitle, legend=st.handles(axis), note="a grey line is a head")
    return figure


@st.styled
def effect_by_model(effects: Mapping[str, np.ndarray], subtitle="") -> Figure:
    """Draw a row a model of first-frame effects [layers, heads]: a dot a head, a bar at their mean."""
    figure, (axis,) = st.panels(1, 1, (7.0, 0.7 + 0.3 * len(effects)))
    means = {name: float(np.nanmean(values)) for name, values in effects.items()}
    for row, (name, values) in enumerate(effects.items()):
        # Dots lie beside each other: multiples of the golden ratio are spread evenly
        ordered = np.sort(values[np.isfinite(values)])
        beside = row + 0.5 * (np.arange(len(ordered)) * 0.618 % 1 - 0.5)
        axis.plot(ordered, beside, "o", color=st.MEASURED, alpha=0.35, markersize=2.5, linewidth=0)
        axis.plot([means[name]] * 2, [row - 0.38, row + 0.38], color=st.DARK, linewidth=2)
    axis.axvline(0, color="0.4", linewidth=0.8, linestyle=":")
    names = [f"{st.wrapped(name, st.SMALL, 1.6)}" for name in effects]
    axis.set_yticks(range(len(effects)), names)
    axis.set_ylim(len(effects) - 0.4, -0.6)
    low, high = (choose(means, key=means.__getitem__) for choose in (min, max))
    title = f"Mean first-frame effect of all heads: {signed(means[low])} logits in {low}, "
    title += f"{signed(means[high])} in {high}"
    legend = {
        "head": Line2D(
            [], [], color=st.MEASURED, alpha=0.5, marker="o", markersize=3, linestyle="", label="a head"
        ),
        "mean": Line2D([], [], color=st.DARK, linewidth=2, label="mean over heads"),
    }
    x = "First-frame effect s (logits): above 0 a head prefers frame 0"
    st.label_figure(figure, [axis], title, subtitle, legend=legend, x=x)
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

# name of an effect -> what was edited, line, colour (docs/interventions.md)
EFFECTS = {
    "direct": ("only this block is edited, its past is not", "-", st.MEASURED),
    "own block": ("only the first block is edited", "-.", st.OWN),
    "total": ("every block is edited", "--", st.DARK),
    "floor": ("nothing but rounding", ":", st.CONTROL),
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
        label, line, color = EFFECTS.get(name, (name, "-", st.MEASURED))
        # A floor far below all effects would squeeze them: its size goes into the legend
        largest = np.nanmax(values, initial=0)
        if name == "floor" and largest < least / FAR_BELOW:
            label, values = f"{label}: at most {largest:.2g}", np.empty(0)
        axis.plot(values, line, color=color, marker="o", markersize=3, linewidth=1.4, label=label)
    axis.axhline(1, color="0.4", linewidth=0.8, label="another seed")
    _scale_by_logarithm(axis)
    F = max(len(values) for values in changes.values())
    axis.set(ylabel="Change of x0 (1: another seed)", xlim=(-0.6, F - 0.4))
    st.label_places(axis.xaxis, range(F))
    title = "The edit changes no frame"
    total = positive.get("total", np.full(F, np.nan))
    if np.isfinite(total).any():
        frame = int(np.nanargmax(total))
        title = f"The edit changes frame {frame} most, by {total[frame]:.2g} of the way to another seed"
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
    title: str,
    y: str = "Heads whose past is taken away",
    note: str = "",
    chosen: Sequence[str] = (),
) -> Figure:
    """Draw a panel a question, a row a set of heads: the share with its interval, a small dot a training.

    panels: question -> set -> (share, low, high, shares of trainings, None where there is none). counts:
    videos that the last panel's shares are of. chosen: the sets in colour, the others are grey.
    """
    columns, row_height = 2, 0.34
    if st.is_narrow():  # names of sets are long
        columns = 1
    height = 0.55 + row_height * max(map(len, panels.values()))
    figure, axes = st.panels(len(panels), columns, (3.4, height), sharey=True)
    for axis, (question, rows) in zip(axes, panels.items(), strict=True):
        _draw_shares(axis, rows, chosen)
        if st.is_narrow():  # names of sets take half of the width
            question = st.wrapped(question.replace("\n", " "), st.LABEL, 1.4)
        axis.set_title(question)
    if counts:
        ends = axes[-1].secondary_yaxis("right")
        ends.set_yticks(range(len(counts)), [f"n = {count}" for count in counts.values()])
        ends.tick_params(length=0)
    note = "; ".join(part for part in (SHARES_NOTE, note) if part)
    st.label_figure(figure, axes, title, subtitle, y, x="Share of videos", note=note)
    return figure


SHARES_NOTE = "large dots: all trainings, with the 95 % interval; small dots: single trainings"


def _draw_shares(axis: Axes, rows: Mapping[str, Sequence[Any]], chosen: Sequence[str]) -> None:
    """Draw a row for each name -> (share, low, high, shares of trainings), its percentage above the dot."""
    for row, (name, (share, low, high, trainings)) in enumerate(rows.items()):
        color = st.MEASURED if name in chosen else "0.4"
        # An interval of t may end outside of what a share can be
        st.mark_intervals(axis, [row], [(share, max(low, 0), min(high, 1))], color, size=6)
        shares = [value for value in trainings if value is not None]
        axis.plot(shares, np.full(len(shares), row + 0.27), "o", color=color, alpha=0.5, markersize=2.5)
        side = "center"
        if share > 0.9:
            side = "right"
        elif share < 0.1:
            side = "left"
        text = axis.annotate(percent(share), (share, row), (0, 5), textcoords="offset points")
        text.set(fontsize=st.SMALL, color=color, ha=side)
        text.set_bbox({"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.5})
    axis.set(xlim=(-0.03, 1.03), ylim=(len(rows) - 0.4, -0.7))
    axis.set_yticks(range(len(rows)), list(rows))
    st.label_places(axis.xaxis, ["0", "25 %", "50 %", "75 %", "100 %"], places=[0, 0.25, 0.5, 0.75, 1])


@st.styled
def budget_shares(
    panels: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]], subtitle: str, note: str = ""
) -> Figure:
    """Draw a panel for three sizes of a cache, a row a rule: the share with its interval, a dot a training.

    panels: rule -> training, or all -> frames of the mean head -> (share, low, high), of one (share,). The
    line and band in each panel are the rule "uniform", in which all heads keep the same window.
    """
    uniform = panels["uniform"]["all"]
    means = {rule: np.mean([row[0] for row in curves["all"].values()]) for rule, curves in panels.items()}
    rules = sorted((rule for rule in means if rule != "uniform"), key=lambda rule: -means[rule])
    sizes = sorted(set(uniform).intersection(*(panels[rule]["all"] for rule in rules)))
    sizes = [sizes[n] for n in np.unique(np.linspace(0, len(sizes) - 1, 3).round().astype(int))]
    columns = 1 if st.is_narrow() else len(sizes)
    figure, axes = st.panels(len(sizes), columns, (2.9, 0.55 + 0.34 * len(rules)), sharey=True)
    for axis, size in zip(axes, sizes, strict=True):
        # 1. What all heads alike give, in its interval
        share, low, high = uniform[size][:3]
        label = "every head keeps the same window, with the 95 % interval"
        axis.axvspan(low, high, color="0.9", linewidth=0, zorder=0)
        line = axis.axvline(share, color=st.DARK, linewidth=1.5, zorder=1, label=label)
        # 2. The rules, which give some heads more than others
        rows = {}
        for rule in rules:
            single = [
                points[size][0] for name, points in panels[rule].items() if name != "all" and size in points
            ]
            rows[rule] = (*panels[rule]["all"][size][:3], single)
        _draw_shares(axis, rows, rules)
        name = f"Cache of {size} frames a head"
        if st.is_narrow():
            name = st.wrapped(name, st.LABEL, 1.4)
        axis.set_title(name)
    size = sizes[-1]
    best = max(rules, key=lambda rule: panels[rule]["all"][size][0])
    shares = [percent(panels[rule]["all"][size][0]) for rule in ("uniform", best)]
    title = f"At {size} frames a head, equal windows bring {shares[0]} of hidden shapes back; the best of "
    title += f"{len(rules)} rules that favour some heads brings {shares[1]} ({best})"
    note = "; ".join(part for part in (SHARES_NOTE, note) if part)
    x, y = "Videos whose shape is back in colour and outline", "Heads are chosen by"
    st.label_figure(figure, axes, title, subtitle, y, {"uniform": line}, x, note)
    return figure


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
    for (name, marks), color, marker in zip(
        (others or {}).items(), (st.COMPARED, st.CONTROL), "Ds", strict=False
    ):
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
    figure.set_figheight(figure.get_figheight() + 0.2 * len(layers))
    close = [layer for layer, far in zip(layers, distance, strict=True) if (far <= 0.5).all()]
    title = "The picture that the output head reads behind each layer"
    if close:
        title += f": at every step at most 0.5 from the final one from layer {close[0]} on"
    st.label_figure(figure, [], title, "below each picture: distance of its x0 to the final x0")
    return figure


@st.styled
def lines_by_layer(
    values: Sequence[Sequence[float]] | np.ndarray, layers: Sequence[int], names: Sequence[str], y: str
) -> Figure:
    """Draw values [layers, names] over the layers, a line a name; the title says what changes most."""
    figure, (axis,) = st.panels(1, 1, (5.0, 2.4))
    colors = st.series(len(names))
    for n, (column, name) in enumerate(zip(np.asarray(values).T, names, strict=True)):
        axis.plot(layers, column, marker="osD^v"[n % 5], markersize=3, color=colors[n], label=name)
    axis.set_ylabel(capitalized(y))
    first, last = np.asarray(values)[[0, -1]]
    most = int(np.abs(last - first).argmax())
    title = f"{capitalized(names[most])}: {y} changes most, from {first[most]:.3g} in layer {layers[0]} "
    title += f"to {last[most]:.3g} in layer {layers[-1]}"
    st.label_figure(figure, [axis], title, x="Layer", legend=st.handles(axis))
    return figure
