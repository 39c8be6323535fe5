"""A pipeline of diffusers as a session, or a transformer alone: the same runs, captures, edits and gradients.

    session = load(pipe)
    run = session.generate("a red circle moving right", num_inference_steps=20, generator=generator)
    with capture(pipe, layers=[1]) as captured:
        pipe("a red circle moving right")  # a run of the same session

A call of the pipeline is a run where somebody captures or edits it in this context: __call__ of the
pipeline's class is wrapped meanwhile. Forwards that no such call makes, in a loop of one's own, are a run
that ends with the context.
"""

import copy
import hashlib
import inspect
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import Context, ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from experiments import provenance
from experiments import runs as rollouts
from experiments.analysis import prompt_words
from experiments.caches.files import RunError
from experiments.caches.formats import READ_BY
from experiments.extraction.video import to_pixels
from experiments.runs import AnySession, Run
from wan import compiled, diffusers_capture, diffusers_latents, errors, sites
from wan import diffusers_attention as attention
from wan import identity as identities
from wan.capture import CapturedCall, move_to_cpu
from wan.config import RunConfig
from wan.diffusers_frames import family_of
from wan.diffusers_passes import told_of
from wan.interventions import counted_edits
from wan.sites import Watcher

PLAIN = (str, int, float, bool)  # values of arguments that caches keep as they are
GUIDANCE = ("guidance_scale", "guidance_scale_2", "true_cfg_scale", "real_guidance_scale")


# --- Settings
@dataclass(frozen=True)
class PipelineConfig:
    """What is known of one video of a pipeline; the names are those of RunConfig."""

    model: str
    prompt: str | None = ""  # None: embeddings were given that nobody saw being made
    seed: int | None = None  # None: the generator was not a fresh one
    num_frames: int = 1
    settings: dict[str, Any] = field(default_factory=dict)  # arguments of the call that are plain values
    reference_prompts: Sequence[str] = field(default_factory=lambda: RunConfig().reference_prompts)
    interventions: list[Any] = field(default_factory=list)
    prompt_schedule: None = None
    prompt_embeds: None = None
    checkpoint_path: None = None
    offload: bool = False
    fps: int = 16

    @property
    def num_frame_per_block(self) -> int:
        return self.num_frames

    @property
    def block_sizes(self) -> list[int]:
        return [self.num_frames]


@dataclass(frozen=True)
class PipelineSizes:
    """Sizes of a transformer; None where its config does not tell them."""

    num_layers: int | None
    num_heads: int | None
    head_dim: int | None


@dataclass(frozen=True, eq=False)
class PipelineCall:
    """One call of a pipeline: its arguments by name, and the video that each item of its batch is."""

    arguments: dict[str, Any]  # by name, with defaults
    configs: list[PipelineConfig]
    states: list[str | None]  # hashes of the states of its generators, where they are not fresh
    generators: list[torch.Generator]  # as they were before the call
    inputs: dict[str, Any]  # all else that its numbers depend on, as plain values
    rows: "Rows" = field(default_factory=list)  # that its text encoder got
    encoded: dict[str | None, "EncodedPrompt"] = field(default_factory=dict)  # its prompts


@dataclass(eq=False)
class Forwards(Watcher):
    """Note the passes of a run's forwards, and the shape of their latents by frame."""

    sees: frozenset[str] | None = frozenset({"x_t"})
    models: frozenset[int] | None = None
    passes: list[sites.Pass] = field(default_factory=list)
    shape: tuple[int, ...] = ()  # [B, F, C, h, w]

    def on_activation(self, x: Tensor, where: sites.ActivationSite) -> None:
        self.passes.append(where.at)
        self.shape = tuple(x.shape)


@dataclass(frozen=True, eq=False)
class OutsideCalls:
    """The ids of a session's transformers while no call of its pipeline runs: a Watcher's models."""

    session: "PipelineSession"

    def __contains__(self, model: object) -> bool:
        return model in self.session.ids and not self.session.is_calling()


_sessions: weakref.WeakValueDictionary[int, "PipelineSession"] = weakref.WeakValueDictionary()
# What a pipeline's weights were when it was first seen, and its prompts by the embeddings that were made
_loaded: weakref.WeakKeyDictionary[Any, identities.LiveWeights] = weakref.WeakKeyDictionary()
_prompts: weakref.WeakKeyDictionary[Any, dict[str, "EncodedPrompt"]] = weakref.WeakKeyDictionary()
# Classes whose __call__ is wrapped: the original, whether it is the class's own, and for how many contexts
_wrapped: dict[type, tuple[Callable[..., Any], bool, int]] = {}
_lock = Lock()
_CALLS: ContextVar[tuple[int, ...]] = ContextVar("pipeline_calls", default=())  # sessions whose call runs
_ENCODED: ContextVar[dict[str | None, "EncodedPrompt"]] = ContextVar(
    "encoded_prompts"
)  # of the call that runs


def is_pipeline(x: Any) -> bool:
    """Return whether x is a pipeline or a transformer, and not a name, a path or a config."""
    return isinstance(x, nn.Module) or hasattr(x, "transformer")


def load_pipeline(x: Any, **settings: Any) -> "PipelineSession":
    """Return the session of a pipeline or a transformer. ConfigError for anything else, and for settings."""
    if not is_pipeline(x):
        raise errors.ConfigError(
            f"{errors.short_repr(x)} is no name or path of a config, no folder, pipeline or transformer"
        )
    for name, value in settings.items():
        if value is not None:
            raise errors.ConfigError(
                f"a pipeline takes {name} when it is called: session.generate(prompt, ...)"
            )
    return session_of(x)


def session_of(x: Any) -> "PipelineSession":
    """Return the session of a pipeline or a transformer: the same one while anybody holds it."""
    session = _sessions.get(id(x))
    if session is None or session.pipe is not x:
        session = PipelineSession(x)
        _sessions[id(x)] = session
    return session


class PipelineSession(AnySession):
    """A pipeline of diffusers that makes runs, or a transformer alone, which has all but generate().

    >>> session = load(WanPipeline.from_pretrained("Wan-AI/Wan2.1-T2V-1.3B-Diffusers"))
    >>> run = session.generate("a red circle", num_inference_steps=20, generator=torch.Generator())
    >>> run.latents.shape, run.common["scheduler"]["class"]
    >>> session.models  # its transformers by name, two where it has two experts
    """

    bidirectional = True
    kind = "pipeline"
    can_nest = True

    def __init__(self, pipe: Any):
        self.pipe = pipe
        self.models: dict[str | None, nn.Module] = diffusers_capture.transformers_of(pipe)
        self.ids = self.models_watched = frozenset(map(id, self.models.values()))
        self.config = PipelineConfig(model=name_of(pipe))
        self.call: PipelineCall | None = None  # the one that runs, of a session that an edit rolls out by
        if pipe not in _loaded:
            _loaded[pipe] = identities.live_weights(self.models)

    # --- Its parts
    @property
    def model(self) -> Any:
        """The transformer, the first of two."""
        return next(iter(self.models.values()))

    @property
    def device(self) -> torch.device:
        """Where the pipeline computes."""
        return getattr(self.pipe, "_execution_device", None) or self.model.device

    @cached_property
    def model_config(self) -> PipelineSizes:
        """Numbers of layers and heads, as far as they are known."""
        layers = diffusers_capture.count_layers(self.model)
        heads = getattr(self.model.config, "num_attention_heads", None)
        return PipelineSizes(layers, heads, getattr(self.model.config, "attention_head_dim", None))

    def watchers(self) -> Sequence[Watcher]:
        of_models = [watcher for model in self.ids for watcher in sites.watchers(model)]
        return list(dict.fromkeys(of_models))

    def prepare(self, **more: Any) -> "PipelineSession":
        """Return the session, which is loaded."""
        return self

    def with_weights(self, config: Any) -> Any:
        raise errors.ConfigError("a source of a pipeline is another prompt or seed of it; leave weights out")

    # --- Videos
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pipeline with its own arguments -> the run, or a list of runs of several videos."""
        rollouts.require_no_run()
        if isinstance(self.pipe, nn.Module):
            raise errors.ConfigError(f"{type(self.pipe).__name__} alone makes no video: load its pipeline")
        signature, title = signature_of(self.pipe), type(self.pipe).__name__
        if not _takes_any(signature):
            for name in kwargs:
                errors.require_known(name, [*signature.parameters][1:], f"{title} takes no {{}}")
        try:
            signature.bind(self.pipe, *args, **kwargs)
        except TypeError as error:
            raise errors.ConfigError(f"{title}: {error}") from None
        # A compiled transformer stays compiled where nobody looks.
        watch: AbstractContextManager[None] = nullcontext()
        if self.is_watched():
            watch = self.opened()
        with watch:
            runs, _ = self.make(original_call(self.pipe), args, kwargs)
        if len(runs) == 1:
            return runs[0]
        return runs

    def make(self, call: Callable[..., Any], args: Any, kwargs: Any) -> tuple[list[Run], Any]:
        """Call the pipeline under all who watch it in this context -> a run for each video, what it returned.

        A call that is stopped by an error leaves the runs of what it reached with who captures it.
        """
        # 1. The videos that it will make, as far as its arguments tell.
        sites.require_running_generators()
        planned = self.plan(args, kwargs)
        captures = self.captures()
        numbers_of = partial(self.numbers_of, planned)
        requests = [request for capture in captures for request in capture.requests_of(numbers_of)]
        runs: list[Run] = []
        output = None
        with ExitStack() as stack:
            token = rollouts.ROLLING.set(True)
            stack.callback(rollouts.ROLLING.reset, token)
            token_of_calls = _CALLS.set((*_CALLS.get(), id(self)))
            stack.callback(_CALLS.reset, token_of_calls)
            token_of_prompts = _ENCODED.set(planned.encoded)
            stack.callback(_ENCODED.reset, token_of_prompts)
            stack.enter_context(noted_rows(self.pipe, planned.rows))
            # 2. Edits first, then who captures what they leave.
            session = self.replaced(call=planned, config=planned.configs[0])
            stack.enter_context(session.edited(planned.configs[0], len(planned.configs)))
            edits = self.active_edits()
            touched = stack.enter_context(counted_edits())
            for capture in captures:
                stack.enter_context(capture.recording(session, planned.configs, runs, self.ids))
            forwards = Forwards(models=self.ids)
            if self.watchers() or requests:
                stack.enter_context(sites.watched(forwards))
            records = stack.enter_context(rollouts.capturing(requests, self.ids))
            for watcher in self.watchers():
                watcher.begin()
            stack.enter_context(sites.counting())
            noted = NotedLatents(self.pipe, planned.arguments)
            latents = stack.enter_context(noted.noted())
            # 3. The call itself; then what came of it.
            stopped = "before its end"
            try:
                output = call(self.pipe, *args, **(kwargs | noted.more))
                stopped = ""
            finally:
                move_to_cpu(records)
                runs += self.runs_of(planned, forwards, records, latents, output, edits, touched, stopped)
        return runs, output

    def rollout(self, config: PipelineConfig) -> Tensor:
        """Make the running call's video once more, with another prompt or seed, beside it -> its latents."""
        call = self.call
        assert call is not None, "a source is of a pipeline's call"
        # 1. The same noise, unless another seed is asked for.
        generators = [generator_again(generator, self.device) for generator in call.generators]
        if config.seed is not None and config.seed != call.configs[0].seed:
            generators = [generator.manual_seed(config.seed) for generator in generators]
        arguments = call.arguments | {"generator": generators}
        if not isinstance(call.arguments.get("generator"), list):
            arguments["generator"] = generators[0]
        if config.prompt != call.configs[0].prompt:
            arguments |= {"prompt": config.prompt, "prompt_embeds": None, "prompt_embeds_mask": None}
        arguments |= {"output_type": "latent", "callback_on_step_end": None}
        # 2. A pipeline of its own, since the scheduler counts its steps.
        pipe = copy.copy(self.pipe)
        if getattr(pipe, "scheduler", None) is not None:
            pipe.scheduler = copy.deepcopy(pipe.scheduler)
            vars(pipe.scheduler).pop("step", None)
        pipe.set_progress_bar_config(disable=True)
        arguments = {name: value for name, value in arguments.items() if name in call.arguments}
        with sites.counting(), NotedLatents(pipe, arguments).noted() as latents:
            output = original_call(pipe)(pipe, **arguments)
        return latents.of(output)

    # --- What a call is
    def plan(self, args: Any, kwargs: Any) -> PipelineCall:
        """Return the videos that a call will make, with prompt and seed of each."""
        arguments = arguments_of(self.pipe, args, kwargs)
        # 1. A prompt for each video, and a generator for each or one for all.
        repeats = arguments.get("num_videos_per_prompt") or 1
        encoded = self.prompts_of(arguments)
        prompts = [each.prompt for each in encoded for _ in range(repeats)]
        given = arguments.get("generator")
        if not isinstance(given, list):
            given = [given]
        generators = [generator_again(generator, self.device) for generator in given]
        # 2. What its numbers depend on.
        settings = {name: value for name, value in arguments.items() if _is_plain(value)}
        settings.pop("prompt", None)
        inputs = {name: _as_plain(value) for name, value in arguments.items() if name not in NOT_NUMBERS}
        if None in prompts:
            inputs["prompt_embeds"] = _as_plain(arguments.get("prompt_embeds"))
        inputs["generator"] = str(generators[0].device)
        configs, states = [], []
        for number, prompt in enumerate(prompts):
            number %= len(generators)
            seed = None
            if given[number] is not None:
                seed = seed_of(generators[number])
            states.append(None if seed is not None else hash_of(generators[number].get_state()))
            configs.append(replace(self.config, prompt=prompt, seed=seed, settings=settings))
        by_prompt = {each.prompt: each for each in encoded if each.tokens}
        return PipelineCall(arguments, configs, states, generators, inputs, encoded=by_prompt)

    def prompts_of(self, arguments: Mapping[str, Any]) -> list["EncodedPrompt"]:
        """Return a call's prompts: those that were encoded, where embeddings are given; None: not known."""
        embeds = arguments.get("prompt_embeds")
        if isinstance(embeds, Tensor):
            by_row = _prompts.get(self.pipe, {})
            return [by_row.get(hash_of(row), NOT_ENCODED) for row in embeds]
        prompts = arguments.get("prompt")
        if isinstance(prompts, str) or prompts is None:
            prompts = [prompts]
        return [EncodedPrompt(prompt, [], []) for prompt in prompts]

    def runs_of(
        self,
        call: PipelineCall,
        forwards: Forwards,
        records: Sequence[CapturedCall],
        latents: "NotedLatents",
        output: Any,
        edits: Sequence[Any],
        touched: Mapping[Any, int],
        stopped: str,
    ) -> list[Run]:
        """Make a run for each video of a call; none where it was stopped before anything was seen."""
        if stopped and not forwards.passes and not records:
            return []
        videos = diffusers_latents.latents_by_frame(self.model, latents.of(output), forwards.shape)
        counts = [len(videos), *forwards.shape[:1], *(record.q_shape[0] for record in records)]
        count = max(*counts, 1)
        frames = videos.shape[1]
        if forwards.passes:
            frames = 1 + max(frame for at in forwards.passes for frame in at.query_frames)
            videos = videos[:, -frames:]  # reference images stand in front
        pixels = pixels_of(output, call.arguments)
        live = identities.live_weights(self.models)
        edits = rollouts.all_edits(edits, touched)
        layers = max((record.site.layer for record in records), default=-1) + 1
        decoder = decoder_of(self.pipe)
        runs = []
        for item in range(count):
            config = call.configs[item * len(call.configs) // count]
            config = replace(config, num_frames=frames)
            calls = [record.of_item(item) for record in records if item < record.q_shape[0]]
            if count == 1:
                calls = list(records)
            common = self.facts(call, config, item, edits, live, calls)
            rollouts.note_calls(common, edits, touched)
            if stopped:
                common |= {"partial": True, "notes": ["partial: the call was stopped before its end"]}
            video = videos[item : item + 1]
            common["fingerprint"] = provenance.with_result(common["fingerprint"], video)
            runs.append(
                Run(
                    config=config,  # type: ignore[arg-type]
                    num_layers=layers,
                    records=calls,
                    latents=video,
                    pass_timesteps=[],
                    prompt_tokens=self.encoded_of(call, config.prompt).tokens,
                    common=common,
                    stopped=stopped,
                    bidirectional=True,
                    returned=pixels[item] if item < len(pixels) else None,
                    decoder=decoder,
                )
            )
        return runs

    def common(self, config: PipelineConfig, edits: Sequence[Any] = (), **more: Any) -> dict[str, Any]:
        """Return the fields that caches of the running call's video share."""
        call = self.call or no_call(config)
        return self.facts(call, config, 0, edits, identities.live_weights(self.models), ())

    def items_of(self, configs: Sequence[Any]) -> int:
        return 0

    def text_kind(self) -> str | None:
        family = family_of(self.model)
        if family is None or getattr(self.pipe, "tokenizer", None) is None:
            return None
        if family.cross:
            return "cross"
        if family.text_of is not None:
            return "self"
        return None

    def numbers_of(self, call: PipelineCall, words: Sequence[str]) -> prompt_words.Numbers:
        """Return the numbers of the words' tokens in each video's prompt, which the call will encode.

        ConfigError for words that do not stand in a prompt, and for embeddings whose prompt nobody saw.
        """
        texts = dict[str, str]()
        for config in call.configs:
            if config.prompt is None:
                raise errors.ConfigError(
                    "words= needs the prompt: give it in place of prompt_embeds, or encode it inside capture"
                )
            texts[config.prompt] = text_of_prompt(self.pipe, config.prompt)
            prompt_words.require_words(texts[config.prompt], words)

        def find() -> prompt_words.Numbers:
            by_prompt = dict[str | None, tuple[tuple[int, ...], ...]]()
            for prompt, text in texts.items():
                encoded = self.encoded_of(call, prompt)
                by_prompt[prompt] = prompt_words.tokens_of_words(encoded.of_prompt, words, text)
            return [by_prompt[config.prompt] for config in call.configs]

        return prompt_words.LateNumbers(len(call.configs), find)

    def encoded_of(self, call: PipelineCall, prompt: str | None) -> "EncodedPrompt":
        """Return the tokens of a prompt as the call's text encoder got them; none where nobody saw it."""
        if not call.encoded and not hasattr(self.pipe, "encode_prompt"):  # it encodes in blocks of its own
            prompts = list(dict.fromkeys(config.prompt for config in call.configs))
            call.encoded.update(encoded_prompts(self.pipe, prompts, call.rows, None))
        return call.encoded.get(prompt, NOT_ENCODED)

    def facts_of(self, configs: Sequence[Any], *sizes: Any) -> list[dict[str, Any]]:
        count, frames = sizes
        call, live, edits = (
            self.call or no_call(self.config),
            identities.live_weights(self.models),
            self.active_edits(),
        )
        configs = [replace(configs[item * len(configs) // count], num_frames=frames) for item in range(count)]
        return [self.facts(call, config, item, edits, live, ()) for item, config in enumerate(configs)]

    def facts(
        self,
        call: PipelineCall,
        config: PipelineConfig,
        item: int,
        edits: Sequence[Any],
        live: identities.LiveWeights,
        calls: Sequence[CapturedCall],
    ) -> dict[str, Any]:
        """Return the fields that caches of one video share."""
        layout = next((record.layout for record in calls if record.layout), None)
        heads, head_dim = 1, 1
        if calls:
            heads, head_dim = calls[0].q_shape[2:]
        elif self.model_config.num_heads:
            heads, head_dim = self.model_config.num_heads, self.model_config.head_dim or 1
        made_of = self.identity(config, edits, live=live, call=call, item=item)
        common: dict[str, Any] = {
            "schema_version": 1,
            "read_by": READ_BY,
            "prompt": config.prompt,
            "seed": config.seed,
            "generator_state": call.states[min(item, len(call.states) - 1)],
            "num_frames": config.num_frames,
            "num_frame_per_block": config.num_frames,
            "block_sizes": [config.num_frames],
            "frame_seq_length": layout.tokens_per_slot if layout else 1,
            "num_heads": heads,
            "head_dim": head_dim,
            "model": config.model,
            "weights": "changed" if live.differs(_loaded[self.pipe]) else "pipeline",
            "weights_file": None,
            "weights_sha256": None,
            "live_weights": live.sampled,
            "live_weights_whole": live.whole,
            "config": config.settings,
            "scheduler": scheduler_facts(self.pipe),
            "versions": provenance.versions(),
            "device": provenance.device_name(self.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "fingerprint": provenance.fingerprint(made_of),
        }
        common |= {name: config.settings[name] for name in GUIDANCE if name in config.settings}
        negative = call.arguments.get("negative_prompt")
        if isinstance(negative, str):
            common["negative_prompt"] = negative
        if live.quantised:
            common["quantised"] = live.quantised
        uncompiled = [
            name or type(model).__name__
            for name, model in self.models.items()
            if diffusers_capture.is_uncompiled(model)
        ]
        if uncompiled:
            common["uncompiled"] = uncompiled
        checks = {record.frames for record in calls if record.site.kind == "self"} - {None}
        if checks:
            order = ("unverified", "told", "verified")
            common["frames"] = next(word for word in order if word in checks)
        if edits:
            common["interventions"] = provenance.record_of(edits)
        return common

    def identity(
        self,
        config: PipelineConfig,
        edits: Sequence[Any] | None = None,
        live: identities.LiveWeights | None = None,
        call: PipelineCall | None = None,
        item: int = 0,
        **more: Any,
    ) -> dict[str, Any]:
        """Return everything that the numbers of a video depend on, as plain values by name."""
        call = call or self.call
        live = live or identities.live_weights(self.models)
        values = {
            "model": config.model,
            "class": type(compiled.plain(self.pipe)).__qualname__,
            "weights": live.sampled,
            "prompt": config.prompt,
            "seed": config.seed,
            "scheduler": scheduler_facts(self.pipe),
            "edits": [edit.identity_values() for edit in (edits if edits is not None else ())],
            "numbers": identities.NUMBERS,
            **more,
        }
        if call is not None:
            values["inputs"] = call.inputs
            if config.seed is None:
                values["state"] = call.states[min(item, len(call.states) - 1)]
            if len(call.configs) > 1:
                values["item"] = [item, len(call.configs)]
        return json.loads(json.dumps(values, default=str))

    # --- Who watches
    @contextmanager
    def opened(self, layout: Any = None) -> Iterator[None]:
        """Let captures and edits see this pipeline while the context lasts, and its calls be runs."""
        with (
            diffusers_capture.watching(self.pipe, layout),
            noted_prompts(self.pipe),
            wrapped_call(self.pipe),
        ):
            yield

    @contextmanager
    def beside_calls(self, capture: Any) -> Iterator[None]:
        """Make a run, when the context ends, of forwards that no call of the pipeline makes."""
        models: Any = OutsideCalls(self)
        planned, runs = no_call(replace(self.config, prompt=None)), list[Run]()
        with ExitStack() as stack:
            touched = stack.enter_context(counted_edits())
            stack.enter_context(capture.recording(self, planned.configs, runs, models))
            forwards = Forwards(models=models)
            stack.enter_context(sites.watched(forwards))
            # Words are of a prompt, which no call tells here: capture.requests has none of them.
            records = stack.enter_context(rollouts.capturing(capture.requests, models))
            try:
                yield
            finally:
                move_to_cpu(records)
                if forwards.passes or records:
                    noted = NotedLatents(self.pipe, {})
                    runs += self.runs_of(planned, forwards, records, noted, None, [], touched, "")

    def replaced(self, **attributes: Any) -> "PipelineSession":
        """Return this session with other attributes, such as the call that runs."""
        other = object.__new__(type(self))
        vars(other).update(vars(self) | attributes)
        return other

    def is_watched(self) -> bool:
        """Return whether anybody captures or edits this pipeline in this context."""
        return bool(self.captures() or self.watchers() or sites.observer(next(iter(self.ids))))

    def is_calling(self) -> bool:
        """Return whether a call of this pipeline runs in this context."""
        return id(self) in _CALLS.get()

    def __repr__(self) -> str:
        kinds = ", ".join(type(model).__name__ for model in self.models.values())
        return f"PipelineSession: {self.config.model}, {kinds}"


# --- Calls of a pipeline
# Arguments that say nothing of a video's numbers, or that its prompt and seed say
NOT_NUMBERS: tuple[str, ...] = ("generator", "output_type", "return_dict", "prompt", "prompt_embeds")
NOT_NUMBERS += ("callback_on_step_end", "callback_on_step_end_tensor_inputs")


def signature_of(pipe: Any) -> inspect.Signature:
    """Return the signature that names a pipeline's arguments: its parent's where a subclass hands all on."""
    calls = [vars(kind)["__call__"] for kind in type(pipe).__mro__ if "__call__" in vars(kind)]
    signatures = [inspect.signature(call) for call in calls]
    return next((known for known in signatures if "prompt" in known.parameters), signatures[0])


def _takes_any(signature: inspect.Signature) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def arguments_of(pipe: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, with defaults, and without the pipeline itself."""
    signature = signature_of(pipe)
    bound = signature.bind(pipe, *args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    del arguments[next(iter(signature.parameters))]
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    return arguments


def no_call(config: PipelineConfig) -> PipelineCall:
    """Return what stands for a call where forwards ran in a loop of somebody's own."""
    return PipelineCall({}, [config], [None], [], {})


def original_call(pipe: Any) -> Callable[..., Any]:
    """Return the __call__ of a pipeline's class, as it is without captures."""
    kind = type(pipe)
    if kind in _wrapped:
        return _wrapped[kind][0]
    return kind.__call__


@contextmanager
def wrapped_call(pipe: Any) -> Iterator[None]:
    """Make calls of a pipeline runs of its session, where somebody watches. Contexts may end in any order."""
    kind = type(pipe)
    if isinstance(pipe, nn.Module):
        yield
        return
    with _lock:
        if kind not in _wrapped:
            original, is_its_own = kind.__call__, "__call__" in vars(kind)
            _wrapped[kind] = (original, is_its_own, 0)
            kind.__call__ = _as_run(original)
        original, is_its_own, count = _wrapped[kind]
        _wrapped[kind] = (original, is_its_own, count + 1)
    try:
        yield
    finally:
        with _lock:
            original, is_its_own, count = _wrapped.pop(kind)
            if count > 1:
                _wrapped[kind] = (original, is_its_own, count - 1)
            elif is_its_own:
                kind.__call__ = original
            else:
                del kind.__call__


def _as_run(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(pipe: Any, *args: Any, **kwargs: Any) -> Any:
        session = _sessions.get(id(pipe))
        if session is None or session.pipe is not pipe or session.is_calling() or not session.is_watched():
            return original(pipe, *args, **kwargs)
        return session.make(original, args, kwargs)[1]

    return call


@contextmanager
def noted_prompts(pipe: Any) -> Iterator[None]:
    """Remember of which prompts embeddings were made while the context lasts."""
    encode = getattr(pipe, "encode_prompt", None)
    if encode is None or hasattr(encode, "of_session"):
        yield
        return
    its_own = vars(pipe).get("encode_prompt")

    @wraps(encode)
    def encode_prompt(*args: Any, **kwargs: Any) -> Any:
        rows: Rows = []
        with noted_rows(pipe, rows):
            output = encode(*args, **kwargs)
        arguments = inspect.signature(encode).bind(*args, **kwargs).arguments | kwargs
        note_prompts(pipe, arguments.get("prompt"), rows, output)
        return output

    encode_prompt.of_session = True  # type: ignore[attr-defined]
    pipe.encode_prompt = encode_prompt
    try:
        yield
    finally:
        del pipe.encode_prompt
        if its_own is not None:
            pipe.encode_prompt = its_own


def note_prompts(pipe: Any, prompt: Any, rows: "Rows", output: Any) -> None:
    """Remember of which prompt each row of encode_prompt's first output is; in a call, by the prompt."""
    embeds = output[0] if isinstance(output, tuple | list) and len(output) else output
    if not isinstance(embeds, Tensor) or prompt is None:
        return
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    encoded = encoded_prompts(pipe, prompts, rows, embeds)
    if id(pipe) in {id(session.pipe) for session in [*_sessions.values()] if session.is_calling()}:
        _ENCODED.get().update(encoded)
        return
    by_row = _prompts.setdefault(pipe, {})
    for number, row in enumerate(embeds):
        text = prompts[number * len(prompts) // len(embeds)]
        by_row[hash_of(row)] = encoded.get(text, EncodedPrompt(text, [], []))


@dataclass(eq=False)
class NotedLatents:
    """Latents at the end of a pipeline's steps: of each of its chunks, where it makes a video in several."""

    pipe: Any
    arguments: Mapping[str, Any]
    chunks: list[Tensor] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)  # arguments that the call takes beside the user's

    @contextmanager
    def noted(self) -> Iterator["NotedLatents"]:
        """Note the latents of a call in this context: by a callback, or of the scheduler's steps."""
        scheduler = getattr(self.pipe, "scheduler", None)
        if "callback_on_step_end" in self.arguments and self.arguments["callback_on_step_end"] is None:
            self.more = {"callback_on_step_end": self._on_step}
            yield self
            return
        if scheduler is None:
            yield self
            return
        step = scheduler.step

        @wraps(step)
        def noting(*args: Any, **kwargs: Any) -> Any:
            output = step(*args, **kwargs)
            latents = output[0] if isinstance(output, tuple) else output.prev_sample
            self.chunks[:] = [latents]
            return output

        scheduler.step = noting
        try:
            yield self
        finally:
            del scheduler.step

    def _on_step(self, pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        latents = given.get("latents")
        if latents is not None:
            if step == 0 or not self.chunks:
                self.chunks.append(latents)
            self.chunks[-1] = latents
        return {}

    def of(self, output: Any) -> Tensor:
        """Return the latents of a call as its scheduler has them; an empty tensor where nobody knows them."""
        returned = first_output(output)
        is_latent = self.arguments.get("output_type") == "latent"
        if is_latent and isinstance(returned, Tensor) and returned.ndim == 5:
            return returned
        if not self.chunks:
            return torch.empty(0, 0)
        shapes = {(len(x), x.ndim, *x.shape[-2:]) for x in self.chunks}
        if len(self.chunks) > 1 and len(shapes) == 1 and self.chunks[0].ndim == 5:
            return torch.cat(self.chunks, frame_axis(self.pipe))
        return self.chunks[-1]


def frame_axis(pipe: Any) -> int:
    """Return the axis of frames in a pipeline's latents."""
    return diffusers_latents.frames_at(next(iter(diffusers_capture.transformers_of(pipe).values())))


def first_output(output: Any) -> Any:
    """Return what a pipeline made: frames of its output, or the first of a tuple."""
    for name in ("frames", "videos"):
        value = getattr(output, name, None)
        if value is None and hasattr(output, "values") and isinstance(getattr(output, "values", None), dict):
            value = output.values.get(name)
        if value is not None:
            return value
    if isinstance(output, tuple) and output:
        return output[0]
    return output


def pixels_of(output: Any, arguments: Mapping[str, Any]) -> list[Tensor]:
    """Return the videos that a pipeline returned, each uint8 [frames, height, width, 3]; none of latents."""
    frames = first_output(output)
    if frames is None or arguments.get("output_type") == "latent":
        return []
    if isinstance(frames, Tensor) and frames.ndim == 5 and frames.shape[2] == 3:
        return list(to_pixels(frames.float()).cpu())
    if isinstance(frames, list) and frames and isinstance(frames[0], list):  # of pictures
        frames = np.stack([np.stack([np.asarray(picture) for picture in video]) for video in frames])
    if not isinstance(frames, np.ndarray) or frames.ndim != 5 or frames.shape[-1] != 3:
        return []
    if frames.dtype != np.uint8:
        frames = (frames * 255).round().astype(np.uint8)
    return list(torch.from_numpy(frames))


def decoder_of(pipe: Any) -> Callable[[Tensor], Tensor]:
    """Return what decodes latents [1, F, C, h, w] as a pipeline does -> uint8 [frames, height, width, 3]."""
    return partial(decode_by, getattr(pipe, "vae", None), type(pipe).__name__)


@torch.no_grad()
def decode_by(vae: Any, title: str, latents: Tensor) -> Tensor:
    """Decode latents by the VAE of a Wan or Hunyuan pipeline; RunError for other VAEs, which differ."""
    kind = type(vae).__name__
    if kind not in ("AutoencoderKLWan", "AutoencoderKLHunyuanVideo", "AutoencoderKLHunyuanVideo15"):
        raise RunError(f'{title} returned no video: leave output_type="latent" out, and it decodes its own')
    x = latents.transpose(1, 2).to(vae.device, vae.dtype)  # [1, C, F, h, w]
    if kind == "AutoencoderKLWan":
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1).to(x)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        x = x / (1.0 / std) + mean
    else:
        x = x / vae.config.scaling_factor
    video = vae.decode(x, return_dict=False)[0]
    return to_pixels((video.float() / 2 + 0.5).clamp(0, 1).transpose(1, 2))[0].cpu()


# --- Facts
def name_of(x: Any) -> str:
    """Return the repository or folder that a pipeline was read from, or its class."""
    config = getattr(x, "config", {})
    origin = getattr(config, "_name_or_path", None) or getattr(config, "name_or_path", None)
    if origin and Path(origin).is_dir():
        return Path(origin).name
    return origin or type(compiled.plain(x)).__name__


def scheduler_facts(pipe: Any) -> dict[str, Any]:
    """Return the class of a pipeline's scheduler and its settings; nothing where there is none."""
    scheduler = getattr(pipe, "scheduler", None)
    if scheduler is None:
        return {}
    settings = {name: value for name, value in dict(scheduler.config).items() if not name.startswith("_")}
    return {"class": type(scheduler).__name__} | json.loads(json.dumps(settings, default=str))


# --- What text encoders get
class EncodedPrompt(NamedTuple):
    """A prompt and its tokens by name: all that the model reads, and those with "" for what is around it."""

    prompt: str | None
    tokens: list[str]
    of_prompt: list[str]


NOT_ENCODED = EncodedPrompt(None, [], [])


Rows = list[tuple[list[int], list[bool]]]  # ids of tokens, and which of them are read


@contextmanager
def noted_rows(pipe: Any, rows: Rows) -> Iterator[None]:
    """Note the rows that a pipeline's text encoder gets in this context.

    One that reads pictures too is left out: where their tokens go is not known.
    """
    encoder = getattr(pipe, "text_encoder", None)
    tokenizer = getattr(pipe, "tokenizer", None)
    if not isinstance(encoder, nn.Module) or tokenizer is None:
        yield
        return

    def note(module: Any, args: Any, kwargs: Any) -> None:
        arguments = dict(zip(("input_ids", "attention_mask"), args, strict=False)) | kwargs
        ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
        if not isinstance(ids, Tensor) or arguments.get("pixel_values") is not None:
            return
        if not isinstance(mask, Tensor):
            mask = ids != tokenizer.pad_token_id
        rows.extend(zip(ids.tolist(), mask.bool().tolist(), strict=True))

    hook = encoder.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def encoded_prompts(
    pipe: Any, prompts: Sequence[str | None], rows: Rows, embeds: Any
) -> dict[str | None, EncodedPrompt]:
    """Return the tokens of prompts, whose rows the text encoder got first, by prompt.

    embeds [B, L, C] have fewer tokens than a row where the pipeline cuts off a template in front.
    """
    by_prompt = dict[str | None, EncodedPrompt]()
    for prompt, (ids, is_read) in zip(prompts, rows, strict=False):
        if prompt is None:
            continue
        # 1. The tokens of the row, without padding at the end.
        names = pipe.tokenizer.convert_ids_to_tokens(ids)
        if puts_registers(pipe):
            names = [name for name, reads in zip(names, is_read, strict=True) if reads]
        elif any(is_read):
            names = names[: len(names) - is_read[::-1].index(True)]
        # 2. The prompt's own tokens; the model reads those behind the template in front.
        ids_alone = pipe.tokenizer(text_of_prompt(pipe, prompt), add_special_tokens=False).input_ids
        place = prompt_words.place_in(names, pipe.tokenizer.convert_ids_to_tokens(ids_alone))
        of_prompt = [name if number in place else "" for number, name in enumerate(names)]
        start = 0
        if isinstance(embeds, Tensor) and embeds.ndim == 3:
            start = max(0, len(ids) - embeds.shape[1])
        by_prompt[prompt] = EncodedPrompt(prompt, names[start:], of_prompt[start:])
    return by_prompt


def puts_registers(pipe: Any) -> bool:
    """Return whether padding is replaced by registers behind the tokens, as LTX-2's connectors do."""
    config = getattr(getattr(pipe, "connectors", None), "config", {})
    return config.get("video_connector_num_learnable_registers") is not None


def text_of_prompt(pipe: Any, prompt: str) -> str:
    """Return a prompt as the pipeline cleans it before it encodes."""
    modules = (sys.modules[kind.__module__] for kind in type(pipe).__mro__)
    clean = next((module.prompt_clean for module in modules if hasattr(module, "prompt_clean")), str.strip)
    return clean(prompt)


def seed_of(generator: torch.Generator) -> int | None:
    """Return the seed of a generator that has drawn nothing yet; None of another one."""
    seed = generator.initial_seed()
    fresh = torch.Generator(generator.device).manual_seed(seed)
    if torch.equal(fresh.get_state(), generator.get_state()):
        return seed
    return None


def generator_again(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """Return a generator that will draw the same; without one, of PyTorch's own for the device."""
    if generator is not None:
        again = torch.Generator(generator.device).manual_seed(generator.initial_seed())
        again.set_state(generator.get_state())
        return again
    again = torch.Generator(device)
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    again.set_state(state)
    return again


def hash_of(x: Tensor) -> str:
    """Return 16 hex digits of the SHA-256 of a tensor's numbers and shape."""
    x = x.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{x.dtype} {list(x.shape)}".encode())
    digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(part, PLAIN) for part in value)
    return isinstance(value, PLAIN)


def _as_plain(value: Any) -> Any:
    """Return a value as plain ones; of tensors, arrays and pictures a hash of their numbers."""
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return hash_of(value)
    if isinstance(value, Mapping):
        return {str(name): _as_plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_as_plain(part) for part in value]
    if isinstance(value, np.ndarray) or hasattr(value, "tobytes"):
        return hashlib.sha256(value.tobytes()).hexdigest()[:16]
    return errors.short_repr(value)


# --- The x0 lens
@dataclass(eq=False)
class PipelineLens(Watcher):
    """Read x0 after chosen layers: a forward again, in which every layer returns what the chosen one did."""

    model: nn.Module
    layers: Sequence[int] | None
    found: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)  # by layer, block, step
    sees: frozenset[str] | None = frozenset({"x_t", "x0"})
    outputs: list = field(default_factory=list)  # of each layer, in this forward
    given: tuple = ()  # the forward's arguments
    noisy: Tensor | None = None

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Note arguments and outputs of forwards while the context lasts."""
        modules = diffusers_capture.layers_of(self.model)
        if not modules:
            raise errors.ConfigError(f"x0_lens does not know the layers of {type(self.model).__name__}")
        with ExitStack() as stack:
            begin = self.model.register_forward_pre_hook(self._begin, with_kwargs=True)
            stack.callback(begin.remove)
            for module in modules:
                stack.callback(module.register_forward_hook(self._note).remove)
            yield

    def _begin(self, model: Any, args: Any, kwargs: Any) -> None:
        self.given = args, kwargs
        self.outputs.clear()

    def _note(self, module: Any, args: Any, output: Any) -> None:
        self.outputs.append(output)

    def on_activation(self, x: Tensor, where: sites.ActivationSite) -> None:
        if where.site == "x_t":
            self.noisy = x
            return
        if where.branch == "uncond":
            return
        forward = attention.FORWARD.get()
        assert forward is not None and self.noisy is not None
        told = told_of(self.model, None)
        arguments = diffusers_capture.arguments_of(self.model, *self.given)
        [items] = [items for at, items in forward.parts if at == where.at]
        for layer in range(len(self.outputs)) if self.layers is None else self.layers:
            output = Context().run(self._again, self.outputs[layer])
            flow = diffusers_latents.Window(self.model, output[0], forward.video, arguments).frames[items]
            a, b = diffusers_latents.coefficients(self.model, told, where.at, flow)
            x0 = a * self.noisy[:, :, : flow.shape[2]] + b * flow
            self.found[layer, where.block, where.step or 0] = x0.detach().cpu()

    @torch.no_grad()
    def _again(self, output: Any) -> Any:
        """Run the forward again, whose layers all return this output."""
        args, kwargs = self.given
        modules, kept = diffusers_capture.layers_of(self.model), list(self.outputs)
        before = [vars(module).get("forward") for module in modules]
        for module in modules:
            module.forward = lambda *_, **__: output
        try:
            return type(self.model).forward(self.model, *args, **kwargs)
        finally:
            for module, forward in zip(modules, before, strict=True):
                del module.forward
                if forward is not None:
                    module.forward = forward
            self.outputs[:] = kept
