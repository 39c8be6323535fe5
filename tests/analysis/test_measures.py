"""Measures: older ones against what the older notebook printed for the real model, others against plain
sums."""

import numpy as np
import pytest
import torch
from conftest import GOLDEN, ROOT
from helpers import synthetic_caches

from experiments.analysis import measures
from experiments.analysis.measures import head_statistics
from experiments.analysis.panels import (
    NO_CONTEXT,
    NO_LOGITS,
    NO_MASS,
    NO_MATRIX,
    NOT_IDENTIFIED,
    choose_heads,
    layers_to_draw,
    no_preference,
)
from experiments.caches import load_cache
from experiments.caches.store import layer_from_atlas
from experiments.caches.view import open_profiles

# first, middle, last, first - middle of the heads of layer 20, 21 frames, first published prompt
OLDER_NOTEBOOK = """
1.787 1.454 2.680 +0.333; 1.240 0.186 5.461 +1.055; 4.270 0.990 7.281 +3.279; 3.805 0.452 7.125 +3.352;
3.789 3.106 2.883 +0.683; 2.662 0.583 6.707 +2.079; 4.168 3.730 5.309 +0.438; 6.180 1.992 10.375 +4.188;
0.476 -0.379 4.203 +0.855; 1.579 0.468 3.674 +1.111; 2.215 1.685 3.797 +0.530; 1.619 0.062 5.547 +1.557
"""


def test_older_notebook_to_the_last_digit():
    profile = np.load(GOLDEN / "published_21f_layer20.npy")  # [12, 21] float16
    s = head_statistics(profile)
    rows = zip(s.first, s.middle, s.last, s.delta, strict=True)
    printed = [f"{a:.3f} {b:.3f} {c:.3f} {d:+.3f}" for a, b, c, d in rows]
    assert printed == OLDER_NOTEBOOK.replace("\n", " ").strip().split("; ")
    assert s.max_frame[7] == 18 + np.argmax(profile[7, 18:])
    assert np.isnan(s.ratio[8])  # the middle is below 0
    assert s.called_sinks[[2, 3, 8]].tolist() == [True, True, False]


def test_by_hand():
    s = head_statistics(np.array([[6, 1, 2, 3, 4.0], [1, 2, 0, -2, 5]]))
    np.testing.assert_allclose([s.first, s.middle, s.last], [[6, 1], [2, 0], [4, 5]])
    np.testing.assert_allclose(s.first_minus_last, [2, -4])
    np.testing.assert_allclose(s.ratio, [3, np.nan])  # a middle of 0 has no ratio
    np.testing.assert_allclose(s.spread, [5 / 3.2, 7 / 1.2])
    assert s.max_frame.tolist() == [0, 4]
    assert s.called_sinks.tolist() == [True, False]


def test_absent_frames_are_left_out():
    nan = np.nan
    s = head_statistics(np.array([[nan, nan, 1, 3, 8], [2, nan, nan, 4, 6], [nan] * 5]))
    np.testing.assert_allclose(s.first, [nan, 2, nan])
    np.testing.assert_allclose(s.middle, [2, 4, nan])
    np.testing.assert_allclose(s.delta, [nan, -2, nan])
    np.testing.assert_allclose(s.spread, [7 / 4, 1, nan])
    assert s.max_frame.tolist() == [4, 4, -1]
    assert not s.called_sinks.any()


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


def test_a_ratio_needs_a_positive_first_and_a_middle_that_is_not_near_0():
    nan = np.nan
    A = np.array([[5, 0.1, 0.1, -3], [-1, 2, 2, 2], [5, 2, 2, -3], [0.9, 0.01, 0.01, 0.08]])
    np.testing.assert_allclose(head_statistics(A).ratio, [nan, nan, 2.5, 90])  # mass has no negative values


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


def test_the_means_of_a_layer_are_the_older_notebooks():
    """It printed 7.0851 and 1.2892 for the castle's layer 20; the published matrix is within vmax / 256 =
    0.06."""
    cache = layer_from_atlas(load_cache(ROOT / "cache/published/self_forcing_dmd_castle_21f.pt"), 20)
    means = measures.matrix_means(cache["full_frame_attention"].numpy())
    assert list(means.values()) == [pytest.approx(7.0851, abs=0.01), pytest.approx(1.2892, abs=0.01)]


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


def test_what_a_figure_4_is_made_of():
    view = open_profiles(load_cache(ROOT / "cache/published/self_forcing_dmd_eagle_21f.pt"))
    chosen = choose_heads(view, [(1, 1, "L1H1"), (40, 0, "L40H0")])
    assert [p.label for p in chosen.panels] == ["L1H1", "L0H0"] and chosen.missing == [(40, 0, "L40H0")]
    assert layers_to_draw(view, chosen.panels) == (0, 1)
    head, _, mean, above = measures.finding_rows(view, chosen.panels)
    delta = view.profiles()[..., 0].astype(float) - view.profiles()[..., 1:-1].astype(float).mean(-1)
    assert head["first − middle"] == pytest.approx(delta[1, 1])
    assert (
        mean["first − middle"] == pytest.approx(delta.mean()) and above["first − middle"] == (delta > 2).sum()
    )
    assert abs(head["excess at equal distance"]) < 0.5 and head["wave R²"] > 0.9
    assert (above["first-frame effect s"], round(mean["first-frame effect s"], 2)) == (23, 0.64)
    assert measures.highest_in_noise(view) == (view.profiles().argmax(-1) >= 18).sum()
    assert measures.finding_rows(open_profiles(synthetic_caches.atlas(), quantity="mass"), []) == []


def test_no_preference_is_an_even_share():
    cache = synthetic_caches.inference(window=[0, 4, 5, 6, 7, 8], S=5, H=3)
    mass, mean = (open_profiles(cache, quantity=quantity) for quantity in ("mass", "mean_prob"))
    assert (no_preference(mass), no_preference(mean)) == (pytest.approx(1 / 6), pytest.approx(1 / 30))
    assert no_preference(open_profiles(synthetic_caches.atlas())) is None


def test_bands_of_a_head():
    cache, shares = synthetic_caches.atlas(curve=False), torch.tensor([0.5, 0.3, 0.2])
    cache |= {
        "frame_logits_by_band": cache["frame_logits"][..., None] * shares,
        "rope_bands": ["t", "h", "w"],
    }
    view = open_profiles(cache, step=4)
    values, names = measures.band_profile(cache, view, 1, 2)
    np.testing.assert_allclose(values[:, 1], 0.3 * view.frame_profile(1)[2], atol=1e-6)
    assert (
        measures.band_profile(cache, view, 1, 3) is None and measures.band_profile(cache, view, 4, 0) is None
    )
    row, *_ = measures.band_rows(values, names, view.context_frames)
    profile = view.frame_profile(1)[2, :6]  # half of it is in the first band
    assert row["band"] == "t" and row["mean"] == pytest.approx(profile.mean() / 2, abs=1e-6)
    assert row["std over context frames"] == pytest.approx(profile.std() / 2, abs=1e-6)
    assert measures.band_rows(values, names, ()) == []
