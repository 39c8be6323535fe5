"""Fit a head's curve with the waves of temporal RoPE.

If the queries and keys of a head had constant means before RoPE, q_b and k_b (complex, one per temporal
frequency ω_b), the mean logit of frames d apart would be Σ_b |q_b| |k_b| cos(ω_b d + φ_b) / √D, plus spatial
terms (compare TriAttention, arXiv 2604.04921). So curves over context frames are fitted by least squares with

    f(d) = c + Σ_b (α_b cos ω_b d + β_b sin ω_b d),        amplitude_b = √(α_b² + β_b²)

Distances d are in latent frames; logits are q·k/√D.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.analysis import panels, stats
from experiments.analysis.first_frame import context_cells
from experiments.caches.view import Profiles
from wan.blocks import block_ranges
from wan.keys import time_frequencies

# Of Wan2.1 1.3B and 14B; 22 of its 64 complex pairs turn with time.
WAN_HEAD_DIM = 128
NUM_BANDS = 6  # of 22: the elbow of R² and of |E q| / E|q| in the real model


def rope_coherence(distances: np.ndarray) -> np.ndarray:
    """Re C(Δ), the mean over Wan's temporal frequencies ω of cos(ω Δ), at distances [n] in latent frames."""
    return np.cos(np.outer(distances, time_frequencies(WAN_HEAD_DIM).numpy())).mean(1)


def maxima(distances: np.ndarray, values: np.ndarray, beyond: int, count: int) -> list[tuple[int, float]]:
    """Find the largest local maxima of values at distances above beyond: (distance, value), largest first."""
    # Strictly above both neighbours, so a plateau is no maximum.
    inner = np.flatnonzero((values[1:-1] > values[:-2]) & (values[1:-1] > values[2:])) + 1
    chosen = sorted((i for i in inner if distances[i] > beyond), key=lambda i: -values[i])[:count]
    return [(int(distances[i]), float(values[i])) for i in chosen]


def fastest_frequencies(head_dim: int) -> np.ndarray:
    """Return the temporal frequencies of RoPE, the fastest first, NUM_BANDS at most."""
    return time_frequencies(head_dim).numpy()[:NUM_BANDS]


def fitted_frequencies(view: Profiles, longest_period: float) -> np.ndarray:
    """Return the temporal frequencies of a view's model that have no longer period; none if it is unknown.

    At most NUM_BANDS. Where a period is longer than the curve, waves are told from lines and from each other
    by a hair: predictions are sound then, single amplitudes are not.
    """
    if view.quantity != "mean_logit" or view.head_dim is None or not view.context_frames:
        return np.empty(0)
    frequencies = fastest_frequencies(view.head_dim)
    return frequencies[2 * np.pi / frequencies <= longest_period]


class Waves(NamedTuple):
    """Waves fitted to curves [...]: the last axis of cosine and sine is the band."""

    frequencies: np.ndarray  # [B] radians a frame
    constant: np.ndarray  # [...]
    cosine: np.ndarray  # [..., B]
    sine: np.ndarray  # [..., B]

    @property
    def amplitude(self) -> np.ndarray:
        """[..., B] in logits."""
        return np.hypot(self.cosine, self.sine)

    @property
    def phase(self) -> np.ndarray:
        """[..., B] in radians: the wave is amplitude · cos(ω d + phase)."""
        return np.arctan2(-self.sine, self.cosine)

    def at(self, distances: np.ndarray) -> np.ndarray:
        """Return the fitted curve [..., n] at distances [n]."""
        angles = np.outer(self.frequencies, distances)  # [B, n]
        return self.constant[..., None] + self.cosine @ np.cos(angles) + self.sine @ np.sin(angles)


def wave_columns(distances: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Return cos and sin of every band [n, 2 B] at distances [n]."""
    angles = np.outer(distances, frequencies)
    return np.concatenate([np.cos(angles), np.sin(angles)], 1)


def fit_waves(curves: np.ndarray, distances: np.ndarray, frequencies: np.ndarray) -> Waves:
    """Fit a constant and waves to curves [..., n] at distances [n] by least squares."""
    num_bands, shape = len(frequencies), np.shape(curves)[:-1]
    if len(distances):
        # curves = columns @ coefficients, whose columns are 1, cos of every band, sin of every band
        ones = np.ones((len(distances), 1))
        columns = np.concatenate([ones, wave_columns(distances, frequencies)], 1)
        flat = np.asarray(curves, np.float64).reshape(-1, len(distances))
        coefficients = (flat @ np.linalg.pinv(columns).T).reshape(*shape, -1)
    else:  # of nothing no wave is known
        coefficients = np.full((*shape, 2 * num_bands + 1), np.nan)
    return Waves(
        frequencies=np.asarray(frequencies),
        constant=coefficients[..., 0],
        cosine=coefficients[..., 1 : num_bands + 1],
        sine=coefficients[..., num_bands + 1 :],
    )


def r_squared(curves: np.ndarray, fitted: np.ndarray) -> np.ndarray:
    """Return the share of the variance of curves [..., n] that fitted [..., n] explains; NaN of constants."""
    rest = ((curves - fitted) ** 2).sum(-1)
    return 1 - rest / stats.varying(curves - curves.mean(-1, keepdims=True), curves, stats.RESOLUTION)


def last_block_context(curves: np.ndarray, block_sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the context [..., n] of last-block curves [..., F] and distances [n] to the block's middle."""
    last = block_ranges(list(block_sizes))[-1]
    distances = (last.start + last.stop - 1) / 2 - np.arange(last.start)
    return np.asarray(curves, np.float64)[..., : last.start], distances


class MatrixFit(NamedTuple):
    """A[q, k] = row(q) + waves(q − k) + s [k = 0] over the context cells of matrices [..., F, F]."""

    waves: Waves  # the constant is 0: rows take it
    s: np.ndarray  # [...] logits, the first-frame effect beside waves
    r_squared_within_rows: np.ndarray  # [...]


def fit_matrix(
    matrix: np.ndarray, block_sizes: Sequence[int], frequencies: np.ndarray, ridge: float = 0.0
) -> MatrixFit:
    """Fit rows, waves and a first-frame effect to the context cells of matrices [..., F, F].

    ridge, times the number of cells, is a penalty on the squares of cosines and sines: without one, waves
    that are longer than the video are found by a hair, and say nothing beyond it.
    """
    num_bands, shape = len(frequencies), np.shape(matrix)[:-2]
    # 1. The context cells: waves of their distance, and whether their key is the first frame.
    q, k = np.nonzero(context_cells(list(block_sizes)))
    columns = np.concatenate([wave_columns(q - k, frequencies), (k == 0)[:, None]], 1)  # [cells, 2 B + 1]
    values = np.asarray(matrix, np.float64)[..., q, k].reshape(-1, len(q))  # [heads, cells]
    # 2. A constant of each row is taken out of both sides, instead of a column for each.
    is_of_row = (q[:, None] == np.unique(q)).astype(np.float64)  # [cells, rows]

    def within_rows(cells: np.ndarray) -> np.ndarray:
        means = (is_of_row.T @ cells) / is_of_row.sum(0)[:, None]
        return cells - is_of_row @ means

    predictors, target = within_rows(columns), within_rows(values.T)
    # 3. Least squares, and the share of the variance within rows that it explains. s has no penalty.
    coefficients = np.linalg.pinv(predictors) @ target  # [2 B + 1, heads]
    if ridge > 0:
        penalty = np.diag([ridge * len(q)] * (2 * num_bands) + [0.0])
        coefficients = np.linalg.solve(predictors.T @ predictors + penalty, predictors.T @ target)
    rest = ((target - predictors @ coefficients) ** 2).sum(0)
    explained = 1 - rest / stats.varying(target.T, values, stats.RESOLUTION)
    cosine, sine, s = np.split(coefficients.T.reshape(*shape, -1), [num_bands, 2 * num_bands], -1)
    waves = Waves(frequencies=np.asarray(frequencies), constant=np.zeros(shape), cosine=cosine, sine=sine)
    return MatrixFit(waves=waves, s=s[..., 0], r_squared_within_rows=explained.reshape(shape))


def first_excess(rows: np.ndarray) -> np.ndarray:
    """Return key 0's excess [...] over the mean of the other keys of rows [..., queries, keys]."""
    mean = np.asarray(rows, np.float64).mean(-2)
    return mean[..., 0] - mean[..., 1:].mean(-1)


def predict_first(fit: MatrixFit, queries: Sequence[float], keys: Sequence[float]) -> np.ndarray:
    """Predict first_excess() [...] of queries and keys at temporal positions; frame 0 is the first key."""
    distances = np.subtract.outer(np.asarray(queries, float), np.asarray(keys, float))
    waves = fit.waves.at(distances.ravel()).reshape(*fit.s.shape, *distances.shape)
    return first_excess(waves) + fit.s


class FirstSplit(NamedTuple):
    """first − context of the last block's mean row, in logits: total = waves + s + rest, each [...]."""

    total: np.ndarray
    waves: np.ndarray
    s: np.ndarray
    rest: np.ndarray


def split_first(
    matrix: np.ndarray, block_sizes: Sequence[int], fit: MatrixFit, block: int = -1
) -> FirstSplit:
    """Split frame 0's excess over the other context frames at a block of queries into waves, s and rest."""
    rows = _mean_rows(matrix, block_ranges(list(block_sizes))[block], fit)
    total, waves = (row[..., 0] - row[..., 1:].mean(-1) for row in rows)
    return FirstSplit(total, waves, fit.s, total - waves - fit.s)


def panels_of_view(
    view: Profiles, heads: Sequence[panels.HeadPanel]
) -> tuple[dict[str, panels.BlockPanel], dict[str, panels.PartsPanel]]:
    """Return both kinds of panels for some heads of a view; none without the whole past or known bands.

    The curves are of the block at queries 18–20, the paper's, and of those beside it.
    """
    matrix, frequencies = view.frame_matrices(), fitted_frequencies(view, 3 * view.num_frames)
    if matrix is None or not len(frequencies) or len(view.block_sizes) < 4:
        return {}, {}
    if not np.isfinite(matrix[..., context_cells(view.block_sizes)]).all():
        return {}, {}
    # Block 1 has too few context frames for waves: start at block 2
    fit, queries = fit_matrix(matrix, view.block_sizes, frequencies), block_ranges(list(view.block_sizes))
    splits = [split_first(matrix, view.block_sizes, fit, b) for b in range(2, len(queries))]
    starts, last = np.array([b.start for b in queries[2:]]), min(len(queries), 8)
    by_block: dict[str, panels.BlockPanel] = {}
    parts: dict[str, panels.PartsPanel] = {}
    for panel in heads:
        at = view.layers.index(panel.layer), panel.head
        measured, predicted = np.transpose([(s.total[at], s.waves[at] + s.s[at]) for s in splits])
        by_block[panel.label] = panels.BlockPanel(starts, measured, predicted)
        for block in queries[last - 3 : last]:
            row, waves = (x[at] for x in _mean_rows(matrix, block, fit))
            waves = waves + (row - waves - fit.s[at] * (np.arange(len(row)) == 0)).mean()
            name = f"{panel.label}, queries {block.start}–{block.stop - 1}"
            parts[name] = panels.PartsPanel(row, waves, float(fit.s[at]))
    return by_block, parts


def _mean_rows(matrix: np.ndarray, queries: range, fit: MatrixFit) -> tuple[np.ndarray, np.ndarray]:
    """Mean over a block of queries of the context and of its waves, [..., n] each."""
    row = np.asarray(matrix, np.float64)[..., queries.start : queries.stop, : queries.start].mean(-2)
    distances = np.asarray(queries)[:, None] - np.arange(queries.start)  # [queries, keys]
    return row, fit.waves.at(distances.ravel()).reshape(*fit.s.shape, *distances.shape).mean(-2)


def amplitude_maps(view: Profiles | None) -> list[panels.HeadMap]:
    """Return amplitude [layers, H] of every band that fits into the context, and R²; or one absent map."""
    frequencies, title = np.empty(0), "all waves: R²"
    if view is not None:
        curves, distances = last_block_context(view.profiles(), view.block_sizes)
        frequencies = fitted_frequencies(view, len(distances))
    if not len(frequencies):
        return [
            panels.HeadMap("waves_r2", title, "", "share", None, "needs mean logits, context and known RoPE")
        ]
    waves = fit_waves(curves, distances, frequencies)
    maps = [
        panels.HeadMap(
            f"amplitude_{b}", f"wave of period {2 * np.pi / w:.1f} frames", "logits", "sequential", a
        )
        for b, (w, a) in enumerate(zip(frequencies, np.moveaxis(waves.amplitude, -1, 0), strict=True))
    ]
    r2 = r_squared(curves, waves.at(distances))
    return [*maps, panels.HeadMap("waves_r2", title, "share of variance", "share", r2)]


def wave_title(maps: Sequence[panels.HeadMap]) -> str:
    """Say how much of the curve of the median head the waves of amplitude_maps() explain."""
    r2 = maps[-1].values
    if r2 is None or not np.isfinite(r2).any():
        return "Waves of temporal RoPE"
    share = stats.percent(float(np.nanmedian(r2)))
    return f"Waves of temporal RoPE explain {share} of the past's curve in the median head"
