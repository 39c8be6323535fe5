"""Axes of figures, words of prompts, tables as text, and what was captured as rows."""

import numpy as np
import pytest
from helpers import synthetic_caches

from experiments.analysis import axes, video_maps
from experiments.analysis.tables import table
from experiments.caches.files import CacheError
from experiments.caches.view import open_profiles


def test_video_frames_of_latent_ones():
    cache = synthetic_caches.layer(F=6, blocks=[6])
    view = axes.choose_view(cache, use_video=True)
    assert view.latent.tolist() == [0] + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4 + [5] * 4  # 21 video frames
    assert view.shown([0, 5]) == [0, 17, 18, 19, 20]
    assert view.spread(np.arange(6.0)).tolist() == view.latent.tolist()
    base = cache | {"orig_num_frames": 21}
    units = [axes.choose_view(*chosen).unit for chosen in ((cache,), (base,), (base, False))]
    assert units == ["latent", "video", "latent"]
    assert len(axes.choose_view(cache, True, 18).latent) == 18  # a last group that is not full
    calls = [(axes.choose_view, cache, True, 17), (axes.choose_view, cache, True, 22)]
    calls += [(axes.query_profile, open_profiles(cache), view, [21]), (axes.select_branch, cache, "uncond")]
    for wrong, *given in calls:
        with pytest.raises(CacheError):
            wrong(*given)


def test_queries_of_several_blocks_count_where_they_attend():
    cache = synthetic_caches.layer(F=9)
    view, frames = open_profiles(cache), axes.choose_view(cache)
    matrix = cache["full_frame_attention"]
    profile, caption = axes.query_profile(view, frames, [2, 8])
    np.testing.assert_allclose(profile[:, :3], matrix[:, [2, 8], :3].mean(1), rtol=1e-6)
    np.testing.assert_allclose(profile[:, 3:], matrix[:, 8, 3:], rtol=1e-6)  # frame 2 does not see these
    assert caption.highlighted_frames == {"own block (noise at t = 1000)": [0, 1, 2, 6, 7, 8]}


def test_words_of_tokens():
    tokens = ["▁", "red", "▁cine", "matic", "▁sky", ",", "</s>", "<pad>", "z"]
    words, place = video_maps.words_of(tokens)
    assert words == ["red", "cinematic", "sky,", "</s>", "<pad>", "z"] and len(place) == len(tokens)


def test_a_table_is_aligned_and_numbers_keep_four_digits():
    rows = [
        {"name": "a", "n": np.int64(3), "x": 10.25},
        {"name": "long", "x": float("nan")},
        {"y": 0.00012345},
    ]
    assert table(rows).split("\n") == [
        "name  n       x          y",
        "a     3  10.250",
        "long        N/A",
        "                 0.0001234",
    ]
    assert table([], "absent") == "absent"
    assert table({"a": 1.5, "long": "words"}) == "a     1.500\nlong  words"
