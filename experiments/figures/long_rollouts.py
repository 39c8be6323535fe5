"""Long rollouts under cache policies: what each keeps, over time, against motion and cost."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import experiments.figures.style as st
from experiments.analysis.stats import Interval
from experiments.figures.style import BLUE, DARK, GREEN, ORANGE, PURPLE, RED, YELLOW, styled

LINES = (RED, BLUE, GREEN, ORANGE, PURPLE, YELLOW, "#56B4E9")
CONTROL: dict[str, Any] = {"color": "0.45", "linewidth": 1}
FPS = 16


@styled
def long_strips(strips: Mapping[str, np.ndarray], seconds: Sequence[int], subtitle="") -> Figure:
    """Draw a row a policy, of frames side by side, uint8 [side, n · side, 3]; above it their times."""
    side = next(iter(strips.values())).shape[0]
    # [side, n · side, 3] -> [n, side, side, 3]
    rows = {n: strip.reshape(side, len(seconds), side, 3).swapaxes(0, 1) for n, strip in strips.items()}
    figure, axes, shown = st.picture_grid(rows, [f"{second} s" for second in seconds])
    for axis, name in zip(axes[:: len(shown)], strips, strict=True):
        axis.set_ylabel(st.wrapped(name, st.SMALL, 1.1), rotation=0, ha="right", va="center")
    st.label_figure(figure, [], "Long rollouts", subtitle)
    return figure


@styled
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
    for ax, (title, values) in zip(axes, panels.items(), strict=True):
        for name, value in values.items():
            row, color = names.index(name), "0.45" if name in controls else DARK
            ax.plot([value.low, value.high], [row, row], color=color, linewidth=2)
            ax.plot(value.estimate, row, "s" if name in controls else "o", color=color, markersize=5)
            if name in controls:
                # A control bounds what the score can say, so it runs through the panel.
                ax.axvline(value.estimate, color="0.45", linewidth=0.8, linestyle=":")
        ax.set_yticks(range(len(names)), names)
        # The first policy is on top.
        ax.set(ylim=(len(names) - 0.5, -0.5), xlim=(-0.03, 1.03), title=title if len(panels) > 1 else "")
    note = "lines: 95 % intervals; grey: controls, scored by the same judge"
    st.label_figure(figure, axes, f"{label}, by policy", subtitle, x=label, note=note)
    return figure


@styled
def drift_over_time(
    measures: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]], controls: Sequence[str], subtitle=""
) -> Figure:
    """Draw a panel a measure: policy -> mean, low, high [seconds] over prompts, with its 95 % band."""
    figure, axes = st.panels(len(measures), 1, (7.0, 1.7), sharex=True)
    legend: dict[str, Artist] = {}
    for ax, (label, curves) in zip(axes, measures.items(), strict=True):
        colors, dashes, markers = iter(LINES), iter((":", "--", "-")), iter("osD^vPX")
        for name, curve in curves.items():
            # Each value is of a whole second: it is drawn at its middle.
            seconds = np.arange(len(curve["mean"])) + 0.5
            if name in controls:
                ax.plot(seconds, curve["mean"], label=name, linestyle=next(dashes), **CONTROL)
                continue
            style: dict[str, Any] = {"color": next(colors), "marker": next(markers), "markersize": 3}
            ax.plot(seconds, curve["mean"], linewidth=1.3, label=name, markevery=5, **style)
            ax.fill_between(
                seconds, curve["low"], curve["high"], color=style["color"], alpha=0.15, linewidth=0
            )
        ax.set_ylabel(label)
        legend |= st.handles(ax)
    st.label_figure(figure, axes[-1:], "Over time, by policy", subtitle, "", legend, "Seconds of video")
    return figure


@styled
def against_motion(
    motion: Mapping[str, float], measures: Mapping[str, Mapping[str, float]], subtitle=""
) -> Figure:
    """Draw a panel a measure of stability over motion: a still video is trivially stable."""
    size = (4.5, 1.9 if st.is_narrow() else 2.7)  # a column is no higher than its page
    figure, axes = st.panels(len(measures), 2, size, sharex=True)
    for ax, (label, values) in zip(axes, measures.items(), strict=True):
        legend = _points(ax, {name: (motion[name], value) for name, value in values.items()})
        ax.set_ylabel(label)
    x = "Motion (sides per second)"
    st.label_figure(figure, axes, "Stability against motion", subtitle, x=x, legend=legend)
    return figure


@styled
def sink_maps(
    maps: Mapping[str, tuple[Sequence[int], Sequence[int], np.ndarray]], label: str, subtitle=""
) -> Figure:
    """Draw a heat map a policy: windows x sinks in frames -> values; NaN is empty."""
    # One scale for all maps, or they could not be compared.
    low = min(np.nanmin(values) for _, _, values in maps.values())
    high = max(np.nanmax(values) for _, _, values in maps.values())
    figure, axes = st.panels(len(maps), 3, (3.6, 2.0))
    for ax, (name, (windows, sinks, values)) in zip(axes, maps.items(), strict=True):
        image = st.heat_map(ax, values, cmap="viridis", vmin=low, vmax=high)
        st.write_cells(ax, values, "{:.2f}", (low + high) / 2)
        ax.set_xticks(range(len(sinks)), [str(sink) for sink in sinks])
        ax.set_yticks(range(len(windows)), [str(window) for window in windows])
        ax.set_title(name)
    st.color_bar(figure, image, axes, label)
    title = f"{label}, by window and sink"
    st.label_figure(figure, axes, title, subtitle, "Window (frames)", x="Sink (frames)")
    return figure


@styled
def cost_and_quality(costs: Mapping[str, tuple[float, float, float]], label: str, subtitle="") -> Figure:
    """Draw megabytes of keys and values, and milliseconds of a late block, each against quality."""
    figure, axes = st.panels(2, 2, (4.5, 2.7))
    names = ("Keys and values of a video (MB)", "A block at the end (ms a video)")
    for index, (ax, what) in enumerate(zip(axes, names, strict=True)):
        legend = _points(ax, {name: (cost[index], cost[2]) for name, cost in costs.items()})
        ax.set_xlabel(what)
    st.label_figure(figure, [], "Cost and quality", subtitle, label, legend)
    return figure


@styled
def rope_against_distance(
    distances: np.ndarray,
    coherence: np.ndarray,
    reach: Mapping[str, tuple[int, int]],
    marks: Sequence[tuple[int, float]],
) -> Figure:
    """Draw Re C(Δ) over Δ in latent frames; below it how far each policy's sink stands from the queries."""
    figure, (ax, below) = st.panels(2, 1, (7.0, 1.5), sharex=True, height_ratios=[1.6, 1])
    ax.plot(distances, coherence, color=DARK, linewidth=1)
    if marks:
        ax.plot(*zip(*marks, strict=True), "v", color=RED, markersize=5)
    # From the first to the last distance at which queries of a block see the sink.
    below.barh(range(len(reach)), [last - first for first, last in reach.values()], color=BLUE, height=0.6)
    below.set_yticks(range(len(reach)), [st.wrapped(name, st.TINY, 1.2) for name in reach], fontsize=st.TINY)
    below.set(ylim=(len(reach) - 0.5, -0.5))
    ax.set_ylabel("Re C(Δ)")
    note = "maxima at Δ = " + ", ".join(str(distance) for distance, _ in marks) if marks else ""
    title, x = "Agreement of RoPE with distance", "Δ, latent frames between query and key"
    st.label_figure(figure, [below], title, x=x, note=note)
    return figure


@styled
def effect_by_length(
    effects: Mapping[str, Mapping[int, Interval]], placebos: Mapping[int, float], subtitle=""
) -> Figure:
    """Draw s by the length of the rollout, a line a policy with intervals; placebos under the whole past."""
    figure, (ax,) = st.panels(1, 1, (6.4, 2.6))
    for (name, of), color, marker in zip(effects.items(), LINES, "osD^vPX", strict=False):
        estimate, low, high = zip(*of.values(), strict=True)
        ax.plot(list(of), estimate, marker=marker, color=color, label=name, markersize=4)
        ax.fill_between(list(of), low, high, color=color, alpha=0.15, linewidth=0)
    ax.plot(list(placebos), list(placebos.values()), linestyle=":", label="largest placebo, full", **CONTROL)
    ax.set_ylabel("First-frame effect s (logits)")
    title, x = "First-frame effect by length", "Latent frames of the rollout"
    st.label_figure(figure, [ax], title, subtitle, legend=st.handles(ax), x=x)
    return figure


def _points(ax: Axes, points: Mapping[str, tuple[float, float]]) -> dict[str, Artist]:
    """Draw a point for each policy, controls in grey -> the legend."""
    for n, (name, (x, y)) in enumerate(points.items()):
        style: dict[str, Any] = {"color": LINES[n % len(LINES)], "marker": "oD^v"[n // len(LINES) % 4]}
        # Controls are grey, each with a marker of its own.
        if name in ("frozen", "vae", "rendered"):
            style = {"color": "0.45", "marker": {"frozen": "s", "vae": "P", "rendered": "X"}[name]}
        ax.plot(x, y, linestyle="", markersize=5, label=name, **style)
    ax.margins(0.12)
    return st.handles(ax)
