"""Many SVGs on one sheet."""

import re
from collections.abc import Mapping
from html import escape
from math import ceil, sqrt
from pathlib import Path

from experiments.caches.atomic_files import replacing
from experiments.caches.errors import CacheError

CELL_WIDTH, GAP, LABEL, TITLE = 480.0, 16.0, 22.0, 38.0  # points

FONT = 'font-family="Arial, DejaVu Sans, Helvetica, sans-serif"'


def save_contact_sheet(path: str | Path, figures: Mapping[str, Path], title: str) -> Path:
    """Write the figures (label -> SVG file) as a grid, in their order, whole or not at all."""
    bodies = {label: _read(file, prefix=f"c{i}_") for i, (label, file) in enumerate(figures.items())}
    height = max(CELL_WIDTH * h / w for w, h, _ in bodies.values())
    page = len(bodies) * (height + LABEL) / CELL_WIDTH  # so that the page is 4 wide, 3 high
    columns = max(1, min(len(bodies), ceil(sqrt(page * 4 / 3))))
    rows = ceil(len(bodies) / columns)
    size = GAP + columns * (CELL_WIDTH + GAP), TITLE + rows * (height + LABEL + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" version="1.1" '
        f'width="{size[0]:.1f}pt" height="{size[1]:.1f}pt" viewBox="0 0 {size[0]:.1f} {size[1]:.1f}">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{GAP}" y="25" font-size="17" {FONT}>{escape(title)}</text>',
    ]
    for i, (label, (w, h, body)) in enumerate(bodies.items()):
        x, y = GAP + i % columns * (CELL_WIDTH + GAP), TITLE + i // columns * (height + LABEL + GAP)
        parts.append(
            f'<text x="{x:.1f}" y="{y + 15:.1f}" font-size="14" font-weight="bold" '
            f"{FONT}>{escape(label)}</text>"
        )
        parts.append(
            f'<svg x="{x:.1f}" y="{y + LABEL:.1f}" width="{CELL_WIDTH}" height="{CELL_WIDTH * h / w:.1f}" '
            f'viewBox="0 0 {w:g} {h:g}">{body}</svg>'
        )
    with replacing(path) as file:
        file.write("\n".join([*parts, "</svg>\n"]).encode())
    return Path(path)


def _read(path: Path, prefix: str) -> tuple[float, float, str]:
    """Width, height and content of a figure. Ids get a prefix:
    in one page, those of two figures would be confused.
    """
    text = Path(path).read_text(encoding="utf-8")
    root = re.search(r'<svg [^>]*viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>(.*)</svg>', text, re.DOTALL)
    if root is None:
        raise CacheError(f"{path} is not an SVG figure of this repository")
    body = re.sub(r"<metadata>.*?</metadata>", "", root[3], flags=re.DOTALL)
    body = re.sub(r'((?:\bid="|url\(#|href="#))', rf"\g<1>{prefix}", body)
    return float(root[1]), float(root[2]), body
