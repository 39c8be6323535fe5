"""One of several processes that torchrun started: its rank, its GPU and its share of the cores."""

import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from wan.config import RunConfig
from wan.errors import ConfigError

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
    """Return the rank that torchrun gave this process; the only one without."""
    if not environment.get("RANK"):
        return Rank()
    return Rank(*(int(environment.get(name) or 0) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))


def on_own_device(config: RunConfig, rank: Rank) -> RunConfig:
    """Return the config of one of several ranks: each has a GPU of its own, or all share the CPU.

    Raises ConfigError where there are fewer GPUs than ranks, or where the config names one GPU for all.
    """
    if rank.count == 1 or config.device == "cpu":
        return config
    # Entry scripts import this file for their flags, and a --help needs no torch
    import torch

    gpus = torch.cuda.device_count()
    if config.device == "auto" and not gpus:
        return replace(config, device="cpu")
    if config.device not in ("auto", "cuda"):
        raise ConfigError(f"device {config.device} was asked for {rank.count} ranks; leave it out")
    if rank.local >= gpus:
        raise ConfigError(
            f"rank {rank.number} is number {rank.local} of its host, and {gpus} GPU(s) are there: "
            "start a rank for each GPU, or use --device cpu"
        )
    return replace(config, device=f"cuda:{rank.local}")


def cores() -> int:
    """Return how many cores this process may use; 1 on macOS, where forking threads is unsafe."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def workers_of(asked: int | None) -> int:
    """Return the number of processes that a script may start: as asked, else its share of the cores."""
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
    """End a process of several without Python's shutdown, in which gloo's threads may abort it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
