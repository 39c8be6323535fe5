"""The engine with many short items and killed workers: nothing lost, nothing twice, and what an item costs.

    python experiments/benchmarks/engine.py --output_path docs/benchmarks/engine.json

Items sleep and write a file: in this process, by two workers, and by two of which one is killed now and then.
"""

import os
import random
import tempfile
import threading
import time
from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from experiments.benchmarks.harness import save_report
from experiments.extraction.provenance import environment
from experiments.extraction.rollout import RunObserver
from experiments.running.cli import Parser, count, finite_number, main
from experiments.running.engine import Results, crew_of, work_through
from experiments.running.progress import Progress

PARTS = {  # number of items, seconds of the longest, workers
    "cost here": (500, 0.006, None),
    "cost": (1000, 0.006, 2),
    "killed": (2000, 2.0, 2),
}
SHORTEST = 0.005  # seconds of an item


@dataclass(frozen=True)
class Sleeping:
    """Items that sleep and write how long they did (the engine's Work)."""

    folder: Path

    def is_done(self, name: str, seconds: float) -> bool:
        return Results(self.folder / "items").read(name) is not None

    def make(self, name: str, seconds: float, watch: RunObserver) -> None:
        start = time.monotonic()
        time.sleep(seconds)
        if self.is_done(name, seconds):  # another one has made it: it was given away twice
            (self.folder / f"{name}.twice").touch()
        Results(self.folder / "items").write(name, {"seconds": time.monotonic() - start})


def items_of(number: int, longest: float) -> dict[str, float]:
    """Return seconds by name: as many items of 10 ms as of 1 s."""
    dice = random.Random(0)
    return {f"item{n:05}": SHORTEST * (longest / SHORTEST) ** dice.random() for n in range(number)}


def made(work: Sleeping, items: dict[str, float], workers: int | None) -> dict[str, Any]:
    """Make items by so many workers -> what happened, and what an item cost beside itself."""
    flags = Namespace(workers=workers, scheduler=None, slurm=None, quiet=True)
    with crew_of(flags, "cpu") as crew, Progress(quiet=True) as watch:
        if crew:
            crew.client.run(items_of, 1, 1.0)  # imports are no part of an item
        start, cpu = time.monotonic(), time.process_time()
        work_through(work, items, work.folder, watch, crew)
        seconds, cpu = time.monotonic() - start, time.process_time() - cpu
    found = [Results(work.folder / "items").read(name) for name in items]
    done = [row["seconds"] for row in found if row]
    return {
        "items": len(items),
        "workers": workers or 1,
        "lost": len(items) - len(done),
        "twice": len(list(work.folder.glob("*.twice"))),
        "seconds": round(seconds, 2),
        "seconds_of_items": round(sum(done), 2),
        "overhead_ms": round(1000 * (seconds * (workers or 1) - sum(done)) / len(items), 2),
        "cpu_ms_of_the_command": round(1000 * cpu / len(items), 2),  # with the scheduler
        "load": round(os.getloadavg()[0], 1),
    }


def kill_now_and_then(folder: Path, over: threading.Event, every: float, killed: list[int]) -> None:
    """Kill a worker every so many seconds, once the first item is there."""
    while not over.wait(every):
        with suppress(psutil.Error, IndexError):
            there = [p for p in psutil.Process().children(True) if "spawn_main" in " ".join(p.cmdline())]
            if list(folder.glob("*.json")):
                there[len(killed) % len(there)].kill()
                killed.append(len(there))


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--items", type=count, help="in place of each part's own number")
    flag("--what", nargs="+", choices=PARTS, default=[*PARTS])
    flag("--kill_every", type=finite_number, default=20.0, help="seconds between two kills")
    flag("--output_path", type=Path, default=Path("docs/benchmarks/engine.json"))
    args = parser.parse_args(argv)
    report: dict[str, Any] = {"environment": environment(torch.device("cpu"))}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.what:
            number, longest, workers = PARTS[name]
            work, over, killed = Sleeping(Path(folder) / name), threading.Event(), list[int]()
            told = work.folder / "items", over, args.kill_every, killed
            if name == "killed":
                threading.Thread(target=kill_now_and_then, args=told, daemon=True).start()
            report[name] = made(work, items_of(args.items or number, longest), workers)
            over.set()
            report[name] |= {"killed": len(killed), "kill_every_s": args.kill_every}
            save_report(report, args.output_path)
    print(args.output_path)


if __name__ == "__main__":
    from experiments.benchmarks.engine import run  # workers import what they are given

    main(run)
