"""Measure the first-frame effect of the miniature at every training checkpoint whose atlas is kept.

    python experiments/dev/first_frame_training.py

Writes docs/checkpoints_first_frame.json, from which readme_tables.py fills docs/first_frame.md.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.caches.atomic_files import replacing
from experiments.running.cli import Parser, main

if TYPE_CHECKING:  # the rest is imported after the flags: --help needs no torch
    from experiments.caches.view import Profiles

ATLASES = Path("cache/wan-mini-training")
OUTPUT = Path("docs/checkpoints_first_frame.json")


def checkpoints(folder: Path = ATLASES) -> list[dict[str, Any]]:
    """A row for the first and the clean pass of every kept atlas, in the order of training."""
    from experiments.caches import load_cache
    from experiments.caches.view import open_passes, open_profiles

    rows = []
    for path in sorted(folder.glob("step_*.pt")):
        cache = load_cache(path)
        passes = open_passes(cache, open_profiles(cache))
        step = int(path.stem.removeprefix("step_"))
        rows += [{"step": step, "pass": view.pass_label} | numbers(view) for view in (passes[0], passes[-1])]
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


def table(report: dict[str, Any]) -> str:
    """The rows of docs/first_frame.md."""
    lines = [
        "| step of causal training | pass | s: mean, median | heads that prefer frame 0 to every placebo | "
        "that avoid it more than any | c(0) |",
        "|---" * 6 + "|",
    ]
    lines += [
        f"| {row['step']} | {row['pass']} | {row['effect_mean']:.2f}, {row['effect_median']:.2f} | "
        f"{row['heads_above_all_placebos']} of {row['heads']} | {row['heads_below_all_placebos']} | "
        f"{row['contrast_0']:.2f} |"
        for row in report["checkpoints"]
    ]
    env = report["environment"]
    where = f"{env['date']}, `{env['git'][:9]}`: `{env['command']}`"
    return "\n".join(lines) + f"\n\nOne caption and seed, logits, {where}\n"


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_path", type=Path, default=OUTPUT)
    args = parser.parse_args(argv)

    import torch

    from experiments.extraction.provenance import environment

    report = {"environment": environment(torch.device("cpu")), "checkpoints": checkpoints()}
    with replacing(args.output_path) as file:
        file.write(json.dumps(report, indent=1).encode() + b"\n")
    print(args.output_path)


if __name__ == "__main__":
    main(run)
