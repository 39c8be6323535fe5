"""What is in each kind of .pt cache: a dataclass per format.

Letters of lengths: H heads, F frames, S tokens per frame, L = F S, q/k: of the query and key frames, N
layers, P passes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import MISSING, dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, NamedTuple, Self, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from experiments.caches.files import CacheError
from wan.blocks import block_frames, later_block
from wan.errors import ConfigError, require_text, short_repr
from wan.files import MAX_COUNT, MAX_TEXT, is_verified

# --- Dicts of a file as typed objects, and the check that their entries have the declared types and lengths
TENSORS = {"f16": torch.float16, "f32": torch.float32, "i32": torch.int32, "mask": torch.bool}

PLAIN: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "dict": (dict,),
    "none": (NoneType,),
}

LENGTHS_OF = {"F": "num_frames", "S": "frame_seq_length", "H": "num_heads"}  # letter: an int field

LENGTHS_FROM = {
    "Fq": "query_frames",
    "Fk": "key_frames",
    "N": "layers",
    "P": "pass_timesteps",
}  # letter: a list

Table = dict[
    str, Any
]  # name, with "?" where it may be absent -> declared text, or [Table] for a list of dicts


@dataclass(frozen=True, kw_only=True)
class Fields:
    """A dict of a file with attributes. It keeps the order of its entries, and the unknown ones."""

    in_files: ClassVar[Mapping[str, str]] = {}  # attribute: its name in files, where that is an older one

    def __post_init__(self) -> None:
        for name in [f.name for f in fields(self) if f.default is None and getattr(self, f.name) is None]:
            object.__delattr__(self, name)  # absent: the default of the class is what a reader finds

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The object of a dict, unchecked; its names are those of files or of attributes.

        Lists of dicts become lists of the objects declared for them.
        """
        attributes = {name: attribute for attribute, name in cls.in_files.items()}
        made, nested = object.__new__(cls), _nested(cls)
        for name, value in values.items():
            attribute = attributes.get(name, name)
            if attribute in nested and isinstance(value, list):
                entry = nested[attribute]
                value = [entry.from_dict(v) if isinstance(v, Mapping) else v for v in value]
            made.__dict__[attribute] = value
        return made

    def to_dict(self) -> dict[str, Any]:
        """The dict that goes into a file, in the order in which the entries came."""
        return {
            self.in_files.get(name, name): [v.to_dict() if isinstance(v, Fields) else v for v in value]
            if isinstance(value, list)
            else value
            for name, value in vars(self).items()
        }

    @classmethod
    def table(cls) -> Table:
        """The names in files, with "?" where one may be absent, and what is declared for each."""
        hints = get_type_hints(cls, include_extras=True)
        return {
            cls.in_files.get(f.name, f.name) + "?" * (f.default is not MISSING): _declared(
                hints[f.name], f.default is None
            )
            for f in fields(cls)
        }


_known: dict[str, dict[str, type[Fields]]] = {}  # of _nested, by the name of a class


def _nested(cls: type[Fields]) -> dict[str, type[Fields]]:
    """Attributes that are lists of objects, with the type of these."""
    if cls.__qualname__ in _known:
        return _known[cls.__qualname__]
    found = _known.setdefault(cls.__qualname__, {})
    for name, hint in get_type_hints(cls).items():
        for option in (hint, *get_args(hint)):  # list[X], or list[X] | None
            for kind in get_args(option):
                if isinstance(kind, type) and issubclass(kind, Fields):
                    found[name] = kind
    return found


def _declared(hint: Any, optional: bool) -> Any:
    """The text of an annotation, or [Table] for a list of objects."""
    if get_origin(hint) is Annotated:
        return hint.__metadata__[0]
    options = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    options = tuple(o for o in options if not (optional and o is NoneType))
    for option in options:
        kind = (get_args(option) or (None,))[0]
        if get_origin(option) is list and isinstance(kind, type) and issubclass(kind, Fields):
            return [kind.table()]
    return " | ".join("none" if o is NoneType else (get_origin(o) or o).__name__ for o in options)


def check_fields(
    values: Mapping[str, Any], table: Table, where: str = "", outer: Mapping[str, int] = {}
) -> None:
    """Raise CacheError for the first field that is missing, or of another type or length than is declared."""
    sizes = _sizes(values, outer)
    for key, declared in table.items():
        name = key.rstrip("?")
        if name not in values:
            if key == name:
                raise CacheError(f"{where}{name} is missing")
        elif isinstance(declared, list):
            entries = values[name]
            if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
                raise CacheError(f"{where}{name} is {describe(entries)}, not a list of dicts")
            for i, entry in enumerate(entries):
                check_fields(entry, declared[0], f"{where}{name}[{i}].", sizes)
        elif not any(_fits(values[name], option, sizes) for option in declared.split("|")):
            raise CacheError(f"{where}{name} is {describe(values[name])}, not {_with_sizes(declared, sizes)}")


def _fits(value: Any, option: str, sizes: dict[str, int]) -> bool:
    """Whether a value has the declared type and lengths; letters not yet known are learned from it."""
    kind, _, lengths = option.strip().rstrip("]").partition(" [")
    letters = [letter.strip() for letter in lengths.split(",")] if lengths else []
    if isinstance(value, Tensor):
        shape: tuple[int, ...] = value.shape
        if value.dtype not in [TENSORS.get(name) for name in kind.split("/")]:
            return False
    else:
        items = value if isinstance(value, list) else [value]
        shape = (len(value),) if isinstance(value, list) else ()
        if any(type(item) not in PLAIN.get(kind, ()) for item in items):
            return False
    return len(shape) == len(letters) and all(
        n == (int(letter) if letter.isdigit() else sizes.setdefault(letter, n))
        for n, letter in zip(shape, letters, strict=True)
    )


def _sizes(values: Mapping[str, Any], outer: Mapping[str, int]) -> dict[str, int]:
    """Lengths by letter, from the fields that fix them."""
    sizes = {k: n for k, n in outer.items() if k in (*LENGTHS_OF, *LENGTHS_FROM)}
    sizes |= {k: values[name] for k, name in LENGTHS_OF.items() if type(values.get(name)) is int}
    lists = {k: values.get(name) for k, name in LENGTHS_FROM.items()}
    sizes |= {k: len(v) for k, v in lists.items() if isinstance(v, Sized)}
    tokens = {"L": "F", "Lq": "Fq", "Lk": "Fk"}
    return sizes | {k: sizes[f] * sizes["S"] for k, f in tokens.items() if f in sizes and "S" in sizes}


def describe(value: Any) -> str:
    """A value in a few words, for messages: "float32 [12, 21]", or the beginning of its text."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return short_repr(value, 60)


def _with_sizes(declared: str, sizes: Mapping[str, int]) -> str:
    """[H, Lk] -> [H=12, Lk=336], for messages."""
    head, bracket, rest = declared.partition("[")
    letters = [x.strip() for x in rest.partition("]")[0].split(",")]
    known = ", ".join(f"{x}={sizes[x]}" if x in sizes else x for x in letters)
    return head + (f"[{known}]" if bracket else "")


# --- What types and shapes do not show: numbers count from 0, frames are in the video, absent cells are NaN
LEAST_KEY = -9  # the least of key_frame: nothing is there
MASS_TOLERANCE = 1e-3  # float32 rows are good to 1e-5; a lost or doubled key frame is at least 1e-2


def check_counts(values: Mapping[str, Any]) -> None:
    """Raise CacheError for counts that no video has: lists and masks are made from them early."""
    for name in ("num_frames", "frame_seq_length", "num_frame_per_block", "num_heads"):
        value = values.get(name)
        if isinstance(value, (int, float)) and not 1 <= value <= MAX_COUNT:
            raise CacheError(f"{name} is {short_repr(value)}, not a number of 1..{MAX_COUNT}")


def check_texts(value: Any, name: str = "") -> None:
    """Raise CacheError for texts that are no UTF-8, or longer than a title or a page can carry."""
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise CacheError(f"{name} has {len(value)} characters, at most {MAX_TEXT} are read")
        try:
            require_text(value.replace("\0", ""), name)  # a page shows NUL as an escape
        except ConfigError as error:
            raise CacheError(str(error)) from None
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            check_texts(key, "a key")
            check_texts(inner, short_repr(key))
    elif isinstance(value, list) and not (value and isinstance(value[0], int)):  # such as frames
        for inner in value:
            check_texts(inner, name)


def check_numbers(values: Mapping[str, Any], where: str = "") -> None:
    """Raise CacheError for layers, passes, blocks or timesteps that do not count from 0."""
    for name, value in values.items():
        numbers = (
            value.tolist() if isinstance(value, Tensor) else value if isinstance(value, list) else [value]
        )
        if not numbers or not all(number is None or 0 <= number < float("inf") for number in numbers):
            raise CacheError(f"{where}{name} is {describe(value)}; it counts from 0")


def check_any_of(values: Mapping[str, Any], names: Sequence[str], where: str = "") -> None:
    """Raise CacheError where none of some fields is there."""
    if not any(name in values for name in names):
        raise CacheError(f"{where}none of {', '.join(names)} is there")


def check_once(values: Mapping[str, list[int] | None]) -> None:
    """Raise CacheError where a list names one layer or pass twice."""
    for name, numbers in values.items():
        if numbers is not None and len(set(numbers)) < len(numbers):
            raise CacheError(f"{name} {numbers} name one twice")


def check_frames(values: Mapping[str, Sequence[int]], num_frames: int, where: str = "") -> None:
    """Raise CacheError for frames that do not increase, or are not in the video."""
    for name, frames in values.items():
        if list(frames) != sorted(set(frames)) or not all(0 <= n < num_frames for n in frames):
            raise CacheError(f"{where}{name} {frames} are not increasing frames of 0..{num_frames - 1}")


def check_block(
    where: str,
    block_sizes: list[int],
    block: int | None,
    query_frames: list[int],
    key_frames: list[int],
    ahead: int = 0,
) -> None:
    """Raise CacheError where a call's queries are not those of its block, or a key comes after them."""
    if block is not None:
        own = block_frames(block_sizes, block) if block < len(block_sizes) else None
        if query_frames != own:
            raise CacheError(
                f"{where}query_frames {query_frames} are not those of block {block} of {block_sizes}"
            )
    if later_block(block_sizes, ahead)[query_frames[-1], key_frames].any():
        raise CacheError(f"{where}key_frames {key_frames} come after the queries' block")


def check_absent(name: str, matrices: Tensor, block_sizes: list[int], done: int, ahead: int = 0) -> None:
    """Raise CacheError where matrices [..., F, F] have values that no query of the done blocks can have."""
    if not is_verified(
        matrices
    ):  # it stays on disk until it is read, and checked with load_cache(verify=True)
        return
    if not matrices[..., later_block(block_sizes, ahead)].isnan().all():
        raise CacheError(f"{name} has values where the key's block comes after the query's; absent is NaN")
    if not matrices[..., sum(block_sizes[:done]) :, :].isnan().all():
        raise CacheError(f"{name} has values in blocks that were not done; absent is NaN")


def check_values(values: Mapping[str, Tensor | None], where: str = "") -> None:
    """Raise CacheError for values that are infinite, and for rows of frame_mass that do not sum to 1."""
    there = {name: tensor for name, tensor in values.items() if tensor is not None and is_verified(tensor)}
    for name, tensor in there.items():
        if tensor.isinf().any():
            raise CacheError(f"{where}{name} has values that are infinite; absent is NaN")
    for name in ("frame_mass", "slot_mass"):
        if (mass := there.get(name)) is None:
            continue
        rows = mass.float()
        attended = ~rows.isnan().all(-1)
        off = (rows.nan_to_num().sum(-1) - 1)[attended].abs()
        if (rows < 0).any() or (off > MASS_TOLERANCE).any():
            raise CacheError(f"{where}rows of {name} do not sum to 1")


def check_keys(
    named: Sequence[Tensor | None],
    values: Mapping[str, Tensor | None],
    num_frames: int,
    S: int,
    seen: int,
    where: str = "",
) -> None:
    """Raise CacheError where values [..., keys] are not of seen frames of S tokens, nor of named keys.

    named are key_frame, key_token and key_position, where keys have names.
    """
    frame, token, position = named
    if (frame is None) != (token is None) or (frame is None) != (position is None):
        raise CacheError(f"{where}key_frame, key_token and key_position go together")
    for name, tensor in values.items():
        if tensor is not None and frame is None and tensor.shape[-1] != seen * S:
            raise CacheError(
                f"{where}{name} is {describe(tensor)}, not of {seen} key frames of {S} tokens each"
            )
    if frame is None or token is None:
        return
    if not ((frame >= LEAST_KEY) & (frame < num_frames)).all():
        raise CacheError(f"{where}key_frame is not in 0..{num_frames - 1}, or negative for what is no frame")
    if not ((token >= 0) & (token < S)).all():
        raise CacheError(f"{where}key_token is not in 0..{S - 1}")


# --- What the formats of caches have in common: fields of every run, of a pass, of a token matrix
SCHEMA_VERSION = 2  # the newest that is read; caches carry the first that has all their fields

READ_BY = "0.1.0"  # the first version of this project that reads this schema; caches carry it

WEIGHTS = ("base", "checkpoint", "published", "unknown")  # unknown: older files, which did not record it

QUANTITIES = ("mean_logit", "mass", "mean_prob")


class PassTag(NamedTuple):
    """A denoising step, or the clean pass; None where a file does not say."""

    step: int | None
    timestep: float | None
    is_clean_pass: bool | None


@dataclass(frozen=True, kw_only=True)
class WeightsFile(Fields):
    """A file that a run read: weights, text encoder and tokenizer, or the file in their place."""

    name: str
    size: int  # bytes
    sampled_sha256: str  # wan.checkpoint.sampled_sha256


@dataclass(frozen=True, kw_only=True)
class Cache(Fields, ABC):
    """The fields of every format."""

    format: str
    schema_version: int
    prompt: str
    seed: int | None
    num_frames: int  # latent frames
    num_frame_per_block: int
    frame_seq_length: int
    block_sizes: Annotated[list[int], "int [blocks]"]
    num_heads: int
    model: str
    weights: str  # one of WEIGHTS
    weights_file: str | None
    weights_sha256: str | None
    files: list[WeightsFile] | None = None
    config: dict[str, Any] | None = None  # settings of the rollout that have no field of their own
    versions: dict[str, str] | None = None  # by package
    device: str | None = None  # cpu, or the GPU's name
    gpus: int | None = None  # how many made it together, where more than one: bits differ with their number
    dtype: str | None = None  # of generation
    attention: str | None = None  # a GPU's kernel of attention
    is_logits: bool
    quantity: str | None = None  # one of QUANTITIES where is_logits leaves it open
    read_by: str | None = None  # the first version of this project that reads this schema
    fingerprint: str | None = None  # of the settings of a sweep
    partial: bool | None = None  # stopped after blocks_done blocks, or before some steps of the base model
    blocks_done: int | None = None
    interventions: dict[str, Any] | None = None  # edits, the same in words, and a hash: the run was edited
    # of a rolling window: the timestep of every step, which is that of a block of the window too
    rolling_timesteps: Annotated[list[float] | None, "float [steps]"] = None
    notes: Annotated[list[str] | None, "str [notes]"] = None  # such as a guess about an older file

    @property
    def done(self) -> int:
        """How many blocks were finished."""
        return len(self.block_sizes) if self.blocks_done is None else self.blocks_done

    @property
    def ahead(self) -> int:
        """How many blocks after its own a query may see."""
        return len(self.rolling_timesteps or [0.0]) - 1

    @abstractmethod
    def passes(self) -> list[PassTag]:
        """The passes that a cache holds of its last block, in its order."""

    def validate(self) -> None:
        """Raise CacheError for the first field that is missing, of a wrong type or shape, or inconsistent."""
        values = self.to_dict()
        _check_version(values)
        check_texts(values)
        check_counts(values)
        check_fields(values, self.table())
        self._check()

    def _check(self) -> None:
        """What the fields' types and shapes do not show. Each format adds its own."""
        blocks, done = self.block_sizes, self.done
        if not 1 <= done <= len(blocks) or (self.blocks_done is not None and not self.partial):
            raise CacheError(f"blocks_done is {done}, not in 1..{len(blocks)} of a partial cache")
        if sum(blocks) != self.num_frames or min(blocks, default=0) < 1:
            raise CacheError(f"block_sizes {blocks} do not add up to num_frames {self.num_frames}")
        for name, value, allowed in (
            ("weights", self.weights, WEIGHTS),
            ("quantity", self.quantity, (None, *QUANTITIES)),
        ):
            if value not in allowed:
                raise CacheError(f"{name} is {value!r}, not one of {', '.join(filter(None, allowed))}")


@dataclass(frozen=True, kw_only=True)
class OnePass(Fields):
    """The pass of a cache, or of a call."""

    step: int | None
    timestep: float | None
    is_clean_pass: bool | None

    @property
    def tag(self) -> PassTag:
        return PassTag(self.step, self.timestep, self.is_clean_pass)

    def passes(self) -> list[PassTag]:
        return [self.tag]

    def _check_pass(self, where: str = "") -> None:
        check_numbers({"step": self.step, "timestep": self.timestep}, where)


@dataclass(frozen=True, kw_only=True)
class Sampling(Fields):
    """Of bidirectional runs of base weights, all frames as one block."""

    orig_num_frames: int | None = None  # video frames
    vae_stride_t: int | None = None
    branch: str | None = None  # of guidance: cond or uncond, where a cache holds one
    guidance_scale: float | None = None
    timestep_shift: float | None = None
    num_steps: int | None = None
    negative_prompt: str | None = None


@dataclass(frozen=True, kw_only=True)
class Tokens(Fields):
    """The token matrix of a call: logits or probabilities. Files know both, and the layer, by older names."""

    in_files: ClassVar[Mapping[str, str]] = {
        "layer": "layer_idx",
        "token_logits": "attn_logits",
        "token_probabilities": "attn_weights",
    }

    layer: int
    is_logits: bool
    # Since schema_version 2, where keys are not those of key_frames in order: what each key is.
    key_frame: Annotated[Tensor | None, "i32 [keys]"] = None  # -1 an average, -2 zeros
    key_token: Annotated[Tensor | None, "i32 [keys]"] = None  # index in its frame, row by row
    key_position: Annotated[Tensor | None, "i32 [keys]"] = None  # temporal RoPE index
    token_logits: Annotated[Tensor | None, "f16/f32 [1, H, Lq, Lk] | f16/f32 [1, H, Lq, keys]"] = None
    token_probabilities: Annotated[Tensor | None, "f16/f32 [1, H, Lq, Lk] | f16/f32 [1, H, Lq, keys]"] = None

    @property
    def matrices(self) -> dict[str, Tensor | None]:
        """Logits and probabilities by their names in files."""
        return {"attn_logits": self.token_logits, "attn_weights": self.token_probabilities}

    @property
    def named_keys(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.key_frame, self.key_token, self.key_position


def _check_version(values: Mapping[str, Any]) -> None:
    version = values.get("schema_version")
    if type(version) is int and version < 1:
        raise CacheError(f"schema_version is {version}; they count from 1")
    if type(version) is int and version > SCHEMA_VERSION:
        reader = values.get("read_by")
        needs = f"version {reader}" if type(reader) is str else "a later version"
        raise CacheError(
            f"schema_version {version} is newer than this code's {SCHEMA_VERSION}; "
            f"{needs} of this project reads it (git pull)"
        )


# --- The formats with token matrices: figure4, an entry per layer, and inference, an entry per captured call
@dataclass(frozen=True, kw_only=True)
class Figure4Layer(Tokens):
    """One layer of a figure4 cache. What it says again of its cache comes from repeated()."""

    num_frames: int
    frame_seq_length: int
    num_heads: int
    num_query_frames: int
    num_key_frames: int
    last_block_start_frame: int
    key_curve: Annotated[Tensor | None, "f16/f32 [H, Lk] | f16/f32 [H, keys]"] = None
    frame_logits: Annotated[Tensor | None, "f16/f32 [H, Fq, F]"] = None
    frame_mass: Annotated[Tensor | None, "f16/f32 [H, Fq, F]"] = None
    slot_frame: Annotated[Tensor | None, "i32 [slots]"] = None  # as in an atlas
    slot_position: Annotated[Tensor | None, "i32 [slots]"] = None
    slot_logits: Annotated[Tensor | None, "f16/f32 [H, Fq, slots]"] = None
    slot_mass: Annotated[Tensor | None, "f16/f32 [H, Fq, slots]"] = None
    tokens_kept: Annotated[Tensor | None, "i32 [F]"] = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The entry of a dict; attn_weights that are attn_logits under another name are left out."""
        logits, weights = (values.get(name) for name in ("attn_logits", "attn_weights"))
        if isinstance(logits, Tensor) and isinstance(weights, Tensor) and _one_tensor(logits, weights):
            values = {name: value for name, value in values.items() if name != "attn_weights"}
        return super().from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """The dict of a file: logits under both names that older notebooks read, one tensor."""
        values = super().to_dict()
        if "attn_logits" in values and "attn_weights" not in values:
            values["attn_weights"] = values["attn_logits"]
        return values

    @staticmethod
    def repeated(
        num_frames: int,
        frame_seq_length: int,
        num_heads: int,
        query_frames: Sequence[int],
        key_frames: Sequence[int],
    ) -> dict[str, int]:
        """The fields that follow from those of the cache."""
        return {
            "num_frames": num_frames,
            "frame_seq_length": frame_seq_length,
            "num_heads": num_heads,
            "num_query_frames": len(query_frames),
            "num_key_frames": len(key_frames),
            "last_block_start_frame": query_frames[0],
        }


@dataclass(frozen=True, kw_only=True)
class Figure4Cache(OnePass, Cache):
    """The last block's attention of some layers, in one pass."""

    in_files: ClassVar[Mapping[str, str]] = {"entries": "attention_weights"}
    any_of: ClassVar = ("attn_logits", "attn_weights", "key_curve", "frame_logits", "frame_mass")

    entries: list[Figure4Layer]  # attention_weights in files
    layer_indices: Annotated[list[int], "int [N]"]
    capture_method: str
    query_frames: Annotated[list[int], "int [Fq]"]
    key_frames: Annotated[list[int], "int [Fk]"]

    def _check(self) -> None:
        super()._check()
        frames = {"query_frames": self.query_frames, "key_frames": self.key_frames}
        self._check_pass()
        check_frames(frames, self.num_frames)
        _check_entries(self.entries, self.layer_indices, self.any_of)
        for where, entry in _named(self.entries):
            for name, said in entry.repeated(
                self.num_frames, self.frame_seq_length, self.num_heads, **frames
            ).items():
                if getattr(entry, name) != said:
                    raise CacheError(f"{where}{name} is {getattr(entry, name)}, and the cache says {said}")
            check_block(where, self.block_sizes, None, **frames, ahead=self.ahead)
            if entry.token_logits is not None and entry.token_probabilities is not None:
                raise CacheError(f"{where}attn_weights is another tensor than attn_logits")
            by_keys = {"key_curve": entry.key_curve, **entry.matrices}
            sizes = self.num_frames, self.frame_seq_length, len(self.key_frames)
            check_keys(entry.named_keys, by_keys, *sizes, where)
            mass = {"frame_mass": entry.frame_mass} if entry.slot_mass is None else {}  # averages have mass
            check_values({"frame_logits": entry.frame_logits, "slot_mass": entry.slot_mass} | mass, where)


@dataclass(frozen=True, kw_only=True)
class InferenceCall(OnePass, Tokens):
    """One captured call of an inference cache."""

    block: int | None
    query_frames: Annotated[list[int], "int [Fq]"]
    key_frames: Annotated[list[int], "int [Fk]"]
    q_shape: Annotated[list[int], "int [four]"]
    k_shape: Annotated[list[int], "int [four]"]

    def check(self, cache: "InferenceCache", where: str) -> None:
        """Raise CacheError where a call's numbers are not those of its cache and its block."""
        self._check_pass(where)
        check_numbers({"block": self.block}, where)
        frames = {"query_frames": self.query_frames, "key_frames": self.key_frames}
        check_frames(frames, cache.num_frames, where)
        check_block(where, cache.block_sizes, self.block, **frames, ahead=cache.ahead)
        S = cache.frame_seq_length
        check_keys(self.named_keys, self.matrices, cache.num_frames, S, len(self.key_frames), where)
        asks, seen = (f"{len(x)} frames of {S} tokens" for x in (self.query_frames, self.key_frames))
        keys = len(self.key_frames) * S
        if self.key_frame is not None:
            keys, seen = len(self.key_frame), f"{len(self.key_frame)} keys"
        for name, shape, tokens, words in (
            ("q_shape", self.q_shape, len(self.query_frames) * S, asks),
            ("k_shape", self.k_shape, keys, seen),
        ):
            if shape[1:3] != [tokens, cache.num_heads]:
                raise CacheError(f"{where}{name} {shape} is not [B, {words}, {cache.num_heads} heads, D]")


@dataclass(frozen=True, kw_only=True)
class InferenceCache(Cache):
    """Captured calls in the order of the rollout, as token matrices."""

    in_files: ClassVar[Mapping[str, str]] = {"entries": "attention_weights"}
    any_of: ClassVar = ("attn_logits", "attn_weights")

    entries: list[InferenceCall]  # attention_weights in files
    layer_indices: Annotated[list[int], "int [N]"]
    num_transformer_blocks: int

    def last_calls(self) -> list[InferenceCall]:
        """The calls of the last block that was captured."""
        block = max(call.block or 0 for call in self.entries)
        return [call for call in self.entries if (call.block or 0) == block]

    def passes(self) -> list[PassTag]:
        return list(dict.fromkeys(call.tag for call in self.last_calls()))

    def _check(self) -> None:
        super()._check()
        _check_entries(self.entries, self.layer_indices, self.any_of)
        for where, call in _named(self.entries):
            call.check(self, where)


def _one_tensor(a: Tensor, b: Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.dtype) == (b.data_ptr(), b.shape, b.dtype)


def _named(entries: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Every entry of attention_weights with the beginning of a message about it."""
    return ((f"attention_weights[{i}].", entry) for i, entry in enumerate(entries))


def _check_entries(entries: Sequence[Tokens], layers: list[int], any_of: Sequence[str]) -> None:
    """Every entry holds values of a layer that is announced, and every layer has one."""
    check_numbers({"layer_indices": layers})
    for where, entry in _named(entries):
        check_any_of(entry.to_dict(), any_of, where)
        check_numbers({"layer_idx": entry.layer}, where)
    found = {entry.layer for entry in entries}
    if found != set(layers):
        raise CacheError(f"layer_indices {layers} are not the layers of attention_weights, {sorted(found)}")


# --- The format of maps over video frames: what chosen queries see of every key token, block by block
ANY = -1  # of a query's frame: all queries of the block; of its row and column: all of the frame
NO_KEY = -9  # in key_frame, where another layer or pass has more keys; its values are NaN


@dataclass(frozen=True, kw_only=True)
class BlockMaps(Fields):
    """The maps of one block. N layers, P passes, h heads, n queries, Lk keys."""

    block: int
    query_frames: Annotated[list[int], "int [Fq]"]
    queries: Annotated[Tensor | None, "i32 [n, 3]"] = None  # frame, row, column; -1: all
    key_frame: Annotated[Tensor | None, "i32 [N, P, Lk]"] = None  # -1 average, -2 zeros, -9 no key
    key_token: Annotated[Tensor | None, "i32 [N, P, Lk]"] = None  # index in its frame, row by row
    key_position: Annotated[Tensor | None, "i32 [N, P, Lk]"] = None  # temporal RoPE index
    map_logits: Annotated[Tensor | None, "f16 [N, P, h, n, Lk]"] = None
    map_mass: Annotated[Tensor | None, "f16 [N, P, h, n, Lk]"] = None  # times S
    attended: Annotated[Tensor | None, "mask [N, P, h, Lk]"] = None  # False: an intervention left it out
    word_map: Annotated[Tensor | None, "f16 [N, P, h, Lq, words]"] = None

    def check(self, cache: "MapsCache", where: str) -> None:
        """Raise CacheError where a block's numbers are not those of its cache."""
        check_numbers({"block": self.block}, where)
        check_any_of(self.to_dict(), ("map_mass", "word_map"), where)
        if self.block >= cache.done or self.query_frames != block_frames(cache.block_sizes, self.block):
            raise CacheError(f"{where}query_frames {self.query_frames} are not those of block {self.block}")
        for values in (self.map_mass, self.word_map):
            if values is not None and values.shape[2] != len(cache.heads):
                raise CacheError(f"{where}maps of {values.shape[2]} heads, and the cache has {cache.heads}")
        if self.word_map is not None and self.word_map.shape[-1] != len(cache.words or ()):
            raise CacheError(f"{where}word_map has {self.word_map.shape[-1]} words, not {cache.words}")
        if self.map_mass is not None:
            self._check_maps(cache, where)

    def _check_maps(self, cache: "MapsCache", where: str) -> None:
        needed = ("queries", "key_frame", "key_token", "key_position", "map_logits")
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise CacheError(f"{where}{missing[0]} is missing")
        assert self.queries is not None and self.map_mass is not None and self.key_token is not None
        assert self.key_frame is not None
        for frame, row, column in self.queries.tolist():
            whole = row == column == ANY
            if not (
                (frame == ANY and whole)
                or (frame in self.query_frames and (whole or cache.has_patch(row, column)))
            ):
                raise CacheError(f"{where}query {[frame, row, column]} is none of this block's")
        S = cache.frame_seq_length
        if not ((self.key_token >= 0) & (self.key_token < S)).all():
            raise CacheError(f"{where}key_token is not in 0..{S - 1}")
        if not ((self.key_frame >= NO_KEY) & (self.key_frame < cache.num_frames)).all():
            raise CacheError(f"{where}key_frame is not in 0..{cache.num_frames - 1}")
        if is_verified(self.map_mass):
            rows = self.map_mass.float().nansum(-1) / S
            if (self.map_mass < 0).any() or ((rows - 1).abs() > MASS_TOLERANCE).any():
                raise CacheError(f"{where}rows of map_mass do not sum to {S}, the tokens of a frame")


@dataclass(frozen=True, kw_only=True)
class MapsCache(Cache):
    """Maps over video frames: of each block that was asked for, layers x passes x heads x queries x keys."""

    layers: Annotated[list[int], "int [N]"]
    heads: Annotated[list[int], "int [h]"]
    rows: int  # of the tokens of a frame
    columns: int
    pass_timesteps: Annotated[list[float], "float [P]"]
    pass_steps: Annotated[list[int], "int [P]"]
    pass_is_clean: Annotated[list[bool], "bool [P]"]
    words: Annotated[list[str] | None, "str [words]"] = None  # text of each prompt token
    blocks: list[BlockMaps]

    def passes(self) -> list[PassTag]:
        tags = zip(self.pass_steps, self.pass_timesteps, self.pass_is_clean, strict=True)
        return [PassTag(*tag) for tag in tags]

    def has_patch(self, row: int, column: int) -> bool:
        """Whether a token of a frame is at this place."""
        return 0 <= row < self.rows and 0 <= column < self.columns

    def _check(self) -> None:
        super()._check()
        numbers = {"layers": self.layers, "heads": self.heads, "pass_steps": self.pass_steps}
        check_numbers(numbers | {"pass_timesteps": self.pass_timesteps})
        check_once(numbers)
        if self.rows * self.columns != self.frame_seq_length:
            raise CacheError(
                f"rows {self.rows} x columns {self.columns} are not {self.frame_seq_length} tokens"
            )
        if max(self.heads) >= self.num_heads:
            raise CacheError(f"head {max(self.heads)} is not in 0..{self.num_heads - 1}")
        if not self.blocks:
            raise CacheError("blocks is empty: no map is there")
        check_once({"blocks": [entry.block for entry in self.blocks]})
        for i, entry in enumerate(self.blocks):
            entry.check(self, f"blocks[{i}].")


# --- The formats of what interventions did: one edited run, and the same edit on every head, layer or frame
@dataclass(frozen=True, kw_only=True)
class EffectsCache(Cache):
    """A run, edited and not, with the same noise. Distances are RMS differences of x0 per frame."""

    latents_base: Annotated[Tensor, "f16/f32 [F, C, h, w]"]
    latents_edited: Annotated[Tensor, "f16/f32 [F, C, h, w]"]
    between_seeds: Annotated[
        Tensor, "f32 [F]"
    ]  # distance of the base run to another seed: the unit of effects
    direct: Annotated[Tensor | None, "f32 [F]"] = None  # past of the base run, only this block edited
    own_block: Annotated[Tensor, "f32 [F]"]  # all passes of the first edited block, edited there alone
    total: Annotated[Tensor, "f32 [F]"]  # the edited rollout
    floor: Annotated[Tensor, "f32 [F]"]  # the rollout with noise of 1e-6, or another attention backend
    psnr: Annotated[Tensor | None, "f32 [video]"] = None  # of the two videos, per video frame
    ssim: Annotated[Tensor | None, "f32 [video]"] = None
    questions: Annotated[list[str] | None, "str [Q]"] = None  # of the miniature's tracker
    answers_base: Annotated[Tensor | None, "mask [Q]"] = None  # its answers for the unedited video
    answers_edited: Annotated[Tensor | None, "mask [Q]"] = None

    def passes(self) -> list[PassTag]:
        return []

    def _check(self) -> None:
        super()._check()
        if not self.interventions:
            raise CacheError("an effects cache says what was edited, and interventions is missing")


@dataclass(frozen=True, kw_only=True)
class CausalAtlasCache(Cache):
    """Direct effects of one edit on every unit. R runs, N layers, U units; NaN: nothing to edit there."""

    prompts: Annotated[list[str], "str [R]"]
    seeds: Annotated[list[int], "int [R]"]
    each: str  # what a unit is: head, layer or frame
    layers: Annotated[list[int], "int [N]"]  # one, of value 0, where frames are edited in all layers
    units: Annotated[list[int], "int [U]"]
    effects: Annotated[Tensor, "f32 [R, N, U, F]"]  # in units of the distance between seeds
    between_seeds: Annotated[Tensor, "f32 [R, F]"]
    floor: Annotated[Tensor, "f32 [R, F]"]
    frame_control: Annotated[Tensor | None, "f32 [R, N, U, F]"] = (
        None  # the same edit on a random earlier frame
    )
    head_control: Annotated[Tensor | None, "f32 [R, N, U, F]"] = None  # on a random other head of the layer
    head_norms: Annotated[Tensor | None, "f32 [R, N, U]"] = None  # mean ‖z‖ in the base run

    def passes(self) -> list[PassTag]:
        return []

    def _check(self) -> None:
        super()._check()
        if self.each not in ("head", "layer", "frame"):
            raise CacheError(f"each is {self.each!r}, not one of head, layer, frame")
        check_numbers({"layers": self.layers, "units": self.units})
        if not self.interventions:
            raise CacheError("a causal atlas says what was edited, and interventions is missing")
        if (self.effects < 0).any() or self.effects.isinf().any():
            raise CacheError("effects has values that are negative or infinite; absent is NaN")


# --- What is in each kind of .pt cache: a dataclass per format, whose fields are the table, and its own check
__all__ = [
    "FORMATS",
    "SCHEMA_VERSION",
    "AtlasCache",
    "Cache",
    "Figure4Cache",
    "InferenceCache",
    "LayerCache",
    "check",
]


@dataclass(frozen=True, kw_only=True)
class LayerCache(Sampling, OnePass, Cache):
    """Every frame pair of one layer, each block in one pass; with guidance its other branch too."""

    layer_index: int
    full_frame_attention: Annotated[Tensor, "f16/f32 [H, F, F]"]
    last_block_frame_attention: Annotated[Tensor, "f16/f32 [H, F]"]
    query_frames: Annotated[list[int], "int [F]"]
    key_frames: Annotated[list[int], "int [F]"]
    last_block_query_frames: Annotated[list[int], "int [last]"]
    full_frame_attention_uncond: Annotated[Tensor | None, "f16/f32 [H, F, F]"] = None
    # Under some cache policies keys that are averages of frames that are gone, in the order of their slots:
    average_attention: Annotated[Tensor | None, "f16/f32 [H, F, averages]"] = None

    @classmethod
    def build(
        cls,
        common: Mapping[str, Any],
        at: PassTag,
        layer: int,
        matrix: Tensor,
        last_queries: list[int],
        profile: Tensor | None = None,
        uncond: Tensor | None = None,
        averages: Tensor | None = None,
    ) -> "LayerCache":
        """From a run's fields and mean logits [H, F, F]; profile [H, F] is their mean over last_queries.

        averages [H, F, averages] are those of keys that are averages of frames.
        """
        all_frames = list(range(matrix.shape[-1]))
        own = {
            "format": "layer",
            "is_logits": True,
            "layer_index": layer,
            "full_frame_attention": matrix,
            "full_frame_attention_uncond": uncond,
            "last_block_frame_attention": matrix[:, last_queries].mean(1) if profile is None else profile,
            "query_frames": all_frames,
            "key_frames": all_frames,
            "last_block_query_frames": last_queries,
        }
        if uncond is None:
            del own["full_frame_attention_uncond"]
        if averages is not None:
            own["average_attention"] = averages
        return cls.from_dict({**common, **at._asdict(), **own})

    def _check(self) -> None:
        super()._check()
        self._check_pass()
        check_numbers({"layer_index": self.layer_index})
        frames = ("query_frames", "key_frames", "last_block_query_frames")
        check_frames({name: getattr(self, name) for name in frames}, self.num_frames)
        check_absent(
            "full_frame_attention", self.full_frame_attention, self.block_sizes, self.done, self.ahead
        )
        for name in ("full_frame_attention", "last_block_frame_attention"):
            check_values({name: getattr(self, name)})


@dataclass(frozen=True, kw_only=True)
class AtlasCache(Sampling, Cache):
    """A whole rollout at frame level."""

    any_of: ClassVar = ("frame_logits", "frame_mass", "last_block_frame_logits")

    layers: Annotated[list[int], "int [N]"]
    pass_timesteps: Annotated[list[float] | Tensor, "float [P] | f32 [P]"]
    pass_steps: Annotated[list[int] | None, "int [P]"] = None  # all passes of the rollout where absent
    pass_is_clean: Annotated[list[bool] | None, "bool [P]"] = None  # t == 0 where absent
    frame_logits: Annotated[Tensor | None, "f16/f32 [N, P, H, F, F]"] = None
    frame_mass: Annotated[Tensor | None, "f16/f32 [N, P, H, F, F]"] = None
    attended: Annotated[Tensor | None, "mask [N, P, H, F, F]"] = None  # False: an intervention left it out
    key_curve: Annotated[Tensor | None, "f16/f32 [N, P, H, L] | f16/f32 [N, P, H, keys]"] = None
    cross_mass: Annotated[Tensor | None, "f16/f32 [N, P, H, F, tokens]"] = None
    cross_tokens: Annotated[list[str] | None, "str [tokens]"] = None
    frame_logits_by_band: Annotated[Tensor | None, "f16/f32 [N, P, H, F, F, bands]"] = None
    rope_bands: Annotated[list[str] | None, "str [bands]"] = None  # a time frequency, height or width
    last_block_frame_logits: Annotated[Tensor | None, "f16/f32 [N, P, H, F]"] = None
    frame_logits_error: Annotated[Tensor | list[float] | None, "f32 [N] | float [N]"] = None
    # Since schema_version 2, under policies whose slots are not the frames of a window:
    slot_frame: Annotated[Tensor | None, "i32 [N, blocks, slots]"] = (
        None  # -1 average, -2 zeros, -3 tokens, -9 none
    )
    slot_position: Annotated[Tensor | None, "i32 [N, blocks, slots]"] = (
        None  # temporal RoPE index of the keys
    )
    slot_tokens: Annotated[Tensor | None, "i32 [N, blocks, slots]"] = None
    sink_slots: Annotated[list[int] | None, "int [blocks]"] = None  # how many of the first slots never leave
    memory_slots: Annotated[list[int] | None, "int [blocks]"] = None  # after them, of a bank of frames
    key_frame: Annotated[Tensor | None, "i32 [N, keys]"] = None  # of key_curve, where slots are not frames
    key_token: Annotated[Tensor | None, "i32 [N, keys]"] = None  # index in its frame, row by row
    key_position: Annotated[Tensor | None, "i32 [N, keys]"] = None  # temporal RoPE index; -9 no key
    slot_logits: Annotated[Tensor | None, "f16/f32 [N, P, H, F, slots]"] = None
    slot_mass: Annotated[Tensor | None, "f16/f32 [N, P, H, F, slots]"] = None
    tokens_kept: Annotated[Tensor | None, "i32 [N, blocks, F]"] = (
        None  # of each frame, where tokens are chosen
    )

    def passes(self) -> list[PassTag]:
        timesteps = [float(t) for t in self.pass_timesteps]
        steps = self.pass_steps or range(len(timesteps))
        clean = self.pass_is_clean or [t == 0 for t in timesteps]
        return [PassTag(*tag) for tag in zip(steps, timesteps, clean, strict=True)]

    def _check(self) -> None:
        super()._check()
        check_any_of(self.to_dict(), self.any_of)
        passes = {"pass_steps": self.pass_steps}
        numbers = {"layers": self.layers, "pass_timesteps": self.pass_timesteps}
        check_numbers(numbers | (passes if self.pass_steps is not None else {}))
        check_once({"layers": self.layers} | passes)
        check_keys(
            (self.key_frame, self.key_token, self.key_position),
            {"key_curve": self.key_curve},
            self.num_frames,
            self.frame_seq_length,
            self.num_frames,
        )
        matrices = {"frame_logits": self.frame_logits, "frame_mass": self.frame_mass}
        if self.frame_logits_by_band is not None:
            matrices["frame_logits_by_band"] = self.frame_logits_by_band.movedim(-1, 0)
        for name, matrix in matrices.items():
            if matrix is not None:
                check_absent(name, matrix, self.block_sizes, self.done, self.ahead)
        mass_by_slot = {"frame_mass": None, "slot_mass": self.slot_mass} if self.slot_mass is not None else {}
        check_values(matrices | {"last_block_frame_logits": self.last_block_frame_logits} | mass_by_slot)


@dataclass(frozen=True)
class Format:
    """A format's dataclass, the script that makes one, where it puts it, the notebook that shows one."""

    cache: type[Cache]
    script: str
    notebook: str
    default: str

    @property
    def fields(self) -> Table:
        """The table of fields."""
        return self.cache.table()


FORMATS = {
    "figure4": Format(
        Figure4Cache, "run_extraction_figure4.py", "plt_fig4.ipynb", "attention_cache_figure4.pt"
    ),
    "layer": Format(LayerCache, "run_extraction_each.py", "extract_all_attention.ipynb", "layer3.pt"),
    "inference": Format(InferenceCache, "run_extraction.py", "plot_figure4.ipynb", "attention_cache.pt"),
    "atlas": Format(AtlasCache, "run_extraction_all.py", "layer_atlas.ipynb", "atlas.pt"),
    "maps": Format(MapsCache, "run_extraction_maps.py", "on_the_video.ipynb", "maps.pt"),
    "effects": Format(EffectsCache, "run_intervention.py", "interventions.ipynb", "effects.pt"),
    "causal_atlas": Format(CausalAtlasCache, "run_causal_atlas.py", "interventions.ipynb", "causal_atlas.pt"),
}


def as_cache(values: Mapping[str, Any]) -> Cache:
    """The typed cache of a dict, unchecked. Raises CacheError for a format that is not one of ours."""
    kind = values.get("format")
    if type(kind) is not str or kind not in FORMATS:
        raise CacheError(f"format is {kind!r}, not one of {', '.join(FORMATS)}")
    return FORMATS[kind].cache.from_dict(values)


def check(values: Mapping[str, Any]) -> None:
    """Raise CacheError for the first field that is missing, of a wrong type or shape, or inconsistent."""
    as_cache(values).validate()
