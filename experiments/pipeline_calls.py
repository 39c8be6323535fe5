"""Calls of a pipeline of diffusers: which videos one makes, what their numbers depend on, what came of it.

    call = planned_call(pipe, PipelineConfig(model=name_of(pipe)), ("a red circle",), {}, device)
    call.configs[0].prompt, call.configs[0].seed, call.inputs

Nothing here knows sessions or captures: pipeline_session.py makes runs of these calls.
"""

import hashlib
import inspect
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from experiments.analysis import prompt_words
from experiments.caches.files import RunError
from experiments.extraction.video import to_pixels
from wan import compiled, diffusers_capture, diffusers_passes
from wan.config import RunConfig
from wan.diffusers_latents import frames_at, unpacked
from wan.errors import short_repr
from wan.interventions import Edit

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

PLAIN = (str, int, float, bool)  # values of arguments that caches keep as they are
# Arguments that say nothing of a video's numbers, or that its prompt and seed say
NOT_NUMBERS: tuple[str, ...] = ("generator", "output_type", "return_dict", "prompt", "prompt_embeds")
NOT_NUMBERS += ("callback_on_step_end", "callback_on_step_end_tensor_inputs")
WAN_VAE, HUNYUAN_VAES = "AutoencoderKLWan", ("AutoencoderKLHunyuanVideo", "AutoencoderKLHunyuanVideo15")

Arguments = dict[str, object]  # of a call, by name


# --- What a call is
@dataclass(frozen=True)
class PipelineConfig:
    """What is known of one video of a pipeline; the names are those of RunConfig."""

    model: str
    prompt: str | None = ""  # None: embeddings were given that nobody saw being made
    seed: int | None = None  # None: the generator was not a fresh one
    num_frames: int = 1
    settings: Arguments = field(default_factory=dict)  # arguments of the call that are plain values
    reference_prompts: Sequence[str] = field(default_factory=lambda: RunConfig().reference_prompts)
    interventions: list[Edit] = field(default_factory=list)
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


@dataclass(frozen=True, eq=False)
class PipelineCall:
    """One call of a pipeline: its arguments by name, and the video that each item of its batch is."""

    arguments: Arguments  # by name, with defaults
    configs: list[PipelineConfig]
    states: list[str | None]  # hashes of the states of its generators, where they are not fresh
    generators: list[torch.Generator]  # as they were before the call
    inputs: Arguments  # all else that its numbers depend on, as plain values
    rows: "Rows" = field(default_factory=list)  # that its text encoder got
    encoded: dict[str | None, "EncodedPrompt"] = field(default_factory=dict)  # its prompts


def planned_call(
    pipe: "DiffusionPipeline",
    config: PipelineConfig,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    device: torch.device,
) -> PipelineCall:
    """Return the videos that a call will make, with prompt and seed of each.

    device is where the pipeline computes: without a generator PyTorch's own of that device draws the noise.
    """
    arguments = arguments_of(pipe, args, kwargs)
    # 1. A prompt for each video, and a generator for each or one for all.
    repeats = arguments.get("num_videos_per_prompt") or 1
    assert isinstance(repeats, int)
    encoded = prompts_of(pipe, arguments)
    prompts = [of_prompt.prompt for of_prompt in encoded for _ in range(repeats)]
    users_generators: list[torch.Generator | None]
    match arguments.get("generator"):
        case list() as one_for_each:
            users_generators = one_for_each
        case torch.Generator() as one_for_all:
            users_generators = [one_for_all]
        case _:
            users_generators = [None]
    generators = [generator_again(generator, device) for generator in users_generators]
    # 2. What its numbers depend on.
    settings = {name: value for name, value in arguments.items() if is_plain(value)}
    settings.pop("prompt", None)
    inputs = {name: as_plain(value) for name, value in arguments.items() if name not in NOT_NUMBERS}
    if None in prompts:
        inputs["prompt_embeds"] = as_plain(arguments.get("prompt_embeds"))
    inputs["generator"] = str(generators[0].device)
    # 3. The videos: a seed is told of a fresh generator, the state of any other one.
    configs, states = list[PipelineConfig](), list[str | None]()
    for number, prompt in enumerate(prompts):
        number %= len(generators)
        seed, state = None, None
        if users_generators[number] is not None:
            seed = seed_of(generators[number])
        if seed is None:
            state = hash_of(generators[number].get_state())
        states.append(state)
        configs.append(replace(config, prompt=prompt, seed=seed, settings=settings))
    return PipelineCall(
        arguments=arguments,
        configs=configs,
        states=states,
        generators=generators,
        inputs=inputs,
        encoded={of_prompt.prompt: of_prompt for of_prompt in encoded if of_prompt.tokens},
    )


def no_call(config: PipelineConfig) -> PipelineCall:
    """Return what stands for a call where forwards ran in a loop of somebody's own."""
    return PipelineCall(arguments={}, configs=[config], states=[None], generators=[], inputs={})


def signature_of(pipe: "DiffusionPipeline") -> inspect.Signature:
    """Return the signature that names a pipeline's arguments: its parent's where a subclass hands all on."""
    calls = [vars(kind)["__call__"] for kind in type(pipe).__mro__ if "__call__" in vars(kind)]
    signatures = [inspect.signature(call) for call in calls]
    for signature in signatures:
        if "prompt" in signature.parameters:
            return signature
    return signatures[0]


def takes_any(signature: inspect.Signature) -> bool:
    """Return whether a call takes arguments that its signature does not name."""
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def arguments_of(
    pipe: "DiffusionPipeline", args: Sequence[object], kwargs: Mapping[str, object]
) -> Arguments:
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


# --- Calls that run
_running: ContextVar[tuple[tuple[int, PipelineCall], ...]] = ContextVar("pipeline_calls", default=())  # by id


@contextmanager
def running(pipe: "DiffusionPipeline", call: PipelineCall) -> Iterator[None]:
    """Mark that a call of a pipeline runs while the context lasts; note what its text encoder gets."""
    token = _running.set((*_running.get(), (id(pipe), call)))
    try:
        with noted_rows(pipe, call.rows):
            yield
    finally:
        _running.reset(token)


def running_call(pipe: object) -> PipelineCall | None:
    """Return the call of this pipeline that runs in this context; None where there is none."""
    for key, call in _running.get():
        if key == id(pipe):
            return call
    return None


# --- Prompts, and what text encoders get of them
class EncodedPrompt(NamedTuple):
    """A prompt and its tokens by name: all that the model reads, and those with "" for what is around it."""

    prompt: str | None
    tokens: list[str]
    of_prompt: list[str]


NOT_ENCODED = EncodedPrompt(None, [], [])


class EncoderRow(NamedTuple):
    """What a text encoder got and made of one text of L tokens."""

    ids: list[int]
    is_read: list[bool]
    states: Sequence[Tensor] = ()  # of each layer, [L, COMPARED] of its channels


COMPARED = 8  # channels by which an embedding is found among an encoder's states
Rows = list[EncoderRow]
# The prompt of each row of embeddings that a pipeline made outside its calls, by the row's hash
_prompts: weakref.WeakKeyDictionary["DiffusionPipeline", dict[str, EncodedPrompt]] = (
    weakref.WeakKeyDictionary()
)


def prompts_of(pipe: "DiffusionPipeline", arguments: Mapping[str, object]) -> list[EncodedPrompt]:
    """Return a call's prompts: those that were encoded, where embeddings are given; None: not known."""
    embeds = arguments.get("prompt_embeds")
    if isinstance(embeds, Tensor):
        by_row = _prompts.get(pipe, {})
        return [by_row.get(hash_of(row), NOT_ENCODED) for row in embeds]
    prompts = arguments.get("prompt")
    if isinstance(prompts, str) or prompts is None:
        return [EncodedPrompt(prompts, [], [])]
    assert isinstance(prompts, Sequence)
    return [EncodedPrompt(prompt, [], []) for prompt in prompts]


def encoded_of(pipe: Any, call: PipelineCall, prompt: str | None) -> EncodedPrompt:
    """Return the tokens of a prompt as the call's text encoder got them; none where nobody saw it."""
    if not call.encoded and not hasattr(pipe, "encode_prompt"):  # it encodes in blocks of its own
        prompts = list(dict.fromkeys(config.prompt for config in call.configs))
        call.encoded.update(encoded_prompts(pipe, prompts, call.rows, None))
    return call.encoded.get(prompt, NOT_ENCODED)


@contextmanager
def noted_prompts(pipe: Any) -> Iterator[None]:
    """Remember of which prompts embeddings were made while the context lasts; a transformer makes none."""
    encode = getattr(pipe, "encode_prompt", None)
    if encode is None or hasattr(encode, "of_session"):
        yield
        return
    attribute_before = vars(pipe).get("encode_prompt")

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
        if attribute_before is not None:
            pipe.encode_prompt = attribute_before


def note_prompts(
    pipe: "DiffusionPipeline", prompt: str | Sequence[str] | None, rows: Rows, output: object
) -> None:
    """Remember of which prompt each row of encode_prompt's first output is; in a call, by the prompt."""
    embeds = output
    if isinstance(output, tuple | list) and output:
        embeds = output[0]
    if not isinstance(embeds, Tensor) or prompt is None:
        return
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    encoded = encoded_prompts(pipe, prompts, rows, embeds)
    call = running_call(pipe)
    if call is not None:
        call.encoded.update(encoded)
        return
    by_row = _prompts.setdefault(pipe, {})
    for number, row in enumerate(embeds):
        text = prompts[number * len(prompts) // len(embeds)]
        by_row[hash_of(row)] = encoded.get(text, EncodedPrompt(text, [], []))


@contextmanager
def noted_rows(pipe: Any, rows: Rows) -> Iterator[None]:
    """Note the rows that a pipeline's text encoder gets in this context, and what it makes of them."""
    encoder = getattr(pipe, "text_encoder", None)
    tokenizer = getattr(pipe, "tokenizer", None)
    if not isinstance(encoder, nn.Module) or tokenizer is None:
        yield
        return

    def note(module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], output: Any) -> None:
        arguments = dict(zip(("input_ids", "attention_mask"), args, strict=False)) | dict(kwargs)
        ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
        if not isinstance(ids, Tensor):
            return
        if not isinstance(mask, Tensor):
            mask = ids != tokenizer.pad_token_id
        states = [
            layer[..., :COMPARED].detach().clone()  # a view would hold all of it
            for layer in tensors_in(output)
            if layer.ndim == 3 and layer.shape[:2] == ids.shape
        ]
        for number, of_text in enumerate(zip(ids.tolist(), mask.bool().tolist(), strict=True)):
            rows.append(EncoderRow(*of_text, states=[state[number] for state in states]))

    hook = encoder.register_forward_hook(note, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def tensors_in(output: object) -> Iterator[Tensor]:
    """Yield the tensors of a module's output: of its fields, and of each layer."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from tensors_in(value)


def encoded_prompts(
    pipe: "DiffusionPipeline", prompts: Sequence[str | None], rows: Rows, embeds: Tensor | None
) -> dict[str | None, EncodedPrompt]:
    """Return the tokens of prompts, whose rows the text encoder got first, by prompt.

    embeds [B, L, C] are what the pipeline took of the encoder's states: it may cut off a template, or put
    tokens of a picture in front. A prompt is left out where they are none of those states.
    """
    by_prompt = dict[str | None, EncodedPrompt]()
    for number, (prompt, row) in enumerate(zip(prompts, rows, strict=False)):
        if prompt is None:
            continue
        # 1. The tokens of the row, without padding at the end.
        names = pipe.tokenizer.convert_ids_to_tokens(row.ids)
        if puts_registers(pipe):
            names = [name for name, reads in zip(names, row.is_read, strict=True) if reads]
        elif any(row.is_read):
            names = names[: len(names) - row.is_read[::-1].index(True)]
        # 2. The prompt's own tokens.
        ids_alone = pipe.tokenizer(text_of_prompt(pipe, prompt), add_special_tokens=False).input_ids
        place = prompt_words.place_in(names, pipe.tokenizer.convert_ids_to_tokens(ids_alone))
        # 3. Which token of the row the model reads at each place.
        places: Sequence[int] = range(len(names))
        if embeds is not None and embeds.ndim == 3 and not puts_registers(pipe):
            places = places_of(embeds[number * len(embeds) // len(prompts)], row)
        by_number = dict(enumerate(names))
        tokens = [by_number.get(n, "") for n in places]
        while tokens and not tokens[-1]:  # padding
            tokens.pop()
        if not tokens:
            continue
        of_prompt = [token if n in place else "" for n, token in zip(places, tokens, strict=False)]
        by_prompt[prompt] = EncodedPrompt(prompt, tokens, of_prompt)
    return by_prompt


def places_of(embeds: Tensor, row: EncoderRow) -> Sequence[int]:
    """Return which token of an encoder's row each of a prompt's embeddings [L, C] is; -1 where it is none.

    A pipeline takes the states of one layer, in pieces. Where it changes them nothing is found, and they are
    the row's in order if there are as many.
    """
    found: Sequence[int] = ()
    most = 0
    for states in row.states:
        is_equal = (embeds[:, None, :COMPARED] == states.to(embeds)).all(-1)  # [L, L of the row]
        is_of_row = is_equal.any(1)
        count = int(is_of_row.sum())
        if count <= most:
            continue
        most = count
        # Equal tokens have equal states in the first layer: the one in the longest piece is meant.
        length, length_of_row = is_equal.shape
        shifts = torch.arange(length_of_row, device=embeds.device) + length  # of the piece
        shifts = shifts - torch.arange(length, device=embeds.device)[:, None]
        sizes = shifts[is_equal].bincount(minlength=length + length_of_row)
        found = sizes[shifts].masked_fill(~is_equal, -1).argmax(1).masked_fill(~is_of_row, -1).tolist()
    if not found and len(embeds) == len(row.ids):
        return range(len(row.ids))
    return found


def puts_registers(pipe: object) -> bool:
    """Return whether padding is replaced by registers behind the tokens, as LTX-2's connectors do."""
    config = getattr(getattr(pipe, "connectors", None), "config", {})
    return config.get("video_connector_num_learnable_registers") is not None


def text_of_prompt(pipe: object, prompt: str) -> str:
    """Return a prompt as the pipeline cleans it before it encodes."""
    for kind in type(pipe).__mro__:
        module = sys.modules[kind.__module__]
        if hasattr(module, "prompt_clean"):
            return module.prompt_clean(prompt)
    return prompt.strip()


# --- Latents and pixels of a call
@dataclass(eq=False)
class NotedLatents:
    """Latents at the end of a pipeline's steps: of each of its chunks, where it makes a video in several."""

    pipe: "DiffusionPipeline"
    arguments: Mapping[str, object]
    chunks: list[Tensor] = field(default_factory=list)
    extra_arguments: dict[str, object] = field(default_factory=dict)  # that the call takes beside the user's

    @contextmanager
    def noted(self) -> Iterator["NotedLatents"]:
        """Note the latents of a call in this context: by a callback, or of the scheduler's steps."""
        scheduler = getattr(self.pipe, "scheduler", None)
        if "callback_on_step_end" in self.arguments and self.arguments["callback_on_step_end"] is None:
            self.extra_arguments = {"callback_on_step_end": self._on_step}
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
            self.chunks[:] = [self._unpacked(latents)]
            return output

        scheduler.step = noting
        try:
            yield self
        finally:
            del scheduler.step

    def _on_step(
        self, pipe: object, step: int, timestep: object, tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        latents = tensors.get("latents")
        if latents is not None:
            if step == 0 or not self.chunks:
                self.chunks.append(latents)
            self.chunks[-1] = self._unpacked(latents)
        return {}

    def _unpacked(self, latents: Tensor) -> Tensor:
        """Return latents by the variables of the pipeline's method that runs now, [B, C, F, h, w]."""
        if latents.ndim != 3:
            return latents
        model = next(iter(diffusers_capture.transformers_of(self.pipe).values()))
        return unpacked(latents, diffusers_passes.told_of(model, self.pipe).variables)

    def of(self, output: object) -> Tensor:
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


def frame_axis(pipe: "DiffusionPipeline") -> int:
    """Return the axis of frames in a pipeline's latents."""
    return frames_at(next(iter(diffusers_capture.transformers_of(pipe).values())))


def first_output(output: Any) -> object:
    """Return what a pipeline made: frames of its output, or the first of a tuple."""
    for name in ("frames", "videos"):
        value = getattr(output, name, None)
        if value is None and isinstance(getattr(output, "values", None), dict):
            value = output.values.get(name)
        if value is not None:
            return value
    if isinstance(output, tuple) and output:
        return output[0]
    return output


def pixels_of(output: object, arguments: Mapping[str, object]) -> list[Tensor]:
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
    if kind not in (WAN_VAE, *HUNYUAN_VAES):
        raise RunError(f'{title} returned no video: leave output_type="latent" out, and it decodes its own')
    x = latents.transpose(1, 2).to(vae.device, vae.dtype)  # [1, C, F, h, w]
    if kind == WAN_VAE:
        mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(x)
        std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(x)
        x = x / (1.0 / std) + mean
    else:
        x = x / vae.config.scaling_factor
    video = vae.decode(x, return_dict=False)[0]
    return to_pixels((video.float() / 2 + 0.5).clamp(0, 1).transpose(1, 2))[0].cpu()


# --- Facts of a pipeline
def name_of(x: object) -> str:
    """Return the repository or folder that a pipeline was read from, or its class."""
    config = getattr(x, "config", {})
    origin = getattr(config, "_name_or_path", None) or getattr(config, "name_or_path", None)
    if origin and Path(origin).is_dir():
        return Path(origin).name
    return origin or type(compiled.plain(x)).__name__


def scheduler_facts(pipe: object) -> dict[str, object]:
    """Return the class of a pipeline's scheduler and its settings; nothing where there is none."""
    scheduler = getattr(pipe, "scheduler", None)
    if scheduler is None:
        return {}
    settings = {name: value for name, value in dict(scheduler.config).items() if not name.startswith("_")}
    return {"class": type(scheduler).__name__} | json.loads(json.dumps(settings, default=str))


# --- Generators, and values as caches keep them
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
    if device.type == "cuda":
        again.set_state(torch.cuda.get_rng_state(device))
    else:
        again.set_state(torch.get_rng_state())
    return again


def hash_of(x: Tensor) -> str:
    """Return 16 hex digits of the SHA-256 of a tensor's numbers and shape."""
    x = x.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{x.dtype} {list(x.shape)}".encode())
    digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def is_plain(value: object) -> bool:
    """Return whether caches keep a value as it is: text, a number, a flag, or a list of these."""
    if isinstance(value, list | tuple):
        return all(isinstance(part, PLAIN) for part in value)
    return isinstance(value, PLAIN)


def as_plain(value: Any) -> object:
    """Return a value as plain ones; of tensors, arrays and pictures a hash of their numbers."""
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return hash_of(value)
    if isinstance(value, Mapping):
        return {str(name): as_plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(part) for part in value]
    if isinstance(value, np.ndarray) or hasattr(value, "tobytes"):
        return hashlib.sha256(value.tobytes()).hexdigest()[:16]
    return short_repr(value)
