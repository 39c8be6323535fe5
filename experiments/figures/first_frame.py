"""The first-frame effect: beside placebos, by distance, by key frame, over passes, against older scores."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import experiments.figures.style as st
from experiments.figures.style import BLUE, DARK, GREEN, GREY, HATCH, ORANGE, PURPLE, RED, styled


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
    """Draw contrasts by key frame, a line a name; every other block of frames is shaded.

    contrasts: name -> [3, first], the mean over heads and the bounds of its interval.
    """
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
