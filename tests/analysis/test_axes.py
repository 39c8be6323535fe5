"""Axes of figures: latent and video frames, queries of several blocks; words of prompts."""

import numpy as np
import pytest
from helpers import synthetic_caches

from experiments.analysis import axes, video_maps
from experiments.caches.files import CacheError
from experiments.caches.view import open_profiles


def test_video_frames_of_latent_ones():
    cache = synthetic_caches.layer(F=6, blocks=[6])
    view = axes.choose_view(cache, use_video=True)
    assert view.latent.tolist() == [0] + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4 + [5] * 4  # 21 video frames
    assert view.shown([0, 5]) == [0, 17, 18, 19, 20] and view.latent_frames([0, 1, 4, 5]) == [0, 1, 1, 2]
    np.testing.assert_array_equal(view.spread(np.arange(6.0))[[0, 1, 4, 5, 20]], [0, 1, 1, 2, 5])
    assert view.spread_matrix(np.arange(36.0).reshape(6, 6))[20, 1] == 31
    base = cache | {"orig_num_frames": 21}
    units = [axes.choose_view(*chosen).unit for chosen in ((cache,), (base,), (base, False))]
    assert units == ["latent", "video", "latent"]
    assert len(axes.choose_view(cache, True, 18).latent) == 18  # a last group that is not full
    assert len(axes.choose_view(cache, True, stride=8).latent) == 41
    for wrong in (17, 22):
        with pytest.raises(
            CacheError, match=rf"{wrong} video frames .* latent frames, but this cache has 6; .* 18\.\.21"
        ):
            axes.choose_view(cache, True, wrong)
    with pytest.raises(CacheError, match=r"query frame 21 is not in 0\.\.20, the video frames"):
        view.latent_frames([21])
    with pytest.raises(CacheError, match="no branch 'uncond' in this cache; it has cond alone"):
        axes.select_branch(cache, "uncond")


def test_queries_of_several_blocks_count_where_they_attend():
    cache = synthetic_caches.layer(F=9)
    view, frames = open_profiles(cache), axes.choose_view(cache)
    matrix = cache["full_frame_attention"]
    profile, caption = axes.query_profile(view, frames, [2, 8])
    np.testing.assert_allclose(profile[:, :3], matrix[:, [2, 8], :3].mean(1), rtol=1e-6)
    np.testing.assert_allclose(profile[:, 3:], matrix[:, 8, 3:], rtol=1e-6)  # frame 2 does not see these
    assert caption.subtitle == "pass 0 (t = 1000), query frames 2, 8"
    assert caption.highlighted_frames == {"own block (noise at t = 1000)": [0, 1, 2, 6, 7, 8]}
    stored, _ = axes.query_profile(view, frames)
    np.testing.assert_array_equal(stored, cache["last_block_frame_attention"])


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["▁a", "▁cine", "matic", "▁sky", ",", "</s>"], ["a", "cinematic", "sky,", "</s>"]),
        (["x", "y"], ["xy"]),
        (["▁", "red", "</s>", "<pad>", "z"], ["red", "</s>", "<pad>", "z"]),
        ([], []),
    ],
)
def test_words_of_tokens(tokens, expected):
    found, place = video_maps.words_of(tokens)
    assert found == expected and len(place) == len(tokens)
