"""Items that sleep and write a file: work for a sweep that needs no model."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from experiments.extraction.sweep import Results


@dataclass(frozen=True)
class Sleep:
    """An item: its name, and the seconds that it takes."""

    name: str
    seconds: float

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Sleeping:
    folder: Path

    def is_done(self, item: Sleep) -> bool:
        return Results(self.folder / "items").read(item.name) is not None

    def make(self, item: Sleep, watch) -> None:
        time.sleep(item.seconds)
        if self.is_done(item):  # another worker has made it: it was given away twice
            (self.folder / f"{item.name}.twice").touch()
        Results(self.folder / "items").write(item.name, {"worker": os.getpid()})


def items_of(number: int, seconds: float) -> list[Sleep]:
    return [Sleep(f"item{n:03}", seconds * (1 + n % 3) / 2) for n in range(number)]


STOPPED = """
import sys
from argparse import Namespace
from pathlib import Path
from helpers.sleeping import Sleeping, items_of
from experiments.running.cli import main
from experiments.progress import observed
from experiments.extraction.sweep import dask_client, work_through

def run(argv):
    flags = Namespace(workers=2, scheduler=None, slurm=None, quiet=False, log_file=None, deterministic=False)
    with observed(flags, "item") as watch, dask_client(flags, "cpu") as client:
        work_through(Sleeping(Path(sys.argv[1])), items_of(100, 0.1), watch, client)

if __name__ == "__main__":
    main(run)
"""
