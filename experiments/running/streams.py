"""What a run prints never decides what it writes: a terminal that is gone, a full disk or a small alphabet
change nothing.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

GONE = (OSError, ValueError)  # a closed pipe, a full disk; a file that is closed


class Unfailing:
    """A text stream that drops what cannot be written, and writes characters that it does not have as
    escapes.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            with suppress(*GONE):
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except GONE:
            pass
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with suppress(*GONE):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def unfailing_streams() -> Iterator[None]:
    """Make stdout and stderr unfailing. The null device takes the place and number of a closed one."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except (
            OSError
        ):  # else the first file that is opened gets the number, and what is printed goes into it
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr
    null = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stdout, sys.stderr = (Unfailing(stream or null) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for number, stream in enumerate(before, 1):
            try:
                if stream:
                    stream.flush()
            except GONE:  # Python would complain of it at its end, and change the exit code
                os.dup2(null.fileno(), number)
        null.close()
