"""Waves of temporal RoPE: fits recover what was put in; the theory agrees with rotated queries and keys."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.analysis import published
from experiments.analysis.panels import choose_heads
from experiments.analysis.rope_waves import (
    Waves,
    first_by_block,
    fit_matrix,
    fit_waves,
    held_out_r_squared,
    jittered,
    panels_of_view,
    predicted_context,
    r_squared,
    split_first,
    temporal_frequencies,
)
from experiments.caches import load_cache
from experiments.caches.view import open_profiles
from wan.keys import RotaryTable, rotate
from wan.reductions import temporal_means


def some_waves(seed: int, heads: int = 3, bands: int = 4) -> Waves:
    draw = np.random.default_rng(seed).normal
    of_bands = draw(size=heads), draw(size=(heads, bands)), draw(size=(heads, bands))
    return Waves(temporal_frequencies(128)[:bands], *of_bands)


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
    assert (held_out_r_squared(waves.at(distances), distances, waves.frequencies) > 0.999).all()
    n = np.arange(1.0, 70)
    curves = waves.at(n)
    nulls = [fit_waves(curves, n, w).at(n) for w in jittered(waves.frequencies)]
    assert np.median([r_squared(curves, null) for null in nulls]) < 0.99


@pytest.mark.parametrize("block_sizes", [[3] * 7, [2, 4, 3, 5, 4]])
def test_a_matrix_of_rows_waves_and_a_first_frame_is_taken_apart(block_sizes):
    F, waves, s = sum(block_sizes), some_waves(2), np.array([0.0, 1.5, -2.0])
    distances = np.arange(F)[:, None] - np.arange(F)
    matrix = waves.at(distances.ravel()).reshape(3, F, F) + np.random.default_rng(0).normal(size=(3, F, 1))
    matrix[..., 0] += s[:, None]
    later = np.repeat(np.arange(len(block_sizes)), block_sizes)
    matrix[:, later[:, None] < later] = np.nan
    fit = fit_matrix(matrix, block_sizes, waves.frequencies)
    np.testing.assert_allclose(fit.s, s, atol=1e-6)
    np.testing.assert_allclose(fit.waves.amplitude, waves.amplitude, atol=1e-6)
    np.testing.assert_allclose(fit.r_squared_within_rows, 1, atol=1e-9)
    for block in (-1, 2):
        split = split_first(matrix, block_sizes, fit, block)
        np.testing.assert_allclose(split.rest, 0, atol=1e-6)
        np.testing.assert_allclose(split.total, split.waves + split.s, atol=1e-6)


def test_the_papers_head_comes_and_goes_with_the_block_of_queries():
    view = open_profiles(load_cache(published.FOLDER / "self_forcing_dmd_eagle_21f.pt"))
    by_block, parts = panels_of_view(view, choose_heads(view, [(1, 1, "L1H1")])[0])
    panel = by_block["L1H1"]
    assert panel.starts.tolist() == [6, 9, 12, 15, 18]
    np.testing.assert_allclose(panel.measured[1:], [-0.8, 2.9, -3.9, 5.2], atol=0.06)
    np.testing.assert_allclose(panel.predicted, panel.measured, atol=1)
    assert list(parts) == [f"L1H1, queries {q}" for q in ("12–14", "15–17", "18–20")]
    last = parts["L1H1, queries 18–20"]
    np.testing.assert_allclose(last.measured, view.frame_matrices()[1, 1, 18:, :18].mean(0), atol=1e-5)
    assert abs(last.waves.sum() + last.s - last.measured.sum()) < 1e-6


def test_frame_0_is_ranked_among_the_context_of_every_block():
    matrix = np.full((1, 9, 9), 1.0)
    matrix[0, 3:6, 0], matrix[0, 6:9, 0], matrix[0, 6:9, 4] = 5.0, 0.0, 3.0
    queries, excess, rank = first_by_block(matrix, [3, 3, 3])
    assert [list(b) for b in queries] == [[3, 4, 5], [6, 7, 8]]
    np.testing.assert_allclose(excess, [[4.0, 0.0 - (1 + 1 + 1 + 3 + 1) / 5]])
    assert rank.tolist() == [[1, 6]]


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 1000), st.sampled_from([[1, 3, 2], [2, 2, 2, 2]]), st.integers(0, 50))
def test_means_before_rope_give_the_temporal_logits(seed, block_sizes, start):
    """Rotated by wan's own RoPE: tokens that differ, and a curve that one mean query and key give exactly."""
    head_dim, H, (rows, columns), F = 16, 3, (2, 3), sum(block_sizes)
    draw, S = torch.Generator().manual_seed(seed), rows * columns
    tables = RotaryTable(head_dim)(range(start, start + F), rows, columns, torch.device("cpu"))
    # each token its own, and all frames the same: the theory's constant means
    q, k = (torch.randn(1, 1, S, H, head_dim, generator=draw).expand(1, F, -1, -1, -1) for _ in range(2))
    rotated = [rotate(x.flatten(1, 2), *tables) for x in (q, k)]
    temporal = 2 * len(temporal_frequencies(head_dim))
    means = [temporal_means(x, range(start, start + F))[0].double().numpy() for x in rotated]
    for found, x in zip(means, (q, k), strict=True):
        expected = x[0, ..., :temporal].mean(1).transpose(0, 1).unflatten(-1, (-1, 2))
        np.testing.assert_allclose(found, expected, atol=1e-5)
    q, k = (x[0].double().unflatten(0, (F, S)).mean(1)[..., :temporal] for x in rotated)  # [F, H, temporal]
    n = F - block_sizes[-1]
    logits = torch.einsum("qhd,khd->hqk", q[n:], k[:n]).mean(1) / head_dim**0.5
    np.testing.assert_allclose(predicted_context(*means, block_sizes, head_dim), logits, atol=1e-5)
