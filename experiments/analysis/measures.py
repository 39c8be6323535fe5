"""What a head does with its past, in numbers. Pure functions of frame profiles A[f] or matrices A[query,
key].

Profiles are [..., F], the mean over the last block's queries; matrices [..., F, F]; NaN was not attended.
Frame 0 is the first frame of the video. Every number is in the unit of what it is given: logits for
mean_logit, a share of 1 for mass. Context is what lies in blocks before the query's: the query's own block is
noise at a noisy pass, and only the older scores of head_statistics mix it in."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.analysis.first_frame import first_frame_effect, key_frame_contrasts, placebo_effects
from wan.blocks import earlier_block

__all__ = [
    "DELTA_THRESHOLD",
    "RATIO_THRESHOLD",
    "HeadStatistics",
    "Wave",
    "distance_profile",
    "equal_distance_excess",
    "excess_by_distance",
    "first_frame_effect",
    "first_frame_mass",
    "first_minus_context",
    "head_statistics",
    "key_frame_contrasts",
    "placebo_effects",
    "sign_rate",
    "wave",
]

DELTA_THRESHOLD = 2.0  # first - middle, in logits, above which earlier work called a head a sink

RATIO_THRESHOLD = 1.2  # first / middle, likewise

SMALL_MIDDLE = 0.02  # of max - min: a smaller middle of signed values makes a ratio of its noise

PERIOD_R2 = 0.5  # of the best-fitting sinusoid, below which its period is not told


class HeadStatistics(NamedTuple):
    """Per-head statistics, each of the profile's shape without the frame axis; NaN where there is no
    answer."""

    first: np.ndarray  # A[0]
    middle: np.ndarray  # mean of A[1 .. F-2]
    last: np.ndarray  # A[F-1]
    delta: np.ndarray  # first - middle
    ratio: np.ndarray  # first / middle; NaN where either is not above 0, or middle is near 0 in logits
    first_minus_last: np.ndarray
    max_frame: np.ndarray  # int, -1 where nothing was attended
    spread: np.ndarray  # (max - min) / |mean|

    @property
    def called_sinks(self) -> np.ndarray:
        """Heads that pass either threshold of earlier work. A wave of temporal RoPE can pass too."""
        return (self.delta > DELTA_THRESHOLD) | (self.ratio > RATIO_THRESHOLD)


def head_statistics(profile: np.ndarray) -> HeadStatistics:
    """Statistics of frame profiles A [..., F].

    middle = 1/(F-2) * sum_{f=1}^{F-2} A[f]: all frames but the first and the last, the own block's others
    among them, as in the older notebooks whose numbers this reproduces. Frames that were not attended (NaN)
    are left out. delta and ratio are the older scores: they compare frame 0 with frames at other distances,
    so a wave passes for a sink."""
    A = np.asarray(profile, np.float64)
    first, last, middle = A[..., 0], A[..., -1], _mean(A[..., 1:-1])
    attended = ~np.isnan(A)
    highest = np.where(attended, A, -np.inf)
    spread = highest.max(-1) - np.where(attended, A, np.inf).min(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return HeadStatistics(
            first=first,
            middle=middle,
            last=last,
            delta=first - middle,
            ratio=np.where(_has_ratio(A, first, middle, spread), first / middle, np.nan),
            first_minus_last=first - last,
            max_frame=np.where(attended.any(-1), highest.argmax(-1), -1),
            spread=np.where(attended.any(-1), spread, np.nan) / np.abs(_mean(A)),
        )


def _has_ratio(A: np.ndarray, first: np.ndarray, middle: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Where first / middle means something: both above 0, and where a profile has values of both signs, as
    logits do, a middle that is not near 0."""
    signed = (A < 0).any(-1)
    return (first > 0) & (middle > 0) & ~(signed & (middle < SMALL_MIDDLE * spread))


def first_minus_context(profile: np.ndarray, context: Sequence[int]) -> np.ndarray:
    """A[0] - mean of A[f] over the context frames f > 0 of profiles [..., F] -> [...], in the profile's unit.

    The older first - middle without the noise of the own block; still at unequal distances.
    """
    A = np.asarray(profile, np.float64)
    return A[..., 0] - _mean(A[..., [f for f in context if f > 0]])


def first_frame_mass(mass: np.ndarray, context: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Mass of frame 0 in mass profiles [..., F], as a share of all mass, A[0], and of that on context frames,
    A[0] / sum of A[f] over context; both [...]. The first counts the own block's mass, the second leaves it
    out. Softmax mass, as in StreamingLLM (arXiv 2309.17453), where the word sink comes from."""
    A = np.asarray(mass, np.float64)
    on_context = A[..., list(context)]
    with np.errstate(divide="ignore", invalid="ignore"):
        return A[..., 0], A[..., 0] / np.where(
            np.isnan(on_context).all(-1), np.nan, np.nansum(on_context, -1)
        )


def equal_distance_excess(matrix: np.ndarray, block_sizes: Sequence[int]) -> np.ndarray:
    """How much frame 0 gets beyond what other frames get at the same distance: matrices A [..., F, F] ->
    [...].

    mean over distances d of ( A[d, 0] - mean over k >= 1 of A[k+d, k] ), using only cells whose key block is
    strictly earlier than the query's; a distance counts where both terms exist. Whatever depends on distance
    alone, such as the wave of temporal RoPE or a decay, cancels. NaN where no distance can be compared."""
    return _mean(excess_by_distance(matrix, block_sizes))


def excess_by_distance(matrix: np.ndarray, block_sizes: Sequence[int]) -> np.ndarray:
    """The same before the mean over distances d: matrices A [..., F, F] -> [..., F], NaN where d cannot be
    compared.

    It still waves: A[d, 0] and A[k+d, k] are of other query frames, whose row offsets do not cancel.
    """
    first, others = _by_distance(matrix, block_sizes)
    return first - others


def distance_profile(matrix: np.ndarray, block_sizes: Sequence[int]) -> np.ndarray:
    """The last block's profile if nothing but distance mattered: matrices A [..., F, F] -> [..., F], NaN
    beyond context.

    P[f] = mean over queries q of the last block of g(q - f), with g(d) = mean over k >= 1 of A[k+d, k] over
    the cells of equal_distance_excess. Frame 0 has no part in it, so first - middle of P is what a head owes
    to distance alone."""
    F, last = np.shape(matrix)[-1], block_sizes[-1]
    _, g = _by_distance(matrix, block_sizes)
    profile = np.full((*np.shape(matrix)[:-2], F), np.nan)
    for f in range(F - last):
        profile[..., f] = _mean(g[..., F - last - f : F - f])
    return profile


def _by_distance(matrix: np.ndarray, block_sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """A[d, 0] and the mean over k >= 1 of A[k+d, k], context cells only: [..., F] each, by distance d."""
    A = np.where(earlier_block(block_sizes).numpy(), np.asarray(matrix, np.float64), np.nan)
    diagonals = [
        np.diagonal(A, -d, -2, -1) for d in range(A.shape[-1])
    ]  # A[k+d, k] for k = 0, 1, ...: [..., F-d]
    return A[..., 0], np.stack([_mean(diagonal[..., 1:]) for diagonal in diagonals], -1)


class Wave(NamedTuple):
    """A sinusoid in each profile, all without the frame axis; NaN where fewer than 6 context frames show
    one."""

    amplitude: np.ndarray  # at 1 rad/frame, in the profile's unit
    r2: np.ndarray  # share of the variance around the trend that this sinusoid explains
    period: np.ndarray  # frames, of the best-fitting sinusoid; 2 pi = 6.28 is the fastest of temporal RoPE
    period_r2: np.ndarray  # the same share for it
    period_inside: np.ndarray  # bool: the best period is not an end of those that were searched

    @property
    def told_period(self) -> np.ndarray:
        """The period where it means something: it explains half of the variance, and the search did not end
        there."""
        return np.where((self.period_r2 >= PERIOD_R2) & self.period_inside, self.period, np.nan)


def wave(profile: np.ndarray, context: Sequence[int], periods: np.ndarray | None = None) -> Wave:
    """Least squares of a + b f + c cos(w f) + s sin(w f) to the context frames f of profiles [..., F].

    amplitude = sqrt(c^2 + s^2) at w = 1, the fastest frequency of Wan's temporal RoPE (RoFormer, arXiv
    2104.09864: 10000^0); r2 = 1 - RSS / RSS of the line a + b f alone. period maximises r2 over periods, by
    default 2.5 frames to half the span of the context, so that a wave is seen twice, in 400 equal steps of
    frequency."""
    y, f = np.asarray(profile, np.float64)[..., list(context)], np.asarray(context, np.float64)
    if len(f) < 6 or np.ptp(f) < 6:
        nothing = np.full(y.shape[:-1], np.nan)
        return Wave(nothing, nothing, nothing, nothing, np.zeros(nothing.shape, bool))
    if periods is None:
        periods = 2 * np.pi / np.linspace(4 * np.pi / np.ptp(f), 2 * np.pi / 2.5, 400)
    line = np.stack([np.ones_like(f), f], -1)
    rest = y - _fit(line, y) @ line.T

    def explained(w: float) -> tuple[np.ndarray, np.ndarray]:
        basis = np.concatenate([line, np.stack([np.cos(w * f), np.sin(w * f)], -1)], -1)
        coefficients = _fit(basis, y)
        rss, of_line = ((x**2).sum(-1) for x in (y - coefficients @ basis.T, rest))
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.hypot(*np.moveaxis(coefficients[..., 2:], -1, 0)), 1 - rss / of_line

    amplitude, r2 = explained(1.0)
    by_period = np.stack([explained(2 * np.pi / p)[1] for p in periods], -1)
    best = np.where(np.isnan(by_period), -np.inf, by_period).argmax(-1)
    best_r2 = np.take_along_axis(by_period, best[..., None], -1)[..., 0]
    period = np.where(np.isnan(best_r2), np.nan, np.asarray(periods)[best])
    return Wave(amplitude, r2, period, best_r2, (best > 0) & (best < len(periods) - 1))


def sign_rate(values: np.ndarray) -> np.ndarray:
    """Share of positive logits over the last axis of [..., cells], NaN cells left out: 1 where a head favours
    whatever it sees, 0 where it avoids it, about 1/2 where it waves. NaN where nothing is left."""
    values = np.asarray(values)
    return _mean(np.where(np.isnan(values), np.nan, values > 0))


def _fit(basis: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Least-squares coefficients of the columns of basis [n, m] for each of y [..., n] -> [..., m]."""
    return y @ np.linalg.pinv(basis).T


def _mean(A: np.ndarray) -> np.ndarray:
    """Mean over the last axis without NaN; NaN where nothing is left."""
    count = (~np.isnan(A)).sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nansum(A, -1) / count
