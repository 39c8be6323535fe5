"""Triton kernel: sums over the tokens of a call's query frames, and mean keys of some of its key frames.

One launch reads both: each alone takes microseconds. A program walks down one frame, so each sum is formed in
one order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# A program has 16 KiB of bfloat16 under way at a time; three query and three key frames of the 1.3B make 288.
TOKENS, COLUMNS, NUM_WARPS = 256, 32, 4


@triton.jit
def _column_sums(x_ptr, stride_l, tokens, columns, inside, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums [COLUMNS] over the tokens that begin at x_ptr."""
    rows = tl.arange(0, TOKENS)
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for at in range(0, tokens, TOKENS):
        here = (at + rows)[:, None]
        tile = x_ptr + here.to(tl.int64) * stride_l + columns[None, :]
        total += tl.load(tile, mask=(here < tokens) & inside[None, :], other=0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["stride_mb", "q_frames", "q_tokens", "k_tokens"])  # else they compile anew
def _frame_sum_kernel(
    q_ptr,
    k_ptr,
    sums_ptr,
    means_ptr,
    stride_qb,
    stride_ql,
    stride_kb,
    stride_kl,
    stride_mb,
    q_frames,
    q_tokens,
    k_tokens,
    num_columns,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: COLUMNS numbers of one frame, of the queries first and then of the keys."""
    frame, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    if frame < q_frames:
        first = q_ptr + batch * stride_qb + frame * q_tokens * stride_ql
        total = _column_sums(first, stride_ql, q_tokens, columns, inside, TOKENS, COLUMNS)
        tl.store(sums_ptr + (batch * q_frames + frame) * num_columns + columns, total, mask=inside)
    else:
        first = k_ptr + batch * stride_kb + (frame - q_frames) * k_tokens * stride_kl
        total = _column_sums(first, stride_kl, k_tokens, columns, inside, TOKENS, COLUMNS) / k_tokens
        place = means_ptr + batch * stride_mb + (frame - q_frames) * num_columns + columns
        tl.store(place, total, mask=inside)


def sums_and_means(q: Tensor, num_query_frames: int, k: Tensor, means: Tensor) -> Tensor:
    """Sums over the tokens of each query frame -> float32 [B, Fq, H, D]; mean keys -> means [B, n, H, D].

    q [B, Lq, H, D], k [B, Lk, H, D] the keys of n whole frames, n >= 0. means is float32, may be a part of a
    larger buffer's frames, and is filled.
    """
    batch, len_q, heads, head_dim = q.shape
    q, k = (x if x.stride()[2:] == (head_dim, 1) else x.contiguous() for x in (q, k))
    count, columns = means.shape[1], heads * head_dim
    assert means.stride()[1:] == (columns, head_dim, 1) and means.dtype == torch.float32
    sums = torch.empty(batch, num_query_frames, heads, head_dim, dtype=torch.float32, device=q.device)
    _frame_sum_kernel[triton.cdiv(columns, COLUMNS), num_query_frames + count, batch](
        q,
        k,
        sums,
        means,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        means.stride(0),
        num_query_frames,
        len_q // num_query_frames,
        k.shape[1] // max(1, count),
        columns,
        TOKENS=TOKENS,
        COLUMNS=COLUMNS,
        num_warps=NUM_WARPS,
    )
    return sums
