"""From a config to a rollout: load the model, generate one video, keep what was asked for.

The scripts are faces of this file and of cache_builders.py, which turns the result into a cache.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from experiments.caches.formats import READ_BY
from experiments.extraction import checks
from experiments.extraction.devices import choose_device, choose_dtype, threads_for
from experiments.extraction.edits import edited, edits_of, record_of
from experiments.extraction.memory import Memory, check_memory, check_requests
from experiments.extraction.observer import RunObserver
from experiments.extraction.prompt_embeds import (
    PromptStates,
    PromptTexts,
    encode_prompts,
    encoding_device,
    needs_encoder,
)
from experiments.extraction.provenance import provenance
from experiments.extraction.result import Extraction
from experiments.extraction.rollout import out_of_memory, roll_out
from wan import checkpoint, parallel
from wan.capture import CaptureRequest
from wan.checkpoint import read_weights
from wan.config import ModelConfig, RunConfig
from wan.errors import ConfigError
from wan.interventions import ACTIVE_EDITS
from wan.kernels.graphs import apply_cuda_graphs, forget_cuda_graphs
from wan.model import CausalWanModel
from wan.noise import SeededNoise
from wan.offload import StreamedBlocks
from wan.parallel import apply_head_parallel
from wan.pipeline import CausalInferencePipeline
from wan.policies import PromptSwitch
from wan.rolling_forcing import RollingForcingPipeline

# --- Where a loaded model runs and how its layers are launched: on several GPUs, from graphs, aside for now
FORWARDS = 35  # that one GPU makes without graphs, those of 21 frames: a single short video records none


def share(model: CausalWanModel, gpus: int) -> None:
    """Let the processes that were started for it make each call of a model together, where gpus says so."""
    if gpus == 1:
        return
    group = parallel.joined()
    if group is None or group.size() != gpus:
        raise ConfigError(
            f"gpus is {gpus}, which the scripts run_extraction*.py know; elsewhere start {gpus} processes by "
            "torchrun, and let each call wan.parallel.join()"
        )
    apply_head_parallel(model, group)
    replay_layers(model, after=1)


def replay_layers(model: CausalWanModel, after: int) -> None:
    """Replay the layers of a model on a GPU from graphs, when they were called so often without.

    Streamed layers are not replayed: they wait for weights, not for Python.
    """
    if model.device.type == "cuda" and not isinstance(model.blocks, StreamedBlocks):
        apply_cuda_graphs(model, after)


@contextmanager
def model_aside(
    loaded: Sequence[CausalInferencePipeline], device: torch.device, config: RunConfig
) -> Iterator[None]:
    """Move a model that is loaded to the host while the encoder takes its place on the GPU."""
    if not loaded or device.type == "cpu" or encoding_device(config, device).type == "cpu":
        yield
        return
    model = loaded[0].model
    forget_cuda_graphs(model)  # they have the weights' addresses, and memory that the encoder may need
    model.to("cpu")
    try:
        yield
    finally:
        model.to(device)


# --- From a config to a rollout: load the model, generate one video, keep what was asked for
@dataclass(frozen=True)
class Session:
    """What rollouts of one config share: the model, the embeddings of every prompt, the caches' fields."""

    model_config: ModelConfig
    pipeline: CausalInferencePipeline
    texts: PromptTexts  # prompt -> states [1, text_len, text_dim], tokens
    common: dict[str, Any]
    sha256: Future  # of the weights file: hashed while models load and the video is made
    device: torch.device
    dtype: torch.dtype

    def rollout(self, config: RunConfig, shake: float = 0.0, **kwargs: Any) -> Tensor:
        """Latents [1, F, C, h, w] of a config's prompt and seed, with nobody looking.

        shake is the size of noise that is added to the first noise.
        """
        prompt_embeds, _ = self.texts[config.prompt]
        noise, renoise = draw_noise(config, self.model_config, self.dtype, self.device)
        if shake:
            more = torch.randn(noise.shape, generator=torch.Generator().manual_seed(0))
            noise = noise + shake * more.to(noise)
        with threads_for(noise, self.model_config):
            _, latents = self.pipeline.inference(
                noise, prompt_embeds=prompt_embeds, renoise=renoise, **kwargs
            )
        return latents

    def switches(self, config: RunConfig) -> list[PromptSwitch]:
        """The prompts that follow the first one, with their embeddings."""
        return [replace(s, prompt_embeds=self.texts[str(s.prompt)][0]) for s in config.switches]

    def with_weights(self, config: RunConfig) -> "Session":
        """The same with the weights that another config names."""
        pipeline = load_pipeline(config, self.model_config, self.dtype, self.device)
        return replace(self, pipeline=pipeline)


def extract(
    config: RunConfig, requests: Sequence[CaptureRequest], observer: RunObserver | None = None
) -> Extraction:
    """Generate one video as the config says and capture on the way; less where the observer asks to stop.

    Raises ConfigError for bad input, before anything large is loaded, and RunError where a result cannot be
    right.
    """
    observer = observer or RunObserver()
    return extract_next(prepare(config, requests, observer=observer), config, requests, observer)


def prepare(
    config: RunConfig,
    requests: Sequence[CaptureRequest],
    prompts: Sequence[str] | None = None,
    observer: RunObserver | None = None,
    replays: bool = False,
) -> Session:
    """Load what rollouts of a config need, for its prompt or for several. ConfigError for bad input.

    What that takes is said before anything is loaded, and refused where it does not fit. replays: rollouts
    are many or long, and nobody changes or hooks into the model, so that a GPU replays layers from graphs.
    """
    later = [str(switch.prompt) for switch in config.switches]
    prompts = list(dict.fromkeys([*(prompts or [config.prompt]), *later]))
    device = choose_device(config.device, config.offload)
    dtype = choose_dtype(config.dtype, device)
    model_config = checkpoint.read_model_config(config.ckpt_dir)
    checks.check_model(config, model_config)
    weights_file = checkpoint.weights_file(config.ckpt_dir, config.checkpoint_path)
    check_requests(config, model_config, requests)
    encodes = needs_encoder(config, prompts, model_config, dtype, device)
    memory = Memory(config, model_config, requests, dtype, device, encodes, replays=replays)
    check_memory(memory, quiet=observer is None or observer.quiet)
    common = common_fields(config, model_config, weights_file, dtype, device)
    sha256 = run_in_background(checkpoint.file_sha256, weights_file)
    loaded: list[CausalInferencePipeline] = []

    def encode(some: Sequence[str]) -> dict[str, PromptStates]:
        with out_of_memory("encoding the prompt"), model_aside(loaded, device, config):
            return encode_prompts(config, some, model_config, dtype, device)

    texts = PromptTexts(prompts, encode)
    texts[prompts[0]]  # the first ones before the model is there: the encoder needs as much memory again
    with out_of_memory("loading the model"):
        pipeline = load_pipeline(config, model_config, dtype, device)
    if replays and config.gpus == 1:  # several replay anyway
        replay_layers(pipeline.model, after=FORWARDS)
    loaded.append(pipeline)
    if observer and not observer.quiet:
        print(pipeline.weights)
    return Session(model_config, pipeline, texts, common, sha256, device, dtype)


def extract_next(
    session: Session,
    config: RunConfig,
    requests: Sequence[CaptureRequest],
    observer: RunObserver | None = None,
) -> Extraction:
    """extract() with what is loaded already; config may have another prompt and seed than at loading."""
    observer = observer or RunObserver()
    prompt_embeds, prompt_tokens = session.texts[config.prompt]
    switches = session.switches(config)
    requests = [with_words(request, len(prompt_tokens)) for request in requests]
    noise, renoise = draw_noise(config, session.model_config, session.dtype, session.device)
    observer.log("rollout", prompt=config.prompt, seed=config.seed)
    edits = edits_of(config.interventions, "config")
    with threads_for(noise, session.model_config), edited(session, config, edits):
        edits = ACTIVE_EDITS.edits  # also those of one's own intervene() around this
        latents, records = roll_out(
            session.pipeline, noise, renoise, prompt_embeds, config.block_sizes, requests, observer, switches
        )
    common, stopped = (
        session.common
        | {"prompt": config.prompt, "seed": config.seed, "weights_sha256": session.sha256.result()},
        "",
    )
    if config.sampler == "rolling_forcing":
        common |= {"schema_version": 2, "rolling_timesteps": session.pipeline.timesteps}
    if edits:
        common |= {"interventions": record_of(edits)}
    if latents.shape[1] < config.num_frames:
        ends = [0, *accumulate(config.block_sizes)]
        common |= {"partial": True, "blocks_done": ends.index(latents.shape[1])}
        stopped = f"{common['blocks_done']} of {len(config.block_sizes)} blocks"
    return Extraction(
        config,
        session.model_config.num_layers,
        records,
        latents,
        session.pipeline.pass_timesteps,
        prompt_tokens,
        common,
        stopped,
    )


def with_words(request: CaptureRequest, num_words: int) -> CaptureRequest:
    """A request for maps of words keeps those of the prompt, unless it says how many."""
    if request.granularity != "map" or request.num_words is not None:
        return request
    return replace(request, num_words=num_words)


def run_in_background(function: Callable, *args) -> Future:
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
    """The fields that every cache of a run carries, but for weights_sha256, which takes a while."""
    return {
        "schema_version": 1,  # an atlas with slots says 2
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
        "weights_file": " + ".join(Path(path).name for path in (weights_file, config.lora_path) if path),
        **({"gpus": config.gpus} if config.gpus > 1 else {}),
    } | provenance(config, weights_file, dtype, device)


def load_pipeline(
    config: RunConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> CausalInferencePipeline:
    """The causal pipeline with the checkpoint's weights, or the base weights where there is none."""
    state, report = read_weights(config, model_config)
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
    share(model, config.gpus)
    pipeline = pipeline_of(model, config)
    pipeline.weights = str(report)
    return pipeline


def pipeline_of(model: CausalWanModel, config: RunConfig) -> CausalInferencePipeline:
    """The rollout of a model as a config says: blocks, steps and what the cache keeps."""
    sampler = RollingForcingPipeline if config.sampler == "rolling_forcing" else CausalInferencePipeline
    return sampler(
        model,
        config.num_frame_per_block,
        config.independent_first_frame,
        config.denoising_step_list,
        config.warp_denoising_step,
        config.timestep_shift,
        config.context_noise,
        cache_policy=config.policy,
        first_block_steps=config.first_block_steps,
        recompute_context=config.recompute_context,
    )


def draw_noise(
    config: RunConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """First noise [1, F, C, h, w] and re-noising [steps - 1, 1, F, C, h, w]; the CPU's on every device."""
    generator = torch.Generator().manual_seed(config.seed)
    shape = (1, config.num_frames, model_config.in_dim, config.height, config.width)
    noise = torch.randn(shape, generator=generator)
    renoise = torch.randn(_most_steps(config) - 1, *shape, generator=generator)
    return noise.to(device, dtype), renoise.to(device, dtype)


def seeded_noise(
    configs: Sequence[RunConfig], model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> SeededNoise:
    """The noise that draw_noise draws for each of these configs, block by block as it is needed.

    They may differ in their seeds.
    """
    first = configs[0]
    shape = (model_config.in_dim, first.height, first.width)
    seeds = [config.seed for config in configs]
    return SeededNoise(seeds, first.num_frames, shape, _most_steps(first), device, dtype)


def _most_steps(config: RunConfig) -> int:
    return max(len(config.denoising_step_list), len(config.first_block_steps or ()))
