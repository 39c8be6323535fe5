"""Activations that were captured at named sites: a table of calls, and its safetensors file.

table = load_activations("cache/activations.safetensors")["z"]
table.at(layer=5, step=0).stack()       # a tensor, whose axes are table.axes
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from experiments.caches.files import CacheError, replacing
from wan.errors import reason_of
from wan.sites import SITES

FORMAT = "activations"
COORDINATES = ("layer", "block", "step", "branch")


@dataclass(frozen=True)
class Place:
    """Where an activation was: its layer (None for x_t, flow and x0), pass and frames."""

    layer: int | None
    block: int
    step: int
    frames: tuple[int, ...]
    is_clean_pass: bool
    timestep: float
    branch: str = "cond"


@dataclass(frozen=True, eq=False)
class Activations(Sequence[Tensor]):
    """The activations of one site, a tensor a call, and where each was."""

    site: str
    places: tuple[Place, ...]
    values: tuple[Tensor, ...]
    is_reduced: bool = False  # by a function of one's own: axes have no names then

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        return self.values[index]

    def at(self, **where: Any) -> "Activations":
        """Return the calls of a layer, block, step, is_clean_pass or branch: at(layer=5, step=0)."""
        # A misspelt name fails in getattr: 'Place' object has no attribute ...
        rows = [
            (place, value)
            for place, value in zip(self.places, self.values, strict=True)
            if all(getattr(place, name) == wanted for name, wanted in where.items())
        ]
        if not rows:
            raise CacheError(f"{self.site}: no call of {where} was captured")
        places, values = zip(*rows, strict=True)
        return Activations(self.site, places, values, self.is_reduced)

    @property
    def coordinates(self) -> dict[str, list[Any]]:
        """The layers, blocks, steps, and branches where there are two, of the calls."""
        found: dict[str, list[Any]] = {}
        for name in COORDINATES:
            values = {getattr(place, name) for place in self.places}
            if None not in values and (len(values) > 1 or name != "branch"):
                found[name] = sorted(values)
        return found

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes of stack()."""
        own = [str(n) for n in range(self.values[0].ndim)] if self.is_reduced else SITES[self.site].split()
        return (*self.coordinates, *own)

    def stack(self) -> Tensor:
        """Stack all calls to one tensor, whose axes have the names axes; CacheError where shapes differ."""
        table, found = self.coordinates, {}
        for place, value in zip(self.places, self.values, strict=True):
            found[tuple(getattr(place, name) for name in table)] = value
        # A tensor needs every combination of coordinates once, each of one shape
        keys, shapes = [*product(*table.values())], {tuple(value.shape) for value in self.values}
        if len(shapes) > 1 or len(found) < len(keys):
            raise CacheError(
                f"{self.site}: {len(found)} of {len(keys)} calls, of {len(shapes)} shapes, make no tensor; "
                "choose some by at(block=...)"
            )
        return torch.stack([found[key] for key in keys]).unflatten(0, [len(each) for each in table.values()])

    def __repr__(self) -> str:
        there = ", ".join(f"{name} {values}" for name, values in self.coordinates.items())
        shape = list(self.values[0].shape) if self.values else []
        return f"Activations: {self.site}, {len(self)} calls ({there}) of shape {shape}"


def save_activations(path: str | Path, tables: Mapping[str, Activations], about: Mapping[str, Any]) -> Path:
    """Write tables by site, whole or not at all, with facts about their run. CacheError where it cannot."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise CacheError(f"activations go into a .safetensors, and {path} does not end so")
    # A tensor a call; what safetensors has no type for goes into its metadata, as JSON
    tensors = {
        f"{site}/{n:06d}": x.cpu().contiguous() for site, table in tables.items() for n, x in enumerate(table)
    }
    sites = {
        site: {"places": [asdict(place) for place in table.places], "is_reduced": table.is_reduced}
        for site, table in tables.items()
    }
    metadata = {"format": FORMAT, "about": json.dumps(dict(about)), "sites": json.dumps(sites)}
    with replacing(path) as file:
        save_file(tensors, file.name, metadata)
    return path


def load_activations(path: str | Path) -> dict[str, Any]:
    """Read what save_activations wrote: format, facts about the run, and tables by site."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            found: dict[str, Any] = {"format": FORMAT, **json.loads(metadata["about"])}
            for site, table in json.loads(metadata["sites"]).items():
                places = tuple(Place(**{**one, "frames": tuple(one["frames"])}) for one in table["places"])
                values = tuple(file.get_tensor(f"{site}/{n:06d}") for n in range(len(places)))
                found[site] = Activations(site, places, values, bool(table["is_reduced"]))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(
            f"{path} cannot be read as activations: {reason_of(error)}; capture them again"
        ) from None
    return found


def joined(tables: Iterator[Mapping[str, Any]]) -> dict[str, Activations]:
    """Return tables of several files as one of each site."""
    found: dict[str, Activations] = {}
    # Calls of later files follow those of earlier ones, site by site
    for table in tables:
        for site, part in table.items():
            if isinstance(part, Activations):
                before = found.get(site, Activations(site, (), (), part.is_reduced))
                both = before.places + part.places, before.values + part.values
                found[site] = Activations(site, *both, part.is_reduced)
    return found
