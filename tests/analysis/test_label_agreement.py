"""What a rule for kinds of heads must beat: against plain loops over thresholds and layers."""

import itertools

import numpy as np
import pytest
from conftest import ROOT

from experiments.analysis import published
from experiments.analysis.taxonomy import (
    ANCHOR,
    VEIL,
    WAVE,
    Thresholds,
    best_single_threshold,
    bootstrap_by_layer,
    label_agreements,
    majority_share,
)
from experiments.caches import load_cache
from experiments.caches.view import open_profiles

RNG = np.random.default_rng(0)


def test_the_best_single_threshold_is_the_best_of_all():
    for _ in range(20):
        rate = RNG.integers(0, 8, 30) / 8  # equal rates must stay on one side
        labels = RNG.choice([ANCHOR, WAVE, VEIL], 30)
        shares = [
            np.where(rate > cut, above, below) == labels
            for cut in (-1, *np.unique(rate))
            for above, below in itertools.product((ANCHOR, WAVE, VEIL), repeat=2)
        ]
        assert best_single_threshold(rate, labels) == pytest.approx(max(map(np.mean, shares)))


def test_majority_and_bootstrap():
    labels = np.array([[1, 1, -1], [1, 2, -1]])
    assert majority_share(labels) == 0.5
    assert bootstrap_by_layer(np.ones((4, 3), bool)) == (1, 1)
    correct = np.repeat(np.arange(10)[:, None] < 5, 12, 1)  # half of the layers are right, all their heads
    low, high = bootstrap_by_layer(correct)
    assert 0.15 <= low <= 0.25 and 0.75 <= high <= 0.85  # by head it would be within 0.41 .. 0.59


def test_the_rule_beats_both_on_the_published_prompts():
    folder = ROOT / published.FOLDER
    views = {
        name: open_profiles(load_cache(folder / f"self_forcing_dmd_{name}.pt"))
        for name in ("eagle_21f", "castle_21f")
    }
    labels, _ = published.labels_for(views["eagle_21f"], folder)
    for one in label_agreements(views, Thresholds(), labels):
        assert one.low < one.share < one.high
        assert one.share > one.single > one.majority
    assert label_agreements(views, Thresholds(), None) == []
