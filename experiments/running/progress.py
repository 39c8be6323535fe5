"""What a run says while it goes on: a line per block, a JSON line per event; and whether it was asked to
stop.
"""

import errno
import json
import os
import resource
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

import torch

from experiments.caches.files import CacheError
from experiments.extraction.observer import RunObserver
from wan import process_group


class Progress(RunObserver):
    """Lines on stderr, unless quiet, and JSON lines in log_file, where there is one.

    Raises CacheError where log_file cannot be written.
    """

    def __init__(self, quiet: bool = False, log_file: str | Path | None = None):
        self.quiet, self.start = quiet, time.monotonic()
        self.rollout_start, self._log = self.start, None
        self.prints_blocks = True  # several ranks say together how far they are
        if log_file:
            self._log = open_log(log_file)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.log("end", ok=error is None, **({} if error is None else {"error": f"{kind.__name__}: {error}"}))
        if self._log:
            self._log.close()

    def log(self, event: str, **values) -> None:
        if event == "rollout":
            self.rollout_start, self.generating = time.monotonic(), True
        if self._log:
            seconds = round(time.monotonic() - self.start, 3)
            line = json.dumps({"event": event, "seconds": seconds} | values, ensure_ascii=False) + "\n"
            try:
                self._log.write(line)
            except OSError as error:  # a full disk must not end a rollout
                self.print(f"the log ends here: {error.strerror or error}")
                self._log = None

    def print(self, line: str) -> None:
        if not self.quiet:
            with suppress(OSError, ValueError):  # nor must a terminal that is gone
                print(line, file=sys.stderr, flush=True)

    def block(self, block: int, frames: range, num_blocks: int) -> None:
        self._advance("block", block, num_blocks, f"frames {frames.start}-{frames[-1]}")

    def step(self, step: int, timestep: float, num_steps: int) -> None:
        self._advance("step", step, num_steps, f"t = {timestep:g}", every=-(-num_steps // 10))

    def _advance(self, unit: str, index: int, count: int, what: str, every: int = 1) -> None:
        passed = time.monotonic() - self.rollout_start
        left = passed / (index + 1) * (count - index - 1)  # later blocks see more keys: a little too short
        if self.prints_blocks and ((index + 1) % every == 0 or index + 1 == count):
            self.print(f"{unit} {index + 1}/{count} ({what}): {passed:.1f} s, {left:.1f} s left, {memory()}")
        self.log(unit, **{unit: index, f"num_{unit}s": count}, seconds_left=round(left, 3), **memory_bytes())


def open_log(path: str | Path) -> TextIO:
    """A regular file to append lines to. Raises CacheError for a pipe, which could wait for ever, and for a
    device.
    """
    if Path(path).suffix == ".pt":
        raise CacheError(f"--log_file {path} has the name of a cache; give it another, such as log.jsonl")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0), 0o666)
    except OSError as error:
        reason = "Is a pipe" if error.errno == errno.ENXIO else error.strerror
        raise CacheError(f"{path} cannot be written: {reason or error}") from error
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise CacheError(f"{path} cannot be written: a log is a file, and this is a device or pipe")
    return open(number, "a", buffering=1, encoding="utf-8", errors="backslashreplace")


@contextmanager
def stopping_when_asked(observer: RunObserver, unit: str = "block") -> Iterator[None]:
    """Ctrl-C, SIGTERM and a terminal that closes (SIGHUP) let the current block, or step, finish.

    A second Ctrl-C or SIGTERM stops at once, as does any before something is generated. Outside the main
    thread nothing is changed: signals do not arrive there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    speaks = os.environ.get("RANK", "0") in ("", "0")  # of several ranks the first one
    hang_up = getattr(signal, "SIGHUP", None)
    asked_before: list[int] = []

    def asked(number: int, frame: FrameType | None) -> None:
        if not observer.generating or (number != hang_up and any(n != hang_up for n in asked_before)):
            raise KeyboardInterrupt
        asked_before.append(number)
        observer.stopping = True
        if not speaks:
            return
        with suppress(
            OSError, RuntimeError, ValueError
        ):  # a terminal that is gone; a line just being printed
            print(f"stopping after this {unit}; Ctrl-C again stops at once", file=sys.stderr, flush=True)

    numbers = [signal.SIGINT]
    if process_group.joined() is None:  # else SIGTERM ends a process, also while it waits for another
        numbers.append(signal.SIGTERM)
    if hang_up and signal.getsignal(hang_up) != signal.SIG_IGN:  # nohup: the run outlives its terminal
        numbers.append(hang_up)
    before = {number: signal.signal(number, asked) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def memory_bytes() -> dict[str, int]:
    """The most memory used so far: of the process, and of the GPU where one is in use."""
    host = {"host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    return host | ({"gpu_bytes": torch.cuda.max_memory_allocated()} if torch.cuda.is_initialized() else {})


def memory() -> str:
    used = memory_bytes()
    return (
        f"{used['gpu_bytes'] / 2**30:.1f} GiB GPU"
        if "gpu_bytes" in used
        else f"{used['host_bytes'] / 2**30:.1f} GiB memory"
    )
