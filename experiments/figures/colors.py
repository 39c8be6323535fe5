"""Colours of a quantity, values drawn as one image, and colour bars. All maps are safe for colour-blind
readers."""

from collections.abc import Sequence
from textwrap import fill
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from experiments.figures.style import GREY, journal_width


def color_scale(values: np.ndarray, quantity: str, percentile: float = 100) -> dict[str, Any]:
    """Colours for values of a quantity: red and blue around 0 for logits, viridis from 0 for masses and
    probabilities.

    percentile of their size is where the colours end: a few heads of the real model would leave all others
    pale."""
    top = max(float(np.nanpercentile(np.abs(values), percentile)), 1e-12)
    return (
        {"cmap": "RdBu_r", "vmin": -top, "vmax": top}
        if quantity == "mean_logit"
        else {"cmap": "viridis", "vmin": 0.0, "vmax": top}
    )


def heat_map(axis: Axes, values: np.ndarray, equal: bool = False, **colors: Any) -> AxesImage:
    """Values [rows, columns] as one image, cell i, j centred on (j, i); grey where NaN."""
    axis.grid(False)
    axis.set_facecolor(GREY)
    return axis.imshow(
        np.ma.masked_invalid(values), interpolation="nearest", aspect="equal" if equal else "auto", **colors
    )


def extend_of(values: np.ndarray, low: float, high: float) -> str:
    """Which ends of a colour bar get an arrow: those that values go beyond."""
    below, above = bool((values < low).any()), bool((values > high).any())
    return {(True, False): "min", (False, True): "max", (True, True): "both"}.get((below, above), "neither")


def color_bar(
    figure: Figure, image: ScalarMappable, axes: Axes | Sequence[Axes], unit: str, **options: Any
) -> Colorbar:
    """A colour bar with its unit above it: beside it, it would read as the next panel's label."""
    narrow = journal_width() is not None
    with plt.rc_context({"axes.titley": None}):  # the unit stands above the bar's arrow, where it has one
        bar = figure.colorbar(image, ax=axes, **options)
        bar.ax.set_title(fill(unit, 12 if narrow else 20), fontsize=8, loc="right" if narrow else "left")
    return bar
