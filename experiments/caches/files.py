"""Write whole files or none, one run per path; compare fingerprints; errors of runs.

with replacing("cache/report.json") as file:      # the old file stays until the block has ended
    file.write(content)
"""

import errno
import json
import os
import platform
import re
import shutil
import tempfile
import threading
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from wan import errors
from wan.files import UnreadableError, load_tensors

ROOT = Path(__file__).parents[2]  # of the repository
PARTIAL = ".partial.pt"  # of a stopped run's cache that must not replace a whole one
REMEDY = "choose another --output_dir"
ONLY = "00000000"  # leads the fingerprint of a run that no other is known to be equal to
NO_RESULT = "00000000"  # ends it while the run has not come to its end


Record = dict[str, Any]  # values by name: a cache, a row of a table, a report


class CacheError(errors.UserError, ValueError):
    """A cache or an output that cannot be read or written; one line that says what to do."""


class RunError(errors.UserError, RuntimeError):
    """A run that started but cannot give a result, such as NaN in the latents."""


class StoppedError(errors.UserError):
    """A run that was asked to stop, and has saved what it could; the message says how to go on."""


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file that becomes path, through links, when the block ends, and is removed if it fails."""
    path = target_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(path)
    try:
        with suppress(FileNotFoundError):
            part.unlink()  # of a killed process that had this number
        with open(part, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:  # after Ctrl-C too
        with suppress(OSError):
            part.unlink()  # is gone where it has become path


def save_report(report: Mapping[str, Any], path: str | Path) -> None:
    """Write a report as JSON, a list of numbers in a line."""
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    lists = r"\[\n\s+([^][{}]+)\n\s+\]"
    text = re.sub(lists, lambda match: "[" + re.sub(r"\n\s+", " ", match[1]) + "]", text)
    with replacing(path) as file:
        file.write(text.encode())


def located(path: str) -> str:
    """Return an input's path: as it is given, or below the repository's root where it is only there."""
    below_root = os.path.join(ROOT, path)  # of an absolute path, that path
    if not os.path.exists(path) and os.path.exists(below_root):
        return below_root
    return path


def remembered_at(path: str) -> str:
    """Return where runs keep what later ones read: at the root unless the working folder has its folder."""
    folder, name = os.path.split(path)
    return os.path.join(located(folder), name)


def target_of(path: str | Path) -> Path:
    """Follow links to the file that is written. OSError for a folder, device or pipe."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "Is a folder, device or pipe", str(path))
    return path


def part_of(path: Path) -> Path:
    """Return where a file is while it is being written by this thread of this process and host."""
    # Two hosts may write to one disk, and their processes may have one number
    writer = f"{platform.node()} {threading.get_ident()}".encode(errors="surrogateescape")
    return path.with_name(f".{path.name}.{os.getpid()}-{zlib.crc32(writer):08x}.part")


def require_writable(path: str | Path) -> None:
    """Raise CacheError, before hours of work, where path cannot become a file."""
    with errors.library_writes(path, CacheError):
        target = target_of(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=target.parent).close()
        with suppress(FileNotFoundError):
            part_of(target).stat()  # its name may be too long where the output's own is not


def require_held(
    name: str, wanted: Any, stored: Collection[Any], where: object = "this cache", error: Any = CacheError
) -> None:
    """Raise error where something that is chosen from what a file holds is not there."""
    if wanted not in stored:
        raise error(f"{name} {errors.short_repr(wanted)} is not in {where}; it has {in_words(stored)}")


def in_words(allowed: Collection[Any]) -> str:
    """Return 0..11 for numbers from 0, else the values, of many the first."""
    values = list(allowed)
    if len(values) > 2 and values == [*range(len(values))]:
        return f"0..{values[-1]}"
    if not values:
        return "none"
    words = [str(value) for value in values[:32]]
    if len(values) > 32:
        words.append("...")
    return ", ".join(words)


def require_suffix(path: str | Path, *suffixes: str) -> None:
    """Raise CacheError for a path that does not end as what is written there."""
    if Path(path).suffix not in suffixes:
        raise CacheError(f"{path} does not end in {' or '.join(suffixes)}, which is written there")


# --- Outputs of a run: never one of its inputs, one run per path, and room on the disk
def require_distinct(outputs: Iterable[str | Path], inputs: Iterable[str | Path | None]) -> None:
    """Raise CacheError where an output is an input or a file of an input folder, or is named twice."""
    # Resolved: a link to an input is that input
    read = [os.path.realpath(path) for path in inputs if path]
    folders = [path for path in read if os.path.isdir(path)]
    used = dict.fromkeys(read, "which this run reads")
    for path in map(os.path.realpath, outputs):
        if os.path.isfile(path) and any(Path(path).is_relative_to(folder) for folder in folders):
            used.setdefault(path, "which this run reads")
        if path in used:
            raise CacheError(f"{path} is the same file as one {used[path]}; give it another name")
        used[path] = "which this run writes too"


@contextmanager
def claimed(paths: Mapping[str, int]) -> Iterator[None]:
    """Hold the locks of outputs, given with the bytes each will take, while a run makes them.

    Raises CacheError, before hours of work, where one cannot be written, is being made by another run, or
    does not fit on its disk. Whether what is there may be replaced is asked of outputs.py.
    """
    for path in paths:
        require_writable(path)
    targets = {target_of(path): size for path, size in paths.items()}
    with ExitStack() as locks:
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
            locks.callback(lock.release)
            locks.callback(Path(lock.lock_file).unlink, missing_ok=True)
            remove_leftovers(target)
        for folder in {path.parent for path in targets}:
            require_space(folder, {str(path): n for path, n in targets.items() if path.parent == folder})
        yield


def require_space(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raise CacheError where a folder's disk has no room for files of these sizes."""
    needed, free = sum(sizes.values()), shutil.disk_usage(folder).free
    if needed > free:
        files = next(iter(sizes))
        if len(sizes) > 1:
            files += f" and {len(sizes) - 1} more"
        raise CacheError(f"{files} cannot be written: it needs {needed} bytes, {free} are free in {folder}")


def remove_leftovers(path: Path) -> None:
    """Remove unfinished files of this name that killed runs left; the caller holds the path's lock."""
    for part in path.parent.glob(f".{escape(path.name)}.*.part"):
        if part.is_file() and not part.is_symlink():
            with suppress(OSError):
                part.unlink()


# --- What an output is of: its fingerprint (experiments/provenance.py), not its name or size
def require_same(path: str | Path, found: object, wanted: str, remedy: str) -> None:
    """Raise CacheError where a file's fingerprint differs from the run's."""
    if found != wanted or wanted.startswith(ONLY):
        said = f"fingerprint {errors.short_repr(found)}" if found else "no fingerprint, or not the whole file"
        if str(found).startswith(ONLY) or wanted.startswith(ONLY):
            remedy = f"give your function a name, named(...), and {remedy}"
            said = f"{said} (a function without a name, so that no run equals another)"
        raise CacheError(f"{path} belongs to another run or code: it has {said}, not {wanted}; {remedy}")


def settings_and_text(fingerprint: str) -> str:
    """Return the digits of a fingerprint that are known before its run: all, where no function is unnamed."""
    if fingerprint.startswith(ONLY):
        return fingerprint[: -len(NO_RESULT)]
    return fingerprint


def peek(path: str | Path) -> dict[str, Any]:
    """Return the fields of a cache that is as it was written, unchecked; none of any other file."""
    try:
        raw = load_tensors(path)
    except UnreadableError:  # not there, torn, older, or of another program
        return {}
    if not isinstance(raw, dict):
        return {}
    return raw


def finished(path: str | Path, fingerprint: str, remedy: str = REMEDY) -> dict[str, Any] | None:
    """Return the content of a cache or a JSON that is whole and of this run; None where one is to be made.

    That is where it is missing, torn or partial. Raises CacheError for a file of another run.
    """
    if Path(path).suffix == ".json":
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
    else:
        content = peek(path)  # compares the checksums of its archive
    if not content:
        return None
    require_same(path, content.get("fingerprint"), fingerprint, remedy)
    return None if content.get("partial") else content
