"""Models side by side: what moved is measured over shared context cells, rows without their means."""

import numpy as np
import pytest
import torch
from helpers import synthetic_caches

from experiments.analysis import sweeps as model_family
from experiments.analysis.taxonomy import Thresholds
from experiments.caches.files import CacheError
from experiments.caches.view import open_profiles

BLOCKS = [3, 3, 3]


def view(change=None, blocks=None, **more):
    cache = synthetic_caches.atlas(F=9, blocks=blocks or BLOCKS, curve=False, **more)
    if change is not None:
        cache["frame_logits"] = change(cache["frame_logits"].clone())
    return open_profiles(cache, 0, "mean_logit")


def test_what_softmax_ignores_is_no_move():
    row = torch.randn(9, 1, generator=torch.Generator().manual_seed(5))
    assert np.allclose(model_family.moved(view(), view(lambda logits: logits + row)), 0, atol=1e-6)


def test_a_move_is_its_root_mean_square():
    """One context cell of a row of three moves by 3: without the row's mean it is 2, −1, −1."""

    def change(logits):
        logits[0, 0, 1, 3:6, 1] += 3.0  # the second block's rows, key frame 1
        return logits

    moved = model_family.moved(view(), view(change))
    expected = np.zeros((3, 3))
    expected[0, 1] = np.sqrt(3 * (4 + 1 + 1) / (3 * 3 + 3 * 6))  # over the 27 context cells
    np.testing.assert_allclose(moved, expected, atol=1e-6)


def test_noise_of_the_own_block_is_left_out():
    def change(logits):
        logits[:, :, :, 6:, 6:] += torch.randn(3, 3)
        return logits

    assert np.allclose(model_family.moved(view(), view(change)), 0, atol=1e-6)


def test_frame_by_frame_shares_the_cells_that_are_context_in_both():
    framewise = view(blocks=[1] * 9)
    assert np.isfinite(model_family.moved(view(), framewise)).all()


def test_models_that_do_not_match_are_refused():
    with pytest.raises(CacheError, match="differ in num_heads: their heads cannot be matched"):
        model_family.moved(view(), view(H=4))


def test_a_line_per_model_and_marks_of_other_kinds():
    views = {"causal": view(), "flipped": view(lambda logits: -logits)}
    effects = model_family.effects(views)
    np.testing.assert_allclose(effects["causal"], -effects["flipped"])
    kinds = model_family.kind_maps(views, Thresholds(anchor_min=0.6, veil_max=0.4), "causal")
    assert kinds[0].differs is None
    assert np.array_equal(kinds[1].differs, kinds[0].labels != kinds[1].labels) and kinds[1].differs.any()
    distances = model_family.moved_maps(views["causal"], {"flipped": views["flipped"]}, "causal")
    lines = model_family.summary(effects, kinds, {one.name: one.values for one in distances}).splitlines()
    assert len(lines) == 2 and "moved by" in lines[1] and "moved by" not in lines[0]
    assert "anchor" in lines[0] and lines[0].lstrip().startswith("causal: s mean +")
