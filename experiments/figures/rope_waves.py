"""Frame 0 by block of queries, and curves taken apart into waves of temporal RoPE, frame 0 and a rest."""

from collections.abc import Mapping

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.analysis.rope_waves import BlockPanel, PartsPanel
from experiments.figures.style import BLUE, DARK, GREY, ORANGE, RED, label_figure, panels, styled


@styled
def first_by_block(
    blocks: Mapping[str, BlockPanel], title: str, subtitle="", *, shown: int = 18, of_paper=True
) -> Figure:
    """Draw frame 0's excess over the other context frames against the block of queries, a panel a head.

    shown is the first query frame of the block to point out: the paper's figure shows 18–20 alone.
    """
    figure, axes = panels(len(blocks), columns=1, size=(7.0, 1.6))
    for axis, (name, panel) in zip(axes, blocks.items(), strict=True):
        starts = panel.starts
        colors = [ORANGE if start == shown else "0.6" for start in starts]
        axis.bar(starts + 1, panel.measured, width=2.2, color=colors, linewidth=0)
        axis.plot(starts + 1, panel.predicted, "o-", color=BLUE, linewidth=1.2, markersize=3)
        axis.axhline(0, color="0.3", linewidth=0.8)
        axis.set(xlim=(starts[0] - 1, starts[-1] + 3))
        axis.set_title(name)
        axis.set_xticks(starts[:: max(1, len(starts) // 12)] + 1)
    queries = f"queries {shown}–{shown + 2}" + ", those of the paper" * of_paper
    legend: dict[str, Artist] = {
        "measured": Patch(color="0.6", label="measured"),
        "shown": Patch(color=ORANGE, label=queries),
        "predicted": Line2D([], [], color=BLUE, marker="o", markersize=3, label="waves + s"),
    }
    x, y = "Middle query frame of the block (latent)", "Frame 0 − other context (logits)"
    label_figure(figure, axes, title, subtitle, y, legend, x)
    return figure


@styled
def curves_in_parts(parts: Mapping[str, PartsPanel], title: str, subtitle="", *, columns: int = 3) -> Figure:
    """Draw context curves beside their waves; a line shows what s adds to frame 0, and the rest follows."""
    figure, axes = panels(len(parts), columns=columns, size=(2.9, 1.7))
    values = np.concatenate([[p.waves[0] + p.s, *p.measured, *p.waves, 0] for p in parts.values()])
    for axis, (name, (measured, waves, s)) in zip(axes, parts.items(), strict=True):
        frames = np.arange(len(measured))
        colors = [ORANGE if k == 0 else GREY for k in frames]
        axis.bar(frames, measured, color=colors, width=0.8, linewidth=0)
        axis.plot(frames, waves, "o-", color=BLUE, markersize=2.5, linewidth=1.1)
        axis.plot([0, 0], [waves[0], waves[0] + s], color=RED, linewidth=2.5)
        axis.axhline(0, color=DARK, linewidth=0.6)
        axis.set(ylim=(values.min() - 0.5, values.max() + 0.5), xticks=frames)
        axis.set_title(name)
    legend: dict[str, Artist] = {
        "first": Patch(color=ORANGE, label="measured, frame 0"),
        "others": Patch(color=GREY, label="measured, other context"),
        "waves": Line2D([], [], color=BLUE, marker="o", markersize=3, label="waves"),
        "s": Line2D([], [], color=RED, linewidth=2.5, label="s, at frame 0"),
    }
    label_figure(figure, axes, title, subtitle, "Mean logit", legend)
    return figure
