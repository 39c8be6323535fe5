"""Measures: the older ones against what the older notebook printed for the real model, the others against
plain loops."""

import numpy as np
import pytest
from conftest import GOLDEN, ROOT

from experiments.analysis import measures
from experiments.analysis.measures import head_statistics
from experiments.caches import load_cache
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


@pytest.mark.parametrize("F", [1, 2])
def test_no_middle(F):
    s = head_statistics(np.ones((3, F)))
    assert np.isnan(s.middle).all()
    assert (s.last == 1).all()
    assert head_statistics(np.ones((2, 4, 3, F))).first.shape == (2, 4, 3)


# Honest measures: by plain loops, on heads made up to be one thing and nothing else


def causal(values, blocks):
    """[F, F] values, NaN where the key's block is later; and blocks by frame."""
    block = np.repeat(np.arange(len(blocks)), blocks)
    return np.where(block[None] > block[:, None], np.nan, values), block


def excess_by_loops(A, block):
    F, differences = len(A), []
    for d in range(1, F):
        others = [
            A[k + d, k] for k in range(1, F - d) if block[k] < block[k + d] and not np.isnan(A[k + d, k])
        ]
        if block[0] < block[d] and others and not np.isnan(A[d, 0]):
            differences.append(A[d, 0] - sum(others) / len(others))
    return sum(differences) / len(differences)


@pytest.mark.parametrize("blocks", [[3, 3, 3], [1, 3, 3], [2, 2, 2, 2], [1] * 6, [3] * 7])
def test_equal_distance_excess(blocks):
    F = sum(blocks)
    rng = np.random.default_rng(0)
    A, block = causal(rng.normal(size=(F, F)), blocks)
    assert measures.equal_distance_excess(A, blocks) == pytest.approx(excess_by_loops(A, block))
    spoiled = np.where(block[None] == block[:, None], 1e6, A)  # the own block is noise: it must not count
    assert measures.equal_distance_excess(spoiled, blocks) == pytest.approx(excess_by_loops(A, block))
    holed = A.copy()
    holed[F - 1, 1] = holed[F - 2, 0] = np.nan  # as a window leaves them
    assert measures.equal_distance_excess(np.stack([A, holed]), blocks)[1] == pytest.approx(
        excess_by_loops(holed, block)
    )
    assert np.isnan(measures.equal_distance_excess(A, [F]))  # one block: no context at all


def test_a_wave_is_no_sink_and_a_sink_is_no_wave():
    """A head of distance alone has no excess however high frame 0 is; a bonus on frame 0 is the excess."""
    blocks, frames = [3] * 24, np.arange(72)
    distance = frames[:, None] - frames[None]
    of_distance, _ = causal(5 * np.cos(distance + 1.0) - 0.02 * distance, blocks)
    sink, _ = causal(2.5 * (frames == 0) + 0.0 * distance, blocks)
    assert measures.equal_distance_excess(of_distance, blocks) == pytest.approx(0, abs=1e-12)
    assert measures.equal_distance_excess(of_distance + sink, blocks) == pytest.approx(2.5)
    P = measures.distance_profile(of_distance + sink, blocks)
    assert np.isnan(P[-3:]).all()
    np.testing.assert_allclose(P[1:69], of_distance[-3:, 1:69].mean(0), atol=1e-9)
    np.testing.assert_allclose(
        P[0], of_distance[-3:-1, 0].mean(), atol=1e-9
    )  # distance 71 exists for frame 0 only


def test_wave_of_a_made_up_head():
    frames = np.arange(21)
    y = np.stack(
        [1 + 0.1 * frames + 3 * np.cos(frames - 0.7), 2 * np.cos(2 * np.pi / 4 * frames + 0.2), 0.3 * frames]
    )
    y[:, 18:] = 100  # the own block is noise
    w = measures.wave(y, range(18), periods=np.array([3.0, 4.0, 2 * np.pi, 9.0]))
    assert (w.amplitude[0], w.r2[0]) == (pytest.approx(3), pytest.approx(1))
    assert w.period.tolist()[:2] == [pytest.approx(2 * np.pi), 4] and w.period_r2[1] == pytest.approx(1)
    assert w.r2[1] < 0.2 and w.amplitude[2] == pytest.approx(0, abs=1e-9)
    assert measures.wave(y, range(18)).period[0] == pytest.approx(2 * np.pi, abs=0.1)
    assert np.isnan(measures.wave(y, [0, 1, 2, 3]).amplitude).all()


def test_a_period_is_told_where_it_explains_something_and_the_search_did_not_end():
    frames, rng = np.arange(40), np.random.default_rng(0)
    clear, slow = np.cos(2 * np.pi / 8 * frames), np.cos(2 * np.pi / 24 * frames)
    w = measures.wave(np.stack([clear, rng.normal(size=40), slow]), range(40))
    assert w.told_period[0] == pytest.approx(8, abs=0.1)
    assert np.isnan(w.told_period[1]) and w.period_r2[1] < 0.5 and np.isfinite(w.period[1])
    assert np.isnan(w.told_period[2]) and w.period_r2[2] > 0.5 and not w.period_inside[2]


def test_a_ratio_needs_a_positive_first_and_a_middle_that_is_not_near_0():
    nan = np.nan
    A = np.array([[5, 0.1, 0.1, -3], [-1, 2, 2, 2], [5, 2, 2, -3], [0.9, 0.01, 0.01, 0.08]])
    np.testing.assert_allclose(head_statistics(A).ratio, [nan, nan, 2.5, 90])  # mass has no negative values


def test_wave_against_numpy_least_squares():
    rng, context = np.random.default_rng(1), [0, 1, 2, 5, 6, 7, 9, 10, 12]
    y = rng.normal(size=(2, 3, 15))
    w = measures.wave(y, context)
    f = np.array(context, float)
    for i in np.ndindex(2, 3):
        basis = np.stack([f**0, f, np.cos(f), np.sin(f)], 1)
        c, rss = np.linalg.lstsq(basis, y[i][context], rcond=None)[:2]
        of_line = np.linalg.lstsq(basis[:, :2], y[i][context], rcond=None)[1]
        np.testing.assert_allclose([w.amplitude[i], w.r2[i]], [np.hypot(c[2], c[3]), 1 - rss[0] / of_line[0]])
        assert w.period_r2[i] >= 0.98 * w.r2[i]


def test_small_measures():
    nan = np.nan
    A = np.array([[6, 1, nan, 2, 50.0], [1, nan, nan, nan, 3]])
    np.testing.assert_allclose(measures.first_minus_context(A, [0, 1, 2, 3]), [4.5, nan])
    mass = np.array([[0.4, 0.1, 0.1, 0.3, 0.1], [0, 0, 0, 0.5, 0.5]])
    of_all, of_context = measures.first_frame_mass(mass, [0, 1, 2])
    np.testing.assert_allclose(of_all, [0.4, 0])
    np.testing.assert_allclose(of_context, [0.4 / 0.6, nan])
    np.testing.assert_allclose(
        measures.sign_rate(np.array([[1, -1, 2, nan], [nan] * 4, [-1, -2, 0, 5]])), [2 / 3, nan, 0.25]
    )


def test_the_published_72_frames():
    """What a wave hides: far fewer heads prefer frame 0 at equal distance than by first - middle."""
    view = open_profiles(load_cache(ROOT / "cache/published/self_forcing_dmd_eagle_72f.pt"))
    matrix = np.stack([view.frame_matrix(layer) for layer in view.layers])
    excess = measures.equal_distance_excess(matrix, view.block_sizes)
    delta = head_statistics(view.profiles()).delta
    block = np.repeat(np.arange(24), 3)
    for layer, head in ((1, 1), (5, 10), (29, 3)):
        assert excess[layer, head] == pytest.approx(excess_by_loops(matrix[layer, head].astype(float), block))
    assert 0.4 < excess.mean() < 0.5 and 1.1 < delta.mean() < 1.3
    assert (excess > 2).sum() == 15 and (delta > 2).sum() == 71
