"""Interventions: edits of the model's computation, each a value that can be stored and repeated.

An edit says what to change, where (sites or whole attention calls, wan/sites.py), and in which passes:

    with intervene(Knockout(frames="first", layers=[5], heads=[10], passes="denoise")) as active:
        latents = pipeline.inference(noise, ...)
    active.changed  # the number of calls that each edit changed
    with intervene(at("resid_post", layers=[5]), lambda x: 2 * x):  # or lambda x, where: ...
        latents = pipeline.inference(noise, ...)

Every edit is a frozen dataclass with one check() and one apply(). check() runs when the edit is created, for
its fields, and again with the sizes of a rollout before anything is computed. A new edit is a subclass of
Edit with its own apply(), and check() if needed.

Letters: B batch, L tokens of a call, Lk its keys, S tokens per frame, F frames, H heads, D head dim.
"""

import inspect
import math
import re
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ContextDecorator, contextmanager, suppress
from contextvars import Context, ContextVar
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import lru_cache, partial, wraps
from pathlib import Path
from threading import Semaphore, Thread
from typing import Annotated, Any, ClassVar, Literal, NoReturn, ParamSpec, Self, TypeVar, cast

import torch
import torch.nn.functional as F
from pydantic import AfterValidator, BeforeValidator, Field
from torch import Tensor

from wan import errors, identity
from wan.attention import Call
from wan.config import RunConfig
from wan.files import MAX_SIZE, read_yaml
from wan.keys import (
    MIXED,
    ROPE_THETA,
    HeadShard,
    KeyBias,
    as_index,
    rope_dims,
    rope_frequencies,
    rotate,
    select,
    send,
    time_frequencies,
)
from wan.sites import (
    BESIDE_GRAPHS,
    CALLS,
    OF_FORWARD,
    OF_HEADS,
    SITES,
    ActivationSite,
    Pass,
    RolloutSizes,
    Watcher,
    call_hook,
    check_indices,
    check_site,
    check_sites,
    observed,
    watched,
    watchers,
)

MAX_BIAS = 65504.0  # the largest number of float16
Number = Annotated[float, Field(ge=-1e30, le=1e30)]  # no NaN
MAX_BYTES = 1 << 20  # of a file of edits


FRAME_NAMES = ("first", "sink", "past", "own")


def frame_name(value: str) -> str:
    """Return a name of frames: first, sink, past, own, or own:N for the frame N of the block itself."""
    if value not in FRAME_NAMES and not re.fullmatch(r"own:(0|[1-9]\d{0,4})", value):
        hint = errors.did_you_mean(value, [*FRAME_NAMES, "own:N"])
        raise ValueError(f"should be a name of frames{hint}")
    return value


def token_numbers(value: Any) -> Any:
    """Return numbers of prompt tokens as they are. ValueError for words, which may have several each."""
    words = [value]
    if isinstance(value, list | tuple):
        words = list(value)
    if any(isinstance(word, str) for word in words):
        raise ValueError("should be numbers of tokens: run.prompt_tokens lists their texts in order, from 0")
    return value


Attention = Literal["self", "cross"]
Passes = Literal["denoise", "clean", "all"]
Index = Annotated[int, Field(ge=0, le=MAX_SIZE)]  # how many there are, a rollout knows
Several = (BeforeValidator(errors.as_tuple), Field(min_length=1, max_length=MAX_SIZE))
Indices = Annotated[tuple[Index, ...], *Several]
# Of the prompt, by their numbers
PromptTokens = Annotated[tuple[Index, ...], *Several, BeforeValidator(token_numbers)]
Frame = Index | Annotated[str, AfterValidator(frame_name)]
Frames = Annotated[tuple[Frame, ...], *Several]
Direction = Annotated[tuple[Number, ...], BeforeValidator(errors.as_tuple)]
Tokens = slice | Tensor  # an index
EVERY: Tokens = slice(None)
InterventionError = errors.ConfigError  # the name that older code catches


@dataclass(frozen=True, repr=False)
class Source:
    """Another run of the same shapes, from which an edit takes activations; None is the edited run's value.

    Args:
        prompt: its prompt.
        seed: of its noise.
        weights: a checkpoint, or "base".

    Examples:
        >>> Patch("z", Source(prompt="a blue square moving left"), layers=[5])
    """

    prompt: str | None = None
    seed: int | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        errors.check_fields(self, "source: ")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are given."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __repr__(self) -> str:
        return f"Source({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"


def as_source(value: Any) -> Any:
    """Return a mapping, as YAML has it, as a Source; anything else stays."""
    if isinstance(value, Mapping):
        return errors.from_values(Source, value, "source: ")
    return value


SourceOfRun = Annotated[Source, BeforeValidator(as_source)]
SourceOrFile = Annotated[Source | str, BeforeValidator(as_source)]


# --- What every edit has: which calls it selects, and how it is written down
@dataclass(frozen=True, kw_only=True, repr=False)
class Edit(ABC):
    """A change at sites or of whole attention calls, in the denoising passes; None selects all.

    A subclass is an edit of your own: give it apply().

    Args:
        layers: layers, one number or several.
        heads: heads, of edits at sites with heads and of whole calls.
        blocks: blocks of frames that are denoised together.
        steps: denoising steps; they narrow passes "denoise" and "all". The clean pass is no step.
        passes: "denoise", "clean" (the pass that fills the KV cache) or "all".
        branch: "cond" or "uncond" of classifier-free guidance.

    Raises:
        ConfigError: for fields that contradict each other, and for an index that the rollout lacks.

    Examples:
        >>> Knockout(frames="first", layers=[5], heads=[10], blocks=[1])
    """

    layers: Indices | None = None
    heads: Indices | None = None
    blocks: Indices | None = None
    steps: Indices | None = None
    passes: Passes = "denoise"
    branch: Literal["cond", "uncond"] | None = None  # of classifier-free guidance

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls.__abstractmethods__:
            raise errors.ConfigError(
                f"{cls.__name__} has no apply(): take one of {', '.join(KINDS)}, or write it"
            )
        edit, signature = super().__new__(cls), inspect.signature(cls.__init__)
        names = [*signature.parameters][1:]
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
            for name in kwargs:
                errors.require_known(name, names, f"{cls.__name__} takes no {{}}")
        try:
            if args or kwargs:  # pickle gives none
                signature.bind(edit, *args, **kwargs)
        except TypeError as error:
            raise errors.ConfigError(f"{cls.__name__}: {error}; it takes {', '.join(names)}") from None
        return edit

    def __post_init__(self) -> None:
        errors.check_fields(self)
        # Equal edits compare, hash and print alike: [3, 1, 3] is (1, 3), names of frames come behind numbers.
        for setting in fields(self):
            value = getattr(self, setting.name)
            if type(value) is tuple and setting.type != Direction:
                numbers = sorted({n for n in value if isinstance(n, int)})
                names = dict.fromkeys(n for n in value if isinstance(n, str))
                self._set(setting.name, (*numbers, *names))
        self.check()

    def _set(self, name: str, value: Any) -> None:
        """Set a field while the edit is being created; afterwards it is frozen."""
        object.__setattr__(self, name, value)

    @abstractmethod
    def apply(self, x: Any, where: ActivationSite, data: Any = None) -> Any:
        """Return the replacement of x, a selected activation or Call; None to keep it.

        data: the means (HeadOutputs, ReferenceMeans) or the run in step that the edit needs.
        """

    @property
    def kind(self) -> str:
        """The attention that it edits: self or cross."""
        return getattr(self, "attention", "self")

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that it edits, or the attention whose whole calls it edits."""
        return (self.kind,)

    @property
    def has_heads(self) -> bool:
        """True if heads can be selected."""
        return {*self.sites} <= OF_HEADS | {*CALLS}

    @property
    def key_frames(self) -> Frames | None:
        """The frames that a call's keys must contain; None if there are none."""
        return getattr(self, "frames", None)

    @property
    def needs(self) -> str:
        """Name the data that the edit requires; most require none."""
        if isinstance(getattr(self, "source", None), Source):
            return "its source as a RunInStep"
        return ""

    @property
    def files(self) -> list[str]:
        """Files that it reads: one of means, or a source's weights (a checkpoint, or "base")."""
        source = getattr(self, "source", None)
        file = source
        if isinstance(source, Source):
            file = source.weights
        if file:
            return [file]
        return []

    def check_source(self, config: RunConfig) -> None:
        """Raise ConfigError, with the remedy, where a run cannot give it the file, prompt or run it needs."""
        source, needed = getattr(self, "source", None), ""
        if source is None and getattr(self, "how", "") == "mean":
            needed = "the reference prompts of a mean; name a file of means as its source"
        if isinstance(source, Source) and source.prompt not in (None, config.prompt):
            needed = f"the source's {errors.short_repr(source.prompt)}; leave --prompt_embeds out"
        if needed and config.prompt_embeds:
            raise errors.ConfigError(
                f"{config.prompt_embeds} holds the states of one prompt, and {self} needs {needed}"
            )
        if isinstance(source, Source) and source.weights is not None and not isinstance(config, RunConfig):
            raise errors.ConfigError(
                "a source of a pipeline is another prompt or seed of it; leave weights out"
            )
        remedy = "leave source out: the run makes the means of reference_prompts"
        file = source
        if isinstance(source, Source):
            file, remedy = source.weights, "bash experiments/download_weights.sh gets some weights"
        if file not in (None, "base") and not Path(file).is_file():
            raise errors.ConfigError(f"source: {file} not found; {remedy}")
        if not isinstance(source, Source):
            return
        run = {"prompt": config.prompt, "seed": config.seed, "weights": config.checkpoint_path or "base"}
        if all(getattr(source, name) in (None, value) for name, value in run.items()):
            raise errors.ConfigError(
                f"source: {source} is the run itself; name another prompt, seed or weights"
            )
        if config.offload and source.weights is None:
            raise errors.ConfigError(
                f"streamed layers cannot serve two runs in step; leave offload out for {self}"
            )

    def selects_pass(self, step: int | None, is_clean_pass: bool, is_recache: bool = False) -> bool:
        """Return whether a pass of a block is chosen; one that computes the cache again is Jitter's alone."""
        if is_clean_pass or is_recache:
            return not is_recache and self.passes != "denoise"
        return self.passes != "clean" and (self.steps is None or step in self.steps)

    def selects(self, site: str, layer: int | None, at: Pass) -> bool:
        """Return whether the edit applies to an activation or a call."""
        return (
            site in self.sites
            and (self.layers is None or layer in self.layers)
            and (self.blocks is None or at.block in self.blocks)
            and (self.branch is None or at.branch == self.branch)
            and self.selects_pass(at.step, at.is_clean_pass, at.is_recache)
        )

    def conflict(self) -> str:
        """Return which fields contradict each other or would be ignored; "" for none."""
        if self.heads is not None and not self.has_heads:
            return f"{self.sites[0]} has no heads: leave heads out"
        if self.layers is not None and {*self.sites} <= {*OF_FORWARD}:
            return f"{self.sites[0]} belongs to no layer: leave layers out"
        return ""

    def check(self, sizes: RolloutSizes | None = None) -> None:
        """Raise ConfigError where fields contradict each other or, with sizes, a rollout lacks an index."""
        problem = self.conflict()
        if problem:
            raise errors.ConfigError(f"{type(self).__name__}: {problem}")
        if sizes is None:
            return
        check_indices("layer", self.layers, sizes.num_layers)
        check_indices("head", self.heads, sizes.num_heads)
        check_indices("block", self.blocks, sizes.num_blocks)
        check_indices("denoising step", self.steps, sizes.num_steps)
        frames = [frame for frame in self.key_frames or () if isinstance(frame, int)]  # others are names
        check_indices("frame", frames, sizes.num_frames)
        check_indices("prompt token", getattr(self, "tokens", None), sizes.text_len)
        check_sites(self.sites, sizes)
        if self.passes == "clean" and not sizes.keeps_clean_keys:
            remedy = "recompute_context computes the keys of clean passes again: take passes denoise or all"
            raise errors.ConfigError(f"no call can be edited: {self}; {remedy}")

    def given(self) -> dict[str, Any]:
        """Return the fields that are not at their defaults; one frame or index alone, several as a list."""
        values = {}
        for setting in fields(self):
            value = getattr(self, setting.name)
            is_default = setting.default is not MISSING and value == setting.default
            # An edit says that it is of denoising passes: caches told it before there was a default
            if is_default and (setting.name, value) != ("passes", "denoise"):
                continue
            if isinstance(value, tuple):
                value = list(value)
                if len(value) == 1:
                    value = value[0]
            values[setting.name] = value
        return values

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for YAML and JSON, which edit_from_dict reads."""
        values = self.given()
        if isinstance(values.get("source"), Source):
            values["source"] = values["source"].to_dict()
        return {"edit": type(self).__name__.lower(), **values}

    def identity_values(self) -> dict[str, Any]:
        """Return the edit's identity: its values, and the name and text of a user's class."""
        return self.to_dict() | identity.identity_of_class(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={x!r}' for name, x in self.given().items())})"


# --- The parts of a call that edits change
def heads_in(edit: Edit, call: Call) -> list[int]:
    """Return the indices in the call of the edit's heads; empty if the call has none of them."""
    return [n for n, number in enumerate(call.numbers) if edit.heads is None or number in edit.heads]


def slots_in(call: Call, names: Frames) -> list[int]:
    """Return the slots of the keys that frames name: of earlier blocks, unless they are own.

    ConfigError where a number or "first" meets a slot that holds another frame for each batch item.
    """
    slots = [n for n, of_slot in enumerate(call.key_layout.names) if not of_slot.isdisjoint(names)]
    # "past" and "sink" mean the same slots in every batch item, whatever frames these hold.
    if set(names) - {"past", "sink"}:
        check_items(call, slots)
    return slots


def check_items(call: Call, slots: Iterable[int]) -> None:
    """Raise ConfigError where one of the slots holds another frame for each batch item."""
    for index in slots:
        if len(set(call.key_layout.slots[index].by_item)) > 1:
            raise errors.ConfigError(
                f"slot {index} holds another frame for each batch item: edit them one by one"
            )


def tokens_in(call: Call, slots: Sequence[int]) -> Tokens:
    """Return the tokens of slots among the keys, as an index."""
    S, index = call.key_layout.tokens_per_slot, as_index(slots, call.k.device)
    if isinstance(index, slice):
        return slice(index.start * S, index.stop * S)
    return (index[:, None] * S + torch.arange(S, device=call.k.device)).flatten()


def replace_values(
    call: Call, name: str, heads: Sequence[int], values: Tensor, tokens: Tokens = EVERY
) -> None:
    """Replace q, k or v [B, tokens, heads, D] in this call; the cache is not changed."""
    # q, k and v may be views of the cache, which later calls read.
    x, columns = getattr(call, name).clone(), as_index(heads, call.q.device)
    if not isinstance(tokens, slice) and not isinstance(columns, slice):
        tokens = tokens[:, None]
    x[:, tokens, columns] = values.to(x.dtype)
    setattr(call, name, x)


def with_heads(x: Tensor, where: ActivationSite, heads: Sequence[int] | None, new: Tensor) -> Tensor:
    """Return x with heads of the model (None: with everything) taken from new, which broadcasts to it."""
    new = new.to(x.dtype).expand_as(x)
    if heads is None:
        return new.clone()
    # Heads may be numbered from a shard's first one, and a call may have some of them alone.
    axis = SITES[where.site].split().index("H")
    numbers = list(where.of_heads or range(x.shape[axis]))
    if where.shard:
        numbers = [number + where.shard.heads.start for number in numbers]
    here = [n for n, number in enumerate(numbers) if number in heads]
    index = (slice(None),) * axis + (as_index(here, x.device),)
    x = x.clone()
    x[index] = new[index]
    return x


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the temporal share of x [B, F·S, heads, D] by angles [F, heads or 1, pairs]; return float32."""
    return rotate(x.float(), *_tables(angles, x.shape[1] // len(angles), x.shape[3], x.device))


def _tables(angles: Tensor, tokens: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tables of rotate() for frames of so many tokens, of angles [F, heads or 1, pairs]."""
    # Pairs of height and width behind those of time turn by 0.
    angles = F.pad(angles, (0, head_dim // 2 - angles.shape[2]))
    cos, sin = angles.cos().float(), angles.sin().float()  # [F, heads, D/2]
    tables = cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
    cos, sin = (send(table, device).repeat_interleave(tokens, 0) for table in tables)
    return cos, sin


@lru_cache(maxsize=8)
def _tables_of_turns(turns: tuple[int, ...], tokens: int, head_dim: int, device: torch.device) -> Any:
    """Return the tables that turn frames by positions, cached for all layers and passes of a block."""
    angles = torch.tensor(turns).double()[:, None, None] * time_frequencies(head_dim)
    return _tables(angles, tokens, head_dim, device)


def positions_of(call: Call, slots: Sequence[int]) -> list[int]:
    """Return the temporal positions of slots' keys; without RoPE they are 0.

    ConfigError where the keys of a slot, or of its batch items, stand at several positions.
    """
    check_items(call, slots)
    chosen = [call.key_layout.slots[n] for n in slots]
    if any(slot.position == MIXED for slot in chosen):
        remedy = "move them by offset=, or take a policy that knows the position of every key"
        raise errors.ConfigError(f"these keys stand at several positions: {remedy}")
    positions = []
    for slot in chosen:
        if slot.is_rotated:
            positions.append(slot.position)
        else:
            positions.append(0)
    return positions


def output_site(site: str, attention: Attention) -> str:
    """Return the site of an attention's outputs where z is meant, else the site itself."""
    if site == "z" and attention == "cross":
        return "cross_z"
    return site


# --- The edits
@dataclass(frozen=True, kw_only=True, repr=False)
class KeySelection(Edit):
    """Add b to the logits of some keys: frames of self-attention, or prompt tokens of cross-attention."""

    b: ClassVar[float]
    frames: Frames | None = None
    tokens: PromptTokens | None = None

    def conflict(self) -> str:
        if (self.frames is None) == (self.tokens is None):
            return "give frames (of self-attention) or tokens (of the prompt)"
        return super().conflict()

    @property
    def kind(self) -> str:
        if self.frames is None:
            return "cross"
        return "self"

    def apply(self, call: Call, where: ActivationSite, data: Any = None) -> Call | None:
        # 1. Which keys: slots of frames in self-attention, single tokens of the prompt in cross-attention.
        if self.frames is None:
            slots, count = list(self.tokens or ()), call.k.shape[1]
        else:
            slots, count = slots_in(call, self.frames), len(call.key_layout.slots)
        if not slots:
            return None
        heads = torch.tensor(heads_in(self, call), dtype=torch.long)
        if not len(heads):
            return call  # all of them are in other processes
        # 2. Edits of one call add up in one bias [H, slots], which its attention adds to the logits.
        if call.bias is None:
            call.bias = KeyBias(torch.zeros(call.q.shape[2], count), call.k.shape[1] // count)
        call.bias.values[heads[:, None], torch.tensor(slots)] += self.b
        return call  # attention() raises ConfigError for a head that loses all its keys


@dataclass(frozen=True, repr=False)
class Knockout(KeySelection):
    """Remove keys before the softmax; the weights of the rest are renormalised.

    Args:
        frames: numbers of frames, "first", "sink", "past", "own" or "own:N", of self-attention.
        tokens: numbers of prompt tokens, of cross-attention.

    Examples:
        >>> with intervene(Knockout(frames="first", layers=[5], heads=[10])):
        ...     edited = session.generate("a red circle moving right", seed=42)
    """

    b: ClassVar[float] = -math.inf


@dataclass(frozen=True, repr=False)
class Bias(KeySelection):
    """Add b to the logits of keys: their weight times e^b before the softmax is renormalised.

    Args:
        b: in logits.
        frames: numbers of frames, "first", "sink", "past", "own" or "own:N", of self-attention.
        tokens: numbers of prompt tokens, of cross-attention.

    Examples:
        >>> Bias(-2.0, frames="first", layers=[5], heads=[10])
    """

    # A Knockout's is one number of the class
    b: Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]  # type: ignore[misc]


@dataclass(frozen=True, repr=False)
class Ablate(Edit):
    """Replace a head's output z [B, Lq, D], before the projection o.

    Args:
        how: "zero"; "mean" over the tokens of the frame and a reference set (same layer, head, place of the
            frame in its block, and pass); "frame_mean" over the tokens of the frame in the same, unedited
            run; "resample": z of the run source.
        source: of "mean" a file of means, of "resample" a Source.
        attention: "self" or "cross".
        site: another site in place of z.

    Examples:
        >>> Ablate("zero", layers=[5], heads=[10])
    """

    how: Literal["zero", "mean", "frame_mean", "resample"]
    source: SourceOrFile | None = None
    attention: Attention = "self"
    site: str = "z"

    def conflict(self) -> str:
        check_site(self.site)
        takes = {"resample": Source, "mean": str | None}.get(self.how, type(None))
        if not isinstance(self.source, takes):
            return f"{self.how} does not take source={self.source!r}"
        if "mean" in self.how and "L" not in SITES[self.sites[0]].split():
            return f"{self.site} has no tokens: take zero or resample"
        return super().conflict()

    @property
    def sites(self) -> tuple[str, ...]:
        return (output_site(self.site, self.attention),)

    @property
    def needs(self) -> str:
        if "mean" in self.how:
            return "means of outputs"
        return super().needs

    def apply(self, x: Tensor, where: ActivationSite, data: Any = None) -> Tensor:
        if self.how == "zero":
            return with_heads(x, where, self.heads, x.new_zeros(()))
        if self.how == "resample":
            return with_heads(x, where, self.heads, data.value(where))
        # A frame's mean stands in for each of its tokens: [B or 1, Fq, H, D] -> [B or 1, Lq, H, D].
        means = data.of(where)
        if where.shard:
            means = where.shard.of(means)
        means = send(means.to(x.dtype), x.device)
        return with_heads(x, where, self.heads, means.repeat_interleave(x.shape[1] // means.shape[1], 1))


@dataclass(frozen=True, repr=False)
class Patch(Edit):
    """Take activations from another run.

    Args:
        what: a site (z of heads, resid_post), "qk" (queries and keys), or "kv" (keys and values of frames).
        source: the run to take them from.
        frames: of "kv"; None is "past".
        attention: "self" or "cross".

    Examples:
        >>> Patch("kv", Source(seed=1), frames="past", layers=[5], heads=[10])
    """

    what: str
    source: SourceOfRun
    frames: Frames | None = None  # of kv; None is past
    attention: Attention = "self"

    def conflict(self) -> str:
        if self.what not in ("qk", "kv"):
            check_site(self.what)
        is_kv = self.what == "kv"
        if (self.frames is not None and not is_kv) or (self.attention == "cross" and is_kv):
            return "frames go with what='kv', which patches cached frames of self-attention"
        return super().conflict()

    @property
    def sites(self) -> tuple[str, ...]:
        if self.what in ("qk", "kv"):
            return super().sites
        return (output_site(self.what, self.attention),)

    @property
    def key_frames(self) -> Frames | None:
        if self.what == "kv":
            return self.frames or ("past",)
        return None

    def apply(self, x: Any, where: ActivationSite, data: Any = None) -> Any:
        if self.what not in ("qk", "kv"):
            return with_heads(x, where, self.heads, data.value(where))
        # 1. The heads and keys that are taken over.
        call, heads, slots, tokens = x, heads_in(self, x), [], EVERY
        if self.key_frames is not None:
            slots = slots_in(call, self.key_frames)
            if not slots:
                return None
            tokens = tokens_in(call, slots)
        # 2. Both runs must see the same keys there: a map of other keys would be laid over these.
        source = data.value(where)
        different = other_keys(call, source, slots)
        if different:
            raise errors.ConfigError(
                f"{where}: the source chose other keys for slot {different[0]}; patch z, or kv of frames "
                "that are not chosen, or take a policy such as window"
            )
        # 3. q and k, or k and v.
        for name in self.what:
            values = select(getattr(source, name)[:, tokens], heads, 2)
            replace_values(call, name, heads, values, tokens)
        return call


def other_keys(call: Call, source: Call, slots: Sequence[int]) -> list[int]:
    """Return those of a call's slots, by default of all, in which another run's call has other keys."""
    if call.layout is None or source.layout is None:
        return []
    layout, source_layout = call.layout, source.layout
    slots = slots or range(len(layout.slots))
    # 1. Slots of other frames.
    different = [n for n in slots if layout.slots[n].by_item != source_layout.slots[n].by_item]
    # 2. Slots of chosen tokens, of which others were chosen.
    chosen, source_chosen = layout.chosen, source_layout.chosen
    if chosen and source_chosen and not {*chosen.slots}.isdisjoint(slots):
        a, b = chosen.on_host, source_chosen.on_host
        if not torch.equal(a.frames, b.frames) or not torch.equal(a.indices, b.indices):
            different += chosen.slots
    return different


@dataclass(frozen=True, repr=False)
class Move(Edit):
    """Move keys to another temporal RoPE position.

    Args:
        frames: numbers of frames, "first", "sink", "past", "own" or "own:N".
        offset: by how many frames; or
        position: to which position all of them.

    Examples:
        >>> Move("sink", position=18, layers=[5], heads=[3])
    """

    frames: Frames
    offset: int | None = None
    position: int | None = None

    def conflict(self) -> str:
        if (self.offset is None) == (self.position is None):
            return "give offset= or position=, in frames"
        return super().conflict()

    def apply(self, call: Call, where: ActivationSite, data: Any = None) -> Call | None:
        slots = slots_in(call, self.frames)
        if not slots:
            return None
        heads, tokens = heads_in(self, call), tokens_in(call, slots)
        is_first = bool(heads) and call.moved is None and call.drift is None
        # 1. By how much, [heads, slots]: edits before this one may have moved them already.
        places = torch.tensor(heads, dtype=torch.long)[:, None], torch.tensor(slots)
        if call.moved is None:
            call.moved = torch.zeros(call.k.shape[2], len(call.key_layout.slots))
        turns = torch.full((len(heads), len(slots)), float(self.offset or 0))
        if self.position is not None:
            turns = self.position - torch.tensor(positions_of(call, slots)) - call.moved[places]
        call.moved[places] += turns
        # 2. RoPE turns add up: keys that were turned to p stand at p + n once they are turned by n more.
        #    Where no edit came before, all layers and passes of a block turn alike, by remembered tables.
        keys = select(call.k[:, tokens], heads, 2)
        if is_first:
            alike = tuple(turns[0].int().tolist())
            tables = _tables_of_turns(alike, call.key_layout.tokens_per_slot, keys.shape[3], keys.device)
            replace_values(call, "k", heads, rotate(keys.float(), *tables), tokens)
            return call
        frequencies = time_frequencies(call.k.shape[3]).expand(call.k.shape[2], -1)[heads]
        if call.drift is not None:
            frequencies = frequencies + call.drift[heads]
        angles = turns.T.double()[:, :, None] * frequencies  # [slots, heads, pairs]
        replace_values(call, "k", heads, turn(keys, angles), tokens)
        return call


@dataclass(frozen=True, repr=False)
class Jitter(Edit):
    """A RoPE base per head, 10000 (1 + scale e), e uniform in [-1, 1], in the temporal share of q and k.

    Cached keys turn too (LoL, arXiv 2601.16914). e is drawn per layer and head, whichever layers and heads
    are chosen. Its passes are "all" by default.

    Args:
        scale: the largest relative change of a base, 0 to 0.99.
        seed: of e.

    Examples:
        >>> Jitter(scale=0.8, seed=0)
    """

    scale: Annotated[float, Field(ge=0, le=0.99)] = 0.8  # a base stays above 0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    passes: Passes = field(default="all", kw_only=True)

    def selects_pass(self, step: int | None, is_clean_pass: bool, is_recache: bool = False) -> bool:
        return is_recache or super().selects_pass(step, is_clean_pass)

    def bases(self, layer: int, num_heads: int) -> Tensor:
        """Return the RoPE base of each head of a layer, float64 [H]."""
        generator = torch.Generator().manual_seed(self.seed * 100_003 + layer)
        e = 2 * torch.rand(num_heads, generator=generator, dtype=torch.float64) - 1
        return ROPE_THETA * (1 + self.scale * e)

    def apply(self, call: Call, where: ActivationSite, data: Any = None) -> Call | None:
        layout, heads, head_dim = call.key_layout, heads_in(self, call), call.q.shape[3]
        # 1. Where queries and keys stand, [frames, 1]; where edits moved keys of heads, [frames, heads].
        stands = torch.tensor(positions_of(call, range(len(layout.slots)))).double()[:, None]
        asks = torch.tensor(layout.query_positions).double()[:, None]
        if call.moved is not None:
            stands = stands + call.moved[heads].T
        # 2. RoPE of base 10000 put them there; another base turns each pair by a drift more, [heads, pairs].
        numbers = [call.numbers[head] for head in heads]
        bases = self.bases(call.site.layer, call.shard.total)[numbers]
        frequencies = rope_frequencies(rope_dims(head_dim)[0], bases[:, None])
        drift = frequencies - time_frequencies(head_dim)
        if call.drift is None:
            call.drift = torch.zeros(call.q.shape[2], drift.shape[1], dtype=torch.float64)
        call.drift[heads] += drift
        # 3. Turn queries and keys by drift times position.
        for name, positions in (("q", asks), ("k", stands)):
            angles = positions[:, :, None] * drift  # [frames, heads, pairs]
            turned = turn(select(getattr(call, name), heads, 2), angles)
            replace_values(call, name, heads, turned)
        return call


@dataclass(frozen=True, repr=False)
class Band(Edit):
    """Temporal RoPE bands of a head's logits, turned by a phase and multiplied by a scale.

    Band b adds |q_b| |k_b| cos(ω_b d + φ) / √D to the logits of frames d apart. The queries' pairs of dims
    are changed, which is the same for all keys of the call.

    Args:
        bands: numbers of bands; 0 is the fastest.
        phase: φ, in radians.
        scale: the factor; 0 removes the bands.

    Examples:
        >>> Band(bands=[0], scale=0.0, layers=[5], heads=[3])
    """

    bands: Indices
    phase: Number = 0.0
    scale: Number = 1.0

    def apply(self, call: Call, where: ActivationSite, data: Any = None) -> Call | None:
        heads, pairs = heads_in(self, call), len(time_frequencies(call.q.shape[3]))
        check_indices("band", self.bands, pairs)
        chosen = torch.zeros(pairs, dtype=torch.float64)
        chosen[list(self.bands)] = 1
        # Turn the queries' pairs by the phase, then scale them: [B, Lq, heads, D].
        q = turn(select(call.q, heads, 2), (self.phase * chosen)[None, None])
        factor = torch.ones(call.q.shape[3])
        factor[: 2 * pairs] += ((self.scale - 1) * chosen).float().repeat_interleave(2)
        replace_values(call, "q", heads, q * send(factor, q.device))
        return call


@dataclass(frozen=True, repr=False)
class Steer(Edit):
    """Add scale times a direction to every token of a site.

    Args:
        site: the name of a site.
        direction: a vector of the site's last axis.
        scale: the factor.

    Examples:
        >>> Steer("resid_post", [1.0] + 191 * [0.0], scale=2.0, layers=[4])
    """

    site: str
    direction: Direction
    scale: Number = 1.0

    @property
    def sites(self) -> tuple[str, ...]:
        return (self.site,)

    def conflict(self) -> str:
        check_site(self.site)
        return super().conflict()

    def apply(self, x: Tensor, where: ActivationSite, data: Any = None) -> Tensor:
        if len(self.direction) != x.shape[-1]:
            raise errors.ConfigError(
                f"{where}: the direction has {len(self.direction)} numbers, not {x.shape[-1]}"
            )
        direction = send(torch.tensor(self.direction, dtype=x.dtype), x.device)
        return with_heads(x, where, self.heads, x + self.scale * direction)

    def __repr__(self) -> str:
        return super().__repr__().replace(repr(list(self.direction)), f"[{len(self.direction)} numbers]")


@dataclass(frozen=True, kw_only=True, repr=False)
class Custom(Edit):
    """A user's function at sites: fn(x, where) or fn(x) returns the replacement of x.

    Returning None changes nothing, so a hook may just read. x is a copy that fn may change in place; where
    has site, layer and pass (wan.sites.ActivationSite). The result must have x's shape and dtype and no NaN.
    """

    names: Annotated[
        tuple[str, ...], BeforeValidator(errors.as_tuple), Field(min_length=1, max_length=len(SITES))
    ]
    function: Any = None
    passes: Passes = "all"
    heads: Indices | None = field(default=None, init=False)  # the function has all of them

    def conflict(self) -> str:
        for name in self.names:
            check_site(name)
        if self.passes == "clean" and {*self.names} == {"x0"}:
            return "x0 is of denoising passes: take passes denoise"
        return super().conflict()

    @property
    def sites(self) -> tuple[str, ...]:
        return self.names

    def __call__(self, function: Any) -> "Custom":
        """Return the edit of a function, or of a class or object with such a method apply."""
        if isinstance(function, type):
            function = function()
        applied = function
        if not callable(function):
            applied = getattr(function, "apply", None)
        problem = "is no function of x and where, and has no method apply"
        if callable(applied):
            problem = ""
            with suppress(TypeError, ValueError):  # some functions of C do not say what they take
                parameters = inspect.signature(getattr(applied, "forward", applied)).parameters.values()
                if all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters):
                    problem = "takes no argument: give it x, or x and where"
        if problem:
            raise errors.ConfigError(
                f"an edit at {', '.join(self.sites)}: {errors.short_repr(function)} {problem}"
            )
        return replace(self, function=function)

    def apply(self, x: Tensor, where: ActivationSite, data: Any = None) -> Tensor | None:
        function = self.function
        if not callable(function):
            function = function.apply
        copied = x.clone()
        version = copied._version
        new = call_hook(function, copied, where)
        if new is None:
            if copied._version != version:
                warnings.warn(
                    f"{self._code.__qualname__} changed its copy of {where.site} and returned None, which "
                    "edits nothing: return x",
                    stacklevel=2,
                )
            return None
        # A tensor of another shape or dtype would broadcast, or run on, and fail layers later.
        returned = f"{errors.short_repr(new)}, not a tensor"
        if isinstance(new, Tensor):
            kind = list(new.shape), new.dtype, new.device
            expected = list(x.shape), x.dtype, x.device
            if new.layout != torch.strided:
                returned = f"a tensor of {new.layout}"
            elif kind != expected:
                returned = "{} {} on {}, not {} {} on {}".format(*kind, *expected)
            elif new.isnan().any():
                returned = "NaN"
            else:
                return new
        raise errors.ConfigError(f"{self._code.__qualname__} at {where}: it returned {returned}")

    @property
    def _code(self) -> Any:
        """The function, or the class of an object."""
        if hasattr(self.function, "__qualname__"):
            return self.function
        return type(self.function)

    def _place(self) -> dict[str, Any]:
        chosen = ("layers", "blocks", "steps", "branch")
        values = {name: x for name, x in self.given().items() if name in chosen}
        return values | {"sites": list(self.sites), "passes": self.passes}

    def to_dict(self) -> dict[str, Any]:
        return {"edit": "custom"} | self._place() | identity.identity_of(self.function)

    def __repr__(self) -> str:
        values = self._place() | {"function": identity.identity_of(self.function)["function"]}
        return f"Custom({', '.join(f'{key}={value!r}' for key, value in values.items())})"


PLACES = ("layers", "blocks", "steps", "passes", "branch")  # by which at() selects


def at(*sites: str, **where: Any) -> Custom:
    """Select sites for a function of your own.

    Args:
        *sites: names of sites (wan.sites.SITES).
        **where: layers, blocks, steps, passes, branch. passes are "all" by default, "denoise" if steps are
            given, since the clean pass is no step.

    Returns:
        An edit that lacks its function: put the function behind it in intervene(), or use it as a decorator.

    Examples:
        >>> with intervene(at("resid_post", layers=[5]), lambda x: 0.5 * x):
        ...     halved = session.generate("a red circle moving right", seed=42)
    """
    if not sites:
        raise errors.ConfigError('at takes a site or several: at("resid_post", layers=[5])')
    for name in where:
        errors.require_known(name, PLACES, "at takes no {}")
    if where.get("steps") is not None:
        where.setdefault("passes", "denoise")
    return Custom(names=sites, **where)


# --- Edits as plain values and back: what YAML, JSON and caches hold
KINDS: dict[str, type[Edit]] = {
    kind.__name__.lower(): kind for kind in (Knockout, Bias, Ablate, Patch, Move, Jitter, Band, Steer)
}


def edit_from_dict(values: Mapping[str, Any]) -> Edit:
    """Return the edit that to_dict wrote: {"edit": "knockout", "frames": "first", "passes": "denoise"}.

    Raises ConfigError for a name, a field or a value that is not one.
    """
    remedy = "write {edit: knockout, frames: first, passes: denoise, ...}"
    name, shown = "", errors.short_repr(values)
    if isinstance(values, Mapping) and values.get("edit") is not None:
        name, shown = values["edit"], errors.short_repr(values["edit"])
    errors.require_known(name, KINDS, f"edit {shown} is none; {remedy}")
    with errors.in_context(name):
        return errors.from_values(KINDS[name], {key: value for key, value in values.items() if key != "edit"})


def config_edits(config: RunConfig) -> list[Edit]:
    """Return the edits that a run's interventions describe."""
    return edits_of(config.interventions, "config")


# --- Edits in YAML files
FORM = "write - {edit: knockout, frames: first, passes: denoise, layers: [3]}, a line an edit"


def edits_of(values: Any, where: str) -> list[Edit]:
    """Make edits of a list of mappings, as in a config. ConfigError names the first wrong one."""
    if not isinstance(values, list):
        raise errors.ConfigError(f"{where} holds no list of interventions; {FORM}")
    edits = []
    for number, settings in enumerate(values, 1):
        with errors.in_context(f"{where}: intervention {number}"):
            edits.append(edit_from_dict(settings))
    return edits


def read_edits(path: str | Path) -> list[Edit]:
    """Read edits from a YAML file: a list of them, or a mapping with the key interventions."""
    values = read_yaml(path, "interventions", object, MAX_BYTES, FORM)
    if isinstance(values, Mapping) and [*values] == ["interventions"]:
        values = values["interventions"]
    edits = edits_of(values, str(path))
    if not edits:
        raise errors.ConfigError(f"{path} holds no intervention; {FORM}")
    return edits


# --- Contexts that may be entered again
P = ParamSpec("P")
T = TypeVar("T")


class ReusableContext(ContextDecorator, AbstractContextManager[Any]):
    """A context that may be entered several times, also while it is open; each entry is independent."""

    def __init__(self, name: str, make: Callable[[], AbstractContextManager[Any]]):
        self._name, self._make = name, make
        self._entered = list[AbstractContextManager[Any]]()

    def __repr__(self) -> str:
        return f"{self._name}(...): a context; open it in a with statement"

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("_"):  # copy and pickle look for theirs before __init__ has run
            raise AttributeError(attribute)
        raise AttributeError(
            f"{self._name}(...) has no {attribute!r} until it is opened: with {self._name}(...) as x: ..."
        )

    def __enter__(self) -> Any:
        context = self._make()
        value = context.__enter__()
        self._entered.append(context)
        return value

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def reusable(function: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """Make a context of a generator function, as contextlib.contextmanager does; it may be entered again."""
    make = contextmanager(function)

    @wraps(function)
    def context(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return ReusableContext(function.__name__, partial(make, *args, **kwargs))

    return context


# --- Edits at work
@dataclass(eq=False, repr=False)
class Edits(Watcher):
    """Edits of one context, the data they need, and how many calls each has changed so far.

    reached: how many activations each user's function was called with, whether it changed them or not.
    has_run: whether any run began that they watch.
    first_block: the first block of which something was changed.
    """

    edits: tuple[Edit, ...]
    data: dict[Edit, object] = field(default_factory=dict)
    changed: list[int] = field(init=False)
    reached: list[int] = field(init=False)
    sees: frozenset[str] = field(init=False)
    has_run: bool = field(default=False, init=False)
    first_block: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.changed, self.reached = [0] * len(self.edits), [0] * len(self.edits)
        self.sees = frozenset(site for edit in self.edits for site in edit.sites)

    def __repr__(self) -> str:
        edits = [f"{edit!r} ({count} calls)" for edit, count in zip(self.edits, self.changed, strict=True)]
        return f"Edits: {'; '.join(edits)}"

    def check(self, sizes: RolloutSizes) -> None:
        self.has_run = True
        for edit in self.edits:
            edit.check(sizes)

    def begin(self) -> None:
        self.has_run = True

    def wants(self, site: str, layer: int | None, at: Pass | None) -> bool:
        return at is not None and any(edit.selects(site, layer, at) for edit in self.edits)

    def hides(self, layer: int, at: Pass | None) -> bool:
        """Return whether an edit changes something inside a CUDA graph; whole calls run between graphs."""
        return any(self.wants(site, layer, at) for site in self.sees - BESIDE_GRAPHS)

    def on_activation(self, x: Any, where: ActivationSite) -> Any:
        self.has_run = True
        for number, edit in enumerate(self.edits):
            if not edit.selects(where.site, where.layer, where.at):
                continue
            # 1. What the edit needs. All processes run a source together, whichever of them has its heads.
            data = self.data.get(edit)
            if edit.needs and data is None:
                raise errors.ConfigError(f"{edit!r} needs data={{edit: ...}}: {edit.needs}")
            if where.shard and "source" in edit.needs:
                cast(RunInStep, data).value(where)
            # 2. Cache policies of heads make a call for some heads. Of those that have none of the edit's,
            #    one counts if the others are in other processes.
            if isinstance(x, Call) and x.of_heads is not None and not heads_in(edit, x):
                if has_other_heads(edit, x.shard):
                    self.changed[number] += 1
                continue
            # 3. Edit, and count.
            if isinstance(edit, Custom):
                self.reached[number] += 1
            edited = apply_edit(edit, x, where, data)
            if edited is None:
                continue
            x = edited
            self.changed[number] += 1
            count = _COUNT.get()
            if count is not None:
                count[edit] += 1
            if self.first_block is None:
                self.first_block = where.block
        return x


def has_other_heads(edit: Edit, shard: HeadShard) -> bool:
    """Return whether an edit is of heads that are in other processes."""
    heads: Sequence[int] = range(shard.total)
    if edit.heads is not None:
        heads = edit.heads
    return any(head not in shard.heads for head in heads)


def apply_edit(edit: Edit, x: Any, where: ActivationSite, data: object) -> Any:
    """Return what an edit makes of an activation or a call, or None.

    Code of one's own edits videos of a batch one by one, as if each were alone.
    """
    is_of_user = isinstance(edit, Custom) or type(edit).__module__.partition(".")[0] not in identity.OURS
    if not is_of_user or not isinstance(x, Tensor):
        return edit.apply(x, where, data)
    videos, is_changed = list(x.split(1)), False
    for item, video in enumerate(videos):
        edited = edit.apply(video, where, data)
        if edited is not None:
            videos[item], is_changed = edited, True
    if not is_changed:
        return None
    if len(videos) == 1:
        return videos[0]
    return torch.cat(videos)


_COUNT: ContextVar[Counter[Edit] | None] = ContextVar("count", default=None)  # of the innermost run


@contextmanager
def counted_edits() -> Iterator[Counter[Edit]]:
    """Count the calls that each edit changes while the context lasts, whenever its own context was opened."""
    before, count = _COUNT.get(), Counter[Edit]()
    _COUNT.set(count)
    try:
        yield count
    finally:
        _COUNT.set(before)


@reusable
def intervene(*edits: Any, data: Mapping[Edit, object] | None = None, models: Any = None) -> Iterator[Edits]:
    """Apply edits, or at(...) and a function, while the context lasts; nested contexts apply outermost first.

    data has, by edit, the means of Ablate("mean" or "frame_mean") and the run in step of an edit with a
    source; a Session of experiments.load() makes them itself. models are ids of the transformers to edit, of
    somebody's pipeline; None: all. Yields the edits with the number of calls that
    each changed. Warns of an edit that changed none, except for a function that was called and returned None.
    """
    if data is not None and not isinstance(data, Mapping):
        raise errors.ConfigError(f"intervene: data {errors.short_repr(data)} is no mapping of edits")
    # 1. at(...) without a function takes the argument behind it.
    remaining, chosen = list(edits), list[Any]()
    while remaining:
        edit = remaining.pop(0)
        lacks_function = isinstance(edit, Custom) and edit.function is None
        if lacks_function and remaining and not isinstance(remaining[0], Edit):
            edit = edit(remaining.pop(0))
        chosen.append(edit)
    others = [edit for edit in chosen if not isinstance(edit, Edit)]
    others += [edit for edit in chosen if isinstance(edit, Custom) and edit.function is None]
    if not chosen or others:
        kinds = ", ".join(kind.__name__ for kind in KINDS.values())
        problem = f"intervene takes edits, at least one: {kinds}; or at(...) and a function"
        if others:
            problem += f"; {errors.short_repr(others[0])} is no edit"
        raise errors.ConfigError(problem)
    # 2. They watch every activation of this context, and count what they change.
    active = Edits(tuple(chosen), dict(data or {}))
    active.models = models
    with watched(active):
        yield active
    remedy = ""
    if models is None and not active.has_run:
        remedy = "; no session made a video meanwhile, and a pipeline comes first: intervene(pipe, ...)"
    for edit, *counts in zip(active.edits, active.changed, active.reached, strict=True):
        if not any(counts):
            warnings.warn(f"no call was edited by: {edit}{remedy}", stacklevel=4)


@contextmanager
def in_turns(batch: int) -> Iterator[None]:
    """Warn where a user's function keeps something between calls, at which videos of a batch take turns.

    A single video has what it keeps for itself: the batch would be other videos.
    """
    functions = dict[int, Any]()
    seeing: Sequence[Watcher] = ()
    if batch > 1:
        seeing = watchers()
    for watcher in seeing:
        custom = [edit for edit in watcher.edits if isinstance(edit, Custom)]
        functions |= {id(edit.function): edit.function for edit in custom}
        reduce = getattr(watcher, "reduce", None)
        if reduce is not None:
            functions[id(reduce)] = reduce
    before = {key: identity.state_of(function) for key, function in functions.items()}
    drawn = ""
    if functions:
        drawn = identity.generators()
    yield
    for key, function in functions.items():
        if identity.state_of(function) != before[key] or drawn != identity.generators():
            warnings.warn(
                f"{identity.identity_of(function)['function']} keeps something between its "
                "calls, or draws random "
                "numbers, and videos of a batch take turns at it: generate them one by one",
                stacklevel=2,
            )


# --- What edits need of an unedited run: the mean output per frame, and its size
Key = tuple[str, int, int, str]  # kind (self, cross for z and cross_z), or another site; layer, step, branch


def key_of(where: ActivationSite) -> Key:
    """Return the key under which means are stored."""
    kind = {"z": "self", "cross_z": "cross"}.get(where.site, where.site)
    return kind, where.layer or 0, where.step, where.branch


@dataclass(eq=False)
class HeadOutputs(Watcher):
    """Means and sizes by call, float32 on the CPU; what Ablate("frame_mean") of the same run takes.

    means [B, Fq, H, D] (or [B, Fq, dim]) over the tokens of each query frame; norms [B, Fq, H], of ‖z‖ over
    its tokens.
    """

    sites: tuple[str, ...] = ("z", "cross_z")
    means: dict[tuple[Key, int], Tensor] = field(default_factory=dict)
    norms: dict[tuple[Key, int], Tensor] = field(default_factory=dict)
    shard: HeadShard | None = None  # where heads are in several processes

    def on_activation(self, x: Tensor, where: ActivationSite) -> None:
        if where.site in self.sites:
            self.shard = where.shard
            frames = x.unflatten(1, (len(where.frames), -1))  # [B, Fq, S, H, D]
            self.means[key_of(where), where.block] = frames.mean(2, dtype=torch.float32).cpu()
            self.norms[key_of(where), where.block] = frames.float().norm(dim=-1).mean(2).cpu()

    def of(self, where: ActivationSite) -> Tensor:
        """[B, Fq, H, D] of the same call; KeyError where it was not recorded."""
        return self.means[key_of(where), where.block]


@contextmanager
def record_head_outputs(*sites: str) -> Iterator[HeadOutputs]:
    """Record outputs of all heads, or of other sites, while the context lasts; the run keeps its bits."""
    outputs = HeadOutputs(sites or HeadOutputs.sites)
    with watched(outputs):
        yield outputs
    if outputs.shard is not None:  # bring together what other processes recorded of their heads
        for recorded in (outputs.means, outputs.norms):
            for key, values in recorded.items():
                recorded[key] = outputs.shard.gather(values, dim=2)


def add_padded(a: Tensor, b: Tensor) -> Tensor:
    """Add tensors [n, ...] of which one may be longer, as if the other one had zeros there."""
    longest, ends = max(len(a), len(b)), [0, 0] * (a.ndim - 1)
    return F.pad(a, (*ends, 0, longest - len(a))) + F.pad(b, (*ends, 0, longest - len(b)))


@dataclass(frozen=True, eq=False)
class ReferenceMeans:
    """Mean z over a reference set, per place of a frame in its block: float32 [offsets, H, D] by call."""

    values: Mapping[Key, Tensor]

    @classmethod
    def over(cls, runs: Sequence[HeadOutputs]) -> "ReferenceMeans":
        """The mean over runs, batch items and blocks. A place that few blocks have is a mean of these."""
        sums: dict[Key, tuple[Tensor, Tensor]] = {}  # of means, and how many there were
        for run in runs:
            for (key, _), means in run.means.items():
                # 1. The first block may have fewer frames than others: each place has a count of its own.
                count = torch.full((means.shape[1], *[1] * (means.ndim - 2)), float(len(means)))
                total = means.sum(0)
                # 2. Add to the sums so far, padded to the longer block, [offsets, H, D].
                if key in sums:
                    total, count = add_padded(sums[key][0], total), add_padded(sums[key][1], count)
                sums[key] = total, count
        return cls({key: total / count for key, (total, count) in sums.items()})

    def of(self, where: ActivationSite) -> Tensor:
        """[1, Fq, H, D] of a call; ConfigError where the set has no such layer, pass or place."""
        means, count = self.values.get(key_of(where)), len(where.frames)
        if means is None or len(means) < count:
            raise errors.ConfigError(f"{where}: no means of {count} frames; record the same model and steps")
        return means[None, :count]


# --- A second run in step with the first: patches take its tensors while they are there, and store none
class _Cancelled(BaseException):
    """Raised in a source run to end it when nobody waits for it any more."""


class RunInStep(Watcher):
    """A source run in step with the edited one: rollout() runs in a thread, from its start and without edits.

    Use it as a context around the edited run; on exit the source is stopped.
    """

    def __init__(self, rollout: Callable[[], object]):
        self._rollout = rollout
        self._thread: Thread | None = None
        self._mine, self._theirs = Semaphore(0), Semaphore(0)  # whose turn it is
        self._wanted: ActivationSite | None = None
        self._found: Tensor | Call | BaseException | None = None  # of the place wanted, or why there is none

    def __enter__(self) -> "RunInStep":
        return self

    def __exit__(self, *error: object) -> None:
        self._wanted = None
        if self._thread is not None:
            self._theirs.release()
            self._thread.join()
        self._found = None

    def value(self, where: ActivationSite) -> Tensor | Call:
        """Return what the source has in a place; ConfigError where it has none."""
        if self._wanted != where and not isinstance(self._found, BaseException):
            self._wanted, self._found = where, None
            # The source starts with the first place that is wanted, in a context without edits of its own.
            if self._thread is None:
                count = torch.get_num_threads()
                self._thread = Thread(target=Context().run, args=(self._run, count), daemon=True)
                self._thread.start()
            else:
                self._theirs.release()
            self._mine.acquire()  # until the source stops in the place, or ends
        if isinstance(self._found, BaseException):
            raise self._found
        assert self._found is not None  # the source stopped in the place
        return self._found

    def wants(self, site: str, layer: int | None, at: object) -> bool:
        wanted = self._wanted
        return wanted is not None and (site, layer, at) == (wanted.site, wanted.layer, wanted.at)

    def on_activation(self, x: Tensor | Call, where: ActivationSite) -> None:
        """Pause the source's thread at the requested place."""
        if where == self._wanted:
            self._found = x
            self._mine.release()
            self._theirs.acquire()
            if self._wanted is None:  # nobody waits any more
                raise _Cancelled

    def _run(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # a new thread has its own count, and other counts other bits
        try:
            with watched(self), observed():
                self._rollout()
            where, remedy = self._wanted, "it must have the same frames, blocks and steps"
            self._found = errors.ConfigError(f"the source has no {where}: {remedy}")
        except BaseException as error:
            self._found = error
        self._mine.release()
