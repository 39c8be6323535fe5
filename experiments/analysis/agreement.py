"""Compare a model's mean logits with published ones, head by head, and say what they look like.

Matrices are [layers, H, F, F], curves [layers, H, F] the mean over the last block's queries; NaN was not
attended. Context is what the published run's blocks saw before their own.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.analysis.effects import spearman
from experiments.analysis.first_frame import context_cells, first_frame_effect
from experiments.analysis.measures import sign_rate
from experiments.analysis.published import pearson, rms_difference
from experiments.analysis.rope_waves import fit_waves
from experiments.analysis.taxonomy import Thresholds, agreement, kinds
from wan.blocks import block_ranges

# Borders, by docs/check_model.json: right models were seen above AGREES, other prompts between, wrong models
# below one of the others. r is the median over heads, own the share of heads most like themselves.
AGREES, OTHER_R, OTHER_OWN = 0.985, 0.80, 0.30
VERDICTS = ("agrees", "differs like another prompt", "wrong")
MEANING = {
    "agrees": "the heads attend as in the published runs",
    "differs like another prompt": "the heads are the published ones, of another noise or prompt",
    "wrong": "the heads are not those of the published model; docs/real_model.md says what to look at",
}


class Comparison(NamedTuple):
    """How heads [layers, H] agree with their published selves."""

    r: np.ndarray  # of last-block curves over context frames
    rms: np.ndarray  # likewise, logits
    is_best: np.ndarray  # bool: no other published head is more like this one
    matrix_r: np.ndarray | None  # of whole matrices around each query frame's mean
    effects: Sequence[np.ndarray] | None  # s of both
    kinds: Sequence[np.ndarray]  # of both
    amplitudes: Sequence[np.ndarray]  # [layers, H, bands] of both

    def numbers(self) -> dict[str, float | None]:
        """Return what a table shows, each over all heads; None where the published data lack it."""
        bands = range(self.amplitudes[0].shape[-1])
        rho = [spearman(*(one[..., band].ravel() for one in self.amplitudes)) for band in bands]
        found: dict[str, float | None] = {
            "r of last-block curves, median": self.median_r,
            "r, 5 % of heads are below": float(np.nanpercentile(self.r, 5)),
            "heads most like their own": float(self.is_best.mean()),
            "RMS, median (logits)": float(np.nanmedian(self.rms)),
            "r of whole matrices, median": None,
            "r of s over heads": None,
            "heads of the same kind": agreement(*self.kinds),
            "ρ of wave amplitudes": float(np.mean(rho)) if rho else None,
        }
        if self.matrix_r is not None and self.effects is not None:
            s = np.stack([one.ravel() for one in self.effects])
            s = s[:, np.isfinite(s).all(0)]
            found["r of whole matrices, median"] = float(np.nanmedian(self.matrix_r))
            found["r of s over heads"] = float(pearson(*s)) if s.shape[1] > 2 else None
        return {name: value if value is None else round(value, 3) for name, value in found.items()}

    @property
    def median_r(self) -> float:
        """Median over heads of r."""
        return float(np.nanmedian(self.r))

    @property
    def verdict(self) -> str:
        """Return one of VERDICTS for one video."""
        if self.median_r >= AGREES:
            return VERDICTS[0]
        return VERDICTS[1 if self.median_r >= OTHER_R and self.is_best.mean() >= OTHER_OWN else 2]

    def worst(self, count: int) -> list[tuple[int, int]]:
        """Return the heads (layer, head) of lowest r, by index."""
        order = np.argsort(np.nan_to_num(self.r, nan=-2), axis=None, kind="stable")[:count]
        return [(int(i // self.r.shape[1]), int(i % self.r.shape[1])) for i in order]


def verdict(comparisons: Sequence[Comparison]) -> str:
    """Return the worst verdict of several videos."""
    return max((one.verdict for one in comparisons), key=VERDICTS.index)


def rows(found: Mapping[str, Comparison], heads: Sequence[tuple[int, int, str]]) -> list[dict[str, Any]]:
    """Return a row a number, a column a video; the last rows are single heads (layer, head, label)."""
    numbers = {name: one.numbers() for name, one in found.items()}
    table = [
        {"": what} | {name: of[what] for name, of in numbers.items()} for what in next(iter(numbers.values()))
    ]
    for layer, head, label in heads:
        if all(layer < one.r.shape[0] and head < one.r.shape[1] for one in found.values()):
            table.append({"": f"{label}: r"} | {name: one.r[layer, head] for name, one in found.items()})
    return table


def compare(
    ours: np.ndarray,
    curves: np.ndarray,
    matrix: np.ndarray | None,
    block_sizes: Sequence[int],
    frequencies: np.ndarray,
) -> Comparison:
    """Compare our matrices with published curves and, where there is one, the published matrix."""
    last, cells = block_ranges(list(block_sizes))[-1], context_cells(block_sizes)
    mine = np.asarray(ours, np.float64)[..., last.start : last.stop, : last.start].mean(-2)
    both = mine, np.asarray(curves, np.float64)[..., : last.start]
    distances = (last.start + last.stop - 1) / 2 - np.arange(last.start)
    amplitudes = [fit_waves(np.nan_to_num(one), distances, frequencies).amplitude for one in both]
    matrix_r = effects = None
    rates = [sign_rate(one) for one in both]
    if matrix is not None:
        matrix_r = pearson(*(_within_rows(one, cells) for one in (ours, matrix)))
        effects = [first_frame_effect(one, block_sizes).effect for one in (ours, matrix)]
        rates = [sign_rate(one[..., cells]) for one in (ours, matrix)]
    r, flat = pearson(*both), [one.reshape(-1, last.start) for one in both]
    others = pearson(flat[0][:, None], flat[1][None])  # [heads, published heads]
    is_best = np.isfinite(r) & ((others > r.reshape(-1, 1)).sum(1).reshape(r.shape) == 0)
    labels = [kinds(rate, Thresholds()) for rate in rates]
    return Comparison(r, rms_difference(*both), is_best, matrix_r, effects, labels, amplitudes)


def _within_rows(matrix: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Context cells [..., n] around each query frame's mean."""
    A = np.where(cells, np.asarray(matrix, np.float64), np.nan)
    mean = np.nansum(A, -1, keepdims=True) / np.maximum(cells.sum(-1, keepdims=True), 1)
    return (A - mean)[..., cells]
