"""Load a model and its settings once; generate any number of videos. Everything uses this loader.

    session = load("wan_mini", num_frames=6)
    run = session.generate("a red circle moving right over a dark blue background", seed=42)
    session.model  # the CausalWanModel, an ordinary nn.Module

Scripts do the same with session.generate(requests=..., observer=...), and extraction/cache_builders.py turns
its Run into a cache. captured.py looks inside: capture, compare, x0_lens.
"""

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Self, TypeGuard

import torch
from torch import Tensor

from experiments import memory, progress
from experiments import runs as rollouts
from experiments.analysis import prompt_words
from experiments.caches import formats
from experiments.caches.files import Record, RunError
from experiments.caches.titles import conditions_of
from experiments.configs import find_config, policy_settings
from experiments.extraction import video
from experiments.prompts import PromptStates, encode_prompts, needs_encoder, with_given_prompt
from experiments.provenance import (
    choose_device,
    choose_dtype,
    encoding_device,
    files_of,
    fingerprint,
    identity,
    model_files,
    number_settings,
    provenance,
    record_of,
    threads_for,
    weights_hash,
    with_result,
)
from wan import cache, capture, checkpoint, errors, interventions, kernels, sites
from wan.blocks import block_ranges
from wan.config import MODELS, ModelConfig, ModelSettings, RunConfig, latent_sides
from wan.identity import LiveWeights, live_weights
from wan.model import CausalWanModel, WanModel
from wan.noise import TensorNoise, draw_noise
from wan.pipeline import CausalInferencePipeline, RolloutInputs, check_numerics, frames_of
from wan.policies import policy_of
from wan.text_encoder import TextEncoder
from wan.vae import VAE, Preview

if TYPE_CHECKING:
    pass

FORWARDS = 35  # that one GPU makes before it records graphs, those of 21 frames: a short video records none
OF_CACHES = ("prompt", "seed", "num_frames", "num_frame_per_block", "block_sizes")  # fields of every cache
PROMPTS_AT_ONCE = 8  # they are rolled out in more time than it takes to load umT5 again
REMEDY = "try --device cpu or another dtype in the config"


def load(
    source: Any = "wan_mini",
    *,
    cache_policy: Any = None,
    preview: str | Path | None = None,
    **settings: Any,
) -> Any:
    """Return a session that generates videos, of a model's name, its files, or somebody's pipeline.

    The first video reads the weights.

    Args:
        source: a name in configs/, a YAML file, a directory of weights, a RunConfig, or a pipeline of
            diffusers (or its transformer alone), which takes its settings when it generates.
        cache_policy: what the KV cache keeps: a name in configs/policies, a name with fields
            ("window,window=9,sink=3"), a file, a dict of settings, or a CachePolicy, also of your own class.
        preview: a file of TAEHV's small decoder for run.show(); run.video and run.save() still use the VAE.
        **settings: fields of RunConfig, such as prompt, seed, num_frames, device ("auto", "cpu", "cuda",
            "cuda:1"), dtype, or offload, which streams weights from the host; and size, the height x width of
            the video in pixels ("480x832").

    Returns:
        A Session; of a pipeline its PipelineSession.

    Raises:
        ConfigError: for a missing file, an unknown setting, and settings that do not fit together.

    Examples:
        >>> session = load("wan_mini", num_frames=6)
        >>> windowed = load("wan_mini", num_frames=6, cache_policy="window,window=9,sink=3")
    """
    if not isinstance(source, str | Path | RunConfig):
        of_pipelines = import_module("experiments.pipeline_session")  # by who has one
        return of_pipelines.load_pipeline(source, cache_policy=cache_policy, preview=preview, **settings)
    # 1. Settings: unknown names are refused, as YAML files' are
    given = dict[str, Any]()
    for name, value in settings.items():
        if value is not None:
            given[name] = value
        if isinstance(value, Path | torch.device | torch.dtype):
            given[name] = str(value).removeprefix("torch.")
    size, names = given.pop("size", None), [field.name for field in fields(RunConfig)]
    for name in given:
        errors.require_known(name, names, "{} is no setting of a run", home="wan/config.py")
    if cache_policy is not None:
        if isinstance(cache_policy, cache.CachePolicy | str | Path):
            cache_policy = policy_settings(cache_policy)
        given = {"cache_policy": cache_policy, "local_attn_size": -1, "sink_size": 0} | given
    # 2. The config itself, or one that is found by name
    if isinstance(source, RunConfig):
        config = replace(source, **given)
    else:
        config = find_config(source, given)
    if size is not None:
        sides = latent_sides(size, config.pixels_per_latent)
        config = replace(config, height=sides["height"], width=sides["width"])
    session = Session(config)
    session.preview = session.read_vae("auto", str(preview)) if preview else None
    return session


@dataclass(frozen=True, eq=False)
class Batch:
    """What a session rolls out together: a video for each config, who sees it, and how it begins."""

    configs: Sequence[RunConfig]  # they differ in prompt and seed
    requests: Sequence[capture.CaptureRequest]  # what is captured of attention
    observer: progress.Progress  # told of every block; it may stop the rollout
    watching: AbstractContextManager[None]  # captures, which see what all edits leave
    first_frames: Any = None  # the beginning of the videos where it was given by value: latents, pixels

    def __len__(self) -> int:
        """Return the number of videos."""
        return len(self.configs)


class Session(rollouts.AnySession):
    """A model and its settings; it makes any number of videos.

    The first video loads the model; so do prepare() and the attribute `model`. A pickled session loads the
    model again in the process that receives it (here).

    Args:
        config: its settings, as load() makes them.

    Examples:
        >>> session = load("wan_mini", num_frames=6)
        >>> run = session.generate("a red circle moving right over a dark blue background", seed=42)
        >>> run.save("circle.mp4")
        >>> hook = session.model.blocks[5].register_forward_hook(lambda block, inputs, x: print(x.shape))
    """

    def __init__(self, config: RunConfig):
        policy_of(config)  # raises ConfigError where policy, blocks and prompts do not fit together
        self.config, self.model_config = config, checkpoint.read_model_config(config.ckpt_dir)
        self.device = choose_device(config.device, config.offload)
        self.dtype = choose_dtype(config.dtype, self.device)
        self.preview: VAE | Preview | None = None  # a small decoder for run.show()
        self.sha256: Future[str] | None = None  # of the weights file: hashed while models load
        self.files: list[checkpoint.FileRecord] | None = None  # of the model, as they were read
        self.pipeline: Any = None
        self.texts: Any = None  # prompt -> states [1, text_len, text_dim], tokens
        self._loaded = config  # a copy of that of the loading
        self._loading = RLock()

    # --- Its parts
    @property
    def model(self) -> CausalWanModel:
        """The transformer: an ordinary nn.Module for hooks, torch.profiler, nnsight or captum."""
        return self.prepare().pipeline.model

    @cached_property
    def vae(self) -> Any:
        """The VAE in float32, as run.video decodes."""
        return self.read_vae()

    def read_vae(self, dtype: str = "float32", preview: str | None = None) -> Any:
        """Read the VAE, or a preview's decoder, onto the session's device."""
        return video.load_vae(self.config, dtype, preview)

    @cached_property
    def text_encoder(self) -> TextEncoder:
        """umT5: text_encoder(prompts) -> states [B, text_len, text_dim]."""
        where = encoding_device(self.config, self.device)
        return TextEncoder.from_pretrained(
            self.config.ckpt_dir, self.model_config.text_len, self.dtype, where
        )

    def prepare(
        self,
        requests: Sequence[capture.CaptureRequest] = (),
        prompts: Sequence[str] | None = None,
        observer: progress.Progress | None = None,
        *,
        replays: bool = False,
        decodes: bool = False,
        config: RunConfig | None = None,
    ) -> Self:
        """Load what rollouts of one prompt or several need, once. ConfigError for bad input.

        All checks come before anything large is loaded. replays: replay layers from CUDA graphs on a GPU,
        since rollouts are many or long and no hooks are set. decodes: a video is made
        afterwards. config: the first rollout's, if it is not the session's.
        """
        with self._loading:
            if self.pipeline is not None:
                return self
            config = config or self.config
            # 1. Check: numbers, files, requests and memory.
            check_numerics()
            quiet, sizes = observer is None or observer.quiet, self.model_config
            later = [str(switch.prompt) for switch in cache.read_switches(config.prompt_schedule)]
            prompts = list(dict.fromkeys([*(prompts or self.prompts_of(config)), *later]))
            for name in (
                ("num_layers", "num_heads", "dim", "ffn_dim", "in_dim") if config.model in MODELS else ()
            ):
                # A directory of another model than the config, and so the cache, names
                held, wanted = getattr(sizes, name), getattr(MODELS[config.model], name)
                if held != wanted:
                    raise errors.ConfigError(
                        f"{config.ckpt_dir} is not {config.model}: {name} {held} instead of {wanted}; "
                        "name a config with its settings by --config_path"
                    )
            weights = checkpoint.weights_file(config.ckpt_dir, config.checkpoint_path)
            kernels.prepare(self.device)
            encodes = needs_encoder(config, prompts, sizes, self.dtype, self.device)
            memory.check_requests(
                config, sizes, requests, config.base.num_steps if self.bidirectional else None
            )
            needs = memory.needs_of_run(
                config,
                sizes,
                requests,
                self.dtype,
                self.device,
                encodes=encodes,
                bidirectional=self.bidirectional,
                replays=replays,
                decodes=decodes,
            )
            memory.require_memory(config.model, needs, memory.free_memory(self.device), quiet=quiet)
            files_of(config, weights)
            self._loaded = deepcopy(config)
            self.require_files()
            # 2. Hash the weights in the background, now that they are described: a file that is replaced from
            #    here on is noticed. Encode the first prompts before the model is there: the encoder needs as
            #    much memory again.
            self.sha256 = weights_hash(weights)
            self.texts = PromptTexts(self, self._loaded, prompts)
            self.texts[prompts[0]]
            # 3. Load the model.
            with memory.out_of_memory("loading the model"):
                pipeline = self.load_pipeline(config)
            self.require_files()
            if replays and config.gpus == 1 and self.device.type == "cuda" and not config.offload:
                from wan.wings.graphs import apply_cuda_graphs  # several GPUs replay anyway

                apply_cuda_graphs(pipeline.model, FORWARDS)
            if not quiet and not self.bidirectional:
                progress.print_out(pipeline.weights)
            pipeline.loaded = live_weights({None: pipeline.model})
            self.pipeline = pipeline
        return self

    def load_pipeline(self, config: RunConfig) -> Any:
        """Load the model of a config and set up its sampler."""
        return load_pipeline(config, self.model_config, self.dtype, self.device)

    def prompts_of(self, config: RunConfig) -> list[str]:
        """Return the prompts of a config's rollout, without those of a schedule."""
        return [config.prompt]

    # --- Videos
    def generate(
        self,
        prompt: str | Sequence[str | Sequence[str]] | None = None,
        seed: int | None = None,
        quiet: bool = True,
        *,
        seeds: Sequence[int] | None = None,
        first_frames: Any = None,
        product: bool = False,
        config: RunConfig | None = None,
        requests: Sequence[capture.CaptureRequest] = (),
        observer: progress.Progress | None = None,
    ) -> Any:
        """Generate one video, or a batch of several.

        On a CPU each video of a batch has the bits of its single run. On a GPU products of other sizes round
        differently, and a rollout feeds that back to itself; equal batches have equal bits.

        Args:
            prompt: a text (None: the config's), or a list of texts for a batch. A video's prompt may be a
                list itself, of a text for each block.
            seed: of the noise, for all videos; None is the config's.
            quiet: print no progress.
            seeds: a seed for each video of a batch.
            first_frames: the beginning of the video, whole blocks (or with held_first_frame one frame):
                latents [G, C, h, w], a file of latents, an mp4 or a picture; num_frames includes them.
            product: combine every prompt with every seed, all seeds of the first prompt first.
            config: settings in place of the session's; they may differ from them in RolloutSettings only.
            requests: what scripts capture; capture() around the call asks for more.
            observer: is told of every block, and may stop the rollout, which then returns fewer frames.

        Returns:
            A Run, or a list of runs where prompts or seeds are lists.

        Raises:
            ConfigError: for input that does not fit together, and where the model does not fit in memory.
            RunError: where a number cannot be right.

        Examples:
            >>> runs = session.generate(["a red circle", "a blue square"], seeds=[1, 2])
        """
        # 1. A config for each video.
        rollouts.require_no_run()
        base = config or self.config
        if config is not None:
            policy_of(config)  # refuses other blocks or prompts than its policy knows
        if isinstance(first_frames, str | Path):
            base, first_frames = replace(base, first_frames=str(first_frames)), None
        configs = batch_configs(base, prompt, seed, seeds, product)
        # 2. Load the model, and roll out under the eyes of who captures this session.
        observer = observer or progress.Progress(quiet)
        captures = next(iter(self.captures()), None)
        if captures and requests:
            raise errors.ConfigError("a capture around this call says what is asked for: leave requests out")
        if captures is not None:
            requests = captures.requests
        self.prepare(requests, observer=observer, config=configs[0])
        for video_config in configs:
            self.require_loaded(video_config)
        if captures is not None:
            requests = captures.requests_of(partial(self.numbers_of, configs))

        def make(watching: AbstractContextManager[None]) -> list[rollouts.Run]:
            token = rollouts.ROLLING.set(True)
            try:
                batch = Batch(
                    configs=configs,
                    requests=requests,
                    observer=observer,
                    watching=watching,
                    first_frames=first_frames,
                )
                return self._roll_out(batch)
            finally:
                rollouts.ROLLING.reset(token)

        if captures is not None:
            runs = captures.roll_out(self, configs, make, first_frames is not None)
        else:
            runs = make(nullcontext())
        # 3. One run, unless prompts or seeds were a list.
        if seeds is None and isinstance(prompt, str | None):
            return runs[0]
        return runs

    def numbers_of(self, configs: Sequence[RunConfig], words: Sequence[str]) -> prompt_words.Numbers:
        """Return the numbers of the words' tokens in each video's prompt.

        ConfigError for words that are absent, and where a video has several prompts.
        """
        numbers = []
        for config in configs:
            if config.prompt_schedule:
                raise errors.ConfigError(
                    "words are of one prompt, and prompt_schedule changes it: leave words out"
                )
            _, tokens = self.texts[config.prompt]
            numbers.append(prompt_words.tokens_of_words(tokens, words, config.prompt))
        return tuple(numbers)

    def _roll_out(self, batch: Batch) -> list[rollouts.Run]:
        """Roll out a batch of videos that differ in prompt and seed; captures see them after all edits.

        Fewer frames come back where the observer asked to stop. Raises RunError for numbers that cannot be
        right, and for memory that does not suffice.
        """
        config, sizes, pipeline = batch.configs[0], self.model_config, self.pipeline
        observer = batch.observer
        # 1. Prompts: states [1, text_len, text_dim] and tokens of each video.
        states, tokens = zip(*(self.texts[item.prompt] for item in batch.configs), strict=True)
        requests = []
        for request in batch.requests:
            # Maps of words are of the prompt's, unless it is said how many.
            if request.granularity == "map" and request.num_words is None:
                request = replace(request, num_words=max(map(len, tokens)))
            requests.append(request)
        # 2. Each video has a generator of its own, so that a batch has the noise of its videos alone.
        drawn = [draw_noise(item, sizes, self.dtype, self.device) for item in batch.configs]
        noise, renoise = torch.cat([pair[0] for pair in drawn]), torch.cat([pair[1] for pair in drawn], 1)
        # 3. Given frames [B, G, C, h, w] take the place of the first ones; noise is drawn for all, so that
        #    the others' stays.
        beginning = batch.first_frames
        if beginning is None:
            beginning = config.first_frames
        switches = self.switches(*batch.configs)
        first, start, given = None, 0, None
        if beginning is not None:
            first = video.first_latents(beginning, config, sizes.in_dim, lambda: self.vae)
            sites.require_no_data(
                (*interventions.config_edits(config), *sites.active_edits()), "videos of first_frames"
            )
            first, start = first.to(noise).expand(len(noise), -1, -1, -1, -1), first.shape[1]
            given = frames_of(first)
        if observer.video is not None:  # a VAE that cannot decode is told now, not after hours
            observer.video.ready()
        # 4. Roll out block by block.
        observer.log("rollout", prompt=config.prompt, seed=config.seed)
        inputs = RolloutInputs(
            noise=TensorNoise(noise[:, start:], renoise[:, :, start:], start=start),
            prompt_embeds=torch.cat(states),
            num_given=start,
            given=given,
            prompt_schedule=switches,
        )
        blocks = pipeline.block_ranges(start, len(inputs.generated))
        # With the heads in several processes, these stop and gather together
        shard = pipeline.model.head_shard
        finished, checked = list[Tensor](), 0
        phase = memory.out_of_memory(lambda: f"rolling out block {len(finished)} of {len(blocks)}", requests)
        with (
            interventions.counted_edits() as touched,
            threads_for(noise, sizes),
            self.edited(config, len(batch)),
            batch.watching,
            interventions.in_turns(len(batch)),
        ):
            edits = sites.active_edits()  # also those of one's own intervene() around this
            files = self.files_now(config, edits)
            with phase, rollouts.capturing(requests) as records:
                for frames, latents in pipeline.blocks(inputs):
                    # Numbers are checked as they come, so that hours are not spent on NaN.
                    block = len(finished)
                    capture.move_to_cpu(records[checked:])
                    check_numbers(pipeline.model, latents, f"block {block}", records[checked:])
                    checked = len(records)
                    # Keep the block and hand it on.
                    finished.append(latents.clone())
                    if observer.video is not None:
                        observer.video.add(finished[-1])
                    observer.advance("block", block, len(blocks), f"frames {frames.start}-{frames[-1]}")
                    # All processes of a rollout stop after the same block.
                    stops = observer.stopping
                    if shard:
                        stops = shard.any_process(stops)
                    if stops:
                        break
        latents = torch.cat(finished, 1)
        # A window of Rolling Forcing began blocks that a stop left unfinished.
        records = [record for record in records if record.at and record.at.block < len(finished)]
        if shard:
            records = shard.gather_calls(records)
        # 5. What caches say of it, beside the settings.
        if len(touched.keys() - edits):  # contexts that were opened while it ran
            edits = rollouts.all_edits(edits, touched)
            files = self.files_now(config, edits)
        live = self.live_weights()
        about, depends, stopped = dict[str, Any](), dict[str, Any](), ""
        if first is not None:
            digest = hashlib.sha256(first[:1].float().cpu().numpy().tobytes()).hexdigest()
            about["first_frames"] = f"{start} latent frames, sha256 {digest[:16]}"
            if batch.first_frames is not None:  # a file is one of those that the run reads
                depends["first_frames"] = digest
        if config.sampler == "rolling_forcing":
            about |= {"schema_version": 2, "rolling_timesteps": pipeline.timesteps}
        if latents.shape[1] < config.num_frames:
            done = [0, *itertools.accumulate(config.block_sizes)].index(latents.shape[1])
            about |= {"partial": True, "blocks_done": done}
            stopped = f"{done} of {len(config.block_sizes)} blocks"
        # 6. A run for each video of the batch: [B, F, C, h, w] -> [1, F, C, h, w].
        runs = []
        schedules = [cache.read_switches(item.prompt_schedule) for item in batch.configs]
        cuts = [pipeline.cache_policy.cuts(schedule) for schedule in schedules]
        for item, own_config in enumerate(batch.configs):
            of_first = {}
            if cuts[item] != cuts[0]:  # the shots of a batch are the first video's
                of_first = {"cuts": cuts[0]}
            calls, video_latents = records, latents[item : item + 1]
            if len(batch) > 1:
                calls = [call.of_item(item) for call in records if call.item in (None, item)]
            common = self.common(own_config, edits, files=files, live=live, **depends, **of_first) | about
            rollouts.note_calls(common, edits, touched)
            common["fingerprint"] = with_result(common["fingerprint"], video_latents)
            runs.append(
                rollouts.Run(
                    config=own_config,
                    num_layers=sizes.num_layers,
                    records=calls,
                    latents=video_latents,
                    pass_timesteps=pipeline.pass_timesteps,
                    prompt_tokens=tokens[item],
                    common=common,
                    stopped=stopped,
                    preview=self.preview,
                )
            )
        return runs

    def rollout(self, config: RunConfig, shake: float = 0.0, **kwargs: Any) -> Tensor:
        """Generate latents [1, F, C, h, w] without an observer; shake sizes noise on the first noise."""
        rollouts.require_no_run()
        self.require_loaded(config)
        noise, renoise = draw_noise(config, self.model_config, self.dtype, self.device)
        # The same everywhere: what tiny noise changes is the floor that effects are compared with
        if shake:
            more = torch.randn(noise.shape, generator=torch.Generator().manual_seed(0))
            noise = noise + shake * more.to(noise)
        inputs = {"prompt_schedule": self.switches(config), "renoise": renoise, **kwargs}
        with threads_for(noise, self.model_config):
            return self.pipeline.inference(noise, prompt_embeds=self.texts[config.prompt][0], **inputs)[1]

    def switches(self, *configs: RunConfig) -> list[cache.PromptSwitch]:
        """Return the later prompts of a batch of videos, with their states [B, text_len, text_dim].

        The prompt of a switch is the first video's. ConfigError where videos go on in different ways.
        """
        schedules = [{s.frame: s for s in cache.read_switches(config.prompt_schedule)} for config in configs]
        texts, switches = [config.prompt for config in configs], list[cache.PromptSwitch]()
        for frame in sorted({frame for schedule in schedules for frame in schedule}):
            changes = [schedule.get(frame) for schedule in schedules]
            hows = {change.how for change in changes if change is not None}
            if len(hows) > 1:
                words = " and ".join(sorted(hows))
                raise errors.ConfigError(
                    f"prompts of a batch go on from frame {frame} by {words}; give one of them"
                )
            for item, change in enumerate(changes):
                if change is not None:
                    texts[item] = str(change.prompt)
            first = None
            if changes[0] is not None:
                first = changes[0].prompt
            states = torch.cat([self.texts[text][0] for text in texts])
            switches.append(
                cache.PromptSwitch(frame=frame, prompt=first, how=hows.pop(), prompt_embeds=states)
            )
        return switches

    # --- What its numbers depend on
    def require_loaded(self, config: RunConfig) -> None:
        """Raise ConfigError if a changed setting requires loading the model again."""
        for item in fields(ModelSettings):
            name = item.name
            asked, loaded = getattr(config, name), getattr(self._loaded, name)
            if loaded != asked:
                raise errors.ConfigError(
                    f"{name} is {errors.short_repr(asked)}, and the model was loaded with "
                    f"{errors.short_repr(loaded)}: "
                    "load it again with the other settings"
                )

    def require_files(self) -> None:
        """Describe the model's files, once. ConfigError if they have changed since the first call."""
        config = self._loaded
        files = model_files(config, checkpoint.weights_file(config.ckpt_dir, config.checkpoint_path))
        self.files = self.files or files
        for file in files:
            if file not in self.files:
                raise errors.ConfigError(
                    f"{file['name']} was replaced after it was read: load the model again"
                )

    @property
    def weights_sha256(self) -> str:
        """SHA-256 of the weights file, which is hashed in the background while models load."""
        assert self.sha256 is not None, "nothing is loaded"
        return self.sha256.result()

    def files_now(
        self, config: RunConfig, edits: Sequence[Any] | None = None
    ) -> list[checkpoint.FileRecord] | None:
        """Describe the files of a rollout: the model's as they were read, those of edits as they are now."""
        weights = Path(config.checkpoint_path or "")
        return None if self.files is None else files_of(config, weights, edits, self.files)

    def identity(
        self,
        config: RunConfig,
        edits: Sequence[Any] | None = None,
        files: Sequence[checkpoint.FileRecord] | None = None,
        live: LiveWeights | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Return everything that the numbers of this model's rollouts depend on (provenance.identity).

        live are the weights in memory, by default as they are now; they count where they are not as loaded.
        """
        files = self.files_now(config, edits) if files is None else files
        live = live or self.live_weights()
        if self.are_changed(live):
            more["live_weights"] = live.sampled
        return identity(config, self.sha256.result() if self.sha256 else None, edits, files, **more)

    def live_weights(self) -> LiveWeights | None:
        """Return the fingerprint of the weights in memory, and of hooks; None where none are loaded."""
        if self.pipeline is None:
            return None
        return live_weights({None: self.pipeline.model})

    def are_changed(self, live: LiveWeights | None) -> TypeGuard[LiveWeights]:
        """Return whether weights in memory are others than those that were loaded, or have hooks."""
        loaded = getattr(self.pipeline, "loaded", None)
        return live is not None and loaded is not None and live.differs(loaded)

    def common(
        self,
        config: RunConfig,
        edits: Sequence[Any] = (),
        live: LiveWeights | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Return the fields that all caches of a rollout share; more: further dependencies of its numbers."""
        sizes, weights = self.model_config, checkpoint.weights_file(config.ckpt_dir, config.checkpoint_path)
        live = live or self.live_weights()
        made_of = self.identity(config, edits, live=live, **more)
        origin = "base"
        if self.are_changed(live):
            origin = "changed"
        elif config.checkpoint_path:
            origin = "checkpoint"
        own_fields = {name: getattr(config, name) for name in OF_CACHES}
        # Settings without a field of their own
        settings = {
            name: value
            for name, value in number_settings(config).items()
            if value is not None and name not in (*own_fields, "model", "gpus")
        }
        if not edits:
            del settings["reference_prompts"]  # of means that edits take
        return {
            "schema_version": 1,  # an atlas with slots says 2
            "read_by": formats.READ_BY,
            **own_fields,
            "frame_seq_length": sizes.tokens_per_frame(config.height, config.width),
            "num_heads": sizes.num_heads,
            "head_dim": sizes.head_dim,
            "model": config.model,
            "weights": origin,
            **({"live_weights": live.sampled} if live else {}),
            "weights_file": " + ".join([weights.name, *map(str, config.loras)]),
            **({"gpus": config.gpus} if config.gpus > 1 else {}),
            "config": settings,
            **provenance(made_of["files"], self.dtype, self.device),
            **({"quantised": self.pipeline.quantised} if self.pipeline.quantised else {}),
            "weights_sha256": made_of["weights_sha256"],
            "fingerprint": fingerprint(made_of),
            **({"interventions": record_of(edits)} if edits else {}),
        }

    # --- Others like it
    def replaced(self, **attributes: Any) -> Self:
        """Return this session with other attributes, such as another config or pipeline of its model."""
        other, loaded = object.__new__(type(self)), deepcopy(attributes.get("config", self._loaded))
        vars(other).update(vars(self) | {"_loaded": loaded} | attributes)
        return other

    def with_weights(self, config: RunConfig) -> Self:
        """Return a session with the weights and rollout settings of another config."""
        pipeline = self.load_pipeline(config)
        pipeline.loaded = live_weights({None: pipeline.model})
        return self.replaced(pipeline=pipeline, config=config, files=None, sha256=None)

    def here(self, cached: Callable[..., Self]) -> Self:
        """Return this session, or in another process the one cached there (sweep.cached)."""
        return (
            self if self.pipeline else cached("model", fingerprint(self.identity(self.config)), self.prepare)
        )

    def __copy__(self) -> Self:
        return self.replaced()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the loaded model too, including changes made in place."""
        lasting = ("texts", "sha256", "preview", "_loading")  # are not changed, or cannot be copied
        own = {name: deepcopy(x, memo) for name, x in vars(self).items() if name not in lasting}
        other = self.replaced(**own)
        other._loading = RLock()
        if self.texts is not None:
            other.texts = replace(self.texts, session=other)
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Leave out everything that is loaded."""
        names = ("config", "model_config", "device", "dtype", "files")
        state = {name: getattr(self, name) for name in names} | {"sha256": None}
        if self.sha256 is not None:
            state["sha256"] = self.sha256.result()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The other process has its own files, device and memory: it loads what it needs itself.
        vars(self).update(state, preview=None, pipeline=None, texts=None, _loaded=state["config"])
        self._loading = RLock()
        if state["sha256"] is not None:
            self.sha256 = Future()
            self.sha256.set_result(state["sha256"])

    def __repr__(self) -> str:
        c, m = self.config, self.model_config
        weights = Path(c.checkpoint_path).name if c.checkpoint_path else "base weights"
        where = f"on {self.device}" if self.pipeline else "read by the first video"
        names = ("cache_policy", "local_attn_size", "sink_size")
        about: dict[str, Any] = {"config": {name: getattr(c, name) for name in names}}
        edits = interventions.config_edits(c)
        if edits:
            about["interventions"] = record_of(edits)
        return (
            f"Session: {c.model} ({weights}, {where}), {m.num_layers} layers of {m.num_heads} heads, "
            f"{c.num_frames} latent frames in {len(c.block_sizes)} blocks; "
            f"{conditions_of(about | {'block_sizes': c.block_sizes})}"
        )


@dataclass(eq=False)
class PromptTexts:
    """States and tokens of many prompts, encoded PROMPTS_AT_ONCE at a time in the order of use."""

    session: Session
    config: RunConfig
    prompts: list[str]
    encoded: dict[str, PromptStates] = field(default_factory=dict)

    def __getitem__(self, prompt: str) -> PromptStates:
        if prompt in self.encoded:
            return self.encoded[prompt]
        start = self.prompts.index(prompt) if prompt in self.prompts else len(self.prompts)
        batch = self.prompts[start:][:PROMPTS_AT_ONCE] or [prompt]
        session, device = self.session, self.session.device
        # On a GPU a model that is loaded makes room meanwhile
        is_beside = session.pipeline is not None and encoding_device(self.config, device).type != "cpu"
        moves = is_beside and device.type != "cpu"
        with memory.out_of_memory("encoding the prompt"):
            if moves:
                session.pipeline.model.to("cpu")
            session.require_files()
            try:
                self.encoded = encode_prompts(self.config, batch, session.model_config, session.dtype, device)
            finally:
                if moves:
                    session.pipeline.model.to(device)
        return self.encoded[prompt]


def batch_configs(
    base: RunConfig,
    prompt: str | Sequence[str | Sequence[str]] | None,
    seed: int | None,
    seeds: Sequence[int] | None,
    product: bool,
) -> list[RunConfig]:
    """Return the config of each video of a batch (Session.generate says what prompt, seed and seeds are).

    ConfigError where prompts and seeds do not fit together, or a prompt is no text.
    """
    # 1. Prompts and seeds: one for each video, or one for all.
    if isinstance(prompt, Mapping) or not isinstance(prompt, str | Iterable | None):
        raise errors.ConfigError(
            f"a prompt is a text, and several are a list of texts, not {errors.short_repr(prompt)}"
        )
    prompts: list[str | Sequence[str] | None]
    if prompt is None or isinstance(prompt, str):
        prompts = [prompt]
    else:
        prompts = list(prompt)
    video_seeds: list[int | None] = [seed]
    if seeds is not None:
        video_seeds = list(errors.as_tuple(seeds))
    if product:
        pairs = list(itertools.product(prompts, video_seeds))
        prompts, video_seeds = [text for text, _ in pairs], [number for _, number in pairs]
    count = max(len(prompts), len(video_seeds))
    fits = count > 0 and {len(prompts), len(video_seeds)} <= {1, count}
    if not fits or (seeds is not None and seed is not None):
        raise errors.ConfigError(
            f"{len(prompts)} prompts and {len(video_seeds)} seeds: one for each, one for all, or product=True"
        )
    # 2. What each video has in place of the base's settings.
    configs = []
    for number in range(count):
        settings: Record = {}
        text = prompts[number % len(prompts)]
        if isinstance(text, list | tuple):  # a prompt for each block
            starts = [frames.start for frames in block_ranges(base.block_sizes)]
            if len(text) != len(starts):
                raise errors.ConfigError(
                    f"{len(text)} prompts for {len(starts)} blocks; give a prompt for each block"
                )
            schedule = [
                {"frame": start, "prompt": of_block} for start, of_block in zip(starts, text, strict=True)
            ]
            settings = {"prompt": text[0], "prompt_schedule": schedule[1:]}
        elif text is not None:
            settings = {"prompt": text}
        if base.prompt_embeds:  # a file of states names its prompt, which umT5 is not asked for
            settings["prompt"] = with_given_prompt(base, settings.get("prompt"))
        if seed is not None or seeds is not None:
            settings["seed"] = video_seeds[number % len(video_seeds)]
        config = replace(base, **settings)
        if config.prompt_schedule != base.prompt_schedule:
            policy_of(config)  # refuses a schedule that it does not know
        configs.append(config)
    return configs


# --- Numbers are checked before they are kept, once a block or step
NO_SUMS = ("attended", "map_queries")  # captured values that are no numbers of a softmax
Kind = tuple[str, torch.Size, torch.dtype]  # name, shape and dtype of captured values


def check_numbers(
    model: WanModel, latents: Tensor, place: str, calls: Sequence[capture.CapturedCall] = ()
) -> None:
    """Raise RunError for latents that are not finite, naming the weights that are to blame.

    And for captured numbers that cannot be right, naming layer, block and pass.
    """
    # 1. The latents.
    if not latents.isfinite().all():
        remedy = REMEDY
        for name, weight in model.named_parameters():
            if not weight.isfinite().all():
                remedy = f"nor is the weight {name}: get the file of the weights again"
                break
        raise RunError(f"{place}: the latents are not finite, {remedy}")
    # 2. What was captured: what is large, or not right everywhere, is looked at one by one.
    right = kinds_that_are_right(calls)
    for call in calls:
        for name, values in call.values.items():
            if name not in NO_SUMS and (name, values.shape, values.dtype) not in right:
                check_captured(call, name, values)


def is_mass(name: str) -> bool:
    """Return whether captured values of a name are shares, whose rows sum to 1."""
    return name.endswith("_mass") or name == "token_probabilities"


def kinds_that_are_right(calls: Sequence[capture.CapturedCall]) -> set[Kind]:
    """Return the kinds of small values that are right in all calls: they are checked together."""
    by_kind = defaultdict[Kind, list[Tensor]](list)
    for call in calls:
        for name, values in call.values.items():
            if values.numel() <= capture.SMALL and name != "map_mass":
                by_kind[name, values.shape, values.dtype].append(values)
    right = set()
    for kind, alike in by_kind.items():
        values = torch.stack(alike).float()
        adds_up = True
        if is_mass(kind[0]):
            adds_up = bool(((values.sum(-1) - 1).abs() <= formats.MASS_TOLERANCE).all())
        if adds_up and values.isfinite().all():
            right.add(kind)
    return right


def check_captured(call: capture.CapturedCall, name: str, values: Tensor) -> None:
    """Raise RunError for captured values that are not finite, or shares whose rows do not sum to 1."""
    block, step = None, None
    if call.at is not None:
        block, step = call.at.block, call.at.step
    where = f"layer {call.site.layer}, block {block}, step {step}: "
    # 1. Policies by head show heads different frames: whole columns of [B, H, Fq, Fk] are NaN.
    heads_differ = False
    if name.startswith("frame_") and values.ndim == 4:
        missing = values.isnan()
        if missing.any() and not missing.all():
            heads_differ = torch.equal(missing.any(2), missing.all(2))
    # 2. Finite numbers; what an intervention left out is NaN.
    if "attended" in call.values and not name.endswith("_mass"):
        is_finite = not values.isinf().any()
    else:
        is_finite = all(extreme.isfinite() for extreme in values.aminmax())
    if not is_finite and not heads_differ:
        remedy = f"; {REMEDY}"
        if values.dtype == torch.float16:
            remedy = " in float16; --capture probabilities keeps float32"
        raise RunError(f"{where}{name} is not finite{remedy}")
    # 3. Sums. Averages of evicted frames are of no frame: with them a row of frames has less than 1.
    has_other_keys = name == "frame_mass" and ("slot_mass" in call.values or heads_differ)
    if not is_mass(name) or has_other_keys:
        return
    total = 1
    if name == "map_mass" and call.layout:  # maps keep mass times the tokens of a frame
        total = call.layout.tokens_per_slot
    error = (values.sum(-1, dtype=torch.float32) / total - 1).abs().max().item()
    if error > formats.MASS_TOLERANCE:
        raise RunError(f"{where}rows of {name} sum to 1 ± {error:.2g}, not to 1")


# --- Loading
def build_model(
    kind: type[Any],
    config: RunConfig,
    model_config: ModelConfig,
    state: checkpoint.StateDict,
    dtype: torch.dtype,
    device: torch.device,
    **window: Any,
) -> Any:
    """Build a model of weights on its device; with offload its layers stay on the host and are streamed."""
    source = config.checkpoint_path or config.ckpt_dir
    if not config.offload:
        return checkpoint.build_model(kind, model_config, state, source, dtype, device, **window)
    from wan.wings.offload import apply_offload

    # It converts a layer at a time, so that the device never holds the whole model
    model = checkpoint.build_model(kind, model_config, state, source, None, "cpu", **window)
    apply_offload(model, dtype, device)
    return model


def load_pipeline(
    config: RunConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> CausalInferencePipeline:
    """Load the checkpoint's weights, or the base weights where there is none; GPUs share the model.

    ConfigError where gpus are more than the processes that are joined.
    """
    state, report = checkpoint.read_weights(config, model_config)
    model = build_model(
        CausalWanModel,
        config,
        model_config,
        state,
        dtype,
        device,
        local_attn_size=config.local_attn_size,
        sink_size=config.sink_size,
    )
    if config.gpus > 1:
        from wan.wings import parallel
        from wan.wings.graphs import apply_cuda_graphs

        group = parallel.joined()
        if group is None or group.size() != config.gpus:
            raise errors.ConfigError(
                f"gpus is {config.gpus}, which the scripts run_extraction*.py know; elsewhere start "
                f"{config.gpus} processes by torchrun, and let each call wan.wings.parallel.join()"
            )
        parallel.apply_head_parallel(model, group)
        if device.type == "cuda" and not config.offload:
            apply_cuda_graphs(model, 1)
    pipeline = pipeline_of(model, config)
    pipeline.weights, pipeline.quantised = report, report.quantised
    return pipeline


def pipeline_of(model: CausalWanModel, config: RunConfig) -> CausalInferencePipeline:
    """Set up the rollout of a model by a config: blocks, steps and cache policy."""
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
        cache_policy=policy_of(config),
        first_block_steps=config.first_block_steps,
        recompute_context=config.recompute_context,
        solver=config.solver,
        held_first_frame=config.held_first_frame,
    )
