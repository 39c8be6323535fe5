"""Show how a run goes on, log it, and stop it between blocks when it is asked to.

with observed(args) as watch:  # a bar on stderr, a JSON line per event in --log_file
    session.generate(observer=watch)

main() of running/cli.py installs stop_when_asked as the handler of SIGINT, SIGTERM and SIGHUP. Nothing else
installs one.
"""

import argparse
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Optional, TextIO

from tqdm import tqdm

from experiments.caches.files import CacheError
from wan import errors

if TYPE_CHECKING:
    from experiments.extraction.video import LiveVideo

MAX_EVENT = 1 << 20  # bytes of the first line of a log

# This module is loaded with the flags, and imports no torch: a --help would wait for it.


class Progress(AbstractContextManager["Progress"]):
    """Is told how a rollout goes on, and may stop it: set `stopping`, and it ends after a block or step.

    Shows a bar of blocks or steps on stderr unless quiet, and appends JSON lines to log_file. unit is what a
    signal lets finish, such as a block; None: nothing. Raises CacheError where log_file cannot be written.
    """

    current: ClassVar[Optional["Progress"]] = None  # of the run that signals stop
    stopping = False
    generating = False  # from the first rollout on: before, nothing is lost by stopping at once
    video: Optional["LiveVideo"] = None  # that is made of the blocks of a rollout

    def __init__(self, quiet: bool = False, log_file: str | Path | None = None, unit: str | None = None):
        self.quiet, self.unit, self.start = quiet, unit, time.monotonic()
        self.rollout_start = self.start
        self._bar: tqdm | None = None
        self._log = open_log(log_file) if log_file else None
        self._signals = set[int]()  # that asked it to stop

    def __enter__(self) -> "Progress":
        self._before, Progress.current = Progress.current, self
        return self

    def __exit__(self, kind, error, trace) -> None:
        Progress.current = self._before
        about = {}
        if error is not None:
            about["error"] = f"{kind.__name__}: {error}"
        if error is not None and not isinstance(error, (errors.UserError, KeyboardInterrupt)):
            about["traceback"] = "".join(traceback.format_exception(error))
        self.log("end", ok=error is None, **about)
        self.close_bar()
        if self._log:
            self._log.close()

    def log(self, event: str, **values: Any) -> None:
        """Note an event: "rollout" begins one, "block" or "step" ends a part of it."""
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
        """Print a line on stderr, above a bar, unless quiet."""
        if not self.quiet:
            print_line(line)

    def advance(self, unit: str, index: int, count: int, what: str) -> None:
        """Note that a block, or a step of the base model's sampler, is finished: what says which."""
        passed = time.monotonic() - self.rollout_start
        left = passed / (index + 1) * (count - index - 1)  # later blocks see more keys: a little too short
        self.log(unit, **{unit: index, f"num_{unit}s": count}, seconds_left=round(left, 3), **memory_bytes())
        if self.quiet:
            return
        with suppress(OSError, ValueError):  # a full disk must not end it either
            if self._bar is None or index < self._bar.n:  # of another rollout
                self.close_bar()
                # It is first shown when its first unit is done, which began `passed` ago; and however fast
                # the blocks are, each is shown (mininterval: tqdm would leave out what is faster than 0.1 s)
                self._bar = tqdm(
                    desc=f"{unit}s", unit=unit, total=count, initial=index, delay=1e-9, mininterval=0
                )
                self._bar.start_t = self._bar.last_print_t = self._bar.start_t - passed
            self._bar.set_postfix_str(f"{what}, {memory()}", refresh=False)
            self._bar.update()
            if index + 1 == count:
                self.close_bar()

    def close_bar(self) -> None:
        """Leave the bar of a rollout that has ended, or was stopped, on the screen."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with suppress(OSError, ValueError):
                bar.close()

    def ask_to_stop(self, number: int) -> bool:
        """Note a signal. Return whether the current block or step may finish; a second one stops at once.

        A closed terminal may send SIGHUP and SIGTERM both: they are one wish to stop, not two.
        """
        is_second = number != signal.SIGHUP and bool(self._signals - {signal.SIGHUP})
        if self.unit is None or not self.generating or is_second:
            return False
        self._signals.add(number)
        self.stopping = True
        if os.environ.get("RANK", "0") in ("", "0"):  # the first of several ranks
            print_line(f"stopping after this {self.unit}; Ctrl-C again stops at once")
        return True


# --- Talking never decides: where nobody reads, or a disk is full, lines are lost, and the run goes on
class Talk:
    """Standard output or error, in whose place it stands while a script runs.

    A write that fails, such as to `| head -1` or to a full disk, sends what follows nowhere.
    """

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
        except UnicodeEncodeError:  # of a terminal that knows few letters
            self.write(text.encode("ascii", "backslashreplace").decode())
        except (OSError, ValueError):
            self.give_up()
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except (OSError, ValueError):
            self.give_up()

    def give_up(self) -> None:
        """Let the descriptor lead nowhere: Python, too, flushes it when it ends."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def talking() -> Iterator[None]:
    """Let no line that is printed end a script, nor a closed output become the descriptor of a file."""
    # 1. A closed one would be given to the next file that is opened, and printed into
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest one
    # 2. Python has None in the place of a closed one
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w") as nowhere:
        sys.stdout, sys.stderr = (Talk(stream or nowhere) for stream in before)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = before


def print_line(line: str) -> None:
    """Print a line on stderr, above a bar; a terminal that is gone must not end a rollout."""
    with suppress(OSError, RuntimeError, ValueError):
        tqdm.write(line, file=sys.stderr)


def print_out(text: object) -> None:
    """Print on stdout; a reader that is gone must not end a rollout."""
    with suppress(OSError, ValueError):
        print(text)


def memory_bytes() -> dict[str, int]:
    """Return the peak memory of the process, and of the GPU where one is in use, in bytes."""
    import torch

    peaks = {"host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_initialized():
        peaks["gpu_bytes"] = torch.cuda.max_memory_allocated()
    return peaks


def memory() -> str:
    """Return the peak memory in words, of the GPU where one is in use."""
    peaks = memory_bytes()
    if "gpu_bytes" in peaks:
        return f"{peaks['gpu_bytes'] / 2**30:.1f} GiB GPU"
    return f"{peaks['host_bytes'] / 2**30:.1f} GiB memory"


def open_log(path: str | Path) -> TextIO:
    """Open a regular file to append lines to. Raises CacheError for a pipe or device."""
    with errors.library_writes(path, CacheError):
        # A pipe would block the rollout until somebody reads
        if Path(path).suffix == ".pt" or (Path(path).exists() and not Path(path).is_file()):
            raise ValueError("a log is a file such as log.jsonl, no cache, folder, pipe or device")
        if Path(path).exists() and not is_log(Path(path)):
            raise ValueError("it is there, and is no log of this program; choose another name")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return open(path, "a", buffering=1, encoding="utf-8", errors="backslashreplace")


def is_log(path: Path) -> bool:
    """Return True for a file that begins with an event of a log, and for an empty one."""
    with open(path, "rb") as file:
        line = file.readline(MAX_EVENT)
    try:
        return not line or "event" in json.loads(line)
    except (TypeError, ValueError):  # of another program
        return False


@contextmanager
def observed(args: argparse.Namespace, unit: str | None = "block") -> Iterator[Progress]:
    """Yield the progress of a run, which stops after a unit when asked to (None: at once)."""
    strict = deterministic() if args.deterministic else nullcontext()
    with Progress(args.quiet, args.log_file, unit) as watch, strict:
        yield watch


@contextmanager
def deterministic() -> Iterator[None]:
    """Refuse operations whose results differ from run to run (torch imports its compiler, for seconds)."""
    import torch

    # cuBLAS reads its variable when CUDA starts; cuDNN's benchmark picks kernels by time, which differs
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


# --- Signals
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_when_asked(number: int, frame: FrameType | None) -> None:
    """Let the current block finish and be saved; stop at once where there is none, or at a second signal.

    The handler of Ctrl-C, SIGTERM and a closed terminal that main() installs.
    """
    watch = Progress.current
    # A process that waits for others of one rollout could never finish its block
    torch = sys.modules.get("torch")
    waits = torch is not None and number == signal.SIGTERM and torch.distributed.is_initialized()
    if watch is not None and not waits and watch.ask_to_stop(number):
        return
    # An exception within an import may pass through C++, which ends in terminate(), or through a callback
    # that ignores it: the process would go on. Nothing is lost, for a run imports before it generates
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"error: stopped\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt
