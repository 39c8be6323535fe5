"""What a comparison of policies says, with intervals over prompts.

Fixed before anything was run: the primary measure is the share of the seconds 5 to 60 in which the tracker
finds colour and shape right; all others are secondary. Seeds of a prompt are averaged first, the unit is the
prompt. Policies of FAMILY are compared with full on the same prompts, seeds and noise: sign flips over
prompts, Holm over the family; a user's own policies likewise, outside Holm. Intervals are percentiles of a
bootstrap over prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.analysis.effects import bootstrap, holm, sign_flip_p
from experiments.extraction.video import FPS
from experiments.studies.policy_comparison import (
    CONTROLS,
    DEEP_SINK,
    FAMILY,
    FULL,
    NAMED,
    PARTICIPATIVE,
    SINKS,
    WINDOWS,
    short_label,
    spec,
)
from wan.blocks import VIDEO_FRAMES_PER_LATENT
from wan.errors import ConfigError

FROM, TO = 5, 60  # seconds that count: before, every policy sees all there is
PRIMARY = "right"
SHOWN = (*FAMILY[:2], "window,window=12,sink=3", DEEP_SINK, PARTICIPATIVE)  # beside full, as curves
MOST_SHOWN = 7  # as many colours as figures of curves have
CURVES = ("right", "hue_kept", "motion")
DRAWS = 2000

Video = Mapping[str, Any]
Measure = Callable[[Video], float]


def _answers(name: str) -> Measure:
    return lambda video: float(np.mean(video["tracker"][name][FROM:TO]))


def _seconds(name: str) -> Measure:
    return lambda video: float(np.mean(np.array(video["seconds"][name][FROM:TO], float)))


def _whole(name: str) -> Measure:
    return lambda video: float("nan") if video["whole"][name] is None else float(video["whole"][name])


SECONDARY: dict[str, Measure] = {
    **{name: _answers(name) for name in ("color", "shape", "visible", "background")},
    **{name: _seconds(name) for name in ("hue_kept", "motion", "flicker", "distance", "sharpness")},
    **{
        name: _whole(name)
        for name in ("sharpness_change", "clipped_change", "flicker_change", "largest_drop", "non_repetition")
    },
}
MEASURED: dict[str, Measure] = {PRIMARY: _answers(PRIMARY), **SECONDARY}


class Table:
    """The videos of a comparison by policy and prompt."""

    def __init__(self, comparison: Mapping[str, Any]):
        """Raises ConfigError for what compare_policies.py did not write, or not of the miniature."""
        try:
            self.prompts, self.kinds = list(comparison["prompts"]), list(comparison["kinds"])
            self.unnamed, self.costs = list(comparison["unnamed"]), comparison["costs"]
            self.videos: dict[tuple[str, str], list[Video]] = {}
            for video in comparison["videos"]:
                self.videos.setdefault((video["label"], video["prompt"]), []).append(video)
            self.labels = list(dict.fromkeys(video["label"] for video in comparison["videos"]))
            pixels = 1 + VIDEO_FRAMES_PER_LATENT * (comparison["num_frames"] - 1)
            self.end = min(TO, round(pixels / FPS))  # seconds
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"no comparison of compare_policies.py: {type(error).__name__} {error}"
            ) from None
        if FULL not in self.labels or not self.kinds:
            raise ConfigError("the findings need the policy full and held-out scenes: --policies findings")

    def values(self, label: str, measure: Measure, prompts: Sequence[str] | None = None) -> np.ndarray:
        """The measure of each prompt, mean over its seeds -> [prompts]."""
        chosen = self.prompts if prompts is None else prompts
        return np.array([np.mean([measure(v) for v in self.videos[label, prompt]]) for prompt in chosen])

    def name(self, label: str) -> str:
        """How figures name a policy: shortly, where no other is named so."""
        short = [short_label(one) for one in self.labels]
        return short_label(label) if short.count(short_label(label)) == 1 else label

    @property
    def own(self) -> list[str]:
        """Policies that a user named beside those of the findings."""
        return [label for label in self.labels if label not in (*NAMED["findings"], *CONTROLS)]

    def of_kind(self, kind: str) -> list[str]:
        return [prompt for prompt, one in zip(self.prompts, self.kinds, strict=True) if one == kind]


def findings(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """All numbers of the findings, as JSON holds them."""
    table = Table(comparison)
    seconds = f"{FROM} to {table.end}"
    return {
        "primary": f"share of seconds {seconds} in which the tracker finds colour and shape right",
        "prompts": len(table.prompts),
        "kinds": {kind: table.kinds.count(kind) for kind in dict.fromkeys(table.kinds)},
        "seeds": len(table.videos[FULL, table.prompts[0]]),
        "num_frames": comparison["num_frames"],
        "weights_sha256": comparison["weights_sha256"],
        "made": comparison.get("made"),
        "policies": {label: of_policy(table, label) for label in table.labels},
        "against_full": against_full(table),
        "sink_map": {policy: sink_map(table, policy) for policy in ("window", "deep_sink")},
        "questions": questions(table),
        "curves": {label: curves(table, label) for label in _shown(table)},
    }


def of_policy(table: Table, label: str) -> dict[str, Any]:
    """Every measure with its interval; what hid; cost."""
    found: dict[str, Any] = {"name": table.name(label)}
    found["measures"] = {name: _interval(table.values(label, of)) for name, of in MEASURED.items()}
    found["by_kind"] = {
        kind: _interval(table.values(label, MEASURED[PRIMARY], table.of_kind(kind)))
        for kind in dict.fromkeys(table.kinds)
    }
    unnamed = [prompt for prompt, one in zip(table.prompts, table.unnamed, strict=True) if one]
    if unnamed:  # the colour of what hides is in the past alone
        found["unnamed_color"] = _interval(table.values(label, MEASURED["color"], unnamed))
    if label in table.costs:
        found["cost"] = table.costs[label]
    return found


def against_full(table: Table) -> dict[str, Any]:
    """Paired differences to full of the primary measure, with Holm-adjusted p over the family.

    A user's own policies come last, and have no adjusted p.
    """
    base = table.values(FULL, MEASURED[PRIMARY])
    there = [label for label in FAMILY if label in table.labels]
    gains = {label: table.values(label, MEASURED[PRIMARY]) - base for label in (*there, *table.own)}
    p_values = [sign_flip_p(gain) for gain in gains.values()]
    adjusted = [round(float(q), 5) for q in holm(p_values[: len(there)])]
    return {
        label: {"difference": _interval(gain), "p": round(p, 5), "p_holm": q}
        for (label, gain), p, q in zip(
            gains.items(), p_values, adjusted + [None] * len(table.own), strict=True
        )
    }


def sink_map(table: Table, policy: str) -> list[dict[str, Any]]:
    """The primary measure, and motion, of every window and sink that was run."""
    rows = []
    for window in WINDOWS:
        for sink in SINKS:
            label = spec(policy, window, sink)
            if label in table.labels:
                values = {
                    name: _interval(table.values(label, MEASURED[name])) for name in (PRIMARY, "motion")
                }
                rows.append({"window": window, "sink": sink, **values})
    return rows


def questions(table: Table) -> dict[str, Any]:
    """Paired differences that answer one question each: estimate, interval, unadjusted p."""
    moving = [
        (spec("deep_sink", window, sink), spec("window", window, sink))
        for window in WINDOWS
        for sink in SINKS
    ]
    asked: dict[str, list[tuple[str, str]]] = {
        "a sink of four blocks against one, window 21, moved along": [
            (spec("deep_sink", 21, 12), spec("deep_sink", 21, 3))
        ],
        "a sink of four blocks against one, window 21, left where it was": [
            (spec("window", 21, 12), spec("window", 21, 3))
        ],
        "a sink of one block against none, window 9": [(spec("window", 9, 3), spec("window", 9, 0))],
        "a sink of one block against none, window 21": [(spec("window", 21, 3), spec("window", 21, 0))],
        "the sink's RoPE moved along against left, all windows and sinks": moving,
        "participative compression against the same deep sink": [(PARTICIPATIVE, DEEP_SINK)],
    }
    found = {}
    for question, pairs in asked.items():
        pairs = [pair for pair in pairs if set(pair) <= set(table.labels)]
        if not pairs:
            continue
        answers: dict[str, Any] = {"pairs": len(pairs)}
        for name in (PRIMARY, "motion"):
            gains = [
                table.values(one, MEASURED[name]) - table.values(other, MEASURED[name])
                for one, other in pairs
            ]
            gain = np.mean(gains, 0)
            answers[name] = {"difference": _interval(gain), "p": round(sign_flip_p(gain), 5)}
        found[question] = answers
    return found


def curves(table: Table, label: str) -> dict[str, Any]:
    """Mean and interval over prompts of some measures at every second."""
    found = {}
    for name in CURVES:
        source = "tracker" if name == PRIMARY else "seconds"
        per_prompt = np.array(
            [
                np.mean([np.array(v[source][name], float) for v in table.videos[label, prompt]], 0)
                for prompt in table.prompts
            ]
        )  # [prompts, seconds]
        draws = np.random.default_rng(0).integers(len(per_prompt), size=(DRAWS, len(per_prompt)))
        low, high = np.percentile(per_prompt[draws].mean(1), [2.5, 97.5], axis=0)
        found[name] = {
            key: [round(float(x), 3) for x in values]
            for key, values in (("mean", per_prompt.mean(0)), ("low", low), ("high", high))
        }
    return found


def _shown(table: Table) -> list[str]:
    policies = [label for label in (FULL, *SHOWN, *table.own) if label in table.labels]
    return policies[:MOST_SHOWN] + [label for label in CONTROLS if label in table.labels]


def _interval(values: np.ndarray) -> list[float | None]:
    """Estimate, low and high; values that are NaN are left out, and None is what then is not there."""
    known = values[~np.isnan(values)]
    if not len(known):
        return [None, None, None]
    return [round(float(x), 4) for x in bootstrap(known, DRAWS)]
