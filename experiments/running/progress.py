"""Progress of a run: a bar on stderr, a JSON line per event in a log, and the wish to stop."""

import argparse
import errno
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self, TextIO

import torch
from tqdm import tqdm

from experiments.caches.files import CacheError
from experiments.extraction.provenance import named_files
from experiments.extraction.rollout import RunObserver
from experiments.running.locks import require_distinct
from wan.config import RunConfig
from wan.errors import UserError


class Progress(RunObserver):
    """Show a bar of blocks or steps on stderr, unless quiet, and append JSON lines to log_file.

    Raises CacheError where log_file cannot be written.
    """

    def __init__(self, quiet: bool = False, log_file: str | Path | None = None):
        super().__init__(quiet)
        self._log = open_log(log_file) if log_file else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        about = {} if error is None else {"error": f"{kind.__name__}: {error}"}
        if error is not None and not isinstance(error, (UserError, KeyboardInterrupt)):
            about["traceback"] = "".join(traceback.format_exception(error))
        self.log("end", ok=error is None, **about)
        self.close_bar()
        if self._log:
            self._log.close()

    def log(self, event: str, **values: Any) -> None:
        super().log(event)
        if self._log:
            seconds = round(time.monotonic() - self.start, 3)
            line = json.dumps({"event": event, "seconds": seconds} | values, ensure_ascii=False) + "\n"
            try:
                self._log.write(line)
            except OSError as error:  # a full disk must not end a rollout
                self.print(f"the log ends here: {error.strerror or error}")
                self._log = None


def open_log(path: str | Path) -> TextIO:
    """Open a regular file to append lines to. Raises CacheError for a pipe or device."""
    try:
        # A pipe would block the rollout until somebody reads
        if Path(path).suffix == ".pt" or (Path(path).exists() and not Path(path).is_file()):
            raise OSError(errno.EINVAL, "a log is a file such as log.jsonl, no cache, folder, pipe or device")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return open(path, "a", buffering=1, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise CacheError(f"{path} cannot be written: {error.strerror}") from error


@contextmanager
def stopping_when_asked(observer: RunObserver, unit: str = "block") -> Iterator[None]:
    """Let the current block, or step, finish after Ctrl-C, SIGTERM or SIGHUP of a closed terminal.

    A second Ctrl-C or SIGTERM stops at once, as does any before something is generated. Outside the main
    thread nothing is changed: signals do not arrive there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A closed terminal may send SIGHUP and SIGTERM both: they are one wish to stop, not two
    asked_before: set[int] = set()

    def asked(number: int, frame: FrameType | None) -> None:
        if not observer.generating or (number != signal.SIGHUP and asked_before - {signal.SIGHUP}):
            raise KeyboardInterrupt
        asked_before.add(number)
        observer.stopping = True
        if os.environ.get("RANK", "0") in ("", "0"):  # the first of several ranks
            with suppress(OSError, RuntimeError, ValueError):  # no terminal; a line that is being printed
                tqdm.write(f"stopping after this {unit}; Ctrl-C again stops at once", file=sys.stderr)

    numbers = [signal.SIGINT]
    if not torch.distributed.is_initialized():  # else SIGTERM ends a process that waits for another at once
        numbers.append(signal.SIGTERM)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup: the run outlives its terminal
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, asked) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_outputs(args: argparse.Namespace, config: RunConfig, outputs: Iterable[str | Path]) -> None:
    """Raise CacheError where a run would write over a file that it reads, or two files to one path."""
    # A stopped run may write beside its output, and a whole cache there must not be an input either
    written = [str(path) for path in outputs]
    written += [partial_name(path) for path in written if path.endswith(".pt")]
    read = [config.ckpt_dir, config.checkpoint_path, config.prompt_embeds, *named_files(config)]
    flags = [getattr(args, name, None) for name in ("save_base", "log_file")]
    require_distinct([*written, *(path for path in flags if path)], [*args.inputs, *read])


@contextmanager
def observed(args: argparse.Namespace, unit: str | None = "block") -> Iterator[Progress]:
    """Yield the progress of a run, which stops after a unit when asked to (None: at once)."""
    with (
        Progress(args.quiet, args.log_file) as watch,
        stopping_when_asked(watch, unit) if unit else nullcontext(),
        deterministic(args.deterministic),
    ):
        yield watch


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Refuse operations whose results differ from run to run, under --deterministic."""
    if not wanted:  # torch imports its compiler to set either, for seconds
        yield
        return
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


def partial_name(path: str) -> str:
    """Return where a partial cache goes that must not replace a whole one."""
    return str(Path(path).with_suffix(".partial.pt"))
