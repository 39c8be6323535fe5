"""Pieces of a study, each in a JSON file named by the hash of all that its numbers depend on."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.caches.atomic_files import replacing


def name_of(settings: Mapping[str, Any]) -> str:
    """16 hexadecimal digits of the SHA-256 of settings, which JSON can hold."""
    said = json.dumps(settings, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class WorkItems:
    """The pieces of one study in a folder; shared are settings that all of them have."""

    folder: Path
    shared: Mapping[str, Any]

    def path(self, settings: Mapping[str, Any]) -> Path:
        return self.folder / f"{name_of({**self.shared, **settings})}.json"

    def read(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """A piece's numbers, or None where it is not done; what cannot be read is made again."""
        try:
            return json.loads(self.path(settings).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def write(self, settings: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        with replacing(self.path(settings)) as file:
            file.write(json.dumps(values).encode() + b"\n")
