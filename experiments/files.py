"""Files appear whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


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
