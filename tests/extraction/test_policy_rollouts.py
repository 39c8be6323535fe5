"""Maps, and caches under policies whose slots are not frames: tokens, keys, frames and atlases agree."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from experiments import memory
from experiments.analysis.axes import slot_mass, slots_of
from experiments.analysis.video_maps import open_map, places_of, word_maps
from experiments.caches import load_cache, save_cache
from experiments.caches.store import layer_from_atlas
from experiments.caches.view import open_profiles
from experiments.extraction import cache_builders as builders
from experiments.memory import check_requests
from wan.blocks import visible_frames
from wan.errors import ConfigError
from wan.interventions import Knockout, intervene

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
    return tiny.session.with_weights(config).generate(requests=requests)


def atlas_of(config):
    return builders.atlas_requests(config, mass=True, key_curve=False, cross=False)


def keeping(run, *names, without=""):
    """A rollout with those of its calls alone that keep a value of these names."""
    of_names = [call for call in run.records if set(names) & call.values.keys()]
    return replace(run, records=[call for call in of_names if without not in call.values])


def saved(cache: dict, path) -> dict:
    save_cache(path, cache, overwrite=True)
    return load_cache(path)


@EACH
def test_tokens_keys_and_frames_of_a_cache_agree(settings, tiny, tmp_path):
    path = tmp_path / "cache.pt"
    by = [partial(builders.figure4_requests, granularity=g) for g in ("token", "key")]
    run = extract(tiny, settings, *by, builders.inference_requests)  # keys, and frames
    by_tokens, by_keys, by_frames = (
        saved(builders.figure4_cache(keeping(run, *names)), path)
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
    calls = saved(builders.inference_cache(keeping(run, "token_probabilities")), path)
    profiles = [open_profiles(c, quantity="mass").profiles() for c in (calls, by_frames)]
    np.testing.assert_allclose(*profiles, atol=1e-5)


@EACH
def test_a_layer_cache_has_averages_as_columns(settings, tiny, tmp_path):
    """Made from a rollout, by frames or by tokens, or taken out of its atlas: the same values."""
    count = 2 * (settings["name"] == "ema_sink")
    by_token = partial(builders.layer_requests, granularity="token")
    run = extract(tiny, settings, by_token, builders.layer_requests, atlas_of)
    by_tokens = builders.layer_cache(keeping(run, "token_logits"), 1)
    own = keeping(run, "frame_logits", without="frame_mass")
    made = saved(builders.layer_cache(own, 1), tmp_path / "layer.pt")
    atlas = saved(builders.atlas_cache(keeping(run, "frame_mass")), tmp_path / "atlas.pt")
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
    atlas = saved(builders.atlas_cache(extract(tiny, settings, atlas_of)), tmp_path / "atlas.pt")
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
    classes = {"name": "per_head", "file": str(tmp_path / "labels.csv")}
    classes["policies"] = {"a": relative, "b": ema}
    static = {"name": "forcing_kv", "num_frame_patch": 4, "heads": str(tmp_path / "static.csv")}
    for settings in (classes, static):
        run = extract(tiny, settings, atlas_of)
        atlas = saved(builders.atlas_cache(run), tmp_path / "atlas.pt")
        mass = atlas["slot_mass" if settings is classes else "frame_mass"]
        torch.testing.assert_close(mass.nansum(-1), torch.ones(2, 3, 2, 15))
        assert settings is static or (atlas["slot_frame"][0, -1] == -1).any()
    with pytest.raises(ConfigError, match="use --granularity frame"):
        check_requests(run.config, tiny.session.model_config, builders.figure4_requests(run.config, "key"))


PLACES = [(7, 2, 1), (7, -1, -1), (-1, -1, -1), (3, 0, 3)]


def made_maps(tiny, places=PLACES, edits=(), steps=None, **more):
    """The requests and the checked cache of a rollout's maps of heads 1 and 0, and its inference cache."""
    config = replace(tiny.config, **more)
    grid = builders.token_grid(config)
    asked = builders.map_requests(config, grid, places, [1], [1, 0], steps=steps, words=not edits)
    session = tiny.session.with_weights(config)
    with intervene(*edits) if edits else nullcontext():
        requests = [*asked, *builders.inference_requests(config, is_logits=True)]
        run = session.generate(requests=requests)
    maps = [call for call in run.records if "token_logits" not in call.values]
    tokens = [call for call in run.records if "token_logits" in call.values]
    whole = builders.inference_cache(replace(run, records=tokens))
    return asked, builders.maps_cache(replace(run, records=maps), grid, [1, 0]), whole


@pytest.fixture(scope="module")
def plain(tiny):
    return made_maps(tiny)


def test_a_map_is_a_row_of_the_matrix(plain, tmp_path):
    _, cache, whole = plain
    save_cache(tmp_path / "maps.pt", cache)
    cache = load_cache(tmp_path / "maps.pt", expect=("maps",))
    assert places_of(cache) == [(-1, -1, -1), (3, 0, 3), *PLACES[:2]]
    logits = whole["attention_weights"][0]["attn_logits"][0].double()  # [H, 48, 144], the last block
    rows = {(7, 2, 1): [16 + 9], (7, -1, -1): range(16, 32), (-1, -1, -1): range(48)}
    for place, some in rows.items():
        expected = logits[1, list(some)]
        mass = open_map(cache, 1, 1, query=place)
        found = torch.from_numpy(mass.values).double().flatten()
        torch.testing.assert_close(found, 144 * expected.softmax(-1).mean(0), rtol=3e-3, atol=1e-3)
        assert mass.values.shape == (9, 4, 4) and abs(mass.values.mean() - 1) < 2e-3  # 1 is even
        found = torch.from_numpy(open_map(cache, 1, 1, query=place, quantity="mean_logit").values)
        torch.testing.assert_close(found.double().flatten(), expected.mean(0), rtol=3e-3, atol=2e-2)
    early = open_map(cache, 1, 0, query=(3, 0, 3))
    assert early.query_frames == early.noise_frames == (3, 4, 5) and "patch (0, 3) of frame 3" in early.about
    assert torch.from_numpy(early.values).isnan().all((1, 2)).tolist() == [False] * 6 + [True] * 3


def test_words_over_the_query_frames_and_sizes_that_are_said_before(plain, tiny):
    asked, cache, _ = plain
    frames, words = word_maps(cache, 1, 0)
    assert frames == [3, 4, 5, 6, 7, 8] and {"red", "circle", "blue"} <= words.keys()
    assert all(grid.shape == (6, 4, 4) for grid in words.values())
    assert 0 < sum(words.values()).max() <= 1.001
    config, sizes = tiny.config, tiny.session.model_config
    kept = [entry[name].nbytes for entry in cache["blocks"] for name in ("map_mass", "map_logits")]
    assert memory.captured(config, sizes, asked[:1]) == sum(kept)
    assert sum(one["word_map"].nbytes for one in cache["blocks"]) <= memory.captured(config, sizes, asked[1:])


def test_under_policies_keys_have_their_places(tiny):
    policy = {"name": "two_memories", "window": 6, "sink": 1}
    cache = made_maps(tiny, [(13, 1, 2)], steps=[0, 2], num_frames=15, cache_policy=policy)[1]
    seen = open_map(cache, 1, 0, 2)
    total = torch.from_numpy(seen.values).nansum().item() / seen.keys + seen.elsewhere
    assert abs(total - 1) < 2e-3 and seen.keys <= 6 * 16 and seen.elsewhere > 1e-3


def test_what_an_intervention_left_out_is_absent(tiny):
    edit = Knockout(frames=[0], layers=[1], heads=[1], passes="denoise")
    cache = made_maps(tiny, [(7, 2, 1)], [edit])[1]
    mass, logits = (open_map(cache, 1, 1, quantity=quantity) for quantity in ("mass", "mean_logit"))
    for found in (mass, logits):
        gone = torch.from_numpy(found.values).isnan().all((1, 2)).tolist()
        assert gone == [True] + [False] * 8 and "keys of frame 0 left out, in layer 1" in found.edits
    assert mass.keys == 128 and not torch.from_numpy(open_map(cache, 1, 0).values[0]).isnan().any()


def test_places_that_are_not_in_the_video(tiny):
    for message, places, blocks in (
        ("frame 9 is not in 0..8", [(9, 0, 0)], None),
        ("column -1 is not in 0..3", [(1, 0, -1)], None),
        ("named twice", [(1, 0, 0), (1, 0, 0)], None),
        ("lies in block 2", [(8, 0, 0)], [0]),
    ):
        with pytest.raises(ConfigError, match=message):
            builders.map_requests(tiny.config, (4, 4), places, blocks=blocks)
