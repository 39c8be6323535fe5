"""The finding about heads and the past, from its studies: a report that JSON holds, a table, figures."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.analysis import effects as knockout_curves
from experiments.analysis.effects import BACK, ORDERS, bootstrap, knockouts_of, rounded
from experiments.dev.tables import markdown, measured_on, of_weights
from experiments.figures.effects import effect_against
from experiments.figures.effects import knockout_curves as draw_curves
from experiments.studies.hidden_shapes import QUESTIONS, Condition, HiddenShapes

OTHERS = tuple(question for question in QUESTIONS if question != BACK)
SHOWN = 12  # heads of the ranking in the report


def knockouts(study: HiddenShapes) -> dict[str, Any]:
    """Of a study that is done: shares of captions whose shape comes back, by order and number of heads."""
    made = {one.name: one for one in study.conditions()}
    counts = study.design.counts

    def answers(name: str, question: str) -> np.ndarray:
        return np.stack([study.answers(made[f"{name}: {count}"], question).numpy() for count in counts])

    return with_curves(
        {
            "captions": study.design.captions,
            "selection": study.design.selection,
            "seeds": study.design.seeds,
            "draws": study.design.draws,
            "counts": list(counts),
            "heads": len(study.heads),
            "base": _shares(study, made["base"]),
            "all": _shares(study, made["all"]),
            "other_answers": {
                name: {q: [round(float(x), 3) for x in answers(name, q).mean(1)] for q in OTHERS}
                for name in ORDERS
            },
            "ranking": _ranking(study),
            "seeds_that_come_back": _digits(study, made),
        }
    )


def with_curves(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a study found, with its curves computed (again) from the seeds that come back."""
    return {**found, **knockout_curves.curves_of(found)}


def _shares(study: HiddenShapes, condition: Condition) -> dict[str, list[float]]:
    return {q: rounded(bootstrap(study.answers(condition, q).numpy())) for q in QUESTIONS}


def _ranking(study: HiddenShapes) -> list[dict[str, Any]]:
    """The heads with the largest single effect, with what ranks them otherwise."""
    measured = study.selection_measures()
    best = sorted(study.heads, key=lambda head: measured["effect"][head], reverse=True)[:SHOWN]
    return [
        {"layer": head[0], "head": head[1]}
        | {name: round(float(values[head]), 3) for name, values in measured.items()}
        for head in best
    ]


def _digits(study: HiddenShapes, made: Mapping[str, Condition]) -> dict[str, str]:
    """By condition a digit per caption: in how many seeds its shape comes back."""
    return {
        name: "".join(str(round(x * study.design.seeds)) for x in study.answers(one).tolist())
        for name, one in made.items()
    }


def table(report: Mapping[str, Any]) -> str:
    """The rows of docs/interventions.md, and what they were measured on."""
    return f"{_of_first_frame(report['first_frame'])}\n{_of_knockouts(report)}"


def _of_first_frame(found: Mapping[str, Any]) -> str:
    rows = [
        (name, *(_interval(values[kind]) for kind in ("rho", "partial_rho", "partial_rho_beyond_control")))
        for name, values in found["correlations"].items()
    ]
    effect, control = (np.array(found["heads"][name]) for name in ("effect", "control"))
    kinds = ", ".join(
        f"{name} {_interval(of['effect'], 3)} ({of['heads']} heads)" for name, of in found["kinds"].items()
    )
    return (
        markdown(("measure of a head", "ρ", "partial ρ", "partial ρ, beyond the control"), rows)
        + "\n\nDirect effect of removing frame 0 from one head's view, in distances between seeds, mean over "
        + f"{effect.size} heads: {_interval(found['mean_effect'], 3)}; of removing a random earlier frame: "
        + f"{_interval(found['mean_control'], 3)}; floor {found['floor']:.1g}. Frame 0 matters more than "
        + f"the random frame in {(effect > control).sum()} heads, in {found['heads_above_control']} with an "
        + f"interval above 0, of each head alone, not adjusted for {effect.size} of them. By kind: {kinds}. "
        + f"{found['prompts']} captions; intervals of ρ resample captions and layers, the others captions.\n"
    )


def _of_knockouts(report: Mapping[str, Any]) -> str:
    found = report["knockouts"]
    counts, curves = found["counts"], found["curves"]
    names = ORDERS | {"random": f"random, {found['draws']} draws"}
    rows = [
        (label, *(_interval(row) for row in curves[name]), str(found["heads_for_half"][name] or "more"))
        for name, label in names.items()
    ]
    base, none = found["base"][BACK], found["all"][BACK]
    best = ", ".join(f"L{one['layer']}H{one['head']} ({one['effect']:.2f})" for one in found["ranking"][:5])
    half = found["heads_for_half"]["effect"]
    compared = [] if half is None else [i for i, count in enumerate(counts) if count >= half][:2]
    differences = "; ".join(
        f"without {counts[i]} heads "
        + ", ".join(
            f"{_interval(rows[i])} {ORDERS[name]}" for name, rows in found["more_than_by_effect"].items()
        )
        for i in compared
    )
    return (
        markdown(("heads without a past", *map(str, counts), "half is lost at"), rows)
        + "\n\nShare of captions whose shape comes back in colour and shape: "
        + f"{_interval(base)} with the whole past, {_interval(none)} where no head sees the past. "
        + f"More than by single effect, paired by caption: {differences or 'not compared'}. "
        + f"Largest single effects on the selection captions: {best}. {found['captions']} captions, others "
        + f"than the {found['selection']} that ranked the heads, {found['seeds']} seeds each; intervals "
        + f"resample captions, of random orders the orders too; {of_weights(report['weights_sha256'])}; "
        + measured_on(report["environment"], report["dtype"])
    )


def _interval(values: list[float], digits: int = 2) -> str:
    estimate, low, high = (f"{value:.{digits}f}" for value in values[:3])
    return f"{estimate} [{low}, {high}]"


def draw(report: Mapping[str, Any], model: str) -> dict[str, Figure]:
    """The curves, and the effect of removing frame 0 against what heads attend to."""
    found, first = report["knockouts"], report["first_frame"]
    curves = knockouts_of(report)
    about_first = f"{model}, {first['prompts']} captions × {found['seeds']} seeds"
    measures = {n: np.array(v) for n, v in first["heads"].items() if n.endswith(("first pass", "all passes"))}
    notes = {
        name: f"ρ = {_interval(values['rho'])}\npartial ρ = {_interval(values['partial_rho'])}"
        for name, values in first["correlations"].items()
    }
    shown = [name for name in measures if name.endswith("first pass")]
    return {
        "hidden_shapes.svg": draw_curves(
            curves.counts,
            curves.orders,
            curves.random,
            curves.ends,
            subtitle=curves.subtitle,
        ),
        "first_frame_removed.svg": effect_against(
            np.array(first["heads"]["effect"]),
            {name: measures[name] for name in shown},
            {name: notes[name] for name in shown},
            subtitle=f"knock out the first frame: {about_first}",
        ),
    }
