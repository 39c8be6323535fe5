"""Measure the first-frame effect on the published atlases, or in training, and draw it (docs/first_frame.md).

    python experiments/benchmarks/reproduce/first_frame.py
    python experiments/benchmarks/reproduce/first_frame.py --training outputs/seed_0 outputs/seed_1 \
        --output_path docs/checkpoints_first_frame.json

--training measures the miniature at every training checkpoint whose atlas is there: a folder holds those of
one training (step_*.pt of measure_checkpoints.py; cache/wan-mini-training where none is named), several are
trainings with seeds 0, 1 ... in this order. Rows of the report whose atlases are gone are kept.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.analysis import measures, published
from experiments.analysis.first_frame import first_frame, key_frame_contrasts, matrices
from experiments.benchmarks.harness import finding_parser, save_finding
from experiments.caches import load_cache
from experiments.caches.view import Profiles, open_passes, open_profiles
from experiments.figures.atlas import contrasts_by_frame
from experiments.figures.training import effect_by_step
from experiments.running.cli import main
from wan.errors import ConfigError
from wan.files import read_json

ATLASES = {  # castle has no 72-frame matrix
    "eagle, 21 frames": "self_forcing_dmd_eagle_21f.pt",
    "castle, 21 frames": "self_forcing_dmd_castle_21f.pt",
    "eagle, 72 frames": "self_forcing_dmd_eagle_72f.pt",
}
TRAINING, LOG = Path("cache/wan-mini-training"), Path("checkpoints/wan-mini/training.json")
LATER_LINE = slice(12, 36)  # another reference for contrasts: level and trend are not identified
ENDS = ("first pass", "clean pass")


def run(argv=None):
    parser = finding_parser(__doc__, "docs/first_frame.json")
    parser.add_argument("--training", type=Path, nargs="*", metavar="FOLDER", help="of atlases, one a seed")
    args = parser.parse_args(argv)
    if args.training is not None:
        rows = checkpoints(args.training or [TRAINING])
        if args.output_path.exists():
            before = read_json(args.output_path)["checkpoints"]
            found = {(row["seed"], row["step"], ENDS.index(row["pass"])): row for row in [*before, *rows]}
            rows = [found[key] for key in sorted(found)]
        save_finding(args, {"checkpoints": rows}, {"first_frame_training": draw_training(rows)})
        return
    views = {name: open_profiles(load_cache(published.FOLDER / file)) for name, file in ATLASES.items()}
    lines = {
        name: mean_interval(key_frame_contrasts(matrices(view), view.block_sizes))
        for name, view in views.items()
    }
    title = "Key-frame contrasts, mean over 360 heads: Wan2.1-T2V-1.3B, Self-Forcing, pass 0 (t = 1000)"
    figures = {"key_frames_published": contrasts_by_frame(lines, title, block=3)}
    save_finding(args, of_atlases(views), figures)


# --- The published atlases
def of_atlases(views: dict[str, Profiles]) -> dict[str, Any]:
    """Return the numbers of each atlas, and correlations between them."""
    effects = [measured(view).fit.effect.ravel() for view in views.values()]
    between = {"between prompts": effects[1], "between lengths": effects[2]}
    return {
        "atlases": {name: numbers(view) for name, view in views.items()},
        "correlation_of_s": {n: rounded(np.corrcoef(effects[0], s)[0, 1]) for n, s in between.items()},
    }


def measured(view: Profiles):
    """Return s, placebos and contrasts of every head."""
    found, _ = first_frame(view)
    assert found is not None
    return found


def numbers(view: Profiles) -> dict[str, Any]:
    """Return first − middle, s, placebos and contrasts of one atlas, over all heads."""
    found = measured(view)
    s, mean = found.fit.effect, np.abs(found.placebos.mean((0, 1)))
    far = view.num_frames >= LATER_LINE.stop  # long enough for a line through later frames
    return {
        "heads": s.size,
        "first_minus_middle": summary(measures.head_statistics(view.profiles()).delta),
        "effect": summary(s) | {"residual_error_median": rounded(np.median(found.fit.residual_error))},
        "r_squared_within_rows_median": rounded(np.median(found.fit.r_squared_within_rows)),
        "placebos": {
            "frames": [found.frames[0], found.frames[-1]],
            "largest_mean": rounded(mean.max()),
            "its_frame": found.frames[int(mean.argmax())],
            "heads_above_all": int((found.rank == 1).sum()),
            "heads_above_all_to_24": int(found.above_placebos.sum()),
        },
        "contrasts": np.round(mean_interval(found.contrasts), 2).tolist(),  # mean, low, high
        "contrasts_to_frames_12_to_35": later_line(view).round(2).tolist() if far else None,
    }


def later_line(view: Profiles) -> np.ndarray:
    """Return the contrasts of the first twelve frames to a line through later ones, [3, n]."""
    far = key_frame_contrasts(matrices(view), view.block_sizes, LATER_LINE.stop, LATER_LINE)
    return mean_interval(far[..., : LATER_LINE.start])


def mean_interval(values: np.ndarray) -> np.ndarray:
    """Return the mean over heads of values [layers, H, n] and its 95 % interval, [3, n]."""
    layers, heads, _ = values.shape
    drawn = np.random.default_rng(0).integers(0, heads, (1000, layers, heads, 1))
    means = [np.take_along_axis(values, d, 1).mean((0, 1)) for d in drawn]
    return np.stack([values.mean((0, 1)), *np.percentile(means, (2.5, 97.5), axis=0)])


def summary(values: np.ndarray) -> dict[str, Any]:
    above = int((values > measures.DELTA_THRESHOLD).sum())
    return {"mean": rounded(values.mean()), "median": rounded(np.median(values)), "heads_above_2": above}


def rounded(value: float) -> float:
    return round(float(value), 2)


# --- The miniature in training
def checkpoints(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return s, its place among the placebos' sizes, and c(0) of each atlas's first and clean pass."""
    rows = []
    for seed, folder in enumerate(folders):
        paths = sorted(folder.glob("step_*.pt"))
        if not paths:
            raise ConfigError(f"{folder} has no step_*.pt; run experiments/measure_checkpoints.py")
        for path in paths:
            cache = load_cache(path)
            passes = open_passes(cache, open_profiles(cache))
            for name, view in zip(ENDS, (passes[0], passes[-1]), strict=True):
                found = measured(view)
                s, largest = found.fit.effect, np.abs(found.placebos).max(-1)
                rows.append(
                    {
                        "seed": seed,
                        "step": int(path.stem.removeprefix("step_")),
                        "pass": name,
                        "heads": s.size,
                        "placebos": len(found.frames),
                        "effect_mean": rounded(s.mean()),
                        "effect_median": rounded(np.median(s)),
                        "heads_above_all_placebos": int((s > largest).sum()),
                        "heads_below_all_placebos": int((s < -largest).sum()),
                        "contrast_0": rounded(found.contrasts[..., 0].mean()),
                    }
                )
    return rows


def few_step_from() -> int:
    """Return the last step of the first causal stage of the shipped weights: few-step stages follow."""
    log = read_json(LOG)
    return log.get("causal_first", log["causal"])["steps"]


def draw_training(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw a line for each seed: the mean of s, and how many heads stand out."""
    panels = {
        "First-frame effect s, mean of all heads (logits)": "effect_mean",
        "Heads that prefer frame 0 to every placebo": "heads_above_all_placebos",
        "Heads that avoid it more than any": "heads_below_all_placebos",
    }
    drawn: dict[str, dict[str, list]] = {title: {name: [] for name in ENDS} for title in panels}
    for seed in sorted({row["seed"] for row in rows}):
        for name in ENDS:
            own = [row for row in rows if (row["seed"], row["pass"]) == (seed, name)]
            for title, key in panels.items():
                drawn[title][name].append(([row["step"] for row in own], [row[key] for row in own]))
    about = "wan-mini in training, one caption and seed of noise; seeds are of the training"
    return effect_by_step(drawn, about, few_step_from())


if __name__ == "__main__":
    main(run)
