"""Checkpoints of one family side by side: heads matched by index, each model a view of the same prompt."""

import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.analysis.first_frame import first_frame_effect
from experiments.analysis.head_taxonomy import KINDS, Thresholds, context_sign_rate, kinds
from experiments.analysis.panels import HeadMap, LabelMap
from experiments.caches.errors import CacheError
from experiments.caches.view import Profiles
from wan.blocks import earlier_block


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
