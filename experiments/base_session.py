"""The base model as a session: all frames of a video at once, in many steps, with guidance; its caches."""

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments import runs, session
from experiments.caches.files import StoppedError, located
from experiments.configs import CONFIGS, HOME, config_for, with_paths
from experiments.extraction.cache_builders import base_atlas_cache, base_layer_cache
from experiments.memory import out_of_memory
from experiments.progress import Progress
from experiments.provenance import threads_for
from experiments.running.run import PlannedCache, make_caches
from wan import capture, checkpoint, errors, interventions, sites
from wan.blocks import VIDEO_FRAMES_PER_LATENT
from wan.config import RunConfig, as_one_block, load_config
from wan.identity import LiveWeights
from wan.model import WanModel
from wan.noise import draw_noise
from wan.text2video import TextToVideoPipeline


class BaseSession(session.Session):
    """The base model, which samples all frames at once with guidance: a config of as_one_block().

    >>> session = BaseSession(as_one_block(load("wan_mini").config))
    >>> run = session.generate("a red circle moving right", requests=[CaptureRequest(steps=[0])])

    A call of each of guidance's two branches is captured: call["branch"] is "cond" or "uncond".
    """

    bidirectional = True

    def generate(self, *given: Any, config: RunConfig | None = None, **more: Any) -> Any:
        # Before anything is loaded: means and runs in step are made by causal rollouts alone.
        sites.require_no_data(interventions.config_edits(config or self.config), "runs of the base model")
        return super().generate(*given, config=config, **more)

    def prompts_of(self, config: RunConfig) -> list[str]:
        return [config.prompt, config.base.negative_prompt]

    def common(
        self,
        config: RunConfig,
        edits: Sequence[Any] = (),
        live: LiveWeights | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        return super().common(config, edits, live=live, base=asdict(config.base), **more)

    def load_pipeline(self, config: RunConfig) -> TextToVideoPipeline:
        """Load the base weights of ckpt_dir."""
        state, base = checkpoint.read_transformer_state(config.ckpt_dir), config.base
        model = session.build_model(WanModel, config, self.model_config, state, self.dtype, self.device)
        return TextToVideoPipeline(model, base.shift, base.guidance_scale, base.num_steps)

    def edited(self, config: RunConfig, batch: int = 1) -> AbstractContextManager[Any]:
        edits = interventions.config_edits(config)
        if not edits:
            return nullcontext()
        return interventions.intervene(*edits)

    def _roll_out(self, batch: session.Batch) -> list[runs.Run]:
        config, base, observer = batch.configs[0], batch.configs[0].base, batch.observer
        if batch.first_frames is not None or config.first_frames:
            raise errors.ConfigError("the base model makes all frames at once; leave first_frames out")
        if len(batch) > 1:
            raise errors.ConfigError(f"the base model makes one video at a time, not {len(batch)} together")
        (prompt, words), (negative, _) = (self.texts[text] for text in self.prompts_of(config))
        # The sampler works in float32, whatever the weights' dtype; released noise is the causal rollout's.
        noise, _ = draw_noise(replace(config, noise="seeded"), self.model_config, torch.float32, self.device)
        if observer.video is not None:
            observer.video.ready()
        observer.log("rollout", prompt=config.prompt, seed=config.seed)
        with (
            interventions.counted_edits() as touched,
            threads_for(noise, self.model_config),
            self.edited(config),
            batch.watching,
        ):
            edits = sites.active_edits()  # also those of one's own intervene() around this
            files = self.files_now(config, edits)
            texts = (prompt, negative)
            latents, calls, done = sample(self.pipeline, texts, noise, batch.requests, observer)
        if len(touched.keys() - edits):  # contexts that were opened while it ran
            edits = runs.all_edits(edits, touched)
            files = self.files_now(config, edits)
        common = self.common(config, edits, files=files) | {  # how it was sampled
            "orig_num_frames": base.num_video_frames,
            "vae_stride_t": VIDEO_FRAMES_PER_LATENT,
            "guidance_scale": base.guidance_scale,
            "timestep_shift": base.shift,
            "num_steps": base.num_steps,
            "negative_prompt": base.negative_prompt,
            "config": {"height": config.height, "width": config.width},  # others are the causal rollout's
        }
        runs.note_calls(common, edits, touched)
        # A stopped run keeps the steps that it reached, and its cache says which are absent.
        stopped = ""
        if done < base.num_steps:
            stopped = f"{done} of {base.num_steps} steps"
        requested = {step for request in batch.requests for step in request.steps or ()}
        absent = [str(step) for step in sorted(requested) if step >= done]
        if absent:
            note = f"partial: the run was stopped after {stopped}; of what was asked for, steps "
            common |= {"partial": True, "notes": [f"{note}{', '.join(absent)} are absent"]}
        run = runs.Run(
            config=config,
            num_layers=self.model_config.num_layers,
            records=calls,
            latents=latents,
            pass_timesteps=self.pipeline.pass_timesteps,
            prompt_tokens=words,
            common=common,
            stopped=stopped,
            bidirectional=True,
            preview=self.preview,
        )
        return [run]


def sample(
    pipeline: TextToVideoPipeline,
    texts: tuple[Tensor, Tensor],
    noise: Tensor,
    requests: Sequence[capture.CaptureRequest],
    observer: Progress,
) -> tuple[Tensor, list[capture.CapturedCall], int]:
    """Run the base model's steps -> latents [1, F, C, h, w], captured calls, the number of steps done.

    texts are those of guidance's two branches. Stops and raises as roll_out does.
    """
    timesteps, latest = pipeline.pass_timesteps, noise
    done = checked = 0

    def on_step(step: int, latents: Tensor) -> None:
        nonlocal latest, done, checked
        capture.move_to_cpu(records[checked:])
        session.check_numbers(pipeline.model, latents, f"step {step}", records[checked:])
        latest, done, checked = latents, step + 1, len(records)
        observer.advance("step", step, len(timesteps), f"t = {timesteps[step]:g}")
        if observer.stopping and done < len(timesteps):
            raise StoppedError

    phase = out_of_memory(lambda: f"sampling step {done} of {len(timesteps)}", requests)
    with phase, runs.capturing(requests) as records, suppress(StoppedError):
        pipeline.inference(noise, *texts, on_step=on_step)
    return latest, records, done


# --- The command extract_attention_wan.py: from flags to caches
RUN_FLAGS = ("ckpt_dir", "prompt", "seed", "device", "dtype", "offload", "t5_cpu")
SAMPLING_FLAGS = ("num_frames", "guidance_scale", "shift", "num_steps", "negative_prompt")


def choose_steps(config: RunConfig, names: Sequence[str]) -> list[int]:
    """first, last, all or numbers -> increasing steps of the sampler."""
    last = config.base.num_steps - 1
    known = {str(step): [step] for step in range(last + 1)}
    known |= {"first": [0], "last": [last], "all": [*range(last + 1)]}
    for name in names:
        errors.require_known(name, known, f"step {{}} is not first, last, all or in 0..{last}")
    return sorted({step for name in names for step in known[name]})


def extract(args: argparse.Namespace) -> None:
    """Sample a video, and write a layer's cache or an atlas of each branch of guidance."""
    # 1. Settings: those of the model's sizes, unless a config is named; flags override them
    if args.config_path:
        path = args.config_path
    elif args.ckpt_dir:
        path = located(config_for(located(args.ckpt_dir), HOME))
    else:
        path = located(CONFIGS[0])
    if args.gpu_id is not None:
        args.device = f"cuda:{args.gpu_id}"
    config = load_config(path, {name: getattr(args, name) for name in RUN_FLAGS})
    config = with_paths(config, located)
    if config.loras:
        raise errors.ConfigError(
            f"{path} names a LoRA, {config.loras[0].path}, and runs of the base model have none; give a "
            "config without lora_path and lora"
        )
    given = {name: getattr(args, name) for name in SAMPLING_FLAGS if getattr(args, name) is not None}
    if "num_frames" in given:
        given["num_video_frames"] = given.pop("num_frames")
    # All frames are one block, which attends to itself
    config = as_one_block(replace(config, base=replace(config.base, **given)))
    # 2. One cache of a layer, or an atlas for each branch of guidance
    steps, outputs = choose_steps(config, args.step), dict[str, PlannedCache]()
    folder = Path(args.output_dir)
    if args.all_layers:
        layers = None
        for branch, name in (("cond", "atlas_base.pt"), ("uncond", "atlas_base_uncond.pt")):
            build = partial(base_atlas_cache, steps=steps, branch=branch)
            outputs[str(folder / name)] = PlannedCache("atlas", build)
    else:
        if len(steps) > 1:
            raise errors.ConfigError(
                f"a layer cache holds one step, not {len(steps)}; give one, or --all_layers"
            )
        last = checkpoint.read_model_config(config.ckpt_dir).num_layers - 1
        layer = min(config.base.layer_index, last) if args.layer_index is None else args.layer_index
        layers = [layer]
        build = partial(base_layer_cache, layer=layer, step=steps[0])
        path = str(folder / f"layer{layer}.pt")
        outputs[path] = PlannedCache("layer", build, layers, guided=True)
    request = capture.CaptureRequest(layers=layers, steps=steps, granularity="frame", mass=args.all_layers)
    make_caches(args, config, [request], outputs, BaseSession)
