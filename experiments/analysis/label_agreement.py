"""How well a rule names kinds of heads, held against what it must beat: the majority class and one
threshold."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from experiments.analysis.head_taxonomy import (
    ANCHOR,
    VEIL,
    WAVE,
    Thresholds,
    agreement,
    context_sign_rate,
    kinds,
)
from experiments.caches.view import Profiles

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
