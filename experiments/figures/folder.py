"""Where a notebook's figures go: each names its model, prompt and cache; a PDF beside it where asked."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments.caches.atomic_files import replacing
from experiments.caches.errors import CacheError
from experiments.caches.schema import FORMATS
from experiments.figures.style import STYLE, WIDTHS, use_width

HASHED_BYTES = 256 << 20  # a larger cache is named by its size alone


class Described(Protocol):
    """A view of a cache: profiles, or a map over the video."""

    @property
    def model(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def source(self) -> str: ...

    @property
    def pass_label(self) -> str: ...


def about(view: Described, cache_path: str | Path) -> dict[str, str]:
    """What the metadata of a figure says: model, weights, prompt and seed, the cache with its hash, and the
    script that writes its format."""
    path = Path(cache_path)
    size = path.stat().st_size
    mark = f"{size} bytes"
    if size <= HASHED_BYTES:
        mark = f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
    return {
        "Title": f"{view.model}, {view.pass_label}",
        "Description": view.source,
        "Source": f"{path.name}, {mark}, format {view.kind} of experiments/{FORMATS[view.kind].script}",
    }


class FigureFolder:
    """Saves figures to one folder and remembers which.

    width "column" or "page" draws all figures from now on 3.25 or 6.75 inches wide with letters of 8 points;
    pdf saves each beside its SVG. Raises CacheError for another width.
    """

    def __init__(
        self, folder: str | Path, metadata: Mapping[str, str], width: str | None = None, pdf: bool = False
    ):
        if width is not None and width not in WIDTHS:
            raise CacheError(f"FIGURE_WIDTH must be None, {' or '.join(WIDTHS)}, not {width!r}")
        use_width(width)
        self.folder, self.metadata, self.width, self.pdf = Path(folder), dict(metadata), width, pdf
        self.paths: list[Path] = []

    def save(self, figure: Figure, name: str) -> Figure:
        """Write folder/name, an SVG, whole or not at all; returns the figure, to be shown."""
        path = self.folder / name
        self._write(figure, path, "svg", {**self.metadata, "Date": None})
        if self.pdf:
            subject = "; ".join(filter(None, map(self.metadata.get, ("Description", "Source"))))
            of_pdf = {"Title": self.metadata.get("Title"), "Subject": subject, "CreationDate": None}
            self._write(figure, path.with_suffix(".pdf"), "pdf", of_pdf)
        return figure

    def _write(self, figure: Figure, path: Path, kind: str, metadata: Mapping[str, str | None]) -> None:
        tight = None if self.width else STYLE["savefig.bbox"]  # a journal's width is exact
        with plt.rc_context(STYLE | {"savefig.bbox": tight, "pdf.fonttype": 42}), replacing(path) as file:
            figure.savefig(file, format=kind, metadata=dict(metadata))
        self.paths.append(path)

    def __str__(self) -> str:
        return "\n".join(map(str, self.paths)) or "none"
