"""What notebooks say about a cache in words: which heads to show, what was captured, statistics per head."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.analysis.curve_matching import (
    Candidate,
    compared_frames,
    pearson,
    place,
    rank_heads,
    rms_difference,
)
from experiments.analysis.measures import (
    DELTA_THRESHOLD,
    RATIO_THRESHOLD,
    HeadStatistics,
    distance_profile,
    equal_distance_excess,
    first_minus_context,
    head_statistics,
    wave,
)
from experiments.analysis.panels import HeadPanel
from experiments.analysis.published import Curve
from experiments.caches.view import Profiles


def call_lines(cache: Mapping[str, Any]) -> str:
    """What is captured, a line per call: its place, layer, pass, block and frames."""
    lines = []
    for i, call in enumerate(cache["attention_weights"]):
        at = cache | call  # a figure4 cache has the tags of its calls at the top
        step = "not recorded" if at["step"] is None else "clean" if at["is_clean_pass"] else str(at["step"])
        timestep = "" if at["timestep"] is None else f" (t = {at['timestep']:g})"
        lines.append(
            f"  {i}: layer {at['layer_idx']}, pass {step}{timestep}, queries of frames {ranges(at['query_frames'])} "
            f"on keys of frames {ranges(at['key_frames'])}"
        )
    return "\n".join(lines)


def summary_lines(view: Profiles, head: int) -> str:
    """Layer, highest and lowest frame with their values, first and last frame of one head's profile."""
    (layer,) = view.layers
    profile = view.frame_profile(layer)[head]
    high, low = int(np.nanargmax(profile)), int(np.nanargmin(profile))
    first, last = view.key_frames[0], view.key_frames[-1]
    return "\n".join([
        f"Layer {layer}, head {head}, {view.quantity}, {view.pass_label}",
        f"  max: frame {high}, {profile[high]:.6f}",
        f"  min: frame {low}, {profile[low]:.6f}",
        f"  first (frame {first}): {profile[first]:.6f}",
        f"  last (frame {last}): {profile[last]:.6f}",
        f"  sum of mass over all key frames: {np.nansum(profile) * view.frame_seq_length:.4f}",
    ])  # fmt: skip


UNITS = {
    "mean_logit": "mean logit q·k/√D over the token pairs of two frames",
    "mass": "attention mass, the share of 1 that a key frame's tokens get together",
    "mean_prob": "mean probability per key token, mass / tokens per frame",
}


def describe(profiles: Profiles) -> str:
    """What a cache holds: source, layers, frames, pass, quantity, and what the queries could see."""
    p = profiles
    seen = {
        "full": "full, all frames so far",
        "window": "a sliding window",
        "within block": "within the block only",
    }
    lines = [
        f"Source: {p.source}",
        f"Layers: {ranges(p.layers)}; {p.num_heads} heads; {p.frame_seq_length} tokens per frame",
        f"Frames: {p.num_frames} in blocks of {', '.join(map(str, p.block_sizes))}",
        f"Pass: {p.pass_label}",
        f"Captured: {seen[p.captured]}; queries of frames {ranges(p.query_frames)} on keys of frames {ranges(p.key_frames)}",
        f"Quantity: {p.quantity}, {UNITS[p.quantity]}",
    ]
    if p.noise_frames:
        lines.append(
            f"Noise: the queries and key frames {ranges(p.noise_frames)} are noise in this pass, not context"
        )
    return "\n".join([*lines, *(f"Note: {note}" for note in p.notes)])


def choose_heads(profiles: Profiles, heads: Iterable[tuple[int, int, str]]) -> tuple[list[HeadPanel], str]:
    """(layer, head, label) -> what figures.head_curves draws, and a note. A head that the cache lacks is replaced by
    head 0 of its first layers, and the note says so."""
    panels, absent, first_layers = [], [], iter(profiles.layers)
    for layer, head, label in heads:
        if layer in profiles.layers and 0 <= head < profiles.num_heads:
            panels.append(_panel(profiles, layer, head, label))
            continue
        absent.append(f"{label} (layer {layer}, head {head})")
        if (substitute := next(first_layers, None)) is not None:
            panels.append(_panel(profiles, substitute, 0, f"L{substitute}H0"))
    if not absent:
        return panels, ""
    return panels, (
        f"Note: {', '.join(absent)} not in this cache, which has layers {ranges(profiles.layers)} with heads "
        f"0–{profiles.num_heads - 1}; shown: {', '.join(panel.label for panel in panels)}"
    )


def choose_layer(profiles: Profiles, layer: int) -> tuple[int, str]:
    """A layer and a note: one that the cache lacks is replaced by its first, and the note says so."""
    if layer in profiles.layers:
        return layer, ""
    first = profiles.layers[0]
    return (
        first,
        f"Note: layer {layer} not in this cache, which has layers {ranges(profiles.layers)}; shown: layer {first}",
    )


def _panel(profiles: Profiles, layer: int, head: int, label: str) -> HeadPanel:
    curve, S = profiles.key_curve(layer), profiles.frame_seq_length
    if profiles.quantity == "mass":
        curve = None  # a frame's mass is the sum of its tokens' probabilities: not one axis
    if curve is not None:  # key tokens of a window -> their places among all frames
        spread = np.full((profiles.num_frames, S), np.nan, np.float32)
        spread[list(profiles.key_frames)] = curve[head].reshape(-1, S)
        curve = spread.reshape(-1)
    return HeadPanel(label, layer, head, profiles.frame_profile(layer)[head], curve)


def with_reference(
    panels: Iterable[HeadPanel], view: Profiles, curves: Mapping[str, Curve]
) -> list[HeadPanel]:
    """Panels with the published curve of their label, and how well the two agree over the context frames."""
    compared = []
    for panel in panels:
        if (curve := curves.get(panel.label)) is not None:
            frames = compared_frames(view, curve)
            r, rms = (
                measure(panel.profile[frames], curve.values[frames]) for measure in (pearson, rms_difference)
            )
            panel = panel._replace(
                reference=curve.values,
                clipped=curve.clipped,
                agreement=f"r = {r:.3f}, RMS {rms:.2f} over context frames {ranges(frames)}",
            )
        compared.append(panel)
    return compared


def match_lines(
    views: Sequence[Profiles],
    heads: Iterable[tuple[int, int, str]],
    curves: Mapping[str, Curve],
    step: int | None,
) -> str:
    """For every curve: where the heads (layer, head, label) of its name rank in a pass among all heads of all views, the
    best heads, and, as a warning, what the head counted from 1 would give."""
    lines = []
    for label, curve in curves.items():
        ranking = rank_heads(views, curve)
        among = f"{len(ranking)} heads" + (f" in {len(views)} passes" if len(views) > 1 else "")
        lines.append(f"{label}, {len(compared_frames(views[0], curve))} context frames, {among}")
        for layer, head, name in heads:
            if name == label:
                lines.append(_place_line("shown", ranking, step, layer, head))
                if min(layer, head) > 0:
                    lines.append(
                        _place_line("WARNING, counted from 1 it would be", ranking, step, layer - 1, head - 1)
                    )
        for i, best in enumerate(ranking[:3]):
            lines.append(_place_line(f"best {i + 1}", ranking, best.step, best.layer, best.head))
    return "\n".join(lines)


def _place_line(what: str, ranking: Sequence[Candidate], step: int | None, layer: int, head: int) -> str:
    where = f"  {what}: layer {layer}, head {head}" + (
        f", pass {step}" if len({c.step for c in ranking}) > 1 else ""
    )
    found = place(ranking, step, layer, head)
    if found is None:
        return f"{where}: not in this cache"
    rank, candidate = found
    return f"{where}: r = {candidate.r:.3f}, RMS {candidate.rms:.2f}, rank {rank} of {len(ranking)}"


def what_it_shows(view: Profiles, panels: Iterable[HeadPanel]) -> str:
    """What a Figure 4 is made of: noise, waves, and what is left for the first frame at equal distance. Every number is
    computed from the view; what it does not hold is said to be absent."""
    if view.quantity != "mean_logit" or not view.context_frames:
        reason = (
            f"it holds {view.quantity}"
            if view.quantity != "mean_logit"
            else "its queries see no earlier block"
        )
        return f"Absent: this needs mean logits of context frames; of this cache, {reason}"
    profile, matrix = view.profiles(), view.frame_matrices()
    s, context, lines = head_statistics(profile), view.context_frames, []
    if view.noise_frames:
        peaks = np.isin(s.max_frame, view.noise_frames)
        lines.append(
            f"Noise: key frames {ranges(view.noise_frames)} are noise, as the queries are; {peaks.sum()} of "
            f"{peaks.size} heads are highest there, so that arm of the curve is not memory"
        )
    waves = wave(profile, context)
    excess = None if matrix is None else equal_distance_excess(matrix, view.block_sizes)
    by_distance = (
        None if matrix is None else first_minus_context(distance_profile(matrix, view.block_sizes), context)
    )
    for panel in panels:
        at = view.layers.index(panel.layer), panel.head
        told = np.isfinite(waves.r2[at])
        lines.append(
            f"{panel.label}, layer {panel.layer}, head {panel.head}: "
            + (
                f"a wave at 1 rad/frame explains {waves.r2[at]:.0%} of what a line leaves over, amplitude "
                f"{waves.amplitude[at]:.2f}, best period {waves.period[at]:.1f} frames"
                if told
                else f"{len(context)} context frames are too few to tell a wave"
            )
            + f"; first − middle {s.delta[at]:+.2f}"
            + ("" if excess is None else f", excess at equal distance {excess[at]:+.2f}")
        )
    high = s.delta > DELTA_THRESHOLD
    lines.append(
        f"All {high.size} heads: first − middle {_mean(s.delta):+.2f} on average, above {DELTA_THRESHOLD:g} for "
        f"{high.sum()}"
    )
    if excess is None:
        return "\n".join(
            [*lines, "Excess at equal distance: absent, it needs every query frame, as an atlas holds them"]
        )
    lonely = high & ~(excess > DELTA_THRESHOLD)
    lines.append(
        f"  excess at equal distance {_mean(excess):+.2f} on average, above {DELTA_THRESHOLD:g} for "
        f"{(excess > DELTA_THRESHOLD).sum()}"
    )
    if np.isfinite(by_distance).any():
        lines.append(
            f"  were distance all that matters, first − context would be {_mean(by_distance):+.2f} on average; it "
            f"is {_mean(first_minus_context(profile, context)):+.2f}"
        )
    if lonely.any():
        lines.append(
            f"  of {lonely.sum()} heads above {DELTA_THRESHOLD:g} by the first alone, distance by itself gives more "
            f"than half of it for {(by_distance > s.delta / 2)[lonely].sum()}"
        )
    return "\n".join(lines)


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def layers_to_draw(profiles: Profiles, panels: Iterable[HeadPanel]) -> tuple[int, ...]:
    """Layers drawn head by head: all of a cache of chosen layers; of an atlas, which has every layer, the shown ones."""
    shown = sorted({panel.layer for panel in panels})
    return tuple(shown) if profiles.kind == "atlas" and shown else profiles.layers


def layer_lines(matrix: np.ndarray, profile: np.ndarray) -> str:
    """Means of a layer's frame matrices [H, F, F] over the diagonal and over the first key frame's column, what was not
    attended left out, then a line per head of its profiles [H, F]: the lines of earlier work's notebook."""
    diagonal, column = np.diagonal(matrix, axis1=1, axis2=2), matrix[..., 0]
    heads = head_statistics(profile)
    return "\n".join(
        [
            f"Diagonal mean (self-attention): {_number(_mean(diagonal), '.4f')}",
            f"First frame mean (sink): {_number(_mean(column), '.4f')}",
            *(_head_line(heads, h) for h in range(len(profile))),
        ]
    )


def head_lines(statistics: HeadStatistics) -> str:
    """One line per head of statistics [H]; N/A where a ratio has no positive middle or a frame was not attended."""
    s = statistics
    return "\n".join(
        f"{_head_line(s, h)}, first/mid={_number(s.ratio[h], '7.2f')}, "
        f"first-last={_number(s.first_minus_last[h], '+8.3f')}, max@{s.max_frame[h]}, "
        f"(max-min)/|mean|={_number(s.spread[h], '6.2f')}"
        for h in range(len(s.first))
    )


def _head_line(s: HeadStatistics, h: int) -> str:
    return (
        f"  H{h:2d}: first={_number(s.first[h])}, mid={_number(s.middle[h])}, last={_number(s.last[h])}, "
        f"sink={_number(s.delta[h], '+7.3f')}"
    )


def called_sinks(statistics: HeadStatistics) -> str:
    """Which heads of statistics [H] pass the thresholds of earlier work."""
    names = [f"H{h}" for h in np.flatnonzero(statistics.called_sinks)]
    return f"Δ > {DELTA_THRESHOLD:g} or first/middle > {RATIO_THRESHOLD:g}: {', '.join(names) or 'no head'}"


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0–2, 5"."""
    parts = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in parts)


def _number(value: float, form: str = "7.3f") -> str:
    text = format(value, form)
    return text if np.isfinite(value) else "N/A".rjust(len(text))
