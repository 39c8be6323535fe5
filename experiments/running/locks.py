"""Outputs are claimed before a run: one run per path, nothing replaced that should stay, room on the disk.

A claim is a lock file beside the output, .NAME.lock, held by filelock: by flock where the disk has it, which
ends with the process, however that ends; else by a lease with a heartbeat, which expires, because another
host's process ids mean nothing.
"""

import argparse
import os
import shutil
import stat
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any

from experiments.caches.files import CacheError, require_writable, target_of

# --- Every file that a run reads and writes, by what it is: device and inode, links followed. Any overlap is
# arguments that name a file to write
OUTPUTS = ("output_path", "save_video", "save_base", "log_file", "log", "sheet", "figure")
MAX_FILES = 10_000  # below a folder that is read

Identity = tuple[int, int, tuple[str, ...]]  # device, inode, and the names below it that are not there yet


def identity(path: str | Path, folders: dict[str, Identity | None] | None = None) -> Identity | None:
    """What a path stands for, whatever it is called; None for devices and pipes, which hold nothing to lose.

    folders remembers what folders stand for: a sweep has thousands of files in one.
    """
    if folders is not None and ".." not in Path(path).parts and not os.path.lexists(path):
        folder, name = os.path.split(os.path.abspath(path))
        if folder not in folders:
            folders[folder] = identity(os.path.join(folder, "x"))
        if (known := folders[folder]) is not None:
            return known[0], known[1], (*known[2][:-1], name)
    real, missing = Path(os.path.realpath(path)), []
    while True:
        try:
            state = real.stat()
            break
        except OSError:
            if real == real.parent:
                return None
            missing.append(real.name)
            real = real.parent
    if not missing and not stat.S_ISREG(state.st_mode):
        return None
    return state.st_dev, state.st_ino, tuple(reversed(missing))


class RunFiles:
    """The files of one run. reads() and writes() raise CacheError for a file that would be both, or written
    twice.
    """

    def __init__(self) -> None:
        self._read: dict[Identity, str] = {}
        self._states: dict[Path, tuple[str, tuple[int, ...]]] = {}  # of what is read, when it was named
        self._written: dict[Identity, tuple[str, str]] = {}
        self._folders: dict[str, Identity | None] = {}

    def reads(self, what: str, *paths: str | Path | None) -> None:
        """Files that the run reads, and all files below folders."""
        for path in paths:
            for file in _files_of(path) if path is not None else ():
                if (key := identity(file)) is None:
                    continue
                if key in self._written:
                    self._refuse(self._written[key][0], file, f"{what} {file}, which this run reads")
                self._read.setdefault(key, f"{what} {file}")
                if not key[2]:
                    self._states.setdefault(Path(file), (what, _state_of(file)))

    def writes(self, what: str, *paths: str | Path | None) -> None:
        """Files that the run makes, replaces or appends to, and the lock beside each."""
        for path in paths:
            if not path:
                continue
            target = Path(path)
            if os.path.isdir(path):
                raise CacheError(f"{what} {path} cannot be written: it is a folder; name a file")
            if os.path.islink(path):
                target = Path(os.path.realpath(path))  # its lock lies beside what is written
            for name, file in ((what, path), (f"the lock of {what}", lock_of(target))):
                if (key := identity(file, self._folders)) is None:
                    continue
                if key in self._read:
                    self._refuse(name, file, f"{self._read[key]}, which this run reads")
                if self._written.setdefault(key, (name, str(file))) != (name, str(file)):
                    self._refuse(name, file, f"{' '.join(self._written[key])}, which this run writes too")

    def unchanged(self) -> None:
        """Raise CacheError where a file that the run reads was replaced or changed since: its cache would
        name another.
        """
        for file, (what, before) in self._states.items():
            try:
                same = _state_of(file) == before
            except OSError:
                same = False
            if not same:
                raise CacheError(f"{what} {file} was replaced or changed while the run read it; run again")

    @staticmethod
    def _refuse(what: str, file: str | Path, other: str) -> None:
        raise CacheError(f"{what} {file} is the same file as {other}; give it another name")


def _state_of(file: str | Path) -> tuple[int, ...]:
    state = os.stat(file)
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def lock_of(path: Path) -> Path:
    """The lock beside an output."""
    return path.with_name(f".{path.name}.lock")


def _files_of(path: str | Path) -> Iterator[Path]:
    """A file, or those below a folder."""
    path = Path(path)
    if not os.path.isdir(path):
        yield path
        return
    for number, file in enumerate(path.rglob("*")):
        if number >= MAX_FILES:
            raise CacheError(
                f"{path} holds more than {MAX_FILES} files; name a folder of a model or of caches"
            )
        if file.is_file():
            yield file


def of_arguments(args: argparse.Namespace) -> RunFiles:
    """The files that a command line names: what exists and is no output is read. Raises CacheError for an
    overlap.
    """
    files = RunFiles()
    for name, value in _texts(vars(args)):
        if name not in OUTPUTS:
            for path in (value, value.partition("=")[2]):  # also LABEL=FILE
                if path and os.path.isfile(path):
                    files.reads(f"--{name}" if value == path else name, path)
    for name, value in _texts(vars(args)):
        if name in OUTPUTS:
            if not value and name != "save_video":  # which says by it: beside the cache
                raise CacheError(f"--{name} is empty; name a file, or leave it out")
            files.writes(f"--{name}", value)
    return files


def _texts(values: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, (str, Path)):
                yield name, str(one)


# --- Outputs are claimed before a run: one run per path, nothing replaced that should stay, room on the disk
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
