"""What interventions did: change per frame beside its floor, videos as strips, effects against measures."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from experiments.figures.style import frame_axis, label_figure, styled

LINES = {"direct": "-", "own block": "-.", "total": "--", "floor": ":"}


@styled
def effects_by_frame(changes: Mapping[str, np.ndarray], *, subtitle: str) -> Figure:
    """A line per effect [F], in units of the distance between two seeds; on a logarithmic scale."""
    figure, axis = plt.subplots(figsize=(7, 3))
    for name, values in changes.items():
        positive = np.where(values > 0, values, np.nan)  # no change at all has no place on this scale
        axis.plot(positive, LINES.get(name, "-"), marker="o", markersize=3, label=name)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_yscale("log")
    frame_axis(axis, max(len(values) for values in changes.values()), 25)
    axis.legend(frameon=False, ncols=len(changes), fontsize=8)
    label_figure(
        figure,
        [axis],
        f"Change of x0, {subtitle}",
        "/ distance between seeds",
        x="Latent frame; the black line is another seed",
    )
    return figure


@styled
def video_strips(videos: Mapping[str, np.ndarray], frames: Sequence[int], *, subtitle: str) -> Figure:
    """A row per video [frames, height, width, 3], uint8, of these video frames, each with its number."""
    size = (0.85 * len(frames) + 0.8, 1.0 * len(videos) + 0.7)
    figure, axes = plt.subplots(len(videos), len(frames), squeeze=False, figsize=size)
    for row, (name, video) in zip(axes, videos.items(), strict=True):
        for axis, frame in zip(row, frames, strict=True):
            axis.imshow(video[frame], interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            axis.grid(False)
            axis.set_title(str(frame), fontsize=7, pad=2)
        row[0].set_ylabel(name, fontsize=8)
    label_figure(figure, [], f"Video frames, {subtitle}")
    return figure


@styled
def effect_against(
    effect: np.ndarray, measures: Mapping[str, np.ndarray], notes: Mapping[str, str], *, subtitle: str
) -> Figure:
    """A panel per measure: a dot per head [N, H], coloured by layer; notes say how they correlate."""
    figure, axes = plt.subplots(
        1, len(measures), squeeze=False, figsize=(3.2 * len(measures), 3.1), sharey=True
    )
    layers = np.broadcast_to(np.arange(len(effect))[:, None], effect.shape)
    for axis, (name, values) in zip(axes[0], measures.items(), strict=True):
        dots = axis.scatter(values, effect, c=layers, cmap="viridis", s=10)
        axis.set_xlabel(name)
        axis.set_title(notes.get(name, ""), fontsize=7)
    axes[0, 0].set_ylabel("direct effect")
    figure.colorbar(dots, ax=axes[0, -1], label="layer")
    label_figure(figure, [], f"Direct effect of every head, {subtitle}")
    return figure
