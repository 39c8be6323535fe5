"""Summarise long rollouts under cache policies, with intervals over prompts (docs/long_rollouts.md).

    python experiments/findings/long_rollouts/run.py                       # draw the figure again
    python experiments/compare_policies.py --policies findings --held_out 18 --seeds 0 1 2 --videos 18
    python experiments/findings/long_rollouts/run.py outputs/policies/comparison.json

Results need the comparison.json of compare_policies.py, hours of a GPU. Where its mp4s are kept, strips.json
beside the results is made of those of the first caption with a wall, a PNG of few colours a policy. These
need minutes of a CPU:

    python experiments/compare_policies.py --policies full window,window=9 window,window=9,sink=3 \\
        window,window=21 window,window=21,sink=3 participative,window=21,sink=10,budget=16,recent=4 \\
        --controls frozen vae --held_out 3 --seeds 0 --videos 3 --device cpu --output_dir outputs/strips
    python experiments/findings/long_rollouts/run.py outputs/strips/comparison.json \\
        --output_path outputs/strips/results.json

effect_by_length.json names the commit that measured it; run.py --first_frame of commit 69f69a7 does it anew.

Fixed before anything was run: the primary measure is the share of the seconds 5 to 60 in which the tracker
finds colour and shape right; all others are secondary. Seeds of a prompt are averaged first, the unit is the
prompt. Policies of FAMILY are compared with full on the same prompts, seeds and noise: sign flips over
prompts, Holm over the family; a user's own policies likewise, outside Holm. Intervals are percentiles of a
bootstrap over prompts.
"""

import argparse
import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
from PIL import Image

from experiments.analysis.drift import FPS
from experiments.analysis.results import CONTROLS, PRIMARY, read_strips
from experiments.analysis.stats import bootstrap, holm, rounded, sign_flip_p
from experiments.caches.files import require_ffmpeg, save_report
from experiments.figures.long_rollouts import long_strips
from experiments.figures.style import save_svg
from experiments.findings.report import finding_parser
from experiments.running.cli import main
from experiments.studies.policy_comparison import (
    DEEP_SINK,
    EQUAL,
    FAMILY,
    FULL,
    GRID,
    NAMED,
    PARTICIPATIVE,
    spec,
)
from wan.blocks import VIDEO_FRAMES_PER_LATENT
from wan.files import read_json

HERE = Path("experiments/findings/long_rollouts")
FROM, TO = 5, 60  # seconds that count: before, every policy sees all there is
OF_TRACKER = (PRIMARY, "color", "shape", "visible", "background")
OF_SECONDS = ("hue_kept", "motion", "flicker", "distance", "sharpness")
OF_WHOLE = ("sharpness_change", "clipped_change", "flicker_change", "largest_drop", "non_repetition")
SHOWN = (*FAMILY[:2], "window,window=12,sink=3", DEEP_SINK, PARTICIPATIVE)  # beside full, as curves
MOST_SHOWN = 7  # as many colours as figures of curves have
CURVES = {"right": "tracker", "hue_kept": "seconds", "motion": "seconds"}
WINDOWS, DEEP = ({size: spec(policy, *size) for size in GRID} for policy in ("window", "deep_sink"))
QUESTIONS = {  # the first policy less the second
    "a sink of four blocks against one, window 21, moved along": (DEEP[21, 12], DEEP[21, 3]),
    "a sink of four blocks against one, window 21, left where it was": (WINDOWS[21, 12], WINDOWS[21, 3]),
    "a sink of one block against none, window 9": (WINDOWS[9, 3], WINDOWS[9, 0]),
    "a sink of one block against none, window 21": (WINDOWS[21, 3], WINDOWS[21, 0]),
    # Of every size: an average over them hides that the sign changes.
    **{
        f"the sink's RoPE moved along against left, {size[0]}/{size[1]}": (DEEP[size], WINDOWS[size])
        for size in GRID
        if size[1]
    },
    "participative compression against the same deep sink": (PARTICIPATIVE, DEEP_SINK),
}

SECONDS = (0, 2, 5, 10, 20, 30, 45, 59)  # of the strips
ROWS = (  # of the strips
    *("full", "window,window=9", "window,window=9,sink=3", "window,window=21", "window,window=21,sink=3"),
    *(PARTICIPATIVE, "frozen", "vae"),
)
WALL = "wall"  # the kind of scene that strips show: the first such caption
COLOURS, SIDE = 32, 64  # of a strip: colours, pixels of a frame's side

Video = Mapping[str, Any]
Values = Mapping[str, np.ndarray]  # of a policy: measure -> [prompts]


def run(argv=None):
    parser = finding_parser(__doc__, "long_rollouts")
    flag = parser.add_argument
    flag("comparison", nargs="?", type=Path, help="comparison.json of compare_policies.py")
    args = parser.parse_args(argv)
    if args.comparison:
        comparison = read_json(args.comparison)
        save_report(findings(comparison), args.output_path)
        print(args.output_path)
        make_strips(comparison, args.comparison.parent / "videos", args.output_path.with_name("strips.json"))
    else:
        draw(args)


def draw(args: argparse.Namespace) -> None:
    """Compute what the map of sinks says, and draw the strips."""
    results = read_json(HERE / "results.json")
    save_report(results | {"sinks": sinks_of(results["sink_map"])}, args.output_path)
    strips, seconds, about = read_strips(HERE / "strips.json", HERE / "results.json")
    figure = long_strips(strips, seconds, about)
    print(save_svg(figure, args.figures / "long_rollouts.svg"))


def sinks_of(sink_map: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return differences of means between policies of the map; paired intervals need its videos.

    moved less left: a sink whose RoPE moves with the window less one that stays, (window, sink) -> points,
    with the interval of two independent samples: too wide by as much as prompts agree.
    one block less none: a window with a sink of 3 frames less the window alone, window -> points.
    """
    left, moved = (
        {(row["window"], row["sink"]): row[PRIMARY] for row in sink_map[policy]}
        for policy in ("window", "deep_sink")
    )
    less = {}
    for size, one in sorted(moved.items()):
        difference, halves = one[0] - left[size][0], [(x[2] - x[1]) / 2 for x in (one, left[size])]
        half = np.hypot(*halves)
        less["{}/{}".format(*size)] = rounded([difference, difference - half, difference + half])
    windows = sorted({window for window, _ in left})
    return {
        "moved less left": less,
        "one block less none": {str(one): round(left[one, 3][0] - left[one, 0][0], 3) for one in windows},
    }


# --- Policies, with intervals over prompts
def short_label(label: str) -> str:
    """Return the name of a policy in figures: deep_sink 21/10."""
    name, *pairs = label.split(",")
    fields = dict(pair.partition("=")[::2] for pair in pairs)
    return f"{name} {fields['window']}/{fields.get('sink', 0)}" if "window" in fields else name


def findings(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """Return all numbers of the findings, as JSON holds them, of a comparison of --policies findings."""
    prompts, kinds = list(comparison["prompts"]), np.array(comparison["kinds"], str)
    costs = comparison["costs"]
    videos: dict[str, dict[str, list[Video]]] = {}  # by policy and prompt
    for video in comparison["videos"]:
        videos.setdefault(video["label"], {}).setdefault(video["prompt"], []).append(video)
    model, num_frames = comparison["model"], comparison["num_frames"]
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
        return found | ({"cost": costs[label]} if label in costs else {})

    # Own policies are drawn too, as long as there are colours.
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

    # Seeds are averaged first: the unit is the prompt.
    rows = [[measured(video) for video in of_prompt] for of_prompt in videos]
    names = (*OF_TRACKER, *OF_SECONDS, *OF_WHOLE)
    return {name: np.array([np.mean([one[name] for one in row]) for row in rows]) for name in names}


def against_full(values: Mapping[str, Values], own: Sequence[str]) -> dict[str, Any]:
    """Compare the primary measure with full's, paired, with Holm-adjusted p over the family.

    A user's own policies come last, and have no adjusted p.
    """
    family = [label for label in FAMILY if label in values]
    # Paired by prompt, seed and noise.
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
        # Nearest on a scale of ratios: half and twice the bytes are as far.
        window = min(windows, key=lambda one: abs(np.log(held[one] / held[label])))
        gains[label] = gain = values[label][PRIMARY] - values[window][PRIMARY]
        by_kind = {str(kind): _interval(gain[kinds == kind]) for kind in dict.fromkeys(kinds)}
        found[label] = {"window": window, "bytes": round(held[label] / held[window], 3), "by_kind": by_kind}
    return {label: found[label] | one for label, one in _paired(gains, len(gains)).items()}


def _paired(gains: Mapping[str, np.ndarray], adjusted: int) -> dict[str, Any]:
    """Return differences with p by sign flips, for the first `adjusted` also by Holm over these."""
    p_values = [_p_value(gain) for gain in gains.values()]
    tested = [np.nan if p is None else p for p in p_values[:adjusted]]
    holms = [None if np.isnan(q) else round(float(q), 5) for q in holm(tested)]
    holms += [None] * (len(gains) - adjusted)
    return {
        label: {"difference": _interval(gain), "p": p, "p_holm": q}
        for (label, gain), p, q in zip(gains.items(), p_values, holms, strict=True)
    }


def answers(values: Mapping[str, Values]) -> dict[str, Any]:
    """Answer each question by a paired difference: estimate, interval, unadjusted p."""
    found: dict[str, Any] = {}
    for question, (one, other) in QUESTIONS.items():
        if one in values and other in values:
            gains = {name: values[one][name] - values[other][name] for name in (PRIMARY, "motion")}
            found[question] = {
                name: {"difference": _interval(gain), "p": _p_value(gain)} for name, gain in gains.items()
            }
    return found


def _curves(videos: Sequence[Sequence[Video]]) -> dict[str, Any]:
    """Return mean and interval over prompts of some measures at every second."""
    found = {}
    for name, source in CURVES.items():
        # [prompts, seconds]
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


def _p_value(gains: np.ndarray) -> float | None:
    """Return p by sign flips of the differences that _interval counts; None where there is none."""
    known = gains[~np.isnan(gains)]
    return round(sign_flip_p(known), 5) if len(known) else None


# --- Frames of long videos side by side, a row a policy, small enough to be kept beside the results
def make_strips(comparison: Mapping[str, Any], folder: Path, output: Path) -> None:
    """Write strips of the first caption with a wall, first seed, where its mp4s lie in a folder."""
    kinds = comparison["kinds"]
    number = kinds.index(WALL) if WALL in kinds else None
    made = {video["label"] for video in comparison["videos"]}
    files = {label: folder / f"{label}_{number}.mp4" for label in ROWS if label in made}
    if number is None or not all(path.is_file() for path in files.values()):
        print(f"{folder} lacks videos of a caption with a wall (--videos): {output.name} is as before")
        return
    require_ffmpeg()
    prompt, seed = comparison["prompts"][number], comparison["videos"][0]["seed"]
    right = {
        video["label"]: float(np.mean(video["tracker"][PRIMARY][FROM:TO]))
        for video in comparison["videos"]
        if (video["prompt"], video["seed"]) == (prompt, seed)
    }
    rows = {}
    for label, path in files.items():
        video = iio.imread(path)  # uint8 [T, H, W, 3]
        scale = video.shape[1] // SIDE
        frames = [video[min(second * FPS, len(video) - 1), ::scale, ::scale] for second in SECONDS]
        content = io.BytesIO()
        Image.fromarray(np.concatenate(frames, 1)).quantize(COLOURS).save(content, "PNG", optimize=True)
        picture = base64.b64encode(content.getvalue()).decode()
        rows[label] = {"right": round(right[label], 3), "png": picture}
    about = {name: comparison.get(name) for name in ("model", "weights_sha256", "made")}
    about |= {"prompt": prompt, "seed": seed, "seconds": list(SECONDS), "side": SIDE}
    save_report(about | {"rows": rows}, output)


if __name__ == "__main__":
    main(run)
