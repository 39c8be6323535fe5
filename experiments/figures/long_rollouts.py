"""Long rollouts under cache policies: what each keeps, over time, against motion and cost."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from einops import rearrange
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

import experiments.figures.style as st
from experiments.analysis.stats import Interval, percent, signed

NAMES_NOTE = "9/3: a window of 9 latent frames, 3 of them the first of the video (a sink)"
CONTROLS_NOTE = "grey: controls, scored by the same judge"


@st.styled
def long_strips(strips: Mapping[str, np.ndarray], seconds: Sequence[int], title: str, subtitle="") -> Figure:
    """Draw a row a policy, of frames side by side, uint8 [side, n · side, 3]; above it their times."""
    split = "height (n width) color -> n height width color"
    rows = {name: rearrange(strip, split, n=len(seconds)) for name, strip in strips.items()}
    beside = 1.3  # inches of the names of rows
    if st.is_narrow():
        beside = 0.9
    figure, axes, shown = st.picture_grid(rows, [f"{second} s" for second in seconds], beside)
    for axis, name in zip(axes[:: len(shown)], strips, strict=True):
        axis.set_ylabel(st.wrapped(name, st.SMALL, beside - 0.1), rotation=0, ha="right", va="center")
    st.label_figure(figure, [], title, subtitle, note=NAMES_NOTE)
    return figure


def _by_estimate(values: Mapping[str, Any], controls: Sequence[str]) -> list[str]:
    """Return the policies by their values, the largest first, and behind them the controls."""
    estimates = {name: float(np.ravel(value)[0]) for name, value in values.items()}
    policies = sorted((name for name in values if name not in controls), key=lambda name: -estimates[name])
    return [*policies, *(name for name in controls if name in values)]


@st.styled
def policy_dots(
    panels: Mapping[str, Mapping[str, Interval]], controls: Sequence[str], label: str, subtitle=""
) -> Figure:
    """Draw a panel a kind of scene, a dot and its 95 % interval for every policy, the best on top.

    Controls are grey, and dotted lines through the panel: they bound what the score can say.
    """
    first = next(iter(panels.values()))
    names = _by_estimate(first, controls)
    size = (max(2.2, 6.4 / len(panels)), 0.7 + 0.19 * len(names))
    columns = 2 if st.is_narrow() else len(panels)
    figure, axes = st.panels(len(panels), columns, size, keep=True, sharey=True)
    for axis, (kind, values) in zip(axes, panels.items(), strict=True):
        _draw_policies(axis, values, names, controls)
        for name in controls:
            axis.axvline(values[name].estimate, color=st.CONTROL, linewidth=0.8, linestyle=":")
        axis.set_xlim(-0.06, 1.06)
        axis.set_xticks([0, 0.5, 1], ["0", "50", "100\u00a0%"])
        if len(panels) > 1:
            axis.set_title(kind)
    policies = [name for name in names if name not in controls]
    best, worst = policies[0], policies[-1]
    title = f"{label}: most with {best} ({percent(first[best].estimate)}), "
    title += f"least with {worst} ({percent(first[worst].estimate)})"
    note = f"lines: 95 % intervals; {CONTROLS_NOTE}; {NAMES_NOTE}"
    st.label_figure(figure, axes, title, subtitle, x="Share of seconds", note=note)
    return figure


def _draw_policies(
    axis: Axes, values: Mapping[str, Interval | float], names: Sequence[str], controls: Sequence[str]
) -> None:
    """Draw a dot in the row of each policy, with its interval where it has one."""
    for row, name in enumerate(names):
        color, marker = (st.CONTROL, "s") if name in controls else (st.DARK, "o")
        value = values.get(name)
        if isinstance(value, Interval):
            st.mark_intervals(axis, [row], [value], color, marker)
        elif value is not None:
            axis.plot([value], [row], marker, color=color, markersize=5)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)


@st.styled
def policy_measures(
    measures: Mapping[str, Mapping[str, Interval | float]], controls: Sequence[str], title: str, subtitle=""
) -> Figure:
    """Draw a panel a measure, each on its own scale, a row a policy, the largest of the first measure on top.

    Dotted lines stand at the last control.
    """
    names = _by_estimate(next(iter(measures.values())), controls)
    columns = 2 if st.is_narrow() else min(3, len(measures))
    size = (max(2.2, 6.4 / columns), 0.7 + 0.19 * len(names))
    figure, axes = st.panels(len(measures), columns, size, keep=True, sharey=True)
    for axis, (label, values) in zip(axes, measures.items(), strict=True):
        _draw_policies(axis, values, names, controls)
        for name in [name for name in controls if name in values][-1:]:
            axis.axvline(float(np.ravel(values[name])[0]), color=st.CONTROL, linewidth=0.8, linestyle=":")
        axis.margins(x=0.08)
        axis.xaxis.set_major_locator(MaxNLocator(2 if st.is_narrow() else 3))
        axis.set_title(st.wrapped(label, st.LABEL, 0.85) if st.is_narrow() else label)
    note = NAMES_NOTE
    if controls:
        note = f"lines: 95 % intervals; dotted: {controls[-1]}; {CONTROLS_NOTE}; {NAMES_NOTE}"
    st.label_figure(figure, [], title, subtitle, note=note)
    return figure


@st.styled
def drift_over_time(
    measures: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]], controls: Sequence[str], subtitle=""
) -> Figure:
    """Draw a panel a measure, a row a policy, a column a second: its mean [seconds] over prompts.

    The policies that keep most of the first measure are on top, the controls below.
    """
    first = {name: curve["mean"] for name, curve in next(iter(measures.values())).items()}
    names = _by_estimate({name: np.nanmean(mean) for name, mean in first.items()}, controls)
    policies = [name for name in names if name not in controls]
    figure, axes = st.panels(len(measures), 1, (7.0, 0.6 + 0.16 * len(names)), sharex=True)
    for axis, (label, curves) in zip(axes, measures.items(), strict=True):
        values = np.array([curves[name]["mean"] for name in names])
        image = st.heat_map(axis, values, cmap="viridis")
        axis.set_yticks(range(len(names)), names)
        if controls:
            axis.axhline(len(policies) - 0.5, color="white", linewidth=2)
        axis.set_title(label)
        st.label_places(axis.xaxis, range(values.shape[1]))
        st.color_bar(figure, image, axis)
    # What the first and the last ten seconds have
    ends = {name: (np.nanmean(first[name][:10]), np.nanmean(first[name][-10:])) for name in policies}
    most = min(ends, key=lambda name: ends[name][1] - ends[name][0])
    label = next(iter(measures))
    title = (
        f"{label}: from {ends[most][0]:.2f} in the first ten seconds to {ends[most][1]:.2f} in the last with "
    )
    title += f"{most}, from {ends[policies[0]][0]:.2f} to {ends[policies[0]][1]:.2f} with {policies[0]}"
    st.label_figure(
        figure,
        axes[-1:],
        title,
        subtitle,
        x="Second of the video",
        note=f"colours: mean of all videos; {NAMES_NOTE}",
    )
    return figure


SINKS = {"window": "the sink stays at its positions", "deep_sink": "the sink moves along with the window"}


@st.styled
def sink_maps(
    maps: Mapping[str, tuple[Sequence[int], Sequence[int], np.ndarray]], label: str, subtitle=""
) -> Figure:
    """Draw a heat map a policy: windows x sinks in frames -> shares; NaN is empty."""
    # One scale for all maps, or they could not be compared.
    low = min(np.nanmin(values) for _, _, values in maps.values())
    high = max(np.nanmax(values) for _, _, values in maps.values())
    columns = 1 if st.is_narrow() else 3  # cells have room for their numbers
    figure, axes = st.panels(len(maps), columns, (3.6, 2.0))
    best = []
    for axis, (name, (windows, sinks, values)) in zip(axes, maps.items(), strict=True):
        image = st.heat_map(axis, values, cmap="viridis", vmin=low, vmax=high)
        st.write_cells(axis, values, percent, (low + high) / 2)
        st.label_places(axis.xaxis, sinks)
        st.label_places(axis.yaxis, windows)
        axis.set_title(f"{name}: {SINKS.get(name, '')}".rstrip(": "))
        row, column = divmod(int(np.nanargmax(values)), len(sinks))
        where = SINKS.get(name, name).removeprefix("the sink ")
        best.append(f"window {windows[row]} with sink {sinks[column]} ({percent(values[row, column])})")
        best[-1] += f" if the sink {where}"
    bar = st.color_bar(figure, image, axes, label)
    bar.formatter = FuncFormatter(lambda share, _: percent(share))
    bar.update_ticks()
    st.label_figure(
        figure, axes, f"Best: {'; '.join(best)}", subtitle, "Window (latent frames)", x="Sink (latent frames)"
    )
    return figure


@st.styled
def rope_against_distance(
    distances: np.ndarray,
    coherence: np.ndarray,
    reach: Mapping[str, tuple[int, int]],
    marks: Sequence[tuple[int, float]],
) -> Figure:
    """Draw Re C(Δ) over Δ in latent frames; below it how far each policy's sink stands from the queries."""
    figure, (above, below) = st.panels(2, 1, (7.0, 1.5), sharex=True, height_ratios=[1.6, 1])
    above.plot(distances, coherence, color=st.DARK, linewidth=1)
    title = "RoPE tells frames apart by their distance"
    if marks:
        places, heights = zip(*marks, strict=True)
        above.plot(places, heights, "v", color=st.DARK, markersize=5)
        distances_named = ", ".join(map(str, sorted(places)))
        title = f"To RoPE, frames {distances_named} apart look more alike than their neighbours"
    above.set_ylabel("Agreement Re\u00a0C(Δ)")
    below.set_title("How far from the queries a policy's sink stands")
    # From the first to the last distance at which queries of a block see the sink
    below.barh(
        range(len(reach)), [last - first for first, last in reach.values()], color=st.FIRST, height=0.6
    )
    below.set_yticks(range(len(reach)), [st.wrapped(name, st.TINY, 1.2) for name in reach], fontsize=st.TINY)
    below.set_ylim(len(reach) - 0.5, -0.5)
    x = "Δ, latent frames between query and key"
    st.label_figure(
        figure,
        [below],
        title,
        "Re C(Δ) is 1 for equal positions, mean over Wan's 22 time frequencies; marked: the highest maxima",
        x=x,
    )
    return figure


@st.styled
def effect_by_length(
    effects: Mapping[str, Mapping[int, Interval]], placebos: Mapping[int, float], subtitle=""
) -> Figure:
    """Draw s by the length of the rollout, a line a policy with intervals; placebos under the whole past."""
    figure, (axis,) = st.panels(1, 1, (6.4, 2.6))
    for (name, by_length), color, marker in zip(
        effects.items(), st.series(len(effects)), "osD^vPX", strict=False
    ):
        lengths = list(by_length)
        estimate, low, high = zip(*by_length.values(), strict=True)
        axis.plot(lengths, estimate, marker=marker, color=color, label=name, markersize=4)
        axis.fill_between(lengths, low, high, color=color, alpha=0.15, linewidth=0)
    label = "largest effect of another early frame, full"
    axis.plot(list(placebos), list(placebos.values()), ":", color=st.CONTROL, linewidth=1, label=label)
    axis.set_ylabel("First-frame effect s (logits)")
    estimates = [interval.estimate for by_length in effects.values() for interval in by_length.values()]
    between = f"{signed(min(estimates))} and {signed(max(estimates))}"
    title = f"At every length the mean first-frame effect lies between {between} logits"
    x = "Length of the rollout (latent frames)"
    st.label_figure(figure, [axis], title, subtitle, legend=st.handles(axis), x=x)
    return figure
