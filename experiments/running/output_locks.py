"""Outputs are claimed before a run: one run per path, nothing replaced that should stay, room on the disk.

A claim is a lock file beside the output, .NAME.lock, held by flock: it ends with the process, however that ends.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from experiments.caches.atomic_files import require_writable, target_of
from experiments.caches.errors import CacheError


@contextmanager
def claimed(paths: Mapping[str, int], overwrite: bool = True) -> Iterator[None]:
    """Hold outputs, given with the bytes each will take, while a run makes them.

    Raises CacheError, before hours of work, where one cannot be written, is there and may not be replaced, is being
    made by another run, or does not fit on its disk.
    """
    for path in paths:
        require_writable(path)
        if not overwrite and Path(path).exists():
            raise CacheError(f"{path} is there already, and --no-overwrite keeps it; --overwrite replaces it")
    targets = {target_of(path): size for path, size in paths.items()}
    with ExitStack() as held:
        for path in sorted(targets):
            held.enter_context(_locked(path))
            _remove_leftovers(path)
        for folder in sorted({path.parent for path in targets}):
            require_space(
                folder, {str(path): size for path, size in targets.items() if path.parent == folder}
            )
        yield


def require_space(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raise CacheError where a folder's disk cannot hold files of these sizes beside those that they replace."""
    needed, free = sum(sizes.values()), shutil.disk_usage(folder).free
    if needed > free:
        more = f" and {len(sizes) - 1} more" if len(sizes) > 1 else ""
        raise CacheError(
            f"{next(iter(sizes))}{more} cannot be written: it needs {needed} bytes, "
            f"{free} are free in {folder}"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = path.with_name(f".{path.name}.lock")
    while True:
        file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            by = os.read(file, 20).decode(errors="replace").strip()
            os.close(file)
            raise CacheError(
                f"{path} is being made by another run{f' (process {by})' if by else ''}; "
                "wait for it, or choose another --output_path"
            ) from None
        except OSError:  # a file system without locks: as safe as before
            os.close(file)
            yield
            return
        with suppress(FileNotFoundError):
            if os.stat(lock).st_ino == os.fstat(file).st_ino:
                break  # else the run that held it has just removed it: ours locks nothing
        os.close(file)
    try:
        os.ftruncate(file, 0)
        os.write(file, str(os.getpid()).encode())
        yield
    finally:
        with suppress(OSError):
            lock.unlink()
        os.close(file)


def _remove_leftovers(path: Path) -> None:
    """Remove unfinished files of runs that were killed; the lock says that nobody else is at it, the process id once more.

    One of this process's own id is of another's: in a container every run may have the same.
    """
    for part in path.parent.glob(f".{glob_escaped(path.name)}.*.part"):
        process = re.fullmatch(r".*\.(\d+)\.part", part.name)
        if process and (int(process[1]) == os.getpid() or not Path(f"/proc/{process[1]}").exists()):
            with suppress(OSError):
                part.unlink()


def glob_escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
