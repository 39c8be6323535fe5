"""One view of all formats: the same numbers whatever they were stored as; frames against float64."""

import numpy as np
import pytest
import torch
from helpers import synthetic_caches
from helpers.synthetic_caches import pass_of, reference_means
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError
from experiments.caches.formats import AVERAGE
from experiments.caches.frames import averages_of_tokens
from experiments.caches.store import layer_from_atlas, one_layer
from experiments.caches.view import open_call, open_passes, open_profiles


def reference(entry, S, keys, F, mass=False):
    """[H, Fq, F] in float64 straight from the tokens."""
    tokens = (entry["attn_logits"] if "attn_logits" in entry else entry["attn_weights"])[0].double()
    tokens = S * (tokens.softmax(-1) if "attn_logits" in entry else tokens) if mass else tokens
    full = np.full((len(tokens), tokens.shape[1] // S, F), np.nan)
    full[..., keys] = reference_means(tokens, S)
    return full


@st.composite
def windows(draw):
    """Blocks, and the key frames of the last one: its own and some before."""
    blocks = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    past = draw(st.sets(st.integers(0, sum(blocks) - 1)))
    return blocks, sorted(past | set(range(sum(blocks) - blocks[-1], sum(blocks))))


@given(window=windows(), H=st.integers(1, 3), S=st.integers(1, 5), is_logits=st.booleans())
@settings(max_examples=30, deadline=None)
def test_token_matrices_against_float64(window, H, S, is_logits):
    blocks, keys = window
    F = sum(blocks)
    cache = synthetic_caches.figure4((1, 5), F, H, S, blocks, keys, is_logits=is_logits)
    for quantity in ("mean_logit", "mass", "mean_prob")[0 if is_logits else 1 :]:
        view = open_profiles(cache, quantity=quantity)
        expected = reference(cache["attention_weights"][1], S, keys, F, mass=quantity != "mean_logit")
        expected = expected / S if quantity == "mean_prob" else expected
        np.testing.assert_allclose(view.frame_matrix(5), expected, atol=2e-6)
        np.testing.assert_allclose(view.frame_profile(5), expected.mean(1), atol=2e-6)
        assert view.query_frames == view.matrix_rows == tuple(range(F - blocks[-1], F))
        assert view.key_frames == tuple(keys)
        sums = view.key_curve(5).reshape(H, len(keys), S).sum(-1) / (1 if quantity == "mass" else S)
        np.testing.assert_allclose(sums, view.frame_profile(5)[:, keys], atol=2e-6)
    assert open_profiles(cache).quantity == ("mean_logit" if is_logits else "mass")


def test_granularities_agree():
    by_token, by_key, by_frame = (
        open_profiles(synthetic_caches.figure4(H=3, S=5, granularity=g)) for g in ("token", "key", "frame")
    )
    for view in (by_key, by_frame):
        np.testing.assert_allclose(view.frame_matrix(1), by_token.frame_matrix(1), atol=1e-6)
    np.testing.assert_allclose(by_key.key_curve(1), by_token.key_curve(1), atol=1e-6)
    assert by_frame.key_curve(1) is None
    without_frames = synthetic_caches.figure4(H=3, S=5, granularity="key")
    for entry in without_frames["attention_weights"]:
        del entry["frame_logits"], entry["frame_mass"]
    curve_only = open_profiles(without_frames)
    np.testing.assert_allclose(curve_only.frame_profile(1), by_token.frame_profile(1), atol=1e-6)
    assert curve_only.frame_matrix(1) is None and curve_only.frame_matrices() is None
    with pytest.raises(CacheError, match="holds no mass; it has a key curve alone"):
        open_profiles(without_frames, quantity="mass").frame_profile(1)


def test_inference_window_passes_and_calls():
    window = [0, 4, 5, 6, 7, 8]
    cache = synthetic_caches.inference(steps=(0, 4), window=window)
    noisy, clean = open_passes(cache, open_profiles(cache))
    assert (noisy.step, noisy.timestep, clean.step, clean.timestep) == (0, 1000.0, 4, 0.0)
    for index, (layer, view) in enumerate(((1, noisy), (5, noisy), (1, clean), (5, clean))):
        expected = reference(cache["attention_weights"][index], 5, window, 9, mass=True)
        np.testing.assert_allclose(view.frame_matrix(layer), expected, atol=1e-6)
        one = open_call(cache, index)
        assert (one.layers, one.step, one.quantity) == ((layer,), view.step, "mean_prob")
        np.testing.assert_allclose(one.frame_matrix(layer), expected / 5, atol=1e-7)
    assert np.isnan(noisy.frame_profile(1)).any(0).tolist() == [False, True, True, True] + [False] * 5
    captured = [open_profiles(synthetic_caches.inference(window=w)) for w in (window, None, [6, 7, 8])]
    assert [view.captured for view in captured] == ["window", "full", "within block"]
    for index in (-1, 4):
        with pytest.raises(CacheError, match=rf"call {index} is not in the calls of .*; it has 0\.\.3"):
            open_call(cache, index)
    with pytest.raises(CacheError, match="probabilities, no mean_logit"):
        open_call(cache, 0, "mean_logit")
    with pytest.raises(CacheError, match="pass 2 is not in this cache; it has 0, 4"):
        open_profiles(cache, step=2)
    atlas = synthetic_caches.atlas(layers=(0, 1, 5), steps=(0, 4))
    assert [open_call(atlas, i, "mass").layers for i in (2, 3, 4)] == [(5,), (0,), (1,)]
    assert [open_call(atlas, i, "mass").step for i in (2, 3, 5)] == [0, 4, 4]
    with pytest.raises(CacheError, match=r"call 6 is not in the layers and passes of .* 0\.\.5"):
        open_call(atlas, 6)


def test_atlas():
    cache = synthetic_caches.atlas()
    noisy, clean = open_passes(cache, open_profiles(cache))
    assert noisy.layers == (0, 1, 5) and (noisy.step, clean.step) == (0, 4)
    np.testing.assert_array_equal(clean.frame_matrix(5), cache["frame_logits"][2, 1])
    np.testing.assert_allclose(noisy.frame_profile(1), cache["frame_logits"][1, 0][:, 6:].mean(1), atol=1e-6)
    np.testing.assert_array_equal(noisy.profiles()[1], noisy.frame_profile(1))
    means = noisy.key_curve(1).reshape(3, 9, 5).mean(-1)
    np.testing.assert_allclose(means, noisy.frame_profile(1), atol=2e-3)
    mass, mean_prob = (open_profiles(cache, 0, quantity) for quantity in ("mass", "mean_prob"))
    np.testing.assert_allclose(np.nansum(mass.frame_matrix(0), -1), 1, atol=1e-5)
    np.testing.assert_allclose(mean_prob.profiles() * 5, mass.profiles(), rtol=1e-6)
    assert mass.key_curve(0) is None
    with pytest.raises(CacheError, match="layer 2 is not in this cache; it has 0, 1, 5"):
        noisy.frame_profile(2)
    np.testing.assert_array_equal(open_profiles(one_layer(cache, 5)).profiles()[0], noisy.profiles()[2])


@pytest.mark.parametrize(("done", "block", "step"), [(2, 2, 0), (None, 1, 4)])
def test_the_last_block_that_was_done_and_has_the_pass(done, block, step):
    cache = synthetic_caches.atlas(curve=False) | ({"partial": True, "blocks_done": done} if done else {})
    for name in ("frame_logits", "frame_mass"):
        cache[name][:, :, :, 3 * block :] = torch.nan
    view, last = open_profiles(cache, step), tuple(range(3 * block - 3, 3 * block))
    layer = open_profiles(layer_from_atlas(cache, 5, step))
    assert layer.query_frames == view.query_frames == last
    np.testing.assert_array_equal(layer.frame_profile(5), view.frame_profile(5))
    np.testing.assert_allclose(layer.frame_profile(5), layer.frame_matrix(5)[:, last].mean(1), atol=1e-6)
    assert ("partial: the run was stopped after 2 of 3 blocks" in " ".join(view.notes)) == bool(done)


def test_atlas_of_published_profiles_alone(tmp_path):
    """Only the last block's mean is known: profiles yes, matrix and mass no."""
    of_file = {"weights": "published", "weights_file": None, "weights_sha256": None}
    cache = synthetic_caches.common("atlas", F=9, H=3, **of_file)
    exact = torch.randn(2, 1, 3, 9)
    cache |= {"layers": [0, 1], "pass_timesteps": [1000.0], "last_block_frame_logits": exact}
    save_cache(tmp_path / "c.pt", cache)
    view = open_profiles(load_cache(tmp_path / "c.pt"))
    np.testing.assert_array_equal(view.frame_profile(1), exact[1, 0])
    assert (view.frame_matrix(1), view.key_curve(1), view.matrix_rows) == (None, None, ())
    layer = open_profiles(layer_from_atlas(cache, 1))
    np.testing.assert_array_equal(layer.frame_profile(1), exact[1, 0])
    assert np.isnan(layer.frame_matrix(1)).all()
    with pytest.raises(CacheError, match="holds no mass"):
        open_profiles(cache, quantity="mass")
    coarse = synthetic_caches.frame_matrix(3, [3, 3, 3]).expand(2, 1, 3, 9, 9)
    cache["frame_logits"] = coarse  # not used for profiles
    np.testing.assert_array_equal(open_profiles(cache).frame_profile(1), exact[1, 0])
    np.testing.assert_array_equal(open_profiles(cache).frame_matrix(1), coarse[1, 0])


@given(slots=st.lists(st.integers(-1, 3), min_size=1, max_size=6), S=st.integers(1, 4), mean=st.booleans())
@settings(max_examples=40, deadline=None)
def test_averages_among_tokens(slots, S, mean):
    """A slot of S tokens for each average, in their order."""
    curves = torch.randn(2, 3, len(slots) * S, generator=torch.Generator().manual_seed(0))
    expected = [x.double() for x, frame in zip(curves.split(S, -1), slots, strict=True) if frame == AVERAGE]
    if expected:
        frame, token = torch.tensor(slots).repeat_interleave(S), torch.arange(S).repeat(len(slots))
        found = averages_of_tokens(curves, frame, token, mean)
        values = torch.stack([x.mean(-1) if mean else x.sum(-1) for x in expected], -1)
        np.testing.assert_allclose(found, values, atol=1e-6)


def test_averages_are_columns_after_the_frames():
    """Slots of the last block: two averages, then its own frames."""
    cache = synthetic_caches.atlas(layers=(1,), steps=(0,), curve=False)
    slots = torch.full((1, 3, 5), -9).int()
    for block in range(3):
        slots[0, block, 2:] = torch.arange(3 * block, 3 * block + 3)
    slots[0, 2, :2] = slots[0, 1, 0] = AVERAGE
    absent = (slots == -9).repeat_interleave(3, 1)[:, None, None]
    values = torch.randn(1, 1, 3, 9, 5).masked_fill(absent, torch.nan)
    cache |= {"slot_frame": slots, "slot_logits": values, "schema_version": 2}
    for view in (open_profiles(cache), open_profiles(layer_from_atlas(cache, 1))):
        assert view.num_averages == view.caption.averages == 2
        gone = view.key_matrix(1)[..., 9:]
        np.testing.assert_array_equal(gone[:, 6:], values[0, 0, :, 6:, :2])
        np.testing.assert_array_equal(gone[:, 3:6, 0], values[0, 0, :, 3:6, 0])
        assert np.isnan(gone[:, :3]).all() and np.isnan(gone[:, 3:6, 1]).all()
        np.testing.assert_allclose(view.key_profile(1)[:, 9:], values[0, 0, :, 6:, :2].mean(1), atol=1e-6)
        np.testing.assert_array_equal(view.key_profiles()[0, :, :9], view.frame_profile(1))


def test_noise_is_told_from_context():
    noisy, clean = (open_profiles(synthetic_caches.figure4(S=4, H=2, step=s)) for s in (0, 4))
    assert noisy.noise_frames == noisy.own_block == (18, 19, 20) and clean.noise_frames == ()
    assert noisy.context_frames == clean.context_frames == tuple(range(18))
    caption = noisy.caption
    assert caption.subtitle == "pass 0 (t = 1000), query frames 18–20" and caption.quantity == "mean_logit"
    assert caption.highlighted_frames == {"own block (noise at t = 1000)": (18, 19, 20)}
    assert not clean.caption.highlighted_frames and clean.pass_label == "clean pass (t = 0)"
    unknown = open_profiles(synthetic_caches.layer() | dict.fromkeys(pass_of()))
    assert (unknown.pass_label, unknown.noise_frames) == ("pass not recorded", ())
