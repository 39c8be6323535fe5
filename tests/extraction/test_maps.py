"""Maps from flags to a view: against token matrices, under policies and edits, sizes, hostile files."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from conftest import ROOT

from experiments.analysis.video_maps import open_map, places_of, word_maps
from experiments.caches import load_cache, save_cache
from experiments.extraction import cache_builders as map_builders
from experiments.extraction import causal
from experiments.extraction import memory as memory_parts
from experiments.extraction.cache_builders import inference_cache, inference_requests
from wan.checkpoint import read_model_config
from wan.config import load_config
from wan.errors import ConfigError
from wan.interventions import Knockout, intervene

PLACES = [(7, 2, 1), (7, -1, -1), (-1, -1, -1), (3, 0, 3)]
SETTINGS = {"num_frames": 9, "layer_indices": [2]}


def made(settings=SETTINGS, places=PLACES, edits=(), **more):
    """The config, requests and checked cache of a short rollout of the miniature, and its inference cache."""
    config = load_config(ROOT / "configs/wan_mini.yaml", settings)
    grid = map_builders.token_grid(config, read_model_config(config.ckpt_dir))
    asked = map_builders.map_requests(config, grid, places, [2], [3, 1], **more)
    with intervene(*edits) if edits else nullcontext():
        run = causal.extract(config, [*asked, *inference_requests(config, is_logits=True)])
    maps = [call for call in run.records if "token_logits" not in call.values]
    tokens = [call for call in run.records if "token_logits" in call.values]
    whole = inference_cache(_with(run, tokens))
    return config, asked, map_builders.maps_cache(_with(run, maps), grid, [3, 1]), whole


def _with(run, records):
    return replace(run, records=records)


@pytest.fixture(scope="module")
def in_root():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield


@pytest.fixture(scope="module")
def plain(in_root):
    return made(words=True)


def test_a_map_is_a_row_of_the_matrix(plain, tmp_path):
    _, _, cache, whole = plain
    save_cache(tmp_path / "maps.pt", cache)
    cache = load_cache(tmp_path / "maps.pt", expect=("maps",))
    assert places_of(cache) == [(-1, -1, -1), (3, 0, 3), *PLACES[:2]]
    logits = whole["attention_weights"][0]["attn_logits"][0].double()  # [H, 48, 144], the last block
    rows = {(7, 2, 1): [16 + 9], (7, -1, -1): range(16, 32), (-1, -1, -1): range(48)}
    for place, some in rows.items():
        expected = logits[1, list(some)]
        mass = open_map(cache, 2, 1, query=place)
        found = torch.from_numpy(mass.values).double().flatten()
        torch.testing.assert_close(found, 144 * expected.softmax(-1).mean(0), rtol=3e-3, atol=1e-3)
        assert mass.values.shape == (9, 4, 4) and abs(mass.values.mean() - 1) < 2e-3  # 1 is even
        found = torch.from_numpy(open_map(cache, 2, 1, query=place, quantity="mean_logit").values)
        torch.testing.assert_close(found.double().flatten(), expected.mean(0), rtol=3e-3, atol=2e-2)
    early = open_map(cache, 2, 3, query=(3, 0, 3))
    assert early.query_frames == early.noise_frames == (3, 4, 5) and "patch (0, 3) of frame 3" in early.about
    assert torch.from_numpy(early.values).isnan().all((1, 2)).tolist() == [False] * 6 + [True] * 3


def test_words_over_the_query_frames(plain):
    frames, words = word_maps(plain[2], 2, 3)
    assert frames == [3, 4, 5, 6, 7, 8] and {"red", "circle", "blue"} <= words.keys()
    assert all(grid.shape == (6, 4, 4) for grid in words.values())
    assert 0 < sum(words.values()).max() <= 1.001


def test_sizes_are_said_before(plain):
    config, asked, cache, _ = plain
    sizes = read_model_config(config.ckpt_dir)
    kept = [entry[name].nbytes for entry in cache["blocks"] for name in ("map_mass", "map_logits")]
    assert memory_parts.captured(config, sizes, asked[:1]) == sum(kept)
    words = sum(entry["word_map"].nbytes for entry in cache["blocks"])
    assert words <= memory_parts.captured(config, sizes, asked[1:])


def test_under_policies_keys_have_their_places(in_root):
    policy = {"name": "two_memories", "window": 6, "sink": 1}
    config = load_config(ROOT / "configs/wan_mini.yaml", {"num_frames": 15, "cache_policy": policy})
    grid = map_builders.token_grid(config, read_model_config(config.ckpt_dir))
    asked = map_builders.map_requests(config, grid, [(13, 1, 2)], [0, 5], [2], steps=[0, 4])
    seen = open_map(map_builders.maps_cache(causal.extract(config, asked), grid, [2]), 5, 2, 4)
    total = torch.from_numpy(seen.values).nansum().item() / seen.keys + seen.elsewhere
    assert abs(total - 1) < 2e-3 and seen.keys <= 6 * 16 and seen.elsewhere > 1e-3


def test_what_an_intervention_left_out_is_absent(in_root):
    edit = Knockout(frames=[0], layers=[2], heads=[1], passes="denoise")
    cache = made(places=[(7, 2, 1)], edits=[edit])[2]
    mass, logits = (open_map(cache, 2, 1, quantity=quantity) for quantity in ("mass", "mean_logit"))
    for found in (mass, logits):
        gone = torch.from_numpy(found.values).isnan().all((1, 2)).tolist()
        assert gone == [True] + [False] * 8 and "Knockout(layers=2" in found.edits
    assert mass.keys == 128 and not torch.from_numpy(open_map(cache, 2, 3).values[0]).isnan().any()


@pytest.mark.parametrize(
    ("places", "more", "message"),
    [
        ([(9, 0, 0)], {}, "frame 9 is not in 0..8"),
        ([(1, 4, 0)], {}, "row 4 is not in 0..3"),
        ([(1, 0, -1)], {}, "column -1 is not in 0..3"),
        ([(1, 0, 0), (1, 0, 0)], {}, "named twice"),
        ([(8, 0, 0)], {"blocks": [0]}, "lies in block 2"),
    ],
    ids=str,
)
def test_places_that_are_not_in_the_video(in_root, places, more, message):
    with pytest.raises(ConfigError, match=message):
        made(places=places, **more)
