"""How much of something is left when more and more heads lose their past: shares, intervals, orders compared.

Answers are shares over seeds, [captions] of one condition, paired by caption. The unit is the caption.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from experiments.analysis.effects import DRAWS, Interval, bootstrap, head_correlation
from experiments.analysis.head_taxonomy import KINDS, Thresholds, kinds

BACK = "same"  # the tracker's answer: hidden, and back in colour and shape
ORDERS = {  # of heads -> in words
    "effect": "by single effect",
    "change": "by change of x0",
    "s": "by s",
    "mass on the past": "by mass on the past",
}


def rounded(interval: Interval, digits: int = 3) -> list[float]:
    return [round(float(value), digits) for value in interval]


def curve(answers: np.ndarray) -> list[list[float]]:
    """Share and its interval for each count of heads, of answers [counts, captions]."""
    return [rounded(bootstrap(row)) for row in answers]


def random_curve(draws: np.ndarray, resamples: int = DRAWS, seed: int = 0) -> list[list[float]]:
    """Of draws [draws, counts, captions]: share, its interval, lowest and highest draw, for each count.

    The interval resamples random orders and captions: both are samples of what might have been drawn.
    """
    generator = np.random.default_rng(seed)
    orders, _, captions = draws.shape
    drawn = [
        draws[generator.integers(orders, size=orders)]
        .mean(0)[:, generator.integers(captions, size=captions)]
        .mean(1)
        for _ in range(resamples)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    of_draws = draws.mean(2)  # [draws, counts]
    columns = (of_draws.mean(0), low, high, of_draws.min(0), of_draws.max(0))
    return [[round(float(value), 3) for value in row] for row in zip(*columns, strict=True)]


def heads_for_half(shares: Sequence[float], counts: Sequence[int], whole: float, none: float) -> int | None:
    """The fewest heads after which half of what the past gives is lost; None where no count does that."""
    half = (whole + none) / 2 + 1e-9  # shares are multiples of 1 / (captions x seeds): no rounding decides
    return next((count for count, share in zip(counts, shares, strict=True) if share <= half), None)


def curves_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Every order's curve and heads_for_half, from the seeds that come back in each condition and caption."""

    def answers(name: str) -> np.ndarray:
        digits = found["seeds_that_come_back"][name]
        return np.array([int(digit) for digit in digits]) / found["seeds"]

    def by_count(name: str) -> np.ndarray:
        return np.stack([answers(f"{name}: {count}") for count in found["counts"]])

    orders = {name: by_count(name) for name in ORDERS}
    random = np.stack([by_count(f"random {draw}") for draw in range(found["draws"])])
    means = {name: values.mean(1) for name, values in orders.items()} | {"random": random.mean((0, 2))}
    whole, none = (float(answers(name).mean()) for name in ("base", "all"))
    return {
        "curves": {name: curve(values) for name, values in orders.items()} | {"random": random_curve(random)},
        "more_than_by_effect": {  # paired by caption
            name: curve(values - orders["effect"]) for name, values in orders.items() if name != "effect"
        },
        "heads_for_half": {
            name: heads_for_half(shares.tolist(), found["counts"], whole, none)
            for name, shares in means.items()
        },
    }


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
