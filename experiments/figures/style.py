"""One style and one layout for all figures: rcParams, colours, panels, labels, fitting to a width, save_svg.

Drawing functions take arrays and a Caption and return a Figure. They read no file and print nothing. NaN
was not attended. A drawing function sets every tick and whole sentences; styled() then fits the figure to its
width: it breaks lines, leaves out ticks without room, and makes the figure higher where panels are too low.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import seaborn
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FixedLocator, MaxNLocator

from experiments.caches.files import replacing

STYLE = seaborn.axes_style("whitegrid") | {
    "font.sans-serif": ["Arial", "DejaVu Sans", "Helvetica"],
    "font.size": 8,  # points; all letters are of 6 to 9, at every width
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "axes.titlelocation": "left",  # lines of a centred title would need the widths of the viewer's own font
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "figure.dpi": 150,
    "savefig.dpi": 300,
    "savefig.bbox": "tight",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "wan-attention",  # ids inside the file do not depend on the run
    "axes.titley": 1.0,
    "axes.formatter.useoffset": False,
    "figure.constrained_layout.use": True,
}
TITLE, SMALL, TINY = 9, 7, 6  # points
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
WIDEST = 9.0  # inches, of a figure that is for no journal
NARROW = 5.0  # inches: below it a colour bar of several panels lies under them
LOWEST = 0.52  # inches, of a panel: 13.2 mm
LAYOUT_ROUNDS = 4  # at most, in which it settles
PERCENTILE = 97  # where colours end: a few heads of the real model's last layers would leave all others pale
STEPS = (1, 2, 3, 5, 6, 10, 12, 20, 25, 50, 100, 200, 500)  # from tick to tick
_size: tuple[float | None, float | None] = (None, None)  # inches that the user wants; None: as panels need

# --- Drawing in this style, and saving


def use_size(width: str | float | None = None, height: float | None = None) -> None:
    """Draw figures from now on as wide as a journal's "column" or "page", or so many inches; None: freely."""
    global _size
    _size = (WIDTHS[width] if isinstance(width, str) else width), height


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
            _fit(figure)
            figure.set_layout_engine("none")  # fixed: showing a figure cannot change it
            plt.close(figure)
            return figure

    return wrapper


def save_svg(figure: Figure, path: str | Path) -> Path:
    """Write a figure as SVG, whole or not at all; the same figure gives the same bytes."""
    with replacing(path) as file:
        file.write(svg_of(figure, {}))
    return Path(path)


def svg_of(figure: Figure, metadata: Mapping[str, str | None]) -> bytes:
    """Return the SVG without indentation, its places rounded to hundredths of a point: a tenth less."""
    drawn = BytesIO()
    with plt.rc_context(STYLE | {"savefig.bbox": None}):
        figure.savefig(drawn, format="svg", metadata={**metadata, "Date": None})

    def rounded(number: re.Match[bytes]) -> bytes:
        return f"{float(number[0]):.2f}".rstrip("0").rstrip(".").encode()

    svg = re.sub(rb"\n +", b"\n", drawn.getvalue())
    places = rb'(?<= )(?:d|points|x|y|x1|x2|y1|y2|cx|cy|width|height)="[^"]*"'
    return re.sub(places, lambda place: re.sub(rb"-?\d+\.\d{3,}", rounded, place[0]), svg)


# --- Fitting a figure to its width


def text_width(text: str, points: float) -> float:
    """Inches of the longest line of a text."""
    return max(_line_width(line) for line in text.split("\n")) * points


@cache
def _line_width(line: str) -> float:
    return text_to_path.get_text_width_height_descent(line, FontProperties(size=100), False)[0] / 7200


def wrapped(text: str, points: float, inches: float) -> str:
    """Break lines so that they are at most so wide; "t = 1000" stays on one line."""
    lines = []
    for line in text.replace(" = ", "\u00a0=\u00a0").split("\n"):
        lines.append("")
        for word in line.split(" "):
            longer = f"{lines[-1]} {word}" if lines[-1] else word
            if lines[-1] and text_width(longer, points) > 0.94 * inches:
                lines.append(word)
            else:
                lines[-1] = longer
    return "\n".join(lines)


def panels_of(figure: Figure) -> list[Axes]:
    """Return the axes that are panels, not colour bars."""
    return [axis for axis in figure.axes if axis.get_subplotspec() is not None]


def _fit(figure: Figure) -> None:
    """Place title and subtitle, break lines and leave out ticks without room, and let no panel be too low."""
    (width, height), panels, layout = figure.get_size_inches(), panels_of(figure), figure.get_layout_engine()
    assert layout is None or isinstance(layout, ConstrainedLayoutEngine)
    top, headers = 0.03, [text for text in figure.texts if text.get_gid() in ("title", "subtitle")]
    places = []
    for text in headers:
        points = float(text.get_fontsize())
        text.set_text(wrapped(text.get_text(), points, width - 0.08))
        places.append(top)
        top += (text.get_text().count("\n") + 1) * points * 1.3 / 72 + 0.03
    if (y := figure._supylabel) is not None:  # type: ignore[attr-defined]
        y.set_text(wrapped(y.get_text(), y.get_fontsize(), 0.85 * height))
    below = sum(legend.get_window_extent().height / figure.dpi for legend in figure.legends)
    if width < NARROW:  # colour bars of several panels lie below them
        below += 0.45 * len([bar for bar in figure.axes if bar not in panels and bar.get_ylim() == (0, 1)])
    height, more = height + top + below, 0.0
    said: dict[Text, str] = {}
    before: list[object] = []
    rows = max(axis.get_subplotspec().get_gridspec().nrows for axis in panels)  # type: ignore[union-attr]
    figure.set_figheight(_size[1] or height)
    for own in [own for axis in figure.axes for own in (axis.xaxis, axis.yaxis)]:
        own.set_major_locator(FixedLocator(list(own.get_majorticklocs())))  # labels keep their width
    once = all(axis.get_aspect() == "auto" for axis in panels)  # else a panel changes its shape in its place
    for n in range(LAYOUT_ROUNDS):
        for axis in panels:
            _fit_panel(axis, panels, said)
        lines = [axis.get_title(loc="left").count("\n") + axis.get_xlabel().count("\n") for axis in panels]
        figure.set_figheight(_size[1] or height + more + 0.14 * rows * max(lines))
        now = [figure.get_figheight(), *(text.get_text() for text in said)]
        if now == before and (once or n > 1):
            break
        before = now
        if layout:
            layout.set(rect=(0, 0, 1, 1 - top / figure.get_figheight()))
            layout.execute(figure)
            more += 1.25 * rows * max(0, LOWEST - min(_inches(axis)[1] for axis in panels))
    if layout and not once:
        layout.execute(figure)
    if y is not None:
        edges = [edge for axis in panels for edge in axis.get_position().intervaly]
        y.set_y((min(edges) + max(edges)) / 2)
    for text, place in zip(headers, places, strict=True):
        text.set_position((0.04 / width, 1 - place / figure.get_figheight()))
    for axis in panels:
        _place_names(axis)


def _figure_of(axis: Axes) -> Figure:
    figure = axis.get_figure(root=True)
    assert figure is not None
    return figure


def _inches(axis: Axes) -> tuple[float, float]:
    size = axis.get_position().size * _figure_of(axis).get_size_inches()
    return float(size[0]), float(size[1])


def _fit_panel(axis: Axes, panels: Sequence[Axes], said: dict[Text, str]) -> None:
    """Break the lines of a panel's title and labels, as they were said, and keep the ticks that have room."""
    (wide, high), place, width = _inches(axis), axis.get_position(), _figure_of(axis).get_size_inches()[0]
    others = [other.get_position() for other in panels]
    beside = [one.x0 for one in others if one.x0 > place.x0 + 0.01 and abs(one.y0 - place.y0) < 0.01]
    cell = max(wide, (min(beside, default=1.0) - place.x0) * width - 0.2)
    alone = not any(other.get_xlabel() for other in panels if other is not axis)
    rooms = {axis._left_title: cell, axis.yaxis.label: high}  # type: ignore[attr-defined]
    rooms[axis.xaxis.label] = (
        2 * min(place.x1 + place.x0, 2 - place.x1 - place.x0) / 2 * width if alone else cell
    )
    for text, room in rooms.items():
        text.set_text(wrapped(said.setdefault(text, text.get_text()), text.get_fontsize(), room))
    _thin(axis.xaxis, axis.get_xlim(), wide)
    _thin(axis.yaxis, axis.get_ylim(), high)


def _thin(axis: Axis, limits: tuple[float, float], inches: float) -> None:
    """Keep every 2nd, 3rd, 5th, ... of ticks that were set, by their number, so that labels have room."""
    if not isinstance(axis.get_major_locator(), FixedLocator):
        return
    is_x, places = axis is axis.axes.xaxis, np.asarray(axis.get_majorticklocs())
    labels = [str(label) for label in axis.get_major_formatter().format_ticks(list(places))]
    some = axis.get_major_ticks()[0].label1 if len(places) else None
    if some is None or not some.get_visible() or some.get_rotation():
        return
    points = float(some.get_fontsize())
    room = [text_width(label, points) + 0.05 if is_x else points / 72 for label in labels]
    at = (places - limits[0]) / (limits[1] - limits[0]) * inches
    for step in STEPS:
        kept = [i for i, label in enumerate(labels) if _is_kept(i, label, step, is_x)]
        gaps = [abs(at[j] - at[i]) - (room[i] + room[j]) / 2 for i, j in pairwise(kept)]
        if min(gaps, default=1) >= 0:
            break
    if step > 1:
        axis.set_ticks([places[i] for i in kept], [labels[i] for i in kept], fontsize=points)


def _is_kept(i: int, label: str, step: int, is_x: bool) -> bool:
    if label.isdecimal():
        return int(label) % step == 0
    is_number = label.strip("−").replace(".", "").isdecimal()
    return i % step == 0 if is_number or (is_x and not label.startswith("μ")) else True


def name_points(axis: Axes, names: Mapping[str, tuple[float, float]], points: float = TINY) -> None:
    """Name places (x, y) of an axis beside them; styled() finds room when the layout is fixed."""
    for name, place in names.items():
        said: dict[str, Any] = {"fontsize": points, "textcoords": "offset points", "gid": "name"}
        axis.annotate(name, place, (0, 0), **said).set_in_layout(False)


def _place_names(axis: Axes) -> None:
    """Move every name to the nearest place around its point without another name or point, and inside."""
    names = [text for text in axis.texts if text.get_gid() == "name"]
    if not names:
        return
    scale, (wide, high) = 72 / axis.figure.dpi, np.array(_inches(axis)) * 72
    corner = axis.get_window_extent().p0
    at = [(axis.transData.transform(text.xy) - corner) * scale for text in names]  # type: ignore[attr-defined]
    taken = [(x - 2.5, y - 2.5, x + 2.5, y + 2.5) for x, y in at]
    for text, (x, y) in zip(names, at, strict=True):
        points = float(text.get_fontsize())
        w, h = text_width(text.get_text(), points) * 72, points * 1.1
        found = []
        for far in (4, 8, 13, 19, 26, 34):
            for turn in np.arange(16) * np.pi / 8:
                dx, dy = far * np.cos(turn), far * np.sin(turn)
                left = x + dx - w * (1 - np.cos(turn)) / 2
                low = y + dy - h * (1 - np.sin(turn)) / 2
                box = (left, low, left + w, low + h)
                out = max(-left, -low, left + w - wide, low + h - high, 0)
                hit = sum(
                    max(0, min(box[2], b[2]) - max(box[0], b[0]))
                    * max(0, min(box[3], b[3]) - max(box[1], b[1]))
                    for b in taken
                )
                found.append((hit + 100 * out + 0.01 * far, box))
        _, best = min(found)
        taken.append(best)
        text.set_position((best[0] - x, best[1] - y))
        text.set_verticalalignment("bottom")
        if np.hypot(best[0] + w / 2 - x, best[1] + h / 2 - y) > w / 2 + 14:
            line = {"arrowstyle": "-", "linewidth": 0.4, "color": "0.5"}
            middle = (best[0] + w / 2 - x, best[1] + h / 2 - y)
            axis.annotate("", text.xy, middle, textcoords="offset points", arrowprops=line)  # type: ignore[attr-defined]


# --- Panels, labels, axes


def panels(
    n: int, columns: int, size: tuple[float, float], keep=False, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Make n axes in rows of at most columns, each of about size inches with its labels, of fewer columns
    where the width is a journal's (unless keep); cells left over are empty."""
    columns = max(1, min(n, columns))
    width = _size[0] or min(WIDEST, max(columns * size[0], 4.0))
    if not keep:
        columns = min(columns, max(1, int(width / (0.45 * size[0]))))
    rows = -(-max(n, 1) // columns)
    height = rows * size[1] * float(np.clip(width / columns / size[0], 0.7, 1))
    grid: dict[str, Any] = {"squeeze": False, "figsize": (width, height)}
    figure, axes = plt.subplots(rows, columns, **grid | options)
    for axis in axes.flat[max(n, 1) :]:
        axis.remove()
    if not n:
        axes.flat[0].axis("off")
    shown = list(axes.flat[:n])
    for axis in shown[max(0, n - columns) :]:  # the lowest of each column keeps its tick labels
        axis.tick_params(labelbottom=True)
    return figure, shown


def columns_with_room(n: int, inches: float, beside: float = 0.6) -> list[int]:
    """Choose evenly as many of n pictures as fit side by side at so many inches each."""
    room = int(((_size[0] or WIDEST) - beside) / inches)
    return np.unique(np.linspace(0, n - 1, max(1, min(n, room))).round().astype(int)).tolist()


def label_figure(
    figure: Figure,
    axes: Sequence[Axes],
    title: str,
    subtitle="",
    y="",
    legend: Mapping[str, Artist] | None = None,
    x="Key frame (latent)",
    note="",
) -> None:
    """Set a title and a small subtitle, an x label under the lowest axes, one y label for all, and below a
    legend and a note."""
    for gid, text, points, color in (("title", title, TITLE, "0"), ("subtitle", subtitle, SMALL, "0.3")):
        if text:
            said: dict[str, Any] = {"fontsize": points, "color": color, "ha": "left", "va": "top"}
            figure.text(0, 1, text, gid=gid, **said).set_in_layout(False)
    lowest = [axis for axis in axes if axis.xaxis.get_tick_params()["labelbottom"]]
    for axis in lowest if len(lowest) <= 2 else [lowest[(len(lowest) - 1) // 2]]:
        axis.set_xlabel(x)
    if y:
        figure.supylabel(y, fontsize=8)
    shown, width = list((legend or {}).values()), figure.get_figwidth()
    if shown or note:
        labels = [wrapped(str(handle.get_label()), SMALL, width - 0.6) for handle in shown]
        widest = max([text_width(label, SMALL) + 0.55 for label in labels], default=1)
        below: dict[str, Any] = {"loc": "outside lower left", "frameon": False, "borderpad": 0.1}
        below |= {"ncols": max(1, min(len(shown), int(width / widest))), "borderaxespad": 0.1}
        about: dict[str, Any] = {"title": wrapped(note, SMALL, width - 0.3) or None, "title_fontsize": SMALL}
        figure.legend(shown, labels, alignment="left", **below, **about)


def handles(axis: Axes) -> dict[str, Artist]:
    """The labelled artists of an axis, as a legend."""
    return {str(handle.get_label()): handle for handle in axis.get_legend_handles_labels()[0]}


def missing_note(missing: Iterable[tuple[str, str]]) -> str:
    """Say what a figure leaves out: (title, reason) of each, those of one reason together; "" for nothing."""
    reasons: dict[str, list[str]] = {}
    for title, reason in missing:
        reasons.setdefault(reason, []).append(title)
    text = "; ".join(f"{', '.join(titles)}: {reason}" for reason, titles in reasons.items())
    return f"absent: {text}" if text else ""


def frame_axis(axis: Axes, F: int) -> None:
    """Let the x axis be F frames."""
    axis.set_xlim(-0.6, F - 0.4)
    axis.set_xticks(range(F))


def picture_strip(axis: Axes, pictures: Sequence[np.ndarray]) -> None:
    """Put pictures [H, W, 3] of frames under their places on the frame axis, of as many as have room."""
    (left, right), (wide, high) = axis.get_xlim(), _inches(axis)
    ratio = pictures[0].shape[1] / pictures[0].shape[0]
    of_frame = 0.9 * wide / (right - left)  # inches
    step = int(np.ceil(0.3 * ratio / of_frame))
    tall = of_frame * step / ratio
    strip = axis.inset_axes((0, -(tall + 0.2) / high, 1, tall / high))
    for frame in range(0, len(pictures), step):
        extent = (frame - 0.46 * step, frame + 0.46 * step, 0, 1)
        strip.imshow(pictures[frame], extent=extent, aspect="auto")
    strip.set(xlim=(left, right), ylim=(0, 1))
    strip.axis("off")
    axis.xaxis.labelpad = 72 * tall + 6  # points: the label stands below the strip


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


def mark_averages(axis: Axes, first: int, count: int, values: np.ndarray | None = None) -> dict[str, Artist]:
    """Mark columns as averages of gone frames, with hatched bars of values, when frames have their ticks."""
    if not count:
        return {}
    if values is not None:
        axis.bar(first + np.arange(count), values, width=0.85, **AVERAGE)
    left, right = axis.get_xlim()
    axis.set_xlim(left, max(right, first + count - 0.5))
    axis.axvline(first - 0.5, color=DARK, linewidth=1.2)
    frames = [int(tick) for tick in axis.get_xticks() if 0 <= tick < first - 1]
    axis.set_xticks([*frames, first + (count - 1) / 2], [*map(str, frames), "μ"])
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


def write_cells(axis: Axes, values: np.ndarray, text: str, middle: float, size: float = SMALL) -> None:
    """Write values [rows, columns] into the cells of a heat map, white below the middle; N/A for NaN."""
    for (row, column), value in np.ndenumerate(values):
        said = text.format(value) if np.isfinite(value) else "N/A"
        color = "white" if value < middle else "black"
        axis.text(column, row, said, ha="center", va="center", fontsize=size, color=color, gid="cell")


def grey_legend(values: np.ndarray) -> dict[str, Artist]:
    """The legend entry of grey cells, where values have a NaN."""
    return {NOT_ATTENDED: Patch(facecolor=GREY, label=NOT_ATTENDED)} if np.isnan(values).any() else {}


def color_bar(
    figure: Figure,
    image: ScalarMappable,
    axes: Axes | Sequence[Axes],
    label="",
    values: np.ndarray | None = None,
    **options: Any,
) -> Colorbar:
    """Draw a colour bar; an end gets an arrow where values go beyond it."""
    low, high = image.get_clim()
    if values is not None and low is not None and high is not None:
        below, above = bool((values < low).any()), bool((values > high).any())
        options["extend"] = {(True, False): "min", (False, True): "max", (True, True): "both"}.get(
            (below, above), "neither"
        )
    (width, height), several = figure.get_size_inches(), not isinstance(axes, Axes)
    first = axes if isinstance(axes, Axes) else axes[0]
    shape: dict[str, Any] = {"pad": 0.02, "aspect": 25, "fraction": 0.1}
    shape["shrink"] = min(1.0, 3.5 / height) if several else 1.0
    long = min(3.5, 0.8 * height)
    if several and width < NARROW:  # panels need the width
        shape, long = {"location": "bottom", "pad": 0.02, "aspect": 40}, 0.9 * width
        grid = first.get_subplotspec()
        long *= min(1, np.size(axes) / (grid.get_gridspec().ncols if grid else 1))  # type: ignore[arg-type]
    bar = figure.colorbar(image, ax=axes, **{"ticks": MaxNLocator(4 if long > 1.2 else 2)} | shape | options)
    bar.set_label(wrapped(label, SMALL, long), fontsize=SMALL)
    return bar
