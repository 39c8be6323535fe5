"""One of several processes that torchrun started: its rank, its GPU and its share of the cores."""

import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from wan.config import RunConfig
from wan.errors import ConfigError, short_repr

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
MAX_WORKERS = 1024
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
    """Return the rank that the environment gives this process; the only one where it gives none.

    Raises ConfigError for an incomplete or impossible environment.
    """
    if not any(environment.get(name) for name in TORCHRUN[:2]):
        return Rank()
    values = {name: environment[name] for name in TORCHRUN if environment.get(name)}
    for name, text in values.items():
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise ConfigError(f"{name} is {short_repr(text, 40)}, not a number: start ranks by torchrun")
    rank, world, local = TORCHRUN
    for name, other in ((rank, world), (world, rank)):
        if other not in values:
            raise ConfigError(f"{name} is set and {other} is not: start ranks by torchrun, or unset {name}")
    number, count = int(values[rank]), int(values[world])
    if number >= count:
        raise ConfigError(f"{rank} {number} is not one of {world} {count}: start ranks by torchrun")
    if count > 1 and local not in values:
        raise ConfigError(f"{local} is not set beside {rank} and {world}: start ranks by torchrun")
    return Rank(number, count, int(values.get(local, 0)))


def on_own_device(config: RunConfig, rank: Rank) -> RunConfig:
    """Return the config of one of several ranks: each has a GPU of its own, or all share the CPU.

    Raises ConfigError where there are fewer GPUs than ranks, or where the config names one GPU for all.
    """
    if rank.count == 1 or config.device == "cpu":
        return config
    import torch  # a --help needs no torch

    gpus = torch.cuda.device_count()
    if config.device == "auto" and not gpus:
        return replace(config, device="cpu")
    if config.device not in ("auto", "cuda"):
        raise ConfigError(f"device {config.device} was asked for {rank.count} ranks; leave it out")
    if rank.local >= gpus:
        raise ConfigError(
            f"rank {rank.number} is number {rank.local} of its host, which has {gpus} "
            f"GPU{'s' * (gpus != 1)}: start at most {max(gpus, 1)} ranks a host, or use --device cpu"
        )
    return replace(config, device=f"cuda:{rank.local}")


def cores() -> int:
    """Return how many cores this process may use; 1 on macOS, where forking threads is unsafe."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def workers_of(asked: int | None) -> int:
    """Return the number of processes that a script may start: as asked, else its share of the cores.

    Raises ConfigError for a number out of range.
    """
    if asked is not None and not 0 <= asked <= MAX_WORKERS:
        raise ConfigError(f"{asked} processes were asked for; 0 to {MAX_WORKERS} can be")
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
