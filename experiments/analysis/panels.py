"""What one panel of a figure shows, as plain arrays: numbers need no matplotlib."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class HeadPanel(NamedTuple):
    """One head for head_curves; profile [F], curve [F*S] per key token or None; and what it is compared with."""

    label: str
    layer: int
    head: int
    profile: np.ndarray
    curve: np.ndarray | None
    reference: np.ndarray | None = None  # [F] read off another figure
    clipped: np.ndarray | None = None  # [F] bool: where that figure cuts it off
    agreement: str = ""  # how well the two agree, in words


class HeadMap(NamedTuple):
    """One number per head; values [N, H], or None and a line that says why it is absent."""

    name: str
    title: str
    unit: str
    scale: str  # "diverging" around 0, "ratio" around 1, "share" of 0..1, or "sequential"
    values: np.ndarray | None
    absent: str = ""


class LabelMap(NamedTuple):
    """One label per head; labels [N, H], or None and a line that says why they are absent."""

    title: str
    names: Mapping[int, str]
    labels: np.ndarray | None
    absent: str = ""
    differs: np.ndarray | None = None  # [N, H] bool: not the label it is compared with


class Strip(NamedTuple):
    """Profiles [H, F] of one layer in one pass, or None and a line that says why they are absent."""

    title: str
    quantity: str
    values: np.ndarray | None
    absent: str = ""
