"""Long rollouts under cache policies: what each keeps, over time, against motion and cost."""

from collections.abc import Mapping, Sequence

import numpy as np
from einops import rearrange
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import experiments.figures.style as st
from experiments.analysis.stats import Interval

LINES = (st.RED, st.BLUE, st.GREEN, st.ORANGE, st.PURPLE, st.YELLOW, st.SKY)
CONTROL = "0.45"  # grey of what bounds a score
CONTROL_MARKERS = {"frozen": "s", "vae": "P", "rendered": "X"}


@st.styled
def long_strips(strips: Mapping[str, np.ndarray], seconds: Sequence[int], subtitle="") -> Figure:
    """Draw a row a policy, of frames side by side, uint8 [side, n · side, 3]; above it their times."""
    split = "height (n width) color -> n height width color"
    rows = {name: rearrange(strip, split, n=len(seconds)) for name, strip in strips.items()}
    figure, axes, shown = st.picture_grid(rows, [f"{second} s" for second in seconds])
    for axis, name in zip(axes[:: len(shown)], strips, strict=True):
        axis.set_ylabel(st.wrapped(name, st.SMALL, 1.1), rotation=0, ha="right", va="center")
    st.label_figure(figure, [], "Long rollouts", subtitle)
    return figure


@st.styled
def policy_dots(
    panels: Mapping[str, Mapping[str, Interval]], controls: Sequence[str], label: str, subtitle=""
) -> Figure:
    """Draw a panel a kind of scene, a dot and its 95 % interval for every policy.

    Controls are grey, and dotted lines through the panel: they bound what the score can say.
    """
    names = list(dict.fromkeys(name for values in panels.values() for name in values))
    size = (max(2.2, 6.4 / len(panels)), 0.7 + 0.19 * len(names))
    columns = 2 if st.is_narrow() else len(panels)
    figure, axes = st.panels(len(panels), columns, size, keep=True, sharey=True)
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        for name, interval in values.items():
            ends = [(interval.estimate, interval.low, interval.high)]
            row = [names.index(name)]
            if name in controls:
                st.mark_intervals(axis, row, ends, CONTROL, "s")
                axis.axvline(interval.estimate, color=CONTROL, linewidth=0.8, linestyle=":")
            else:
                st.mark_intervals(axis, row, ends, st.DARK)
        axis.set_yticks(range(len(names)), names)
        axis.set(ylim=(len(names) - 0.5, -0.5), xlim=(-0.03, 1.03))  # the first policy is on top
        if len(panels) > 1:
            axis.set_title(title)
    note = "lines: 95 % intervals; grey: controls, scored by the same judge"
    st.label_figure(figure, axes, f"{label}, by policy", subtitle, x=label, note=note)
    return figure


@st.styled
def drift_over_time(
    measures: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]], controls: Sequence[str], subtitle=""
) -> Figure:
    """Draw a panel a measure: policy -> mean, low, high [seconds] over prompts, with its 95 % band."""
    figure, axes = st.panels(len(measures), 1, (7.0, 1.7), sharex=True)
    legend: dict[str, Artist] = {}
    for axis, (label, curves) in zip(axes, measures.items(), strict=True):
        colors, dashes, markers = iter(LINES), iter((":", "--", "-")), iter("osD^vPX")
        for name, curve in curves.items():
            # Each value is of a whole second: it is drawn at its middle
            seconds = np.arange(len(curve["mean"])) + 0.5
            if name in controls:
                axis.plot(seconds, curve["mean"], next(dashes), color=CONTROL, linewidth=1, label=name)
                continue
            color = next(colors)
            (line,) = axis.plot(seconds, curve["mean"], color=color, label=name)
            line.set(marker=next(markers), markersize=3, markevery=5)
            axis.fill_between(seconds, curve["low"], curve["high"], color=color, alpha=0.15, linewidth=0)
        axis.set_ylabel(label)
        legend |= st.handles(axis)
    st.label_figure(figure, axes[-1:], "Over time, by policy", subtitle, "", legend, "Seconds of video")
    return figure


@st.styled
def against_motion(
    motion: Mapping[str, float], measures: Mapping[str, Mapping[str, float]], subtitle=""
) -> Figure:
    """Draw a panel a measure of stability over motion: a still video is trivially stable."""
    size = (4.5, 1.9 if st.is_narrow() else 2.7)  # a column is no higher than its page
    figure, axes = st.panels(len(measures), 2, size, sharex=True)
    for axis, (label, values) in zip(axes, measures.items(), strict=True):
        legend = _points(axis, {name: (motion[name], value) for name, value in values.items()})
        axis.set_ylabel(label)
    x = "Motion (sides per second)"
    st.label_figure(figure, axes, "Stability against motion", subtitle, x=x, legend=legend)
    return figure


@st.styled
def sink_maps(
    maps: Mapping[str, tuple[Sequence[int], Sequence[int], np.ndarray]], label: str, subtitle=""
) -> Figure:
    """Draw a heat map a policy: windows x sinks in frames -> values; NaN is empty."""
    # One scale for all maps, or they could not be compared.
    low = min(np.nanmin(values) for _, _, values in maps.values())
    high = max(np.nanmax(values) for _, _, values in maps.values())
    columns = 1 if st.is_narrow() else 3  # cells have room for their numbers
    figure, axes = st.panels(len(maps), columns, (3.6, 2.0))
    for axis, (name, (windows, sinks, values)) in zip(axes, maps.items(), strict=True):
        image = st.heat_map(axis, values, cmap="viridis", vmin=low, vmax=high)
        st.write_cells(axis, values, "{:.2f}", (low + high) / 2)
        st.label_places(axis.xaxis, sinks)
        st.label_places(axis.yaxis, windows)
        axis.set_title(name)
    st.color_bar(figure, image, axes, label)
    title = f"{label}, by window and sink"
    st.label_figure(figure, axes, title, subtitle, "Window (frames)", x="Sink (frames)")
    return figure


@st.styled
def cost_and_quality(costs: Mapping[str, tuple[float, float, float]], label: str, subtitle="") -> Figure:
    """Draw megabytes of keys and values, and milliseconds of a late block, each against quality."""
    figure, axes = st.panels(2, 2, (4.5, 2.7))
    names = ("Keys and values of a video (MB)", "A block at the end (ms a video)")
    for index, (axis, cost_name) in enumerate(zip(axes, names, strict=True)):
        legend = _points(axis, {name: (cost[index], cost[2]) for name, cost in costs.items()})
        axis.set_xlabel(cost_name)
    st.label_figure(figure, [], "Cost and quality", subtitle, label, legend)
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
    note = ""
    if marks:
        places, heights = zip(*marks, strict=True)
        above.plot(places, heights, "v", color=st.RED, markersize=5)
        note = f"maxima at Δ = {', '.join(map(str, places))}"
    above.set_ylabel("Re C(Δ)")
    # From the first to the last distance at which queries of a block see the sink
    below.barh(range(len(reach)), [last - first for first, last in reach.values()], color=st.BLUE, height=0.6)
    below.set_yticks(range(len(reach)), [st.wrapped(name, st.TINY, 1.2) for name in reach], fontsize=st.TINY)
    below.set_ylim(len(reach) - 0.5, -0.5)
    title, x = "Agreement of RoPE with distance", "Δ, latent frames between query and key"
    st.label_figure(figure, [below], title, x=x, note=note)
    return figure


@st.styled
def effect_by_length(
    effects: Mapping[str, Mapping[int, Interval]], placebos: Mapping[int, float], subtitle=""
) -> Figure:
    """Draw s by the length of the rollout, a line a policy with intervals; placebos under the whole past."""
    figure, (axis,) = st.panels(1, 1, (6.4, 2.6))
    for (name, by_length), color, marker in zip(effects.items(), LINES, "osD^vPX", strict=False):
        lengths = list(by_length)
        estimate, low, high = zip(*by_length.values(), strict=True)
        axis.plot(lengths, estimate, marker=marker, color=color, label=name, markersize=4)
        axis.fill_between(lengths, low, high, color=color, alpha=0.15, linewidth=0)
    label = "largest placebo, full"
    axis.plot(list(placebos), list(placebos.values()), ":", color=CONTROL, linewidth=1, label=label)
    axis.set_ylabel("First-frame effect s (logits)")
    title, x = "First-frame effect by length", "Latent frames of the rollout"
    st.label_figure(figure, [axis], title, subtitle, legend=st.handles(axis), x=x)
    return figure


def _points(axis: Axes, points: Mapping[str, tuple[float, float]]) -> dict[str, Artist]:
    """Draw a point for each policy, controls in grey; return the legend."""
    for n, (name, (x, y)) in enumerate(points.items()):
        color, marker = LINES[n % len(LINES)], "oD^v"[n // len(LINES) % 4]
        if name in CONTROL_MARKERS:
            color, marker = CONTROL, CONTROL_MARKERS[name]
        axis.plot(x, y, marker, color=color, markersize=5, label=name)
    axis.margins(0.12)
    return st.handles(axis)
