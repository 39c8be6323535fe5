"""A Triton kernel between two convolutions of the VAE's decoder: feed() of wan/vae.py.

It reads the output of the first convolution once and writes the input of the next: the frames after the two
past ones, or each frame with the two before it.
"""

import triton
import triton.language as tl
from torch import Tensor

from wan.kernels import launch

PIXELS, WARPS = 2048, 4  # of a program: pixels * channels, and its warps


@triton.jit
def _put(fed_ptr, past_ptr, value, frame, at, inside, fed_row, batch, num_frames, HW, C, STACK: tl.constexpr):
    """Write frame -2..T-1 everywhere the next convolution reads it, and keep the last two frames."""
    value = value.to(fed_ptr.dtype.element_ty)
    if STACK == 1:
        tl.store(fed_ptr + (batch * (num_frames + 2) + frame + 2) * HW * C + at, value, mask=inside)
    else:
        for slot in tl.static_range(3):
            target = frame + 2 - slot  # the frame whose convolution reads this one in that slot
            if (target >= 0) & (target < num_frames):
                row = fed_ptr + (batch * num_frames + target) * HW * C * 3 + fed_row + slot * C
                tl.store(row, value, mask=inside)
    place = frame - num_frames + 2  # in the past of the next call
    if place >= 0:
        tl.store(past_ptr + (batch * 2 + place) * HW * C + at, value, mask=inside)


@triton.jit(do_not_specialize=["num_frames", "height", "width"])  # else some sizes compile anew
def _feed_kernel(
    y_ptr,
    bias_ptr,
    residual_ptr,
    gamma_ptr,
    past_ptr,
    sum_ptr,
    fed_ptr,
    num_frames,
    height,
    width,
    C: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SHUFFLED: tl.constexpr,
    KEEP: tl.constexpr,
    NORM: tl.constexpr,
    STACK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program: BLOCK_P pixels of all frames of a video; no other program touches their past."""
    batch, HW = tl.program_id(1).to(tl.int64), height * width
    pixels = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
    channels = tl.arange(0, BLOCK_C)[None, :]
    inside = (pixels < HW) & (channels < C)
    at, fed_row = pixels * C + channels, pixels * C * 3 + channels
    if STACK > 0:
        for i in tl.static_range(2):
            past = tl.load(past_ptr + (batch * 2 + i) * HW * C + at, mask=inside, other=0.0)
            _put(fed_ptr, past_ptr, past, i - 2, at, inside, fed_row, batch, num_frames, HW, C, STACK)
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_ptr + channels, mask=channels < C, other=0.0).to(tl.float32)
    if NORM:
        gamma = tl.load(gamma_ptr + channels, mask=channels < C, other=0.0).to(tl.float32)
    # The sum of a pixel's channels is formed, stored and normed without leaving registers.
    if SHUFFLED:  # y [B, T, h + 1, w + 1, 2, 2, C]: the four pixels of one come from windows one apart
        row, column = pixels // width, pixels % width
        window = (row // 2 + row % 2) * (width // 2 + 1) + column // 2 + column % 2
        read = (window * 4 + row % 2 * 2 + column % 2) * C + channels
        frame_size = (height // 2 + 1) * (width // 2 + 1) * 4 * C
    else:
        read, frame_size = at, HW * C
    for frame in range(num_frames):
        of_frame = y_ptr + (batch * num_frames + frame) * frame_size
        x = tl.load(of_frame + read, mask=inside, other=0.0).to(tl.float32) + bias
        place = (batch * num_frames + frame) * HW * C + at
        if RESIDUAL:
            x += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if KEEP:
            rounded = x.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + place, rounded, mask=inside)
            x = rounded.to(tl.float32)
        if NORM:
            x = tl.where(inside, x, 0.0)
            x = x * (1.0 / tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-12))[:, None] * gamma
            x = x * tl.sigmoid(x)
        if STACK > 0:
            _put(fed_ptr, past_ptr, x, frame, at, inside, fed_row, batch, num_frames, HW, C, STACK)


def feed(
    y: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    shuffled: bool,
    gamma: Tensor | None,
    past: Tensor | None,
    stack: int,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Return the sum [B, T, H, W, C], if kept, and the input of the next convolution."""
    y = y.contiguous()
    if residual is not None:
        residual = residual.contiguous()
    batch, frames, height, width, *_, channels = y.shape
    if shuffled:
        height, width = 2 * (height - 1), 2 * (width - 1)
    shape = batch, frames, height, width, channels
    total = fed = y
    if keep:
        total = y.new_empty(shape)
    if stack == 1:
        fed = y.new_empty((batch, frames + 2, *shape[2:]))
    elif stack:
        fed = y.new_empty((*shape[:4], stack * channels))
    inputs = [bias, residual, gamma, past]
    for place, tensor in enumerate(inputs):
        if tensor is None:
            inputs[place] = y  # a pointer that is not read
    block_c = triton.next_power_of_2(channels)
    block_p = max(1, PIXELS // block_c)
    launch(
        _feed_kernel,
        (triton.cdiv(height * width, block_p), batch),
        y,
        *inputs,
        total,
        fed,
        frames,
        height,
        width,
        C=channels,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        SHUFFLED=shuffled,
        KEEP=keep,
        NORM=gamma is not None,
        STACK=stack,
        BLOCK_P=block_p,
        BLOCK_C=block_c,
        num_warps=WARPS,
    )
    return total, fed
