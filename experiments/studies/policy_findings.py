"""Summarise a comparison of policies, with intervals over prompts.

Fixed before anything was run: the primary measure is the share of the seconds 5 to 60 in which the tracker
finds colour and shape right; all others are secondary. Seeds of a prompt are averaged first, the unit is the
prompt. Policies of FAMILY are compared with full on the same prompts, seeds and noise: sign flips over
prompts, Holm over the family; a user's own policies likewise, outside Holm. Intervals are percentiles of a
bootstrap over prompts.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from experiments.analysis.drift import FPS
from experiments.analysis.long_rollouts import CONTROLS
from experiments.analysis.stats import bootstrap, holm, rounded, sign_flip_p
from wan.blocks import VIDEO_FRAMES_PER_LATENT
from wan.errors import ConfigError

FULL = "full"
DEEP_SINK = "deep_sink,window=21,sink=10"  # Deep Forcing's, and the same with compression
PARTICIPATIVE = "participative,window=21,sink=10,budget=16,recent=4"
FAMILY = (  # compared with full: published settings, and the plain window they came from
    "window,window=9",
    "window,window=9,sink=3",
    "window,window=12,sink=3",
    "relative,window=6,sink=1",
    "relative,window=12,sink=3",
    DEEP_SINK,
    PARTICIPATIVE,
    "ema_sink,window=9,sink=3",
    "two_memories,window=12,sink=3",
    "rolling_sink,window=21",
    "memory_bank,window=12,sink=3,bank=3,interval=3",
)


def spec(policy: str, window: int, sink: int) -> str:
    """Write a policy of a window and a sink as --policies does."""
    return f"{policy},window={window}" + (f",sink={sink}" if sink else "")


GRID = list(product((6, 9, 12, 21), (0, 3, 6, 9, 12, 15)))  # windows and sinks in frames; a block has three
SINK_MAP = [  # every window and sink that leave room for a block
    spec(policy, window, sink)
    for policy in ("window", "deep_sink")
    for window, sink in GRID
    if sink + 3 <= window and (sink or policy == "window")
]
HEADS = (
    *("dummy_forcing", "dummy_forcing_far", "forcing_kv", "forcing_kv_wide"),
    *("triattention", "triattention_small", "mass_heads", "pyramid_heads"),
)
EQUAL = (spec("window", 6, 3), spec("window", 9, 3))  # beside head-wise policies of as many bytes
NAMED = {
    "family": (FULL, *FAMILY),
    "findings": tuple(dict.fromkeys((FULL, *FAMILY, *SINK_MAP))),
    "heads": (FULL, *EQUAL, spec("window", 6, 1), *(f"mini_{name}" for name in HEADS)),
}

FROM, TO = 5, 60  # seconds that count: before, every policy sees all there is
PRIMARY = "right"
OF_TRACKER = (PRIMARY, "color", "shape", "visible", "background")
OF_SECONDS = ("hue_kept", "motion", "flicker", "distance", "sharpness")
OF_WHOLE = ("sharpness_change", "clipped_change", "flicker_change", "largest_drop", "non_repetition")
SHOWN = (*FAMILY[:2], "window,window=12,sink=3", DEEP_SINK, PARTICIPATIVE)  # beside full, as curves
MOST_SHOWN = 7  # as many colours as figures of curves have
CURVES = {"right": "tracker", "hue_kept": "seconds", "motion": "seconds"}
WINDOWS, DEEP = ({size: spec(policy, *size) for size in GRID} for policy in ("window", "deep_sink"))
QUESTIONS = {  # differences between the policies of each pair
    "a sink of four blocks against one, window 21, moved along": [(DEEP[21, 12], DEEP[21, 3])],
    "a sink of four blocks against one, window 21, left where it was": [(WINDOWS[21, 12], WINDOWS[21, 3])],
    "a sink of one block against none, window 9": [(WINDOWS[9, 3], WINDOWS[9, 0])],
    "a sink of one block against none, window 21": [(WINDOWS[21, 3], WINDOWS[21, 0])],
    "the sink's RoPE moved along against left, all windows and sinks": [
        (DEEP[size], WINDOWS[size]) for size in GRID
    ],
    "participative compression against the same deep sink": [(PARTICIPATIVE, DEEP_SINK)],
}

Video = Mapping[str, Any]
Values = Mapping[str, np.ndarray]  # of a policy: measure -> [prompts]


def short_label(label: str) -> str:
    """Return the name of a policy in figures: deep_sink 21/10."""
    name, *pairs = label.split(",")
    fields = dict(pair.partition("=")[::2] for pair in pairs)
    return f"{name} {fields['window']}/{fields.get('sink', 0)}" if "window" in fields else name


def findings(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """Return all numbers of the findings, as JSON holds them.

    Raises ConfigError for what compare_policies.py did not write, or not of the miniature.
    """
    try:
        prompts, kinds = list(comparison["prompts"]), np.array(comparison["kinds"], str)
        unnamed, costs = np.array(comparison["unnamed"], bool), comparison["costs"]
        videos: dict[str, dict[str, list[Video]]] = {}  # by policy and prompt
        for video in comparison["videos"]:
            videos.setdefault(video["label"], {}).setdefault(video["prompt"], []).append(video)
        model, num_frames = comparison["model"], comparison["num_frames"]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"no comparison of compare_policies.py: {type(error).__name__} {error}") from None
    if FULL not in videos or not len(kinds):
        raise ConfigError("the findings need the policy full and held-out scenes: --policies findings")
    seconds = min(TO, round((1 + VIDEO_FRAMES_PER_LATENT * (num_frames - 1)) / FPS))
    values = {
        label: _by_prompt([of_label[prompt] for prompt in prompts]) for label, of_label in videos.items()
    }
    own = [label for label in videos if label not in (*NAMED["findings"], *CONTROLS)]
    short = [short_label(label) for label in videos]
    counts = {str(kind): int((kinds == kind).sum()) for kind in dict.fromkeys(kinds)}

    def of_policy(label: str) -> dict[str, Any]:
        """Return every measure with its interval, the primary one by kind, and the cost."""
        mine, name = values[label], short_label(label)
        found: dict[str, Any] = {
            "name": name if short.count(name) == 1 else label,
            "measures": {name: _interval(mine[name]) for name in mine},
            "by_kind": {kind: _interval(mine[PRIMARY][kinds == kind]) for kind in counts},
        }
        if unnamed.any():  # the colour of what hides is in the past alone
            found["unnamed_color"] = _interval(mine["color"][unnamed])
        return found | ({"cost": costs[label]} if label in costs else {})

    shown = [label for label in (FULL, *SHOWN, *own) if label in videos][:MOST_SHOWN]
    return {
        "primary": f"share of seconds {FROM} to {seconds} in which the tracker finds colour and shape right",
        "prompts": len(prompts),
        "kinds": counts,
        "seeds": len(videos[FULL][prompts[0]]),
        "model": model,
        "num_frames": num_frames,
        "weights_sha256": comparison["weights_sha256"],
        "made": comparison.get("made"),
        "policies": {label: of_policy(label) for label in videos},
        "against_full": against_full(values, own),
        "at_equal_bytes": at_equal_bytes(values, costs, kinds),
        "sink_map": {
            policy: [
                {"window": window, "sink": sink}
                | {name: _interval(values[spec(policy, window, sink)][name]) for name in (PRIMARY, "motion")}
                for window, sink in GRID
                if spec(policy, window, sink) in values
            ]
            for policy in ("window", "deep_sink")
        },
        "questions": answers(values),
        "curves": {
            label: _curves([videos[label][prompt] for prompt in prompts])
            for label in (*shown, *(control for control in CONTROLS if control in videos))
        },
    }


def _by_prompt(videos: Sequence[Sequence[Video]]) -> dict[str, np.ndarray]:
    """Return every measure of the videos of each prompt, mean over seeds: [prompts]."""

    def measured(video: Video) -> dict[str, float]:
        return {
            **{name: float(np.mean(video["tracker"][name][FROM:TO])) for name in OF_TRACKER},
            **{name: float(np.mean(np.array(video["seconds"][name][FROM:TO], float))) for name in OF_SECONDS},
            **{name: float("nan" if (x := video["whole"][name]) is None else x) for name in OF_WHOLE},
        }

    rows = [[measured(video) for video in of_prompt] for of_prompt in videos]
    names = (*OF_TRACKER, *OF_SECONDS, *OF_WHOLE)
    return {name: np.array([np.mean([one[name] for one in row]) for row in rows]) for name in names}


def against_full(values: Mapping[str, Values], own: Sequence[str]) -> dict[str, Any]:
    """Compare the primary measure with full's, paired, with Holm-adjusted p over the family.

    A user's own policies come last, and have no adjusted p.
    """
    family = [label for label in FAMILY if label in values]
    gains = {label: values[label][PRIMARY] - values[FULL][PRIMARY] for label in (*family, *own)}
    return _paired(gains, len(family))


def at_equal_bytes(
    values: Mapping[str, Values], costs: Mapping[str, Any], kinds: np.ndarray
) -> dict[str, Any]:
    """Compare each head-wise policy's primary measure with that of the window and sink nearest in bytes.

    Pairs are of the same prompts and seeds; p is by sign flips over prompts, Holm over all of these policies.
    """
    held = {label: costs[label]["cache_bytes"] for label in values if costs.get(label)}
    windows, found, gains = [label for label in EQUAL if label in held], {}, {}
    for label in (name for name in held if name.startswith("mini_") and windows):
        window = min(windows, key=lambda one: abs(np.log(held[one] / held[label])))
        gains[label] = gain = values[label][PRIMARY] - values[window][PRIMARY]
        by_kind = {str(kind): _interval(gain[kinds == kind]) for kind in dict.fromkeys(kinds)}
        found[label] = {"window": window, "bytes": round(held[label] / held[window], 3), "by_kind": by_kind}
    return {label: found[label] | one for label, one in _paired(gains, len(gains)).items()}


def _paired(gains: Mapping[str, np.ndarray], adjusted: int) -> dict[str, Any]:
    """Return differences with p by sign flips, for the first `adjusted` also by Holm over these."""
    p_values = [sign_flip_p(gain) for gain in gains.values()]
    holms: list[float | None] = [*rounded(holm(p_values[:adjusted]), 5)] if adjusted else []
    holms += [None] * (len(gains) - adjusted)
    return {
        label: {"difference": _interval(gain), "p": round(p, 5), "p_holm": q}
        for (label, gain), p, q in zip(gains.items(), p_values, holms, strict=True)
    }


def answers(values: Mapping[str, Values]) -> dict[str, Any]:
    """Answer each question by a paired difference: estimate, interval, unadjusted p."""
    found: dict[str, Any] = {}
    for question, asked in QUESTIONS.items():
        if pairs := [pair for pair in asked if set(pair) <= set(values)]:
            found[question] = {"pairs": len(pairs)}
            for name in (PRIMARY, "motion"):
                gain = np.mean([values[one][name] - values[other][name] for one, other in pairs], 0)
                found[question][name] = {"difference": _interval(gain), "p": round(sign_flip_p(gain), 5)}
    return found


def _curves(videos: Sequence[Sequence[Video]]) -> dict[str, Any]:
    """Return mean and interval over prompts of some measures at every second."""
    found = {}
    for name, source in CURVES.items():
        rows = [np.mean([np.array(v[source][name], float) for v in of_prompt], 0) for of_prompt in videos]
        each = zip(*(bootstrap(second) for second in np.transpose(rows)), strict=True)
        found[name] = {
            key: rounded(values) for key, values in zip(("mean", "low", "high"), each, strict=True)
        }
    return found


def _interval(values: np.ndarray) -> list[float | None]:
    """Return estimate, low and high of the values that are not NaN; None where there is none."""
    known = values[~np.isnan(values)]
    return [*rounded(bootstrap(known), 4)] if len(known) else [None] * 3
