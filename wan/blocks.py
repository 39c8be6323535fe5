"""Which frames belong to which block of a rollout, and which of them a block sees; indices only."""

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from wan.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor  # a config must not wait for torch

ROLLING_ATTENTION = 21  # frames that a forward of Rolling Forcing sees, as released
VIDEO_FRAMES_PER_LATENT = 4  # the VAE encodes frame 0 alone, then groups of four


def block_sizes(
    num_frames: int, num_frame_per_block: int = 3, independent_first_frame: bool = False
) -> list[int]:
    """Frames of each block of the rollout, e.g.
    21 -> [3]*7, and with an independent first frame 19 -> [1] + [3]*6.

    Raises ConfigError where the frames do not fit, naming the nearest counts that do.
    """
    n = num_frame_per_block
    first = [1] if independent_first_frame else []
    if n < 1:
        raise ConfigError(f"num_frame_per_block must be at least 1, not {n}")
    rest, left_over = divmod(num_frames - len(first), n)
    if num_frames < 1 or rest < (0 if first else 1) or left_over:
        lower = len(first) + max(rest, 0 if first else 1) * n
        fits = sorted({lower, lower + n})
        raise ConfigError(
            f"{num_frames} frames do not fit blocks of {n}"
            f"{' after an independent first frame' if first else ''}; try {fits[0]} or {fits[1]}"
        )
    return first + [n] * rest


def steps_of_blocks(
    steps: Sequence[int], first_block_steps: Sequence[int] | None = None
) -> tuple[list[int], list[int], list[int]]:
    """All denoising steps of a config, descending; which of them the first block takes, and later ones.

    [1000, 500] with first_block_steps [1000, 750, 500, 250] -> [1000, 750, 500, 250], 0..3 and [0, 2].
    """
    first = list(steps if first_block_steps is None else first_block_steps)
    every = sorted({*steps, *first}, reverse=True)
    return every, [every.index(step) for step in first], [every.index(step) for step in steps]


def block_ranges(sizes: list[int]) -> list[range]:
    """Frame indices of each block: [3, 3] -> [range(0, 3), range(3, 6)]."""
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def check_window(local_attn_size: int, sink_size: int, block_size: int) -> None:
    """A window of local_attn_size frames must hold the sink frames and one whole block;
    -1 means no window.
    """
    if sink_size < 0:
        raise ConfigError(f"sink_size must be 0 or more frames, not {sink_size}")
    if local_attn_size == -1:
        return
    if local_attn_size < sink_size + block_size:
        raise ConfigError(
            f"local_attn_size {local_attn_size} cannot hold {sink_size} sink frames and a block of "
            f"{block_size}; it must be at least {sink_size + block_size}, or -1 for no window"
        )


def latent_frames(video_frames: int) -> int:
    """Latent frames of a video of 4n + 1 frames, e.g. 21 -> 6.
    Raises ConfigError for other counts, naming those that fit.
    """
    rest, left_over = divmod(video_frames - 1, VIDEO_FRAMES_PER_LATENT)
    if video_frames < 1 or left_over:
        fits = [1 + VIDEO_FRAMES_PER_LATENT * n for n in (max(rest, 0), max(rest, 0) + 1)]
        raise ConfigError(
            f"{video_frames} video frames are not {VIDEO_FRAMES_PER_LATENT}n + 1; try {fits[0]} or {fits[1]}"
        )
    return 1 + rest


def video_to_latent_frame(video_frame: int, stride: int = VIDEO_FRAMES_PER_LATENT) -> int:
    """Latent frame that holds a video frame, or array of them:
    the VAE encodes frame 0 alone, then groups of stride.
    """
    return (video_frame + stride - 1) // stride


def block_of_frame(block_sizes: Sequence[int], frame: int) -> int:
    """The block that a frame belongs to."""
    return next(block for block, frames in enumerate(block_ranges(list(block_sizes))) if frame in frames)


def block_frames(block_sizes: Sequence[int], block: int) -> list[int]:
    """Frames of a block, block -1 the last: block_frames([1, 3, 3], 1) == [1, 2, 3]."""
    return list(block_ranges(list(block_sizes))[block])


def visible_frames(
    block_sizes: Sequence[int], block: int, local_attn_size: int = -1, sink_size: int = 0
) -> list[int]:
    """Key frames that a block sees, its own included: all so far, or with local_attn_size > 0 the first
    sink_size frames and the newest local_attn_size - sink_size ones.
    """
    end = block_frames(block_sizes, block)[-1] + 1
    if local_attn_size <= 0 or end <= local_attn_size:
        return list(range(end))
    return [*range(sink_size), *range(end - (local_attn_size - sink_size), end)]


def rolling_attention_size(local_attn_size: int, num_steps: int, block_size: int) -> int:
    """Frames that a forward of Rolling Forcing sees: local_attn_size, or 21. ConfigError where they do not
    hold the first block and a window of num_steps blocks.
    """
    size = ROLLING_ATTENTION if local_attn_size == -1 else local_attn_size
    least = (num_steps + 1) * block_size
    if size < least:
        raise ConfigError(
            f"sampler rolling_forcing: {size} frames (local_attn_size) cannot hold the first block and a "
            f"window of {num_steps} blocks; it must be at least {least}"
        )
    return size


def later_block(block_sizes: Sequence[int], ahead: int = 0) -> "Tensor":
    """[F, F] bool: the key's block comes more than `ahead` blocks after the query's, so the cell was never
    attended. Only a rolling window looks ahead.
    """
    import torch

    block = torch.repeat_interleave(torch.arange(len(block_sizes)), torch.as_tensor(block_sizes))
    return block[None, :] > block[:, None] + ahead


def window_levels(
    block_sizes: Sequence[int], block: int, step: int, timesteps: Sequence[float]
) -> dict[int, float]:
    """Frame -> timestep of all that Rolling Forcing denoises together with a block at a step.

    timesteps are those of the steps, from the noisiest on: one for each block of the window.
    """
    newest, ranges = block + step, block_ranges(list(block_sizes))
    shown = range(max(0, newest - len(timesteps) + 1), min(len(ranges), newest + 1))
    return {frame: timesteps[newest - b] for b in shown for frame in ranges[b]}


def earlier_block(block_sizes: Sequence[int]) -> "Tensor":
    """[F, F] bool: the key's block comes before the query's. Such keys are clean context in every pass;
    the query's own block is as noisy as the query.
    """
    import torch

    block = torch.repeat_interleave(torch.arange(len(block_sizes)), torch.as_tensor(block_sizes))
    return block[None, :] < block[:, None]
