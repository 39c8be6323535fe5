"""Compare a model's mean logits with published ones, head by head, and say what they look like.

Matrices are [layers, H, F, F], curves [layers, H, F] the mean over the last block's queries; NaN was not
attended. Context is what the published run's blocks saw before their own.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.analysis.first_frame import context_cells, first_frame_effect, sign_rate
from experiments.analysis.rope_waves import fit_waves, last_block_context
from experiments.analysis.stats import mean_without_nan, pearson, rms_difference, spearman
from experiments.analysis.taxonomy import Thresholds, agreement, kinds

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
    is_best: np.ndarray  # bool: no other published head is more like this one
    of_heads: Mapping[str, float | None]  # further numbers over all heads; None where the data lack them

    def numbers(self) -> dict[str, float | None]:
        """Return what a table shows, each over all heads."""
        found = {
            "r of last-block curves, median": self.median_r,
            "r, 5 % of heads are below": float(np.nanpercentile(self.r, 5)),
            "heads most like their own": float(self.is_best.mean()),
            **self.of_heads,
        }
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
    cells = context_cells(block_sizes)
    # [layers, H, F]: the mean over the last block's queries
    last = np.asarray(ours, np.float64)[..., -block_sizes[-1] :, :].mean(-2)
    (mine, distances), (theirs, _) = (last_block_context(one, block_sizes) for one in (last, curves))
    # Amplitudes of the waves that RoPE makes, [layers, H, bands].
    a, b = (fit_waves(np.nan_to_num(one), distances, frequencies).amplitude for one in (mine, theirs))
    rho = [spearman(a[..., band].ravel(), b[..., band].ravel()) for band in range(a.shape[-1])]
    matrix_r, of_s, rates = None, None, [sign_rate(mine), sign_rate(theirs)]
    if matrix is not None:
        both = [np.where(cells, np.asarray(one, np.float64), np.nan) for one in (ours, matrix)]
        # Softmax ignores a constant of a query: rows are compared without their mean.
        within = [(one - mean_without_nan(one)[..., None])[..., cells] for one in both]  # of each query
        matrix_r = float(np.nanmedian(pearson(*within)))
        s = np.stack([first_frame_effect(one, block_sizes).effect.ravel() for one in (ours, matrix)])
        s = s[:, np.isfinite(s).all(0)]
        of_s = float(pearson(*s)) if s.shape[1] > 2 else None
        rates = [sign_rate(one[..., cells]) for one in (ours, matrix)]
    r = pearson(mine, theirs)
    flat = [one.reshape(-1, one.shape[-1]) for one in (mine, theirs)]
    # Shifted or permuted heads agree well with another head, not with their own.
    others = pearson(flat[0][:, None], flat[1][None])  # [heads, published heads]
    is_best = np.isfinite(r) & ((others > r.reshape(-1, 1)).sum(1).reshape(r.shape) == 0)
    # None where the published data lack the matrix.
    of_heads = {
        "RMS, median (logits)": float(np.nanmedian(rms_difference(mine, theirs))),
        "r of whole matrices, median": matrix_r,
        "r of s over heads": of_s,
        "heads of the same kind": agreement(*(kinds(rate, Thresholds()) for rate in rates)),
        "ρ of wave amplitudes": float(np.mean(rho)) if rho else None,
    }
    return Comparison(r, is_best, of_heads)
