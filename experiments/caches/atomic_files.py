"""Files appear whole or not at all, and how large they will be."""

import errno
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from experiments.caches.errors import CacheError

MARGIN = 1 << 16  # bytes of a cache beside its tensors: names, numbers, the archive's directory


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
    """Where a file is while it is being written by this process."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


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


def tensor_bytes(value: Any, seen: set[int] | None = None) -> int:
    """Bytes that a cache, or what is in it, takes in a file; a little too many. One tensor counts once."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        new = value.data_ptr() not in seen
        seen.add(value.data_ptr())
        return value.numel() * value.element_size() * new + 512
    if isinstance(value, Mapping):
        return MARGIN * ("format" in value) + sum(tensor_bytes(inner, seen) for inner in value.values())
    return sum(tensor_bytes(inner, seen) for inner in value) if isinstance(value, list) else 16
