"""Which passes a rollout has: the noise levels of its denoising steps, and which of them a block takes.

A pass is named by its noise level. Where the first block takes other steps than the later ones, step counts
all levels that any block has, from the noisiest on: equal steps are equal levels in every block, and after
the last of them comes the clean pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wan.blocks import steps_of_blocks
from wan.scheduler import FlowSchedule


@dataclass(frozen=True)
class PassPlan:
    """Noise levels of the denoising passes, from the noisiest on; the clean pass follows them."""

    timesteps: tuple[float, ...]
    sigmas: tuple[float, ...]
    first: tuple[int, ...]  # the passes of block 0, as indices of timesteps
    later: tuple[int, ...]  # those of every other block
    clean_timestep: float = 0.0

    @classmethod
    def of_steps(
        cls,
        steps: Sequence[int],
        first_block_steps: Sequence[int] | None = None,
        warp: bool = True,
        shift: float = 5.0,
        clean_timestep: float = 0.0,
    ) -> "PassPlan":
        """From the steps of a config; warp reads them as steps of an unshifted schedule."""
        every, first, later = steps_of_blocks(steps, first_block_steps)
        schedule = FlowSchedule(shift)
        timesteps = schedule.warp(every) if warp else torch.as_tensor(every).float()
        sigmas = schedule.sigma(timesteps)
        return cls(
            tuple(timesteps.tolist()), tuple(sigmas.tolist()), tuple(first), tuple(later), clean_timestep
        )

    def of_block(self, block: int) -> tuple[int, ...]:
        """The denoising passes of a block."""
        return self.later if block else self.first

    def has(self, block: int, step: int) -> bool:
        """Whether a block has a pass, the clean one included."""
        return step == len(self.timesteps) or step in self.of_block(block)
