"""The base model as a session: all frames of a video at once, in many steps, with guidance."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch

from experiments.extraction.cache_builders import Run
from experiments.extraction.provenance import threads_for
from experiments.extraction.rollout import Progress, sample
from experiments.session import Session, build_model
from wan import checkpoint
from wan.blocks import VIDEO_FRAMES_PER_LATENT
from wan.capture import CaptureRequest
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.interventions import active_edits, edits_of, intervene
from wan.model import WanModel
from wan.noise import draw_noise
from wan.text2video import TextToVideoPipeline


class BaseSession(Session):
    """The base model, which samples all frames at once with guidance: a config of as_one_block().

    >>> session = BaseSession(as_one_block(load("wan_mini").config))
    >>> run = session.generate("a red circle moving right", requests=[CaptureRequest(steps=[0])])

    A call of each of guidance's two branches is captured: call["branch"] is "cond" or "uncond".
    """

    bidirectional = True

    def generate(self, *given: Any, config: RunConfig | None = None, **more: Any) -> Any:
        # Before anything is loaded: means and runs in step are made by causal rollouts alone.
        edits = edits_of((config or self.config).interventions, "config")
        if needy := next((edit for edit in edits if edit.needs), None):
            raise ConfigError(
                f"runs of the base model cannot make this edit, which needs {needy.needs}: {needy}"
            )
        return super().generate(*given, config=config, **more)

    def prompts_of(self, config: RunConfig) -> list[str]:
        return [config.prompt, config.base.negative_prompt]

    def _load_pipeline(self, config: RunConfig) -> TextToVideoPipeline:
        """Load the base weights of ckpt_dir."""
        state, base = checkpoint.read_transformer_state(config.ckpt_dir), config.base
        model = build_model(WanModel, config, self.model_config, state, self.dtype, self.device)
        return TextToVideoPipeline(model, base.shift, base.guidance_scale, base.num_steps)

    def _roll_out(
        self, configs: Sequence[RunConfig], requests: Sequence[CaptureRequest], observer: Progress
    ) -> list[Run]:
        config, base = configs[0], configs[0].base
        edits = edits_of(config.interventions, "config")
        (prompt, words), (negative, _) = (self.texts[text] for text in self.prompts_of(config))
        # The sampler works in float32, whatever the weights' dtype; released noise is the causal rollout's.
        noise, _ = draw_noise(replace(config, noise="seeded"), self.model_config, torch.float32, self.device)
        if observer.video is not None:
            observer.video.ready()
        observer.log("rollout", prompt=config.prompt, seed=config.seed)
        with threads_for(noise, self.model_config), intervene(*edits) if edits else nullcontext():
            edits = active_edits()  # also those of one's own intervene() around this
            latents, calls, done = sample(self.pipeline, (prompt, negative), noise, requests, observer)
        common = self.common(config, edits, base=asdict(base)) | {  # how it was sampled
            "orig_num_frames": base.num_video_frames,
            "vae_stride_t": VIDEO_FRAMES_PER_LATENT,
            "guidance_scale": base.guidance_scale,
            "timestep_shift": base.shift,
            "num_steps": base.num_steps,
            "negative_prompt": base.negative_prompt,
            "config": {"height": config.height, "width": config.width},  # others are the causal rollout's
        }
        # A stopped run keeps the steps that it reached, and its cache says which are absent.
        stopped = f"{done} of {base.num_steps} steps" if done < base.num_steps else ""
        asked = {step for request in requests for step in request.steps or ()}
        if absent := [str(step) for step in sorted(asked) if step >= done]:
            note = f"partial: the run was stopped after {stopped}; of what was asked for, steps "
            common |= {"partial": True, "notes": [f"{note}{', '.join(absent)} are absent"]}
        timesteps, layers = self.pipeline.pass_timesteps, self.model_config.num_layers
        return [Run(config, layers, calls, latents, timesteps, words, common, stopped, self.preview)]
