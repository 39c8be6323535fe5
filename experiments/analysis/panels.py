"""What one panel of a figure shows, as plain arrays: numbers need no matplotlib."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from experiments.caches.view import ranges


# --- What one panel of a figure shows, as plain arrays: numbers need no matplotlib
class Agreement(NamedTuple):
    """How well a profile agrees with a reference."""

    r: float  # Pearson correlation
    rms: float  # root mean square difference, in the profile's unit
    frames: tuple[int, ...]  # that were compared

    def __str__(self) -> str:
        return f"r = {self.r:.3f}, RMS {self.rms:.2f} over context frames {ranges(self.frames)}"


class HeadPanel(NamedTuple):
    """One head for head_curves and one_head; profile [F], curve [F*S] per key token or None; and what it is
    compared with."""

    label: str
    layer: int
    head: int
    profile: np.ndarray
    curve: np.ndarray | None
    reference: np.ndarray | None = None  # [F] read off another figure
    clipped: np.ndarray | None = None  # [F] bool: where that figure cuts it off
    agreement: Agreement | None = None
    no_preference: float | None = None  # value of every frame if all tokens were alike; None for logits
    averages: np.ndarray | None = None  # [averages] of frames that are gone, beside the frames


class HeadMap(NamedTuple):
    """One number per head; values [N, H], or None and a line that says why it is absent."""

    name: str
    title: str
    unit: str
    scale: str  # "diverging" around 0, "ratio" around 1, "share" of 0..1, or "sequential"
    values: np.ndarray | None
    missing_reason: str = ""
    queries: str = ""  # whose queries it is of, where they are not those of the figure's title


class LabelMap(NamedTuple):
    """One label per head; labels [N, H], or None and a line that says why they are absent."""

    title: str
    names: Mapping[int, str]
    labels: np.ndarray | None
    missing_reason: str = ""
    differs: np.ndarray | None = None  # [N, H] bool: not the label it is compared with
    queries: str = ""  # whose queries it is of, where they are not those of the figure's title


class ProfileMap(NamedTuple):
    """Profiles [H, F + averages] of a layer in one pass, or None and a line that says why there are none."""

    title: str
    quantity: str
    values: np.ndarray | None
    missing_reason: str = ""
    averages: int = 0  # columns after the frames: averages of frames that are gone


# --- Why a cache does not hold a number, in words that figures and printed lines share
NO_LOGITS, NO_MASS = "no mean logits in this cache", "no mass in this cache"

NO_CONTEXT, NO_MATRIX = "no context: the queries see no earlier block", "no whole frame matrix in this cache"

NOT_IDENTIFIED = "its cells do not tell frame 0 from rows and distances"
