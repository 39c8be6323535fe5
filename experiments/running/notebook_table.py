"""Which parameter of each notebook takes what, so that one can be rerun for another layer without opening it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.caches import load_cache, save_cache
from experiments.caches.convert import layer_from_atlas, one_layer
from experiments.caches.errors import CacheError

Cache = Mapping[str, Any]


@dataclass(frozen=True)
class Notebook:
    """A notebook's cache parameter, the formats it opens, what picks the layer, and the figure for the contact sheet."""

    cache: str
    formats: tuple[str, ...]
    layer: str  # the parameter that picks a layer, or "" where the cache does
    value: Callable[[Cache, int], Any]  # what to set it to
    sheet: str  # SVG shown on the contact sheet


def heads_of(cache: Cache, layer: int) -> list[list]:
    return [[layer, head, f"L{layer}H{head}"] for head in range(cache["num_heads"])]


def first_call_of(cache: Cache, layer: int) -> int:
    return [call["layer_idx"] for call in cache["attention_weights"]].index(layer)


NOTEBOOKS = {
    "extract_all_attention.ipynb": Notebook(
        "DATA_PATH", ("layer",), "", lambda cache, layer: None, "layer{}_perhead_grid.svg"
    ),
    "plt_fig4.ipynb": Notebook(
        "CACHE_PATH",
        ("figure4", "inference", "atlas"),
        "HEADS",
        heads_of,
        "figure4_layer{}_per_head_grid.svg",
    ),
    "plot_figure4.ipynb": Notebook(
        "CACHE_PATH", ("inference", "figure4"), "WEIGHT_INDEX", first_call_of, "figure4_multihead.svg"
    ),
    "layer_atlas.ipynb": Notebook(
        "CACHE_PATH", ("atlas",), "LAYER", lambda cache, layer: layer, "measures.svg"
    ),
}


class LayerCaches:
    """The layers of a cache file, or of a folder of layerN.pt, as a notebook takes them.

    A notebook of single layers gets a layer cache taken out of an atlas; plt_fig4, whose figures of all layers would be the
    same every time, gets an atlas of one layer. These are written to a folder of their own.
    """

    def __init__(self, notebook: str, source: str | Path, folder: str | Path):
        """Raises CacheError for a notebook that is not in the table, and for a cache that it does not open."""
        if notebook not in NOTEBOOKS:
            raise CacheError(f"{notebook} is not one of {', '.join(NOTEBOOKS)}")
        self.name, self.notebook, self.source, self.folder = (
            notebook,
            NOTEBOOKS[notebook],
            Path(source),
            Path(folder),
        )
        takes_layers = "layer" in self.notebook.formats
        if self.source.is_dir():
            self.files = {
                load_cache(path, expect=self.notebook.formats)["layer_index"]: path
                for path in sorted(self.source.glob("layer*.pt"))
            }
            if not self.files:
                raise CacheError(
                    f"{source} holds no layerN.pt; run: bash experiments/extract_all_layers.sh CONFIG {source}"
                )
            self.cache, self.layers = None, sorted(self.files)
            return
        self.files = {}
        self.cache = load_cache(
            self.source, expect=(*self.notebook.formats, *(("atlas",) if takes_layers else ()))
        )
        found = self.cache.get("layers") or self.cache.get("layer_indices") or [self.cache["layer_index"]]
        self.layers = sorted(set(found))

    def choose(self, words: list[str]) -> list[int]:
        """ "all", numbers and ranges such as 0-29 -> layers of this cache."""
        chosen: set[int] = set()
        for word in words:
            first, dash, last = word.partition("-")
            if word == "all":
                chosen.update(self.layers)
            elif first.isdecimal() and (last.isdecimal() if dash else True):
                layers = range(int(first), int(last or first) + 1)
                if not layers:
                    raise CacheError(
                        f"layers {word!r} are none: a range goes from its lower number to its higher"
                    )
                chosen.update(layers)
            else:
                raise CacheError(f"layer {word!r} is not a number from 0, a range such as 0-29, or all")
        if absent := sorted(chosen - set(self.layers)):
            raise CacheError(
                f"layer {absent[0]} is not in {self.source}; it has {', '.join(map(str, self.layers))}"
            )
        return sorted(chosen)

    def parameters(self, layer: int) -> dict[str, Any]:
        """What to set for one layer, the save folder left out. Paths are absolute."""
        path, cache = self.files.get(layer, self.source), self.cache
        if cache is not None and cache["format"] == "atlas" and self.notebook.layer != "LAYER":
            path = self.folder / f"layer{layer}.pt"
            save_cache(
                path, layer_from_atlas(cache, layer) if not self.notebook.layer else one_layer(cache, layer)
            )
        chosen = {self.notebook.layer: self.notebook.value(cache, layer)} if self.notebook.layer else {}
        return {self.notebook.cache: str(path.resolve())} | chosen

    def files_of(self, layer: int) -> list[Path]:
        return [self.files.get(layer, self.source)]
