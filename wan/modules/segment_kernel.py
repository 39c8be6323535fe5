"""Triton kernels: what is known of unequal segments of keys, whose bounds the GPU alone knows.

Mean keys of runs of tokens, masses of segments, and both gathered by frame and by slot. A program walks along
its own run, so nobody waits for the bounds, and each sum is formed in one order.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS, COLUMNS = 64, 64  # of a tile of keys
SUMMED = 1024  # masses at once: a frame of the 1.3B has 1560 queries
SEGMENTS, GATHERED = 64, 32  # a tile of what gathers values


@triton.jit(do_not_specialize=["stride_b", "stride_ob"])  # else some values compile anew
def _run_mean_kernel(
    k_ptr,
    bounds_ptr,
    out_ptr,
    stride_kb,
    stride_kl,
    stride_b,
    stride_ob,
    stride_on,
    first_token,
    num_columns,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: of one run the mean of COLUMNS numbers of its keys."""
    run, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows, inside = tl.arange(0, TOKENS), columns < num_columns
    start = tl.load(bounds_ptr + batch * stride_b + run).to(tl.int32) - first_token
    stop = tl.load(bounds_ptr + batch * stride_b + run + 1).to(tl.int32) - first_token
    tile = k_ptr + batch * stride_kb + columns[None, :]
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for at in range(start, stop, TOKENS):
        here = (at + rows)[:, None]
        there = (here < stop) & inside[None, :]
        total += tl.load(tile + here.to(tl.int64) * stride_kl, mask=there, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / tl.maximum(stop - start, 1).to(tl.float32)
    tl.store(out_ptr + batch * stride_ob + run * stride_on + columns, mean, mask=inside)


def run_means(k: Tensor, bounds: Tensor, first_token: int, out: Tensor) -> None:
    """Mean key of each run -> out [B, runs, H, D], float32; 0 of a run without tokens.

    k [B, n, H, D] are the tokens from first_token on; run i of an item is bounds[i] .. bounds[i + 1] - 1 of
    all keys, bounds [B or 1, runs + 1].
    """
    batch, _, heads, head_dim = k.shape
    k = k if k.stride()[2:] == (head_dim, 1) else k.contiguous()
    assert out.stride()[2:] == (head_dim, 1)
    of_item = bounds.expand(batch, -1)
    grid = (out.shape[1], triton.cdiv(heads * head_dim, COLUMNS), batch)
    _run_mean_kernel[grid](
        k,
        bounds,
        out,
        k.stride(0),
        k.stride(1),
        of_item.stride(0),
        out.stride(0),
        out.stride(1),
        first_token,
        heads * head_dim,
        TOKENS=TOKENS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )


@triton.jit
def _sum(x_ptr, length, BLOCK: tl.constexpr):
    """Sum of length numbers that follow each other."""
    places = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(0, length, BLOCK):
        total += tl.load(x_ptr + at + places, mask=at + places < length, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["stride_b", "stride_wr", "stride_wf", "before", "num_runs", "count"])
def _segment_sum_kernel(
    whole_ptr,
    tokens_ptr,
    bounds_ptr,
    out_ptr,
    stride_b,
    stride_wr,
    stride_ws,
    stride_wf,
    num_heads,
    num_frames,
    frame_size,
    num_tokens,
    before,
    num_runs,
    num_skipped,
    count,
    first_token,
    BLOCK: tl.constexpr,
):
    """One program: the mass of one segment, from a whole slot's queries or from the tokens of a run."""
    segment, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch_head, frame = row // num_frames, row % num_frames
    if (segment >= before) & (segment < before + num_runs):
        bounds_ptr += batch_head // num_heads * stride_b + segment
        start = tl.load(bounds_ptr).to(tl.int32)
        length = tl.load(bounds_ptr + 1).to(tl.int32) - start
        mass = _sum(tokens_ptr + row * num_tokens + start - first_token, length, BLOCK)
    else:
        slot = tl.where(segment < before, segment, segment - num_runs + num_skipped)
        whole_ptr += batch_head * stride_wr + slot * stride_ws + frame * stride_wf
        mass = _sum(whole_ptr, frame_size, BLOCK) / frame_size
    tl.store(out_ptr + row * count + segment, mass)


def segment_sums(whole: Tensor, tokens: Tensor, bounds: Tensor, runs: range, first_token: int) -> Tensor:
    """Mass of every segment, averaged over the queries of each query frame -> float32 [B, H, Fq, n].

    whole [B, H, slots, Lq or Fq] is the mass of every query, or query frame, on the slots around the runs; it
    may hold those slots, too, in whose place the runs stand. tokens [B, H, Fq, keys] is that on the keys from
    first_token on, and segment i of runs is the keys bounds[i] .. bounds[i + 1] - 1: bounds [B or 1, n + 1].
    """
    batch, heads, num_frames, num_tokens = tokens.shape
    count = bounds.shape[1] - 1
    frame_size = whole.shape[3] // num_frames
    whole = whole if frame_size == 1 or whole.stride(3) == 1 else whole.contiguous()
    rows = whole.flatten(0, 1)  # [B·H, slots, Lq or Fq]
    out = tokens.new_empty(batch, heads, num_frames, count)
    _segment_sum_kernel[count, batch * heads * num_frames](
        rows,
        tokens.contiguous(),
        bounds,
        out,
        bounds.expand(batch, -1).stride(0),
        rows.stride(0),
        rows.stride(1),
        rows.stride(2) * frame_size,
        heads,
        num_frames,
        frame_size,
        num_tokens,
        runs.start,
        len(runs),
        whole.shape[2] - (count - len(runs)),
        count,
        first_token,
        BLOCK=SUMMED,
        num_warps=4,
    )
    return out


@triton.jit
def _product(
    x_ptr, matrix_ptr, out_ptr, num_segments, num_columns, first, ROWS: tl.constexpr, N: tl.constexpr
):
    """N columns from first on of a row x [num_segments] times a matrix."""
    columns, rows = first + tl.arange(0, N), tl.arange(0, ROWS)
    total = tl.zeros([ROWS, N], tl.float32)
    for at in range(0, num_segments, ROWS):
        here = at + rows
        x = tl.load(x_ptr + here, mask=here < num_segments, other=0.0)
        there = (here[:, None] < num_segments) & (columns[None, :] < num_columns)
        tile = matrix_ptr + here[:, None] * num_columns + columns[None, :]
        total += x[:, None] * tl.load(tile, mask=there, other=0.0)
    tl.store(out_ptr + columns, tl.sum(total, 0), mask=columns < num_columns)


@triton.jit(do_not_specialize=["num_segments", "num_frames", "num_slots"])
def _gather_kernel(
    logits_ptr,
    mass_ptr,
    frame_means_ptr,
    slot_means_ptr,
    frame_sums_ptr,
    slot_sums_ptr,
    frame_logits_ptr,
    slot_logits_ptr,
    frame_mass_ptr,
    slot_mass_ptr,
    rows_of_item,
    num_segments,
    num_frames,
    num_slots,
    ROWS: tl.constexpr,
    N: tl.constexpr,
):
    """One program: of one row of logits, and of mass, N frames or N slots."""
    row = tl.program_id(0).to(tl.int64)
    item = row // rows_of_item
    logits_ptr += row * num_segments
    first, frames = tl.program_id(1) * N, tl.cdiv(num_frames, N) * N
    if first < frames:
        at, out = item * num_segments * num_frames, row * num_frames
        means, found = frame_means_ptr + at, frame_logits_ptr + out
        _product(logits_ptr, means, found, num_segments, num_frames, first, ROWS, N)
        if mass_ptr is not None:
            values, sums, found = mass_ptr + row * num_segments, frame_sums_ptr + at, frame_mass_ptr + out
            _product(values, sums, found, num_segments, num_frames, first, ROWS, N)
    else:
        at, out = item * num_segments * num_slots, row * num_slots
        means, found = slot_means_ptr + at, slot_logits_ptr + out
        _product(logits_ptr, means, found, num_segments, num_slots, first - frames, ROWS, N)
        if mass_ptr is not None:
            values, sums, found = mass_ptr + row * num_segments, slot_sums_ptr + at, slot_mass_ptr + out
            _product(values, sums, found, num_segments, num_slots, first - frames, ROWS, N)


def gathered(
    logits: Tensor, mass: Tensor | None, means: Sequence[Tensor], sums: Sequence[Tensor]
) -> dict[str, list[Tensor]]:
    """Values of segments [B, H, Fq, n] by frame and by slot: "logits" times means, and "mass" times sums.

    means and sums are a matrix of the frames and one of the slots, [B or 1, 1, n, m] each.
    """
    logits, mass = logits.contiguous(), None if mass is None else mass.contiguous()
    frames, slots = (x.shape[-1] for x in means)
    rows, count = logits[..., 0].numel(), logits.shape[-1]
    found = [logits.new_empty(*logits.shape[:-1], n) for n in (frames, slots)]
    masses = [] if mass is None else [torch.empty_like(x) for x in found]
    _gather_kernel[rows, triton.cdiv(frames, GATHERED) + triton.cdiv(slots, GATHERED)](
        logits,
        mass,
        *(x.contiguous() for x in (*means, *sums)),
        *found,
        *(masses or (None, None)),
        rows // len(means[0]),
        count,
        frames,
        slots,
        ROWS=SEGMENTS,
        N=GATHERED,
        num_warps=4,
    )
    return {"logits": found} | ({"mass": masses} if masses else {})
