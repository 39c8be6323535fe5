"""Measure the first-frame effect of the miniature at every training checkpoint whose atlas is there.

    python experiments/benchmarks/reproduce/first_frame_training.py --extend
    python experiments/benchmarks/reproduce/first_frame_training.py outputs/seed_0 outputs/seed_1

A folder holds the atlases of one training (step_*.pt of measure_checkpoints.py); several are trainings with
seeds 0, 1 ... in this order. Writes docs/checkpoints_first_frame.json and a figure with a line for each seed;
--extend keeps the file's rows of atlases that are no longer there.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from experiments.analysis.first_frame import first_frame
from experiments.benchmarks.harness import save_report
from experiments.caches import load_cache
from experiments.caches.files import require_writable
from experiments.caches.view import Profiles, open_passes, open_profiles
from experiments.extraction.provenance import environment
from experiments.figures.style import save_svg
from experiments.figures.training import effect_by_step
from experiments.running.cli import Parser, main
from wan.errors import ConfigError
from wan.files import read_json

ATLASES, LOG = Path("cache/wan-mini-training"), Path("checkpoints/wan-mini/training.json")
ENDS = ("first pass", "clean pass")


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("folders", type=Path, nargs="*", default=[ATLASES], help="of atlases, one a seed")
    flag("--extend", action="store_true", help="keep what OUTPUT_PATH has of other atlases")
    flag("--output_path", type=Path, default=Path("docs/checkpoints_first_frame.json"))
    flag("--figure", type=Path, default=Path("notebooks/figures/first_frame_training.svg"), help="SVG")
    args = parser.parse_args(argv)

    for path in (args.output_path, args.figure):
        require_writable(path)
    report = {"environment": environment(torch.device("cpu")), "checkpoints": checkpoints(args.folders)}
    if args.extend and args.output_path.exists():
        report = extended(read_json(args.output_path), report)
    save_report(report, args.output_path)
    print(args.output_path)
    print(save_svg(draw(report["checkpoints"]), args.figure))


def checkpoints(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return a row for the first and the clean pass of every atlas, by seed in the order of training."""
    rows = []
    for seed, folder in enumerate(folders):
        paths = sorted(folder.glob("step_*.pt"))
        if not paths:
            raise ConfigError(f"{folder} has no step_*.pt; run experiments/measure_checkpoints.py")
        for path in paths:
            cache = load_cache(path)
            passes = open_passes(cache, open_profiles(cache))
            at = {"seed": seed, "step": int(path.stem.removeprefix("step_"))}
            for name, view in zip(ENDS, (passes[0], passes[-1]), strict=True):
                rows.append(at | {"pass": name} | numbers(view))
    return rows


def numbers(view: Profiles) -> dict[str, Any]:
    """Return s, its place among the placebos' sizes, and c(0), over all heads of one pass."""
    found = first_frame(view)
    assert found is not None
    s, largest = found.fit.effect, np.abs(found.placebos).max(-1)
    return {
        "heads": s.size,
        "placebos": len(found.frames),
        "effect_mean": round(float(s.mean()), 2),
        "effect_median": round(float(np.median(s)), 2),
        "heads_above_all_placebos": int((s > largest).sum()),
        "heads_below_all_placebos": int((s < -largest).sum()),
        "contrast_0": round(float(found.contrasts[..., 0].mean()), 2),
    }


def extended(earlier: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """Return a report with an earlier one's rows of other seeds, steps and passes; they name their commit."""

    def key(row: dict[str, Any]) -> tuple[int, int, int]:
        return row["seed"], row["step"], ENDS.index(row["pass"])

    try:
        before = [{"git": earlier["environment"]["git"][:9]} | row for row in earlier["checkpoints"]]
        rows = {key(row): row for row in [*before, *report["checkpoints"]]}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--extend: the report is not what this script writes ({error!r})") from None
    return report | {"checkpoints": [rows[k] for k in sorted(rows)]}


def few_step_from() -> int:
    """Return the last step of the first causal stage of the shipped weights: few-step stages follow."""
    log = read_json(LOG)
    return log.get("causal_first", log["causal"])["steps"]


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw a line for each seed: the mean of s, and how many heads stand out."""

    def lines(key: str, name: str) -> list[tuple[list[int], list[float]]]:
        chosen = [row for row in rows if row["pass"] == name]
        by_seed = [[row for row in chosen if row["seed"] == seed] for seed in {r["seed"]: 0 for r in chosen}]
        return [([row["step"] for row in of], [row[key] for row in of]) for of in by_seed]

    panels = {
        "First-frame effect s, mean of all heads (logits)": "effect_mean",
        "Heads that prefer frame 0 to every placebo": "heads_above_all_placebos",
        "Heads that avoid it more than any": "heads_below_all_placebos",
    }
    drawn = {title: {name: lines(key, name) for name in ENDS} for title, key in panels.items()}
    about = "wan-mini in training, one caption and seed of noise; seeds are of the training"
    return effect_by_step(drawn, about, few_step_from())


if __name__ == "__main__":
    main(run)
