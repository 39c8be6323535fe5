"""Identify functions, classes and values by everything that they compute with.

    digest_of(lambda x, where: scale * x)  # changes with its code and with scale

Source text does not: two functions of one text differ by what they close over.
"""

import dis
import functools
import hashlib
import os
import random
import site
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from wan.errors import short_repr

ENVIRONMENT = (os.environ, os.environb, os.getenv, os.getenvb)
UNHASHABLE = "unhashable"  # why nothing tells a value from another
MOST_VALUES = 100_000  # that are looked into
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
# Of classes in C, which are told apart by name
DESCRIPTORS = (GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType, WrapperDescriptorType)
NOT_OF_A_CLASS = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__"}
NOT_OF_A_CLASS |= {
    "__slotnames__",
    "__static_attributes__",
    "__abstractmethods__",
    "_abc_impl",
    "__dataclass_fields__",
}


class UnhashableError(ValueError):
    """A value that cannot be distinguished from others of its kind."""


@functools.cache
def library_folders() -> tuple[str, ...]:
    """Return the folders of installed code: Python's, packages' and this project's."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    here = Path(__file__).resolve().parents[1]
    own = (str(here / "wan"), str(here / "experiments"))
    return tuple(f"{Path(path).resolve()}/" for path in (*paths, *own) if path)


@functools.cache
def is_library(module: str) -> bool:
    """Return True for a module that is identified by its version instead of its content."""
    if module == "__main__":  # what a notebook defines, whatever installed kernel runs it
        return False
    if module.partition(".")[0] in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and str(Path(file).resolve()).startswith(library_folders())


def digest_of(value: Any) -> str:
    """Return 16 hex digits that change with a value and with everything it refers to.

    Functions count by code, defaults, closure and the globals that they name, objects by class and state,
    libraries by name; files that it may read do not. Raises UnhashableError, with the reason, where something
    has no state to be read, or is read from os.environ.
    """
    return _Digests().of(value).hex()[:16]


def code_of(value: Any) -> dict[str, str]:
    """Return the identity of a user's function, class or object, as plain values.

    If it has none, return a unique number and the reason, so that no other run counts as equal.
    """
    try:
        return {"code_sha256": digest_of(value)}
    except UnhashableError as error:
        return {"code_sha256": uuid4().hex[:16], UNHASHABLE: str(error)}


def random_state() -> dict[str, str]:
    """Return the state of the global random generators, which functions may share."""
    return {"random": digest_of([torch.get_rng_state(), np.random.get_state(), random.getstate()])}


def warn_of_turns(function: object, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warn if state that a function reads changed while the videos of a batch called it in turn."""
    if was != now and UNHASHABLE not in was:
        said = "changed something that it reads, and videos of a batch take turns at it"
        warnings.warn(f"{function} {said}: make videos one by one", stacklevel=5)


def code_of_class(kind: type) -> dict[str, str]:
    """Return code_of a user's class, such as a policy; nothing for a library's class."""
    return {} if is_library(kind.__module__) else code_of(kind)


class _Digests:
    """Digests of values that may refer to each other, also in circles."""

    def __init__(self) -> None:
        self.found: dict[int, bytes] = {}
        self.alive: list[Any] = []  # an id is good while its value lives

    def of(self, value: Any) -> bytes:
        if isinstance(value, PLAIN):
            return _hashed(type(value).__name__, repr(value).encode())
        known = self.found.get(id(value))
        if known is not None:
            return known
        if len(self.alive) > MOST_VALUES:
            raise UnhashableError(f"more than {MOST_VALUES} values")
        if any(value is one for one in ENVIRONMENT):
            raise UnhashableError("os.environ, which says something else at another time")
        self.alive.append(value)
        self.found[id(value)] = _hashed("within itself")
        self.found[id(value)] = found = _hashed(type(value).__qualname__, *self._parts(value))
        return found

    def _parts(self, value: Any) -> Iterator[bytes]:
        """Yield the parts that determine a value."""
        if isinstance(value, Tensor) and type(value) in (Tensor, torch.nn.Parameter):
            if value.layout != torch.strided or value.device.type == "meta":
                raise UnhashableError(f"a {value.layout} tensor on {value.device}")
            x = value.detach().cpu().contiguous()
            yield f"{x.dtype} {list(x.shape)}".encode()
            yield x.flatten().view(torch.uint8).numpy().tobytes()
        elif isinstance(value, np.ndarray) and value.dtype != object:
            yield f"{value.dtype} {value.shape}".encode()
            yield np.ascontiguousarray(value).tobytes()
        elif isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            yield from map(self.of, value)
        elif type(value) in (set, frozenset):
            yield from sorted(map(self.of, value))
        elif isinstance(value, Mapping) and type(value) in (dict, type(vars(int))):
            yield from sorted(self.of(key) + self.of(x) for key, x in value.items())
        elif isinstance(value, CodeType):
            yield value.co_code
            yield getattr(value, "co_exceptiontable", b"")
            yield from map(
                self.of, (value.co_names, value.co_argcount, value.co_kwonlyargcount, value.co_flags)
            )
            yield from map(self.of, value.co_consts)
        elif isinstance(value, ModuleType):
            yield value.__name__.encode()
        elif isinstance(value, FunctionType):
            yield from self._of_function(value)
        elif isinstance(value, type):
            yield from self._of_class(value)
        elif isinstance(value, property):
            yield from map(self.of, (value.fget, value.fset))
        elif isinstance(value, (classmethod, staticmethod)):
            yield self.of(value.__func__)
        elif isinstance(value, functools.cached_property):
            yield self.of(value.func)
        else:
            yield from self._of_object(value)

    def _of_function(self, function: FunctionType) -> Iterator[bytes]:
        if is_library(function.__module__ or ""):
            yield f"{function.__module__}.{function.__qualname__}".encode()
            if "<locals>" not in function.__qualname__:
                return
        yield self.of(function.__code__)
        yield from map(self.of, (function.__defaults__, function.__kwdefaults__))
        named = _names(function.__code__)
        own = {name: x for name, x in vars(function).items() if name != "__wrapped__"}
        yield from map(self.of, ([own] if own else []))  # f.scale
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield from self._of_global(cell.cell_contents, named.get(name, frozenset()))
            except ValueError as error:
                if isinstance(error, UnhashableError):
                    raise
                yield b"empty"  # a name that is bound later, or never
        for name, attributes in sorted(named.items()):
            if name in function.__globals__:
                yield name.encode()
                yield from self._of_global(function.__globals__[name], attributes)

    def _of_global(self, value: Any, attributes: frozenset[str]) -> Iterator[bytes]:
        yield self.of(value)
        if isinstance(value, ModuleType) and (value is os or not is_library(value.__name__)):  # of settings
            for name in sorted(attributes & {*vars(value)}):
                yield name.encode()
                yield self.of(vars(value)[name])

    def _of_class(self, kind: type) -> Iterator[bytes]:
        yield f"{kind.__module__}.{kind.__qualname__}".encode()
        if not is_library(kind.__module__):
            yield from map(self.of, kind.__bases__)
            members = {name: x for name, x in vars(kind).items() if name not in NOT_OF_A_CLASS}
            if slots := members.pop("__slots__", ()):
                members = {name: x for name, x in members.items() if name not in slots}
            yield self.of(members)

    def _of_object(self, value: Any) -> Iterator[bytes]:
        """Yield what pickle would write of an object: how it is made, and its state."""
        yield self.of(type(value))
        if isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, ModuleType | None):
            yield f"{value.__module__}.{value.__qualname__}".encode()
            return
        if isinstance(value, np.ufunc) and getattr(np, str(value.__name__), None) is value:
            named: Any = value  # one of numpy's functions, whose name its types do not know
            yield named.__name__.encode()
            return
        if isinstance(value, DESCRIPTORS):
            yield value.__qualname__.encode()
            return
        if hasattr(value, "__wrapped__"):  # as by functools.cache
            yield self.of(value.__wrapped__)
        try:
            made = value.__reduce_ex__(4)
        except Exception as error:  # whatever a class of one's own raises
            raise UnhashableError(f"a {type(value).__name__}, {short_repr(value)}: {error}") from None
        if isinstance(made, str):
            yield made.encode()
            return
        yield from map(self.of, made[:3])
        for items in made[3:5]:
            yield self.of(list(items or ()))


def _names(code: CodeType) -> dict[str, frozenset[str]]:
    """Return the globals and closed-over names of code and functions in it, with attributes it asks for."""
    names, attributes, inner = set[str](), set[str](), dict[str, frozenset[str]]()
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            names.add(one.argval)
        elif one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(one.argval)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            for name, more in _names(each).items():
                inner[name] = inner.get(name, frozenset()) | more
    return inner | {name: inner.get(name, frozenset()) | attributes for name in names}


def _hashed(kind: str, *parts: bytes) -> bytes:
    """Hash a kind and parts, so that no two lists of parts are alike."""
    digest = hashlib.sha256(kind.encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
