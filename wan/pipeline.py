"""The causal rollout of Self-Forcing (arXiv 2506.08009): denoise a block of frames, remember it, go on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from wan import cache, sites
from wan.blocks import block_ranges, block_sizes, steps_of_blocks
from wan.config import NUM_TRAIN_TIMESTEPS
from wan.errors import ConfigError
from wan.model import CausalWanModel
from wan.noise import Noise, TensorNoise, check_frames

if TYPE_CHECKING:
    from wan.checkpoint import LoadReport

Blocks = Iterator[tuple[range, Tensor]]  # frames of a block, and its latents [B, n, C, h, w]
Probe = Callable[[int, Callable[..., Tensor]], None]  # (block, denoise)
SIGMA_MAX = 0.999  # where UniPC starts, before the shift


@dataclass(frozen=True, eq=False)
class RolloutInputs:
    """Describe a rollout of one video, or of a batch of B. Frames are latent frames, [C, h, w] each.

    A rollout may begin with num_given clean frames; num_frames follow them, which are generated. The block
    behind a beginning takes the first block's steps, unless the rollout resumes an earlier one.
    """

    noise: Noise  # of the generated frames, [B, F, C, h, w]
    prompt_embeds: Tensor  # states of the prompt, [B, n, text_dim]
    num_frames: int | None = None  # that are generated; None: all that the noise has
    num_given: int = 0
    given: Callable[[range], Tensor] | None = None  # frames -> their clean latents [B, n, C, h, w]
    resumes: bool = False
    prompt_schedule: Sequence[cache.PromptSwitch] = ()  # later prompts
    on_pass: Callable[[], None] | None = None  # called after each forward
    # Called before each generated block with its number and a function that denoises it, from other noise
    # [B, n, C, h, w] where that is given -> x0, as often as wanted, without a trace in the rollout.
    probe: Probe | None = None

    @property
    def generated(self) -> range:
        """The frames that are generated."""
        count = self.num_frames
        if count is None:
            count = self.noise.shape[1]
        return range(self.num_given, self.num_given + count)

    def clean_latents(self, frames: range) -> Tensor | None:
        """Return the given latents [B, m, C, h, w] with which a block begins; None where it has none."""
        beginning = frames[: max(0, self.num_given - frames.start)]
        if self.given is None or not beginning:
            return None
        return self.given(beginning)


def frames_of(latents: Tensor) -> Callable[[range], Tensor]:
    """Return a function of frames that gives their latents [B, n, C, h, w], of latents [B, F, C, h, w]."""
    return lambda frames: latents[:, frames.start : frames.stop]


class FlowSchedule:
    """Table of 1000 noise levels sigma, descending from 1, with the timesteps t = 1000 sigma that name them.

    The flow-matching schedule of https://github.com/guandeh17/Self-Forcing. shift s moves levels towards
    noise: sigma -> s sigma / (1 + (s - 1) sigma).
    """

    def __init__(self, shift: float = 5.0):
        sigmas = torch.linspace(1.0, 0.0, NUM_TRAIN_TIMESTEPS + 1)[:-1]
        self.sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)  # float32 [1000]
        self.timesteps = self.sigmas * NUM_TRAIN_TIMESTEPS  # float32 [1000]

    def sigma(self, timestep: float | Tensor) -> Tensor:
        """Return the noise level of the entry nearest to each timestep; float32, shape of the input."""
        timestep = torch.as_tensor(timestep, dtype=torch.float32)
        nearest = (self.timesteps.to(timestep.device) - timestep[..., None]).abs().argmin(-1)
        return self.sigmas.to(timestep.device)[nearest]

    def warp(self, steps: Sequence[int]) -> Tensor:
        """Shift timesteps of an unshifted schedule: 1000, 750, 500, 250 -> 1000, 937.5, 833.33, 625."""
        table = torch.cat([self.timesteps, torch.zeros(1)])
        return table[NUM_TRAIN_TIMESTEPS - torch.as_tensor(steps, dtype=torch.long)]


def flow_to_x0(flow: Tensor, x: Tensor, sigma: float, num_held: int = 0) -> Tensor:
    """Return the clean latents that a flow points to, x0 = x - sigma flow: in float64, in flow's dtype.

    The first num_held frames of x [B, n, C, h, w] are clean already.
    """
    x0 = (x.double() - sigma * flow.double()).to(flow.dtype)
    if num_held == 0:
        return x0
    return torch.cat([x[:, :num_held].to(x0.dtype), x0[:, num_held:]], 1)


def add_noise(x0: Tensor, noise: Tensor, sigma: float | Tensor) -> Tensor:
    """Return x_t = (1 - sigma) x0 + sigma noise, computed in float32 or wider, in the dtype of x0."""
    wide = torch.promote_types(x0.dtype, torch.float32)
    return ((1 - sigma) * x0.to(wide) + sigma * noise.to(wide)).to(x0.dtype)


# --- From one noise level of a block to the next. A solver is made for each block
Draw = Callable[[int], Tensor]  # number of a step -> the noise that follows it


class FreshNoise:
    """Add new noise to each prediction, as models of few steps are trained to."""

    def __init__(self, sigmas: Sequence[float], draw: Draw):
        self.sigmas, self.draw = sigmas, draw

    @staticmethod
    def levels(steps: Sequence[int], shift: float, warp: bool) -> tuple[list[float], list[float]]:
        """Return timesteps and noise levels of a config's steps; warp reads them as unshifted."""
        schedule = FlowSchedule(shift)
        timesteps = torch.as_tensor(steps).float()
        if warp:
            timesteps = schedule.warp(steps)
        return timesteps.tolist(), schedule.sigma(timesteps).tolist()

    def step(self, number: int, x: Tensor, x0: Tensor) -> Tensor:
        """Return latents at the level after step number, from x at its own level and its prediction x0."""
        return add_noise(x0, self.draw(number), self.sigmas[number + 1])


class UniPC:
    """Extrapolate from two predictions, and correct each level by the next one; no noise is drawn.

    UniPC (arXiv 2302.04867) of order 2 with B2, by diffusers, in float32 or wider.
    """

    def __init__(self, sigmas: Sequence[float], draw: Draw):
        from diffusers import UniPCMultistepScheduler  # takes a second to import

        self.solver = UniPCMultistepScheduler(prediction_type="sample", use_flow_sigmas=True, flow_shift=1)
        self.solver.set_timesteps(sigmas=np.array(sigmas))
        self.solver.set_begin_index(0)  # or it looks steps up by their timesteps

    @staticmethod
    def levels(steps: Sequence[int], shift: float, warp: bool) -> tuple[list[float], list[float]]:
        """Return timesteps and noise levels: 1000, 750, 500, 250 at shift 5 -> 999, 937, 833, 624.

        Wan's own solver, https://github.com/Wan-Video/Wan2.2 wan/utils/fm_solvers_unipc.py: levels begin at
        0.999, and the network gets timesteps without their fraction.
        """
        sigmas = SIGMA_MAX * np.array(steps) / NUM_TRAIN_TIMESTEPS
        if warp:
            sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
        return np.floor(sigmas * NUM_TRAIN_TIMESTEPS).tolist(), sigmas.tolist()

    def step(self, number: int, x: Tensor, x0: Tensor) -> Tensor:
        """Return latents at the level after step number, from x at its own level and its prediction x0."""
        t, wide = self.solver.timesteps[number], torch.promote_types(x0.dtype, torch.float32)
        return self.solver.step(x0.to(wide), t, x.to(wide), return_dict=False)[0].to(x0.dtype)


SOLVERS: dict[str, type[FreshNoise] | type[UniPC]] = {"fresh_noise": FreshNoise, "unipc": UniPC}


def check_numerics() -> None:
    """Raise ConfigError under autocast or another default dtype, which would change numbers in silence."""
    dtype, autocast = torch.get_default_dtype(), any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    problem = ""
    if dtype != torch.float32:
        problem = f"torch's default dtype is {dtype}"
    if autocast:
        problem = "autocast is active"
    if problem:
        raise ConfigError(
            f"{problem}, which changes numbers; run rollouts in torch.float32, without autocast"
        )


class CausalInferencePipeline:
    """Text to video: a few denoising steps per block, then one clean pass that writes its keys and values."""

    def __init__(
        self,
        model: CausalWanModel,
        num_frame_per_block: int = 3,
        independent_first_frame: bool = False,
        denoising_step_list: Sequence[int] = (1000, 750, 500, 250),
        warp_denoising_step: bool = True,
        timestep_shift: float = 5.0,
        context_noise: int = 0,
        text_encoder=None,
        vae=None,
        cache_policy: cache.CachePolicy | None = None,
        first_block_steps: Sequence[int] | None = None,
        recompute_context: int = 0,
        solver: str = "fresh_noise",
        held_first_frame: bool = False,
    ):
        """text_encoder(prompts) -> [B, n, text_dim] and vae.decode(latents [B, F, C, h, w]) are optional.

        warp_denoising_step reads the steps as those of an unshifted schedule. cache_policy says what a block
        may look at (wan/policies/). Without one it is the window that the model's local_attn_size and
        sink_size describe, or the whole past. first_block_steps are those of the first block that is denoised
        in place of denoising_step_list. With recompute_context n the keys of the last n frames are computed
        again before each block; all other frames leave, the sink included (window's global_sink stays).
        solver, of SOLVERS, goes from one noise level to the next. With held_first_frame block 0 can hold one
        given frame, clean at t = 0, while it denoises the others. weights is the report of what the model was
        loaded from, quantised how it was stored there, cache_bytes what keys and values take after the newest
        block.
        """
        self.weights: LoadReport | None = None
        self.quantised, self.cache_bytes = "", 0
        self.model, self.text_encoder, self.vae = model, text_encoder, vae
        self.num_frame_per_block, self.independent_first_frame = num_frame_per_block, independent_first_frame
        steps, self.first_steps, self.later_steps = steps_of_blocks(denoising_step_list, first_block_steps)
        self.solver, self.held_first_frame = SOLVERS[solver], held_first_frame
        self.timesteps, self.sigmas = self.solver.levels(steps, timestep_shift, warp_denoising_step)
        self.pass_timesteps = [*self.timesteps, float(context_noise)]  # the clean pass last
        self.recompute_context = recompute_context
        if cache_policy is None and model.local_attn_size != -1:
            cache_policy = cache.of_window(model.local_attn_size, model.sink_size)
        self.cache_policy = cache_policy or cache.Full()
        sizes = [num_frame_per_block]
        if independent_first_frame:
            sizes.append(1)
        self.cache_policy.check(sizes)
        if recompute_context:
            self.cache_policy.check_recompute(recompute_context, num_frame_per_block)

    def at(self, block: int, frames: range, step: int | None, num_held: int = 0) -> sites.Pass:
        """Announce a pass; None, where the cache is computed again, has the clean pass's timestep.

        Of its frames the first num_held are at t = 0.
        """
        last = len(self.timesteps)
        of_timestep = last
        if step is not None:
            of_timestep = step
        timestep, levels = self.pass_timesteps[of_timestep], list[tuple[int, float]]()
        if num_held:
            levels += [(frame, 0.0) for frame in frames[:num_held]]
            levels += [(frame, timestep) for frame in frames[num_held:]]
        return sites.Pass(
            query_frames=tuple(frames),
            block=block,
            step=step,
            timestep=timestep,
            is_clean_pass=of_timestep == last,
            is_recache=step is None,
            levels=tuple(levels),
        )

    @torch.no_grad()
    def inference(
        self,
        noise: Tensor,
        text_prompts: Sequence[str] | None = None,
        prompt_embeds: Tensor | None = None,
        renoise: Tensor | None = None,
        initial_latent: Tensor | None = None,
        return_latents: bool = True,
        generator: torch.Generator | None = None,
        on_pass: Callable[[], None] | None = None,
        on_block: Callable[[int, Tensor], None] | None = None,
        prompt_schedule: Sequence[cache.PromptSwitch] = (),
        probe: Probe | None = None,
    ):
        """Generate as many frames as noise [B, F, C, h, w] has -> video or None, latents [B, G + F, C, h, w].

        Without return_latents the video alone. renoise [steps - 1, B, F, C, h, w] replaces the fresh noise
        between steps, else generator draws it. initial_latent [B, G, C, h, w] is a given beginning, and must
        fill whole blocks, but for one frame that block 0 holds (held_first_frame). on_block is called with
        the block and its latents when it is finished; the rest is as in RolloutInputs.
        """
        # 1. Inputs: the given beginning, and the prompt's states [B, n, text_dim].
        beginning = noise[:, :0]  # [B, G, C, h, w]
        if initial_latent is not None:
            beginning = initial_latent
        if prompt_embeds is None:
            prompt_embeds = self.encode(text_prompts)
        # 2. The rollout, block by block; nothing is computed before the loop asks for it.
        num_given = beginning.shape[1]
        inputs = RolloutInputs(
            noise=TensorNoise(noise, renoise, generator, start=num_given),
            prompt_embeds=prompt_embeds,
            num_given=num_given,
            given=frames_of(beginning),
            prompt_schedule=prompt_schedule,
            on_pass=on_pass,
            probe=probe,
        )
        finished = []
        for block, (_, x0) in enumerate(self.blocks(inputs)):
            finished.append(x0)
            if on_block:
                on_block(block, x0)
        # 3. Latents to pixels, where there is a VAE.
        latents = torch.cat(finished, 1)  # [B, G + F, C, h, w]
        video = None
        if self.vae is not None:
            video = self.vae.decode(latents)
        if return_latents:
            return video, latents
        return video

    def blocks(self, inputs: "RolloutInputs | Noise", *older: Any, **fields: Any) -> Blocks:
        """Roll out block by block: yield the frames of each and its latents [B, n, C, h, w].

        It holds the cache and one block, so that a video may be of any length. Raises ConfigError for inputs
        that do not fit the blocks, the cache policy or who watches, before anything is computed. Version 2
        also takes the fields of RolloutInputs as arguments: blocks(noise, prompt_embeds, num_frames=6).
        """
        if isinstance(inputs, RolloutInputs):
            return self.roll_out(inputs)
        return self.roll_out(RolloutInputs(inputs, *older, **fields))

    @torch.no_grad()
    def roll_out(self, inputs: RolloutInputs) -> Blocks:
        """Denoise block by block: the algorithm of blocks()."""
        # 0. Refuse what could not be done, before anything is computed.
        check_numerics()
        blocks = self.block_ranges(inputs.num_given, len(inputs.generated))
        check_frames(inputs.noise, inputs.generated)
        if inputs.prompt_schedule:
            self.cache_policy.check_schedule(inputs.prompt_schedule, blocks)
        if inputs.probe:
            self.check_probe(inputs.noise)
        sites.check_watchers(self.sizes(len(inputs.generated), inputs.num_given, inputs.resumes))
        video = Rollout(self, inputs)

        for block, frames in enumerate(blocks):
            # 1. Make room for the block in the KV cache. A new prompt may begin here.
            video.make_room(block, frames)

            # 2. Denoise, from pure noise to clean latents; frames that are given stay as they are.
            clean = inputs.clean_latents(frames)
            if clean is not None and clean.shape[1] == len(frames):
                x0 = clean
            else:
                if inputs.probe:
                    inputs.probe(block, partial(video.denoise, block, frames, clean))
                x0 = video.denoise(block, frames, clean)

            # 3. Remember: the clean pass overwrites this block's keys and values, which later blocks see.
            video.predict_flow(x0, self.at(block, frames, step=len(self.timesteps)))
            if video.keeps_past:
                video.past += x0.split(1, 1)
                del video.past[: -(video.kv_cache.policy.recomputed_frames or len(video.past))]
            self.cache_bytes = video.kv_cache.nbytes
            yield frames, x0

    def check_probe(self, noise: Noise) -> None:
        """Raise ConfigError where denoising a block twice would change the noise or the past of others."""
        policy = self.cache_policy
        if not noise.is_repeatable or policy.chooses_by_layer or policy.release:
            remedy = "take noise that is drawn again (renoise), and cache_policy full or window"
            raise ConfigError(f"a probe would change noise or cache ({policy.name}); {remedy}")

    def block_ranges(self, num_given: int, num_frames: int) -> list[range]:
        """Return the frames of every block. ConfigError where given or generated frames end within one."""
        sizes = block_sizes(num_given + num_frames, self.num_frame_per_block, self.independent_first_frame)
        blocks = block_ranges(sizes)
        ends = [0, *(frames.stop for frames in blocks)]
        holds = self.held_first_frame and num_given == 1
        if num_given not in ends and not holds:
            raise ConfigError(f"{num_given} given frames end within a block; blocks end at {ends[1:]}")
        return blocks

    def encode(self, text_prompts: Sequence[str] | None) -> Tensor:
        """Return the states [B, n, text_dim] of a prompt for each video of the batch."""
        if text_prompts is None or self.text_encoder is None:
            raise ConfigError("give prompt_embeds, or text_prompts and a text_encoder")
        return self.text_encoder(text_prompts)

    def sizes(self, num_frames: int, num_given: int = 0, resumes: bool = False) -> sites.RolloutSizes:
        """Return how many layers, heads, blocks and passes a rollout has."""
        config, blocks = self.model.config, self.block_ranges(num_given, num_frames)
        last_steps = [self.later_steps[-1]] * len(blocks)
        last_steps[first_denoised(blocks, num_given, resumes)] = self.first_steps[-1]
        return sites.RolloutSizes(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            text_len=config.text_len,
            num_steps=len(self.timesteps),
            last_steps=tuple(last_steps),
            num_frames=num_frames,
            keeps_clean_keys=not self.recompute_context or self.cache_policy.lasting_sink > 0,
            splits_tokens=self.model.head_shard is not None,
        )


def first_denoised(blocks: Sequence[range], num_given: int, resumes: bool) -> int:
    """Return the block that takes the first block's steps: the first one that is not given whole."""
    if resumes:
        return 0
    return next((block for block, frames in enumerate(blocks) if frames.stop > num_given), 0)


def behind(clean: Tensor | None, x: Tensor) -> Tensor:
    """Return latents [B, m + n, C, h, w] of clean frames, where there are some, and of those behind them."""
    if clean is None:
        return x
    return torch.cat([clean.to(x.dtype), x], 1)


class Rollout:
    """One video, or a batch of them, in the making: its inputs, its prompt now, and what it remembers."""

    def __init__(self, pipeline: CausalInferencePipeline, inputs: RolloutInputs):
        self.pipeline, self.model, self.inputs = pipeline, pipeline.model, inputs
        # 1. The prompt, and those that follow.
        self.text = self.model.text_keys_values(inputs.prompt_embeds)
        self.switches = {switch.frame: switch for switch in inputs.prompt_schedule}
        # 2. The KV cache, of given and generated frames.
        batch, _, _, height, width = inputs.noise.shape
        self.kv_cache = self.model.new_kv_cache(
            batch=batch,
            num_frames=inputs.generated.stop,
            height=height,
            width=width,
            policy=pipeline.cache_policy,
            block_size=pipeline.num_frame_per_block,
        )
        self.kv_cache.has_switches = bool(self.switches)
        # 3. Clean latents [B, 1, C, h, w] of the past, where its keys are computed again.
        self.past: list[Tensor] = []
        self.context = pipeline.recompute_context
        hows = {switch.how for switch in inputs.prompt_schedule}
        self.keeps_past = self.context > 0 or "recache" in hows
        # 4. The block that takes the first block's steps.
        blocks = pipeline.block_ranges(inputs.num_given, len(inputs.generated))
        self.first_block = first_denoised(blocks, inputs.num_given, inputs.resumes)

    def make_room(self, block: int, frames: range) -> None:
        """Put the block's frames into the cache; before that, change the prompt where a switch says so."""
        # 1. A new prompt: its cross-attention keys and values take the place of the old ones.
        switch = self.switches.get(frames.start)
        how: cache.How = "keep"
        if switch:
            how, embeds = switch.how, switch.prompt_embeds
            if embeds is None:
                prompts = None
                if switch.prompt is not None:
                    prompts = [switch.prompt] * self.inputs.noise.shape[0]
                embeds = self.pipeline.encode(prompts)
            self.text = self.model.text_keys_values(embeds)
            self.kv_cache.announce_prompt(switch.prompt)
        # 2. What the policy makes of the past under it, and how many of its frames are computed again.
        again = 0
        if switch or self.context:
            remembered, again = cache.apply_switch(self.kv_cache, how, len(self.past), self.context)
            del self.past[: len(self.past) - remembered]
        text: cache.Text = self.text
        if self.model.head_shard:
            text = self.model.head_shard.of_text(text)
        if again:
            past = range(self.kv_cache.newest.stop - again, self.kv_cache.newest.stop)
            self.kv_cache.recache(past, text, lasts=not self.context)
            again_at = self.pipeline.at(block, past, step=None)
            self.predict_flow(torch.cat(self.past[-again:], 1), again_at)
        # 3. Slots for the block; what has no room leaves.
        self.kv_cache.advance(frames, text, cut=how == "cut")

    def denoise(
        self, block: int, frames: range, clean: Tensor | None = None, x: Tensor | None = None
    ) -> Tensor:
        """Denoise a block from pure noise x [B, n, C, h, w], or the rollout's own -> x0 [B, n, C, h, w].

        clean [B, m, C, h, w] are latents that its first m frames hold; then x is noise of the other frames.
        """
        steps = self.pipeline.later_steps
        if block == self.first_block:
            steps = self.pipeline.first_steps
        num_held = 0
        if clean is not None:
            num_held = clean.shape[1]
        sigmas, free = [self.pipeline.sigmas[step] for step in steps], frames[num_held:]
        noise = self.inputs.noise
        solver = self.pipeline.solver(sigmas, draw=lambda number: noise.fresh(number, free))
        if x is None:
            x = noise.first(free)
        for number, step in enumerate(steps):
            # 1. Predict the clean block.
            at, whole = self.pipeline.at(block, frames, step, num_held), behind(clean, x)
            x0 = flow_to_x0(self.predict_flow(whole, at), whole, sigmas[number], num_held)
            with sites.during(at):
                x0 = sites.hook_point("x0", None, x0)
            # 2. Go back to the next, lower noise level.
            if number + 1 < len(steps):
                x = solver.step(number, x, x0[:, num_held:])
        return x0

    def predict_flow(self, x: Tensor, at: sites.Pass) -> Tensor:
        """Run the model once in a pass, announced to those who observe it."""
        self.kv_cache.begin_pass(at.is_clean_pass)
        t = x.new_full((), at.timestep, dtype=torch.float32)
        if at.levels:
            t = t.new_tensor([level for _, level in at.levels]).expand(len(x), -1)  # [B, n]
        with sites.during(at):
            flow = self.model(x, t, self.text, self.kv_cache)
        if self.inputs.on_pass:
            self.inputs.on_pass()
        return flow
