"""Statistics over prompts and heads, and differences of videos. NaN was not measured, and stays NaN.

The unit is the prompt: seeds are averaged first, bootstraps resample prompts, and layers as wholes where a
number is over heads: the draws of scipy.stats.bootstrap, which computes an interval of its own beside them.

    bootstrap(effect)                  # of values [prompts, ...]: Interval(estimate, low, high)
    sign_flip_p(ours - theirs)         # of paired differences [prompts]
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy  # its submodules are imported when they are first named

from wan.errors import ConfigError

DRAWS = 2000  # resamples of a bootstrap
ENOUGH_PROMPTS = 16  # below, a bootstrap over prompts says little
# Share of its largest value by which what varies must differ from a constant, or from a line: rounding of
# float64 sums, and of the float32 that caches keep.
ROUNDING, RESOLUTION = 1e-13, 1e-6


def percent(share: float) -> str:
    """Return a share in words that no line breaks apart: 0.864 -> "86 %"."""
    return f"{round(100 * share)}\N{NO-BREAK SPACE}%"


def signed(value: float, digits: int = 2) -> str:
    """Return a number in words, with a minus as long as a plus: -0.5 -> "−0.50"."""
    rounded_value = round(float(value), digits) + 0.0  # no minus before 0
    return f"{rounded_value:.{digits}f}".replace("-", "\N{MINUS SIGN}")


class Interval(NamedTuple):
    """An estimate and its percentile interval of 95 %."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:.2f} [{self.low:.2f}, {self.high:.2f}]"


def rounded(values: Sequence[float] | np.ndarray, digits: int = 3) -> list[float]:
    """Round values, such as an interval, for a report."""
    return [round(float(value), digits) for value in values]


def mean_without_nan(values: np.ndarray) -> np.ndarray:
    """Mean over the last axis without NaN; NaN where nothing is left."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nansum(values, -1) / (~np.isnan(values)).sum(-1)


# --- What can be computed at all: scipy's resampling takes NaN for a number, and rounding for a spread


def floats(values: Any) -> np.ndarray:
    """Return values in float64; None, and what a masked array hides, was not measured: NaN."""
    return np.ma.asarray(values, np.float64).filled(np.nan)


def is_known(values: np.ndarray) -> bool:
    """Return True where there are values, and all of them are finite: the check before any statistic."""
    return values.size > 0 and bool(np.isfinite(values).all())


def varying(rest: np.ndarray, values: np.ndarray, share: float = ROUNDING) -> np.ndarray:
    """Return the sum of squares of rest [..., n], which is left of values [..., n]; NaN where it is rounding.

    A constant differs from its mean by rounding alone: it has no correlation, no R² and no period.
    """
    squares = (rest * rest).sum(-1)
    least = rest.shape[-1] * (share * np.abs(values).max(-1, initial=0)) ** 2
    return np.where(squares > least, squares, np.nan)


# --- Correlations


def pearson(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Correlate [..., n] with [..., n] along the last axis in float64; NaN with NaN, or a constant."""
    arrays = (floats(one), floats(other))
    with np.errstate(divide="ignore", invalid="ignore"):
        a, b = (x - x.mean(-1, keepdims=True) for x in arrays)
        sizes = [np.sqrt(varying(x, values)) for x, values in zip((a, b), arrays, strict=True)]
        return (a * b).sum(-1) / (sizes[0] * sizes[1])


def rms_difference(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """sqrt(mean((one - other)^2)) over the last axis of [..., n] and [..., n]."""
    return np.sqrt(((floats(one) - floats(other)) ** 2).mean(-1))


def spearman(x: np.ndarray, y: np.ndarray) -> Any:
    """Spearman's ρ [...] of values [..., n] and [..., n] along the last axis, as partial_spearman()."""
    return partial_spearman(x, y, ())


def partial_spearman(x: np.ndarray, y: np.ndarray, given: Sequence[np.ndarray]) -> Any:
    """Spearman's ρ [...] of x and y [..., n] given others [..., n] along the last axis.

    Places with NaN in one of them are left out. NaN where nothing of one is left, or of fewer than 3 places.
    """
    # 1. Ranks of the places that are known in all columns, around 0; what is left out is 0 and adds nothing.
    columns = np.broadcast_arrays(*map(floats, (x, y, *given)))
    is_known = ~np.isnan(columns).any(0)
    count = is_known.sum(-1, keepdims=True)
    ranks = scipy.stats.rankdata(np.where(is_known, columns, np.nan), axis=-1, nan_policy="omit")
    ranks = np.where(is_known, ranks - (count + 1) / 2, 0)  # [2 + given, ..., n]
    # 2. scipy has no partial ρ: take from all ranks what they have along each given one (Gram-Schmidt).
    least_length = 1e-9 * count
    for number in range(2, len(ranks)):
        length = np.linalg.norm(ranks[number], axis=-1, keepdims=True)
        unit = ranks[number] / np.where(length >= least_length, length, np.inf)
        ranks = ranks - (ranks * unit).sum(-1, keepdims=True) * unit
    # 3. The correlation of what is left of x and y.
    of_x, of_y = ranks[:2]
    length_x, length_y = np.linalg.norm(of_x, axis=-1), np.linalg.norm(of_y, axis=-1)
    is_enough = (np.minimum(length_x, length_y) >= least_length[..., 0]) & (count[..., 0] >= 3)
    lengths = np.where(is_enough, length_x * length_y, 1)
    return np.where(is_enough, (of_x * of_y).sum(-1) / lengths, np.nan)[()]


# --- Intervals and p-values


def percentiles(estimate: float, drawn: Sequence[float] | np.ndarray) -> Interval:
    """Return an estimate with the middle 95 % of the draws that are known; NaN has no interval."""
    if not np.isfinite(estimate) or np.isnan(drawn).all():
        return Interval(np.nan, np.nan, np.nan)
    return Interval(estimate, *np.nanpercentile(drawn, [2.5, 97.5]).tolist())


def bootstrap(values: np.ndarray) -> Interval:
    """Return the mean of values and its interval, from resampling the first axis, the prompts.

    All are NaN where a value is not known, or there is none.
    """
    values = floats(values)
    if not is_known(values):
        return Interval(np.nan, np.nan, np.nan)
    per_prompt = values.reshape(len(values), -1).mean(1)
    return percentiles(float(per_prompt.mean()), resampled((per_prompt,), np.mean, DRAWS))


def resampled(samples: Sequence[np.ndarray], statistic: Callable[..., Any], draws: int) -> np.ndarray:
    """Return a statistic of draws from samples, each [n], which are resampled apart from each other."""
    generator = np.random.default_rng(0)
    # A single value is taken twice, which gives the same draws of it
    several = [np.resize(values, max(2, len(values))) for values in samples]
    drawn = [values[generator.integers(len(values), size=(draws, len(values)))] for values in several]
    return statistic(*drawn, axis=-1)  # [draws]; NaN may be in it


def head_correlation(
    effects: np.ndarray, predictor: np.ndarray, given: Sequence[np.ndarray] = (), draws=DRAWS
) -> Interval:
    """Spearman's ρ over heads of effects [prompts, layers, H], averaged over prompts, with a predictor.

    predictor is [layers, H], or per prompt. given: other values [layers, H] that ρ is partial to. Each draw
    resamples prompts, and layers as wholes.
    """
    per_prompt = np.broadcast_to(predictor, effects.shape).astype(np.float64)

    def rho(prompts: np.ndarray, layers: np.ndarray, axis: int = -1) -> np.ndarray:
        """Draws of prompts [..., P] and layers [..., L] -> ρ [...]: all draws are ranked at once."""
        # [draws, layers, H] each: means over the drawn prompts; what is given has no prompts
        means = []
        for values in (effects, per_prompt):
            means.append(np.stack([values[draw].mean(0) for draw in np.atleast_2d(prompts)]))
        means += [np.asarray(values)[None] for values in given]
        # The drawn layers of each, all heads of them in one row
        rows = np.atleast_2d(layers)[..., None]
        x, y, *others = [np.take_along_axis(mean, rows, 1).reshape(len(rows), -1) for mean in means]
        return partial_spearman(x, y, others)

    prompts, layers = map(np.arange, effects.shape[:2])
    return percentiles(float(rho(prompts, layers)[0]), resampled((prompts, layers), rho, draws))


def bootstrap_of_trainings(values: np.ndarray) -> Interval:
    """Return the mean of values [trainings, captions] and its interval; NaN was not measured.

    Draws resample trainings crossed with captions. Every training counts alike, however many of its captions
    were measured.
    """
    values = floats(values)
    groups, columns = values.shape
    generator = np.random.default_rng(0)
    chosen = generator.integers(groups, size=(DRAWS, groups, 1))
    drawn = values[chosen, generator.integers(columns, size=(DRAWS, 1, columns))]
    return percentiles(float(mean_without_nan(values).mean()), mean_without_nan(drawn).mean(1))


def contrast_of_trainings(differences: np.ndarray) -> dict[str, Any]:
    """Return the mean of differences [trainings, captions] with its intervals, and p; NaN was not measured.

    t, its interval of 95 % and p are of the trainings' means; bootstrap is bootstrap_of_trainings().
    """
    means = mean_without_nan(floats(differences))
    test = scipy.stats.ttest_1samp(means, 0)
    return {
        "t": rounded([means.mean(), *test.confidence_interval()]),
        "bootstrap": rounded(bootstrap_of_trainings(differences)),
        "p": float(f"{test.pvalue:.2g}"),
        "each": rounded(means),
    }


def contrasts_of_trainings(differences: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """Return contrast_of_trainings() by name, with p adjusted for their number (Holm)."""
    contrasts = {name: contrast_of_trainings(values) for name, values in differences.items()}
    adjusted = holm([contrast["p"] for contrast in contrasts.values()])
    for contrast, p in zip(contrasts.values(), adjusted, strict=True):
        contrast["p_holm"] = float(f"{p:.2g}")
    return contrasts


def sign_flip_p(differences: np.ndarray, draws: int = 10_000) -> float:
    """Return the two-sided p of paired differences [prompts, ...] having mean 0, by flipping their signs.

    It is exact where there are no more than `draws` ways to flip them. NaN where a difference is not known.
    """
    differences = floats(differences)
    if not is_known(differences):
        return float("nan")
    if len(differences) < 2:  # the sign of one alone says nothing
        return 1.0
    differences = differences.reshape(len(differences), -1).mean(1)  # a prompt's signs flip together

    def size_of_mean(x: np.ndarray, axis: int) -> np.ndarray:
        return np.abs(x.mean(axis))

    options = {"permutation_type": "samples", "n_resamples": draws, "rng": np.random.default_rng(0)}
    test = scipy.stats.permutation_test((differences,), size_of_mean, alternative="greater", **options)
    return float(test.pvalue)


def holm(p_values: Sequence[float]) -> np.ndarray:
    """Adjust p-values [n] for the comparisons made (Holm 1979), in their order; NaN was not made."""
    # The smallest p times n, the next times n - 1, ...; none below the one before it. NaN comes last
    p = floats(p_values)
    order = p.argsort(kind="stable")
    adjusted = np.maximum.accumulate((np.isfinite(p).sum() - np.arange(len(p))) * p[order])
    return np.minimum(adjusted, 1)[order.argsort()]


# --- Differences of videos


def _require_one_shape(video: np.ndarray, other: np.ndarray) -> None:
    """Raise ConfigError for videos of two shapes, of which NumPy would repeat one."""
    if np.shape(video) != np.shape(other):
        raise ConfigError(f"videos of {list(np.shape(video))} and {list(np.shape(other))} are not compared")


def psnr(one: np.ndarray, other: np.ndarray, peak: float = 1.0) -> np.ndarray:
    """Return the peak signal-to-noise ratio in dB of each frame of videos [F, ...] of values in 0..peak.

    Infinite for equal frames.
    """
    _require_one_shape(one, other)
    # Frame by frame: whole videos in float64 would take gigabytes.
    pairs = zip(one, other, strict=True)
    squared = [np.mean((np.asarray(x, np.float64) - np.asarray(y, np.float64)) ** 2) for x, y in pairs]
    with np.errstate(divide="ignore"):
        return -10 * np.log10(np.array(squared) / peak**2)


def ssim(one: np.ndarray, other: np.ndarray, window: int = 8) -> np.ndarray:
    """Structural similarity per frame (Wang et al. 2004) of videos [F, C, H, W] in 0..1, square windows."""

    # Means of all windows by sums from the corner: four lookups each
    def mean(x: np.ndarray) -> np.ndarray:
        sums = np.pad(x, [(0, 0)] * (x.ndim - 2) + [(1, 0), (1, 0)]).cumsum(-1).cumsum(-2)
        right, left = sums[..., window:], sums[..., :-window]
        corners = right[..., window:, :] + left[..., :-window, :]
        return (corners - left[..., window:, :] - right[..., :-window, :]) / window**2

    _require_one_shape(one, other)
    x, y = np.asarray(one, np.float64), np.asarray(other, np.float64)
    c1, c2 = 0.01**2, 0.03**2  # they keep flat windows finite
    mean_x, mean_y = mean(x), mean(y)
    covariance = mean(x * y) - mean_x * mean_y
    variances = mean(x * x) - mean_x**2 + mean(y * y) - mean_y**2
    numerator = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    denominator = (mean_x**2 + mean_y**2 + c1) * (variances + c2)
    return (numerator / denominator).mean((-3, -2, -1))
