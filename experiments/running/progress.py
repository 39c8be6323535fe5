"""What a run says while it goes on: a line per block, a JSON line per event; and whether it was asked to stop."""

import json
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch

from experiments.caches.errors import CacheError
from experiments.extraction.observer import RunObserver


class Progress(RunObserver):
    """Lines on stderr, unless quiet, and JSON lines in log_file, where there is one.

    Raises CacheError where log_file cannot be written.
    """

    def __init__(self, quiet: bool = False, log_file: str | Path | None = None):
        self.quiet, self.start = quiet, time.monotonic()
        self.rollout_start, self._log = self.start, None
        if log_file and Path(log_file).suffix == ".pt":
            raise CacheError(
                f"--log_file {log_file} has the name of a cache; give it another, such as log.jsonl"
            )
        try:
            if log_file:
                Path(log_file).parent.mkdir(parents=True, exist_ok=True)
                self._log = Path(log_file).open(
                    "a",
                    buffering=1,
                    encoding="utf-8",
                    errors="backslashreplace",
                )
        except OSError as error:
            raise CacheError(f"{log_file} cannot be written: {error.strerror or error}") from error

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
            with suppress(OSError):  # nor must a terminal that is gone
                print(line, file=sys.stderr, flush=True)

    def block(self, block: int, frames: range, num_blocks: int) -> None:
        self._advance("block", block, num_blocks, f"frames {frames.start}-{frames[-1]}")

    def step(self, step: int, timestep: float, num_steps: int) -> None:
        self._advance("step", step, num_steps, f"t = {timestep:g}", every=-(-num_steps // 10))

    def _advance(self, unit: str, index: int, count: int, what: str, every: int = 1) -> None:
        passed = time.monotonic() - self.rollout_start
        left = passed / (index + 1) * (count - index - 1)  # later blocks see more keys: a little too short
        if (index + 1) % every == 0 or index + 1 == count:
            self.print(f"{unit} {index + 1}/{count} ({what}): {passed:.1f} s, {left:.1f} s left, {memory()}")
        self.log(unit, **{unit: index, f"num_{unit}s": count}, seconds_left=round(left, 3), **memory_bytes())


@contextmanager
def stopping_when_asked(watch: RunObserver, unit: str = "block") -> Iterator[None]:
    """The first Ctrl-C, or SIGTERM, lets the current block (or step) finish, the second one stops at once, as does one before
    anything is generated. Outside the main thread: as ever."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def asked(number: int, frame: FrameType | None) -> None:
        if watch.stopping or not watch.generating:
            raise KeyboardInterrupt
        watch.stopping = True
        with suppress(OSError, RuntimeError):  # a terminal that is gone; a line that is just being printed
            print(f"stopping after this {unit}; Ctrl-C again stops at once", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
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
