"""The noise of a rollout, asked for block by block: from tensors, or drawn from seeds at constant memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wan.errors import ConfigError

DRAWN_TOGETHER = 16  # torch.randn fills memory in groups of so many values
SKIPPED_AT_ONCE = 1 << 20  # values


class TensorNoise:
    """Noise [B, F, C, h, w] of the frames from start on, and renoise [steps - 1, B, F, C, h, w].

    Without renoise the noise between steps is drawn from generator whenever it is asked for.
    """

    def __init__(
        self,
        noise: Tensor,
        renoise: Tensor | None = None,
        generator: torch.Generator | None = None,
        start: int = 0,
    ):
        self.noise, self.renoise, self.generator, self.start = noise, renoise, generator, start
        self.shape, self.is_repeatable = tuple(noise.shape), renoise is not None

    def first(self, frames: range) -> Tensor:
        """Return what a block is denoised from, [B, n, C, h, w]."""
        return self.noise[:, frames.start - self.start : frames.stop - self.start]

    def fresh(self, step: int, frames: range) -> Tensor:
        """Return what is added to the prediction of a denoising step on the way to the next."""
        if self.renoise is not None:
            return self.renoise[step][:, frames.start - self.start : frames.stop - self.start]
        like = self.first(frames)
        return torch.randn(like.shape, generator=self.generator, dtype=like.dtype, device=like.device)


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
        """frame_shape is (C, h, w), start the first frame, behind those that are given.

        Raises ConfigError where torch could not draw a frame for itself.
        """
        self.shape: tuple[int, ...] = (len(seeds), num_frames, *frame_shape)
        self.device, self.dtype, self.start = device, dtype, start
        self._values = frame_shape[0] * frame_shape[1] * frame_shape[2]
        if self._values % DRAWN_TOGETHER:
            problem = f"a latent frame of {self._values} values is not drawn by itself"
            raise ConfigError(f"{problem}; they must be a multiple of {DRAWN_TOGETHER}")
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._states: list[list[Tensor]] = []  # per segment and video, at its beginning
        for segment in range(num_steps):
            for generator in generators if segment else ():
                _skip(generator, num_frames * self._values)
            self._states.append([generator.get_state() for generator in generators])
        self._now = [(0, states) for states in self._states]  # its next frame, and the states there

    def first(self, frames: range) -> Tensor:
        """Return what a block is denoised from, [B, n, C, h, w]."""
        return self._draw(0, frames)

    def fresh(self, step: int, frames: range) -> Tensor:
        """Return what is added to the prediction of a denoising step on the way to the next."""
        return self._draw(1 + step, frames)

    def _draw(self, segment: int, frames: range) -> Tensor:
        check_frames(self, frames)  # the next segment would follow in the generator
        first, (at, states) = frames.start - self.start, self._now[segment]
        if first < at:
            at, states = 0, self._states[segment]
        rows, after = [], []
        for state in states:
            generator = torch.Generator()
            generator.set_state(state)
            _skip(generator, (first - at) * self._values)
            rows.append(torch.randn(len(frames), *self.shape[2:], generator=generator))
            after.append(generator.get_state())
        self._now[segment] = (first + len(frames), after)
        return torch.stack(rows).to(self.device, self.dtype)


Noise = TensorNoise | SeededNoise


def _skip(generator: torch.Generator, values: int) -> None:
    """Advance a generator by so many normal values, which take as much of it as uniform ones."""
    while values > 0:
        torch.rand(min(values, SKIPPED_AT_ONCE), generator=generator)
        values -= SKIPPED_AT_ONCE


def check_frames(noise: Noise, frames: range) -> None:
    """Raise ConfigError where a noise is not of all these frames."""
    there = range(noise.start, noise.start + noise.shape[1])
    if frames.start < there.start or frames.stop > there.stop:
        has, asks = (f"frames {one.start}..{one.stop - 1}" for one in (there, frames))
        raise ConfigError(f"noise of {has} is not that of {asks}; draw more frames")
