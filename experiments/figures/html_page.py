"""All layers, heads and passes of a cache as one HTML file that opens from disk: no server, no network.

    python experiments/layer_page.py cache/published/self_forcing_dmd_eagle_21f.pt

This module makes the numbers, as JSON, and the files of page/ draw them. docs/page.md describes the page.
"""

import base64
import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from experiments.analysis.axes import AXES, key_columns
from experiments.analysis.measures import head_statistics, measure_heads, open_quantity
from experiments.analysis.stats import mean_without_nan
from experiments.analysis.taxonomy import ANCHOR, KINDS, Thresholds, head_kinds
from experiments.analysis.video_maps import open_map, places_of
from experiments.caches import load_cache
from experiments.caches.files import CacheError, replacing
from experiments.caches.formats import MapsCache
from experiments.caches.legacy import UNRECORDED
from experiments.caches.store import open_layers, remedy
from experiments.caches.view import (
    Profiles,
    average_names,
    edits_in_words,
    open_passes,
    require_alike,
    short_source,
    source_of,
)
from experiments.figures.style import LABELS
from experiments.figures.video_maps import pictures_for

QUANTITIES = ("mean_logit", "mass")
# By quantity: its unit, its name in a sentence, and the power of its code (see code). Mass is small almost
# everywhere, so its steps are fine near 0.
ABOUT = {"mean_logit": ("logits", "mean logit", 1), "mass": ("share of 1", "attention mass", 2)}
STATISTICS = ("first", "middle", "last", "delta", "ratio")
LONGEST = {"model": 120, "source": 600, "note": 400, "label": 120}  # letters of what a cache says in words
MOST_NOTES = 20
MAX_MB = 16.0  # both quantities of five passes of 30 x 12 heads x 72 frames are 14 MB

PARTS = Path(__file__).with_name("page")
STYLES = ("theme", "page", "drawing")
SCRIPTS = ("data", "draw", "heads", "detail", "keys", "compare", "on_video", "export", "controls")

Views = dict[str, Profiles]  # by quantity


def save_page(path: str | Path, source: str | Path, **options: Any) -> Path:
    """Write the page of a cache file or a folder of layerN.pt, whole or not at all; options of page_of."""
    with replacing(path) as file:
        file.write(page_of(source, **options).encode())
    return Path(path)


def page_of(
    source: str | Path,
    layers: Sequence[int] | None = None,
    max_mb=MAX_MB,
    video: str | Path | None = None,
    maps: str | Path | None = None,
    compare: str | Path | None = None,
) -> str:
    """Return the page of a cache file, or of a folder of layerN.pt.

    max_mb bounds the file, in 10^6 bytes. video is an mp4 of the same rollout, by default the one beside the
    cache. maps is a maps cache of the rollout, which takes at most half of the page, and so does compare, a
    second cache of as many heads and frames. CacheError where the profiles alone do not fit, for a bad video,
    for maps of another rollout and for a second cache of other sizes.
    """
    # 1. Passes of the cache, and pictures of its video
    source = Path(source)
    passes = open_passes_of(source, layers)
    view = one_of(passes[0])
    shown, note = pictures_for(source, video, view.num_frames)
    frames, notes = list(map(_data_uri, shown or ())), [note] if note else []
    # 2. What is left of max_mb after the program and the pictures: maps and a second cache take half at most
    page = _template()
    room = int(max_mb * 1e6) - len(page.encode()) - size_of(frames)
    seen = None if maps is None else maps_of(maps, view, room // 2)
    keys = keys_of(source, passes)
    other = None if compare is None else other_of(compare, passes, room // 2)
    # 3. Matrices get what is left then
    data = fit(passes, room - size_of(seen) - size_of(keys) - size_of(other), notes)
    if other:
        add_differences(data["passes"], other["passes"])
    data |= {"thumbnails": frames, "maps": seen, "keys": keys, "other": other, "name": source.stem}
    return page.replace("DATA_GOES_HERE", to_json(data), 1)


def one_of(views: Views) -> Profiles:
    """Return a view of a pass, of whichever quantity the cache holds."""
    return next(iter(views.values()))


def other_of(path: str | Path, ours: Sequence[Views], max_bytes: int) -> dict[str, Any]:
    """Return the data of a second cache of the same layers, heads, frames and passes; else CacheError."""
    passes, view = open_passes_of(Path(path)), one_of(ours[0])
    layers = one_of(passes[0]).layers
    passes = open_passes_of(Path(path), [layer for layer in view.layers if layer in layers])
    # Differences are of the same heads: other weights of the model may be compared, another model may not
    sizes: tuple[str, ...] = ("layers", "num_heads", "num_frames", "block_sizes", "num_averages")
    known = UNRECORDED["model"] not in (one_of(passes[0]).model, view.model)
    sizes = ("model", *sizes) if known else sizes
    require_alike(one_of(passes[0]), view, sizes, f"{path} cannot be compared with the page's cache")
    for mine, other in zip(ours, passes, strict=False):  # a pass is drawn beside the one of its number
        at, there = one_of(mine).timestep, one_of(other).timestep
        if at is not None and there is not None and at != there:
            raise CacheError(f"{path} has a pass at t = {there:g} where the page's cache has t = {at:g}")
    return fit(passes, max_bytes) | {"name": Path(path).stem}


def add_differences(ours: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> None:
    """Add the differences to the second cache's measures, pass by pass."""
    for one, other in zip(ours, others, strict=False):
        theirs = {m["name"]: m["values"] for m in other["measures"]}
        for m in [m for m in one["measures"] if m["name"] in theirs]:
            difference = np.array(m["values"], float) - np.array(theirs[m["name"]], float)
            named = {"name": f"{m['name']}_difference", "title": f"{m['title']}, A − B", "scale": "diverging"}
            one["measures"].append({"unit": m["unit"], "values": numbers(difference)} | named)


def open_passes_of(path: Path, layers: Sequence[int] | None = None) -> list[Views]:
    """Open the passes of a cache file, or of a folder of layerN.pt that belong together, as if one cache."""
    caches = list(open_layers(path).values()) if path.is_dir() else [load_cache(path)]
    passes: list[Views] = []
    for quantity in QUANTITIES:
        opened = [(cache, open_quantity(cache, None, quantity)) for cache in caches]
        of_caches = [open_passes(cache, view) for cache, view in opened if view]
        for p, views in enumerate(zip(*of_caches, strict=False)):
            # The layers of a folder, one a view, as one view of many layers
            by_layer = {layer: view for view in views for layer in view.layers}
            shown, gone = tuple(layers or sorted(by_layer)), max(view.num_averages for view in views)
            read = lambda layer, by_layer=by_layer: by_layer[layer].values(layer)  # noqa: E731
            joined = replace(views[0], layers=shown, num_averages=gone, _read=read)
            if p == len(passes):
                passes.append({})
            passes[p][quantity] = joined
    if not passes:
        raise CacheError(f"{path} holds neither mean logits nor mass per frame")
    return passes


# --- Profiles, statistics, measures and frame matrices of every pass


def fit(passes: Sequence[Views], max_bytes: int, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the page's data in max_bytes of JSON: matrices of 2 bytes or 1 a cell, then of fewer passes."""
    view = one_of(passes[0])
    averages = max(view.num_averages for views in passes for view in views.values())
    data: dict[str, Any] = {
        "model": words(view.model, LONGEST["model"]),
        "title": words(short_source(view.source), LONGEST["source"]),
        "source": words(f"edited: {view.edits}. " * bool(view.edits) + view.source, LONGEST["source"]),
        "notes": [words(note, LONGEST["note"]) for note in [*view.notes[:MOST_NOTES], *notes]],
        "layers": list(view.layers),
        "num_heads": view.num_heads,
        "num_frames": view.num_frames,
        "averages": list(average_names(averages)),  # columns after the frames
        "blocks": list(view.block_sizes),
        "query_frames": list(view.query_frames),
        "quantities": {q: {"label": LABELS[q], "unit": ABOUT[q][0], "name": ABOUT[q][1]} for q in passes[0]},
        "passes": [_pass_data(views, averages) for views in passes],
    }
    # Two bytes a cell, or one; then fewer passes
    base = size_of(data) + 302  # for one more note
    if base > max_bytes:
        said = f"profiles and measures of {len(passes)} passes take {base / 1e6:.1f} MB"
        raise CacheError(f"{said}, more than the page has; allow more with --max_mb")
    for cell_bytes in (2, 1):
        matrices = [_matrices(views, cell_bytes, averages) for views in passes]
        sizes = np.array([size_of(one) for one in matrices])
        if base + sizes.sum() <= max_bytes:
            break
    for count in range(len(sizes), -1, -1):  # evenly chosen, the first and the last among them where two fit
        kept = np.unique(np.linspace(0, len(sizes) - 1, count).round().astype(int)).tolist()
        if sizes[kept].sum() <= max_bytes - base:
            break
    for p, (shown, of_pass) in enumerate(zip(data["passes"], matrices, strict=True)):
        shown |= {"matrices": of_pass if p in kept else dict.fromkeys(of_pass), "left_out": p not in kept}
    if len(kept) < len(passes):
        missing = f"Frame matrices of {len(kept)} of {len(passes)} passes are shown"
        data["notes"].append(f"{missing}: more would not fit in one page. Allow more with --max_mb.")
    return data


def _pass_data(views: Views, averages: int) -> dict[str, Any]:
    """One pass without its matrices: profiles and statistics by quantity, measures and kinds of heads."""
    quantities, view = {}, one_of(views)
    for name, of_quantity in views.items():
        keys = of_quantity.key_profiles()  # [N, H, F + averages]
        s = head_statistics(keys[..., : view.num_frames])
        statistics = {each: numbers(getattr(s, each)) for each in STATISTICS}
        statistics["max_frame"] = s.max_frame.tolist()
        profiles = code(_filled(keys, view.num_frames + averages), 2)
        quantities[name] = {"profiles": profiles, "statistics": statistics}
    logits, mass = (views.get(quantity) for quantity in QUANTITIES)
    measures = [
        {"name": m.name, "title": m.title, "unit": m.unit, "scale": m.scale, "values": numbers(m.values)}
        for m in measure_heads(logits, mass)
        if m.values is not None and np.isfinite(m.values).any()
    ]
    labels = head_kinds(logits, Thresholds())
    kinds = None
    if labels is not None and logits is not None:
        # The rule counts signs of all context; a head that turns from frame 0 is no anchor to a reader
        away = logits.key_profiles()[..., 0] < 0
        kinds = [
            [
                "positive" if k == ANCHOR and far else KINDS.get(int(k), "")
                for k, far in zip(*row, strict=True)
            ]
            for row in zip(labels, away, strict=True)
        ]
    about = {"label": words(view.pass_label, LONGEST["label"]), "noise": list(view.noise_frames)}
    return about | {"quantities": quantities, "measures": measures, "kinds": kinds}


def _matrices(views: Views, cell_bytes: int, averages: int) -> dict[str, Any]:
    """Frame matrices [N, H, F, F + averages] of each quantity, coded, of cells that any head has; or None."""
    coded: dict[str, Any] = dict.fromkeys(views)
    for name, view in views.items():
        if len(view.matrix_rows) == view.num_frames:
            found = [view.key_matrix(layer) for layer in view.layers]
            whole = np.stack([_filled(m, view.num_frames + averages) for m in found if m is not None])
            values = whole.reshape(*whole.shape[:2], -1)
            cells = np.flatnonzero(np.isfinite(values).any((0, 1)))
            if cells.size:
                of_cells = code(values[..., cells], cell_bytes, ABOUT[name][2])
                coded[name] = {"cells": cells.tolist()} | of_cells
    return coded


def _filled(values: np.ndarray, columns: int) -> np.ndarray:
    """Values [..., n] with NaN in further columns: [..., columns]."""
    more = [(0, 0)] * (values.ndim - 1) + [(0, columns - values.shape[-1])]
    return np.pad(values, more, constant_values=np.nan)


# --- Numbers and words as JSON


def to_json(data: Any) -> str:
    """Write compact JSON that no browser takes for markup; a NaN or an infinity in it would be an error."""
    found = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return found.replace("<", "\\u003c")


def size_of(data: Any) -> int:
    """Bytes of the JSON."""
    return len(to_json(data).encode())


def words(text: object, longest: int) -> str:
    """Cut what a cache says to a length, without letters that no page shows or that turn the text around."""
    # Control, format, private letters and halves of pairs: invisible, or they turn lines around
    text = str(text)[: longest + 1]
    shown = "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co") else c for c in text)
    return shown if len(text) <= longest else shown[: longest - 1] + "…"


def code(values: np.ndarray, cell_bytes: int, power: int = 1) -> dict[str, Any]:
    """Code values [..., n] as base64 of uint c: low + (high - low) (c / top)^power; top + 1 is NaN."""
    values = np.asarray(values, np.float64)
    # Every row [n] has its own ends; the highest code says absent
    there, top = np.isfinite(values), 256**cell_bytes - 2
    some = there.any(-1)
    low = np.where(some, np.where(there, values, np.inf).min(-1), 0.0)
    high = np.where(some, np.where(there, values, -np.inf).max(-1), 0.0)
    span = np.where(high > low, high - low, 1.0)[..., None]
    share = np.where(there, (np.where(there, values, 0.0) - low[..., None]) / span, 0.0)
    codes = np.where(there, np.rint(np.clip(share, 0, 1) ** (1 / power) * top), top + 1)
    coded = base64.b64encode(codes.astype(f"<u{cell_bytes}").tobytes()).decode()
    about = {"bytes": cell_bytes, "power": power, "low": numbers(low, 6), "high": numbers(high, 6)}
    return about | {"codes": coded}


def numbers(values: np.ndarray, digits: int = 4) -> Any:
    """Return nested lists with a few significant digits; None for NaN."""
    if values.ndim:
        return [numbers(row, digits) for row in values]
    return float(f"{values:.{digits}g}") if np.isfinite(values) else None


def keys_of(path: Path, passes: Sequence[Views]) -> dict[str, Any] | None:
    """Return by axis labels and marks of columns, and values [N, H, columns] by pass; None for frames."""
    cache = {} if path.is_dir() else load_cache(path)
    if cache.get("format") != "atlas" or "slot_frame" not in cache:
        return None
    along: dict[str, Any] = {}
    for axis in AXES:
        coded: list[dict[str, Any]] = [{} for _ in passes]
        # [N, H, columns] of every pass and quantity
        for of_pass, views in zip(coded, passes, strict=True):
            for q, view in views.items():
                columns = [key_columns(cache, layer, view.step, q, axis) for layer in view.layers]
                of_pass[q] = code(np.stack([one.values for one in columns]), 2)
        labels, marks = [list(one.labels) for one in columns], [list(one.marks) for one in columns]
        along[axis] = {"labels": labels, "marks": marks, "passes": coded}
    return along


def maps_of(path: str | Path, view: Profiles, max_bytes: int) -> dict[str, Any]:
    """Return the maps of the view's rollout in max_bytes, patches pooled to fit; else CacheError."""
    cache = load_cache(path, expect=("maps",))
    typed = MapsCache.from_dict(cache)
    # 1. Of the same rollout, by source, length, settings and edits
    ours, theirs = typed.config or {}, view.settings
    differing = ["source"] * (source_of(typed) != view.source) + ["length"] * (
        typed.num_frames != view.num_frames
    )
    differing += [n for n in sorted({*ours, *theirs}) if ours and theirs and ours.get(n) != theirs.get(n)]
    differing += ["interventions"] * (edits_in_words(typed.interventions) != view.edits)
    if differing:
        raise CacheError(f"{path} belongs to another rollout than the page, by its {', '.join(differing)}")
    if not (places := places_of(cache)):
        raise CacheError(f"{path} holds no maps of queries, only words; {remedy(path, ('maps',))}")
    # 2. Maps of every pass, layer, head and query
    found = [
        [[[open_map(cache, n, h, at.step, p) for p in places] for h in typed.heads] for n in typed.layers]
        for at in typed.passes()
    ]
    first = [by_layer[0][0] for by_layer in found]  # of each pass, a map per query
    values = np.array([[[[m.values for m in row] for row in rows] for rows in layers] for layers in found])
    # 3. Pool patches until they fit
    # base64 of a byte a value, and two numbers a row; values are [P, N, h, n, F, rows, columns]
    while (values.size * 4 // 3 + values[..., 0, 0, 0].size * 16) > max_bytes - 2000:
        if values.shape[-2:] == (1, 1):
            fewer = "keep fewer heads or queries, or allow more with --max_mb"
            raise CacheError(f"the maps of {path} do not fit in the page: {fewer}")
        values = pooled(values)
    return {
        "layers": typed.layers,
        "heads": typed.heads,
        "passes": [of_pass[0].pass_label for of_pass in first],
        "queries": places,
        "noise": [[list(seen.noise_frames) for seen in of_pass] for of_pass in first],
        "own": [seen.query_frames[0] for seen in first[0]],
        "unit": first[0][0].unit,
        "grid": [typed.rows, typed.columns],
        "rows": values.shape[-2],
        "columns": values.shape[-1],
        "coded": code(values.reshape(*values.shape[:4], -1), 1, 2),
    }


def pooled(values: np.ndarray) -> np.ndarray:
    """Mean of 2 x 2 patches [..., rows, columns], of fewer at an odd edge; NaN where all are."""
    for axis in (-2, -1):
        lines = np.moveaxis(values, axis, -1)
        if (n := lines.shape[-1]) > 1:
            pairs = _filled(lines, n + n % 2).reshape(*lines.shape[:-1], -1, 2)
            values = np.moveaxis(mean_without_nan(pairs), -1, axis)
    return values


def _data_uri(picture: np.ndarray) -> str:
    """Code a picture [height, width, 3] uint8 as a JPEG."""
    file = BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=75)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def _template() -> str:
    """The page without its data. Its policy allows its own script alone: no code from a cache, no request."""
    parts = {path.name: path.read_text(encoding="utf-8") for path in PARTS.iterdir()}
    style = "\n".join(parts[f"{name}.css"] for name in STYLES)
    # programs that draw SVG know no variables: drawing.css with the colours of the light theme in it
    light = dict(re.findall(r"--(\w+): (#\w+);", parts["theme.css"].partition("}")[0]))
    drawing = re.sub(r"var\(--(\w+)\)", lambda found: light[found[1]], parts["drawing.css"])
    script = "\n".join(parts[f"{name}.js"] for name in SCRIPTS).replace("DRAWING_STYLE", to_json(drawing), 1)
    # The policy of the page allows the script with this hash, and no other
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = parts["page.html"]
    for name, content in (("STYLE", style), ("SCRIPT", script), ("DIGEST", digest)):
        page = page.replace(f"{name}_GOES_HERE", content, 1)
    return page
