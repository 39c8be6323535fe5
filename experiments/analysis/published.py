"""Published facts of the real model, and how heads agree with published curves."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.analysis import stats
from experiments.analysis.first_frame import first_frame_effect
from experiments.analysis.measures import head_statistics
from experiments.analysis.panels import HeadPanel
from experiments.caches.files import CacheError, located
from experiments.caches.titles import ranges
from experiments.caches.view import Profiles
from wan.errors import library_reads
from wan.files import MAX_COUNT, read_text

FOLDER = Path("cache/published")
FIGURE4_CSV = "deep_forcing_figure4_digitised.csv"  # the paper's Figure 4, by key frame
FIGURE4_MODEL = "Wan2.1-T2V-1.3B"
FIGURE4_HEADS = ((1, 1, "L1H1"), (5, 10, "L5H10"))  # layer, head, label of its curves; counted from 0
DEFAULT_ATLAS = "self_forcing_dmd_eagle_21f.pt"  # what a notebook shows before anything was captured
DEFAULT_CACHE = "cache/attention_cache_figure4.pt"
HEAD_LABELS_CSV = "pyramid_forcing_head_labels.csv"  # 1 anchor, -1 wave, 2 veil
STATIC_HEADS_CSV = "forcing_kv_static_heads.csv"  # 1 static, 0 dynamic


class Curve(NamedTuple):
    """A curve read off a figure; both [F]."""

    values: np.ndarray  # NaN where the figure shows nothing
    clipped: np.ndarray  # bool: the figure ends there, the true value lies further out


def read_curves(path: str | Path, num_frames: int | None = None) -> dict[str, Curve]:
    """Read curves by name from a CSV with columns key_frame, clipped (names cut off) and one a curve."""
    text = read_text(path, error=CacheError)
    with library_reads(f"{path}: a table of curves with a column key_frame", CacheError):
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
        frames = [int(row["key_frame"]) for row in rows]
        # A CSV of a figure may leave frames out: then the cache says how many there are.
        whole = sorted(frames) == list(range(len(frames)))
        length = num_frames if num_frames and not whole else max(frames) + 1
        if len(set(frames)) < len(frames) or not 0 <= min(frames) <= max(frames) < min(length, MAX_COUNT):
            raise ValueError(f"key_frame must count frames of 0..{length - 1}, each once")
        names = [name for name in rows[0] if name not in ("key_frame", "clipped")]
        header = next(csv.reader(io.StringIO(text, newline="")))
        is_ragged = any(None in row or None in row.values() for row in rows)
        if is_ragged or not names or len(set(header)) < len(header):
            raise ValueError("it names a column twice or no curve, or its rows are not of one length")
        curves = {name: Curve(np.full(length, np.nan), np.zeros(length, bool)) for name in names}
        for frame, row in zip(frames, rows, strict=True):
            for name in names:
                value = float(row[name] or "nan")
                if np.isinf(value) or "_" in row[name]:
                    raise ValueError(f"{row[name]} is no number of a figure")
                curves[name].values[frame] = value
            for name in (row.get("clipped") or "").split():
                curves[name].clipped[frame] = True
        return curves


def curves_for(
    view: Profiles, path: str | Path | None, model: str | None = None
) -> tuple[dict[str, Curve], str]:
    """Return the curves of a CSV, of a model, that fit a view; or none and a line that says why."""
    if path is None or not Path(path).is_file():
        why_not = "none was asked for" if path is None else f"{path} not found"
        return {}, f"Not compared with a published curve: {why_not}"
    curves = read_curves(path, view.num_frames)
    F = len(next(iter(curves.values())).values)
    # Each of these would draw the paper's curve over numbers of something else.
    reasons = {
        f"this run was edited: {view.edits}": bool(view.edits),
        f"they belong to {model}, this cache to {view.model}": model not in (None, view.model),
        f"they have {F} frames, this cache has {view.num_frames}": view.num_frames != F,
        f"they are mean logits, this is {view.quantity}": view.quantity != "mean_logit",
        "the queries of this cache see no earlier block": not view.context_frames,
    }
    for reason, applies in reasons.items():
        if applies:
            return {}, f"Not compared with the curves of {Path(path).name}: {reason}"
    return curves, ""


def heads_of(
    view: Profiles, heads: Sequence[tuple[int, int, str]] | str, count=2
) -> tuple[tuple[int, int, str], ...]:
    """Return (layer, head, label) as given, or of "auto" the paper's.

    In other models of "auto" those of largest s; of largest first − middle where a cache has no matrices.
    """
    if heads and not isinstance(heads, str):
        return tuple((layer, head, label) for layer, head, label in heads)
    if heads != "auto":
        raise CacheError(f'HEADS must be "auto" or a list of (layer, head, label), not {heads!r}')
    if view.model == FIGURE4_MODEL:
        return FIGURE4_HEADS
    # The heads of the largest first-frame effect; without matrices of the largest first - middle
    matrix = view.frame_matrices() if view.quantity == "mean_logit" else None
    effect = None if matrix is None else first_frame_effect(matrix, view.block_sizes).effect
    if effect is None or not np.isfinite(effect).any():
        effect = head_statistics(view.profiles()).delta
    # Heads without a value come last.
    order = np.argsort(-np.nan_to_num(effect, nan=-np.inf), axis=None, kind="stable")[:count]
    chosen = [(view.layers[i // view.num_heads], int(i % view.num_heads)) for i in order]
    return tuple((layer, head, f"L{layer}H{head}") for layer, head in chosen)


def path_of(name: str) -> Path:
    """Return the path of a published file: in the working folder, else in the project."""
    return Path(located(str(FOLDER / name)))


def cache_or_published(path: str | Path) -> tuple[Path, str]:
    """Return a cache's path; where a notebook's default was not made yet, the published eagle and a note."""
    path, published = Path(path), Path("..") / FOLDER / DEFAULT_ATLAS
    if path.is_file() or path != Path("..") / DEFAULT_CACHE or not published.is_file():
        return path, ""
    make = "bash experiments/quickstart.sh makes it from the miniature"
    return published, f"Shown: published data of the real model; {DEFAULT_CACHE} is not there, {make}"


def labels_for(view: Profiles, folder: str | Path = FOLDER) -> tuple[np.ndarray, np.ndarray] | None:
    """Return published kinds and locality [layers, H] for a view; None for another model or an edit."""
    if view.model != FIGURE4_MODEL or view.edits or not Path(folder).is_dir():
        return None
    files = {HEAD_LABELS_CSV: (1, -1, 2), STATIC_HEADS_CSV: (1, 0)}
    kinds, locality = (read_labels(Path(folder) / name, allowed) for name, allowed in files.items())
    if view.num_heads != kinds.shape[1] or max(view.layers) >= len(kinds):
        return None
    return kinds[list(view.layers)], locality[list(view.layers)]


def read_labels(path: str | Path, known: Sequence[int]) -> np.ndarray:
    """Read labels of heads [layers, H], one row per layer; lines that start with # are comments.

    CacheError for anything but rows of one length of the known labels.
    """
    lines = read_text(path, error=CacheError).splitlines()
    with library_reads(f"{path}: labels of heads", CacheError):
        labels = np.array([[*map(int, line.split(","))] for line in lines if line and line[0] != "#"])
        if not np.isin(labels, known).all() or labels.ndim != 2:
            raise ValueError(f"its rows are not of one length, of {', '.join(map(str, known))}")
    return labels


def compared_frames(view: Profiles, curve: Curve) -> list[int]:
    """Context frames of a view where the curve has a point that is not cut off."""
    return [f for f in view.context_frames if np.isfinite(curve.values[f]) and not curve.clipped[f]]


def rank_heads(views: Iterable[Profiles], curve: Curve) -> list[dict[str, Any]]:
    """Rank all heads of all views (passes of a cache, with the curve's frames), the best r first.

    r is NaN for a head without any variation; RMS is in the unit of the curve.
    """
    rows = []
    for view in views:
        frames = compared_frames(view, curve)
        # [N, H, n] and [n]
        profiles, values = view.profiles()[..., frames], curve.values[frames]  # [N, H, n], [n]
        r, rms = stats.pearson(profiles, values), stats.rms_difference(profiles, values)
        for i, head in np.ndindex(r.shape):
            place = {"layer": view.layers[i], "number": head, "pass": view.step}
            rows.append(place | {"r": float(r[i, head]), "RMS": float(rms[i, head])})
    rows.sort(key=lambda row: (np.isnan(row["r"]), -row["r"]))
    return [row | {"rank": rank} for rank, row in enumerate(rows, 1)]


def add_reference(
    panels: Iterable[HeadPanel], view: Profiles, curves: Mapping[str, Curve]
) -> list[HeadPanel]:
    """Return panels with the published curve of their label, and how well the two agree."""
    compared = []
    for panel in panels:
        curve = curves.get(panel.label)
        if curve is not None:
            frames = compared_frames(view, curve)
            pair = panel.profile[frames], curve.values[frames]
            summary = (
                f"r = {stats.pearson(*pair):.3f}, RMS {stats.rms_difference(*pair):.2f} over context frames"
            )
            summary += f" {ranges(frames)}"
            panel = panel._replace(reference=curve.values, clipped=curve.clipped, agreement=summary)
        compared.append(panel)
    return compared


def match_rows(
    views: Sequence[Profiles], heads: Iterable[tuple], curves: Mapping[str, Curve], step: int | None
) -> list[dict[str, Any]]:
    """Rank all heads for every curve: a row for its own, for those counted from 1, for the best three."""
    rows = []
    for label, curve in curves.items():
        ranking = rank_heads(views, curve)
        counts = {"of heads": len(ranking), "context frames": len(compared_frames(views[0], curve))}
        # 1. The head that the paper names. Papers count from 1 or from 0: both readings are ranked.
        named = [(layer, head) for layer, head, of_curve in heads if of_curve == label]
        readings = {"shown": named}
        if all(layer > 0 and head > 0 for layer, head in named):
            readings["if counted from 1"] = [(layer - 1, head - 1) for layer, head in named]
        for reading, places in readings.items():
            for layer, head in places:
                place = {"layer": layer, "number": head, "pass": step}
                ranked = [row for row in ranking if place.items() <= row.items()]
                row = ranked[0] if ranked else place
                rows.append({"curve": label, "head": reading} | row | counts)
        # 2. The three heads that are most like the curve.
        for row in ranking[:3]:
            rows.append({"curve": label, "head": f"best {row['rank']}"} | row | counts)
    return rows
