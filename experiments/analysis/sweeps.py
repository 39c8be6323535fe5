"""Heads over several atlases: a sweep of prompts and seeds of one model, or checkpoints of one family."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from experiments.analysis import first_frame, stats, taxonomy
from experiments.analysis.measures import head_statistics
from experiments.analysis.panels import HeadMap, LabelMap
from experiments.caches import load_cache, store
from experiments.caches.files import CacheError
from experiments.caches.view import Profiles, open_profiles, require_alike

MAKE = "python experiments/run_extraction_all.py --config_path configs/wan_mini.yaml --seeds 0 1"
PUBLISHED = tuple(f"self_forcing_dmd_{name}_21f.pt" for name in ("castle", "eagle"))
MEASURES = {"effect": "First-frame effect s", "delta": "First − middle"}

Views = Mapping[str, Profiles]
Measures = Mapping[str, np.ndarray]  # name -> [atlases, N, H], logits


# --- A sweep: what is the head's own, and what the video's


def open_sweep(
    folder: str | Path, published: str | Path, step: int | None = None
) -> tuple[dict[str, Profiles], str]:
    """Open mean logits of a folder's atlases, or published ones and a note. CacheError for fewer than two."""
    paths, note = sorted(Path(folder).glob("*.pt")), ""
    make = f"run: {MAKE} --output_dir {quote(str(store.from_root(folder)))}"
    if not paths and not Path(folder).is_dir():
        paths = [Path(published) / name for name in PUBLISHED]
        note = f"Shown: the published 21-frame atlases; {Path(folder).name} is not there; {make}"
    if len(paths) < 2:
        raise CacheError(f"{folder} has {len(paths)} atlases, a sweep needs two or more; {make}")
    caches = {path.stem: load_cache(path, expect=("atlas",)) for path in paths}
    views = {name: open_profiles(cache, step, "mean_logit") for name, cache in caches.items()}
    store.require_one_model(caches, "a sweep")  # heads are compared by index
    return views, note


def measures_of(views: Views) -> dict[str, np.ndarray]:
    """Return the first-frame effect s and first − middle of every atlas [atlases, N, H].

    The effect is NaN for an atlas without whole matrices.
    """
    effects, deltas = [], []
    for view in views.values():
        delta = head_statistics(view.profiles()).delta
        effect = np.full(delta.shape, np.nan)
        matrix = view.frame_matrices()
        if matrix is not None:
            effect = first_frame.first_frame_effect(matrix, view.block_sizes).effect
        deltas.append(delta)
        effects.append(effect)
    return {"effect": np.stack(effects), "delta": np.stack(deltas)}


def stability(values: np.ndarray) -> np.ndarray:
    """Return |mean| / standard deviation (n − 1) of values [atlases, N, H] -> [N, H]; NaN: no spread."""
    # Unlike a t value it does not grow with the number of atlases
    samples = np.moveaxis(np.asarray(values, np.float64), 0, -1)  # [N, H, atlases]
    deviations = samples - samples.mean(-1, keepdims=True)
    spread = np.sqrt(stats.varying(deviations, samples) / max(len(values) - 1, 1))
    return np.abs(samples.mean(-1)) / spread


def rank_correlations(values: np.ndarray) -> np.ndarray:
    """Return Spearman's ρ over heads between every pair of atlases, values [n, N, H] -> [n, n]."""
    rows = np.reshape(values, (len(values), -1))
    return np.array([[stats.spearman(a, b) for b in rows] for a in rows])


def sweep_maps(measures: Measures) -> list[HeadMap]:
    """Return mean, spread, and log₁₀ of |mean| / spread of every measure, layers × heads."""
    maps = []
    for name, values in measures.items():
        title, mean, spread = MEASURES[name], np.mean(values, 0), np.std(values, 0, ddof=1)
        ratio = stability(values)
        log_ratio = np.log10(np.where(ratio > 0, ratio, np.nan))  # 0 where mean and spread are alike
        maps += [
            HeadMap(f"{name}_mean", f"{title}, mean", "logits", "diverging", mean),
            HeadMap(f"{name}_spread", f"{title}, spread", "logits", "sequential", spread),
            HeadMap(
                f"{name}_stability",
                f"{title}, |mean| / spread",
                "log₁₀; red: above 1",
                "diverging",
                log_ratio,
            ),
        ]
    return maps


def sweep_title(measures: Measures) -> str:
    """Say how many heads have a mean above its spread over atlases."""
    counts = []
    for name, values in measures.items():
        stable = int((stability(values) > 1).sum())
        title = MEASURES[name]
        counts.append(f"{stable} keep their {title[0].lower()}{title[1:]}")
    atlases, *shape = next(iter(measures.values())).shape
    kept = " and ".join(counts)
    return f"Of {np.prod(shape)} heads {kept}: its mean exceeds its spread over {atlases} atlases"


def sweep_rows(measures: Measures) -> list[dict[str, Any]]:
    """Return a row per measure: rank correlations of atlases, and the heads that stay above their spread."""
    rows = []
    for name, values in measures.items():
        pairs = rank_correlations(values)[np.triu_indices(len(values), 1)]
        row = {
            "measure": MEASURES[name],
            "mean rank correlation": np.mean(pairs),
            "least": np.min(pairs),
            "largest": np.max(pairs),
            "pairs": len(pairs),
            "|mean| above spread": int((stability(values) > 1).sum()),
            "heads": values[0].size,
        }
        rows.append(row)
    return rows


# --- Checkpoints of one family: heads matched by index, each model a view of the same prompt


def moved(one: Profiles, other: Profiles) -> np.ndarray:
    """Return the RMS difference of mean logits, rows centred, over context cells of both, [layers, heads]."""
    same = ("layers", "num_heads", "num_frames", "quantity")
    require_alike(one, other, same, "heads of two models cannot be matched by index")
    # Own blocks are noise, and blocks may differ between the models
    cells = first_frame.context_cells(one.block_sizes) & first_frame.context_cells(other.block_sizes)
    difference = np.where(
        cells, first_frame.matrices(one).astype(np.float64) - first_frame.matrices(other), np.nan
    )
    difference -= stats.mean_without_nan(difference)[..., None]  # softmax ignores a constant of each row
    return np.sqrt(stats.mean_without_nan(difference.reshape(*difference.shape[:2], -1) ** 2))


def kind_maps(views: Views, thresholds: taxonomy.Thresholds, reference: str) -> list[LabelMap]:
    """Return a panel for each model's kinds of heads; marked are those of another kind in the reference."""
    labels = {
        name: taxonomy.kinds(first_frame.context_sign_rate(view), thresholds) for name, view in views.items()
    }
    panels = []
    for name, of_heads in labels.items():
        differs = None
        if name != reference:
            differs = of_heads != labels[reference]
        panels.append(LabelMap(name, taxonomy.KINDS, of_heads, differs=differs))
    return panels


def kinds_title(panels: Sequence[LabelMap], reference: str) -> str:
    """Say how many heads of the other models are of another kind than in the reference."""
    counts = {panel.title: int(panel.differs.sum()) for panel in panels if panel.differs is not None}
    labels = panels[0].labels
    if not counts or labels is None:
        return ""
    least, most = (choose(counts, key=counts.__getitem__) for choose in (min, max))
    title = (
        f"Of {labels.size} heads {counts[least]} ({least}) to {counts[most]} ({most}) are of another kind "
    )
    return f"{title}than in {reference}"


def moved_title(distances: Sequence[HeadMap], reference: str) -> str:
    """Say which model's heads are farthest from the reference's, and which nearest."""
    shown = [(panel.name, panel.values) for panel in distances if panel.values is not None]
    means = {name: float(np.nanmean(values)) for name, values in shown}
    near, far = (choose(means, key=means.__getitem__) for choose in (min, max))
    title = f"Heads differ from {reference} by {means[near]:.2f} logits on average in {near}, "
    return f"{title}by {means[far]:.2f} in {far}"


def model_rows(
    effects: Mapping[str, np.ndarray], kinds_of: Sequence[LabelMap], distances: Sequence[HeadMap]
) -> list[dict[str, Any]]:
    """Return a row per model: first-frame effect, kinds of heads, how far they moved."""
    labels = {panel.title: panel.labels for panel in kinds_of}
    moves = {panel.name: panel.values for panel in distances}
    rows = []
    for name, effect in effects.items():
        row = {
            "model": name,
            "mean of s": np.nanmean(effect),
            "above 1": (effect > 1).sum(),
            "heads": effect.size,
        }
        of_heads = labels.get(name)
        if of_heads is not None:
            row |= {word: (of_heads == kind).sum() for kind, word in taxonomy.KINDS.items()}
        distance = moves.get(name)
        if distance is not None:
            row["moved by"] = np.nanmean(distance)
        rows.append(row)
    return rows
