"""All layers, heads and passes of a cache as one HTML file that opens from disk: no server, no network.

    python experiments/layer_page.py cache/published/self_forcing_dmd_eagle_21f.pt --output_path outputs/eagle.html

Everything drawn is in the file as JSON (page_data); html_page.html draws it.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.analysis import head_measures, head_taxonomy
from experiments.analysis.measures import head_statistics
from experiments.caches import load_cache
from experiments.caches.atomic_files import replacing
from experiments.caches.errors import CacheError
from experiments.caches.view import Profiles, open_passes
from experiments.figures.style import LABELS

TEMPLATE = Path(__file__).with_suffix(".html")

BUDGET = 2_600_000  # bytes of JSON: the page stays under 3 MB

QUANTITIES = ("mean_logit", "mass")

Passes = list[dict[str, dict[int, Profiles]]]  # per pass, by quantity, by layer


def page_data(passes: Passes, layers: Sequence[int]) -> dict[str, Any]:
    """What the page shows. Numbers are rounded to 4 digits; frame matrices are coded in one or two bytes a cell, whichever
    fits the budget, and where neither fits, passes are left out evenly and the page says so."""
    for cell_bytes in (2, 1):
        coded = [_pass_data(views, layers, cell_bytes) for views in passes]
        sizes = [len(to_json(one)) for one in coded]
        if sum(sizes) <= BUDGET:
            break
    every = 1
    while sum(sizes[::every]) > BUDGET and every < len(sizes):
        every *= 2
    notes = (
        []
        if every == 1
        else [f"{len(sizes[::every])} of {len(sizes)} passes are shown: more would not fit in one page."]
    )
    return _describe(passes, layers, notes) | {"cell_bytes": cell_bytes, "passes": coded[::every]}


def open_passes_of(path: str | Path) -> tuple[Passes, list[int]]:
    """The passes and layers of a cache file, or of a folder of layerN.pt that belong together."""
    path = Path(path)
    files = sorted(
        path.glob("layer*.pt"), key=lambda file: int("0" + "".join(filter(str.isdigit, file.stem)))
    )
    caches = [load_cache(file) for file in (files if path.is_dir() else [path])]
    if not caches:
        raise CacheError(
            f"{path} holds no layerN.pt; run: bash experiments/extract_all_layers.sh CONFIG {path}"
        )
    passes: Passes = []
    for quantity in QUANTITIES:
        for cache in caches:
            view = head_measures.open_quantity(cache, None, quantity)
            for p, one in enumerate(open_passes(cache, view) if view else []):
                if p == len(passes):
                    passes.append({})
                passes[p].setdefault(quantity, {}).update(dict.fromkeys(one.layers, one))
    if not passes:
        raise CacheError(f"{path} holds neither mean logits nor mass per frame")
    views = list(next(iter(passes[0].values())).values())
    for view in views:
        if (view.num_frames, view.num_heads, view.pass_label) != (
            views[0].num_frames,
            views[0].num_heads,
            views[0].pass_label,
        ):
            raise CacheError(
                f"{path}: layer {view.layers[0]} has {view.num_frames} frames, {view.num_heads} heads, "
                f"{view.pass_label}; layer {views[0].layers[0]} has others. One page shows one rollout"
            )
    return passes, sorted(next(iter(passes[0].values())))


def save_page(path: str | Path, source: str | Path, layers: Sequence[int] | None = None) -> Path:
    """Write the page of a cache or folder, whole or not at all; layers None: all of them."""
    passes, there = open_passes_of(source)
    data = page_data(passes, there if layers is None else layers)
    page = TEMPLATE.read_text()
    with replacing(path) as file:
        file.write(page.replace("DATA_GOES_HERE", to_json(data).replace("<", "\\u003c"), 1).encode())
    return Path(path)


def to_json(data: Mapping[str, Any]) -> str:
    """Compact JSON; a NaN or an infinity in it would be an error."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _describe(passes: Passes, layers: Sequence[int], notes: Sequence[str]) -> dict[str, Any]:
    """What holds for every pass."""
    view = next(iter(passes[0].values()))[layers[0]]
    return {
        "model": view.model, "source": view.source, "notes": [*view.notes, *notes], "layers": list(layers),
        "num_heads": view.num_heads, "num_frames": view.num_frames, "blocks": list(view.block_sizes),
        "query_frames": list(view.query_frames), "labels": {quantity: LABELS[quantity] for quantity in passes[0]},
    }  # fmt: skip


def _pass_data(
    views: dict[str, dict[int, Profiles]], layers: Sequence[int], cell_bytes: int
) -> dict[str, Any]:
    """One pass: profiles, statistics and matrices by quantity; measures and kinds of heads."""
    view = next(iter(views.values()))[layers[0]]
    quantities = {}
    for quantity, by_layer in views.items():
        profiles = np.stack([by_layer[layer].frame_profile(layer) for layer in layers])  # [N, H, F]
        s = head_statistics(profiles)
        quantities[quantity] = {
            "profiles": _numbers(profiles),
            "statistics": {
                name: _numbers(getattr(s, name)) for name in ("first", "middle", "last", "delta", "ratio")
            }
            | {"max_frame": s.max_frame.tolist()},
            "matrices": _matrices(by_layer, layers, cell_bytes),
        }
    measures, kinds = _measures(views, layers)
    return {
        "label": view.pass_label,
        "noise": list(view.noise_frames),
        "quantities": quantities,
        "measures": measures,
        "kinds": kinds,
    }


def _measures(
    views: dict[str, dict[int, Profiles]], layers: Sequence[int]
) -> tuple[list[dict], list[list[str]] | None]:
    """Every measure that there is, as values [N, H], and the kind of each head."""
    logits, mass = (views.get(quantity, {}) for quantity in QUANTITIES)
    rows: dict[str, list[np.ndarray]] = {}
    about, kinds = {}, []
    surveyed: dict[int, tuple] = {}
    for layer in layers:
        pair = logits.get(layer), mass.get(layer)
        view = pair[0] or pair[1]
        if id(view) not in surveyed:  # an atlas has one view for all of its layers
            surveyed[id(view)] = (
                head_measures.survey(*pair),
                head_measures.head_kinds(pair[0], head_taxonomy.Thresholds()),
            )
        maps, labels = surveyed[id(view)]
        row = view.layers.index(layer)
        for m in maps:
            if m.values is not None and np.isfinite(m.values).any():
                about[m.name] = {"name": m.name, "title": m.title, "unit": m.unit, "scale": m.scale}
                rows.setdefault(m.name, []).append(m.values[row])
        if labels is not None:
            kinds.append([head_taxonomy.KINDS.get(int(label), "") for label in labels[row]])
    whole = [name for name, values in rows.items() if len(values) == len(layers)]
    return (
        [about[name] | {"values": _numbers(np.stack(rows[name]))} for name in whole],
        kinds if len(kinds) == len(layers) else None,
    )


def _matrices(by_layer: dict[int, Profiles], layers: Sequence[int], cell_bytes: int) -> dict[str, Any] | None:
    """Frame matrices [N, H, F, F] as base64 of little-endian unsigned integers from 0 (low) to top - 1 (high), of each head;
    top is NaN. Cells that no head has are left out; cells says which are there, by rows. None where there are none."""
    found = [by_layer[layer].frame_matrix(layer) for layer in layers]
    F = by_layer[layers[0]].num_frames
    if any(matrix is None or matrix.shape[1] < F for matrix in found):
        return None
    values = np.stack(found).reshape(len(layers), -1, F * F).astype(np.float64)  # [N, H, F F]
    cells = np.isfinite(values).any((0, 1))
    if not cells.any():
        return None
    values = values[..., cells]
    there = np.isfinite(values)
    low, high = (
        edge(np.where(there, values, fill), -1) for edge, fill in ((np.min, np.inf), (np.max, -np.inf))
    )
    low, high = (
        np.where(np.isfinite(low), low, 0),
        np.where(np.isfinite(high), high, 0),
    )  # a head without values
    top = 256**cell_bytes - 1
    span = np.where(high > low, high - low, 1)
    codes = np.where(there, np.rint((values - low[..., None]) / span[..., None] * (top - 1)), top)
    return {
        "cells": np.flatnonzero(cells).tolist(),
        "low": _numbers(low, 6),
        "high": _numbers(high, 6),
        "codes": base64.b64encode(codes.astype(f"<u{cell_bytes}").tobytes()).decode(),
    }


def _numbers(values: np.ndarray, digits: int = 4) -> Any:
    """Nested lists with a few significant digits; None for what is not there."""
    if values.ndim:
        return [_numbers(row, digits) for row in values]
    return float(f"{values:.{digits}g}") if np.isfinite(values) else None
