"""Data-parallel training under torchrun: every rank draws clips of its own, gradients are averaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.running.ranks import this_rank
from wan.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

SEEDS_APART = 10_007  # between the random numbers of neighbouring ranks


@dataclass(frozen=True)
class Ranks:
    """This process among `count`; one process alone needs no launcher."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes files and keeps the clock."""
        return self.rank == 0

    def share(self, number: int) -> int:
        """This rank's part of a number of clips. Raises ConfigError where it cannot be cut evenly."""
        if number % self.count:
            raise ConfigError(f"{number} clips cannot be shared evenly by {self.count} processes")
        return number // self.count

    def seed(self, seed: int) -> int:
        return seed + SEEDS_APART * self.rank

    def average(self, gradients: Tensor) -> None:
        """The mean over ranks, in place."""
        if self.count > 1:
            import torch.distributed as dist

            dist.all_reduce(gradients)
            gradients /= self.count

    def agree(self, number: float) -> float:
        """The first rank's number."""
        if self.count == 1:
            return number
        import torch
        import torch.distributed as dist

        said = torch.tensor([number], dtype=torch.float64)
        dist.broadcast(said, src=0)
        return said.item()

    def leave(self) -> None:
        """Nothing is exchanged any more."""
        if self.count > 1:
            import torch.distributed as dist

            dist.destroy_process_group()


def start_ranks(on_gpu: bool) -> Ranks:
    """Join the other processes of torchrun, each on its own GPU; alone without a launcher.

    Raises ConfigError for an environment that says only half of it.
    """
    here = this_rank()
    if here.count == 1:
        return Ranks()
    import torch
    import torch.distributed as dist

    if on_gpu:
        torch.cuda.set_device(here.local)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, rank=here.number, world_size=here.count)
    return Ranks(here.number, here.count)
