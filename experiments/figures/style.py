"""One style for all figures: rcParams, colours, labels, frame axes, and save_svg."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from textwrap import fill
from types import MappingProxyType

import matplotlib.pyplot as plt
import numpy as np
import seaborn
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from experiments.caches.atomic_files import replacing

STYLE = seaborn.axes_style("whitegrid") | {
    "font.sans-serif": ["Arial", "DejaVu Sans", "Helvetica"],
    "font.size": 9,
    "axes.titlesize": 10,
    "figure.titlesize": 11,
    "figure.dpi": 150,
    "savefig.dpi": 300,
    "savefig.bbox": "tight",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "wan-attention",  # ids inside the file do not depend on the run
    "figure.constrained_layout.use": True,
}

LABELS = {
    "mean_logit": "Mean logit q·k/√D",
    "mass": "Attention mass (share of 1)",
    "mean_prob": "Mean probability per key token",
}

TOKEN_LABELS = LABELS | {"mean_logit": "Logit q·k/√D, query mean", "mean_prob": "Probability, query mean"}

NAMES = {"mean_logit": "mean logit", "mass": "attention mass", "mean_prob": "mean probability"}

BLUE, DARK, ORANGE, GREEN, PURPLE, RED, GREY = (
    "#4C72B0",
    "#1F3552",
    "#DD8452",
    "#55A868",
    "#8172B3",
    "#C44E52",
    "0.85",
)

ABSENT = {"facecolor": "0.92", "edgecolor": "0.7", "hatch": "////", "linewidth": 0}

SHADE = {"facecolor": ORANGE, "alpha": 0.2, "linewidth": 0}

THIN_ABOVE = 25  # frames: up to here every frame has a tick, where there is room

Shaded = Mapping[str, Sequence[int]]

NONE: Mapping = MappingProxyType({})


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Draw in the style of this module, and keep the figure out of pyplot's list of open ones."""

    @wraps(draw)
    def wrapper(*args, **kwargs) -> Figure:
        with plt.rc_context(STYLE):
            figure = draw(*args, **kwargs)
            for _ in range(
                2
            ):  # the layout settles in two rounds; then fixed, so showing a figure cannot change it
                figure.draw_without_rendering()
            figure.set_layout_engine("none")
            plt.close(figure)
            return figure

    return wrapper


def save_svg(figure: Figure, path: str | Path) -> Path:
    """Write a figure as SVG, whole or not at all; the same figure gives the same bytes."""
    with plt.rc_context(STYLE), replacing(path) as file:
        figure.savefig(file, format="svg", metadata={"Date": None})
    return Path(path)


def panel_grid(n: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """n axes in rows of at most columns, each of size inches; cells left over are empty."""
    columns = min(n, columns)
    rows = -(-n // columns)
    figure, axes = plt.subplots(
        rows, columns, squeeze=False, sharex=True, figsize=(max(7.0, size[0] * columns), 0.8 + size[1] * rows)
    )
    axes = list(axes.flat)
    for axis in axes[n:]:
        axis.remove()
    for axis in axes[max(0, n - columns) : n]:  # the lowest of each column keeps its tick labels
        axis.tick_params(labelbottom=True)
    return figure, axes[:n]


def label_figure(
    figure: Figure,
    axes: Sequence[Axes],
    title: str,
    y: str = "",
    legend: Mapping = NONE,
    x: str = "Key frame (latent)",
) -> None:
    """Title, x label under the lowest axes, one y label for all, and a legend below everything."""
    figure.suptitle(title)
    for axis in axes:
        if axis.xaxis.get_tick_params()["labelbottom"]:
            axis.set_xlabel(x)
    if y:
        figure.supylabel(y, fontsize=9)
    if legend:
        figure.legend(
            handles=list(legend.values()), loc="outside lower center", ncols=len(legend), frameon=False
        )


def ticks(n: int, room: int) -> np.ndarray:
    """0, step, 2 step, ... below n: every one where there is room for that many, else a round step."""
    step = next(s for s in (1, 2, 3, 5, 6, 10, 12, 20, 25, 50, 100, 200, 500, n) if n / s <= room or s >= n)
    return np.arange(0, n, step)


def frame_axis(axis: Axes, F: int, room: int) -> None:
    axis.set_xlim(-0.6, F - 0.4)
    axis.set_xticks(ticks(F, room if F <= THIN_ABOVE else min(room, 15)))


def mark_frames(axis: Axes, profile: np.ndarray, shaded: Shaded) -> dict[str, Patch]:
    """Shade the frames of shaded, hatch those that were not attended; legend entries by their text."""
    legend = {}
    for text, frames in shaded.items():
        axis.axvspan(min(frames) - 0.5, max(frames) + 0.5, zorder=0, **SHADE)
        legend[text] = Patch(**SHADE, label=text)
    absent = np.flatnonzero(np.isnan(profile))
    for run in np.split(absent, np.flatnonzero(np.diff(absent) > 1) + 1) if len(absent) else []:
        axis.axvspan(run[0] - 0.5, run[-1] + 0.5, zorder=0, **ABSENT)
        legend["not attended"] = Patch(**ABSENT, label="not attended")
    return legend


def say_absent(axis: Axes, why: str, width: int = 22) -> None:
    """An axis for what a cache does not hold, with the reason in lines of at most width letters. Its limits are left as
    they are: axes may share them."""
    axis.grid(False)
    axis.tick_params(bottom=False, labelbottom=False, left=False, labelleft=False)
    axis.add_patch(Rectangle((0, 0), 1, 1, transform=axis.transAxes, zorder=0, **ABSENT))
    axis.text(
        0.5,
        0.5,
        "absent:\n" + fill(why, width),
        transform=axis.transAxes,
        ha="center",
        va="center",
        fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 3},
    )


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
