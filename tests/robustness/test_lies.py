"""Caches whose fields have the right types and shapes and contradict each other,
or hold numbers that cannot be.
"""

import copy

import pytest
import torch
from helpers import synthetic_caches

from experiments.caches import load_cache
from experiments.caches.files import CacheError
from experiments.caches.view import open_profiles

NAN, INF = float("nan"), float("inf")


def told(kind, granularity=None, **fields):
    """A cache with fields replaced, or, given a function, changed."""
    cache = copy.deepcopy(
        getattr(synthetic_caches, kind)(**({"granularity": granularity} if granularity else {}))
    )
    return cache | {name: value(cache[name]) if callable(value) else value for name, value in fields.items()}


def in_calls(kind, granularity=None, **fields):
    cache = told(kind, granularity)
    for call in cache["attention_weights"]:
        call |= {name: value(call[name]) if callable(value) else value for name, value in fields.items()}
    return cache


LIES = [
    (told("atlas", layers=[1, 1, 5]), r"layers \[1, 1, 5\] name one twice"),
    (told("atlas", layers=[-1, 1, 5]), r"layers is \[-1, 1, 5\]; it counts from 0"),
    (told("atlas", pass_steps=[0, 0]), "pass_steps .* name one twice"),
    (told("atlas", pass_steps=[-1, 0]), "pass_steps .* counts from 0"),
    (told("atlas", pass_timesteps=[NAN, 0.0]), "pass_timesteps is "),
    (told("atlas", frame_mass=lambda x: x * 2), "rows of frame_mass do not sum to 1"),
    (
        told("atlas", frame_mass=lambda x: x.roll(1, -1)),
        "frame_mass has values where the key's block comes after|do not sum",
    ),
    (told("atlas", frame_mass=lambda x: 2 / 9 - x), "rows of frame_mass do not sum to 1"),
    (told("atlas", frame_logits=lambda x: x * INF), "frame_logits has values that are infinite"),
    (told("atlas", frame_logits=lambda x: x * NAN), "holds no values for its last block"),
    (told("layer", layer_index=-3), "layer_index is -3"),
    (told("layer", step=-2), "step is -2"),
    (told("layer", timestep=NAN), "timestep is nan"),
    (told("layer", last_block_frame_attention=lambda x: x * NAN), "holds no values for its last block"),
    (told("layer", blocks_done=2), "blocks_done is 2, not in 1..3 of a partial cache"),
    (
        told("layer", partial=True, blocks_done=2),
        "full_frame_attention has values in blocks that were not done",
    ),
    (told("layer", schema_version=0), "schema_version is 0"),
    (told("figure4", query_frames=[3, 4, 5]), r"key_frames .* come after the queries' block"),
    (told("figure4", attention_weights=[], layer_indices=[]), r"layer_indices is \[\]"),
    (
        in_calls("figure4", num_query_frames=9),
        r"attention_weights\[0\].num_query_frames is 9, and the cache says 3",
    ),
    (in_calls("figure4", num_heads=3), r"attention_weights\[0\]"),
    (
        in_calls("figure4", "frame", frame_mass=lambda x: x * 3),
        r"attention_weights\[0\].rows of frame_mass do not sum to 1",
    ),
    (
        in_calls("inference", block=99),
        r"attention_weights\[0\].query_frames \[6, 7, 8\] are not those of block 99",
    ),
    (in_calls("inference", query_frames=[0, 1, 2]), "are not those of block 2"),
    (in_calls("inference", block=0, query_frames=[0, 1, 2]), "key_frames .* come after the queries' block"),
    (
        in_calls("inference", q_shape=[1, 2, 3, 4]),
        r"q_shape \[1, 2, 3, 4\] is not \[B, 15 tokens, 3 heads, D\]",
    ),
]


@pytest.mark.parametrize(("cache", "message"), LIES)
def test_a_cache_that_contradicts_itself_is_refused(cache, message, tmp_path):
    torch.save(cache, tmp_path / "c.pt")
    with pytest.raises(CacheError, match=message) as caught:
        view = open_profiles(load_cache(tmp_path / "c.pt"))
        view.frame_profile(view.layers[0])
    assert "\n" not in str(caught.value)
