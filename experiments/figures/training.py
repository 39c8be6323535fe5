"""The miniature: losses of its training, its attention meanwhile, strips of its videos."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Literal

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.figures.style import (
    BLUE,
    DARK,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    YELLOW,
    color_bar,
    drop_empty,
    styled,
)

STRIP_FRAMES = 7  # shown of 81, evenly
SMOOTHED = 7  # values of a loss that are averaged
HEAD_COLORS = (RED, ORANGE, PURPLE, BLUE, YELLOW, GREEN)  # of heads that a figure names
STYLES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")  # of seeds
Lines = Sequence[tuple[Sequence[int], Sequence[float]]]  # of each seed: steps, values


@styled
def training_curves(
    losses: Mapping[str, Sequence[Sequence]],
    psnr: Sequence[Sequence[float]],
    resumed: int | None,
    subtitle="",
) -> Figure:
    """Draw the losses of each stage, and the PSNR of the VAE on held-out clips.

    losses are runs of [step, seconds, loss] by the stage's name, dashed but for the last run; psnr is
    [step, all, first second, last second]. resumed is the step at which the VAE's second run begins.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 2.7))
    half = SMOOTHED // 2
    for (name, runs), color in zip(losses.items(), (BLUE, ORANGE, GREEN, PURPLE), strict=False):
        for curve in runs:
            _, seconds, loss = np.array(curve).T
            share, last = seconds / seconds[-1], curve is runs[-1]
            smooth = np.exp(np.convolve(np.log(loss), np.ones(SMOOTHED) / SMOOTHED, "valid"))
            line, label = ("-", name) if last else ("--", None)
            left.plot(share[half:-half], smooth, line, color=color, label=label)
            if last:
                left.plot(share, loss, color=color, linewidth=0.7, alpha=0.35)
    left.set(yscale="log", xlabel="Share of the run's time", ylabel="Loss", title="Loss of each stage")
    drawn = [*left.get_legend_handles_labels()[0], Line2D([], [], color="0.3", label=f"mean of {SMOOTHED}")]
    drawn.append(Line2D([], [], color="0.3", linewidth=0.7, alpha=0.35, label="each value"))
    if any(len(runs) > 1 for runs in losses.values()):
        drawn.append(Line2D([], [], color="0.3", linestyle="--", label="first of two runs"))
    low, high = left.get_ylim()
    left.set_ylim(low, high * (high / low) ** 0.4)  # room for the legend
    left.legend(handles=drawn, loc="upper right", ncols=2, fontsize=7)
    figure.suptitle(subtitle)
    steps, *curves = np.array(psnr).T
    names = ("81 frames", "first second", "last second")
    for values, color, name in zip(curves, (DARK, BLUE, ORANGE), names, strict=True):
        right.plot(steps, values, "o-", markersize=3, color=color, label=name)
    if resumed is not None:
        right.axvline(resumed, color=DARK, linestyle=":", linewidth=1, label="resumed")
    right.set(xlabel="Step", ylabel="PSNR (dB)", title="VAE, held-out clips")
    right.legend(loc="lower right")
    return figure


@styled
def training_checkpoints(
    steps: Sequence[int],
    measures: Mapping[str, tuple[str, float, np.ndarray]],
    shown: Sequence[int],
    subtitle: str,
    few_step: int | None = None,
) -> Figure:
    """Draw measures (unit, neutral, [checkpoints, layers, heads]) over steps, and maps of those shown."""
    named: dict[int, str] = {}  # head -> colour
    size, ratios = (4.0 + 2.1 * len(shown), 0.5 + 2.5 * len(measures)), [1.7, *[1] * len(shown)]
    rows, columns = len(measures), 1 + len(shown)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, width_ratios=ratios)
    for row, (title, (unit, neutral, values)) in zip(axes, measures.items(), strict=True):
        flat, heads = values.reshape(len(steps), -1), values.shape[2]
        row[0].plot(steps, flat, color="0.6", linewidth=0.5)
        row[0].plot(steps, flat.mean(1), color=DARK, linewidth=1.8, label="mean of all heads")
        for head in np.argsort(-flat[-1])[:3].tolist():
            color = named.setdefault(head, HEAD_COLORS[len(named) % len(HEAD_COLORS)])
            name = f"L{head // heads}H{head % heads}"
            row[0].plot(steps, flat[:, head], "o-", markersize=2.5, color=color, label=name)
        row[0].axhline(neutral, color="black", linestyle=":", linewidth=1, label="no preference")
        row[0].set_ylim(top=flat.max() + 0.5 * np.ptp(flat))  # room for the legend
        row[0].legend(fontsize=7, loc="upper left", ncols=2)
        _steps_along(row[0], steps[-1], few_step)
        row[0].set(ylabel=unit, title=title)
        chosen = values[[steps.index(step) for step in shown]]
        limit = np.abs(chosen).max()
        low, cmap = (-limit, "RdBu_r") if values.min() < 0 else (0, "viridis")
        for axis, step, map_of_step in zip(row[1:], shown, chosen, strict=True):
            mesh = axis.pcolormesh(map_of_step, cmap=cmap, vmin=low, vmax=limit)
            axis.set(title=f"step {step}", xlabel="Head")
            axis.set_xticks(np.arange(0, heads, 3) + 0.5, range(0, heads, 3))
            axis.set_yticks(np.arange(values.shape[1]) + 0.5, range(values.shape[1]))
            axis.invert_yaxis()
            axis.grid(False)
        row[1].set_ylabel("Layer")
        color_bar(figure, mesh, list(row[1:]), unit, aspect=20, pad=0.02)
    figure.suptitle(subtitle)
    return figure


@styled
def effect_by_step(
    panels: Mapping[str, Mapping[str, Lines]], subtitle="", few_step: int | None = None
) -> Figure:
    """Draw numbers over the steps of training: a panel a title, a colour a pass, a line a seed."""
    figure, axes = plt.subplots(1, len(panels), figsize=(3.4 * len(panels), 3.0), squeeze=False)
    handles: dict[str, Line2D] = {}
    for axis, (title, passes) in zip(axes.flat, panels.items(), strict=True):
        for (name, seeds), color in zip(passes.items(), (BLUE, ORANGE), strict=False):
            for seed, (steps, values) in enumerate(seeds):
                line = STYLES[seed % len(STYLES)]
                label = name if len(seeds) == 1 else f"{name}, seed {seed}"
                axis.plot(steps, values, f"o{line}", color=color, markersize=2.5)
                handles[label] = Line2D([], [], color=color, linestyle=line, label=label)
        axis.set_title(title)
        _steps_along(axis, max(steps[-1] for seeds in passes.values() for steps, _ in seeds), few_step)
    axes[0, 0].axhline(0, color="black", linestyle=":", linewidth=1)
    axes[0, 0].legend(handles=list(handles.values()), fontsize=7, handlelength=4)
    figure.suptitle(subtitle)
    return figure


def _steps_along(axis: Axes, last: int, few_step: int | None = None) -> None:
    """Show steps from 0 to the last: even up to 100, then by size; a line where few-step stages begin."""
    several = few_step is not None and few_step < last
    axis.set_xlabel("Training step" + (f" (few-step stages from {few_step} on)" if several else ""))
    if few_step is not None and several:
        axis.axvline(few_step, color=GREEN, linestyle="--", linewidth=1)
    axis.set_xscale("symlog", linthresh=100)
    axis.set_xlim(-10, 1.2 * last)
    axis.set_xticks([0, *(10**n for n in range(2, 5) if 10**n <= last)])


@styled
def video_strips(captions: Sequence[str], rows: Mapping[str, Sequence[np.ndarray]]) -> Figure:
    """Draw under each caption a strip of frames a source: source -> videos [F, H, W, 3] in 0..1."""
    chosen = np.linspace(0, len(next(iter(rows.values()))[0]) - 1, STRIP_FRAMES).round().astype(int)
    lines = -(-len(captions) // 2)
    size = (1.2 * STRIP_FRAMES + 1.2, lines * (0.57 * len(rows) + 0.4))
    figure, axes = plt.subplots(lines, 2, figsize=size)
    edge = ((0, 0), (1, 1), (1, 1), (0, 0))
    for i, (axis, caption) in enumerate(zip(axes.flat, captions, strict=False)):
        shown = [np.pad(videos[i][chosen], edge, constant_values=1) for videos in rows.values()]
        picture = np.concatenate([np.concatenate([*strip], 1) for strip in shown])
        height, width = picture.shape[0] / len(rows), picture.shape[1] / len(chosen)
        # The SVG holds the pixels as they are; six bits of a colour are enough and pack twice as well.
        axis.imshow(np.round(63 * picture) / 63, interpolation="none")
        axis.set_yticks([(n + 0.5) * height for n in range(len(rows))], list(rows))
        axis.set_xticks([])
        if i >= len(captions) - 2:  # frame numbers under the lowest strip of each column
            axis.set_xticks([(n + 0.5) * width for n in range(len(chosen))], [str(f) for f in chosen])
            axis.tick_params(axis="x", labelsize=7, pad=1, length=0)
            axis.set_xlabel("Video frame", fontsize=7, labelpad=1)
        axis.set_title(fill(caption, 66), fontsize=8)
        axis.grid(False)
        for spine in axis.spines.values():
            spine.set_color(GREY)
    drop_empty(axes, len(captions))
    return figure
