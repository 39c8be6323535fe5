"""The first-frame effect: planted effects come back, row offsets do nothing, ordinary key frames are not
called special."""

import numpy as np
import pytest
from conftest import ROOT
from helpers import synthetic_caches

from experiments.analysis import first_frame
from experiments.analysis.first_frame import (
    first_frame_effect,
    key_frame_contrasts,
    placebo_effects,
    placebo_frames,
)
from experiments.caches import load_cache
from experiments.caches.view import open_profiles
from wan.blocks import later_block


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
        c = key_frame_contrasts(A, [3] * 7, first)[:, :12]
        np.testing.assert_allclose(c, np.broadcast_to(expected, (4, 12)), atol=1e-6)


def test_what_the_cells_do_not_identify_is_nan_and_a_window_that_keeps_frame_0_is_measured():
    one_block, unseen = np.random.default_rng(0).normal(size=(2, 9, 9)), heads([1] * 9, n=1)
    unseen[..., :, 0] = np.nan  # a window without frame 0
    for A, sizes in ((one_block, [9]), (unseen, [1] * 9)):
        assert np.isnan(np.stack(first_frame_effect(A, sizes))).all()
        assert np.isnan(key_frame_contrasts(A, sizes)[..., 0]).all()
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
