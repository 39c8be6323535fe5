"""Attention whose last tiles of queries, which would leave most of a GPU idle, take their keys in chunks."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from wan.backends import TILE

LOG2_E = 1.4426950408889634
MOST_CHUNKS = 24
# Estimates in steps of one tile of queries over one tile of keys: to begin and to end with a tile of queries,
# and to launch and join chunks.
START, JOIN = 3, 16


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@cache
def plan(len_q: int, len_k: int, batch: int, heads: int, multiprocessors: int) -> tuple[int, int]:
    """Return how many queries see all keys at once, and in how many chunks the others see them.

    It follows from the sizes and the GPU alone. Of several items every query sees all at once.
    """
    blocks = cdiv(len_q, TILE)
    whole = blocks * heads // multiprocessors * multiprocessors // heads  # blocks in whole waves

    def steps(blocks: int, chunks: int) -> int:
        of_tile = cdiv(len_k // chunks, TILE) + START
        return cdiv(blocks * heads * chunks, multiprocessors) * of_tile

    best, chosen = steps(blocks, 1), (len_q, 1)
    for chunks in range(2, MOST_CHUNKS + 1 if batch == 1 and whole < blocks else 0):
        if len_k % chunks == 0 and (now := steps(whole, 1) + steps(blocks - whole, chunks) + JOIN) < best:
            best, chosen = now, (whole * TILE, chunks)
    return chosen


class PartialSoftmax(NamedTuple):
    """Output like q, log-sum-exp [B, H, Lq], and where they are wanted tails of key frames.

    tails [2, B, H, Fk, Lq] hold for each frame of keys the sum of a query's exponentials from its first key
    to the last one of all, and, in units of log 2, the maximum that had been subtracted.
    """

    out: Tensor
    lse: Tensor
    tails: Tensor | None

    def of(self, queries: slice) -> "PartialSoftmax":
        tails = None if self.tails is None else self.tails[..., queries]
        return PartialSoftmax(self.out[:, queries], self.lse[..., queries], tails)


# An attention kernel: launch(q, k, v, seen, frame_size, are_chunks) of [B, L, H, D] fills seen. are_chunks:
# items are chunks of one item's keys, and tails [2, 1, H, Fk, Lq] end with a frame's chunk.
Launch = Callable[[Tensor, Tensor, Tensor, PartialSoftmax, int, bool], None]


def attend(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, frame_size: int, multiprocessors: int
) -> PartialSoftmax:
    """Attend over [B, L, H, D]; with a frame_size, a number of keys, tails too."""
    batch, len_q, heads, _ = q.shape
    tails = None
    if frame_size:
        tails = torch.empty(2, batch, heads, k.shape[1] // frame_size, len_q, device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    seen = PartialSoftmax(out, torch.empty(batch, heads, len_q, device=q.device), tails)
    whole, chunks = plan(len_q, k.shape[1], batch, heads, multiprocessors)
    if whole:
        first = slice(0, whole)
        launch(q[:, first], k, v, seen.of(first), frame_size, False)
    if whole < len_q:
        last = slice(whole, len_q)
        many, part = q[:, last].expand(chunks, -1, -1, -1), seen.of(last)
        keys, values = (x[0].unflatten(0, (chunks, -1)) for x in (k, v))
        parts = torch.empty(many.shape, dtype=q.dtype, device=q.device)
        lses = torch.empty(chunks, heads, len_q - whole, device=q.device)
        launch(many, keys, values, PartialSoftmax(parts, lses, part.tails), frame_size, True)
        join(parts, lses, part, keys.shape[1], frame_size)
    return seen


def join(parts: Tensor, lses: Tensor, seen: PartialSoftmax, chunk_size: int, frame_size: int) -> None:
    """Merge outputs of chunks [chunks, L, H, D] with lses [chunks, H, L] into those of all keys, one item's.

    Tails reach from a frame's first key to the end of its chunk; here they are extended to the last key.
    """
    lse = lses.logsumexp(0)  # [H, L]
    weights = (lses - lse).exp()
    seen.lse[0], seen.out[0] = lse, (parts * weights.mT[..., None]).sum(0)
    if seen.tails is not None:
        sums, maxima = seen.tails[:, 0]  # [H, Fk, L]
        whole = (lse * LOG2_E)[:, None]
        later = weights.flip(0).cumsum(0).flip(0) - weights  # what is seen in the chunks behind each one
        chunk = torch.arange(sums.shape[1], device=sums.device) * frame_size // chunk_size
        sums.mul_((maxima - whole).exp2()).add_(later[chunk].transpose(0, 1))
        maxima.copy_(whole.expand_as(maxima))
