"""Stage 4: the few steps of the rollout's sampler land where many steps of the causal model do.

The causal stage makes a good sampler of many steps. After four, each block is a mean of what it could be:
shapes are blurred, or missing. As the ODE initialisation of CausVid (arXiv 2412.07772) and Self-Forcing
(arXiv 2506.08009), this stage trains the model to jump from the sampler's noise levels to the end of the
teacher's ODE; as in Causal Forcing (arXiv 2602.02214), the teacher is causal too:
here it is the causal stage's own weights.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import UMT5EncoderModel

from experiments.miniature.checkpoint_files import CAUSAL, TEACHER, kept_steps
from experiments.miniature.latent_clips import LatentClips, encode_text
from experiments.miniature.recipe import GUIDANCE, MODEL, SAMPLER_STEPS, SHIFT, TEACHER_STEPS, StageRun
from experiments.miniature.stages import TeacherForcing, masked_attention, train_rollouts
from wan.checkpoint_layouts import read_self_forcing_state
from wan.modules.causal_model import CausalWanModel

TEACHER_BATCH = 256  # clips of one call of the teacher, each with and without its caption
PATH_USES = 4  # steps that draw a path before the teacher makes the clip another, on average
PATHS_APART = 1_000_003  # between the random numbers of a rank's batches of paths
EVERY = TEACHER_STEPS // len(SAMPLER_STEPS)  # of the teacher's noise levels are the sampler's


def teacher_sigmas() -> Tensor:
    """Noise levels of the teacher's ODE, float32 [TEACHER_STEPS + 1], from 1 to 0."""
    sigmas = torch.linspace(1, 0, TEACHER_STEPS + 1)
    return SHIFT * sigmas / (1 + (SHIFT - 1) * sigmas)


class Teacher:
    """The causal stage's weights: guided paths from noise to clean blocks, each block after the clip's own.

    Keys and values of the clean blocks are the same at every step, and stay in a KV cache.
    """

    def __init__(self, run: StageRun, clips: LatentClips, encoder: UMT5EncoderModel, blocks: list[range]):
        model = CausalWanModel(**asdict(MODEL)).to(run.device, run.dtype).requires_grad_(False)
        model.load_state_dict(read_self_forcing_state(run.output_dir / TEACHER))
        self.model, self.clips, self.encoder = model, clips, encoder
        tokens = MODEL.tokens_per_frame(*clips.latents.shape[3:])
        self.clean = masked_attention(blocks, tokens, run, "clean")
        self.noisy = masked_attention(blocks, tokens, run, "noisy")

    @torch.no_grad()
    def path(self, some: Tensor, seed: int) -> list[Tensor]:
        """x_t of these clips at the sampler's noise levels and at 0, [B, F, C, h, w] each."""
        past = self.clips.latents[some].transpose(1, 2)
        random = torch.Generator(past.device).manual_seed(seed)
        return self._path(past, torch.randn(past.shape, generator=random, device=past.device), some)

    def _path(self, past: Tensor, x: Tensor, some: Tensor) -> list[Tensor]:
        """Euler steps from noise x [B, F, C, h, w]; every EVERY-th point."""
        rows = torch.cat([some + 1, torch.zeros_like(some)])  # with the caption, and with the empty one
        model = self.model
        text = model.text_keys_values(encode_text(self.encoder, self.clips.ids[rows], self.clips.mask[rows]))
        sigmas, frames = teacher_sigmas().to(x.device), range(x.shape[1])
        cache = model.new_kv_cache(2 * len(x), 2 * len(frames), *x.shape[3:])
        cache.advance(frames, text)
        model(past.repeat(2, 1, 1, 1, 1), torch.zeros_like(sigmas[0]), text, cache, mask=self.clean)
        cache.advance(frames, text)  # the same frames again, noisy
        points = [x]
        for step, (now, after) in enumerate(pairwise(sigmas)):
            both = x.to(past.dtype).repeat(2, 1, 1, 1, 1)
            flow = model(both, 1000 * now, text, cache, mask=self.noisy)
            guided, free = flow.float().chunk(2)
            x = x + (after - now) * (free + GUIDANCE * (guided - free))
            if (step + 1) % EVERY == 0:
                points.append(x)
        return points


class FewStep(TeacherForcing):
    """The distance of the model's jumps from the ends of its teacher's paths; captions are always given.

    The teacher goes on making paths: a model that sees one too often learns it by heart.
    """

    def __init__(self, run: StageRun, model: CausalWanModel, clips: LatentClips):
        super().__init__(run, model, clips)
        self.teacher = Teacher(run, clips, self.encoder, self.blocks)
        self.ranks, self.seed = run.ranks, run.ranks.seed(run.seed)
        self.sigmas = teacher_sigmas()[:-1:EVERY].to(run.device)
        latents = clips.latents
        self.paths = latents.new_empty(
            len(latents), len(self.sigmas) + 1, latents.shape[2], latents.shape[1], *latents.shape[3:]
        )  # [N, S + 1, F, C, h, w]
        self.turns = torch.arange(len(latents), device=latents.device).split(TEACHER_BATCH)
        self.made = 0  # batches of paths, so far
        self.before(0)

    def before(self, step: int) -> None:
        """New paths, from new noise, of the clips whose turn it is: of a clip after PATH_USES draws, on
        average. They follow from the step alone."""
        turns = len(self.turns)
        wanted = turns + step * self.batch * turns // (PATH_USES * len(self.paths))
        for number in range(max(self.made, wanted - turns), wanted):
            some = self.turns[number % turns]
            for i, x in enumerate(self.teacher.path(some, self.seed + PATHS_APART * number)):
                self.paths[some, i] = x.to(self.paths.dtype)
        self.made = wanted

    def numbers(self) -> dict:
        """Of all processes, which make as many."""
        rounds, more = divmod(self.made, len(self.turns))
        paths = rounds * len(self.paths) + sum(len(some) for some in self.turns[:more])
        return {"paths": paths * self.ranks.count}

    def __call__(self, own_past: bool) -> Tensor:
        """Loss of a random batch, each block at one of the sampler's noise levels. own_past: the past is
        the model's."""
        chosen = self.clips.draw(self.batch)
        paths, x0 = self.paths[chosen], self.clips.latents[chosen].transpose(1, 2)
        with torch.no_grad():
            context = encode_text(self.encoder, self.clips.ids[chosen + 1], self.clips.mask[chosen + 1])
        text = self.model.text_keys_values(context)
        past = self._own_past(x0, text) if own_past else x0
        step = torch.randint(len(self.sigmas), (len(x0), len(self.blocks)), device=x0.device)
        step = step.repeat_interleave(len(self.blocks[0]), 1)  # [B, F]
        frames = torch.arange(x0.shape[1], device=x0.device)
        x = paths[torch.arange(len(x0), device=x0.device)[:, None], step, frames]
        sigma = self.sigmas[step]
        flow = self.predict(past, x, 1000 * sigma, text)
        jump = x.float() - sigma[..., None, None, None] * flow.float()
        return F.mse_loss(jump, paths[:, -1].float())


def train_few_step(run: StageRun) -> dict:
    """The causal stage's weights, trained to jump; among the steps which that stage kept, this one's end is
    the last."""
    after = max(kept_steps(run.training_checkpoints), default=0) if run.training_checkpoints else 0
    state = read_self_forcing_state(run.output_dir / TEACHER)
    return train_rollouts(run, state, FewStep, CAUSAL, after)
