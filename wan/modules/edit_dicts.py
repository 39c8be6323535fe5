"""Interventions as plain values and back: what YAML, JSON and caches hold."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, get_args

from wan.modules.edit_fields import InterventionError
from wan.modules.interventions import PASSES, Edit

KINDS: dict[str, type] = {kind.__name__.lower(): kind for kind in get_args(Edit)}


def edit_from_dict(values: Mapping[str, Any]) -> Edit:
    """The edit that to_dict wrote: {"edit": "knockout", "frames": "first", "passes": "denoise"}.

    Raises InterventionError for a name, a field or a value that is not one.
    """
    if not isinstance(values, Mapping):
        raise InterventionError(f"{values!r} is not an edit; write {{edit: knockout, frames: first, ...}}")
    given = {str(name): value for name, value in values.items()}
    name = given.pop("edit", None)
    if not isinstance(name, str) or name not in KINDS:
        raise InterventionError(f"edit {name!r} is not one of {', '.join(KINDS)}")
    kind = KINDS[name]
    known = {field.name: field for field in fields(kind)}
    if unknown := sorted(set(given) - set(known)):
        raise InterventionError(f"{name}: unknown field {unknown[0]!r}; it takes {', '.join(known)}")
    for field in known.values():
        if field.default is MISSING and field.name not in given:
            choices = f": {', '.join(PASSES)}" if field.name == "passes" else ""
            raise InterventionError(f"{name}: {field.name} is missing and has no default{choices}")
    try:
        return kind(**given)
    except InterventionError as error:
        raise InterventionError(f"{name}: {error}") from None


def fingerprint(edits: Iterable[Edit]) -> str:
    """16 hexadecimal digits that tell lists of edits apart: of the SHA-256 of what they say."""
    said = json.dumps([edit.to_dict() for edit in edits], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def in_words(edits: Iterable[Edit]) -> str:
    """Edits as one line for a subtitle."""
    return "; ".join(str(edit) for edit in edits)
