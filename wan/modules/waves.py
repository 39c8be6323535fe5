"""An attention call whose last tiles leave most of a GPU idle: their keys are taken in chunks, then joined.

A tile of queries of one head occupies a multiprocessor until it has seen all keys. The 444 tiles of a block
of the 1.3B go on the 132 of an H200 in four waves, the last of which has work for 48. So whole waves are
launched as they are, and of the tiles that are left the keys are split into chunks, as many as fill the GPU
again. What chunks saw is joined by their log-sum-exp (as FlashAttention-2 splits keys, arXiv 2307.08691).
"""

from functools import cache
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128  # queries and keys
MOST_CHUNKS = 24
# Estimates in steps of one tile of queries over one tile of keys: to begin and to end with a tile of queries,
# and to launch and join chunks.
START, JOIN = 3, 16


@cache
def plan(len_q: int, len_k: int, batch: int, heads: int, multiprocessors: int) -> tuple[int, int]:
    """How many queries see all keys at once, and in how many chunks the others see them.

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


class Launch(Protocol):
    """An attention kernel of [B, L, H, D], to out like q and its log-sum-exp [B, H, Lq].

    With a frame_size, tails [2, B, H, Fk, Lq] get for each frame of keys the sum of a query's exponentials
    from its first key to the last one of all, and, in units of log 2, the maximum that had been subtracted.
    are_chunks: items are chunks of one item's keys, and tails [2, 1, H, Fk, Lq] end with a frame's chunk.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        tails: Tensor | None,
        frame_size: int,
        are_chunks: bool,
    ) -> None: ...


def attend(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, frame_size: int, multiprocessors: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output [B, L, H, D], log-sum-exp [B, H, Lq], and with a frame_size tails [2, B, H, Fk, Lq]."""
    batch, len_q, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, len_q, device=q.device)
    tails = None
    if frame_size:
        tails = torch.empty(2, batch, heads, k.shape[1] // frame_size, len_q, device=q.device)
    whole, chunks = plan(len_q, k.shape[1], batch, heads, multiprocessors)
    if whole:
        first = slice(0, whole)
        of_first = None if tails is None else tails[..., first]
        launch(q[:, first], k, v, out[:, first], lse[..., first], of_first, frame_size, False)
    if whole < len_q:
        last = slice(whole, len_q)
        of_last = None if tails is None else tails[..., last]
        _in_chunks(launch, chunks, q[:, last], k, v, out[0, last], lse[0, :, last], of_last, frame_size)
    return out, lse, tails


def _in_chunks(
    launch: Launch,
    chunks: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tails: Tensor | None,
    frame_size: int,
) -> None:
    """The same for queries [1, L, H, D] with chunks of the keys as items, to out [L, H, D] and lse [H, L]."""
    q = q.expand(chunks, -1, -1, -1).contiguous()
    k, v = (x[0].unflatten(0, (chunks, -1)) for x in (k, v))
    parts, lses = torch.empty_like(q), torch.empty(chunks, *lse.shape, device=q.device)
    launch(q, k, v, parts, lses, tails, frame_size, True)
    join(parts, lses, out, lse)
    if tails is not None:
        join_tails(tails[:, 0], lses, lse, k.shape[1], frame_size)


@triton.jit
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


@triton.jit
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
    """Of what chunks saw, [chunks, L, H, D] with lses [chunks, H, L], to out [L, H, D] and lse [H, L].

    D is a power of two; tokens of out are rows.
    """
    chunks, rows, heads, head_dim = parts.shape
    sizes = {"HEAD_DIM": head_dim, "HEADS": triton.next_power_of_2(heads)}
    _join_kernel[(rows,)](parts, lses, out, lse, chunks, rows, heads, lse.stride(0), **sizes)


def join_tails(tails: Tensor, lses: Tensor, lse: Tensor, chunk_size: int, frame_size: int) -> None:
    """Tails [2, H, Fk, L] to the ends of chunks become tails to the last key; lse [H, L] is of all keys."""
    _, heads, frames, rows = tails.shape
    _join_tails_kernel[triton.cdiv(rows, TILE), heads, frames](
        tails,
        lses,
        lse,
        len(lses),
        chunk_size,
        frame_size,
        rows,
        heads,
        *tails.stride()[:3],
        lse.stride(0),
        BLOCK=TILE,
    )
