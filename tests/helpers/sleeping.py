"""Items that sleep and write a file: work for the engine that needs no model."""

import time
from dataclasses import dataclass
from pathlib import Path

from experiments.running.engine import Results


@dataclass(frozen=True)
class Sleeping:
    folder: Path

    def is_done(self, name: str, seconds: float) -> bool:
        return Results(self.folder / "items").read(name) is not None

    def make(self, name: str, seconds: float, watch) -> None:
        time.sleep(seconds)
        if self.is_done(name, seconds):  # another one has made it: it was given away twice
            (self.folder / f"{name}.twice").touch()
        Results(self.folder / "items").write(name, {"seconds": seconds})


def items_of(number: int, seconds: float) -> dict[str, float]:
    return {f"item{n:03}": seconds * (1 + n % 3) / 2 for n in range(number)}
