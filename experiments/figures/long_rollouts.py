"""Long rollouts under cache policies: what each keeps, over time, against motion and cost."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.analysis.effects import Interval
from experiments.figures.style import BLUE, DARK, GREEN, ORANGE, PURPLE, RED, YELLOW, styled

LINES = (RED, BLUE, GREEN, ORANGE, PURPLE, YELLOW, "#56B4E9")
CONTROL: dict[str, Any] = {"color": "0.45", "linewidth": 1}
FPS = 16


@styled
def long_strips(strips: Mapping[str, np.ndarray], seconds: Sequence[int], subtitle: str = "") -> Figure:
    """Draw a row a policy, of frames side by side, uint8 [side, n · side, 3]; above it their times."""
    figure, axes = plt.subplots(len(strips), 1, squeeze=False, figsize=(7.6, 0.3 + 0.82 * len(strips)))
    for ax, (name, strip) in zip(axes[:, 0], strips.items(), strict=True):
        side = strip.shape[0]
        ax.imshow(strip, interpolation="nearest")
        ax.set(xticks=[], yticks=[])
        ax.grid(False)
        ax.set_ylabel(name, fontsize=7, rotation=0, ha="right", va="center")
        for edge in range(1, len(seconds)):
            ax.axvline(edge * side - 0.5, color="white", linewidth=1)
    top, centres = axes[0, 0], (np.arange(len(seconds)) + 0.5) * strip.shape[0]
    top.xaxis.tick_top()
    top.set_xticks(centres, [f"{s} s\nlatent {(s * FPS + 3) // 4}" for s in seconds], fontsize=6)
    figure.suptitle(subtitle, fontsize=8)
    return figure


@styled
def policy_dots(values: Mapping[str, Interval], controls: Sequence[str], label: str, subtitle="") -> Figure:
    """Draw a dot and its 95 % interval for every policy; controls are grey."""
    figure, ax = plt.subplots(figsize=(6.4, 1.1 + 0.26 * len(values)))
    for row, (name, value) in enumerate(values.items()):
        color = "0.45" if name in controls else DARK
        ax.plot([value.low, value.high], [row, row], color=color, linewidth=2)
        ax.plot(value.estimate, row, "o", color=color, markersize=5)
    ax.set_yticks(range(len(values)), list(values))
    ax.set(ylim=(len(values) - 0.5, -0.5), xlabel=label)
    figure.suptitle(subtitle)
    return figure


@styled
def drift_over_time(
    measures: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]], controls: Sequence[str], subtitle=""
) -> Figure:
    """Draw a panel a measure: policy -> mean, low, high [seconds] over prompts, with its 95 % band."""
    size = (7.6, 2.2 * len(measures))
    figure, axes = plt.subplots(len(measures), 1, figsize=size, sharex=True, squeeze=False)
    for ax, (label, curves) in zip(axes[:, 0], measures.items(), strict=True):
        colors, dashes = iter(LINES), iter((":", "--", "-"))
        for name, curve in curves.items():
            seconds = np.arange(len(curve["mean"])) + 0.5
            if name in controls:
                ax.plot(seconds, curve["mean"], label=name, linestyle=next(dashes), **CONTROL)
                continue
            color = next(colors)
            ax.plot(seconds, curve["mean"], color=color, linewidth=1.3, label=name)
            ax.fill_between(seconds, curve["low"], curve["high"], color=color, alpha=0.15, linewidth=0)
        ax.set_ylabel(label)
    axes[-1, 0].set_xlabel("Seconds of video")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    figure.suptitle(subtitle)
    return figure


@styled
def against_motion(
    motion: Mapping[str, float], measures: Mapping[str, Mapping[str, float]], subtitle=""
) -> Figure:
    """Draw a panel a measure of stability over motion: what stands still is stable for nothing."""
    size = (3.1 * len(measures), 3.0)
    figure, axes = plt.subplots(1, len(measures), figsize=size, sharex=True, squeeze=False)
    for ax, (label, values) in zip(axes[0], measures.items(), strict=True):
        _named_points(ax, {name: (motion[name], value) for name, value in values.items()})
        ax.set(xlabel="Motion (sides per second)", ylabel=label)
    figure.suptitle(subtitle)
    return figure


@styled
def sink_maps(
    maps: Mapping[str, tuple[Sequence[int], Sequence[int], np.ndarray]], label: str, subtitle=""
) -> Figure:
    """Draw a heat map a policy: windows x sinks in frames -> values; NaN is empty."""
    low = min(np.nanmin(values) for _, _, values in maps.values())
    high = max(np.nanmax(values) for _, _, values in maps.values())
    figure, axes = plt.subplots(1, len(maps), figsize=(3.9 * len(maps), 2.8), squeeze=False)
    for ax, (name, (windows, sinks, values)) in zip(axes[0], maps.items(), strict=True):
        image = ax.imshow(values, cmap="viridis", vmin=low, vmax=high, aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                color = "black" if value > (low + high) / 2 else "white"
                ax.text(column, row, f"{value:.2f}", ha="center", va="center", color=color)
        ax.set_xticks(range(len(sinks)), [str(sink) for sink in sinks])
        ax.set_yticks(range(len(windows)), [str(window) for window in windows])
        ax.set(title=name, xlabel="Sink (frames)", ylabel="Window (frames)")
        ax.grid(False)
    figure.colorbar(image, ax=axes[0].tolist(), label=label)
    figure.suptitle(subtitle)
    return figure


@styled
def cost_and_quality(costs: Mapping[str, tuple[float, float, float]], label: str, subtitle="") -> Figure:
    """Draw megabytes of keys and values, and milliseconds of a late block, each against quality."""
    figure, axes = plt.subplots(1, 2, figsize=(8.2, 3.2), sharey=True)
    names = ("Keys and values of a video (MB)", "A block at the end (ms a video)")
    for index, (ax, what) in enumerate(zip(axes, names, strict=True)):
        _named_points(ax, {name: (cost[index], cost[2]) for name, cost in costs.items()})
        ax.set_xlabel(what)
    axes[0].set_ylabel(label)
    figure.suptitle(subtitle)
    return figure


@styled
def rope_against_distance(
    distances: np.ndarray,
    coherence: np.ndarray,
    reach: Mapping[str, tuple[int, int]],
    marks: Sequence[tuple[int, float]] = (),
    subtitle="",
) -> Figure:
    """Draw Re C(Δ) over Δ in latent frames; below it how far each policy's sink stands from the queries."""
    figure, ax = plt.subplots(figsize=(7.6, 3.2))
    ax.plot(distances, coherence, color=DARK, linewidth=1)
    for distance, value in marks:
        ax.annotate(f"{distance}", (distance, value), textcoords="offset points", xytext=(0, 4), ha="center")
    bottom = float(coherence.min())
    for row, (name, (first, last)) in enumerate(reach.items(), 1):
        y = bottom - 0.12 * row
        ax.plot([first, last], [y, y], color=LINES[row % len(LINES)], linewidth=4, solid_capstyle="butt")
        ax.text(last + 3, y, name, va="center", fontsize=7)
    ax.set(xlabel="Δ, latent frames between query and key", ylabel="Re C(Δ)")
    figure.suptitle(subtitle)
    return figure


@styled
def effect_by_length(
    effects: Mapping[str, Mapping[int, Interval]], placebos: Mapping[int, float], subtitle=""
) -> Figure:
    """Draw s by the length of the rollout, a line a policy with intervals; placebos under the whole past."""
    figure, ax = plt.subplots(figsize=(6.4, 3.2))
    for (name, of), color in zip(effects.items(), LINES, strict=False):
        estimate, low, high = zip(*of.values(), strict=True)
        ax.plot(list(of), estimate, "o-", color=color, label=name)
        ax.fill_between(list(of), low, high, color=color, alpha=0.15, linewidth=0)
    ax.plot(list(placebos), list(placebos.values()), linestyle=":", label="largest placebo, full", **CONTROL)
    ax.set(xlabel="Latent frames of the rollout", ylabel="First-frame effect s (logits)")
    figure.legend(loc="outside right upper", fontsize=7)
    figure.suptitle(subtitle)
    return figure


def _named_points(ax: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    for name, (x, y) in points.items():
        color = RED if name == "full" else "0.45" if name in ("frozen", "vae", "rendered") else BLUE
        ax.plot(x, y, "o", color=color, markersize=4)
        ax.annotate(name, (x, y), textcoords="offset points", xytext=(3, 2), fontsize=5.5)
