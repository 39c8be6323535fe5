"""Which heads need which part of their past, by which route, and which rule picks them best at equal bytes?

    python experiments/benchmarks/reproduce/head_memory.py --device cuda

Writes docs/head_memory.json and figures (docs/head_memory.md). Trials are kept in --folder: the same command
goes on where it stopped. --ckpt_dir takes another miniature, such as one of `train_mini.py --seed 1`.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from experiments.analysis.effects import budget_panels
from experiments.analysis.panels import HeadMap
from experiments.analysis.stats import bootstrap, partial_spearman, rounded, spearman
from experiments.benchmarks.harness import finding_parser, miniature_config, save_report
from experiments.extraction import causal
from experiments.extraction.provenance import environment
from experiments.figures.atlas import budget_curves, head_maps, share_bars
from experiments.figures.style import save_svg
from experiments.miniature.evaluation import rendered
from experiments.miniature.recipe import FRAMES
from experiments.miniature.tracking import EvalPool
from experiments.running.cli import count, main
from experiments.running.progress import Progress, stopping_when_asked
from experiments.running.ranks import workers_of
from experiments.studies.hidden_shapes import (
    HALVES,
    QUESTIONS,
    RULES,
    Design,
    HeadMemory,
    Sizes,
    captions_behind_a_wall,
    unnamed_captions,
)
from experiments.studies.paired_prompts import pairs_of, trace
from wan.files import read_json
from wan.vae import VAE

SHARE = "Share back in colour and shape"
KNOWN = 8  # heads of the ranking of hidden_shapes.py


def run(argv=None):
    parser = finding_parser(__doc__, "docs/head_memory.json")
    flag = parser.add_argument
    flag("--captions", type=count, default=Sizes.captions, help="behind a wall, that do not name the colour")
    flag("--pairs", type=count, default=160, help="captions tried for pairs; 60 %% do not hide alike")
    flag("--samples", type=count, default=Sizes.samples, help="random halves of all heads")
    flag("--draws", type=count, default=Sizes.draws, help="random sets of heads, matched by layer")
    flag("--folds", type=int, choices=(1, 2, 5), default=2, help="folds of captions that judge budgets")
    flag("--ranking", type=Path, default=Path("docs/hidden_shapes.json"), help="the heads known before")
    flag("--folder", type=Path, default=Path("cache/head_memory"), help="where trials are kept")
    flag("--draw", action="store_true", help="only draw the figures of --output_path again")
    args = parser.parse_args(argv)
    if not args.draw:
        save_report(measure(args), args.output_path)
    for name, figure in figures_of(read_json(args.output_path)).items():
        print(save_svg(figure, args.figures / f"{name}.svg"))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Make what is not done yet, and return the report. StoppedError after Ctrl-C."""
    config = miniature_config(args)
    _, selection = captions_behind_a_wall(Design())  # on which the known heads were found
    ranked = {scene.caption: scene for _, scene in selection}
    scenes = unnamed_captions(max(args.captions, args.pairs), ranked)
    pairs = pairs_of(scenes[: args.pairs])
    known = [(row["layer"], row["head"]) for row in read_json(args.ranking)["knockouts"]["ranking"][:KNOWN]]
    judges = workers_of(args.judges)
    sizes = Sizes(args.captions, args.draws, samples=args.samples, folds=args.folds)
    with (
        Progress() as watch,
        stopping_when_asked(watch, "trial"),
        EvalPool(judges) as pool,  # before a GPU is touched: it forks
    ):
        captions = [scene.caption for _, scene in scenes]
        session = causal.prepare(
            config, [], captions + [text for pair in pairs for text in pair.texts], watch
        )
        vae, paths = VAE.from_pretrained(config.ckpt_dir, device=session.device), args.folder / "paths.json"
        if not paths.is_file():
            save_report({"paths": trace(config, session, vae, pool, pairs)}, paths)
        made_by = config, session, args.folder, judges
        study = HeadMemory(scenes[: args.captions], *made_by, sizes=sizes, known=known)
        study.make_all(watch)
        about = {
            "environment": environment(session.device),
            "model": config.model,
            "weights_sha256": session.sha256.result(),
        }
        return about | report_of(study, ceilings_of(study, vae, pool)) | read_json(paths)


def share(values: Sequence[float] | np.ndarray) -> list[float]:
    """Return a mean over captions and its interval."""
    return rounded(bootstrap(np.asarray(values, float)))


def report_of(study: HeadMemory, ceilings: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return shares with intervals over captions, of the trials that are done, and each caption's answers."""
    trials = {one.name: one for _, stage in study.stages() for one in stage()}
    done = {name: found for name, trial in trials.items() if (found := study.read(trial))}
    matched = np.array([done[f"matched {n}"]["same"] for n in range(study.sizes.draws)])

    def numbers(*names: str) -> dict[str, Any]:
        """Return shares over the captions of some trials together."""
        joined = {q: np.concatenate([done[name][q] for name in names]) for q in (*QUESTIONS, "change")}
        return {"captions": len(joined["same"])} | {q: share(values) for q, values in joined.items()}

    routes = {name: [name] for name in done if name.startswith(("known: ", "(")) and ", block " not in name}
    for name in (name for name in done if ", block " in name):  # before and after it returns, in any block
        routes.setdefault(name.rpartition(", block")[0], []).append(name)
    return {
        "captions": [scene.caption for _, scene in study.scenes],
        "seeds": [number for number, _ in study.scenes],
        "known heads": [list(head) for head in study.known],
        "ceilings": {name: share(values) for name, values in ceilings.items()},
        "base": numbers("base"),
        "no past": numbers("no past"),
        "known": numbers("known"),
        "matched": {
            "draws": rounded(matched.mean(1)),
            "mean": share(matched.mean(0)),
            "known less matched": share(np.array(done["known"]["same"]) - matched.mean(0)),
        },
        "returns in block": done["base"]["returns"],
        "routes": {name: numbers(*parts) for name, parts in routes.items()},
        "budgets": budgets_of(study, done),
        "chosen": agreement_of_halves(study),
        "answers": {name: "".join(map(str, one["same"])) for name, one in done.items()},
        "rows": {name: list(trials[name].rows) for name in done if trials[name].rows != study.everyone},
    }


def ceilings_of(study: HeadMemory, vae: VAE, pool: EvalPool) -> dict[str, list[int]]:
    """Return whether the judge says `same` of the scenes as rendered, and after the VAE."""
    scenes = [scene for _, scene in study.scenes]
    videos = rendered(scenes, FRAMES)
    parts = (vae.decode(vae.encode(x.to(study.session.device))) for x in torch.stack(videos).split(32))
    judged = pool.judge_all(videos, scenes), pool.judge_all((v.cpu() for x in parts for v in x), scenes)
    return {
        name: [int(one["same"]) for one in answers]
        for name, answers in zip(("rendered", "VAE"), judged, strict=True)
    }


def budgets_of(study: HeadMemory, done: Mapping[str, dict]) -> dict[str, Any]:
    """Return shares by rule and budget, each caption by heads of the other folds; beside uniform windows."""
    rows = [row for fold in study.judged for row in fold]

    def answers(rule: str, budget: int, sink: int, question: str) -> np.ndarray | None:
        names = [f"{rule}, {budget}, sink {sink}, fold {fold}" for fold in range(study.sizes.folds)]
        if not all(name in done for name in names):
            return None
        return np.concatenate([done[name][question] for name in names])

    found: dict[str, Any] = {"captions": len(rows), "narrow window": study.sizes.narrow}
    for sink in (0, study.sizes.sink):
        for question in ("same", "same_color", "comes_back", "shape"):
            table: dict[str, dict[str, Any]] = {"uniform": {}}
            for budget in (study.sizes.narrow, *study.sizes.budgets):
                beside = np.array(done[f"window {budget}" + ", sink" * (sink > 0)][question])[rows]
                table["uniform"][str(budget)] = share(beside)
                each = {rule: answers(rule, budget, sink, question) for rule in (*RULES, "interactions")}
                drawn = (
                    answers(f"random {n}", budget, sink, question) for n in range(study.sizes.budget_draws)
                )
                if random := [values for values in drawn if values is not None]:
                    each["random"] = np.mean(random, 0)
                for rule, values in each.items():
                    if values is not None:
                        both = [share(values), share(values - beside)]
                        table.setdefault(rule, {})[str(budget)] = both
            found[f"{question}, sink {sink}"] = table
    return found


def agreement_of_halves(study: HeadMemory) -> dict[str, Any]:
    """Return, by rule, Spearman's ρ between scores of the halves, with the effect, and of a chosen twelve."""
    one, other = (study.scores_of(study.everyone[number::HALVES]) for number in range(HALVES))
    folds = [study.scores_of(study.others(fold)) for fold in range(len(study.folds))]
    layers = np.broadcast_to(np.arange(len(one["effect"]))[:, None], one["effect"].shape)
    found = {}
    for rule in one:
        chosen = [set(study.chosen(half[rule], study.sizes.budgets[1])) for half in (one, other)]
        every = set.intersection(*(set(study.chosen(fold[rule], study.sizes.budgets[1])) for fold in folds))
        both, effect = (one[rule] + other[rule]).ravel(), (one["effect"] + other["effect"]).ravel()
        found[rule] = {
            "rho of halves": round(spearman(one[rule].ravel(), other[rule].ravel()), 3),
            "chosen by both": len(chosen[0] & chosen[1]) / len(chosen[0]),
            "chosen in all folds": len(every) / len(chosen[0]),
            "rho with effect": round(spearman(both, effect), 3),
            "rho with effect given layer": round(partial_spearman(both, effect, [layers.ravel()]), 3),
            "heads of half 0": sorted(map(list, chosen[0])),
        }
    return found


def figures_of(report: dict[str, Any]) -> dict[str, Figure]:
    """Return the figures of a report: routes, readers of the colour, rules at equal bytes."""
    panels, ceilings, title = budget_panels(report)
    others, nobody = report["matched"]["mean"], report["no past"]["same"]
    shown = {"8 others of their layers": others, "all heads: past, all": nobody}
    known = {name: one["same"] for name, one in report["routes"].items() if name.startswith("known: ")}
    readers = report["paths"]["readers"]
    layers = sorted({int(name.split()[1]) for name in readers})
    heads = sum(name.startswith("layer 0 head") for name in readers)
    shares = np.array([[np.mean(readers[f"layer {n} head {h}"]) for h in range(heads)] for n in layers])
    panel = HeadMap("reads", "Colour read from visible frames", "share of x0", "sequential", shares)
    subtitle = f"{report['paths']['pairs']} pairs of colours"
    return {
        "routes": share_bars(shown | known, ceilings, "Eight heads lose a part of their past", SHARE),
        "color_readers": head_maps([panel], layers, subtitle=subtitle),
        "head_budgets": budget_curves(panels, ceilings, title),
    }


if __name__ == "__main__":
    main(run)
