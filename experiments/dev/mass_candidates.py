"""Candidates for the mass kernel: benchmark_mass.py says which is faster than wan/modules/mass_kernel.py.

That one begins anew with every key frame. Here a tile may hold the end of a frame, and tiles follow each
other: in Triton, and for Hopper in Gluon. There TMA brings the keys, the queries stay in registers, and the
next product runs on the tensor cores while the exponentials of this one are taken.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from wan.modules.mass_kernel import LOG2_E

barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # of Triton 3.6, and since 3.7


class Shape(NamedTuple):
    """Of a program: queries, keys of a tile, tiles on their way, warps, and key frames."""

    block_q: int
    block_k: int
    stages: int
    warps: int
    frames: int


FLAT = [Shape(128, 64, 3, 8, frames) for frames in (3, 7)]
# The first needs few enough registers for two programs on a multiprocessor; of the others one fits.
HOPPER = [Shape(128, 64, 4, 8, frames) for frames in (1, 3, 7)]
HOPPER += [
    Shape(*sizes, frames)
    for sizes in ((256, 64, 4, 16), (128, 128, 3, 8), (256, 64, 4, 8))
    for frames in (3, 7)
]


@triton.jit
def _flat_mass_kernel(
    q_ptr,
    k_ptr,
    lse_ptr,
    mass_ptr,
    scale,
    stride_ql,
    stride_qh,
    stride_kl,
    stride_kh,
    len_q,
    num_frames,
    frame_size,
    frames_each,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: BLOCK_Q queries of one head against frames_each key frames."""
    head, first = tl.program_id(1).to(tl.int64), tl.program_id(2) * frames_each
    len_k = (min(first + frames_each, num_frames) - first) * frame_size
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dims, columns = tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_K)
    at = q_ptr + head * stride_qh + rows[:, None] * stride_ql + dims[None, :]
    q = tl.load(at, mask=rows[:, None] < len_q, other=0.0)
    lse = tl.load(lse_ptr + head * len_q + rows, mask=rows < len_q, other=0.0) * 1.4426950408889634
    place = (first * frame_size + columns).to(tl.int64)[None, :]
    tile = k_ptr + head * stride_kh + dims[:, None] + place * stride_kl
    out = mass_ptr + (head * num_frames + first) * len_q + rows
    total, end, whole = tl.zeros([BLOCK_Q], tl.float32), frame_size, len_k // BLOCK_K * BLOCK_K
    for start in range(0, whole, BLOCK_K):
        weights = tl.math.exp2(tl.dot(q, tl.load(tile)) * scale - lse[:, None])
        tile += BLOCK_K * stride_kl
        if start + BLOCK_K >= end:
            own = tl.sum(tl.where((start + columns < end)[None, :], weights, 0.0), 1)
            tl.store(out, total + own, mask=rows < len_q)
            out, end, total = out + len_q, end + frame_size, tl.sum(weights, 1) - own
        else:
            total += tl.sum(weights, 1)
    if whole < len_k:
        there = (whole + columns < len_k)[None, :]
        weights = tl.math.exp2(tl.dot(q, tl.load(tile, mask=there, other=0.0)) * scale - lse[:, None])
        tl.store(out, total + tl.sum(tl.where(there, weights, 0.0), 1), mask=rows < len_q)


@gluon.jit
def _load(
    keys, tiles, arrived, tile, first_key, first_dim, count, BLOCK_K: gl.constexpr, STAGES: gl.constexpr
):
    """Have a tile of keys brought, where there is one."""
    there, stage = tile < count, tile % STAGES
    mbarrier.expect(arrived.index(stage), keys.block_type.nbytes, pred=there)
    at = [first_key + tile * BLOCK_K, first_dim]
    tma.async_copy_global_to_shared(keys, at, arrived.index(stage), tiles.index(stage), pred=there)


@gluon.jit
def _begun(keys, first_key, first_dim, count, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Room for STAGES tiles of keys, on their way, and what says that they have arrived."""
    tiles = gl.allocate_shared_memory(keys.dtype, [STAGES, BLOCK_K, keys.block_type.shape[1]], keys.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
    for stage in gl.static_range(STAGES):
        _load(keys, tiles, arrived, stage, first_key, first_dim, count, BLOCK_K, STAGES)
    return tiles, arrived


@gluon.jit
def _product(
    q,
    tiles,
    arrived,
    tile,
    BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    MMA: gl.constexpr,
):
    """q kᵀ of a tile, begun."""
    stage = tile % STAGES
    mbarrier.wait(arrived.index(stage), (tile // STAGES) & 1)
    zeros = gl.zeros([BLOCK_Q, BLOCK_K], gl.float32, MMA)
    return warpgroup_mma(q, tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _finished(
    begun,
    keys,
    tiles,
    arrived,
    tile,
    first_key,
    first_dim,
    count,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A product that was begun [BLOCK_Q, BLOCK_K]; a later tile takes the place of the one it has read."""
    product = warpgroup_mma_wait(0, deps=[begun])
    barrier()  # until every warp has read it
    _load(keys, tiles, arrived, tile + STAGES, first_key, first_dim, count, BLOCK_K, STAGES)
    return product


@gluon.jit
def _queries(q_ptr, stride, len_q, BLOCK_Q: gl.constexpr, HEAD_DIM: gl.constexpr, MMA: gl.constexpr):
    """The program's queries of a head [BLOCK_Q, HEAD_DIM], as a product takes them from registers."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    rows = gl.program_id(0) * BLOCK_Q + gl.arange(0, BLOCK_Q, gl.SliceLayout(1, OPERAND))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, OPERAND))
    return gl.load(q_ptr + rows[:, None] * stride + dims[None, :], mask=(rows < len_q)[:, None], other=0.0)


@gluon.jit
def _hopper_mass_kernel(
    keys,
    q_ptr,
    lse_ptr,
    mass_ptr,
    scale,
    stride_ql,
    stride_qh,
    len_q,
    num_frames,
    frame_size,
    frames_each,
    HEAD_DIM: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """One program: BLOCK_Q queries of one head against frames_each key frames; keys [len_k, heads * D]."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_K, 16])
    head, first = gl.program_id(1), gl.program_id(2) * frames_each
    first_key, first_dim = first * frame_size, head * HEAD_DIM
    len_k = (min(first + frames_each, num_frames) - first) * frame_size
    count, end = gl.cdiv(len_k, BLOCK_K), frame_size

    tiles, arrived = _begun(keys, first_key, first_dim, count, BLOCK_K, STAGES)
    q = _queries(q_ptr + head * stride_qh, stride_ql, len_q, BLOCK_Q, HEAD_DIM, MMA)
    rows = gl.program_id(0) * BLOCK_Q + gl.arange(0, BLOCK_Q, gl.SliceLayout(1, MMA))
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, MMA))
    lse = gl.load(lse_ptr + head * len_q + rows, mask=rows < len_q, other=0.0) * 1.4426950408889634

    out = mass_ptr + (head * num_frames + first) * len_q + rows
    total = gl.zeros([BLOCK_Q], gl.float32, gl.SliceLayout(1, MMA))
    begun = _product(q, tiles, arrived, 0, BLOCK_Q, BLOCK_K, STAGES, MMA)
    logits = _finished(begun, keys, tiles, arrived, 0, first_key, first_dim, count, BLOCK_K, STAGES)
    for tile in range(0, count - 1):
        begun = _product(q, tiles, arrived, tile + 1, BLOCK_Q, BLOCK_K, STAGES, MMA)
        weights = gl.exp2(logits * scale - lse[:, None])
        if (tile + 1) * BLOCK_K >= end:
            own = gl.sum(gl.where((tile * BLOCK_K + columns < end)[None, :], weights, 0.0), 1)
            gl.store(out, total + own, mask=rows < len_q)
            out, end, total = out + len_q, end + frame_size, gl.sum(weights, 1) - own
        else:
            total += gl.sum(weights, 1)
        logits = _finished(
            begun, keys, tiles, arrived, tile + 1, first_key, first_dim, count, BLOCK_K, STAGES
        )
    weights = gl.exp2(logits * scale - lse[:, None])
    there = (count - 1) * BLOCK_K + columns < len_k
    gl.store(out, total + gl.sum(gl.where(there[None, :], weights, 0.0), 1), mask=rows < len_q)


def flat_frame_mass(q: Tensor, k: Tensor, lse: Tensor, num_key_frames: int, shape: Shape) -> Tensor:
    """query_frame_mass of wan/modules/mass_kernel.py for one video: q [1, Lq, H, D], k [1, Lk, H, D]."""
    mass, grid, frame_size = _prepared(q, k, num_key_frames, shape)
    _flat_mass_kernel[grid](
        q,
        k,
        lse,
        mass,
        q.shape[3] ** -0.5 * LOG2_E,
        *q.stride()[1:3],
        *k.stride()[1:3],
        q.shape[1],
        num_key_frames,
        frame_size,
        shape.frames,
        HEAD_DIM=q.shape[3],
        BLOCK_Q=shape.block_q,
        BLOCK_K=shape.block_k,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return mass


def hopper_frame_mass(q: Tensor, k: Tensor, lse: Tensor, num_key_frames: int, shape: Shape) -> Tensor:
    """The same in Gluon, on compute capability 9.0; heads lie side by side in k."""
    mass, grid, frame_size = _prepared(q, k, num_key_frames, shape)
    _, len_k, heads, head_dim = k.shape
    block, dtype = [shape.block_k, head_dim], gl.bfloat16 if k.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    _hopper_mass_kernel[grid](
        TensorDescriptor(k, [len_k, heads * head_dim], [k.stride(1), 1], block, layout),
        q,
        lse,
        mass,
        head_dim**-0.5 * LOG2_E,
        *q.stride()[1:3],
        q.shape[1],
        num_key_frames,
        frame_size,
        shape.frames,
        HEAD_DIM=head_dim,
        BLOCK_Q=shape.block_q,
        BLOCK_K=shape.block_k,
        STAGES=shape.stages,
        WARPS=shape.warps,
        num_warps=shape.warps,
    )
    return mass


def _prepared(q: Tensor, k: Tensor, num_key_frames: int, shape: Shape) -> tuple[Tensor, tuple, int]:
    """Room for the mass [1, H, Fk, Lq], the grid of programs, and the tokens of a frame."""
    (_, len_q, heads, head_dim), frame_size = q.shape, k.shape[1] // num_key_frames
    if shape.block_k > frame_size or q.stride(3) != 1 or k.stride()[2:] != (head_dim, 1):
        raise ValueError(f"frames of {frame_size} tokens, or strides {q.stride()}, {k.stride()}, do not fit")
    mass = torch.empty(1, heads, num_key_frames, len_q, dtype=torch.float32, device=q.device)
    grid = triton.cdiv(len_q, shape.block_q), heads, triton.cdiv(num_key_frames, shape.frames)
    return mass, grid, frame_size
