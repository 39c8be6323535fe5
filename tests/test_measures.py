"""Per-head statistics against the numbers that the older notebook printed for the real model."""

from pathlib import Path

import numpy as np
import pytest

from experiments.measures import head_statistics

# first, middle, last, first - middle of the heads of layer 20, 21 frames, first published prompt
OLDER_NOTEBOOK = """
1.787 1.454 2.680 +0.333; 1.240 0.186 5.461 +1.055; 4.270 0.990 7.281 +3.279; 3.805 0.452 7.125 +3.352;
3.789 3.106 2.883 +0.683; 2.662 0.583 6.707 +2.079; 4.168 3.730 5.309 +0.438; 6.180 1.992 10.375 +4.188;
0.476 -0.379 4.203 +0.855; 1.579 0.468 3.674 +1.111; 2.215 1.685 3.797 +0.530; 1.619 0.062 5.547 +1.557
"""


def test_older_notebook_to_the_last_digit():
    profile = np.load(Path(__file__).parent / "golden" / "published_21f_layer20.npy")  # [12, 21] float16
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
