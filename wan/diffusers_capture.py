"""Capture and edit attention in the video transformers of diffusers (0.42 or later).

    with watching(pipe), ATTENTION_WEIGHT_CAPTURE.capture(layers=[1], granularity="frame") as calls:
        pipe("a red circle moving right")
    calls[0].values["frame_mass"], calls[0].at.step, calls[0].at.branch

diffusers computes attention in dispatch_attention_fn, which each model's module imports by name. That name is
replaced while a capture or edit is open, and hooks on the attention modules tell which layer calls. Calls
give sites q, k, v and z; modules give attn_out, cross_out, mlp_out and resid_post (wan/sites.py). q and k are
those of the call, after RoPE, so sites q and q_rot are the same.

A pass is described by the pipeline: the branch by transformer.cache_context(name), the step by its step_index
or its scheduler. Unknown facts are None. In a loop of your own, ATTENTION_WEIGHT_CAPTURE.during(Pass(...))
around a forward takes precedence.
"""

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan.attention import Call, attend_by_groups, attention_with_lse, site_name
from wan.capture import ATTENTION_WEIGHT_CAPTURE, CapturedCall, CaptureRequest
from wan.errors import ConfigError, require_known, short_repr
from wan.interventions import reusable
from wan.keys import KeyLayout, send
from wan.sites import (
    Pass,
    Site,
    active_edits,
    check_indices,
    current_pass,
    during,
    hook_point,
    observer,
    watchers,
)

# --- Where the tokens of frames lie, by family
SAY_WHERE = "say where frames lie, layout=(frames, tokens of each)"


class VideoTokens(NamedTuple):
    """Frames of a forward, tokens per frame, and the tokens before them in self-attention.

    Other tokens of a call, text or padding, come after them.
    """

    frames: int
    tokens: int
    before: int = 0  # tokens in front: a history at another resolution
    past: int | None = None  # frames whose cached keys lie between; a rollout block by block says 0 or more
    start: int = 0  # the number of its first frame

    @property
    def total(self) -> int:
        return self.frames * self.tokens


Locate = Callable[[Any, Mapping[str, Any]], VideoTokens]  # of a model's config and its forward's arguments


def of_latents(config: Any, arguments: Mapping[str, Any]) -> VideoTokens:
    """Tokens of latents [B, C, F, h, w]; patch_size is of time, height, width, or patch_size_t is time's."""
    size = config.patch_size
    if isinstance(size, int):
        size = config.patch_size_t, size, size
    time, high, wide = size
    *_, frames, rows, columns = arguments["hidden_states"].shape
    return VideoTokens(frames // time, (rows // high) * (columns // wide))


def with_history(config: Any, arguments: Mapping[str, Any]) -> VideoTokens:
    """Tokens of latents behind those of three histories (Helios), each coarser than the one before."""
    before = 0
    for name, times in (("short", 1), ("mid", 2), ("long", 4)):
        history = arguments.get(f"latents_history_{name}")
        if history is not None:
            sizes = zip(history.shape[2:], config.patch_size, strict=True)
            before += math.prod(math.ceil(size / (times * patch)) for size, patch in sizes)
    return of_latents(config, arguments)._replace(before=before)


def of_chunks(config: Any, arguments: Mapping[str, Any]) -> VideoTokens:
    """Tokens of latents [B, F, C, h, w], of which early chunks are compressed to larger patches (FAR).

    With a cache the last chunk alone is computed, and the keys of the others lie in front.
    """
    flags = arguments.get("kv_cache_flag") or {}
    is_cache_step = bool(flags.get("is_cache_step"))
    rows, columns = arguments["hidden_states"].shape[-2:]
    full, compressed = (
        (rows // high) * (columns // wide)
        for _, high, wide in (config.patch_size, config.compressed_patch_size)
    )
    chunks = arguments["chunk_partition"]
    far = max(0, len(chunks) - (config.full_chunk_limit - is_cache_step))
    first, past = sum(chunks[:far]), None
    if arguments.get("kv_cache") is not None and not is_cache_step:
        past = sum(chunks[far:-1])
    start = first + (past or 0)
    return VideoTokens(sum(chunks) - start, full, first * compressed, past, start)


def of_sequence(config: Any, arguments: Mapping[str, Any]) -> VideoTokens:
    """Tokens [B, L, C], whose number of frames is an argument."""
    frames, length = arguments.get("num_frames"), arguments["hidden_states"].shape[1]
    if frames is None or length % frames:
        raise ConfigError(f"num_frames is {frames} for {length} tokens: {SAY_WHERE}")
    return VideoTokens(frames, length // frames)


@dataclass(frozen=True)
class Family:
    """How a class of transformers is built."""

    locate: Locate
    layers: tuple[str, ...] = ("blocks",)  # lists of layers, numbered through
    attn: str = "attn1"
    cross: str = "attn2"
    mlp: str = "ffn"
    has_wan_rope: bool = False  # which edits that turn q and k take for granted


WAN = Family(of_latents, has_wan_rope=True)
JOINT = Family(of_latents, ("transformer_blocks",), attn="attn", cross="", mlp="ff")
FAMILIES: dict[str, Family] = {
    "WanTransformer3DModel": WAN,
    "WanVACETransformer3DModel": WAN,  # its vace_blocks are no layers of this list
    "SkyReelsV2Transformer3DModel": WAN,
    "CosmosTransformer3DModel": Family(of_latents, ("transformer_blocks",), mlp="ff"),
    "LTXVideoTransformer3DModel": Family(of_sequence, ("transformer_blocks",), mlp="ff"),
    "LTX2VideoTransformer3DModel": Family(
        of_sequence, ("transformer_blocks",), mlp="ff"
    ),  # without its audio
    "HeliosTransformer3DModel": Family(with_history),
    "AnyFlowFARTransformer3DModel": Family(of_chunks),
    "HunyuanVideo15Transformer3DModel": JOINT,
    "HunyuanVideoTransformer3DModel": replace(
        JOINT, layers=("transformer_blocks", "single_transformer_blocks")
    ),
}
SITES_HERE: tuple[str, ...] = ("q", "k", "q_rot", "k_rot", "v", "z")
SITES_HERE += ("cross_q", "cross_k", "cross_v", "cross_z", "attn_out", "cross_out", "mlp_out", "resid_post")
OF_HEADS_HERE = {"self", "cross", *SITES_HERE[:10]}
TURNING = ("Move", "Jitter", "Band")  # edits that turn q and k as Wan's RoPE does

# The names of guidance's branches -> ours. A joint call has a batch of both, the negative prompt's first.
BRANCHES = {"cond": "cond", "pred_cond": "cond", "uncond": "uncond", "pred_uncond": "uncond"}
JOINT_BRANCHES = "cond_uncond"


# --- Who calls, and in which forward: of the context (contextvars), so that threads do not meet
@dataclass(frozen=True, eq=False)
class Forward:
    """A forward of a transformer: its passes with their items of the batch, and the place of the frames."""

    parts: tuple[tuple[Pass, slice], ...]
    video: VideoTokens
    layout: KeyLayout
    outer: "Forward | None"
    announced: AbstractContextManager[None]


@dataclass(eq=False)
class Caller:
    """The running attention module, and whether its next call is for image tokens."""

    site: Site
    outer: "Caller | None"
    has_image_keys: bool = False
    has_called: bool = False


_FORWARD: ContextVar[Forward | None] = ContextVar("diffusers_forward", default=None)
_CALLER: ContextVar[Caller | None] = ContextVar("diffusers_caller", default=None)
_TOLD: ContextVar[tuple[str, Any] | None] = ContextVar("cache_context", default=None)  # branch, step_index


# --- Watch
@reusable
def watching(x: Any, layout: Any = None) -> Iterator[dict[str | None, Any]]:
    """Connect a diffusers pipeline, or a transformer, to captures and edits while the context lasts.

    Yields the transformers by name (None: x itself). layout says where frames lie, for a class that is not in
    FAMILIES: (frames, tokens of each), or a function of the model's config and its forward's arguments that
    returns them. Raises ConfigError for other models, and for attention that does not go through
    dispatch_attention_fn. Contexts may nest.
    """
    transformers = transformers_of(x)
    with ExitStack() as stack:
        for name, transformer in transformers.items():
            stack.enter_context(_watched(transformer, name, x, layout))
        yield transformers


def transformers_of(x: Any) -> dict[str | None, Any]:
    """Return a pipeline's transformers by name, or a transformer under None."""
    if isinstance(x, nn.Module):
        return {None: x}
    names = ("transformer", "transformer_2")  # two experts of Wan2.2
    modules = {name: getattr(x, name, None) for name in names}
    transformers: dict[str | None, Any] = {}
    for name, module in modules.items():
        if isinstance(module, nn.Module):
            transformers[name] = module
    if not transformers:
        raise ConfigError(f"{type(x).__name__} is no pipeline of diffusers with a transformer, and no model")
    return transformers


@dataclass(eq=False)
class Watched:
    """A transformer with hooks; nested contexts share them."""

    transformer: Any
    name: str | None
    pipeline: Any  # None where the transformer alone was given
    family: Family
    layers: list[nn.Module]
    undo: ExitStack
    layout: Any = None
    count: int = 1

    def __deepcopy__(self, memo: Any) -> "Watched":
        raise ConfigError("a copy would keep the hooks of captures and edits: copy outside of their contexts")


_open: dict[int, Watched] = {}  # by the transformer's id
_replaced: dict[int, tuple[Any, int]] = {}  # by the id of a module's names: the original, how many watch
_lock = Lock()


def count_layers(transformer: Any) -> int | None:
    """Return how many layers a watched transformer has; None where its family is not known."""
    return len(_open[id(transformer)].layers) or None


@contextmanager
def _watched(transformer: Any, name: str | None, x: Any, layout: Any) -> Iterator[None]:
    key = id(transformer)
    with _lock:
        pipeline = x
        if x is transformer:
            pipeline = None
        watched = _open.get(key)
        if watched is None:
            _open[key] = _install(transformer, name, pipeline, layout)
        else:
            if layout not in (None, watched.layout):
                raise ConfigError("this model is watched already with another layout: give the outermost one")
            if watched.pipeline is None:  # a pipeline tells more than its transformer alone
                watched.pipeline, watched.name = pipeline, name
            watched.count += 1
    try:
        yield
    finally:
        with _lock:
            _open[key].count -= 1
            if _open[key].count == 0:
                _open.pop(key).undo.close()


def _install(transformer: Any, name: str | None, pipeline: Any, layout: Any) -> Watched:
    """Put hooks on a transformer's modules, and replace dispatch_attention_fn where they look it up."""
    title = type(transformer).__name__
    # 1. Its family: where layers, their parts and the tokens of frames are.
    families = [FAMILIES[kind.__name__] for kind in type(transformer).__mro__ if kind.__name__ in FAMILIES]
    family: Family | None = None
    if families:
        family = families[0]
    if layout is not None:
        is_pair = isinstance(layout, Sequence) and [type(count) for count in layout] == [int, int]
        if not callable(layout) and not is_pair:
            raise ConfigError(f"{short_repr(layout)} is no layout: {SAY_WHERE}")
        locate = partial(_locate_by, layout, family)
        if family is None:
            family = Family(locate, layers=())
        family = replace(family, locate=locate)
    # Of torch.compile(model), and of model.compile()
    is_compiled = hasattr(transformer, "_orig_mod") or any(
        getattr(part, "_compiled_call_impl", None) for part in transformer.modules()
    )
    if is_compiled:
        raise ConfigError(f"{title} is compiled, which hides its layers: watch it before torch.compile")
    if family is None:
        raise ConfigError(f"{title} is not one of {', '.join(FAMILIES)}; {SAY_WHERE}")
    layers = [layer for part in family.layers for layer in getattr(transformer, part)]
    if layers:
        callers = _attention_of(family, layers)
    else:
        callers = _attention_by_names(transformer)
    # 2. Everything is undone in reverse order, also where a module is refused half-way.
    with ExitStack() as stack:
        watched = Watched(transformer, name, pipeline, family, layers, stack, layout)

        def hook(module: nn.Module, before: Any, after: Any, always: bool = False) -> None:
            if before is not None:
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            if after is not None:
                stack.callback(module.register_forward_hook(after, always_call=always).remove)

        for site, module in callers:
            _replace_dispatch(site, module, stack)
            hook(module, partial(_enter_attention, site), None)
            norm = getattr(module, "norm_added_k", None)
            if norm is None:
                norm = getattr(module, "k_img_norm", None)
            if site.kind == "cross" and norm is not None:
                hook(norm, None, _expect_image_call)
            out = {"self": "attn_out", "cross": "cross_out"}[site.kind]
            hook(module, None, partial(_show_output, out, site.layer))
            hook(module, None, _leave_attention, always=True)
        for number, layer in enumerate(layers):
            mlp = getattr(layer, family.mlp, None)
            if isinstance(mlp, nn.Module):
                hook(mlp, None, partial(_show_output, "mlp_out", number))
            hook(layer, None, partial(_show_output, "resid_post", number))
        hook(transformer, partial(_enter, watched), _leave, always=True)
        if hasattr(transformer, "cache_context"):
            transformer.cache_context = partial(_told, transformer.cache_context)
            stack.callback(delattr, transformer, "cache_context")
        watched.undo = stack.pop_all()
    return watched


def _locate_by(layout: Any, family: Family | None, config: Any, arguments: Mapping[str, Any]) -> VideoTokens:
    """Return the frames of a forward as a user's layout says; ConfigError where latents have others."""
    if callable(layout):
        video = VideoTokens(*layout(config, arguments))
    else:
        video = VideoTokens(*layout)
    if family is not None and family.locate is of_latents:
        total = of_latents(config, arguments).total
        if video.total != total:
            raise ConfigError(f"layout {video[:2]} is of {video.total} tokens, not of {total}: {SAY_WHERE}")
    return video


def _attention_of(family: Family, layers: Sequence[nn.Module]) -> list[tuple[Site, nn.Module]]:
    names = {"self": family.attn, "cross": family.cross}
    return [
        (Site(number, kind), getattr(layer, name))  # type: ignore[arg-type]
        for number, layer in enumerate(layers)
        for kind, name in names.items()
        if name
    ]


def _attention_by_names(transformer: nn.Module) -> list[tuple[Site, nn.Module]]:
    """Modules with a processor in lists of blocks; a second one in a block is cross-attention."""
    numbers: dict[str, list[nn.Module]] = {}
    for path, module in transformer.named_modules():
        block = re.match(r"(\w*blocks|layers)\.\d+\.", path)
        if block and hasattr(module, "processor"):
            numbers.setdefault(block[0], []).append(module)
    if not numbers:
        raise ConfigError(
            f"{type(transformer).__name__} has no attention with a processor in lists of blocks"
        )
    callers = []
    for number, modules in enumerate(numbers.values()):
        callers.append((Site(number, "self"), modules[0]))
        callers += [(Site(number, "cross"), module) for module in modules[1:2]]
    return callers


def _names_of(processor: Any) -> dict[str, Any]:
    """Return the names that a processor's code looks functions up in."""
    return getattr(inspect.unwrap(type(processor).__call__), "__globals__", {})


def _replace_dispatch(site: Site, module: nn.Module, stack: ExitStack) -> None:
    """Replace dispatch_attention_fn in the names that a module's processor looks it up in."""
    processor = module.processor
    names = _names_of(processor)
    if "dispatch_attention_fn" not in names:
        raise ConfigError(
            f"layer {site.layer}: {type(processor).__name__} does not call diffusers' dispatch_attention_fn, "
            "so it cannot be seen; take the model's own processor of diffusers 0.42 or later"
        )
    key = id(names)
    if key not in _replaced:
        original = names["dispatch_attention_fn"]
        names["dispatch_attention_fn"] = partial(_dispatch, original)
        _replaced[key] = (original, 0)
    original, count = _replaced[key]
    _replaced[key] = (original, count + 1)

    def undo() -> None:
        original, count = _replaced.pop(key)
        if count > 1:
            _replaced[key] = (original, count - 1)
        else:
            names["dispatch_attention_fn"] = original

    stack.callback(undo)


# --- Hooks of the transformer: which pass a forward is
@contextmanager
def _told(original: Any, name: str, **options: Any) -> Iterator[None]:
    """Wrap cache_context to remember the branch that the pipeline names."""
    before = _TOLD.set((name, options.get("step_index")))
    try:
        with original(name, **options):
            yield
    finally:
        _TOLD.reset(before)


def _enter(watched: Watched, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Announce a forward before it runs."""
    outer = _FORWARD.get()
    if not watchers() and observer() is None:
        return
    arguments = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    video = VideoTokens(*watched.family.locate(module.config, arguments))
    at, frames = current_pass(), tuple(range(video.start, video.start + video.frames))
    parts: tuple[tuple[Pass, slice], ...]
    if at is None:
        timestep, levels = _timesteps(arguments.get("timestep"), video)
        at = Pass(
            query_frames=frames,
            step=_step(watched, arguments),
            timestep=timestep,
            levels=levels,
            branch=None,
            model=watched.name,
        )
        parts = _branches(watched, at, len(arguments["hidden_states"]))
    else:
        frames, parts = at.query_frames, ((at, slice(None)),)
    _check_watchers(watched, at, video)
    # Edits name the frames of a whole video by number, "first" or "past", not as the queries' own.
    keys = (*range(frames[0] - (video.past or 0), frames[0]), *frames)
    layout = KeyLayout.of_frames(keys, len(keys) * video.tokens)
    layout = replace(layout, own=range(0), query_positions=frames)
    if video.past is not None:
        layout = replace(layout, own=range(video.past, len(keys)))
    if len(parts) == 1:
        at = parts[0][0]
    announced = during(at)
    _FORWARD.set(Forward(parts, video, layout, outer, announced))
    announced.__enter__()


def _leave(module: nn.Module, args: tuple, out: Any) -> None:
    forward = _FORWARD.get()
    if forward is not None:
        forward.announced.__exit__(None, None, None)
        _FORWARD.set(forward.outer)


def _timesteps(timestep: Any, video: VideoTokens) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return the largest timestep of a forward, and each frame's where they are given by frame or token."""
    if timestep is None:
        return 0.0, ()
    t = torch.as_tensor(timestep).float()
    if t.ndim < 2 or t.shape[1] not in (video.frames, video.total):
        return float(t.max()), ()
    by_frame = t.amax(0).unflatten(0, (video.frames, -1)).amax(1).tolist()
    return max(by_frame), tuple(enumerate(by_frame))


def _step(watched: Watched, arguments: Mapping[str, Any]) -> int | None:
    """Return the index of the sampler's step, as the pipeline or its scheduler says it; None: nobody does."""
    told = _TOLD.get()
    if told is not None and told[1] is not None:
        return told[1]
    # A loop of one's own tells nothing, and frames of diffusion forcing have steps of their own.
    in_its_loop = told is not None or getattr(watched.pipeline, "_current_timestep", None) is not None
    scheduler = getattr(watched.pipeline, "scheduler", None)
    if not in_its_loop or arguments.get("enable_diffusion_forcing"):
        return None
    if scheduler is None or not hasattr(scheduler, "step_index"):
        return None
    if scheduler.step_index is None:
        return scheduler.begin_index or 0
    return scheduler.step_index


def _branches(watched: Watched, at: Pass, items: int) -> tuple[tuple[Pass, slice], ...]:
    """Return the passes of a forward, with their items of the batch."""
    name, _ = _TOLD.get() or ("", None)
    if name != JOINT_BRANCHES:
        return ((replace(at, branch=BRANCHES.get(name, name) or None), slice(None)),)
    # The name says what a batch may hold; whether guidance doubles it, only the pipeline knows.
    guided = getattr(watched.pipeline, "do_classifier_free_guidance", None)
    if guided is None and items == 1:
        guided = False
    if guided is None:
        return ((replace(at, branch=None), slice(None)),)
    if not guided:
        return ((replace(at, branch="cond"), slice(None)),)
    half = items // 2
    return (
        (replace(at, branch="uncond"), slice(0, half)),
        (replace(at, branch="cond"), slice(half, items)),
    )


def _check_watchers(watched: Watched, at: Pass, video: VideoTokens) -> None:
    """Raise ConfigError for layers, heads, sites, frames, steps and edits that this forward does not have."""
    # 1. How many there are of each, as far as that is known.
    is_whole = video.past is None and at.query_frames == tuple(range(video.frames))
    counts: dict[str, int | None] = {
        "layer": len(watched.layers) or None,
        "head": getattr(watched.transformer.config, "num_attention_heads", None),
        "block": None,
        "step": None,
    }
    if is_whole:
        counts["block"] = 1
    timesteps = getattr(getattr(watched.pipeline, "scheduler", None), "timesteps", None)
    if at.step is not None and at.model and timesteps is not None:
        counts["step"] = len(timesteps)
    # 2. Each watcher, or each of its edits.
    for chosen in (chosen for watcher in watchers() for chosen in watcher.edits or [watcher]):
        for name, count in counts.items():
            check_indices(name, getattr(chosen, f"{name}s", None), count)
        frames, sites = getattr(chosen, "frames", None), getattr(chosen, "sites", ())
        if is_whole and isinstance(frames, Sequence):
            check_indices("frame", [n for n in frames if isinstance(n, int)], video.frames)
        if getattr(chosen, "heads", None) is not None and sites and OF_HEADS_HERE.isdisjoint(sites):
            raise ConfigError(f"{sites[0]} has no heads: leave heads out")
        for site in sites:
            require_known(site, ("self", "cross", *SITES_HERE), "{} cannot be seen in diffusers' models")
    title = type(watched.transformer).__name__
    for edit in active_edits():
        if type(edit).__name__ in TURNING and not watched.family.has_wan_rope:
            raise ConfigError(
                f"{type(edit).__name__} turns q and k by Wan's RoPE, which {title} does not have"
            )


# --- Hooks of its layers: who calls, and what comes out
def _enter_attention(site: Site, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    if id(_names_of(module.processor)) not in _replaced:
        raise ConfigError(
            f"layer {site.layer}: its processor is {type(module.processor).__name__}, which was set while "
            "captures and edits watch: set it before them"
        )
    _CALLER.set(Caller(site, _CALLER.get()))


def _leave_attention(module: nn.Module, args: tuple, out: Any) -> None:
    caller = _CALLER.get()
    if caller is None:
        return
    _CALLER.set(caller.outer)
    is_looked_at = _FORWARD.get() is not None and (watchers() or observer() is not None)
    # Where forward is not the class's own, a cache of diffusers may take its place.
    if not is_looked_at or out is None or caller.has_called or "forward" in vars(module):
        return
    if not getattr(module, "perturbed_attn", False):
        raise ConfigError(
            f"layer {caller.site.layer}: {type(module.processor).__name__} did not call diffusers' "
            "dispatch_attention_fn, so it cannot be seen; take the model's own processor"
        )


def _expect_image_call(module: nn.Module, args: tuple, out: Tensor) -> None:
    """Note that the keys of image tokens are made: processors make them right before their call."""
    caller = _CALLER.get()
    if caller is not None:
        caller.has_image_keys = True


def _show_output(name: str, layer: int, module: nn.Module, args: tuple, out: Any) -> Any:
    """Show what a module returns for the video's tokens: its output, or the first one of several."""
    forward = _FORWARD.get()
    if forward is None or not watchers():
        return None
    x = out
    if isinstance(out, tuple):
        x = out[0]
    new = _show(forward, name, layer, x, _around(forward.video, x.shape[1]))
    if new is x:
        return None
    if isinstance(out, tuple):
        return new, *out[1:]
    return new


def _around(video: VideoTokens, length: int) -> tuple[int, int]:
    """Return the numbers of tokens before and after those of a forward's frames."""
    before = video.before
    if length < before + video.total:
        before = 0
    return before, length - before - video.total


def _show(forward: Forward, name: str, layer: int, x: Tensor, around: tuple[int, int] = (0, 0)) -> Tensor:
    """Show x [B, L, ...] to watchers, pass by pass and without tokens that belong to no frame -> x."""
    pieces, is_changed = [], False
    start, stop = around[0], x.shape[1] - around[1]
    for at, items in forward.parts:
        piece = x[items]
        seen = piece[:, start:stop]
        with during(at):
            new = hook_point(name, layer, seen)
        if new is not seen:
            is_changed = True
            piece = torch.cat([piece[:, :start], new, piece[:, stop:]], 1)
        pieces.append(piece)
    if not is_changed:
        return x
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces)


# --- The attention call itself
def _dispatch(original: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Replace dispatch_attention_fn, so that captures and edits see the call."""
    caller, forward = _CALLER.get(), _FORWARD.get()
    if caller is not None:
        caller.has_called = True
    if caller is None or forward is None or not (watchers() or observer()):
        return original(*args, **kwargs)
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    return _attend(forward, caller, original, bound.arguments)


def _attend(forward: Forward, caller: Caller, original: Any, arguments: dict[str, Any]) -> Tensor:
    """Compute a call's output [B, Lq, H, D] with edits, and show it to captures."""
    if arguments["parallel_config"] is not None:
        raise ConfigError("tokens that several GPUs share cannot be seen: disable context parallelism")
    q, k, v = arguments["query"], arguments["key"], arguments["value"]
    # 1. Which call this is, and which of its tokens are of no frame.
    site, is_self = caller.site, caller.site.kind == "self"
    if caller.has_image_keys:
        site, caller.has_image_keys = Site(site.layer, "cross_image"), False
    is_edited = bool(watchers()) and site.kind != "cross_image"
    video, len_q, len_k = forward.video, q.shape[1], k.shape[1]
    layout, around, around_q = None, (0, 0), _around(video, len_q)
    if is_self:  # what lies behind the frames does so in the queries, too
        layout = forward.layout
        behind = len_k - video.before - len(forward.layout.slots) * video.tokens
        around, around_q = (video.before, behind), (len_q - behind - video.total, behind)
    if min(*around, *around_q) < 0 or (video.past is None and is_self and len_q != len_k):
        raise ConfigError(
            f"layer {site.layer}: {len_q} queries and {len_k} keys are not {video.frames} "
            f"frames of {video.tokens} tokens: give layout=(frames, tokens of each)"
        )
    # 2. Edits change q, k, v, and add a bias to the logits of keys.
    calls = [
        Call(site, at, q[items], k[items], v[items], layout, around=around, around_q=around_q)
        for at, items in forward.parts
    ]
    is_changed = False
    if is_edited:
        q = _show(forward, site_name(site, "q"), site.layer, q, around_q)
        k = _show(forward, site_name(site, "k"), site.layer, k, around)
        v = _show(forward, site_name(site, "v"), site.layer, v, around)
        if is_self:
            q = _show(forward, "q_rot", site.layer, q, around_q)
            k = _show(forward, "k_rot", site.layer, k, around)
        for call, (at, items) in zip(calls, forward.parts, strict=True):
            is_changed |= _edit(call, at, [x[items] for x in (q, k, v)])
        if is_changed:
            q, k, v = (torch.cat([getattr(call, name) for call in calls]) for name in "qkv")
    # 3. The softmax: diffusers' own, unless a bias was added.
    mask, by = _mask_of(arguments, q, k), observer()
    if any(call.bias is not None for call in calls):
        outputs = []
        for call, (_, items) in zip(calls, forward.parts, strict=True):
            outputs.append(_attend_biased(call, arguments, _of_items(mask, items, len(q))))
        out, lse = torch.cat(outputs), None
    else:
        is_kept = by is not None and any(_is_wanted(by, call) for call in calls)
        arguments = arguments | {"query": q, "key": k, "value": v}
        out, lse = _attend_as_they_do(original, arguments, is_kept and mask is None and not any(around))
    # 4. Captures get what the softmax saw; a scale other than 1/√D goes into their q.
    if by is not None:
        for call, (at, items) in zip(calls, forward.parts, strict=True):
            call.mask = _of_items(mask, items, len(q))
            call.q, call.k, call.v = (
                _as_scaled(q[items], arguments["scale"]),
                _of_all_heads(k[items], q),
                v[items],
            )
            if lse is not None:
                call.lse = lse[items]
            with during(at):
                by.observe(call)
    if not is_edited:
        return out
    return _show(forward, site_name(site, "z"), site.layer, out, around_q)


def _is_wanted(by: Any, call: Call) -> bool:
    assert call.at is not None
    with during(call.at):
        return by.wants(call.site)


def _edit(call: Call, at: Pass, parts: list[Tensor]) -> bool:
    """Show watchers a call, of the tokens of frames, and put their q, k, v into it -> whether any changed."""
    beside = (call.around_q, call.around, call.around)
    seen = [x[:, before : x.shape[1] - behind] for x, (before, behind) in zip(parts, beside, strict=True)]
    call.q, call.k, call.v = seen
    with during(at):
        hook_point(call.site.kind, call.site.layer, call)
    edited, is_changed = (call.q, call.k, call.v), False
    for name, whole, old, new, (before, behind) in zip("qkv", parts, seen, edited, beside, strict=True):
        if new is not old:
            is_changed = True
            whole = torch.cat([whole[:, :before], new, whole[:, whole.shape[1] - behind :]], 1)
        setattr(call, name, whole)
    return is_changed


def _attend_biased(call: Call, arguments: Mapping[str, Any], mask: Tensor | None) -> Tensor:
    """Compute the output [B, Lq, H, D] of a call under a bias of its keys."""
    assert call.bias is not None
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    k, v = (_of_all_heads(x, q, 1) for x in (k, v))
    has_usual_scale = arguments["scale"] in (None, q.shape[-1] ** -0.5)
    if mask is None and not any(call.around) and has_usual_scale:
        # As our own models do: exact, and without a mask kernel
        out, call.lse = attend_by_groups(q, k, v, call.bias)
        return out.transpose(1, 2)
    bias = send(F.pad(call.bias.per_token(), call.around), q.device)[:, None].to(q.dtype)  # [H, 1, Lk]
    if mask is not None and mask.dtype == torch.bool:
        bias = bias.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        bias = bias + mask.to(q.dtype)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=arguments["scale"])
    return out.transpose(1, 2)


def _mask_of(arguments: Mapping[str, Any], q: Tensor, k: Tensor) -> Tensor | None:
    """Return a call's mask as [B or 1, H or 1, Lq or 1, Lk], boolean or added to logits; None for none."""
    mask = arguments["attn_mask"]
    if arguments["is_causal"]:
        return torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()[None, None]
    if mask is None:
        return None
    if type(mask).__name__ == "BlockMask":  # of flex_attention, which computes it where it is needed
        sizes = (*mask.shape[:2], q.shape[1], k.shape[1])
        return sys.modules[type(mask).__module__].create_mask(mask.mask_mod, *sizes, device=str(q.device))
    if not isinstance(mask, Tensor):
        raise ConfigError(f"a {type(mask).__name__} as a mask of attention cannot be seen")
    if mask.ndim == 2 and mask.shape == (len(q), k.shape[1]):  # of keys, as diffusers reads it
        return mask[:, None, None]
    return mask.view(*[1] * (4 - mask.ndim), *mask.shape)


def _of_items(mask: Tensor | None, items: slice, batch: int) -> Tensor | None:
    if mask is None or len(mask) != batch:
        return mask
    return mask[items]


def _as_scaled(q: Tensor, scale: float | None) -> Tensor:
    default = q.shape[-1] ** -0.5
    if scale is None or scale == default:
        return q
    return q.float() * (scale / default)


def _of_all_heads(x: Tensor, q: Tensor, dim: int = 2) -> Tensor:
    """Repeat heads of k or v where queries share them."""
    if x.shape[dim] == q.shape[dim]:
        return x
    return x.repeat_interleave(q.shape[dim] // x.shape[dim], dim)


# --- Their softmax, with its log-sum-exp where that costs nothing
_proven: dict[
    tuple, bool
] = {}  # by kernel, shapes and dtype: whether it gives the bits of diffusers' own call


def _attend_as_they_do(
    original: Any, arguments: dict[str, Any], needs_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return diffusers' own output, bit for bit, and on a GPU the log-sum-exp [B, H, Lq] if needed.

    The backend's own kernel returns it, and is used once its output equals diffusers' for these shapes. For
    other backends we make a second attention call.
    """
    q, k, v = arguments["query"], arguments["key"], arguments["value"]
    has_usual_scale = arguments["scale"] in (None, q.shape[-1] ** -0.5)
    if not needs_lse or not q.is_cuda or q.shape[2] != k.shape[2] or not has_usual_scale:
        return original(**arguments), None  # on the CPU values do not need it
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return original(**arguments), attention_with_lse(*(x.detach().transpose(1, 2) for x in (q, k, v)))[1]
    kernel = _kernel_of(arguments)
    key = (kernel, q.shape, k.shape, q.dtype, q.stride(), k.stride(), v.stride())
    if kernel is None or _proven.get(key) is False:
        return original(**arguments), attention_with_lse(*(x.transpose(1, 2) for x in (q, k, v)))[1]
    out, lse = _run(kernel, q, k, v)
    if key not in _proven:
        theirs = original(**arguments)
        _proven[key] = torch.equal(theirs, out)
        return theirs, lse
    return out, lse


def _kernel_of(arguments: Mapping[str, Any]) -> str | None:
    """Name the kernel of PyTorch that a call's backend runs; None for backends that are not PyTorch's."""
    if arguments["dropout_p"] or arguments["attention_kwargs"] or arguments["query"].shape[-1] % 8:
        return None
    backend = arguments["backend"]
    if backend is None:  # diffusers is imported: its model calls this
        dispatch = sys.modules["diffusers.models.attention_dispatch"]
        backend, _ = dispatch._AttentionBackendRegistry.get_active_backend()
    name = str(getattr(backend, "value", backend))
    if name == "native":
        q, k, v = (arguments[x].transpose(1, 2) for x in ("query", "key", "value"))
        kinds: Any = torch.nn.attention.SDPBackend
        kernels = {
            int(kinds.FLASH_ATTENTION): "flash",
            int(kinds.EFFICIENT_ATTENTION): "efficient",
            int(kinds.CUDNN_ATTENTION): "cudnn",
        }
        return kernels.get(torch._fused_sdp_choice(q, k, v))
    of_backends = {
        "_native_flash": "flash",
        "_native_efficient": "efficient",
        "_native_cudnn": "cudnn_packed",
    }
    return of_backends.get(name)


def _run(kernel: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Run a fused kernel as PyTorch's scaled_dot_product_attention does -> [B, Lq, H, D], lse [B, H, Lq]."""
    aten = torch.ops.aten
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if kernel == "cudnn_packed":  # diffusers' cuDNN backend packs them first
        q, k, v = (x.contiguous() for x in (q, k, v))
    if kernel == "flash":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v)
    elif kernel == "efficient":
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
    else:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    return out.transpose(1, 2), lse.reshape(*q.shape[:2], -1)[..., : q.shape[2]]


# --- Capture
@reusable
def capture_diffusers(
    x: Any, *requests: CaptureRequest, layout: Any = None, **fields: Any
) -> Iterator[list[CapturedCall]]:
    """Capture the calls of a diffusers transformer, or of a pipeline's; requests or fields of CaptureRequest.

    Yields the list of calls. A pipeline tells more of a call's pass than its transformer alone, whose step is
    known in WanPipeline only. Raises ConfigError as watching() does, and for a layer that is not there.
    """
    requests = requests or (CaptureRequest(**fields),)
    with watching(x, layout) as transformers:
        for transformer in transformers.values():
            for request in requests:
                request.check(count_layers(transformer) or 1 << 20)
        with ATTENTION_WEIGHT_CAPTURE.capture(*requests) as calls:
            yield calls
