"""Kinds of heads by two published rules: anchor, wave or veil by signs, static or dynamic by mass.

Labels are coded as in the published tables (Pyramid Forcing, Forcing-KV); ABSENT where a cache does not
hold what the rule needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from experiments.analysis.first_frame import NO_CONTEXT, NO_LOGITS, NO_MASS, context_sign_rate
from experiments.analysis.panels import ALL_QUERIES, LabelMap
from experiments.analysis.stats import DRAWS, percentiles, resampled
from experiments.caches.view import Profiles
from wan.errors import ConfigError, check_fields, from_values, named
from wan.files import Count, Frames, Share, read_yaml

ANCHOR, WAVE, VEIL, STATIC, DYNAMIC, ABSENT = 1, -1, 2, 1, 0, -9
KINDS: Mapping[int, str] = MappingProxyType({ANCHOR: "anchor", WAVE: "wave", VEIL: "veil"})
LOCALITY: Mapping[int, str] = MappingProxyType({STATIC: "static", DYNAMIC: "dynamic"})


@dataclass(frozen=True)
class Thresholds:
    """The defaults agree with the published labels on the published data; see configs/taxonomy.yaml."""

    anchor_min: Share = 0.84
    veil_max: Share = 0.12
    static_min: Share = 0.80
    skip_frames: Frames = 3
    near_frames: Count = 4

    def __post_init__(self):
        check_fields(self)
        if not 0 <= self.veil_max < self.anchor_min <= 1:
            said = f"veil_max {self.veil_max} must be below anchor_min {self.anchor_min}"
            raise ConfigError(f"{said}, both shares of 1")


def load_thresholds(path: str | Path) -> Thresholds:
    """Read thresholds from a YAML file. ConfigError for a missing file, unknown key or wrong value."""
    with named(path):
        return from_values(Thresholds, read_yaml(path))


def kinds(rate: np.ndarray, thresholds: Thresholds) -> np.ndarray:
    """Label ANCHOR, WAVE or VEIL by rates of positive context logits (Pyramid Forcing); ABSENT for NaN."""
    veil_or_wave = np.where(rate <= thresholds.veil_max, VEIL, WAVE)
    return np.where(np.isnan(rate), ABSENT, np.where(rate >= thresholds.anchor_min, ANCHOR, veil_or_wave))


def head_kinds(logits: Profiles | None, thresholds: Thresholds) -> np.ndarray | None:
    """Label every head of a view [N, H]; None where it does not say."""
    if logits is None or not logits.context_frames:
        return None
    return kinds(context_sign_rate(logits), thresholds)


def local_mass_share(mass: np.ndarray, thresholds: Thresholds) -> np.ndarray:
    """Share of mass on frames [skip_frames:] on the last near_frames (Forcing-KV), [..., F] -> [...]."""
    # The first frames are a sink of their own (Forcing-KV), so they count neither way
    skip, near = thresholds.skip_frames, thresholds.near_frames
    A = np.asarray(mass, np.float64)
    if A.shape[-1] <= skip + near:
        return np.full(A.shape[:-1], np.nan)
    return A[..., -near:].sum(-1) / A[..., skip:].sum(-1)


def locality(share: np.ndarray, thresholds: Thresholds) -> np.ndarray:
    """Label STATIC or DYNAMIC by local_mass_share; ABSENT for NaN."""
    return np.where(np.isnan(share), ABSENT, np.where(share >= thresholds.static_min, STATIC, DYNAMIC))


# --- Our labels beside published ones


def agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Share of heads with the same label in both; NaN where no head has a label in both."""
    both = (a != ABSENT) & (b != ABSENT)
    return float((a == b)[both].mean()) if both.any() else float("nan")


def label_maps(
    logits: Profiles | None,
    mass: Profiles | None,
    thresholds: Thresholds,
    published: tuple[np.ndarray, np.ndarray] | None,
) -> list[LabelMap]:
    """Return our labels, each beside the published ones of the same model; differing heads are marked."""
    whole = logits is not None and logits.context_frames and logits.frame_matrices() is not None
    by_mass = None if mass is None else locality(local_mass_share(mass.profiles(), thresholds), thresholds)
    if by_mass is not None and (by_mass == ABSENT).all():
        by_mass = None
    of_kinds = NO_LOGITS if logits is None else NO_CONTEXT, ALL_QUERIES if whole else ""
    of_locality = NO_MASS if mass is None else "too few frames", ""
    found = []
    for ours, names, source, (reason, queries), theirs in zip(
        (head_kinds(logits, thresholds), by_mass),
        (KINDS, LOCALITY),
        ("Pyramid Forcing", "Forcing-KV"),
        (of_kinds, of_locality),
        published or (None, None),
        strict=True,
    ):
        title, differs = " / ".join(names.values()), None
        if ours is not None and theirs is not None:
            title += f", {agreement(ours, theirs):.1%} agree"
            differs = np.not_equal(ours, theirs)
        found.append(LabelMap(title, names, ours, reason if ours is None else "", differs, queries))
        other_model = "" if published else "published for another model"
        found.append(LabelMap(f"published, {source}", names, theirs, other_model))
    return found


def label_rows(maps: Sequence[LabelMap]) -> list[dict[str, Any]]:
    """A row per label of label_maps: how many heads have it, and how many of them are published as which."""
    rows = []
    for ours, theirs in zip(maps[::2], maps[1::2], strict=True):
        for label, name in ours.names.items():
            mine = None if ours.labels is None else ours.labels == label
            row: dict[str, Any] = {"label": name, "heads": None if mine is None else mine.sum()}
            if mine is not None and theirs.labels is not None:
                row |= {f"published {n}": (mine & (theirs.labels == k)).sum() for k, n in ours.names.items()}
            row["absent"] = "; ".join(filter(None, (ours.missing_reason, theirs.missing_reason)))
            rows.append(row)
    return rows


def agreements(labels: Sequence[np.ndarray]) -> np.ndarray:
    """Agreement of every pair of label maps [n, n]."""
    return np.array([[agreement(a, b) for b in labels] for a in labels])


# --- What the rule must beat


class LabelAgreement(NamedTuple):
    """Shares of heads whose label is the published one, of one view."""

    name: str
    share: float  # our rule
    low: float  # of 95 % of bootstraps over layers: heads of one layer are not independent
    high: float
    majority: float  # every head called by the most frequent label
    single: float  # the best single threshold on the same rate, chosen on this view


def rates_of(views: Mapping[str, Profiles]) -> dict[str, np.ndarray]:
    """Return the rates of positive context logits [layers, H] of every view that has some, by name."""
    usable = {n: view for n, view in views.items() if view.context_frames and view.quantity == "mean_logit"}
    return {name: context_sign_rate(view) for name, view in usable.items()}


def label_agreements(
    rates: Mapping[str, np.ndarray], thresholds: Thresholds, labels: np.ndarray
) -> list[LabelAgreement]:
    """Compare the kinds by rates [layers, H] of every view to published labels [layers, H]."""
    found = []
    for name, rate in rates.items():
        ours = kinds(rate, thresholds)
        known = (ours != ABSENT) & (labels != ABSENT)  # heads with both labels
        if not known.any():
            found.append(LabelAgreement(name, *[float("nan")] * 5))
            continue

        def share(layers: np.ndarray, axis=-1, right=(ours == labels) & known, known=known) -> np.ndarray:
            agreed, count = (heads[layers].sum((-2, -1)) for heads in (right, known))  # of layers [..., L]
            return agreed / np.where(count, count, np.nan)

        layers = np.arange(len(labels))
        interval = percentiles(float(share(layers)), resampled((layers,), share, DRAWS))
        majority = float(np.unique(labels[known], return_counts=True)[1].max() / known.sum())
        # Any threshold between two rates gives the same labels: the rates themselves are enough
        single = max(
            float((np.where(rate > cut, above, below) == labels)[known].mean())
            for cut, above, below in product(np.unique(rate[known]), KINDS, KINDS)
        )
        found.append(LabelAgreement(name, *interval, majority, single))
    return found


def threshold_transfer(rates: Mapping[str, np.ndarray], labels: np.ndarray) -> list[dict[str, Any]]:
    """A row per view: thresholds chosen on it, and the share of labels that they give on every view."""
    rows, grid = [], np.linspace(0, 1, 101).tolist()
    # Every pair of hundredths
    pairs = [Thresholds(anchor, veil) for anchor, veil in product(grid, grid) if veil < anchor]
    for name, rate in rates.items():
        shares = [agreement(kinds(rate, pair), labels) for pair in pairs]
        chosen = pairs[int(np.argmax(shares))]
        row = {"chosen on": name, "anchor from": chosen.anchor_min, "veil to": chosen.veil_max}
        rows.append(row | {f"on {there}": agreement(kinds(r, chosen), labels) for there, r in rates.items()})
    return rows
