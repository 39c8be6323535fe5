"""Figures of a training: what lines, colours and steps mean is said in them."""

import numpy as np
from matplotlib.colors import to_hex

from experiments.figures.training import training_checkpoints

STEPS = [0, 100, 1000, 20000]


def label_colors(axis):
    return {line.get_label(): to_hex(line.get_color()) for line in axis.lines if line.get_label()[0] == "L"}


def test_a_head_has_one_colour_in_every_row():
    values = np.zeros((4, 2, 3))
    values[-1] = [[5, 4, 0], [0, 0, 3]]
    other = np.zeros((4, 2, 3))
    other[-1] = [[4, 5, 0], [0, 2, 0]]
    measures = {"logit\nall queries": ("logits", 0, values), "mass\nlast block": ("share", 0, other)}
    figure = training_checkpoints(STEPS, measures, [0, 20000], "wan-mini", few_step=1000)
    first, second = (label_colors(figure.axes[i]) for i in (0, 3))
    assert set(first) == {"L0H0", "L0H1", "L1H2"} and set(second) == {"L0H0", "L0H1", "L1H1"}
    assert first["L0H0"] == second["L0H0"] and first["L0H1"] == second["L0H1"]
    assert len({*first.values(), *second.values()}) == 4
    assert figure.axes[0].get_xlabel() == "Training step (few-step stages from 1000 on)"
