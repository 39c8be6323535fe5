"""Measures: older ones against what the older notebook printed for the real model, others against plain
sums."""

import numpy as np
import pytest
import torch
from helpers import synthetic_caches

from experiments.analysis import measures
from experiments.analysis.measures import head_statistics
from experiments.analysis.panels import NO_CONTEXT, NO_LOGITS, NO_MASS, NO_MATRIX, NOT_IDENTIFIED


def test_absent_frames_are_left_out():
    nan = np.nan
    s = head_statistics(np.array([[nan, nan, 1, 3, 8], [2, nan, nan, 4, 6], [nan] * 5]))
    np.testing.assert_allclose(s.first, [nan, 2, nan])
    np.testing.assert_allclose(s.middle, [2, 4, nan])
    np.testing.assert_allclose(s.delta, [nan, -2, nan])
    np.testing.assert_allclose(s.spread, [7 / 4, 1, nan])
    assert s.max_frame.tolist() == [4, 4, -1]
    assert not s.called_sinks.any()
    A = np.array([[5, 0.1, 0.1, -3], [-1, 2, 2, 2], [5, 2, 2, -3], [0.9, 0.01, 0.01, 0.08]])
    np.testing.assert_allclose(head_statistics(A).ratio, [nan, nan, 2.5, 90])  # mass has no negative values


def test_waves_against_numpy_least_squares():
    rng, context = np.random.default_rng(1), [0, 1, 2, 5, 6, 7, 9, 10, 12]
    y = rng.normal(size=(2, 3, 15))
    found, best = measures.wave(y, context), measures.best_period(y, context)
    f = np.array(context, float)
    for i in np.ndindex(2, 3):
        basis = np.stack([f**0, f, np.cos(f), np.sin(f)], 1)
        c, rss = np.linalg.lstsq(basis, y[i][context], rcond=None)[:2]
        of_line = np.linalg.lstsq(basis[:, :2], y[i][context], rcond=None)[1]
        np.testing.assert_allclose(
            [found.amplitude[i], found.r2[i]], [np.hypot(*c[2:]), 1 - rss[0] / of_line[0]]
        )
        assert best.r2[i] >= 0.98 * found.r2[i]
    assert np.isnan(measures.wave(y, [0, 1, 2, 3, 4]).amplitude).all()
    assert np.isnan(measures.wave(y, [0, 1, 2, 3, 4, 5]).r2).all()  # a span of 5 is less than a wave
    assert np.isfinite(measures.wave(y, [0, 1, 2, 3, 4, 6]).r2).all()


def test_a_period_is_reliable_where_it_explains_something_and_the_search_did_not_end():
    frames, rng = np.arange(40), np.random.default_rng(0)
    clear, slow = np.cos(2 * np.pi / 8 * frames), np.cos(2 * np.pi / 24 * frames)
    w = measures.best_period(np.stack([clear, rng.normal(size=40), slow]), range(40))
    assert w.reliable[0] == pytest.approx(8, abs=0.1)
    assert np.isnan(w.reliable[1]) and w.r2[1] < 0.5 and np.isfinite(w.period[1])
    assert np.isnan(w.reliable[2]) and w.r2[2] > 0.5 and not w.inside[2]
    chosen = measures.best_period(clear[None], range(40), periods=np.array([3.0, 8.0, 9.0]))
    assert chosen.period == 8 and chosen.r2 == pytest.approx(1)


def test_small_measures():
    nan = np.nan
    A = np.array([[6, 1, nan, 2, 50.0], [1, nan, nan, nan, 3]])
    np.testing.assert_allclose(measures.first_minus_context(A, [0, 1, 2, 3]), [4.5, nan])
    mass = np.array([[0.4, 0.1, 0.1, 0.3, 0.1], [0, 0, 0, 0.5, 0.5]])
    of_all, of_context = measures.first_frame_mass(mass, [0, 1, 2])
    np.testing.assert_allclose(of_all, [0.4, 0])
    np.testing.assert_allclose(of_context, [0.4 / 0.6, nan])
    signs = np.array([[1, -1, 2, nan], [nan] * 4, [-1, -2, 0, 5]])
    np.testing.assert_allclose(measures.sign_rate(signs), [2 / 3, nan, 0.25])


# Every measure of every head


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
    assert all(m.values.shape == (3, 3) for m in before.values())
    assert {n for n, m in before.items() if m.queries} == {
        *("equal_distance_excess", "first_frame_effect", "first_frame_r2", "sign_rate", "log_mass_effect")
    }


def test_what_a_cache_does_not_hold_is_absent_with_the_reason():
    whole, logits = synthetic_caches.atlas(F=12), {"first_minus_middle", "first_minus_context", "sign_rate"}
    assert {m.missing_reason for m in maps_of(whole, "mass").values()} == {NO_LOGITS, ""}
    assert {m.missing_reason for m in maps_of(whole, "mean_logit").values()} == {NO_MASS, ""}
    base = maps_of(synthetic_caches.atlas(F=6, blocks=[6]), "mean_logit", "mass")
    assert {n for n, m in base.items() if m.values is not None} == {"first_minus_middle", "first_mass"}
    assert base["sign_rate"].missing_reason == NO_CONTEXT
    profiles = maps_of(synthetic_caches.figure4(granularity="key"), "mean_logit")
    assert {n for n, m in profiles.items() if m.missing_reason == NO_MATRIX} == {
        *("equal_distance_excess", "first_frame_effect", "first_frame_r2")
    }
    assert logits < {n for n, m in profiles.items() if m.values is not None}
    blind = synthetic_caches.atlas(F=12)
    blind["frame_logits"][..., 3:, 0] = torch.nan  # a window that never sees frame 0
    assert maps_of(blind, "mean_logit")["first_frame_effect"].missing_reason == NOT_IDENTIFIED
    rows = measures.measure_rows(list(base.values()))
    assert rows[0]["heads"] == 9 and rows[1]["absent"] == NO_CONTEXT
