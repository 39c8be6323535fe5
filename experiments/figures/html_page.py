"""All layers, heads and passes of a cache as one HTML file that opens from disk: no server, no network.

    python experiments/layer_page.py cache/published/self_forcing_dmd_eagle_21f.pt

This module makes the numbers, as JSON, and the files of page/ draw them. notebooks/README.md describes it.
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

from experiments.analysis import axes, taxonomy
from experiments.analysis.measures import MEASURES, head_statistics, measure_heads, open_quantity
from experiments.analysis.stats import mean_without_nan
from experiments.analysis.video_maps import open_map, places_of
from experiments.caches import files, load_cache, outputs, store, titles
from experiments.caches.formats import MapsCache
from experiments.caches.legacy import UNRECORDED
from experiments.caches.view import (
    Profiles,
    average_names,
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
# What the page says of a kind of heads, beside it
SIGNS = "q·k is positive for {} % of the pairs of a query frame and a frame of an earlier block"
KIND_MEANINGS = {
    "anchor": SIGNS.format("at least {anchor:.0f}") + ", and its mean at frame 0 is not negative",
    "wave": SIGNS.format("{veil:.0f} to {anchor:.0f}"),
    "veil": SIGNS.format("at most {veil:.0f}"),
    "positive": SIGNS.format("at least {anchor:.0f}") + ", but its mean at frame 0 is negative",
}
LONGEST = {"model": 120, "source": 600, "note": 400, "label": 120}  # letters of what a cache says in words
MOST_NOTES = 20
MAX_MB = 16.0  # both quantities of five passes of 30 x 12 heads x 72 frames are 14 MB

PARTS = Path(__file__).with_name("page")
STYLES = ("theme", "page", "drawing")
SCRIPTS = ("data", "draw", "heads", "detail", "keys", "compare", "on_video", "export", "controls")

Views = dict[str, Profiles]  # by quantity


def save_page(path: str | Path, source: str | Path, overwrite: bool = False, **options: Any) -> Path:
    """Write the page of a cache file or a folder of layerN.pt, whole or not at all; options of page_of.

    CacheError, unless overwrite, for a file there that this program did not write, or that was changed since.
    """
    outputs.require_redrawable(path, overwrite)
    content = outputs.with_checksum(page_of(source, **options).encode())
    with files.replacing(path) as file:
        file.write(content)
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
    view = any_quantity(passes[0])
    pictures, note = pictures_for(source, video, view.num_frames)
    thumbnails = [jpeg_uri(picture) for picture in pictures or ()]
    notes = []
    if note:
        notes.append(note)
    # 2. What is left of max_mb after the program and the pictures: maps and a second cache take half at most
    page = page_without_data()
    room = int(max_mb * 1e6) - len(page.encode()) - size_of(thumbnails)
    maps_data = other = None
    if maps is not None:
        maps_data = maps_of(maps, view, room // 2)
    if compare is not None:
        other = compared_cache(compare, passes, room // 2)
    keys = keys_of(source, passes)
    # 3. Matrices get what is left then
    data = fit(passes, room - size_of(maps_data) - size_of(keys) - size_of(other), notes)
    if other is not None:
        add_differences(data["passes"], other["passes"])
    data |= {"thumbnails": thumbnails, "maps": maps_data, "keys": keys, "other": other, "name": source.stem}
    return page.replace("DATA_GOES_HERE", to_json(data), 1)


def any_quantity(views: Views) -> Profiles:
    """Return a view of a pass, of whichever quantity the cache holds."""
    return next(iter(views.values()))


def compared_cache(path: str | Path, page_passes: Sequence[Views], max_bytes: int) -> dict[str, Any]:
    """Return the data of a second cache of the same layers, heads, frames and passes; else CacheError."""
    page_view = any_quantity(page_passes[0])
    layers = any_quantity(open_passes_of(Path(path))[0]).layers
    passes = open_passes_of(Path(path), [layer for layer in page_view.layers if layer in layers])
    view = any_quantity(passes[0])
    # Differences are of the same heads: other weights of the model may be compared, another model may not
    sizes = ["layers", "num_heads", "num_frames", "block_sizes", "num_averages"]
    if UNRECORDED["model"] not in (view.model, page_view.model):
        sizes.insert(0, "model")
    require_alike(view, page_view, sizes, f"{path} cannot be compared with the page's cache")
    for page_views, views in zip(page_passes, passes, strict=False):  # a pass beside the one of its number
        at, page_at = any_quantity(views).timestep, any_quantity(page_views).timestep
        if at is not None and page_at is not None and at != page_at:
            raise files.CacheError(
                f"{path} has a pass at t = {at:g} where the page's cache has t = {page_at:g}"
            )
    return fit(passes, max_bytes) | {"name": Path(path).stem}


def add_differences(passes: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> None:
    """Add the differences to the second cache's measures, pass by pass."""
    for shown, other in zip(passes, others, strict=False):
        other_values = {measure["name"]: measure["values"] for measure in other["measures"]}
        for measure in list(shown["measures"]):
            if measure["name"] not in other_values:
                continue
            values = np.array(measure["values"], float) - np.array(other_values[measure["name"]], float)
            difference = {
                "unit": measure["unit"],
                "values": numbers(values),
                "name": f"{measure['name']}_difference",
                "title": f"{measure['title']}, A − B",
                "scale": "diverging",
            }
            shown["measures"].append(difference)


def open_passes_of(path: Path, layers: Sequence[int] | None = None) -> list[Views]:
    """Open the passes of a cache file, or of a folder of layerN.pt that belong together, as if one cache."""
    caches = list(store.open_layers(path).values()) if path.is_dir() else [load_cache(path)]
    passes: list[Views] = []
    for quantity in QUANTITIES:
        passes_by_cache = []
        for cache in caches:
            view = open_quantity(cache, None, quantity)
            if view is not None:
                passes_by_cache.append(open_passes(cache, view))
        for number, views in enumerate(zip(*passes_by_cache, strict=False)):
            if number == len(passes):
                passes.append({})
            passes[number][quantity] = joined(views, layers)
    if not passes:
        raise files.CacheError(f"{path} holds neither mean logits nor mass per frame")
    return passes


def joined(views: Sequence[Profiles], layers: Sequence[int] | None) -> Profiles:
    """Join views of a pass, which hold a layer or several each, to one view of these layers, None: of all."""
    by_layer = {layer: view for view in views for layer in view.layers}
    return replace(
        views[0],
        layers=tuple(layers or sorted(by_layer)),
        num_averages=max(view.num_averages for view in views),
        _read=lambda layer: by_layer[layer].values(layer),
    )


# --- Profiles, statistics, measures and frame matrices of every pass


def fit(passes: Sequence[Views], max_bytes: int, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the page's data in max_bytes of JSON: matrices of 2 bytes or 1 a cell, then of fewer passes."""
    view = any_quantity(passes[0])
    averages = max(view.num_averages for views in passes for view in views.values())
    source = view.source
    if view.edits:
        source = f"edited: {view.edits}. {source}"
    limits = taxonomy.Thresholds()
    percent = {"anchor": 100 * limits.anchor_min, "veil": 100 * limits.veil_max}
    quantities = {
        name: {"label": LABELS[name], "unit": ABOUT[name][0], "name": ABOUT[name][1]} for name in passes[0]
    }
    data: dict[str, Any] = {
        "model": words(view.model, LONGEST["model"]),
        "title": words(short_source(view.source), LONGEST["source"]),
        "subtitle": words(beside_title(view), LONGEST["source"]),
        "source": words(source, LONGEST["source"]),
        "notes": [words(note, LONGEST["note"]) for note in [*view.notes[:MOST_NOTES], *notes]],
        "layers": list(view.layers),
        "num_heads": view.num_heads,
        "num_frames": view.num_frames,
        "averages": list(average_names(averages)),  # columns after the frames
        "blocks": list(view.block_sizes),
        "query_frames": list(view.query_frames),
        "quantities": quantities,
        "meanings": {measure.name: measure.meaning for measure in MEASURES},
        "kinds": {name: meaning.format(**percent) for name, meaning in KIND_MEANINGS.items()},
        "passes": [pass_data(views, averages) for views in passes],
    }
    # 1. What cannot be left out
    base = size_of(data) + 302  # for one more note
    if base > max_bytes:
        profiles = f"profiles and measures of {len(passes)} passes take {base / 1e6:.1f} MB"
        raise files.CacheError(f"{profiles}, more than the page has; allow more with --max_mb")
    # 2. Two bytes a cell, or one
    for cell_bytes in (2, 1):
        matrices = [coded_matrices(views, cell_bytes, averages) for views in passes]
        sizes = np.array([size_of(of_pass) for of_pass in matrices])
        if base + sizes.sum() <= max_bytes:
            break
    # 3. Fewer passes, evenly chosen, the first and the last among them where two fit
    for count in range(len(sizes), -1, -1):
        chosen = np.unique(np.linspace(0, len(sizes) - 1, count).round().astype(int)).tolist()
        if sizes[chosen].sum() <= max_bytes - base:
            break
    for number, (shown, of_pass) in enumerate(zip(data["passes"], matrices, strict=True)):
        shown["left_out"] = number not in chosen
        shown["matrices"] = dict.fromkeys(of_pass) if shown["left_out"] else of_pass
    if len(chosen) < len(passes):
        missing = f"Frame matrices of {len(chosen)} of {len(passes)} passes are shown"
        data["notes"].append(f"{missing}: more would not fit in one page. Allow more with --max_mb.")
    return data


def beside_title(view: Profiles) -> str:
    """Return what the title leaves out: edits, weights, cache policy, and a long prompt."""
    parts = []
    if view.edits:
        parts.append(f"Edited: {view.edits}")
    if short_source(view.source).count("…") > view.source.count("…"):  # the title has cut the prompt
        parts.append(view.source)
    else:
        kind, _, file = view.source.partition(" (")[2].partition("), ")[0].partition(": ")
        parts.append(f"Weights: {file} ({kind})" if file else f"Weights: {kind}")
    policy = titles.policy_in_words(view.settings, len(view.block_sizes))
    if policy:
        parts.append(policy[0].upper() + policy[1:])
    return ". ".join(parts)


def pass_data(views: Views, averages: int) -> dict[str, Any]:
    """One pass without its matrices: profiles and statistics by quantity, measures and kinds of heads."""
    num_frames = any_quantity(views).num_frames
    # 1. Profiles [N, H, F + averages] and statistics [N, H]
    quantities = {}
    for name, view in views.items():
        profiles = view.key_profiles()
        statistics = head_statistics(profiles[..., :num_frames])
        by_name = {statistic: numbers(getattr(statistics, statistic)) for statistic in STATISTICS}
        by_name["max_frame"] = statistics.max_frame.tolist()
        coded = code(padded(profiles, num_frames + averages), 2)
        quantities[name] = {"profiles": coded, "statistics": by_name}
    # 2. Measures that any head has
    logits, mass = views.get("mean_logit"), views.get("mass")
    measures = []
    for measure in measure_heads(logits, mass):
        if measure.values is not None and np.isfinite(measure.values).any():
            shown = {"name": measure.name, "title": measure.title, "unit": measure.unit}
            measures.append(shown | {"scale": measure.scale, "values": numbers(measure.values)})
    return {
        "label": words(any_quantity(views).pass_label, LONGEST["label"]),
        "noise": list(any_quantity(views).noise_frames),
        "quantities": quantities,
        "measures": measures,
        "kinds": kind_names(logits),
    }


def kind_names(logits: Profiles | None) -> list[list[str]] | None:
    """Return the kind of every head [N][H] in words, "" for none; None without logits of context."""
    kinds = taxonomy.head_kinds(logits, taxonomy.Thresholds())
    if kinds is None or logits is None:
        return None
    # The rule counts signs of all context; a head that turns from frame 0 is no anchor to a reader
    turns_away = logits.key_profiles()[..., 0] < 0
    names = [[taxonomy.KINDS.get(int(kind), "") for kind in row] for row in kinds]
    for layer, head in zip(*np.nonzero((kinds == taxonomy.ANCHOR) & turns_away), strict=True):
        names[layer][head] = "positive"
    return names


def coded_matrices(views: Views, cell_bytes: int, averages: int) -> dict[str, Any]:
    """Frame matrices [N, H, F, F + averages] of each quantity, coded, of cells that any head has; or None."""
    coded: dict[str, Any] = dict.fromkeys(views)
    for name, view in views.items():
        if len(view.matrix_rows) != view.num_frames:
            continue
        matrices = [view.key_matrix(layer) for layer in view.layers]
        columns = view.num_frames + averages
        whole = np.stack([padded(matrix, columns) for matrix in matrices if matrix is not None])
        values = whole.reshape(*whole.shape[:2], -1)
        cells = np.flatnonzero(np.isfinite(values).any((0, 1)))
        if cells.size:
            power = ABOUT[name][2]
            coded[name] = {"cells": cells.tolist()} | code(values[..., cells], cell_bytes, power)
    return coded


def padded(values: np.ndarray, columns: int) -> np.ndarray:
    """Values [..., n] with NaN in further columns: [..., columns]."""
    widths = [(0, 0)] * (values.ndim - 1) + [(0, columns - values.shape[-1])]
    return np.pad(values, widths, constant_values=np.nan)


# --- Numbers and words as JSON


def to_json(data: Any) -> str:
    """Write compact JSON that no browser takes for markup; a NaN or an infinity in it would be an error."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def size_of(data: Any) -> int:
    """Bytes of the JSON."""
    return len(to_json(data).encode())


def words(text: object, longest: int) -> str:
    """Cut what a cache says to a length, without letters that no page shows or that turn the text around."""
    letters = list(str(text)[: longest + 1])
    for place, letter in enumerate(letters):
        # Control, format, private letters and halves of pairs: invisible, or they turn lines around
        if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co"):
            letters[place] = "\ufffd"
    if len(letters) > longest:
        letters[longest - 1 :] = "…"
    return "".join(letters)


def code(values: np.ndarray, cell_bytes: int, power: int = 1) -> dict[str, Any]:
    """Code values [..., n] as base64 of uint c: low + (high - low) (c / top)^power; top + 1 is NaN."""
    values = np.asarray(values, np.float64)
    # 1. Every row [n] has its own ends
    finite, top = np.isfinite(values), 256**cell_bytes - 2
    any_finite = finite.any(-1)
    low = np.where(any_finite, np.where(finite, values, np.inf).min(-1), 0.0)
    high = np.where(any_finite, np.where(finite, values, -np.inf).max(-1), 0.0)
    span = np.where(high > low, high - low, 1.0)[..., None]
    # 2. The highest code says absent
    share = np.where(finite, (np.where(finite, values, 0.0) - low[..., None]) / span, 0.0)
    codes = np.where(finite, np.rint(np.clip(share, 0, 1) ** (1 / power) * top), top + 1)
    return {
        "bytes": cell_bytes,
        "power": power,
        "low": numbers(low, 6),
        "high": numbers(high, 6),
        "codes": base64.b64encode(codes.astype(f"<u{cell_bytes}").tobytes()).decode(),
    }


def numbers(values: np.ndarray, digits: int = 4) -> Any:
    """Return nested lists with a few significant digits; None for NaN."""
    if values.ndim:
        return [numbers(row, digits) for row in values]
    if not np.isfinite(values):
        return None
    return float(f"{values:.{digits}g}")


# --- Keys of cache policies, and maps of patches


def keys_of(path: Path, passes: Sequence[Views]) -> dict[str, Any] | None:
    """Return by axis labels and marks of columns, and values [N, H, columns] by pass; None for frames."""
    if path.is_dir():
        return None
    cache = load_cache(path)
    if cache["format"] != "atlas" or "slot_frame" not in cache:
        return None
    by_axis = {}
    for axis in axes.AXES:
        coded = list[dict[str, Any]]()
        for views in passes:
            coded.append({})
            for quantity, view in views.items():
                columns = [axes.key_columns(cache, layer, view.step, quantity, axis) for layer in view.layers]
                values = np.stack([of_layer.values for of_layer in columns])  # [N, H, columns]
                coded[-1][quantity] = code(values, 2)
        labels = [list(of_layer.labels) for of_layer in columns]  # the same in every pass
        marks = [list(of_layer.marks) for of_layer in columns]
        by_axis[axis] = {"labels": labels, "marks": marks, "passes": coded}
    return by_axis


def maps_of(path: str | Path, view: Profiles, max_bytes: int) -> dict[str, Any]:
    """Return the maps of the view's rollout in max_bytes, patches pooled to fit; else CacheError."""
    cache = load_cache(path, expect=("maps",))
    typed = MapsCache.from_dict(cache)
    # 1. Of the same rollout, by source, length, settings and edits
    differing = differing_fields(typed, view)
    if differing:
        raise files.CacheError(
            f"{path} belongs to another rollout than the page, by its {', '.join(differing)}"
        )
    places = places_of(cache)
    if not places:
        raise files.CacheError(
            f"{path} holds no maps of queries, only words; {store.remedy(path, ('maps',))}"
        )
    # 2. Maps of every pass, layer, head and query: values are [P, N, h, n, F, rows, columns]
    maps = [
        [
            [[open_map(cache, layer, head, at.step, place) for place in places] for head in typed.heads]
            for layer in typed.layers
        ]
        for at in typed.passes()
    ]
    by_query = [of_pass[0][0] for of_pass in maps]  # of each pass, the maps of the first layer and head
    values = np.array(
        [[[[item.values for item in row] for row in rows] for rows in of_pass] for of_pass in maps]
    )
    # 3. Pool patches until they fit: base64 of a byte a value, and two numbers a row
    while values.size * 4 // 3 + values[..., 0, 0, 0].size * 16 > max_bytes - 2000:
        if values.shape[-2:] == (1, 1):
            fewer = "keep fewer heads or queries, or allow more with --max_mb"
            raise files.CacheError(f"the maps of {path} do not fit in the page: {fewer}")
        values = pooled(values)
    return {
        "layers": typed.layers,
        "heads": typed.heads,
        "covers": f"layers {titles.ranges(typed.layers)}; heads {titles.ranges(typed.heads)}",
        "passes": [queries[0].pass_label for queries in by_query],
        "queries": places,
        "noise": [[list(item.noise_frames) for item in queries] for queries in by_query],
        "own": [item.query_frames[0] for item in by_query[0]],
        "unit": by_query[0][0].unit,
        "grid": [typed.rows, typed.columns],
        "rows": values.shape[-2],
        "columns": values.shape[-1],
        "coded": code(values.reshape(*values.shape[:4], -1), 1, 2),
    }


def differing_fields(maps: MapsCache, view: Profiles) -> list[str]:
    """Return by what maps and a view are of different rollouts: source, length, settings, edits."""
    differing = []
    if source_of(maps) != view.source:
        differing.append("source")
    if maps.num_frames != view.num_frames:
        differing.append("length")
    if maps.config and view.settings:
        names = sorted({*maps.config, *view.settings})
        differing += [name for name in names if maps.config.get(name) != view.settings.get(name)]
    if (maps.interventions or {}).get("hash", "") != view.edits_hash:
        differing.append("interventions")
    return differing


def pooled(values: np.ndarray) -> np.ndarray:
    """Mean of 2 x 2 patches [..., rows, columns], of fewer at an odd edge; NaN where all are."""
    for axis in (-2, -1):
        lines = np.moveaxis(values, axis, -1)
        n = lines.shape[-1]
        if n > 1:
            pairs = padded(lines, n + n % 2).reshape(*lines.shape[:-1], -1, 2)
            values = np.moveaxis(mean_without_nan(pairs), -1, axis)
    return values


# --- The page around the data


def jpeg_uri(picture: np.ndarray) -> str:
    """Code a picture [height, width, 3] uint8 as a JPEG."""
    file = BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=75)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def page_without_data() -> str:
    """The page without its data. Its policy allows its own script alone: no code from a cache, no request."""
    parts = {path.name: path.read_text(encoding="utf-8") for path in PARTS.iterdir()}
    style = "\n".join(parts[f"{name}.css"] for name in STYLES)
    # 1. Programs that draw SVG know no variables: drawing.css with the colours of the light theme in it
    light = dict(re.findall(r"--(\w+): (#\w+);", parts["theme.css"].partition("}")[0]))
    drawing = re.sub(r"var\(--(\w+)\)", lambda variable: light[variable[1]], parts["drawing.css"])
    script = "\n".join(parts[f"{name}.js"] for name in SCRIPTS).replace("DRAWING_STYLE", to_json(drawing), 1)
    # 2. The policy of the page allows the script with this hash, and no other
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = parts["page.html"]
    contents = {"STYLE": style, "SCRIPT": script, "DIGEST": digest, "CHECKSUM": outputs.NO_CHECKSUM}
    for name, content in contents.items():
        page = page.replace(f"{name}_GOES_HERE", content, 1)
    return page
