"""What the atlas notebook says in words: measures, kinds of heads, RoPE bands, prompt words."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.analysis import head_taxonomy
from experiments.analysis.first_frame_findings import FirstFrame
from experiments.analysis.head_measures import NO_BANDS, band_spread
from experiments.analysis.head_taxonomy import Transfer
from experiments.analysis.label_agreement import LabelAgreement
from experiments.analysis.measures import DELTA_THRESHOLD
from experiments.analysis.panels import HeadMap, LabelMap
from experiments.analysis.reasons import NO_CONTEXT


def measure_lines(maps: Sequence[HeadMap]) -> str:
    """One line per measure: mean, median, range, and for those in logits how many heads are above the older
    threshold."""
    lines = []
    for m in maps:
        if m.values is None or not np.isfinite(m.values).any():
            lines.append(
                f"{m.name}: {f'absent, {m.missing_reason}' if m.missing_reason else 'N/A for all heads'}"
            )
            continue
        v = m.values[np.isfinite(m.values)]
        line = f"{m.name} ({m.unit}): mean {v.mean():.2f}, median {np.median(v):.2f}, "
        line += f"{v.min():.2f} to {v.max():.2f}"
        if m.scale == "diverging":
            above = (v > DELTA_THRESHOLD).sum()
            line += f"; {above} of {v.size} heads above {DELTA_THRESHOLD:g}"
        elif v.size < m.values.size:
            line += f"; N/A for {m.values.size - v.size} of {m.values.size} heads"
        lines.append(line)
    return "\n".join(lines)


def confusion_lines(maps: Sequence[LabelMap]) -> str:
    """Agreement and confusion of each of our maps with the published one after it; absent ones in one
    line."""
    lines = []
    for ours, theirs in zip(maps[::2], maps[1::2], strict=True):
        names = " / ".join(ours.names.values())
        if ours.labels is None or theirs.labels is None:
            here, there = (
                f"absent, {m.missing_reason}" if m.labels is None else "there" for m in (ours, theirs)
            )
            lines.append(f"{names}: ours {here}; published {there}")
        else:
            share = head_taxonomy.agreement(ours.labels, theirs.labels)
            lines.append(f"{names}: agree on {share:.1%} of {ours.labels.size} heads")
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


def first_frame_lines(found: FirstFrame | None, reason: str) -> str:
    """Two lines: the effect with its placebos, the contrasts of the first frames; or why there are none."""
    if found is None:
        return f"First-frame effect: absent, {reason}"
    s = found.fit.effect[np.isfinite(found.fit.effect)]
    lines = [
        f"First-frame effect: mean {s.mean():.2f}, median {np.median(s):.2f} logits; "
        f"{(s > DELTA_THRESHOLD).sum()} of {s.size} heads above {DELTA_THRESHOLD:g}; "
        f"{found.above_placebos.sum()} above all of {found.num_placebos} placebo frames"
    ]
    c = mean_of_heads(found.contrasts)[:3]
    if np.isfinite(c).all():
        lines.append(f"Key-frame contrasts: {', '.join(f'{x:.2f}' for x in c)} for frames 0, 1, 2")
    else:
        lines.append("Key-frame contrasts: absent, too few key frames to draw a line through")
    return "\n".join(lines)


def pass_lines(effects: Mapping[str, np.ndarray]) -> str:
    """Mean effect of every pass, and how well heads of a pass agree with those of the first."""
    lines = []
    for name, values in effects.items():
        first = next(iter(effects.values()))
        both = np.isfinite(values) & np.isfinite(first)
        r = np.corrcoef(values[both], first[both])[0, 1] if both.sum() > 1 else float("nan")
        lines.append(f"{name}: mean {np.nanmean(values):.2f}, r = {r:.2f} with the first pass")
    return "\n".join(lines)


def agreement_lines(found: Sequence[LabelAgreement]) -> str:
    """Our rule on every view, beside what it must beat."""
    return (
        "\n".join(
            f"{one.name}: {one.share:.1%} agree "
            f"(95 % of bootstraps over layers: {one.low:.1%} to {one.high:.1%}); "
            f"majority class {one.majority:.1%}, best single threshold {one.single:.1%}"
            for one in found
        )
        or "No published labels of this model"
    )


def mean_of_heads(values: np.ndarray) -> np.ndarray:
    """Mean over layers and heads of [layers, heads, n], without NaN; NaN where no head has one."""
    there = np.isfinite(values).any((0, 1))
    return np.where(there, np.nanmean(np.where(there, values, 0), (0, 1)), np.nan)


def transfer_lines(transfers: Sequence[Transfer]) -> str:
    """Thresholds chosen on one view and reported on every other."""
    lines = []
    for chosen in transfers:
        others = ", ".join(f"{share:.1%} on {there}" for there, share in chosen.elsewhere.items())
        lines.append(
            f"chosen on {chosen.name}: anchor from {chosen.thresholds.anchor_min:.3f}, "
            f"veil to {chosen.thresholds.veil_max:.3f}; "
            f"{chosen.here:.1%} there, {others or 'nothing else to report on'}"
        )
    return "\n".join(lines) or "No published labels of this model"


def why_no_bands(cache: Mapping[str, Any], layer: int, head: int) -> str:
    """One line on why band_profile gave nothing."""
    return (
        f"RoPE bands: layer {layer}, head {head} is not in this cache"
        if "frame_logits_by_band" in cache
        else NO_BANDS
    )


def band_lines(values: np.ndarray, names: Sequence[str], context: Sequence[int]) -> str:
    """Bands [F, bands] by how much they vary over the context frames, largest first."""
    if not context:
        return NO_CONTEXT
    mean, spread = band_spread(values, context)
    return "\n".join(
        f"{names[i]}: mean {mean[i]:+.3f}, std over context frames {spread[i]:.3f}"
        for i in np.argsort(-spread, kind="stable")
    )


def word_lines(words: Sequence[str], mass: np.ndarray, count: int = 5) -> str:
    """The words with the most mass, mean over heads of mass [H, words], and for each the head that gives it
    most."""
    mean, head = mass.mean(0), mass.argmax(0)
    lines = [
        f"On the whole prompt: {mass.sum(1).mean():.3f} of the mass, mean over heads; "
        "the rest is on the padding"
    ]
    for i in np.argsort(-mean, kind="stable")[:count]:
        lines.append(f"  {words[i]}: {mean[i]:.3f}, at most {mass[head[i], i]:.3f} (H{head[i]})")
    return "\n".join(lines)
