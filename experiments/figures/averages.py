"""Columns of averages of frames that are gone: after the frames, behind a line, hatched, named μ."""

from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from experiments.caches.averages import average_names
from experiments.figures.style import DARK, ORANGE, journal_width

HATCHED: dict[str, Any] = {"facecolor": ORANGE, "edgecolor": "white", "hatch": "////", "linewidth": 0}
AVERAGES = "average of gone frames (μ)"
STRIP = 0.04  # of the axes' height, above them
ROOM = 12  # points between axes and a title over the strip
EACH = 25  # columns up to which every average has its name, where the panel is large


def average_bars(axis: Axes, values: np.ndarray, first: int, width: float = 0.8) -> None:
    """Hatched bars of values [averages] in the columns from first on."""
    axis.bar(first + np.arange(len(values)), values, width=width, **HATCHED)


def mark_averages(axis: Axes, first: int, count: int, large: bool = False) -> dict[str, Artist]:
    """A line before the columns first .. first + count - 1, a hatched strip above them, and their names ->
    the legend entry; nothing where count is 0. Call it when the frames have their ticks."""
    if not count:
        return {}
    left, right = axis.get_xlim()
    axis.set_xlim(left, max(right, first + count - 0.5))
    axis.axvline(first - 0.5, color=DARK, linewidth=1.2)
    each = large and first + count <= EACH and journal_width() is None
    named: dict[float, str] = {first + (count - 1) / 2: "μ"}
    if each:
        named = {first + n: name for n, name in enumerate(average_names(count))}
    frames = [int(tick) for tick in axis.get_xticks() if 0 <= tick < first - (0 if each else 1)]
    axis.set_xticks([*frames, *named], [*map(str, frames), *named.values()])
    strip = Rectangle((first - 0.5, 1), count, STRIP, transform=axis.get_xaxis_transform(), clip_on=False)
    strip.set(**HATCHED)
    axis.add_patch(strip)
    return {AVERAGES: Patch(**HATCHED, label=AVERAGES)}
