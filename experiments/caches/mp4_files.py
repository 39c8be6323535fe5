"""The one place where an mp4 is encoded. ffmpeg comes with the package imageio-ffmpeg, or with the system."""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from experiments.caches.errors import CacheError
from wan.errors import one_line

if TYPE_CHECKING:
    import numpy as np

INSTALL = 'pip install "imageio[ffmpeg]"'


def require_ffmpeg(otherwise: str = "") -> str:
    """Where ffmpeg is. Raises CacheError, before anything is computed, where there is none."""
    try:
        import_module("imageio")  # both are needed only where a video is written
        return str(import_module("imageio_ffmpeg").get_ffmpeg_exe())
    except (ImportError, RuntimeError) as error:
        remedy = f"run: {INSTALL}" + (f"; or {otherwise}" if otherwise else "")
        raise CacheError(
            f"videos are written by ffmpeg, which is not here ({one_line(error)}); {remedy}"
        ) from None


def encode_mp4(pixels: "np.ndarray", fps: int, multiple: int = 8, options: Sequence[str] = ()) -> bytes:
    """An mp4 of uint8 pixels [frames, height, width, 3]; sides grow to a multiple, options are ffmpeg's."""
    require_ffmpeg()
    import imageio.v3 as iio

    return iio.imwrite(
        "<bytes>",
        pixels,
        extension=".mp4",
        fps=fps,
        codec="libx264",
        macro_block_size=multiple,
        output_params=list(options),
    )
