"""Measures of heads against plain sums and numpy's least squares; what is absent says why."""

import numpy as np
import pytest
import torch
from helpers import synthetic_caches

from experiments.analysis import first_frame, measures
from experiments.analysis.measures import head_statistics
from experiments.analysis.panels import NO_CONTEXT, NO_LOGITS, NO_MASS, NO_MATRIX, NOT_IDENTIFIED


def test_absent_frames_are_left_out_of_small_measures():
    nan = np.nan
    s = head_statistics(np.array([[nan, nan, 1, 3, 8], [2, nan, nan, 4, 6], [nan] * 5]))
    np.testing.assert_allclose([s.first, s.middle, s.delta], [[nan, 2, nan], [2, 4, nan], [nan, -2, nan]])
    np.testing.assert_allclose(s.spread, [7 / 4, 1, nan])
    assert s.max_frame.tolist() == [4, 4, -1] and not s.called_sinks.any()
    A = np.array([[5, 0.1, 0.1, -3], [-1, 2, 2, 2], [5, 2, 2, -3], [0.9, 0.01, 0.01, 0.08]])
    np.testing.assert_allclose(head_statistics(A).ratio, [nan, nan, 2.5, 90])  # mass has no negative values
    A = np.array([[6, 1, nan, 2, 50.0], [1, nan, nan, nan, 3]])
    np.testing.assert_allclose(measures.first_minus_context(A, [0, 1, 2, 3]), [4.5, nan])
    mass = np.array([[0.4, 0.1, 0.1, 0.3, 0.1], [0, 0, 0, 0.5, 0.5]])
    np.testing.assert_allclose(measures.first_frame_mass(mass, [0, 1, 2]), [[0.4, 0], [0.4 / 0.6, nan]])
    signs = np.array([[1, -1, 2, nan], [nan] * 4, [-1, -2, 0, 5]])
    np.testing.assert_allclose(first_frame.sign_rate(signs), [2 / 3, nan, 0.25])


def test_waves_against_numpy_least_squares_and_periods_that_are_reliable():
    context = [0, 1, 2, 5, 6, 7, 9, 10, 12]
    y, f = np.random.default_rng(1).normal(size=(2, 3, 15)), np.array(context, float)
    found = measures.wave(y, context)
    for i in np.ndindex(2, 3):
        basis = np.stack([f**0, f, np.cos(f), np.sin(f)], 1)
        c, rss = np.linalg.lstsq(basis, y[i][context], rcond=None)[:2]
        of_line = np.linalg.lstsq(basis[:, :2], y[i][context], rcond=None)[1]
        expected = [np.hypot(*c[2:]), 1 - rss[0] / of_line[0]]
        np.testing.assert_allclose([found[0][i], found[1][i]], expected)
    assert np.isnan(measures.wave(y, [0, 1, 2, 3, 4, 5])).all()  # a span of 5 is less than a wave
    frames, noise = np.arange(40), np.random.default_rng(0).normal(size=40)
    clear, slow = np.cos(2 * np.pi / 8 * frames), np.cos(2 * np.pi / 24 * frames)
    periods = measures.best_period(np.stack([clear, noise, slow]), range(40))
    assert periods[0] == pytest.approx(8, abs=0.1)
    assert np.isnan(periods[1:]).all()  # of noise, and where the search ended


def maps_of(cache, *quantities):
    views = [measures.open_quantity(cache, 0, q) if q in quantities else None for q in ("mean_logit", "mass")]
    return {m.name: m for m in measures.measure_heads(*views)}


def test_measures_keep_noise_apart():
    """Of those of logits and of context only the oldest may change when the own block's values do."""
    cache = synthetic_caches.atlas(F=12, H=3)
    spoiled = {name: value.clone() if torch.is_tensor(value) else value for name, value in cache.items()}
    block = torch.arange(12) // 3
    for name in ("frame_logits", "frame_mass"):
        spoiled[name][..., block[:, None] == block[None]] += 7
    before, after = (maps_of(c, "mean_logit", "mass") for c in (cache, spoiled))
    changed = {n for n in before if not np.allclose(before[n].values, after[n].values, equal_nan=True)}
    assert changed == {"first_minus_middle"}
    assert {n for n, m in before.items() if m.queries} == {
        *("equal_distance_excess", "first_frame_effect", "first_frame_r2", "sign_rate", "log_mass_effect")
    }


def test_what_a_cache_does_not_hold_is_absent_with_the_reason():
    whole, logits = synthetic_caches.atlas(F=12), {"first_minus_middle", "first_minus_context", "sign_rate"}
    assert {m.missing_reason for m in maps_of(whole, "mass").values()} == {NO_LOGITS, ""}
    assert {m.missing_reason for m in maps_of(whole, "mean_logit").values()} == {NO_MASS, ""}
    base = maps_of(synthetic_caches.atlas(F=6, blocks=[6]), "mean_logit", "mass")
    assert {n for n, m in base.items() if m.values is not None} == {"first_minus_middle", "first_mass"}
    profiles = maps_of(synthetic_caches.figure4(granularity="key"), "mean_logit")
    assert profiles["first_frame_effect"].missing_reason == NO_MATRIX
    assert logits < {n for n, m in profiles.items() if m.values is not None}
    whole["frame_logits"][..., 3:, 0] = torch.nan  # a window that never sees frame 0
    assert maps_of(whole, "mean_logit")["first_frame_effect"].missing_reason == NOT_IDENTIFIED
    rows = measures.measure_rows(list(base.values()))
    assert rows[0]["heads"] == 9 and rows[1]["absent"] == NO_CONTEXT
