"""The first-frame effect by length, of matrices in which it is known."""

import numpy as np
import pytest

from experiments.dev.long_first_frame import effects


def test_a_placebo_counts_by_its_size():
    """Frame 0 stands out by 1 in every head; in the second one frame 5 is avoided by 4."""
    matrix = np.zeros((2, 2, 21, 21))
    matrix[..., 0] = 1
    matrix[:, 1, :, 5] = -4
    own = np.arange(21) // 3
    matrix[..., own[:, None] < own] = np.nan  # later blocks are not seen
    found = effects(matrix, 21)
    assert found["heads_above_placebos"] == 0.5 and found["largest_placebo"] > 1.5
    assert found["effect"][0] == pytest.approx(found["effect"][1])  # both prompts are alike
