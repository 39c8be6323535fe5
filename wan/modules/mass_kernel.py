"""Triton kernel: softmax mass per key frame from q, k and the log-sum-exp of their attention call.

It forms q kᵀ tile by tile, takes exp2(s − lse) and keeps one row sum per key frame: half the products of
attention, no second softmax, and no matrix in memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
BLOCK_ROWS = 512  # queries whose sums are read at once
BLOCK_Q, BLOCK_K, NUM_WARPS, NUM_STAGES = 128, 64, 8, 3  # fastest of 13 shapes on an H200 at head dim 128
# Keys that a program takes, in whole frames: 3 of the 1.3B. On an H200 that is fastest at 21 key frames, and
# even with 1 frame at 12 (docs/benchmarks/mass_h200.json). More programs leave fewer multiprocessors idle at
# the end, fewer programs read the queries less often.
KEYS_EACH = 4800


@triton.jit
def _tile_mass(q, k, scale, lse):
    """exp2(q kᵀ scale − lse) of one tile [BLOCK_Q, BLOCK_K]; scale and lse in units of log 2."""
    return tl.math.exp2(tl.dot(q, k) * scale - lse[:, None])


@triton.jit
def _whole_tile(tile, dims, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Keys [DIM_PAD, BLOCK_K] that are all there; masked loads cost time: none where none is needed."""
    return tl.load(tile) if HEAD_DIM == DIM_PAD else tl.load(tile, mask=dims[:, None] < HEAD_DIM, other=0.0)


@triton.jit(do_not_specialize=["num_frames", "frames_each", "gap_at", "gap"])  # else some values compile anew
def _mass_kernel(
    q_ptr,
    k_ptr,
    lse_ptr,
    mass_ptr,
    scale,
    stride_qb,
    stride_ql,
    stride_qh,
    stride_kb,
    stride_kl,
    stride_kh,
    num_heads,
    len_q,
    num_frames,
    frame_size,
    frames_each,
    gap_at,
    gap,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: BLOCK_Q queries of one head against frames_each frames of keys."""
    batch_head = tl.program_id(1).to(tl.int64)
    batch, head = batch_head // num_heads, batch_head % num_heads
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dims, columns = tl.arange(0, DIM_PAD), tl.arange(0, BLOCK_K)
    whole = frame_size // BLOCK_K * BLOCK_K

    q_ptr += batch * stride_qb + head * stride_qh
    there = (rows[:, None] < len_q) & (dims[None, :] < HEAD_DIM)
    q = tl.load(q_ptr + rows[:, None] * stride_ql + dims[None, :], mask=there, other=0.0)
    lse = tl.load(lse_ptr + batch_head * len_q + rows, mask=rows < len_q, other=0.0) * 1.4426950408889634
    k_head = k_ptr + batch * stride_kb + head * stride_kh + dims[:, None]

    begin = tl.program_id(2) * frames_each
    for frame in range(begin, min(begin + frames_each, num_frames)):
        first = frame * frame_size + tl.where(frame < gap_at, 0, gap)
        tile = k_head + (first + columns).to(tl.int64)[None, :] * stride_kl
        total = tl.zeros([BLOCK_Q], tl.float32)
        for _ in range(0, whole, BLOCK_K):
            total += tl.sum(_tile_mass(q, _whole_tile(tile, dims, HEAD_DIM, DIM_PAD), scale, lse), 1)
            tile += BLOCK_K * stride_kl
        if whole < frame_size:  # the rest of the frame
            inside = whole + columns < frame_size
            k = tl.load(tile, mask=inside[None, :] & (dims[:, None] < HEAD_DIM), other=0.0)
            total += tl.sum(tl.where(inside[None, :], _tile_mass(q, k, scale, lse), 0.0), 1)
        tl.store(mass_ptr + (batch_head * num_frames + frame) * len_q + rows, total, mask=rows < len_q)


def query_frame_mass(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    num_key_frames: int,
    frames_each: int | None = None,
    left_out: range = range(0),
) -> Tensor:
    """Mass of every query on every key frame -> float32 [B, H, Fk, Lq].

    q [B, Lq, H, D], k [B, Lk, H, D], lse [B, H, Lq]. A program takes frames_each key frames, or as many
    as make KEYS_EACH keys. The keys left_out lie between two frames and are of none.
    """
    batch, len_q, heads, head_dim = q.shape
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    frame_size = (k.shape[1] - len(left_out)) // num_key_frames
    frames_each = frames_each or max(1, KEYS_EACH // frame_size)
    mass = torch.empty(batch, heads, num_key_frames, len_q, dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(len_q, BLOCK_Q), batch * heads, triton.cdiv(num_key_frames, frames_each))
    _mass_kernel[grid](
        q,
        k,
        lse.float().contiguous(),
        mass,
        head_dim**-0.5 * LOG2_E,
        q.stride(0),
        q.stride(1),
        q.stride(2),
        k.stride(0),
        k.stride(1),
        k.stride(2),
        heads,
        len_q,
        num_key_frames,
        frame_size,
        frames_each,
        left_out.start // frame_size,
        len(left_out),
        HEAD_DIM=head_dim,
        DIM_PAD=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_Q=BLOCK_Q,
        BLOCK_K=BLOCK_K,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return mass


@triton.jit(do_not_specialize=["num_frames"])
def _tails_kernel(tails_ptr, mass_ptr, part, num_frames, len_q, rows, BLOCK: tl.constexpr):
    """One program: mean mass of a key frame over the queries of a query frame of one head."""
    batch_head, query_frame, frame = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    sums = tails_ptr + batch_head * num_frames * len_q + query_frame * rows
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        there = row < rows
        highest = tl.load(sums + part + row, mask=there, other=0.0)
        here, after = sums + frame * len_q + row, sums + (frame + 1) * len_q + row
        mass = _tail(here, part, highest, there)
        mass -= _tail(after, part, highest, there & (frame + 1 < num_frames))
        total += mass / tl.load(sums + row, mask=there, other=1.0)
    out = mass_ptr + (batch_head * tl.num_programs(1) + query_frame) * num_frames + frame
    tl.store(out, tl.sum(total) / rows)


@triton.jit
def _tail(sums, part, highest, there):
    """Sums of exponentials, whose own maximum lies part behind them, as if the highest one was subtracted."""
    maximum = tl.load(sums + part, mask=there, other=0.0)
    return tl.load(sums, mask=there, other=0.0) * tl.math.exp2(maximum - highest)


def mass_of_tails(tails: Tensor, num_query_frames: int) -> Tensor:
    """Mass by frame [B, H, Fq, Fk] from what the attention kernel kept, [2, B, H, Fk, Lq].

    The whole sums and the largest maximum stand with the first frame: the kernel walks to it.
    """
    _, batch, heads, num_frames, len_q = tails.shape
    mass = torch.empty(batch, heads, num_query_frames, num_frames, device=tails.device)
    grid = (batch * heads, num_query_frames, num_frames)
    rows = len_q // num_query_frames
    _tails_kernel[grid](tails, mass, tails.stride(0), num_frames, len_q, rows, BLOCK=BLOCK_ROWS, num_warps=4)
    return mass
