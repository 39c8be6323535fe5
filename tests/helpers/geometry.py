"""Where the parts of a figure lie: words over words or data, words cut off, panels too small, letters too."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from experiments.figures.style import LEAST, PICTURE, panels_of

MM = 25.4
POINT = 1 / 72


def problems(figure: Figure, letters=(6, 9)) -> list[str]:
    """What is wrong with the figure as it is drawn, a line each."""
    canvas = FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    renderer, hidden, inch = canvas.get_renderer(), _hidden(figure), figure.dpi
    found, words = [], []  # text, its artist, box in inches
    for text in figure.findobj(Text):
        said = text.get_text().strip()
        if not said or not text.get_visible() or text in hidden:
            continue
        box = Text.get_window_extent(text, renderer)
        corners = np.array([box.x0, box.y0, box.x1, box.y1]) / inch
        words.append((said, text, corners))
        if not letters[0] <= text.get_fontsize() <= letters[1]:
            found.append(f"{said!r} has {text.get_fontsize()} points")
        width, height = figure.get_size_inches()
        out = max(-corners[0], -corners[1], corners[2] - width, corners[3] - height)
        if out > POINT:
            found.append(f"{said!r} is cut by {out * MM:.1f} mm")
    boxes = np.array([corners for _, _, corners in words]).reshape(-1, 4)
    # [words, words, 2] inches by which two overlap
    over = np.minimum(boxes[:, None, 2:], boxes[:, 2:]) - np.maximum(boxes[:, None, :2], boxes[:, :2])
    for one, other in np.argwhere(np.triu((over > 0.6 * POINT).all(-1), k=1)):
        found.append(f"{words[one][0]!r} lies over {words[other][0]!r}")
    for axis in panels_of(figure):
        box = axis.get_window_extent(renderer)
        wide, high = box.width / inch, box.height / inch
        least = min(wide, high)
        if axis.get_gid() == PICTURE:  # as high as its video is
            least = (wide * high) ** 0.5
        if least < LEAST - 1e-6:
            found.append(f"a panel is {wide:.2f} x {high:.2f} inches")
        for said, text, corners in words:
            inner = (corners + np.array([1, 1, -1, -1]) * POINT) * inch
            if text in axis.texts and text.get_gid() != "cell" and _touches_data(axis, inner, text):
                found.append(f"{said!r} lies over data")
    return found


def _hidden(figure: Figure) -> set[Text]:
    """Texts that are artists but are not drawn: of switched-off axes, and tick labels outside their range."""
    hidden: set[Text] = set()
    for axes in figure.findobj(Axes):
        if not (axes.get_visible() and axes.axison):
            hidden.update(axes.findobj(Text))
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not low - 1e-9 <= tick.get_loc() <= high + 1e-9:
                    hidden |= {tick.label1, tick.label2}
    return hidden


def _touches_data(axis: Axes, corners: np.ndarray, text: Text) -> bool:
    """Tell whether a line, its markers or a bar pass through a box; a point that the text names may."""
    box, own = Bbox([corners[:2], corners[2:]]), getattr(text, "xy", None)
    for line in axis.lines:
        if line.get_transform() is axis.get_xaxis_transform() or np.size(line.get_xdata()) < 1:
            continue
        path = line.get_transform().transform_path(line.get_path())
        is_data = np.size(line.get_xdata()) > 2 or np.ptp(np.asarray(line.get_ydata(), float))
        if is_data and line.get_linestyle() not in ("None", "") and path.intersects_bbox(box, False):
            return True
        inside = (path.vertices > box.p0).all(1) & (path.vertices < box.p1).all(1)
        if line.get_marker() not in ("None", "") and inside.any():
            return own is None or not np.allclose(np.asarray(line.get_xydata())[inside], own)
    drawn = [p for p in axis.patches if p.get_clip_on() and p.zorder >= 1]
    bars = [p for p in drawn if p.get_data_transform() == axis.transData]
    paths = [patch.get_transform().transform_path(patch.get_path()) for patch in bars]
    return any(np.isfinite(path.vertices).all() and path.intersects_bbox(box, True) for path in paths)
