"""Interventions by name: YAML and CSV files to edits and back. Imports no torch: flags are read with it."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from wan.errors import ConfigError
from wan.modules.edit_dicts import edit_from_dict, fingerprint, in_words
from wan.modules.interventions import Ablate, Edit, Patch, Source
from wan.text_files import load_yaml, read_text

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
    values = load_yaml(path, "interventions", MAX_BYTES)
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
    said = {"interventions": [edit.to_dict() for edit in edits]}
    plain = json.loads(json.dumps(said))  # nothing stands in it twice, so that no alias is written
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def read_ablated_heads(
    path: str | Path, num_layers: int, num_heads: int, passes: str, how: str = "zero"
) -> list[Edit]:
    """Ablate edits from a CSV of layers x heads without headings: 1 drops a head, 0 keeps it.

    Raises ConfigError for another shape, naming the model's, and for other values.
    """
    lines = read_text(path, MAX_BYTES).splitlines()
    try:
        rows = [row for row in csv.reader(lines) if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise ConfigError(f"{path} is not a CSV of layers x heads: {error}") from None
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
