"""Which heads bring a hidden shape back, and does attention to frame 0 predict the effect of removing it?

    python experiments/benchmarks/reproduce/hidden_shapes.py --device cuda --workers 4

Writes docs/hidden_shapes.json and two figures (docs/interventions.md). Pieces are kept in --folder: the same
command goes on where it stopped.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.analysis.effects import BACK, ORDERS, curves_of, first_frame_report, knockouts_of
from experiments.analysis.stats import bootstrap, rounded
from experiments.benchmarks.reproduce.common import finding_parser, miniature_config, save_finding
from experiments.extraction.provenance import environment
from experiments.figures.atlas import effect_against, knockout_curves
from experiments.miniature import SHIPPED
from experiments.miniature.moving_shapes import SIDE
from experiments.running.cli import add_engine_flags, count, main
from experiments.running.engine import called, crew_of
from experiments.running.progress import Progress, stopping_when_asked
from experiments.running.ranks import workers_of
from experiments.session import load
from experiments.studies import causal_atlas, hidden_shapes
from experiments.studies.hidden_shapes import QUESTIONS, Design, HiddenShapes, Trials
from experiments.studies.runs import SEED_STEP
from wan.errors import ConfigError
from wan.files import read_json

SCALE = 8  # pixels of a latent
FIRST_FRAME_CAPTIONS = 32  # of every kind, for frame 0
SHOWN = 12  # heads of the ranking in the report
FIRST_PASS = ", first pass"


def run(argv=None):
    parser = finding_parser(__doc__, "docs/hidden_shapes.json")
    flag = parser.add_argument
    flag("--captions", type=count, default=96, help="captions behind a wall, on which heads are judged")
    flag("--seeds", type=int, choices=range(1, 10), default=3, help="seeds of each caption")
    add_engine_flags(parser)
    flag("--folder", type=Path, default=Path("cache/hidden_shapes"), help="where pieces are kept")
    flag("--draw", action="store_true", help="only compute and draw --output_path's curves again")
    args = parser.parse_args(argv)
    report = read_json(args.output_path) if args.draw else measure(args)
    report["knockouts"] |= curves_of(report["knockouts"])
    save_finding(args, report, figures_of(report))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Make what is not done yet; return the report. StoppedError after Ctrl-C."""
    config = miniature_config(args)
    if config.height * SCALE != SIDE:
        raise ConfigError(f"{args.config_path} is not of the miniature, whose tracker this needs")
    design, judges, args.quiet = Design(args.captions, seeds=args.seeds), workers_of(args.judges), False
    with Progress() as watch, stopping_when_asked(watch, "condition"), crew_of(args, config.device) as crew:
        of_frame_0 = hidden_shapes.captions(FIRST_FRAME_CAPTIONS)
        sets = hidden_shapes.captions_behind_a_wall(design)
        walls = [scene.caption for scenes in sets for _, scene in scenes]
        session = called(crew, load(config).prepare, (), [*walls, *of_frame_0])
        test, selection = (called(crew, trials_of, one, config, session, args, judges) for one in sets)
        shapes, folder = HiddenShapes(design, selection, test), args.folder / "first_frame"
        removed = causal_atlas.first_frame_study(of_frame_0, args.seeds, config, session, folder)
        shapes.run(watch, crew)
        causal_atlas.run(removed, len(removed.configs), watch, crew)
        first_frame = called(crew, causal_atlas.first_frame_numbers, removed, args.seeds)
        return {
            "environment": called(crew, environment, session.device),
            "model": config.model,
            "weights_sha256": session.sha256.result(),
            "dtype": str(session.dtype).removeprefix("torch."),
            "first_frame": first_frame_report(first_frame, range(session.model_config.num_layers)),
            "knockouts": knockouts(shapes),
        }


def trials_of(scenes, config, session, args: argparse.Namespace, judges: int) -> Trials:
    """Return trials of all scenes with their first seed, then with the next; they know what they are of."""
    seeded = [(number + SEED_STEP * n, scene) for n in range(args.seeds) for number, scene in scenes]
    trials = Trials(seeded, config, session, args.folder, judges)
    assert trials.identity
    return trials


def knockouts(study: HiddenShapes) -> dict[str, Any]:
    """Return what came back in each trial, by caption, and shares of captions."""
    design, trials = study.design, {one.name: one for one in study.conditions()}
    made = {q: {name: study.answers(one, q) for name, one in trials.items()} for q in QUESTIONS}
    measured, heads = study.selection_measures(), study.test.heads
    best = sorted(heads, key=lambda head: measured["effect"][head], reverse=True)[:SHOWN]
    scenes = [scene for _, scene in study.test.scenes][: design.captions]
    judged = read_json(SHIPPED / "evaluation.json")["captions"]["behind a wall"]["shares"]
    others = [q for q in QUESTIONS if q != BACK]
    return {
        "captions": design.captions,
        "selection": design.selection,
        "seeds": design.seeds,
        "draws": design.draws,
        "counts": list(design.counts),
        "heads": len(heads),
        "ceilings": {"rendered": judged["rendered"][BACK], "through the VAE": judged["vae"][BACK]},
        "base": {q: rounded(bootstrap(made[q]["base"])) for q in QUESTIONS},
        "all": {q: rounded(bootstrap(made[q]["all"])) for q in QUESTIONS},
        "other_answers": {
            name: {q: rounded([made[q][f"{name}: {n}"].mean() for n in design.counts]) for q in others}
            for name in ORDERS
        },
        "ranking": [
            {"layer": head[0], "head": head[1]}
            | {name: round(float(values[head]), 3) for name, values in measured.items()}
            for head in best
        ],
        "texts": [scene.caption for scene in scenes],
        "names_color": "".join(str(int(not scene.unnamed_color)) for scene in scenes),
        "seeds_that_come_back": {  # a digit a caption
            name: "".join(str(round(x * design.seeds)) for x in found) for name, found in made[BACK].items()
        },
    }


def figures_of(report: dict[str, Any]) -> dict[str, Figure]:
    """Draw the curves, and the effect of removing frame 0 against what heads attend to."""
    first = report["first_frame"]
    heads = first["heads"].items()
    shown = {n.removesuffix(FIRST_PASS): np.array(x) for n, x in heads if n.endswith(FIRST_PASS)}
    notes = {}
    for name in shown:
        both = (first["correlations"][name + FIRST_PASS][key][:3] for key in ("rho", "partial_rho"))
        notes[name] = "ρ = {}\npartial ρ = {}".format(*("{:.2f} [{:.2f}, {:.2f}]".format(*x) for x in both))
    about = f"{report['model']}, {first['prompts']} captions × {report['knockouts']['seeds']} seeds"
    effect, about = np.array(first["heads"]["effect"]), f"knock out the first frame: {about}{FIRST_PASS}"
    return {
        "hidden_shapes": knockout_curves(*knockouts_of(report)),
        "first_frame_removed": effect_against(effect, shown, notes, subtitle=about),
    }


if __name__ == "__main__":
    main(run)
