"""Triton kernels between a layer's matrix products: each reads its input once and writes its output once.

They compute in float32 the same as wan/model.py in PyTorch, which runs on CPUs and in training. Results are
written into out, contiguous, if it is given.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from wan.kernels import launch

power_of_2 = cache(triton.next_power_of_2)  # the next one; a launch asks for it
ROWS_AT_ONCE = 8  # of merge_parts(), by one program


@triton.jit
def nothing():
    """Compute nothing; compiling it starts Triton."""


@triton.jit
def _add_norm_kernel(
    x_ptr,
    y_ptr,
    gate_ptr,
    scale_ptr,
    shift_ptr,
    sum_ptr,
    out_ptr,
    eps,
    dim,
    tokens_per_gate,
    tokens_per_row,
    stride_gate,
    stride_scale,
    stride_shift,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    AFFINE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token: x, x + y, or x + gate of its frame * y, and the norm of that sum as it is stored."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < dim
    total = tl.load(x_ptr + token * dim + columns, mask=inside, other=0.0).to(tl.float32)
    # 1. The residual stream is stored in its own dtype, and normed as it is stored.
    if ADD:
        y = tl.load(y_ptr + token * dim + columns, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            gate = gate_ptr + token // tokens_per_gate * stride_gate + columns
            y *= tl.load(gate, mask=inside, other=0.0)
        rounded = (total + y).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + token * dim + columns, rounded, mask=inside)
        total = rounded.to(tl.float32)
    # 2. LayerNorm in two passes over registers: mean, then variance of what is centred.
    if NORM:
        row = token // tokens_per_row
        scale = tl.load(scale_ptr + row * stride_scale + columns, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(shift_ptr + row * stride_shift + columns, mask=inside, other=0.0).to(tl.float32)
        if not AFFINE:
            scale += 1.0
        centred = tl.where(inside, total - tl.sum(total) / dim, 0.0)
        normed = centred * tl.rsqrt(tl.sum(centred * centred) / dim + eps)
        result = normed * scale + shift
        tl.store(out_ptr + token * dim + columns, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm_rotate_kernel(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    eps,
    num_heads,
    length,
    HEAD_DIM: tl.constexpr,
    ROTATE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token: RMSNorm over all heads, then each pair of dims of each head turned by the token's angles.

    Heads are rows [HEADS, BLOCK]: they share one row of the tables.
    """
    token, dim = tl.program_id(0).to(tl.int64), num_heads * HEAD_DIM
    heads, columns = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    at, inside = heads * HEAD_DIM + columns, (heads < num_heads) & (columns < HEAD_DIM)
    x = tl.load(x_ptr + token * dim + at, mask=inside, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / dim + eps)
    result = x * inverse_rms * tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    # Pairs (even, odd) turn by (cos, sin); the tables hold cos twice, and sin with its sign.
    if ROTATE:
        first = tl.arange(0, BLOCK // 2)[None, :] * 2
        angle, in_head = token % length * HEAD_DIM + first, first < HEAD_DIM
        even, odd = tl.split(tl.reshape(result, [HEADS, BLOCK // 2, 2]))
        turned_even = even * tl.load(cos_ptr + angle, mask=in_head, other=0.0)
        turned_even += odd * tl.load(sin_ptr + angle, mask=in_head, other=0.0)
        turned_odd = odd * tl.load(cos_ptr + angle + 1, mask=in_head, other=0.0)
        turned_odd += even * tl.load(sin_ptr + angle + 1, mask=in_head, other=0.0)
        result = tl.reshape(tl.join(turned_even, turned_odd), [HEADS, BLOCK])
    tl.store(out_ptr + token * dim + at, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, dim, head_dim, stride_x, stride_out, stride_table, BLOCK: tl.constexpr
):
    """One token: each pair of dims of each head turned by the token's angles."""
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < dim
    row = x_ptr + batch * stride_x + token * dim
    x = tl.load(row + columns, mask=inside).to(tl.float32)
    other = tl.load(row + (columns ^ 1), mask=inside).to(tl.float32)
    angle = batch * stride_table + token * head_dim + columns % head_dim
    turned = x * tl.load(cos_ptr + angle, mask=inside) + other * tl.load(sin_ptr + angle, mask=inside)
    place = out_ptr + batch * stride_out + token * dim + columns
    tl.store(place, turned.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _merge_kernel(
    out_ptr,
    lse_ptr,
    merged_ptr,
    merged_lse_ptr,
    num_parts,
    rows,
    num_heads,
    length,
    head_dim,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS rows (token, head) of attention over parts of the keys: their mean, weighed by e^lse."""
    row, columns = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = row < rows
    numbers = inside[:, None] & (columns[None, :] < head_dim)
    # Outputs lie by token and head, log-sum-exps by head and token.
    head, token = row % num_heads, row // num_heads
    of_lse = (token // length * num_heads + head) * length + token % length
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    weights, total = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    for part in range(num_parts):
        lse = tl.load(lse_ptr + part * rows + of_lse, mask=inside, other=0.0)
        higher = tl.maximum(highest, lse)
        # A part that a row does not see has lse -inf, as have all of them until one is seen.
        before = tl.where(highest == float("-inf"), 0.0, tl.exp(highest - higher))
        weight = tl.where(lse == float("-inf"), 0.0, tl.exp(lse - higher))
        of_part = out_ptr + (part * rows + row)[:, None] * head_dim
        out = tl.load(of_part + columns[None, :], mask=numbers, other=0.0)
        total = total * before[:, None] + weight[:, None] * out.to(tl.float32)
        weights, highest = weights * before + weight, higher
    place = merged_ptr + row[:, None] * head_dim + columns[None, :]
    tl.store(place, (total / weights[:, None]).to(merged_ptr.dtype.element_ty), mask=numbers)
    tl.store(merged_lse_ptr + of_lse, highest + tl.log(weights), mask=inside)


def merge_parts(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention over parts of the keys: outs [B, H, L, D] and their lses, float32 [B, H, L]."""
    stacked = torch.stack([out.transpose(1, 2) for out in outs])
    lse = torch.stack(lses)
    parts, batch, length, heads, head_dim = stacked.shape
    rows = batch * length * heads
    merged, merged_lse = torch.empty_like(stacked[0]), torch.empty_like(lse[0])
    launch(
        _merge_kernel,
        (triton.cdiv(rows, ROWS_AT_ONCE),),
        stacked,
        lse,
        merged,
        merged_lse,
        parts,
        rows,
        heads,
        length,
        head_dim,
        ROWS=ROWS_AT_ONCE,
        BLOCK=power_of_2(head_dim),
        num_warps=4,
    )
    return merged.transpose(1, 2), merged_lse


def modulated_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """LayerNorm(x) * (1 + scale) + shift: x [B, L, dim], scale and shift float32 [B, F or 1, dim]."""
    _, normed = _launch(x, rows=(scale, shift), eps=eps, normed=out)
    return normed


def gated_add(x: Tensor, y: Tensor, gate: Tensor, out: Tensor | None = None) -> Tensor:
    """x + gate * y: x, y [B, L, dim], gate float32 [B, F or 1, dim]; out may be x."""
    total, _ = _launch(x, y, gate, total=out)
    return total


def add_norm(
    x: Tensor, y: Tensor, gate: Tensor | None, scale: Tensor, shift: Tensor, eps: float, affine: bool = False
) -> tuple[Tensor, Tensor]:
    """x + gate * y (gate None: x + y), and the LayerNorm of that * (1 + scale) + shift; affine: * scale.

    x, y [B, L, dim]; gate, scale and shift [B, F or 1, dim], affine: scale and shift [dim].
    """
    return _launch(x, y, gate, rows=(scale, shift), eps=eps, affine=affine)


def _launch(
    x: Tensor,
    y: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    rows: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    affine: bool = False,
    total: Tensor | None = None,
    normed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum and its norm, contiguous [B, L, dim]; x in place of one that is not computed.

    total and normed are written where they are given. rows are scale and shift.
    """
    x, (batch, length, dim) = x.contiguous(), x.shape
    # 1. Where results go.
    if y is None:
        total = x
    elif total is None:
        total = torch.empty_like(x)
    if rows is None:
        normed = x
    elif normed is None:
        normed = torch.empty_like(x)
    # 2. Rows of the tables, and for how many tokens each is.
    scale, shift = rows or (x, x)
    stride_scale = stride_shift = stride_gate = 0
    tokens = tokens_per_row = tokens_per_gate = batch * length
    if rows and not affine:
        (scale, stride_scale), (shift, stride_shift) = _rows(scale), _rows(shift)
        tokens_per_row = length // scale.shape[1]
    if gate is not None:
        gate, stride_gate = _rows(gate)
        tokens_per_gate = length // gate.shape[1]
    # 3. The constants that the kernel is compiled for.
    numbers = eps, dim, tokens_per_gate, tokens_per_row, stride_gate, stride_scale, stride_shift
    block = power_of_2(dim)
    constants = {"BLOCK": block, "num_warps": 4}
    if rows:
        # The same warps for every norm: they decide in what order a token's numbers are summed.
        constants["num_warps"] = 2 * max(1, block // 2048)
    constants |= {"ADD": y is not None, "GATED": gate is not None, "NORM": rows is not None, "AFFINE": affine}
    added, gates = x, x  # not read where there are none
    if y is not None:
        added = y.contiguous()
    if gate is not None:
        gates = gate
    tensors = added, gates, scale, shift, total, normed
    launch(_add_norm_kernel, (tokens,), x, *tensors, *numbers, **constants)
    return total, normed


def norm_rotate(
    x: Tensor,
    weight: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    num_heads: int,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """RMSNorm over dim, heads, and RoPE where tables [L, 1, D] are given: x [B, L, dim] -> [B, L, H, D]."""
    x, (batch, length, dim) = x.contiguous(), x.shape
    if out is None:
        out = x.new_empty((batch, length, num_heads, dim // num_heads))
    cos, sin = x, x  # not read without RoPE
    if rope:
        cos, sin = rope[0].contiguous(), rope[1].contiguous()
    constants = _heads(num_heads, dim // num_heads) | {"ROTATE": rope is not None}
    launch(
        _norm_rotate_kernel, (batch * length,), x, weight, cos, sin, out, eps, num_heads, length, **constants
    )
    return out


def rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """RoPE of x into out, [B, L, H, D] whose tokens are rows; tables [L, 1, D] or [B, L, 1, D]."""
    batch, length, num_heads, head_dim = x.shape
    dim, cos, sin = num_heads * head_dim, cos.contiguous(), sin.contiguous()
    of_table = 0
    if cos.dim() == 4 and len(cos) > 1:
        of_table = cos.stride(0)
    sizes = dim, head_dim, x.stride(0), out.stride(0), of_table
    launch(_rotate_kernel, (length, batch), x, cos, sin, out, *sizes, BLOCK=power_of_2(dim))


def _rows(table: Tensor) -> tuple[Tensor, int]:
    """Return a table [B, F, dim] of contiguous, evenly spaced rows, and the stride between them."""
    evenly = table.stride(-1) == 1 and (
        table.shape[0] == 1 or table.stride(0) == table.shape[1] * table.stride(1)
    )
    if not evenly:
        table = table.contiguous()
    if table.shape[1] > 1:
        return table, table.stride(1)
    return table, table.stride(0)


@cache
def _heads(num_heads: int, head_dim: int) -> dict[str, int]:
    """Return the constants by which a program holds a token's heads."""
    heads, block = power_of_2(num_heads), power_of_2(head_dim)
    num_warps = max(1, heads * block // 2048)  # with one a token, tokens share a multiprocessor best
    return {"HEAD_DIM": head_dim, "HEADS": heads, "BLOCK": block, "num_warps": num_warps}
