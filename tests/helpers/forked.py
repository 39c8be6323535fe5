"""Run a function in a fork of this warmed process: its own memory, its own end, no cold start; stop a run, or
read what a script says where it refuses.
"""

import contextlib
import io
import os
import pickle
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import torch
from conftest import require_forks

import experiments.running.atlases  # noqa: F401  loaded once, not in every fork
from experiments.progress import Progress
from experiments.running import cli


@dataclass(frozen=True)
class Outcome:
    value: Any  # what the function returned; None where it did not come to that
    code: int  # of exit; -N where signal N ended it
    seconds: float
    more_bytes: int  # peak memory beyond what the parent held
    said: str = ""  # on stderr


def forked(function: Callable[[], Any], timeout: float = 240, kill_after: float | None = None) -> Outcome:
    """Call function in a fork, which SIGKILL ends after kill_after seconds, or as hung after timeout."""
    require_forks()
    before, start = psutil.Process().memory_info().rss, time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(function, writing)
    os.close(writing)
    received, deadline = b"", start + (timeout if kill_after is None else kill_after)
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.kill(child, signal.SIGKILL)
            break
        if not (more := os.read(reading, 1 << 16)):
            break
        received += more
    os.close(reading)
    _, status, usage = os.wait4(child, 0)
    value, said = pickle.loads(received) if received and os.WIFEXITED(status) else (None, "")
    cost = time.monotonic() - start, max(0, usage.ru_maxrss * 1024 - before)
    return Outcome(value, os.waitstatus_to_exitcode(status), *cost, said)


def _child(function: Callable[[], Any], pipe: int) -> None:
    """Never returns: pytest must not go on in a fork."""
    code, value, said = 0, None, io.StringIO()
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        sys.stdout, sys.stderr = open(os.devnull, "w"), said  # noqa: SIM115
        torch.cuda.is_available = lambda: False  # the numbers are a CPU's, as on machines without
        torch.set_num_threads(1)  # a fork makes its thread pool anew: here, before threads that race for it
        value = function()
    except BaseException as error:
        code, value = 70, f"{type(error).__name__}: {error}"
    with contextlib.suppress(BaseException):
        os.write(pipe, pickle.dumps((value, said.getvalue())))
    os._exit(code)


def exit_code(run: Callable[[], Any]) -> Callable[[], int]:
    """The function's exit code as its value."""

    def call() -> int:
        try:
            run()
        except SystemExit as ended:
            return ended.code or 0
        return 0

    return call


def stopping_after(monkeypatch, number: int, what: str = "block", by=signal.SIGINT) -> None:
    """A Ctrl-C, or another signal, when a block or a step is reached."""
    original = Progress.advance

    def on_progress(self, unit, at, *more):
        original(self, unit, at, *more)
        if (unit, at) == (what, number):
            os.kill(os.getpid(), by)
            time.sleep(0.01)

    monkeypatch.setattr(Progress, "advance", on_progress)


def refused(script, flags, capfd, message: str, code: int = 2) -> None:
    """Run a script that ends with this exit code; its one line on stderr must match the message."""
    with pytest.raises(SystemExit) as ended:
        cli.main(script.run, [*map(str, flags)])
    said = [line for line in capfd.readouterr().err.splitlines() if "blocks:" not in line]
    assert ended.value.code == code and len(said) == 1 and re.search(f"^error: .*{message}", said[0]), said
