"""Which parameter of each notebook takes what, so that it can be rerun for a layer without opening it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Cache = Mapping[str, Any]


@dataclass(frozen=True)
class Notebook:
    """A notebook's parameters, the formats it opens, and its figure for the contact sheet."""

    cache: str  # the parameter that takes the cache
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
