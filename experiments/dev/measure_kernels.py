"""What the benchmarks of single kernels share: inputs of the 1.3B, turns, and float64 to compare with."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from experiments.dev.tables import median_interval
from wan.config import MODELS, RunConfig
from wan.errors import ConfigError

RUN, MODEL = RunConfig(), MODELS["Wan2.1-T2V-1.3B"]
TOKENS = MODEL.tokens_per_frame(RUN.height, RUN.width)
QUERIES = RUN.num_frame_per_block * TOKENS  # of a block
CALLS_A_TURN, CHUNK = 5, 256  # CHUNK: queries at once in float64


def require_gpu(script: str) -> torch.device:
    """The GPU whose kernels a script times. ConfigError where none is."""
    if not torch.cuda.is_available():
        raise ConfigError(f"{script} times kernels of a GPU; none is here")
    return torch.device("cuda")


def random_inputs(lengths: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """bfloat16 [1, n, H, D] for each length, always the same."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = MODEL.num_heads, MODEL.head_dim
    return [torch.randn(1, n, *sizes, generator=generator, device=device).bfloat16() for n in lengths]


def in_turn(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each call over so many turns: median, and the bounds of its 95 % interval."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            taken[name].append(milliseconds(call))
    return {
        name: [round(float(x), 4) for x in (np.median(turns), *median_interval(turns))]
        for name, turns in taken.items()
    }


def milliseconds(call: Callable[[], object]) -> float:
    """Of one call, on average over a few."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS_A_TURN):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / CALLS_A_TURN


def exact_logits(q: Tensor, k: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
    """Head, queries and their float64 logits [n, Lk], some rows at a time, in the first and the last head.

    q is [B, Lq, H, D], k [B, Lk, H, D]; the first item of the batch is taken.
    """
    for head in (0, q.shape[2] - 1):
        keys = k[0, :, head].double()
        for start in range(0, q.shape[1], CHUNK):
            rows = slice(start, start + CHUNK)
            yield head, rows, q[0, rows, head].double() @ keys.mT * q.shape[3] ** -0.5
