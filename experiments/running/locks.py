"""Outputs of a run: never one of its inputs, one run per path, and room on the disk."""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path

from experiments.caches.files import CacheError, require_writable, target_of


def require_distinct(outputs: Iterable[str | Path], inputs: Iterable[str | Path | None]) -> None:
    """Raise CacheError where an output is an input or a file of an input folder, or is named twice."""
    # Resolved: a link to an input is that input
    read = [os.path.realpath(path) for path in inputs if path]
    folders = [path for path in read if os.path.isdir(path)]
    used = dict.fromkeys(read, "which this run reads")
    for path in map(os.path.realpath, outputs):
        in_folder = os.path.isfile(path) and any(Path(path).is_relative_to(folder) for folder in folders)
        if use := used.get(path, "which this run reads" if in_folder else None):
            raise CacheError(f"{path} is the same file as one {use}; give it another name")
        used[path] = "which this run writes too"


@contextmanager
def claimed(paths: Mapping[str, int], overwrite: bool = True) -> Iterator[None]:
    """Hold the locks of outputs, given with the bytes each will take, while a run makes them.

    Raises CacheError, before hours of work, where one cannot be written, is there and may not be replaced, is
    being made by another run, or does not fit on its disk.
    """
    from filelock import FileLock, Timeout  # slow to import, and --help needs no locks

    for path in paths:
        require_writable(path)
        if not overwrite and Path(path).exists():
            raise CacheError(f"{path} is there already, and --no-overwrite keeps it; --overwrite replaces it")
    targets = {target_of(path): size for path, size in paths.items()}
    with ExitStack() as held:
        for target in sorted(targets):
            # The system frees the lock of a killed process, so a file that it left locks nobody out
            lock = FileLock(target.with_name(f".{target.name}.lock"), timeout=0)
            try:
                lock.acquire()
            except (Timeout, OSError):
                raise CacheError(
                    f"{target} is being made by another run; wait for it, or choose another --output_path"
                ) from None
            # Left in reverse order: the file goes while it is still locked, and who waits looks again
            held.callback(lock.release)
            held.callback(Path(lock.lock_file).unlink, missing_ok=True)
            remove_leftovers(target)
        for folder in {path.parent for path in targets}:
            require_space(folder, {str(path): n for path, n in targets.items() if path.parent == folder})
        yield


def require_space(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raise CacheError where a folder's disk has no room for files of these sizes."""
    needed, free = sum(sizes.values()), shutil.disk_usage(folder).free
    if needed > free:
        more = f" and {len(sizes) - 1} more" if len(sizes) > 1 else ""
        raise CacheError(
            f"{next(iter(sizes))}{more} cannot be written: it needs {needed} bytes, "
            f"{free} are free in {folder}"
        )


def remove_leftovers(path: Path) -> None:
    """Remove unfinished files of this name that killed runs left; the caller holds the path's lock."""
    for part in path.parent.glob(f".{escape(path.name)}.*.part"):
        if part.is_file() and not part.is_symlink():
            with suppress(OSError):
                part.unlink()
