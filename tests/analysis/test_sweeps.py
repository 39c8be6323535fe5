"""Heads over a sweep of prompts and seeds, and over checkpoints of a family."""

import numpy as np
import pytest
from conftest import ROOT
from helpers import synthetic_caches

from experiments.analysis import sweeps
from experiments.analysis.first_frame import effects_of
from experiments.analysis.panels import HeadMap
from experiments.analysis.taxonomy import Thresholds
from experiments.caches import save_cache
from experiments.caches.files import CacheError
from experiments.caches.view import open_profiles


def test_mean_spread_and_order():
    values = np.array([[[1.0, 2.0], [3.0, -4.0]], [[3.0, 2.0], [5.0, -8.0]]])  # two atlases, 2 x 2 heads
    mean, spread, ratio = (one.values for one in sweeps.sweep_maps({"effect": values}))
    np.testing.assert_allclose(mean, [[2, 2], [4, -6]])
    np.testing.assert_allclose(spread, np.sqrt(2) * np.array([[1, 0], [1, 2]]))
    np.testing.assert_allclose(ratio, np.log10([[2**0.5, np.nan], [8**0.5, 3 / 2**0.5]]))
    (row,) = sweeps.sweep_rows({"effect": np.stack([values[0], -values[0]])})
    assert (row["|mean| above spread"], row["pairs"]) == (0, 1) and row["least"] == pytest.approx(-1)


def test_the_published_atlases_keep_the_order_of_heads_and_others_are_no_sweep(tmp_path):
    views, note = sweeps.open_sweep(tmp_path / "none", ROOT / "cache/published")
    effect = sweeps.measures_of(views)["effect"]
    assert "published" in note and sweeps.rank_correlations(effect)[0, 1] > 0.8
    save_cache(tmp_path / "a.pt", synthetic_caches.atlas())
    with pytest.raises(CacheError, match="sweep"):
        sweeps.open_sweep(tmp_path, tmp_path)
    save_cache(tmp_path / "b.pt", synthetic_caches.atlas(H=2))
    with pytest.raises(CacheError, match="sweep"):
        sweeps.open_sweep(tmp_path, tmp_path)


def view(change=None):
    cache = synthetic_caches.atlas(F=9, blocks=[3, 3, 3], curve=False)
    if change is not None:
        cache["frame_logits"] = change(cache["frame_logits"].clone())
    return open_profiles(cache, 0, "mean_logit")


def test_a_move_is_its_root_mean_square_and_other_kinds_are_marked():
    """One context cell of a row of three moves by 3: without the row's mean it is 2, −1, −1."""

    def change(logits):
        logits[0, 0, 1, 3:6, 1] += 3.0  # the second block's rows, key frame 1
        return logits

    expected = np.zeros((3, 3))
    expected[0, 1] = np.sqrt(3 * (4 + 1 + 1) / (3 * 3 + 3 * 6))  # over the 27 context cells
    np.testing.assert_allclose(sweeps.moved(view(), view(change)), expected, atol=1e-6)
    views = {"causal": view(), "flipped": view(lambda logits: -logits)}
    effects = effects_of(views)
    np.testing.assert_allclose(effects["causal"], -effects["flipped"])
    kinds = sweeps.kind_maps(views, Thresholds(anchor_min=0.6, veil_max=0.4), "causal")
    assert kinds[0].differs is None and kinds[1].differs.any()
    far = sweeps.moved(views["causal"], views["flipped"])
    distances = [HeadMap("flipped", "flipped", "logits", "sequential", far)]
    rows = sweeps.model_rows(effects, kinds, distances)
    assert "moved by" not in rows[0] and rows[1]["moved by"] == pytest.approx(distances[0].values.mean())
    assert sum(rows[0][kind] for kind in ("anchor", "wave", "veil")) == rows[0]["heads"] == 9
