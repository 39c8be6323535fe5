"""Tables as text, and what a view and a cache hold as facts and rows."""

import numpy as np
import torch
from helpers import synthetic_caches
from helpers.older_caches import older_figure4, older_inference

from experiments.analysis.tables import calls, table
from experiments.caches import load_cache
from experiments.caches.view import open_call


def test_a_table_is_aligned_and_numbers_keep_four_digits():
    rows = [
        {"name": "a", "n": 3, "x": 10.25},
        {"name": "long", "x": float("nan")},
        {"name": "b", "y": 0.00012345},
    ]
    assert table(rows).split("\n") == [
        "name  n       x          y",
        "a     3  10.250",
        "long        N/A",
        "b                0.0001234",
    ]
    assert table([]) == "nothing to show" and table([], "absent") == "absent"
    assert table({"a": 1.5, "long": "words"}) == "a     1.500\nlong  words"
    assert table([np.float32(2)] and [{"x": np.float32(2), "i": np.int64(7)}]) == "    x  i\n2.000  7"


def test_calls_of_an_atlas_and_of_older_files(tmp_path):
    rows = calls(synthetic_caches.atlas(layers=(0, 1, 5), steps=(0, 4)))
    assert rows[1] == {"call": "3–5", "layers": "0–1, 5", "pass": "clean pass (t = 0)"}
    torch.save(older_inference([1, 3, 3], passes=5), tmp_path / "c.pt")
    cache = load_cache(tmp_path / "c.pt", expect=("inference", "figure4"))
    rows = calls(cache)
    assert rows[29] == {"call": 29, "layer": 4, "pass": "clean (t = 0)", "queries": "4–6", "keys": "0–6"}
    assert rows[12] == {"call": 12, "layer": 2, "pass": "1", "queries": "1–3", "keys": "0–3"}
    np.testing.assert_allclose(
        open_call(cache, 12).frame_profile(2), [[1 / 20] * 4 + [np.nan] * 3] * 3, rtol=1e-6
    )
    torch.save(older_figure4(F=19, claimed=21), tmp_path / "f.pt")
    view = open_call(load_cache(tmp_path / "f.pt"), 0)
    assert (view.num_frames, view.query_frames, view.quantity) == (19, (16, 17, 18), "mean_prob")
