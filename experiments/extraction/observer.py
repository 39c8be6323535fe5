"""Who is told how a rollout goes on, and may ask it to stop."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.extraction.video import LiveVideo


class RunObserver:
    """Prints and logs nothing. A run ends after its current block or step once stopping is true."""

    stopping = False
    generating = False  # from the first rollout on: before, nothing is lost by stopping at once
    quiet = True
    video: "LiveVideo | None" = None  # that is made of the blocks of a rollout

    def block(self, block: int, frames: range, num_blocks: int) -> None:
        """A block is finished."""

    def step(self, step: int, timestep: float, num_steps: int) -> None:
        """A step of the base model's sampler is finished."""

    def log(self, event: str, **values: object) -> None:
        """Something worth a line in the log."""

    def print(self, line: str) -> None:
        """Something worth a line on the screen."""
