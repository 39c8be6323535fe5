"""Statistics against pandas, textbook formulas and coverage that can be counted."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, strategies

from experiments.analysis import stats


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@given(strategies.integers(0, 1000), strategies.sampled_from([9, 0]))
def test_spearman_is_pandas_own(seed, decimals):
    x, y = draw(40, seed=seed).round(decimals), draw(40, seed=seed + 1).round(decimals)
    expected = pd.DataFrame({"x": x, "y": y}).corr(method="spearman").loc["x", "y"]
    assert stats.spearman(np.append(x, np.nan), np.append(y, 9.0)) == pytest.approx(expected, abs=1e-12)
    assert np.isnan(stats.spearman(x, np.ones(40))) and np.isnan(stats.spearman(x[:2], y[:2]))
    assert np.isnan(stats.partial_spearman(x, y, (x,)))


def test_partial_spearman_is_that_of_the_inverse_of_the_rank_correlations():
    z, w = draw(60), draw(60, seed=1)
    x, y = z + 0.3 * draw(60, seed=2), -z + w + 0.5 * draw(60, seed=3)
    precision = np.linalg.inv(np.corrcoef([stats.ranks(v) for v in (x, y, z, w)]))
    expected = -precision[0, 1] / np.sqrt(precision[0, 0] * precision[1, 1])
    assert stats.partial_spearman(x, y, (z, w)) == pytest.approx(expected, abs=1e-10)


def test_intervals_over_heads_resample_prompts_and_whole_layers():
    predictor = draw(8, 12)
    related = predictor + draw(8, 12, seed=5) + 0.2 * draw(20, 8, 12, seed=1)
    one = stats.head_correlation(related, predictor, draws=100)
    assert one.estimate == pytest.approx(stats.spearman(related.mean(0).ravel(), predictor.ravel()))
    assert one.low < one.estimate < one.high and one.low > 0.4
    # A predictor that only tells layers apart: with layers resampled as wholes its interval is far wider.
    by_layer = np.broadcast_to(draw(8, 1, seed=2), (8, 12))
    layered = np.broadcast_to(by_layer + 0.01 * draw(8, 12), (20, 8, 12))
    wide = stats.head_correlation(layered, draw(8, 1, seed=3) + by_layer, draws=100)
    assert wide.high - wide.low > 0.25
    assert np.isnan(stats.head_correlation(layered, by_layer, given=[by_layer], draws=5).estimate)


def test_p_values_and_pictures_by_the_textbook():
    assert np.allclose(stats.holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    assert stats.sign_flip_p(np.ones(5), draws=40_000) == pytest.approx(2 / 32, abs=5e-3)
    video = np.clip(0.5 + 0.2 * draw(3, 3, 16, 16), 0, 1)
    assert np.allclose(stats.psnr(video, video + 0.1), 20) and np.isinf(stats.psnr(video, video)).all()
    p, q = (np.lib.stride_tricks.sliding_window_view(x, (8, 8), (-2, -1)) for x in (video, 1 - video))
    (a, b), (v, w) = ((x.mean((-2, -1)) for x in (p, q)), (x.var((-2, -1)) for x in (p, q)))
    top = (2 * a * b + 1e-4) * (2 * ((p * q).mean((-2, -1)) - a * b) + 9e-4)
    by_hand = top / ((a**2 + b**2 + 1e-4) * (v + w + 9e-4))
    assert np.allclose(stats.ssim(video, 1 - video), by_hand.mean((1, 2, 3)))


@given(strategies.integers(0, 10**6), strategies.integers(2, 12))
def test_correlations_of_rows(seed, n):
    a, b = np.random.default_rng(seed).normal(size=(2, 3, n))
    np.testing.assert_allclose(stats.pearson(a, b), np.diag(np.corrcoef(a, b)[:3, 3:]), atol=1e-9)
    np.testing.assert_allclose(stats.rms_difference(a, b), np.linalg.norm(a - b, axis=1) / np.sqrt(n))
    assert np.isnan(stats.pearson(np.ones(n), b)).all()
