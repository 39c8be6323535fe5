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
import json
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from experiments import pipeline_calls, provenance
from experiments import runs as rollouts
from experiments.analysis import prompt_words
from experiments.caches.files import Record
from experiments.caches.formats import READ_BY
from wan import compiled, diffusers_capture, diffusers_latents, errors, sites
from wan import identity as identities
from wan.capture import CapturedCall, move_to_cpu
from wan.diffusers_frames import family_of
from wan.interventions import Edit, counted_edits
from wan.model import WanModel

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

GUIDANCE = ("guidance_scale", "guidance_scale_2", "true_cfg_scale", "real_guidance_scale")
FRAME_CHECKS = ("unverified", "told", "verified")  # how it is known where frames lie, the weakest first


@dataclass(frozen=True)
class PipelineSizes:
    """Sizes of a transformer; None where its config does not tell them."""

    num_layers: int | None
    num_heads: int | None
    head_dim: int | None


@dataclass(eq=False)
class Forwards(sites.Watcher):
    """Note the passes of a run's forwards, and the shape of their latents by frame."""

    sees: frozenset[str] | None = frozenset({"x_t"})
    models: Container[int] | None = None
    passes: list[sites.Pass] = field(default_factory=list)
    shape: tuple[int, ...] = ()  # [B, F, C, h, w]

    def on_activation(self, x: Tensor, where: sites.ActivationSite) -> None:
        self.passes.append(where.at)
        self.shape = tuple(x.shape)


@dataclass(frozen=True, eq=False)
class CallRecord:
    """What was seen of one call of a pipeline, or of forwards that no call made."""

    passes: Sequence[sites.Pass]  # of its forwards
    shape: Sequence[int]  # [B, F, C, h, w] of what went into them; () where none ran
    records: Sequence[CapturedCall]  # attention that was captured
    edits: Sequence[Edit]
    touched: Mapping[Edit, int]  # how many calls each edit changed
    latents: Tensor = field(default_factory=lambda: torch.empty(0, 0))  # as the scheduler has them
    pixels: Sequence[Tensor] = ()  # videos that the pipeline returned, uint8 [frames, height, width, 3]
    stopped: str = ""


@dataclass(frozen=True, eq=False)
class OutsideCalls(Container[int]):
    """The ids of a session's transformers while no call of its pipeline runs: a Watcher's models."""

    session: "PipelineSession"

    def __contains__(self, model: object) -> bool:
        return model in self.session.ids and not self.session.is_calling()


GIVE_A_PIPELINE = "give a pipeline that denoises videos by a transformer, such as WanPipeline"
_sessions: weakref.WeakValueDictionary[int, "PipelineSession"] = weakref.WeakValueDictionary()
# What a pipeline's weights were when it was first seen
_loaded: weakref.WeakKeyDictionary[object, identities.LiveWeights] = weakref.WeakKeyDictionary()
_lock = Lock()  # of the classes whose __call__ is wrapped


def is_pipeline(x: Any) -> bool:
    """Return whether x is a pipeline or a transformer, and not a name, a path or a config."""
    return isinstance(x, nn.Module) or hasattr(x, "transformer")


def load_pipeline(x: Any, **settings: Any) -> "PipelineSession":
    """Return the session of a pipeline or a transformer. ConfigError for anything else, and for settings."""
    if not is_pipeline(x):
        raise errors.ConfigError(
            f"{errors.short_repr(x)} is no name or path of a config, no folder, pipeline or transformer; "
            f"{GIVE_A_PIPELINE}"
        )
    for name, value in settings.items():
        if value is not None:
            raise errors.ConfigError(
                f"a pipeline takes {name} when it is called: session.generate(prompt, ...)"
            )
    return session_of(x)


def session_of(x: Any) -> "PipelineSession":
    """Return the session of a pipeline or a transformer: the same one while anybody holds it."""
    if isinstance(x, WanModel):
        raise errors.ConfigError(f"{type(x).__name__} is the model of a session: give the session itself")
    session = _sessions.get(id(x))
    if session is None or session.pipe is not x:
        session = PipelineSession(x)
        _sessions[id(x)] = session
    return session


class PipelineSession(rollouts.AnySession):
    """A pipeline of diffusers that makes runs, or a transformer alone, which has all but generate().

    >>> session = load(WanPipeline.from_pretrained("Wan-AI/Wan2.1-T2V-1.3B-Diffusers"))
    >>> run = session.generate("a red circle", seed=42, num_inference_steps=20)
    >>> run.latents.shape, run.common["scheduler"]["class"]
    >>> session.models  # its transformers by name, two where it has two experts
    """

    bidirectional = True
    kind = "pipeline"
    can_nest = True

    def __init__(self, pipe: Any):
        self.pipe = pipe
        self.config = pipeline_calls.PipelineConfig(model=pipeline_calls.name_of(pipe))
        self.call: pipeline_calls.PipelineCall | None = (
            None  # the one that runs, of a session that an edit rolls out by
        )
        for model in self.models.values():
            diffusers_capture.prepare(model)
        if pipe not in _loaded:
            _loaded[pipe] = identities.live_weights(self.models)

    # --- Its parts
    @property
    def models(self) -> dict[str | None, nn.Module]:
        """The transformers by name, as the pipeline has them now."""
        return diffusers_capture.transformers_of(self.pipe)

    @property
    def ids(self) -> frozenset[int]:
        """The ids of the transformers."""
        return frozenset(map(id, self.models.values()))

    @property
    def models_watched(self) -> frozenset[int]:
        return self.ids

    @property
    def model(self) -> Any:
        """The transformer, the first of two."""
        return next(iter(self.models.values()))

    @property
    def device(self) -> torch.device:
        """Where the pipeline computes."""
        return getattr(self.pipe, "_execution_device", None) or self.model.device

    @property
    def model_config(self) -> PipelineSizes:
        """Numbers of layers and heads, as far as they are known."""
        layers = diffusers_capture.count_layers(self.model)
        heads = getattr(self.model.config, "num_attention_heads", None)
        return PipelineSizes(layers, heads, getattr(self.model.config, "attention_head_dim", None))

    @property
    def place_among_gpus(self) -> tuple[int, int]:
        """The rank of this process among those that share a transformer's tokens, and their number."""
        places = [diffusers_capture.place_among_gpus(model) for model in self.models.values()]
        return max(places, key=lambda place: place[1])

    def watchers(self) -> Sequence[sites.Watcher]:
        of_models = [watcher for model in self.ids for watcher in sites.watchers(model)]
        return list(dict.fromkeys(of_models))

    def prepare(self, **more: Any) -> "PipelineSession":
        """Return the session, which is loaded."""
        return self

    def with_weights(self, config: Any) -> Any:
        raise errors.ConfigError("a source of a pipeline is another prompt or seed of it; leave weights out")

    # --- Videos
    def generate(self, *args: Any, seed: int | None = None, **kwargs: Any) -> Any:
        """Call the pipeline with its own arguments -> the run, or a list of runs of several videos.

        seed is that of a new generator on the pipeline's device.
        """
        rollouts.require_no_run()
        kwargs = self.seeded(kwargs, seed)
        self.check_call(args, kwargs)
        with ExitStack() as stack:
            if self.is_watched():  # a compiled transformer stays compiled where nobody looks
                stack.enter_context(self.opened())
            runs, _ = self.make(original_call(self.pipe), args, kwargs)
        if len(runs) == 1:
            return runs[0]
        return runs

    def seeded(self, arguments: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
        """Return a call's arguments with a new generator of the seed, on the pipeline's device."""
        if seed is None:
            return dict(arguments)
        if arguments.get("generator") is not None:
            raise errors.ConfigError("seed and generator both make the noise: leave one out")
        return dict(arguments) | {"generator": torch.Generator(self.device).manual_seed(seed)}

    def check_call(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Raise ConfigError for arguments that the pipeline does not take."""
        if isinstance(self.pipe, nn.Module):
            raise errors.ConfigError(f"{type(self.pipe).__name__} alone makes no video: load its pipeline")
        signature, title = pipeline_calls.signature_of(self.pipe), type(self.pipe).__name__
        if not pipeline_calls.takes_any(signature):
            for name in kwargs:
                errors.require_known(name, [*signature.parameters][1:], f"{title} takes no {{}}")
        try:
            signature.bind(self.pipe, *args, **kwargs)
        except TypeError as error:
            raise errors.ConfigError(f"{title}: {error}") from None

    def make(self, call: Callable[..., Any], args: Any, kwargs: Any) -> tuple[list[rollouts.Run], Any]:
        """Call the pipeline under all who watch it in this context -> a run for each video, what it returned.

        A call that is stopped by an error leaves the runs of what it reached with who captures it.
        """
        # 1. The videos that it will make, as far as its arguments tell.
        sites.require_running_generators()
        planned = self.plan(args, kwargs)
        captures = self.captures()
        numbers_of = partial(self.numbers_of, planned)
        requests = [request for capture in captures for request in capture.requests_of(numbers_of)]
        runs: list[rollouts.Run] = []
        output = None
        with ExitStack() as stack:
            token = rollouts.ROLLING.set(True)
            stack.callback(rollouts.ROLLING.reset, token)
            stack.enter_context(pipeline_calls.running(self.pipe, planned))
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
            noted = pipeline_calls.NotedLatents(self.pipe, planned.arguments)
            latents = stack.enter_context(noted.noted())
            # 3. The call itself; then what came of it.
            stopped = "before its end"
            try:
                output = call(self.pipe, *args, **(kwargs | noted.extra_arguments))
                stopped = ""
            finally:
                move_to_cpu(records)
                runs += self.runs_of(
                    planned,
                    CallRecord(
                        passes=forwards.passes,
                        shape=forwards.shape,
                        records=records,
                        latents=latents.of(output),
                        pixels=pipeline_calls.pixels_of(output, planned.arguments),
                        edits=rollouts.all_edits(edits, touched),
                        touched=touched,
                        stopped=stopped,
                    ),
                )
        return runs, output

    def rollout(self, config: pipeline_calls.PipelineConfig) -> Tensor:
        """Make the running call's video once more, with another prompt or seed, beside it -> its latents."""
        call = self.call
        assert call is not None, "a source is of a pipeline's call"
        # 1. The same noise, unless another seed is asked for.
        generators = [pipeline_calls.generator_again(generator, self.device) for generator in call.generators]
        if config.seed is not None and config.seed != call.configs[0].seed:
            generators = [generator.manual_seed(config.seed) for generator in generators]
        arguments = dict(call.arguments) | {"generator": generators}
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
        with sites.counting(), pipeline_calls.NotedLatents(pipe, arguments).noted() as latents:
            output = original_call(pipe)(pipe, **arguments)
        return latents.of(output)

    # --- What a call is, and what came of it
    def plan(self, args: Sequence[object], kwargs: Mapping[str, object]) -> pipeline_calls.PipelineCall:
        """Return the videos that a call will make, with prompt and seed of each."""
        return pipeline_calls.planned_call(self.pipe, self.config, args, kwargs, self.device)

    def runs_of(self, call: pipeline_calls.PipelineCall, record: "CallRecord") -> list[rollouts.Run]:
        """Make a run for each video of a call; none where it was stopped before anything was seen."""
        if record.stopped and not record.passes and not record.records:
            return []
        # 1. The latents by frame [B, F, C, h, w]; reference images stand in front of the video's frames.
        latents = diffusers_latents.latents_by_frame(self.model, record.latents, record.shape)
        frames = latents.shape[1]
        if record.passes:
            frames = 1 + max(frame for at in record.passes for frame in at.query_frames)
            latents = latents[:, -frames:]
        # 2. How many videos there are, of what was seen: nobody tells it of a loop of one's own.
        counts = [1, len(latents), *record.shape[:1], *(seen.q_shape[0] for seen in record.records)]
        count = max(counts)
        live = identities.live_weights(self.models)
        layers = max((seen.site.layer for seen in record.records), default=-1) + 1
        decoder = pipeline_calls.decoder_of(self.pipe)
        # 3. A run for each video: its settings, its calls, and the fields that caches share.
        runs = []
        for item in range(count):
            config = replace(call.configs[item * len(call.configs) // count], num_frames=frames)
            calls = list(record.records)
            if count > 1:
                calls = [seen.of_item(item) for seen in record.records if item < seen.q_shape[0]]
            item_latents = latents[item : item + 1]
            common = self.facts(call, config, item, record.edits, live, calls)
            rollouts.note_calls(common, record.edits, record.touched)
            if record.stopped:
                common |= {"partial": True, "notes": ["partial: the call was stopped before its end"]}
            common["fingerprint"] = provenance.with_result(common["fingerprint"], item_latents)
            runs.append(
                rollouts.Run(
                    config=config,  # type: ignore[arg-type]
                    num_layers=layers,
                    records=calls,
                    latents=item_latents,
                    pass_timesteps=[],
                    prompt_tokens=pipeline_calls.encoded_of(self.pipe, call, config.prompt).tokens,
                    common=common,
                    stopped=record.stopped,
                    bidirectional=True,
                    returned=record.pixels[item] if item < len(record.pixels) else None,
                    decoder=decoder,
                )
            )
        return runs

    def common(
        self, config: pipeline_calls.PipelineConfig, edits: Sequence[Any] = (), **more: Any
    ) -> dict[str, Any]:
        """Return the fields that caches of the running call's video share."""
        call = self.call or pipeline_calls.no_call(config)
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

    def numbers_of(self, call: pipeline_calls.PipelineCall, words: Sequence[str]) -> prompt_words.Numbers:
        """Return the numbers of the words' tokens in each video's prompt, which the call will encode.

        ConfigError for words that do not stand in a prompt, and for embeddings whose prompt nobody saw.
        """
        texts = dict[str, str]()
        for config in call.configs:
            if config.prompt is None:
                raise errors.ConfigError(
                    "words= needs the prompt: give it in place of prompt_embeds, or encode it inside capture"
                )
            texts[config.prompt] = pipeline_calls.text_of_prompt(self.pipe, config.prompt)
            prompt_words.require_words(texts[config.prompt], words)

        def find() -> prompt_words.Numbers:
            by_prompt = dict[str | None, tuple[tuple[int, ...], ...]]()
            for prompt, text in texts.items():
                encoded = pipeline_calls.encoded_of(self.pipe, call, prompt)
                by_prompt[prompt] = prompt_words.tokens_of_words(encoded.of_prompt, words, text)
            return [by_prompt[config.prompt] for config in call.configs]

        return prompt_words.LateNumbers(len(call.configs), find)

    def facts_of(self, configs: Sequence[pipeline_calls.PipelineConfig], *sizes: int) -> list[dict[str, Any]]:
        count, frames = sizes
        call = self.call or pipeline_calls.no_call(self.config)
        live, edits = identities.live_weights(self.models), self.active_edits()
        facts = []
        for item in range(count):
            config = replace(configs[item * len(configs) // count], num_frames=frames)
            facts.append(self.facts(call, config, item, edits, live, ()))
        return facts

    def facts(
        self,
        call: pipeline_calls.PipelineCall,
        config: pipeline_calls.PipelineConfig,
        item: int,
        edits: Sequence[Any],
        live: identities.LiveWeights,
        calls: Sequence[CapturedCall],
    ) -> dict[str, Any]:
        """Return the fields that caches of one video share."""
        # 1. Sizes, of what was captured, or of the transformer's config.
        heads, head_dim = 1, 1
        if calls:
            heads, head_dim = calls[0].q_shape[2:]
        elif self.model_config.num_heads:
            heads, head_dim = self.model_config.num_heads, self.model_config.head_dim or 1
        tokens_per_frame = 1
        layouts = [seen.layout for seen in calls if seen.layout]
        if layouts:
            tokens_per_frame = layouts[0].tokens_per_slot
        weights = "pipeline"
        if live.differs(_loaded[self.pipe]):
            weights = "changed"
        made_of = self.identity(config, edits, live=live, call=call, item=item)
        # 2. What every video has.
        common: Record = {
            "schema_version": 1,
            "read_by": READ_BY,
            "prompt": config.prompt,
            "seed": config.seed,
            "generator_state": call.states[min(item, len(call.states) - 1)],
            "num_frames": config.num_frames,
            "num_frame_per_block": config.num_frames,
            "block_sizes": [config.num_frames],
            "frame_seq_length": tokens_per_frame,
            "num_heads": heads,
            "head_dim": head_dim,
            "model": config.model,
            "weights": weights,
            "weights_file": None,
            "weights_sha256": None,
            "live_weights": live.sampled,
            "live_weights_whole": live.whole,
            "config": config.settings,
            "scheduler": pipeline_calls.scheduler_facts(self.pipe),
            "versions": provenance.versions(),
            "device": provenance.device_name(self.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "fingerprint": provenance.fingerprint(made_of),
        }
        # 3. What some have.
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
        rank, gpus = self.place_among_gpus
        if gpus > 1:
            common["gpus"] = gpus
        if rank > 0:
            common["rank"] = rank
        checks = {seen.frames for seen in calls if seen.site.kind == "self"}
        for check in FRAME_CHECKS:
            if check in checks:
                common["frames"] = check
                break
        if edits:
            common["interventions"] = provenance.record_of(edits)
        return common

    def identity(
        self,
        config: pipeline_calls.PipelineConfig,
        edits: Sequence[Any] | None = None,
        live: identities.LiveWeights | None = None,
        call: pipeline_calls.PipelineCall | None = None,
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
            "scheduler": pipeline_calls.scheduler_facts(self.pipe),
            "edits": [edit.identity_values() for edit in edits or ()],
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
            pipeline_calls.noted_prompts(self.pipe),
            wrapped_call(self.pipe),
        ):
            yield

    @contextmanager
    def beside_calls(self, capture: Any) -> Iterator[None]:
        """Make a run, when the context ends, of forwards that no call of the pipeline makes."""
        models = OutsideCalls(self)
        planned, runs = pipeline_calls.no_call(replace(self.config, prompt=None)), list[rollouts.Run]()
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
                    record = CallRecord(
                        passes=forwards.passes,
                        shape=forwards.shape,
                        records=records,
                        edits=rollouts.all_edits([], touched),
                        touched=touched,
                    )
                    runs += self.runs_of(planned, record)

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
        return pipeline_calls.running_call(self.pipe) is not None

    def __repr__(self) -> str:
        kinds = ", ".join(type(model).__name__ for model in self.models.values())
        return f"PipelineSession: {self.config.model}, {kinds}"


# --- Calls that are runs
class WrappedCall(NamedTuple):
    """The __call__ of a pipeline's class while it is wrapped."""

    original: Callable[..., object]
    is_own: bool  # the class defines it, and no parent
    contexts: int  # how many have it wrapped


_wrapped: dict[type, WrappedCall] = {}


def original_call(pipe: "DiffusionPipeline") -> Callable[..., object]:
    """Return the __call__ of a pipeline's class, as it is without captures."""
    kind = type(pipe)
    if kind in _wrapped:
        return _wrapped[kind].original
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
            _wrapped[kind] = WrappedCall(kind.__call__, is_own="__call__" in vars(kind), contexts=0)
            kind.__call__ = _as_run(kind.__call__)
        wrapped = _wrapped[kind]
        _wrapped[kind] = wrapped._replace(contexts=wrapped.contexts + 1)
    try:
        yield
    finally:
        with _lock:
            wrapped = _wrapped.pop(kind)
            if wrapped.contexts > 1:
                _wrapped[kind] = wrapped._replace(contexts=wrapped.contexts - 1)
            elif wrapped.is_own:
                kind.__call__ = wrapped.original
            else:
                del kind.__call__


def _as_run(original: Callable[..., object]) -> Callable[..., object]:
    @wraps(original)
    def call(pipe: "DiffusionPipeline", *args: object, **kwargs: object) -> object:
        session = _sessions.get(id(pipe))
        if session is None or session.pipe is not pipe or session.is_calling() or not session.is_watched():
            return original(pipe, *args, **kwargs)
        return session.make(original, args, kwargs)[1]

    return call
