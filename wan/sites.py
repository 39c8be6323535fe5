"""Name every activation of the model, and let watchers see or replace it during the forward.

The model calls hook_point(site, layer, x) where an activation is made. Nothing happens until someone watches:

    with watched(watcher):  # watcher.on_activation(x, where) returns what takes the place of x, or None
        pipeline.inference(...)

Edits, recorders (wan/interventions.py) and SiteCapture (wan/activations.py) are watchers. An observer
(wan/capture.py) keeps something of attention calls that are done, and disturbs nothing. Both belong to the
context (contextvars) that opened them, so threads do not see each other's.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import torch

from wan import errors
from wan.keys import HeadShard

if TYPE_CHECKING:
    from wan.capture import Capture
    from wan.interventions import Edit

# Site -> axes. B batch, L tokens of the call, K keys that it sees, T prompt tokens, H heads, D head dim,
# F frames of the call (1 where all have one timestep), C channels, h and w of a latent frame.
SITES: dict[str, str] = {
    "resid_pre": "B L dim",  # residual stream before the layer
    "resid_mid": "B L dim",  # after self-attention
    "resid_cross": "B L dim",  # after cross-attention
    "resid_post": "B L dim",  # after the MLP
    "attn_out": "B L dim",  # self-attention's output, before its gate
    "cross_out": "B L dim",  # cross-attention's, which has no gate
    "mlp_pre": "B L ffn_dim",  # before the GELU
    "mlp_post": "B L ffn_dim",  # behind it
    "mlp_out": "B L dim",  # before its gate
    "q": "B L H D",  # normed, before RoPE
    "k": "B L H D",  # likewise, of the call's own tokens
    "q_rot": "B L H D",  # after RoPE
    "k_rot": "B L H D",
    "v": "B L H D",
    "z": "B L H D",  # what each head saw, before the projection o
    "scores": "B H L K",  # logits q·k/√D, edits of keys included
    "pattern": "B H L K",  # their softmax
    "cross_q": "B L H D",
    "cross_k": "B T H D",
    "cross_v": "B T H D",
    "cross_z": "B L H D",
    "cross_scores": "B H L T",
    "cross_pattern": "B H L T",
    "mod_shift": "B F 2 dim",  # AdaLN: of self-attention's input (0) and of the MLP's (1)
    "mod_scale": "B F 2 dim",
    "mod_gate": "B F 2 dim",  # of their outputs
    "x_t": "B F C h w",  # noisy latents, the forward's input
    "flow": "B F C h w",  # its output
    "x0": "B F C h w",  # the clean latents that the flow points to
}
CALLS = ("self", "cross")  # visited too: a whole attention call (wan.attention.Call) before its softmax
OF_FORWARD = ("x_t", "flow", "x0")  # of no layer
OF_HEADS = frozenset(name for name, axes in SITES.items() if "H" in axes)
BESIDE_GRAPHS = frozenset({*OF_FORWARD, "self", "z", "scores", "pattern"})  # which no CUDA graph hides
WHOLE_ON_EACH_GPU = frozenset({*CALLS, *OF_FORWARD, "z", "cross_z"})  # of others GPUs share tokens


def call_hook(function: Callable[..., Any], x: Any, where: "ActivationSite") -> Any:
    """Call a user's function as fn(x, where), or as fn(x) if it takes or requires x alone."""
    # A module's own __call__ takes anything; a builtin such as torch.relu has no signature
    try:
        parameters = inspect.signature(getattr(function, "forward", function)).parameters.values()
    except (TypeError, ValueError):
        return function(x)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_where = (
        len([p for p in positional if p.default is p.empty]) > 1  # lambda x, where, scale=scale: ...
        or any(p.name == "where" for p in positional)
        or any(p.kind == p.VAR_POSITIONAL for p in parameters)
    )
    if not takes_where and not positional:
        raise errors.ConfigError(
            f"{where}: a function of (x, where), or of x, is called there; this one takes nothing"
        )
    if takes_where:
        return function(x, where)
    return function(x)


# --- Who calls, and in which forward
@dataclass(frozen=True)
class Site:
    """An attention module of the model: its transformer layer, counted from 0, and what it attends to."""

    layer: int
    kind: Literal["self", "cross", "cross_image"]  # cross_image: of image tokens, beside those of the text
    shard: HeadShard | None = field(default=None, compare=False, repr=False)  # where not all heads are here


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward of the model as the sampler announces it. Frames are global latent frame indices."""

    query_frames: tuple[int, ...]
    block: int = 0  # of frames; a chunk of them, where a pipeline makes a video chunk by chunk
    step: int | None = 0  # index of the pass in its block; None: of none of its own, or not told
    evaluation: int = 0  # of the same model, block, step and branch: 1 for its second forward, ...
    timestep: float = 0.0
    is_clean_pass: bool = False
    is_recache: bool = False  # clean frames of the past, whose keys are computed again before the block
    branch: str | None = "cond"  # classifier-free guidance runs a second branch, "uncond"; None: not told
    model: str | None = None  # the name of the transformer in its pipeline, of two experts that which ran
    parts: tuple["Pass", ...] = ()  # of blocks at several noise levels: each block's own pass
    levels: tuple[tuple[int, float], ...] = ()  # where they differ: every frame, and its timestep

    @property
    def num_held(self) -> int:
        """First frames of a block that are given, and clean at t = 0 while the others are denoised."""
        return sum(timestep == 0 for _, timestep in self.levels)


Checked = Literal["verified", "told", "unverified"]


@dataclass(eq=False)
class FrameCheck:
    """How sure it is where the tokens of frames lie in the calls of a forward of somebody's model.

    place is of the whole forward: found by an experiment ("verified"), told by somebody, or assumed.
    A call is as sure if its queries stand in the order in which the model made them, else unverified.
    """

    place: Checked = "unverified"
    in_order: dict[Site, bool] = field(default_factory=dict)  # calls that are not in it: nobody could tell

    def of_call(self, site: Site) -> Checked:
        """Return how sure it is where the frames of a call lie."""
        if self.in_order.get(site):
            return self.place
        return "unverified"


@dataclass(frozen=True)
class ActivationSite:
    """The place of an activation: its site, layer (None for x_t, flow, x0) and pass."""

    site: str
    layer: int | None
    at: Pass
    shard: HeadShard | None = field(default=None, compare=False, repr=False)
    of_heads: tuple[int, ...] | None = None  # the heads of a call that has some of a layer's

    block = property(lambda self: self.at.block)
    step = property(lambda self: self.at.step)
    evaluation = property(lambda self: self.at.evaluation)
    frames = property(lambda self: self.at.query_frames)
    timestep = property(lambda self: self.at.timestep)
    is_clean_pass = property(lambda self: self.at.is_clean_pass)
    branch = property(lambda self: self.at.branch)

    def __str__(self) -> str:
        of_layer = ""
        if self.layer is not None:
            of_layer = f"layer {self.layer}, "
        return f"{self.site}: {of_layer}block {self.block}, step {self.step}"


class Watcher:
    """See, and perhaps change, activations while installed."""

    edits: Sequence["Edit"] = ()  # where it makes some
    changed: Sequence[int] = ()  # how many calls each of them changed
    models: Container[int] | None = None  # ids of the transformers that it watches; None: of any
    sees: frozenset[str] | None = None  # the only sites that it is shown; None: all of them

    def on_activation(self, x: Any, where: ActivationSite) -> Any:
        """Return a replacement for x, or None to keep it."""

    def wants(self, site: str, layer: int | None, at: Pass | None) -> bool:
        """Return whether this watcher wants a site; sites that cost work are computed only if one does."""
        return False

    def hides(self, layer: int, at: Pass | None) -> bool:
        """Return whether a layer must run without CUDA graphs."""
        return True

    def check(self, sizes: "RolloutSizes") -> None:
        """Raise ConfigError where it does not fit the rollout that is about to run."""

    def begin(self) -> None:
        """Begin anew: a run of somebody's pipeline is about to start, whose sizes nobody knows."""


_WATCHERS: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=())
_PASS: ContextVar[Pass | None] = ContextVar("pass", default=None)
_OBSERVERS: ContextVar[tuple[list["Capture | None"], ...]] = ContextVar(
    "observers", default=()
)  # the last one takes the calls
_RUN: ContextVar[object | None] = ContextVar("run", default=None)  # of somebody's pipeline
_GENERATORS: ContextVar[tuple[tuple[int, str], ...]] = ContextVar("generators", default=())
# The id of somebody's transformer whose forward runs (wan/diffusers_capture.py); None: of no such one
MODEL: ContextVar[int | None] = ContextVar("model", default=None)
_of_process: "Capture | None" = None
_open = 0  # contexts of any thread in which somebody looks; torch.compile can read it, and no ContextVar
_lock = Lock()


# --- Contexts: who looks is on a stack of the context (thread, task) that opened them
@contextmanager
def pushed(stack: ContextVar[tuple[Any, ...]], *entries: Any) -> Iterator[None]:
    """Push entries on a stack of this context; on exit remove exactly these, whatever else changed."""
    global _open
    # 1. Find who enters: functions that contextlib drives, and __enter__, do it for who enters them.
    frame, generators = sys._getframe(), tuple[tuple[int, str], ...]()
    while frame.f_back is not None:
        places = frame.f_code.co_filename, frame.f_back.f_code.co_filename
        if contextlib.__file__ not in places and frame.f_code.co_name != "__enter__":
            if frame.f_code.co_flags & inspect.CO_GENERATOR:
                generators = ((id(frame), frame.f_code.co_qualname),)
            break
        frame = frame.f_back
    del frame  # else it and what it holds would live on in a circle
    # 2. Look while the context lasts.
    stack.set((*stack.get(), *entries))
    _GENERATORS.set((*_GENERATORS.get(), *generators))
    with _lock:
        _open += 1
    try:
        yield
    finally:
        with _lock:
            _open -= 1
        for entry in entries:
            remove(stack, entry)
        for entry in generators:
            remove(_GENERATORS, entry)


def remove(stack: ContextVar[tuple[Any, ...]], entry: Any) -> None:
    """Remove an entry from a stack of this context, wherever it is there."""
    entries = stack.get()
    places = [n for n, other in enumerate(entries) if other is entry]
    if not places:  # of a generator that another thread closes
        raise errors.ConfigError("a context was left in another thread or task than the one that entered it")
    stack.set(entries[: places[-1]] + entries[places[-1] + 1 :])


def require_running_generators() -> None:
    """Raise ConfigError if a suspended generator holds an open context, which would see others' runs."""
    frame: FrameType | None = sys._getframe(1)
    running = set[int]()
    while frame is not None:
        running.add(id(frame))
        frame = frame.f_back
    suspended = [name for key, name in _GENERATORS.get() if key not in running]
    if suspended:
        raise errors.ConfigError(
            f"the generator {suspended[0]} is suspended inside intervene(), capture() or watched(), which "
            "would change or see this run: generate inside it, or close() it first"
        )


def watched(*watchers: Watcher) -> AbstractContextManager[None]:
    """Let watchers see all activations while the context lasts, from the outermost in."""
    return pushed(_WATCHERS, *watchers)


@contextmanager
def during(at: Pass) -> Iterator[None]:
    """Announce the forward that runs inside this context."""
    before = _PASS.get()
    _PASS.set(at)
    try:
        yield
    finally:
        _PASS.set(before)


def observed(by: "Capture | None" = None) -> AbstractContextManager[None]:
    """Let one observer (wan.capture.Capture), or none, take the attention calls of this context."""
    return pushed(_OBSERVERS, [by])  # one of its own, however often None is there


def observe_process(by: "Capture | None") -> None:
    """Install an observer for all contexts that have none of their own."""
    global _of_process
    _of_process = by


def observer(model: int | None = None) -> "Capture | None":
    """Return the observer of attention calls in this context, or None: the last of those of the model.

    model is the id of somebody's transformer, by default the one whose forward runs.
    """
    entries: tuple[list[Capture | None], ...] = ()
    if _open:
        entries = _OBSERVERS.get()
    for [entry] in reversed(entries):
        if watches(entry, model):
            return entry
    return _of_process


def watches(watcher: Any, model: int | None = None) -> bool:
    """Return whether a watcher or an observer is of a model, by default of the one whose forward runs."""
    models = getattr(watcher, "models", None)
    return models is None or (model or MODEL.get()) in models


@contextmanager
def counting() -> Iterator[None]:
    """Count evaluations (Pass.evaluation) anew while the context lasts: it is one run of a pipeline."""
    before = _RUN.get()
    _RUN.set(object())
    try:
        yield
    finally:
        _RUN.set(before)


current_run = _RUN.get  # what tells the run of a pipeline from others, or None
current_pass = _PASS.get  # the forward that runs, as the sampler announced it, or None


def watchers(model: int | None = None) -> tuple[Watcher, ...]:
    """Return the watchers of this context that are of a model, outermost first.

    model is the id of somebody's transformer, by default the one whose forward runs.
    """
    if _open:
        return tuple(watcher for watcher in _WATCHERS.get() if watches(watcher, model))
    return ()


def require_no_data(edits: Iterable[Any], what: str) -> None:
    """Raise ConfigError for an edit that needs more than the run itself, which these runs cannot give it."""
    for edit in edits:
        if edit.needs:
            raise errors.ConfigError(f"{what} take no edit that needs {edit.needs}: {edit}")


def active_edits(model: int | None = None) -> list[Any]:
    """Return all edits (wan/interventions.py) that apply now to a model, in order of nesting."""
    return [edit for watcher in watchers(model) for edit in watcher.edits]


def announced_pass() -> Pass:
    """Return the present pass, which a pipeline announces; ConfigError outside of one."""
    at = _PASS.get()
    if at is None:
        raise errors.ConfigError(
            "captures and edits need the pass of each call: run the model through the "
            "pipeline, or inside ATTENTION_WEIGHT_CAPTURE.during(Pass(query_frames=...))"
        )
    return at


def wanted(site: str, layer: int | None) -> bool:
    """Return whether a watcher wants a site in this pass."""
    # `_open` first: torch 2.11 compiles training's layers one by one where their number is read.
    return bool(_open) and any(watcher.wants(site, layer, _PASS.get()) for watcher in watchers())


def is_shown(*sites: str) -> bool:
    """Return whether a watcher sees one of these sites; if not, the model may skip work done only for it."""
    return any(watcher.sees is None or not watcher.sees.isdisjoint(sites) for watcher in watchers())


def hook_point(
    site: str, layer: int | None, x: Any, shard: HeadShard | None = None, of_heads: Any = None
) -> Any:
    """Show an activation to all watchers -> x, or its replacement."""
    for watcher in watchers():
        if watcher.sees is not None and site not in watcher.sees:  # most hook points, of most watchers
            continue
        at = announced_pass()
        changed = watcher.on_activation(x, ActivationSite(site, layer, at, shard, of_heads))
        if changed is not None:
            x = changed
    return x


def is_changed(x: Any, before: Any) -> bool:
    """Return whether a watcher replaced an activation: by other numbers, or by a node of a graph."""
    return x is not before and (x.requires_grad or not torch.equal(x, before))


def is_hidden(layer: int) -> bool:
    """Return whether CUDA graphs would hide a layer from a watcher in this pass."""
    return any(watcher.hides(layer, _PASS.get()) for watcher in watchers())


def check_watchers(sizes: "RolloutSizes") -> None:
    """Raise ConfigError if an observer or a watcher does not fit the rollout that is about to run."""
    if _GENERATORS.get():
        require_running_generators()
    for request in getattr(observer(), "requests", ()):
        request.check(sizes.num_layers, sizes.num_blocks, sizes.num_passes)
    for watcher in watchers():
        watcher.check(sizes)


def asks_for(chosen: Any, layer: int | None, at: Pass) -> bool:
    """Return whether layers, blocks and steps of a request have a pass; None is all but a recache."""
    return (
        (layer is None or chosen.layers is None or layer in chosen.layers)
        and (chosen.blocks is None or at.block in chosen.blocks)
        and not at.is_recache
        and (chosen.steps is None or at.step in chosen.steps)
    )


def check_site(name: Any) -> str:
    """Return the name of a site. ConfigError for others, with the nearest."""
    short = str(name).rpartition(".")[2].removeprefix("hook_")
    if name not in SITES and short in SITES:  # blocks.5.attn.hook_z, as TransformerLens names it
        raise errors.ConfigError(f"{errors.short_repr(name)} is no site; did you mean {short}, layers=[5]?")
    errors.require_known(name, SITES, "{} is no site")
    return str(name)


def check_sites(sites: Collection[str], sizes: "RolloutSizes") -> None:
    """Raise ConfigError for sites whose tokens several GPUs share."""
    lost = sorted(set(sites) - WHOLE_ON_EACH_GPU)
    if sizes.splits_tokens and lost:
        whole = ", ".join(sorted(WHOLE_ON_EACH_GPU - {*CALLS}))
        raise errors.ConfigError(
            f"several GPUs share the tokens of {lost[0]}: take one GPU, or one of {whole}"
        )


def check_indices(name: str, chosen: Collection[int] | None, count: int | None) -> None:
    """Raise ConfigError for a chosen index that is not in 0..count - 1."""
    for index in chosen or ():
        if count is not None and not 0 <= index < count:
            raise errors.ConfigError(f"{name} {index} is not in 0..{count - 1}")


@dataclass(frozen=True)
class RolloutSizes:
    """How many layers, heads, blocks and passes a rollout has: what indices of a request may name.

    Denoising steps come first, the clean pass is the last one.
    """

    num_layers: int
    num_heads: int
    text_len: int
    num_steps: int
    last_steps: tuple[int, ...]  # of each block, its last denoising step
    num_frames: int | None = None  # of the whole video, where it is known
    has_clean_pass: bool = True
    keeps_clean_keys: bool = True  # False: before each block all keys are computed again, without edits
    splits_tokens: bool = False  # over several GPUs

    @property
    def num_blocks(self) -> int:
        return len(self.last_steps)

    @property
    def num_passes(self) -> int:
        """The clean pass too, where there is one."""
        if self.has_clean_pass:
            return self.num_steps + 1
        return self.num_steps
