"""Token matrices and key curves under policies whose slots are not frames: saved and read, key by key."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers.rollouts import TWO_STEPS

from experiments.analysis.axes import choose_view, query_profile
from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError
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
from wan.checkpoint import read_model_config
from wan.config import load_config
from wan.errors import ConfigError

CONFIG = ROOT / "configs/wan_mini.yaml"
POLICIES = [
    {"name": "participative", "window": 6, "sink": 1, "budget": 5, "recent": 3},
    {"name": "ema_sink", "window": 6, "sink": 2},
    {"name": "rolling_sink", "window": 9},
    {"name": "deep_sink", "window": 9, "sink": 4},
    {"name": "memory_bank", "window": 6, "sink": 1, "bank": 2, "interval": 1},
]


def config_of(settings: dict):
    overrides = {"cache_policy": settings, "num_frames": 15, "layer_indices": [1, 3]}
    return load_config(CONFIG, overrides | TWO_STEPS)


@cache
def session() -> causal.LoadedModel:
    """The model, which no policy changes."""
    return causal.prepare(config_of({"name": "full"}), [])


def extract(config, requests):
    pipeline = causal.pipeline_of(session().pipeline.model, config)
    return causal.extract_next(replace(session(), pipeline=pipeline), config, requests)


def keeping(run, *names, without=""):
    """A rollout with those of its calls alone that keep a value of these names."""
    of_names = [call for call in run.records if set(names) & call.values.keys()]
    return replace(run, records=[call for call in of_names if without not in call.values])


def saved(cache: dict, path) -> dict:
    save_cache(path, cache)
    return load_cache(path)


@pytest.mark.parametrize("settings", POLICIES, ids=lambda settings: settings["name"])
def test_tokens_keys_and_frames_of_a_cache_agree(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = config_of(settings)
    path = tmp_path / "cache.pt"
    requests = [*figure4_requests(config, "token"), *figure4_requests(config, "key")]  # keys, and frames
    run = extract(config, [*requests, *inference_requests(config)])
    by_tokens, by_keys, by_frames = (
        saved(figure4_cache(keeping(run, *names)), path)
        for names in (["token_logits"], ["key_curve", "frame_logits"], ["frame_logits"])
    )
    assert {made["schema_version"] for made in (by_tokens, by_keys, by_frames)} == {2}
    for made in (by_keys, by_frames):
        entry = made["attention_weights"][0]
        mass = entry.get("slot_mass", entry["frame_mass"])
        np.testing.assert_allclose(mass.nansum(-1), 1, atol=1e-5)
        assert entry["slot_frame"].shape == entry["slot_position"].shape
    for quantity in ("mean_logit", "mass"):
        tokens, keys, means = (open_profiles(c, quantity=quantity) for c in (by_tokens, by_keys, by_frames))
        assert tokens.key_frames == keys.key_frames == means.key_frames
        for layer in (1, 3):
            wanted = means.key_profile(layer)  # frames, and averages of those that are gone
            assert wanted.shape == (12, 15 + 2 * (settings["name"] == "ema_sink"))
            np.testing.assert_allclose(tokens.key_profile(layer), wanted, atol=2e-3)  # tokens are float16
            np.testing.assert_allclose(keys.key_profile(layer), wanted, atol=1e-6)
            if quantity == "mass":
                np.testing.assert_allclose(np.nansum(wanted, 1), 1, atol=1e-5)
    curves = [open_profiles(c).key_curve(1) for c in (by_tokens, by_keys)]
    np.testing.assert_allclose(*curves, atol=2e-3)
    calls = saved(inference_cache(keeping(run, "token_probabilities")), path)
    np.testing.assert_allclose(
        open_profiles(calls, quantity="mass").profiles(),
        open_profiles(by_frames, quantity="mass").profiles(),
        atol=1e-5,
    )


@pytest.mark.parametrize("settings", POLICIES, ids=lambda settings: settings["name"])
def test_an_atlas_has_the_key_curve_of_its_keys(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = config_of(settings)
    requests = atlas_requests(config, mass=True, key_curve=True, cross=False, layers=[1, 3])
    atlas = saved(atlas_cache(extract(config, requests)), tmp_path / "atlas.pt")
    S, view = atlas["frame_seq_length"], open_profiles(atlas)
    assert atlas["key_curve"].shape[-1] == atlas["key_frame"].shape[1] == atlas["key_position"].shape[1]
    slots = atlas["slot_frame"][0, -1]
    slots = slots[slots != -9]
    whole = slots >= 0
    firsts = atlas["key_frame"][0].unflatten(0, (-1, S))[:, 0]
    assert torch.equal(firsts[whole], slots[whole])
    positions = atlas["key_position"][0].unflatten(0, (-1, S))[:, 0]
    assert torch.equal(positions[whole], atlas["slot_position"][0, -1][: len(slots)][whole])
    curve, profile = view.key_curve(1), view.frame_profile(1)
    by_frame = curve.reshape(*curve.shape[:-1], -1, S)
    seen = ~np.isnan(by_frame)
    means = np.where(seen, by_frame, 0).sum(-1) / np.where(seen.any(-1), seen.sum(-1), np.nan)
    np.testing.assert_allclose(means, profile[:, list(view.key_frames)], atol=5e-3)


def test_keys_that_contradict_themselves_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = config_of(POLICIES[1])
    good = figure4_cache(extract(config, figure4_requests(config, "key")))
    entry = good["attention_weights"][0]
    for change, message in (
        ({"key_frame": entry["key_frame"] + 99}, "key_frame is not in"),
        ({"key_token": entry["key_token"] - 1}, "key_token is not in"),
        ({"key_frame": entry["key_frame"][:-1]}, "not"),
        ({"key_position": None}, "go together"),
    ):
        changed = {k: v for k, v in {**entry, **change}.items() if v is not None}
        with pytest.raises(CacheError, match=message):
            save_cache(tmp_path / "bad.pt", {**good, "attention_weights": [changed]} | {"layer_indices": [1]})


def test_heads_with_keys_of_their_own_have_no_key_curves(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    model = read_model_config("checkpoints/wan-mini")
    rows = "\n".join(",".join("a" for _ in range(model.num_heads)) for _ in range(model.num_layers))
    (tmp_path / "labels.csv").write_text(rows)
    settings = {"name": "per_head", "file": str(tmp_path / "labels.csv"), "policies": {"a": {"name": "full"}}}
    config = config_of(settings)
    with pytest.raises(ConfigError, match="use --granularity frame"):
        check_requests(config, model, figure4_requests(config, "key"))


@pytest.mark.parametrize("settings", POLICIES, ids=lambda settings: settings["name"])
def test_a_layer_cache_has_averages_as_columns(settings, tmp_path, monkeypatch):
    """Made from a rollout, by frames or by tokens, or taken out of its atlas: the same values."""
    monkeypatch.chdir(ROOT)
    config = replace(config_of(settings), layer_index=3, layer_indices=[3])
    count = 2 * (settings["name"] == "ema_sink")
    of_atlas = atlas_requests(config, mass=True, key_curve=False, cross=False, layers=[3])
    run = extract(config, [*layer_requests(config, "token"), *layer_requests(config), *of_atlas])
    by_tokens = layer_cache(keeping(run, "token_logits"), 3)
    by_frames = keeping(run, "frame_logits", without="frame_mass")
    made = saved(layer_cache(by_frames, 3), tmp_path / "layer.pt")
    atlas = saved(atlas_cache(keeping(run, "frame_mass")), tmp_path / "atlas.pt")
    taken = saved(layer_from_atlas(atlas, 3), tmp_path / "taken.pt")
    assert ("average_attention" in made) == ("average_attention" in taken) == bool(count)
    view, whole = open_profiles(made), open_profiles(atlas)
    assert view.num_averages == whole.num_averages == open_profiles(taken).num_averages == count
    for name in ("key_profile", "key_matrix"):
        values = [getattr(one, name)(3) for one in (view, open_profiles(taken), whole)]
        assert values[0].shape[-1] == 15 + count
        np.testing.assert_array_equal(values[0], values[2])
        np.testing.assert_array_equal(values[1], values[2])
        np.testing.assert_allclose(getattr(open_profiles(by_tokens), name)(3), values[0], atol=1e-5)
    axes = choose_view(made, use_video=True)
    shown, profile = axes.spread_matrix(view.key_matrix(3)), query_profile(view, axes)[0]
    assert shown.shape[1:] == (57, 57 + count) and axes.spread(profile).shape[-1] == 57 + count
    np.testing.assert_array_equal(shown[:, 56, 57:], view.key_matrix(3)[:, 14, 15:])
