"""Where figures go: a folder whose figures say what they are of; many SVGs on one sheet."""

import hashlib
import re
from collections.abc import Mapping
from html import escape
from math import ceil, sqrt
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import experiments.figures.style as st
from experiments.caches import outputs
from experiments.caches.files import replacing
from experiments.caches.formats import FORMATS

HASHED_BYTES = 256 << 20  # a larger cache is named by its size alone
CELL_WIDTH, GAP, LABEL, TITLE = 480.0, 16.0, 22.0, 38.0  # points, of a contact sheet
FONT = 'font-family="Arial, DejaVu Sans, Helvetica, sans-serif"'


# --- Figures of a notebook
def about(view: Any, cache_path: str | Path, notebook="", **parameters: Any) -> dict[str, str]:
    """Return a figure's metadata: model, pass, source, the cache with its hash and script, the notebook."""
    path = Path(cache_path)
    # A hash tells two caches of one name apart
    mark = f"{path.stat().st_size} bytes"
    if path.stat().st_size <= HASHED_BYTES:
        mark = f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
    metadata = {
        "Title": f"{view.model}, {view.pass_label}",
        "Description": st.plain(view.source),
        "Source": f"{path.name}, {mark}, format {view.kind} of experiments/{FORMATS[view.kind].script}",
    }
    if notebook:
        values = ", ".join(f"{name} = {value!r}" for name, value in parameters.items())
        metadata["Relation"] = f"{notebook} with {values}"
    return metadata


class FigureFolder:
    """Save figures to one folder, beside an SVG a PDF.

    A file there is replaced if this program wrote it and nobody changed it since; overwrite replaces any.

    width is of a journal, "column" or "page", or a number of inches; height too is in inches. None leaves
    both to the figure.
    """

    def __init__(
        self,
        folder: str | Path,
        metadata: Mapping[str, str],
        width: str | float | None = None,
        pdf=False,
        height: float | None = None,
        overwrite: bool = False,
    ):
        # Drawing functions know no folder: the width is a setting of the style
        st.use_size(width, height)
        self.folder, self.metadata, self.pdf = Path(folder), dict(metadata), pdf
        self.overwrite = overwrite
        self.paths: list[Path] = []

    def save(self, figure: Figure, name: str) -> Figure:
        """Write folder/name, an SVG, whole or not at all; returns the figure, to be shown."""
        paths = [self.folder / name]
        if self.pdf:
            paths.append(paths[0].with_suffix(".pdf"))
        for path in paths:
            self.paths.append(st.save_figure(figure, path, self.metadata, self.overwrite))
        return figure

    def __str__(self) -> str:
        return "\n".join(map(str, self.paths)) or "none"


def save_contact_sheet(path: str | Path, figures: Mapping[str, Path], title: str) -> Path:
    """Write figures (label -> SVG file) as a grid, in their order, whole or not at all.

    CacheError for a file there that this program did not write, or that was changed since.
    """
    # 1. The drawing of each SVG, with its size in points
    bodies = {}
    for i, (label, file) in enumerate(figures.items()):
        text = Path(file).read_text(encoding="utf-8")
        root = re.search(r'<svg [^>]*viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>(.*)</svg>', text, re.DOTALL)
        assert root is not None, file  # save_svg wrote it
        body = re.sub(r"<metadata>.*?</metadata>", "", root[3], flags=re.DOTALL)
        body = re.sub(r'((?:\bid="|url\(#|href="#))', rf"\g<1>c{i}_", body)  # else two figures share ids
        bodies[label] = float(root[1]), float(root[2]), body
    # 2. Rows and columns, of cells as high as the highest figure
    height = max(CELL_WIDTH * h / w for w, h, _ in bodies.values())
    page = len(bodies) * (height + LABEL) / CELL_WIDTH  # so that the page is 4 wide, 3 high
    columns = max(1, min(len(bodies), ceil(sqrt(page * 4 / 3))))
    rows = ceil(len(bodies) / columns)
    w, h = GAP + columns * (CELL_WIDTH + GAP), TITLE + rows * (height + LABEL + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" version="1.1" '
        f'width="{w:.1f}pt" height="{h:.1f}pt" viewBox="0 0 {w:.1f} {h:.1f}">',
        f"<!-- Creator: {outputs.MARK}, {outputs.NO_CHECKSUM} -->",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{GAP}" y="25" font-size="17" {FONT}>{escape(st.plain(title))}</text>',
    ]
    # 3. A label and a nested SVG for each
    for i, (label, (w, h, body)) in enumerate(bodies.items()):
        x, y = GAP + i % columns * (CELL_WIDTH + GAP), TITLE + i // columns * (height + LABEL + GAP)
        bold = f'font-size="14" font-weight="bold" {FONT}'
        parts.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" {bold}>{escape(st.plain(label))}</text>')
        size = f'width="{CELL_WIDTH}" height="{CELL_WIDTH * h / w:.1f}" viewBox="0 0 {w:g} {h:g}"'
        parts.append(f'<svg x="{x:.1f}" y="{y + LABEL:.1f}" {size}>{body}</svg>')
    outputs.require_redrawable(path)
    with replacing(path) as sheet:
        sheet.write(outputs.with_checksum("\n".join([*parts, "</svg>\n"]).encode()))
    return Path(path)
