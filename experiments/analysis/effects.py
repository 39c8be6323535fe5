"""What an intervention did, in numbers: changes of videos, correlations.

The unit is the prompt. Seeds of a prompt are averaged first, bootstraps resample prompts, and where a number
is over heads they resample layers too, whose heads belong together. NaN is what was not measured.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from experiments.analysis.taxonomy import KINDS, Thresholds, kinds

# --- What an intervention did, in numbers: changes of videos, correlations
DRAWS = 2000
ENOUGH_PROMPTS = 16  # below, a bootstrap over prompts says little


class Interval(NamedTuple):
    """An estimate and its percentile interval of 95 %."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:.2f} [{self.low:.2f}, {self.high:.2f}]"


def psnr(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio per frame in dB of videos [F, C, H, W] in 0..1; infinite where equal."""
    squared = ((np.asarray(one, np.float64) - np.asarray(other, np.float64)) ** 2).mean((-3, -2, -1))
    with np.errstate(divide="ignore"):
        return -10 * np.log10(squared)


def ssim(one: np.ndarray, other: np.ndarray, window: int = 8) -> np.ndarray:
    """Structural similarity per video frame (Wang et al. 2004), of videos [F, C, H, W] in 0..1.

    Means, variances and covariance over square windows of equal weight, one per pixel that has a whole one.
    """
    x, y = np.asarray(one, np.float64), np.asarray(other, np.float64)
    mean_x, mean_y = _windows(x, window), _windows(y, window)
    var_x, var_y = _windows(x * x, window) - mean_x**2, _windows(y * y, window) - mean_y**2
    covariance = _windows(x * y, window) - mean_x * mean_y
    c1, c2 = 0.01**2, 0.03**2
    index = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    index /= (mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2)
    return index.mean((-3, -2, -1))


def _windows(x: np.ndarray, size: int) -> np.ndarray:
    """Mean over every square of size x size pixels, from running sums."""
    sums = np.pad(x, [(0, 0)] * (x.ndim - 2) + [(1, 0), (1, 0)]).cumsum(-1).cumsum(-2)
    corner = sums[..., size:, size:] + sums[..., :-size, :-size]
    return (corner - sums[..., size:, :-size] - sums[..., :-size, size:]) / size**2


def ranks(x: np.ndarray) -> np.ndarray:
    """Ranks from 1 of values [n]; equal ones share the mean of theirs."""
    _, inverse, counts = np.unique(np.asarray(x, np.float64), return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return ((last - counts + 1 + last) / 2)[inverse]


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's ρ of values [n] and [n]; NaN where one does not vary. Pairs with NaN are left out."""
    return partial_spearman(x, y, ())


def partial_spearman(x: np.ndarray, y: np.ndarray, given: Sequence[np.ndarray]) -> float:
    """Spearman's ρ of x and y [n] given others [n]: of what a linear fit on their ranks leaves of the ranks.

    NaN where nothing is left of one of them. Places with a NaN are left out.
    """
    columns = np.stack([np.asarray(values, np.float64) for values in (x, y, *given)])
    columns = columns[:, ~np.isnan(columns).any(0)]
    if columns.shape[1] < 3:
        return float("nan")
    x_ranks, y_ranks, *others = (ranks(values) for values in columns)
    design = np.stack([np.ones(columns.shape[1]), *others], 1)
    residuals = [r - design @ np.linalg.lstsq(design, r, rcond=None)[0] for r in (x_ranks, y_ranks)]
    sizes = [np.sqrt((r**2).sum()) for r in residuals]
    if min(sizes) < 1e-9 * columns.shape[1]:
        return float("nan")
    return float(residuals[0] @ residuals[1] / (sizes[0] * sizes[1]))


def bootstrap(values: np.ndarray, draws: int = DRAWS, seed: int = 0) -> Interval:
    """The mean of values and its interval, from resampling the first axis, the prompts."""
    values = np.asarray(values, np.float64)
    chosen = np.random.default_rng(seed).integers(len(values), size=(draws, len(values)))
    return _interval(float(values.mean()), values[chosen].reshape(draws, -1).mean(1))


def head_correlation(
    effects: np.ndarray,
    predictor: np.ndarray,
    given: Sequence[np.ndarray] = (),
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval:
    """ρ over heads of effects [prompts, layers, H], averaged over prompts, with a predictor.

    predictor [layers, H], or per prompt. given: other values [layers, H] that ρ is partial to. Each draw
    resamples prompts, and layers as wholes.
    """
    effects, predictor = np.asarray(effects, np.float64), np.asarray(predictor, np.float64)
    per_prompt = predictor if predictor.ndim == 3 else np.broadcast_to(predictor, effects.shape)

    def rho(prompts: np.ndarray, layers: np.ndarray) -> float:
        each = (effects[prompts].mean(0), per_prompt[prompts].mean(0), *given)
        x, y, *others = (np.asarray(values)[layers].ravel() for values in each)
        return partial_spearman(x, y, others)

    num_prompts, num_layers = effects.shape[:2]
    generator = np.random.default_rng(seed)
    drawn = [
        rho(
            generator.integers(num_prompts, size=(num_prompts,)),
            generator.integers(num_layers, size=(num_layers,)),
        )
        for _ in range(draws)
    ]
    return _interval(rho(np.arange(num_prompts), np.arange(num_layers)), drawn)


def sign_flip_p(differences: np.ndarray, draws: int = 10_000, seed: int = 0) -> float:
    """Two-sided p of paired differences [prompts] having mean 0, by flipping their signs at random."""
    differences = np.asarray(differences, np.float64)
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(draws, len(differences)))
    as_far = np.abs(signs @ differences) >= abs(differences.sum()) * (1 - 1e-12)
    return float((as_far.sum() + 1) / (draws + 1))


def holm(p_values: Sequence[float]) -> np.ndarray:
    """p-values [n] adjusted for n comparisons (Holm 1979), in their order."""
    p = np.asarray(p_values, np.float64)
    order = p.argsort(kind="stable")
    adjusted = np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order])
    result = np.empty_like(p)
    result[order] = np.minimum(adjusted, 1)
    return result


def _interval(estimate: float, drawn: Sequence[float] | np.ndarray) -> Interval:
    if np.isnan(drawn).all():
        return Interval(estimate, float("nan"), float("nan"))
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return Interval(estimate, float(low), float(high))


# --- How much of something is left when more and more heads lose their past: shares, intervals, orders
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
        return Knockouts(f"{path} not found; run: python experiments/benchmarks/reproduce/hidden_shapes.py")
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
