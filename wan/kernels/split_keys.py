"""Attention whose last tiles of queries, which would leave most of a GPU idle, take their keys in chunks."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wan.backends import TILE

MOST_CHUNKS = 24
# Estimates in steps of one tile of queries over one tile of keys: to begin and to end with a tile of queries,
# and to launch and join chunks.
START, JOIN = 3, 16


@cache
def plan(len_q: int, len_k: int, batch: int, heads: int, multiprocessors: int) -> tuple[int, int]:
    """Return how many queries see all keys at once, and in how many chunks the others see them.

    It follows from the sizes and the GPU alone. Of several items every query sees all at once.
    """
    blocks = triton.cdiv(len_q, TILE)
    whole = blocks * heads // multiprocessors * multiprocessors // heads  # blocks in whole waves

    def steps(blocks: int, chunks: int) -> int:
        of_tile = triton.cdiv(len_k // chunks, TILE) + START
        return triton.cdiv(blocks * heads * chunks, multiprocessors) * of_tile

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
        _in_chunks(launch, chunks, q[:, last], k, v, seen.of(last), frame_size)
    return seen


def _in_chunks(
    launch: Launch, chunks: int, q: Tensor, k: Tensor, v: Tensor, seen: PartialSoftmax, frame_size: int
) -> None:
    """Attend for queries [1, L, H, D] with chunks of the keys as items."""
    q = q.expand(chunks, -1, -1, -1)
    k, v = (x[0].unflatten(0, (chunks, -1)) for x in (k, v))
    out, lse = seen.out[0], seen.lse[0]
    parts, lses = (torch.empty(chunks, *x.shape, dtype=x.dtype, device=x.device) for x in (out, lse))
    launch(q, k, v, PartialSoftmax(parts, lses, seen.tails), frame_size, True)
    join(parts, lses, out, lse)
    if seen.tails is not None:
        join_tails(seen.tails[:, 0], lses, lse, k.shape[1], frame_size)


@triton.jit(do_not_specialize=["chunks"])  # else some values compile anew
def _join_kernel(
    parts_ptr,
    lses_ptr,
    out_ptr,
    lse_ptr,
    chunks,
    rows,
    heads,
    stride_lse,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One query of all heads."""
    row = tl.program_id(0).to(tl.int64)
    head, dims = tl.arange(0, HEADS), tl.arange(0, HEAD_DIM)
    there = head < heads
    highest = tl.full([HEADS], float("-inf"), tl.float32)
    for chunk in range(0, chunks):
        lse = tl.load(lses_ptr + (chunk * heads + head) * rows + row, mask=there, other=0.0)
        highest = tl.maximum(highest, lse)
    total, seen = tl.zeros([HEADS], tl.float32), tl.zeros([HEADS, HEAD_DIM], tl.float32)
    place = (row * heads + head[:, None]) * HEAD_DIM + dims[None, :]
    for chunk in range(0, chunks):
        lse = tl.load(lses_ptr + (chunk * heads + head) * rows + row, mask=there, other=0.0)
        weight = tl.math.exp2((lse - highest) * 1.4426950408889634)
        total += weight
        part = tl.load(parts_ptr + chunk * rows * heads * HEAD_DIM + place, mask=there[:, None], other=0.0)
        seen += weight[:, None] * part.to(tl.float32)
    joined = (seen / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, joined, mask=there[:, None])
    tl.store(
        lse_ptr + head * stride_lse + row, highest + tl.math.log2(total) / 1.4426950408889634, mask=there
    )


@triton.jit(do_not_specialize=["chunks", "chunk_size"])
def _join_tails_kernel(
    tails_ptr,
    lses_ptr,
    lse_ptr,
    chunks,
    chunk_size,
    frame_size,
    rows,
    heads,
    stride_part,
    stride_head,
    stride_frame,
    stride_lse,
    BLOCK: tl.constexpr,
):
    """Some queries of one head: what they see from a frame on, in its chunk and in later ones."""
    head, frame = tl.program_id(1).to(tl.int64), tl.program_id(2)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    whole = tl.load(lse_ptr + head * stride_lse + row, mask=there, other=0.0) * 1.4426950408889634
    place = tails_ptr + head * stride_head + frame * stride_frame + row
    maximum = tl.load(place + stride_part, mask=there, other=0.0)
    total = tl.load(place, mask=there, other=0.0) * tl.math.exp2(maximum - whole)
    for chunk in range(frame * frame_size // chunk_size + 1, chunks):
        lse = tl.load(lses_ptr + (chunk * heads + head) * rows + row, mask=there, other=0.0)
        total += tl.math.exp2(lse * 1.4426950408889634 - whole)
    tl.store(place, total, mask=there)
    tl.store(place + stride_part, whole, mask=there)


def join(parts: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge outputs of chunks [chunks, L, H, D] with lses [chunks, H, L] to out [L, H, D] and lse [H, L].

    D is a power of two; tokens of out are rows.
    """
    chunks, rows, heads, head_dim = parts.shape
    sizes = {"HEAD_DIM": head_dim, "HEADS": triton.next_power_of_2(heads)}
    _join_kernel[(rows,)](parts, lses, out, lse, chunks, rows, heads, lse.stride(0), **sizes)


def join_tails(tails: Tensor, lses: Tensor, lse: Tensor, chunk_size: int, frame_size: int) -> None:
    """Extend tails [2, H, Fk, L] from the ends of chunks to the last key; lse [H, L] is of all keys."""
    _, heads, frames, rows = tails.shape
    sizes = len(lses), chunk_size, frame_size, rows, heads, *tails.stride()[:3], lse.stride(0)
    grid = triton.cdiv(rows, TILE), heads, frames
    _join_tails_kernel[grid](tails, lses, lse, *sizes, BLOCK=TILE)
