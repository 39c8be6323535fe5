"""The first-frame effect: how much more a head gives to frame 0 than rows and distances explain.

The model of a head's logits at query frame q and key frame k, where the key's block comes before the query's:

    A[q, k] = row(q) + distance(q − k) + s · [k = 0] + residual

Softmax ignores row(q); a decay or a wave of temporal RoPE is part of distance(q − k); s is the first-frame
effect. All heads that have the same cells share one factorisation. Matrices are [..., F, F], NaN where
nothing was attended. Results are NaN where the cells do not identify a number: in bidirectional caches, or
in a window that never sees frame 0.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.analysis import stats
from experiments.caches.files import CacheError
from experiments.caches.view import Profiles

# Why a cache does not hold a number, in words that figures and printed lines share
NO_LOGITS, NO_MASS = "no mean logits in this cache", "no mass in this cache"
NO_CONTEXT, NO_MATRIX = "no context: the queries see no earlier block", "no whole frame matrix in this cache"
NOT_IDENTIFIED = "its cells do not tell frame 0 from rows and distances"

RANK_TOLERANCE = 1e-9  # squared share of a column outside the span of others, below which it is in the span
LINE = slice(3, 12)  # key frames through which contrasts draw their line
LAST_PLACEBO = 24  # key frames within what the model was trained on, at any length


class FirstFrameEffect(NamedTuple):
    """The fit with s, each [...] per head."""

    effect: np.ndarray  # s; in logits, e^s is a ratio of geometric-mean weights at equal distance
    residual_error: np.ndarray  # standard error of s from the residuals: of this video alone
    r_squared_within_rows: np.ndarray  # of the whole fit, around each query frame's own mean
    partial_r_squared: np.ndarray  # share of what rows and distances leave over that s explains


class Cells:
    """Some cells (q, k) of frame matrices, with an orthonormal basis of all row(q) + distance(q − k)."""

    def __init__(self, mask: np.ndarray):
        self.q, self.k = np.nonzero(mask)
        rows, distances = (values[:, None] == np.unique(values) for values in (self.q, self.q - self.k))
        # Indicators of rows and of distances [cells, rows + distances]; they overlap, so take their span
        columns = np.concatenate([rows, distances], 1).astype(np.float64)
        u, sizes, _ = np.linalg.svd(columns, full_matrices=False)
        self.basis = u[:, sizes > 1e-9 * sizes.max(initial=1)]  # [cells, rank]
        self.rows = rows.astype(np.float64)

    def outside(self, values: np.ndarray) -> np.ndarray:
        """Return what rows and distances cannot explain of values [cells, n]."""
        return values - self.basis @ (self.basis.T @ values)

    def of_keys(self, frames: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Indicators of key frames outside the basis [cells, frames], and which are identified [frames]."""
        indicators = (self.k[:, None] == np.asarray(frames)).astype(np.float64)
        z = self.outside(indicators)
        return z, (z**2).sum(0) > RANK_TOLERANCE * np.maximum(indicators.sum(0), 1)


def first_frame_effect(matrix: np.ndarray, block_sizes: Sequence[int]) -> FirstFrameEffect:
    """Fit s, its residual error and R² to matrices [..., F, F], each [...]."""

    def fit(cells: Cells, y: np.ndarray) -> np.ndarray:
        # Frisch-Waugh: s is the regression on [k = 0] outside of what rows and distances span
        z, identified = cells.of_keys([0])
        rest, size = cells.outside(y), (z**2).sum()
        effect = (z.T @ y)[0] / size
        # Its error, of what neither rows, distances nor s explain
        residual = ((rest - z * effect) ** 2).sum(0)
        freedom = len(y) - cells.basis.shape[1] - 1
        if freedom <= 0:
            freedom = np.nan
        error = np.sqrt(residual / freedom / size)
        # R² is of what differs within a query's row: softmax ignores its mean
        within = y - cells.rows @ ((cells.rows.T @ y) / cells.rows.sum(0)[:, None])
        r_squared = 1 - residual / stats.varying(within.T, y.T, stats.RESOLUTION)
        partial_r_squared = size * effect**2 / stats.varying(rest.T, y.T, stats.RESOLUTION)
        return np.where(identified, np.stack([effect, error, r_squared, partial_r_squared]), np.nan)

    return FirstFrameEffect(*_of_heads(fit, matrix, context_cells(block_sizes), 4))


def placebo_effects(matrix: np.ndarray, block_sizes: Sequence[int], frames: Sequence[int]) -> np.ndarray:
    """Fit s for other key frames, without frame 0: matrices [..., F, F] -> [..., frames]."""
    cells_of = context_cells(block_sizes)
    cells_of[:, 0] = False

    def fit(cells: Cells, y: np.ndarray) -> np.ndarray:
        z, identified = cells.of_keys(frames)
        return np.where(identified[:, None], (z.T @ y) / (z**2).sum(0)[:, None], np.nan)

    return np.moveaxis(_of_heads(fit, matrix, cells_of, len(frames)), 0, -1)


def placebo_frames(block_sizes: Sequence[int]) -> list[int]:
    """List key frames from 1 on that at least a sixth of all frames see as context: 1..14 of 21."""
    queries = context_cells(block_sizes).sum(0)
    enough = np.flatnonzero(queries >= max(len(queries) / 6, 1)).tolist()
    return [j for j in enough if j > 0]


def key_frame_contrasts(
    matrix: np.ndarray, block_sizes: Sequence[int], first: int = 12, line: slice = LINE
) -> np.ndarray:
    """Measure how far each of the first key frames stands out: matrices [..., F, F] -> [..., first].

    f(k) for every k < first takes the place of s · [k = 0]; c(j) = f(j) − the least-squares line through
    f(3..11), or another line's, does not depend on level and trend, which trade against rows and distances.
    """
    points = np.stack([np.ones(first), np.arange(first, dtype=np.float64)], 1)

    def fit(cells: Cells, y: np.ndarray) -> np.ndarray:
        z, _ = cells.of_keys(range(first))
        reference = np.intersect1d(np.arange(first)[line], cells.k)
        if len(reference) < 3:
            return np.full((first, y.shape[1]), np.nan)
        contrast = np.eye(first)  # takes f to f − its line
        contrast[:, reference] -= points @ np.linalg.pinv(points[reference])
        # A contrast is known if it has no share in directions that the cells leave open
        values, vectors = np.linalg.eigh(z.T @ z)
        free = values <= RANK_TOLERANCE * max(values[-1], 1)
        inverse = vectors[:, ~free] / values[~free] @ vectors[:, ~free].T
        is_determined = np.abs(contrast @ vectors[:, free]).max(1, initial=0) < 1e-6
        return np.where(is_determined[:, None], contrast @ inverse @ (z.T @ y), np.nan)

    return np.moveaxis(_of_heads(fit, matrix, context_cells(block_sizes), first), 0, -1)


def context_cells(block_sizes: Sequence[int]) -> np.ndarray:
    """Mark the cells whose key block is strictly earlier than the query's: [F, F] bool."""
    block = np.repeat(np.arange(len(block_sizes)), block_sizes)
    return block[None, :] < block[:, None]


def _of_heads(
    fit: Callable[[Cells, np.ndarray], np.ndarray], matrix: np.ndarray, wanted: np.ndarray, n: int
) -> np.ndarray:
    """Apply fit to matrices [..., F, F], heads with the same attended cells together: [n, ...]."""
    F = matrix.shape[-1]
    # [..., F, F] -> [heads, F F]
    flat = np.asarray(matrix, np.float64).reshape(-1, F * F)
    is_filled = np.isfinite(flat) & wanted.ravel()
    results = np.full((n, len(flat)), np.nan)
    alike: dict[bytes, list[int]] = {}  # np.unique of rows would take most of the time
    for head, mask in enumerate(is_filled):
        alike.setdefault(mask.tobytes(), []).append(head)
    for heads in alike.values():
        mask = is_filled[heads[0]]
        if mask.any():
            with np.errstate(divide="ignore", invalid="ignore"):
                results[:, heads] = fit(Cells(mask.reshape(F, F)), flat[heads][:, mask].T)
    return results.reshape(n, *matrix.shape[:-2])


# --- Frame 0 against other frames at equal distance


def excess_by_distance(matrix: np.ndarray, block_sizes: Sequence[int]) -> np.ndarray:
    """A[d, 0] minus the mean over k >= 1 of A[k+d, k] of context cells: [..., F, F] -> [..., F] by d."""
    A = np.where(context_cells(block_sizes), np.asarray(matrix, np.float64), np.nan)
    others = [stats.mean_without_nan(np.diagonal(A, -d, -2, -1)[..., 1:]) for d in range(A.shape[-1])]
    return A[..., 0] - np.stack(others, -1)


def equal_distance_excess(matrix: np.ndarray, block_sizes: Sequence[int]) -> np.ndarray:
    """Mean over distances of excess_by_distance [...]: what depends on distance alone cancels."""
    return stats.mean_without_nan(excess_by_distance(matrix, block_sizes))


def matrices(view: Profiles) -> np.ndarray:
    """Return the matrices [layers, heads, F, F] of a view. CacheError for a cache of profiles alone."""
    values = view.frame_matrices()
    if values is None:
        raise CacheError(NO_MATRIX)
    return values


def sign_rate(values: np.ndarray) -> np.ndarray:
    """Share of positive logits over the last axis of [..., cells], without NaN."""
    return stats.mean_without_nan(np.where(np.isnan(values), np.nan, values > 0))


def context_sign_rate(view: Profiles) -> np.ndarray:
    """Share of positive mean logits over context cells [N, H]; without matrices of the last block."""
    if view.quantity != "mean_logit" or not view.context_frames:
        return np.full((len(view.layers), view.num_heads), np.nan)
    matrix = view.frame_matrices()
    if matrix is None:
        return sign_rate(view.profiles()[..., list(view.context_frames)])
    return sign_rate(matrix[..., context_cells(view.block_sizes)])


class FirstFrame(NamedTuple):
    """Every head [layers, heads, ...] of a view with whole matrices, in the view's unit."""

    fit: FirstFrameEffect
    frames: Sequence[int]  # key frames of the placebos
    placebos: np.ndarray  # [layers, heads, frames]
    contrasts: np.ndarray  # of frames 0..11: [layers, heads, 12]

    @property
    def above_placebos(self) -> np.ndarray:
        """Mark heads whose effect exceeds the size of every placebo of frames 1..24 [layers, heads]."""
        # Later frames exist in long videos alone: counting them would make those stricter
        first = self.placebos[..., np.asarray(self.frames) <= LAST_PLACEBO]
        return (self.fit.effect > np.abs(first).max(-1, initial=0)) & np.isfinite(first).any(-1)

    @property
    def rank(self) -> np.ndarray:
        """Rank of an effect among its placebos' sizes, 1 the highest; NaN without one [layers, heads]."""
        rank = 1 + (np.abs(self.placebos) >= self.fit.effect[..., None]).sum(-1)
        is_known = np.isfinite(self.fit.effect) & np.isfinite(self.placebos).any(-1)
        return np.where(is_known, rank, np.nan)

    def summary(self, threshold: float = 2.0) -> dict[str, float | int]:
        """Mean and median of s, heads above a threshold and above all placebos, first contrasts."""
        s = self.fit.effect[np.isfinite(self.fit.effect)]
        c = stats.mean_without_nan(self.contrasts.reshape(-1, self.contrasts.shape[-1]).T)
        return {
            "mean of s": float(s.mean()),
            "median of s": float(np.median(s)),
            f"heads above {threshold:g}": int((s > threshold).sum()),
            "heads above all placebos": int(self.above_placebos.sum()),
            "placebo frames": sum(frame <= LAST_PLACEBO for frame in self.frames),
            "heads": s.size,
            **{f"contrast of frame {frame}": float(c[frame]) for frame in range(3)},
        }


def first_frame(view: Profiles | None) -> tuple[FirstFrame | None, str]:
    """Fit everything to a view; or None and the reason in a line."""
    if view is None or not view.context_frames:
        return None, NO_LOGITS if view is None else NO_CONTEXT
    matrix, sizes = view.frame_matrices(), view.block_sizes
    if matrix is None:
        return None, NO_MATRIX
    fit, frames = first_frame_effect(matrix, sizes), placebo_frames(sizes)
    if not np.isfinite(fit.effect).any():
        return None, NOT_IDENTIFIED
    placebos, contrasts = placebo_effects(matrix, sizes, frames), key_frame_contrasts(matrix, sizes)
    return FirstFrame(fit, frames, placebos, contrasts), ""


def effects_of(views: Mapping[str, Profiles]) -> dict[str, np.ndarray]:
    """First-frame effect s [layers, heads] of every view with whole matrices, in logits, by its name."""
    whole = {name: view for name, view in views.items() if view.frame_matrices() is not None}
    return {name: first_frame_effect(matrices(view), view.block_sizes).effect for name, view in whole.items()}


def pass_rows(effects: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Mean effect of every pass, and the correlation of its heads with those of the first pass."""
    first = next(iter(effects.values()), np.empty(0))
    is_finite = np.isfinite([first, *effects.values()]).all(0)
    return [
        {
            "pass": name,
            "mean of s": np.nanmean(s),
            "r with the first pass": stats.pearson(s[is_finite], first[is_finite]),
        }
        for name, s in effects.items()
    ]
