"""Heads over a sweep of atlases: Figure 4 with error bars."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.caches.caption import Caption
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
    """A panel per head: bars are the mean over atlases of its profiles [atlases, F], error bars their
    standard deviation (n − 1), lines the atlases themselves, which names names."""
    figure, axes = panel_grid(len(profiles), columns=2, size=(6.6, 3.5))
    legend: dict[str, Any] = {}
    for axis, (title, values) in zip(axes, profiles.items(), strict=True):
        mean, frames = values.mean(0), np.arange(values.shape[1])
        axis.bar(frames, mean, width=0.8, color=BLUE, alpha=0.6, linewidth=0)
        for row in values:
            axis.plot(frames, row, color="0.35", linewidth=0.5)
        bars = axis.errorbar(
            frames, mean, values.std(0, ddof=1), fmt="o", color=DARK, markersize=3, capsize=2
        )
        legend["mean"] = bars
        bars.set_label(f"mean ± standard deviation over {len(names)} atlases")
        axis.axhline(0, color="0.4", linewidth=0.8)
        axis.set_title(title)
        frame_axis(axis, values.shape[1], room=25)
        legend |= mark_frames(axis, mean, caption.highlighted_frames)
    note = f"grey lines: {', '.join(names)}" if len(names) <= 4 else "grey lines: each atlas"
    label_figure(figure, axes, capitalised(caption.subtitle), LABELS[caption.quantity], legend, note=note)
    return figure
