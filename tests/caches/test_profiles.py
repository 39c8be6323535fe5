"""One view of all formats: the same numbers whatever they were stored as, absent frames absent,
honest labels.
"""

import numpy as np
import pytest
import torch
from helpers import synthetic_caches

from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError
from experiments.caches.store import layer_from_atlas
from experiments.caches.view import open_call, open_profiles


def reference(entry, S, keys, F, mass=False):
    """[H, Fq, F] in float64 straight from the tokens."""
    tokens = entry["attn_logits"][0].double() if "attn_logits" in entry else entry["attn_weights"][0].double()
    if mass and "attn_logits" in entry:
        tokens = tokens.softmax(-1)
    H, Lq, Lk = tokens.shape
    frames = tokens.reshape(H, Lq // S, S, Lk // S, S)
    full = np.full((H, Lq // S, F), np.nan)
    full[..., keys] = (frames.sum(4).mean(2) if mass else frames.mean((2, 4))).numpy()
    return full


@pytest.mark.parametrize("H,S,F,blocks,keys", [
    (3, 5, 9, [3, 3, 3], None), (2, 4, 7, [1, 3, 3], None), (3, 1, 4, [1, 1, 1, 1], None),
    (3, 5, 12, [3, 3, 3, 3], [0, 7, 8, 9, 10, 11]),
])  # fmt: skip
@pytest.mark.parametrize("is_logits", [True, False])
def test_figure4_tokens(H, S, F, blocks, keys, is_logits):
    cache = synthetic_caches.figure4(H=H, S=S, F=F, blocks=blocks, keys=keys, is_logits=is_logits)
    view = open_profiles(cache)
    keys = keys or list(range(F))
    expected = reference(cache["attention_weights"][1], S, keys, F, mass=not is_logits)
    np.testing.assert_allclose(view.frame_matrix(5), expected, atol=2e-6)
    np.testing.assert_allclose(view.frame_profile(5), expected.mean(1), atol=2e-6)
    assert view.quantity == ("mean_logit" if is_logits else "mass")
    assert view.query_frames == view.matrix_rows == tuple(range(F - blocks[-1], F))
    curve = view.key_curve(5)  # its frames, put in place, are the profile
    assert curve.shape == (H, len(keys) * S)
    sums = curve.reshape(H, len(keys), S).sum(-1) / (S if is_logits else 1)
    np.testing.assert_allclose(sums, view.frame_profile(5)[:, keys], atol=2e-6)
    if not is_logits:
        np.testing.assert_allclose(np.nansum(view.frame_matrix(5), -1), 1, atol=1e-5)


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
    assert curve_only.frame_matrix(1) is None
    with pytest.raises(CacheError, match="holds no mass; it has a key curve alone"):
        open_profiles(without_frames, quantity="mass").frame_profile(1)


def test_quantities():
    logits, S = synthetic_caches.figure4(H=3, S=5, F=9), 5
    mass = reference(logits["attention_weights"][0], S, list(range(9)), 9, mass=True)
    frame = synthetic_caches.figure4(H=3, S=5, F=9, granularity="frame")
    for cache in (logits, synthetic_caches.figure4(H=3, S=5, F=9, is_logits=False), frame):
        np.testing.assert_allclose(open_profiles(cache, quantity="mass").frame_matrix(1), mass, atol=1e-6)
        np.testing.assert_allclose(
            open_profiles(cache, quantity="mean_prob").frame_matrix(1), mass / S, atol=1e-7
        )
    with pytest.raises(CacheError, match="probabilities, no mean_logit"):
        open_profiles(synthetic_caches.inference(), quantity="mean_logit").frame_profile(1)


def test_layer():
    cache = synthetic_caches.layer(N=3, F=9, H=3)
    view = open_profiles(cache)
    assert (view.layers, view.matrix_rows, view.query_frames) == ((3,), tuple(range(9)), (6, 7, 8))
    np.testing.assert_array_equal(view.frame_matrix(3), cache["full_frame_attention"])
    np.testing.assert_allclose(view.frame_profile(3), view.frame_matrix(3)[:, 6:].mean(1), atol=1e-6)
    assert view.key_curve(3) is None
    with pytest.raises(CacheError, match="holds no mass; it has mean_logit"):
        open_profiles(cache, quantity="mass")
    with pytest.raises(CacheError, match="quantity 'logits' is not one of mean_logit, mass, mean_prob"):
        open_profiles(cache, quantity="logits")


def test_inference_window_and_passes():
    cache = synthetic_caches.inference(steps=(0, 4), window=[0, 4, 5, 6, 7, 8])
    noisy, clean = open_profiles(cache), open_profiles(cache, step=4)
    assert (noisy.step, noisy.timestep, clean.step, clean.timestep) == (0, 1000.0, 4, 0.0)
    expected = reference(
        cache["attention_weights"][3], 5, [0, 4, 5, 6, 7, 8], 9, mass=True
    )  # layer 5, pass 4
    np.testing.assert_allclose(clean.frame_matrix(5), expected, atol=1e-6)
    assert np.isnan(noisy.frame_profile(1)).any(0).tolist() == [False, True, True, True] + [False] * 5
    assert noisy.captured == "window"
    assert open_profiles(synthetic_caches.inference()).captured == "full"
    assert open_profiles(synthetic_caches.inference(window=[6, 7, 8])).captured == "within block"
    with pytest.raises(CacheError, match="pass 2 is not in this cache; it has 0, 4"):
        open_profiles(cache, step=2)


def test_the_last_captured_block_is_shown():
    cache = synthetic_caches.inference(layers=(1,))
    early = cache["attention_weights"][0] | {
        "block": 1,
        "query_frames": [3, 4, 5],
        "key_frames": [0, 1, 2, 3, 4, 5],
    }
    early["attn_weights"] = torch.full((1, 3, 15, 30), 1 / 30)
    cache["attention_weights"].insert(0, early)
    view = open_profiles(cache)
    assert view.query_frames == (6, 7, 8)
    assert not np.allclose(view.frame_profile(1)[0, :6], 1 / 6, atol=0.01)
    cache["attention_weights"].pop()
    view = open_profiles(cache)
    assert (view.query_frames, view.captured) == ((3, 4, 5), "full")
    np.testing.assert_allclose(view.frame_profile(1)[0], [1 / 6] * 6 + [np.nan] * 3, atol=1e-6)


def test_atlas():
    cache = synthetic_caches.atlas(layers=(0, 1, 5), steps=(0, 4))
    noisy, clean = open_profiles(cache), open_profiles(cache, step=4)
    assert noisy.layers == (0, 1, 5)
    np.testing.assert_array_equal(clean.frame_matrix(5), cache["frame_logits"][2, 1])
    np.testing.assert_allclose(noisy.frame_profile(1), cache["frame_logits"][1, 0][:, 6:].mean(1), atol=1e-6)
    np.testing.assert_allclose(
        noisy.key_curve(1).reshape(3, 9, 5).mean(-1), noisy.frame_profile(1), atol=2e-3
    )
    mass = open_profiles(cache, quantity="mass")
    np.testing.assert_allclose(np.nansum(mass.frame_matrix(0), -1), 1, atol=1e-5)
    assert mass.key_curve(0) is None
    np.testing.assert_array_equal(noisy.profiles()[1], noisy.frame_profile(1))
    with pytest.raises(CacheError, match="layer 2 is not in this cache; it has 0, 1, 5"):
        noisy.frame_profile(2)


def test_a_layer_of_an_atlas_names_the_frames_of_its_profile():
    """Those of the last block that was done, or of the last one that has the pass."""
    partial = synthetic_caches.atlas() | {"partial": True, "blocks_done": 2}
    early = synthetic_caches.atlas()
    for cache, block, step in ((partial, 2, 0), (early, 1, 4)):
        for name in ("frame_logits", "frame_mass"):
            cache[name][:, :, :, 3 * block :] = torch.nan
        cache.pop("key_curve", None)
        layer = open_profiles(layer_from_atlas(cache, 5, step))
        view, last = open_profiles(cache, step), tuple(range(3 * block - 3, 3 * block))
        assert layer.query_frames == view.query_frames == last
        np.testing.assert_array_equal(layer.frame_profile(5), view.frame_profile(5))
        np.testing.assert_allclose(layer.frame_profile(5), layer.frame_matrix(5)[:, last].mean(1), atol=1e-6)


def test_atlas_of_published_profiles_alone(tmp_path):
    """Only the last block's mean is known: profiles yes, matrix and mass no."""
    cache = synthetic_caches.common(
        "atlas", F=9, H=3, weights="published", weights_file=None, weights_sha256=None
    )
    exact = torch.randn(2, 1, 3, 9)
    cache |= {"layers": [0, 1], "pass_timesteps": [1000.0], "last_block_frame_logits": exact}
    save_cache(tmp_path / "c.pt", cache)
    view = open_profiles(load_cache(tmp_path / "c.pt"))
    np.testing.assert_array_equal(view.frame_profile(1), exact[1, 0])
    assert (view.frame_matrix(1), view.key_curve(1), view.matrix_rows) == (None, None, ())
    with pytest.raises(CacheError, match="holds no mass"):
        open_profiles(cache, quantity="mass")
    cache["frame_logits"] = synthetic_caches.frame_matrix(3, [3, 3, 3]).expand(
        2, 1, 3, 9, 9
    )  # coarser, so not used
    np.testing.assert_array_equal(open_profiles(cache).frame_profile(1), exact[1, 0])
    assert open_profiles(cache).frame_matrix(1).shape == (3, 9, 9)


def test_one_call_of_many():
    cache = synthetic_caches.inference(layers=(1, 5), steps=(0, 4))
    for index, (layer, step) in enumerate([(1, 0), (5, 0), (1, 4), (5, 4)]):
        view = open_call(cache, index)
        assert (view.layers, view.step, view.quantity) == ((layer,), step, "mean_prob")
        expected = reference(cache["attention_weights"][index], 5, [*range(9)], 9, mass=True) / 5
        np.testing.assert_allclose(view.frame_matrix(layer), expected, atol=1e-7)
    for index in (-1, 4):
        with pytest.raises(CacheError, match=rf"call {index} is not in 0\.\.3, the calls of this cache"):
            open_call(cache, index)
    with pytest.raises(CacheError, match="probabilities, no mean_logit"):
        open_call(cache, 0, "mean_logit")
    view = open_call(synthetic_caches.atlas(layers=(0, 1, 5), steps=(0, 4)), 4, "mass")
    assert (view.layers, view.step) == ((1,), 4)


def test_noise_is_told_from_context():
    noisy, clean = (open_profiles(synthetic_caches.figure4(S=4, H=2, step=s)) for s in (0, 4))
    assert noisy.noise_frames == noisy.own_block == (18, 19, 20)
    assert clean.noise_frames == ()
    assert noisy.pass_label == "pass 0 (t = 1000)"
    assert clean.pass_label == "clean pass (t = 0)"
    unknown = open_profiles(
        synthetic_caches.layer() | {"step": None, "timestep": None, "is_clean_pass": None}
    )
    assert (unknown.pass_label, unknown.noise_frames) == ("pass not recorded", ())
    assert noisy.source == f"wan-mini (checkpoint: self_forcing.pt), “{synthetic_caches.PROMPT}”, seed 42"
