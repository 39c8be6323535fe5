"""Noise of long videos, drawn from seeds block by block at constant memory."""

from collections.abc import Sequence
from math import inf, prod

import torch
from torch import Tensor

from wan.config import ModelConfig, RunConfig
from wan.errors import ConfigError
from wan.noise import Noise, TensorNoise, check_frames, draw_noise, num_draws

DRAWN_TOGETHER = 16  # torch.randn fills memory in groups of so many values
SKIPPED_AT_ONCE = 1 << 20  # values


class SeededNoise:
    """Noise of one video per seed, drawn on the CPU as it is needed.

    The bits are those of a generator that draws torch.randn(F, C, h, w), then torch.randn(steps - 1, F, C, h,
    w) at once. The noise between steps depends on F: a short rollout takes the first blocks of a longer one.
    """

    is_repeatable = True

    def __init__(
        self,
        seeds: Sequence[int],
        num_frames: int,
        frame_shape: tuple[int, int, int],
        num_steps: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        start: int = 0,
    ):
        """Set up frame_shape (C, h, w), and start, the first frame after given ones."""
        self.shape: tuple[int, ...] = (len(seeds), num_frames, *frame_shape)
        self.device, self.dtype, self.start = device, dtype, start
        self._values = prod(frame_shape)
        if self._values % DRAWN_TOGETHER:
            problem = f"a latent frame of {self._values} values is not drawn by itself"
            raise ConfigError(f"{problem}; they must be a multiple of {DRAWN_TOGETHER}")
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._begin: list[list[torch.Generator]] = []  # per segment and video
        for segment in range(num_steps):
            if segment:
                for generator in generators:
                    _skip(generator, num_frames * self._values)
            self._begin.append([generator.clone_state() for generator in generators])
        self._now: dict[int, tuple[int, list[torch.Generator]]] = {}

    def first(self, frames: range) -> Tensor:
        """Return the noise from which a block is denoised, [B, n, C, h, w]."""
        return self._draw(0, frames)

    def fresh(self, step: int, frames: range) -> Tensor:
        return self._draw(1 + step, frames)

    def _draw(self, segment: int, frames: range) -> Tensor:
        check_frames(self, frames)  # the next segment would follow in the generator
        first = frames.start - self.start
        at, generators = self._now.get(segment, (inf, []))
        if first < at:
            at, generators = 0, [generator.clone_state() for generator in self._begin[segment]]
        rows = []
        for generator in generators:
            _skip(generator, int(first - at) * self._values)
            rows.append(torch.randn(len(frames), *self.shape[2:], generator=generator))
        self._now[segment] = first + len(frames), generators
        return torch.stack(rows).to(self.device, self.dtype)


def _skip(generator: torch.Generator, values: int) -> None:
    """Advance a generator by a number of normal values, by drawing as many uniform ones."""
    while values > 0:
        torch.rand(min(values, SKIPPED_AT_ONCE), generator=generator)
        values -= SKIPPED_AT_ONCE


def seeded_noise(
    configs: Sequence[RunConfig], model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Noise:
    """Draw like draw_noise for configs that differ in their seeds, but block by block as needed."""
    first, seeds = configs[0], [config.seed for config in configs]
    if first.noise != "seeded":
        noise, renoise = zip(*(draw_noise(c, model_config, dtype, device) for c in configs), strict=True)
        return TensorNoise(torch.cat(noise), torch.cat(renoise, 1))
    return SeededNoise(
        seeds,
        num_frames=first.num_frames,
        frame_shape=(model_config.in_dim, first.height, first.width),
        num_steps=num_draws(first),
        device=device,
        dtype=dtype,
    )
