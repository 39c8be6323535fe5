"""Caches under policies whose slots are not frames: tokens, key curves, frames and atlases agree."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from experiments.analysis.axes import slot_mass, slots_of
from experiments.caches import load_cache, save_cache
from experiments.caches.store import layer_from_atlas
from experiments.caches.view import open_profiles
from experiments.extraction import causal
from experiments.extraction.cache_builders import (
    atlas_cache,
    atlas_requests,
    figure4_cache,
    figure4_requests,
    inference_cache,
    inference_requests,
    layer_cache,
    layer_requests,
)
from experiments.extraction.memory import check_requests
from wan.blocks import visible_frames
from wan.errors import ConfigError

POLICIES = [
    {"name": "participative", "window": 6, "sink": 1, "budget": 5, "recent": 3},
    {"name": "ema_sink", "window": 6, "sink": 2},
    {"name": "deep_sink", "window": 9, "sink": 4},
    {"name": "window", "window": 6, "sink": 1},
    {"name": "memory_bank", "window": 6, "sink": 1, "bank": 2, "interval": 1},
    {"name": "two_memories", "window": 6, "sink": 1},
    {"name": "relative", "window": 9, "sink": 5, "released": "longlive_infinity"},  # zeros in block 0
]
EACH, ALL = (
    pytest.mark.parametrize("settings", some, ids=lambda settings: settings["name"])
    for some in (POLICIES[:4], POLICIES)
)


def extract(tiny, settings, *asked, **more):
    """Roll out under a policy; each of asked makes requests of the config, with more fields."""
    config = replace(tiny.config, cache_policy=settings, num_frames=15, layer_indices=[0, 1], **more)
    requests = [request for make in asked for request in make(config)]
    return causal.extract_next(tiny.session.with_weights(config), config, requests)


def atlas_of(config):
    return atlas_requests(config, mass=True, key_curve=False, cross=False)


def keeping(run, *names, without=""):
    """A rollout with those of its calls alone that keep a value of these names."""
    of_names = [call for call in run.records if set(names) & call.values.keys()]
    return replace(run, records=[call for call in of_names if without not in call.values])


def saved(cache: dict, path) -> dict:
    save_cache(path, cache)
    return load_cache(path)


@EACH
def test_tokens_keys_and_frames_of_a_cache_agree(settings, tiny, tmp_path):
    path, by = tmp_path / "cache.pt", [partial(figure4_requests, granularity=g) for g in ("token", "key")]
    run = extract(tiny, settings, *by, inference_requests)  # keys, and frames
    by_tokens, by_keys, by_frames = (
        saved(figure4_cache(keeping(run, *names)), path)
        for names in (["token_logits"], ["key_curve", "frame_logits"], ["frame_logits"])
    )
    named = settings["name"] != "window"  # in a window keys are where they are
    assert {made["schema_version"] for made in (by_tokens, by_keys, by_frames)} == {1 + named}
    for made in (by_keys, by_frames):
        entry = made["attention_weights"][0]
        np.testing.assert_allclose(entry.get("slot_mass", entry["frame_mass"]).nansum(-1), 1, atol=1e-5)
        assert not named or entry["slot_frame"].shape == entry["slot_position"].shape
    for quantity in ("mean_logit", "mass"):
        tokens, keys, means = (open_profiles(c, quantity=quantity) for c in (by_tokens, by_keys, by_frames))
        assert tokens.key_frames == keys.key_frames == means.key_frames
        assert named or list(means.key_frames) == visible_frames([3] * 5, 4, 6, 1)
        for layer in (0, 1):
            wanted = means.key_profile(layer)  # frames, and averages of those that are gone
            assert wanted.shape == (2, 15 + 2 * (settings["name"] == "ema_sink"))
            np.testing.assert_allclose(tokens.key_profile(layer), wanted, atol=2e-3)  # tokens are float16
            np.testing.assert_allclose(keys.key_profile(layer), wanted, atol=1e-6)
            if quantity == "mass":
                np.testing.assert_allclose(np.nansum(wanted, 1), 1, atol=1e-5)
    curves = [open_profiles(c).key_curve(1) for c in (by_tokens, by_keys)]
    np.testing.assert_allclose(*curves, atol=2e-3)
    calls = saved(inference_cache(keeping(run, "token_probabilities")), path)
    profiles = [open_profiles(c, quantity="mass").profiles() for c in (calls, by_frames)]
    np.testing.assert_allclose(*profiles, atol=1e-5)


@EACH
def test_a_layer_cache_has_averages_as_columns(settings, tiny, tmp_path):
    """Made from a rollout, by frames or by tokens, or taken out of its atlas: the same values."""
    count = 2 * (settings["name"] == "ema_sink")
    by_token = partial(layer_requests, granularity="token")
    run = extract(tiny, settings, by_token, layer_requests, atlas_of)
    by_tokens = layer_cache(keeping(run, "token_logits"), 1)
    made = saved(layer_cache(keeping(run, "frame_logits", without="frame_mass"), 1), tmp_path / "layer.pt")
    atlas = saved(atlas_cache(keeping(run, "frame_mass")), tmp_path / "atlas.pt")
    taken = saved(layer_from_atlas(atlas, 1), tmp_path / "taken.pt")
    assert ("average_attention" in made) == ("average_attention" in taken) == bool(count)
    views = [open_profiles(one) for one in (made, taken, atlas)]
    assert [view.num_averages for view in views] == [count] * 3
    for name in ("key_profile", "key_matrix"):
        values = [getattr(view, name)(1) for view in views]
        assert values[0].shape[-1] == 15 + count
        np.testing.assert_array_equal(values[0], values[2])
        np.testing.assert_array_equal(values[1], values[2])
        np.testing.assert_allclose(getattr(open_profiles(by_tokens), name)(1), values[0], atol=1e-5)


@ALL
def test_an_atlas_says_what_lay_in_its_slots(settings, tiny, tmp_path):
    atlas = saved(atlas_cache(extract(tiny, settings, atlas_of)), tmp_path / "atlas.pt")
    frames, positions = slots_of(atlas, layer=1)
    mass = slot_mass(atlas, layer=1, step=0)
    np.testing.assert_allclose(mass.sum(1), 1, atol=1e-5)
    assert frames.shape == positions.shape and len(frames) == 5 and mass.shape[1] == (frames[-1] != -9).sum()
    assert list(frames[-1][frames[-1] != -9][-3:]) == [12, 13, 14]
    name, whole = settings["name"], ("window", "deep_sink")
    assert atlas["schema_version"] == (1 if name == "window" else 2)
    assert ("slot_mass" in atlas) == (name not in whole)
    if name == "deep_sink":
        assert positions[-1].tolist() == list(range(6, 15))
    if name == "participative":
        assert (atlas["tokens_kept"].sum(2)[:, -1] == 5 * atlas["frame_seq_length"]).all()
    rows = slice(3 if settings.get("released") else 0, None)  # zeros, which are of no frame, have mass too
    matrix = open_profiles(atlas, 0, "mass").key_matrix(1)
    np.testing.assert_allclose(np.nansum(matrix, -1)[:, rows], 1, atol=1e-5)


def test_an_atlas_of_classes_of_heads(tiny, tmp_path):
    """Also where one class keeps averages, whose mass is of no frame."""
    for name, rows in (("labels", "a,b\nb,a"), ("static", "0,1\n1,0")):
        (tmp_path / f"{name}.csv").write_text(rows)
    relative, ema = {"name": "relative", "window": 6, "sink": 1}, {"name": "ema_sink", "window": 6, "sink": 2}
    classes = {
        "name": "per_head",
        "file": str(tmp_path / "labels.csv"),
        "policies": {"a": relative, "b": ema},
    }
    static = {"name": "forcing_kv", "num_frame_patch": 4, "heads": str(tmp_path / "static.csv")}
    for settings in (classes, static):
        run = extract(tiny, settings, atlas_of)
        atlas = saved(atlas_cache(run), tmp_path / "atlas.pt")
        mass = atlas["slot_mass" if settings is classes else "frame_mass"]
        torch.testing.assert_close(mass.nansum(-1), torch.ones(2, 3, 2, 15))
        assert settings is static or (atlas["slot_frame"][0, -1] == -1).any()
    with pytest.raises(ConfigError, match="use --granularity frame"):
        check_requests(run.config, tiny.session.model_config, figure4_requests(run.config, "key"))
