"""Errors that a caller can mend: each message is one short line with the remedy, whatever it quotes."""

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

QUOTED = 80  # characters of what a file or a user said
LINE = 1000  # characters of a message; the remedy stands at its end


def one_line(message: object) -> str:
    """A message without line breaks, control characters and halves of characters; a long one loses its
    middle.
    """
    text = str(message)
    if len(text) > LINE:
        text = f"{text[: LINE - 300]} ... {text[-290:]}"
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return " " if char in "\r\n\t" else char.encode("unicode_escape").decode("ascii")


def quoted(value: Any, limit: int = QUOTED) -> str:
    """What a file or a user gave, for a message: as Python writes it, in at most limit characters."""
    short = reprlib.Repr()
    short.maxstring = short.maxlong = short.maxother = limit
    short.maxlist = short.maxtuple = short.maxdict = limit // 2
    try:
        text = short.repr(value)
    except Exception:  # such as a number of 5000 digits, which has no decimal form
        text = f"a {type(value).__name__}"
    return _cut(text, limit)


def named(value: Any, limit: int = QUOTED) -> str:
    """quoted() without the quotation marks: for names that a file gave, such as keys of a state dict."""
    return _cut(str(value), limit)


def _cut(text: str, limit: int) -> str:
    text = one_line(text[: limit + 1])
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def reason_of(error: BaseException) -> str:
    """The first line of another library's error; torch's advice to trust the file is not passed on."""
    text = str(error).strip()
    if "weights_only" in text or "Weights only load" in text:
        text = (
            text.partition("WeightsUnpickler error: ")[2] or "damaged, or more than tensors and plain values"
        )
    line = (text.splitlines() or [""])[0]
    return (
        named(line, 300) if line and not isinstance(error, KeyError) else f"damaged ({type(error).__name__})"
    )


def require_text(value: str, name: str) -> str:
    """A text that UTF-8 can hold. Raises ConfigError for halves of characters, which other bytes give, and
    NUL.
    """
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{name} is not text: {quoted(value[error.start])} at {error.start} is no character; "
            "give it as UTF-8"
        ) from None
    if "\0" in value:
        raise ConfigError(f"{name} has a NUL character at {value.index(chr(0))}; leave it out")
    return value


class OneLineError(Exception):
    """An error whose message is one line by construction."""

    def __init__(self, message: object = ""):
        super().__init__(one_line(message))

    def _render_traceback_(self) -> list[str]:  # the hook by which IPython shows the line alone in a notebook
        return [f"{type(self).__name__}: {self}"]


class ConfigError(OneLineError, ValueError):
    """What a user asked for cannot be run; the message is one line with the remedy."""


@contextmanager
def library_reads(what: object, error: type[OneLineError] = ConfigError, remedy: str = "") -> Iterator[None]:
    """Whatever a library raises on a file becomes one line: a damaged file can make it raise anything."""
    try:
        yield
    except (OneLineError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as problem:  # a panic of a library in Rust is no Exception
        if isinstance(problem, RuntimeError) and "memory" in str(problem):
            raise  # torch's allocators: the file is not to blame
        raise error(
            f"{what} cannot be read: {reason_of(problem)}{f'; {remedy}' if remedy else ''}"
        ) from problem
