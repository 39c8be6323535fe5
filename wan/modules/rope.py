"""Rotary position embedding over time, height and width (RoFormer, arXiv 2104.09864, as Wan2.1 lays it out)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ROPE_THETA = 10000.0


class RotaryTable:
    """Rotary position embedding over (time, height, width): D-4·(D//6), 2·(D//6) and 2·(D//6) of the head's dims.

    Time is the absolute latent frame, without limit. Tables are computed in float64, once per block of a rollout.
    """

    def __init__(self, head_dim: int):
        self.head_dim = head_dim
        spatial = 2 * (head_dim // 6)
        self.shares = (head_dim - 2 * spatial, spatial, spatial)
        self._last: dict[tuple, tuple[Tensor, Tensor]] = {}

    @property
    def bands(self) -> dict[str, int]:
        """Consecutive bands of the head's dims by name, with their sizes: one per time frequency, then height and width."""
        time, height, width = self.shares
        periods = [2 * math.pi * ROPE_THETA ** (2 * i / time) for i in range(time // 2)]  # frames
        named = {f"time, period {period:.{0 if period > 100 else 2}f} frames": 2 for period in periods}
        return named | {"height": height, "width": width}

    def turns(self, axis: int, positions: Tensor) -> Tensor:
        """exp(i position frequency) of each pair of dims along time (0), height (1) or width (2): complex128 [n, share/2]."""
        exponents = (
            torch.arange(0, self.shares[axis], 2, dtype=torch.float64, device=positions.device)
            / self.shares[axis]
        )
        angles = torch.outer(positions.double(), 1 / ROPE_THETA**exponents)
        return torch.polar(torch.ones_like(angles), angles)

    def __call__(
        self, frames: Sequence[int], height: int, width: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """cos and signed sin for rotate(), float32 [L, 1, D]; kept until other frames are asked for."""
        key = (tuple(frames), height, width, device)
        if key not in self._last:
            if isinstance(frames, range):  # made on the device: a copy from the host would wait for it
                frames = torch.arange(frames.start, frames.stop, frames.step, device=device)
            positions = (
                torch.as_tensor(frames, device=device),
                *(torch.arange(n, device=device) for n in (height, width)),
            )
            time, rows, columns = (self.turns(axis, p) for axis, p in enumerate(positions))
            grid = (len(key[0]), height, width, -1)
            turns = torch.cat(
                [
                    time[:, None, None].expand(grid),
                    rows[None, :, None].expand(grid),
                    columns[None, None].expand(grid),
                ],
                -1,
            ).flatten(0, 2)[:, None]  # [L, 1, D/2]
            cos, sin = turns.real.float(), turns.imag.float()
            self._last = {key: (cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2))}
        return self._last[key]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of dims (a, b) to (a cos − b sin, a sin + b cos): x [B, L, H, D], tables [L, 1, D], float32 inside."""
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)
