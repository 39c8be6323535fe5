"""The layers of a cache, as each notebook takes them."""

from pathlib import Path
from typing import Any

from experiments.caches import load_cache, save_cache
from experiments.caches.convert import layer_from_atlas, one_layer
from experiments.caches.errors import CacheError
from experiments.caches.layer_folder import open_layers
from experiments.running.notebook_table import NOTEBOOKS, Cache

MOST_DIGITS = 4  # of a layer's number


class LayerCaches:
    """The layers of a cache file, or of a folder of layerN.pt, as a notebook takes them.

    A notebook of single layers gets a layer cache taken out of an atlas. plt_fig4 gets an atlas of one layer:
    its figures of all layers would be the same every time. These caches are written to a folder of their own.
    """

    def __init__(self, notebook: str, source: str | Path, folder: str | Path):
        """Raises CacheError for a notebook that is not in the table and for a cache that it does not open."""
        if notebook not in NOTEBOOKS:
            raise CacheError(f"{notebook} is not one of {', '.join(NOTEBOOKS)}")
        self.notebook, self.source, self.folder = NOTEBOOKS[notebook], Path(source), Path(folder)
        self.cache: Cache | None = None
        self.files: dict[int, Path] = {}
        if self.source.is_dir():
            opened = open_layers(self.source, self.notebook.formats)
            self.files = {cache["layer_index"]: path for path, cache in opened.items()}
            self.layers = sorted(self.files)
        else:
            atlas = ("atlas",) if "layer" in self.notebook.formats else ()
            self.cache = load_cache(self.source, expect=(*self.notebook.formats, *atlas))
            found = self.cache.get("layers") or self.cache.get("layer_indices") or [self.cache["layer_index"]]
            self.layers = sorted(set(found))

    def choose(self, words: list[str]) -> list[int]:
        """ "all", numbers and ranges such as 0-29 -> layers of this cache."""
        chosen: set[int] = set()
        for word in words:
            chosen.update(self.layers if word == "all" else layer_range(word))
        if absent := sorted(chosen - set(self.layers)):
            there = ", ".join(map(str, self.layers))
            raise CacheError(f"layer {absent[0]} is not in {self.source}; it has {there}")
        return sorted(chosen)

    def parameters(self, layer: int) -> dict[str, Any]:
        """What to set for one layer, the save folder left out. Paths are absolute."""
        path = self.files.get(layer, self.source)
        if self.cache is None:
            return {self.notebook.cache: str(path.resolve())}
        chosen = {self.notebook.layer: self.notebook.value(self.cache, layer)} if self.notebook.layer else {}
        if self.cache["format"] == "atlas" and self.notebook.layer != "LAYER":
            take = one_layer if self.notebook.layer else layer_from_atlas
            path = self.folder / f"layer{layer}.pt"
            save_cache(path, take(self.cache, layer))
        return {self.notebook.cache: str(path.resolve())} | chosen

    def files_of(self, layer: int) -> list[Path]:
        return [self.files.get(layer, self.source)]


def layer_range(word: str) -> range:
    """ "3" or "0-29" -> layers. Raises CacheError for other words, empty ranges and long numbers."""
    first, dash, last = word.partition("-")
    if not (is_number(first) and (is_number(last) if dash else True)):
        raise CacheError(f"layer {word!r} is not a number from 0, a range such as 0-29, or all")
    layers = range(int(first), int(last or first) + 1)
    if not layers:
        raise CacheError(f"layers {word!r} are none: a range goes from its lower number to its higher")
    return layers


def is_number(word: str) -> bool:
    """Up to MOST_DIGITS ASCII digits: no model has a billion layers."""
    return word.isascii() and word.isdecimal() and len(word) <= MOST_DIGITS
