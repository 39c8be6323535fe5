"""Files appear whole or not at all."""

import errno
import os
import platform
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from experiments.caches.errors import CacheError


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
