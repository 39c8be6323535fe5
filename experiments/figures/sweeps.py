"""Heads over a sweep of atlases: Figure 4 with error bars."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.caches.caption import Caption
from experiments.figures.averages import ROOM, average_bars, mark_averages
from experiments.figures.style import (
    BLUE,
    DARK,
    LABELS,
    capitalised,
    frame_axis,
    label_figure,
    mark_frames,
    panel_grid,
    styled,
)


@styled
def sweep_curves(profiles: Mapping[str, np.ndarray], caption: Caption, names: Sequence[str]) -> Figure:
    """A panel per head: bars are the mean over atlases of its profiles [atlases, F + averages], error bars
    their standard deviation (n − 1), lines the atlases themselves, which names names."""
    figure, axes = panel_grid(len(profiles), columns=2, size=(6.6, 3.5))
    legend: dict[str, Any] = {}
    for axis, (title, values) in zip(axes, profiles.items(), strict=True):
        mean, frames, F = values.mean(0), np.arange(values.shape[1]), values.shape[1] - caption.averages
        axis.bar(frames[:F], mean[:F], width=0.8, color=BLUE, alpha=0.6, linewidth=0)
        average_bars(axis, mean[F:], F)
        for row in values:
            axis.plot(frames[:F], row[:F], color="0.35", linewidth=0.5)
        bars = axis.errorbar(
            frames, mean, values.std(0, ddof=1), fmt="o", color=DARK, markersize=3, capsize=2
        )
        legend["mean"] = bars
        bars.set_label(f"mean ± standard deviation over {len(names)} atlases")
        axis.axhline(0, color="0.4", linewidth=0.8)
        axis.set_title(title, pad=ROOM if caption.averages else None)
        frame_axis(axis, F, room=25)
        legend |= mark_frames(axis, mean, caption.highlighted_frames)
        legend |= mark_averages(axis, F, caption.averages, large=True)
    note = f"grey lines: {', '.join(names)}" if len(names) <= 4 else "grey lines: each atlas"
    label_figure(figure, axes, capitalised(caption.subtitle), LABELS[caption.quantity], legend, note=note)
    return figure
