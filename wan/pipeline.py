"""The causal rollout of Self-Forcing (arXiv 2506.08009): denoise a block of frames, remember it, go on."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from wan.blocks import block_ranges, block_sizes, check_window
from wan.errors import ConfigError
from wan.modules.attention import ATTENTION_WEIGHT_CAPTURE
from wan.modules.cache_policies import CachePolicy, of_window
from wan.modules.captured_call import Pass
from wan.modules.causal_model import CausalWanModel
from wan.modules.edits import ACTIVE_EDITS
from wan.modules.kv_cache import KVCache
from wan.modules.model import TextKeysValues
from wan.modules.per_head_cache import PerHeadCache
from wan.modules.rollout_plan import RolloutPlan, blocks_of_window
from wan.prompt_schedule import PromptSwitch, check_schedule
from wan.scheduler import FlowSchedule, add_noise, flow_to_x0

RECACHE = -1  # the step of a forward that computes the cache again after a switch of prompts


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
        cache_policy: CachePolicy | None = None,
    ):
        """text_encoder(prompts) -> [B, n, text_dim] and vae.decode(latents [B, F, C, h, w]) are optional.

        cache_policy says what a block may look at (wan/modules/cache_policies.py). Without one it is the
        window that the model's local_attn_size and sink_size describe, or the whole past.
        """
        self.model, self.text_encoder, self.vae = model, text_encoder, vae
        self.num_frame_per_block, self.independent_first_frame = num_frame_per_block, independent_first_frame
        schedule = FlowSchedule(timestep_shift)
        steps = (
            schedule.warp(denoising_step_list)
            if warp_denoising_step
            else torch.as_tensor(denoising_step_list).float()
        )
        self.timesteps = steps.tolist()
        self.sigmas = schedule.sigma(steps).tolist()
        self.clean_timestep = float(context_noise)
        check_window(model.local_attn_size, model.sink_size, num_frame_per_block)
        self.cache_policy = cache_policy or of_window(model.local_attn_size, model.sink_size)
        self.cache_policy.check([num_frame_per_block, *([1] if independent_first_frame else [])])

    @property
    def pass_timesteps(self) -> list[float]:
        """Timestep of every pass of a block, the clean pass last."""
        return [*self.timesteps, self.clean_timestep]

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
        prompt_schedule: Sequence[PromptSwitch] = (),
        probe: Callable[[int, Callable[..., Tensor]], None] | None = None,
    ):
        """Generate as many frames as noise [B, F, C, h, w] has -> video or None, latents [B, G + F, C, h, w].

        Without return_latents the video alone. renoise [steps - 1, B, F, C, h, w] replaces the fresh noise
        between steps, else generator draws it. initial_latent [B, G, C, h, w] is a given beginning, and must
        fill whole blocks. on_pass is called after each forward, on_block with the block and its latents when
        it is finished. probe is called before each generated block with its number and a function that
        denoises it, from other noise [B, n, C, h, w] where that is given -> x0, as often as wanted, without
        a trace in the rollout.
        """
        given, blocks = self._blocks(noise, initial_latent)
        check_schedule(prompt_schedule, blocks, self.cache_policy)
        self._check_probe(probe, renoise)
        switches = {switch.frame: switch for switch in prompt_schedule}
        if prompt_embeds is None:
            prompt_embeds = self._encode(text_prompts, noise.shape[0])
        ATTENTION_WEIGHT_CAPTURE.check_model(
            self.model.config.num_layers, len(blocks), len(self.pass_timesteps)
        )
        if ACTIVE_EDITS.active:
            ACTIVE_EDITS.check(self.plan(noise.shape[1], given))

        latents = torch.cat([noise.new_empty(noise.shape[0], given, *noise.shape[2:]), noise], 1)
        batch, num_frames, _, height, width = latents.shape
        kv_cache = self.model.new_kv_cache(
            batch, num_frames, height, width, self.cache_policy, self.num_frame_per_block
        )
        text = self.model.text_keys_values(prompt_embeds)

        def predict_flow(x: Tensor, at: Pass) -> Tensor:
            timestep = x.new_full((), at.timestep, dtype=torch.float32)
            kv_cache.begin_pass(at.is_clean_pass)
            with ATTENTION_WEIGHT_CAPTURE.during(at):
                flow = self.model(x, timestep, text, kv_cache)
            if on_pass:
                on_pass()
            return flow

        def fresh_noise(step: int, frames: range) -> Tensor:
            if renoise is not None:
                return renoise[step][:, frames.start - given : frames.stop - given]
            shape = (latents.shape[0], len(frames), *latents.shape[2:])
            return torch.randn(shape, generator=generator, dtype=latents.dtype, device=latents.device)

        def denoise(block: int, frames: range, x: Tensor | None = None) -> Tensor:
            x = latents[:, frames.start : frames.stop] if x is None else x
            for step, sigma in enumerate(self.sigmas):
                x0 = flow_to_x0(predict_flow(x, self._pass(block, frames, step)), x, sigma)
                if step + 1 < len(self.timesteps):
                    x = add_noise(x0, fresh_noise(step, frames), self.sigmas[step + 1])
            return x0

        for block, frames in enumerate(blocks):
            now = slice(frames.start, frames.stop)

            # 0. Switch to the next prompt, make room for the block.
            switch = switches.get(frames.start)
            if switch:
                text = self.model.text_keys_values(self._embeds(switch, noise.shape[0]))
                again = self._recall(kv_cache, switch, text)
                if again:
                    past = slice(again.start, again.stop)
                    predict_flow(latents[:, past], self._pass(block, again, RECACHE))
            kv_cache.advance(frames, text, cut=switch is not None and switch.how == "cut")

            # 1. Denoise: predict the clean block, then go back to the next, lower noise level.
            if probe and frames.start >= given:
                probe(block, partial(denoise, block, frames))
            if initial_latent is not None and frames.start < given:
                latents[:, now] = initial_latent[:, now]
            else:
                latents[:, now] = denoise(block, frames)

            # 2. Remember: the clean pass overwrites this block's keys and values.
            predict_flow(latents[:, now], self._pass(block, frames, len(self.timesteps)))
            if on_block:
                on_block(block, latents[:, now])

        video = None if self.vae is None else self.vae.decode(latents)
        return (video, latents) if return_latents else video

    def plan(self, num_frames: int, given: int = 0) -> RolloutPlan:
        """What a rollout of num_frames frames after given ones is going to do."""
        config, policy = self.model.config, self.cache_policy
        if policy.name == "per_head" and ACTIVE_EDITS.active:
            raise ConfigError("edits do not know cache_policy per_head; edit a rollout under another policy")
        sizes = block_sizes(given + num_frames, self.num_frame_per_block, self.independent_first_frame)
        whole_frames = policy.name in ("window", "relative", "deep_sink")  # of others: all that may be there
        window = getattr(policy, "window", -1) if whole_frames else -1
        blocks = blocks_of_window(sizes, window, getattr(policy, "sink", 0), given)
        return RolloutPlan(config.num_layers, config.num_heads, len(self.timesteps), blocks, config.text_len)

    def _check_probe(self, probe: object, renoise: Tensor | None) -> None:
        """A block can be denoised twice where its noise is given and its passes leave the past as it is."""
        if probe is None:
            return
        if renoise is None:
            raise ConfigError("a probe needs renoise: fresh noise would change the rollout")
        if self.cache_policy.chooses_by_layer or self.cache_policy.source:
            raise ConfigError(
                f"a probe denoises blocks again, and cache_policy {self.cache_policy.name} changes its cache "
                "in a block's first pass; take full or window"
            )

    def _pass(self, block: int, frames: range, step: int) -> Pass:
        """What the forward of a block's step announces; after the denoising steps comes the clean pass."""
        return Pass(
            query_frames=tuple(frames),
            block=block,
            step=step,
            timestep=self.pass_timesteps[step],  # step -1 has that of the clean pass
            is_clean_pass=step in (len(self.timesteps), RECACHE),
        )

    @staticmethod
    def _recall(kv_cache: KVCache | PerHeadCache, switch: PromptSwitch, text: TextKeysValues) -> range | None:
        """What a switch does to the cache; the frames whose keys are to be computed again, if any."""
        if switch.how in ("flush", "cut"):
            kv_cache.flush()
        if switch.how != "recache":
            return None
        seen = kv_cache.policy.num_frames or switch.frame
        frames = range(max(0, switch.frame - seen), switch.frame)
        kv_cache.recache(frames, text)
        return frames

    def _embeds(self, switch: PromptSwitch, batch: int) -> Tensor:
        if switch.prompt_embeds is not None:
            return switch.prompt_embeds
        return self._encode(None if switch.prompt is None else [switch.prompt] * batch, batch)

    def _blocks(self, noise: Tensor, initial_latent: Tensor | None) -> tuple[int, list[range]]:
        """How many frames are given, and the frames of every block, given and generated."""
        if noise.ndim != 5:
            raise ConfigError(f"noise of shape {tuple(noise.shape)} is not [B, F, C, h, w]")
        given = 0 if initial_latent is None else initial_latent.shape[1]
        sizes = block_sizes(given + noise.shape[1], self.num_frame_per_block, self.independent_first_frame)
        blocks = block_ranges(sizes)
        ends = [0, *(frames.stop for frames in blocks)]
        if given not in ends:
            raise ConfigError(
                f"initial_latent of {given} frames does not fill whole blocks {sizes}; "
                f"it may have {ends[:-1]} frames"
            )
        if initial_latent is not None and given and initial_latent[:, 0].shape != noise[:, 0].shape:
            raise ConfigError(
                f"initial_latent {tuple(initial_latent.shape)} and noise {tuple(noise.shape)} "
                "differ in more than their frames"
            )
        return given, blocks

    def _encode(self, text_prompts: Sequence[str] | None, batch: int) -> Tensor:
        if text_prompts is None or self.text_encoder is None:
            raise ConfigError("give prompt_embeds, or text_prompts and a text_encoder")
        if len(text_prompts) != batch:
            raise ConfigError(f"{len(text_prompts)} prompts for noise of batch {batch}")
        return self.text_encoder(text_prompts)
