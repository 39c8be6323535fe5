"""Triton kernels for softmax mass by key frame or key token, from q, k and attention's log-sum-exp.

They compute q kᵀ tile by tile and sum exp2(s − lse): half of attention's matrix products, no second softmax,
no matrix in memory.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from wan.kernels import launch

LOG2_E = 1.4426950408889634
BLOCK_Q, BLOCK_K, NUM_WARPS, NUM_STAGES = 128, 64, 8, 3  # fastest of 13 shapes on an H200 at head dim 128
# Keys that a program takes, in whole frames: 3 of the 1.3B. On an H200 that is fastest at 21 key frames, and
# even with 1 frame at 12 (docs/benchmarks/mass_h200.json at 01e1ad6). More programs leave fewer
# multiprocessors idle at the end, fewer programs read the queries less often.
KEYS_EACH = 4800


@triton.jit
def _tile_mass(q, k, scale, lse):
    """exp2(q kᵀ scale − lse) of one tile [BLOCK_Q, BLOCK_K]; scale and lse in units of log 2."""
    return tl.math.exp2(tl.dot(q, k) * scale - lse[:, None])


@triton.jit
def _whole_tile(tile, dims, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Load a full tile of keys [DIM_PAD, BLOCK_K], without a mask if possible, since masks cost time."""
    return tl.load(tile) if HEAD_DIM == DIM_PAD else tl.load(tile, mask=dims[:, None] < HEAD_DIM, other=0.0)


@triton.jit(do_not_specialize=["num_frames", "frames_each"])  # else some values compile anew
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
        tile = k_head + (frame * frame_size + columns).to(tl.int64)[None, :] * stride_kl
        total = tl.zeros([BLOCK_Q], tl.float32)
        for _ in range(0, whole, BLOCK_K):
            total += tl.sum(_tile_mass(q, _whole_tile(tile, dims, HEAD_DIM, DIM_PAD), scale, lse), 1)
            tile += BLOCK_K * stride_kl
        if whole < frame_size:  # the rest of the frame
            inside = whole + columns < frame_size
            k = tl.load(tile, mask=inside[None, :] & (dims[:, None] < HEAD_DIM), other=0.0)
            total += tl.sum(tl.where(inside[None, :], _tile_mass(q, k, scale, lse), 0.0), 1)
        tl.store(mass_ptr + (batch_head * num_frames + frame) * len_q + rows, total, mask=rows < len_q)


def _tiles(head_dim: int, block_q: int, block_k: int) -> dict[str, int]:
    """Return the constants of a kernel that works on tiles of q kᵀ."""
    dims = {"HEAD_DIM": head_dim, "DIM_PAD": max(16, triton.next_power_of_2(head_dim))}
    return dims | {"BLOCK_Q": block_q, "BLOCK_K": block_k, "num_warps": NUM_WARPS, "num_stages": NUM_STAGES}


def query_frame_mass(q: Tensor, k: Tensor, lse: Tensor, num_key_frames: int) -> Tensor:
    """Return the mass of every query on every key frame, float32 [B, H, Fk, Lq].

    q [B, Lq, H, D], k [B, Lk, H, D], lse [B, H, Lq]. A program takes KEYS_EACH keys, in whole key frames.
    """
    batch, len_q, heads, head_dim = q.shape
    if q.stride(-1) != 1:
        q = q.contiguous()
    if k.stride(-1) != 1:
        k = k.contiguous()
    frame_size = k.shape[1] // num_key_frames
    frames_each = max(1, KEYS_EACH // frame_size)
    mass = torch.empty(batch, heads, num_key_frames, len_q, dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(len_q, BLOCK_Q), batch * heads, triton.cdiv(num_key_frames, frames_each))
    scale, frames = head_dim**-0.5 * LOG2_E, (num_key_frames, frame_size, frames_each)
    sizes = (*q.stride()[:3], *k.stride()[:3], heads, len_q, *frames)
    tiles = _tiles(head_dim, BLOCK_Q, BLOCK_K)
    launch(_mass_kernel, grid, q, k, lse.float().contiguous(), mass, scale, *sizes, **tiles)
    return mass


# Under a mask nobody knows the log-sum-exp: segments of keys have one each, and that of a row is their sum's.
@triton.jit
def _raised(logits, peak, total):
    """Add a tile's exponentials [BLOCK_Q, BLOCK_K] to total under the rows' new maxima, in units of log 2."""
    higher = tl.maximum(peak, tl.max(logits, 1))
    return higher, total * tl.math.exp2(peak - higher) + tl.sum(tl.math.exp2(logits - higher[:, None]), 1)


@triton.jit(do_not_specialize=["num_segments", "segments_each"])
def _segment_kernel(
    q_ptr,
    k_ptr,
    starts_ptr,
    stops_ptr,
    lse_ptr,
    scale,
    stride_qb,
    stride_ql,
    stride_qh,
    stride_kb,
    stride_kl,
    stride_kh,
    num_heads,
    len_q,
    num_segments,
    segments_each,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: BLOCK_Q queries of one head against segments_each segments of keys."""
    batch_head = tl.program_id(1).to(tl.int64)
    batch, head = batch_head // num_heads, batch_head % num_heads
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dims, columns = tl.arange(0, DIM_PAD), tl.arange(0, BLOCK_K)

    q_ptr += batch * stride_qb + head * stride_qh
    there = (rows[:, None] < len_q) & (dims[None, :] < HEAD_DIM)
    q = tl.load(q_ptr + rows[:, None].to(tl.int64) * stride_ql + dims[None, :], mask=there, other=0.0)
    k_head = k_ptr + batch * stride_kb + head * stride_kh + dims[:, None]

    begin = tl.program_id(2) * segments_each
    for segment in range(begin, min(begin + segments_each, num_segments)):
        start, stop = tl.load(starts_ptr + segment), tl.load(stops_ptr + segment)
        whole = (stop - start) // BLOCK_K * BLOCK_K
        tile = k_head + (start + columns).to(tl.int64)[None, :] * stride_kl
        peak = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
        for _ in range(0, whole, BLOCK_K):
            logits = tl.dot(q, _whole_tile(tile, dims, HEAD_DIM, DIM_PAD)) * scale
            peak, total = _raised(logits, peak, total)
            tile += BLOCK_K * stride_kl
        if start + whole < stop:  # the rest of the segment
            inside = start + whole + columns < stop
            k = tl.load(tile, mask=inside[None, :] & (dims[:, None] < HEAD_DIM), other=0.0)
            logits = tl.where(inside[None, :], tl.dot(q, k) * scale, float("-inf"))
            peak, total = _raised(logits, peak, total)
        lse = (peak + tl.math.log2(total)) * 0.6931471805599453
        tl.store(lse_ptr + (batch_head * num_segments + segment) * len_q + rows, lse, mask=rows < len_q)


def segment_lse(q: Tensor, k: Tensor, segments: Sequence[tuple[int, int]]) -> Tensor:
    """Return the log-sum-exp of every query on every segment of keys, float32 [B, H, segments, Lq].

    q [B, Lq, H, D], k [B, Lk, H, D]; segments are first keys and ones after the last.
    """
    batch, len_q, heads, head_dim = q.shape
    if q.stride(-1) != 1:
        q = q.contiguous()
    if k.stride(-1) != 1:
        k = k.contiguous()
    starts, stops = torch.tensor(list(zip(*segments, strict=True)), dtype=torch.int32, device=q.device)
    lse = torch.empty(batch, heads, len(segments), len_q, dtype=torch.float32, device=q.device)
    num_keys = sum(stop - start for start, stop in segments)
    segments_each = max(1, KEYS_EACH * len(segments) // max(num_keys, 1))
    grid = (triton.cdiv(len_q, BLOCK_Q), batch * heads, triton.cdiv(len(segments), segments_each))
    sizes = (*q.stride()[:3], *k.stride()[:3], heads, len_q, len(segments), segments_each)
    tiles = _tiles(head_dim, BLOCK_Q, BLOCK_K)
    launch(_segment_kernel, grid, q, k, starts, stops, lse, head_dim**-0.5 * LOG2_E, *sizes, **tiles)
    return lse


# What every key token receives: as above with keys and queries swapped.
COLUMN_BLOCK_Q, COLUMN_BLOCK_K = 64, 128


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
    """One program: the mass of BLOCK_K keys from a frame's queries, perhaps the mean logit."""
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
    """Return mean logit and mass of every key token by query frame, float32 [B, H, F, Lk] each.

    q [B, Lq, H, D], k [B, Lk, H, D], lse [B, H, Lq] in natural units.
    """
    by_frame = q.unflatten(1, (num_query_frames, -1))
    q_mean = (by_frame.mean(2, dtype=torch.float32) * q.shape[-1] ** -0.5).transpose(1, 2).contiguous()
    logits = torch.empty(*q_mean.shape[:3], k.shape[1], device=q.device)
    return logits, _columns(q, k, lse, num_query_frames, q_mean=q_mean, logits=logits)


def key_token_mass(q: Tensor, k: Tensor, lse: Tensor, num_query_frames: int = 1) -> Tensor:
    """Return the mass of key_token_means alone, float32 [B, H, F, Lk]."""
    return _columns(q, k, lse, num_query_frames)


def _columns(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    num_query_frames: int,
    q_mean: Tensor | None = None,
    logits: Tensor | None = None,
) -> Tensor:
    """Return the mass of every key token; with q_mean [B, H, F, D] write its mean logit to logits, too."""
    batch, len_q, heads, head_dim = q.shape
    rows = (heads * head_dim, head_dim, 1)
    if q.stride()[1:] != rows:
        q = q.contiguous()
    if k.stride()[1:] != rows:
        k = k.contiguous()
    mass = torch.empty(batch, heads, num_query_frames, k.shape[1], device=q.device)
    grid = (triton.cdiv(k.shape[1], COLUMN_BLOCK_K), batch * heads, num_query_frames)
    sizes = q.stride(0), k.stride(0), heads, num_query_frames, len_q // num_query_frames, k.shape[1]
    scale, tiles = head_dim**-0.5 * LOG2_E, _tiles(head_dim, COLUMN_BLOCK_Q, COLUMN_BLOCK_K)
    launch(_column_kernel, grid, q, k, lse.float().contiguous(), q_mean, mass, logits, scale, *sizes, **tiles)
    return mass
