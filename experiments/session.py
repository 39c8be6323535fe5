"""Load a model and its settings once; generate any number of videos. Everything uses this loader.

    session = load("wan_mini", num_frames=6)
    run = session.generate("a red circle moving right over a dark blue background", seed=42)
    session.model  # the CausalWanModel, an ordinary nn.Module

Scripts do the same with session.generate(requests=..., observer=...), and extraction/cache_builders.py turns
its Run into a cache. captured.py looks inside: capture, compare, x0_lens.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from threading import RLock, Thread
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor

from experiments.caches.files import replacing
from experiments.caches.formats import READ_BY
from experiments.caches.frames import one_thread
from experiments.extraction.cache_builders import Run, videos
from experiments.extraction.project_files import find_config, policy_settings
from experiments.extraction.rollout import Progress, out_of_memory, roll_out
from experiments.memory import check_requests, free_memory, needs_of_run, require_memory
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
)
from wan import checkpoint
from wan.cache import CachePolicy, PromptSwitch, read_switches
from wan.capture import CaptureRequest
from wan.checkpoint import CheckpointError, describe_files, encoder_files, read_weights_file, require_file
from wan.config import MODELS, ModelConfig, ModelSettings, RunConfig, latent_sides
from wan.errors import ConfigError, require_known, require_text, short_repr
from wan.identity import NUMBERS
from wan.interventions import config_edits
from wan.kernels import start_triton
from wan.model import CausalWanModel
from wan.noise import TensorNoise, draw_noise
from wan.pipeline import CausalInferencePipeline, check_numerics
from wan.policies import policy_of
from wan.sites import PIPELINES, active_edits, require_no_data
from wan.text_encoder import TextEncoder

FORWARDS = 35  # that one GPU makes before it records graphs, those of 21 frames: a short video records none
OF_CACHES = ("prompt", "seed", "num_frames", "num_frame_per_block", "block_sizes")  # fields of every cache
PROMPTS_AT_ONCE = 8  # they are rolled out in more time than it takes to load umT5 again
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAKE_ONE = 'torch.save({"prompt": text, "prompt_embeds": states}, FILE), or copy one of cache/prompt_embeds/'

ROLLING: ContextVar[bool] = ContextVar("rolling", default=False)  # a video is being made in this context

PromptStates = tuple[Tensor, list[str]]  # states [1, n, text_dim], tokens without padding
# Who captures the videos of a session (captured.py), behind the session's id. It has `requests` for
# attention, and roll_out(session, configs, make, ...), whose make(watching) gives the runs, made under watch.
CAPTURES: ContextVar[tuple[tuple[int, Any], ...]] = ContextVar("captures", default=())


def require_no_run() -> None:
    """Raise ConfigError inside a function that a run calls: another run would mix up captures and edits."""
    if ROLLING.get():
        raise ConfigError(
            "another video was asked for by a function that a running one calls (reduce, an edit, a hook): "
            "keep what it needs, and generate when the first has ended"
        )


def load(
    source: str | Path | RunConfig = "wan_mini",
    *,
    cache_policy: Any = None,
    preview: str | Path | None = None,
    **settings: Any,
) -> "Session":
    """Return a session that generates videos, from a config's name, its path, or a directory of weights.

    settings are fields of RunConfig, such as num_frames, device (auto, cpu, cuda, cuda:N), dtype, or offload,
    which streams weights from the host; and size, a video's height x width in pixels ("480x832").
    cache_policy is a policy (also of your own class), a dict of settings, a file, a name in configs/policies,
    or a name with fields, such as "window,window=9,sink=3". preview is a file of TAEHV's small decoder for
    run.show(); run.video and run.save() still use the VAE. The first video reads the weights. Raises
    ConfigError for missing files and settings that do not fit together.
    """
    # 1. Settings: unknown names are refused, as YAML files' are
    given: dict[str, Any] = {
        name: str(v) if isinstance(v, Path) else v for name, v in settings.items() if v is not None
    }
    if "size" in given:
        given |= latent_sides(given.pop("size"))
    for name in given:
        require_known(name, [field.name for field in fields(RunConfig)], "{} is no setting of a run")
    if cache_policy is not None:
        if isinstance(cache_policy, CachePolicy | str | Path):
            cache_policy = policy_settings(cache_policy)
        given = {"cache_policy": cache_policy, "local_attn_size": -1, "sink_size": 0} | given
    # 2. The config itself, or one that is found by name
    config = replace(source, **given) if isinstance(source, RunConfig) else find_config(source, given)
    session = Session(config)
    session.preview = session.read_vae("auto", str(preview)) if preview else None
    return session


class Session:
    """A model and its settings; it makes any number of videos.

    >>> session = load("wan_mini", num_frames=6)
    >>> run = session.generate("a red circle moving right over a dark blue background", seed=42)
    >>> run.save("circle.mp4")
    >>> hook = session.model.blocks[5].register_forward_hook(lambda block, inputs, x: print(x.shape))

    The first video loads the model; so do prepare() and the attribute `model`. A pickled session loads the
    model again in the process that receives it (here).
    """

    bidirectional = False  # all frames at once, by the base model

    def __init__(self, config: RunConfig):
        policy_of(config)  # raises ConfigError where policy, blocks and prompts do not fit together
        self.config, self.model_config = config, checkpoint.read_model_config(config.ckpt_dir)
        self.device = choose_device(config.device, config.offload)
        self.dtype = choose_dtype(config.dtype, self.device)
        self.preview: Any = None  # a small decoder for run.show()
        self.sha256: Future[str] | None = None  # of the weights file: hashed while models load
        self.files: list[dict[str, Any]] | None = None  # of the model, as they were when they were read
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
        return videos().load_vae(self.config, dtype, preview)

    @cached_property
    def text_encoder(self) -> TextEncoder:
        """umT5: text_encoder(prompts) -> states [B, text_len, text_dim]."""
        where = encoding_device(self.config, self.device)
        return TextEncoder.from_pretrained(
            self.config.ckpt_dir, self.model_config.text_len, self.dtype, where
        )

    def prepare(
        self,
        requests: Sequence[CaptureRequest] = (),
        prompts: Sequence[str] | None = None,
        observer: Progress | None = None,
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
            later = [str(switch.prompt) for switch in read_switches(config.prompt_schedule)]
            prompts = list(dict.fromkeys([*(prompts or self.prompts_of(config)), *later]))
            for name in ("num_layers", "num_heads", "dim", "ffn_dim") if config.model in MODELS else ():
                # A directory of another model than the config, and so the cache, names
                held, wanted = getattr(sizes, name), getattr(MODELS[config.model], name)
                if held != wanted:
                    raise ConfigError(
                        f"{config.ckpt_dir} is not {config.model}: {name} {held} instead of {wanted}; "
                        "name a config with its settings by --config_path"
                    )
            weights = checkpoint.weights_file(config.ckpt_dir, config.checkpoint_path)
            if self.device.type == "cuda":  # the process may end without it
                Thread(target=start_triton, args=(self.device,), daemon=True).start()
            encodes = needs_encoder(config, prompts, sizes, self.dtype, self.device)
            check_requests(config, sizes, requests, config.base.num_steps if self.bidirectional else None)
            needs = needs_of_run(
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
            require_memory(config.model, needs, free_memory(self.device), quiet=quiet)
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
            with out_of_memory("loading the model"):
                pipeline = self._load_pipeline(config)
            self.require_files()
            if replays and config.gpus == 1:  # several replay anyway
                replay_layers(pipeline.model, config, after=FORWARDS)
            if not quiet and not self.bidirectional:
                print(pipeline.weights)
            self.pipeline = pipeline
        return self

    def _load_pipeline(self, config: RunConfig) -> Any:
        return load_pipeline(config, self.model_config, self.dtype, self.device)

    def prompts_of(self, config: RunConfig) -> list[str]:
        """Return the prompts of a config's rollout, without those of a schedule."""
        return [config.prompt]

    # --- Videos
    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        seed: int | None = None,
        quiet: bool = True,
        *,
        seeds: Sequence[int] | None = None,
        first_frames: Any = None,
        product: bool = False,
        config: RunConfig | None = None,
        requests: Sequence[CaptureRequest] = (),
        observer: Progress | None = None,
    ) -> Any:
        """Generate one video; prompt and seed are the config's where not given.

        A list of prompts or seeds makes a batch and returns a list of runs: seeds has one per prompt, seed is
        for all. product=True combines every prompt with every seed, all seeds of the first prompt first. On a
        CPU each video has the bits of its single run. On a GPU products of other sizes round differently, and
        a rollout feeds that back to itself; equal batches have equal bits. config replaces the session's and
        may differ from it in RolloutSettings only. requests are what scripts capture. observer is told of
        every block and may stop the rollout, which then returns fewer frames. first_frames are the beginning
        of the video, whole blocks: latents [G, C, h, w], a file of latents, an mp4 or a picture; num_frames
        includes them. ConfigError: the model does not fit in memory; RunError: a number cannot be right.
        """
        # 1. A config for each video.
        require_no_run()
        if PIPELINES.get():
            raise ConfigError("a diffusers pipeline is captured or edited here: leave that context first")
        base = config or self.config
        if isinstance(first_frames, str | Path):
            base, first_frames = replace(base, first_frames=str(first_frames)), None
        is_batch = seeds is not None or not isinstance(prompt, str | None)
        prompts = [prompt] if isinstance(prompt, str | None) else list(prompt)
        chosen = [seed] if seeds is None else list(seeds)
        if product:
            prompts, chosen = [p for p in prompts for _ in chosen], chosen * len(prompts)
        count = max(len(prompts), len(chosen))
        if (
            not count
            or not {len(prompts), len(chosen)} <= {1, count}
            or (seeds is not None and seed is not None)
        ):
            raise ConfigError(
                f"{len(prompts)} prompts and {len(chosen)} seeds: one for each, one for all, or product=True"
            )
        configs = []
        for number in range(count):
            text, own = prompts[number % len(prompts)], chosen[number % len(chosen)]
            # A file of states names its prompt, which umT5 is not asked for
            if base.prompt_embeds:
                text = with_given_prompt(base, text)
            given: dict[str, Any] = {"prompt": text, "seed": own}
            configs.append(replace(base, **{k: v for k, v in given.items() if v is not None}))
        # 2. Load the model, and roll out under the eyes of who captures this session.
        captures, observer = dict(CAPTURES.get()).get(id(self)), observer or Progress(quiet)
        if captures and requests:
            raise ConfigError("a capture around this call says what is asked for: leave requests out")
        requests = captures.requests if captures else requests
        self.prepare(requests, observer=observer, config=configs[0])
        for each in configs:
            self.require_loaded(each)

        def make(watching: AbstractContextManager[None]) -> list[Run]:
            token = ROLLING.set(True)
            try:
                return self._roll_out(configs, requests, observer, watching, first_frames)
            finally:
                ROLLING.reset(token)

        by_value = first_frames is not None
        runs = captures.roll_out(self, configs, make, by_value) if captures else make(nullcontext())
        return runs if is_batch else runs[0]

    def _roll_out(
        self,
        configs: Sequence[RunConfig],
        requests: Sequence[CaptureRequest],
        observer: Progress,
        watching: AbstractContextManager[None],
        first_frames: Any = None,
    ) -> list[Run]:
        """Roll out a batch of videos that differ in prompt and seed; captures see them after all edits."""
        config, sizes = configs[0], self.model_config
        states, tokens = zip(*(self.texts[each.prompt] for each in configs), strict=True)
        requests = [  # maps of words are of the prompt's, unless it is said how many
            replace(r, num_words=max(map(len, tokens)))
            if r.granularity == "map" and r.num_words is None
            else r
            for r in requests
        ]
        # Each video has a generator of its own, so that a batch has the noise of its videos alone.
        drawn = [draw_noise(each, sizes, self.dtype, self.device) for each in configs]
        noise, renoise = torch.cat([pair[0] for pair in drawn]), torch.cat([pair[1] for pair in drawn], 1)
        # Given frames take the place of the first ones; noise is drawn for all, so that the others' stays.
        given = config.first_frames if first_frames is None else first_frames
        first, start = None, 0
        if given is not None:
            first = videos().first_latents(given, config, sizes.in_dim, lambda: self.vae)
            require_no_data((*config_edits(config), *active_edits()), "videos of first_frames")
            first, start = first.to(noise).expand(len(noise), -1, -1, -1, -1), first.shape[1]
        if observer.video is not None:  # a VAE that cannot decode is told now, not after hours
            observer.video.ready()
        observer.log("rollout", prompt=config.prompt, seed=config.seed)
        schedule = self.switches(config, len(configs))
        with threads_for(noise, sizes), self.edited(config, len(configs)), watching:
            edits = active_edits()  # also those of one's own intervene() around this
            files = self.files_now(config, edits)
            drawn_noise = TensorNoise(noise[:, start:], renoise[:, :, start:], start=start)
            made_of = self.pipeline, drawn_noise, torch.cat(states), schedule, requests, observer
            latents, records = roll_out(*made_of, first)
        more, stopped, depends = dict[str, Any](), "", dict[str, Any]()
        if first is not None:
            digest = hashlib.sha256(first[:1].float().cpu().numpy().tobytes()).hexdigest()
            more["first_frames"] = f"{start} latent frames, sha256 {digest[:16]}"
            if first_frames is not None:  # a file is one of those that the run reads
                depends["first_frames"] = digest
        if config.sampler == "rolling_forcing":
            more |= {"schema_version": 2, "rolling_timesteps": self.pipeline.timesteps}
        if latents.shape[1] < config.num_frames:
            done = [0, *accumulate(config.block_sizes)].index(latents.shape[1])
            more |= {"partial": True, "blocks_done": done}
            stopped = f"{done} of {len(config.block_sizes)} blocks"
        # A run for each video of the batch: [B, F, C, h, w] -> [1, F, C, h, w]
        found = []
        for item, each in enumerate(configs):
            own = records
            if len(configs) > 1:
                own = [call.of_item(item) for call in records if call.item in (None, item)]
            made = latents[item : item + 1], self.pipeline.pass_timesteps, tokens[item]
            common = self.common(each, edits, files=files, **depends) | more
            found.append(Run(each, sizes.num_layers, own, *made, common, stopped, self.preview))
        return found

    def edited(self, config: RunConfig, batch: int = 1) -> AbstractContextManager[Any]:
        """Apply a config's edits while the context lasts, and give a user's intervene() the data it lacks."""
        edits = config_edits(config)
        if not (edits or active_edits()):
            return nullcontext()
        from experiments.extraction.edits import edited  # a run without edits needs no wan.interventions

        return edited(self, config, edits, batch)

    def rollout(self, config: RunConfig, shake: float = 0.0, **kwargs: Any) -> Tensor:
        """Generate latents [1, F, C, h, w] without an observer; shake sizes noise on the first noise."""
        require_no_run()
        self.require_loaded(config)
        noise, renoise = draw_noise(config, self.model_config, self.dtype, self.device)
        # The same everywhere: what tiny noise changes is the floor that effects are compared with
        if shake:
            more = torch.randn(noise.shape, generator=torch.Generator().manual_seed(0))
            noise = noise + shake * more.to(noise)
        inputs = {"prompt_schedule": self.switches(config), "renoise": renoise, **kwargs}
        with threads_for(noise, self.model_config):
            return self.pipeline.inference(noise, prompt_embeds=self.texts[config.prompt][0], **inputs)[1]

    def switches(self, config: RunConfig, batch: int = 1) -> list[PromptSwitch]:
        """Return the later prompts of a schedule, with embeddings [batch, text_len, text_dim]."""
        texts = {
            str(s.prompt): self.texts[str(s.prompt)][0].expand(batch, -1, -1)
            for s in read_switches(config.prompt_schedule)
        }
        return [replace(s, prompt_embeds=texts[str(s.prompt)]) for s in read_switches(config.prompt_schedule)]

    # --- What its numbers depend on
    def require_loaded(self, config: RunConfig) -> None:
        """Raise ConfigError if a changed setting requires loading the model again."""
        for item in fields(ModelSettings):
            name = item.name
            asked, loaded = getattr(config, name), getattr(self._loaded, name)
            if loaded != asked:
                raise ConfigError(
                    f"{name} is {short_repr(asked)}, and the model was loaded with {short_repr(loaded)}: "
                    "load it again with the other settings"
                )

    def require_files(self) -> None:
        """Describe the model's files, once. ConfigError if they have changed since the first call."""
        config = self._loaded
        there = model_files(config, checkpoint.weights_file(config.ckpt_dir, config.checkpoint_path))
        self.files = self.files or there
        if other := next((each for each in there if each not in self.files), None):
            raise ConfigError(f"{other['name']} was replaced after it was read: load the model again")

    @property
    def weights_sha256(self) -> str:
        """SHA-256 of the weights file, which is hashed in the background while models load."""
        assert self.sha256 is not None, "nothing is loaded"
        return self.sha256.result()

    def files_now(self, config: RunConfig, edits: Sequence[Any] | None = None) -> list[dict[str, Any]] | None:
        """Describe the files of a rollout: the model's as they were read, those of edits as they are now."""
        weights = Path(config.checkpoint_path or "")
        return None if self.files is None else files_of(config, weights, edits, self.files)

    def identity(
        self,
        config: RunConfig,
        edits: Sequence[Any] | None = None,
        files: Sequence[dict[str, Any]] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Return everything that the numbers of this model's rollouts depend on (provenance.identity)."""
        files = self.files_now(config, edits) if files is None else files
        return identity(config, self.sha256.result() if self.sha256 else None, edits, files, **more)

    def common(self, config: RunConfig, edits: Sequence[Any] = (), **more: Any) -> dict[str, Any]:
        """Return the fields that all caches of a rollout share; more: further dependencies of its numbers."""
        sizes, weights = self.model_config, checkpoint.weights_file(config.ckpt_dir, config.checkpoint_path)
        made_of = self.identity(config, edits, **more)
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
            "read_by": READ_BY,
            **own_fields,
            "frame_seq_length": sizes.tokens_per_frame(config.height, config.width),
            "num_heads": sizes.num_heads,
            "head_dim": sizes.head_dim,
            "model": config.model,
            "weights": "checkpoint" if config.checkpoint_path else "base",
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
        return self.replaced(pipeline=self._load_pipeline(config), config=config, files=None, sha256=None)

    def here(self, cached: Callable[..., Self]) -> Self:
        """Return this session, or in another process the one cached there (engine.cached)."""
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
        given = {name: getattr(self, name) for name in ("config", "model_config", "device", "dtype")}
        return given | {"sha256": self.sha256.result() if self.sha256 else None, "files": self.files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The other process has its own files, device and memory: it loads what it needs itself.
        vars(self).update(state, preview=None, pipeline=None, texts=None, _loaded=state["config"])
        self._loading = RLock()
        if sha256 := state["sha256"]:
            self.sha256 = Future()
            self.sha256.set_result(sha256)

    def __repr__(self) -> str:
        c, m = self.config, self.model_config
        weights = Path(c.checkpoint_path).name if c.checkpoint_path else "base weights"
        where = f"on {self.device}" if self.pipeline else "read by the first video"
        return (
            f"Session: {c.model} ({weights}, {where}), {m.num_layers} layers of {m.num_heads} heads, "
            f"{c.num_frames} latent frames in {len(c.block_sizes)} blocks"
        )


Pipe = Session  # its name of before, for one release


# --- Prompts to embeddings, once: remembered by prompt and encoder, or given in a file in place of umT5
# A file of states is a .pt of {"prompt": str, "tokens": [str], "prompt_embeds": [1, n, text_dim]}; embeds_dir
# of the config holds those that were made before. prompt and tokens may be left out of a file of one's own.
@dataclass(eq=False)
class PromptTexts:
    """States and tokens of many prompts, encoded PROMPTS_AT_ONCE at a time in the order of use."""

    session: Session
    config: RunConfig
    prompts: list[str]
    known: dict[str, PromptStates] = field(default_factory=dict)

    def __getitem__(self, prompt: str) -> PromptStates:
        if prompt in self.known:
            return self.known[prompt]
        there = self.prompts.index(prompt) if prompt in self.prompts else len(self.prompts)
        some = self.prompts[there:][:PROMPTS_AT_ONCE] or [prompt]
        # On a GPU a model that is loaded makes room meanwhile
        session, device = self.session, self.session.device
        model = session.pipeline and session.pipeline.model
        moves = model and device.type != "cpu" and encoding_device(self.config, device).type != "cpu"
        with out_of_memory("encoding the prompt"):
            if moves:
                model.to("cpu")
            session.require_files()
            try:
                self.known = encode_prompts(self.config, some, session.model_config, session.dtype, device)
            finally:
                if moves:
                    model.to(device)
        return self.known[prompt]


def encode_prompts(
    config: RunConfig, prompts: Sequence[str], sizes: ModelConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, PromptStates]:
    """Return embeddings and tokens of each prompt; load the encoder only if needed, and free it."""
    if given := config.prompt_embeds:
        own = with_given_prompt(config, None)
        if other := [short_repr(prompt) for prompt in prompts if prompt != own]:
            needs = f"and this run needs those of {other[0]}; leave --prompt_embeds out"
            raise ConfigError(f"{given} holds the states of {short_repr(own)}, {needs}")
        states, tokens = read_states(given, sizes)
        return {own: (states.to(device, dtype), tokens)}
    # Remembered states are taken where all that their bits depend on is the same (states_files)
    where, known = encoding_device(config, device), dict[str, PromptStates]()
    encoder: TextEncoder | None = None
    for prompt, path, is_there in states_files(config, prompts, sizes, dtype, where):
        if path is not None and is_there:
            with suppress(CheckpointError):  # damaged: to be made again
                known[prompt] = read_states(path, sizes)
                continue
        # umT5 has 11 GB in bfloat16: it is loaded once, for the prompts that are not remembered
        encoder = encoder or TextEncoder.from_pretrained(config.ckpt_dir, sizes.text_len, dtype, where)
        with one_thread() if where.type == "cpu" and sizes.text_dim < 1024 else nullcontext():
            known[prompt] = states, tokens = encoder([prompt]), encoder.words(prompt)
        if path is not None:  # a full disk costs the next run some seconds
            with suppress(OSError, RuntimeError), replacing(path) as file:
                kept = {"prompt": prompt, "tokens": tokens, "prompt_embeds": states.cpu()}
                torch.save(kept | {"fingerprint": path.stem}, file)
    if encoder is not None and where.type == "cuda":
        del encoder
        torch.cuda.empty_cache()  # else its gigabytes stay reserved beside the transformer's
    return {prompt: (states.to(device), tokens) for prompt, (states, tokens) in known.items()}


def needs_encoder(
    config: RunConfig, prompts: Sequence[str], sizes: ModelConfig, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return True where encode_prompts would load umT5."""
    if config.prompt_embeds:
        return False
    files = states_files(config, prompts, sizes, dtype, encoding_device(config, device))
    return not all(is_there for *_, is_there in files)


def states_files(
    config: RunConfig, prompts: Sequence[str], sizes: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Path | None, bool]]:
    """Return the file of each prompt's states, named by everything its bits depend on, and whether it exists.

    None: states are not stored.
    """
    if config.embeds_dir is None:
        yield from ((prompt, None, False) for prompt in prompts)
        return
    files = describe_files(encoder_files(config.ckpt_dir))
    made_of = {"files": files, "text_len": sizes.text_len, "dtype": str(dtype), "numbers": NUMBERS}
    for prompt in prompts:
        path, is_there = Path(config.embeds_dir) / f"{fingerprint(made_of, prompt=prompt)}.pt", False
        with suppress(CheckpointError):  # absent or damaged; a file of another name is of other states
            is_there = read_weights_file(path).get("fingerprint") == path.stem
        yield prompt, path, is_there


def with_given_prompt(config: RunConfig, prompt: str | None) -> str:
    """Return the prompt of a run with --prompt_embeds: the file's own, or else the given one; not both."""
    own = read_weights_file(require_file(config.prompt_embeds or "", MAKE_ONE)).get("prompt")
    if own is not None and not isinstance(own, str):
        raise CheckpointError(f"{config.prompt_embeds}: its prompt is a {type(own).__name__}, not a text")
    if prompt is not None and own is not None and prompt != own:
        holds = f"{config.prompt_embeds} holds the states of {short_repr(own)}"
        raise ConfigError(f"--prompt is {short_repr(prompt)}, but {holds}")
    return next(text for text in (own, prompt, config.prompt) if text is not None)  # "" is a prompt too


def read_states(path: str | Path, sizes: ModelConfig) -> PromptStates:
    """Read embeddings [1, n, text_dim], n at most text_len, and their tokens. CheckpointError for others."""
    content = read_weights_file(require_file(path, MAKE_ONE))
    states: Any = content.get("prompt_embeds")
    states = states[None] if isinstance(states, Tensor) and states.ndim == 2 else states
    is_known = isinstance(states, Tensor) and states.dtype in FLOATS and bool(states.isfinite().all())
    fits = is_known and states.ndim == 3 and states.shape[::2] == (1, sizes.text_dim)
    if not fits or not 1 <= states.shape[1] <= sizes.text_len:
        shown = list(states.shape) if is_known else "are missing, or not finite numbers of floating point"
        wanted = f"[1, at most {sizes.text_len}, {sizes.text_dim}], as this model's are"
        raise CheckpointError(f"{path}: prompt_embeds {shown}; wanted {wanted}; make one: {MAKE_ONE}")
    # Padding is zero: the other rows are tokens
    rows = int(states[0].any(-1).sum())
    tokens = content.get("tokens", [str(i) for i in range(rows)])
    texts = isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)
    if not texts or len(tokens) > states.shape[1]:
        raise CheckpointError(f"{path}: tokens are not a list of at most {states.shape[1]} texts")
    for token in tokens:
        require_text(token, f"{path}: a token")
    return states, tokens


# --- Loading
def wings() -> ModuleType:
    """Import the optional parts (experiments/wings.py), only for a config that uses one."""
    from experiments import wings

    return wings


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
    # Offload converts a layer at a time, so that the device never holds the whole model
    source = config.checkpoint_path or config.ckpt_dir
    placed = (None, "cpu") if config.offload else (dtype, device)
    model = checkpoint.build_model(kind, model_config, state, source, *placed, **window)
    if config.offload:
        wings().apply_offload(model, dtype, device)
    return model


def load_pipeline(
    config: RunConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> CausalInferencePipeline:
    """Load the checkpoint's weights, or the base weights where there is none; GPUs share the model."""
    state, report = checkpoint.read_weights(config, model_config)
    window: dict[str, Any] = {"local_attn_size": config.local_attn_size, "sink_size": config.sink_size}
    model = build_model(CausalWanModel, config, model_config, state, dtype, device, **window)
    if config.gpus > 1:
        wings().share_heads(model, config)
        replay_layers(model, config, after=1)
    pipeline = pipeline_of(model, config)
    pipeline.weights, pipeline.quantised = report, report.quantised
    return pipeline


def replay_layers(model: CausalWanModel, config: RunConfig, after: int) -> None:
    """Replay a GPU model's layers from CUDA graphs after so many calls, unless weights are streamed."""
    if model.device.type == "cuda" and not config.offload:
        wings().apply_cuda_graphs(model, after)


def pipeline_of(model: CausalWanModel, config: RunConfig) -> CausalInferencePipeline:
    """Set up the rollout of a model by a config: blocks, steps and cache policy."""
    rolls = config.sampler == "rolling_forcing"
    sampler = wings().RollingForcingPipeline if rolls else CausalInferencePipeline
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
    )
