"""Maps over the video for the HTML page: what every captured query sees of every patch, as JSON."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.analysis.video_maps import open_map, places_of
from experiments.caches import load_cache
from experiments.caches.errors import CacheError
from experiments.caches.maps_schema import MapsCache
from experiments.caches.view import Profiles, edits_in_words, source_of
from experiments.figures.page_data import code, size_of


def maps_of(path: str | Path, view: Profiles, max_bytes: int) -> dict[str, Any]:
    """The maps of a cache as JSON of at most max_bytes; patches are pooled where they would take more.

    Mass, times the number of keys that a query sees: 1 is even. Raises CacheError for a cache of another
    rollout than the view's, and for maps that do not fit.
    """
    cache = load_cache(path, expect=("maps",))
    typed = MapsCache.from_dict(cache)
    if source_of(typed) != view.source or typed.num_frames != view.num_frames:
        raise CacheError(f"{path} is of another rollout ({source_of(typed)}) than the page ({view.source})")
    if differing := _differing(typed, view):
        raise CacheError(
            f"{path} is of another rollout than the page, by its {', '.join(differing)}; make both with the "
            "same settings"
        )
    places = places_of(cache)
    if not places:
        raise CacheError(f"{path} holds no maps of queries, only words; run: {MAKE}")
    found = [
        [
            [[open_map(cache, layer, head, at.step, place) for place in places] for head in typed.heads]
            for layer in typed.layers
        ]
        for at in typed.passes()
    ]
    values = np.array(
        [[[[seen.values for seen in row] for row in rows] for rows in by_layer] for by_layer in found]
    )
    first = found[0][0][0]
    data = {
        "layers": typed.layers,
        "heads": typed.heads,
        "passes": [by_layer[0][0][0].pass_label for by_layer in found],
        "queries": places,
        "noise": [[list(seen.noise_frames) for seen in by_layer[0][0]] for by_layer in found],
        "own": [seen.query_frames[0] for seen in first],
        "unit": first[0].unit,
        "grid": [typed.rows, typed.columns],
    }
    return data | _fitting(values, max_bytes - size_of(data) - 100, path)


def _differing(maps: MapsCache, view: Profiles) -> list[str]:
    """Settings in which the rollouts of maps and view differ, where both files say them."""
    ours, theirs = maps.config or {}, view.settings
    names = sorted({*ours, *theirs}) if ours and theirs else []
    edits = ["interventions"] if edits_in_words(maps.interventions) != view.edits else []
    return [name for name in names if ours.get(name) != theirs.get(name)] + edits


def _fitting(values: np.ndarray, room: int, path: str | Path) -> dict[str, Any]:
    """Values [P, N, h, n, F, rows, columns] as coded rows, pooled by 2 until they take at most room bytes."""
    while True:
        rows, columns = values.shape[-2:]
        flat = values.reshape(*values.shape[:4], -1)
        if (
            flat.size * 4 // 3 + flat[..., 0].size * 16 <= room
        ):  # base64 of a byte each, and two numbers a row
            return {"rows": rows, "columns": columns, "coded": code(flat.astype(np.float64), 1, 2)}
        if rows == columns == 1:
            raise CacheError(
                f"the maps of {path} do not fit in the page: keep fewer heads or queries, "
                "or allow more with --max_mb"
            )
        values = pooled(values)


def pooled(values: np.ndarray) -> np.ndarray:
    """Means of 2 x 2 patches [..., rows, columns], of what is there at an odd edge; NaN where none is."""
    for axis in (-2, -1):
        if values.shape[axis] > 1:
            if values.shape[axis] % 2:
                pad = [(0, 0)] * values.ndim
                pad[axis] = (0, 1)
                values = np.pad(values, pad, constant_values=np.nan)
            values = np.moveaxis(values, axis, -1)
            pairs = values.reshape(*values.shape[:-1], -1, 2)
            there = np.isfinite(pairs)
            with np.errstate(invalid="ignore"):
                mean = np.where(there, pairs, 0).sum(-1) / there.sum(-1)
            values = np.moveaxis(mean, -1, axis)
    return values


MAKE = "python experiments/run_extraction_maps.py --query_grid 18,4,4"
