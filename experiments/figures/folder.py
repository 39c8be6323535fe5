"""Where figures go: a folder whose figures name their model, prompt and cache; many SVGs on one sheet."""

import hashlib
import re
from collections.abc import Mapping
from html import escape
from math import ceil, sqrt
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.caches.files import replacing
from experiments.caches.formats import FORMATS
from experiments.figures.style import drawn, save_svg, use_size

HASHED_BYTES = 256 << 20  # a larger cache is named by its size alone
CELL_WIDTH, GAP, LABEL, TITLE = 480.0, 16.0, 22.0, 38.0  # points, of a contact sheet
FONT = 'font-family="Arial, DejaVu Sans, Helvetica, sans-serif"'


def about(view: Any, cache_path: str | Path) -> dict[str, str]:
    """Return a figure's metadata: model, pass, source, the cache with its hash and script."""
    path = Path(cache_path)
    # A hash tells two caches of one name apart
    mark = f"{path.stat().st_size} bytes"
    if path.stat().st_size <= HASHED_BYTES:
        mark = f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
    return {
        "Title": f"{view.model}, {view.pass_label}",
        "Description": view.source,
        "Source": f"{path.name}, {mark}, format {view.kind} of experiments/{FORMATS[view.kind].script}",
    }


class FigureFolder:
    """Save figures to one folder, beside an SVG a PDF.

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
    ):
        # Drawing functions know no folder: the width is a setting of the style
        use_size(width, height)
        self.folder, self.metadata, self.pdf = Path(folder), dict(metadata), pdf
        self.paths: list[Path] = []

    def save(self, figure: Figure, name: str) -> Figure:
        """Write folder/name, an SVG, whole or not at all; returns the figure, to be shown."""
        self.paths.append(save_svg(figure, self.folder / name, self.metadata))
        if self.pdf:
            subject = "; ".join(filter(None, map(self.metadata.get, ("Description", "Source"))))
            of_pdf = {"Title": self.metadata.get("Title"), "Subject": subject, "CreationDate": None}
            self.paths.append(self.paths[-1].with_suffix(".pdf"))
            with replacing(self.paths[-1]) as file:
                file.write(drawn(figure, "pdf", of_pdf))
        return figure

    def __str__(self) -> str:
        return "\n".join(map(str, self.paths)) or "none"


def save_contact_sheet(path: str | Path, figures: Mapping[str, Path], title: str) -> Path:
    """Write figures (label -> SVG file) as a grid, in their order, whole or not at all."""
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
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{GAP}" y="25" font-size="17" {FONT}>{escape(title)}</text>',
    ]
    # 3. A label and a nested SVG for each
    for i, (label, (w, h, body)) in enumerate(bodies.items()):
        x, y = GAP + i % columns * (CELL_WIDTH + GAP), TITLE + i // columns * (height + LABEL + GAP)
        bold = f'font-size="14" font-weight="bold" {FONT}'
        parts.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" {bold}>{escape(label)}</text>')
        size = f'width="{CELL_WIDTH}" height="{CELL_WIDTH * h / w:.1f}" viewBox="0 0 {w:g} {h:g}"'
        parts.append(f'<svg x="{x:.1f}" y="{y + LABEL:.1f}" {size}>{body}</svg>')
    with replacing(path) as sheet:
        sheet.write("\n".join([*parts, "</svg>\n"]).encode())
    return Path(path)
