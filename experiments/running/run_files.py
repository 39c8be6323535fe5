"""Every file that a run reads and writes, by what it is: device and inode, links followed. Any overlap is
refused.

A script's flags say most of them (of_arguments); what follows from a config or a folder is added before
anything starts.
"""

import argparse
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from experiments.caches.errors import CacheError

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
