"""Which heads need their past, and which rule picks them best at equal bytes?

    python experiments/benchmarks/reproduce/head_memory.py --device cuda
    python experiments/benchmarks/reproduce/head_memory.py --ckpt_dir checkpoints/wan-mini outputs/mini1

Writes docs/head_memory.json and a figure (docs/head_memory.md). Trials are kept in --folder by the weights'
hash: the same command goes on where it stopped, and --trials beside it, of the same miniature, helps.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from experiments.analysis.effects import ALL, CEILINGS, EACH, budget_panels
from experiments.analysis.stats import nested_bootstrap, partial_spearman, rounded, spearman
from experiments.benchmarks.reproduce.common import finding_parser, miniature_config
from experiments.caches.files import save_report
from experiments.extraction.provenance import environment
from experiments.figures.atlas import budget_curves
from experiments.figures.style import save_svg
from experiments.miniature.evaluation import rendered
from experiments.miniature.moving_shapes import FRAMES
from experiments.miniature.tracking import EvalPool
from experiments.running.cli import count, main
from experiments.running.progress import Progress, stopping_when_asked
from experiments.running.ranks import workers_of
from experiments.session import load
from experiments.studies.hidden_shapes import (
    HALVES,
    MEASURED,
    RULES,
    Design,
    HeadMemory,
    Sizes,
    by_claim,
    captions_behind_a_wall,
    unnamed_captions,
)
from wan.errors import ConfigError
from wan.files import read_json
from wan.vae import VAE

NUMBERS = ("same", "comes_back", "shape", "change", "hue kept", "sharpness")  # of a caption
STABLE = 10  # frames of the mean head: the budget whose chosen heads are compared


def run(argv=None):
    parser = finding_parser(__doc__, "docs/head_memory.json", several=True)
    flag = parser.add_argument
    flag("--captions", type=count, default=Sizes.captions, help="behind a wall, that do not name the colour")
    flag("--samples", type=count, default=Sizes.samples, help="random halves of all heads")
    flag("--draws", type=count, default=Sizes.draws, help="random sets of heads for each fold, by layer")
    flag("--folds", type=int, choices=(1, 2, 5), default=Sizes.folds, help="folds of captions that judge")
    flag("--ranking", type=Path, default=Path("docs/hidden_shapes.json"), help="the heads known before")
    flag("--folder", type=Path, default=Path("cache/head_memory"), help="where trials are kept")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--trials", action="store_true", help="only make trials, beside another such command")
    what.add_argument("--report", action="store_true", help="only report the trials that are done")
    what.add_argument("--draw", action="store_true", help="only draw the figures of --output_path again")
    args = parser.parse_args(argv)
    if not args.draw:
        studies = measure(args)
        if args.trials:
            return
        save_report(report_of(studies), args.output_path)
    for name, figure in figures_of(read_json(args.output_path)).items():
        print(save_svg(figure, args.figures / f"{name}.svg"))


def measure(args: argparse.Namespace) -> dict[str, HeadMemory]:
    """Make what is not done yet, and return the study of each miniature. StoppedError after Ctrl-C."""
    _, selection = captions_behind_a_wall(Design())  # on which the known heads were found
    scenes = unnamed_captions(args.captions, {scene.caption: 0 for _, scene in selection})
    ranking, judges = read_json(args.ranking), workers_of(args.judges)
    texts = [scene.caption for _, scene in scenes]
    sizes, studies = Sizes(args.captions, draws=args.draws, samples=args.samples, folds=args.folds), {}
    heads = [(row["layer"], row["head"]) for row in ranking["knockouts"]["ranking"][: sizes.known]]
    with (
        Progress() as watch,
        stopping_when_asked(watch, "trial"),
        EvalPool(judges) as pool,  # before a GPU is touched: it forks
    ):
        for ckpt_dir in args.ckpt_dir or [None]:
            config = miniature_config(argparse.Namespace(**vars(args) | {"ckpt_dir": ckpt_dir}))
            if (name := Path(config.ckpt_dir).name) in studies:
                raise ConfigError(f"--ckpt_dir: two folders are called {name}; rename one")
            session = load(config).prepare((), texts, watch)
            weights = session.sha256.result()
            vae = VAE.from_pretrained(config.ckpt_dir, device=session.device)
            known = heads if weights == ranking["weights_sha256"] else []
            made_by, shared = (config, session, args.folder / weights[:12]), {"judges": pool, "vae": vae}
            study = HeadMemory(scenes, *made_by, judges, sizes=sizes, known=known, shared=shared)
            if not args.trials:
                study.about("ceilings", partial(ceilings_of, study, vae, pool))
            if not args.report:
                study.make_all(watch)
            studies[name] = study
    return studies


def ceilings_of(study: HeadMemory, vae: VAE, pool: EvalPool) -> dict[str, list[int]]:
    """Return whether the judge says `same` of the scenes as rendered, and after the VAE."""
    scenes = [scene for _, scene in study.scenes]
    videos = rendered(scenes, FRAMES)
    parts = (vae.decode(vae.encode(x.to(study.session.device))) for x in torch.stack(videos).split(32))
    judged = pool.judge_all(videos, scenes), pool.judge_all((v.cpu() for x in parts for v in x), scenes)
    return {
        name: [int(one["same"]) for one in answers] for name, answers in zip(CEILINGS, judged, strict=True)
    }


# --- Shares: of each miniature with intervals over captions, of all over miniatures and captions
Values = dict[str, np.ndarray]  # a number for each caption, NaN where it was not judged


def claims_of(study: HeadMemory) -> dict[str, Values]:
    """Return the numbers of each claim that is judged: means over its trials."""
    found, count = {}, len(study.scenes)
    for claim, trials in by_claim(one for _, stage in study.stages() for one in stage).items():
        if not all(done := [study.read(one) for one in trials]):
            continue
        rows = np.concatenate([one.rows for one in trials])
        times = np.bincount(rows, minlength=count)
        found[claim] = {
            name: np.where(times, np.bincount(rows, values, count) / np.maximum(times, 1), np.nan)
            for name in NUMBERS
            if all(name in one for one in done)
            for values in [np.concatenate([one[name] for one in done])]
        }
    for claim, values in found.items():
        others = ["known"] if claim in ("matched", "no past") else ["base"]
        if " with " in claim:
            rule, budget, narrow = claim.split(", ")
            uniform = [other for other in found if other.startswith(f"uniform, {budget}, ")]
            others = [*uniform, f"random, {budget}, {narrow}"]
            rivals = [found.get(f"{one}, {budget}, {narrow}") for one in RULES if one not in MEASURED]
            if rule in MEASURED and (judged := [one["same"] for one in rivals if one]):  # the best of each
                values["less attention"] = values["same"] - max(judged, key=np.nanmean)
        for other in others:
            if other in found and claim not in (other, "base"):
                values[f"less {other}"] = values["same"] - found[other]["same"]
    return found


def shares_of(claims: Mapping[str, Mapping[str, Values]]) -> dict[str, Any]:
    """Return claim -> number -> the mean, its interval and the count of captions; means of each miniature."""
    found: dict[str, Any] = defaultdict(dict)
    names = dict.fromkeys((c, n) for one in claims.values() for c in one for n in one[c])
    for claim, name in (one for one in names if not one[0].startswith(("without", "sample"))):
        values = [one.get(claim, {}).get(name, np.zeros(0)) for one in claims.values()]
        each = [some[~np.isnan(some)] for some in values]
        judged = [some for some in each if len(some)]
        means = [round(float(some.mean()), 3) if len(some) else None for some in each]
        row = [*rounded(nested_bootstrap(judged)), sum(map(len, judged))]
        found[claim][name] = {ALL: row, EACH: means}
    return found


def report_of(studies: Mapping[str, HeadMemory]) -> dict[str, Any]:
    """Return shares with intervals, of the trials that are done, and what was found in each miniature."""
    studies = {name: study for name, study in studies.items() if study.read(study.base())}
    if not studies:
        raise ConfigError("nothing is done yet; run the same command without --report")
    first = next(iter(studies.values()))
    claims = {name: claims_of(study) for name, study in studies.items()}
    for name, study in studies.items():
        ceilings = study.about("ceilings")
        for of in CEILINGS:
            claims[name][of] = {"same": np.array(ceilings[of], float)}
    return {
        "environment": environment(first.session.device),
        "model": first.config.model,
        "captions": [scene.caption for _, scene in first.scenes],
        "seeds": [number for number, _ in first.scenes],
        "folds": first.sizes.folds,
        "shares": shares_of(claims),
        "miniatures": {name: about(study, claims[name]) for name, study in studies.items()},
    }


def about(study: HeadMemory, claims: Mapping[str, Values]) -> dict[str, Any]:
    """Return what was found in one miniature: known heads, scores, each caption's answers."""
    found: dict[str, Any] = {"weights_sha256": study.session.sha256.result(), "answers": {}}
    if all(f"without {head}" in claims for head in study.heads):
        folds = range(len(study.judged))
        found["known heads"] = sorted({(*map(int, head),) for n in folds for head in study.known_of(n)})
        found["chosen"] = agreement_of_halves(study)
    for name in (name for name in claims if "same" in claims[name]):
        values = claims[name]["same"]  # a digit a caption, or a number where there are several draws
        digits = "".join("-" if np.isnan(x) else str(round(x)) for x in values)
        whole = set(values[~np.isnan(values)]) <= {0, 1}
        found["answers"][name] = digits if whole else rounded(values, 2)
    return found


def agreement_of_halves(study: HeadMemory) -> dict[str, Any]:
    """Return, by rule, Spearman's ρ between scores of halves and with the effect, and the heads chosen."""
    one, other = (study.scores_of(study.everyone[number::HALVES]) for number in range(HALVES))
    folds = [study.scores_of(study.others(fold)) for fold in range(len(study.folds))]
    layers = np.broadcast_to(np.arange(len(one["effect"]))[:, None], one["effect"].shape)
    found = {}
    for rule in one:
        chosen, *others = ({*study.chosen(scores, rule, STABLE)} for scores in (one, other, *folds))
        both, effect = (one[rule] + other[rule]).ravel(), (one["effect"] + other["effect"]).ravel()
        found[rule] = {
            "rho of halves": round(spearman(one[rule].ravel(), other[rule].ravel()), 3),
            "chosen by both": len(chosen & others[0]) / len(chosen),
            "chosen in all folds": len(set.intersection(*others[1:])) / len(chosen),
            "rho with effect": round(spearman(both, effect), 3),
            "rho with effect given layer": round(partial_spearman(both, effect, [layers.ravel()]), 3),
            "heads of half 0": sorted(map(list, chosen)),
        }
    return found


def figures_of(report: dict[str, Any]) -> dict[str, Figure]:
    """Return the figure of a report: rules at equal bytes, with a sink."""
    return {"head_budgets": budget_curves(*budget_panels(report, *Sizes.narrow[0]))}


if __name__ == "__main__":
    main(run)
