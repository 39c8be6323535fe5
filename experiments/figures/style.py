"""One style and one layout for all figures: rcParams, colours, panels, labels, fitting to a width, save_svg.

Drawing functions take arrays and a Caption and return a Figure. They read no file and print nothing. NaN
was not attended. A drawing function sets every tick and whole sentences; styled() then breaks lines, leaves
out ticks without room, and makes the figure higher where panels are too low.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial, wraps
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, MaxNLocator
from matplotlib.transforms import ScaledTranslation

from experiments.caches.files import replacing
from wan.errors import ConfigError

STYLE: Any = {
    # White with a grid, as seaborn's "whitegrid", whose import takes seconds: of scipy.stats and pandas
    "axes.axisbelow": True,
    "axes.edgecolor": ".8",
    "axes.grid": True,
    "axes.labelcolor": ".15",
    "grid.color": ".8",
    "lines.solid_capstyle": "round",
    "patch.edgecolor": "w",
    "patch.force_edgecolor": True,
    "text.color": ".15",
    "xtick.bottom": False,
    "xtick.color": ".15",
    "ytick.left": False,
    "ytick.color": ".15",
    "font.family": ["sans-serif"],
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
    "figure.constrained_layout.w_pad": 0.1,  # inches
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
LOWEST = 0.55  # inches, of a panel: 14 mm
TICKS, TITLED = (
    0.45,
    0.45,
)  # inches of a panel: tick labels beside it; its title and tick labels above and below
LAYOUT_ROUNDS = 2
PERCENTILE = 97  # where colours end: a few heads of the real model's last layers would leave all others pale
STEPS = (1, 2, 3, 5, 6, 10, 12, 20, 25, 50, 100, 200, 500)  # from tick to tick
_size: tuple[float | None, float | None] = (None, None)  # inches that the user wants; None: as panels need

# --- Drawing in this style, and saving


def use_size(width: str | float | None = None, height: float | None = None) -> None:
    """Draw figures from now on as wide as a journal's "column" or "page", or so many inches; None: freely."""
    global _size
    inches = WIDTHS.get(width) if isinstance(width, str) else width
    for value, asked in ((inches, width), (height, height)):
        if asked is not None and (value is None or not 1 <= value <= 40):
            raise ConfigError(f"a figure's size is {', '.join(WIDTHS)}, or 1..40 inches, not {asked!r}")
    _size = inches, height


@cache
def _load_backend() -> None:
    """Load pyplot's backend before rc_context, which would undo that a notebook's turns the display on."""
    plt.switch_backend(matplotlib.get_backend())


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Draw in the style of this module, and keep the figure out of pyplot's list of open ones."""

    @wraps(draw)
    def wrapper(*args, **kwargs) -> Figure:
        _load_backend()
        with plt.rc_context(STYLE):
            figure = draw(*args, **kwargs)
            _fit(figure)
            plt.close(figure)
        with plt.rc_context({"figure.constrained_layout.use": False, "figure.autolayout": False}):
            figure.set_layout_engine(None)  # showing a figure cannot change it, and saving draws it once
        figure._ipython_display_ = partial(_show, figure)  # type: ignore[attr-defined]
        return figure

    return wrapper


def _show(figure: Figure) -> None:
    """Show a figure in a notebook as it is saved; Jupyter's own PNG cuts off the title."""
    from IPython.display import SVG, display

    display(SVG(drawn(figure, "svg", {"Date": None}).decode()))


def save_svg(figure: Figure, path: str | Path, metadata: Mapping[str, str | None] | None = None) -> Path:
    """Write a figure as SVG, whole or not at all; the same figure gives the same bytes."""
    with replacing(path) as file:
        file.write(drawn(figure, "svg", {**(metadata or {}), "Date": None}))
    return Path(path)


PLACES = re.compile(rb' (?:d|x|y)="[^"]*"')
DECIMALS = re.compile(rb"(\d\.\d\d)\d+")  # of points: a hundredth is enough


def drawn(figure: Figure, kind: str, metadata: Mapping[str, Any]) -> bytes:
    """Return the bytes of a figure as "svg" or "pdf"."""
    # Fonts of a PDF as TrueType (42): journals refuse type 3
    content = BytesIO()
    still = {"figure.constrained_layout.use": False}  # else the next drawing finds a layout
    with plt.rc_context(STYLE | still | {"savefig.bbox": None, "pdf.fonttype": 42}):
        figure.savefig(content, format=kind, metadata=metadata)
    if kind != "svg":
        return content.getvalue()
    return PLACES.sub(lambda some: DECIMALS.sub(rb"\1", some[0]), content.getvalue())


# --- Fitting a figure to its width


def wrapped(text: str, points: float, inches: float) -> str:
    """Break lines so that they are about so wide at most; "t = 1000" stays on one line."""
    # A letter of Arial is about 0.59 of its height wide; 72 points are an inch
    letters = max(8, int(inches * 72 / (0.59 * points)))
    lines = text.replace(" = ", "\u00a0=\u00a0").split("\n")
    return "\n".join(textwrap.fill(line, letters, break_long_words=False) for line in lines)


def panels_of(figure: Figure) -> list[Axes]:
    """Return the axes that are panels, not colour bars."""
    return [axis for axis in figure.axes if axis.get_subplotspec() is not None]


def _fit(figure: Figure) -> None:
    """Break lines and leave out ticks that have no room, and let no panel be too low."""
    # 1. What label_figure left: the height of the header, and the width of a panel
    layout, shown, height = figure.get_layout_engine(), panels_of(figure), figure.get_figheight()
    assert isinstance(layout, ConstrainedLayoutEngine)
    header = (1 - layout.get()["rect"][3]) * height  # inches, of label_figure
    grids = [axis.get_subplotspec().get_gridspec() for axis in shown]  # type: ignore[union-attr]
    rows, columns = np.max([grid.get_geometry() for grid in grids], 0)
    cell = figure.get_figwidth() / columns - 0.5
    alone = sum(bool(axis.get_xlabel()) for axis in shown) == 1
    # 2. Titles and x labels in lines as wide as their panels
    for axis in shown:
        title = axis._left_title  # type: ignore[attr-defined]
        title.set_text(wrapped(title.get_text(), title.get_fontsize(), cell))
        label = axis.xaxis.label
        label.set_text(wrapped(label.get_text(), 8, figure.get_figwidth() - 1 if alone else cell))
    # A line of 8 points takes 0.14 inches
    height += 0.14 * rows * max(axis.get_title(loc="left").count("\n") for axis in shown)
    # 3. Lay out, leave out ticks without room, grow: each changes what the others have
    for _ in range(LAYOUT_ROUNDS):
        figure.set_figheight(_size[1] or height)
        layout.set(rect=(0, 0, 1, 1 - header / figure.get_figheight()))
        layout.execute(figure)
        for axis in shown:
            wide, high = _inches(axis)
            axis.yaxis.label.set_text(wrapped(axis.get_ylabel(), 8, high))
            _thin(axis.xaxis, wide)
            _thin(axis.yaxis, high)
        free = [
            _inches(axis)[1] for axis in shown if axis.get_aspect() == "auto"
        ]  # squares follow their width
        height += 1.25 * rows * max(0, LOWEST - min(free, default=LOWEST))
    # 4. The last layout; constrained layout centres the y label on the figure, not on its panels
    figure.set_figheight(_size[1] or height)
    layout.set(rect=(0, 0, 1, 1 - header / figure.get_figheight()))
    layout.execute(figure)
    if (y := figure._supylabel) is not None:  # type: ignore[attr-defined]
        y.set_y(np.mean([axis.get_position().intervaly for axis in shown]))


def _inches(axis: Axes) -> tuple[float, float]:
    wide, high = axis.get_position().size * axis.figure.get_size_inches()  # type: ignore[union-attr]
    return float(wide), float(high)


def _thin(axis: Axis, inches: float) -> None:
    """Keep every 2nd, 3rd, 5th, ... of ticks that were set, by their number, so that labels have room."""
    places = np.asarray(axis.get_majorticklocs())
    if not isinstance(axis.get_major_locator(), FixedLocator) or not len(places):
        return
    some = axis.get_major_ticks()[0].label1
    if not some.get_visible() or some.get_rotation():
        return
    # Letters are 0.62 of their height wide; one above the other they need their height
    labels, points = axis.get_major_formatter().format_ticks(list(places)), float(some.get_fontsize())
    letter = points / 72 * (0.62 if axis is axis.axes.xaxis else 0)
    room = [max(map(len, label.split("\n"))) * letter + (0.05 if letter else points / 72) for label in labels]
    ends = axis.get_transform().transform(np.array(axis.get_view_interval()))
    at = (axis.get_transform().transform(places) - ends[0]) / (ends[1] - ends[0]) * inches
    # The first step at which no two labels touch
    for step in STEPS:
        numbers = [int(label) if label.isdecimal() else i for i, label in enumerate(labels)]
        kept = [i for i, n in enumerate(numbers) if n % step == 0 or labels[i] == "μ"]
        if all(abs(at[j] - at[i]) >= (room[i] + room[j]) / 2 for i, j in pairwise(kept)):
            break
    if step > 1:
        axis.set_ticks([places[i] for i in kept], [labels[i] for i in kept], fontsize=points)


# --- Panels, labels, axes


def is_narrow() -> bool:
    """Return True where figures are drawn at a column's width."""
    return _size[0] is not None and _size[0] < NARROW


def shape_square(figure: Figure, axes: Sequence[Axes]) -> None:
    """Make a figure of square panels as high as these are wide: no gaps between rows."""
    grid = axes[0].get_subplotspec().get_gridspec()  # type: ignore[union-attr]
    rows, columns = grid.get_geometry()
    width = figure.get_figwidth() - (0 if is_narrow() else 0.8)  # a colour bar stands beside wide panels
    figure.set_layout_engine("compressed")
    figure.set_figheight(rows * (width / columns - TICKS + TITLED))


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
    legend and a note. The figure grows by their height."""
    (width, height), top = figure.get_size_inches(), 0.03
    from_top = figure.dpi_scale_trans + ScaledTranslation(0, 1, figure.transFigure)  # type: ignore[arg-type]
    # 1. Title and subtitle from the top edge down, outside the layout: it would centre them on the axes
    for gid, text, points, color in (("title", title, TITLE, "0"), ("subtitle", subtitle, SMALL, "0.3")):
        if text:
            text = wrapped(text, points, width - 0.1)
            said: dict[str, Any] = {"fontsize": points, "color": color, "va": "top", "transform": from_top}
            figure.text(0.04, -top, text, gid=gid, **said).set_in_layout(False)
            top += (text.count("\n") + 1) * points * 1.3 / 72 + 0.03
    # 2. The x label under the lowest panels, once in the middle where there are more than two
    rows = [axis.get_subplotspec().rowspan.start for axis in axes]  # type: ignore[union-attr]
    lowest = [axis for axis, row in zip(axes, rows, strict=True) if row == max(rows)]
    for axis in lowest if len(lowest) <= 2 else [lowest[(len(lowest) - 1) // 2]]:
        axis.set_xlabel(x)
    # 3. Legend and note below, in as many columns as the longest label leaves room for
    shown, below = list((legend or {}).values()), 0.0
    if shown or note:
        labels = [wrapped(str(handle.get_label()), SMALL, width - 0.6) for handle in shown]
        widest = max([0.58 * SMALL / 72 * len(label) + 0.55 for label in labels], default=1)
        columns = max(1, min(len(shown), int(width / widest)))
        title_of_legend = wrapped(note, SMALL, width - 0.3) or None
        below = 0.16 * (-(-len(shown) // columns) + (title_of_legend or "").count("\n") + bool(note)) + 0.05
        style: dict[str, Any] = {"loc": "outside lower left", "frameon": False, "borderpad": 0.1}
        style |= {"ncols": columns, "borderaxespad": 0.1, "title": title_of_legend, "title_fontsize": SMALL}
        figure.legend(shown, labels, alignment="left", **style)
    # 4. The figure grows by what was added, so that panels keep their size
    bars = [axis for axis in figure.axes if axis.get_subplotspec() is None and axis.get_ylim() == (0, 1)]
    if width < NARROW:  # colour bars of several panels lie below them
        below += 0.45 * len(bars)
    if y:
        figure.supylabel(wrapped(y, 8, 0.85 * height), fontsize=8)
    figure.set_figheight(height + top + below)
    layout = figure.get_layout_engine()
    assert isinstance(layout, ConstrainedLayoutEngine)
    layout.set(rect=(0, 0, 1, 1 - top / (height + top + below)))


def handles(axis: Axes) -> dict[str, Artist]:
    """The labelled artists of an axis, as a legend."""
    return {str(handle.get_label()): handle for handle in axis.get_legend_handles_labels()[0]}


def missing_note(missing: Iterable[tuple[str, str]]) -> str:
    """Say what a figure leaves out: (title, reason) of each, those of one reason together; "" for nothing."""
    reasons: dict[str, list[str]] = {}
    for title, reason in missing:
        reasons.setdefault(reason, []).append(title)
    # Titles with commas of their own are told apart by quotes
    some = [titles for titles in reasons.values() if any("," in title for title in titles)]
    quoted = [[f"“{one}”" for one in titles] if some else titles for titles in reasons.values()]
    text = "; ".join(f"{', '.join(t)}: {reason}" for reason, t in zip(reasons, quoted, strict=True))
    return f"absent: {text}" if text else ""


def show_picture(axis: Axes, pixels: np.ndarray) -> None:
    """Draw pixels [height, width, 3] alone, with ticks at none; an SVG holds them once."""
    height, width = pixels.shape[:2]
    axis.imshow(pixels, extent=(0, width, height, 0), interpolation="none")
    axis.set(xticks=[], yticks=[])
    axis.grid(False)
    for spine in axis.spines.values():
        spine.set_visible(False)


def picture_grid(
    rows: Mapping[str, Sequence[np.ndarray] | np.ndarray], columns: Sequence[str]
) -> tuple[Figure, list[Axes], list[int]]:
    """Draw rows of pictures [height, width, 3] under the names of their columns, of as many as have room.

    Returns the figure, its axes row by row, and which columns are shown.
    """
    # Pictures are at least 0.62 inches wide; names of rows need 1.3 inches beside them
    height, width = next(iter(rows.values()))[0].shape[:2]
    shown = columns_with_room(len(columns), 0.62 * max(1.0, width / height), beside=1.3)
    n = len(shown)
    figure, axes = panels(n * len(rows), n, (1.2, 1.2 * height / width), keep=True)
    figure.set_layout_engine("compressed", wspace=0.02, hspace=0.02, w_pad=0.02, h_pad=0.02)
    figure.set_figheight(0.2 + len(rows) * height / width * (figure.get_figwidth() - 0.7) / n)
    for row, (name, pictures) in enumerate(rows.items()):
        for axis, column in zip(axes[row * n :], shown, strict=False):
            show_picture(axis, pictures[column])
        axes[row * n].set_ylabel(name, fontsize=SMALL)
    for axis, column in zip(axes, shown, strict=False):
        axis.set_title(columns[column], fontsize=SMALL, pad=3)
    return figure, axes, shown


def picture_strip(axis: Axes, pictures: Sequence[np.ndarray]) -> None:
    """Put pictures [H, W, 3] of frames under their places on the frame axis, of as many as have room."""
    (left, right), (wide, high) = axis.get_xlim(), _inches(axis)
    ratio = pictures[0].shape[1] / pictures[0].shape[0]
    # A picture is at least 0.3 inches high, and covers several frames where these are narrower
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


def one_heat_map(
    values: np.ndarray,
    title: str,
    subtitle: str,
    names: tuple[str, str, str],
    rows: Sequence[Any] | None = None,
    columns: Sequence[Any] | None = None,
    **colors: Any,
) -> Figure:
    """Draw values [rows, columns] in a figure of their own; names are of rows, columns and values."""
    figure, (axis,) = panels(1, 1, (1.4 + 0.26 * values.shape[1], 0.8 + 0.14 * len(values)))
    image = heat_map(axis, values, **colors)
    axis.set_xticks(range(values.shape[1]), columns)
    axis.tick_params(axis="x", labelsize=SMALL if columns is None else TINY)
    axis.set_yticks(range(len(values)), rows)
    axis.set_ylabel(names[0])
    color_bar(figure, image, axis, names[2], values)
    label_figure(figure, [axis], title, subtitle, x=names[1])
    return figure


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
    # Colours end at a percentile: arrows say that values go on
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
