"""Pieces of a study, each in a JSON file named by the hash of all that its numbers depend on."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.caches.files import replacing
from experiments.running.work_items import item_name


@dataclass(frozen=True)
class WorkItems:
    """The pieces of one study in a folder; shared are settings that all of them have."""

    folder: Path
    shared: Mapping[str, Any]

    def path(self, settings: Mapping[str, Any]) -> Path:
        return self.folder / f"{item_name({**self.shared, **settings})}.json"

    def holds(self, name: str) -> bool:
        """Whether a piece of this name is done."""
        return (self.folder / f"{name}.json").is_file()

    def read(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """A piece's numbers, or None where it is not done; what cannot be read is made again."""
        try:
            return json.loads(self.path(settings).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def write(self, settings: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        with replacing(self.path(settings)) as file:
            file.write(json.dumps(values).encode() + b"\n")
