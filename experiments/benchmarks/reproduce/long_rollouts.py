"""Make the findings about long rollouts from what compare_policies.py wrote (docs/long_rollouts.md).

    python experiments/compare_policies.py --policies findings --held_out 18 --seeds 0 1 2 --videos 18
    python experiments/benchmarks/reproduce/long_rollouts.py outputs/policies/comparison.json
    python experiments/benchmarks/reproduce/long_rollouts.py --first_frame --output_path effects.json

Writes docs/long_rollouts.json; where the comparison kept the mp4s, also strips, a PNG of few colours a
policy, and the README's figure: each policy's median video. --strips writes them alone. --first_frame rolls
the miniature out instead and measures the first-frame effect by length: mean logits of pass 0, fitted to the
first frames of each length; placebos are the same fit for frames 1 to 14.
"""

import argparse
import base64
import io
from pathlib import Path
from typing import Any

import numpy as np

from experiments.analysis.drift import FPS
from experiments.analysis.first_frame import first_frame_effect, placebo_effects
from experiments.analysis.long_rollouts import read_strips
from experiments.analysis.stats import bootstrap, rounded
from experiments.benchmarks.reproduce.common import finding_parser, save_finding
from experiments.caches.files import require_ffmpeg, save_report
from experiments.captured import capture
from experiments.figures.long_rollouts import long_strips
from experiments.figures.style import save_svg
from experiments.running.cli import count, main
from experiments.session import load
from experiments.studies.policy_comparison import read_policies
from experiments.studies.policy_findings import FROM, PRIMARY, TO, findings, short_label
from wan.errors import ConfigError
from wan.files import read_json

SECONDS = (0, 2, 5, 10, 15, 20, 30, 40, 50, 59)
ROWS = {  # label -> what the figure calls it
    "full": "full",
    "window,window=9": "window 9, no sink",
    "window,window=9,sink=3": "window 9, sink 3",
    "deep_sink,window=21,sink=10": "deep sink 21/10",
    "participative,window=21,sink=10,budget=16,recent=4": "participative 21/10",
    "vae": "rendered, through the VAE",
}
UNRANKED = ("deep sink 21/10",)  # the README does not rank it
COLOURS, SIDE = 32, 64
POLICIES = ("full", "window,window=9,sink=3", "deep_sink,window=21,sink=10")
PLACEBOS = range(1, 15)


def run(argv=None):
    parser = finding_parser(__doc__, "docs/long_rollouts.json")
    flag = parser.add_argument
    flag("comparison", nargs="?", type=Path, help="comparison.json of compare_policies.py")
    flag("--strips", action="store_true", help="write the strips of the comparison alone")
    flag("--first_frame", action="store_true", help="measure the first-frame effect by length instead")
    flag("--lengths", type=count, nargs="+", default=[21, 45, 93, 141, 240], help="latent frames")
    flag("--prompts", type=count, default=4, help="reference prompts that are rolled out together")
    args = parser.parse_args(argv)
    if bool(args.comparison) == args.first_frame:
        raise ConfigError("give the comparison.json of compare_policies.py, or --first_frame")
    if args.first_frame:
        save_finding(args, by_length(args))
        return
    comparison = read_json(args.comparison)
    found = findings(comparison)  # refuses what is no comparison
    if not args.strips:
        save_report(found, args.output_path)
        print(args.output_path)
    made = {video["label"] for video in comparison["videos"]}
    medians = {label: median_video(comparison, label) for label in ROWS if label in made}
    videos = {label: args.comparison.parent / f"videos/{label}_{n}.mp4" for label, (n, _) in medians.items()}
    if videos and all(path.is_file() for path in videos.values()):
        make_strips(comparison, medians, videos, args)
    elif args.strips:
        raise ConfigError(f"{args.comparison.parent}/videos lacks median videos: compare with --videos")


# --- Frames of long videos side by side, a row a policy, small enough to be kept beside the findings
def median_video(comparison: dict[str, Any], label: str) -> tuple[int, float]:
    """Return the number of the prompt of a policy's median video, of the first seed, and its share right.

    Of two in the middle it is the lower one, of equals the first prompt's.
    """
    first: dict[str, float] = {}
    for video in (video for video in comparison["videos"] if video["label"] == label):
        first.setdefault(video["prompt"], float(np.mean(video["tracker"][PRIMARY][FROM:TO])))
    prompt = sorted(comparison["prompts"], key=first.__getitem__)[(len(first) - 1) // 2]
    return comparison["prompts"].index(prompt), first[prompt]


def make_strips(
    comparison: dict[str, Any],
    medians: dict[str, tuple[int, float]],
    videos: dict[str, Path],
    args: argparse.Namespace,
) -> None:
    """Write the strips of each policy's median video, and draw those of the README."""
    import imageio.v3 as iio
    from PIL import Image

    require_ffmpeg()
    output, rows, prompts = args.output_path.with_name(f"{args.output_path.stem}_strips.json"), {}, {}
    for label, (number, right) in medians.items():
        video = iio.imread(videos[label])
        scale = video.shape[1] // SIDE
        frames = [video[min(second * FPS, len(video) - 1), ::scale, ::scale] for second in SECONDS]
        content = io.BytesIO()
        Image.fromarray(np.concatenate(frames, 1)).quantize(COLOURS).save(content, "PNG", optimize=True)
        name = f"{ROWS[label]}: {right:.0%} ({comparison['kinds'][number]})"
        rows[name] = base64.b64encode(content.getvalue()).decode()
        prompts[name] = comparison["prompts"][number]
    about = {name: comparison[name] for name in ("model", "weights_sha256", "made")}
    about |= {"seed": comparison["videos"][0]["seed"], "prompts": prompts}
    about["rule"] = f"each policy's median video; %: seconds {FROM} to {TO} with colour and shape right"
    save_report(about | {"seconds": list(SECONDS), "side": SIDE, "rows": rows}, output)
    drawn, seconds, subtitle = read_strips(output)
    chosen = {name: row for name, row in drawn.items() if not name.startswith(UNRANKED)}
    print(save_svg(long_strips(chosen, seconds, subtitle), args.figures / "long_rollouts.svg"))


# --- The first-frame effect by length
def by_length(args: argparse.Namespace) -> dict[str, Any]:
    """Roll out the reference prompts, each with a seed of its own, under three policies; fit every length."""
    rows = []
    for label, settings in read_policies(POLICIES).items():
        given = {"num_frames": max(args.lengths), "cache_policy": settings, "device": args.device}
        pipe = load(args.config_path, **given)
        with capture(pipe, mass=False) as seen:
            for number, prompt in enumerate(pipe.config.reference_prompts[: args.prompts]):
                pipe.generate(prompt, seed=pipe.config.seed + number)
        matrices = [seen.atlas(run).view(step=0).frame_matrices() for run in seen.runs]
        every_head = np.stack([m.reshape(-1, *m.shape[-2:]) for m in matrices if m is not None])
        for length in sorted(args.lengths):
            cut, sizes = every_head[:, :, :length, :length], [3] * (length // 3)
            effect = first_frame_effect(cut, sizes).effect  # [prompts, heads]
            placebos = placebo_effects(cut, sizes, PLACEBOS)  # [prompts, heads, placebos]
            known = placebos[..., ~np.isnan(placebos).any((0, 1))]
            largest = np.abs(known.mean((0, 1))).max(initial=0)
            exceeds = (effect[..., None] > np.abs(known)).all(-1).mean()
            rows.append(
                {
                    "policy": short_label(label),
                    "num_frames": length,
                    "effect": rounded(bootstrap(effect.mean(1)), 4),
                    "largest_placebo": round(float(largest), 4) if known.size else None,
                    "heads_above_placebos": round(float(exceeds), 3) if known.size else None,
                }
            )
            print(rows[-1])
    sha256 = seen.runs[0].common["weights_sha256"]
    return {"prompts": args.prompts, "weights_sha256": sha256, "rows": rows}


if __name__ == "__main__":
    main(run)
