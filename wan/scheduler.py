"""The flow-matching noise schedule of https://github.com/guandeh17/Self-Forcing and its two formulas.

Noise levels: x_t = (1 - sigma) x0 + sigma noise, and the model predicts the flow (velocity) noise - x0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from wan.validation import NUM_TRAIN_TIMESTEPS


class FlowSchedule:
    """Table of 1000 noise levels sigma, descending from 1, with the timesteps t = 1000 sigma that name them.

    shift s moves levels towards noise: sigma -> s sigma / (1 + (s - 1) sigma).
    """

    def __init__(self, shift: float = 5.0):
        sigmas = torch.linspace(1.0, 0.0, NUM_TRAIN_TIMESTEPS + 1)[:-1]
        self.sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)  # float32 [1000]
        self.timesteps = self.sigmas * NUM_TRAIN_TIMESTEPS  # float32 [1000]

    def sigma(self, timestep: float | Tensor) -> Tensor:
        """The noise level of the table's entry nearest to each timestep; float32, shape of the input."""
        timestep = torch.as_tensor(timestep, dtype=torch.float32)
        nearest = (self.timesteps.to(timestep.device) - timestep[..., None]).abs().argmin(-1)
        return self.sigmas.to(timestep.device)[nearest]

    def warp(self, steps: Sequence[int]) -> Tensor:
        """Timesteps of an unshifted schedule, shifted: 1000, 750, 500, 250 -> 1000, 937.5, 833.33, 625."""
        table = torch.cat([self.timesteps, torch.zeros(1)])
        return table[NUM_TRAIN_TIMESTEPS - torch.as_tensor(steps, dtype=torch.long)]


def flow_to_x0(flow: Tensor, x: Tensor, sigma: float) -> Tensor:
    """The clean latents that a flow points to, x0 = x - sigma flow: computed in float64, in flow's dtype."""
    return (x.double() - sigma * flow.double()).to(flow.dtype)


def add_noise(x0: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """x_t = (1 - sigma) x0 + sigma noise, computed in float32, in the dtype of x0."""
    return ((1 - sigma) * x0.float() + sigma * noise.float()).to(x0.dtype)
