"""Which heads bring a hidden shape back, and does attention to frame 0 predict the effect of removing it?

    python experiments/benchmarks/reproduce/hidden_shapes.py --device cuda
    torchrun --nproc_per_node 4 experiments/benchmarks/reproduce/hidden_shapes.py --device cuda

Writes docs/hidden_shapes.json and two figures (docs/interventions.md). Pieces are kept in --folder: the same
command goes on where it stopped. --draw computes the curves of that file again, and draws the figures.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.analysis.effects import (
    BACK,
    ORDERS,
    bootstrap,
    curves_of,
    first_frame_report,
    knockouts_of,
    rounded,
)
from experiments.benchmarks.harness import save_report
from experiments.caches.files import StoppedError, require_writable
from experiments.extraction import causal
from experiments.extraction.provenance import environment
from experiments.figures.effects import effect_against, knockout_curves
from experiments.figures.style import save_svg
from experiments.miniature.evaluation import EvalPool
from experiments.miniature.recipe import SIDE
from experiments.running.cli import Parser, count, main
from experiments.running.progress import Progress, stopping_when_asked
from experiments.running.ranks import Rank, on_own_device, this_rank, workers_of
from experiments.studies.hidden_shapes import (
    QUESTIONS,
    Condition,
    Design,
    FirstFrameRemoved,
    HiddenShapes,
    captions,
    captions_behind_a_wall,
)
from wan.config import ModelConfig, RunConfig, load_config
from wan.errors import ConfigError
from wan.vae import VAE

SCALE = 8  # pixels of a latent
SHOWN = 12  # heads of the ranking in the report


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--config_path", default="configs/wan_mini.yaml")
    flag("--ckpt_dir", help="directory of another miniature, with self_forcing_mini.pt in it")
    flag("--captions", type=count, default=96, help="captions behind a wall, on which heads are judged")
    flag("--selection", type=count, default=24, help="other captions, by which heads are ranked")
    flag("--first_frame_captions", type=count, default=32, help="captions of every kind, for frame 0")
    flag("--seeds", type=count, default=3, help="seeds of each caption, at most 9")
    flag("--draws", type=count, default=20, help="random orders")
    flag("--counts", type=count, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="heads without a past")
    flag("--layers", type=int, nargs="+", help="edit heads of these layers alone")
    flag("--num_frames", type=count, default=21, help="latent frames")
    flag("--workers", type=count, help="processes that judge videos; this rank's share of the cores")
    flag("--device", default="auto")
    flag("--dtype", default="float32")
    flag("--folder", type=Path, default=Path("cache/hidden_shapes"), help="where pieces are kept")
    flag("--output_path", type=Path, default=Path("docs/hidden_shapes.json"))
    flag("--figures", type=Path, default=Path("notebooks/figures"), help="folder of the two SVGs")
    flag("--draw", action="store_true", help="only the curves and figures of --output_path, again")
    args = parser.parse_args(argv)

    require_writable(args.output_path)
    try:
        if args.draw:
            report = json.loads(args.output_path.read_text(encoding="utf-8"))
            report["knockouts"] |= curves_of(report["knockouts"])
        elif (report := measure(args)) is None:  # not the first rank
            return
        save_report(report, args.output_path)
        print(args.output_path)
        draw_figures(report, args.figures)
    except (ValueError, KeyError, TypeError) as error:
        if not args.draw or isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{args.output_path} is not what this script writes: {error}") from None


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    """Make what is not done yet; return the report to the first rank. StoppedError after Ctrl-C."""
    if args.seeds > 9:
        raise ConfigError(f"--seeds {args.seeds}: at most 9, the report has a digit for each caption")
    settings = {"device": args.device, "dtype": args.dtype, "num_frames": args.num_frames}
    if args.ckpt_dir:
        weights = f"{args.ckpt_dir}/self_forcing_mini.pt"
        settings |= {"ckpt_dir": args.ckpt_dir, "checkpoint_path": weights}
    config = load_config(args.config_path, settings)
    if config.height * SCALE != SIDE:
        raise ConfigError(f"{args.config_path} is not of the miniature, whose tracker this needs")
    rank = this_rank()
    layers = None if args.layers is None else tuple(sorted(set(args.layers)))
    counts = tuple(sorted(set(args.counts)))
    design = Design(args.captions, args.selection, args.seeds, args.draws, counts, layers)
    with (
        Progress(quiet=not rank.is_first) as watch,
        stopping_when_asked(watch, "condition"),
        EvalPool(workers_of(args.workers, rank)) as judges,  # before a GPU is touched: it forks
    ):
        return study(args, design, on_own_device(config, rank), judges, watch, rank)


def study(
    args: argparse.Namespace, design: Design, config: RunConfig, judges: EvalPool, watch: Progress, rank: Rank
) -> dict[str, Any] | None:
    """Make both studies and return their report."""
    of_frame_0 = captions(args.first_frame_captions)
    behind_walls = [scene.caption for part in reversed(captions_behind_a_wall(design)) for _, scene in part]
    session = causal.prepare(config, [], [*behind_walls, *of_frame_0], watch)
    check_layers(design, session.model_config)
    vae = VAE.from_pretrained(config.ckpt_dir, device=session.device)
    torch.backends.cudnn.benchmark = session.device.type == "cuda"  # a decoder of few sizes
    folder = args.folder / "first_frame"
    removed = FirstFrameRemoved(of_frame_0, args.seeds, config, session, folder, design.layers)
    shapes = HiddenShapes(design, config, session, vae, judges, args.folder, watch)
    if not (shapes.run(rank) and removed.run(watch, rank)):
        raise StoppedError("stopped; what is done is not made again: run the same command to go on")
    if not rank.is_first:
        return None
    return {
        "environment": environment(session.device),
        "model": config.model,
        "weights_sha256": session.sha256.result(),
        "dtype": str(session.dtype).removeprefix("torch."),
        "first_frame": first_frame_report(removed.numbers(), [layer or 0 for layer in removed.study.layers]),
        "knockouts": knockouts(shapes),
    }


def check_layers(design: Design, sizes: ModelConfig) -> None:
    """Raise ConfigError for layers that the model lacks, and counts that are no part of its heads."""
    layers = range(sizes.num_layers) if design.layers is None else design.layers
    for layer in layers:
        if not 0 <= layer < sizes.num_layers:
            raise ConfigError(f"layer {layer} is not in 0..{sizes.num_layers - 1}")
    heads = len(layers) * sizes.num_heads
    if design.counts[-1] >= heads:
        raise ConfigError(f"--counts {design.counts[-1]}: fewer than all {heads} heads lose their past")


def knockouts(study: HiddenShapes) -> dict[str, Any]:
    """Return the shares of captions whose shape comes back, by order and number of heads."""
    design, made = study.design, {one.name: one for one in study.conditions()}

    def shares(condition: Condition) -> dict[str, list[float]]:
        return {q: rounded(bootstrap(study.answers(condition, q).numpy())) for q in QUESTIONS}

    def means(name: str, question: str) -> list[float]:
        answers = [study.answers(made[f"{name}: {n}"], question).numpy() for n in design.counts]
        return [round(float(x.mean()), 3) for x in answers]

    measured = study.selection_measures()
    best = sorted(study.heads, key=lambda head: measured["effect"][head], reverse=True)[:SHOWN]
    found = {
        "captions": design.captions,
        "selection": design.selection,
        "seeds": design.seeds,
        "draws": design.draws,
        "counts": list(design.counts),
        "heads": len(study.heads),
        "base": shares(made["base"]),
        "all": shares(made["all"]),
        "other_answers": {name: {q: means(name, q) for q in QUESTIONS if q != BACK} for name in ORDERS},
        "ranking": [
            {"layer": head[0], "head": head[1]}
            | {name: round(float(values[head]), 3) for name, values in measured.items()}
            for head in best
        ],
        "seeds_that_come_back": {  # a digit a caption
            name: "".join(str(round(x * design.seeds)) for x in study.answers(one).tolist())
            for name, one in made.items()
        },
    }
    return found | curves_of(found)


def draw_figures(report: dict[str, Any], folder: Path) -> None:
    """Draw the curves, and the effect of removing frame 0 against what heads attend to."""
    first, curves = report["first_frame"], knockouts_of(report)
    shown = [name for name in first["heads"] if name.endswith("first pass")]
    notes = {}
    for name in shown:
        rho, partial = (
            "{:.2f} [{:.2f}, {:.2f}]".format(*first["correlations"][name][key][:3])
            for key in ("rho", "partial_rho")
        )
        notes[name] = f"ρ = {rho}\npartial ρ = {partial}"
    about = f"{report['model']}, {first['prompts']} captions × {report['knockouts']['seeds']} seeds"
    drawn = {
        "hidden_shapes.svg": knockout_curves(
            curves.counts, curves.orders, curves.random, curves.ends, subtitle=curves.subtitle
        ),
        "first_frame_removed.svg": effect_against(
            np.array(first["heads"]["effect"]),
            {name: np.array(first["heads"][name]) for name in shown},
            notes,
            subtitle=f"knock out the first frame: {about}",
        ),
    }
    for name, figure in drawn.items():
        print(save_svg(figure, folder / name))


if __name__ == "__main__":
    main(run)
