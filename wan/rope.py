"""Rotary position embedding over time, height and width (arXiv 2104.09864), laid out as in Wan2.1."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wan.kernels import fused_kernels
from wan.keys import send

ROPE_THETA = 10000.0


class RotaryTable:
    """Rotary position embedding over time, height, width: D-4·(D//6), 2·(D//6) and 2·(D//6) of a head's dims.

    Time is the absolute latent frame, without limit. Tables are computed in float64, once per block of a
    rollout.
    """

    def __init__(self, head_dim: int):
        self.head_dim = head_dim
        spatial = 2 * (head_dim // 6)
        self.axes_dim = (head_dim - 2 * spatial, spatial, spatial)
        self._last: dict[tuple, tuple[Tensor, Tensor]] = {}

    @property
    def bands(self) -> dict[str, int]:
        """Consecutive bands of a head's dims, name -> size: one per time frequency, then height and width."""
        time, height, width = self.axes_dim
        periods = [2 * math.pi * ROPE_THETA ** (2 * i / time) for i in range(time // 2)]  # frames
        named = {f"time, period {period:.{0 if period > 100 else 2}f} frames": 2 for period in periods}
        return named | {"height": height, "width": width}

    def freqs_cis(self, axis: int, positions: Tensor) -> Tensor:
        """Return exp(i position frequency) of each pair of dims along time (0), height (1) or width (2).

        positions [n] -> complex128 [n, axes_dim / 2].
        """
        dim = self.axes_dim[axis]
        exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
        angles = torch.outer(positions.double(), 1 / ROPE_THETA**exponents)
        return torch.polar(torch.ones_like(angles), angles)

    def __call__(
        self, frames: Sequence[int], height: int, width: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin for rotate(), float32 [L, 1, D]; kept until others are asked for."""
        key = (tuple(frames), height, width, device)
        if (found := self._last.get(key)) is None:  # another thread may replace what is kept
            if isinstance(frames, range):  # made on the device: a copy from the host would wait for it
                positions = torch.arange(frames.start, frames.stop, frames.step, device=device)
            else:
                positions = send(torch.tensor(frames), device)
            rows, columns = (torch.arange(n, device=device) for n in (height, width))
            time, row, column = (self.freqs_cis(axis, p) for axis, p in enumerate((positions, rows, columns)))
            grid = (len(positions), height, width, -1)
            parts = time[:, None, None], row[None, :, None], column[None, None]
            turns = torch.cat([part.expand(grid) for part in parts], -1).flatten(0, 2)[:, None]  # [L, 1, D/2]
            cos, sin = turns.real.float(), turns.imag.float()
            found = cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
            self._last = {key: found}
        return found


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of dims (a, b) to (a cos − b sin, a sin + b cos): x [B, L, H, D], tables [L, 1, D]."""
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)


def rotate_into(target: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """target[...] = rotate(x, cos, sin), [B, L, H, D], in one kernel where both lie as a KV cache does."""
    rows = (x.shape[2] * x.shape[3], x.shape[3], 1)
    if x.numel() and x.stride()[1:] == target.stride()[1:] == rows and (kernels := fused_kernels(x)):
        kernels.rotate_into(target, x, cos, sin)
    else:
        target.copy_(rotate(x, cos, sin))
