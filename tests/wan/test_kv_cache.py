"""The KV cache against a plain list of frames, and places for keys and values that are computed inside it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wan.cache import CacheSizes, KVCache
from wan.policies import make_policy, of_window

LAYERS, HEADS, DIM = 2, 3, 4


def new_cache(num_frames: int, window: int = -1, sink: int = 0, S: int = 2) -> KVCache:
    return KVCache(CacheSizes([HEADS] * LAYERS, DIM, S, num_frames), of_window(window, sink))


@given(
    data=st.data(),
    S=st.integers(1, 3),
    sink=st.integers(0, 3),
    extra=st.integers(0, 5),
    windowed=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_against_a_list_of_frames(data, S, sink, extra, windowed):
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=7))
    window = sink + max(sizes) + extra if windowed else -1
    cache = new_cache(sum(sizes), window, sink, S)
    buffer, generator = cache.keys[0].data_ptr(), torch.Generator().manual_seed(0)
    past: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # (frame, keys [layers, S, H, D], values)
    start = 0
    for size in sizes:
        block = range(start, start := start + size)
        cache.advance(block)
        for _ in range(data.draw(st.integers(1, 3))):  # passes over one block overwrite each other
            k, v = torch.randn(2, LAYERS, 1, size * S, HEADS, DIM, generator=generator)
            written = [cache.write(layer, k[layer], k[layer], v[layer]) for layer in range(LAYERS)]
            own = list(zip(block, k[:, 0].split(S, 1), v[:, 0].split(S, 1), strict=True))
            frames = past + own
            if windowed and len(frames) > window:
                frames = frames[:sink] + frames[len(frames) - (window - sink) :]
            assert cache.frames == [f for f, _, _ in frames] and cache.newest == block
            assert cache.layouts[1].frames == tuple(cache.frames)
            assert cache.layouts[1].sink == range(min(sink if windowed else 0, cache.own.start))
            for layer, (keys, values) in enumerate(written):
                assert torch.equal(keys[0], torch.cat([k[layer] for _, k, _ in frames]))
                assert torch.equal(values[0], torch.cat([v[layer] for _, _, v in frames]))
        past = [*past, *own]
    assert cache.keys[0].data_ptr() == buffer == cache.view(0)[0].data_ptr()  # written in place


def test_a_rollout_longer_than_announced_is_refused():
    cache = new_cache(3)
    cache.advance(range(3))
    with pytest.raises(ValueError, match="frame 5 is beyond the frames"):
        cache.advance(range(3, 6))


@pytest.mark.parametrize("batch", [1, 2])
def test_the_sink_is_written_by_a_blocks_first_pass_alone(batch):
    """As LongLive releases it."""
    policy = make_policy("window", window=12, sink=6, released="longlive")
    cache = KVCache(CacheSizes([HEADS] * LAYERS, DIM, 2, 9, batch), policy)
    cache.advance(range(3))
    cache.advance(range(3, 6))
    for first in (True, False):
        cache.begin_pass(is_clean=False)
        for layer in range(LAYERS):
            k, v = torch.randn(2, batch, 6, HEADS, DIM)
            keys, values = cache.write(layer, k, k, v)
            assert torch.equal(keys[:, 6:], k) == torch.equal(values[:, 6:], v) == first
