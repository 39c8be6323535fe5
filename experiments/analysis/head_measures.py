"""Every measure of every head of an atlas, as maps layers × heads, and the kinds of heads beside published ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.analysis import head_taxonomy, measures
from experiments.analysis.panels import HeadMap, LabelMap
from experiments.caches.errors import CacheError
from experiments.caches.view import Profiles, open_profiles

NO_LOGITS, NO_MASS = "no mean logits in this cache", "no mass in this cache"

NO_CONTEXT, NO_MATRIX = "no context: the queries see no earlier block", "no whole frame matrix in this cache"

OTHER_MODEL = "published for another model"

NO_BANDS = "RoPE bands: absent in this cache; capture them with: python experiments/run_extraction_all.py --rope_bands"


def open_quantity(cache: Mapping[str, Any], step: int | None, quantity: str) -> Profiles | None:
    """A view, or None where the cache does not hold the quantity."""
    try:
        view = open_profiles(cache, step, quantity)
        view.frame_profile(view.layers[0])
        return view
    except CacheError:
        return None


def survey(logits: Profiles | None, mass: Profiles | None) -> list[HeadMap]:
    """All measures of experiments/analysis/measures.py for every head, of the last block's queries or of the whole matrix."""
    maps = []

    def add(
        name: str, title: str, unit: str, scale: str, values: np.ndarray | None, absent: str = ""
    ) -> None:
        maps.append(HeadMap(name, title, unit, scale, None if absent else values, absent))

    matrix = logits.frame_matrices() if logits else None
    profile = logits.profiles() if logits else np.full((1, 1, 7), np.nan)
    context = logits.context_frames if logits else ()
    blocks = logits.block_sizes if logits else (7,)
    none = NO_LOGITS if logits is None else ""
    without = none or ("" if context else NO_CONTEXT)
    s, w = measures.head_statistics(profile), measures.wave(profile, context)
    excess = None if matrix is None else measures.equal_distance_excess(matrix, blocks)
    rate = head_taxonomy.context_sign_rate(logits) if logits else None
    add("first_minus_middle", "first − middle", "logits", "diverging", s.delta, none)
    add("first_over_middle", "first / middle", "ratio", "ratio", s.ratio, none)
    over_context = measures.first_minus_context(profile, context)
    add("first_minus_context", "first − context", "logits", "diverging", over_context, without)
    add(
        "equal_distance_excess",
        "excess at equal distance",
        "logits",
        "diverging",
        excess,
        without or (NO_MATRIX if matrix is None else ""),
    )
    add("sign_rate", "positive context logits", "share of cells", "share", rate, without)
    add("wave_amplitude", "amplitude, 1 rad/frame", "logits", "sequential", w.amplitude, without)
    add("wave_r2", "wave R², 1 rad/frame", "share of variance", "share", w.r2, without)
    add("wave_period", "best-fit period", "frames", "sequential", w.period, without)
    of_all = of_context = None
    if mass is not None:
        of_all, of_context = measures.first_frame_mass(mass.profiles(), mass.context_frames)
    no_mass = NO_MASS if mass is None else ""
    add("first_mass", "mass on first, of all", "share of all", "sequential", of_all, no_mass)
    add(
        "first_context_mass",
        "mass on first, of context",
        "share of context",
        "sequential",
        of_context,
        no_mass or ("" if mass and mass.context_frames else NO_CONTEXT),
    )
    return maps


def survey_lines(maps: Sequence[HeadMap]) -> str:
    """One line per measure: mean, median, range, and for those in logits how many heads are above the older threshold."""
    lines = []
    for m in maps:
        if m.values is None or not np.isfinite(m.values).any():
            lines.append(f"{m.name}: absent, {m.absent or 'no head has one'}")
            continue
        v = m.values[np.isfinite(m.values)]
        line = f"{m.name} ({m.unit}): mean {v.mean():.2f}, median {np.median(v):.2f}, {v.min():.2f} to {v.max():.2f}"
        if m.scale == "diverging":
            line += f"; {(v > measures.DELTA_THRESHOLD).sum()} of {v.size} heads above {measures.DELTA_THRESHOLD:g}"
        elif v.size < m.values.size:
            line += f"; N/A for {m.values.size - v.size} of {m.values.size} heads"
        lines.append(line)
    return "\n".join(lines)


def head_kinds(logits: Profiles | None, thresholds: head_taxonomy.Thresholds) -> np.ndarray | None:
    """Anchor, wave or veil [N, H]; None where the cache does not say."""
    if logits is None or not logits.context_frames:
        return None
    return head_taxonomy.kinds(head_taxonomy.context_sign_rate(logits), thresholds)


def head_reaches(mass: Profiles | None, thresholds: head_taxonomy.Thresholds) -> np.ndarray | None:
    """Static or dynamic [N, H]; None where the cache does not say."""
    if mass is None:
        return None
    labels = head_taxonomy.reaches(head_taxonomy.near_share(mass.profiles(), thresholds), thresholds)
    return None if (labels == head_taxonomy.ABSENT).all() else labels


def label_maps(
    logits: Profiles | None,
    mass: Profiles | None,
    thresholds: head_taxonomy.Thresholds,
    published: tuple[np.ndarray, np.ndarray] | None,
) -> list[LabelMap]:
    """Our labels beside the published ones of the same model: kinds, then reaches; heads that differ are marked."""
    found = []
    ours = (head_kinds(logits, thresholds), head_reaches(mass, thresholds))
    reasons = (NO_LOGITS if logits is None else NO_CONTEXT, NO_MASS if mass is None else "too few frames")
    for i, (names, sources) in enumerate(
        ((head_taxonomy.KINDS, "Pyramid Forcing"), (head_taxonomy.REACHES, "Forcing-KV"))
    ):
        theirs = published[i] if published else None
        differs = None if ours[i] is None or theirs is None else ours[i] != theirs
        title = " / ".join(names.values())
        if differs is not None:
            title += f", {head_taxonomy.agreement(ours[i], theirs):.1%} agree"
        found.append(LabelMap(title, names, ours[i], "" if ours[i] is not None else reasons[i], differs))
        found.append(LabelMap(f"published, {sources}", names, theirs, "" if published else OTHER_MODEL))
    return found


def confusion_lines(maps: Sequence[LabelMap]) -> str:
    """Agreement and confusion of each of our maps with the published one after it; absent ones in one line."""
    lines = []
    for ours, theirs in zip(maps[::2], maps[1::2], strict=True):
        names = " / ".join(ours.names.values())
        if ours.labels is None or theirs.labels is None:
            here, there = (f"absent, {m.absent}" if m.labels is None else "there" for m in (ours, theirs))
            lines.append(f"{names}: ours {here}; published {there}")
        else:
            lines.append(
                f"{names}: agree on {head_taxonomy.agreement(ours.labels, theirs.labels):.1%} of {ours.labels.size} heads"
            )
            table = head_taxonomy.confusion(ours.labels, theirs.labels, list(ours.names))
            for name, row in zip(ours.names.values(), table, strict=True):
                there = ", ".join(
                    f"{count} {other}" for count, other in zip(row, ours.names.values(), strict=True)
                )
                lines.append(f"  ours {name}: published {there}")
        if ours.labels is not None:
            counts = ", ".join(f"{(ours.labels == label).sum()} {name}" for label, name in ours.names.items())
            lines.append(f"  in this cache: {counts}")
    return "\n".join(lines)


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


def cross_lines(views: Mapping[str, Profiles], labels: np.ndarray | None) -> str:
    """Thresholds chosen on each view and reported on every other: agreement with published labels of the same heads."""
    if labels is None:
        return "No published labels of this model"
    rates = {
        name: head_taxonomy.context_sign_rate(view) for name, view in views.items() if view.context_frames
    }
    lines = []
    for name, rate in rates.items():
        chosen = head_taxonomy.choose_thresholds(rate, labels)
        others = ", ".join(
            f"{head_taxonomy.agreement(head_taxonomy.kinds(other, chosen), labels):.1%} on {there}"
            for there, other in rates.items()
            if there != name
        )
        own = head_taxonomy.agreement(head_taxonomy.kinds(rate, chosen), labels)
        lines.append(
            f"chosen on {name}: anchor from {chosen.anchor_min:.3f}, veil to {chosen.veil_max:.3f}; "
            f"{own:.1%} there, {others or 'nothing else to report on'}"
        )
    return "\n".join(lines)


def band_profile(
    cache: Mapping[str, Any], view: Profiles, layer: int, head: int
) -> tuple[np.ndarray, list[str]] | None:
    """What each RoPE band adds to a head's mean logits, last block's queries [F, bands], and the bands' names; None where
    the cache does not hold it."""
    if "frame_logits_by_band" not in cache or layer not in view.layers or not 0 <= head < view.num_heads:
        return None
    passes = list(cache.get("pass_steps", range(len(cache["pass_timesteps"]))))
    of_head = cache["frame_logits_by_band"][view.layers.index(layer), passes.index(view.step), head]
    values = of_head[list(view.query_frames)].float().mean(0).numpy()
    return values, cache.get("rope_bands", [f"band {i}" for i in range(values.shape[-1])])


def why_no_bands(cache: Mapping[str, Any], layer: int, head: int) -> str:
    """One line on why band_profile gave nothing."""
    return (
        f"RoPE bands: layer {layer}, head {head} is not in this cache"
        if "frame_logits_by_band" in cache
        else NO_BANDS
    )


def band_lines(values: np.ndarray, names: Sequence[str], context: Sequence[int]) -> str:
    """Bands [F, bands] by how much they vary over the context frames: the standard deviation, largest first."""
    if not context:
        return NO_CONTEXT
    values = values[list(context)]
    spread = np.nanstd(values, 0)
    order = np.argsort(-spread, kind="stable")
    return "\n".join(
        f"{names[i]}: mean {np.nanmean(values[:, i]):+.3f}, std over context frames {spread[i]:.3f}"
        for i in order
    )
