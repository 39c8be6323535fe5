"""Readers held to the rules: what was read, or refused in one line; nothing else, nothing slow, no code that
ran.
"""

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.forked import forked
from wan.errors import UserError

SECONDS, BYTES = 2.0, 500 << 20  # that a reader may take of a small file
HUNG = 10.0  # seconds
AT_ONCE = 8  # mutants read in one fork

Read = Callable[[Path], Any]


def outcome(read: Read, path: Path) -> tuple[str, Any, float]:
    """read or refused, with its line; or escaped, which must not be; and the seconds."""
    gc.disable()  # a collection would walk all that the tests before it left, and be timed
    start, cpu = time.monotonic(), time.process_time()
    try:
        kind, value = "read", read(path)
    except UserError as error:
        kind, value = "refused", str(error)
    except BaseException as error:
        kind, value = "escaped", f"{type(error).__name__}: {error}"[:500]
    seconds = time.monotonic() - start  # of a busy machine: up to HUNG it is the work that counts
    return kind, value, seconds if seconds >= HUNG else time.process_time() - cpu


@dataclass
class Judge:
    """Counts what happened to the mutants of one class of files."""

    what: str  # the row of the table
    seed: int
    found: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def read_all(self, read: Read, mutants: Sequence[tuple[Path, str, bool]]) -> list[Any]:
        """Read mutants, given with how they were made and whether inside valid structure -> what each reader
        returned.
        """
        paths = [path for path, _, _ in mutants]
        before = [_content(path) for path in paths]
        done = forked(lambda: [outcome(read, path) for path in paths], timeout=HUNG * 2)
        alone = done.code or not isinstance(done.value, list) or done.more_bytes > BYTES
        results = []
        for number, (path, how, _) in enumerate(mutants):
            if alone:
                one = forked(lambda path=path: outcome(read, path), timeout=HUNG)
                kind, value, seconds = one.value if one.code == 0 and one.value else ("ended", one.code, HUNG)
                if one.more_bytes > BYTES:
                    kind = "large"
            else:
                kind, value, seconds = done.value[number]
                if seconds >= SECONDS:  # again: imports and a busy machine are slow once
                    again = forked(lambda path=path: outcome(read, path), timeout=HUNG)
                    kind, value, seconds = (
                        again.value if again.code == 0 and again.value else done.value[number]
                    )
            if _content(path) != before[number]:
                kind = "lost"
            self._judge(kind, value, seconds, how)
            results.append(value if kind == "read" else None)
        return results

    def _judge(self, kind: str, value: Any, seconds: float, how: str) -> None:
        if seconds >= SECONDS and kind in ("read", "refused"):
            kind = "slow" if seconds < HUNG else "hung"
        if kind == "refused" and ("\n" in value or not value.isprintable() or len(value) > 1100):
            kind = "unreadable"
        if os.path.exists("ran-code"):
            kind = "ran code"
        self.found[kind] += 1
        if kind not in ("read", "refused"):
            self.wrong.append(f"{how}: {kind} {str(value)[:300]}")

    def close(self) -> str:
        """Fail where a rule was broken -> the line for the screen."""
        assert not self.wrong, f"{len(self.wrong)} of {self.what}\n" + "\n".join(self.wrong[:20])
        count = sum(self.found.values())
        return f"{self.what}: {count} mutants, {dict(self.found)}"


def _content(path: Path) -> list[tuple[str, bytes]]:
    """A file, or the files of a folder, links not followed."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return [(str(file), b"a link" if file.is_symlink() else file.read_bytes()) for file in files]
