"""Base Wan2.1 text to video (https://github.com/Wan-Video/Wan2.1): all frames at once, guidance, UniPC."""

from collections.abc import Callable

import numpy as np
import torch
from diffusers import UniPCMultistepScheduler
from torch import Tensor

from wan import sites
from wan.config import BaseSampling
from wan.model import TextKeysValues, WanModel

SIGMA_MAX = 0.999  # where the native solver starts, before the shift; diffusers' own default would start at 1


class TextToVideoPipeline:
    """Bidirectional sampling: each step follows the difference between flows with and without the prompt."""

    quantised = ""  # how the weights were stored, as a causal pipeline says it

    def __init__(self, model: WanModel, shift: float = 8.0, guidance_scale: float = 6.0, num_steps: int = 50):
        """shift 8 and guidance_scale 6 are Wan's for 1.3B, 5 and 5 for 14B."""
        BaseSampling(shift, guidance_scale, num_steps)  # checks them
        self.model, self.shift, self.guidance_scale, self.num_steps = model, shift, guidance_scale, num_steps

    def solver(self) -> UniPCMultistepScheduler:
        """Return a fresh solver, which counts its steps and remembers earlier flows: one per video."""
        solver = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=self.shift
        )
        solver.set_timesteps(sigmas=np.linspace(SIGMA_MAX, 0, self.num_steps + 1)[:-1])
        solver.set_begin_index(0)  # or it looks steps up by their timesteps, which may repeat
        return solver

    @property
    def pass_timesteps(self) -> list[float]:
        """The timestep of every step: 999, 997, 994 ... 249, 140 for 50 steps at shift 8."""
        return [float(t) for t in self.solver().timesteps]

    @torch.no_grad()
    def inference(
        self,
        noise: Tensor,
        prompt_embeds: Tensor,
        negative_embeds: Tensor,
        on_step: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Return latents of as many frames as noise [B, F, C, h, w] has, from embeddings [B, n, text_dim].

        The solver runs in float32, the model in its own dtype. on_step is called with a step and its latents.
        """
        # 0. A solver of its own, and the text's keys and values of both branches.
        solver, timesteps = self.solver(), self.pass_timesteps
        frames = tuple(range(noise.shape[1]))
        config = self.model.config
        sites.check_watchers(
            sites.RolloutSizes(
                num_layers=config.num_layers,
                num_heads=config.num_heads,
                text_len=config.text_len,
                num_steps=self.num_steps,
                last_steps=(self.num_steps - 1,),  # of the one block
                num_frames=len(frames),
                has_clean_pass=False,
            )
        )
        prompt, negative = map(self.model.text_keys_values, (prompt_embeds, negative_embeds))

        def predict_flow(x: Tensor, step: int, text: TextKeysValues, branch: str) -> Tensor:
            t = x.new_full((x.shape[0], 1), timesteps[step])  # [B, 1]
            at = sites.Pass(query_frames=frames, step=step, timestep=timesteps[step], branch=branch)
            with sites.during(at):
                return self.model.flow(x, t, text, frames=range(len(frames))).float()

        # The solver works on [B, C, F, h, w] in float32, as Wan's own does.
        x = noise.float().transpose(1, 2)  # [B, C, F, h, w]
        for step, t in enumerate(solver.timesteps):
            # 1. Flow with the prompt and without; guidance goes further in the direction of the prompt.
            cond = predict_flow(x, step, prompt, "cond")
            uncond = predict_flow(x, step, negative, "uncond")
            flow = uncond + self.guidance_scale * (cond - uncond)
            # 2. One step of the solver to the next, lower noise level.
            x = solver.step(flow, t, x, return_dict=False)[0]
            if on_step:
                on_step(step, x.transpose(1, 2))
        return x.transpose(1, 2)  # [B, F, C, h, w]
