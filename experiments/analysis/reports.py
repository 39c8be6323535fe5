"""What notebooks say about a cache in words: what was captured, which heads are shown, statistics per
head."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.analysis import taxonomy as head_taxonomy
from experiments.analysis.curve_matching import CurveMatch, Placed
from experiments.analysis.effects import ENOUGH_PROMPTS, head_correlation
from experiments.analysis.first_frame import first_frame_effect
from experiments.analysis.first_frame_findings import FirstFrame
from experiments.analysis.head_measures import NO_BANDS, HeadChoice, band_spread
from experiments.analysis.measures import (
    DELTA_THRESHOLD,
    RATIO_THRESHOLD,
    HeadStatistics,
    Wave,
    distance_profile,
    equal_distance_excess,
    first_frame_mass,
    first_minus_context,
    head_statistics,
    wave,
)
from experiments.analysis.panels import NO_CONTEXT, HeadMap, HeadPanel, LabelMap
from experiments.analysis.taxonomy import LabelAgreement, Transfer
from experiments.caches import load_cache
from experiments.caches.formats import as_cache
from experiments.caches.view import Profiles, edits_in_words, open_profiles, ranges


# --- What the atlas notebook says in words: measures, kinds of heads, RoPE bands, prompt words
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


# --- A causal atlas and an effects cache as arrays and lines, for notebooks and figures
UNIT = "/ seeds"  # effects are in units of the distance between two seeds
S = "First-frame effect s"


def changes_of(cache: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The effects of an effects cache [F] each, in units of the distance between seeds."""
    names = {"direct": "direct", "own_block": "own block", "total": "total", "floor": "floor"}
    unit = cache["between_seeds"].numpy()
    return {label: cache[name].numpy() / unit for name, label in names.items() if name in cache}


def change_lines(changes: Mapping[str, np.ndarray]) -> str:
    """Mean of each effect over the frames that have one, a line each."""
    return "\n".join(f"{name}: mean {np.nanmean(values):.2g}" for name, values in changes.items())


QUESTIONS = {  # of the miniature's tracker, in words
    "background": "background",
    "color": "colour",
    "shape": "shape",
    "direction": "direction",
    "landmark": "landmark",
    "crossing": "paths cross",
    "hides": "it hides",
    "comes_back": "it comes back",
    "same": "back in colour and shape",
}


def tracker_lines(cache: Mapping[str, Any]) -> str:
    """What the tracker says of both videos of an effects cache, a line each; or why it says nothing."""
    if "questions" not in cache:
        return "the tracker judges captions of the miniature alone"
    names = ("answers_base", "answers_edited")
    yes = [
        [
            QUESTIONS[q]
            for q, said in zip(cache["questions"], cache[name].tolist(), strict=True)
            if said and q in QUESTIONS
        ]
        for name in names
    ]
    return f"right in the unedited video: {', '.join(yes[0])}\nright in the edited one: {', '.join(yes[1])}"


@dataclass(frozen=True)
class HeadStudy:
    """Direct effects of heads and what they attend to; reason says why there is nothing."""

    reason: str = ""
    subtitle: str = ""
    layers: list[int] = field(default_factory=list)
    effects: np.ndarray = field(
        default_factory=lambda: np.empty((0, 0, 0))
    )  # [prompts, N, H], mean over frames
    floor: float = float("nan")
    controls: dict[str, np.ndarray] = field(default_factory=dict)  # [N, H]
    norms: np.ndarray | None = None  # [N, H]
    measures: dict[str, np.ndarray] = field(default_factory=dict)  # [N, H], of one atlas
    kinds: np.ndarray | None = None  # [N, H], names, by the signs of logits in that atlas

    @property
    def effect(self) -> np.ndarray:
        """[N, H], mean over prompts."""
        return self.effects.mean(0)

    def maps(self) -> list[HeadMap]:
        maps = [HeadMap("effect", "Direct effect", UNIT, "sequential", self.effect)]
        maps += [HeadMap(name, name, UNIT, "sequential", values) for name, values in self.controls.items()]
        for name, values in self.measures.items():
            unit, scale = ("logits", "diverging") if name == S else ("share", "sequential")
            maps.append(HeadMap(name, name, unit, scale, values))
        return maps

    def notes(self) -> dict[str, str]:
        """ρ and partial ρ of every measure with the effect, with intervals."""
        layer = np.broadcast_to(np.arange(len(self.layers))[:, None], self.effect.shape)
        given = [layer] if self.norms is None else [layer, self.norms]
        found = {}
        for name, values in self.measures.items():
            rho, partial = (
                head_correlation(self.effects, values),
                head_correlation(self.effects, values, given),
            )
            found[name] = f"ρ = {rho}\npartial ρ = {partial}"
        return found

    def lines(self) -> str:
        few = len(self.effects) < ENOUGH_PROMPTS
        return (
            f"{len(self.effects)} prompts; mean effect {self.effect.mean():.4f}, largest "
            f"{self.effect.max():.4f}, floor {self.floor:.2g}"
            + (f"; with fewer than {ENOUGH_PROMPTS} prompts intervals say little" if few else "")
        )


def read_study(causal_atlas: str | Path, atlas: str | Path | None = None) -> HeadStudy:
    """A causal atlas of heads, beside an attention atlas of the same model where one is there."""
    if not Path(causal_atlas).is_file():
        return HeadStudy(
            f"{causal_atlas} not found; run: python experiments/run_causal_atlas.py "
            "(on a CPU add --config_path configs/wan_mini.yaml)"
        )
    cache = load_cache(causal_atlas, expect=("causal_atlas",))
    if cache["each"] != "head" or len(cache["units"]) != cache["num_heads"]:
        return HeadStudy(f"{causal_atlas} is of each {cache['each']}; these figures are of every head")
    prompts = sorted(set(cache["prompts"]), key=cache["prompts"].index)
    rows = [[n for n, prompt in enumerate(cache["prompts"]) if prompt == one] for one in prompts]
    per_run = np.nanmean(cache["effects"].numpy(), -1)  # [R, N, H]
    controls = {
        label: np.nanmean(cache[name].numpy(), (0, -1))
        for name, label in (("frame_control", "On a random frame"), ("head_control", "On another head"))
        if name in cache
    }
    return HeadStudy(
        subtitle=edits_in_words(cache["interventions"]),
        layers=cache["layers"],
        effects=np.stack([per_run[row].mean(0) for row in rows]),  # seeds of a prompt first
        floor=float(np.nanmean(cache["floor"].numpy())),
        controls=controls,
        norms=cache["head_norms"].numpy().mean(0) if "head_norms" in cache else None,
        **_attention(atlas, cache),
    )


def _attention(atlas: str | Path | None, causal: Mapping[str, Any]) -> dict[str, Any]:
    """What heads attend to, and their kinds, from an unedited atlas of the same weights; nothing without."""
    if atlas is None or not Path(atlas).is_file():
        return {}
    cache = load_cache(atlas, expect=("atlas",))
    same = cache["weights_sha256"] == causal["weights_sha256"] and "interventions" not in cache
    if not same or "frame_mass" not in cache or cache["layers"] != causal["layers"]:
        return {}
    found: dict[str, Any] = {"measures": _measures(cache)}
    if "frame_logits" in cache:
        rates = head_taxonomy.context_sign_rate(open_profiles(cache, quantity="mean_logit"))
        labels = head_taxonomy.kinds(rates, head_taxonomy.Thresholds())
        names = {**head_taxonomy.KINDS, head_taxonomy.ABSENT: "no kind"}
        found["kinds"] = np.vectorize(names.__getitem__, otypes=[object])(labels)
    return found


def _measures(cache: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """s, the mass on frame 0 and the mass on the past of every head, [N, H]."""
    view = open_profiles(cache, quantity="mass")
    profile = view.profiles()
    first, _ = first_frame_mass(profile, view.context_frames)
    past = np.nansum(profile[..., list(view.context_frames)], -1)
    found = {"Mass on frame 0": first, "Mass on the past": past}
    matrices = (
        open_profiles(cache, quantity="mean_logit").frame_matrices() if "frame_logits" in cache else None
    )
    if matrices is not None:
        found = {S: first_frame_effect(matrices, cache["block_sizes"])[0]} | found
    return found


# --- What a Figure 4 is made of: noise, waves, and what is left for the first frame at equal distance
class Findings(NamedTuple):
    """Per head [layers, H], in logits; None where the view has no whole matrix."""

    delta: np.ndarray  # first − middle
    max_frame: np.ndarray  # int
    waves: Wave
    over_context: np.ndarray  # first − context
    excess: np.ndarray | None  # at equal distance
    effect: np.ndarray | None  # first-frame effect: rows and distances accounted for
    by_distance: np.ndarray | None  # what first − context would be if distance were all that matters


def why_nothing(view: Profiles) -> str:
    """Why a view has no findings, or ""."""
    if view.quantity != "mean_logit":
        return f"it holds {view.quantity}"
    return "" if view.context_frames else "its queries see no earlier block"


def findings(view: Profiles) -> Findings:
    """Of every head of a view of mean logits with context frames."""
    profile, matrix, context = view.profiles(), view.frame_matrices(), view.context_frames
    s = head_statistics(profile)
    excess = effect = by_distance = None
    if matrix is not None:
        excess = equal_distance_excess(matrix, view.block_sizes)
        effect = first_frame_effect(matrix, view.block_sizes).effect
        by_distance = first_minus_context(distance_profile(matrix, view.block_sizes), context)
    over_context = first_minus_context(profile, context)
    return Findings(s.delta, s.max_frame, wave(profile, context), over_context, excess, effect, by_distance)


def places(view: Profiles, panels: Iterable[HeadPanel]) -> list[tuple[HeadPanel, tuple[int, int]]]:
    """Panels with their place [layer, head] in the arrays of findings."""
    return [(panel, (view.layers.index(panel.layer), panel.head)) for panel in panels]


# --- What notebooks say about a cache in words: what was captured, which heads are shown, statistics per
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
