"""Outputs are claimed before a run: one run per path, nothing replaced that should stay, room on the disk.

A claim is a lock file beside the output, .NAME.lock, held by filelock: by flock where the disk has it, which
ends with the process, however that ends; else by a lease with a heartbeat, which expires, because another
host's process ids mean nothing.
"""

import os
import shutil
import stat
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any

from experiments.caches.atomic_files import require_writable, target_of
from experiments.caches.errors import CacheError
from experiments.running.run_files import lock_of

LOCK_BYTES = 200  # a process id, or what filelock writes into a lease
LEASE_SECONDS = 30.0  # without a heartbeat, after which a lease is another run's to take


@contextmanager
def claimed(paths: Mapping[str, int], overwrite: bool = True) -> Iterator[None]:
    """Hold outputs, given with the bytes each will take, while a run makes them.

    Raises CacheError, before hours of work, where one cannot be written, is there and may not be replaced, is
    being made by another run, or does not fit on its disk.
    """
    for path in paths:
        require_writable(path)
        if not overwrite and Path(path).exists():
            raise CacheError(f"{path} is there already, and --no-overwrite keeps it; --overwrite replaces it")
    targets = {target_of(path): size for path, size in paths.items()}
    with ExitStack() as held:
        for target in sorted(targets):
            held.enter_context(_locked(target))
            remove_leftovers(target)
        for folder in sorted({path.parent for path in targets}):
            require_space(
                folder, {str(path): size for path, size in targets.items() if path.parent == folder}
            )
        yield


def require_space(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raise CacheError where a folder's disk cannot hold files of these sizes beside those that they
    replace.
    """
    needed, free = sum(sizes.values()), shutil.disk_usage(folder).free
    if needed > free:
        more = f" and {len(sizes) - 1} more" if len(sizes) > 1 else ""
        raise CacheError(
            f"{next(iter(sizes))}{more} cannot be written: it needs {needed} bytes, "
            f"{free} are free in {folder}"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock beside a path. Raises CacheError where another run holds it, or where something else lies
    there.
    """
    from filelock import FileLock, Timeout  # here: a --help needs no locks

    file = lock_of(path)
    if file.is_symlink() or (file.exists() and not (file.is_file() and file.stat().st_size <= LOCK_BYTES)):
        raise CacheError(f"{file} is no lock of ours, and would be one; move it away, then run again")
    was_there = os.path.lexists(file)
    lock: Any = FileLock(file, timeout=0, fallback_to_soft=False, on_acquired=_write_process)
    try:
        lock.acquire()
    except Timeout:
        raise _held_by_another(path, file) from None
    except NotImplementedError:
        lock = None
    except OSError as error:
        if os.path.lexists(file) and file.is_symlink():
            raise CacheError(f"{file} is a link; remove it, then run again") from None
        lock = None if _has_no_locks(error) else lock
        if lock:
            raise CacheError(f"{file} cannot be locked: {error.strerror or error}") from error
    if lock is None:
        if not was_there:
            file.unlink(missing_ok=True)  # what was made in vain
        lock = _lease(path, file)
    try:
        yield
    finally:
        with suppress(OSError):
            if stat.S_ISREG(file.lstat().st_mode):
                file.unlink()  # while it is held: who waits for it looks again
        with warnings.catch_warnings(action="ignore"), suppress(OSError):
            lock.release()


def _lease(path: Path, file: Path):
    """A lock with a heartbeat, for disks without flock; it waits until that of a dead run has expired."""
    from filelock import SoftFileLease, Timeout

    lease = SoftFileLease(file, lease_duration=LEASE_SECONDS, timeout=0, thread_local=False)
    try:
        lease.acquire(timeout=1.5 * LEASE_SECONDS if file.exists() else 0)
    except Timeout:
        raise _held_by_another(path, file) from None
    except OSError as error:
        raise CacheError(f"{file} cannot be made: {error.strerror or error}") from error
    return lease


def _has_no_locks(error: OSError) -> bool:
    import errno

    names = ("ENOSYS", "ENOTSUP", "EOPNOTSUPP", "ENOLCK")
    return error.errno in {getattr(errno, name, None) for name in names}


def _write_process(descriptor: int) -> None:
    """Say who holds a lock, in a file that was made for it: what another name links to is left as it is."""
    state = os.fstat(descriptor)
    if state.st_nlink == 1 and state.st_size <= LOCK_BYTES:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)


def _held_by_another(path: Path, file: Path) -> CacheError:
    with suppress(OSError, ValueError):
        number = int(file.read_bytes()[:LOCK_BYTES])
        return CacheError(
            f"{path} is being made by another run (process {number}); "
            "wait for it, or choose another --output_path"
        )
    return CacheError(f"{path} is being made by another run; wait for it, or choose another --output_path")


def remove_leftovers(path: Path) -> None:
    """Remove unfinished files of this name that killed runs left; a lock says that nobody else is at it."""
    for part in path.parent.glob(f".{escape(path.name)}.*.part"):
        with suppress(OSError):
            if stat.S_ISREG(part.lstat().st_mode):
                part.unlink()
