"""Measures of heads against plain sums, least squares and planted effects; waves of temporal RoPE."""

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import synthetic_caches
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.analysis import axes, first_frame, measures, prompt_words, published, rope_waves, sweeps
from experiments.analysis.first_frame import (
    NO_CONTEXT,
    NO_LOGITS,
    NO_MASS,
    NO_MATRIX,
    first_frame_effect,
    placebo_effects,
    placebo_frames,
)
from experiments.analysis.measures import head_statistics
from experiments.analysis.panels import HeadMap, LabelMap, choose_heads, table
from experiments.analysis.rope_waves import Waves, fit_waves
from experiments.caches import load_cache
from experiments.caches.files import CacheError
from experiments.caches.view import open_profiles
from wan.keys import RotaryTable, later_block, rotate, time_frequencies
from wan.reductions import temporal_means


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
    assert maps_of(whole, "mean_logit")["first_frame_effect"].missing_reason == first_frame.NOT_IDENTIFIED
    rows = measures.measure_rows(list(base.values()))
    assert rows[0]["heads"] == 9 and rows[1]["absent"] == NO_CONTEXT


@pytest.mark.filterwarnings("error")
def test_the_mean_of_what_no_head_has_is_nan_without_a_warning():
    view = measures.open_quantity(synthetic_caches.atlas(F=6), 0, "mean_logit")
    [mean, _] = measures.finding_rows(view, [])
    assert mean["heads"] == "mean of all 9" and np.isnan(mean["wave R², 1 rad/frame"])
    assert not np.isnan(mean["first − middle"])


def heads(block_sizes, n=4, noise=0.0):
    """[n, F, F] logits with row offsets, a decay and a wave in distance, and noise per cell."""
    rng, F = np.random.default_rng(0), sum(block_sizes)
    q, k = np.mgrid[:F, :F]
    amplitude, phase, slope = (rng.normal(0, 1, (n, 1, 1)) for _ in range(3))
    A = rng.normal(0, 3, (n, F, 1)) + 2 * amplitude * np.cos(q - k + phase) + 0.1 * slope * (q - k)
    return np.where(later_block(block_sizes).numpy(), np.nan, A + rng.normal(0, noise, A.shape))


def by_lstsq(A, block_sizes, key=0):
    """The same fit by its definition: one column per row and per distance, one for the key frame."""
    block, F = np.repeat(np.arange(len(block_sizes)), block_sizes), len(A)
    q, k = np.nonzero((block[None] < block[:, None]) & np.isfinite(A))
    q, k = (q[k > 0], k[k > 0]) if key else (q, k)
    X, y = np.concatenate([np.eye(F)[q], np.eye(F)[q - k], (k == key)[:, None]], 1), A[q, k]
    beta, _, rank, _ = np.linalg.lstsq(X, y, rcond=None)
    rss = ((y - X @ beta) ** 2).sum()
    left = ((y - X[:, :-1] @ np.linalg.lstsq(X[:, :-1], y, rcond=None)[0]) ** 2).sum()
    within = y - np.array([y[q == row].mean() for row in q])
    error = np.sqrt(rss / (len(y) - rank) * np.linalg.pinv(X.T @ X)[-1, -1])
    return beta[-1], error, 1 - rss / (within**2).sum(), 1 - rss / left


@pytest.mark.parametrize("block_sizes", [[3] * 7, [1, 3, 3, 3, 3], [2] * 6])
def test_it_is_ordinary_least_squares(block_sizes):
    A = heads(block_sizes, n=3, noise=0.5)
    A[1, -1, 1] = A[2, -2, 0] = np.nan  # heads that miss other cells are fitted apart
    found = np.stack(first_frame_effect(A, block_sizes), 1)
    np.testing.assert_allclose(found, [by_lstsq(one, block_sizes) for one in A], rtol=1e-6)
    frames = placebo_frames(block_sizes)[:4]
    expected = [[by_lstsq(one, block_sizes, j)[0] for j in frames] for one in A]
    np.testing.assert_allclose(placebo_effects(A, block_sizes, frames), expected, rtol=1e-6)


def test_contrasts_tell_which_frame_it_is_whatever_frames_are_free():
    A, expected = heads([3] * 7), np.zeros(12)
    expected[[0, 2]] = 0.7, -0.4
    A[..., :12] += expected
    A += 0.05 * np.arange(21)  # a trend in the key frame is no contrast
    for first in (12, 18):
        c = first_frame.key_frame_contrasts(A, [3] * 7, first)[:, :12]
        np.testing.assert_allclose(c, np.broadcast_to(expected, (4, 12)), atol=1e-6)


def test_what_the_cells_do_not_identify_is_nan_and_a_window_that_keeps_frame_0_is_measured():
    one_block, unseen = np.random.default_rng(0).normal(size=(2, 9, 9)), heads([1] * 9, n=1)
    unseen[..., :, 0] = np.nan  # a window without frame 0
    for A, sizes in ((one_block, [9]), (unseen, [1] * 9)):
        assert np.isnan(np.stack(first_frame_effect(A, sizes))).all()
        assert np.isnan(first_frame.key_frame_contrasts(A, sizes)[..., 0]).all()
    assert np.isnan(placebo_effects(one_block, [9], [1, 2])).all() and placebo_frames([9]) == []
    A = heads([3] * 8, n=2)
    A[..., 0] += np.array([1.5, -0.5])[:, None]
    q, k = np.mgrid[:24, :24]
    A = np.where((k >= (q // 3 + 1) * 3 - 9) | (k < 3), A, np.nan)  # the first block is a sink of 9 frames
    np.testing.assert_allclose(first_frame_effect(A, [3] * 8).effect, [1.5, -0.5], atol=1e-8)


def test_a_wave_is_no_sink_and_a_sink_is_no_wave():
    """A head of distance alone has no excess however high frame 0 is; a bonus on frame 0 is the excess."""
    blocks, frames = [3] * 24, np.arange(72)
    distance = frames[:, None] - frames
    of_distance = np.where(later_block(blocks).numpy(), np.nan, 5 * np.cos(distance + 1.0) - 0.02 * distance)
    A = of_distance + 2.5 * (frames == 0)
    assert first_frame.equal_distance_excess(of_distance, blocks) == pytest.approx(0, abs=1e-12)
    spoiled = np.where(frames[:, None] // 3 == frames // 3, 1e6, A)  # the own block is noise
    spoiled[70, 1] = spoiled[69, 0] = np.nan  # as a window leaves them
    assert first_frame.equal_distance_excess(spoiled, blocks) == pytest.approx(2.5)
    assert np.isnan(first_frame.equal_distance_excess(spoiled, [72]))  # one block: no context at all


def test_all_of_a_view_and_why_there_is_nothing():
    view = open_profiles(load_cache(ROOT / "cache/published/self_forcing_dmd_eagle_21f.pt"))
    found, _ = first_frame.first_frame(view)
    said = {name: round(value, 2) for name, value in found.summary().items()}
    assert (said["heads above 2"], said["heads above all placebos"], said["placebo frames"]) == (23, 208, 14)
    assert [said[f"contrast of frame {n}"] for n in range(3)] == [0.76, 0.13, 0.23]
    holed = found._replace(fit=found.fit._replace(effect=np.where(found.rank == 1, np.nan, found.fit.effect)))
    assert np.isnan(holed.rank[found.rank == 1]).all() and np.nanmin(holed.rank) == 2
    other = {"a": found.fit.effect, "b": -found.fit.effect}
    assert [row["r with the first pass"] for row in first_frame.pass_rows(other)] == pytest.approx([1, -1])
    for absent, reason in (
        (open_profiles(synthetic_caches.atlas(F=6, blocks=[6])), first_frame.NO_CONTEXT),
        (open_profiles(synthetic_caches.figure4(granularity="key")), first_frame.NO_MATRIX),
    ):
        assert first_frame.first_frame(absent) == (None, reason)


def test_video_frames_of_latent_ones():
    cache = synthetic_caches.layer(F=6, blocks=[6])
    view = axes.choose_view(cache, use_video=True)
    assert view.latent.tolist() == [0] + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4 + [5] * 4  # 21 video frames
    assert view.shown([0, 5]) == [0, 17, 18, 19, 20]
    assert view.spread(np.arange(6.0)).tolist() == view.latent.tolist()
    base = cache | {"orig_num_frames": 21}
    units = [axes.choose_view(*chosen).unit for chosen in ((cache,), (base,), (base, False))]
    assert units == ["latent", "video", "latent"]
    assert len(axes.choose_view(cache, True, 18).latent) == 18  # a last group that is not full
    calls = [(axes.choose_view, cache, True, 17), (axes.choose_view, cache, True, 22)]
    for refuses, *asked in calls:
        with pytest.raises(CacheError):
            refuses(*asked)


def test_queries_of_several_blocks_count_where_they_attend():
    cache = synthetic_caches.layer(F=9)
    view, frames = open_profiles(cache), axes.choose_view(cache)
    matrix = cache["full_frame_attention"]
    profile, caption = axes.query_profile(view, frames, [2, 8])
    np.testing.assert_allclose(profile[:, :3], matrix[:, [2, 8], :3].mean(1), rtol=1e-6)
    np.testing.assert_allclose(profile[:, 3:], matrix[:, 8, 3:], rtol=1e-6)  # frame 2 does not see these
    assert caption.highlighted_frames == {"own block (noise at t = 1000)": [0, 1, 2, 6, 7, 8]}


def test_titles_count_heads():
    effect, waves = np.array([[3.0, 1.0], [np.nan, 2.5]]), np.array([[0.6, 0.1], [0.2, 0.3]])
    maps = [
        HeadMap("first_frame_effect", "first-frame effect s", "logits", "diverging", effect),
        HeadMap("wave_r2", "wave R²", "share of variance", "share", waves),
        HeadMap("sign_rate", "positive", "share", "share", None, "none here"),
        HeadMap("first_context_mass", "mass", "share", "sequential", None, "no mass"),
    ]
    expected = (
        "Of 4 heads 2 give frame 0 over 2 logits more than distance explains and 1 are mostly a wave of RoPE"
    )
    assert measures.headline(maps) == expected
    assert measures.headline(maps[2:]) == "Measures of every head"
    assert [panel.name for panel in measures.main_maps(maps)] == [*measures.MAIN]
    older = maps[0]._replace(title="first − middle", values=effect + 2)
    assert measures.preference_title(older, maps[0]) == (
        "Heads that prefer frame 0 by over 2 logits: 3 by first − middle, 2 by first-frame effect s"
    )
    sweep = {"effect": np.array([[[1.0, 0.1]], [[1.2, -0.3]]])}
    expected = "Of 2 heads 1 keep their first-frame effect s: its mean exceeds its spread over 2 atlases"
    assert sweeps.sweep_title(sweep) == expected
    differs = [None, np.array([True, False, True]), np.array([False, False, True])]
    kinds = [
        LabelMap(name, {}, np.zeros(3), differs=marked)
        for name, marked in zip(("causal", "base", "LoRA"), differs, strict=True)
    ]
    expected = "Of 3 heads 1 (LoRA) to 2 (base) are of another kind than in causal"
    assert sweeps.kinds_title(kinds, "causal") == expected


def test_words_of_tokens():
    tokens = ["▁", "red", "▁cine", "matic", "▁sky", ",", "</s>", "<pad>", "z"]
    words, place = prompt_words.words_of(tokens)
    assert words == ["red", "cinematic", "sky,", "(end)", "(padding)", "z"] and len(place) == len(tokens)
    mass = np.arange(18.0).reshape(2, 9)
    names, of_words = prompt_words.mass_of_words(mass, tokens)
    assert names == words and of_words.tolist() == [[1, 5, 9, 6, 7, 8], [19, 23, 27, 15, 16, 17]]


def test_a_table_is_aligned_and_numbers_keep_four_digits():
    rows = [{"name": "a", "n": np.int64(3), "x": 10.25}, {"name": "long", "x": np.nan}, {"y": 0.00012345}]
    expected = ["name  n       x          y", "a     3  10.250", "long        N/A", f"{'0.0001234':>26}"]
    assert table(rows).split("\n") == expected
    assert table([], "absent") == "absent"
    assert table({"a": 1.5, "long": "words"}) == "a     1.500\nlong  words"


def some_waves(seed: int, heads: int = 3, bands: int = 4) -> Waves:
    draw = np.random.default_rng(seed).normal
    of_bands = draw(size=heads), draw(size=(heads, bands)), draw(size=(heads, bands))
    return Waves(time_frequencies(128).numpy()[:bands], *of_bands)


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 1000), st.integers(30, 80))
def test_a_fit_finds_the_waves_that_a_curve_is_made_of(seed, n):
    waves, distances = some_waves(seed), np.arange(1.0, n + 1)
    found = fit_waves(waves.at(distances), distances, waves.frequencies)
    for name in ("constant", "cosine", "sine"):
        np.testing.assert_allclose(getattr(found, name), getattr(waves, name), atol=1e-5)
    angles = waves.frequencies[:, None] * distances + waves.phase[0][:, None]
    curve = waves.constant[0] + waves.amplitude[0] @ np.cos(angles)
    np.testing.assert_allclose(waves.at(distances)[0], curve)


@pytest.mark.parametrize("block_sizes", [[3] * 7, [2, 4, 3, 5, 4]])
def test_a_matrix_of_rows_waves_and_a_first_frame_is_taken_apart(block_sizes):
    F, waves, s = sum(block_sizes), some_waves(2), np.array([0.0, 1.5, -2.0])
    distances = np.arange(F)[:, None] - np.arange(F)
    matrix = waves.at(distances.ravel()).reshape(3, F, F) + np.random.default_rng(0).normal(size=(3, F, 1))
    matrix[..., 0] += s[:, None]
    later = np.repeat(np.arange(len(block_sizes)), block_sizes)
    matrix[:, later[:, None] < later] = np.nan
    fit = rope_waves.fit_matrix(matrix, block_sizes, waves.frequencies)
    np.testing.assert_allclose(fit.s, s, atol=1e-6)
    np.testing.assert_allclose(fit.waves.amplitude, waves.amplitude, atol=1e-6)
    np.testing.assert_allclose(fit.r_squared_within_rows, 1, atol=1e-9)
    for block in (-1, 2):
        split = rope_waves.split_first(matrix, block_sizes, fit, block)
        np.testing.assert_allclose(split.rest, 0, atol=1e-6)
        np.testing.assert_allclose(split.total, split.waves + split.s, atol=1e-6)
    # Beyond the video, where the first key stands elsewhere: by the formula, key by key
    queries, keys = [F + 4, F + 5], [2, *range(1, F + 3)]
    logits = np.stack([waves.at(query - np.array(keys)) for query in queries], -2)  # [3, queries, keys]
    expected = (logits[..., 0] - logits[..., 1:].mean(-1)).mean(-1) + s
    np.testing.assert_allclose(rope_waves.predict_first(fit, queries, keys), expected, atol=1e-5)


def test_a_ridge_is_more_rows_of_least_squares():
    block_sizes, waves, ridge = [3] * 6, some_waves(3), 0.02
    matrix = np.random.default_rng(1).normal(size=(3, 18, 18))
    q, k = np.nonzero(first_frame.context_cells(block_sizes))
    angles = np.outer(q - k, waves.frequencies)
    rows = (q[:, None] == np.unique(q)).astype(float)
    columns = np.concatenate([np.cos(angles), np.sin(angles), (k == 0)[:, None], rows], 1)
    penalty = np.eye(2 * len(waves.frequencies), columns.shape[1]) * np.sqrt(ridge * len(q))
    target = np.concatenate([matrix[:, q, k], np.zeros((3, len(penalty)))], 1).T
    found = np.linalg.lstsq(np.concatenate([columns, penalty]), target, rcond=None)[0].T
    fit = rope_waves.fit_matrix(matrix, block_sizes, waves.frequencies, ridge)
    B = len(waves.frequencies)
    np.testing.assert_allclose(fit.waves.cosine, found[:, :B], atol=1e-9)
    np.testing.assert_allclose(fit.waves.sine, found[:, B : 2 * B], atol=1e-9)
    np.testing.assert_allclose(fit.s, found[:, 2 * B], atol=1e-9)


def test_the_papers_head_comes_and_goes_with_the_block_of_queries():
    view = open_profiles(load_cache(published.FOLDER / "self_forcing_dmd_eagle_21f.pt"))
    by_block, parts = rope_waves.panels_of_view(view, choose_heads(view, [(1, 1, "L1H1")])[0])
    panel = by_block["L1H1"]
    assert panel.starts.tolist() == [6, 9, 12, 15, 18]
    np.testing.assert_allclose(panel.measured[1:], [-0.8, 2.9, -3.9, 5.2], atol=0.06)
    np.testing.assert_allclose(panel.predicted, panel.measured, atol=1)
    assert list(parts) == [f"L1H1, queries {q}" for q in ("12–14", "15–17", "18–20")]
    last = parts["L1H1, queries 18–20"]
    np.testing.assert_allclose(last.measured, view.frame_matrices()[1, 1, 18:, :18].mean(0), atol=1e-5)
    assert abs(last.waves.sum() + last.s - last.measured.sum()) < 1e-6


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 1000), st.sampled_from([[1, 3, 2], [2, 2, 2, 2]]), st.integers(0, 50))
def test_means_before_rope_are_those_of_queries_and_keys(seed, block_sizes, start):
    """Rotated by wan's own RoPE, of tokens that differ."""
    head_dim, H, (rows, columns), F = 16, 3, (2, 3), sum(block_sizes)
    draw, S = torch.Generator().manual_seed(seed), rows * columns
    tables = RotaryTable(head_dim)(range(start, start + F), rows, columns, torch.device("cpu"))
    # each token its own, and all frames the same
    q, k = (torch.randn(1, 1, S, H, head_dim, generator=draw).expand(1, F, -1, -1, -1) for _ in range(2))
    rotated = [rotate(x.flatten(1, 2), *tables) for x in (q, k)]
    temporal = 2 * len(time_frequencies(head_dim))
    means = [temporal_means(x, range(start, start + F))[0].double().numpy() for x in rotated]
    for found, x in zip(means, (q, k), strict=True):
        expected = x[0, ..., :temporal].mean(1).transpose(0, 1).unflatten(-1, (-1, 2))
        np.testing.assert_allclose(found, expected, atol=1e-5)
