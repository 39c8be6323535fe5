"""Errors that a user can fix: the message is one printable line that names the value and the remedy."""

import functools
import inspect
import operator
import re
import reprlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

Made = TypeVar("Made")
Called = TypeVar("Called", bound=Callable[..., Any])
NUMBER = r":(0|[1-9]\d{0,4})"  # of a frame, behind a word: own:3, and not own:03


class UserError(Exception):
    """An error whose message is one line, whatever it quotes."""

    def __init__(self, message: object = ""):
        super().__init__(one_line(message))

    def _render_traceback_(self) -> list[str]:  # the hook by which IPython shows the line alone
        return [f"{type(self).__name__}: {self}"]


class ConfigError(UserError, ValueError):
    """A setting that cannot be run."""


def refuse(*problems: tuple[Any, str], error: type[UserError] = ConfigError) -> None:
    """Raise an error with the first message whose condition holds."""
    for holds, message in problems:
        if holds:
            raise error(message)


def one_line(message: object, limit: int = 1000) -> str:
    """Return a message in printable characters; cut a long one in the middle, as the remedy is at the end."""
    text = str(message)
    if len(text) > limit:
        text = f"{text[: limit - 300]} ... {text[-290:]}"
    text = text.translate(dict.fromkeys(map(ord, "\r\n\t"), " "))
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def short_repr(value: Any, limit: int = 80) -> str:
    """Return the repr of what a file or a user gave, in at most limit characters of one line."""
    short = reprlib.Repr()
    short.maxstring = short.maxlong = short.maxother = limit
    try:
        text = one_line(short.repr(value))
    except Exception:  # such as a number of 5000 digits, which has no decimal form
        return f"a {type(value).__name__}"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return the end of a message about a wrong name: the nearest of the known ones, or all of them."""
    names = sorted(known)
    nearest = get_close_matches(str(name), names, 1)
    return f"; did you mean {nearest[0]}?" if nearest else f"; known ones: {', '.join(names)}"


def require_known(
    name: object, known: Collection[str], problem: str, error: type[UserError] = ConfigError
) -> None:
    """Raise error where a name is none of the known ones: the problem with it in place of {}, the nearest."""
    if not isinstance(name, str) or name not in known:
        raise error(problem.replace("{}", short_repr(name), 1) + did_you_mean(name, known))


def reason_of(error: BaseException) -> str:
    """Return the first line of another library's error, without torch's advice to trust a file."""
    text = str(error).strip()
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    elif isinstance(error, UnicodeDecodeError):
        text = f"it is not text in UTF-8, at byte {error.start}"
    elif mark := getattr(error, "problem_mark", None):  # of YAML
        text = f"{getattr(error, 'problem', text)} in line {mark.line + 1}"
    if "weights_only" in text or "Weights only load" in text:
        text = text.partition("WeightsUnpickler error: ")[2]
        if "GLOBAL" in text:
            name = (text.partition("GLOBAL ")[2].split() or ["an unnamed object"])[0]
            text = f"it holds a {name[:80]}, which is neither tensor nor plain value, and is not opened"
    line = (text.splitlines() or [""])[0]
    damaged = not line or isinstance(error, KeyError)
    return f"damaged ({type(error).__name__})" if damaged else one_line(line, 350)


def require_text(value: str, name: str, limit: int | None = None) -> str:
    """Return a text. Raise ConfigError for NUL, for halves of characters, and beyond limit characters."""
    problem = ""
    if halves := [c for c in value if "\ud800" <= c <= "\udfff"]:
        problem = f"is not text in UTF-8: {short_repr(halves[0])}"
    elif "\0" in value:
        problem = f"has a NUL character at {value.index(chr(0))}; leave it out"
    elif limit is not None and len(value) > limit:
        problem = f"has {len(value)} characters, at most {limit} are read"
    if problem:
        raise ConfigError(f"{name} {problem}")
    return value


def as_numbers(name: str, value: Any) -> list[int] | None:
    """Return a whole number, or several, once each and in order; None stays. ConfigError for what is none."""
    if value is None:
        return None
    try:  # of numpy and torch too, an array without axes as the one that it holds
        chosen = [*value] if getattr(value, "ndim", 1) and isinstance(value, Iterable) else [value]
        if chosen and not any(isinstance(one, (bool, str)) for one in chosen):
            return sorted({operator.index(one) for one in chosen})
    except TypeError:
        pass
    # nothing would be chosen in silence
    raise ConfigError(f"{name} must be a number or several, such as [0, 5], not {short_repr(value)}")


def check_fields(settings: Any, where: str = "") -> None:
    """Give the fields of a dataclass the form that their annotations name; ConfigError for what has none.

    Annotated[int, low, high] names a range, of texts and lists that of their length; Annotated[str, words]
    and Literal name all that is known, N standing for a number. tuple[X, ...] takes one X alone, too, a
    dataclass its fields as a mapping. Strict: "3" is no number and True no text, but 3 becomes the float 3.0.
    """
    for each in fields(settings):
        value = getattr(settings, each.name)
        fitting, known = fitted(value, each.type, where + each.name)
        if known:
            raise ConfigError(f"{where}{each.name} {short_repr(value)} is not {known}")
        if fitting is not value:
            object.__setattr__(settings, each.name, fitting)  # frozen ones, too: they are being made


def fitted(value: Any, kind: Any, name: str) -> tuple[Any, str]:
    """Return a value in the form of an annotation, and ""; where none fits, the value and what would."""
    # 1. One of several kinds; a kind and its limits.
    if get_origin(kind) in (Union, UnionType):
        tried = [fitted(value, one, name) for one in get_args(kind)]
        words = " or ".join(known for _, known in tried)
        return next((one for one in tried if not one[1]), (value, words))
    limits: tuple[Any, ...] = ()
    if get_origin(kind) is Annotated:
        kind, *limits = get_args(kind)  # type: ignore[assignment]
    if get_origin(kind) is Literal:
        kind, limits = str, (get_args(kind),)
    # 2. Several values of one kind, or values of these kinds in this order.
    origin, items = get_origin(kind) or kind, get_args(kind)
    if origin in (list, tuple) and items:
        given = [value]
        if isinstance(value, Iterable) and not isinstance(value, (str, Mapping)):
            given = [*value]
        kinds = items if origin is tuple and items[-1] is not Ellipsis else items[:1] * len(given)
        parts = [fitted(x, one, name) for x, one in zip(given, kinds, strict=False)]
        low, high = limits or (0, sys.maxsize) if kinds is not items else [len(items)] * 2
        fits = low <= len(given) <= high and (origin is tuple or given != [value])
        fits = fits and not any(known for _, known in parts)
        many = f"{low}..{high} of " if limits else "a list of "
        words = many + (fitted(object(), items[0], name)[1] or "anything")
        return (origin(x for x, _ in parts), "") if fits else (value, words)
    if origin in (Sequence, Collection) and items:  # of an argument, which stays as it is
        words = "a list of " + (fitted(object(), items[0], name)[1] or "anything")
        several = isinstance(value, origin) and not isinstance(value, (str, bytes, Mapping))
        return value, "" if several and not any(fitted(x, items[0], name)[1] for x in value) else words
    # 3. A dataclass by its fields; other classes are not looked into.
    if isinstance(origin, type) and is_dataclass(origin) and isinstance(value, Mapping):
        return from_values(origin, value, f"{name}: "), ""
    if origin not in (bool, int, float, str, NoneType):
        fits = origin is Any or not isinstance(origin, type) or isinstance(value, origin)
        return value, "" if fits else f"a {origin.__name__}"
    # 4. Numbers and texts: the type itself, for True is no 1, and the known ones or the range.
    fits = type(value) is kind or (kind is float and type(value) is int)
    words = {NoneType: "null", str: "text"}.get(kind, kind.__name__)
    if type(value) is str:
        require_text(value, name)
    if len(limits) == 1:
        words = f"one of {', '.join(limits[0])}"
        fits = fits and any(re.fullmatch(one.replace(":N", NUMBER), value) for one in limits[0])
    elif limits:
        low, high = limits
        words = f"{words} in {low}..{high}" + " characters" * (kind is str)
        fits = fits and low <= (len(value.strip()) if kind is str else value) <= high
    return float(value) if fits and type(value) is int and kind is float else value, "" if fits else words


def from_values(kind: type[Made], values: Any, where: str = "") -> Made:
    """Make a dataclass of a mapping, as YAML and JSON have it.

    ConfigError for an unknown or a missing field, and by check_fields() of the dataclass for a wrong value.
    """
    known = {each.name: each for each in fields(kind) if each.init}  # type: ignore[arg-type]
    needed = [name for name, one in known.items() if one.default is one.default_factory is MISSING]
    given = values if isinstance(values, Mapping) else {}
    unknown = [key for key in given if key not in known]
    missing = [name for name in needed if name not in given]
    if unknown or missing or not isinstance(values, Mapping):
        problem = f"has no {missing[0]}; its fields: {', '.join(known)}" if missing else short_repr(values)
        if unknown:
            problem = f"unknown key {short_repr(unknown[0])}{did_you_mean(unknown[0], known)}"
        raise ConfigError(where + problem)
    return kind(**given)


def checked(call: Called) -> Called:
    """Check what a public function is called with, by its annotations and as check_fields() does.

    ConfigError for an argument that it does not know, that is missing, or whose value does not fit. Of a
    dataclass the names alone are checked: its values are fields.
    """
    function: Any = vars(call)["__init__"] if isinstance(call, type) else call
    signature, kinds = inspect.signature(function), dict[str, Any]()

    @functools.wraps(function)
    def checking(*args: Any, **given: Any) -> Any:
        name, known = call.__name__, signature.parameters
        try:
            bound = signature.bind(*args, **given)
        except TypeError as error:  # say it as a setting's
            problem = f"{name}: {error}"
            names = [one for one in known if one != "self"]
            takes_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
            missing = str(error).rpartition("'")[0].rpartition("'")[2]
            if unknown := [one for one in given if one not in known and not takes_any]:
                problem = f"{name} knows no {unknown[0]}{did_you_mean(unknown[0], names)}"
            elif str(error).startswith("missing") and missing in known:
                words = fitted(object(), known[missing].annotation, missing)[1]
                problem = f"{name} needs {missing}{f', {words}' * bool(words)}"
            raise ConfigError(problem) from None
        for key, value in bound.arguments.items() if function is call else ():
            one = known[key]
            if key not in kinds:  # names in quotes are of classes that come later
                kinds[key] = one.annotation
                if isinstance(one.annotation, str):
                    kinds[key] = vars(sys.modules[call.__module__]).get(one.annotation, Any)
            if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) or kinds[key] is one.empty:
                continue
            bound.arguments[key], words = fitted(value, kinds[key], key)
            if words:
                raise ConfigError(f"{name}: {key} {short_repr(value)} is not {words}")
        return function(*bound.args, **bound.kwargs)

    if function is call:
        return checking  # type: ignore[return-value]
    setattr(call, "__init__", checking)  # noqa: B010 - of a class
    return call


@contextmanager
def named(where: object, error: type[UserError] = ConfigError) -> Iterator[None]:
    """Prefix the message of a ConfigError with the file or row of the setting."""
    try:
        yield
    except ConfigError as problem:
        raise error(f"{where}: {problem}") from None


@contextmanager
def library_reads(
    what: object, error: type[UserError] = ConfigError, remedy: str = "", done: str = "read"
) -> Iterator[None]:
    """Turn whatever a library raises on a damaged file into one line."""
    try:
        yield
    except (UserError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as problem:  # a panic of a library in Rust is no Exception
        if isinstance(problem, RuntimeError) and "memory" in str(problem):
            raise  # torch's allocators: the file is not to blame
        message = f"{what} cannot be {done}: {reason_of(problem)}"
        raise error(f"{message}; {remedy}" if remedy else message) from problem


library_writes = functools.partial(library_reads, done="written")
