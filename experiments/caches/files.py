"""Files appear whole or not at all; errors of caches and runs; the one place where an mp4 is encoded."""

import errno
import os
import platform
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from wan.errors import UserError, one_line

if TYPE_CHECKING:
    import numpy as np


class CacheError(UserError, ValueError):
    """A cache or an output that cannot be read or written; one line that says what to do."""


class RunError(UserError, RuntimeError):
    """A run that started but cannot give a result, such as NaN in the latents."""


class StoppedError(UserError):
    """A run that was asked to stop, and has saved what it could; the message says how to go on."""


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file that becomes path, through links, when the block ends, and is removed if it fails."""
    path = target_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(path)
    try:
        with open(part, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:  # Ctrl-C too
        with suppress(OSError):
            part.unlink()
        raise


def target_of(path: str | Path) -> Path:
    """Follow links to the file that is written. OSError for a folder, device or pipe."""
    path = Path(os.path.realpath(path))
    if path.is_dir():
        raise OSError(errno.EISDIR, "Is a directory", str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "Is a device or pipe", str(path))
    return path


def part_of(path: Path) -> Path:
    """Return where a file is while it is being written by this process of this host."""
    host = zlib.crc32(platform.node().encode(errors="surrogateescape"))  # disks are shared
    return path.with_name(f".{path.name}.{os.getpid()}-{host:08x}.part")


def require_writable(path: str | Path) -> None:
    """Raise CacheError, before hours of work, where path cannot become a file."""
    try:
        target = target_of(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=target.parent).close()
        with suppress(FileNotFoundError):
            part_of(target).stat()  # its name may be too long where the output's own is not
    except OSError as error:
        raise CacheError(f"{path} cannot be written: {error.strerror or error}") from error


def require_ffmpeg(otherwise: str = "") -> str:
    """Return the path of ffmpeg. Raises CacheError, before anything is computed, where there is none."""
    try:
        import_module("imageio")  # both are needed only where a video is written
        return str(import_module("imageio_ffmpeg").get_ffmpeg_exe())
    except (ImportError, RuntimeError) as error:
        remedy = 'run: pip install "imageio[ffmpeg]"' + (f"; or {otherwise}" if otherwise else "")
        raise CacheError(
            f"videos are written by ffmpeg, which is not here ({one_line(error)}); {remedy}"
        ) from None


def encode_mp4(pixels: "np.ndarray", fps: int, multiple: int = 8, options: Sequence[str] = ()) -> bytes:
    """Encode uint8 pixels [frames, height, width, 3]; sides grow to a multiple, options are ffmpeg's."""
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
