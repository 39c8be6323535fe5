"""Interventions: what can be changed inside the model, each as a value that is written down and run again.

An edit says what is done, where (sites and whole attention calls, wan/sites.py), and in which passes:

    with intervene(Knockout(frames="first", layers=[5], heads=[10], passes="denoise")) as session:
        latents = pipeline.inference(noise, ...)
    with intervene(at("resid_post", layers=[5]), lambda x, where: 2 * x):
        latents = pipeline.inference(noise, ...)

A new edit is a subclass of Edit with its own apply(), and check() where it needs one.
"""

import hashlib
import inspect
import json
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from wan.capture import Call
from wan.errors import ConfigError, did_you_mean
from wan.keys import EMPTY, MIXED, ROPE_THETA, KeyBias, KeyLayout, RotaryTable, as_index, rotate, select, send
from wan.sites import (
    CALLS,
    OF_FORWARD,
    OF_HEADS,
    SITES,
    Pass,
    Watcher,
    Where,
    check_indices,
    check_site,
    check_sites,
    watched,
    watchers,
)

PASSES = ("denoise", "clean", "all")
FRAME_NAMES = ("first", "sink", "past", "own")
MAX_BIAS = 65504.0  # the largest number of float16

Frames = tuple[int | str, ...]
Tokens = slice | Tensor  # an index
EVERY: Tokens = slice(None)
InterventionError = ConfigError  # of an intervention


# --- Fields: what is accepted, and in which form it is kept
def one_of(*choices: str) -> Callable[[str, Any], str]:
    """Return a check that a value is one of the choices."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise InterventionError(f"{name} {value!r} is not one of {', '.join(choices)}")
        return value

    return check


def as_indices(name: str, value: Any) -> tuple[int, ...]:
    """Return a number, or several, that count from 0, as increasing ones."""
    chosen = [value] if type(value) is int else list(value) if isinstance(value, Iterable) else None
    if chosen is None or isinstance(value, (str, bytes, dict)) or any(type(n) is not int for n in chosen):
        raise InterventionError(f"{name} {value!r} are not whole numbers, such as [0, 5]")
    if not chosen or min(chosen) < 0:
        empty = "name at least one, or leave it out for all" if not chosen else "they count from 0"
        raise InterventionError(f"{name} {value!r}: {empty}")
    return tuple(sorted(set(chosen)))


def as_frames(name: str, value: Any) -> Frames:
    """Return frames by number or name, numbers first: 0, "first", [3, "sink"], "own", "own:18"."""
    chosen = [value] if isinstance(value, (int, str)) else list(value) if isinstance(value, Iterable) else []
    if not chosen or isinstance(value, dict):
        raise InterventionError(f"{name} {value!r}: name a number, {', '.join(FRAME_NAMES)}, or a list")
    for each in chosen:
        is_own = isinstance(each, str) and each.startswith("own:") and each[4:].isdecimal()
        if not is_own and each not in FRAME_NAMES and not (type(each) is int and each >= 0):
            raise InterventionError(f"frame {each!r} is not a number from 0, nor {', '.join(FRAME_NAMES)}")
    numbers = sorted({each for each in chosen if isinstance(each, int)})
    return (*numbers, *dict.fromkeys(each for each in chosen if isinstance(each, str)))


def as_number(name: str, value: Any) -> float:
    """Return a finite number as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InterventionError(f"{name} {value!r} is not a finite number")
    return float(value)


def of_type(kind: type, noun: str) -> Callable[[str, Any], Any]:
    """Return a check that a value is of a type: True is no whole number."""

    def check(name: str, value: Any) -> Any:
        if type(value) is not kind:
            raise InterventionError(f"{name} {value!r} is not a {noun}")
        return value

    return check


def as_sites(name: str, value: Any) -> tuple[str, ...]:
    """Return names of sites, at least one."""
    names = (value,) if isinstance(value, str) else tuple(value)
    if not names:
        raise InterventionError("at() takes the name of a site, or several")
    return tuple(check_site(each) for each in names)


def as_direction(name: str, value: Any) -> tuple[float, ...]:
    """Return the numbers of a vector, a tensor or a list."""
    row = value.tolist() if isinstance(value, Tensor) else value
    if not isinstance(row, Sequence) or isinstance(row, str) or not row:
        raise InterventionError(f"{name} is not a vector of numbers: give a tensor [dim]")
    return tuple(as_number(name, each) for each in row)


def as_source(name: str, value: Any) -> Any:
    """Return a Source from its mapping; anything else as it is, for whoever takes it to check."""
    if not isinstance(value, Mapping):
        return value
    known = [each.name for each in fields(Source)]
    if unknown := sorted(set(map(str, value)) - set(known)):
        raise InterventionError(f"source: unknown field {unknown[0]!r}; it takes {', '.join(known)}")
    return Source(**value)


FIELDS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("layers", "heads", "blocks", "steps", "tokens", "bands"), as_indices),
    **dict.fromkeys(("offset", "position", "seed"), of_type(int, "whole number")),
    **dict.fromkeys(("b", "scale", "phase"), as_number),
    **dict.fromkeys(("prompt", "weights"), of_type(str, "text")),
    "frames": as_frames,
    "source": as_source,
    "passes": one_of(*PASSES),
    "branch": one_of("cond", "uncond"),  # of classifier-free guidance
    "attention": one_of("self", "cross"),
    "how": one_of("zero", "mean", "frame_mean", "resample"),
    "what": lambda name, value: value if value in ("qk", "kv") else check_site(value),
    "site": lambda name, value: check_site(value),
    "names": as_sites,
    "direction": as_direction,
}


class _Checked:
    """A frozen dataclass whose fields are checked and brought into one form; None by default stays."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if each.name in FIELDS and (value is not None or each.default is MISSING):
                object.__setattr__(self, each.name, FIELDS[each.name](each.name, value))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for YAML and JSON; what is left at its default is left out."""
        values = {}
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if each.default is MISSING or value != each.default:
                values[each.name] = value.to_dict() if isinstance(value, Source) else _plain(value)
        return values

    def __repr__(self) -> str:
        said = [f"{name}={_plain(getattr(self, name))!r}" for name in _Checked.to_dict(self)]
        return f"{type(self).__name__}({', '.join(said)})"


def _plain(value: Any) -> Any:
    """Return a field's value as YAML and JSON have it: one frame or index alone, several as a list."""
    if isinstance(value, tuple):
        return value[0] if len(value) == 1 else list(value)
    return value


@dataclass(frozen=True, repr=False)
class Source(_Checked):
    """Another run of the same shapes; None is what the edited run has. weights: a checkpoint, or "base"."""

    prompt: str | None = None
    seed: int | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.to_dict():
            raise InterventionError("source: name another prompt, seed or weights; this is the run itself")


# --- What a rollout is going to do: enough to refuse an edit before it runs, and to count its calls
@dataclass(frozen=True)
class BlockKeys:
    """The passes of a block, and the frames whose keys it sees, as far as they have a number."""

    own: tuple[int, ...]
    steps: tuple[int, ...]  # -1 where keys of its past are computed again; a clean pass is the last
    past: tuple[int, ...] = ()  # of earlier blocks
    sink: tuple[int, ...] = ()
    sees_more: bool = False  # keys of its past may have no frame number

    def has(self, name: int | str) -> bool:
        """Return whether some key is of a frame of that name."""
        if name == "past":
            return bool(self.past) or self.sees_more
        if name == "sink":
            return bool(self.sink)
        if isinstance(name, int) or name == "first":
            return (0 if name == "first" else name) in self.past
        return name == "own" or int(name[4:]) in self.own


@dataclass(frozen=True)
class RolloutPlan:
    """Layers, heads, passes and blocks of a rollout. Denoising steps come first, the clean pass is last."""

    num_layers: int
    num_heads: int
    num_steps: int
    blocks: tuple[BlockKeys, ...]
    text_len: int
    has_clean_pass: bool = True
    branches: tuple[str, ...] = ("cond",)
    keeps_clean_keys: bool = True  # False: before each block all keys are computed again, without edits
    splits_tokens: bool = False  # over several GPUs

    def passes(self, edit: "Edit", block: int) -> list[int]:
        """Return the steps of a block that an edit selects."""
        is_clean = (-1, self.num_steps)
        return [step for step in self.blocks[block].steps if edit.selects_pass(step, step in is_clean)]

    def calls(self, edit: "Edit") -> list[tuple[int, int]]:
        """Return (block, step) of the calls of one layer and branch that an edit changes."""
        chosen, names = range(len(self.blocks)) if edit.blocks is None else edit.blocks, edit.key_frames
        return [
            (block, step)
            for block in chosen
            if names is None or any(map(self.blocks[block].has, names))
            for step in self.passes(edit, block)
        ]

    def count(self, edit: "Edit") -> int:
        """Return how many activations, or attention calls, an edit changes."""
        layers, branches = self.layers(edit), [edit.branch] if edit.branch else self.branches
        return len(self.calls(edit)) * sum(layers[site] for site in edit.sites) * len(branches)

    def layers(self, edit: "Edit") -> dict[str, int]:
        """Return in how many layers an edit stands, by its sites."""
        every = len(edit.layers or range(self.num_layers))
        return {site: 1 if site in OF_FORWARD else every for site in edit.sites}

    def in_words(self, edit: "Edit") -> str:
        """Say what an edit is going to do: edits 1 of 12 heads in 5 passes of 7 blocks: 35 calls."""
        calls, count, layers = self.calls(edit), self.count(edit), max(self.layers(edit).values())
        passes, blocks = len({step for _, step in calls}), len({block for block, _ in calls})
        of_layers = f" in {layers} of {self.num_layers} layers," if layers > 1 else ""
        what = f"{len(edit.heads or range(self.num_heads))} of {self.num_heads} heads"
        if not edit.has_heads:
            what = ", ".join(edit.sites)
        return (
            f"edits {what}{of_layers} in {passes} pass{'es' * (passes != 1)} of "
            f"{blocks} block{'s' * (blocks != 1)}: {count} call{'s' * (count != 1)}"
        )

    def check(self, edits: Iterable["Edit"]) -> None:
        """Raise InterventionError for an edit that this rollout cannot make, or that would change nothing."""
        for edit in edits:
            edit.check(self)


# --- What every edit has: which calls it selects, and how it is written down
@dataclass(frozen=True, kw_only=True, repr=False)
class Edit(_Checked, ABC):
    """A change at some sites or of attention calls; None selects all.

    passes has no default: denoise, clean or all.
    steps are denoising steps and narrow passes "denoise" and "all"; the clean pass is named by passes alone.
    """

    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    blocks: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None
    passes: str
    branch: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.passes == "clean":
            raise InterventionError("steps are denoising steps: leave them out with passes='clean'")

        if self.heads is not None and not self.has_heads:
            raise InterventionError(f"{self.sites[0]} has no heads: leave heads out")
        if self.layers is not None and set(self.sites) <= set(OF_FORWARD):
            raise InterventionError(f"{self.sites[0]} is of no layer: leave layers out")

    @abstractmethod
    def apply(self, x: Any, where: Where, data: Any = None) -> Any:
        """Return what takes the place of x, an activation or a Call, which is selected; None for nothing.

        data: the means (HeadOutputs, ReferenceMeans) or the run in step that the edit needs.
        """

    @property
    def kind(self) -> str:
        """The attention it edits: self or cross."""
        return getattr(self, "attention", "self")

    @property
    def sites(self) -> tuple[str, ...]:
        """Where it stands: at sites, or in whole calls of an attention."""
        return (self.kind,)

    @property
    def has_heads(self) -> bool:
        """True where heads can be chosen."""
        return {*self.sites} <= OF_HEADS | {*CALLS}

    @property
    def key_frames(self) -> Frames | None:
        """The frames that it needs among the keys of a call; None where it needs none."""
        return getattr(self, "frames", None)

    @property
    def needs(self) -> str:
        """The data that it cannot do without; nothing for most."""
        has_source = isinstance(getattr(self, "source", None), Source)
        return "its source as a wan.recorders.RunInStep" if has_source else ""

    def selects_pass(self, step: int, is_clean_pass: bool) -> bool:
        """Return whether a pass of a block is chosen; step -1, a cache computed again, is Jitter's alone."""
        if step < 0 or is_clean_pass:
            return is_clean_pass and step >= 0 and self.passes != "denoise"
        return self.passes != "clean" and (self.steps is None or step in self.steps)

    def selects(self, site: str, layer: int | None, at: Pass) -> bool:
        """Return whether an activation or a call is one of those that it is for."""
        return (
            site in self.sites
            and (self.layers is None or layer in self.layers)
            and (self.blocks is None or at.block in self.blocks)
            and (self.branch is None or at.branch == self.branch)
            and self.selects_pass(at.step, at.is_clean_pass)
        )

    def check(self, plan: RolloutPlan) -> None:
        """Raise InterventionError where a rollout has no such call."""
        if plan.has_clean_pass and plan.num_steps in (self.steps or ()):
            raise InterventionError(
                f"step {plan.num_steps} is the clean pass: name it by passes, not by steps"
            )
        try:
            check_indices("layer", self.layers, plan.num_layers)
            check_indices("head", self.heads, plan.num_heads)
            check_indices("block", self.blocks, len(plan.blocks))
            check_indices("step", self.steps, plan.num_steps)
            check_indices("prompt token", getattr(self, "tokens", None), plan.text_len)
            check_sites(self.sites, plan)
        except ValueError as error:
            raise InterventionError(f"{error}: {self}") from None
        if self.passes == "clean" and not plan.has_clean_pass:
            raise InterventionError("the base model has no clean pass: passes are denoise or all")
        if self.passes == "clean" and not plan.keeps_clean_keys:
            raise InterventionError(
                "recompute_context computes the keys of clean passes again: no later block would see an edit "
                "of passes='clean'; take denoise or all, or leave recompute_context out"
            )
        if self.branch is not None and self.branch not in plan.branches:
            raise InterventionError(f"branch {self.branch} is not there: this rollout has no guidance")
        if plan.calls(self):
            return
        blocks = list(range(len(plan.blocks)) if self.blocks is None else self.blocks)
        remedy = "its blocks have no such pass"
        if self.key_frames is not None and any(plan.passes(self, block) for block in blocks):
            past, own = (
                sorted({frame for block in blocks for frame in getattr(plan.blocks[block], kind)})
                for kind in ("past", "own")
            )
            remedy = f"earlier blocks hold frames {past}; own frames are {own}, named by own or own:N"
        raise InterventionError(f"no call can be edited: {self}; {remedy}")

    def to_dict(self) -> dict[str, Any]:
        return {"edit": type(self).__name__.lower(), **super().to_dict()}


# --- The parts of a call that edits change
def heads_in(edit: Edit, call: Call) -> list[int]:
    """Return the heads of an edit, by their indices in the call; none where the call is of others."""
    return [n for n, number in enumerate(call.numbers) if edit.heads is None or number in edit.heads]


def _where(call: Call) -> str:
    return f"layer {call.site.layer}, block {0 if call.at is None else call.at.block}"


def slots_in(call: Call, names: Frames) -> list[int]:
    """Return the slots of the keys that frames name: of earlier blocks, unless they are own.

    InterventionError where a number or "first" meets a slot that holds another frame for each batch item.
    """

    def is_named(name: int | str, frame: int, is_own: bool, is_sink: bool) -> bool:
        if isinstance(name, str) and name.startswith("own"):
            return is_own and name in ("own", f"own:{frame}")
        named = {"past": frame != EMPTY, "sink": is_sink, "first": frame == 0}
        return not is_own and (named[name] if isinstance(name, str) else frame == name)

    own, sink, slots = call.known_layout.own, call.known_layout.sink, call.known_layout.slots
    found = [
        n
        for n, slot in enumerate(slots)
        if any(is_named(name, frame, n in own, n in sink) for name in names for frame in slot.by_item)
    ]
    if set(names) - {"past", "sink"}:
        check_items(call, found)
    return found


def check_items(call: Call, slots: Iterable[int]) -> None:
    """Raise InterventionError where one of the slots holds another frame for each batch item."""
    for index in slots:
        if len(set(call.known_layout.slots[index].by_item)) > 1:
            raise InterventionError(
                f"slot {index} holds another frame for each batch item: edit them one by one"
            )


def tokens_in(call: Call, slots: Sequence[int]) -> Tokens:
    """Return the tokens of slots among the keys, as an index."""
    S, some = call.known_layout.tokens_per_slot, as_index(slots, call.k.device)
    if isinstance(some, slice):
        return slice(some.start * S, some.stop * S)
    return (some[:, None] * S + torch.arange(S, device=call.k.device)).flatten()


def replace_values(
    call: Call, name: str, heads: Sequence[int], values: Tensor, tokens: Tokens = EVERY
) -> None:
    """Let q, k or v have other values [B, tokens, heads, D] in this call; the cache stays as it is."""
    x, columns = getattr(call, name).clone(), as_index(heads, call.q.device)
    rows = tokens if isinstance(tokens, slice) or isinstance(columns, slice) else tokens[:, None]
    x[:, rows, columns] = values.to(x.dtype)
    setattr(call, name, x)


def with_heads(x: Tensor, where: Where, heads: Sequence[int] | None, new: Tensor) -> Tensor:
    """Return x with heads of the model (None: with everything) taken from new, which broadcasts to it."""
    new = new.to(x.dtype).expand_as(x)
    if heads is None:
        return new.clone()
    axis = SITES[where.site].split().index("H")
    first = where.shard.heads.start if where.shard else 0
    numbers = where.of_heads or range(x.shape[axis])
    here = [n for n, number in enumerate(numbers) if number + first in heads]
    index = (slice(None),) * axis + (as_index(here, x.device),)
    x = x.clone()
    x[index] = new[index]
    return x


def of_source(x: Any, where: Where, data: Any) -> Any:
    """Return what stands in the place of x in another run; InterventionError where its shapes are others."""
    source = data.value(where)
    parts = [(each.q, each.k) if isinstance(each, Call) else (each,) for each in (source, x)]
    theirs, mine = (tuple(part.shape for part in each) for each in parts)
    if theirs != mine:
        raise InterventionError(f"{where}: the source's call is of another shape: {theirs}, not {mine}")
    return source


def time_frequencies(head_dim: int, bases: Tensor | None = None) -> Tensor:
    """Radians per frame of each pair of the temporal share, float64 [heads or 1, pairs]; bases [heads]."""
    share = RotaryTable(head_dim).axes_dim[0]
    exponents = torch.arange(0, share, 2, dtype=torch.float64) / share
    bases = torch.tensor([ROPE_THETA], dtype=torch.float64) if bases is None else bases
    return bases[:, None] ** -exponents


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the temporal share of x [B, F·S, heads, D] by angles [F, heads or 1, pairs] -> float32."""
    rest = x.shape[3] // 2 - angles.shape[2]
    whole = torch.cat([angles, angles.new_zeros(*angles.shape[:2], rest)], 2)
    cos, sin = whole.cos().float(), whole.sin().float()  # [F, heads, D/2]
    tables = cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
    there = [send(table, x.device).repeat_interleave(x.shape[1] // len(angles), 0) for table in tables]
    return rotate(x.float(), *there)


# --- The edits
@dataclass(frozen=True, kw_only=True, repr=False)
class KeySelection(Edit):
    """Add b to the logits of some keys: frames of self-attention, or prompt tokens of cross-attention."""

    b: ClassVar[float]
    frames: Frames | None = None
    tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.frames is None) == (self.tokens is None):
            name = type(self).__name__
            raise InterventionError(f"{name} takes frames (of self-attention) or tokens (of the prompt)")

    @property
    def kind(self) -> str:
        return "self" if self.frames is not None else "cross"

    def apply(self, call: Call, where: Where, data: Any = None) -> Call | None:
        slots = list(self.tokens or ()) if self.frames is None else slots_in(call, self.frames)
        if not slots:
            return None
        heads = torch.tensor(heads_in(self, call), dtype=torch.long)
        if not len(heads):
            return call  # all of them are in other processes
        if call.bias is None:
            size = call.k.shape[1] if self.frames is None else len(call.known_layout.slots)
            call.bias = KeyBias(torch.zeros(call.q.shape[2], size), call.k.shape[1] // size)
        call.bias.values[heads[:, None], torch.tensor(slots)] += self.b
        if blind := call.bias.blind_heads:
            head = call.numbers[blind[0]]
            raise InterventionError(f"{_where(call)}: head {head} would lose all its keys")
        return call


@dataclass(frozen=True, repr=False)
class Knockout(KeySelection):
    """Leave keys out before the softmax; the weights of the rest are renormalised."""

    b: ClassVar[float] = -math.inf


@dataclass(frozen=True, repr=False)
class Bias(KeySelection):
    """Add b to the logits of keys: their weight times e^b before the softmax is renormalised."""

    b: float  # type: ignore[misc]  # of all Knockouts, of each Bias

    def __post_init__(self) -> None:
        super().__post_init__()
        if abs(self.b) > MAX_BIAS:
            raise InterventionError(
                f"b {self.b:g} is not in -{MAX_BIAS:g}..{MAX_BIAS:g}, which every dtype can add to a logit; "
                "Knockout leaves keys out"
            )


@dataclass(frozen=True, repr=False)
class Ablate(Edit):
    """Replace a head's output z [B, Lq, D], before the projection o.

    how: zero; mean over the tokens of the frame and a reference set (same layer, head, place of the frame in
    its block, and pass); frame_mean: over the tokens of the frame in the same, unedited run; resample: z of
    the run source. source of mean is a file of means, of resample a Source.
    """

    how: str
    source: Source | str | None = None
    attention: str = "self"
    site: str = "z"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.how == "resample") != isinstance(self.source, Source):
            raise InterventionError("resample, and nothing else, takes a source of prompt, seed or weights")
        if isinstance(self.source, str) and self.how != "mean":
            raise InterventionError(f"how={self.how!r} takes no file of means: leave source out")
        if "mean" in self.how and " L " not in f"{SITES[self.sites[0]]} ":
            raise InterventionError(f"{self.site} has no tokens to take a mean over: take zero or resample")

    @property
    def sites(self) -> tuple[str, ...]:
        return ("cross_z" if (self.site, self.attention) == ("z", "cross") else self.site,)

    @property
    def needs(self) -> str:
        return "means of outputs, from wan.recorders" if "mean" in self.how else super().needs

    def apply(self, x: Tensor, where: Where, data: Any = None) -> Tensor:
        if self.how == "zero":
            return with_heads(x, where, self.heads, x.new_zeros(()))
        if self.how == "resample":
            return with_heads(x, where, self.heads, of_source(x, where, data))
        means = data.of(where)  # [B or 1, Fq, ...]
        means = send((where.shard.of(means) if where.shard else means).to(x.dtype), x.device)
        return with_heads(x, where, self.heads, means.repeat_interleave(x.shape[1] // means.shape[1], 1))


@dataclass(frozen=True, repr=False)
class Patch(Edit):
    """Take from the run source a site (z of heads, resid_post), q and k (qk), or k and v of frames (kv)."""

    what: str
    source: Source
    frames: Frames | None = None  # of kv; None is past
    attention: str = "self"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.source, Source):
            raise InterventionError("Patch takes a source: the prompt, seed or weights of another run")
        if self.what != "kv" and self.frames is not None:
            raise InterventionError(f"frames are of what='kv', not of what={self.what!r}")
        if self.what == "kv" and self.attention == "cross":
            raise InterventionError("what='kv' is of cached frames: of self-attention")

    @property
    def sites(self) -> tuple[str, ...]:
        if self.what in ("qk", "kv"):
            return super().sites
        return ("cross_z" if (self.what, self.attention) == ("z", "cross") else self.what,)

    @property
    def key_frames(self) -> Frames | None:
        return (self.frames or ("past",)) if self.what == "kv" else None

    def apply(self, x: Any, where: Where, data: Any = None) -> Any:
        if self.what not in ("qk", "kv"):
            return with_heads(x, where, self.heads, of_source(x, where, data))
        heads, slots = heads_in(self, x), slots_in(x, self.key_frames) if self.key_frames else []
        if self.what == "kv" and not slots:
            return None
        source, tokens = of_source(x, where, data), EVERY
        if self.what == "kv":
            tokens = tokens_in(x, slots)
        if x.layout is not None:  # a map of other keys would be laid over these
            chosen = slots if self.what == "kv" else range(len(x.layout.slots))
            self._check_same_keys(x, source.layout or x.layout, chosen)
        for name in self.what:
            replace_values(x, name, heads, select(getattr(source, name)[:, tokens], heads, 2), tokens)
        return x

    def _check_same_keys(self, call: Call, theirs: KeyLayout, slots: Sequence[int]) -> None:
        """Raise InterventionError where the source's policy chose other keys for one of the slots."""
        mine = call.known_layout
        others = [n for n in slots if mine.slots[n].by_item != theirs.slots[n].by_item]
        if mine.chosen and theirs.chosen and {*mine.chosen.slots} & {*slots}:
            one, other = mine.chosen.on_host, theirs.chosen.on_host
            if not (torch.equal(one.frames, other.frames) and torch.equal(one.indices, other.indices)):
                others += mine.chosen.slots
        if others:
            raise InterventionError(
                f"{_where(call)}: the source chose other keys for slot "
                f"{others[0]}; patch kv of frames that are not chosen, z, or under a policy such as window"
            )


@dataclass(frozen=True, repr=False)
class Move(Edit):
    """Let cached keys stand at another temporal RoPE position: offset frames further, or all at position."""

    frames: Frames
    offset: int | None = None
    position: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(str(name).startswith("own") for name in self.frames):
            raise InterventionError("Move is of cached keys: own keys stand where their queries stand")
        if (self.offset is None) == (self.position is None):
            raise InterventionError("Move takes offset= or position=, in frames")

    def apply(self, call: Call, where: Where, data: Any = None) -> Call | None:
        slots = slots_in(call, self.frames)
        if not slots:
            return None
        turns = [self.offset] * len(slots)
        if self.position is not None:
            check_items(call, slots)
            stands = [_position(call.known_layout, n) for n in slots]
            if MIXED in stands:
                raise InterventionError("these keys stand at several positions: move them by offset=")
            turns = [self.position - each for each in stands]
        heads, tokens = heads_in(self, call), tokens_in(call, slots)
        angles = torch.tensor(turns).double()[:, None, None] * time_frequencies(call.k.shape[3])
        replace_values(call, "k", heads, turn(select(call.k[:, tokens], heads, 2), angles), tokens)
        return call


def _position(layout: KeyLayout, slot: int) -> int:
    """Return where the keys of a slot stand; without RoPE they stand at 0."""
    return layout.slots[slot].position if layout.slots[slot].is_rotated else 0


@dataclass(frozen=True, repr=False)
class Jitter(Edit):
    """A RoPE base per head, 10000 (1 + scale e), e uniform in [-1, 1], in the temporal share of q and k.

    For a whole rollout, cached keys too (LoL, arXiv 2601.16914). e is drawn per layer and head from seed; the
    choice of layers and heads does not change it.
    """

    scale: float = 0.8
    seed: int = 0
    passes: str = field(default="all", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.scale < 1:
            raise InterventionError(f"scale {self.scale:g} is not in 0 .. 1: a base must stay above 0")
        if not 0 <= self.seed < 2**63:
            raise InterventionError(f"seed {self.seed} is not a whole number from 0")
        if (self.blocks, self.steps, self.passes, self.branch) != (None, None, "all", None):
            raise InterventionError("Jitter is of a whole rollout: it takes layers and heads alone")

    def selects_pass(self, step: int, is_clean_pass: bool) -> bool:
        return True

    def bases(self, layer: int, num_heads: int) -> Tensor:
        """Return the RoPE base of each head of a layer, float64 [H]."""
        generator = torch.Generator().manual_seed(self.seed * 100_003 + layer)
        e = 2 * torch.rand(num_heads, generator=generator, dtype=torch.float64) - 1
        return ROPE_THETA * (1 + self.scale * e)

    def apply(self, call: Call, where: Where, data: Any = None) -> Call | None:
        layout, heads, head_dim = call.known_layout, heads_in(self, call), call.q.shape[3]
        if MIXED in layout.positions:
            raise InterventionError(
                "Jitter needs the position of every key: this cache policy has keys without one"
            )
        check_items(call, range(len(layout.slots)))
        numbers = [call.numbers[head] for head in heads]
        bases = self.bases(call.site.layer, call.shard.total)[numbers]
        drift = time_frequencies(head_dim, bases) - time_frequencies(head_dim)  # [heads, pairs]
        stands = [_position(layout, slot) for slot in range(len(layout.slots))]
        for name, positions in (("q", layout.query_positions), ("k", stands)):
            angles = torch.tensor(positions).double()[:, None, None] * drift
            replace_values(call, name, heads, turn(select(getattr(call, name), heads, 2), angles))
        return call


@dataclass(frozen=True, repr=False)
class Band(Edit):
    """Temporal RoPE bands of a head's logits, turned by phase (radians) and multiplied by scale.

    Band b adds |q_b| |k_b| cos(ω_b d + φ) / √D to the logits of frames d apart; band 0 is the fastest. The
    queries' pairs of dims are changed, which is the same for all keys of the call.
    """

    bands: tuple[int, ...]
    phase: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.phase, self.scale) == (0, 1):
            raise InterventionError("Band changes nothing with phase 0 and scale 1: give one of them")

    def apply(self, call: Call, where: Where, data: Any = None) -> Call | None:
        heads, pairs = heads_in(self, call), time_frequencies(call.q.shape[3]).shape[1]
        if self.bands[-1] >= pairs:
            raise InterventionError(f"band {self.bands[-1]} is not in 0..{pairs - 1}: {self}")
        chosen = torch.zeros(pairs, dtype=torch.float64)
        chosen[list(self.bands)] = 1
        q = turn(select(call.q, heads, 2), (self.phase * chosen)[None, None])
        factor = torch.ones(call.q.shape[3])
        factor[: 2 * pairs] += ((self.scale - 1) * chosen).float().repeat_interleave(2)
        replace_values(call, "q", heads, q * send(factor, q.device))
        return call


@dataclass(frozen=True, repr=False)
class Steer(Edit):
    """Add scale times a direction, a vector of the last axis of a site, to every token."""

    site: str
    direction: tuple[float, ...]
    scale: float = 1.0

    @property
    def sites(self) -> tuple[str, ...]:
        return (self.site,)

    def apply(self, x: Tensor, where: Where, data: Any = None) -> Tensor:
        if x.shape[-1] != len(self.direction):
            raise InterventionError(
                f"{where}: the direction has {len(self.direction)} numbers, not {x.shape[-1]}"
            )
        direction = send(torch.tensor(self.direction, dtype=x.dtype), x.device)
        return with_heads(x, where, self.heads, x + self.scale * direction)

    def __repr__(self) -> str:
        return super().__repr__().replace(repr(list(self.direction)), f"[{len(self.direction)} numbers]")


@dataclass(frozen=True, kw_only=True, repr=False)
class Custom(Edit):
    """A function of one's own at some sites: fn(x, where) returns what takes the place of x, or None.

    x is a copy, which fn may change; where says site, layer and pass (wan.sites.Where). What it returns has
    the shape and dtype of x, and no NaN.
    """

    names: tuple[str, ...]
    function: Any = None
    passes: str = "all"

    @property
    def sites(self) -> tuple[str, ...]:
        return self.names

    def __call__(self, function: Any) -> "Custom":
        """Return the edit of a function, or of a class or object with such a method apply."""
        function = function() if isinstance(function, type) else function
        if not callable(function) and not callable(getattr(function, "apply", None)):
            raise InterventionError(f"{function!r} is no function (x, where), and has no such method apply")
        return replace(self, function=function)

    @property
    def code(self) -> Callable[[Tensor, Where], Tensor | None]:
        """The function itself."""
        return self.function if callable(self.function) else self.function.apply

    def check(self, plan: RolloutPlan) -> None:
        if self.function is None:
            raise InterventionError(f"at({', '.join(self.sites)}) has no function: intervene(at(...), fn)")
        super().check(plan)

    def apply(self, x: Tensor, where: Where, data: Any = None) -> Tensor | None:
        new = self.code(x.clone(), where)
        if new is None:
            return None
        problem = f"it returned a {type(new).__name__}"
        if isinstance(new, Tensor):
            problem = "it returned NaN" if new.isnan().any() else ""
            for name in ("shape", "dtype", "device"):
                if getattr(new, name) != getattr(x, name):
                    theirs, mine = (getattr(each, name) for each in (new, x))
                    problem = f"it returned {name} {_said(theirs)}, not {_said(mine)}"
        if problem:
            raise InterventionError(f"{self.name} at {where}: {problem}")
        return new

    @property
    def name(self) -> str:
        """The qualified name of the function, or of the class of an object."""
        named = self.function if hasattr(self.function, "__qualname__") else type(self.function)
        return f"{named.__module__}.{named.__qualname__}"

    def to_dict(self) -> dict[str, Any]:
        named = self.function if hasattr(self.function, "__qualname__") else type(self.function)
        try:
            source = inspect.getsource(named).encode()
        except (OSError, TypeError):  # typed into an interpreter
            code = getattr(self.code, "__code__", None)
            source = code.co_code + repr(code.co_consts).encode() if code else b""
        said = {name: _plain(getattr(self, name)) for name in ("layers", "blocks", "steps", "branch")}
        said = {name: value for name, value in said.items() if value is not None}
        said |= {"edit": "custom", "sites": list(self.sites), "passes": self.passes, "function": self.name}
        return said | {"source_sha256": hashlib.sha256(source).hexdigest()[:16]}

    def __repr__(self) -> str:
        said = {key: value for key, value in self.to_dict().items() if key not in ("edit", "source_sha256")}
        return f"Custom({', '.join(f'{key}={value!r}' for key, value in said.items())})"


def _said(value: Any) -> Any:
    return list(value) if isinstance(value, torch.Size) else value


def at(*sites: str, **where: Any) -> Custom:
    """Choose sites (wan.sites.SITES) for a function of one's own, by layers, blocks, steps, passes, branch.

    intervene(at("resid_post", layers=[5]), fn); or @at("resid_post", layers=[5]) above fn, which makes it an
    edit. passes are denoise, clean or all, the default.
    """
    known = [each.name for each in fields(Custom) if each.name not in ("names", "function", "heads")]
    if wrong := next((name for name in where if name not in known), None):
        raise InterventionError(f"at() takes no {wrong}{did_you_mean(wrong, known)}")
    return Custom(names=sites, **where)


# --- Edits as plain values and back: what YAML, JSON and caches hold
KINDS: dict[str, type[Edit]] = {
    kind.__name__.lower(): kind for kind in (Knockout, Bias, Ablate, Patch, Move, Jitter, Band, Steer)
}


def edit_from_dict(values: Mapping[str, Any]) -> Edit:
    """Return the edit that to_dict wrote: {"edit": "knockout", "frames": "first", "passes": "denoise"}.

    Raises InterventionError for a name, a field or a value that is not one.
    """
    if not isinstance(values, Mapping):
        raise InterventionError(f"{values!r} is not an edit; write {{edit: knockout, frames: first, ...}}")
    given = {str(name): value for name, value in values.items()}
    name = given.pop("edit", None)
    if not isinstance(name, str) or name not in KINDS:
        raise InterventionError(f"edit {name!r} is not one of {', '.join(KINDS)}")
    kind = KINDS[name]
    known = {field.name: field for field in fields(kind)}
    if unknown := sorted(set(given) - set(known)):
        raise InterventionError(f"{name}: unknown field {unknown[0]!r}{did_you_mean(unknown[0], known)}")
    for declared in known.values():
        if declared.default is MISSING and declared.name not in given:
            choices = f": {', '.join(PASSES)}" if declared.name == "passes" else ""
            raise InterventionError(f"{name}: {declared.name} is missing and has no default{choices}")
    try:
        return kind(**given)
    except InterventionError as error:
        raise InterventionError(f"{name}: {error}") from None


def fingerprint(edits: Iterable[Edit]) -> str:
    """Return 16 hexadecimal digits that tell lists of edits apart: of the SHA-256 of what they say."""
    said = json.dumps([edit.to_dict() for edit in edits], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


# --- Edits at work
def active_edits() -> list[Edit]:
    """Return all edits that apply now, in order of nesting."""
    return [edit for one in watchers() if isinstance(one, Edits) for edit in one.edits]


@dataclass(eq=False)
class Edits(Watcher):
    """Edits that were asked for together, what they need, and how many calls each of them changed so far."""

    edits: tuple[Edit, ...]
    data: dict[Edit, object] = field(default_factory=dict)
    changed: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.changed = [0] * len(self.edits)

    def check(self, plan: RolloutPlan) -> None:
        plan.check(self.edits)

    def wants(self, site: str, layer: int | None, at: Pass | None) -> bool:
        return at is not None and any(edit.selects(site, layer, at) for edit in self.edits)

    def visit(self, x: Any, where: Where) -> Any:
        for number, edit in enumerate(self.edits):
            if not edit.selects(where.site, where.layer, where.at):
                continue
            data, shard = self.data.get(edit), where.shard
            if edit.needs and data is None:
                raise InterventionError(f"{edit!r} needs data={{edit: ...}}: {edit.needs}")
            if shard and isinstance(edit.needs, str) and "source" in edit.needs:
                of_source(
                    x, where, data
                )  # all processes run a source together, also where it changes nothing
            if isinstance(x, Call) and x.of_heads is not None and not heads_in(edit, x):
                heads = range(x.shard.total) if edit.heads is None else edit.heads
                self.changed[number] += any(head not in x.shard.heads for head in heads)  # in other processes
                continue
            if (new := edit.apply(x, where, data)) is not None:
                self.changed[number] += 1
                x = new
        return x


@contextmanager
def intervene(*edits: Any, data: Mapping[Edit, object] | None = None) -> Iterator[Edits]:
    """Edit while the context lasts: edits, or at(...) and a function; contexts nest, from the outermost in.

    data has, by edit, the means of Ablate("mean" or "frame_mean") and the run in step of what has a source;
    a Pipe of experiments.load() makes them itself. Yields the edits with the number of calls that each
    changed. Warns of one that changed none.
    """
    given, chosen = list(edits), list[Any]()
    while given:
        each = given.pop(0)
        if isinstance(each, Custom) and each.function is None and given and not isinstance(given[0], Edit):
            each = each(given.pop(0))
        chosen.append(each)
    if not chosen or not all(isinstance(edit, Edit) for edit in chosen):
        known = ", ".join(KINDS)
        raise InterventionError(f"intervene takes edits, at least one: {known}; or at(...) and a function")
    session = Edits(tuple(chosen), dict(data or {}))
    with watched(session):
        yield session
    for edit, changed in zip(session.edits, session.changed, strict=True):
        if not changed:
            warnings.warn(f"no call was edited by: {edit}", stacklevel=3)
