"""Memory of cache policies: it does not grow with the rollout, and it is what the estimate says."""

import pytest
import torch

from experiments.extraction import memory as memory_parts
from wan.config import ModelConfig, RunConfig
from wan.model import CausalWanModel

MODEL = ModelConfig(dim=24, ffn_dim=8, num_heads=2, num_layers=2, freq_dim=8, text_dim=8, text_len=3)
POLICIES = [
    {"name": "window", "window": 9, "sink": 3},
    {"name": "relative", "window": 9, "sink": 3},
    {"name": "deep_sink", "window": 9, "sink": 3},
    {"name": "participative", "window": 12, "sink": 3, "budget": 9, "recent": 4},
    {"name": "ema_sink", "window": 9, "sink": 3},
    {"name": "two_memories", "window": 12, "sink": 3},
    {"name": "rolling_sink", "window": 12},
    {"name": "memory_bank", "window": 12, "sink": 3},
]


def config_of(policy: dict, num_frames: int) -> RunConfig:
    return RunConfig(num_frames=num_frames, height=4, width=8, cache_policy=policy, layer_indices=[0])


def held(thing, seen: set) -> int:
    """Bytes of all tensors of a cache and of its policy; views of one storage once."""
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage()
        known = storage.data_ptr() in seen
        seen.add(storage.data_ptr())
        return 0 if known else storage.nbytes()
    if isinstance(thing, dict):
        return sum(held(value, seen) for value in thing.values())
    if isinstance(thing, (list, tuple)):
        return sum(held(value, seen) for value in thing)
    if type(thing).__module__.startswith("wan.") and id(thing) not in seen:
        seen.add(id(thing))
        return held(vars(thing), seen)
    return 0


def after(policy: dict, num_blocks: int, num_frames: int) -> int:
    """Bytes of a cache after some blocks of a rollout of num_frames."""
    config = config_of(policy, num_frames)
    cache = CausalWanModel(**vars(MODEL)).new_kv_cache(1, num_frames, 4, 8, config.policy)
    text = [(torch.zeros(1, 3, 2, 12),) * 2] * 2
    generator = torch.Generator().manual_seed(0)
    for block in range(num_blocks):
        cache.advance(range(3 * block, 3 * block + 3), text)
        for is_clean in (False, True):
            cache.begin_pass(is_clean)
            for layer in range(2):
                x = torch.randn(1, 24, 2, 12, generator=generator)
                cache.write(layer, x, x, x, x if cache.stores_raw else None)
    cache.text = ()
    return held(cache, set())


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["name"])
def test_a_long_rollout_takes_no_more_than_a_full_window(policy):
    """Periods of policies are 1, 2 or 3 blocks; 240 and 2400 frames are blocks 80 and 800."""
    assert after(policy, 12, 2400) == after(policy, 80, 2400) == after(policy, 80, 240)


@pytest.mark.parametrize("num_frames", [6, 30])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["name"])
def test_the_estimate_holds_what_is_held(policy, num_frames):
    said = memory_parts.kv_cache(config_of(policy, num_frames), MODEL, torch.float32)
    measured = after(policy, num_frames // 3, num_frames)
    single = {"participative": 4_000, "two_memories": 768}  # numbers of tokens, sums of queries; two tokens
    assert measured <= said + single.get(policy["name"], 0)
    assert said <= 1.5 * measured or num_frames == 6
