"""Published data, and curves matched to heads: planted ones and the real model's."""

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import synthetic_caches

from experiments import match_curve
from experiments.analysis import published
from experiments.analysis.first_frame import first_frame_effect
from experiments.analysis.published import Curve, compared_frames, match_rows, rank_heads
from experiments.caches.files import CacheError
from experiments.caches.view import open_passes, open_profiles

CSV = ROOT / published.FOLDER / published.FIGURE4_CSV
REAL = {"model": published.FIGURE4_MODEL}


def test_a_planted_head_is_found_whatever_noise_and_clipped_points_are():
    """A three-layer atlas of noise with a curve in one head of one pass, rescaled: r is 1, the RMS is not."""
    cache, values = synthetic_caches.atlas(layers=(0, 2, 5), curve=False), np.sin(np.arange(9.0))
    cache["frame_logits"][1, 1, 1, 6:] = torch.from_numpy(2 * values + 1).float()
    views, spoiled, clipped = open_passes(cache, open_profiles(cache)), values.copy(), np.arange(9) == 2
    spoiled[[2, 4, 6, 7, 8]] = 50, np.nan, -50, 70, 30  # cut off, absent, and the own block
    curve = Curve(spoiled, clipped)
    assert compared_frames(views[0], curve) == [0, 1, 3, 5]
    ranking = rank_heads(views, curve)
    best = {"layer": 2, "number": 1, "pass": 4, "rank": 1, "r": pytest.approx(1)}
    best["RMS"] = pytest.approx(np.sqrt(((values[[0, 1, 3, 5]] + 1) ** 2).mean()), rel=1e-6)
    assert len(ranking) == 2 * 3 * 3 and ranking[0] == best
    rows = match_rows(views, [(2, 1, "c"), (3, 1, "c")], {"c": curve}, 4)
    assert rows[0]["rank"] == 1 and "rank" not in rows[1] and rows[-1]["rank"] == 3
    assert rank_heads(views, Curve(spoiled, clipped & False))[0]["r"] < 0.99


def test_what_cannot_be_compared_says_why():
    for cache, quantity, path in (
        (synthetic_caches.atlas(F=21), None, CSV),  # of another model
        (synthetic_caches.atlas() | REAL, None, CSV),  # of other frames
        (synthetic_caches.atlas(F=21) | REAL, "mass", CSV),
        (synthetic_caches.atlas(F=21, blocks=[21]) | REAL, None, CSV),  # its queries see no earlier block
        (synthetic_caches.atlas(), None, None),
        (synthetic_caches.atlas(), None, "nowhere.csv"),
    ):
        view = open_profiles(cache, quantity=quantity)
        curves, why = published.curves_for(view, path, published.FIGURE4_MODEL)
        assert not curves and why.startswith("Not compared")


def test_other_curves(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("key_frame,mine\n9,0.4\n0,5.1\n3,\n")  # some frames, as in the README
    (curve,) = published.read_curves(path, 21).values()
    assert len(curve.values) == 21 and np.flatnonzero(np.isfinite(curve.values)).tolist() == [0, 9]
    wrong = ("frame,m\n0,1\n", "key_frame,m\n1,2\n1,1\n", "key_frame,m\n21,1\n", "", "key_frame,m\n0,x")
    for text in wrong:
        path.write_text(text)
        with pytest.raises(CacheError, match=r"a\.csv is not a table of curves"):
            published.read_curves(path, 21)
    path.write_text("1,2\n3,x\n")
    for read in (lambda: published.read_labels(path), lambda: published.read_curves(tmp_path / "c.csv")):
        with pytest.raises(CacheError, match="csv"):
            read()


def test_the_matching_script(capsys):
    match_curve.run(["--cache_path", "cache/published/self_forcing_dmd_castle_21f.pt"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name, layer, head in (("L1H1", "1", "1"), ("L5H10", "5", "10")):
        (row,) = [row for row in rows if row[:2] == [name, "shown"]]
        assert row[2:4] == [layer, head] and float(row[5]) >= 0.98 and row[7:9] == ["1", "360"]


def test_heads_worth_a_look():
    own = open_profiles(synthetic_caches.atlas(F=12))
    effect = first_frame_effect(own.frame_matrices(), own.block_sizes).effect
    layer, head = np.unravel_index(effect.argmax(), effect.shape)
    assert published.heads_of(own, "auto")[0] == (own.layers[layer], head, f"L{own.layers[layer]}H{head}")
    assert published.heads_of(own, [[1, 2, "x"]]) == ((1, 2, "x"),)
    with pytest.raises(CacheError, match='HEADS must be "auto"'):
        published.heads_of(own, "all")
