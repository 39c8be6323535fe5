"""Matching curves to heads: against numpy's own correlation, on planted heads, and on the real model."""

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import synthetic_caches
from hypothesis import given
from hypothesis import strategies as st

from experiments.analysis import published
from experiments.analysis.published import (
    Curve,
    compared_frames,
    match_rows,
    pearson,
    rank_heads,
    rms_difference,
)
from experiments.caches.view import open_passes, open_profiles

REAL = {"model": "Wan2.1-T2V-1.3B"}


@given(st.integers(0, 10**6), st.integers(2, 12))
def test_formulas(seed, n):
    a, b = np.random.default_rng(seed).normal(size=(2, 3, n))
    for i in range(3):
        np.testing.assert_allclose(pearson(a, b)[i], np.corrcoef(a[i], b[i])[0, 1], atol=1e-9)
        np.testing.assert_allclose(rms_difference(a, b)[i], np.linalg.norm(a[i] - b[i]) / np.sqrt(n))
    assert np.isnan(pearson(np.ones(n), b)).all()


def test_a_planted_head_is_found_whatever_noise_and_clipped_points_are():
    """A three-layer atlas of noise with a curve in one head of one pass, rescaled: r is 1, the RMS is not."""
    cache, values = synthetic_caches.atlas(layers=(0, 2, 5), curve=False), np.sin(np.arange(9.0))
    cache["frame_logits"][1, 1, 1, 6:] = torch.from_numpy(2 * values + 1).float()
    views = open_passes(cache, open_profiles(cache))
    spoiled, clipped = values.copy(), np.arange(9) == 2
    spoiled[[2, 6, 7, 8]] = 50, -50, 70, 30  # cut off, and the own block
    spoiled[4] = np.nan
    curve = Curve(spoiled, clipped)
    assert compared_frames(views[0], curve) == [0, 1, 3, 5]
    ranking = rank_heads(views, curve)
    assert len(ranking) == 2 * 3 * 3 and ranking[0].r == pytest.approx(1)
    assert (ranking[0].step, ranking[0].layer, ranking[0].head) == (4, 2, 1)
    assert ranking[0].rms == pytest.approx(np.sqrt(((values[[0, 1, 3, 5]] + 1) ** 2).mean()), rel=1e-6)
    rows = match_rows(views, [(2, 1, "c"), (3, 1, "c")], {"c": curve}, 4)
    assert rows[0]["rank"] == 1 and rows[0]["r"] == ranking[0].r  # shown
    assert "rank" not in rows[1] and rows[-1]["rank"] == 3
    assert rank_heads(views, Curve(spoiled, clipped & False))[0].r < 0.99


@pytest.mark.parametrize(("cache", "quantity", "path", "reason"), [
    (synthetic_caches.atlas(F=21), None, ..., "they are of Wan2.1-T2V-1.3B, this cache is of wan-mini"),
    (synthetic_caches.atlas() | REAL, None, ..., "they have 21 frames, this cache has 9"),
    (synthetic_caches.atlas(F=21) | REAL, "mass", ..., "they are mean logits, this is mass"),
    (synthetic_caches.atlas(F=21, blocks=[21]) | REAL, None, ..., "see no earlier block"),
    (synthetic_caches.atlas(), None, None, "none was asked for"),
    (synthetic_caches.atlas(), None, "nowhere.csv", "nowhere.csv not found"),
])  # fmt: skip
def test_what_cannot_be_compared_says_why(cache, quantity, path, reason):
    path = ROOT / published.FOLDER / published.FIGURE4_CSV if path is ... else path
    curves, why_not = published.curves_for(open_profiles(cache, quantity=quantity), path, "Wan2.1-T2V-1.3B")
    assert not curves and reason in why_not
