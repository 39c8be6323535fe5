"""Compare rules that pick heads for a long cache, and remove frame 0 from heads (docs/head_memory.md).

    python experiments/findings/head_memory/run.py                    # answers -> shares, figure
    python experiments/findings/head_memory/run.py --measure first_frame --device cuda
    python experiments/findings/head_memory/run.py --measure budgets --ckpt_dir checkpoints/wan-mini mini1

results.json beside this file has the judge's answer for every caption and condition: without --measure all
shares, intervals and the figure are computed from these. --measure makes the answers anew, hours of a GPU.
Trials are kept in --folder, and the same command goes on where it stopped. first_frame: frame 0 is removed
from each head's view. budgets: some heads keep the whole past, at equal bytes. Scores by path patching need
the code of commit 01e1ad6; more and more heads without a past, that of 13da109.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.analysis.results import (
    ALL,
    BACK,
    CEILINGS,
    EACH,
)
from experiments.analysis.stats import (
    bootstrap,
    crossed_bootstrap,
    head_correlation,
    pearson,
    rounded,
    spearman,
    t_interval,
)
from experiments.caches.files import save_report
from experiments.extraction.provenance import environment
from experiments.extraction.rollout import Progress, stopping_when_asked
from experiments.figures.atlas import effect_against
from experiments.figures.style import save_svg
from experiments.findings.head_memory.captions import (
    SEED_STEP,
    Design,
    captions_behind_a_wall,
    captions_of_all_kinds,
    unnamed_captions,
)
from experiments.findings.head_memory.trials import (
    HALVES,
    MEASURED,
    RULES,
    HeadMemory,
    Sizes,
    by_claim,
    measures_of_pass,
)
from experiments.findings.report import finding_parser, miniature_config
from experiments.running.cli import count, main
from experiments.running.ranks import workers_of
from experiments.session import Session, load
from experiments.studies import causal_atlas
from experiments.studies.batches import Runs
from wan.config import RunConfig
from wan.files import read_json
from wan.interventions import Knockout

FIRST_FRAME_CAPTIONS = 32  # of every kind, for frame 0

Values = dict[str, np.ndarray]  # by claim, a number for each caption


def run(argv=None):
    parser = finding_parser(__doc__, "head_memory")
    flag = parser.add_argument
    flag("--measure", choices=("first_frame", "budgets"), help="make the answers anew; else they are read")
    other = "directories of miniatures, with self_forcing_mini.pt in each; first_frame takes the first"
    flag("--ckpt_dir", nargs="+", default=[None], help=other)
    flag("--captions", type=count, default=Sizes.captions, help="on which heads are judged, of budgets")
    flag("--seeds", type=int, choices=range(1, 10), default=3, help="seeds of each caption, of first_frame")
    flag("--folder", type=Path, default=Path("cache/head_memory"), help="where trials are kept")
    args = parser.parse_args(argv)
    report = read_json(args.output_path)
    if args.measure == "first_frame":
        report["first_frame"] = measured_first_frame(args)
    elif args.measure == "budgets":
        report["budgets"] = measured_budgets(args)
    report["budgets"]["shares"] = shares = shares_of(report["budgets"])
    # Is a shape that is right more than one that comes back?
    both = [(x[BACK][ALL][0], x["comes_back"][ALL][0]) for x in shares.values() if "comes_back" in x]
    report["budgets"]["r of right and comes_back"] = [
        round(float(pearson(*np.transpose(both))), 3),
        len(both),
    ]
    save_report(report, args.output_path)
    print(args.output_path)
    print(save_svg(figure_of(report), args.figures / "first_frame_removed.svg"))


# --- Making the answers
def measured_first_frame(args: argparse.Namespace) -> dict[str, Any]:
    """Remove frame 0 from every head's view, unless that is done; return what it does."""
    config, prompts = miniature_config(args, args.ckpt_dir[0]), captions_of_all_kinds(FIRST_FRAME_CAPTIONS)
    with Progress() as watch, stopping_when_asked(watch, "condition"):
        session = load(config).prepare((), [*prompts], watch)
        removed = first_frame_study(prompts, args.seeds, config, session, args.folder / "first_frame")
        causal_atlas.run(removed, len(removed.configs), watch)
        about = {"environment": environment(session.device), "model": config.model, "seeds": args.seeds}
        about |= {
            "weights_sha256": session.weights_sha256,
            "dtype": str(session.dtype).removeprefix("torch."),
        }
        numbers = first_frame_numbers(removed, args.seeds)
        return about | first_frame_report(numbers, range(session.model_config.num_layers))


# Frame 0 removed from a head's view, beside what that head attends to
def first_frame_study(
    prompts: Mapping[str, int], seeds: int, config: RunConfig, session: Session, folder: Path
) -> causal_atlas.Study:
    """Return the causal atlas of frame 0: runs of all captions with their first seed, then with the next."""
    configs = [
        replace(config, prompt=caption, seed=first + SEED_STEP * n)
        for n in range(seeds)
        for caption, first in prompts.items()
    ]
    edit = Knockout(frames=("first",), passes="denoise")
    return causal_atlas.Study(folder, edit, "head", configs, session)


def first_frame_numbers(study: causal_atlas.Study, seeds: int) -> dict[str, np.ndarray]:
    """Return means over frames and seeds of a study that is done, [prompts, layers, H] each.

    effect and control (the same on a random earlier frame) in units of the distance between seeds, norm of z,
    and s and masses of the first pass.
    """
    atlas = {name: values.numpy() for name, values in causal_atlas.merged(study).items()}
    names = {"effect": "effects", "control": "frame_control", "floor": "floor"}
    found = {name: np.nanmean(atlas[field], -1) for name, field in names.items()}
    found["norm"] = atlas["head_norms"]
    layers = [layer or 0 for layer in study.layers]
    measures = measures_of_pass(Runs(study.session, study.configs), 0)
    found |= {name: x[:, layers] for name, x in measures.items()}
    return {name: x.reshape(seeds, -1, *x.shape[1:]).mean(0) for name, x in found.items()}


def measured_budgets(args: argparse.Namespace) -> dict[str, Any]:
    """Make the trials that are missing of each miniature; return every caption's answer in each of them."""
    _, selection = captions_behind_a_wall(Design())  # heads of other studies were chosen on these
    sizes = Sizes(args.captions)
    scenes = unnamed_captions(sizes.captions, [scene.caption for _, scene in selection])
    found: dict[str, Any] = {"captions": [scene.caption for _, scene in scenes], "miniatures": {}}
    with Progress() as watch, stopping_when_asked(watch, "trial"):
        for ckpt_dir in args.ckpt_dir:
            config = miniature_config(args, ckpt_dir)
            session = load(config).prepare((), found["captions"], watch)
            folder = args.folder / session.identity(config)["weights_sha256"][:12]
            study = HeadMemory(scenes, config, session, folder, workers_of(args.judges), sizes=sizes)
            study.make_all(watch)
            found["miniatures"][Path(config.ckpt_dir).name] = about(study)
            found |= {"environment": environment(session.device), "model": config.model}
    return found | {"seeds": [number for number, _ in scenes], "folds": sizes.folds}


def about(study: HeadMemory) -> dict[str, Any]:
    """Return what was found in one miniature: agreement of scores, each caption's answers."""
    found: dict[str, Any] = {"weights_sha256": study.session.weights_sha256}
    answers = study.ceilings()
    means: dict[str, float] = {}
    # Are scores of half of the captions those of the other half?
    one, other = (study.scores_of(study.everyone[number::HALVES]) for number in range(HALVES))
    found["rho of halves"] = {
        rule: round(spearman(one[rule].ravel(), other[rule].ravel()), 3) for rule in one
    }
    for claim, trials in by_claim(one for _, stage in study.stages() for one in stage).items():
        if claim.startswith(("without", "sample")):  # heads are chosen by these
            continue
        # Folds of a claim are disjoint; draws of one claim cover the captions again.
        rows = np.concatenate([one.rows for one in trials])

        def mean_of(question: str, rows: np.ndarray = rows, trials: Sequence = trials) -> np.ndarray:
            """Return the mean over draws of every caption."""
            said = np.concatenate([study.read(one)[question] for one in trials])
            return np.bincount(rows, said) / np.bincount(rows)

        answers[claim] = mean_of(BACK).tolist()
        means[claim] = round(float(mean_of("comes_back").mean()), 3)
    found["answers"] = {
        claim: "".join(map(str, map(round, values))) if {*values} <= {0, 1} else rounded(values, 2)
        for claim, values in answers.items()
    }
    found["means"] = {"comes_back": dict(sorted(means.items()))}
    return found


# --- Shares from answers: of each miniature with intervals over captions, of all over miniatures and captions
def claims_of(answers: Mapping[str, str | Sequence[float]]) -> dict[str, Values]:
    """Return, by claim, its answers and their differences to the claims that it is compared with."""
    found: dict[str, Values] = {}
    for claim, values in answers.items():
        found[claim] = {BACK: np.array([float(x) for x in values])}  # a digit a caption, or a mean of draws
    for claim, shares in found.items():
        others = ["base"]
        if " with " in claim:  # "rule, budget, window with sink n"
            rule, budget, narrow = claim.split(", ")
            uniform = [other for other in found if other.startswith(f"uniform, {budget}, ")]
            others = [*uniform, f"random, {budget}, {narrow}"]
            rivals = [found.get(f"{one}, {budget}, {narrow}") for one in RULES if one not in MEASURED]
            if rule in MEASURED and (judged := [one[BACK] for one in rivals if one]):
                # The best attention measure of this training, not of all.
                shares["less attention"] = shares[BACK] - max(judged, key=np.mean)
        for other in others:
            if other in found and claim not in (other, "base", *CEILINGS):
                shares[f"less {other}"] = shares[BACK] - found[other][BACK]
    return found


def shares_of(budgets: Mapping[str, Any]) -> dict[str, Any]:
    """Return claim -> number -> the mean, its interval and the count of captions; means of each miniature.

    Trainings are crossed with captions, and so is the bootstrap. t: Student's interval over trainings alone.
    """
    miniatures = budgets["miniatures"].values()
    claims = [claims_of(one["answers"]) for one in miniatures]
    found: dict[str, Any] = defaultdict(dict)
    names = dict.fromkeys((claim, name) for one in claims for claim, of in one.items() for name in of)
    for claim, name in names:
        rows = np.stack([one[claim][name] for one in claims if name in one.get(claim, {})])
        row = [*rounded(crossed_bootstrap(rows)), rows.size]
        found[claim][name] = {ALL: row, EACH: rounded(rows.mean(1))}
        if len(rows) > 1:
            found[claim][name]["t"] = rounded(t_interval(rows.mean(1))[1:])
    for claim, of in found.items():
        means = (one["means"]["comes_back"] for one in miniatures)
        if len(each := [of_one[claim] for of_one in means if claim in of_one]) > 1:
            of["comes_back"] = {ALL: rounded(t_interval(each)), EACH: each}
    return found


# --- Does attention predict the effect of removing frame 0?
def first_frame_report(found: Mapping[str, np.ndarray], layers: Sequence[int]) -> dict[str, Any]:
    """Report how attention predicts the effect of removing frame 0; found [prompts, layers, H] each."""
    effect, beyond = found["effect"], found["effect"] - found["control"]
    shape = effect.shape[1:]
    # Layer and norm of z explain much of the effect: partial rho is given both.
    given = [np.broadcast_to(np.asarray(layers, float)[:, None], shape), found["norm"].mean(0)]
    measured = [name for name in found if name not in ("effect", "control", "floor", "norm")]
    correlations = {
        name: {
            f"{partial}rho{suffix}": rounded(head_correlation(values, found[name], others))
            for suffix, values in (("", effect), ("_beyond_control", beyond))
            for partial, others in (("", ()), ("partial_", given))
        }
        for name in measured
    }
    return {
        "prompts": len(effect),
        "layers": list(layers),
        "mean_effect": rounded(bootstrap(effect.mean((1, 2))), 4),
        "mean_control": rounded(bootstrap(found["control"].mean((1, 2))), 4),
        "floor": float(f"{found['floor'].mean():.2g}"),
        "correlations": correlations,
        "heads": {
            name: [[float(f"{value:.3g}") for value in row] for row in found[name].mean(0)]
            for name in ("effect", "control", "norm", *measured)
        },
    }


# --- The figure
def figure_of(report: Mapping[str, Any]) -> Figure:
    """Draw frame 0 removed against attention."""
    first = report["first_frame"]
    shown = {name: np.array(first["heads"][name]) for name in first["correlations"]}
    notes = {}
    for name, of in first["correlations"].items():
        both = (of[key][:3] for key in ("rho", "partial_rho"))
        notes[name] = "ρ = {}\npartial ρ = {}".format(*("{:.2f} [{:.2f}, {:.2f}]".format(*x) for x in both))
    runs = f"{first['model']}, {first['prompts']} captions × {first['seeds']} seeds"
    about = f"knock out the first frame: {runs}, first pass"
    return effect_against(np.array(first["heads"]["effect"]), shown, notes, subtitle=about)


if __name__ == "__main__":
    main(run)
