"""What maps over key tokens cost: one call beside its attention, and rollouts that keep the last block's."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wan.attention import attention_with_lse
from wan.capture import CaptureRequest, MapQuery, key_maps
from wan.config import ModelConfig, RunConfig

PATCHES, WORDS = 4, 20


def requests_of(config: RunConfig, S: int) -> dict[str, list[CaptureRequest]]:
    """What is kept of the last block, all layers and heads, by the name of its row."""
    last = len(config.block_sizes) - 1
    frames = tuple(range(config.num_frames - config.block_sizes[-1], config.num_frames))
    patches = tuple(MapQuery(frames[0], n * S // PATCHES) for n in range(PATCHES))
    of: dict[str, Any] = {"granularity": "map", "blocks": [last]}
    words = CaptureRequest(kinds=("cross",), num_words=WORDS, steps=[0], **of)
    return {
        "plain": [],
        "mean of the block, every pass": [CaptureRequest(**of)],
        "mean of the block, pass 0": [CaptureRequest(steps=[0], **of)],
        "each query frame, every pass": [CaptureRequest(queries=tuple(map(MapQuery, frames)), **of)],
        f"{PATCHES} patches, every pass": [CaptureRequest(queries=patches, **of)],
        f"{WORDS} words, pass 0": [words],
    }


def one_call(
    config: RunConfig, sizes: ModelConfig, dtype: torch.dtype, device: torch.device, repeats: int
) -> dict:
    """Milliseconds of the last block's attention call, and of each kind of map beside it; random q, k, v."""
    S, frames = sizes.tokens_per_frame(config.height, config.width), config.block_sizes[-1]
    generator = torch.Generator(device).manual_seed(0)
    shapes = (frames * S, config.num_frames * S, config.num_frames * S)
    q, k, v = (
        torch.randn(1, length, sizes.num_heads, sizes.head_dim, generator=generator, device=device).to(dtype)
        for length in shapes
    )
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    lse = attention_with_lse(*heads_first)[1]
    queries = {
        "mean of the block": [MapQuery()],
        "each query frame": [MapQuery(frame) for frame in range(frames)],
        f"{PATCHES} patches": [MapQuery(0, n * S // PATCHES) for n in range(PATCHES)],
    }

    def maps(some: list[MapQuery]) -> Callable[[], object]:
        return lambda: key_maps(q, k, lse, some, range(frames), S)

    calls: dict[str, Callable[[], object]] = {"attention": lambda: attention_with_lse(*heads_first)}
    calls |= {name: maps(some) for name, some in queries.items()}
    spent = {name: milliseconds(call, q, repeats) for name, call in calls.items()}
    return {
        name: {"milliseconds": round(ms, 4), "times_attention": round(ms / spent["attention"], 3)}
        for name, ms in spent.items()
    }


def milliseconds(call: Callable[[], object], like: Tensor, repeats: int) -> float:
    """Median over repeats, after one that is not counted."""

    def wait() -> None:
        if like.device.type == "cuda":
            torch.cuda.synchronize(like.device)

    call()
    spent = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        call()
        wait()
        spent.append(1000 * (time.perf_counter() - start))
    return statistics.median(spent)
