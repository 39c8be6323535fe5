"""How a script begins and ends: exit codes, one line for whatever went wrong, and the last resort."""

import json
import signal
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import current_thread, main_thread
from typing import NoReturn

from experiments.caches.errors import CacheError, RunError, StoppedError
from experiments.running.streams import unfailing_streams
from wan.errors import ConfigError, one_line, reason_of

EXPLAINED = (1, 2, 130)  # exit codes of processes that have said why
LOST = 70  # of one that another process left alone

parsed: list[Namespace] = []  # the flags of the script that runs, once they are read


def main(run: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> None:
    """Run a script and end the process: 0, 1 what went wrong while running, 2 bad input,
    130 asked to stop.
    """
    warnings.showwarning = lambda message, *_: print(f"warning: {one_line(message)}", file=sys.stderr)
    parsed.clear()
    with unfailing_streams(), _ended_by_signals():
        try:
            run(argv)
        except (KeyboardInterrupt, Exception) as error:
            message, code = explained(error)
            if code == LOST or not first_to_say(message):
                raise SystemExit(code) from None
            if parsed and getattr(parsed[-1], "debug", False):
                traceback.print_exc()
            fail(message, code)


def first_to_say(message: str) -> bool:
    """Whether no other process of the same rollout has said what went wrong."""
    group = sys.modules.get("wan.process_group")  # where several processes make one rollout
    return group is None or group.is_first_to_fail(message)


def explained(error: BaseException) -> tuple[str, int]:
    """What is printed of an error, and the exit code."""
    group = sys.modules.get("wan.process_group")
    if group is not None and (trouble := group.trouble_with_others(error)):
        if trouble == "lost":  # it says itself what went wrong, or its launcher does
            return "another process of this rollout has ended", LOST
        return f"another process of this rollout did not answer in {group.TIMEOUT.seconds} s", 1
    if isinstance(error, (ConfigError, CacheError)):
        return str(error), 2
    if isinstance(error, KeyboardInterrupt):
        return "stopped", 130
    if isinstance(error, StoppedError):
        return str(error), 130
    if isinstance(error, RunError):
        return str(error), 1
    if type(error).__name__ == "OutOfMemoryError":  # torch's, without importing torch for it
        return f"out of GPU memory: {reason_of(error)}; try --offload, fewer frames, or --device cpu", 1
    if isinstance(error, MemoryError):
        return "out of memory; try fewer frames or layers", 1
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.filename or 'a file'}: {error.strerror or error}", 2
    if isinstance(error, UnicodeDecodeError):
        return f"not a text file: {error}", 2
    return f"unexpected {type(error).__name__}: {reason_of(error)}: please report it, {_kept(error)}", 1


def _kept(error: BaseException) -> str:
    """Where the traceback of an unexpected error is: in the log, or to be had."""
    log = getattr(parsed[-1], "log_file", None) if parsed else None
    with suppress(OSError):
        if log:
            event = {"event": "unexpected", "traceback": "".join(traceback.format_exception(error))}
            with open(log, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(json.dumps(event) + "\n")
            return f"with the traceback at the end of {log}"
    return "with what the same command prints under --debug"


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that is closed, end a script as Ctrl-C does: what it began is cleaned
    up.
    """
    if current_thread() is not main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [
        number for number in numbers if signal.getsignal(number) == signal.SIG_DFL
    ]  # nohup ignores one
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def fail(message: object, code: int) -> NoReturn:
    """Print one line and end the process."""
    print(f"error: {one_line(message)}", file=sys.stderr)
    raise SystemExit(code)
