"""Keys of the last block for the HTML page, along frames and along temporal positions, as JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.analysis.key_axes import AXES, has_slots, key_columns
from experiments.caches import load_cache
from experiments.figures.page_data import Passes, code


def keys_of(path: Path, passes: Passes, layers: Sequence[int]) -> dict[str, Any] | None:
    """By axis the labels and marks of the columns of every layer, and their values [N, H, columns] by pass.

    None where keys are frames in their places, as in every cache but an atlas under a cache policy.
    """
    cache = {} if path.is_dir() else load_cache(path)
    if cache.get("format") != "atlas" or not has_slots(cache):
        return None
    return {axis: _along(cache, passes, layers, axis) for axis in AXES}


def _along(cache: dict[str, Any], passes: Passes, layers: Sequence[int], axis: str) -> dict[str, Any]:
    found = [
        {
            quantity: [key_columns(cache, layer, views[layers[0]].step, quantity, axis) for layer in layers]
            for quantity, views in by_quantity.items()
        }
        for by_quantity in passes
    ]
    first = next(iter(found[0].values()))
    return {
        "labels": [list(columns.labels) for columns in first],
        "marks": [list(columns.marks) for columns in first],
        "passes": [
            {
                quantity: code(np.stack([one.values for one in columns]).astype(np.float64), 2)
                for quantity, columns in by_quantity.items()
            }
            for by_quantity in found
        ],
    }
