"""Latent or video frames along the axes of a layer's figures.

The VAE encodes video frame 0 alone and then groups of four: video frame i is in latent frame (i + 3) // 4.
Attention is measured per latent frame, so the video view repeats values: it places them in time and adds no
measurement."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.caches.caption import Caption, noise_label, subtitle
from experiments.caches.errors import CacheError
from experiments.caches.view import Profiles
from wan.blocks import VIDEO_FRAMES_PER_LATENT, video_to_latent_frame


@dataclass(frozen=True)
class FrameView:
    """Which latent frame each shown frame is in."""

    unit: str  # "latent" or "video", for axis labels
    stride: int  # video frames per latent frame
    latent: np.ndarray  # [n] latent frame of every shown frame

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Profiles [..., F] of latent frames -> [..., n] of shown frames; columns after them stay."""
        return np.concatenate([values[..., self.latent], values[..., self.latent[-1] + 1 :]], -1)

    def spread_matrix(self, matrix: np.ndarray) -> np.ndarray:
        """Matrices [..., F, F] of latent frames -> [..., n, n] of shown frames; columns after them stay."""
        return self.spread(matrix[..., self.latent, :])

    def shown(self, latent_frames: Sequence[int]) -> list[int]:
        """The shown frames that are in some latent frames."""
        return np.flatnonzero(np.isin(self.latent, list(latent_frames))).tolist()

    def latent_frames(self, shown: Sequence[int]) -> list[int]:
        """The latent frame of each of some shown frames. CacheError for a frame that is not shown."""
        for f in shown:
            if not 0 <= f < len(self.latent):
                last = len(self.latent) - 1
                raise CacheError(f"query frame {f} is not in 0..{last}, the {self.unit} frames of this view")
        return [int(self.latent[f]) for f in shown]

    def __str__(self) -> str:
        n = len(self.latent)
        if self.unit == "latent":
            return f"View: {n} latent frames"
        return (
            f"View: {n} video frames; the VAE encodes frame 0 alone, then groups of {self.stride}: "
            f"video frame i is in latent frame (i + {self.stride - 1}) // {self.stride}, and shows its value"
        )


def choose_view(
    cache: Mapping[str, Any],
    use_video: bool | None = None,
    num_video_frames: int | None = None,
    stride: int | None = None,
) -> FrameView:
    """The frames of a layer cache to show: video frames if use_video, or None and the cache knows
    orig_num_frames.

    num_video_frames and stride are the cache's orig_num_frames and vae_stride_t, else as many as the latents
    hold in groups of four. Raises CacheError for a count that is not that of the cache's latent frames."""
    F = cache["num_frames"]
    stride = stride or cache.get("vae_stride_t", VIDEO_FRAMES_PER_LATENT)
    if not (use_video if use_video is not None else "orig_num_frames" in cache):
        return FrameView("latent", stride, np.arange(F))
    n = num_video_frames or cache.get("orig_num_frames", 1 + stride * (F - 1))
    needed = video_to_latent_frame(n - 1, stride) + 1
    if needed != F:
        fits = f"{1 + stride * (F - 2) + 1}..{1 + stride * (F - 1)}" if F > 1 else "1"
        raise CacheError(
            f"{n} video frames in groups of {stride} are {needed} latent frames, but this cache has {F}; "
            f"ORIG_NUM_FRAMES may be {fits}"
        )
    return FrameView("video", stride, np.array([video_to_latent_frame(i, stride) for i in range(n)]))


def query_profile(
    view: Profiles, axes: FrameView, query_frames: Sequence[int] | None = None
) -> tuple[np.ndarray, Caption]:
    """Profile [H, F + averages] over latent key frames of a layer view, and what figures say about it.

    query_frames None takes the stored mean over the last block's queries; frames as the axes count them take
    the mean of those rows, in which a key frame counts the queries that attend to it. CacheError for a frame
    that is not there, or rows of a cache without a matrix."""
    (layer,) = view.layers
    noise: Sequence[int]
    if query_frames is None:
        profile, latent = view.key_profile(layer), list(view.query_frames)
        query_frames, noise = axes.shown(latent), view.noise_frames
    else:
        latent, matrix = axes.latent_frames(query_frames), view.key_matrix(layer)
        if matrix is None:
            raise CacheError("this cache has no frame matrix: QUERY_FRAMES must be None")
        profile = _mean_of_rows(matrix, latent)
        noise = own_blocks(view.block_sizes, latent) if view.is_clean_pass is False else ()
        if view.rolling_timesteps and noise:
            noise = view.noise_frames if tuple(latent) == view.query_frames else noise
    highlighted = {}
    if noise and len(noise) < len(view.key_frames):  # else there is no context to tell them from
        highlighted = {noise_label(view.timestep, view.noise_levels.values()): axes.shown(noise)}
    said = subtitle(view.pass_label, query_frames)
    return profile, Caption(view.quantity, said, highlighted, axes.unit, view.num_averages)


def select_branch(cache: Mapping[str, Any], branch: str) -> Mapping[str, Any]:
    """A layer cache as it is ("cond"), or of guidance's unconditional branch ("uncond"), whose queries are
    the same."""
    if branch == "cond":
        return cache
    if branch != "uncond" or "full_frame_attention_uncond" not in cache:
        raise CacheError(
            f"no branch {branch!r} in this cache; it has cond"
            f"{' and uncond' if 'full_frame_attention_uncond' in cache else ' alone'}"
        )
    matrix = cache["full_frame_attention_uncond"]
    return {
        **cache,
        "branch": branch,
        "full_frame_attention": matrix,
        "last_block_frame_attention": matrix[:, cache["last_block_query_frames"]].float().mean(1),
    }


def own_blocks(block_sizes: Sequence[int], latent_frames: Sequence[int]) -> list[int]:
    """All frames of the blocks that hold some frames: those that were denoised together with them."""
    block = np.repeat(np.arange(len(block_sizes)), block_sizes)
    return np.flatnonzero(np.isin(block, block[list(latent_frames)])).tolist()


def _mean_of_rows(matrix: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """Mean over rows of A [H, F, F] -> [H, F], without NaN; NaN where nothing is left."""
    chosen = matrix[:, list(rows)]
    count = (~np.isnan(chosen)).sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(count > 0, np.nansum(chosen, 1) / count, np.nan)
