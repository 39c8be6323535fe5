"""Maps from flags to a view: against token matrices, under policies and edits, sizes, hostile files."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from experiments.analysis.video_maps import open_map, places_of, word_maps
from experiments.caches import load_cache, save_cache
from experiments.extraction import cache_builders, causal, memory
from wan.errors import ConfigError
from wan.interventions import Knockout, intervene

PLACES = [(7, 2, 1), (7, -1, -1), (-1, -1, -1), (3, 0, 3)]


def made(tiny, places=PLACES, edits=(), steps=None, **more):
    """The requests and the checked cache of a rollout's maps of heads 1 and 0, and its inference cache."""
    config = replace(tiny.config, **more)
    grid = cache_builders.token_grid(config, tiny.session.model_config)
    asked = cache_builders.map_requests(config, grid, places, [1], [1, 0], steps=steps, words=not edits)
    session = tiny.session.with_weights(config)
    with intervene(*edits) if edits else nullcontext():
        requests = [*asked, *cache_builders.inference_requests(config, is_logits=True)]
        run = causal.extract_next(session, config, requests)
    maps = [call for call in run.records if "token_logits" not in call.values]
    tokens = [call for call in run.records if "token_logits" in call.values]
    whole = cache_builders.inference_cache(replace(run, records=tokens))
    return asked, cache_builders.maps_cache(replace(run, records=maps), grid, [1, 0]), whole


@pytest.fixture(scope="module")
def plain(tiny):
    return made(tiny)


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
    cache = made(tiny, [(13, 1, 2)], steps=[0, 2], num_frames=15, cache_policy=policy)[1]
    seen = open_map(cache, 1, 0, 2)
    total = torch.from_numpy(seen.values).nansum().item() / seen.keys + seen.elsewhere
    assert abs(total - 1) < 2e-3 and seen.keys <= 6 * 16 and seen.elsewhere > 1e-3


def test_what_an_intervention_left_out_is_absent(tiny):
    edit = Knockout(frames=[0], layers=[1], heads=[1], passes="denoise")
    cache = made(tiny, [(7, 2, 1)], [edit])[1]
    mass, logits = (open_map(cache, 1, 1, quantity=quantity) for quantity in ("mass", "mean_logit"))
    for found in (mass, logits):
        gone = torch.from_numpy(found.values).isnan().all((1, 2)).tolist()
        assert gone == [True] + [False] * 8 and "Knockout(layers=1" in found.edits
    assert mass.keys == 128 and not torch.from_numpy(open_map(cache, 1, 0).values[0]).isnan().any()


@pytest.mark.parametrize(
    ("places", "blocks", "message"),
    [
        ([(9, 0, 0)], None, "frame 9 is not in 0..8"),
        ([(1, 4, 0)], None, "row 4 is not in 0..3"),
        ([(1, 0, -1)], None, "column -1 is not in 0..3"),
        ([(1, 0, 0), (1, 0, 0)], None, "named twice"),
        ([(8, 0, 0)], [0], "lies in block 2"),
    ],
    ids=str,
)
def test_places_that_are_not_in_the_video(tiny, places, blocks, message):
    with pytest.raises(ConfigError, match=message):
        cache_builders.map_requests(tiny.config, (4, 4), places, blocks=blocks)
