"""Which heads bring a hidden shape back, and does attention to frame 0 predict the effect of removing it?

    python experiments/benchmarks/reproduce/hidden_shapes.py --device cuda
    python experiments/benchmarks/reproduce/hidden_shapes.py --device cuda --workers 4

Writes docs/hidden_shapes.json and two figures (docs/interventions.md). Pieces are kept in --folder: the same
command goes on where it stopped.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

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
from experiments.caches.files import require_writable
from experiments.extraction import causal
from experiments.extraction.provenance import environment
from experiments.figures.atlas import effect_against, knockout_curves
from experiments.figures.style import save_svg
from experiments.miniature.recipe import SIDE
from experiments.miniature.tracking import EvalPool
from experiments.running.cli import Parser, add_engine_flags, count, main
from experiments.running.engine import called, crew_of
from experiments.running.progress import Progress, stopping_when_asked
from experiments.running.ranks import workers_of
from experiments.studies import causal_atlas, hidden_shapes
from experiments.studies.hidden_shapes import QUESTIONS, Design, HiddenShapes
from wan.config import load_config
from wan.errors import ConfigError
from wan.files import read_json

SCALE = 8  # pixels of a latent
FIRST_FRAME_CAPTIONS = 32  # of every kind, for frame 0
SHOWN = 12  # heads of the ranking in the report


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--config_path", default="configs/wan_mini.yaml")
    flag("--ckpt_dir", help="directory of another miniature, with self_forcing_mini.pt in it")
    flag("--captions", type=count, default=96, help="captions behind a wall, on which heads are judged")
    flag("--seeds", type=int, choices=range(1, 10), default=3, help="seeds of each caption")
    flag("--judges", type=count, help="processes that judge videos; this worker's share of the cores")
    add_engine_flags(parser)
    flag("--device", default="auto")
    flag("--dtype", default="float32")
    flag("--folder", type=Path, default=Path("cache/hidden_shapes"), help="where pieces are kept")
    flag("--output_path", type=Path, default=Path("docs/hidden_shapes.json"))
    flag("--figures", type=Path, default=Path("notebooks/figures"), help="folder of the two SVGs")
    flag("--draw", action="store_true", help="only draw the figures of --output_path again")
    args = parser.parse_args(argv)
    if args.draw:
        try:
            draw_figures(read_json(args.output_path), args.figures)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{args.output_path} is not what this script writes: {error}") from None
        return
    require_writable(args.output_path)
    report = measure(args)
    save_report(report, args.output_path)
    print(args.output_path)
    draw_figures(report, args.figures)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Make what is not done yet; return the report. StoppedError after Ctrl-C."""
    settings = {"device": args.device, "dtype": args.dtype}
    if args.ckpt_dir:
        weights = f"{args.ckpt_dir}/self_forcing_mini.pt"
        settings |= {"ckpt_dir": args.ckpt_dir, "checkpoint_path": weights}
    config = load_config(args.config_path, settings)
    if config.height * SCALE != SIDE:
        raise ConfigError(f"{args.config_path} is not of the miniature, whose tracker this needs")
    design, judges, args.quiet = Design(args.captions, seeds=args.seeds), workers_of(args.judges), False
    with (
        Progress() as watch,
        stopping_when_asked(watch, "condition"),
        EvalPool(1 if args.workers else judges) as pool,  # before a GPU is touched: it forks
        crew_of(args, config.device) as crew,
    ):
        of_frame_0 = hidden_shapes.captions(FIRST_FRAME_CAPTIONS)
        test, selection = hidden_shapes.captions_behind_a_wall(design)
        walls = [scene.caption for _, scene in (*selection, *test)]
        session = called(crew, causal.prepare, config, [], [*walls, *of_frame_0])
        shapes = HiddenShapes(design, config, session, args.folder, judges, None if crew else pool)
        shapes = called(crew, identified, shapes)
        folder = args.folder / "first_frame"
        removed = hidden_shapes.first_frame_study(of_frame_0, args.seeds, config, session, folder)
        shapes.run(watch, crew)
        causal_atlas.run(removed, len(removed.configs), watch, crew)
        first_frame = called(crew, hidden_shapes.first_frame_numbers, removed, args.seeds)
        return {
            "environment": called(crew, environment, session.device),
            "model": config.model,
            "weights_sha256": session.sha256.result(),
            "dtype": str(session.dtype).removeprefix("torch."),
            "first_frame": first_frame_report(first_frame, range(session.model_config.num_layers)),
            "knockouts": knockouts(shapes),
        }


def identified(shapes: HiddenShapes) -> HiddenShapes:
    """Return a study that knows what it is of, by the device here."""
    assert shapes.identity
    return shapes


def knockouts(study: HiddenShapes) -> dict[str, Any]:
    """Return the shares of captions whose shape comes back, by order and number of heads."""
    design, made = study.design, {one.name: one for one in study.conditions()}

    def shares(name: str) -> dict[str, list[float]]:
        return {q: rounded(bootstrap(study.answers(made[name], q).numpy())) for q in QUESTIONS}

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
        "base": shares("base"),
        "all": shares("all"),
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
    shown = {name: np.array(x) for name, x in first["heads"].items() if name.endswith("first pass")}
    notes = {}
    for name in shown:
        both = (first["correlations"][name][key][:3] for key in ("rho", "partial_rho"))
        notes[name] = "ρ = {}\npartial ρ = {}".format(*("{:.2f} [{:.2f}, {:.2f}]".format(*x) for x in both))
    about = f"{report['model']}, {first['prompts']} captions × {report['knockouts']['seeds']} seeds"
    subtitle = f"knock out the first frame: {about}"
    drawn = {
        "hidden_shapes.svg": knockout_curves(*curves),
        "first_frame_removed.svg": effect_against(
            np.array(first["heads"]["effect"]), shown, notes, subtitle=subtitle
        ),
    }
    for name, figure in drawn.items():
        print(save_svg(figure, folder / name))


if __name__ == "__main__":
    main(run)
