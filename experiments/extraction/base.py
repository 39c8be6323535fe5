"""From a config to a cache of the base model: sample all frames at once, keep attention of some steps.

The two branches of guidance, with the prompt and without, stay apart: a layer cache holds both, atlases are
one each.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch

from experiments.caches.files import RunError
from experiments.caches.formats import PassTag, build_layer_cache
from experiments.extraction import rollout
from experiments.extraction.cache_builders import Extraction
from experiments.extraction.causal import draw_noise, prepare
from experiments.extraction.devices import threads_for
from experiments.extraction.provenance import fingerprint
from experiments.extraction.rollout import RunObserver
from wan import checkpoint
from wan.blocks import VIDEO_FRAMES_PER_LATENT, latent_frames
from wan.capture import CaptureRequest
from wan.config import ModelConfig, RunConfig
from wan.errors import ConfigError, short_repr
from wan.interventions import active_edits, edits_of, intervene, record_of
from wan.model import WanModel
from wan.text2video import TextToVideoPipeline

BRANCHES = ("cond", "uncond")  # of guidance
LAST_FRAMES = 3  # query frames of last_block_frame_attention: as many as the last block of a causal rollout


def as_one_block(config: RunConfig) -> RunConfig:
    """Return the settings of a bidirectional run: base weights, base.num_video_frames as one block."""
    frames = latent_frames(config.base.num_video_frames)
    one: dict[str, Any] = {"num_frames": frames, "num_frame_per_block": frames, "local_attn_size": -1}
    one |= {"sink_size": 0, "independent_first_frame": False}
    one |= dict.fromkeys(("checkpoint_path", "lora_path", "lora_rank", "lora_alpha", "cache_policy"))
    return replace(config, **one)


def choose_layer(config: RunConfig, layer: int | None) -> int:
    """Return the layer asked for, else the config's, or the last one where the model has fewer."""
    last = checkpoint.read_model_config(config.ckpt_dir).num_layers - 1
    if layer is not None and not 0 <= layer <= last:
        raise ConfigError(f"layer {layer} is not in 0..{last}")
    return min(config.base.layer_index, last) if layer is None else layer


def choose_steps(config: RunConfig, names: Sequence[str]) -> list[int]:
    """first, last, all or numbers -> increasing steps of the sampler."""
    last = config.base.num_steps - 1
    known = {str(step): [step] for step in range(last + 1)}
    known |= {"first": [0], "last": [last], "all": [*range(last + 1)]}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"step {short_repr(unknown[0])} is not first, last, all or in 0..{last}")
    return sorted({step for name in names for step in known[name]})


def load_pipeline(
    config: RunConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> TextToVideoPipeline:
    """Load the base weights of ckpt_dir."""
    state, base = checkpoint.read_transformer_state(config.ckpt_dir), config.base
    given = model_config, state, config.ckpt_dir, dtype, device, config.offload
    model = checkpoint.build_model(WanModel, *given)
    return TextToVideoPipeline(model, base.shift, base.guidance_scale, base.num_steps)


def sample(
    config: RunConfig, request: CaptureRequest, observer: RunObserver, decodes: str = ""
) -> Extraction:
    """Generate one video with the base weights (see as_one_block), and capture both branches of guidance.

    Raises ConfigError for bad input, before anything large is loaded, and RunError for wrong numbers.
    """
    edits = edits_of(config.interventions, "config")
    if needy := next((edit for edit in edits if edit.needs), None):
        raise ConfigError(f"runs of the base model cannot make this edit, which needs {needy.needs}: {needy}")
    base, prompts = config.base, [config.prompt, config.base.negative_prompt]
    loaded = prepare(config, [request], prompts, observer, load_base=load_pipeline, decodes=decodes)
    pipeline: Any = loaded.pipeline
    (prompt, words), (negative, _) = (loaded.texts[text] for text in prompts)
    noise, _ = draw_noise(replace(config, noise="seeded"), loaded.model_config, torch.float32, loaded.device)
    if observer.video is not None:
        observer.video.ready()
    observer.log("rollout", prompt=config.prompt, seed=config.seed)
    with threads_for(noise, loaded.model_config), intervene(*edits) if edits else nullcontext():
        edits = active_edits()  # also those of one's own intervene() around this
        latents, calls, done = rollout.sample(pipeline, (prompt, negative), noise, [request], observer)
    common = loaded.common | {  # how it was sampled; the causal rollout's settings do not apply
        "orig_num_frames": base.num_video_frames,
        "vae_stride_t": VIDEO_FRAMES_PER_LATENT,
        "guidance_scale": base.guidance_scale,
        "timestep_shift": base.shift,
        "num_steps": base.num_steps,
        "negative_prompt": base.negative_prompt,
        "config": {"height": config.height, "width": config.width},
        "weights_sha256": loaded.sha256.result(),
        "fingerprint": fingerprint(loaded.identity(config, edits, base=asdict(base))),
        **({"interventions": record_of(edits)} if edits else {}),
    }
    stopped = f"{done} of {base.num_steps} steps" if done < base.num_steps else ""
    if absent := [str(step) for step in request.steps or () if step >= done]:
        note = f"partial: the run was stopped after {stopped}; of what was asked for, steps "
        common |= {"partial": True, "notes": [f"{note}{', '.join(absent)} are absent"]}
    layers, timesteps = loaded.model_config.num_layers, pipeline.pass_timesteps
    return Extraction(config, layers, calls, latents, timesteps, words, common, stopped)


def base_layer_cache(run: Extraction, layer: int, step: int) -> dict[str, Any]:
    """Return mean logits of every frame pair of one layer at one step, with the prompt and without."""
    cond, uncond = (of_branch(run, name).frame_matrix("frame_logits", layer, step) for name in BRANCHES)
    last = list(range(run.config.num_frames))[-LAST_FRAMES:]
    at = PassTag(step, run.pass_timesteps[step], False)
    return build_layer_cache(run.common, at, layer, cond, last, uncond=uncond)


def of_branch(run: Extraction, branch: str) -> Extraction:
    """Return the run as if only one branch of guidance had been captured."""
    return replace(run, records=[call for call in run.records if call["branch"] == branch])


def base_atlas_cache(run: Extraction, steps: Sequence[int], branch: str) -> dict[str, Any]:
    """Return mean logits and mass of every layer at the steps that were reached, of one branch."""
    layers, reached = list(range(run.num_layers)), {call["step"] for call in run.records}
    if not (steps := [step for step in steps if step in reached]):
        raise RunError(f"none of the steps was reached for {branch}")
    mine, names = of_branch(run, branch), ("frame_logits", "frame_mass")
    own: dict[str, Any] = {
        "format": "atlas",
        "is_logits": True,
        "branch": branch,
        "layers": layers,
        "pass_steps": steps,
        "pass_timesteps": [run.pass_timesteps[step] for step in steps],
        "pass_is_clean": [False] * len(steps),
    }
    return run.common | {name: mine.frame_matrices(name, layers, steps) for name in names} | own
