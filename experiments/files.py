"""Files appear whole or not at all, and how large they will be."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

MARGIN = 1 << 16       # bytes of a cache beside its tensors: names, numbers, the archive's directory


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A binary file beside path that becomes path when the block ends, and is removed when the block fails.

    Missing folders are made. Raises OSError where that is not allowed.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"[Errno 21] Is a directory: '{path}'")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
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


def tensor_bytes(value: Any) -> int:
    """Bytes that a cache, or what is in it, takes in a file; a little too many."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size() + 512
    if isinstance(value, Mapping):
        return MARGIN * ("format" in value) + sum(map(tensor_bytes, value.values()))
    return sum(map(tensor_bytes, value)) if isinstance(value, list) else 16
