"""The engine with many short items and killed workers: nothing lost, nothing twice, and what an item costs.

    python experiments/benchmarks/engine.py --output_path docs/benchmarks/engine.json

Items sleep and write a file. Parts, in turn: the cost of an item; a worker killed every --kill_every seconds;
a worker on a slow shared folder; a scheduler that is killed and comes back; and, from these, 10,000 prompts
on 64 GPUs on paper. No GPU takes part. docs/sweeps.md quotes the report.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from distributed import get_worker

from experiments.benchmarks.harness import save_report
from experiments.extraction.provenance import environment
from experiments.extraction.rollout import RunObserver
from experiments.running.cli import Parser, count, finite_number, main
from experiments.running.engine import Results, crew_of, work_through
from experiments.running.progress import Progress
from wan.files import read_json

PARTS = ("cost here", "cost", "killed", "slow folder", "restarted", "files")
SHORTEST, LONGEST = 0.005, 2.0  # seconds of an item
ON_PAPER = {"prompts": 10_000, "gpus": 64, "seconds": 2.58}  # of a captured rollout (docs/benchmarks.md)


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
        if self.slow and get_worker().name == 0:
            time.sleep(self.slow)
        if self.is_done(name, seconds):  # another one has made it: it was given away twice
            (self.folder / f"{name}.twice").touch()
        Results(self.folder / "items").write(name, {"seconds": time.monotonic() - start})


def items_of(number: int, longest: float = LONGEST, shortest: float = SHORTEST) -> dict[str, float]:
    """Return seconds by name: as many items of 10 ms as of 1 s."""
    dice = random.Random(0)
    return {f"item{n:05}": shortest * (longest / shortest) ** dice.random() for n in range(number)}


def made(work: Sleeping, items: dict[str, float], **flags: Any) -> dict[str, Any]:
    """Make items by the workers that flags ask for -> what happened, and what an item cost beside itself."""
    given = {"workers": None, "scheduler": None, "slurm": None, "quiet": True} | flags
    with crew_of(Namespace(**given), "cpu") as crew, Progress(quiet=True) as watch:
        if crew and crew.own:
            crew.client.run(items_of, 1)  # imports are no part of an item
        start, cpu = time.monotonic(), time.process_time()
        work_through(work, items, work.folder, watch, crew)
        seconds, cpu = time.monotonic() - start, time.process_time() - cpu
        workers = given["workers"] or (
            len(crew.client.nthreads()) if crew else 1
        )  # one may be killed just now
    found = [Results(work.folder / "items").read(name) for name in items]
    done = [row["seconds"] for row in found if row]
    return {
        "items": len(items),
        "workers": workers,
        "lost": len(items) - len(done),
        "twice": len(list(work.folder.glob("*.twice"))),
        "seconds": round(seconds, 2),
        "seconds_of_items": round(sum(done), 2),
        "overhead_ms": round(1000 * (seconds * workers - sum(done)) / len(items), 2),
        "cpu_ms_of_the_command": round(
            1000 * cpu / len(items), 2
        ),  # with the scheduler, for workers of its own
    }


@contextmanager
def every(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """Call act() every so many seconds, in a thread."""
    over = threading.Event()

    def loop() -> None:
        while not over.wait(seconds):
            act()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def killing(work: Sleeping, items: dict[str, float], kill_every: float, workers: int = 2) -> dict[str, Any]:
    """Make items while a worker is killed now and then."""
    killed, dice = list[int](), random.Random(1)

    def kill() -> None:
        if not list((work.folder / "items").glob("*.json")):
            return  # they are not there yet
        with suppress(psutil.Error, IndexError):
            there = [p for p in psutil.Process().children(True) if "spawn_main" in " ".join(p.cmdline())]
            one = dice.choice(there)
            one.send_signal(signal.SIGKILL)
            killed.append(one.pid)

    with every(kill_every, kill):
        found = made(work, items, workers=workers)
    return found | {"killed": len(killed), "kill_every_s": kill_every}


def restarting(work: Sleeping, items: dict[str, float], after: float = 4.0) -> dict[str, Any]:
    """Make items by the workers of a scheduler that is killed once, and comes back after two seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "DASK_LOGGING__DISTRIBUTED": "error"}
    options: dict[str, Any] = {"env": environment, "stderr": subprocess.DEVNULL}
    own = ["--host", "127.0.0.1", "--port", str(port), "--dashboard-address", "127.0.0.1:0"]
    scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", *own]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", f"tcp://127.0.0.1:{port}"]
    worker += ["--nthreads", "1", "--memory-limit", "0"]
    running = {"scheduler": subprocess.Popen(scheduler, **options)}
    over = threading.Event()

    def keep_worker() -> None:  # as Kubernetes does, or a loop in a shell
        while not over.is_set():
            running["worker"] = subprocess.Popen(worker, **options)
            running["worker"].wait()

    def restart() -> None:
        while not list((work.folder / "items").glob("*.json")):
            time.sleep(0.1)
        time.sleep(after)
        running["scheduler"].kill()
        time.sleep(2)
        running["scheduler"] = subprocess.Popen(scheduler, **options)

    threads = [threading.Thread(target=one, daemon=True) for one in (keep_worker, restart)]
    for thread in threads:
        thread.start()
    try:
        found = made(work, items, scheduler=f"tcp://127.0.0.1:{port}")
        threads[1].join()
    finally:
        over.set()
        for process in running.values():
            process.terminate()
    return found


def parts(number: int, folder: Path) -> dict[str, float]:
    """Measure the milliseconds to write an item, to write its log, and to look whether it is done."""
    results, items = Results(folder / "items"), items_of(number)

    def ms(act: Callable[[str], object]) -> float:
        start = time.monotonic()
        for name in items:
            act(name)
        return round(1000 * (time.monotonic() - start) / number, 3)

    def log(name: str) -> None:
        with Progress(quiet=True, log_file=folder / "logs" / f"{name}.jsonl") as watch:
            watch.log("rollout", prompt=name)

    row = {"prompt": "a red circle moving right over a dark blue background" * 3, "seed": 0, "bytes": 10**6}
    found = {"write": ms(lambda name: results.write(name, row)), "log": ms(log)}
    return found | {"look": ms(lambda name: results.read(name)), "items": number}


def on_paper(report: dict[str, Any]) -> dict[str, Any]:
    """Return what many prompts on many GPUs would cost, from the measured parts."""
    prompts, gpus, seconds = ON_PAPER["prompts"], ON_PAPER["gpus"], ON_PAPER["seconds"]
    cpu, files = report["cost"]["cpu_ms_of_the_command"] / 1000, report["files"]
    rollouts = prompts * seconds / gpus
    return {
        **ON_PAPER,
        "seconds_of_rollouts": round(rollouts, 1),
        "items_per_second": round(gpus / seconds, 1),
        "scheduler_seconds": round(prompts * cpu, 1),
        "share_of_the_scheduler": round(prompts * cpu / rollouts, 3),
        "writes_ms_of_an_item": round(files["write"] + files["log"], 3),
        "look_before_seconds": round(2 * prompts * files["look"] / 1000, 1),
        "merge_seconds": round(prompts * files["look"] / 1000, 1),
    }


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--items", type=count, default=2000, help="of the part with killed workers, 5 ms to 2 s each")
    flag("--what", nargs="+", choices=PARTS, default=PARTS, help="parts; others stay as the report has them")
    flag("--kill_every", type=finite_number, default=20.0, help="seconds between two kills")
    flag("--output_path", type=Path, default=Path("docs/benchmarks/engine.json"))
    args = parser.parse_args(argv)
    report: dict[str, Any] = read_json(args.output_path) if args.output_path.is_file() else {}
    report |= {"environment": environment(torch.device("cpu"))}
    with tempfile.TemporaryDirectory() as folder:

        def work(name: str, slow: float = 0.0) -> Sleeping:
            return Sleeping(Path(folder) / name, slow)

        rows: dict[str, Callable[[], dict[str, Any]]] = {
            "cost here": lambda: made(work("here"), items_of(500, 0.006)),
            "cost": lambda: made(work("cost"), items_of(1000, 0.006), workers=2),
            "killed": lambda: killing(work("killed"), items_of(args.items), args.kill_every),
            "slow folder": lambda: made(work("slow", 0.5), items_of(60, 0.2), workers=2),
            "restarted": lambda: restarting(work("restarted"), items_of(60, 1.0, 0.1)),
            "files": lambda: parts(2000, Path(folder) / "files"),
        }
        for name in args.what:
            report[name] = rows[name]() | {"load": round(os.getloadavg()[0], 1)}
            save_report(report, args.output_path)
    if {"cost", "files"} <= report.keys():
        report["on paper"] = on_paper(report)
    save_report(report, args.output_path)
    print(args.output_path)


if __name__ == "__main__":
    from experiments.benchmarks.engine import run  # workers import what they are given

    main(run)
