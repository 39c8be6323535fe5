"""Errors that a user can fix, and the check of settings: one printable line that names value and remedy."""

import functools
import operator
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any, TypeVar, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

Settings = TypeVar("Settings")
MOST_NAMES = 32  # that a message lists


class UserError(Exception):
    """An error whose message is one line, whatever it quotes."""

    def __init__(self, message: object = ""):
        super().__init__(one_line(message))

    def _render_traceback_(self) -> list[str]:  # the hook by which IPython shows the line alone
        return [f"{type(self).__name__}: {self}"]


class ConfigError(UserError, ValueError):
    """A setting that cannot be run."""


class CheckpointError(ConfigError):
    """Weights that are missing or do not fit."""


# --- Messages
def one_line(message: object, limit: int = 1000) -> str:
    """Return a message in printable characters; cut a long one in the middle, as the remedy is at the end."""
    text = str(message)
    if len(text) > limit:
        text = f"{text[: limit - 300]} ... {text[-290:]}"
    text = text.translate(dict.fromkeys(map(ord, "\r\n\t"), " "))
    characters = list(text)
    for place, character in enumerate(characters):
        if not character.isprintable():
            characters[place] = character.encode("unicode_escape").decode("ascii")
    return "".join(characters)


def short_repr(value: Any, limit: int = 80) -> str:
    """Return what a file or a user gave in words, in at most limit characters of one line.

    An array is its shape and kind, a function its name, and an object without a repr of its own its class.
    """
    short, value = reprlib.Repr(), plain_number(value)
    short.maxstring = short.maxlong = short.maxother = limit
    try:
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            text = f"an array {list(value.shape)} of {value.dtype}"
            if str(getattr(value, "layout", "torch.strided")) != "torch.strided":
                text += f", {value.layout}"
            if getattr(value, "is_meta", False):
                text += ", without numbers (meta)"
        elif hasattr(value, "__qualname__"):
            text = f"{value.__module__}.{value.__qualname__}"
        else:
            text = one_line((short.repr(value).splitlines() or [""])[0])
    except Exception:  # such as a number of 5000 digits, which has no decimal form
        text = " at 0x"
    if " at 0x" in text and not isinstance(value, str):
        return f"a {type(value).__name__}"
    if len(text) > limit:
        text = f"{text[: limit - 3]}..."
    return text


def did_you_mean(name: object, allowed: Iterable[str], home: str = "") -> str:
    """Return the end of a message about a wrong name: the nearest of the allowed ones, or all of them.

    Of more than MOST_NAMES the three nearest are named, and home, the file that has all.
    """
    names = sorted(allowed)
    nearest = get_close_matches(str(name), names, 1)
    if nearest:
        return f"; did you mean {nearest[0]}?"
    if len(names) <= MOST_NAMES:
        return f"; known ones: {', '.join(names)}"
    nearest = get_close_matches(str(name), names, 3, cutoff=0)
    hint = f"; the nearest of {len(names)} known ones: {', '.join(nearest)}"
    if home:
        hint += f"; {home} has all of them"
    return hint


def reason_of(error: BaseException) -> str:
    """Return the first line of another library's error, without torch's advice to trust a file."""
    text = str(error).strip()
    mark = getattr(error, "problem_mark", None)  # of YAML
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    elif isinstance(error, UnicodeDecodeError):
        text = f"it is not text in UTF-8, at byte {error.start}"
    elif mark:
        text = f"{getattr(error, 'problem', text)} in line {mark.line + 1}"
    if "weights_only" in text or "Weights only load" in text:
        text = text.partition("WeightsUnpickler error: ")[2]
        if "GLOBAL" in text:
            name = (text.partition("GLOBAL ")[2].split() or ["an unnamed object"])[0]
            text = f"it holds a {name[:80]}, which is neither tensor nor plain value, and is not opened"
        elif "Unsupported operand" in text:
            text = "it is not what torch.save writes"
    line = (text.splitlines() or [""])[0]
    if not line or isinstance(error, KeyError):
        return f"damaged ({type(error).__name__})"
    return one_line(line, 350)


# --- Checks of names, texts and numbers
def require_known(
    name: object,
    allowed: Collection[str],
    problem: str,
    error: type[UserError] = ConfigError,
    home: str = "",
) -> None:
    """Raise error for a name that is not allowed: the problem with it in place of {}, and the nearest."""
    if not isinstance(name, str) or name not in allowed:
        raise error(problem.replace("{}", short_repr(name), 1) + did_you_mean(name, allowed, home))


def require_text(value: str, name: str, limit: int | None = None) -> str:
    """Return a text. Raise ConfigError for NUL, for halves of characters, and beyond limit characters."""
    surrogates = [c for c in value if "\ud800" <= c <= "\udfff"]
    problem = ""
    if surrogates:
        problem = f"is not text in UTF-8: {short_repr(surrogates[0])}"
    elif "\0" in value:
        problem = f"has a NUL character at {value.index(chr(0))}; leave it out"
    elif limit is not None and len(value) > limit:
        problem = f"has {len(value)} characters, at most {limit} are read"
    if problem:
        raise ConfigError(f"{name} {problem}")
    return value


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return several values, or one alone, as a tuple; numbers of numpy and torch become Python's."""
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        value = [value]
    return tuple(map(plain_number, value))


def plain_number(item: Any) -> Any:
    """Return a number of numpy or torch as Python's; whatever has no single number stays, to be refused."""
    if not hasattr(item, "item"):
        return item
    try:
        return item.item()
    except (RuntimeError, ValueError):  # several numbers, or of the device meta none
        return item


def as_list(value: Any) -> Any:
    """Return a range, a tuple or an array as a list of Python's numbers; anything else stays."""
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        return value
    return list(as_tuple(value))


def as_numbers(name: str, value: Any) -> list[int] | None:
    """Return one whole number or several as a list in their order (of a set: ascending); None stays.

    ConfigError for anything else, and for a number that comes twice: nothing would be chosen in silence.
    """
    if value is None:
        return None
    items = as_tuple(value)
    try:
        numbers = [operator.index(item) for item in items if not isinstance(item, bool)]
    except (RuntimeError, TypeError):
        numbers = []
    if not numbers or len(numbers) < len(items):
        raise ConfigError(
            f"{name} must be a number or several, such as [0, 5] or range(3), not {short_repr(value)}"
        )
    if isinstance(value, Set):
        return sorted(numbers)
    twice = [number for n, number in enumerate(numbers) if number in numbers[:n]]
    if twice:
        raise ConfigError(f"{name} {short_repr(numbers)} name {twice[0]} twice; name each once")
    return numbers


def require_ascending(name: str, numbers: Sequence[int] | None, why: str) -> None:
    """Raise ConfigError for numbers in another order than that in which their values come."""
    if numbers is not None and list(numbers) != sorted(numbers):
        raise ConfigError(f"{name} {short_repr(list(numbers))} must ascend: {why}")


# --- Checks of settings, by pydantic
@functools.cache
def field_checks(kind: type) -> dict[str, TypeAdapter[Any]]:
    """Return the check of every field of a dataclass, by its annotation; types are strict."""
    hints = get_type_hints(kind, include_extras=True)
    strict = ConfigDict(strict=True, arbitrary_types_allowed=True)
    checks = {}
    for item in fields(kind):
        hint = hints[item.name]
        try:
            checks[item.name] = TypeAdapter(hint, config=strict)
        except PydanticUserError:  # a type with a config of its own
            checks[item.name] = TypeAdapter(hint)
    return checks


def check_fields(settings: Any, where: str = "") -> None:
    """Check the fields of a dataclass by their annotations: Annotated[int, Field(ge=1, le=30)].

    Strict: "3" is no number and True no 1, but 3 becomes the float 3.0. ConfigError names the first field
    that does not fit; where is put before its name.
    """
    kind: type = type(settings)
    for name, check in field_checks(kind).items():
        value = getattr(settings, name)
        if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
            value = value.item()  # a number of numpy is Python's
        try:
            fitting = check.validate_python(value, strict=True)
        except ValidationError as error:
            problem = f"{name} {short_repr(value)} {problem_of(error)}"
            cause = error.errors()[0].get("ctx", {}).get("error")
            if isinstance(cause, ConfigError):  # of a dataclass in this one, which says where it is
                problem = str(cause)
            raise ConfigError(f"{where}{problem}") from None
        if fitting is not getattr(settings, name):
            object.__setattr__(settings, name, fitting)  # also of a frozen one, which is being made


def problem_of(error: ValidationError) -> str:
    """Return what pydantic says of a value, as the end of a sentence that begins with the value.

    An item of a list is named once, before all that pydantic says of it.
    """
    problems: dict[str, list[str]] = {}  # by the item
    for entry in error.errors(include_url=False):
        message = entry["msg"]
        if entry["type"] == "none_required":  # None is allowed besides what the other entries say
            continue
        if entry["type"] == "value_error":  # of a validator of ours
            message = str(entry["ctx"]["error"])
        if entry["type"].startswith("dataclass"):
            message = f"should be a {entry['ctx']['class_name']}(...)"
        if "should" in message:
            message = "should" + message.partition("should")[2]
        indices = [str(step) for step in entry["loc"] if isinstance(step, int)]
        item = ""
        if indices:
            item = f"(item {indices[-1]}) "
        messages = problems.setdefault(item, [])
        if messages:
            message = message.removeprefix("should be ")
        if message not in messages:
            messages.append(message)
    return " or ".join(item + " or ".join(messages) for item, messages in problems.items())


def from_values(kind: type[Settings], values: Any, where: str = "") -> Settings:
    """Make a dataclass of a mapping, as YAML and JSON have it.

    ConfigError for an unknown or a missing field, and by check_fields() of the dataclass for a wrong value.
    """
    allowed = {item.name: item for item in fields(kind) if item.init}  # type: ignore[arg-type]
    required = [
        name for name, item in allowed.items() if item.default is MISSING and item.default_factory is MISSING
    ]
    names = f"its fields: {', '.join(allowed)}"
    problems = []
    if not isinstance(values, Mapping):
        problems.append(f"{short_repr(values)} is no mapping; {names}")
    else:
        unknown = [key for key in values if key not in allowed]
        home = f"{kind.__module__.replace('.', '/')}.py"
        problems += [f"unknown key {short_repr(key)}{did_you_mean(key, allowed, home)}" for key in unknown]
        problems += [f"has no {name}; {names}" for name in required if name not in values]
    if problems:
        raise ConfigError(f"{where}{problems[0]}")
    return kind(**values)


# --- Errors of other code, with the place that they are of
@contextmanager
def in_context(where: object, error: type[UserError] = ConfigError) -> Iterator[None]:
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
        if remedy:
            message = f"{message}; {remedy}"
        raise error(message) from problem


library_writes = functools.partial(library_reads, done="written")
