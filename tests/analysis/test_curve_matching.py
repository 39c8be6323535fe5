"""Matching curves to heads: against numpy's own correlation, on planted heads, and on the real model."""

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import synthetic_caches

from experiments.analysis import published
from experiments.analysis.published import (
    Curve,
    compared_frames,
    pearson,
    rank_heads,
    rank_of,
    rms_difference,
)
from experiments.caches import load_cache
from experiments.caches.view import open_passes, open_profiles

REAL = {"model": "Wan2.1-T2V-1.3B"}
CURVES = published.read_curves(ROOT / published.FOLDER / published.FIGURE4_CSV)


def real(name="eagle", F=21):
    return load_cache(ROOT / published.FOLDER / f"self_forcing_dmd_{name}_{F}f.pt")


def test_formulas():
    rng = np.random.default_rng(0)
    profiles, values = rng.normal(size=(4, 3, 9)).astype(np.float32), rng.normal(size=9)
    for i in np.ndindex(4, 3):
        np.testing.assert_allclose(
            pearson(profiles, values)[i], np.corrcoef(profiles[i], values)[0, 1], atol=1e-12
        )
        expected = np.linalg.norm(profiles[i].astype(float) - values) / 3  # sqrt(9)
        np.testing.assert_allclose(rms_difference(profiles, values)[i], expected)
    assert np.isnan(pearson(np.ones(9), values))


def planted(step_index=1, layer=2, head=1, curve=None):
    """A three-layer atlas of noise with a curve in one head of one pass, rescaled: r is 1, the RMS is not
    0."""
    cache = synthetic_caches.atlas(layers=(0, 2, 5), curve=False)
    cache["frame_logits"][cache["layers"].index(layer), step_index, head, 6:] = torch.from_numpy(
        2 * curve + 1
    ).float()
    return cache


def test_a_planted_head_is_found():
    values = np.sin(np.arange(9.0))
    curve = Curve(values, np.zeros(9, bool))
    cache = planted(curve=values)
    views = open_passes(cache, open_profiles(cache))
    ranking = rank_heads(views, curve)
    assert len(ranking) == 2 * 3 * 3
    best = ranking[0]
    assert (best.step, best.layer, best.head) == (4, 2, 1) and best.r == pytest.approx(1)
    assert best.rms == pytest.approx(np.sqrt(((values[:6] + 1) ** 2).mean()), rel=1e-6)
    rank, candidate = rank_of(ranking, 4, 2, 1)
    assert rank == 1 and candidate == best and rank_of(ranking, 4, 3, 1) is None
    assert rank_of(ranking, ranking[7].step, ranking[7].layer, ranking[7].head)[0] == 8


def test_noise_and_clipped_points_do_not_count():
    values = np.sin(np.arange(9.0))
    view = open_profiles(planted(curve=values), step=4)
    spoiled = values.copy()
    spoiled[[2, 6, 7, 8]] = 50, -50, 70, 30  # cut off, and the own block
    clipped = np.arange(9) == 2
    assert compared_frames(view, Curve(spoiled, clipped)) == [0, 1, 3, 4, 5]
    assert rank_heads([view], Curve(spoiled, clipped))[0].r == pytest.approx(1)
    assert rank_heads([view], Curve(spoiled, clipped & False))[0].r < 0.99
    holed = np.where(np.arange(9) == 4, np.nan, values)
    assert compared_frames(view, Curve(holed, clipped & False)) == [0, 1, 2, 3, 5]


@pytest.mark.parametrize(("cache", "quantity", "path", "reason"), [
    (synthetic_caches.atlas(F=21, H=12), None, ..., "they are of Wan2.1-T2V-1.3B, this cache is of wan-mini"),
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
