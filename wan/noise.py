"""The noise of a rollout, asked for block by block: from tensors, or drawn from seeds at constant memory."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from wan.errors import ConfigError

DRAWN_TOGETHER = 16  # torch.randn fills memory in groups of so many values
SKIPPED_AT_ONCE = 1 << 20  # values


class Noise(Protocol):
    """What a rollout asks for. Frames are global latent indices."""

    shape: tuple[int, ...]  # (B, F, C, h, w) of the frames that are there
    start: int  # the first of them
    is_repeatable: bool  # whether the same frames have the same noise when they are asked for again

    def first(self, frames: range) -> Tensor:
        """What a block is denoised from, [B, n, C, h, w]."""

    def fresh(self, step: int, frames: range) -> Tensor:
        """What is added to the prediction of a denoising step on the way to the next."""


def check_frames(noise: Noise, frames: range) -> None:
    """Raise ConfigError where a noise is not of all these frames."""
    there = range(noise.start, noise.start + noise.shape[1])
    if frames.start < there.start or frames.stop > there.stop:
        raise ConfigError(
            f"noise of frames {there.start}..{there.stop - 1} is not that of frames {frames.start}.."
            f"{frames.stop - 1}; draw more frames, or begin it at another start"
        )


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
        return self.noise[:, frames.start - self.start : frames.stop - self.start]

    def fresh(self, step: int, frames: range) -> Tensor:
        if self.renoise is not None:
            return self.renoise[step][:, frames.start - self.start : frames.stop - self.start]
        shape = (self.shape[0], len(frames), *self.shape[2:])
        like = self.noise
        return torch.randn(shape, generator=self.generator, dtype=like.dtype, device=like.device)


class SeededNoise:
    """Noise of one video per seed, drawn on the CPU as it is needed.

    The bits are those of a generator of that seed which draws torch.randn(F, C, h, w) and then
    torch.randn(steps - 1, F, C, h, w) at once: each of these segments has a generator of its own, wound
    forward to where it begins. The noise between steps therefore depends on F; a shorter rollout takes the
    first blocks of a longer noise. A video's noise does not depend on the others of its batch.
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
        values = frame_shape[0] * frame_shape[1] * frame_shape[2]
        if values % DRAWN_TOGETHER:
            raise ConfigError(
                f"a latent frame of {values} values is not drawn by itself; they must be a multiple of "
                f"{DRAWN_TOGETHER}"
            )
        self._segments = [_segments(seed, num_frames * values, num_steps) for seed in seeds]

    def first(self, frames: range) -> Tensor:
        return self._draw(0, frames)

    def fresh(self, step: int, frames: range) -> Tensor:
        return self._draw(1 + step, frames)

    def _draw(self, index: int, frames: range) -> Tensor:
        check_frames(self, frames)  # the next one's would follow in the generator
        shape = (len(frames), *self.shape[2:])
        drawn = [segments[index].draw(frames.start - self.start, shape) for segments in self._segments]
        return torch.stack(drawn).to(self.device, self.dtype)


class _Segment:
    """Consecutive values of one generator, drawn a few frames at a time."""

    def __init__(self, state: Tensor):
        self._state, self._generator, self._frame = state, torch.Generator(), 0
        self._generator.set_state(state)

    def draw(self, frame: int, shape: tuple[int, ...]) -> Tensor:
        """Frames from `frame` on, of shape [n, C, h, w]."""
        if frame < self._frame:
            self._generator.set_state(self._state)
            self._frame = 0
        _wind(self._generator, (frame - self._frame) * shape[1] * shape[2] * shape[3])
        self._frame = frame + shape[0]
        return torch.randn(shape, generator=self._generator)


def _segments(seed: int, values: int, num_steps: int) -> list[_Segment]:
    """The first noise and the one between each two steps."""
    generator, segments = torch.Generator().manual_seed(seed), []
    for step in range(num_steps):
        segments.append(_Segment(generator.get_state()))
        if step + 1 < num_steps:
            _wind(generator, values)
    return segments


def _wind(generator: torch.Generator, values: int) -> None:
    """Go on as if so many values had been drawn: a normal one takes as much as a uniform one."""
    while values > 0:
        torch.rand(min(values, SKIPPED_AT_ONCE), generator=generator)
        values -= SKIPPED_AT_ONCE
