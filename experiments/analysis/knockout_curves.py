"""How much of something is left when more and more heads lose their past: shares, intervals, orders compared.

Answers are shares over seeds, [captions] of one condition, paired by caption. The unit is the caption.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from experiments.analysis.effects import Interval, bootstrap, head_correlation, holm, sign_flip_p
from experiments.analysis.head_taxonomy import KINDS, Thresholds, kinds

BACK = "same"  # the tracker's answer: hidden, and back in colour and shape
ORDERS = {  # of heads -> in words
    "effect": "by single effect",
    "change": "by change of x0",
    "s": "by s",
    "mass on the past": "by mass on the past",
}
Curves = Mapping[str, np.ndarray]  # by order [counts, captions]


def rounded(interval: Interval, digits: int = 3) -> list[float]:
    return [round(float(value), digits) for value in interval]


def curve(answers: np.ndarray) -> list[list[float]]:
    """Share and its interval for each count of heads, of answers [counts, captions]."""
    return [rounded(bootstrap(row)) for row in answers]


def random_curve(draws: np.ndarray) -> list[list[float]]:
    """Of draws [draws, counts, captions]: share, its interval over captions, lowest and highest draw."""
    of_draws = draws.mean(2)  # [draws, counts]
    return [
        [*one, round(float(low), 3), round(float(high), 3)]
        for one, low, high in zip(curve(draws.mean(0)), of_draws.min(0), of_draws.max(0), strict=True)
    ]


def against_random(orders: Curves, draws: np.ndarray) -> dict[str, list[list[float]]]:
    """Order minus the mean random order, for each count: difference, its interval, p after Holm over all."""
    mean = draws.mean(0)
    differences = {name: answers - mean for name, answers in orders.items()}
    adjusted = iter(holm([sign_flip_p(row) for rows in differences.values() for row in rows]))
    return {
        name: [[*rounded(bootstrap(row)), round(float(next(adjusted)), 4)] for row in rows]
        for name, rows in differences.items()
    }


def heads_for_half(shares: Sequence[float], counts: Sequence[int], whole: float, none: float) -> int | None:
    """The fewest heads after which half of what the past gives is lost; None where no count does that."""
    half = (whole + none) / 2
    return next((count for count, share in zip(counts, shares, strict=True) if share <= half), None)


class Knockouts(NamedTuple):
    """The curves of a report as a figure takes them; reason says why there are none."""

    reason: str = ""
    subtitle: str = ""
    counts: Sequence[int] = ()
    orders: Mapping[str, np.ndarray] = MappingProxyType({})  # [counts, 3] each: share and its interval
    random: np.ndarray = np.empty((0, 5))  # and lowest and highest draw
    ends: tuple[np.ndarray, np.ndarray] = (np.empty(3), np.empty(3))  # with the whole past, and without any


def knockouts_of(report: Mapping[str, Any]) -> Knockouts:
    """The curves of a report of hidden_shapes.py."""
    found = report["knockouts"]
    curves = {name: np.array(rows) for name, rows in found["curves"].items()}
    about = f"{report['model']}, {found['captions']} captions × {found['seeds']} seeds"
    return Knockouts(
        "",
        f"Which heads bring a hidden shape back: {about}",
        found["counts"],
        {label: curves[name] for name, label in ORDERS.items()},
        curves["random"],
        (np.array(found["base"][BACK]), np.array(found["all"][BACK])),
    )


def read_knockouts(path: str | Path) -> Knockouts:
    """The curves of a report in a file, or why there are none."""
    if not Path(path).is_file():
        return Knockouts(f"{path} not found; run: python experiments/dev/hidden_shapes.py")
    return knockouts_of(json.loads(Path(path).read_text(encoding="utf-8")))


def first_frame_report(found: Mapping[str, np.ndarray], layers: Sequence[int]) -> dict[str, Any]:
    """Does what a head attends to predict what removing frame 0 does? found [prompts, layers, H] each.

    ρ over heads, and partial ρ given layer and ‖z‖, of the effect and of the effect beyond the control.
    """
    effect, beyond = found["effect"], found["effect"] - found["control"]
    shape = effect.shape[1:]
    given = [np.broadcast_to(np.asarray(layers, float)[:, None], shape), found["norm"].mean(0)]
    measured = [name for name in found if name.endswith("pass") or name.endswith("passes")]
    above = [
        bootstrap(beyond[:, layer, head]).low > 0 for layer in range(shape[0]) for head in range(shape[1])
    ]
    return {
        "prompts": len(effect),
        "layers": list(layers),
        "mean_effect": rounded(bootstrap(effect.mean((1, 2))), 4),
        "mean_control": rounded(bootstrap(found["control"].mean((1, 2))), 4),
        "floor": float(f"{found['floor'].mean():.2g}"),
        "heads_above_control": int(sum(above)),
        "kinds": _by_kind(effect, found["share of positive logits, first pass"].mean(0)),
        "correlations": {
            name: {
                "rho": rounded(head_correlation(effect, found[name])),
                "partial_rho": rounded(head_correlation(effect, found[name], given)),
                "rho_beyond_control": rounded(head_correlation(beyond, found[name])),
                "partial_rho_beyond_control": rounded(head_correlation(beyond, found[name], given)),
            }
            for name in measured
        },
        "heads": {
            name: [[float(f"{value:.3g}") for value in row] for row in found[name].mean(0)]
            for name in ("effect", "control", "norm", *measured)
        },
    }


def _by_kind(effect: np.ndarray, rate: np.ndarray) -> dict[str, dict[str, Any]]:
    """Number of heads of every kind, and their mean effect; effect [prompts, layers, H], rate [layers, H]."""
    labels = kinds(rate, Thresholds())
    return {
        name: {
            "heads": int((labels == kind).sum()),
            "effect": rounded(bootstrap(effect[:, labels == kind].mean(1)), 4),
        }
        for kind, name in KINDS.items()
        if (labels == kind).any()
    }
