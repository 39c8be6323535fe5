"""One small picture of a video per latent frame, as text that a page can hold."""

import base64
from io import BytesIO
from pathlib import Path

from experiments.caches.errors import CacheError
from wan.blocks import VIDEO_FRAMES_PER_LATENT

HEIGHT = 60  # pixels


class ThumbnailError(CacheError):
    """A video that cannot be shown beside a cache."""


def thumbnails(path: str | Path, num_frames: int, height: int = HEIGHT) -> list[str]:
    """JPEGs as data URIs, one per latent frame.

    The VAE encodes video frame 0 alone and then groups of four; the third of a group stands for it. Raises
    ThumbnailError for a file that is no video, or that has another number of frames than the latents.
    """
    import imageio.v3 as iio  # ffmpeg is needed only here
    from PIL import Image

    stride = VIDEO_FRAMES_PER_LATENT
    wanted = {0, *range(stride - 1, stride * (num_frames - 1), stride)}
    found, count = [], 0
    try:
        for count, pixels in enumerate(iio.imiter(path, plugin="FFMPEG"), 1):
            if count - 1 in wanted:
                image = Image.fromarray(pixels)
                image = image.resize((max(1, round(image.width * height / image.height)), height))
                found.append(_data_uri(image))
    except Exception as error:  # ffmpeg's own errors have no common type
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ThumbnailError(f"{path} cannot be read as a video: {reason[0][:200]}") from None
    expected = 1 + stride * (num_frames - 1)
    if count != expected:
        raise ThumbnailError(f"{path} has {count} frames; {num_frames} latent frames are {expected}")
    return found


def _data_uri(image) -> str:
    file = BytesIO()
    image.save(file, "JPEG", quality=75)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
