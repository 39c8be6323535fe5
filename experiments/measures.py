"""What a head does with its past, in numbers. Pure functions of frame profiles [..., F]; NaN frames were not attended.

Frame 0 is the first frame of the video. Every number is in the unit of its profile: logits for mean_logit, a share
of 1 for mass and mean_prob.
"""

from typing import NamedTuple

import numpy as np

DELTA_THRESHOLD = 2.0    # first - middle, in logits, above which earlier work called a head a sink
RATIO_THRESHOLD = 1.2    # first / middle, likewise


class HeadStatistics(NamedTuple):
    """Per-head statistics, each of the profile's shape without the frame axis; NaN where there is no answer."""

    first: np.ndarray          # A[0]
    middle: np.ndarray         # mean of A[1 .. F-2]
    last: np.ndarray           # A[F-1]
    delta: np.ndarray          # first - middle
    ratio: np.ndarray          # first / middle; NaN where middle <= 0
    first_minus_last: np.ndarray
    max_frame: np.ndarray      # int, -1 where nothing was attended
    spread: np.ndarray         # (max - min) / |mean|

    @property
    def called_sinks(self) -> np.ndarray:
        """Heads that pass either threshold of earlier work. A wave of temporal RoPE can pass too."""
        return (self.delta > DELTA_THRESHOLD) | (self.ratio > RATIO_THRESHOLD)


def head_statistics(profile: np.ndarray) -> HeadStatistics:
    """Statistics of frame profiles A [..., F].

    middle = 1/(F-2) * sum_{f=1}^{F-2} A[f]: all frames but the first and the last, the own block's others among them,
    as in the older notebooks whose numbers this reproduces. Frames that were not attended (NaN) are left out.
    """
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
            ratio=np.where(middle > 0, first / middle, np.nan),
            first_minus_last=first - last,
            max_frame=np.where(attended.any(-1), highest.argmax(-1), -1),
            spread=np.where(attended.any(-1), spread, np.nan) / np.abs(_mean(A)),
        )


def _mean(A: np.ndarray) -> np.ndarray:
    """Mean over the last axis without NaN; NaN where nothing is left."""
    count = (~np.isnan(A)).sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nansum(A, -1) / count
