"""From captured calls to caches, without a model: which calls are asked for, where values land.

Every value of the hand-made calls says where it belongs, so a value in a wrong cell shows.
"""

import random
from dataclasses import replace

import pytest
import torch

from experiments.caches import formats as schema
from experiments.caches.files import RunError
from experiments.extraction import cache_builders
from wan.blocks import block_frames, visible_frames
from wan.capture import CapturedCall, Pass, Site
from wan.config import RunConfig
from wan.keys import KeyLayout

S, H, LAYERS, TIMESTEPS = 4, 3, 3, [1000.0, 625.0, 0.0]


def value(layer, step, queries, keys):
    """[1, H, Fq, Fk]: layer.step in front, head, query and key behind the point."""
    q, k, h = torch.tensor(queries)[:, None], torch.tensor(keys), torch.arange(H)[:, None, None]
    return (100 * layer + 10 * step + h + q / 100 + k / 10000).float()[None]


def hand_made(config, granularity="frame"):
    """An Extraction of every layer, block and pass;
    within a block, its calls in an order that nobody may rely on.
    """
    sizes, records = config.block_sizes, []
    for block in range(len(sizes)):
        of_block = [
            hand_made_call(config, block, step, layer, granularity)
            for step in range(len(TIMESTEPS))
            for layer in range(LAYERS)
        ]
        random.Random(block).shuffle(of_block)
        records += of_block
    common = {"schema_version": 1, "prompt": "", "seed": 0, "num_frames": config.num_frames, "model": "m"}
    common |= {"block_sizes": sizes, "num_frame_per_block": 3, "frame_seq_length": S, "num_heads": H}
    common |= {"weights": "base", "weights_file": None, "weights_sha256": None}
    latents = torch.zeros(1, config.num_frames, 1, 1, 1)
    return cache_builders.Extraction(config, LAYERS, records, latents, TIMESTEPS, ["▁a", "</s>"], common)


def hand_made_call(config, block, step, layer, granularity):
    """A call whose values say where they belong."""
    queries = tuple(block_frames(config.block_sizes, block))
    keys = visible_frames(config.block_sizes, block, config.local_attn_size, config.sink_size)
    frame = value(layer, step, queries, keys)
    tokens = frame.repeat_interleave(S, 2).repeat_interleave(S, 3)
    values = {
        "frame": {"frame_logits": frame, "frame_mass": frame.softmax(-1)},
        "token": {"token_logits": tokens},
        "key": {"key_curve": tokens.mean(2)},
        "cross": {"cross_mass": frame[..., :1].expand(-1, -1, -1, 9)},
    }[granularity]
    timestep, is_cross = TIMESTEPS[step], granularity == "cross"
    return CapturedCall(
        site=Site(layer, "cross" if is_cross else "self"),
        at=Pass(query_frames=queries, block=block, step=step, timestep=timestep, is_clean_pass=timestep == 0),
        values=values,
        q_shape=(1, len(queries) * S, H, 8),
        k_shape=(1, len(keys) * S, H, 8),
        layout=None if is_cross else KeyLayout.of_frames(keys, len(keys) * S),
    )


WHOLE = RunConfig(num_frames=9, denoising_step_list=[1000, 250], layer_indices=[2, 0], step=1)
FIRST_ALONE = replace(WHOLE, num_frames=7, independent_first_frame=True)
WINDOW = replace(WHOLE, num_frames=12, local_attn_size=6, sink_size=1)
CONFIGS = pytest.mark.parametrize(
    "config", [WHOLE, FIRST_ALONE, WINDOW], ids=["whole", "first alone", "window"]
)


def expected(config, layer, step):
    """[H, F, F] with NaN where a query's block does not see the key."""
    F, sizes = config.num_frames, config.block_sizes
    everywhere = value(layer, step, list(range(F)), list(range(F)))[0]
    seen = torch.zeros(F, F, dtype=torch.bool)
    for block in range(len(sizes)):
        for query in block_frames(sizes, block):
            seen[query, visible_frames(sizes, block, config.local_attn_size, config.sink_size)] = True
    return everywhere.masked_fill(~seen, torch.nan)


def same(a, b):
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0, equal_nan=True)


def only(run, **tags):
    return replace(
        run, records=[r for r in run.records if all(r[name] in values for name, values in tags.items())]
    )


@CONFIGS
def test_an_atlas_holds_every_layer_and_pass_in_its_place(config):
    run = hand_made(config)
    run = replace(
        run,
        records=run.records
        + hand_made(config, "cross").records
        + only(hand_made(config, "key"), block=[len(config.block_sizes) - 1]).records,
    )
    cache = cache_builders.atlas_cache(run)
    schema.check(cache)
    for layer in range(LAYERS):
        for step in range(len(TIMESTEPS)):
            same(cache["frame_logits"][layer, step], expected(config, layer, step))
            there = expected(config, layer, step)
            mass = (
                there.masked_fill(there.isnan(), -torch.inf).softmax(-1).masked_fill(there.isnan(), torch.nan)
            )
            torch.testing.assert_close(cache["frame_mass"][layer, step], mass, equal_nan=True)
    last = expected(config, 2, 1)[:, block_frames(config.block_sizes, -1)].mean(1)
    torch.testing.assert_close(
        cache["key_curve"][2, 1].unflatten(-1, (-1, S)).mean(-1),
        last.half(),
        atol=0.2,
        rtol=0,
        equal_nan=True,
    )
    words = cache["cross_mass"][1, 2]  # the prompt's tokens, of nine with padding
    same(words, value(1, 2, list(range(config.num_frames)), [0])[0].expand(-1, -1, 2))


def test_what_was_not_captured_is_an_error():
    with pytest.raises(RunError, match="layer 7, step 1: no frame_logits was captured"):
        cache_builders.layer_cache(hand_made(WHOLE), 7)
