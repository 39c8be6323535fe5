"""Capture and edit attention in the video transformers of diffusers (0.42 or later).

    with watching(pipe), ATTENTION_WEIGHT_CAPTURE.capture(layers=[1], granularity="frame") as calls:
        pipe("a red circle moving right")
    calls[0].values["frame_mass"], calls[0].at.step, calls[0].at.branch, calls[0].frames

diffusers computes attention in dispatch_attention_fn, which each model's module imports by name. That name is
replaced while a capture or edit is open, and the calls of the attention modules are wrapped, so that it is
known which layer calls (wan/diffusers_attention.py). Which pass a forward is the pipeline says
(wan/diffusers_passes.py), where frames lie the family or layout= (wan/diffusers_frames.py). In a loop of your
own, ATTENTION_WEIGHT_CAPTURE.during(Pass(...)) around a forward takes precedence.
"""

import inspect
import re
import traceback
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from wan import capture, compiled, diffusers_frames, diffusers_passes, errors, kernels
from wan import diffusers_attention as attention
from wan import diffusers_latents as latents
from wan.identity import OURS
from wan.interventions import reusable
from wan.keys import KeyLayout
from wan.sites import (
    MODEL,
    OF_FORWARD,
    Checked,
    FrameCheck,
    Pass,
    Site,
    active_edits,
    check_indices,
    current_pass,
    during,
    observer,
    require_running_generators,
    watchers,
)

OF_CALLS = (*attention.SHOWN["self"], *attention.SHOWN["cross"])
SITES_HERE = (*OF_CALLS, "attn_out", "cross_out", "mlp_out", "resid_post")
OF_HEADS_HERE = {"self", "cross", *OF_CALLS}
TURNING = ("Move", "Jitter", "Band")  # edits that turn q and k as Wan's RoPE does


# --- Watch
@reusable
def watching(x: Any, layout: Any = None) -> Iterator[dict[str | None, Any]]:
    """Connect a diffusers pipeline, or a transformer, to captures and edits while the context lasts.

    Yields the transformers by name (None: x itself); what torch.compile made of them runs uncompiled
    meanwhile. layout says where frames lie, for a class that is not in
    FAMILIES or tokens that nobody tells: (frames, tokens of each) or (frames, tokens of each, tokens before
    them), or a function of the model's config and its forward's arguments that returns them. Raises
    ConfigError for other models, and for attention that does not go through dispatch_attention_fn. Contexts
    may nest.
    """
    transformers = transformers_of(x)
    with ExitStack() as stack:
        for name, transformer in transformers.items():
            stack.enter_context(_watched(transformer, name, x, layout))
        yield transformers


def transformers_of(x: Any) -> dict[str | None, Any]:
    """Return a pipeline's transformers by name, or a transformer under None; not torch.compile's wrappers.

    ConfigError for anything else, such as a pipeline's VAE.
    """
    transformers = {name: compiled.plain(module) for name, module in _modules_of(x).items()}
    for transformer in transformers.values():
        if diffusers_frames.family_of(transformer) is None and not _attention_in(transformer):
            raise errors.ConfigError(
                f"{type(transformer).__name__} is no transformer of diffusers: give a pipeline, such as "
                "WanPipeline.from_pretrained(...), or its transformer, pipe.transformer"
            )
    return transformers


def _modules_of(x: Any) -> dict[str | None, Any]:
    """Return a pipeline's transformers by name as it calls them, or a transformer under None."""
    if isinstance(x, nn.Module):
        return {None: x}
    modules: dict[str | None, Any] = {}
    for name in diffusers_passes.TRANSFORMERS:
        module = getattr(x, name, None)
        if isinstance(module, nn.Module):
            modules[name] = module
    if not modules:
        raise errors.ConfigError(
            f"{type(x).__name__} is no pipeline of diffusers with a transformer, and no model"
        )
    return modules


@dataclass(eq=False)
class Watched:
    """A transformer whose modules' calls are wrapped; nested contexts share them."""

    transformer: Any
    name: str | None
    pipeline: Any  # None where the transformer alone was given
    family: diffusers_frames.Family
    layers: list[nn.Module]
    undo: ExitStack
    attention: list[Any] = field(default_factory=list)  # modules with a processor
    layout: Any = None
    count: int = 1
    is_compiled: bool = False  # and runs uncompiled meanwhile
    evaluations: diffusers_passes.Evaluations = field(default_factory=diffusers_passes.Evaluations)
    resting: list[nn.Module] = field(default_factory=list)  # attention that refines text before the layers
    places: dict[Any, Checked] = field(default_factory=dict)  # what the experiment found, by shapes


_open: dict[int, Watched] = {}  # by the transformer's id
# What the experiment found of each transformer: its frames lie where they lay when it was watched before
_places: weakref.WeakKeyDictionary[nn.Module, dict[Any, Checked]] = weakref.WeakKeyDictionary()
_replaced: dict[int, tuple[Any, int]] = {}  # by the id of a module's names: the original, how many watch
_lock = Lock()


def count_layers(transformer: Any) -> int | None:
    """Return how many layers a transformer has; None where its family is not known."""
    family = diffusers_frames.family_of(transformer)
    if family is None:
        return None
    return len(_layers_of_family(transformer, family)) or None


def is_uncompiled(transformer: Any) -> bool:
    """Return whether a transformer is compiled, and runs uncompiled since it is watched."""
    watched = _open.get(id(transformer))
    return watched is not None and watched.is_compiled


def place_among_gpus(transformer: Any) -> tuple[int, int]:
    """Return the rank of this process among those that share a transformer's tokens, and their number."""
    config = getattr(transformer, "_parallel_config", None)
    context = getattr(config, "context_parallel_config", None)
    if context is None:
        return 0, 1
    return context._ulysses_local_rank, context.ulysses_degree


def _layers_of_family(transformer: Any, family: diffusers_frames.Family) -> list[Any]:
    return [compiled.plain(layer) for part in family.layers for layer in getattr(transformer, part)]


def layers_of(transformer: Any) -> list[nn.Module]:
    """Return the layers of a watched transformer, in order; none where its family is not known."""
    return _open[id(transformer)].layers


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
                raise errors.ConfigError(
                    "this model is watched already with another layout: give the outermost one"
                )
            if watched.pipeline is None:  # a pipeline tells more than its transformer alone
                watched.pipeline, watched.name = pipeline, name
            watched.count += 1
    try:
        with _lock:
            _run_uncompiled(_open[key], _modules_of(x)[name])
        yield
    finally:
        with _lock:
            _open[key].count -= 1
            if _open[key].count == 0:
                _open.pop(key).undo.close()
                diffusers_passes.forget(key)


def _install(transformer: Any, name: str | None, pipeline: Any, layout: Any) -> Watched:
    """Wrap the calls of a transformer's modules; replace dispatch_attention_fn where they look it up."""
    # 1. Its family: where layers, their parts and the tokens of frames are.
    title, family = type(transformer).__name__, diffusers_frames.family_of(transformer)
    if layout is not None:
        locate = diffusers_frames.told_layout(layout, family)
        if family is None:
            family = diffusers_frames.Family(locate, layers=())
        family = replace(family, locate=locate, is_told=True)
    if family is None:
        raise errors.ConfigError(
            f"{title} is none of the {len(diffusers_frames.FAMILIES)} classes whose frames are known "
            f"(docs/own_code.md); {diffusers_frames.SAY_WHERE}"
        )
    layers = _layers_of_family(transformer, family)
    if layers:
        callers = _attention_of(family, layers)
    else:
        callers = _attention_by_names(transformer)
    early: list[nn.Module] = []
    if family.early:
        early = [compiled.plain(block) for block in getattr(transformer, family.early)]
    callers += [(None, _part(block, family.attn)) for block in early]
    prepare(transformer)
    # 2. Everything is undone in reverse order, also where a module is refused half-way.
    with ExitStack() as stack:
        watched = Watched(transformer, name, pipeline, family, layers, undo=stack, layout=layout)
        watched.attention = [module for _, module in callers if hasattr(module, "processor")]
        watched.places = _places.setdefault(transformer, {})
        if layers:
            watched.resting = _attention_in(transformer, without=[*layers, *early])
        for site, module in callers:
            if site is not None:
                _replace_dispatch(site, module, transformer, stack)
            num_heads = getattr(module, "heads", None) or getattr(module, "num_heads", None)
            if num_heads is None:
                num_heads = transformer.config.num_attention_heads
            wrap(module, partial(_call_attention, site, module, transformer, num_heads), stack)
            norm = _part(module, "norm_q")
            if isinstance(norm, nn.Module):
                wrap(norm, _call_norm, stack)
            projection = _part(module, "to_q")
            if isinstance(projection, nn.Module):
                wrap(projection, _call_projection, stack)
            norm = _part(module, "norm_added_k")
            if norm is None:
                norm = _part(module, "k_img_norm")
            if site is not None and site.kind == "cross" and norm is not None:
                wrap(norm, _call_image_norm, stack)
        for number, layer in enumerate(layers):
            mlp = _part(layer, family.mlp)
            if isinstance(mlp, nn.Module):
                wrap(mlp, partial(_call_part, "mlp_out", number), stack)
            wrap(layer, partial(_call_part, "resid_post", number), stack)
        wrap(transformer, partial(_call_transformer, watched), stack)
        if hasattr(transformer, "cache_context"):
            original = transformer.cache_context
            transformer.cache_context = Wrapped(original, partial(diffusers_passes.telling, id(transformer)))
            stack.callback(delattr, transformer, "cache_context")
        watched.undo = stack.pop_all()
    return watched


def _part(module: nn.Module, name: str) -> Any:
    """Return a part of a module, or None; not torch.compile's wrapper around it."""
    return compiled.plain(getattr(module, name, None))


def _run_uncompiled(watched: Watched, module: nn.Module) -> None:
    """Set aside what torch.compile made of a transformer, until nobody watches it; say so once."""
    is_compiled = compiled.set_aside(module, watched.undo)
    if is_compiled and not watched.is_compiled:
        watched.is_compiled = True
        warnings.warn(
            f"{type(watched.transformer).__name__} is compiled, which hides its layers: it runs uncompiled "
            "while it is watched, equal within rounding",
            stacklevel=2,
        )


def prepare(transformer: Any) -> None:
    """Compile the kernels of a transformer's captures in a thread, where it is on a GPU."""
    weight, config = next(transformer.parameters(), None), getattr(transformer, "config", None)
    heads = getattr(config, "num_attention_heads", 0), getattr(config, "attention_head_dim", 0)
    if weight is not None and all(isinstance(number, int) for number in heads):
        kernels.prepare(weight.device, *heads, dtype=weight.dtype)


class Wrapped:
    """A method of an object, in its place: call(original, ...) around it."""

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any]):
        self.original, self.call = original, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.original, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise errors.ConfigError(
            "a copy would keep what captures and edits put in: copy outside of their contexts"
        )


def wrap(module: nn.Module, call: Callable[..., Any], stack: ExitStack) -> None:
    """Call call(original, ...) in place of a module, around its hooks, until the stack closes.

    PyTorch's own hooks are not run where a forward is interrupted, and forward() itself is replaced by caches
    and offload, at any time.
    """
    if "_call_impl" in vars(module):  # one norm for several modules
        return
    vars(module)["_call_impl"] = Wrapped(module._call_impl, call)
    stack.callback(vars(module).pop, "_call_impl")


Callers = list[tuple[Site | None, nn.Module]]  # attention modules; None: of blocks before the layers


def _attention_of(family: diffusers_frames.Family, layers: Sequence[nn.Module]) -> Callers:
    names = {"self": family.attn, "cross": family.cross}
    return [
        (Site(number, kind), _part(layer, name))  # type: ignore[arg-type]
        for number, layer in enumerate(layers)
        for kind, name in names.items()
        if name
    ]


def _attention_in(model: nn.Module, without: Collection[nn.Module] = ()) -> list[Any]:
    parts = compiled.modules_of(model, without)
    return [part for part in parts if not compiled.is_wrapper(part) and hasattr(part, "processor")]


def _attention_by_names(transformer: nn.Module) -> Callers:
    """Modules with a processor in lists of blocks; a second one in a block is cross-attention."""
    numbers: dict[str, list[nn.Module]] = {}
    for path, module in compiled.plain_modules(transformer):
        block = re.match(r"(\w*blocks|layers)\.\d+\.", path)
        if block and hasattr(module, "processor"):
            numbers.setdefault(block[0], []).append(module)
    if not numbers:
        raise errors.ConfigError(
            f"{type(transformer).__name__} has no attention with a processor in lists of blocks"
        )
    callers: Callers = []
    for number, modules in enumerate(numbers.values()):
        callers.append((Site(number, "self"), modules[0]))
        callers += [(Site(number, "cross"), module) for module in modules[1:2]]
    return callers


def _names_of(processor: Any) -> dict[str, Any]:
    """Return the names that a processor's code looks functions up in."""
    return getattr(inspect.unwrap(type(processor).__call__), "__globals__", {})


def _unseen(site: Site, module: Any, transformer: Any) -> errors.ConfigError:
    """Return the error of attention that does not go through dispatch_attention_fn."""
    remedy = "take the model's own processor of diffusers 0.42 or later"
    if diffusers_frames.family_of(transformer) is None:
        title = type(transformer).__name__
        remedy = f"if it is the own processor of {title}, no layout helps (docs/own_code.md)"
    return errors.ConfigError(
        f"layer {site.layer}: {type(module.processor).__name__} does not call diffusers' "
        f"dispatch_attention_fn, so it cannot be seen; {remedy}"
    )


def _replace_dispatch(site: Site, module: Any, transformer: Any, stack: ExitStack) -> None:
    """Replace dispatch_attention_fn in the names that a module's processor looks it up in."""
    processor = module.processor
    names = _names_of(processor)
    if "dispatch_attention_fn" not in names:
        raise _unseen(site, module, transformer)
    key = id(names)
    if key not in _replaced:
        original = names["dispatch_attention_fn"]
        names["dispatch_attention_fn"] = partial(attention.dispatch, original)
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


# --- Calls of modules
def _call_transformer(watched: Watched, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a forward whose pass is announced while it runs, and not longer, whatever ends it."""
    model = id(watched.transformer)
    if not watchers(model) and observer(model) is None:
        return original(*args, **kwargs)
    if any(compiled.compiled_parts(watched.transformer)):
        title = type(watched.transformer).__name__
        raise errors.ConfigError(
            f"{title} was compiled while it is watched: compile it before captures and edits"
        )
    before = attention.FORWARD.get(), attention.CALLER.get(), MODEL.get(), attention.PARALLEL.get()
    try:
        attention.FORWARD.set(None)
        attention.CALLER.set(None)
        MODEL.set(model)
        require_running_generators()
        return _run_forward(watched, original, args, kwargs)
    finally:
        attention.FORWARD.set(before[0])
        attention.CALLER.set(before[1])
        MODEL.set(before[2])
        attention.PARALLEL.set(before[3])


def _call_attention(
    site: Site | None,
    module: nn.Module,
    transformer: Any,
    num_heads: int,
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    is_seen = attention.is_looked_at() or attention.IS_EXPERIMENT.get()
    if site is not None and is_seen and id(_names_of(module.processor)) not in _replaced:
        raise errors.ConfigError(
            f"layer {site.layer}: its processor is {type(module.processor).__name__}, which was set while "
            "captures and edits watch: set it before them"
        )
    given = kwargs.get("hidden_states")
    if args:
        given = args[0]
    with attention.calling(site, module, num_heads, given) as caller:
        out = original(*args, **kwargs)
    if site is None:
        return out
    # Where forward is not the class's own, a cache of diffusers may take its place.
    is_explained = "forward" in vars(module) or getattr(module, "perturbed_attn", False)
    if is_seen and not caller.has_called and not is_explained:
        raise _unseen(site, module, transformer)
    name = {"self": "attn_out", "cross": "cross_out"}[site.kind]
    return attention.show_output(name, site.layer, out)


def _call_projection(original: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    attention.note_projected(x)
    return original(x, *args, **kwargs)


def _call_norm(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    out = original(*args, **kwargs)
    attention.note_norms(out)
    return out


def _call_image_norm(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    out = original(*args, **kwargs)
    attention.expect_image_call()
    return out


def _call_part(name: str, layer: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return attention.show_output(name, layer, original(*args, **kwargs))


# --- A forward: which pass it is, and where its frames lie
def _run_forward(watched: Watched, original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a forward inside its announced pass, with both checks of where frames lie."""
    parallel = _processes_of(watched)
    attention.PARALLEL.set(parallel)
    # 1. Its pass, and its frames. What the user announced comes first.
    arguments = arguments_of(watched.transformer, args, kwargs)
    told = diffusers_passes.told_of(watched.transformer, watched.pipeline, watched.name)
    video = watched.family.locate(watched.transformer.config, arguments, told.variables)
    if told.place is not None:
        video = video._replace(start=video.start + told.place.start)
    at = current_pass()
    if at is None:
        parts = watched.evaluations.number(diffusers_passes.passes_of(told, arguments, video), told.pipeline)
    else:
        parts = ((at, slice(None)),)
    frames = parts[0][0].query_frames
    is_chunk = told.place is not None or arguments.get("chunk_partition") is not None
    requests = getattr(observer(), "requests", ())
    _check_watchers(watched, told, parts[0][0], video, is_chunk, requests)
    require_bands(watched, requests)
    if parallel is not None:
        parallel.require_alike(requests)
    forward = attention.Forward(
        parts=parts,
        video=video,
        layout=_layout_of(video, frames),
        family=watched.family,
        check=FrameCheck(),
    )
    if watched.family.text_of and any(request.granularity == "words" for request in requests):
        forward.text = watched.family.text_of(arguments)
    # 2. The experiment comes before the forward, or behind the first one of streamed offload, which notes the
    # order of its modules meanwhile.
    is_late = _records_order(watched.transformer)
    if not is_late:
        forward.check.place = _place_of(watched, forward, args, kwargs)
    # 3. The forward. What is captured of one whose frames lie elsewhere is dropped.
    calls = getattr(observer(), "calls", [])
    count = len(calls)
    announced: AbstractContextManager[None] = nullcontext()
    if len(parts) == 1:
        announced = during(parts[0][0])
    attention.FORWARD.set(forward)
    try:
        with announced:
            model = watched.transformer
            out = latents.run(model, told, parts, video, arguments, original, args, kwargs)
        attention.read_comparisons(forward)
        if is_late:
            forward.check.place = _place_of(watched, forward, args, kwargs)
        if parallel is not None:
            calls[count:] = parallel.gathered(calls[count:])
    except errors.ConfigError:
        del calls[count:]
        raise
    return out


def _processes_of(watched: Watched) -> Any:
    """Return the processes that share the tokens of a transformer, None of one on one GPU.

    ConfigError for what needs the tokens or heads of all of them, and for other kinds of parallelism.
    """
    model = watched.transformer
    if getattr(model, "_parallel_config", None) is None:
        return None
    from wan.wings import ulysses

    for watcher in watchers():
        if watcher.sees is None or not watcher.sees <= {*OF_FORWARD}:
            _require_of_heads(watcher.edits, type(model).__name__)
    return ulysses.processes_of(model)


def _require_of_heads(edits: Sequence[Any], title: str) -> None:
    """Raise ConfigError but for edits of single heads, which each process makes of those that it has."""
    if not edits:
        raise errors.ConfigError(
            f"several GPUs share the tokens of {title}: attention, x_t, flow and x0 are captured there; "
            "gradients and other sites take one GPU"
        )
    for edit in edits:
        if {*OF_FORWARD}.issuperset(edit.sites):
            continue
        is_of_heads = (OF_HEADS_HERE | {*OF_FORWARD}).issuperset(edit.sites)
        is_of_user = hasattr(edit, "function") or type(edit).__module__.partition(".")[0] not in OURS
        if not is_of_heads or is_of_user or edit.needs:
            raise errors.ConfigError(
                f"several GPUs share the tokens and heads of {title}: {edit} takes one GPU; edits of calls, "
                "q, k, v and z without a function of your own, a source or means do not"
            )


def arguments_of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a forward's arguments by the names of its class, whatever wraps the model's own forward."""
    names = list(attention.signature_of(type(model).forward).parameters)[1:]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _layout_of(video: diffusers_frames.VideoTokens, frames: Sequence[int]) -> KeyLayout:
    """Return the layout of the keys of self-attention: cached frames, then those of the queries.

    Edits name the frames of a whole video by number or "first", not as the queries' own.
    """
    keys = (*range(frames[0] - (video.past or 0), frames[0]), *frames)
    layout = KeyLayout.of_frames(keys, len(keys) * video.tokens)
    own = range(0)
    if video.past is not None:
        own = range(video.past, len(keys))
    return replace(layout, own=own, query_positions=tuple(frames))


def _check_watchers(
    watched: Watched,
    told: diffusers_passes.Told,
    at: Pass,
    video: diffusers_frames.VideoTokens,
    is_chunk: bool,
    requests: Sequence[capture.CaptureRequest],
) -> None:
    """Raise ConfigError for layers, heads, sites, frames, steps and edits that this forward does not have."""
    # 1. How many there are of each, as far as that is known.
    is_whole = not is_chunk and video.past is None and at.query_frames == tuple(range(video.frames))
    counts: dict[str, int | None] = {
        "layer": len(watched.layers) or None,
        "head": getattr(watched.transformer.config, "num_attention_heads", None),
        "block": None,
        "step": None,
    }
    if is_whole:
        counts["block"] = 1
    timesteps = getattr(getattr(told.pipeline, "scheduler", None), "timesteps", None)
    if at.step is not None and at.model and timesteps is not None and not is_chunk:
        counts["step"] = max(len(timesteps), at.step + 1)
    # 2. Each watcher, or each of its edits; and each request of a capture of attention.
    selections: list[object] = [*requests]
    for watcher in watchers():
        selections += watcher.edits or [watcher]
    for chosen in selections:
        for name, count in counts.items():
            check_indices(name, getattr(chosen, f"{name}s", None), count)
        frames, sites = getattr(chosen, "frames", None), getattr(chosen, "sites", ())
        names: Sequence[object] = ()
        if isinstance(frames, str):
            names = [frames]
        elif isinstance(frames, Sequence):
            names = frames
        of_blocks = [name for name in names if isinstance(name, str) and name != "first"]
        if of_blocks and video.past is None:
            raise errors.ConfigError(
                f'frames="{of_blocks[0]}": this model makes all frames at once, without earlier blocks; '
                'name frames by number or "first"'
            )
        if is_whole and isinstance(frames, Sequence):
            check_indices("frame", [n for n in frames if isinstance(n, int)], video.frames)
        if getattr(chosen, "heads", None) is not None and sites and OF_HEADS_HERE.isdisjoint(sites):
            raise errors.ConfigError(f"{sites[0]} has no heads: leave heads out")
        for site in sites:
            errors.require_known(
                site, ("self", "cross", *OF_FORWARD, *SITES_HERE), "{} cannot be seen in diffusers' models"
            )
    title = type(watched.transformer).__name__
    for edit in active_edits():
        if type(edit).__name__ in TURNING and not watched.family.has_wan_rope:
            raise errors.ConfigError(
                f"{type(edit).__name__} turns q and k by Wan's RoPE, which {title} does not have"
            )


def require_bands(watched: Watched, requests: Sequence[capture.CaptureRequest]) -> None:
    """Raise ConfigError for what Wan's RoPE tells of q and k, of a model with another one."""
    for request in requests:
        for name in ("rope_bands", "query_key_means"):
            if getattr(request, name) and not watched.family.has_wan_rope:
                title = type(watched.transformer).__name__
                raise errors.ConfigError(f"{name}: {title} does not have Wan's RoPE; leave {name} out")


# --- The experiment
COMPARED = 8  # channels of each head
RECORDS_ORDER = "lazy_prefetch_group_offloading"  # diffusers' hook, gone after the first forward


def _records_order(model: nn.Module) -> bool:
    return RECORDS_ORDER in getattr(getattr(model, "_diffusers_hook", None), "hooks", ())


def _place_of(
    watched: Watched, forward: attention.Forward, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Checked:
    """Return how sure it is where a forward's frames lie: one experiment for each set of shapes."""
    arguments = arguments_of(watched.transformer, args, kwargs)
    shapes = {name: tuple(value.shape) for name, value in arguments.items() if isinstance(value, Tensor)}
    processors = {type(module.processor) for module in watched.attention}
    key = forward.video, watched.family, frozenset(shapes.items()), frozenset(processors)
    if key not in watched.places:
        x = arguments["hidden_states"]
        plain = _first_queries(watched, args, kwargs, x)
        (_, behind), _ = attention.tokens_around(forward, True, plain.queries.shape[1], plain.num_keys)
        watched.places[key] = diffusers_frames.place_by_experiment(
            lambda changed: _first_queries(watched, args, kwargs, changed).queries,
            x,
            plain.queries,
            behind,
            watched.family,
            forward.video,
        )
    return watched.places[key]


def _stand_still(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the input in place of attention that refines text, which tells nothing of frames."""
    return hidden_states


def _first_queries(
    watched: Watched, args: Sequence[Any], kwargs: Mapping[str, Any], x: Tensor
) -> attention.Reached:
    """Return queries of the first self-attention over video, 8 channels a head, where hidden_states are x.

    The forward is the class's own and ends there. Offloaded parts are loaded by their hooks, and released by
    the forward that follows; caches of diffusers see nothing. Random numbers are those of before.
    """
    # 1. The arguments, with x.
    kwargs = dict(kwargs)
    if "hidden_states" in kwargs:
        kwargs["hidden_states"] = x
    else:
        args = (x, *args[1:])
    devices, model = [], watched.transformer
    if x.is_cuda:
        devices = [x.device]
    # 2. The forward.
    before = attention.IS_EXPERIMENT.get()
    attention.IS_EXPERIMENT.set(True)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices), ExitStack() as stack:
            stack.enter_context(without_caches(model))
            for module in watched.resting:
                vars(module)["_call_impl"] = _stand_still
                stack.callback(vars(module).pop, "_call_impl")
            args, kwargs = loaded(model, args, kwargs)
            type(model).forward(model, *args, **kwargs)
    except attention.Reached as reached:
        traceback.clear_frames(reached.__traceback__)  # they hold what the forward made, as a mask of GiB
        reached.queries = reached.queries[..., :COMPARED].clone()
        return reached.with_traceback(None)
    finally:
        attention.IS_EXPERIMENT.set(before)
    raise errors.ConfigError(f"{type(model).__name__} has no self-attention over the video that can be seen")


def loaded(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Load an offloaded model by the hooks of its own forward -> its arguments, on the device."""
    hook = getattr(model, "_hf_hook", None)  # accelerate's
    if hook is not None:
        args, kwargs = hook.pre_forward(model, *args, **kwargs)
    registry = getattr(model, "_diffusers_hook", None)
    if registry is not None:
        for hook in registry.hooks.values():
            if not hook._is_stateful:
                args, kwargs = hook.pre_forward(model, *args, **kwargs)
    return args, kwargs


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Let hooks of diffusers that keep a state, as caches do, neither act nor see calls in this context."""
    silenced = []
    for part in compiled.modules_of(model):
        registry = vars(part).get("_diffusers_hook")
        if registry is None:
            continue
        for name, functions in zip(registry._hook_order, registry._fn_refs, strict=True):
            if registry.hooks[name]._is_stateful:
                silenced.append((functions, dict(vars(functions))))
                functions.pre_forward = lambda module, *args, **kwargs: (args, kwargs)
                functions.forward = functions.original_forward or functions.forward
                functions.post_forward = lambda module, output: output
    try:
        yield
    finally:
        for functions, before in silenced:
            vars(functions).update(before)


# --- Capture
def check_requests(transformer: Any, requests: Sequence[capture.CaptureRequest]) -> None:
    """Raise ConfigError for a layer that a watched transformer lacks, or what another RoPE is needed for."""
    watched = _open[id(transformer)]
    for request in requests:
        request.check(len(watched.layers) or 1 << 20)
    require_bands(watched, requests)


@reusable
def capture_diffusers(
    x: Any, *requests: capture.CaptureRequest, layout: Any = None, **fields: Any
) -> Iterator[list[capture.CapturedCall]]:
    """Capture the calls of a diffusers transformer, or of a pipeline's; requests or fields of CaptureRequest.

    Yields the list of calls. Raises ConfigError as watching() does, for a layer that is not there, and where
    tokens are not those of the frames that the family or layout= says.
    """
    requests = requests or (capture.CaptureRequest(**fields),)
    with watching(x, layout) as transformers:
        for transformer in transformers.values():
            check_requests(transformer, requests)
        with capture.ATTENTION_WEIGHT_CAPTURE.capture(*requests) as calls:
            yield calls
