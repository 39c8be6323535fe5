"""Kinds of heads by two published rules: anchor, wave or veil by signs, static or dynamic by mass.

Labels are coded as in the published tables (Pyramid Forcing, Forcing-KV); ABSENT where a cache does not
hold what the rule needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.analysis.measures import ALL_QUERIES, context_sign_rate
from experiments.analysis.panels import NO_CONTEXT, NO_LOGITS, NO_MASS, LabelMap
from experiments.caches.view import Profiles
from wan.errors import ConfigError

ANCHOR, WAVE, VEIL, STATIC, DYNAMIC, ABSENT = 1, -1, 2, 1, 0, -9
KINDS: Mapping[int, str] = MappingProxyType({ANCHOR: "anchor", WAVE: "wave", VEIL: "veil"})
LOCALITY: Mapping[int, str] = MappingProxyType({STATIC: "static", DYNAMIC: "dynamic"})
RESAMPLES = 2000


@dataclass(frozen=True)
class Thresholds:
    """The defaults agree with the published labels on the published data; see configs/taxonomy.yaml."""

    anchor_min: float = 0.84
    veil_max: float = 0.12
    static_min: float = 0.80
    skip_frames: int = 3
    near_frames: int = 4

    def __post_init__(self):
        if not 0 <= self.veil_max < self.anchor_min <= 1:
            said = f"veil_max {self.veil_max} must be below anchor_min {self.anchor_min}"
            raise ConfigError(f"{said}, both shares of 1")


def load_thresholds(path: str | Path) -> Thresholds:
    """Read thresholds from a YAML file. ConfigError for a missing file, unknown key or wrong value."""
    if not Path(path).is_file():
        raise ConfigError(f"{path} not found; the repository has configs/taxonomy.yaml")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Thresholds), OmegaConf.load(path))
        return cast(Thresholds, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        known = ", ".join(f.name for f in fields(Thresholds))
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}; known keys: {known}") from error


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
    no_kinds = NO_LOGITS if logits is None else NO_CONTEXT
    no_locality = NO_MASS if mass is None else "too few frames"
    pairs = (
        (head_kinds(logits, thresholds), KINDS, "Pyramid Forcing", no_kinds, ALL_QUERIES if whole else ""),
        (by_mass, LOCALITY, "Forcing-KV", no_locality, ""),
    )
    found = []
    for (ours, names, source, reason, queries), theirs in zip(pairs, published or (None, None), strict=True):
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


def kinds_by_name(
    views: Mapping[str, Profiles], thresholds: Thresholds, published: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Kinds of heads [N, H] of every view that shows them, and the published ones, by name."""
    found = {name: head_kinds(view, thresholds) for name, view in views.items()}
    found |= {"published labels": published}
    return {name: labels for name, labels in found.items() if labels is not None}


def agreements(labels: Sequence[np.ndarray]) -> np.ndarray:
    """Agreement of every pair of label maps [n, n]."""
    return np.array([[agreement(a, b) for b in labels] for a in labels])


# --- What the rule must beat, and thresholds chosen from labels


class LabelAgreement(NamedTuple):
    """Shares of heads whose label is the published one, of one view."""

    name: str
    share: float  # our rule
    low: float  # of 95 % of bootstraps over layers: heads of one layer are not independent
    high: float
    majority: float  # every head called by the most frequent label
    single: float  # the best single threshold on the same rate, chosen on this view


def label_agreements(
    views: Mapping[str, Profiles], thresholds: Thresholds, labels: np.ndarray | None
) -> list[LabelAgreement]:
    """Compare every view with context to published labels [layers, H]; nothing where there are none."""
    found = []
    for name, rate in _rates(views).items() if labels is not None else ():
        assert labels is not None
        ours = kinds(rate, thresholds)
        by_layer = (ours == labels).mean(1)
        layers = np.random.default_rng(0).integers(len(by_layer), size=(RESAMPLES, len(by_layer)))
        low, high = np.percentile(by_layer[layers].mean(1), [2.5, 97.5]).tolist()
        majority = float(np.unique(labels, return_counts=True)[1].max() / labels.size)
        single = best_single_threshold(rate, labels)
        found.append(LabelAgreement(name, agreement(ours, labels), low, high, majority, single))
    return found


def threshold_transfer(views: Mapping[str, Profiles], labels: np.ndarray | None) -> list[dict[str, Any]]:
    """A row per view: thresholds chosen on it, and the share of labels [N, H] they give on every view."""
    rates, rows = _rates(views), []
    for name, rate in rates.items() if labels is not None else ():
        assert labels is not None
        chosen = choose_thresholds(rate, labels)
        row = {"chosen on": name, "anchor from": chosen.anchor_min, "veil to": chosen.veil_max}
        rows.append(row | {f"on {there}": agreement(kinds(r, chosen), labels) for there, r in rates.items()})
    return rows


def _rates(views: Mapping[str, Profiles]) -> dict[str, np.ndarray]:
    usable = {n: view for n, view in views.items() if view.context_frames and view.quantity == "mean_logit"}
    return {name: context_sign_rate(view) for name, view in usable.items()}


def choose_thresholds(rate: np.ndarray, labels: np.ndarray) -> Thresholds:
    """Choose the pair of sign-rate thresholds that agrees best with labels, the middle of the best."""
    rate, labels = np.ravel(rate), np.ravel(labels)
    levels = np.unique(np.concatenate([[0.0], rate, [1.0]]))
    cuts = (levels[1:] + levels[:-1]) / 2  # every threshold between two observed rates
    above, below = rate[None] >= cuts[:, None], rate[None] <= cuts[:, None]  # [cuts, heads]
    anchors = (above & (labels == ANCHOR)).sum(1) - (above & (labels == WAVE)).sum(1)
    veils = (below & (labels == VEIL)).sum(1) - (below & (labels == WAVE)).sum(1)
    allowed = np.where(cuts[:, None] > cuts[None], 0, -np.inf)
    score = anchors[:, None] + veils[None] + allowed  # beyond all waves
    best = np.argwhere(score == score.max())
    anchor, veil = best[len(best) // 2]
    return Thresholds(anchor_min=float(cuts[anchor]), veil_max=float(cuts[veil]))


def best_single_threshold(rate: np.ndarray, labels: np.ndarray) -> float:
    """Best share that one threshold on rates [...] reaches with one label above it and another below."""
    rate, labels = np.ravel(rate), np.ravel(labels)
    order = np.argsort(rate)
    counts = np.stack([np.cumsum(labels[order] == label) for label in KINDS])  # of the lowest n
    counts = np.concatenate([np.zeros((len(KINDS), 1)), counts], 1)
    distinct = np.concatenate([[True], np.diff(rate[order]) > 0, [True]])  # equal rates stay together
    below, above = counts[:, distinct], (counts[:, -1:] - counts)[:, distinct]
    return float((below.max(0) + above.max(0)).max() / len(rate))
