"""Files appear whole or not at all."""

import errno
import os
import platform
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from wan.errors import UserError, one_line


# --- What can be wrong with files and runs, told in one line that says what to do
class CacheError(UserError, ValueError):
    """What is wrong with a cache, in one line that says what to do."""


class RunError(UserError, RuntimeError):
    """A run that started but cannot give a result, such as NaN in the latents."""


class StoppedError(UserError):
    """A run that was asked to stop, and has saved what it could; the message says how to go on."""


# --- Files appear whole or not at all
@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A binary file beside path that becomes path when the block ends, and is removed when the block fails.

    Missing folders are made, and a link stays: its target is replaced. Raises OSError where that is not
    allowed.
    """
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
    """The file that is written under a path; of a link its target. OSError for a folder, device or pipe."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(
            errno.EISDIR if path.is_dir() else errno.EINVAL,
            "Is a directory" if path.is_dir() else "Is a device or pipe",
            str(path),
        )
    return path


def part_of(path: Path) -> Path:
    """Where a file is while it is being written by this process of this host."""
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


# --- The one place where an mp4 is encoded. ffmpeg comes with the package imageio-ffmpeg, or with the system
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


# --- How many bytes a cache takes in its file
MARGIN = 1 << 16  # bytes of a cache beside its tensors: names, numbers, the archive's directory


def tensor_bytes(value: Any, seen: set[int] | None = None) -> int:
    """Bytes that a cache, or what is in it, takes in a file; a little too many. One tensor counts once."""
    from torch import Tensor  # a --help needs no torch

    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        new = value.data_ptr() not in seen
        seen.add(value.data_ptr())
        return value.numel() * value.element_size() * new + 512
    if isinstance(value, Mapping):
        return MARGIN * ("format" in value) + sum(tensor_bytes(inner, seen) for inner in value.values())
    return sum(tensor_bytes(inner, seen) for inner in value) if isinstance(value, list) else 16
