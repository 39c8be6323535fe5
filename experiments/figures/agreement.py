"""How a model's heads agree with published ones: all heads by r, and the curves of the worst."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.figures.style import BLUE, GREEN, GREY, ORANGE, PURPLE, label_figure, panels, styled


class HeadPair(NamedTuple):
    """Context curves [n] of one head."""

    name: str
    ours: np.ndarray
    published: np.ndarray
    r: float


@styled
def heads_by_agreement(
    r: Mapping[str, np.ndarray], worst: Sequence[HeadPair], title: str, *, columns: int = 3
) -> Figure:
    """Draw the sorted r of all heads, a line for each name, and some heads' curves beside the published."""
    figure, axes = panels(1 + len(worst), columns, (3.0, 2.0))
    legend: dict[str, Artist] = {}
    for color, (name, values) in zip((BLUE, GREEN, PURPLE, ORANGE), r.items(), strict=False):
        ordered = np.sort(values[np.isfinite(values)])
        axes[0].plot(np.linspace(0, 1, len(ordered)), ordered, color=color, linewidth=1.4)
        legend[name] = Line2D([], [], color=color, label=name)
    axes[0].set(title="All heads, ordered", xlabel="Share of heads", ylabel="r of curves", ylim=(-1, 1.02))
    for axis, pair in zip(axes[1:], worst, strict=True):
        frames = np.arange(len(pair.published))
        axis.bar(frames, pair.published, color=GREY, width=0.8, linewidth=0)
        axis.plot(frames, pair.ours, "o-", color=BLUE, markersize=2.5, linewidth=1.1)
        axis.set(title=f"{pair.name}, r = {pair.r:.2f}", xlabel="Key frame (latent)", ylabel="Mean logit")
    legend |= {"published": Patch(color=GREY, label="published curve")}
    legend |= {"here": Line2D([], [], color=BLUE, marker="o", markersize=3, label="here")}
    label_figure(figure, [], title, legend=legend)
    return figure
