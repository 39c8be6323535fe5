"""Processes that measure on the CPU beside the one that makes videos: how many, and when they end."""

import os
import threading
import time
from collections.abc import Mapping

from experiments.running.ranks import Rank
from wan.errors import ConfigError

MOST = 1024
LOOK_SECONDS = 0.5
OF_HOST = "LOCAL_WORLD_SIZE"  # torchrun's number of ranks on this host


def cores() -> int:
    """Cores that this process may run on; 1 on macOS, where forks of a process with threads are not safe."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def end_with(parent: int) -> None:
    """In a worker: end when the process that asked for it is gone. A pool's workers outlive one that was
    killed: each holds the pipe that the others read from."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def workers_of(asked: int | None, rank: Rank, environment: Mapping[str, str] = os.environ) -> int:
    """So many as were asked for, or this rank's share of its host's cores, at least one.

    Raises ConfigError for a number that cannot be.
    """
    if asked is not None:
        if not 0 <= asked <= MOST:
            raise ConfigError(f"--workers must be in 0..{MOST}, not {asked}")
        return asked
    said = environment.get(OF_HOST, "")
    ranks = int(said) if rank.count > 1 and said.isdecimal() and int(said) else rank.count
    return max(1, cores() // ranks)
