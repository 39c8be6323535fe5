"""Errors that a user can mend: the message is one printable line that names the value and the remedy."""

import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin


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
    """Return a message in printable characters; a long one loses its middle: the remedy stands at the end."""
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


def reason_of(error: BaseException) -> str:
    """Return the first line of another library's error, without torch's advice to trust a file."""
    text = str(error).strip()
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    elif isinstance(error, UnicodeDecodeError):
        text = f"it is not text in UTF-8, at byte {error.start}"
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


def check_fields(settings: Any, where: str = "") -> None:
    """Raise ConfigError where a field of a dataclass is not what its annotation says.

    Annotated[int, low, high] names a range, of a text that of its length; Annotated[str, words] and Literal
    all that is known. Other classes than numbers, texts and None are not looked into.
    """
    for each in fields(settings):
        # 1. The kinds that an annotation names, and the value.
        value, known = getattr(settings, each.name), []
        kinds = get_args(each.type) if get_origin(each.type) in (Union, UnionType) else (each.type,)
        if type(value) is str:
            require_text(value, where + each.name)
        for kind in kinds:
            # 2. What it may hold: all that is known, or a range of numbers or lengths.
            limits: tuple = ()
            if get_origin(kind) is Annotated:
                kind, *limits = get_args(kind)  # type: ignore[assignment]
            if get_origin(kind) is Literal:
                kind, limits = str, (get_args(kind),)
            if kind not in (bool, int, float, str, NoneType):
                break
            # 3. Whether it fits this kind; else the kind in words.
            name = {NoneType: "null", str: "text"}.get(kind, kind.__name__)
            fits = type(value) is kind or (kind is float and type(value) is int)
            if len(limits) == 1:
                name, fits = f"one of {', '.join(limits[0])}", fits and value in limits[0]
            elif len(limits) == 2:
                low, high = limits
                size = len(value.strip()) if fits and kind is str else value
                name = f"{name} in {low}..{high}" + " characters" * (kind is str)
                fits = fits and low <= size <= high
            if fits:
                break
            known.append(name)
        else:
            raise ConfigError(f"{where}{each.name} {short_repr(value)} is not {' or '.join(known)}")


@contextmanager
def library_reads(what: object, error: type[UserError] = ConfigError, remedy: str = "") -> Iterator[None]:
    """Turn whatever a library raises on a damaged file into one line."""
    try:
        yield
    except (UserError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as problem:  # a panic of a library in Rust is no Exception
        if isinstance(problem, RuntimeError) and "memory" in str(problem):
            raise  # torch's allocators: the file is not to blame
        message = f"{what} cannot be read: {reason_of(problem)}"
        raise error(f"{message}; {remedy}" if remedy else message) from problem
