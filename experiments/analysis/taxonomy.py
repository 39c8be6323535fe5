"""Kinds of heads, by two published rules: anchor, wave or veil from signs of logits; static or dynamic from
mass.

Labels are small integers in the coding of the published tables (Pyramid Forcing, Forcing-KV). ABSENT is where
a cache does not hold what the rule needs. Pure functions; the thresholds come from configs/taxonomy.yaml."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, cast

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.analysis.measures import sign_rate
from experiments.caches.view import Profiles
from wan.blocks import earlier_block
from wan.errors import ConfigError

# --- Kinds of heads, by two published rules: anchor, wave or veil from signs of logits; static or dynamic
ANCHOR, WAVE, VEIL, STATIC, DYNAMIC, ABSENT = 1, -1, 2, 1, 0, -9

KINDS: Mapping[int, str] = MappingProxyType({ANCHOR: "anchor", WAVE: "wave", VEIL: "veil"})

LOCALITY: Mapping[int, str] = MappingProxyType({STATIC: "static", DYNAMIC: "dynamic"})


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
            raise ConfigError(
                f"veil_max {self.veil_max} must be below anchor_min {self.anchor_min}, both shares of 1"
            )


def load_thresholds(path: str | Path) -> Thresholds:
    """Thresholds from a YAML file. Raises ConfigError for one that is not there, an unknown key or a wrong
    value."""
    if not Path(path).is_file():
        raise ConfigError(f"{path} not found; the repository has configs/taxonomy.yaml")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Thresholds), OmegaConf.load(path))
        return cast(Thresholds, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        known = ", ".join(f.name for f in fields(Thresholds))
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}; known keys: {known}") from error


def context_sign_rate(view: Profiles) -> np.ndarray:
    """Share of positive mean logits over context cells, per head [N, H]: all cells of the frame matrix whose
    key block is strictly earlier than the query's, or where a cache has no whole matrix the last block's
    context frames."""
    if view.quantity != "mean_logit" or not view.context_frames:
        return np.full((len(view.layers), view.num_heads), np.nan)
    if (matrix := view.frame_matrices()) is None:
        return sign_rate(view.profiles()[..., list(view.context_frames)])
    return sign_rate(matrix[..., earlier_block(view.block_sizes).numpy()])


def kinds(rate: np.ndarray, thresholds: Thresholds) -> np.ndarray:
    """ANCHOR, WAVE or VEIL from rates of positive context logits; ABSENT for NaN. Names: Pyramid Forcing."""
    labels = np.where(
        rate >= thresholds.anchor_min, ANCHOR, np.where(rate <= thresholds.veil_max, VEIL, WAVE)
    )
    return np.where(np.isnan(rate), ABSENT, labels)


def local_mass_share(mass: np.ndarray, thresholds: Thresholds) -> np.ndarray:
    """Share of the mass on frames [skip_frames:] that lies on the last near_frames, of mass profiles [..., F]
    -> [...].

    Forcing-KV's rule. The last frames are the queries' own block and what is just before: at a noisy pass
    that is mostly noise. NaN where the video is too short for the two to differ, or a frame was not attended.
    """
    skip, near = thresholds.skip_frames, thresholds.near_frames
    A = np.asarray(mass, np.float64)
    if A.shape[-1] <= skip + near:
        return np.full(A.shape[:-1], np.nan)
    return A[..., -near:].sum(-1) / A[..., skip:].sum(-1)


def locality(share: np.ndarray, thresholds: Thresholds) -> np.ndarray:
    """STATIC or DYNAMIC from local_mass_share; ABSENT for NaN."""
    return np.where(np.isnan(share), ABSENT, np.where(share >= thresholds.static_min, STATIC, DYNAMIC))


def choose_thresholds(rate: np.ndarray, labels: np.ndarray) -> Thresholds:
    """The pair of sign-rate thresholds that agrees best with labels of the same heads, from all that tell
    rates apart.

    Report it on other data than it was chosen on. Of equally good pairs the one in the middle of their order.
    """
    rate, labels = np.ravel(rate), np.ravel(labels)
    levels = np.unique(np.concatenate([[0.0], rate, [1.0]]))
    cuts = (levels[1:] + levels[:-1]) / 2  # every threshold between two observed rates
    above, below = rate[None] >= cuts[:, None], rate[None] <= cuts[:, None]  # [cuts, heads]
    anchors = (above & (labels == ANCHOR)).sum(1) - (above & (labels == WAVE)).sum(1)
    veils = (below & (labels == VEIL)).sum(1) - (below & (labels == WAVE)).sum(1)
    score = (
        anchors[:, None] + veils[None] + np.where(cuts[:, None] > cuts[None], 0, -np.inf)
    )  # heads beyond all waves
    best = np.argwhere(score == score.max())
    anchor, veil = best[len(best) // 2]
    return Thresholds(anchor_min=float(cuts[anchor]), veil_max=float(cuts[veil]))


def agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Share of heads with the same label in both; NaN where no head has a label in both."""
    both = (a != ABSENT) & (b != ABSENT)
    return float((a == b)[both].mean()) if both.any() else float("nan")


def confusion(ours: np.ndarray, theirs: np.ndarray, classes: Sequence[int]) -> np.ndarray:
    """Counts of heads [ours, theirs] in the order of classes."""
    return np.array([[int(((ours == a) & (theirs == b)).sum()) for b in classes] for a in classes])


class Transfer(NamedTuple):
    """Thresholds chosen on one view of a model, and how well they do there and on its other views."""

    name: str
    thresholds: Thresholds
    here: float  # share of heads that agree with the published labels
    elsewhere: dict[str, float]


def threshold_transfer(views: Mapping[str, Profiles], labels: np.ndarray | None) -> list[Transfer]:
    """Thresholds chosen on each view, reported on every other; nothing where there are no published labels
    [N, H]."""
    if labels is None:
        return []
    rates = {name: context_sign_rate(view) for name, view in views.items() if view.context_frames}
    found = []
    for name, rate in rates.items():
        chosen = choose_thresholds(rate, labels)
        shares = {there: agreement(kinds(other, chosen), labels) for there, other in rates.items()}
        here = shares.pop(name)
        found.append(Transfer(name, chosen, here, shares))
    return found


# --- How well a rule names kinds of heads, held against what it must beat: the majority class and one
RESAMPLES = 2000


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
    """Of every view with context, against published labels [layers, H]; nothing where there are none."""
    found = []
    for name, view in views.items() if labels is not None else ():
        if labels is None or not view.context_frames or view.quantity != "mean_logit":
            continue
        rate = context_sign_rate(view)
        ours = kinds(rate, thresholds)
        low, high = bootstrap_by_layer(ours == labels)
        single = best_single_threshold(rate, labels)
        found.append(LabelAgreement(name, agreement(ours, labels), low, high, majority_share(labels), single))
    return found


def majority_share(labels: np.ndarray) -> float:
    """Share of the most frequent of labels [...]."""
    return float(np.unique(labels, return_counts=True)[1].max() / np.size(labels))


def best_single_threshold(rate: np.ndarray, labels: np.ndarray) -> float:
    """Best share that one threshold on rates [...] reaches with one label above it and another below."""
    rate, labels = np.ravel(rate), np.ravel(labels)
    order = np.argsort(rate)
    counts = np.stack(
        [np.cumsum(labels[order] == label) for label in (ANCHOR, WAVE, VEIL)]
    )  # of the lowest n
    counts = np.concatenate([np.zeros((3, 1)), counts], 1)
    distinct = np.concatenate([[True], np.diff(rate[order]) > 0, [True]])  # equal rates stay together
    below, above = counts[:, distinct], (counts[:, -1:] - counts)[:, distinct]
    return float((below.max(0) + above.max(0)).max() / len(rate))


def bootstrap_by_layer(correct: np.ndarray, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float]:
    """2.5 and 97.5 percentiles of the mean of correct [layers, H] when layers are drawn with replacement."""
    by_layer = np.asarray(correct, np.float64).mean(1)
    drawn = np.random.default_rng(seed).integers(len(by_layer), size=(resamples, len(by_layer)))
    low, high = np.percentile(by_layer[drawn].mean(1), [2.5, 97.5])
    return float(low), float(high)
