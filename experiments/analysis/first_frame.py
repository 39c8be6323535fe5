"""Does a head prefer the first frame? Least squares on the context cells of its frame matrix.

The model of a head's logits at query frame q and key frame k, where the key's block comes before the query's:

    A[q, k] = row(q) + distance(q − k) + s · [k = 0] + residual

Softmax ignores row(q); a decay or a wave of temporal RoPE is part of distance(q − k); s is the first-frame
effect. All heads that have the same cells share one factorisation. Matrices are [..., F, F], NaN where
nothing was attended, and results are NaN where the cells do not identify a number: in bidirectional caches,
or a window that never sees frame 0."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from wan.blocks import earlier_block

RANK_TOLERANCE = (
    1e-9  # share of a column outside the span of the others, squared, below which it counts as inside
)

LINE = slice(3, 12)  # key frames through which contrasts draw their line


class FirstFrameEffect(NamedTuple):
    """Per head [...], of the fit with s."""

    effect: np.ndarray  # s; in logits, e^s is a ratio of geometric-mean weights at equal distance
    residual_error: (
        np.ndarray
    )  # standard error of s from the residuals: of this video alone, see placebo_effects
    r_squared_within_rows: np.ndarray  # of the whole fit, around each query frame's own mean


def first_frame_effect(matrix: np.ndarray, block_sizes: Sequence[int]) -> FirstFrameEffect:
    """s with its residual error and the fit's R² within rows, of matrices [..., F, F], each [...]."""

    def fit(cells: "Cells", y: np.ndarray) -> np.ndarray:
        return np.stack(_effect(cells, y, 0))

    F = np.shape(matrix)[-1]
    return FirstFrameEffect(*_of_heads(fit, matrix, context_cells(block_sizes), (3,), F))


def partial_r_squared(matrix: np.ndarray, block_sizes: Sequence[int]) -> np.ndarray:
    """Share of what rows and distances leave over that s explains, of matrices [..., F, F] -> [...]."""

    def fit(cells: "Cells", y: np.ndarray) -> np.ndarray:
        z, rest = cells.outside(cells.keys([0])), cells.outside(y)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = (z.T @ rest)[0] ** 2 / ((z**2).sum() * (rest**2).sum(0))
        return np.where(cells.identifies(z, [0])[0], share, np.nan)[None]

    (share,) = _of_heads(fit, matrix, context_cells(block_sizes), (1,), np.shape(matrix)[-1])
    return share


def placebo_effects(matrix: np.ndarray, block_sizes: Sequence[int], frames: Sequence[int]) -> np.ndarray:
    """What s would be for other key frames j, the cells of frame 0 left out: matrices [..., F, F] -> [...,
    frames].

    Cells of a key frame share its content, so residuals do not say whether frame 0 is special; these do.
    """
    cells_of = context_cells(block_sizes)
    cells_of[:, 0] = False

    def fit(cells: "Cells", y: np.ndarray) -> np.ndarray:
        z = cells.outside(cells.keys(frames))
        with np.errstate(divide="ignore", invalid="ignore"):
            effects = (z.T @ y) / (z**2).sum(0)[:, None]
        return np.where(cells.identifies(z, frames)[:, None], effects, np.nan)

    effects = _of_heads(fit, matrix, cells_of, (len(frames),), np.shape(matrix)[-1])
    return np.moveaxis(effects, 0, -1)


def placebo_frames(block_sizes: Sequence[int], last: int | None = None) -> list[int]:
    """Key frames 1.. that at least a sixth of all frames see as context, up to last: 1..14 of 21, 1..59 of
    72."""
    queries = context_cells(block_sizes).sum(0)
    enough = [int(j) for j in np.flatnonzero(queries >= max(len(queries) / 6, 1)) if j > 0]
    return [j for j in enough if last is None or j <= last]


def key_frame_contrasts(matrix: np.ndarray, block_sizes: Sequence[int], first: int = 12) -> np.ndarray:
    """How far each of the first key frames stands out: matrices [..., F, F] -> [..., first].

    f(k) for every k < first takes the place of s · [k = 0]. Its level and its trend trade against rows and
    distances; c(j) = f(j) − the line through f(3..11), by least squares, does not depend on either."""

    def fit(cells: "Cells", y: np.ndarray) -> np.ndarray:
        z = cells.outside(cells.keys(range(first)))  # [cells, first]
        contrast = _off_line(z.any(0) & cells.seen(range(first)))
        values, vectors = np.linalg.eigh(z.T @ z)
        free = values <= RANK_TOLERANCE * max(values[-1], 1)
        inverse = vectors[:, ~free] / values[~free] @ vectors[:, ~free].T
        known = np.abs(contrast @ vectors[:, free]).max(1, initial=0) < 1e-6
        return np.where(known[:, None], contrast @ inverse @ (z.T @ y), np.nan)

    F = np.shape(matrix)[-1]
    contrasts = _of_heads(fit, matrix, context_cells(block_sizes), (first,), F)
    return np.moveaxis(contrasts, 0, -1)


def context_cells(block_sizes: Sequence[int]) -> np.ndarray:
    """[F, F] bool: cells whose key block is strictly earlier than the query's."""
    return earlier_block(block_sizes).numpy().copy()


class Cells:
    """Some cells (q, k) of frame matrices, with an orthonormal basis of all functions row(q) + distance(q −
    k)."""

    def __init__(self, mask: np.ndarray):
        self.q, self.k = np.nonzero(mask)
        columns = [
            self.q[:, None] == np.unique(self.q),
            (self.q - self.k)[:, None] == np.unique(self.q - self.k),
        ]
        u, sizes, _ = np.linalg.svd(np.concatenate(columns, 1).astype(np.float64), full_matrices=False)
        self.basis = u[:, sizes > 1e-9 * sizes.max(initial=1)]  # [cells, rank]

    def keys(self, frames: Sequence[int]) -> np.ndarray:
        """[cells, frames]: 1 in the cells of a key frame."""
        return (self.k[:, None] == np.asarray(frames)).astype(np.float64)

    def seen(self, frames: Sequence[int]) -> np.ndarray:
        """[frames] bool: whether any cell has that key frame."""
        return np.isin(np.asarray(frames), self.k)

    def outside(self, values: np.ndarray) -> np.ndarray:
        """What rows and distances cannot explain of values [cells, n]."""
        return values - self.basis @ (self.basis.T @ values)

    def identifies(self, outside: np.ndarray, frames: Sequence[int]) -> np.ndarray:
        """[frames] bool: whether a key frame's column is more than a sum of rows and distances."""
        return (outside**2).sum(0) > RANK_TOLERANCE * np.maximum(self.keys(frames).sum(0), 1)

    def within_rows(self, values: np.ndarray) -> np.ndarray:
        """Values [cells, n] minus the mean of their query frame."""
        rows = (self.q[:, None] == np.unique(self.q)).astype(np.float64)
        return values - rows @ ((rows.T @ values) / rows.sum(0)[:, None])


def _effect(cells: Cells, y: np.ndarray, frame: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Effect of a key frame, its residual error and the fit's R² within rows for y [cells, heads], each
    [heads]."""
    nothing = np.full(y.shape[1], np.nan)
    z = cells.outside(cells.keys([frame]))[:, 0]
    if not cells.identifies(z[:, None], [frame])[0]:
        return nothing, nothing, nothing
    size = (z**2).sum()
    effect = z @ y / size
    residual = ((cells.outside(y) - z[:, None] * effect) ** 2).sum(0)
    freedom = len(y) - cells.basis.shape[1] - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt(residual / freedom / size) if freedom > 0 else nothing
        return effect, error, 1 - residual / (cells.within_rows(y) ** 2).sum(0)


def _of_heads(
    fit: Callable[[Cells, np.ndarray], np.ndarray],
    matrix: np.ndarray,
    wanted: np.ndarray,
    shape: tuple[int, ...],
    F: int,
) -> np.ndarray:
    """fit of all heads of matrices [..., F, F], those with the same attended cells together: [*shape,
    ...]."""
    flat = np.asarray(matrix, np.float64).reshape(-1, F * F)
    there = np.isfinite(flat) & wanted.ravel()
    results = np.full((*shape, len(flat)), np.nan)
    alike: dict[bytes, list[int]] = {}  # np.unique of rows would take most of the time
    for head, mask in enumerate(there):
        alike.setdefault(mask.tobytes(), []).append(head)
    for heads in alike.values():
        mask = there[heads[0]]
        if mask.any():
            results[..., heads] = fit(Cells(mask.reshape(F, F)), flat[heads][:, mask].T)
    return results.reshape(*shape, *np.shape(matrix)[:-2])


def _off_line(seen: np.ndarray) -> np.ndarray:
    """[first, first]: takes f to f − its least-squares line through frames 3..11, those that are seen
    [first]."""
    j = np.arange(len(seen), dtype=np.float64)
    line = np.stack([np.ones_like(j), j], 1)
    reference = np.zeros(len(seen), bool)
    reference[LINE] = seen[LINE]
    if reference.sum() < 3:
        return np.full((len(seen), len(seen)), np.nan)
    solve = np.zeros((2, len(seen)))
    solve[:, reference] = np.linalg.pinv(line[reference])
    return np.eye(len(seen)) - line @ solve
