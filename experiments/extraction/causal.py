"""From a config to a rollout: load the model, generate one video, keep what was asked for.

The scripts are faces of this file and of cache_builders.py, which turns the result into a cache.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from contextvars import Context
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from experiments.caches.files import replacing, require_same
from experiments.caches.formats import READ_BY
from experiments.extraction.cache_builders import Extraction, atlas_cache, atlas_requests
from experiments.extraction.devices import choose_device, choose_dtype, encoding_device, threads_for
from experiments.extraction.memory import Memory, check_memory, check_requests
from experiments.extraction.prompt_embeds import PromptStates, PromptTexts, encode_prompts, needs_encoder
from experiments.extraction.provenance import check_sources, fingerprint, identity, provenance
from experiments.extraction.rollout import RunObserver, out_of_memory, roll_out
from wan import checkpoint
from wan.capture import CaptureRequest
from wan.checkpoint import read_weights
from wan.config import MODELS, ModelConfig, RunConfig, load_config
from wan.errors import ConfigError, short_repr
from wan.files import UnreadableError, load_tensors
from wan.interventions import (
    Ablate,
    Edit,
    Edits,
    HeadOutputs,
    Key,
    ReferenceMeans,
    RunInStep,
    Source,
    active_edits,
    edits_of,
    intervene,
    record_head_outputs,
    record_of,
)
from wan.model import CausalWanModel
from wan.noise import Noise, SeededNoise, TensorNoise, released_noise
from wan.pipeline import CausalInferencePipeline
from wan.policies import PromptSwitch
from wan.sites import observed, watchers

FORWARDS = 35  # that one GPU makes before it records graphs, those of 21 frames: a short video records none
MEANS = Path("cache/reference_means")
MEANS_SEEDS = (0, 1)
OF_CACHES = ("prompt", "seed", "num_frames", "num_frame_per_block", "block_sizes")  # fields of every cache
OF_A_ROLLOUT = (  # settings that a loaded model takes anew for every rollout; others need another loading
    *("prompt", "seed", "noise", "num_frames", "height", "width", "prompt_schedule", "interventions"),
    *("reference_prompts", "layer_indices", "layer_index", "step", "base", "release", "embeds_dir"),
)


@dataclass(frozen=True)
class LoadedModel:
    """Shared by the rollouts of one config: the model, the embeddings of every prompt, the caches' fields.

    It is pickled without the model, which another process loads itself (LoadedModel.here).
    """

    model_config: ModelConfig
    pipeline: CausalInferencePipeline
    texts: PromptTexts  # prompt -> states [1, text_len, text_dim], tokens
    common: dict[str, Any]
    sha256: Future  # of the weights file: hashed while models load and the video is made
    device: torch.device
    dtype: torch.dtype
    config: RunConfig  # a copy of that of the loading

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"pipeline": None, "texts": None, "sha256": self.sha256.result()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, sha256=Future())
        self.sha256.set_result(state["sha256"])

    def here(self, kept: Callable[..., "LoadedModel"]) -> "LoadedModel":
        """Return itself, or where it came from another process, one that is loaded and kept (engine.kept)."""
        if vars(self)["pipeline"]:
            return self
        return kept("model", fingerprint(self.identity(self.config)), lambda: prepare(self.config, []))

    def require_loaded(self, config: RunConfig) -> None:
        """Raise ConfigError where a changed setting needs the model loaded again."""
        for name, loaded in vars(self.config).items():
            asked = getattr(config, name)
            if loaded != asked and name not in OF_A_ROLLOUT:
                raise ConfigError(
                    f"{name} is {short_repr(asked)}, and the model was loaded with {short_repr(loaded)}: "
                    "load it again with the other settings"
                )

    def identity(self, config: RunConfig, edits: Sequence[Edit] | None = None, **more: Any) -> dict[str, Any]:
        """Return all that the numbers of a rollout of this model depend on (provenance.identity)."""
        return identity(config, self.sha256.result(), edits, **more)

    def rollout(self, config: RunConfig, shake: float = 0.0, **kwargs: Any) -> Tensor:
        """Generate latents [1, F, C, h, w] without an observer; shake sizes noise on the first noise."""
        self.require_loaded(config)
        noise, renoise = draw_noise(config, self.model_config, self.dtype, self.device)
        if shake:
            more = torch.randn(noise.shape, generator=torch.Generator().manual_seed(0))
            noise = noise + shake * more.to(noise)
        inputs = {"prompt_schedule": self.switches(config), "renoise": renoise, **kwargs}
        with threads_for(noise, self.model_config):
            return self.pipeline.inference(noise, prompt_embeds=self.texts[config.prompt][0], **inputs)[1]

    def switches(self, config: RunConfig, batch: int = 1) -> list[PromptSwitch]:
        """Return the prompts that follow the first one, with their embeddings [batch, text_len, text_dim]."""
        texts = {str(s.prompt): self.texts[str(s.prompt)][0].expand(batch, -1, -1) for s in config.switches}
        return [replace(s, prompt_embeds=texts[str(s.prompt)]) for s in config.switches]

    def with_weights(self, config: RunConfig) -> "LoadedModel":
        """Return the same with the weights, and the settings of the rollout, of another config."""
        pipeline = load_pipeline(config, self.model_config, self.dtype, self.device)
        return replace(self, pipeline=pipeline, config=deepcopy(config))


# --- Loading
def memory_of(
    config: RunConfig, requests: Sequence[CaptureRequest], prompts: Sequence[str] = (), **settings: Any
) -> Memory:
    """Estimate the memory of a run; settings are further fields of Memory. ConfigError for bad input."""
    device = choose_device(config.device, config.offload)
    dtype, sizes = choose_dtype(config.dtype, device), checkpoint.read_model_config(config.ckpt_dir)
    encodes = needs_encoder(config, prompts or [config.prompt], sizes, dtype, device)
    return Memory(config, sizes, requests, dtype, device, encodes, **settings)


def prepare(
    config: RunConfig,
    requests: Sequence[CaptureRequest],
    prompts: Sequence[str] | None = None,
    observer: RunObserver | None = None,
    replays: bool = False,
    load_base: Callable[..., Any] | None = None,
    decodes: str = "",
) -> LoadedModel:
    """Load what rollouts of a config need, for its prompt or for several. ConfigError for bad input.

    replays: rollouts are many or long, and nobody hooks into the model, so that a GPU replays layers from
    graphs. load_base loads the base model in place of the causal one. decodes: what asks for a video.
    """
    quiet = observer is None or observer.quiet
    texts = [*(prompts or [config.prompt]), *(str(switch.prompt) for switch in config.switches)]
    prompts = list(dict.fromkeys(texts))
    check_model(config)
    weights_file = checkpoint.weights_file(config.ckpt_dir, config.checkpoint_path)
    more: dict[str, Any] = {"bidirectional": bool(load_base), "replays": replays, "decodes": decodes}
    memory = memory_of(config, requests, prompts, **more)
    sizes, dtype, device = memory.model_config, memory.dtype, memory.device
    check_requests(config, sizes, requests, config.base.num_steps if load_base else None)
    check_memory(memory, quiet)
    common = {
        "schema_version": 1,  # an atlas with slots says 2
        "read_by": READ_BY,
        **{name: getattr(config, name) for name in OF_CACHES},
        "frame_seq_length": sizes.tokens_per_frame(config.height, config.width),
        "num_heads": sizes.num_heads,
        "head_dim": sizes.head_dim,
        "model": config.model,
        "weights": "checkpoint" if config.checkpoint_path else "base",
        "weights_file": " + ".join(Path(path).name for path in (weights_file, config.lora_path) if path),
        **({"gpus": config.gpus} if config.gpus > 1 else {}),
        **provenance(config, weights_file, dtype, device),
    }
    sha256 = run_in_background(checkpoint.file_sha256, weights_file)
    loaded: list[CausalInferencePipeline] = []

    def encode(some: Sequence[str]) -> dict[str, PromptStates]:
        """Encode prompts; on a GPU a model that is loaded makes room meanwhile."""
        moves = loaded and device.type != "cpu" and encoding_device(config, device).type != "cpu"
        with out_of_memory("encoding the prompt"):
            if moves:
                loaded[0].model.to("cpu")
            try:
                return encode_prompts(config, some, sizes, dtype, device)
            finally:
                if moves:
                    loaded[0].model.to(device)

    states = PromptTexts(prompts, encode)
    states[prompts[0]]  # the first ones before the model is there: the encoder needs as much memory again
    with out_of_memory("loading the model"):
        pipeline = (load_base or load_pipeline)(config, sizes, dtype, device)
    if replays and config.gpus == 1:  # several replay anyway
        replay_layers(pipeline.model, config, after=FORWARDS)
    loaded.append(pipeline)
    if pipeline.quantised:
        common["quantised"] = pipeline.quantised
    if not quiet and not load_base:
        print(pipeline.weights)
    return LoadedModel(sizes, pipeline, states, common, sha256, device, dtype, deepcopy(config))


def check_model(config: RunConfig) -> None:
    """Raise ConfigError where a directory holds another model than the config, and so the cache, names."""
    sizes = checkpoint.read_model_config(config.ckpt_dir)
    for name in ("num_layers", "num_heads", "dim", "ffn_dim") if config.model in MODELS else ():
        found, wanted = getattr(sizes, name), getattr(MODELS[config.model], name)
        if found != wanted:
            raise ConfigError(
                f"{config.ckpt_dir} is not {config.model}: {name} {found} instead of {wanted}; "
                "name a config with its settings by --config_path"
            )


def load_pipeline(
    config: RunConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> CausalInferencePipeline:
    """Load the checkpoint's weights, or the base weights where there is none; GPUs share the model."""
    state, report = read_weights(config, model_config)
    source = config.checkpoint_path or config.ckpt_dir
    placed = (None, "cpu") if config.offload else (dtype, device)
    window: dict[str, Any] = {"local_attn_size": config.local_attn_size, "sink_size": config.sink_size}
    model = checkpoint.build_model(CausalWanModel, model_config, state, source, *placed, **window)
    if config.offload:
        from wan.wings.offload import apply_offload

        apply_offload(model, dtype, device)
    if config.gpus > 1:
        from wan.wings import parallel

        group = parallel.joined()
        if group is None or group.size() != config.gpus:
            raise ConfigError(
                f"gpus is {config.gpus}, which the scripts run_extraction*.py know; elsewhere start "
                f"{config.gpus} processes by torchrun, and let each call wan.wings.parallel.join()"
            )
        parallel.apply_head_parallel(model, group)
        replay_layers(model, config, after=1)
    pipeline = pipeline_of(model, config)
    pipeline.weights, pipeline.quantised = str(report), report.quantised
    return pipeline


def replay_layers(model: CausalWanModel, config: RunConfig, after: int) -> None:
    """Replay a GPU model's layers from graphs after so many calls; streamed ones wait for weights anyway."""
    if model.device.type == "cuda" and not config.offload:
        from wan.wings.graphs import apply_cuda_graphs

        apply_cuda_graphs(model, after)


def pipeline_of(model: CausalWanModel, config: RunConfig) -> CausalInferencePipeline:
    """Set up the rollout of a model as a config says: blocks, steps and what the cache keeps."""
    sampler = CausalInferencePipeline
    if config.sampler == "rolling_forcing":
        from wan.wings.rolling_forcing import RollingForcingPipeline as sampler
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


def run_in_background(function: Callable, *args) -> Future:
    """Run a function in a daemon thread: the process may end without it."""
    future: Future = Future()

    def work() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # raised again by result()
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future


# --- One rollout
def extract(
    config: RunConfig, requests: Sequence[CaptureRequest], observer: RunObserver | None = None, decodes=""
) -> Extraction:
    """Load a model and extract_next() with it. Raises ConfigError before anything large is loaded."""
    loaded = prepare(config, requests, observer=observer, decodes=decodes)
    return extract_next(loaded, config, requests, observer)


def extract_next(
    loaded: LoadedModel,
    config: RunConfig,
    requests: Sequence[CaptureRequest],
    observer: RunObserver | None = None,
) -> Extraction:
    """Generate one video, which may differ from the loading's config in OF_A_ROLLOUT alone, and capture.

    Less comes back where the observer asks to stop. RunError where a result cannot be right.
    """
    return extract_batch(loaded, [config], requests, observer)[0]


def extract_batch(
    loaded: LoadedModel,
    configs: Sequence[RunConfig],
    requests: Sequence[CaptureRequest],
    observer: RunObserver | None = None,
) -> list[Extraction]:
    """extract_next() of videos that differ in prompt and seed, made together."""
    config, observer, sizes = configs[0], observer or RunObserver(), loaded.model_config
    for each in configs:
        loaded.require_loaded(each)
    states, tokens = zip(*(loaded.texts[each.prompt] for each in configs), strict=True)
    requests = [  # maps of words are of the prompt's, unless it is said how many
        replace(r, num_words=max(map(len, tokens))) if r.granularity == "map" and r.num_words is None else r
        for r in requests
    ]
    drawn = [draw_noise(each, sizes, loaded.dtype, loaded.device) for each in configs]
    noise, renoise = torch.cat([pair[0] for pair in drawn]), torch.cat([pair[1] for pair in drawn], 1)
    if observer.video is not None:
        observer.video.ready()
    observer.log("rollout", prompt=config.prompt, seed=config.seed)
    schedule = loaded.switches(config, len(configs))
    inputs = {"prompt_embeds": torch.cat(states), "renoise": renoise, "prompt_schedule": schedule}
    edits = edits_of(config.interventions, "config")
    with threads_for(noise, sizes), edited(loaded, config, edits, len(configs)):
        edits = active_edits()  # also those of one's own intervene() around this
        latents, records = roll_out(loaded.pipeline, noise, config.block_sizes, requests, observer, **inputs)
    more, stopped = dict[str, Any](), ""
    if config.sampler == "rolling_forcing":
        more |= {"schema_version": 2, "rolling_timesteps": loaded.pipeline.timesteps}
    if edits:
        more["interventions"] = record_of(edits)
    if latents.shape[1] < config.num_frames:
        done = [0, *accumulate(config.block_sizes)].index(latents.shape[1])
        more |= {"partial": True, "blocks_done": done}
        stopped = f"{done} of {len(config.block_sizes)} blocks"
    found = []
    for item, each in enumerate(configs):
        settings = {k: v for k, v in loaded.common["config"].items() if k != "noise"}
        by_noise = {} if each.noise == "seeded" else {"noise": each.noise}
        common = loaded.common | {name: getattr(each, name) for name in OF_CACHES}
        common["frame_seq_length"] = sizes.tokens_per_frame(each.height, each.width)
        common |= {"config": settings | by_noise, "weights_sha256": loaded.sha256.result()}
        common["fingerprint"] = fingerprint(loaded.identity(each, edits))
        own = records if len(configs) == 1 else [call.of_item(item) for call in records]
        made = latents[item : item + 1], loaded.pipeline.pass_timesteps, tokens[item], common | more, stopped
        found.append(Extraction(each, sizes.num_layers, own, *made))
    return found


def policy_atlas(config_path: str | Path, settings: Mapping[str, Any], num_frames: int) -> dict[str, Any]:
    """Return mean logits and mass of every call of num_frames frames under the policy of settings."""
    config = replace(load_config(config_path, {"cache_policy": dict(settings)}), num_frames=num_frames)
    return atlas_cache(extract(config, atlas_requests(config, mass=True, key_curve=False, cross=False)))


def draw_noise(
    config: RunConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """First noise [1, F, C, h, w] and re-noising [steps - 1, 1, F, C, h, w]; seeded: the CPU's everywhere."""
    if config.noise != "seeded":
        first, between = released_noise(config, model_config.in_dim, device)
        return first.to(dtype), between.to(dtype)
    generator = torch.Generator().manual_seed(config.seed)
    shape = (1, config.num_frames, model_config.in_dim, config.height, config.width)
    noise = torch.randn(shape, generator=generator)
    renoise = torch.randn(_most_steps(config) - 1, *shape, generator=generator)
    return noise.to(device, dtype), renoise.to(device, dtype)


def seeded_noise(
    configs: Sequence[RunConfig], model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Noise:
    """The noise that draw_noise draws for configs that differ in their seeds, block by block as needed."""
    first, seeds = configs[0], [config.seed for config in configs]
    if first.noise != "seeded":
        noise, renoise = zip(*(draw_noise(c, model_config, dtype, device) for c in configs), strict=True)
        return TensorNoise(torch.cat(noise), torch.cat(renoise, 1))
    shape = (model_config.in_dim, first.height, first.width)
    return SeededNoise(seeds, first.num_frames, shape, _most_steps(first), device, dtype)


def _most_steps(config: RunConfig) -> int:
    return max(len(config.denoising_step_list), len(config.first_block_steps or ()))


# --- Edits of a rollout with what they need: means of a reference set, and runs in step
@contextmanager
def edited(
    loaded: LoadedModel, config: RunConfig, edits: Sequence[Edit], batch: int = 1
) -> Iterator[Edits | None]:
    """Make edits while a rollout of config runs, with the means and the runs in step that they need.

    Those of one's own intervene() around this get what they lack, too.
    """
    own = [one for one in watchers() if isinstance(one, Edits)]
    lacking = [edit for one in own for edit in one.edits if edit.needs and edit not in one.data]
    if batch > 1 and (needy := next((e for e in (*edits, *lacking) if e.needs), None)):
        raise ConfigError(f"videos that are made together take no edit that needs {needy.needs}: {needy}")
    if edits:
        loaded.pipeline.plan(config.num_frames, prompt_schedule=config.switches).check(edits)
    with ExitStack() as stack:
        data = data_of(loaded, config, [*edits, *lacking], stack)
        for one in own:
            stack.callback(setattr, one, "data", one.data)
            one.data = {edit: data[edit] for edit in one.edits if edit in data} | one.data
        yield stack.enter_context(intervene(*edits, data=data)) if edits else None


def data_of(
    loaded: LoadedModel, config: RunConfig, edits: Sequence[Edit], stack: ExitStack
) -> dict[Edit, object]:
    """Return the data that edits need, by edit; the stack stops their source runs."""
    check_sources(edits, config)
    data: dict[Edit, object] = {}
    made: dict[Any, Any] = {}  # runs by source, unedited outputs by sites: several edits share them
    for edit in edits:
        source, how = getattr(edit, "source", None), edit.how if isinstance(edit, Ablate) else None
        if isinstance(source, Source):
            if source not in made:
                made[source] = stack.enter_context(run_of(loaded, config, source))
            data[edit] = made[source]
        elif how == "mean":
            data[edit] = reference_means(loaded, config, source, edit.sites)
        elif how == "frame_mean":
            if edit.sites not in made:
                made[edit.sites] = _head_outputs(loaded, config, edit.sites)
            data[edit] = made[edit.sites]
    return data


def run_of(loaded: LoadedModel, config: RunConfig, source: Source) -> RunInStep:
    """Return the run in step that a source names."""
    given = {name: getattr(source, name) for name in ("prompt", "seed") if getattr(source, name) is not None}
    other = replace(config, **given)
    if source.weights is not None:
        other = replace(other, checkpoint_path=None if source.weights == "base" else source.weights)
        loaded = loaded.with_weights(other)
    return RunInStep(lambda: loaded.rollout(other))


def _head_outputs(loaded: LoadedModel, config: RunConfig, sites: Sequence[str]) -> HeadOutputs:
    def unedited() -> HeadOutputs:
        with record_head_outputs(*sites) as outputs, observed():
            loaded.rollout(config)
        return outputs

    return Context().run(unedited)  # without anybody's edits


@dataclass(frozen=True)
class MeanRuns:
    """The rollouts of a config's reference set, an item each (the engine's Work)."""

    loaded: LoadedModel
    config: RunConfig
    sites: Sequence[str] = ("z",)

    @property
    def recorded(self) -> tuple[str, ...]:
        return HeadOutputs.sites if set(self.sites) <= set(HeadOutputs.sites) else tuple(self.sites)

    @cached_property
    def items(self) -> dict[str, RunConfig]:
        runs = [(prompt, seed) for prompt in self.config.reference_prompts for seed in MEANS_SEEDS]
        plain = replace(self.config, prompt_schedule=None, interventions=[])
        return {f"run_{n}": replace(plain, prompt=run[0], seed=run[1]) for n, run in enumerate(runs)}

    @cached_property
    def made_of(self) -> str:
        plain = replace(self.config, prompt="", seed=0, prompt_schedule=None, interventions=[])
        others = {} if self.recorded == HeadOutputs.sites else {"sites": self.recorded}
        return fingerprint(self.loaded.identity(plain, [], mean_seeds=MEANS_SEEDS, **others))

    @property
    def path(self) -> Path:
        return MEANS / f"{self.made_of}.pt"

    def part(self, name: str) -> Path:
        return MEANS / self.made_of / f"{name}.pt"

    def is_done(self, name: str, config: RunConfig) -> bool:
        return self.path.is_file() or self.part(name).is_file()

    def make(self, name: str, config: RunConfig, watch: RunObserver) -> None:
        """Roll out a run and write its mean outputs, which reference_means takes."""
        with replacing(self.part(name)) as file:
            torch.save(_head_outputs(self.loaded, config, self.recorded).means, file)


def reference_means(
    loaded: LoadedModel, config: RunConfig, path: object = None, sites: Sequence[str] = ("z",)
) -> ReferenceMeans:
    """Return mean outputs over a config's reference_prompts, kept on disk, or a named file's."""
    if isinstance(path, (str, Path)):
        return ReferenceMeans(_read_means(Path(path), loaded.model_config))
    runs = MeanRuns(loaded, config, sites)
    if runs.path.is_file():
        return ReferenceMeans(_read_means(runs.path, loaded.model_config, runs.made_of))
    outputs = [
        HeadOutputs(means=torch.load(runs.part(name), weights_only=True))
        if runs.part(name).is_file()  # of a worker
        else _head_outputs(loaded, one, runs.recorded)
        for name, one in runs.items.items()
    ]
    means = ReferenceMeans.over(outputs)
    values: dict[str, Any] = {"|".join(map(str, key)): values for key, values in means.values.items()}
    with replacing(runs.path) as file:
        torch.save(values | {"fingerprint": runs.made_of}, file)
    shutil.rmtree(runs.part("").parent, ignore_errors=True)
    return means


def _read_means(path: Path, sizes: ModelConfig, made_of: str = "") -> dict[Key, Tensor]:
    """Read a file of means: any that is named (made_of is empty), or one that was made of this."""
    wanted, means = [sizes.num_heads, sizes.head_dim], dict[Key, Tensor]()
    try:
        content = dict(load_tensors(path, mmap=False))
        found = content.pop("fingerprint", None)
        for name, values in content.items():
            kind, layer, step, branch = name.split("|")
            if not values.is_floating_point() or (
                kind in ("self", "cross") and [*values.shape[1:]] != wanted
            ):
                raise ValueError(
                    f"it holds no means of this model's {wanted[0]} heads of {wanted[1]} numbers"
                )
            means[kind, int(layer), int(step), branch] = values
    except (OSError, UnreadableError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read as means of head outputs: {error}; remove it") from None
    if made_of:
        require_same(path, found, made_of, "remove it")
    return means
