"""Interventions: what can be changed inside attention, each as a value that is written down and run again.

An edit says what is done (Knockout, Bias, Ablate, Patch, Move, Jitter) and, by its Selection, in which calls.
wan/edits.py applies it, in attention() and nowhere else.
"""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, get_args

from wan.errors import ConfigError

# --- The fields of interventions: what is accepted, in which form it is kept, and how it reads in words
FRAME_NAMES = ("first", "sink", "past", "own")

Frames = tuple[int | str, ...]


class InterventionError(ConfigError):
    """What is wrong with an intervention, in one line that says what to do."""


def one_of(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise InterventionError for a value that is none of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise InterventionError(f"{name} {value!r} is not one of {', '.join(choices)}")


def indices(name: str, value: Any) -> tuple[int, ...] | None:
    """A number, or several, that count from 0, as increasing ones; None stays None."""
    if value is None:
        return None
    chosen = [value] if type(value) is int else list(value) if isinstance(value, Iterable) else None
    if chosen is None or isinstance(value, (str, bytes, dict)) or any(type(n) is not int for n in chosen):
        raise InterventionError(f"{name} {value!r} are not whole numbers, such as [0, 5]")
    if not chosen or min(chosen) < 0:
        empty = "name at least one, or leave it out for all" if not chosen else "they count from 0"
        raise InterventionError(f"{name} {value!r}: {empty}")
    return tuple(sorted(set(chosen)))


def frames(value: Any) -> Frames | None:
    """Frames by number or name, numbers first: 0, "first", [3, "sink"], "own", "own:18" (one own frame)."""
    if value is None:
        return None
    chosen = [value] if isinstance(value, (int, str)) else list(value) if isinstance(value, Iterable) else []
    if not chosen or isinstance(value, dict):
        raise InterventionError(f"frames {value!r}: name a number, {', '.join(FRAME_NAMES)}, or a list")
    for name in chosen:
        if type(name) is int and name >= 0:
            continue
        own = isinstance(name, str) and name.startswith("own:") and name[4:].isdecimal()
        if not own and (not isinstance(name, str) or name not in FRAME_NAMES):
            raise InterventionError(f"frame {name!r} is not a number from 0, nor {', '.join(FRAME_NAMES)}")
    numbers = sorted({name for name in chosen if isinstance(name, int)})
    return (*numbers, *dict.fromkeys(name for name in chosen if isinstance(name, str)))


def finite(name: str, value: Any) -> float:
    """A number as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InterventionError(f"{name} {value!r} is not a finite number")
    return float(value)


def plain(value: Any) -> Any:
    """A field's value as YAML and JSON have it: one frame or index alone, several as a list."""
    if isinstance(value, tuple):
        return value[0] if len(value) == 1 else list(value)
    return value


def numbered(noun: str, numbers: Sequence[int] | None) -> str:
    """layer 5; layers 1 and 5; layers 0..7; nothing for None."""
    if numbers is None:
        return ""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{noun}s {numbers[0]}..{numbers[-1]}"
    return f"{noun}s {', '.join(str(n) for n in numbers[:-1])} and {numbers[-1]}"


def frames_in_words(chosen: Frames) -> str:
    """What frames mean: keys of earlier blocks, unless they are own."""
    numbers = [name for name in chosen if isinstance(name, int)]
    own = [int(name[4:]) for name in chosen if isinstance(name, str) and name.startswith("own:")]
    named = {"first": "the first frame", "sink": "the sink", "past": "the past", "own": "their own block"}
    parts = [numbered("frame", numbers)] if numbers else []
    parts += [named[name] for name in chosen if name in named]
    parts += [f"own {numbered('frame', own)}"] if own else []
    return " and ".join(parts)


# --- Interventions: what can be changed inside attention, each as a value that is written down and run again
PASSES = ("denoise", "clean", "all")
BRANCHES = ("cond", "uncond")  # of classifier-free guidance
ATTENTIONS = ("self", "cross")
ABLATIONS = ("zero", "mean", "frame_mean", "resample")
PATCHES = ("z", "qk", "kv")
HEADS_OF = {"self": "heads", "cross": "cross-attention heads"}


@dataclass(frozen=True, repr=False)
class Source:
    """Another run of the same shapes; None is what the edited run has.

    weights is a checkpoint's path, or "base".
    """

    prompt: str | None = None
    seed: int | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        for name, kind in (("prompt", str), ("seed", int), ("weights", str)):
            value = getattr(self, name)
            if value is not None and type(value) is not kind:
                what = "a whole number" if kind is int else "a text"
                raise InterventionError(f"source: {name} {value!r} is not {what}")
        if (self.prompt, self.seed, self.weights) == (None, None, None):
            raise InterventionError("source: name another prompt, seed or weights; this is the run itself")

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __repr__(self) -> str:
        return f"Source({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    def __str__(self) -> str:
        return "the run of " + ", ".join(f"{name} {value!r}" for name, value in self.to_dict().items())


def source_from(value: Any) -> Any:
    """A Source from its mapping; anything else as it is, for whoever takes it to check."""
    if not isinstance(value, Mapping):
        return value
    if unknown := sorted(set(map(str, value)) - {"prompt", "seed", "weights"}):
        raise InterventionError(f"source: unknown field {unknown[0]!r}; it takes prompt, seed, weights")
    return Source(**value)


@dataclass(frozen=True, kw_only=True, repr=False)
class Selection(ABC):
    """In which calls an edit is made; None is all. passes has no default: denoise, clean or all.

    steps are denoising steps and narrow passes "denoise" and "all"; the clean pass is named by passes alone.
    """

    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    blocks: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None
    passes: str
    branch: str | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "blocks", "steps"):
            object.__setattr__(self, name, indices(name, getattr(self, name)))
        one_of("passes", self.passes, PASSES)
        if self.branch is not None:
            one_of("branch", self.branch, BRANCHES)
        if self.steps is not None and self.passes == "clean":
            raise InterventionError("steps are denoising steps: leave them out with passes='clean'")

    @property
    def kind(self) -> str:
        """Of the attention it edits: self or cross."""
        return "self"

    def selects_pass(self, step: int, is_clean_pass: bool) -> bool:
        """Whether a pass of a block is chosen; step -1, a cache computed again, is Jitter's alone."""
        if step < 0 or is_clean_pass:
            return is_clean_pass and step >= 0 and self.passes != "denoise"
        return self.passes != "clean" and (self.steps is None or step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for YAML and JSON; what is left at its default is left out."""
        values: dict[str, Any] = {"edit": type(self).__name__.lower()}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.default is MISSING or value != each.default:
                values[each.name] = value.to_dict() if isinstance(value, Source) else plain(value)
        return values

    def __repr__(self) -> str:
        said = [f"{name}={plain(getattr(self, name))!r}" for name in self.to_dict() if name != "edit"]
        return f"{type(self).__name__}({', '.join(said)})"

    def __str__(self) -> str:
        return f"{self.deed}: {self.where}"

    @property
    @abstractmethod
    def deed(self) -> str:
        """What is done, in words."""

    @property
    def where(self) -> str:
        """In which calls, in words."""
        passes = {"denoise": "denoising passes", "clean": "clean pass", "all": "all passes"}[self.passes]
        if self.steps is not None:
            passes = numbered("denoising step", self.steps) + (" and clean pass" * (self.passes == "all"))
        said = [
            numbered("layer", self.layers) or "all layers",
            numbered("head", self.heads) or "all heads",
            numbered("block", self.blocks),
            passes,
            f"branch {self.branch}" if self.branch else "",
        ]
        return ", ".join(text for text in said if text)


@dataclass(frozen=True, kw_only=True, repr=False)
class KeySelection(Selection):
    """Some keys of the chosen calls: frames of self-attention, or prompt tokens of cross-attention."""

    frames: Frames | None = None
    tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "frames", frames(self.frames))
        object.__setattr__(self, "tokens", indices("tokens", self.tokens))
        if (self.frames is None) == (self.tokens is None):
            name = type(self).__name__
            raise InterventionError(f"{name} takes frames (of self-attention) or tokens (of the prompt)")

    @property
    def kind(self) -> str:
        return "self" if self.frames is not None else "cross"

    @property
    def keys(self) -> str:
        """Which keys, in words."""
        return numbered("prompt token", self.tokens) if self.frames is None else frames_in_words(self.frames)


@dataclass(frozen=True, repr=False)
class Knockout(KeySelection):
    """Leave keys out before the softmax; the weights of the rest are renormalised."""

    @property
    def deed(self) -> str:
        return f"knock out {self.keys}"


@dataclass(frozen=True, repr=False)
class Bias(KeySelection):
    """Add b to the logits of keys: their weight times e^b before the softmax is renormalised."""

    b: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "b", finite("b", self.b))

    @property
    def deed(self) -> str:
        return f"add {self.b:g} to the logits of {self.keys}"


@dataclass(frozen=True, repr=False)
class Ablate(Selection):
    """Replace a head's output z [B, Lq, D], before the projection o.

    how: zero; mean over the tokens of the frame and a reference set (same layer, head, place of the frame in
    its block, and pass); frame_mean: over the tokens of the frame in the same, unedited run; resample: z of
    the run source. source of mean is a file of means, of resample a Source.
    """

    how: str
    source: Source | str | None = None
    attention: str = "self"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("how", self.how, ABLATIONS)
        one_of("attention", self.attention, ATTENTIONS)
        object.__setattr__(self, "source", source_from(self.source))
        if (self.how == "resample") != isinstance(self.source, Source):
            raise InterventionError("resample, and nothing else, takes a source of prompt, seed or weights")
        if isinstance(self.source, str) and self.how != "mean":
            raise InterventionError(f"how={self.how!r} takes no file of means: leave source out")

    @property
    def kind(self) -> str:
        return self.attention

    @property
    def deed(self) -> str:
        by = {
            "zero": "0",
            "mean": f"its mean over {self.source or 'the reference set'}",
            "frame_mean": "its mean over the frame in the unedited run",
            "resample": f"that of {self.source}",
        }[self.how]
        return f"replace the output of {HEADS_OF[self.attention]} by {by}"


@dataclass(frozen=True, repr=False)
class Patch(Selection):
    """Take a head's z, its q and k (the attention map), or k and v of cached frames, from the run source."""

    what: str
    source: Source
    frames: Frames | None = None  # of kv; None is past
    attention: str = "self"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("what", self.what, PATCHES)
        one_of("attention", self.attention, ATTENTIONS)
        object.__setattr__(self, "source", source_from(self.source))
        object.__setattr__(self, "frames", frames(self.frames))
        if not isinstance(self.source, Source):
            raise InterventionError("Patch takes a source: the prompt, seed or weights of another run")
        if self.what != "kv" and self.frames is not None:
            raise InterventionError(f"frames are of what='kv', not of what={self.what!r}")
        if self.what == "kv" and self.attention == "cross":
            raise InterventionError("what='kv' is of cached frames: of self-attention")

    @property
    def kind(self) -> str:
        return self.attention

    @property
    def deed(self) -> str:
        parts = {"z": "the output", "qk": "queries and keys", "kv": "keys and values"}[self.what]
        keys = f", for {frames_in_words(self.frames or ('past',))}," if self.what == "kv" else ""
        return f"take {parts} of {HEADS_OF[self.attention]}{keys} from {self.source}"


@dataclass(frozen=True, repr=False)
class Move(Selection):
    """Let cached keys stand at another temporal RoPE position: offset frames further, or all at position."""

    frames: Frames
    offset: int | None = None
    position: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "frames", frames(self.frames))
        if self.frames is None:
            raise InterventionError("Move takes frames: numbers, first, sink or past")
        if any(str(name).startswith("own") for name in self.frames):
            raise InterventionError("Move is of cached keys: own keys stand where their queries stand")
        if (self.offset is None) == (self.position is None):
            raise InterventionError("Move takes offset= or position=, in frames")
        for name in ("offset", "position"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise InterventionError(f"{name} {value!r} is not a whole number of frames")

    @property
    def deed(self) -> str:
        to = f"by {self.offset:+d} frames" if self.offset is not None else f"to position {self.position}"
        return f"move the keys of {frames_in_words(self.frames)} {to}"


@dataclass(frozen=True, repr=False)
class Jitter(Selection):
    """A RoPE base per head, 10000 (1 + scale e), e uniform in [-1, 1], in the temporal share of q and k.

    For a whole rollout, cached keys too (LoL, arXiv 2601.16914). e is drawn per layer and head from seed; the
    choice of layers and heads does not change it.
    """

    scale: float = 0.8
    seed: int = 0
    passes: str = field(default="all", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "scale", finite("scale", self.scale))
        if not 0 <= self.scale < 1:
            raise InterventionError(f"scale {self.scale:g} is not in 0 .. 1: a base must stay above 0")
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise InterventionError(f"seed {self.seed!r} is not a whole number from 0")
        if (self.blocks, self.steps, self.passes, self.branch) != (None, None, "all", None):
            raise InterventionError("Jitter is of a whole rollout: it takes layers and heads alone")

    def selects_pass(self, step: int, is_clean_pass: bool) -> bool:
        return True

    @property
    def deed(self) -> str:
        return f"jitter the RoPE base of every head by up to {self.scale:.0%} (seed {self.seed})"


Edit = Knockout | Bias | Ablate | Patch | Move | Jitter


# --- Interventions as plain values and back: what YAML, JSON and caches hold
KINDS: dict[str, type] = {kind.__name__.lower(): kind for kind in get_args(Edit)}


def edit_from_dict(values: Mapping[str, Any]) -> Edit:
    """The edit that to_dict wrote: {"edit": "knockout", "frames": "first", "passes": "denoise"}.

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
        raise InterventionError(f"{name}: unknown field {unknown[0]!r}; it takes {', '.join(known)}")
    for declared in known.values():
        if declared.default is MISSING and declared.name not in given:
            choices = f": {', '.join(PASSES)}" if declared.name == "passes" else ""
            raise InterventionError(f"{name}: {declared.name} is missing and has no default{choices}")
    try:
        return kind(**given)
    except InterventionError as error:
        raise InterventionError(f"{name}: {error}") from None


def fingerprint(edits: Iterable[Edit]) -> str:
    """16 hexadecimal digits that tell lists of edits apart: of the SHA-256 of what they say."""
    said = json.dumps([edit.to_dict() for edit in edits], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def in_words(edits: Iterable[Edit]) -> str:
    """Edits as one line for a subtitle."""
    return "; ".join(str(edit) for edit in edits)
