"""Interventions by name: YAML and CSV files to edits and back. Imports no torch: flags are read with it."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from wan.errors import ConfigError
from wan.modules.edit_dicts import edit_from_dict, fingerprint, in_words
from wan.modules.interventions import Ablate, Edit, Patch, Source

MAX_BYTES = 1 << 20  # of a file of edits
MAX_EDITS = 1000


def edits_of(values: Any, where: str) -> list[Edit]:
    """Edits from a list of mappings, as a config's key interventions holds it.

    Raises ConfigError, with the place of the first that is wrong.
    """
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise ConfigError(f"{where}: interventions are a list: - {{edit: knockout, frames: first, ...}}")
    if len(values) > MAX_EDITS:
        raise ConfigError(f"{where}: {len(values)} interventions, at most {MAX_EDITS} are read")
    edits = []
    for number, each in enumerate(values, 1):
        try:
            edits.append(edit_from_dict(each))
        except ConfigError as error:
            raise ConfigError(f"{where}: intervention {number}: {error}") from None
    return edits


def read_edits(path: str | Path) -> list[Edit]:
    """Edits from a YAML file: a list of them, or a mapping with the key interventions."""
    try:
        values = yaml.safe_load(_text(path))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(
            f"{path}: not a YAML file of interventions: {' '.join(str(error).split())[:200]}"
        ) from None
    if isinstance(values, Mapping):
        if set(values) != {"interventions"}:
            raise ConfigError(f"{path}: it may hold the key interventions and nothing else")
        values = values["interventions"]
    edits = edits_of(values, str(path))
    if not edits:
        raise ConfigError(f"{path} holds no intervention; write - {{edit: knockout, frames: first, ...}}")
    return edits


def sources_of(edits: Sequence[Edit]) -> list[str]:
    """What edits take values from: files of means, and weights of runs in step, "base" among them."""
    sources = [edit.source for edit in edits if isinstance(edit, (Ablate, Patch))]
    found = [source.weights if isinstance(source, Source) else source for source in sources]
    return [str(file) for file in found if file is not None]


def to_yaml(edits: Sequence[Edit]) -> str:
    """The text of a file that read_edits reads."""
    return yaml.safe_dump(
        {"interventions": [edit.to_dict() for edit in edits]}, sort_keys=False, allow_unicode=True
    )


def read_ablated_heads(
    path: str | Path, num_layers: int, num_heads: int, passes: str, how: str = "zero"
) -> list[Edit]:
    """Ablate edits from a CSV of layers x heads without headings: 1 drops a head, 0 keeps it.

    Raises ConfigError for another shape, naming the model's, and for other values.
    """
    rows = [row for row in csv.reader(_text(path).splitlines()) if any(cell.strip() for cell in row)]
    widths = sorted({len(row) for row in rows})
    if len(rows) != num_layers or widths != [num_heads]:
        shape = f"{len(rows)} x {' or '.join(map(str, widths[:3])) or 0}"
        raise ConfigError(f"{path} is {shape}; this model has {num_layers} layers x {num_heads} heads")
    edits: list[Edit] = []
    for layer, row in enumerate(rows):
        for head, cell in enumerate(row):
            if cell.strip() not in ("0", "1"):
                raise ConfigError(f"{path}: layer {layer}, head {head}: {cell.strip()[:20]!r} is not 0 or 1")
        heads = [head for head, cell in enumerate(row) if cell.strip() == "1"]
        if heads:
            edits.append(Ablate(how, layers=(layer,), heads=tuple(heads), passes=passes))
    if not edits:
        raise ConfigError(f"{path} drops no head: every value is 0")
    return edits


def record_of(edits: Sequence[Edit]) -> dict[str, Any]:
    """What caches say of edits: the values, in words, and the hash that tells them apart."""
    return {
        "edits": [edit.to_dict() for edit in edits],
        "words": in_words(edits),
        "hash": fingerprint(edits),
    }


def _text(path: str | Path) -> str:
    try:
        if (size := Path(path).stat().st_size) > MAX_BYTES:
            raise ConfigError(f"{path} has {size} bytes; a file of interventions has at most {MAX_BYTES}")
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path} not found") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
