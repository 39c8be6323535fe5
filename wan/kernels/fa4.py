"""FlashAttention-4's forward on Hopper, launched without its Python front, and with sums at key frames.

flash-attn-4's own function takes 0.07 ms of Python before each launch, more than a short call lasts
(docs/benchmarks/attention_h200.json). The kernel is the package's, compiled as that function compiles it: the
same bits, but for the queries whose keys wan/modules/py takes in chunks. For a captured mass it is
compiled once more, with one addition: where a key frame begins, it stores the row sums that its softmax has
anyway. Mass by key frame then costs neither a second q kᵀ nor a second softmax, and the output stays the
same, bit for bit.

It takes hold of the package's inside, hence of one version: attention_backend.LAUNCHED.
"""

import inspect
import operator
import warnings
from functools import cache
from typing import Any, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
import torch
import triton
import triton.language as tl
from cutlass import Float32, Int32
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.seqlen_info import SeqlenInfoQK
from flash_attn.cute.softmax import Softmax
from flash_attn.cute.utils import AuxData, warp_reduce
from quack import layout_utils
from quack.compile_utils import make_fake_stream, make_fake_tensor
from torch import Tensor

from wan.backends import TILE

# --- An attention call whose last tiles leave most of a GPU idle: their keys are taken in chunks, then joined
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


class Seen(NamedTuple):
    """What queries saw: output like q, log-sum-exp [B, H, Lq], and where they are wanted tails of key frames.

    tails [2, B, H, Fk, Lq] hold for each frame of keys the sum of a query's exponentials from its first key
    to the last one of all, and, in units of log 2, the maximum that had been subtracted.
    """

    out: Tensor
    lse: Tensor
    tails: Tensor | None

    def of(self, queries: slice) -> "Seen":
        tails = None if self.tails is None else self.tails[..., queries]
        return Seen(self.out[:, queries], self.lse[..., queries], tails)


class Launch(Protocol):
    """An attention kernel of [B, L, H, D], which writes what queries see.

    are_chunks: items are chunks of one item's keys, and tails [2, 1, H, Fk, Lq] end with a frame's chunk.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, frame_size: int, are_chunks: bool
    ) -> None: ...


def attend(launch: Launch, q: Tensor, k: Tensor, v: Tensor, frame_size: int, multiprocessors: int) -> Seen:
    """Attention of [B, L, H, D]; with a frame_size, a number of keys, tails too."""
    batch, len_q, heads, _ = q.shape
    tails = None
    if frame_size:
        tails = torch.empty(2, batch, heads, k.shape[1] // frame_size, len_q, device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    seen = Seen(out, torch.empty(batch, heads, len_q, device=q.device), tails)
    whole, chunks = plan(len_q, k.shape[1], batch, heads, multiprocessors)
    if whole:
        first = slice(0, whole)
        launch(q[:, first], k, v, seen.of(first), frame_size, are_chunks=False)
    if whole < len_q:
        last = slice(whole, len_q)
        _in_chunks(launch, chunks, q[:, last], k, v, seen.of(last), frame_size)
    return seen


def _in_chunks(
    launch: Launch, chunks: int, q: Tensor, k: Tensor, v: Tensor, seen: Seen, frame_size: int
) -> None:
    """The same for queries [1, L, H, D], with chunks of the keys as items."""
    q = q.expand(chunks, -1, -1, -1)
    k, v = (x[0].unflatten(0, (chunks, -1)) for x in (k, v))
    out, lse = seen.out[0], seen.lse[0]
    parts, lses = (torch.empty(chunks, *x.shape, dtype=x.dtype, device=x.device) for x in (out, lse))
    launch(q, k, v, Seen(parts, lses, seen.tails), frame_size, are_chunks=True)
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


# --- FlashAttention-4's forward on Hopper, launched without its Python front, and with sums at key frames
TYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}
OPTIONS: dict[str, Any] = {  # as flash_attn.cute.interface has them for this head dim
    "tile_m": TILE,
    "tile_n": TILE,
    "num_stages": 2,
    "num_threads": 384,
    "pack_gqa": False,
    "Q_in_regs": False,
    "intra_wg_overlap": True,
    "mma_pv_is_rs": True,
}


def attention(q: Tensor, k: Tensor, v: Tensor, frame_size: int = 0) -> Seen:
    """Attention of [B, L, H, D] in half precision; with a frame_size of TILE keys or more, tails of frames.

    wan/kernels/mass.py makes masses of them.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return attend(_launch, q, k, v, frame_size, _multiprocessors(q.device))


def _launch(q: Tensor, k: Tensor, v: Tensor, seen: Seen, frame_size: int, are_chunks: bool) -> None:
    """See Launch."""
    kernel = _compiled(q.dtype, q.shape[3], frame_size, are_chunks)
    aux = AuxData(None if seen.tails is None else [seen.tails], None)
    kernel(q, k, v, seen.out, seen.lse, q.shape[3] ** -0.5, *[None] * 9, aux, None, None)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _compiled(dtype: torch.dtype, head_dim: int, frame_size: int, are_chunks: bool) -> Any:
    """The kernel for all lengths, batches and numbers of heads."""
    kind = TYPES[dtype]
    batch, heads, len_q, len_k = (cute.sym_int() for _ in range(4))
    aligned = 128 // kind.width  # elements: rows begin at multiples of 16 bytes
    q, k, v, out = (
        make_fake_tensor(kind, (batch, length, heads, head_dim), divisibility=aligned)
        for length in (len_q, len_k, len_k, len_q)
    )
    if are_chunks:  # which share their queries: a distance of 0 between items must be known beforehand
        q = cute.runtime.make_fake_tensor(kind, q.shape, stride=(0, *q.stride[1:]), assumed_align=16)
    lse = make_fake_tensor(Float32, (batch, heads, len_q))
    sizes, tails = (kind, head_dim, head_dim, 1), None  # the last: each head has its own keys
    if frame_size:
        forward = ForwardWithTails(*sizes, frame_size=frame_size, are_chunks=are_chunks, **OPTIONS)
        tails = [make_fake_tensor(Float32, (2, *(cute.sym_int() for _ in range(3)), len_q))]
    else:
        forward = FlashAttentionForwardSm90(*sizes, **OPTIONS)
    rest = [*[None] * 9, AuxData(tails, None), None, None, make_fake_stream()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Argument aux_data")  # which is known at compile time, as it says
        return cute.compile(forward, q, k, v, out, lse, Float32(1.0), *rest, options="--enable-tvm-ffi")


class ForwardWithTails(FlashAttentionForwardSm90):
    """The forward, which keeps its row sums where a key frame begins. It walks from the last key to the first
    one. are_chunks: the items of the batch are chunks of one item's keys, and tails [2, 1, H, Fk, Lq] of all.
    """

    def __init__(self, *args: Any, frame_size: int, are_chunks: bool, **options: Any) -> None:
        super().__init__(*args, has_aux_tensors=True, **options)
        self.frame_size, self.are_chunks = frame_size, are_chunks

    def mma(self, *args: Any, **options: Any) -> Any:
        given = inspect.signature(FlashAttentionForwardSm90.mma).bind(self, *args, **options).arguments
        self.tails, self.scale_log2 = given["aux_data"].tensors[0], given["softmax_scale_log2"]
        thread = given["tiled_mma_qk"].get_slice(given["tidx"])
        places = thread.partition_C(cute.make_identity_tensor((self.tile_m, self.tile_n)))
        self.places = layout_utils.reshape_acc_to_mn(places)  # row and column of what a thread holds
        return super().mma(*args, **options)

    # The sums are kept behind all else that a tile needs. Between its softmax and the conversion of what that
    # gives, a branch parts instructions that run beside each other, and the whole kernel is slower.

    def first_half_block_overlap(
        self, n_block: Int32, *args: Any, softmax: Softmax, seqlen: SeqlenInfoQK, **options: Any
    ) -> Any:
        seen = SeenSoftmax.of(softmax)
        options |= {"softmax": seen, "seqlen": seqlen}
        state = super().first_half_block_overlap(n_block, *args, **options)
        self.keep(seen.weights, n_block, seqlen.seqlen_k, softmax.row_max, softmax.row_sum)
        return state

    def mma_one_n_block_intrawg_overlap(
        self, state: Any, n_block: Int32, *args: Any, softmax: Softmax, seqlen: SeqlenInfoQK, **options: Any
    ) -> Any:
        seen = SeenSoftmax.of(softmax)
        options |= {"softmax": seen, "seqlen": seqlen}
        state = super().mma_one_n_block_intrawg_overlap(state, n_block, *args, **options)
        self.keep(seen.weights, n_block, seqlen.seqlen_k, softmax.row_max, softmax.row_sum)
        return state

    @cute.jit
    def keep(
        self,
        weights: cute.Tensor,
        n_block: Int32,
        len_k: Int32,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
    ) -> None:
        """Where a frame begins in this tile: the sums without those of its keys that are before."""
        tails, places, scale = self.tails, self.places, self.scale_log2
        tile = layout_utils.reshape_acc_to_mn(weights)
        m_block, head, item = cute.arch.block_idx()
        start = item * len_k if cutlass.const_expr(self.are_chunks) else Int32(0)
        batch = Int32(0) if cutlass.const_expr(self.are_chunks) else item
        first = start + n_block * self.tile_n
        frame = (first + self.tile_n - 1) // self.frame_size
        begin = frame * self.frame_size - first  # its column
        if begin >= 0 and frame * self.frame_size < start + len_k:
            for r in cutlass.range_constexpr(cute.size(row_sum)):
                before = Float32(0.0)
                for c in cutlass.range_constexpr(cute.size(tile, mode=[1])):
                    before += tile[r, c] if places[r, c][1] < begin else Float32(0.0)
                total = warp_reduce(row_sum[r] - before, operator.add, width=4)  # four threads have a row
                row = m_block * self.tile_m + places[r, 0][0]
                if places[r, 0][1] == 0 and row < tails.shape[4]:
                    tails[0, batch, head, frame, row] = total
                    tails[1, batch, head, frame, row] = row_max[r] * scale


class SeenSoftmax(Softmax):
    """The softmax of a tile, which remembers the weights that it left in place of the scores."""

    weights: cute.Tensor

    @classmethod
    def of(cls, other: Softmax) -> "SeenSoftmax":
        return cls(
            other.scale_log2, other.num_rows, other.row_max, other.row_sum, other.arch, other.softmax_scale
        )

    def online_softmax(self, scores: cute.Tensor, is_first: bool = False, check_inf: bool = True) -> Any:
        self.weights = scores
        return super().online_softmax(scores, is_first=is_first, check_inf=check_inf)
