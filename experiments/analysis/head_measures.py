"""Every measure of every head of an atlas, as maps layers × heads, and the kinds of heads beside published
ones."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.analysis import measures
from experiments.analysis import taxonomy as head_taxonomy
from experiments.analysis.first_frame import first_frame_effect, partial_r_squared
from experiments.analysis.first_frame_findings import log_mass_effect
from experiments.analysis.panels import (
    NO_CONTEXT,
    NO_LOGITS,
    NO_MASS,
    NO_MATRIX,
    NOT_IDENTIFIED,
    HeadMap,
    HeadPanel,
    LabelMap,
)
from experiments.analysis.published import FIGURE4_HEADS, FIGURE4_MODEL
from experiments.caches.files import CacheError
from experiments.caches.view import Profiles, open_profiles

# --- Every measure of every head of an atlas, as maps layers × heads, and the kinds of heads beside published
OTHER_MODEL = "published for another model"

NO_BANDS = (
    "RoPE bands: absent in this cache; capture them with: "
    "python experiments/run_extraction_all.py --rope_bands"
)


def open_quantity(cache: Mapping[str, Any], step: int | None, quantity: str) -> Profiles | None:
    """A view, or None where the cache does not hold the quantity."""
    try:
        view = open_profiles(cache, step, quantity)
        view.frame_profile(view.layers[0])
        return view
    except CacheError:
        return None


def measure_heads(logits: Profiles | None, mass: Profiles | None) -> list[HeadMap]:
    """All measures of experiments/analysis/measures.py for every head [N, H]; those that a cache does not
    hold say why."""
    return _logit_maps(logits) + _mass_maps(mass)


LOGIT_MEASURES = (  # name, title, unit, scale, what it needs: any profile, context, or the whole matrix
    ("first_minus_middle", "first − middle", "logits", "diverging", "profile"),
    ("first_minus_context", "first − context", "logits", "diverging", "context"),
    ("equal_distance_excess", "excess at equal distance", "logits", "diverging", "matrix"),
    ("first_frame_effect", "first-frame effect s", "logits", "diverging", "effect"),
    ("first_frame_r2", "partial R² of s", "share of variance", "sequential", "effect"),
    ("sign_rate", "positive context logits", "share of cells", "share", "context"),
    ("wave_amplitude", "amplitude, 1 rad/frame", "logits", "sequential", "context"),
    ("wave_r2", "wave R², 1 rad/frame", "share of variance", "share", "context"),
    ("wave_period", "best-fit period, R² ≥ 0.5", "frames", "sequential", "context"),
)

MASS_MEASURES = (
    ("first_mass", "mass on first, of all", "share of all", "sequential", "profile"),
    ("first_context_mass", "mass on first, of context", "share of context", "sequential", "context"),
    ("log_mass_effect", "s of log mass", "log ratio", "diverging", "effect"),
)

FIRST_FRAME = ("first_minus_middle", "equal_distance_excess", "first_frame_effect", "log_mass_effect")

WHOLE_MATRIX = {  # these use every query frame with context, where a cache has them
    "equal_distance_excess",
    "first_frame_effect",
    "first_frame_r2",
    "sign_rate",
    "log_mass_effect",
}

ALL_QUERIES = "all query frames"


def _logit_maps(view: Profiles | None) -> list[HeadMap]:
    reasons = {"profile": "" if view else NO_LOGITS}
    reasons["context"] = reasons["profile"] or ("" if view and view.context_frames else NO_CONTEXT)
    matrix = view.frame_matrices() if view else None
    reasons["matrix"] = reasons["context"] or (NO_MATRIX if matrix is None else "")
    values: dict[str, np.ndarray] = {}
    if view:
        profile, context = view.profiles(), view.context_frames
        s, w = measures.head_statistics(profile), measures.wave(profile, context)
        values = {
            "first_minus_middle": s.delta,
            "first_minus_context": measures.first_minus_context(profile, context),
            "sign_rate": head_taxonomy.context_sign_rate(view),
            "wave_amplitude": w.amplitude,
            "wave_r2": w.r2,
            "wave_period": w.told_period,
        }
    if view and matrix is not None:
        sizes = view.block_sizes
        values["equal_distance_excess"] = measures.equal_distance_excess(matrix, sizes)
        values["first_frame_effect"] = measures.first_frame_effect(matrix, sizes).effect
        values["first_frame_r2"] = partial_r_squared(matrix, sizes)
    reasons["effect"] = _effect_reason(reasons["matrix"], values.get("first_frame_effect"))
    return _as_maps(LOGIT_MEASURES, values, reasons, whole=matrix is not None)


def _mass_maps(view: Profiles | None) -> list[HeadMap]:
    reasons = {"profile": "" if view else NO_MASS}
    reasons["context"] = reasons["profile"] or ("" if view and view.context_frames else NO_CONTEXT)
    effect = log_mass_effect(view)
    no_matrix = "" if effect is not None else NO_MATRIX
    reasons["effect"] = _effect_reason(reasons["context"] or no_matrix, effect)
    values: dict[str, np.ndarray] = {}
    if view:
        of_all, of_context = measures.first_frame_mass(view.profiles(), view.context_frames)
        values = {"first_mass": of_all, "first_context_mass": of_context}
    if effect is not None:
        values["log_mass_effect"] = effect
    return _as_maps(MASS_MEASURES, values, reasons, whole=effect is not None)


def _effect_reason(reason: str, effect: np.ndarray | None) -> str:
    if reason or effect is None:
        return reason
    return "" if np.isfinite(effect).any() else NOT_IDENTIFIED


def _as_maps(
    table: Sequence[tuple[str, str, str, str, str]],
    values: Mapping[str, np.ndarray],
    reasons: Mapping[str, str],
    whole: bool,
) -> list[HeadMap]:
    """Maps of a table's measures; one whose need is not met is None, with the reason. whole: of a whole
    matrix."""
    maps = []
    for name, title, unit, scale, need in table:
        queries = ALL_QUERIES if whole and name in WHOLE_MATRIX else ""
        shown = None if reasons[need] else values[name]
        maps.append(HeadMap(name, title, unit, scale, shown, reasons[need], queries))
    return maps


def head_kinds(logits: Profiles | None, thresholds: head_taxonomy.Thresholds) -> np.ndarray | None:
    """Anchor, wave or veil [N, H]; None where the cache does not say."""
    if logits is None or not logits.context_frames:
        return None
    return head_taxonomy.kinds(head_taxonomy.context_sign_rate(logits), thresholds)


def head_locality(mass: Profiles | None, thresholds: head_taxonomy.Thresholds) -> np.ndarray | None:
    """Static or dynamic [N, H]; None where the cache does not say."""
    if mass is None:
        return None
    labels = head_taxonomy.locality(head_taxonomy.local_mass_share(mass.profiles(), thresholds), thresholds)
    return None if (labels == head_taxonomy.ABSENT).all() else labels


def label_maps(
    logits: Profiles | None,
    mass: Profiles | None,
    thresholds: head_taxonomy.Thresholds,
    published: tuple[np.ndarray, np.ndarray] | None,
) -> list[LabelMap]:
    """Our labels beside the published ones of the same model: kinds, then locality; heads that differ are
    marked."""
    ours = (head_kinds(logits, thresholds), head_locality(mass, thresholds))
    reasons = (NO_LOGITS if logits is None else NO_CONTEXT, NO_MASS if mass is None else "too few frames")
    tables = ((head_taxonomy.KINDS, "Pyramid Forcing"), (head_taxonomy.LOCALITY, "Forcing-KV"))
    theirs = published or (None, None)
    whole = ours[0] is not None and logits is not None and logits.frame_matrices() is not None
    found = []
    for mine, other, reason, (names, source), queries in zip(
        ours, theirs, reasons, tables, (ALL_QUERIES if whole else "", ""), strict=True
    ):
        title, differs = " / ".join(names.values()), None
        if mine is not None and other is not None:
            title += f", {head_taxonomy.agreement(mine, other):.1%} agree"
            differs = np.not_equal(mine, other)
        found.append(LabelMap(title, names, mine, "" if mine is not None else reason, differs, queries))
        found.append(LabelMap(f"published, {source}", names, other, "" if published else OTHER_MODEL))
    return found


def kinds_by_name(
    views: Mapping[str, Profiles], thresholds: head_taxonomy.Thresholds, published: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Kinds of heads [N, H] of every view that shows them, and the published ones, by name."""
    found = {name: head_kinds(view, thresholds) for name, view in views.items()} | {
        "published labels": published
    }
    return {name: labels for name, labels in found.items() if labels is not None}


def stability(labels: Sequence[np.ndarray]) -> np.ndarray:
    """Agreement of every pair of label maps [n, n]."""
    return np.array([[head_taxonomy.agreement(a, b) for b in labels] for a in labels])


def band_profile(
    cache: Mapping[str, Any], view: Profiles, layer: int, head: int
) -> tuple[np.ndarray, list[str]] | None:
    """What each RoPE band adds to a head's mean logits, last block's queries [F, bands], and the bands'
    names; None where the cache does not hold it."""
    if "frame_logits_by_band" not in cache or layer not in view.layers or not 0 <= head < view.num_heads:
        return None
    passes = list(cache.get("pass_steps", range(len(cache["pass_timesteps"]))))
    of_head = cache["frame_logits_by_band"][view.layers.index(layer), passes.index(view.step), head]
    values = of_head[list(view.query_frames)].float().mean(0).numpy()
    return values, cache.get("rope_bands", [f"band {i}" for i in range(values.shape[-1])])


def band_spread(values: np.ndarray, context: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each band of [F, bands] over the context frames."""
    of_context = values[list(context)]
    return np.nanmean(of_context, 0), np.nanstd(of_context, 0)


# --- Which heads and layers of a view a notebook shows: those asked for, or what stands in for them
Heads = tuple[tuple[int, int, str], ...]  # layer, head, label


class HeadChoice(NamedTuple):
    """What figures.head_curves draws, and the (layer, head, label) that the view does not have."""

    panels: list[HeadPanel]
    missing: list[tuple[int, int, str]]


def heads_of(view: Profiles, heads: Sequence[tuple[int, int, str]] | str, count: int = 2) -> Heads:
    """The heads asked for; of "auto" the paper's where the model is the paper's, else those with the largest
    first-frame effect where a cache has whole matrices. CacheError for another word."""
    if not isinstance(heads, str):
        return tuple((layer, head, label) for layer, head, label in heads)
    if heads != "auto":
        raise CacheError(f'HEADS must be "auto" or a list of (layer, head, label), not {heads!r}')
    matrix = view.frame_matrices() if view.quantity == "mean_logit" and view.model != FIGURE4_MODEL else None
    effect = None if matrix is None else first_frame_effect(matrix, view.block_sizes).effect
    if effect is None or not np.isfinite(effect).any():
        return FIGURE4_HEADS
    order = np.argsort(-np.nan_to_num(effect, nan=-np.inf), axis=None, kind="stable")[:count]
    places = [(view.layers[i // view.num_heads], int(i % view.num_heads)) for i in order]
    return tuple((layer, head, f"L{layer}H{head}") for layer, head in places)


def choose_heads(view: Profiles, heads: Iterable[tuple[int, int, str]]) -> HeadChoice:
    """Panels of some (layer, head, label). One that the view lacks is replaced by head 0 of its first
    layers."""
    panels, missing, first_layers = [], [], iter(view.layers)
    for layer, head, label in heads:
        if layer in view.layers and 0 <= head < view.num_heads:
            panels.append(head_panel(view, layer, head, label))
            continue
        missing.append((layer, head, label))
        if (substitute := next(first_layers, None)) is not None:
            panels.append(head_panel(view, substitute, 0, f"L{substitute}H0"))
    return HeadChoice(panels, missing)


def choose_layer(view: Profiles, layer: int) -> int:
    """The layer, or the first one of a view that lacks it."""
    return layer if layer in view.layers else view.layers[0]


def layers_to_draw(view: Profiles, panels: Iterable[HeadPanel]) -> tuple[int, ...]:
    """Layers drawn head by head: all of a cache of chosen layers; of an atlas, which has every layer, the
    shown ones."""
    shown = sorted({panel.layer for panel in panels})
    return tuple(shown) if view.kind == "atlas" and shown else view.layers


def head_panel(view: Profiles, layer: int, head: int, label: str) -> HeadPanel:
    """A head's profile, and its curve per key token where one axis can hold both."""
    curve, S = view.key_curve(layer), view.frame_seq_length
    if view.quantity == "mass":
        curve = None  # a frame's mass is the sum of its tokens' probabilities: not one axis
    if curve is not None:  # key tokens of a window -> their places among all frames
        spread = np.full((view.num_frames, S), np.nan, np.float32)
        spread[list(view.key_frames)] = curve[head].reshape(-1, S)
        curve = spread.reshape(-1)
    profile, gone = np.split(view.key_profile(layer)[head], [view.num_frames])
    return HeadPanel(
        label,
        layer,
        head,
        profile,
        curve,
        no_preference=no_preference(view),
        averages=gone if gone.size else None,
    )


def no_preference(view: Profiles) -> float | None:
    """What each key frame and average would get if all tokens that the queries see were alike; None for
    logits, which any constant may shift."""
    frames = len(view.key_frames) + view.num_averages
    return {"mass": 1 / frames, "mean_prob": 1 / (frames * view.frame_seq_length)}.get(view.quantity)
