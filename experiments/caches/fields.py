"""Dicts of a file as typed objects, and the check that their entries have the declared types and lengths.

A field is declared by its annotation: int, str | None, or Annotated[Tensor, "f16/f32 [H, F, F]"]. "f16/f32"
is a tensor, "int [Fq]" a list, "|" stands between alternatives. A field with the default None may be absent.
A letter is a length; one without a meaning of its own takes the first length it meets.
"""

from collections.abc import Mapping, Sized
from dataclasses import MISSING, dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from experiments.caches.errors import CacheError
from wan.errors import quoted

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
    return quoted(value, 60)


def _with_sizes(declared: str, sizes: Mapping[str, int]) -> str:
    """[H, Lk] -> [H=12, Lk=336], for messages."""
    head, bracket, rest = declared.partition("[")
    letters = [x.strip() for x in rest.partition("]")[0].split(",")]
    known = ", ".join(f"{x}={sizes[x]}" if x in sizes else x for x in letters)
    return head + (f"[{known}]" if bracket else "")
