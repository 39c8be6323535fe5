"""Drawings of a layer and of strips at every size, what is absent in them, latent and video frames, words,
single calls."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import executed, synthetic_caches
from helpers.older_caches import older_figure4, older_inference

from experiments.analysis import axes as frame_axes
from experiments.analysis import video_maps as prompt_words
from experiments.analysis.panels import HeadPanel, ProfileMap
from experiments.analysis.reports import call_lines, sink_titles, summary_lines
from experiments.caches import load_cache
from experiments.caches import store as convert
from experiments.caches.files import CacheError
from experiments.caches.formats import check
from experiments.caches.view import Caption, open_call, open_profiles
from experiments.figures import style
from experiments.figures.heads import head_grid, one_head
from experiments.figures.layer import frame_maps
from experiments.figures.profile_maps import profile_heat_maps
from experiments.figures.profile_maps import prompt_words as prompt_words_map
from experiments.figures.style import color_scale

CAPTION = Caption("mean_logit", "pass 0 (t = 1000), query frames 18–20")


def words(figure, tmp_path):
    return executed.words(style.save_svg(figure, tmp_path / "f.svg").read_bytes())


def drawings(H, F, N):
    """Every drawing at a size, by name, each made when called."""
    matrix = synthetic_caches.frame_matrix(H, [F % 3] * (F % 3 > 0) + [3] * (F // 3)).numpy()
    profiles, own_block = matrix[:, -3:].mean(1), {"own block": range(F - 3, F)}
    caption = replace(CAPTION, highlighted_frames=own_block)
    mass, of_probabilities = np.abs(profiles) / 10, replace(CAPTION, quantity="mean_prob")
    one, sinks = HeadPanel("x", 7, 3, profiles[0], np.repeat(profiles[0], 5)), sink_titles(profiles[:, 0])
    layers = [ProfileMap(f"Layer {n}", "mean_logit", profiles) for n in range(N)]
    beside = [ProfileMap("a", "mean_logit", profiles), ProfileMap("b", "mass", mass)]
    return {
        "maps": lambda: frame_maps(matrix, range(F), CAPTION, layer=7),
        "one map": lambda: frame_maps(matrix[:1, -3:], range(F - 3, F), of_probabilities, layer=7, heads=[5]),
        "sinks": lambda: head_grid(profiles, sinks, caption, layer=7),
        "heads": lambda: head_grid(profiles[:8], sinks[:8], caption, layer=7),
        "one": lambda: one_head(one, caption),
        "layers": lambda: profile_heat_maps(layers, "Layers", highlighted_frames=own_block),
        "beside": lambda: profile_heat_maps(beside, "Layer 7", columns=2),
        "words": lambda: prompt_words_map(mass[:, :7], list("abcdefg"), layer=7, subtitle="pass 0"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("H", "F", "N", "name", "shown"),
    [
        (3, 19, 1, "maps", "H2"),
        (3, 19, 1, "one map", "head 5"),
        (3, 19, 1, "heads", "H2"),
        (3, 9, 1, "layers", "Layer 0"),
        pytest.param(12, 72, 30, "layers", "Layer 29", marks=pytest.mark.beside),
        (12, 72, 1, "one", "min@"),
        (12, 21, 1, "sinks", "H11 (sink="),
        (40, 72, 1, "words", "on the whole prompt"),
        (40, 72, 1, "beside", "Attention mass"),
    ],
)
def test_every_size_draws(tmp_path, H, F, N, name, shown):
    assert shown in words(drawings(H, F, N)[name](), tmp_path)


def test_what_is_absent_says_so(tmp_path):
    nothing = np.full((3, 21, 21), np.nan)
    maps = frame_maps(nothing, range(21), CAPTION, layer=7)
    assert "absent: no frame matrix in this cache" in words(maps, tmp_path)
    assert "H0 (sink=N/A)" in words(
        head_grid(nothing[:, 0], sink_titles(nothing[:, 0, 0]), CAPTION, layer=7), tmp_path
    )
    panels = [
        ProfileMap("logits", "mean_logit", np.ones((3, 21))),
        ProfileMap("mass", "mass", None, "why not"),
    ]
    beside = profile_heat_maps(panels, "t")
    assert "absent: mass: why not" in words(beside, tmp_path)
    assert beside.axes[0].get_xlim() == (-0.5, 20.5)  # the absent panel leaves its neighbour's axis alone


def test_colours_are_even_around_zero_for_logits_alone():
    values = np.array([-3.0, np.nan, 1.0])
    assert color_scale(values, "mean_logit") == {"cmap": "RdBu_r", "vmin": -3, "vmax": 3}
    assert color_scale(-values, "mass") == {"cmap": "viridis", "vmin": 0, "vmax": 3}


def test_max_and_min_are_annotated(tmp_path):
    profile = np.full(21, 0.5)
    profile[[4, 9]] = 0.75, 0.125
    text = words(one_head(HeadPanel("x", 7, 0, profile, None), CAPTION), tmp_path)
    assert "max@4: 0.75" in text and "min@9: 0.125" in text


# Latent and video frames


def test_video_frames_of_latent_ones():
    cache = synthetic_caches.layer(F=6, blocks=[6])
    view = frame_axes.choose_view(cache, use_video=True)
    assert view.latent.tolist() == [0] + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4 + [5] * 4  # 21 video frames
    assert view.shown([0, 5]) == [0, 17, 18, 19, 20] and view.latent_frames([0, 1, 4, 5]) == [0, 1, 1, 2]
    np.testing.assert_array_equal(view.spread(np.arange(6.0))[[0, 1, 4, 5, 20]], [0, 1, 1, 2, 5])
    assert view.spread_matrix(np.arange(36.0).reshape(6, 6))[20, 1] == 31
    base = cache | {"orig_num_frames": 21}
    units = [frame_axes.choose_view(*chosen).unit for chosen in ((cache,), (base,), (base, False))]
    assert units == ["latent", "video", "latent"]
    assert len(frame_axes.choose_view(cache, True, 18).latent) == 18  # a last group that is not full
    assert len(frame_axes.choose_view(cache, True, stride=8).latent) == 41
    for wrong in (17, 22):
        with pytest.raises(
            CacheError, match=rf"{wrong} video frames .* latent frames, but this cache has 6; .* 18\.\.21"
        ):
            frame_axes.choose_view(cache, True, wrong)
    with pytest.raises(CacheError, match=r"query frame 21 is not in 0\.\.20, the video frames"):
        view.latent_frames([21])
    with pytest.raises(CacheError, match="no branch 'uncond' in this cache; it has cond alone"):
        frame_axes.select_branch(cache, "uncond")


def test_queries_of_several_blocks_count_where_they_attend():
    cache = synthetic_caches.layer(F=9)
    view, axes = open_profiles(cache), frame_axes.choose_view(cache)
    matrix = cache["full_frame_attention"]
    profile, caption = frame_axes.query_profile(view, axes, [2, 8])
    np.testing.assert_allclose(profile[:, :3], matrix[:, [2, 8], :3].mean(1), rtol=1e-6)
    np.testing.assert_allclose(profile[:, 3:], matrix[:, 8, 3:], rtol=1e-6)  # frame 2 does not see these
    assert caption.subtitle == "pass 0 (t = 1000), query frames 2, 8"
    assert caption.highlighted_frames == {"own block (noise at t = 1000)": [0, 1, 2, 6, 7, 8]}
    stored, _ = frame_axes.query_profile(view, axes)
    np.testing.assert_array_equal(stored, cache["last_block_frame_attention"])


# Layers of an atlas, words, calls


def test_a_layer_out_of_an_atlas(tmp_path, monkeypatch):
    atlas = synthetic_caches.atlas()
    layer = convert.layer_from_atlas(atlas, 5, step=4)
    check(layer)
    assert (layer["layer_index"], layer["step"], layer["is_clean_pass"]) == (5, 4, True)
    torch.testing.assert_close(layer["full_frame_attention"], atlas["frame_logits"][2, 1], equal_nan=True)
    torch.testing.assert_close(
        layer["last_block_frame_attention"], atlas["frame_logits"][2, 1][:, 6:].mean(1)
    )
    base = synthetic_caches.atlas(F=6, blocks=[6], curve=False) | {
        "orig_num_frames": 21,
        "guidance_scale": 6.0,
    }
    layer = convert.layer_from_atlas(base, 0)
    assert (layer["last_block_query_frames"], layer["orig_num_frames"]) == ([3, 4, 5], 21)
    torch.testing.assert_close(layer["last_block_frame_attention"], base["frame_logits"][0, 0][:, 3:].mean(1))


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
    found, place = prompt_words.words_of(tokens)
    assert found == expected and len(place) == len(tokens)


def test_mass_of_a_word_is_that_of_its_tokens():
    cache = synthetic_caches.atlas()
    cache |= {"cross_mass": torch.rand(3, 2, 3, 9, 3) / 9, "cross_tokens": ["▁cine", "matic", "▁sky"]}
    found, mass = prompt_words.word_mass(cache, open_profiles(cache, step=4), 5)
    tokens = cache["cross_mass"][2, 1][:, 6:].mean(1)
    assert found == ["cinematic", "sky"]
    np.testing.assert_allclose(mass, torch.stack([tokens[:, :2].sum(1), tokens[:, 2]], 1), rtol=1e-6)
    assert (
        prompt_words.word_mass(synthetic_caches.atlas(), open_profiles(synthetic_caches.atlas()), 5) is None
    )


def test_calls_of_older_files(tmp_path):
    torch.save(older_inference([1, 3, 3], passes=5), tmp_path / "c.pt")
    cache = load_cache(tmp_path / "c.pt", expect=("inference", "figure4"))
    assert "  29: layer 4, pass clean (t = 0), queries of frames 4–6 on keys of frames 0–6" in call_lines(
        cache
    )
    assert "  12: layer 2, pass 1, queries of frames 1–3 on keys of frames 0–3" in call_lines(cache)
    view = open_call(cache, 12)
    np.testing.assert_allclose(view.frame_profile(2), [[1 / 20] * 4 + [np.nan] * 3] * 3, rtol=1e-6)
    assert "  max: frame 0, 0.050000\n" in summary_lines(view, 1) and "key frames: 1.0000" in summary_lines(
        view, 1
    )
    torch.save(older_figure4(F=19, claimed=21), tmp_path / "f.pt")
    view = open_call(load_cache(tmp_path / "f.pt"), 0)
    assert (view.num_frames, view.query_frames, view.quantity) == (19, (16, 17, 18), "mean_prob")
    assert "key frames: 1.0000" in summary_lines(view, 0)
