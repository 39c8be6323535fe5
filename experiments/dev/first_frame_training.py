"""Measure the first-frame effect of the miniature at every training checkpoint whose atlas is there.

    python experiments/dev/first_frame_training.py
    python experiments/dev/first_frame_training.py outputs/seed_0 outputs/seed_1 outputs/seed_2

A folder holds the atlases of one training (step_*.pt of measure_checkpoints.py); several are trainings with
seeds 0, 1 ... in this order. Writes docs/checkpoints_first_frame.json, from which readme_tables.py fills
docs/first_frame.md, and a figure with a line for each seed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.caches.files import replacing
from experiments.running.cli import Parser, main
from wan.errors import ConfigError
from wan.files import read_json

if TYPE_CHECKING:  # the rest is imported after the flags: --help needs no torch
    from matplotlib.figure import Figure

    from experiments.caches.view import Profiles

ATLASES = Path("cache/wan-mini-training")
OUTPUT = Path("docs/checkpoints_first_frame.json")
FIGURE = Path("notebooks/figures/first_frame_training.svg")
LOG = Path(__file__).parents[2] / "checkpoints/wan-mini/training.json"
ENDS = ("first pass", "clean pass")


def checkpoints(folders: Sequence[Path] = (ATLASES,)) -> list[dict[str, Any]]:
    """A row for the first and the clean pass of every atlas, by seed in the order of training.

    Raises ConfigError for a folder without atlases.
    """
    from experiments.caches import load_cache
    from experiments.caches.view import open_passes, open_profiles

    rows = []
    for seed, folder in enumerate(folders):
        paths = sorted(folder.glob("step_*.pt"))
        if not paths:
            raise ConfigError(f"{folder} has no step_*.pt; run experiments/measure_checkpoints.py")
        for path in paths:
            cache = load_cache(path)
            passes = open_passes(cache, open_profiles(cache))
            step = int(path.stem.removeprefix("step_"))
            rows += [
                {"seed": seed, "step": step, "pass": name} | numbers(view)
                for name, view in zip(ENDS, (passes[0], passes[-1]), strict=True)
            ]
    return rows


def numbers(view: "Profiles") -> dict[str, Any]:
    """s, its place among the placebos' sizes and c(0), over all heads of one pass."""
    from experiments.analysis.first_frame_findings import first_frame

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


def few_step_from() -> int:
    """The last step of the first causal stage, by the log of the shipped weights: few-step stages follow."""
    log = read_json(LOG)
    return log.get("causal_first", log["causal"])["steps"]


def table(report: dict[str, Any]) -> str:
    """The rows of docs/first_frame.md: a step and a pass each, the seeds side by side."""
    rows = report["checkpoints"]
    seeds = sorted({row["seed"] for row in rows})
    lines = [
        f"| training step (few-step stages from {few_step_from()} on) | pass | s: mean | median | "
        "heads that prefer frame 0 to every placebo | that avoid it more than any | c(0) |",
        "|---" * 7 + "|",
    ]
    for step, end in sorted({(row["step"], ENDS.index(row["pass"])) for row in rows}):
        name = ENDS[end]
        at = [row for row in rows if (row["step"], row["pass"]) == (step, name)]

        def of(key: str, form: str = "", at: Sequence[dict[str, Any]] = at) -> str:
            values = {row["seed"]: format(row[key], form) for row in at}
            return ", ".join(values.get(seed, "-") for seed in seeds)

        counts = f"{of('heads_above_all_placebos')} of {at[0]['heads']} | {of('heads_below_all_placebos')}"
        lines.append(
            f"| {step} | {name} | {of('effect_mean', '.2f')} | {of('effect_median', '.2f')} | {counts} | "
            f"{of('contrast_0', '.2f')} |"
        )
    made = [report["environment"], *report.get("earlier", ())]
    where = "; earlier rows: ".join(f"{env['date']}, `{env['git'][:9]}`: `{env['command']}`" for env in made)
    several = f"; seeds {', '.join(map(str, seeds))} of the training side by side" if len(seeds) > 1 else ""
    return "\n".join(lines) + f"\n\nOne caption and seed, logits{several}; {where}\n"


def extended(earlier: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """A report with an earlier one's rows of other seeds, steps and passes, and how those were made: each
    names its commit."""

    def key(row: dict[str, Any]) -> tuple[int, int, int]:
        return row["seed"], row["step"], ENDS.index(row["pass"])

    try:
        before = [{"git": earlier["environment"]["git"][:9]} | row for row in earlier["checkpoints"]]
        rows = {key(row): row for row in [*before, *report["checkpoints"]]}
        commits = {row.get("git") for row in rows.values()}
        made = [earlier["environment"], *earlier.get("earlier", ())]
        made = [env for env in made if env["git"][:9] in commits]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--extend: the report is not what this script writes ({error!r})") from None
    return {**report, "earlier": made, "checkpoints": [rows[k] for k in sorted(rows)]}


def draw(rows: Sequence[dict[str, Any]]) -> "Figure":
    """A line for each seed: the mean of s, and how many heads stand out."""
    from experiments.figures.training import effect_by_step

    def lines(key: str, name: str) -> list[tuple[list[int], list[float]]]:
        chosen = [row for row in rows if row["pass"] == name]
        return [
            ([row["step"] for row in of], [row[key] for row in of])
            for seed in sorted({row["seed"] for row in chosen})
            if (of := [row for row in chosen if row["seed"] == seed])
        ]

    panels = {
        "First-frame effect s, mean of all heads (logits)": "effect_mean",
        "Heads that prefer frame 0 to every placebo": "heads_above_all_placebos",
        "Heads that avoid it more than any": "heads_below_all_placebos",
    }
    drawn = {title: {name: lines(key, name) for name in ENDS} for title, key in panels.items()}
    about = "wan-mini in training, one caption and seed of noise; seeds are of the training"
    return effect_by_step(drawn, about, few_step_from())


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*", default=[ATLASES], help="of atlases, one a seed")
    parser.add_argument("--extend", action="store_true", help="keep what OUTPUT_PATH has of other atlases")
    parser.add_argument("--output_path", type=Path, default=OUTPUT)
    parser.add_argument("--figure", type=Path, default=FIGURE, help="SVG")
    args = parser.parse_args(argv)

    import torch

    from experiments.caches.files import require_writable
    from experiments.extraction.provenance import environment
    from experiments.figures.style import save_svg

    for path in (args.output_path, args.figure):
        require_writable(path)
    earlier = read_json(args.output_path) if args.extend and args.output_path.exists() else None
    report = {"environment": environment(torch.device("cpu")), "checkpoints": checkpoints(args.folders)}
    report = report if earlier is None else extended(earlier, report)
    rows = report["checkpoints"]
    with replacing(args.output_path) as file:
        file.write(json.dumps(report, indent=1).encode() + b"\n")
    print(args.output_path)
    print(save_svg(draw(rows), args.figure))


if __name__ == "__main__":
    main(run)
