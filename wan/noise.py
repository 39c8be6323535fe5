"""The noise of a rollout, requested block by block; wings/seeded_noise.py draws it in constant memory."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from wan.blocks import block_ranges
from wan.config import CARDS, ModelConfig, RunConfig
from wan.errors import ConfigError

if TYPE_CHECKING:
    from wan.wings.seeded_noise import SeededNoise


@dataclass(eq=False)
class TensorNoise:
    """Noise [B, F, C, h, w] of the frames from start on, and renoise [steps - 1, B, F, C, h, w].

    Without renoise the noise between steps is drawn from generator whenever it is asked for.
    """

    noise: Tensor
    renoise: Tensor | None = None
    generator: torch.Generator | None = None
    start: int = 0

    def __post_init__(self) -> None:
        self.shape, self.is_repeatable = tuple(self.noise.shape), self.renoise is not None

    def first(self, frames: range) -> Tensor:
        """Return the noise from which a block is denoised, [B, n, C, h, w]."""
        return self.noise[:, frames.start - self.start : frames.stop - self.start]

    def fresh(self, step: int, frames: range) -> Tensor:
        """Return the noise that is added to the prediction of a step before the next one."""
        if self.renoise is not None:
            return self.renoise[step][:, frames.start - self.start : frames.stop - self.start]
        like = self.first(frames)
        return torch.randn(like.shape, generator=self.generator, dtype=like.dtype, device=like.device)


Noise: TypeAlias = "TensorNoise | SeededNoise"


def check_frames(noise: Noise, frames: range) -> None:
    """Raise ConfigError where a noise is not of all these frames."""
    first, last = noise.start, noise.start + noise.shape[1] - 1
    if frames.start < first or frames.stop - 1 > last:
        wanted = f"frames {frames.start}..{frames.stop - 1}"
        raise ConfigError(f"noise of frames {first}..{last} is not that of {wanted}; draw more frames")


# --- The noise of the public scripts: torch.randn in bfloat16 on the GPU, in the order of their calls


def draw_noise(
    config: RunConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Draw a rollout's noise [1, F, C, h, w], and that between steps [steps - 1, 1, F, C, h, w], if any.

    Seeded noise is drawn on the CPU, so that it is the same for every device.
    """
    if config.noise != "seeded":
        first, between = released_noise(config, model_config.in_dim, device)
        return first.to(dtype), between.to(dtype)
    generator = torch.Generator().manual_seed(config.seed)
    shape = (1, config.num_frames, model_config.in_dim, config.height, config.width)
    noise = torch.randn(shape, generator=generator)
    renoise = torch.randn(num_draws(config) - 1, *shape, generator=generator)
    return noise.to(device, dtype), renoise.to(device, dtype)


def num_draws(config: RunConfig) -> int:
    """Return how often noise is drawn for a block: before its steps, and between them but for UniPC."""
    if config.solver == "unipc":
        return 1
    return max(len(config.denoising_step_list), len(config.first_block_steps or ()))


def released_noise(config: RunConfig, channels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw what inference.py of Self-Forcing and its siblings draws after set_seed(seed), in bfloat16.

    First noise [1, F, C, h, w] of all frames, then noise between steps [steps - 1, 1, F, C, h, w] block by
    block and step by step; Rolling Forcing draws for a whole window and takes a block of it. The values
    depend on the kind of GPU: config.noise names one of CARDS, or "released" means this device.
    https://github.com/guandeh17/Self-Forcing inference.py, pipeline/causal_inference.py;
    https://github.com/TencentARC/RollingForcing pipeline/rolling_forcing_inference.py.
    """
    frame, blocks = (channels, config.height, config.width), block_ranges(config.block_sizes)
    if config.noise in CARDS:
        randn: Callable[..., Tensor] = CardGenerator(config.seed, config.noise).randn
    else:
        generator = torch.Generator(device).manual_seed(config.seed)
        randn = partial(torch.randn, generator=generator, dtype=torch.bfloat16, device=device)

    def draw(frames: int) -> Tensor:
        return randn(frames, *frame).to(device)

    # 1. All frames at once; the scripts draw them before anything else.
    noise = draw(config.num_frames)
    steps = num_draws(config)
    renoise = noise.new_zeros(steps - 1, *noise.shape)
    # 2. Noise between steps, in the order in which a block's steps, or a window's blocks, ask for it.
    if config.sampler == "rolling_forcing":
        for newest in range(len(blocks) + steps - 1):
            window = range(max(0, newest - steps + 1), min(newest, len(blocks) - 1) + 1)
            for block in window:
                step = newest - block
                if step < steps - 1:
                    frames, start = blocks[block], blocks[window.start].start
                    drawn = draw(blocks[window[-1]].stop - start)
                    renoise[step, frames.start : frames.stop] = drawn[
                        frames.start - start : frames.stop - start
                    ]
    elif steps > 1:
        for block, frames in enumerate(blocks):
            for step in range(len(config.passes_of_block(block)) - 2):
                renoise[step, frames.start : frames.stop] = draw(len(frames))
    return noise[None], renoise[:, None]


class CardGenerator:
    """torch.randn on a GPU after torch.manual_seed(seed), computed on any device, for one of CARDS.

    Thread t of the card's T draws values t, t + T, t + 2 T, t + 3 T of a tensor, then 4 T further on, from
    Philox 4x32-10 (Salmon et al., SC 2011) by Box-Muller. So cards agree in the first values, as far as the
    smaller T, and differ behind them. Bits of the bfloat16 agree but for the last one of some: a GPU's sine
    is an approximation. PyTorch: aten/src/ATen/native/cuda/DistributionTemplates.h.
    """

    def __init__(self, seed: int, card: str):
        self.seed, self.at, (processors, threads) = seed, 0, CARDS[card]
        self.most_threads = processors * (threads // 256) * 256

    def randn(self, *shape: int) -> Tensor:
        """Return the next normal values in bfloat16."""
        count = prod(shape)
        threads = min(256 * ceil(count / 256), self.most_threads)
        turns = ceil(count / (4 * threads))
        turn, thread = np.divmod(np.arange(turns * threads, dtype=np.uint64), np.uint64(threads))
        zero = np.zeros_like(turn)
        x, y, z, w = _philox([turn + np.uint64(self.at), zero, thread, zero], self.seed)
        values = np.stack([*_box_muller(x, y), *_box_muller(z, w)])  # [4, turns * threads]
        # Four values of a thread lie T apart: [turns, 4, T] in order of the tensor.
        self.at += turns
        ordered = values.reshape(4, turns, threads).swapaxes(0, 1).reshape(-1)[:count]
        return torch.from_numpy(ordered).to(torch.bfloat16).reshape(shape)


def _philox(counter: list[np.ndarray], seed: int) -> list[np.ndarray]:
    """Return four words of 32 bits for each counter of four, as uint64."""
    low, keys = np.uint64(0xFFFFFFFF), [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    # Multipliers and key increments of Philox 4x32: Salmon et al., SC 2011, as in Random123.
    a, b, c, d = counter
    for _ in range(10):
        of_a, of_c = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        first, second = np.uint64(keys[0]), np.uint64(keys[1])
        high_a, high_c = of_a >> np.uint64(32), of_c >> np.uint64(32)
        a, b, c, d = high_c ^ b ^ first, of_c & low, high_a ^ d ^ second, of_a & low
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return [a, b, c, d]


def _box_muller(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two normal values, float32, of two words each."""
    unit = np.float32(2**-32)
    u, turn = (word.astype(np.float32) * unit + unit / 2 for word in (x, y))
    angle = turn * np.float32(2 * np.pi)
    radius = np.sqrt(np.float32(-2) * np.log(u))
    return radius * np.sin(angle), radius * np.cos(angle)
