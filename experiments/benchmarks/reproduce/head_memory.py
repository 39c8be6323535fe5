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

from experiments.analysis.effects import bootstrap, partial_spearman, rounded, spearman
from experiments.benchmarks.harness import save_report
from experiments.caches.files import require_writable
from experiments.extraction import causal
from experiments.extraction.provenance import environment
from experiments.miniature.evaluation import rendered
from experiments.miniature.recipe import FRAMES
from experiments.miniature.tracking import EvalPool
from experiments.running.cli import Parser, count, main
from experiments.running.progress import Progress, stopping_when_asked
from experiments.running.ranks import workers_of
from experiments.studies.color_paths import pairs_of, trace
from experiments.studies.head_memory import (
    HALVES,
    RULES,
    HeadMemory,
    Sizes,
    unnamed_captions,
)
from experiments.studies.hidden_shapes import QUESTIONS, Design, captions_behind_a_wall
from wan.config import load_config
from wan.files import read_json
from wan.vae import VAE

KNOWN = 8  # heads of the ranking of hidden_shapes.py


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--config_path", default="configs/wan_mini.yaml")
    flag("--ckpt_dir", help="directory of another miniature, with self_forcing_mini.pt in it")
    flag("--captions", type=count, default=Sizes.captions, help="behind a wall, that do not name the colour")
    flag(
        "--pairs", type=count, default=160, help="captions tried for pairs of colours; 60 % do not hide alike"
    )
    flag("--samples", type=count, default=Sizes.samples, help="random halves of all heads")
    flag("--draws", type=count, default=Sizes.draws, help="random sets of heads, matched by layer")
    flag("--ranking", type=Path, default=Path("docs/hidden_shapes.json"), help="the heads known before")
    flag("--judges", type=count, help="processes that judge videos")
    flag("--device", default="auto")
    flag("--folder", type=Path, default=Path("cache/head_memory"), help="where trials are kept")
    flag("--output_path", type=Path, default=Path("docs/head_memory.json"))
    args = parser.parse_args(argv)
    require_writable(args.output_path)
    save_report(measure(args), args.output_path)
    print(args.output_path)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Make what is not done yet, and return the report. StoppedError after Ctrl-C."""
    settings = {"device": args.device, "dtype": "float32"}
    if args.ckpt_dir:
        weights = f"{args.ckpt_dir}/self_forcing_mini.pt"
        settings |= {"ckpt_dir": args.ckpt_dir, "checkpoint_path": weights}
    config = load_config(args.config_path, settings)
    _, selection = captions_behind_a_wall(Design())  # on which the known heads were found
    ranked = {scene.caption: scene for _, scene in selection}
    scenes = unnamed_captions(max(args.captions, args.pairs), ranked)
    pairs = pairs_of(scenes[: args.pairs])
    known = [(row["layer"], row["head"]) for row in read_json(args.ranking)["knockouts"]["ranking"][:KNOWN]]
    sizes = Sizes(args.captions, args.draws, samples=args.samples)
    with (
        Progress() as watch,
        stopping_when_asked(watch, "trial"),
        EvalPool(workers_of(args.judges)) as pool,  # before a GPU is touched: it forks
    ):
        captions = [scene.caption for _, scene in scenes]
        session = causal.prepare(config, [], captions + [c for pair in pairs for c in pair.captions()], watch)
        vae, paths = VAE.from_pretrained(config.ckpt_dir, device=session.device), args.folder / "paths.json"
        if not paths.is_file():
            save_report({"paths": trace(config, session, vae, pool, pairs)}, paths)
        made_by = config, session, args.folder, 1, pool
        study = HeadMemory(scenes[: args.captions], *made_by, sizes=sizes, known=known)
        study.make_all(watch)
        about = {
            "environment": environment(session.device),
            "model": config.model,
            "weights_sha256": session.sha256.result(),
        }
        return about | report_of(study, ceilings_of(study, vae, pool)) | read_json(paths)


# -- the report --------------------------------------------------------------------------------------------


def share(values: Sequence[float] | np.ndarray) -> list[float]:
    """Return a mean over captions and its interval."""
    return rounded(bootstrap(np.asarray(values, float)))


def report_of(study: HeadMemory, ceilings: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return shares with intervals over captions, of trials that are done, and each caption's answers."""
    trials = {one.name: one for _, stage in study.stages() for one in stage()}
    done = {name: found for name, trial in trials.items() if (found := study.read(trial))}
    base = done["base"]

    def numbers(name: str) -> dict[str, Any]:
        one = done[name]
        return {q: share(one[q]) for q in QUESTIONS} | {"change of x0": share(one["change"])}

    matched = np.array([done[f"matched {n}"]["same"] for n in range(study.sizes.draws)])
    return {
        "captions": [scene.caption for _, scene in study.scenes],
        "seeds": [number for number, _ in study.scenes],
        "known heads": [list(head) for head in study.known],
        "ceilings": {name: share(values) for name, values in ceilings.items()},
        "base": numbers("base"),
        "no past": numbers("no past"),
        "known": numbers("known"),
        "matched": {
            "draws": [rounded([row.mean()])[0] for row in matched],
            "mean": share(matched.mean(0)),
            "known less matched": share(np.array(done["known"]["same"]) - matched.mean(0)),
        },
        "returns in block": base["returns"],
        "routes": {name: numbers(name) for name in done if name.startswith(("known: ", "("))}
        | before_and_after(study, done),
        "budgets": budgets_of(study, done),
        "chosen": agreement_of_halves(study),
        "answers": {name: "".join(map(str, one["same"])) for name, one in done.items()},
        "rows": {name: list(one.rows) for name, one in trials.items() if len(one.rows) < len(study.scenes)},
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


def before_and_after(study: HeadMemory, done: Mapping[str, dict]) -> dict[str, Any]:
    """Return the routes before and after the shape returns, over all captions that have such a moment."""
    found = {}
    names = {name.rpartition(", block")[0] for name in done if " it returns, block " in name}
    for name in sorted(names):
        parts = [
            done[f"{name}, block {block}"] for block in study.by_return() if f"{name}, block {block}" in done
        ]
        found[name] = {q: share(np.concatenate([one[q] for one in parts])) for q in QUESTIONS}
    return found


def budgets_of(study: HeadMemory, done: Mapping[str, dict]) -> dict[str, Any]:
    """Return for every rule [budgets] of shares, cross-fitted: each caption by heads of the other half."""

    def cross_fitted(rule: str, budget: int, sink: int, question: str) -> np.ndarray | None:
        values = np.full(len(study.scenes), np.nan)
        for half in range(HALVES):
            one = done.get(f"{rule}, {budget}, sink {sink}, half {half}")
            if one is None:
                return None
            values[list(study.half(half))] = one[question]
        return values

    found: dict[str, Any] = {"budgets": list(study.sizes.budgets), "narrow window": study.sizes.narrow}
    for sink in (0, study.sizes.sink):
        for question in ("same", "same_color", "comes_back", "shape"):
            rows: dict[str, list] = {}
            values = {
                rule: [cross_fitted(rule, budget, sink, question) for budget in study.sizes.budgets]
                for rule in (*RULES, "interactions")
            }
            values["random"] = []
            for budget in study.sizes.budgets:
                drawn = (f"random {n}" for n in range(study.sizes.budget_draws))
                each = [cross_fitted(rule, budget, sink, question) for rule in drawn]
                some = [x for x in each if x is not None]
                values["random"].append(np.mean(some, 0) if some else None)
            for rule, each in values.items():
                if all(x is not None for x in each):
                    rows[rule] = [share(x) for x in each]
            uniform = "window {}" + (", sink" if sink else "")
            of_windows = [np.array(done[uniform.format(b)][question]) for b in study.sizes.budgets]
            rows["uniform"] = [share(x) for x in of_windows]
            found[f"{question}, rest with sink {sink}"] = rows
            if question == "same":
                best = {
                    rule: [share(x - y) for x, y in zip(each, of_windows, strict=True)]
                    for rule, each in values.items()
                    if all(x is not None for x in each)
                }
                found[f"more than uniform, rest with sink {sink}"] = best
    return found


def agreement_of_halves(study: HeadMemory) -> dict[str, Any]:
    """Return, by rule, Spearman's ρ between scores of the halves, with the effect, and of a chosen twelve."""
    one, other = (study.scores(half) for half in range(HALVES))
    layers = np.broadcast_to(np.arange(len(one["effect"]))[:, None], one["effect"].shape)
    found = {}
    for rule in one:
        chosen = [set(study.chosen(half[rule], study.sizes.budgets[1])) for half in (one, other)]
        both, effect = (one[rule] + other[rule]).ravel(), (one["effect"] + other["effect"]).ravel()
        found[rule] = {
            "rho of halves": round(spearman(one[rule].ravel(), other[rule].ravel()), 3),
            "chosen by both": len(chosen[0] & chosen[1]) / len(chosen[0]),
            "rho with effect": round(spearman(both, effect), 3),
            "rho with effect given layer": round(partial_spearman(both, effect, [layers.ravel()]), 3),
            "heads of half 0": sorted(map(list, chosen[0])),
        }
    return found


if __name__ == "__main__":
    main(run)
