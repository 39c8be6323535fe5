"""What notebooks say about a cache in words: what was captured, which heads are shown, statistics per
head."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.analysis.curve_matching import CurveMatch, Placed
from experiments.analysis.findings import Findings, findings, places, why_nothing
from experiments.analysis.head_choice import HeadChoice
from experiments.analysis.measures import DELTA_THRESHOLD, RATIO_THRESHOLD, HeadStatistics, head_statistics
from experiments.analysis.panels import HeadPanel
from experiments.caches.caption import ranges
from experiments.caches.schema import as_cache
from experiments.caches.view import Profiles, open_profiles

UNITS = {
    "mean_logit": "mean logit q·k/√D over the token pairs of two frames",
    "mass": "attention mass, the share of 1 that a key frame's tokens get together",
    "mean_prob": "mean probability per key token, mass / tokens per frame",
}

SEEN = {
    "full": "full, all frames so far",
    "window": "a sliding window",
    "within block": "within the block only",
}


def call_lines(cache: Mapping[str, Any]) -> str:
    """What is captured, a line per call: its place, layer, pass, block and frames. Of an atlas, a line per
    pass."""
    if cache["format"] == "atlas":
        layers = cache["layers"]
        return "\n".join(
            f"  {p * len(layers)}–{(p + 1) * len(layers) - 1}: layers {ranges(layers)}, "
            f"{open_profiles(cache, at.step).pass_label}"
            for p, at in enumerate(as_cache(cache).passes())
        )
    lines = []
    for i, call in enumerate(cache["attention_weights"]):
        at = cache | call  # a figure4 cache has the tags of its calls at the top
        step = "not recorded" if at["step"] is None else "clean" if at["is_clean_pass"] else str(at["step"])
        timestep = "" if at["timestep"] is None else f" (t = {at['timestep']:g})"
        lines.append(
            f"  {i}: layer {at['layer_idx']}, pass {step}{timestep}, "
            f"queries of frames {ranges(at['query_frames'])} "
            f"on keys of frames {ranges(at['key_frames'])}"
        )
    return "\n".join(lines)


def summary_lines(view: Profiles, head: int) -> str:
    """Layer, highest and lowest frame with their values, first and last frame of one head's profile."""
    (layer,) = view.layers
    profile = view.frame_profile(layer)[head]
    high, low = int(np.nanargmax(profile)), int(np.nanargmin(profile))
    first, last = view.key_frames[0], view.key_frames[-1]
    tokens = 1 if view.quantity == "mass" else view.frame_seq_length
    return "\n".join([
        f"Layer {layer}, head {head}, {view.quantity}, {view.pass_label}",
        f"  max: frame {high}, {profile[high]:.6f}",
        f"  min: frame {low}, {profile[low]:.6f}",
        f"  first (frame {first}): {profile[first]:.6f}",
        f"  last (frame {last}): {profile[last]:.6f}",
        f"  sum of mass over all key frames: {np.nansum(profile) * tokens:.4f}",
    ])  # fmt: skip


FIRST_LINE = {
    "mean_logit": "These are logits, q·k/√D before the softmax: differences matter, 0 is not special",
    "mass": "These are probabilities: the share of 1 that each key frame gets",
    "mean_prob": "These are probabilities: the mean per key token of each frame",
}


def describe(profiles: Profiles) -> str:
    """What a cache holds: source, layers, frames, pass, quantity, and what the queries could see."""
    p = profiles
    lines = [
        f"Source: {p.source}",
        f"Layers: {ranges(p.layers)}; {p.num_heads} heads; {p.frame_seq_length} tokens per frame",
        f"Frames: {p.num_frames} in blocks of {', '.join(map(str, p.block_sizes))}",
        f"Pass: {p.pass_label}",
        f"Captured: {SEEN[p.captured]}; queries of frames {ranges(p.query_frames)} "
        f"on keys of frames {ranges(p.key_frames)}{_averages(p.num_averages)}",
        f"Quantity: {p.quantity}, {UNITS[p.quantity]}",
    ]
    if p.noise_frames:
        lines.append(
            f"Noise: the queries and key frames {ranges(p.noise_frames)} are noise in this pass, not context"
        )
    if len(set(p.noise_levels.values())) > 1:
        levels = {t: [f for f, at in p.noise_levels.items() if at == t] for t in p.noise_levels.values()}
        said = ", ".join(f"{ranges(frames)} at t = {t:.4g}" for t, frames in levels.items())
        lines.append(f"Window: frames {said}")
    return "\n".join([*lines, *(f"Note: {note}" for note in p.notes)])


def _averages(count: int) -> str:
    return f" and {count} average{'s' * (count > 1)} of frames that are gone" if count else ""


def captured_lines(view: Profiles) -> str:
    """Shape and range of what was captured, and a line per layer: first, middle, last, their ratio and
    difference, the highest frame, and the head-averaged maximum and minimum: what the older notebooks
    printed."""
    profiles = view.profiles()
    low, high = np.nanmin(profiles), np.nanmax(profiles)
    lines = [
        f"Captured: {view.quantity} [{', '.join(map(str, profiles.shape))}] layers × heads × key frames, "
        f"{low:.4g} to {high:.4g}"
    ]
    for layer, values in zip(view.layers, profiles, strict=True):
        mean = values.mean(0)
        s = head_statistics(mean[None])
        spread = values.std(0)
        lines.append(
            f"  layer {layer}, mean of heads: first={_number(s.first[0], '.4g')}, "
            f"mid={_number(s.middle[0], '.4g')}, "
            f"last={_number(s.last[0], '.4g')}, first/mid={_number(s.ratio[0], '.2f')}, "
            f"first-last={_number(s.first_minus_last[0], '+.4g')}, max {np.nanmax(mean):.4g} at frame "
            f"{s.max_frame[0]}, min {np.nanmin(mean):.4g}, std over heads {np.nanmin(spread):.3g} to "
            f"{np.nanmax(spread):.3g}"
        )
    return "\n".join(lines)


def choice_note(choice: HeadChoice, view: Profiles) -> str:
    """Which heads are shown, and which were asked for and are not there."""
    shown = ", ".join(panel.label for panel in choice.panels)
    if not choice.missing:
        return f"Shown: {shown}"
    missing = ", ".join(f"{label} (layer {layer}, head {head})" for layer, head, label in choice.missing)
    return (
        f"Note: {missing} not in this cache, which has layers {ranges(view.layers)} with heads "
        f"0–{view.num_heads - 1}; shown: {shown}"
    )


def layer_note(view: Profiles, asked: int, shown: int) -> str:
    """Which layer is shown, and whether the one that was asked for is not there."""
    if asked == shown:
        return f"Shown: layer {shown}"
    return (
        f"Note: layer {asked} not in this cache, which has layers {ranges(view.layers)}; shown: layer {shown}"
    )


def delta_titles(delta: np.ndarray) -> list[str]:
    """Panel titles with first − middle of heads [H]."""
    numbers = [f"{value:+.2f}".replace("-", "−") if np.isfinite(value) else "N/A" for value in delta]
    return [f"H{head}, Δ = {number}" for head, number in enumerate(numbers)]


def sink_titles(sinks: np.ndarray) -> list[str]:
    """The same number [H] as the older notebook of one layer wrote it."""
    numbers = [f"{sink:.2f}" if np.isfinite(sink) else "N/A" for sink in sinks]
    return [f"H{head} (sink={number})" for head, number in enumerate(numbers)]


def match_lines(matches: Sequence[CurveMatch], passes: Sequence[Profiles]) -> str:
    """For every curve where its heads rank, the best heads, and, as a warning, what the names counted from 1
    would give. passes are the views that were ranked."""
    lines = []
    for match in matches:
        several = len({view.step for view in passes}) > 1
        among = f"{match.num_heads} heads" + (f" in {match.num_passes} passes" if several else "")
        lines.append(f"{match.label}, {match.num_frames} context frames, {among}")
        for shown, one_based in zip(match.shown, match.one_based, strict=True):
            lines.append(_place_line("shown", shown, match.num_heads, several))
            if one_based is not None:
                warning = "WARNING, counted from 1 it would be"
                lines.append(_place_line(warning, one_based, match.num_heads, several))
        for i, best in enumerate(match.best):
            lines.append(_place_line(f"best {i + 1}", best, match.num_heads, several))
    return "\n".join(lines)


def _place_line(what: str, placed: Placed, num_heads: int, several: bool) -> str:
    where = f"  {what}: layer {placed.layer}, head {placed.head}"
    if placed.found is None:
        return f"{where}: not in this cache"
    where += f", pass {placed.found.step}" if several else ""
    r, rms = placed.found.r, placed.found.rms
    return f"{where}: r = {r:.3f}, RMS {rms:.2f}, rank {placed.rank} of {num_heads}"


def finding_lines(view: Profiles, panels: Sequence[HeadPanel]) -> str:
    """What a Figure 4 is made of. Every number is computed from the view; what it does not hold is said to be
    absent."""
    if reason := why_nothing(view):
        return f"Absent: this needs mean logits of context frames; of this cache, {reason}"
    found, lines = findings(view), []
    if view.noise_frames:
        peaks = np.isin(found.max_frame, view.noise_frames)
        lines.append(
            f"Noise: key frames {ranges(view.noise_frames)} are noise, as the queries are; {peaks.sum()} of "
            f"{peaks.size} heads are highest there, so that arm of the curve is not memory"
        )
    for panel, at in places(view, panels):
        wave = (
            f"a wave at 1 rad/frame explains {found.waves.r2[at]:.0%} of what a line leaves over, amplitude "
            f"{found.waves.amplitude[at]:.2f}, best period {found.waves.period[at]:.1f} frames"
        )
        if not np.isfinite(found.waves.r2[at]):
            wave = f"{len(view.context_frames)} context frames are too few to tell a wave"
        lines.append(
            f"{panel.label}, layer {panel.layer}, head {panel.head}: {wave}; "
            f"first − middle {found.delta[at]:+.2f}"
            + ("" if found.effect is None else f", first-frame effect {found.effect[at]:+.2f}")
            + ("" if found.excess is None else f", excess at equal distance {found.excess[at]:+.2f}")
        )
    return "\n".join([*lines, *_mean_findings(found)])


def _mean_findings(found: Findings) -> list[str]:
    """The same of all heads."""
    high = found.delta > DELTA_THRESHOLD
    lines = [
        f"All {high.size} heads: first − middle {_mean(found.delta):+.2f} on average, "
        f"above {DELTA_THRESHOLD:g} for {high.sum()}"
    ]
    if found.excess is None or found.by_distance is None or found.effect is None:
        return [
            *lines,
            "Excess at equal distance: absent, it needs every query frame, as an atlas holds them",
        ]
    above = found.excess > DELTA_THRESHOLD
    lines.append(
        f"  excess at equal distance {_mean(found.excess):+.2f} on average, "
        f"above {DELTA_THRESHOLD:g} for {above.sum()}"
    )
    if np.isfinite(found.by_distance).any():
        lines.append(
            f"  were distance all that matters, first − context would be {_mean(found.by_distance):+.2f} "
            f"on average; it is {_mean(found.over_context):+.2f}"
        )
    if (lonely := high & ~above).any():
        by_distance = (found.by_distance > found.delta / 2)[lonely]
        lines.append(
            f"  of {lonely.sum()} heads above {DELTA_THRESHOLD:g} by the first alone, distance by itself "
            f"gives more than half of it for {by_distance.sum()}"
        )
    lines.append(
        f"  first-frame effect s {_mean(found.effect):+.2f} on average, above {DELTA_THRESHOLD:g} for "
        f"{(found.effect > DELTA_THRESHOLD).sum()}: rows and distances are accounted for"
    )
    return lines


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def layer_lines(matrix: np.ndarray, profile: np.ndarray) -> str:
    """Means of a layer's frame matrices [H, F, F] over the diagonal and over the first key frame's column,
    what was not attended left out, then a line per head of its profiles [H, F]: the lines of earlier work's
    notebook."""
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
    """One line per head of statistics [H]; N/A where a ratio has no positive middle or a frame was not
    attended."""
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


def _number(value: float, form: str = "7.3f") -> str:
    text = format(value, form)
    return text if np.isfinite(value) else "N/A".rjust(len(text))
