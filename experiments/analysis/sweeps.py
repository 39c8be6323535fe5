"""Heads over a sweep, atlases of the same model for several prompts and seeds: what is the head's own, and
what the video's."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.analysis.effects import spearman
from experiments.analysis.first_frame import first_frame_effect
from experiments.analysis.measures import head_statistics
from experiments.analysis.panels import HeadMap, LabelMap
from experiments.analysis.taxonomy import KINDS, Thresholds, context_sign_rate, kinds
from experiments.caches import load_cache
from experiments.caches.files import CacheError
from experiments.caches.view import Profiles, open_profiles
from wan.blocks import earlier_block

# --- Heads over a sweep, atlases of the same model for several prompts and seeds: what is the head's own, and
MAKE = "python experiments/run_extraction_all.py --prompts FILE --seeds 0 1 --output_dir cache/sweep"
PUBLISHED = tuple(f"self_forcing_dmd_{name}_21f.pt" for name in ("castle", "eagle"))
MEASURES = {"effect": "Effect s", "delta": "First − middle"}

Views = Mapping[str, Profiles]
Measures = Mapping[str, np.ndarray]  # name -> [atlases, N, H], logits


def open_sweep(
    folder: str | Path, published: str | Path, step: int | None = None
) -> tuple[dict[str, Profiles], str]:
    """Mean logits of every atlas of a folder by its name, and a note where published ones stand in for it.

    Raises CacheError for fewer than two atlases, or where they differ in model, heads, blocks, pass or in how
    many averages of gone frames their keys have.
    """
    paths, note = sorted(Path(folder).glob("*.pt")), ""
    if not paths and not Path(folder).is_dir():
        paths = [Path(published) / name for name in PUBLISHED]
        note = f"Shown: the published 21-frame atlases; {Path(folder).name} is not there, made by: {MAKE}"
    if len(paths) < 2:
        raise CacheError(f"{folder} has {len(paths)} atlases, a sweep needs two or more; run: {MAKE}")
    views = {
        path.stem: open_profiles(load_cache(path, expect=("atlas",)), step, "mean_logit") for path in paths
    }
    (first, one), *others = views.items()
    for name, view in others:
        for what in ("model", "layers", "num_heads", "block_sizes", "step", "query_frames", "num_averages"):
            if (mine := getattr(view, what)) != (theirs := getattr(one, what)):
                raise CacheError(f"{name} and {first} are not of one sweep: {what} {mine} and {theirs}")
    return views, note


def measures_of(views: Views) -> dict[str, np.ndarray]:
    """First-frame effect s and first − middle of every atlas [atlases, N, H] in logits; s is NaN where an
    atlas holds no whole matrices."""
    effects, deltas = [], []
    for view in views.values():
        profiles, matrix = view.profiles(), view.frame_matrices()
        deltas.append(head_statistics(profiles).delta)
        none = np.full(profiles.shape[:2], np.nan)
        effects.append(none if matrix is None else first_frame_effect(matrix, view.block_sizes).effect)
    return {"effect": np.stack(effects), "delta": np.stack(deltas)}


def mean_and_spread(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (n − 1) over the first axis, the atlases."""
    return np.mean(values, 0), np.std(values, 0, ddof=1)


def stability(values: np.ndarray) -> np.ndarray:
    """|mean| / spread of values [atlases, N, H] -> [N, H]: above 1 a head differs from 0 by more than it
    varies. NaN where it does not vary."""
    mean, spread = mean_and_spread(values)
    return np.abs(mean) / np.where(spread > 0, spread, np.nan)


def rank_correlations(values: np.ndarray) -> np.ndarray:
    """Spearman's ρ over heads between every pair of atlases, values [n, N, H] -> [n, n]."""
    rows = np.reshape(values, (len(values), -1))
    return np.array([[spearman(a, b) for b in rows] for a in rows])


def sweep_maps(measures: Measures) -> list[HeadMap]:
    """Mean, spread, and log₁₀ of |mean| / spread of every measure, layers × heads."""
    maps = []
    for name, values in measures.items():
        mean, spread = mean_and_spread(values)
        title, log_ratio = MEASURES[name], np.log10(stability(values))  # 0 where mean and spread are alike
        maps += [
            HeadMap(f"{name}_mean", f"{title}: mean", "logits", "diverging", mean),
            HeadMap(f"{name}_spread", f"{title}: spread", "logits", "sequential", spread),
            HeadMap(f"{name}_stability", f"{title}: |mean| / spread", "log₁₀", "diverging", log_ratio),
        ]
    return maps


def head_profiles(views: Views, layer: int, head: int) -> np.ndarray:
    """A head's profile in every atlas [atlases, F + averages], in logits."""
    return np.stack([view.key_profile(layer)[head] for view in views.values()])


def sweep_lines(views: Views, measures: Measures) -> str:
    """The atlases, rank correlations between them, and the heads that stay above their spread."""
    lines = [f"{len(views)} atlases: {', '.join(views)}"]
    for name, values in measures.items():
        pairs = rank_correlations(values)[np.triu_indices(len(values), 1)]
        above = int((stability(values) > 1).sum())
        lines.append(
            f"{MEASURES[name]}: rank correlation over heads {np.mean(pairs):.3f} "
            f"({np.min(pairs):.3f} to {np.max(pairs):.3f}, {len(pairs)} pairs); "
            f"|mean| above spread in {above} of {values[0].size} heads"
        )
    return "\n".join(lines)


# --- Checkpoints of one family side by side: heads matched by index, each model a view of the same prompt
def effects(views: Mapping[str, Profiles]) -> dict[str, np.ndarray]:
    """First-frame effect s [layers, heads] of every model, in logits."""
    return {name: first_frame_effect(matrices(view), view.block_sizes).effect for name, view in views.items()}


def moved(one: Profiles, other: Profiles) -> np.ndarray:
    """How far each head moved, [layers, heads] in logits.

    RMS difference of mean logits over the cells that are context in both, each row without its mean there,
    which softmax ignores.

    Raises CacheError where layers, heads or frames differ.
    """
    same = ("layers", "num_heads", "num_frames", "quantity")
    if differ := [name for name in same if getattr(one, name) != getattr(other, name)]:
        raise CacheError(f"the models differ in {', '.join(differ)}: their heads cannot be matched by index")
    cells = earlier_block(one.block_sizes).numpy() & earlier_block(other.block_sizes).numpy()
    pair = [np.where(cells, matrices(view).astype(np.float64), np.nan) for view in (one, other)]
    both = np.isfinite(pair[0]) & np.isfinite(pair[1])
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # rows without such a cell
        centred = [np.where(both, values, np.nan) for values in pair]
        centred = [values - np.nanmean(values, -1, keepdims=True) for values in centred]
        return np.sqrt(np.nanmean((centred[0] - centred[1]) ** 2, (-2, -1)))


def matrices(view: Profiles) -> np.ndarray:
    """Mean logits [layers, heads, F, F] of a view. CacheError for a cache of profiles alone."""
    found = view.frame_matrices()
    if found is None:
        raise CacheError("this cache has no frame matrices: models are compared cell by cell")
    return found


def effect_maps(values: Mapping[str, np.ndarray]) -> list[HeadMap]:
    """A panel for each model's effects."""
    return [HeadMap(name, name, "logits", "diverging", effect) for name, effect in values.items()]


def moved_maps(reference: Profiles, others: Mapping[str, Profiles], name: str) -> list[HeadMap]:
    """A panel for each model: how far its heads are from the reference's."""
    return [
        HeadMap(other, f"{other} against {name}", "logits", "sequential", moved(reference, view))
        for other, view in others.items()
    ]


def kind_maps(views: Mapping[str, Profiles], thresholds: Thresholds, reference: str) -> list[LabelMap]:
    """A panel for each model's kinds of heads; marked are those that are another kind in the reference."""
    labels = {name: kinds(context_sign_rate(view), thresholds) for name, view in views.items()}
    return [
        LabelMap(name, KINDS, found, differs=None if name == reference else found != labels[reference])
        for name, found in labels.items()
    ]


def summary(
    values: Mapping[str, np.ndarray], maps: Sequence[LabelMap], distances: Mapping[str, np.ndarray]
) -> str:
    """A line per model: first-frame effect, kinds of heads, how far they moved."""
    kinds_of = {one.title: one.labels for one in maps}
    lines = []
    for name, effect in values.items():
        line = (
            f"{name:>16}: s mean {np.nanmean(effect):+.2f}, above 1 for {(effect > 1).sum()} of {effect.size}"
        )
        if (labels := kinds_of.get(name)) is not None:
            line += "; " + ", ".join(f"{(labels == kind).sum()} {word}" for kind, word in KINDS.items())
        if name in distances:
            line += f"; moved by {np.nanmean(distances[name]):.2f}"
        lines.append(line)
    return "\n".join(lines)
