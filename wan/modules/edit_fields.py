"""The fields of interventions: what is accepted, in which form it is kept, and how it reads in words."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from wan.errors import ConfigError

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
