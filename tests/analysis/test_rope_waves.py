"""Waves of temporal RoPE: fits recover what was put in; the theory agrees with rotated queries and keys."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.analysis.rope_waves import (
    Waves,
    first_by_block,
    fit_matrix,
    fit_waves,
    held_out_r_squared,
    jittered,
    last_block_context,
    predicted_curve,
    r_squared,
    split_first,
    temporal_frequencies,
)
from wan.rope import RotaryTable, rotate


def some_waves(seed: int, heads: int = 3, bands: int = 4) -> Waves:
    draw = np.random.default_rng(seed).normal
    return Waves(
        temporal_frequencies(128)[:bands],
        draw(size=heads),
        draw(size=(heads, bands)),
        draw(size=(heads, bands)),
    )


def test_frequencies_are_those_of_the_spec():
    assert len(temporal_frequencies(128)) == 22 and len(temporal_frequencies(16)) == 4
    periods = 2 * np.pi / temporal_frequencies(128)[:6]
    np.testing.assert_allclose(periods, [6.28, 9.55, 14.51, 22.06, 33.53, 50.96], atol=0.01)


@settings(deadline=None, max_examples=20)
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


def test_other_frequencies_explain_less():
    waves, distances = some_waves(1), np.arange(1.0, 70)
    curves = waves.at(distances)
    draws = jittered(waves.frequencies)
    nulls = [r_squared(curves, fit_waves(curves, distances, w).at(distances)) for w in draws]
    assert np.shape(nulls) == (20, 3) and np.median(nulls) < 0.97
    assert not np.allclose(jittered(waves.frequencies, seed=1), draws)


@pytest.mark.parametrize("block_sizes", [[3] * 7, [1, 3, 3, 3, 3, 3], [2, 4, 3, 5, 4]])
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


def test_frame_0_is_ranked_among_the_context_of_every_block():
    matrix = np.full((1, 9, 9), 1.0)
    matrix[0, 3:6, 0], matrix[0, 6:9, 0], matrix[0, 6:9, 4] = 5.0, 0.0, 3.0
    found = first_by_block(matrix, [3, 3, 3])
    assert [list(b) for b in found.queries] == [[3, 4, 5], [6, 7, 8]]
    np.testing.assert_allclose(found.excess, [[4.0, 0.0 - (1 + 1 + 1 + 3 + 1) / 5]])
    assert found.rank.tolist() == [[1, 6]]


def test_context_and_distances_of_the_last_block():
    curve, distances = last_block_context(np.arange(7.0), [1, 3, 3])
    assert curve.tolist() == [0, 1, 2, 3] and distances.tolist() == [5, 4, 3, 2]


def test_constant_queries_and_keys_give_the_predicted_curve():
    """Rotated by wan's own RoPE: q and k that are the same at every position."""
    head_dim, frames = 16, 9
    tables = RotaryTable(head_dim)(range(frames), 1, 1, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 3, head_dim, generator=draw, dtype=torch.float64) for _ in range(2))
    frequencies = temporal_frequencies(head_dim)
    temporal = 2 * len(frequencies)
    q[..., temporal:] = 0  # no spatial terms
    rotated = [rotate(x.expand(1, frames, 3, head_dim), *tables) for x in (q, k)]
    logits = torch.einsum("blhd,bmhd->hlm", *rotated)[:, -1].numpy() / head_dim**0.5  # of the last query
    means = [x[0, 0, :, :temporal].numpy().reshape(3, -1, 2) @ np.array([1, 1j]) for x in (q, k)]
    distances = frames - 1 - np.arange(frames)
    np.testing.assert_allclose(predicted_curve(*means, distances, frequencies, head_dim), logits, atol=1e-6)
