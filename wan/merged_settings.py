"""The fields of a dataclass from several dicts of settings, each value of the type that its field has."""

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan.errors import ConfigError, quoted, reason_of
from wan.limits import MAX_LAYERS

if TYPE_CHECKING:
    from omegaconf import DictConfig


def merged(settings: type, path: str | Path, *sources: dict[str, Any]) -> dict[str, Any]:
    """Plain values of all fields of a dataclass; later sources win. Raises ConfigError, which names path."""
    from omegaconf import OmegaConf  # here: a --help needs no OmegaConf

    try:
        found = OmegaConf.merge(
            _schema(settings), *(OmegaConf.create(_literal(source)) for source in sources)
        )
        return OmegaConf.to_container(found, resolve=True, throw_on_missing=True)
    except ConfigError:
        raise
    except Exception as error:  # OmegaConf's own error classes, and whatever a value of a wrong type raises
        key = getattr(error, "full_key", None)
        raise ConfigError(f"{path}: {reason_of(error)}{f' (key {quoted(key)})' if key else ''}") from error


@cache
def _schema(settings: type) -> "DictConfig":
    """A dataclass as OmegaConf knows it; a merge copies it, so one is enough."""
    from omegaconf import OmegaConf

    return OmegaConf.structured(settings)


def _literal(value: Any) -> Any:
    """A value in which OmegaConf fills nothing in, as it would for ${...}."""
    if value == "???":
        raise ConfigError("??? stands for a value that is missing; give it, or leave its key out")
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, dict):
        return {name: _literal(inner) for name, inner in value.items()}
    if isinstance(value, list) and len(value) > MAX_LAYERS:
        raise ConfigError(
            f"a list of {len(value)} values, such as {quoted(value[:3])}; at most {MAX_LAYERS} are read"
        )
    return [_literal(inner) for inner in value] if isinstance(value, list) else value
