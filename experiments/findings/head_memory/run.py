"""Find the heads that bring a hidden shape back, and the rule that picks them best (docs/head_memory.md).

    python experiments/findings/head_memory/run.py                    # answers -> shares, figures
    python experiments/findings/head_memory/run.py --measure shapes --device cuda
    python experiments/findings/head_memory/run.py --measure budgets --ckpt_dir checkpoints/wan-mini mini1

results.json beside this file has the judge's answer for every caption and condition: without --measure all
shares, intervals and figures are computed from these. --measure makes the answers anew, hours of a GPU.
Trials are kept in --folder, and the same command goes on where it stopped. shapes: more and more heads lose
their past, and frame 0 is removed from each head's view. budgets: some heads keep the whole past, at equal
bytes. Scores by path patching and routes through the past need the code of commit 01e1ad6.
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
    ORDERS,
)
from experiments.analysis.stats import (
    DRAWS,
    bootstrap,
    crossed_bootstrap,
    head_correlation,
    partial_spearman,
    pearson,
    rounded,
    spearman,
    t_interval,
)
from experiments.analysis.taxonomy import KINDS, Thresholds, kinds
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
    QUESTIONS,
    RULES,
    HeadMemory,
    HiddenShapes,
    Sizes,
    Trials,
    by_claim,
    measures_of_pass,
)
from experiments.findings.report import finding_parser, miniature_config
from experiments.miniature import SHIPPED
from experiments.running.cli import count, main
from experiments.running.ranks import workers_of
from experiments.session import Session, load
from experiments.studies import causal_atlas
from experiments.studies.batches import Runs
from wan.config import RunConfig
from wan.files import read_json
from wan.interventions import Knockout

FIRST_FRAME_CAPTIONS = 32  # of every kind, for frame 0
SHOWN = 12  # heads of the ranking in the report
FIRST_PASS = ", first pass"
STABLE = 10  # frames of the mean head: the budget whose chosen heads are compared

Values = dict[str, np.ndarray]  # by claim, a number for each caption


def run(argv=None):
    parser = finding_parser(__doc__, "head_memory")
    flag = parser.add_argument
    flag("--measure", choices=("shapes", "budgets"), help="make the answers anew; else they are read")
    other = "directories of miniatures, with self_forcing_mini.pt in each; shapes takes the first"
    flag("--ckpt_dir", nargs="+", default=[None], help=other)
    flag(
        "--captions", type=count, help="behind a wall, on which heads are judged: 96 of shapes, 40 of budgets"
    )
    flag("--seeds", type=int, choices=range(1, 10), default=3, help="seeds of each caption, of shapes")
    flag("--folder", type=Path, default=Path("cache/head_memory"), help="where trials are kept")
    args = parser.parse_args(argv)
    report = read_json(args.output_path)
    if args.measure == "shapes":
        report["shapes"] = measured_shapes(args)
    elif args.measure == "budgets":
        report["budgets"] = measured_budgets(args, report["shapes"])
    report["shapes"]["knockouts"] |= curves_of(report["shapes"]["knockouts"])
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
def measured_shapes(args: argparse.Namespace) -> dict[str, Any]:
    """Make the trials that are missing; return what came back, and what frame 0 does."""
    config, design = miniature_config(args, args.ckpt_dir[0]), Design(args.captions or 96, seeds=args.seeds)
    of_frame_0, sets = captions_of_all_kinds(FIRST_FRAME_CAPTIONS), captions_behind_a_wall(design)
    texts = [*(scene.caption for scenes in sets for _, scene in scenes), *of_frame_0]
    with Progress() as watch, stopping_when_asked(watch, "condition"):
        session = load(config).prepare((), texts, watch)

        def trials(scenes: Sequence) -> Trials:
            """Return trials of all scenes with their first seed, then with the next."""
            seeded = [(number + SEED_STEP * n, scene) for n in range(args.seeds) for number, scene in scenes]
            return Trials(seeded, config, session, args.folder, workers_of(args.judges))

        test, selection = map(trials, sets)
        shapes = HiddenShapes(design, selection, test)
        shapes.run(watch)
        removed = first_frame_study(of_frame_0, args.seeds, config, session, args.folder / "first_frame")
        causal_atlas.run(removed, len(removed.configs), watch)
        first_frame = first_frame_numbers(removed, args.seeds)
        return {
            "environment": environment(session.device),
            "model": config.model,
            "weights_sha256": session.weights_sha256,
            "dtype": str(session.dtype).removeprefix("torch."),
            "first_frame": first_frame_report(first_frame, range(session.model_config.num_layers)),
            "knockouts": knockouts(shapes),
        }


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
    and s and masses, of the first pass and as the mean over the denoising passes.
    """
    atlas = {name: values.numpy() for name, values in causal_atlas.merged(study).items()}
    names = {"effect": "effects", "control": "frame_control", "floor": "floor"}
    found = {name: np.nanmean(atlas[field], -1) for name, field in names.items()}
    found["norm"] = atlas["head_norms"]
    runs = Runs(study.session, study.configs)
    passes = [measures_of_pass(runs, step) for step in range(len(study.configs[0].denoising_step_list))]
    for name in passes[0]:
        of_layers = np.stack([one[name] for one in passes])[:, :, [layer or 0 for layer in study.layers]]
        found |= {f"{name}, first pass": of_layers[0], f"{name}, all passes": of_layers.mean(0)}
    return {name: x.reshape(seeds, -1, *x.shape[1:]).mean(0) for name, x in found.items()}


def knockouts(study: HiddenShapes) -> dict[str, Any]:
    """Return what came back in each trial, by caption, and shares of captions."""
    design, trials = study.design, {one.name: one for one in study.conditions()}
    made = {q: {name: study.answers(one, q) for name, one in trials.items()} for q in QUESTIONS}
    measured, heads = study.selection_measures(), study.test.heads
    best = sorted(heads, key=lambda head: measured["effect"][head], reverse=True)[:SHOWN]
    scenes = [scene for _, scene in study.test.scenes][: design.captions]
    judged = read_json(SHIPPED / "evaluation.json")["captions"]["behind a wall"]["shares"]
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
            name: {
                q: rounded([made[q][f"{name}: {n}"].mean() for n in design.counts])
                for q in QUESTIONS
                if q != BACK
            }
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


def measured_budgets(args: argparse.Namespace, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Make the trials that are missing of each miniature; return every caption's answer in each of them."""
    _, selection = captions_behind_a_wall(Design())  # on which the known heads were found
    sizes = Sizes(args.captions or Sizes.captions)
    scenes = unnamed_captions(sizes.captions, [scene.caption for _, scene in selection])
    ranked = [(row["layer"], row["head"]) for row in shapes["knockouts"]["ranking"][: sizes.known]]
    found: dict[str, Any] = {"captions": [scene.caption for _, scene in scenes], "miniatures": {}}
    with Progress() as watch, stopping_when_asked(watch, "trial"):
        for ckpt_dir in args.ckpt_dir:
            config = miniature_config(args, ckpt_dir)
            session = load(config).prepare((), found["captions"], watch)
            weights = session.identity(config)["weights_sha256"]
            known = ranked if weights == shapes["weights_sha256"] else []
            made_by = config, session, args.folder / weights[:12], workers_of(args.judges)
            study = HeadMemory(scenes, *made_by, sizes=sizes, known=known)
            study.make_all(watch)
            found["miniatures"][Path(config.ckpt_dir).name] = about(study)
            found |= {"environment": environment(session.device), "model": config.model}
    return found | {"seeds": [number for number, _ in scenes], "folds": sizes.folds}


def about(study: HeadMemory) -> dict[str, Any]:
    """Return what was found in one miniature: known heads, agreement of scores, each caption's answers."""
    found: dict[str, Any] = {"weights_sha256": study.session.weights_sha256}
    folds, answers = range(len(study.folds)), study.ceilings()
    means: dict[str, float] = {}
    found["known heads"] = sorted({(*map(int, head),) for n in folds for head in study.known_of(n)})
    found["chosen"] = agreement_of_halves(study)
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


def agreement_of_halves(study: HeadMemory) -> dict[str, Any]:
    """Return, by rule, Spearman's ρ between scores of halves and with the effect, and the heads chosen."""
    # Are scores of half of the captions those of the other half?
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


# --- Shares from answers: of each miniature with intervals over captions, of all over miniatures and captions
def claims_of(answers: Mapping[str, str | Sequence[float]]) -> dict[str, Values]:
    """Return, by claim, its answers and their differences to the claims that it is compared with."""
    found: dict[str, Values] = {}
    for claim, values in answers.items():
        found[claim] = {BACK: np.array([float(x) for x in values])}  # a digit a caption, or a mean of draws
    for claim, shares in found.items():
        others = ["known"] if claim in ("matched", "no past") else ["base"]
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


# --- Curves: how much comes back when more and more heads lose their past
def random_curve(draws: np.ndarray) -> list[list[float]]:
    """Share, interval over orders and captions, lowest, highest, of draws [draws, counts, captions]."""
    generator = np.random.default_rng(0)
    (orders, _, captions), drawn = draws.shape, []
    for _ in range(DRAWS):
        # Orders are resampled, and then captions, which all orders share.
        of_orders = draws[generator.integers(orders, size=orders)].mean(0)
        drawn.append(of_orders[:, generator.integers(captions, size=captions)].mean(1))
    of_draws = draws.mean(2)  # [draws, counts]
    ends = np.percentile(drawn, [2.5, 97.5], axis=0)
    columns = np.stack([of_draws.mean(0), *ends, of_draws.min(0), of_draws.max(0)], 1)
    return [rounded(row) for row in columns]


def heads_for_half(shares: Sequence[float], counts: Sequence[int], whole: float, none: float) -> int | None:
    """Return the fewest heads after which half of what the past gives is lost, or None."""
    half = (whole + none) / 2 + 1e-9  # shares are multiples of 1 / (captions x seeds): no rounding decides
    return next((count for count, share in zip(counts, shares, strict=True) if share <= half), None)


def curves_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Compute every order's curve from the seeds that come back in each condition.

    Of captions that do not name the shape's colour, whose answer the text cannot give; the ends and the
    effect's curve of the others beside them.
    """
    named = np.array([digit == "1" for digit in found["names_color"]])

    def answers(name: str, of: np.ndarray = ~named) -> np.ndarray:
        return np.array([int(digit) for digit in found["seeds_that_come_back"][name]])[of] / found["seeds"]

    def by_count(name: str, of: np.ndarray = ~named) -> np.ndarray:
        return np.stack([answers(f"{name}: {count}", of) for count in found["counts"]])

    def curve(shares: np.ndarray) -> list[list[float]]:
        return [rounded(bootstrap(row)) for row in shares]

    orders = {name: by_count(name) for name in ORDERS}
    random = np.stack([by_count(f"random {draw}") for draw in range(found["draws"])])
    means = {name: values.mean(1) for name, values in orders.items()} | {"random": random.mean((0, 2))}
    ends = {name: curve(answers(name)[None])[0] for name in ("base", "all")}
    paired = {name: curve(values - orders["effect"]) for name, values in orders.items() if name != "effect"}
    of_named = {name: curve(answers(name, named)[None])[0] for name in ends}
    everyone = np.ones_like(named)
    at = found["counts"].index(8)
    both = {
        question: {
            "base": found["base"][question][0],
            "all": found["all"][question][0],
            "effect: 8": found["other_answers"]["effect"][question][at],
        }
        for question in ("comes_back", "hides")
    }
    return {
        "captions without colour": int((~named).sum()),
        "ends": ends,
        "curves": {name: curve(values) for name, values in orders.items()} | {"random": random_curve(random)},
        "more_than_by_effect": paired,
        "heads_for_half": {
            name: heads_for_half(each.tolist(), found["counts"], ends["base"][0], ends["all"][0])
            for name, each in means.items()
        },
        "all captions": {
            name: {
                "right": round(float(answers(name, everyone).mean()), 3),
                "comes_back": share,
                "hides": both["hides"][name],
                "returns": round(share * found["captions"] * found["seeds"]),
            }
            for name, share in both["comes_back"].items()
        },
        "colour named": {"ends": of_named, "effect": curve(by_count("effect", named))},
    }


# --- Does attention predict the effect of removing frame 0?
def first_frame_report(found: Mapping[str, np.ndarray], layers: Sequence[int]) -> dict[str, Any]:
    """Report how attention predicts the effect of removing frame 0; found [prompts, layers, H] each."""
    effect, beyond = found["effect"], found["effect"] - found["control"]
    shape = effect.shape[1:]
    # Layer and norm of z explain much of the effect: partial rho is given both.
    given = [np.broadcast_to(np.asarray(layers, float)[:, None], shape), found["norm"].mean(0)]
    measured = [name for name in found if name.endswith(("pass", "passes"))]
    labels = kinds(found["share of positive logits, first pass"].mean(0), Thresholds())
    by_kind, correlations = {}, {}
    for kind, name in KINDS.items():
        if heads := int((labels == kind).sum()):
            mean = rounded(bootstrap(effect[:, labels == kind].mean(1)), 4)
            by_kind[name] = {"heads": heads, "effect": mean}
    for name in measured:
        correlations[name] = {
            f"{partial}rho{suffix}": rounded(head_correlation(values, found[name], others))
            for suffix, values in (("", effect), ("_beyond_control", beyond))
            for partial, others in (("", ()), ("partial_", given))
        }
    # The interval of each head alone, not adjusted for their number.
    above = [bootstrap(beyond[:, layer, head]).low > 0 for layer, head in np.ndindex(shape)]
    return {
        "prompts": len(effect),
        "layers": list(layers),
        "mean_effect": rounded(bootstrap(effect.mean((1, 2))), 4),
        "mean_control": rounded(bootstrap(found["control"].mean((1, 2))), 4),
        "floor": float(f"{found['floor'].mean():.2g}"),
        "heads_above_control": int(sum(above)),
        "kinds": by_kind,
        "correlations": correlations,
        "heads": {
            name: [[float(f"{value:.3g}") for value in row] for row in found[name].mean(0)]
            for name in ("effect", "control", "norm", *measured)
        },
    }


# --- The figure
def figure_of(report: Mapping[str, Any]) -> Figure:
    """Draw frame 0 removed against attention."""
    shapes, first = report["shapes"], report["shapes"]["first_frame"]
    heads = first["heads"].items()
    shown = {n.removesuffix(FIRST_PASS): np.array(x) for n, x in heads if n.endswith(FIRST_PASS)}
    notes = {}
    for name in shown:
        both = (first["correlations"][name + FIRST_PASS][key][:3] for key in ("rho", "partial_rho"))
        notes[name] = "ρ = {}\npartial ρ = {}".format(*("{:.2f} [{:.2f}, {:.2f}]".format(*x) for x in both))
    runs = f"{shapes['model']}, {first['prompts']} captions × {shapes['knockouts']['seeds']} seeds"
    about = f"knock out the first frame: {runs}{FIRST_PASS}"
    return effect_against(np.array(first["heads"]["effect"]), shown, notes, subtitle=about)


if __name__ == "__main__":
    main(run)
