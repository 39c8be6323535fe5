"""One of several processes that torchrun started: its rank, its GPU and its share of the cores."""

import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

PARENT_SECONDS = 0.5  # between two looks whether the parent process is alive


@dataclass(frozen=True)
class Rank:
    """One of count processes that were started together; local counts those of its host."""

    number: int = 0
    count: int = 1
    local: int = 0

    @property
    def is_first(self) -> bool:
        return self.number == 0


def this_rank(environment: Mapping[str, str] = os.environ) -> Rank:
    """Return the rank that torchrun gave this process, or that of a single process."""
    if not environment.get("RANK"):
        return Rank()
    return Rank(*(int(environment.get(name) or 0) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))


def cores() -> int:
    """Return how many cores this process may use; 1 on macOS, where forking threads is unsafe."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def workers_of(asked: int | None) -> int:
    """Return the number of processes to start: the given one, else this process's share of the cores."""
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # processes of this host that share the cores
    return max(1, cores() // beside) if asked is None else asked


def exit_with_parent(parent: int) -> None:
    """End this worker when its parent process is gone; a pool's workers would outlive a killed parent."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_at_once() -> NoReturn:
    """Exit one of several processes without Python's shutdown, in which gloo's threads may abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
