"""From a config to a rollout: load the model, generate one video, keep what was asked for.

The scripts are faces of this file and of arrange.py, which turns the result into a cache.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from experiments import frames, guards
from experiments.files import replacing
from experiments.formats import READ_BY, SCHEMA_VERSION
from experiments.guards import RunError
from experiments.memory import Memory, check_memory
from experiments.progress import Watch
from experiments.prompts import encode_prompts, needs_encoder
from experiments.provenance import provenance
from experiments.rollout import out_of_memory, roll_out
from experiments.sizes import check_requests
from wan import checkpoint
from wan.config import ConfigError, ModelConfig, RunConfig
from wan.modules.capture import CaptureRequest
from wan.modules.causal_model import CausalWanModel
from wan.pipeline import CausalInferencePipeline

DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Extraction:
    """One rollout, finished or stopped: what was captured, what was generated, and the fields that every cache carries."""

    config: RunConfig
    num_layers: int
    records: list[dict]
    latents: Tensor  # [1, F, C, h, w]; fewer frames where the run was stopped
    pass_timesteps: list[float]  # of a block's passes, the clean pass last
    prompt_tokens: list[str]  # text of each prompt token, without padding
    common: dict[str, Any]
    stopped: str = ""  # where, of a run that was stopped: "3 of 7 blocks"

    @property
    def last_block(self) -> list[int]:
        """Frames of the last finished block."""
        return frames.block_frames(self.config.block_sizes, self.blocks_done - 1)

    @property
    def blocks_done(self) -> int:
        return self.common.get("blocks_done", len(self.config.block_sizes))

    def pass_fields(self, step: int) -> dict[str, Any]:
        last = len(self.pass_timesteps) - 1
        return {"step": step, "timestep": self.pass_timesteps[step], "is_clean_pass": step == last}

    def kept(self, name: str, layer: int, step: int) -> list[dict]:
        """The captured calls of one layer and pass that hold a quantity, in block order."""
        found = [r for r in self.records if name in r and (r["layer"], r["step"]) == (layer, step)]
        if not found:
            raise RunError(f"layer {layer}, step {step}: no {name} was captured")
        return found

    def frame_matrix(self, name: str, layer: int, step: int) -> Tensor:
        """frame_logits or frame_mass of all blocks as one matrix [H, F, F], NaN where nothing was attended.

        Where tokens were captured, they are reduced to it.
        """
        if any("attn_weights" in r for r in self.records):
            S = self.common["frame_seq_length"]
            pieces = [
                (r["query_frames"], r["key_frames"], frames.frame_means(r["attn_weights"][0], S))
                for r in self.kept("attn_weights", layer, step)
            ]
        else:
            pieces = [(r["query_frames"], r["key_frames"], r[name][0]) for r in self.kept(name, layer, step)]
        return frames.assemble(pieces, self.config.num_frames)


@dataclass(frozen=True)
class Prepared:
    """What rollouts of one config share: the model, loaded once, the states of every prompt, and the caches' fields."""

    model_config: ModelConfig
    pipeline: CausalInferencePipeline
    texts: dict[str, tuple[Tensor, list[str]]]  # prompt -> states [1, text_len, text_dim], tokens
    common: dict[str, Any]
    sha256: Future  # of the weights file: hashed while models load and the video is made
    device: torch.device
    dtype: torch.dtype


def extract(config: RunConfig, requests: Sequence[CaptureRequest], watch: Watch | None = None) -> Extraction:
    """Generate one video as the config says and capture on the way; fewer blocks of it where the watch asks to stop.

    Raises ConfigError for bad input, before anything large is loaded, and RunError where a result cannot be right.
    """
    watch = watch or Watch()
    return extract_next(prepare(config, requests, watch=watch), config, requests, watch)


def prepare(
    config: RunConfig,
    requests: Sequence[CaptureRequest],
    prompts: Sequence[str] | None = None,
    watch: Watch | None = None,
) -> Prepared:
    """Load what rollouts of the config need, for its own prompt or for several. Raises ConfigError for bad input.

    What that takes is said before anything is loaded, and refused where it does not fit.
    """
    prompts = prompts or [config.prompt]
    device = choose_device(config.device, config.offload)
    dtype = choose_dtype(config.dtype, device)
    model_config = checkpoint.read_model_config(config.ckpt_dir)
    guards.check_model(config, model_config)
    weights_file = checkpoint.weights_file(config.ckpt_dir, config.checkpoint_path)
    check_requests(config, model_config, requests)
    encodes = needs_encoder(config, prompts, model_config, dtype, device)
    memory = Memory(config, model_config, requests, dtype, device, encodes)
    check_memory(memory, quiet=watch is None or watch.quiet)
    common = common_fields(config, model_config, weights_file, dtype, device)
    sha256 = begin(checkpoint.file_sha256, weights_file)
    with out_of_memory("encoding the prompt"):
        texts = encode_prompts(config, prompts, model_config, dtype, device)
    with out_of_memory("loading the model"):
        pipeline = load_pipeline(config, model_config, dtype, device)
    return Prepared(model_config, pipeline, texts, common, sha256, device, dtype)


def extract_next(
    ready: Prepared, config: RunConfig, requests: Sequence[CaptureRequest], watch: Watch | None = None
) -> Extraction:
    """extract() with what is loaded already; config may differ in prompt and seed from the one it was loaded for."""
    watch = watch or Watch()
    prompt_embeds, prompt_tokens = ready.texts[config.prompt]
    noise, renoise = draw_noise(config, ready.model_config, ready.dtype, ready.device)
    watch.event("rollout", prompt=config.prompt, seed=config.seed)
    with threads_for(noise, ready.model_config):
        latents, records = roll_out(
            ready.pipeline, noise, renoise, prompt_embeds, config.block_sizes, requests, watch
        )
    common, stopped = (
        ready.common
        | {"prompt": config.prompt, "seed": config.seed, "weights_sha256": ready.sha256.result()},
        "",
    )
    if latents.shape[1] < config.num_frames:
        ends = [sum(config.block_sizes[:n]) for n in range(len(config.block_sizes))]
        common |= {"partial": True, "blocks_done": ends.index(latents.shape[1])}
        stopped = f"{common['blocks_done']} of {len(config.block_sizes)} blocks"
    return Extraction(
        config,
        ready.model_config.num_layers,
        records,
        latents,
        ready.pipeline.pass_timesteps,
        prompt_tokens,
        common,
        stopped,
    )


def begin(function: Callable, *args) -> Future:
    """The result of a function that runs beside this one; nobody waits for it when the process ends."""
    future: Future = Future()

    def work() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # whoever asks for the result gets it
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future


def common_fields(
    config: RunConfig, model_config: ModelConfig, weights_file: Path, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """The fields that every cache of a run carries, weights_sha256 excepted: that takes as long as reading the file."""
    return {
        "schema_version": SCHEMA_VERSION,
        "read_by": READ_BY,
        "prompt": config.prompt,
        "seed": config.seed,
        "num_frames": config.num_frames,
        "num_frame_per_block": config.num_frame_per_block,
        "block_sizes": config.block_sizes,
        "frame_seq_length": model_config.tokens_per_frame(config.height, config.width),
        "num_heads": model_config.num_heads,
        "model": config.model,
        "weights": "checkpoint" if config.checkpoint_path else "base",
        "weights_file": weights_file.name,
    } | provenance(config, weights_file, dtype, device)


def choose_device(name: str, offload: bool = False) -> torch.device:
    """auto, cpu, cuda or cuda:N -> a device that is there, and that layers can be streamed to where that is wanted."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name} was asked for, but {torch.cuda.device_count()} CUDA devices are there; "
            "use --device cpu"
        )
    if offload and device.type != "cuda":
        raise ConfigError(
            f"--offload keeps weights on the host for a GPU, and the device is {device}; leave it out"
        )
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto is bfloat16 on a GPU and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES[1:]:
        raise ConfigError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return getattr(torch, name)


@contextmanager
def threads_for(noise: Tensor, model_config: ModelConfig) -> Iterator[None]:
    """One CPU thread for the rollout of a small model, as many as there are for a large one.

    Threads that wait for each other at every small operation gain a fifth on an idle machine and made the miniature's
    rollout 80 times slower on a busy one.
    """
    small = noise.device.type == "cpu" and noise[0].numel() * model_config.dim < 1 << 24
    with frames.one_thread() if small else nullcontext():
        yield


def load_pipeline(
    config: RunConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> CausalInferencePipeline:
    """The causal pipeline with the checkpoint's weights, or the base weights where the config names no checkpoint."""
    if config.checkpoint_path:
        state = checkpoint.read_self_forcing_state(config.checkpoint_path, config.use_ema)
    else:
        state = checkpoint.read_transformer_state(config.ckpt_dir)
    source = config.checkpoint_path or config.ckpt_dir
    model = checkpoint.build_model(
        CausalWanModel,
        model_config,
        state,
        source,
        dtype,
        device,
        config.offload,
        local_attn_size=config.local_attn_size,
        sink_size=config.sink_size,
    )
    return CausalInferencePipeline(
        model,
        config.num_frame_per_block,
        config.independent_first_frame,
        config.denoising_step_list,
        config.warp_denoising_step,
        config.timestep_shift,
        config.context_noise,
    )


def draw_noise(
    config: RunConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """First noise [1, F, C, h, w] and re-noising [steps - 1, 1, F, C, h, w]; drawn on the CPU, the same on every device."""
    generator = torch.Generator().manual_seed(config.seed)
    shape = (1, config.num_frames, model_config.in_dim, config.height, config.width)
    noise = torch.randn(shape, generator=generator)
    renoise = torch.randn(len(config.denoising_step_list) - 1, *shape, generator=generator)
    return noise.to(device, dtype), renoise.to(device, dtype)


def save_video(extraction: Extraction, path: str | Path) -> None:
    """Decode the latents and write an mp4 of 16 frames a second, whole or not at all; small ones are enlarged."""
    import imageio.v3 as iio  # ffmpeg is needed only here

    from wan.modules.vae import VAE

    vae = VAE.from_pretrained(extraction.config.ckpt_dir, device=extraction.latents.device)
    video = vae.decode(extraction.latents)[0].permute(0, 2, 3, 1)  # [frames, H, W, 3]
    pixels = (video * 255).round().byte().cpu()
    enlarge = -(-256 // min(pixels.shape[1:3]))
    pixels = pixels.repeat_interleave(enlarge, 1).repeat_interleave(enlarge, 2)
    content = iio.imwrite(
        "<bytes>", pixels.numpy(), extension=".mp4", fps=16, codec="libx264", macro_block_size=8
    )
    with replacing(path) as file:
        file.write(content)
