"""Rows of the engine with many short items and killed workers: nothing lost, nothing twice, and the cost."""

import os
import random
import signal
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from experiments.benchmarks.rollouts import Part, Rows
from experiments.extraction.rollout import RunObserver
from experiments.running.engine import Results, dask_client, work_through
from experiments.running.progress import Progress

SHORTEST, LONGEST = 0.005, 2.0  # seconds of an item
KILL_EVERY = 20.0  # seconds


@dataclass(frozen=True)
class Sleeping:
    """Items that sleep and write how long they did (the engine's Work)."""

    folder: Path
    slow: float = 0.0  # seconds that the folder takes for a write, at the first worker

    def is_done(self, name: str, seconds: float) -> bool:
        return Results(self.folder / "items").read(name) is not None

    def make(self, name: str, seconds: float, watch: RunObserver) -> None:
        start = time.monotonic()
        time.sleep(seconds)
        if self.slow:
            from distributed import get_worker  # an extra, which the other rows do without

            time.sleep(self.slow if get_worker().name == 0 else 0)
        if self.is_done(name, seconds):  # another one has made it: it was given away twice
            (self.folder / f"{name}.twice").touch()
        Results(self.folder / "items").write(name, {"seconds": time.monotonic() - start})


def items_of(number: int, longest: float = LONGEST, shortest: float = SHORTEST) -> dict[str, float]:
    """Return seconds by name: as many items of 10 ms as of 1 s."""
    dice = random.Random(0)
    return {f"item{n:05}": shortest * (longest / shortest) ** dice.random() for n in range(number)}


def rows(args: Namespace, config: Any) -> Iterator[Part]:
    """Yield the cost of an item, killed workers, and a slow shared folder."""
    short, medium, slow = items_of(1000, 0.006), items_of(2000), items_of(60, 0.2)
    simulations: dict[str, Callable[[Path], dict[str, Any]]] = {
        "cost here": lambda folder: made(Sleeping(folder), items_of(500, 0.006)),
        "cost": lambda folder: made(Sleeping(folder), short, workers=2),
        "killed": lambda folder: killing(Sleeping(folder), medium),
        "slow folder": lambda folder: made(Sleeping(folder, 0.5), slow, workers=2),
    }
    about: Rows = {name: {} for name in simulations}

    def timed(name: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            about[name] |= simulations[name](Path(folder)) | {"load": round(os.getloadavg()[0], 1)}
        return about[name]["seconds_in_all"]

    yield {name: partial(timed, name) for name in simulations}, about


def made(work: Sleeping, items: dict[str, float], **flags: Any) -> dict[str, Any]:
    """Make items by the workers that flags ask for -> what happened, and what an item cost beside itself."""
    given = {"workers": None, "scheduler": None, "slurm": None, "quiet": True} | flags
    with dask_client(Namespace(**given), "cpu") as client, Progress(quiet=True) as watch:
        if given["workers"]:
            client.run(items_of, 1)  # imports are no part of an item
        start, cpu = time.monotonic(), time.process_time()
        work_through(work, items, work.folder, watch, client)
        seconds, cpu = time.monotonic() - start, time.process_time() - cpu
        there = len(client.nthreads()) if client else 1
    workers = given["workers"] or there  # one may be killed just now
    found = [Results(work.folder / "items").read(name) for name in items]
    done = [row["seconds"] for row in found if row]
    return {
        "items": len(items),
        "workers": workers,
        "lost": len(items) - len(done),
        "twice": len(list(work.folder.glob("*.twice"))),
        "seconds_in_all": round(seconds, 2),
        "seconds_of_items": round(sum(done), 2),
        "overhead_ms": round(1000 * (seconds * workers - sum(done)) / len(items), 2),
        "cpu_ms_of_the_command": round(1000 * cpu / len(items), 2),  # with the scheduler of its own workers
    }


def killing(work: Sleeping, items: dict[str, float]) -> dict[str, Any]:
    """Make items by two workers while one is killed now and then."""
    killed, dice, over = list[int](), random.Random(1), threading.Event()

    def kill() -> None:
        while not over.wait(KILL_EVERY):
            there = [p for p in psutil.Process().children(True) if "spawn_main" in " ".join(p.cmdline())]
            if any((work.folder / "items").glob("*.json")):
                with suppress(psutil.Error, IndexError):
                    one = dice.choice(there)
                    one.send_signal(signal.SIGKILL)
                    killed.append(one.pid)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    found = made(work, items, workers=2)
    over.set()
    thread.join()
    return found | {"killed": len(killed), "kill_every_s": KILL_EVERY}
