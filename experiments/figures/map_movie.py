"""An mp4 of the video with a map moving over it: every video frame has the map of its latent frame."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import to_rgb

from experiments.analysis.video_maps import VideoMap
from experiments.caches.atomic_files import replacing
from experiments.caches.mp4_files import encode_mp4
from experiments.figures.style import RED
from experiments.figures.video_maps import ALPHA, blend, query_box, scale_of
from wan.blocks import VIDEO_FRAMES_PER_LATENT

FPS, LINE, STRIPE = 16, 3, 16  # frames a second; pixels of the query's frame, and from stripe to stripe


def save_map_movie(
    path: str | Path,
    frames: Sequence[np.ndarray],
    seen: VideoMap,
    *,
    alpha: float = ALPHA,
    scale: ScalarMappable | None = None,
) -> Path:
    """Write video frames [h, w, 3] uint8 with a map over them, whole or not at all.

    Frames that the query does not see are pale; its own block is striped while it is noise, and the query has
    a frame. scale None: the map's own.
    """
    scale = scale or scale_of([seen])
    shown = [movie_frame(pixels, latent_frame(n), seen, scale, alpha) for n, pixels in enumerate(frames)]
    content = encode_mp4(np.stack(shown), FPS, multiple=2)
    with replacing(path) as file:
        file.write(content)
    return Path(path)


def latent_frame(video_frame: int) -> int:
    """The latent frame that a video frame is decoded from: frame 0 alone, then groups of four."""
    return (video_frame + VIDEO_FRAMES_PER_LATENT - 1) // VIDEO_FRAMES_PER_LATENT


def movie_frame(
    pixels: np.ndarray, frame: int, seen: VideoMap, scale: ScalarMappable, alpha: float
) -> np.ndarray:
    """One video frame of a latent frame with its map, as pixels."""
    out = blend(pixels, seen.values[frame], scale, alpha)
    height, width = out.shape[:2]
    if frame in seen.noise_frames:
        stripes = np.add.outer(np.arange(height), np.arange(width)) % STRIPE < 2
        out[stripes] = out[stripes] // 2 + 127
    if frame == seen.query[0]:
        (x, y), wide, high = query_box(seen, (height, width))
        left, top, right, bottom = (round(edge) for edge in (x, y, x + wide, y + high))
        color = np.round(255 * np.array(to_rgb(RED))).astype(np.uint8)
        edge = np.zeros((height, width), bool)
        edge[top:bottom, left:right] = True
        edge[top + LINE : bottom - LINE, left + LINE : right - LINE] = False
        out[edge] = color
    return out
