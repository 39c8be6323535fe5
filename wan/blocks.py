"""Which frames belong to which block of a rollout, and which of them a block sees; indices only."""

from collections.abc import Sequence
from itertools import accumulate

from wan.errors import ConfigError

ROLLING_ATTENTION = 21  # frames that a forward of Rolling Forcing sees, as released
VIDEO_FRAMES_PER_LATENT = 4  # the VAE encodes frame 0 alone, then groups of four


def block_sizes(
    num_frames: int, num_frame_per_block: int = 3, independent_first_frame: bool = False
) -> list[int]:
    """Return the frames of each block: 21 -> [3] * 7, with an independent first frame 19 -> [1] + [3] * 6.

    Raises ConfigError where the frames do not fit, naming the nearest counts that do.
    """
    # F = first + n · blocks, where first is 1 or 0
    n, first = num_frame_per_block, int(independent_first_frame)
    count, left_over = divmod(num_frames - first, n)
    least = 1 - first  # blocks of n frames
    if count < least or left_over:
        lower = first + max(count, least) * n
        blocks = f"blocks of {n}"
        if first:
            blocks += " after an independent first frame"
        raise ConfigError(f"{num_frames} frames do not fit {blocks}; try {lower} or {lower + n}")
    return [1] * first + [n] * count


def steps_of_blocks(
    steps: Sequence[int], first_block_steps: Sequence[int] | None = None
) -> tuple[list[int], list[int], list[int]]:
    """Return all denoising steps, descending, and as indices of them those of block 0 and of later blocks.

    [1000, 500] with first_block_steps [1000, 750, 500, 250] -> [1000, 750, 500, 250], 0..3 and [0, 2].
    """
    first = list(steps)
    if first_block_steps is not None:
        first = list(first_block_steps)
    every = sorted({*steps, *first}, reverse=True)
    return every, [every.index(step) for step in first], [every.index(step) for step in steps]


def block_ranges(sizes: Sequence[int]) -> list[range]:
    """Return the frames of each block: [3, 3] -> [range(0, 3), range(3, 6)]."""
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def block_frames(block_sizes: Sequence[int], block: int) -> list[int]:
    """Return the frames of a block, block -1 the last: block_frames([1, 3, 3], 1) == [1, 2, 3]."""
    return list(block_ranges(block_sizes)[block])


def block_of_frame(block_sizes: Sequence[int], frame: int) -> int:
    """Return the block that a frame belongs to."""
    return next(block for block, frames in enumerate(block_ranges(block_sizes)) if frame in frames)


def visible_frames(
    block_sizes: Sequence[int], block: int, local_attn_size: int = -1, sink_size: int = 0
) -> list[int]:
    """Return the key frames that a block sees, its own included: all so far, or a sink and the newest."""
    frames = list(range(block_ranges(block_sizes)[block].stop))
    if local_attn_size <= 0:
        return frames
    excess = max(0, len(frames) - local_attn_size)
    return frames[:sink_size] + frames[sink_size + excess :]


def rolling_attention_size(local_attn_size: int, num_steps: int, block_size: int) -> int:
    """Return the frames that a forward of Rolling Forcing sees: local_attn_size, or 21.

    Raises ConfigError where they do not hold the first block and a window of num_steps blocks.
    """
    size = local_attn_size
    if size == -1:
        size = ROLLING_ATTENTION
    least = (num_steps + 1) * block_size
    if size < least:
        raise ConfigError(
            f"sampler rolling_forcing: {size} frames (local_attn_size) cannot hold the first block and a "
            f"window of {num_steps} blocks; it must be at least {least}"
        )
    return size


def window_levels(
    block_sizes: Sequence[int], block: int, step: int, timesteps: Sequence[float]
) -> dict[int, float]:
    """Return frame -> timestep of all that Rolling Forcing denoises together with a block at a step.

    timesteps are those of the steps, from the noisiest on: one for each block of the window.
    """
    # Block b stands at step newest - b: the oldest block of the window is nearly clean.
    newest, ranges = block + step, block_ranges(block_sizes)
    shown = range(max(0, newest - len(timesteps) + 1), min(len(ranges), newest + 1))
    return {frame: timesteps[newest - b] for b in shown for frame in ranges[b]}


def latent_frames(video_frames: int) -> int:
    """Return the latent frames of a video of 4n + 1 frames: 21 -> 6. ConfigError for other counts."""
    n, left_over = divmod(video_frames - 1, VIDEO_FRAMES_PER_LATENT)
    if n < 0 or left_over:
        fits = [1 + VIDEO_FRAMES_PER_LATENT * near for near in (max(n, 0), max(n, 0) + 1)]
        raise ConfigError(
            f"{video_frames} video frames are not {VIDEO_FRAMES_PER_LATENT}n + 1; try {fits[0]} or {fits[1]}"
        )
    return 1 + n


def video_to_latent_frame(video_frame: int, stride: int = VIDEO_FRAMES_PER_LATENT) -> int:
    """Return the latent frame that holds a video frame, or an array of them."""
    return (video_frame + stride - 1) // stride
