"""Launch FlashAttention-4's forward on Hopper without its Python function; return sums by key frame.

flash-attn-4's own function spends 0.07 ms in Python before each launch, more than a short call takes. The
kernel is the package's, so outputs have the same bits. To capture mass, a second variant is compiled: at the
start of each key frame it stores the row sums that the softmax computes anyway. Mass by key frame then needs
no second q kᵀ, and the output keeps its bits.

This uses private parts of the package and therefore supports one version: wan.backends.LAUNCHED.
"""

import inspect
import operator
import warnings
from functools import cache
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.seqlen_info import SeqlenInfoQK
from flash_attn.cute.softmax import Softmax
from flash_attn.cute.utils import AuxData, warp_reduce
from quack import layout_utils
from quack.compile_utils import make_fake_stream, make_fake_tensor
from torch import Tensor

from wan.backends import TILE

TYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}
OPTIONS: dict[str, int | bool] = {  # as flash_attn.cute.interface has them for this head dim
    "tile_m": TILE,
    "tile_n": TILE,
    "num_stages": 2,
    "num_threads": 384,
    "pack_gqa": False,
    "Q_in_regs": False,
    "intra_wg_overlap": True,
    "mma_pv_is_rs": True,
}

UNUSED = (None,) * 9  # the kernel's arguments for packed sequences, pages, windows and sinks


def attention(q: Tensor, k: Tensor, v: Tensor, frame_size: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend over [B, L, H, D] in half precision -> output like q, log-sum-exp [B, H, Lq], tails or None.

    A frame_size of TILE keys or more asks for tails [2, B, H, Fk, Lq]: for each frame of keys the sum of a
    query's exponentials from the frame's first key to the last key of all, and, in units of log 2, the
    maximum that was subtracted. reductions.mass_of_tails() turns them into masses.
    """
    batch, len_q, heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, len_q, device=q.device)
    tails, aux = None, AuxData(None, None)
    if frame_size:
        tails = torch.empty(2, batch, heads, k.shape[1] // frame_size, len_q, device=q.device)
        aux = AuxData([tails], None)
    kernel = _compiled(q.dtype, head_dim, frame_size)
    kernel(q, k, v, out, lse, head_dim**-0.5, *UNUSED, aux, None, None)
    return out, lse, tails


@cache
def _compiled(dtype: torch.dtype, head_dim: int, frame_size: int) -> Any:
    """Compile the kernel for all lengths, batches and numbers of heads."""
    kind = TYPES[dtype]
    batch, heads, len_q, len_k = (cute.sym_int() for _ in range(4))
    aligned = 128 // kind.width  # elements: rows begin at multiples of 16 bytes
    q, k, v, out = (
        make_fake_tensor(kind, (batch, length, heads, head_dim), divisibility=aligned)
        for length in (len_q, len_k, len_k, len_q)
    )
    lse = make_fake_tensor(Float32, (batch, heads, len_q))
    sizes, tails = (kind, head_dim, head_dim, 1), None  # the last: each head has its own keys
    if frame_size:
        forward = ForwardWithTails(*sizes, frame_size=frame_size, **OPTIONS)
        tails = [make_fake_tensor(Float32, (2, *(cute.sym_int() for _ in range(3)), len_q))]
    else:
        forward = FlashAttentionForwardSm90(*sizes, **OPTIONS)
    rest = [*UNUSED, AuxData(tails, None), None, None, make_fake_stream()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Argument aux_data")  # which is known at compile time, as it says
        return cute.compile(forward, q, k, v, out, lse, Float32(1.0), *rest, options="--enable-tvm-ffi")


class ForwardWithTails(FlashAttentionForwardSm90):
    """The forward, from the last key to the first; it stores its row sums at the start of each key frame."""

    def __init__(self, *args: Any, frame_size: int, **options: Any) -> None:
        super().__init__(*args, has_aux_tensors=True, **options)
        self.frame_size = frame_size

    def mma(self, *args: Any, **options: Any) -> Any:
        bound = inspect.signature(FlashAttentionForwardSm90.mma).bind(self, *args, **options).arguments
        self.tails, self.scale_log2 = bound["aux_data"].tensors[0], bound["softmax_scale_log2"]
        thread = bound["tiled_mma_qk"].get_slice(bound["tidx"])
        places = thread.partition_C(cute.make_identity_tensor((self.tile_m, self.tile_n)))
        self.places = layout_utils.reshape_acc_to_mn(places)  # row and column of what a thread holds
        return super().mma(*args, **options)

    # The sums are stored after everything else in a tile. A branch between the softmax and the conversion of
    # its weights would keep the compiler from interleaving them, and slow the whole kernel down.

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
        self, weights: cute.Tensor, n_block: Int32, len_k: Int32, row_max: cute.Tensor, row_sum: cute.Tensor
    ) -> None:
        """Store the sums if a frame begins in this tile, without the tile's keys before that frame."""
        tails, places, scale = self.tails, self.places, self.scale_log2
        tile = layout_utils.reshape_acc_to_mn(weights)
        m_block, head, item = cute.arch.block_idx()
        first = n_block * self.tile_n
        frame = (first + self.tile_n - 1) // self.frame_size
        begin = frame * self.frame_size - first  # its column
        if begin >= 0 and frame * self.frame_size < len_k:
            for r in cutlass.range_constexpr(cute.size(row_sum)):
                before = Float32(0.0)
                for c in cutlass.range_constexpr(cute.size(tile, mode=[1])):
                    before += tile[r, c] if places[r, c][1] < begin else Float32(0.0)
                total = warp_reduce(row_sum[r] - before, operator.add, width=4)  # four threads have a row
                row = m_block * self.tile_m + places[r, 0][0]
                if places[r, 0][1] == 0 and row < tails.shape[4]:
                    tails[0, item, head, frame, row] = total
                    tails[1, item, head, frame, row] = row_max[r] * scale


class SeenSoftmax(Softmax):
    """The softmax of a tile; it remembers the tensor whose scores it replaced by weights."""

    weights: cute.Tensor

    @classmethod
    def of(cls, other: Softmax) -> "SeenSoftmax":
        names = ("scale_log2", "num_rows", "row_max", "row_sum", "arch", "softmax_scale")
        return cls(*(getattr(other, name) for name in names))

    def online_softmax(self, scores: cute.Tensor, is_first: bool = False, check_inf: bool = True) -> Any:
        self.weights = scores
        return super().online_softmax(scores, is_first=is_first, check_inf=check_inf)
