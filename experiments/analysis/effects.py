"""What an intervention did, in numbers: changes of videos, correlations.

The unit is the prompt. Seeds of a prompt are averaged first, bootstraps resample prompts, and where a number
is over heads they resample layers too, whose heads belong together. NaN is what was not measured.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

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
