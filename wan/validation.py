"""What single values of a config may be; each function raises ConfigError, with the remedy, for any other."""

import re
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

from wan.errors import ConfigError, require_text, short_repr
from wan.files import (
    MAX_DENOISING_STEPS,
    MAX_PATH,
    MAX_SCALE,
    MAX_SIZE,
    MAX_STEPS,
    SEED_BITS,
)

NUM_TRAIN_TIMESTEPS = 1000  # noise levels that the model was trained on
SAMPLERS = ("blocks", "rolling_forcing")


def check_number(name: str, value: float, low: float, high: float) -> None:
    """Raise ConfigError for a number that is not in low..high, as nan never is."""
    if not low <= value <= high:
        raise ConfigError(f"{name} is {short_repr(value)}, not in {low:g}..{high:g}")


def check_sampling(shift: float, num_steps: int) -> None:
    """A sampler takes at least one step, and its shift of noise levels keeps them between 0 and 1."""
    check_number("num_steps", num_steps, 1, MAX_STEPS)
    check_shift("shift", shift)


def check_shift(name: str, shift: float) -> None:
    """A shift s of noise levels, sigma -> s sigma / (1 + (s - 1) sigma), is above 0 and finite."""
    if not 0 < shift <= MAX_SCALE:
        raise ConfigError(
            f"{name} must be above 0 and at most {MAX_SCALE:g}, not {short_repr(shift)}; try 5.0"
        )


def check_steps(name: str, steps: Sequence[int]) -> None:
    """Denoising steps of a block go down from at most 1000; the last one alone may be 0."""
    T = NUM_TRAIN_TIMESTEPS
    if not 1 <= len(steps) <= MAX_DENOISING_STEPS:
        raise ConfigError(
            f"{name} has {len(steps)} steps, not 1..{MAX_DENOISING_STEPS}; try [1000, 750, 500, 250]"
        )
    falls = all(a > b for a, b in pairwise(steps))
    if not falls or not 1 <= steps[0] <= T or steps[-1] < 0:
        raise ConfigError(
            f"{name} {short_repr(list(steps))} does not go down within {T}..1, or to a last 0; "
            "try [1000, 750, 500, 250]"
        )


def check_device(name: str) -> str:
    """auto, cpu, cuda or cuda:N. Raises ConfigError for any other device, such as those without all
    operations.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name):
        raise ConfigError(f"device {short_repr(name)} is not one of auto, cpu, cuda, cuda:N")
    return name


def check_seed(seed: int) -> int:
    """Raise ConfigError for a seed beyond 64 bits."""
    if not -(2 ** (SEED_BITS - 1)) <= seed < 2 ** (SEED_BITS - 1):
        raise ConfigError(f"seed {short_repr(seed)} does not fit {SEED_BITS} bits; try 0")
    return seed


def check_types(config: Any) -> None:
    """Raise ConfigError for a field of another type than is declared; a whole number will do for a float."""
    wider: dict[Any, tuple[Any, ...]] = {
        float: (float, int),
        str | None: (str, type(None)),
        list[int]: (list, tuple),
        list[int] | None: (list, tuple, type(None)),
        int | None: (int, type(None)),
        float | None: (float, int, type(None)),
    }
    for declared in fields(config):
        value, allowed = getattr(config, declared.name), wider.get(declared.type, (declared.type,))
        plain = all(isinstance(kind, type) for kind in allowed)
        if declared.type in (str, int, float, bool, *wider) and plain and type(value) not in allowed:
            raise ConfigError(f"{declared.name} is {short_repr(value)}, not a {declared.type}")
        if isinstance(value, (list, tuple)) and "list[int]" in str(declared.type) and not _whole(value):
            raise ConfigError(f"{declared.name} is {short_repr(value)}, not a list of whole numbers")


def _whole(values: Sequence[Any]) -> bool:
    return all(type(item) is int for item in values)


def check_sampler(name: str) -> None:
    """Raise ConfigError for a sampler that is not one of SAMPLERS."""
    if name not in SAMPLERS:
        raise ConfigError(f"sampler {short_repr(name)} is not one of {', '.join(SAMPLERS)}")


def check_lora(path: str | None, rank: int | None, alpha: float | None) -> None:
    """A rank and an alpha are of a LoRA, and above 0."""
    for name, value in (("lora_rank", rank), ("lora_alpha", alpha)):
        if value is None:
            continue
        if path is None:
            raise ConfigError(f"{name} {short_repr(value)} is of no file; give lora_path, or leave it out")
        if not 0 < value <= MAX_SIZE:
            raise ConfigError(f"{name} must be above 0 and at most {MAX_SIZE}, not {short_repr(value)}")


def check_texts(**texts: tuple[str | None, int | None]) -> None:
    """Raise ConfigError for texts that are no UTF-8 or too long, and for empty ones that name a file (limit
    None).
    """
    for name, (text, limit) in texts.items():
        if text is None:
            continue
        require_text(text, name)
        if limit is None and not text.strip():
            raise ConfigError(f"{name} is empty; give a path, or null where nothing is meant")
        if len(text) > (limit or MAX_PATH):
            raise ConfigError(f"{name} has {len(text)} characters, at most {limit or MAX_PATH} are read")
