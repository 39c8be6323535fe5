"""Triton kernel: what every key token receives, from q, k and the log-sum-exp of their attention call.

The column sums of a softmax: a program keeps a tile of keys and walks over the queries, so that q kᵀ exists
tile by tile only. mass_kernel.py is its twin for row sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
BLOCK_Q, BLOCK_K, NUM_WARPS, NUM_STAGES = (
    64,
    128,
    8,
    3,
)  # those of mass_kernel.py with keys and queries swapped


@triton.jit
def _weights(k, q, scale, lse):
    """Softmax of one tile [BLOCK_K, BLOCK_Q]; scale in units of log 2, lse in natural ones."""
    return tl.math.exp2(tl.dot(k, q) * scale - lse[None, :] * 1.4426950408889634)


@triton.jit
def _mean_logits(k, q_mean_ptr, dims, HEAD_DIM: tl.constexpr):
    """Products of keys [BLOCK_K, DIM_PAD] with a mean query."""
    q_mean = tl.load(q_mean_ptr + dims, mask=dims < HEAD_DIM, other=0.0)
    return tl.sum(k.to(tl.float32) * q_mean[None, :], 1)


@triton.jit
def _column_kernel(
    q_ptr,
    k_ptr,
    lse_ptr,
    q_mean_ptr,
    mass_ptr,
    logits_ptr,
    scale,
    stride_qb,
    stride_kb,
    num_heads,
    num_frames,
    len_q,
    len_k,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: of BLOCK_K keys of one head the mass from a frame's queries, and maybe the mean logit."""
    batch_head, frame = tl.program_id(1).to(tl.int64), tl.program_id(2)
    of_frame = batch_head * num_frames + frame
    batch, head = batch_head // num_heads, batch_head % num_heads
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    rows, dims = tl.arange(0, BLOCK_Q), tl.arange(0, DIM_PAD)
    stride = num_heads * HEAD_DIM

    k_ptr += batch * stride_kb + head * HEAD_DIM
    inside = (columns[:, None] < len_k) & (dims[None, :] < HEAD_DIM)
    k = tl.load(k_ptr + columns.to(tl.int64)[:, None] * stride + dims[None, :], mask=inside, other=0.0)
    if q_mean_ptr is not None:
        logits = _mean_logits(k, q_mean_ptr + of_frame * HEAD_DIM, dims, HEAD_DIM)
        tl.store(logits_ptr + of_frame * len_k + columns, logits, mask=columns < len_k)

    total = tl.zeros([BLOCK_K], tl.float32)
    tile = q_ptr + batch * stride_qb + head * HEAD_DIM + rows[None, :] * stride + dims[:, None]
    tile += frame.to(tl.int64) * len_q * stride
    lse_ptr += of_frame * len_q + rows
    whole = len_q // BLOCK_Q * BLOCK_Q
    for start in range(0, whole, BLOCK_Q):
        # masked loads cost: none where none is needed
        q = tl.load(tile) if HEAD_DIM == DIM_PAD else tl.load(tile, mask=dims[:, None] < HEAD_DIM, other=0.0)
        total += tl.sum(_weights(k, q, scale, tl.load(lse_ptr + start)), 1)
        tile += BLOCK_Q * stride
    if whole < len_q:
        there = whole + rows < len_q
        q = tl.load(tile, mask=there[None, :] & (dims[:, None] < HEAD_DIM), other=0.0)
        weights = _weights(k, q, scale, tl.load(lse_ptr + whole, mask=there, other=0.0))
        total += tl.sum(tl.where(there[None, :], weights, 0.0), 1)
    tl.store(mass_ptr + of_frame * len_k + columns, total / len_q, mask=columns < len_k)


def key_token_means(q: Tensor, k: Tensor, lse: Tensor, num_query_frames: int = 1) -> tuple[Tensor, Tensor]:
    """Mean logit and mass of every key token, means over each frame's queries -> float32 [B, H, F, Lk] each.

    q [B, Lq, H, D], k [B, Lk, H, D], lse [B, H, Lq] in natural units.
    """
    by_frame = q.unflatten(1, (num_query_frames, -1))
    q_mean = (by_frame.mean(2, dtype=torch.float32) * q.shape[-1] ** -0.5).transpose(1, 2).contiguous()
    logits = torch.empty(*q_mean.shape[:3], k.shape[1], device=q.device)
    return logits, _columns(q, k, lse, num_query_frames, q_mean, logits)


def key_token_mass(q: Tensor, k: Tensor, lse: Tensor, num_query_frames: int = 1) -> Tensor:
    """The mass of key_token_means alone -> float32 [B, H, F, Lk]."""
    return _columns(q, k, lse, num_query_frames, None, None)


def _columns(
    q: Tensor, k: Tensor, lse: Tensor, num_query_frames: int, q_mean: Tensor | None, logits: Tensor | None
) -> Tensor:
    """Mass of every key token; with q_mean [B, H, F, D] its mean logit is written to logits, too."""
    batch, len_q, heads, head_dim = q.shape
    rows = (heads * head_dim, head_dim, 1)
    q, k = (x if x.stride()[1:] == rows else x.contiguous() for x in (q, k))
    mass = torch.empty(batch, heads, num_query_frames, k.shape[1], device=q.device)
    grid = (triton.cdiv(k.shape[1], BLOCK_K), batch * heads, num_query_frames)
    _column_kernel[grid](
        q,
        k,
        lse.float().contiguous(),
        q_mean,
        mass,
        logits,
        head_dim**-0.5 * LOG2_E,
        q.stride(0),
        k.stride(0),
        heads,
        num_query_frames,
        len_q // num_query_frames,
        k.shape[1],
        HEAD_DIM=head_dim,
        DIM_PAD=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_Q=BLOCK_Q,
        BLOCK_K=BLOCK_K,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return mass
