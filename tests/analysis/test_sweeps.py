"""Heads over a sweep: mean, spread and order over atlases; the notebook that shows them."""

import numpy as np
import pytest
from conftest import ROOT
from helpers import executed, synthetic_caches

from experiments.analysis import sweeps
from experiments.caches import save_cache
from experiments.caches.files import CacheError


def test_mean_spread_and_order():
    values = np.array([[[1.0, 2.0], [3.0, -4.0]], [[3.0, 2.0], [5.0, -8.0]]])  # two atlases, 2 x 2 heads
    mean, spread = sweeps.mean_and_spread(values)
    np.testing.assert_allclose(mean, [[2, 2], [4, -6]])
    np.testing.assert_allclose(spread, np.sqrt(2) * np.array([[1, 0], [1, 2]]))
    np.testing.assert_allclose(sweeps.stability(values), [[2**0.5, np.nan], [8**0.5, 3 / 2**0.5]])
    reversed_order = np.stack([values[0], -values[0]])
    np.testing.assert_allclose(sweeps.rank_correlations(reversed_order), [[1, -1], [-1, 1]])


def test_the_published_atlases_keep_the_order_of_heads(tmp_path):
    views, note = sweeps.open_sweep(tmp_path / "none", ROOT / "cache/published")
    assert "published" in note and sweeps.MAKE in note and len(views) == 2
    measures = sweeps.measures_of(views)
    assert measures["effect"].shape == measures["delta"].shape == (2, 30, 12)
    eagle = list(views).index("self_forcing_dmd_eagle_21f")
    assert measures["effect"][eagle].mean() == pytest.approx(0.64, abs=0.005)  # as the README's table
    assert sweeps.rank_correlations(measures["effect"])[0, 1] > 0.8
    profiles = sweeps.head_profiles(views, 1, 1)
    np.testing.assert_array_equal(profiles[0], next(iter(views.values())).frame_profile(1)[1])


def test_what_is_no_sweep_is_one_line(tmp_path):
    save_cache(tmp_path / "a.pt", synthetic_caches.atlas())
    with pytest.raises(CacheError, match="has 1 atlases, a sweep needs two"):
        sweeps.open_sweep(tmp_path, tmp_path)
    save_cache(tmp_path / "b.pt", synthetic_caches.atlas(H=2))
    with pytest.raises(CacheError, match="b and a are not of one sweep: num_heads 2 and 3"):
        sweeps.open_sweep(tmp_path, tmp_path)


def test_the_notebook_over_a_folder(tmp_path):
    for name in ("a", "b", "c"):
        save_cache(tmp_path / f"{name}.pt", synthetic_caches.atlas())
    printed = executed.run("sweep.ipynb", tmp_path, SWEEP_DIR=str(tmp_path), HEADS=[[1, 2, "L1H2"]])
    assert "3 atlases: a, b, c\n" in printed and "rank correlation over heads 1.000" in printed
    drawn = executed.figures(tmp_path)
    assert drawn.keys() == {"sweep_measures.svg", "sweep_figure4.svg"}
    text = executed.words(drawn["sweep_figure4.svg"])
    assert "L1H2: layer 1, head 2" in text and "over 3 atlases" in text
