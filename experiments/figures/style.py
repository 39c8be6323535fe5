"""One style for all figures: rcParams, colours, labels, axes, and save_svg.

Drawing functions take arrays and a Caption and return a Figure. They read no file and print nothing. NaN
was not attended. Titles are single lines: an SVG's own font is centred right only then.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import seaborn
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text

from experiments.caches.files import replacing
from experiments.caches.view import average_names

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
    "axes.titley": 1.0,
    "figure.constrained_layout.use": True,
}
LABELS = {
    "mean_logit": "Mean logit q·k/√D",
    "mass": "Attention mass (share of 1)",
    "mean_prob": "Mean probability per key token",
}
TOKEN_LABELS = LABELS | {"mean_logit": "Logit q·k/√D, query mean", "mean_prob": "Probability, query mean"}
NAMES = {"mean_logit": "mean logit", "mass": "attention mass", "mean_prob": "mean probability"}

# Okabe and Ito (2008), colours that colour-blind readers tell apart; RED is their vermilion, PURPLE their
# reddish purple. DARK and GREY are neutral.
BLUE, ORANGE, GREEN, PURPLE, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00"
YELLOW, DARK, GREY = "#F0E442", "#1F3552", "0.85"
HATCH: dict[str, Any] = {"facecolor": "0.92", "edgecolor": "0.7", "hatch": "////", "linewidth": 0}
SHADE: dict[str, Any] = {"facecolor": ORANGE, "alpha": 0.2, "linewidth": 0}
AVERAGE: dict[str, Any] = {"facecolor": ORANGE, "edgecolor": "white", "hatch": "////", "linewidth": 0}
NOT_ATTENDED, AVERAGES = "not attended", "average of gone frames (μ)"

WIDTHS = {"column": 3.25, "page": 6.75}  # inches, of a journal
JOURNAL_POINTS = 8  # letters of figures of such a width
LAYOUT_ROUNDS = 2  # in which it settles
THIN_ABOVE = 25  # frames: up to here every frame has a tick, where there is room
PERCENTILE = 97  # where colours end: a few heads of the real model's last layers would leave all others pale
_width: float | None = None  # inches, where figures are drawn for a journal

# --- Drawing in this style, and saving


def use_width(width: str | None) -> None:
    """Draw figures from now on as wide as a journal's "column" or "page"; None: as their panels need."""
    global _width
    _width = WIDTHS[width] if width else None


@cache
def _load_backend() -> None:
    """Load pyplot's backend before rc_context, which would undo that a notebook's turns the display on."""
    plt.switch_backend(matplotlib.get_backend())


@contextmanager
def in_style() -> Iterator[None]:
    """Draw new figures in the style of this module; what is set beyond it stays as it was."""
    _load_backend()
    with plt.rc_context(STYLE):
        yield


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Draw in the style of this module, and keep the figure out of pyplot's list of open ones."""

    @wraps(draw)
    def wrapper(*args, **kwargs) -> Figure:
        with in_style():
            figure = draw(*args, **kwargs)
            if _width:
                _fit(figure, _width)
            if layout := figure.get_layout_engine():
                for _ in range(LAYOUT_ROUNDS):
                    layout.execute(figure)
            figure.set_layout_engine("none")  # fixed: showing a figure cannot change it
            plt.close(figure)
            return figure

    return wrapper


def _fit(figure: Figure, inches: float) -> None:
    """Make a figure so wide, its letters at most 8 points, its titles in as many lines as they need."""
    ratio = inches / figure.get_figwidth()
    height = figure.get_figheight() * max(ratio, min(1, ratio**0.5))
    figure.set_size_inches(inches, max(height, min(inches, 3.0)))  # room for words, which do not shrink
    for text in figure.findobj(Text):
        text.set_fontsize(min(text.get_fontsize(), JOURNAL_POINTS))

    def wrapped(text: str, letters: float) -> str:
        return fill(text.replace(" = ", "\u00a0=\u00a0"), int(letters))  # "t = 1000" stays on one line

    if title := figure.get_suptitle():
        figure.suptitle(wrapped(title, inches * 15), fontsize=JOURNAL_POINTS)
    for axis in figure.axes:
        if (spec := axis.get_subplotspec()) is not None:
            axis.title.set_text(wrapped(axis.get_title(), inches * 14 / spec.get_gridspec().ncols))


def save_svg(figure: Figure, path: str | Path) -> Path:
    """Write a figure as SVG, whole or not at all; the same figure gives the same bytes."""
    drawn = BytesIO()
    with plt.rc_context(STYLE):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    with replacing(path) as file:
        file.write(lean(drawn.getvalue()))
    return Path(path)


def lean(svg: bytes) -> bytes:
    """Drop an SVG's indentation and round places to hundredths of a point: a tenth of it less."""
    places = rb'(?<= )(?:d|points|x|y|x1|x2|y1|y2|cx|cy|width|height)="[^"]*"'

    def rounded(number: re.Match[bytes]) -> bytes:
        return f"{float(number[0]):.2f}".rstrip("0").rstrip(".").encode()

    svg = re.sub(rb"\n +", b"\n", svg)
    return re.sub(places, lambda place: re.sub(rb"-?\d+\.\d{3,}", rounded, place[0]), svg)


def panel_grid(n: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """Make n axes in rows of at most columns, each of size inches; cells left over are empty."""
    columns = min(n, columns)
    if _width:
        columns = min(columns, max(1, int(_width / (1.6 if size[0] < 4 else 3.2))))
    rows = -(-n // columns)
    figsize = (_width or max(7.0, size[0] * columns), 0.8 + size[1] * rows * (0.75 if _width else 1))
    figure, grid = plt.subplots(rows, columns, squeeze=False, sharex=True, figsize=figsize)
    axes = drop_empty(grid, n)
    for axis in axes[max(0, n - columns) :]:  # the lowest of each column keeps its tick labels
        axis.tick_params(labelbottom=True)
    return figure, axes


def drop_empty(grid: np.ndarray, n: int) -> list[Axes]:
    """Remove the axes of a grid after the first n, and return those."""
    for axis in grid.flat[n:]:
        axis.remove()
    return list(grid.flat[:n])


def label_figure(
    figure: Figure,
    axes: Sequence[Axes],
    title: str,
    y="",
    legend: Mapping[str, Artist] | None = None,
    x="Key frame (latent)",
    note="",
) -> None:
    """Set a title, an x label under the lowest axes, one y label for all, and below a legend and a note."""
    figure.suptitle(title)
    for axis in axes:
        if axis.xaxis.get_tick_params()["labelbottom"]:
            axis.set_xlabel(x)
    if y:
        figure.supylabel(y, fontsize=9)
    if legend or note:
        shown = list((legend or {}).values())
        columns = max(1, min(len(shown), int(_width / 2.2) if _width else len(shown)))
        below: dict[str, Any] = {"loc": "outside lower center", "ncols": columns, "frameon": False}
        figure.legend(handles=shown, title=note or None, title_fontsize=8, **below)


def handles(axis: Axes) -> dict[str, Artist]:
    """The labelled artists of an axis, as a legend."""
    return {str(handle.get_label()): handle for handle in axis.get_legend_handles_labels()[0]}


def missing_note(missing: Sequence[tuple[str, str]]) -> str:
    """Say what a figure leaves out: (title, reason) of each, those of one reason together; "" for nothing."""
    reasons: dict[str, list[str]] = {}
    for title, reason in missing:
        reasons.setdefault(reason, []).append(title)
    text = "; ".join(f"{', '.join(titles)}: {reason}" for reason, titles in reasons.items())
    return fill(f"absent: {text}", 110) if text else ""


def ticks(n: int, room: int) -> np.ndarray:
    """0, step, 2 step, ... below n: every one where there is room for that many, else a round step."""
    step = next(s for s in (1, 2, 3, 5, 6, 10, 12, 20, 25, 50, 100, 200, 500, n) if n / s <= room or s >= n)
    return np.arange(0, n, step)


def frame_axis(axis: Axes, F: int, room: int) -> None:
    """Let the x axis be F frames, with ticks for as many as there is room for."""
    if _width and (spec := axis.get_subplotspec()) is not None:
        room = min(room, int(_width / spec.get_gridspec().ncols * 4.5))
    axis.set_xlim(-0.6, F - 0.4)
    axis.set_xticks(ticks(F, room if F <= THIN_ABOVE else min(room, 15)))


def picture_strip(axis: Axes, pictures: Sequence[np.ndarray]) -> None:
    """Put a picture [H, W, 3] of every frame under its place on the frame axis."""
    left, right = axis.get_xlim()
    height, width = pictures[0].shape[:2]
    room = 0.14 * (right - left) / 2.3  # frames' widths that the strip is high; axes are about 2.3 : 1
    half = min(0.46, room * width / height / 2)
    strip = axis.inset_axes((0, -0.24, 1, 0.15))
    for frame, picture in enumerate(pictures):
        strip.imshow(picture, extent=(frame - half, frame + half, 0, 2 * half * height / width))
    strip.set(xlim=(left, right), ylim=(0, 2 * half * height / width), anchor="N")
    strip.axis("off")
    axis.xaxis.labelpad = 34  # points: the label stands below the strip


def mark_frames(
    axis: Axes, profile: np.ndarray, highlighted: Mapping[str, Sequence[int]]
) -> dict[str, Artist]:
    """Shade highlighted frames (text -> frames) and hatch NaN frames of a profile [F] -> the legend."""
    legend: dict[str, Artist] = {}
    for text, frames in highlighted.items():
        axis.axvspan(min(frames) - 0.5, max(frames) + 0.5, zorder=0, **SHADE)
        legend[text] = Patch(**SHADE, label=text)
    missing = np.flatnonzero(np.isnan(profile))
    for run in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1) if len(missing) else []:
        axis.axvspan(run[0] - 0.5, run[-1] + 0.5, zorder=0, **HATCH)
        legend[NOT_ATTENDED] = Patch(**HATCH, label=NOT_ATTENDED)
    return legend


def average_bars(axis: Axes, values: np.ndarray, first: int, width: float = 0.8) -> None:
    """Draw hatched bars of values [averages] in the columns from first on."""
    axis.bar(first + np.arange(len(values)), values, width=width, **AVERAGE)


def mark_averages(axis: Axes, first: int, count: int, large: bool = False) -> dict[str, Artist]:
    """Name and mark columns as averages of gone frames, when frames have their ticks -> the legend."""
    if not count:
        return {}
    left, right = axis.get_xlim()
    axis.set_xlim(left, max(right, first + count - 0.5))
    axis.axvline(first - 0.5, color=DARK, linewidth=1.2)
    each = large and first + count <= 25 and _width is None  # room for a name of every average
    named: dict[float, str] = {first + (count - 1) / 2: "μ"}
    if each:
        named = {first + n: name for n, name in enumerate(average_names(count))}
    frames = [int(tick) for tick in axis.get_xticks() if 0 <= tick < first - (not each)]
    axis.set_xticks([*frames, *named], [*map(str, frames), *named.values()])
    above: dict[str, Any] = {"transform": axis.get_xaxis_transform(), "clip_on": False}
    axis.add_patch(Rectangle((first - 0.5, 1), count, 0.04, **above, **AVERAGE))
    return {AVERAGES: Patch(**AVERAGE, label=AVERAGES)}


def color_scale(values: np.ndarray, quantity: str, percentile: float = 100) -> dict[str, Any]:
    """Colour by quantity: red and blue around 0 for logits, else viridis from 0; ends at a percentile."""
    top = max(float(np.nanpercentile(np.abs(values), percentile)), 1e-12)
    if quantity == "mean_logit":
        return {"cmap": "RdBu_r", "vmin": -top, "vmax": top}
    return {"cmap": "viridis", "vmin": 0.0, "vmax": top}


def heat_map(axis: Axes, values: np.ndarray, equal: bool = False, **colors: Any) -> AxesImage:
    """Draw values [rows, columns] as one image, cell i, j centred on (j, i); grey where NaN."""
    axis.grid(False)
    axis.set_facecolor(GREY)
    colors |= {"interpolation": "nearest", "aspect": "equal" if equal else "auto"}
    return axis.imshow(np.ma.masked_invalid(values), **colors)


def grey_legend(values: np.ndarray) -> dict[str, Artist]:
    """The legend entry of grey cells, where values have a NaN."""
    return {NOT_ATTENDED: Patch(facecolor=GREY, label=NOT_ATTENDED)} if np.isnan(values).any() else {}


def extend_of(values: np.ndarray, low: float, high: float) -> str:
    """Name the ends of a colour bar that get an arrow: those that values go beyond."""
    below, above = bool((values < low).any()), bool((values > high).any())
    return {(True, False): "min", (False, True): "max", (True, True): "both"}.get((below, above), "neither")


def color_bar(
    figure: Figure, image: ScalarMappable, axes: Axes | Sequence[Axes], unit: str, **options: Any
) -> Colorbar:
    """Draw a colour bar with its unit above it: beside it, it would read as the next panel's label."""
    with plt.rc_context({"axes.titley": None}):  # the unit stands above the bar's arrow, where it has one
        bar = figure.colorbar(image, ax=axes, **options)
        bar.ax.set_title(fill(unit, 12 if _width else 20), fontsize=8, loc="right" if _width else "left")
    return bar
