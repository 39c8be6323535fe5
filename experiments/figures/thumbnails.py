"""One small picture of a video per latent frame: as arrays for figures, as text that a page can hold."""

import base64
from collections.abc import Container
from io import BytesIO
from pathlib import Path

import numpy as np

from experiments.caches.errors import CacheError
from wan.blocks import VIDEO_FRAMES_PER_LATENT

HEIGHT = 60  # pixels
COPIED = 1.0  # seconds by which a video that was copied with its cache may be the older file


class ThumbnailError(CacheError):
    """A video that cannot be shown beside a cache."""


def thumbnails(path: str | Path, num_frames: int, height: int = HEIGHT) -> list[str]:
    """The pictures as JPEGs in data URIs; raises what pictures raises."""
    return [_data_uri(picture) for picture in pictures(path, num_frames, height)]


def pictures(path: str | Path, num_frames: int, height: int = HEIGHT, which: int = 2) -> list[np.ndarray]:
    """One picture [height, W, 3] uint8 per latent frame.

    The VAE encodes video frame 0 alone and then groups of four; which of a group, 0..3, stands for it. Raises
    ThumbnailError for a file that is no video, or that has another number of frames than the latents.
    """
    stride = VIDEO_FRAMES_PER_LATENT
    if not 0 <= which < stride:
        raise ThumbnailError(f"picture {which} of a latent frame is not in 0..{stride - 1}")
    return video_frames(path, num_frames, height, {0, *range(1 + which, stride * num_frames, stride)})


def video_frames(
    path: str | Path, num_frames: int, height: int, wanted: Container[int] | None = None
) -> list[np.ndarray]:
    """The wanted frames of the video of num_frames latent frames, [height, W, 3] uint8; None: all."""
    import imageio.v3 as iio  # ffmpeg is needed only here
    from PIL import Image

    stride = VIDEO_FRAMES_PER_LATENT
    found, count = [], 0
    try:
        for count, pixels in enumerate(iio.imiter(path, plugin="FFMPEG"), 1):
            if wanted is None or count - 1 in wanted:
                image = Image.fromarray(pixels)
                image = image.resize((max(1, round(image.width * height / image.height)), height))
                found.append(np.asarray(image))
    except Exception as error:  # ffmpeg's own errors have no common type
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ThumbnailError(f"{path} cannot be read as a video: {reason[0][:200]}") from None
    expected = 1 + stride * (num_frames - 1)
    if count != expected:
        raise ThumbnailError(f"{path} has {count} frames; {num_frames} latent frames are {expected}")
    return found


def video_of(cache_path: str | Path, video: str | Path | None) -> Path:
    """The video given, or the mp4 of the same name beside a cache. CacheError where there is none, or where
    the one beside the cache is of an earlier run."""
    path = Path(video) if video is not None else Path(cache_path).with_suffix(".mp4")
    if not path.is_file():
        raise CacheError(f"{path} not found; the script that made the cache writes it with --save_video")
    if video is None:
        require_as_new(path, cache_path)
    return path


def require_as_new(video: Path, cache_path: str | Path) -> None:
    """Raise ThumbnailError for a video that an earlier run left beside a cache: a run writes it last."""
    if video.stat().st_mtime < Path(cache_path).stat().st_mtime - COPIED:
        raise ThumbnailError(
            f"{video} is older than {cache_path}, so of an earlier run; make the cache again with "
            "--save_video, or name the video where it is of the same rollout"
        )


def required_pictures(path: str | Path, num_frames: int, height: int, which: int) -> list[np.ndarray]:
    """pictures() of a video that has to be there: a plain CacheError where it cannot be shown."""
    try:
        return pictures(path, num_frames, height, which)
    except ThumbnailError as error:
        raise CacheError(str(error)) from None


def pictures_for(
    cache_path: str | Path, video: str | Path | None, num_frames: int
) -> tuple[list[np.ndarray] | None, str]:
    """Pictures of the video given, or of the mp4 of the same name beside a cache, and a note.

    None where there is no video. One beside the cache that does not fit is left out, as the note says; one
    that was given and does not fit raises ThumbnailError.
    """
    if video is not None:
        return pictures(video, num_frames), ""
    beside = Path(cache_path).with_suffix(".mp4")
    if not beside.is_file():
        return None, ""
    try:
        require_as_new(beside, cache_path)
        return pictures(beside, num_frames), ""
    except ThumbnailError as error:
        return None, f"Note: the video beside the cache is left out: {error}"


def _data_uri(picture: np.ndarray) -> str:
    from PIL import Image

    file = BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=75)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
