"""One style and one layout for all figures: theme, colours, panels, labels, colour bars, saving.

Drawing functions take arrays and a Caption and return a Figure. They read no file and print nothing. NaN
was not attended. The theme is seaborn's. A panel has a planned size in inches, the figure grows by what is
written around its panels, and matplotlib's constrained layout places everything, once.
"""

import hashlib
import math
import os
import pickle
import re
import textwrap
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle
from matplotlib.rcsetup import cycler
from matplotlib.ticker import FuncFormatter, Locator, MaxNLocator, ScalarFormatter
from matplotlib.transforms import Bbox, ScaledTranslation, blended_transform_factory

from experiments.caches import files, outputs
from wan import errors

TITLE, LABEL, SMALL, TINY = 9, 8, 7, 6  # points; all letters are of these sizes, at every width
OURS: dict[str, object] = {  # on top of seaborn's theme
    "font.size": LABEL,
    "axes.titlesize": LABEL,
    "axes.labelsize": LABEL,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "axes.titlelocation": "left",  # lines of a centred title would need the widths of the viewer's own font
    "axes.titley": 1.0,
    "axes.formatter.useoffset": False,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "figure.dpi": 150,
    "savefig.dpi": 300,
    "savefig.bbox": None,  # a figure is as wide as was asked
    "text.parse_math": False,  # prompts and names of users are text: "a $5 bill" is no formula
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "wan-attention",  # ids inside the file do not depend on the run
    "pdf.fonttype": 42,  # TrueType: journals refuse type 3
    "figure.constrained_layout.w_pad": 0.06,  # inches
    "figure.constrained_layout.wspace": 0.0,
    "figure.constrained_layout.use": False,  # a figure is laid out once, by lay_out()
    "figure.autolayout": False,
}
LABELS = {
    "mean_logit": "Mean logit q·k/√D",
    "mass": "Attention mass (share of 1)",
    "mean_prob": "Mean probability per key token",
}
TOKEN_LABELS = LABELS | {"mean_logit": "Logit q·k/√D, query mean", "mean_prob": "Probability, query mean"}
NAMES = {"mean_logit": "mean logit", "mass": "attention mass", "mean_prob": "mean probability"}

# seaborn's palette "colorblind", in its order; written out, since seaborn is imported at the first figure
BLUE, ORANGE, GREEN, RED, PURPLE = "#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc"
BROWN, PINK, SILVER, YELLOW, SKY = "#ca9161", "#fbafe4", "#949494", "#ece133", "#56b4e9"
PALETTE = (BLUE, ORANGE, GREEN, RED, PURPLE, BROWN, PINK, SILVER, YELLOW, SKY)
# One colour per meaning, in every figure; a row of things without one of these takes series()
MEASURED = BLUE  # values of the model, where nothing tells them apart
FIRST = ORANGE  # the first frame, a sink
PAST = GREEN  # earlier frames, and what a cache remembers of them
OWN = PURPLE  # the query, and the block of frames that it belongs to
COMPARED = RED  # what measured values are held against: published curves, forecasts, an even share
AVERAGED = BROWN  # means of frames that left the cache
CHOSEN = PINK  # tokens that a policy picks out of many frames
CONTROL = SILVER  # what bounds a score: rendered videos, a judge's own errors
EMPTY = YELLOW  # slots that hold zeros
PROMPT = SKY  # words of the prompt
DARK, GREY = "#1F3552", "0.85"  # ink of marks and means; cells and bars without a meaning
# Fonts of other scripts than Latin, Greek and Cyrillic, which are asked behind seaborn's where installed
FALLBACKS: tuple[str, ...] = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Source Han Sans SC")
FALLBACKS += ("PingFang SC", "Hiragino Sans GB", "Microsoft YaHei", "WenQuanYi Micro Hei", "SimHei")
FALLBACKS += ("WenQuanYi Zen Hei", "Droid Sans Fallback", "Malgun Gothic", "Apple SD Gothic Neo")
FALLBACKS += ("Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "Noto Sans Thai")
FALLBACKS += ("Arial Unicode MS", "Noto Emoji", "Segoe UI Symbol", "Symbola", "Unifont")
MISSING_GLYPHS = r"(Glyph \d+ .*missing|Matplotlib currently does not support)"  # warned of once a letter
NO_DATE = {"svg": "Date", "pdf": "CreationDate"}  # of a file's metadata, which would differ from run to run
Style = dict[str, Any]  # how an artist of matplotlib looks: its keyword arguments
HATCH: Style = {"facecolor": "0.92", "edgecolor": "0.7", "hatch": "////", "linewidth": 0}
SHADE: Style = {"facecolor": OWN, "alpha": 0.25, "linewidth": 0}
AVERAGE: Style = {"facecolor": AVERAGED, "edgecolor": "white", "hatch": "////", "linewidth": 0}
NOT_ATTENDED, AVERAGES = "not attended", "average of gone frames (μ)"

WIDTHS = {"column": 3.25, "page": 6.75}  # inches, of a journal
WIDEST = 9.0  # inches, of a figure that is for no journal
NARROW = 5.0  # inches: below it a colour bar of several panels lies under them
LEAST = 0.7  # inches of a panel's side: a smaller one cannot be read
PANEL = 0.75  # inches that the grid plans for at least, so that LEAST is left beside long labels
OUTSIDE = 0.3  # inches of a figure's width beside all panels: a label, the edges
BESIDE, GAP = 0.42, 0.16  # inches from panel to panel, with tick labels between them and without
ABOVE, BELOW = 0.28, 0.17  # inches of a title above a panel, of tick labels below it
PICTURE = "picture"  # gid of panels that are as high as their picture
PAGE_HEIGHT = 8.0  # inches of panels on a page, whose title and legend take another one
LINE = 0.14  # inches, of a line of 8 points
ABOVE_STRIP = 8  # points from a panel to its title where the strip of averages is between them
PERCENTILE = 97  # where colours end: a few heads of the real model's last layers would leave all others pale
STEPS = (1, 2, 3, 5, 6, 10, 12, 20, 25, 50, 100, 200, 500)  # from tick to tick
# Of the environment of a kernel that runs a notebook for each layer, which draws maps of all layers each time
REMEMBER = "WAN_REMEMBER_FIGURES"
REMEMBERED_FIGURES = 24
_remembered: dict[bytes, Figure] = {}
_size: tuple[float | None, float | None] = (None, None)  # inches that the user wants; None: as panels need
MANY = 1000
_most_columns = MANY  # of the figure that is being drawn

# --- The theme, drawing in it, and saving


@cache
def seaborn() -> ModuleType:
    """Import seaborn, at the first figure: it takes seconds, most of them pandas and scipy.stats."""
    import seaborn

    return seaborn


@cache
def theme() -> Any:
    """Return seaborn's theme with our letters, as rcParams."""
    library = seaborn()
    colors = {"axes.prop_cycle": cycler(color=library.color_palette("colorblind"))}
    installed = font_manager.get_font_names()
    fonts = {"font.family": ["sans-serif", *(name for name in FALLBACKS if name in installed)]}
    return library.axes_style("whitegrid") | library.plotting_context("paper") | colors | fonts | OURS


@contextmanager
def in_style() -> Iterator[None]:
    """Draw in the theme; a letter that no installed font has is a box, and no warning each."""
    with matplotlib.rc_context(theme()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", MISSING_GLYPHS)
        yield


class StyledFigure(Figure):
    """A figure that is drawn in this module's style wherever it is saved or shown."""

    panel_width: float  # inches, planned; set by panels()

    def savefig(self, fname: Any, overwrite: bool = False, **options: Any) -> None:
        """Write the figure as matplotlib does; the same figure gives the same bytes.

        CacheError, unless overwrite, for a file there that this program did not write, or that was changed.
        """
        if isinstance(fname, str | Path) and Path(fname).suffix:
            metadata = options.pop("metadata", None)
            save_figure(self, fname, metadata, overwrite, **options)
            return
        kind = options.get("format") or Path(str(fname)).suffix[1:] or matplotlib.rcParams["savefig.format"]
        if kind in NO_DATE:
            options["metadata"] = {NO_DATE[kind]: None, **(options.get("metadata") or {})}
        with in_style():
            super().savefig(fname, **options)

    def _ipython_display_(self) -> None:
        """Show the figure in a notebook as it is saved; Jupyter's own PNG cuts off the title."""
        from IPython.display import display

        svg = drawn(self, "svg", {}).decode()
        # IPython's SVG() would parse it first
        display({"image/svg+xml": svg[svg.index("<svg") :], "text/plain": repr(self)}, raw=True)


def use_size(width: str | float | None = None, height: float | None = None) -> None:
    """Draw figures from now on as wide as a journal's "column" or "page", or so many inches; None: freely."""
    global _size
    inches = WIDTHS.get(width) if isinstance(width, str) else width
    for value, wanted in ((inches, width), (height, height)):
        if wanted is not None and (value is None or not 1 <= value <= 40):
            raise errors.ConfigError(
                f"a figure's size is {', '.join(WIDTHS)}, or 1..40 inches, not {wanted!r}"
            )
    _size = inches, height


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Draw in the style of this module, and lay the figure out.

    In a process that has REMEMBER in its environment, equal arguments give the same figure again.
    """

    @wraps(draw)
    def wrapper(*args, **kwargs) -> Figure:
        key = b""
        if REMEMBER in os.environ:
            key = hashlib.sha256(pickle.dumps((draw.__qualname__, args, kwargs, _size))).digest()
        figure = _remembered.pop(key, None)
        if figure is None:
            with in_style():
                figure = _draw_in_grid(lambda: draw(*args, **kwargs))
        if key:
            _remembered[key] = figure  # at the end: the first is the one that was not drawn for longest
            if len(_remembered) > REMEMBERED_FIGURES:
                del _remembered[next(iter(_remembered))]
        return figure

    return wrapper


def _draw_in_grid(draw: Callable[[], Figure]) -> Figure:
    """Draw and lay out a figure; again with fewer columns where tick labels leave a panel too narrow."""
    global _most_columns
    columns_before = MANY
    try:
        while True:
            figure = draw()
            is_wide = lay_out(figure)
            _, columns = rows_and_columns(figure)
            if is_wide or columns in (1, columns_before):  # as before: of pictures, or of two parts
                return figure
            columns_before, _most_columns = columns, columns - 1
    finally:
        _most_columns = MANY


def lay_out(figure: Figure) -> bool:
    """Let constrained layout place everything, once; return True where all panels are wide enough.

    Showing or saving a figure does not change it any more.
    """
    layout = figure.get_layout_engine()
    assert isinstance(layout, ConstrainedLayoutEngine)
    layout.execute(figure)
    # 1. Panels of a fixed shape leave room below the titles: the figure shrinks by it
    panels = panels_of(figure)
    if panels and all(axis.get_aspect() != "auto" for axis in panels) and _size[1] is None:
        height = figure.get_figheight()
        title = (1 - layout.get()["rect"][3]) * height
        highest = max(axis.get_tightbbox().y1 for axis in panels) / figure.dpi  # type: ignore[union-attr]
        room = height - title - highest - 0.06
        if room > 0.05:
            figure.set_figheight(height - room)
            layout.set(rect=(0, 0, 1, 1 - title / figure.get_figheight()))
            layout.execute(figure)
    # 2. A figure with panels too low grows, and its titles keep their inches
    charts = [axis for axis in panels_of(figure) if axis.get_gid() != PICTURE]
    widths, heights = np.array([axis.get_position().size for axis in charts]).reshape(-1, 2).T
    widths, heights = widths * figure.get_figwidth(), heights * figure.get_figheight()
    if heights.size and heights.min() < LEAST and _size[1] is None:
        rows, _ = rows_and_columns(figure)
        height = figure.get_figheight()
        title = (1 - layout.get()["rect"][3]) * height
        figure.set_figheight(height + 1.05 * (LEAST / heights.min() - 1) * rows * heights.mean())
        layout.set(rect=(0, 0, 1, 1 - title / figure.get_figheight()))
        layout.execute(figure)
    figure.set_layout_engine(None)  # unlike "none", which has matplotlib draw the figure twice to save it
    # 3. A label of all panels stands in their middle, not in that of the figure or of the first
    around = Bbox.union([axis.get_position() for axis in panels_of(figure)])
    beside = figure._supylabel  # type: ignore[attr-defined]
    if beside is not None:
        beside.set_y((around.y0 + around.y1) / 2)
    labelled = [axis for axis in panels_of(figure) if axis.get_xlabel()]
    if len(labelled) == 1:
        place = labelled[0].get_position()
        labelled[0].xaxis.label.set_x(((around.x0 + around.x1) / 2 - place.x0) / place.width)
    return widths.min(initial=LEAST) >= LEAST


def marks(kind: str, metadata: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the metadata of a file of a kind, with our mark: an SVG's names, of which others take some."""
    told = {name: text for name, text in metadata.items() if text is not None}
    of_run = "; ".join(told[name] for name in ("Description", "Source", "Relation") if name in told)
    if kind == "pdf":
        names = {"Title": told.get("Title"), "Subject": of_run or None, "Keywords": outputs.NO_CHECKSUM}
        return {**names, "Creator": outputs.MARK}
    if kind == "png":
        names = {"Title": told.get("Title"), "Description": of_run or None}
        return {**{name: text for name, text in names.items() if text}, "Software": outputs.MARK}
    if kind == "svg":
        return {**told, "Creator": outputs.MARK, "Identifier": outputs.NO_CHECKSUM}
    return dict(metadata)


def save_figure(
    figure: Figure,
    path: str | Path,
    metadata: Mapping[str, str | None] | None = None,
    overwrite: bool = False,
    **options: Any,
) -> Path:
    """Write a figure as its suffix says, whole or not at all; the same figure gives the same bytes.

    metadata has the names of an SVG's; options are matplotlib's. CacheError, unless overwrite, for a file
    there that this program did not write, or that was changed since.
    """
    kind = options.pop("format", None) or Path(path).suffix.lower().removeprefix(".")
    with errors.library_writes(path, files.CacheError):
        outputs.require_redrawable(path, overwrite)
        content = outputs.with_checksum(drawn(figure, kind, marks(kind, metadata or {}), **options))
        with files.replacing(path) as file:
            file.write(content)
    return Path(path)


save_svg = save_figure  # its name until 2.0


PLACES = re.compile(rb' (?:d|x|y)="[^"]*"')
METADATA = re.compile(rb"(?: *<title>[^<]*</title>\n)? *<metadata>.*?</metadata>\n", re.DOTALL)
_drawings: WeakKeyDictionary[Figure, bytes] = WeakKeyDictionary()  # SVGs without metadata
DECIMALS = re.compile(rb"(\d\.\d\d)\d+")  # of points: a hundredth is enough


def drawn(figure: Figure, kind: str, metadata: Mapping[str, Any], **options: Any) -> bytes:
    """Return the bytes of a figure as "svg", "pdf" or another kind of matplotlib's."""
    if kind != "svg" or options:
        return file_bytes(figure, kind, metadata, **options)
    # 1. The drawing, once: a notebook shows what it has saved. stale: something was changed since
    if figure.stale or figure not in _drawings:
        _drawings[figure] = file_bytes(figure, "svg", {})
        figure.stale = False  # savefig() sets it, by setting the resolution and setting it back
    # 2. Its metadata, as matplotlib writes them into a figure of nothing
    block = METADATA.search(file_bytes(StyledFigure(), "svg", metadata))
    assert block is not None
    words = block[0]
    return METADATA.sub(lambda _: words, _drawings[figure], count=1)


def shortened(place: re.Match[bytes]) -> bytes:
    """Return a path or a coordinate of an SVG on one line, to a hundredth of a point."""
    return DECIMALS.sub(rb"\1", place[0]).replace(b" \n", b" ")


def file_bytes(figure: Figure, kind: str, metadata: Mapping[str, Any], **options: Any) -> bytes:
    """Return what matplotlib writes, with the places of an SVG shortened."""
    content = BytesIO()
    figure.savefig(content, format=kind, metadata=dict(metadata), **options)
    if kind != "svg":
        return content.getvalue()
    return PLACES.sub(shortened, content.getvalue())


# --- Panels: their grid follows from the width of the figure and from how many they are


class Grid(NamedTuple):
    """Rows and columns of panels, in a figure of so many inches before its titles are added."""

    rows: int
    columns: int
    width: float
    height: float
    panel_width: float  # of what is drawn: without tick labels


def is_narrow() -> bool:
    """Return True where figures are drawn at a column's width."""
    return _size[0] is not None and _size[0] < NARROW


def grid_of(
    n: int, columns: int, size: tuple[float, float], keep=False, x_labels=True, y_labels=True
) -> Grid:
    """Choose the grid of n panels of about size inches, of which about so many columns were planned.

    x_labels and y_labels: each panel has tick labels of its own. A journal's width has room for fewer
    columns, a page that ends for more; keep has exactly those planned.
    """
    n, columns = max(n, 1), max(1, min(n, columns))
    width = _size[0]
    if width is None:
        width = min(WIDEST, max(columns * size[0], 4.0))
    beside = BESIDE if y_labels else GAP
    lowest = PANEL + ABOVE + BELOW if x_labels else PANEL + ABOVE
    if not keep:
        # 1. Panels may be half as wide as planned; below that, as narrow as a page needs them
        room = _room(width, beside)
        columns = min(columns, room, max(1, int(width / (0.45 * size[0]))))
        while columns < min(room, n) and math.ceil(n / columns) * lowest > PAGE_HEIGHT:
            columns += 1
        columns = min(columns, _most_columns)
        # 2. Rows as even as can be
        columns = math.ceil(n / math.ceil(n / columns))
    rows = math.ceil(n / columns)
    height = rows * size[1] * float(np.clip(width / columns / size[0], 0.7, 1))
    if not keep:
        height = max(rows * lowest, min(height, PAGE_HEIGHT))
    return Grid(rows, columns, width, height + LINE, (width - OUTSIDE) / columns - beside)


def has_room(n: int, same_scale=False, columns: int | None = None) -> bool:
    """Tell whether n panels fit on a page, in so many columns; else a figure draws maps_of_bands()."""
    beside, above = (GAP, ABOVE) if same_scale else (BESIDE, ABOVE + BELOW)
    if columns is None:
        columns = _room(_size[0] or WIDEST, beside)
    return math.ceil(n / columns) * (PANEL + above) <= PAGE_HEIGHT


def _room(width: float, beside: float) -> int:
    """Return how many panels of the least width stand side by side."""
    return max(1, int((width - OUTSIDE) / (PANEL + beside)))


def panels(
    n: int, columns: int, size: tuple[float, float], keep=False, same_scale=False, **options: Any
) -> tuple[StyledFigure, list[Axes]]:
    """Make n axes in the grid of grid_of(); cells left over are empty.

    same_scale: all panels have the same axes, so that only the outer ones have tick labels. sharex and
    sharey of matplotlib do so too, but with 36 panels they double the time of a figure.
    """
    grid = grid_of(
        n,
        columns,
        size,
        keep=keep,
        x_labels=not same_scale and not options.get("sharex"),
        y_labels=not same_scale and not options.get("sharey"),
    )
    figure = StyledFigure(figsize=(grid.width, grid.height), layout="constrained")
    axes = figure.subplots(grid.rows, grid.columns, squeeze=False, **options).ravel()
    for axis in axes[max(n, 1) :]:
        axis.remove()
    if not n:
        axes[0].axis("off")
    shown = list(axes[:n])
    for place, axis in enumerate(shown):
        axis.xaxis.set_major_formatter(ShortNumbers())
        axis.yaxis.set_major_formatter(ShortNumbers())
        is_lowest = place + grid.columns >= n  # of its column
        if is_lowest:
            axis.tick_params(labelbottom=True)
        elif same_scale:
            axis.tick_params(labelbottom=False)
        if same_scale and place % grid.columns > 0:
            axis.tick_params(labelleft=False)
    figure.panel_width = grid.panel_width
    return figure, shown


def panels_of(figure: Figure) -> list[Axes]:
    """Return the axes that are panels, not colour bars."""
    return [axis for axis in figure.axes if axis.get_subplotspec() is not None]


def rows_and_columns(figure: Figure) -> tuple[int, int]:
    """Return how many rows and columns of panels a figure has."""
    grids = [axis.get_subplotspec().get_gridspec() for axis in panels_of(figure)]  # type: ignore[union-attr]
    return max(grid.nrows for grid in grids), max(grid.ncols for grid in grids)


def shape_square(figure: Figure) -> None:
    """Make a figure of square panels as high as these are wide: no gaps between rows."""
    rows, columns = rows_and_columns(figure)
    width = figure.get_figwidth() - OUTSIDE
    if not is_narrow():
        width -= 0.8  # a colour bar stands beside wide panels
    figure.set_layout_engine("compressed")
    figure.set_figheight(rows * (width / columns - GAP + ABOVE) + BELOW)


def picture_width(height: int, width: int) -> float:
    """Return the least inches of a picture's width: it covers as much as the least panel."""
    return LEAST * math.sqrt(width / height)


def columns_with_room(n: int, inches: float, beside: float = 0.3) -> list[int]:
    """Choose evenly as many of n pictures as fit side by side at so many inches each."""
    room = int(((_size[0] or WIDEST) - beside) / inches)
    return np.unique(np.linspace(0, n - 1, max(1, min(n, room))).round().astype(int)).tolist()


# --- Labels


def plain(text: str) -> str:
    """Return text without what no XML, and so no SVG, may hold: control characters but line breaks."""
    spaces = dict[int, str]()
    for character in {*text} - {"\n"}:
        if unicodedata.category(character) in ("Cc", "Cs") or character in "\ufffe\uffff":
            spaces[ord(character)] = " "
    return text.translate(spaces)


def wrapped(text: str, points: float, inches: float) -> str:
    """Break text into as few lines as fit, equally long; "t = 1000" and "of 1)" stay on one line."""
    text = plain(text)
    # A letter of Arial is about 0.59 of its height wide; 72 points are an inch
    letters = max(8, int(inches * 72 / (0.59 * points)))
    lines = text.replace(" = ", "\u00a0=\u00a0").replace("of 1)", "of\u00a01)").split("\n")
    return "\n".join(_balanced(line, letters) for line in lines)


def _balanced(line: str, letters: int) -> str:
    """Break a line at so many letters, then at fewer, as long as no line is added: no word stands alone."""
    parts = textwrap.wrap(line, letters, break_long_words=False, break_on_hyphens=False)
    if len(parts) < 2:
        return line
    for shorter in range(math.ceil(len(line) / len(parts)), letters):
        balanced = textwrap.wrap(line, shorter, break_long_words=False, break_on_hyphens=False)
        if len(balanced) == len(parts):
            return "\n".join(balanced)
    return "\n".join(parts)


class ShortNumbers(ScalarFormatter):
    """Write small and large numbers as 3e−5, each for itself: matplotlib's common factor hits the title."""

    def __init__(self) -> None:
        super().__init__(useOffset=False)
        self.set_scientific(False)

    def __call__(self, x: float, pos: int | None = None) -> str:
        if x == 0:
            return "0"
        if 1e-3 <= abs(x) < 1e5:
            return super().__call__(x, pos)
        digits, _, power = f"{x:.1e}".replace("-", "\N{MINUS SIGN}").partition("e")
        sign = power[0].replace("+", "")
        return f"{digits.removesuffix('.0')}e{sign}{power[1:].lstrip('0')}"


class PlacesWithRoom(Locator):
    """Put ticks at every place, or every 2nd, 3rd, 5th, ...: as many as have room for their labels."""

    def __init__(self, labels: Mapping[float, str], points: float):
        self.labels, self.points = dict(labels), points

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        assert self.axis is not None
        axes = self.axis.axes  # type: ignore[union-attr]
        lines = [label.split("\n") for label in self.labels.values()]
        # 1. Inches of a label: letters are about 0.62 of their height wide
        if self.axis.axis_name == "x":  # type: ignore[union-attr]
            length = axes.bbox.width
            label = 0.62 * self.points / 72 * max(len(line) for label in lines for line in label) + 0.05
        else:
            length = axes.bbox.height
            label = 1.1 * self.points / 72 * max(map(len, lines))
        inches = length / axes.figure.dpi / abs(vmax - vmin)  # from one place to the next
        # 2. The first step at which no two labels touch; μ, of several columns, always stays
        averages = [place for place, name in self.labels.items() if name == "μ"]
        places = sorted(self.labels.keys() - averages)
        for step in STEPS:
            shown = places[::step]
            if all((right - left) * inches >= label for left, right in pairwise(shown)):
                break
        shown = [place for place in shown if all(abs(place - mu) * inches >= label for mu in averages)]
        return shown + averages

    def __call__(self) -> Sequence[float]:
        return self.tick_values(*self.axis.get_view_interval())  # type: ignore[union-attr]


def label_places(
    axis: Axis, labels: Iterable[Any], places: Iterable[float] | None = None, points=SMALL
) -> None:
    """Label places of an axis, by default 0, 1, 2, ...; where labels have no room, every few.

    Averages (μ), which stand together, have one label.
    """
    names = [plain(str(label)) for label in labels]
    if places is None:
        places = range(len(names))
    label_of_place, averages = dict[float, str](), []
    for place, name in zip(places, names, strict=True):
        if name.startswith("μ"):
            averages.append(float(place))
        else:
            label_of_place[float(place)] = name
    if averages:
        label_of_place[float(np.mean(averages))] = "μ"
    axis.set_major_locator(PlacesWithRoom(label_of_place, points))
    axis.set_major_formatter(FuncFormatter(lambda place, _: label_of_place.get(float(place), "")))
    axis.set_tick_params(labelsize=points)


def label_figure(
    figure: StyledFigure,
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
    width, height = figure.get_size_inches()
    # 1. Title and subtitle from the top edge down, outside the layout: it would centre them on the axes
    top = 0.03
    from_top = figure.dpi_scale_trans + ScaledTranslation(0, 1, figure.transFigure)  # type: ignore[arg-type]
    for gid, text, points, color in (("title", title, TITLE, "0"), ("subtitle", subtitle, SMALL, "0.3")):
        if text:
            text = wrapped(text, points, width - 0.1)
            header = figure.text(0.04, -top, text, gid=gid, va="top", fontsize=points, color=color)
            header.set_transform(from_top)
            header.set_in_layout(False)
            top += (text.count("\n") + 1) * points * 1.3 / 72 + 0.03
    # 2. The x label once below all; lay_out() puts it in the middle
    row_of = {axis: axis.get_subplotspec().rowspan.start for axis in axes}  # type: ignore[union-attr]
    if axes:
        max(axes, key=lambda axis: (row_of[axis], -axes.index(axis))).set_xlabel(x)
    # 3. Labels of panels in lines as long as the panels' sides
    lines = _wrap_labels(figure, figure.panel_width)
    # 4. Legend and note below, in as many columns as the longest label leaves room for
    below = _set_legend(figure, list((legend or {}).values()), note)
    # 5. Colour bars of several panels, which lie below them in a column
    if width < NARROW:
        below += 0.45 * sum(
            axis.get_subplotspec() is None and axis.get_ylim() == (0, 1) for axis in figure.axes
        )
    if y:
        figure.supylabel(wrapped(y, LABEL, 0.85 * height), fontsize=LABEL)
    # 6. The figure grows by what was added, so that panels keep their size
    height = _size[1] or height + top + lines + below
    figure.set_figheight(height)
    layout = figure.get_layout_engine()
    assert isinstance(layout, ConstrainedLayoutEngine)
    layout.set(rect=(0, 0, 1, 1 - top / height))


def _wrap_labels(figure: Figure, wide: float) -> float:
    """Break titles and labels of panels so wide into lines; return inches of the lines added."""
    panels = panels_of(figure)
    rows, _ = rows_and_columns(figure)
    is_alone = sum(bool(axis.get_xlabel()) for axis in panels) == 1
    below = figure.get_figwidth() - 1 if is_alone else wide
    in_titles = in_labels = 0
    for axis in panels:
        title = axis._left_title  # type: ignore[attr-defined]
        title.set_text(wrapped(title.get_text(), title.get_fontsize(), wide - 0.05))
        in_titles = max(in_titles, title.get_text().count("\n"))
        axis.xaxis.label.set_text(wrapped(axis.get_xlabel(), LABEL, below))
        in_labels = max(in_labels, axis.get_xlabel().count("\n"))
        # Rows need not be alike
        place = axis.get_subplotspec()
        ratios = np.asarray(place.get_gridspec().get_height_ratios(), float)  # type: ignore[union-attr]
        share = ratios[place.rowspan.start] / ratios.sum()  # type: ignore[union-attr]
        high = share * figure.get_figheight() - ABOVE - BELOW
        axis.yaxis.label.set_text(wrapped(axis.get_ylabel(), LABEL, high))
    return LINE * (rows * in_titles + in_labels)


def _set_legend(figure: Figure, entries: Sequence[Artist], note: str) -> float:
    """Put a legend and a note below the panels; return their height in inches."""
    if not entries and not note:
        return 0.0
    width = figure.get_figwidth()
    labels = [wrapped(str(entry.get_label()), SMALL, width - 0.6) for entry in entries]
    widest = max((0.58 * SMALL / 72 * len(label) + 0.55 for label in labels), default=width)
    columns = max(1, min(len(entries), int(width / widest)))
    note = wrapped(note, SMALL, width - 0.3)
    figure.legend(
        entries,
        labels,
        loc="outside lower left",
        alignment="left",
        ncols=columns,
        title=note or None,
        title_fontsize=SMALL,
        frameon=False,
        borderpad=0.1,
        borderaxespad=0.4,  # of the letters: the legend begins below the title's first letter
    )
    lines = math.ceil(len(entries) / columns)
    if note:
        lines += note.count("\n") + 1
    return 0.16 * lines + 0.05


def handles(axis: Axes) -> dict[str, Artist]:
    """The labelled artists of an axis, as a legend."""
    return {str(handle.get_label()): handle for handle in axis.get_legend_handles_labels()[0]}


def missing_note(missing: Iterable[tuple[str, str]]) -> str:
    """Say what a figure leaves out: (title, reason) of each, those of one reason together; "" for nothing."""
    titles_by_reason: dict[str, list[str]] = {}
    for title, reason in missing:
        titles_by_reason.setdefault(reason, []).append(title)
    # Titles with commas of their own are told apart by quotes
    is_quoted = any("," in title for titles in titles_by_reason.values() for title in titles)
    parts = []
    for reason, titles in titles_by_reason.items():
        if is_quoted:
            titles = [f"“{title}”" for title in titles]
        parts.append(f"{', '.join(titles)} ({reason})")
    return f"not drawn: {'; '.join(parts)}" if parts else ""


# --- Pictures


def show_picture(axis: Axes, pixels: np.ndarray) -> None:
    """Draw pixels [height, width, 3] alone, with ticks at none; an SVG holds them once."""
    height, width = pixels.shape[:2]
    axis.imshow(pixels, extent=(0, width, height, 0), interpolation="none")
    axis.set(xticks=[], yticks=[], gid=PICTURE)
    axis.grid(False)
    for spine in axis.spines.values():
        spine.set_visible(False)
    # A picture may be as white as the page: half of this line is outside of it
    axis.patch.set(edgecolor="0.8", linewidth=1, joinstyle="round")  # few bytes in an SVG


def picture_grid(
    rows: Mapping[str, Sequence[np.ndarray] | np.ndarray], columns: Sequence[str], beside=0.42
) -> tuple[StyledFigure, list[Axes], list[int]]:
    """Draw rows of pictures [height, width, 3] under the names of their columns, of as many as have room.

    beside: inches that the names of rows take; by default, they stand upright.
    Returns the figure, its axes row by row, and which columns are shown.
    """
    height, width = next(iter(rows.values()))[0].shape[:2]
    shown = columns_with_room(len(columns), picture_width(height, width), beside)
    n = len(shown)
    figure, axes = panels(n * len(rows), n, (1.2, 1.2 * height / width), keep=True)
    figure.set_layout_engine("compressed", wspace=0.02, hspace=0.02, w_pad=0.02, h_pad=0.02)
    figure.set_figheight(0.2 + len(rows) * height / width * (figure.get_figwidth() - beside) / n)
    for row, (name, pictures) in enumerate(rows.items()):
        for axis, column in zip(axes[row * n :], shown, strict=False):
            show_picture(axis, pictures[column])
        axes[row * n].set_ylabel(name, fontsize=SMALL)
    for axis, column in zip(axes, shown, strict=False):
        axis.set_title(columns[column], fontsize=SMALL, pad=3)
    return figure, axes, shown


def picture_strip(axis: Axes, pictures: Sequence[np.ndarray], inches: float) -> None:
    """Put pictures [H, W, 3] of frames under an axis of so many inches, as many as have room."""
    left, right = axis.get_xlim()
    ratio = pictures[0].shape[1] / pictures[0].shape[0]
    # A picture is at least 0.3 inches high, and covers several frames where these are narrower
    of_frame = 0.9 * inches / (right - left)
    step = math.ceil(0.3 * ratio / of_frame)
    tall = of_frame * step / ratio
    # The strip spans the axis, and lies 0.2 inches below it
    scale = axis.figure.dpi_scale_trans
    below = scale + ScaledTranslation(0, 0, axis.transAxes)  # type: ignore[arg-type]
    strip = axis.inset_axes(
        (0, -(tall + 0.2), 1, tall), transform=blended_transform_factory(axis.transAxes, below)
    )
    for frame in range(0, len(pictures), step):
        extent = (frame - 0.46 * step, frame + 0.46 * step, 0, 1)
        strip.imshow(pictures[frame], extent=extent, aspect="auto", interpolation="none")
    strip.set(xlim=(left, right), ylim=(0, 1))
    strip.axis("off")
    axis.xaxis.labelpad = 72 * tall + 6  # points: the label stands below the strip


# --- Colours


def series(n: int) -> list[tuple[float, float, float]]:
    """Return colours of n things in a row, such as layers or policies: dark to light, none of a meaning."""
    return seaborn().color_palette("viridis", n)


def color_scale(values: np.ndarray, quantity: str, percentile: float = 100) -> dict[str, Any]:
    """Colour by quantity: red and blue around 0 for logits, else viridis from 0; ends at a percentile."""
    top = max(float(np.nanpercentile(np.abs(values), percentile)), 1e-12)
    if quantity == "mean_logit":
        return {"cmap": "RdBu_r", "vmin": -top, "vmax": top}
    return {"cmap": "viridis", "vmin": 0.0, "vmax": top}


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
        is_below, is_above = (values < low).any(), (values > high).any()
        if is_below and is_above:
            options["extend"] = "both"
        elif is_below:
            options["extend"] = "min"
        elif is_above:
            options["extend"] = "max"
    # Beside the panels, or below them where they need the width
    width, height = figure.get_size_inches()
    length = min(3.5, 0.8 * height)
    shape: Style = {"pad": 0.02, "aspect": 25, "fraction": 0.1}
    if not isinstance(axes, Axes):
        shape["shrink"] = min(1.0, 3.5 / height)
        if width < NARROW:
            shape = {"pad": 0.02, "aspect": 40, "location": "bottom"}
            length = 0.9 * width * min(1, len(axes) / rows_and_columns(figure)[1])
    least = 2.0 if "location" in shape else 1.2  # inches of four labels, which may lie side by side
    shape["ticks"], shape["format"] = MaxNLocator(4 if length > least else 2), ShortNumbers()
    bar = figure.colorbar(image, ax=axes, **shape | options)
    bar.set_label(wrapped(label, SMALL, length), fontsize=SMALL)
    return bar


# --- Heat maps, marks and intervals
#
# seaborn.heatmap draws the whole figure for each panel, to see whether labels overlap: 12 panels of 21 x 21
# cells take 4.7 s in place of 1.0. An image of the cells looks the same.


def heat_map(axis: Axes, values: np.ndarray, equal: bool = False, **colors: Any) -> AxesImage:
    """Draw values [rows, columns] as one image, cell i, j centred on (j, i); grey where NaN."""
    axis.grid(False)
    axis.set_facecolor(GREY)
    image = axis.imshow(np.ma.masked_invalid(values), interpolation="nearest", **colors)
    axis.set_aspect("equal" if equal else "auto")
    return image


class Bands(NamedTuple):
    """A heat map for what has too many panels: a band of rows for each, [rows, columns], by its name."""

    values: Mapping[str, np.ndarray]
    label: str  # of the colours
    colors: Mapping[str, Any]


def maps_of_bands(parts: Mapping[str, Bands]) -> tuple[StyledFigure, list[Axes]]:
    """Draw a panel for each part, side by side; of the same bands, the first has their names beside it."""
    first = next(iter(parts.values()))
    is_same = all(part.values.keys() == first.values.keys() for part in parts.values())
    inches = max(len(part.values) * max(0.11, 0.015 * _rows_of(part).max()) for part in parts.values())
    size = (6.0 / len(parts), float(np.clip(inches, 1.5, 6.5)) + 0.5)
    figure, axes = panels(len(parts), len(parts), size, keep=True, same_scale=is_same)
    for axis, (title, part) in zip(axes, parts.items(), strict=True):
        # Bands with fewer columns end early
        rows = _rows_of(part)
        columns = max(band.shape[1] for band in part.values.values())
        cells = np.full((rows.sum(), columns), np.nan)
        ends = rows.cumsum()
        for end, band in zip(ends, part.values.values(), strict=True):
            cells[end - len(band) : end, : band.shape[1]] = band
        image = heat_map(axis, cells, **part.colors)
        if rows.max() > 1:
            axis.hlines(ends[:-1] - 0.5, -0.5, columns - 0.5, color="white", linewidth=0.6)
        axis.set_title(title)
        label_places(axis.xaxis, range(columns))
        label_places(axis.yaxis, part.values, places=ends - (rows + 1) / 2)
        color_bar(figure, image, [axis], part.label, cells)
    return figure, axes


def _rows_of(part: Bands) -> np.ndarray:
    return np.array([len(band) for band in part.values.values()])


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
    if columns is None:
        label_places(axis.xaxis, range(values.shape[1]))
    else:
        label_places(axis.xaxis, columns, points=TINY)
    label_places(axis.yaxis, range(len(values)) if rows is None else rows)
    axis.set_ylabel(names[0])
    color_bar(figure, image, axis, names[2], values)
    label_figure(figure, [axis], title, subtitle, x=names[1])
    return figure


def write_cells(axis: Axes, values: np.ndarray, words: Callable[[float], str], middle: float) -> None:
    """Write values [rows, columns] into the cells of a heat map, white below the middle; nothing for NaN."""
    for (row, column), value in np.ndenumerate(values):
        if not np.isfinite(value):
            continue
        label = words(value)
        color = "white" if value < middle else "black"
        axis.text(column, row, label, ha="center", va="center", fontsize=SMALL, color=color, gid="cell")


def grey_legend(values: np.ndarray) -> dict[str, Artist]:
    """The legend entry of grey cells, where values have a NaN."""
    if not np.isnan(values).any():
        return {}
    return {NOT_ATTENDED: Patch(facecolor=GREY, label=NOT_ATTENDED)}


def mark_averages(axis: Axes, first: int, count: int, values: np.ndarray | None = None) -> dict[str, Artist]:
    """Mark the columns from first on as averages of gone frames, with hatched bars of values."""
    if not count:
        return {}
    if values is not None:
        axis.bar(first + np.arange(count), values, width=0.85, **AVERAGE)
    axis.set_title(axis.get_title("left"), pad=ABOVE_STRIP)
    left, right = axis.get_xlim()
    axis.set_xlim(left, max(right, first + count - 0.5))
    axis.axvline(first - 0.5, color=DARK, linewidth=1.2)
    rows, _ = rows_and_columns(axis.figure)  # type: ignore[arg-type]
    tall = min(0.04, 0.06 * rows / axis.figure.get_figheight())  # type: ignore[union-attr]
    strip = Rectangle((first - 0.5, 1), count, tall, clip_on=False, **AVERAGE)
    strip.set_transform(axis.get_xaxis_transform())
    axis.add_patch(strip)
    return {AVERAGES: Patch(**AVERAGE, label=AVERAGES)}


def bars(
    axis: Axes, heights: np.ndarray, colors: str | Sequence[str], width=0.8, places: np.ndarray | None = None
) -> None:
    """Draw bars as one artist a color, at places that ascend, by default 0, 1, 2, ...; none where NaN.

    Axes.bar makes an artist a bar, which takes a fifth of the time of a figure of many panels.
    """
    if places is None:
        places = np.arange(len(heights))
    if isinstance(colors, str):
        colors = [colors] * len(heights)
    edges = np.stack([places - width / 2, places + width / 2], axis=1).ravel()
    for color in dict.fromkeys(colors):
        steps = np.full(len(edges) - 1, np.nan)  # between two bars: NaN
        steps[::2] = np.where([name == color for name in colors], heights, np.nan)
        axis.stairs(steps, edges, fill=True, color=color, linewidth=0)


def mean_bars(axis: Axes, values: np.ndarray, colors: Sequence[str], ddof=0, **style: Any) -> None:
    """Draw the mean and the standard deviation of values [places, groups, n], a bar a group."""

    def spread(of_bar):
        mean, deviation = of_bar.mean(), of_bar.std(ddof=ddof)
        return mean - deviation, mean + deviation

    places, groups, _ = np.indices(values.shape)
    style |= {"native_scale": True, "saturation": 1, "linewidth": 0, "legend": False}
    style |= {"err_kws": {"linewidth": 0.8, "color": "0.5"}, "errorbar": spread}
    seaborn().barplot(
        x=places.ravel(), y=values.ravel(), hue=groups.ravel(), palette=list(colors), ax=axis, **style
    )


def mark_intervals(
    axis: Axes,
    rows: Sequence[float],
    intervals: Sequence[Sequence[float]],
    color: str = MEASURED,
    marker="o",
    size=5.0,
    label: str | None = None,
) -> None:
    """Draw a dot in each row with its interval, (estimate, low, high)."""
    estimate, low, high = np.array([interval[:3] for interval in intervals], float).T
    ends = np.stack([estimate - low, high - estimate])
    axis.errorbar(estimate, rows, xerr=ends, fmt=marker, color=color, markersize=size, label=label)
