"""Which heads need which part of their past, by which route, and which rule picks them best at equal bytes?

    python experiments/benchmarks/reproduce/head_memory.py --device cuda
    python experiments/benchmarks/reproduce/head_memory.py --ckpt_dir checkpoints/wan-mini outputs/mini1

Writes docs/head_memory.json and figures (docs/head_memory.md). Trials are kept in --folder by the weights'
hash: the same command goes on where it stopped, and --trials beside it, of the same miniature, helps. Trials
of the same code made on other machines count once they lie in the folder, with their machines/*.json.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from experiments.analysis import published
from experiments.analysis.effects import ALL, CEILINGS, EACH, budget_panels, route_bars
from experiments.analysis.panels import HeadMap
from experiments.analysis.stats import (
    bootstrap,
    nested_bootstrap,
    partial_spearman,
    pearson,
    rounded,
    spearman,
)
from experiments.analysis.taxonomy import KINDS, LOCALITY, Thresholds, kinds, locality
from experiments.benchmarks.harness import finding_parser, miniature_config, save_report
from experiments.caches import load_cache
from experiments.caches.view import open_profiles
from experiments.extraction import causal
from experiments.extraction.provenance import environment, fingerprint
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
    MEASURED,
    RULES,
    Design,
    HeadMemory,
    Sizes,
    by_claim,
    captions_behind_a_wall,
    unnamed_captions,
)
from experiments.studies.paired_prompts import pairs_of, trace
from wan.errors import ConfigError
from wan.files import read_json
from wan.vae import VAE

NUMBERS = ("same", "comes_back", "shape", "change", "hue kept", "sharpness")  # of a caption
BUDGETS = "head_budgets", "head_budgets_no_sink", "head_budgets_last_block"  # a figure a narrow window
STABLE = 10  # frames of the mean head: the budget whose chosen heads are compared


def run(argv=None):
    parser = finding_parser(__doc__, "docs/head_memory.json", several=True)
    flag = parser.add_argument
    flag("--captions", type=count, default=Sizes.captions, help="behind a wall, that do not name the colour")
    flag("--pairs", type=count, default=160, help="captions tried for pairs; 60 %% do not hide alike")
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
    scenes = unnamed_captions(max(args.captions, args.pairs), {scene.caption: 0 for _, scene in selection})
    pairs, ranking, judges = pairs_of(scenes[: args.pairs]), read_json(args.ranking), workers_of(args.judges)
    texts = [scene.caption for _, scene in scenes] + [text for pair in pairs for text in pair.texts]
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
            session = causal.prepare(config, [], texts, watch)
            weights = session.sha256.result()
            vae = VAE.from_pretrained(config.ckpt_dir, device=session.device)
            known = heads if weights == ranking["weights_sha256"] else []
            made_by, shared = (config, session, args.folder / weights[:12]), {"judges": pool, "vae": vae}
            study = HeadMemory(
                scenes[: args.captions], *made_by, judges, sizes=sizes, known=known, shared=shared
            )
            if not args.report:
                made = {"environment": environment(session.device), "identity": study.identity}
                save_report(made, study.folder / "machines" / f"{fingerprint(study.identity)}.json")
            if not args.trials:
                study.about("ceilings", partial(ceilings_of, study, vae, pool))
                study.about("moments", partial(study.hiding, vae, pool))
            if not (args.trials or args.report):
                study.about("paths", partial(trace, config, session, vae, pool, pairs))
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
        ceilings, whole = study.about("ceilings"), study.about("paths").get("whole", {})
        for of in CEILINGS:
            claims[name][of] = {"same": np.array(ceilings[of], float)}
        claims[name] |= {f"patched: {of}": {"way": np.array(values)} for of, values in whole.items()}
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
    """Return what was found in one miniature: known heads, scores, classes, each caption's answers, paths."""
    found: dict[str, Any] = {"weights_sha256": study.session.sha256.result(), "answers": {}}
    found["machines"] = [one["environment"] for one in study.machines]
    if all(f"without {head}" in claims for head in study.heads):
        folds = range(len(study.judged))
        found["known heads"] = sorted({(*map(int, head),) for n in folds for head in study.known_of(n)})
        found |= {"chosen": agreement_of_halves(study), "classes": classes_of(study)}
    found["hides and returns in blocks"] = study.about("moments").get("blocks")
    for name in (name for name in claims if "same" in claims[name]):
        values = claims[name]["same"]  # a digit a caption, or a number where there are several draws
        digits = "".join("-" if np.isnan(x) else str(round(x)) for x in values)
        whole = set(values[~np.isnan(values)]) <= {0, 1}
        found["answers"][name] = digits if whole else rounded(values, 2)
    return found | {"paths": paths_of(study)}


def paths_of(study: HeadMemory) -> dict[str, Any]:
    """Return what trace() found: shares of readers and of writers with intervals over pairs."""
    found = {what: one for what, one in study.about("paths").items() if what not in ("whole", "name")}
    found["readers"] = {name: interval(x) for name, x in found.get("readers", {}).items()}
    writers = found.get("writers", {}).items()
    return found | {"writers": {name: {by: interval(x) for by, x in one.items()} for name, one in writers}}


def interval(shares: Sequence[float]) -> list[float]:
    """Return a mean over pairs with its interval."""
    return rounded(bootstrap(np.array(shares)))


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


# --- Published labels and curves of the real model
def classes_of(study: HeadMemory) -> dict[str, Any]:
    """Return shares of heads by published class: of the real model, of this one, of those that rules choose.

    For a published curve the largest r of a head over context frames, of both models.
    """
    base, scores = study.read(study.base()), study.scores_of(study.everyone)
    rate, far = (np.mean(base["measures"][rule], 0) for rule in ("Pyramid Forcing", "Forcing-KV"))
    here = kinds(rate, Thresholds()), locality(1 - far, Thresholds())
    files = published.HEAD_LABELS_CSV, published.STATIC_HEADS_CSV
    chosen = {rule: study.chosen(scores, rule, STABLE) for rule in RULES if rule in scores}
    found: dict[str, Any] = {}
    for labels, names, file in zip(here, (KINDS, LOCALITY), files, strict=True):
        real = published.read_labels(published.FOLDER / file)
        for label, name in names.items():
            found[name] = {"real model": round(float((real == label).mean()), 3)}
            found[name]["miniature"] = round(float((labels == label).mean()), 3)
            for rule, heads in chosen.items():
                found[name][rule] = round(float(np.mean([labels[head] == label for head in heads])), 3)
    view = open_profiles(load_cache(published.FOLDER / published.DEFAULT_ATLAS))
    for name, curve in published.read_curves(published.FOLDER / published.FIGURE4_CSV).items():
        frames = published.compared_frames(view, curve)
        r = pearson(np.array(base["curve"])[..., frames], curve.values[frames])
        best = published.rank_heads([view], curve)[0]["r"]
        found[name] = {"largest r, real model": round(best, 3), "miniature": round(float(np.nanmax(r)), 3)}
    return found


def figures_of(report: dict[str, Any]) -> dict[str, Figure]:
    """Return the figures of a report: routes, readers of the colour by miniature, rules at equal bytes."""
    found = {"routes": share_bars(*route_bars(report))}
    for name, narrow in zip(BUDGETS, Sizes.narrow, strict=True):
        panels, *about = budget_panels(report, *narrow)
        if panels.keys() - {"uniform"}:
            found[name] = budget_curves(panels, *about)
    paths = {name: one["paths"] for name, one in report["miniatures"].items() if one["paths"].get("readers")}
    read = {f"share of x0, {name}": readers_of(one["readers"]) for name, one in paths.items()}
    if read:
        maps = [HeadMap("reads", title, "share of x0", "sequential", x) for title, x in read.items()]
        pairs = ", ".join(str(one["pairs"]) for one in paths.values())
        subtitle = (
            f"how far a head's keys and values of visible frames move x0 to the other run's; {pairs} pairs"
        )
        title, layers = "Heads that read the colour", range(len(next(iter(read.values()))))
        found["color_readers"] = head_maps(maps, layers, subtitle=subtitle, title=title)
    return found


def readers_of(readers: Mapping[str, Sequence[float]]) -> np.ndarray:
    """Return the share of x0 that each head reads [layers, H], from shares with their intervals."""
    heads = {
        (*map(int, re.findall(r"\d+", name)),): shares for name, shares in readers.items() if "head" in name
    }
    values = np.zeros(np.max([*heads], 0) + 1)
    for head, shares in heads.items():
        values[head] = shares[0]
    return values


if __name__ == "__main__":
    main(run)
