"""What the HTML page shows, as JSON: profiles, statistics, measures and frame matrices of every pass."""

import base64
import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.analysis import head_measures, head_taxonomy
from experiments.analysis.measures import head_statistics
from experiments.caches.averages import average_names
from experiments.caches.errors import CacheError
from experiments.caches.view import Profiles
from experiments.figures.style import LABELS

QUANTITIES = ("mean_logit", "mass")

# By quantity: its unit, its name in a sentence, and the power of its code (see code). Mass is small almost
# everywhere, so its steps are fine near 0.
ABOUT = {"mean_logit": ("logits", "mean logit", 1), "mass": ("share of 1", "attention mass", 2)}

STATISTICS = ("first", "middle", "last", "delta", "ratio")

LONGEST = {"model": 120, "source": 600, "note": 400, "label": 120}  # letters of what a cache says in words

MOST_NOTES = 20

Passes = list[dict[str, dict[int, Profiles]]]  # per pass, by quantity, by layer


def fit(passes: Passes, layers: Sequence[int], max_bytes: int, notes: Sequence[str] = ()) -> dict[str, Any]:
    """What the page shows, in at most max_bytes of JSON.

    Frame matrices take two bytes a cell, or one where two are too many. Where one is too many, they are kept
    for as many passes as fit, evenly chosen, and a note says so; profiles and measures are kept for all.
    Raises CacheError where those alone do not fit.
    """
    data, count = _describe(passes, layers), _num_averages(passes, layers)
    data |= {"passes": [_pass_data(views, layers, count) for views in passes]}
    base = (
        size_of(data) + size_of([words(note, LONGEST["note"]) for note in notes]) + 300
    )  # for one more note
    if base > max_bytes:
        raise CacheError(
            f"profiles and measures of {len(passes)} passes take {base / 1e6:.1f} MB, "
            f"more than the page has; allow more with --max_mb"
        )
    for cell_bytes in (2, 1):
        matrices = [_matrices(views, layers, cell_bytes, count) for views in passes]
        sizes = [size_of(one) for one in matrices]
        if base + sum(sizes) <= max_bytes:
            break
    kept = _evenly(sizes, max_bytes - base)
    for p, (shown, of_pass) in enumerate(zip(data["passes"], matrices, strict=True)):
        shown["matrices"] = of_pass if p in kept else dict.fromkeys(of_pass)
        shown["left_out"] = p not in kept
    if len(kept) < len(passes):
        missing = f"Frame matrices of {len(kept)} of {len(passes)} passes are shown"
        notes = [*notes, f"{missing}: more would not fit in one page. Allow more with --max_mb."]
    data["notes"] += [words(note, LONGEST["note"]) for note in notes]
    return data


def to_json(data: Any) -> str:
    """Compact JSON that no browser takes for markup; a NaN or an infinity in it would be an error."""
    found = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return found.replace("<", "\\u003c")


def size_of(data: Any) -> int:
    """Bytes of the JSON."""
    return len(to_json(data).encode())


def words(text: object, longest: int) -> str:
    """What a cache says, cut to a length, without letters that no page shows or that turn the text around."""
    text = str(text)[: longest + 1]
    shown = "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co") else c for c in text)
    return shown if len(text) <= longest else shown[: longest - 1] + "…"


def code(values: np.ndarray, cell_bytes: int, power: int = 1) -> dict[str, Any]:
    """Values [..., n] as base64 of little-endian unsigned integers c: low + (high - low) (c / top)^power.

    low and high [...] are the range of each row. The largest integer, top + 1, is NaN. Both are JSON lists.
    """
    there = np.isfinite(values)
    low, high = (np.where(there, values, fill) for fill in (np.inf, -np.inf))
    low, high = low.min(-1), high.max(-1)
    some = there.any(-1)
    low, high = np.where(some, low, 0.0), np.where(some, high, 0.0)
    top = 256**cell_bytes - 2
    span = np.where(high > low, high - low, 1.0)[..., None]
    share = np.where(there, (np.where(there, values, 0.0) - low[..., None]) / span, 0.0)
    codes = np.where(there, np.rint(np.clip(share, 0, 1) ** (1 / power) * top), top + 1)
    return {
        "bytes": cell_bytes,
        "power": power,
        "low": numbers(low, 6),
        "high": numbers(high, 6),
        "codes": base64.b64encode(codes.astype(f"<u{cell_bytes}").tobytes()).decode(),
    }


def numbers(values: np.ndarray, digits: int = 4) -> Any:
    """Nested lists with a few significant digits; None for what is not there."""
    if values.ndim:
        return [numbers(row, digits) for row in values]
    return float(f"{values:.{digits}g}") if np.isfinite(values) else None


def _describe(passes: Passes, layers: Sequence[int]) -> dict[str, Any]:
    """What holds for every pass."""
    view = next(iter(passes[0].values()))[layers[0]]
    return {
        "model": words(view.model, LONGEST["model"]),
        "source": words(f"edited: {view.edits}. " * bool(view.edits) + view.source, LONGEST["source"]),
        "notes": [words(note, LONGEST["note"]) for note in view.notes[:MOST_NOTES]],
        "layers": list(layers),
        "num_heads": view.num_heads,
        "num_frames": view.num_frames,
        "averages": list(average_names(_num_averages(passes, layers))),  # columns after the frames
        "blocks": list(view.block_sizes),
        "query_frames": list(view.query_frames),
        "quantities": {
            name: {"label": LABELS[name], "unit": ABOUT[name][0], "name": ABOUT[name][1]}
            for name in passes[0]
        },
    }


def _num_averages(passes: Passes, layers: Sequence[int]) -> int:
    """How many keys are averages of frames that are gone, at most."""
    views = [by_layer[layers[0]] for views in passes for by_layer in views.values()]
    return max(view.num_averages for view in views)


def _filled(values: np.ndarray, columns: int) -> np.ndarray:
    """Values [..., n] with NaN in further columns: [..., columns]."""
    missing = np.full((*values.shape[:-1], columns - values.shape[-1]), np.nan, np.float32)
    return np.concatenate([values, missing], -1)


def _pass_data(
    views: Mapping[str, Mapping[int, Profiles]], layers: Sequence[int], averages: int
) -> dict[str, Any]:
    """One pass without its matrices: profiles and statistics by quantity, measures and kinds of heads.

    Profiles are of all frames and, after them, of averages.
    """
    view = next(iter(views.values()))[layers[0]]
    quantities = {}
    for name, by_layer in views.items():
        keys = np.stack([by_layer[layer].key_profile(layer) for layer in layers])  # [N, H, F + averages]
        s = head_statistics(keys[..., : view.num_frames])
        quantities[name] = {
            "profiles": code(_filled(keys, view.num_frames + averages).astype(np.float64), 2),
            "statistics": {each: numbers(getattr(s, each)) for each in STATISTICS}
            | {"max_frame": s.max_frame.tolist()},
        }
    measures, kinds = _measures(views, layers)
    return {
        "label": words(view.pass_label, LONGEST["label"]),
        "noise": list(view.noise_frames),
        "quantities": quantities,
        "measures": measures,
        "kinds": kinds,
    }


def _measures(
    views: Mapping[str, Mapping[int, Profiles]], layers: Sequence[int]
) -> tuple[list[dict], list[list[str]] | None]:
    """Every measure that there is, as values [N, H], and the kind of each head."""
    logits, mass = (views.get(quantity, {}) for quantity in QUANTITIES)
    rows: dict[str, list[np.ndarray]] = {}
    about, kinds = {}, []
    measured: dict[int, tuple] = {}
    for layer in layers:
        pair = logits.get(layer), mass.get(layer)
        view = pair[0] or pair[1]
        assert view is not None
        if id(view) not in measured:  # an atlas has one view for all of its layers
            measured[id(view)] = (
                head_measures.measure_heads(*pair),
                head_measures.head_kinds(pair[0], head_taxonomy.Thresholds()),
            )
        maps, labels = measured[id(view)]
        row = view.layers.index(layer)
        for m in maps:
            if m.values is not None and np.isfinite(m.values).any():
                about[m.name] = {"name": m.name, "title": m.title, "unit": m.unit, "scale": m.scale}
                rows.setdefault(m.name, []).append(m.values[row])
        if labels is not None:
            kinds.append([head_taxonomy.KINDS.get(int(label), "") for label in labels[row]])
    whole = [name for name, values in rows.items() if len(values) == len(layers)]
    return (
        [about[name] | {"values": numbers(np.stack(rows[name]))} for name in whole],
        kinds if len(kinds) == len(layers) else None,
    )


def _matrices(
    views: Mapping[str, Mapping[int, Profiles]], layers: Sequence[int], cell_bytes: int, averages: int
) -> dict[str, Any]:
    """Frame matrices [N, H, F, F + averages] of each quantity, coded by head, or None where there are none.

    Cells that no head has are left out; "cells" says which are there, by rows.
    """
    coded: dict[str, Any] = {}
    for name, by_layer in views.items():
        coded[name] = None
        F = by_layer[layers[0]].num_frames
        found = [by_layer[layer].key_matrix(layer) for layer in layers]
        whole = [_filled(m, F + averages) for m in found if m is not None and m.shape[1] == F]
        if len(whole) < len(layers):
            continue
        values = np.stack(whole).reshape(len(layers), -1, F * (F + averages)).astype(np.float64)
        cells = np.isfinite(values).any((0, 1))
        if cells.any():
            coded[name] = {"cells": np.flatnonzero(cells).tolist()}
            coded[name] |= code(values[..., cells], cell_bytes, ABOUT[name][2])
    return coded


def _evenly(sizes: Sequence[int], room: int) -> set[int]:
    """As many of the passes as fit in room bytes, the first and the last of all among them where two fit."""
    for count in range(len(sizes), 0, -1):
        chosen = {round(p) for p in np.linspace(0, len(sizes) - 1, count)}
        if sum(sizes[p] for p in chosen) <= room:
            return chosen
    return set()
