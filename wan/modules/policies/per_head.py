"""A policy for each class of heads: heads of one class share a cache of their own."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from os.path import isfile
from typing import Any, ClassVar

from wan.errors import ConfigError, named, quoted
from wan.limits import CONFIG_BYTES
from wan.modules.policies.base import CachePolicy
from wan.text_files import read_text

Labels = tuple[tuple[str, ...], ...]  # of every layer and head


@dataclass
class PerHead(CachePolicy):
    """file: a CSV of classes, layers x heads. policies: a policy for each class.

    All have the same query positions. Pyramid Forcing, Forcing-KV, Dummy Forcing.
    """

    file: str = ""
    policies: dict[str, CachePolicy] = field(default_factory=dict)

    name: ClassVar[str] = "per_head"
    can_recache: ClassVar[bool] = False

    def validate(self) -> None:
        if self.released:
            raise ConfigError("cache_policy per_head has no released variant; leave released out")
        if not self.file or not self.policies:
            raise ConfigError("cache_policy per_head needs a file of head classes and policies for them")
        self.labels = read_labels(self.file)
        self.classes = self.policies
        missing = sorted({label for row in self.labels for label in row} - set(self.classes))
        if missing:
            known = ", ".join(self.classes)
            raise ConfigError(
                f"cache_policy per_head: class {quoted(missing[0])} of {self.file} has no policy: {known}"
            )
        self._check_positions()

    def _check_positions(self) -> None:
        """All classes put the queries at the same positions."""
        by_slot = {
            label: policy.num_frames for label, policy in self.classes.items() if policy.stands_by_slot
        }
        if by_slot and (len(by_slot) < len(self.classes) or len(set(by_slot.values())) > 1):
            raise ConfigError(
                "cache_policy per_head: the classes put queries at different positions; policies whose "
                "keys stand "
                f"at 0..n-1 ({', '.join(by_slot)}) go together only, and with one window"
            )
        for label, policy in self.classes.items():
            if policy.source:
                raise ConfigError(
                    f"cache_policy per_head: class {label!r} is released; only clean rules go here"
                )

    def describe(self) -> dict[str, Any]:
        classes = {label: policy.describe() for label, policy in self.policies.items()}
        return {"name": self.name, "file": self.file, "policies": classes}

    def check(self, block_sizes: Sequence[int]) -> None:
        for policy in self.classes.values():
            policy.check(block_sizes)

    def check_flush(self) -> None:
        sinks = {getattr(one, "sink", 0) for one in self.classes.values() if one.stands_by_slot}
        if len(sinks) > 1:
            raise ConfigError(
                "cache_policy per_head: a flush leaves the sink and two frames, and queries behind sinks of "
                f"{', '.join(map(str, sorted(sinks)))} frames would stand at different positions; use keep, "
                "or one sink"
            )

    def check_model(self, num_layers: int, num_heads: int) -> None:
        """Raise ConfigError where the labels are not of this model."""
        shape = (len(self.labels), len(self.labels[0]))
        if shape != (num_layers, num_heads):
            raise ConfigError(
                f"cache_policy per_head: {self.file} has {shape[0]} layers x {shape[1]} heads, "
                f"the model {num_layers} x {num_heads}"
            )

    def heads(self, label: str) -> list[list[int]]:
        """The heads of a class in every layer."""
        return [[head for head, other in enumerate(row) if other == label] for row in self.labels]

    @property
    def chooses_by_layer(self) -> bool:
        return any(policy.chooses_by_layer for policy in self.classes.values())

    @property
    def num_frames(self) -> int | None:
        seen = [policy.num_frames for policy in self.classes.values()]
        return None if None in seen else max(size for size in seen if size is not None)

    def capacity(self, num_frames: int, block_size: int) -> int:
        """Of the mean head, rounded up."""
        return self._mean([policy.capacity(num_frames, block_size) for policy in self.classes.values()])

    def raw_slots(self, capacity: int) -> int:
        return capacity if any(policy.raw_slots(capacity) for policy in self.classes.values()) else 0

    def state_frames(self) -> int:
        return max(policy.state_frames() for policy in self.classes.values())

    def _mean(self, sizes: Sequence[int]) -> int:
        counts = [sum(row.count(label) for row in self.labels) for label in self.classes]
        total = sum(len(row) for row in self.labels)
        return -(-sum(n * size for n, size in zip(counts, sizes, strict=True)) // total)


def read_labels(file: str) -> Labels:
    """Classes of layers x heads from a CSV: one row a layer, or rows of layer, head,
    class under such a header.
    """
    if not isfile(file):
        said = f"cache_policy per_head: {named(file)} not found"
        raise ConfigError(f"{said}; it is a CSV of classes, layers x heads")
    lines = (line for line in read_text(file, CONFIG_BYTES).splitlines() if not line.startswith("#"))
    try:
        rows = [row for row in csv.reader(lines) if row]
    except csv.Error as error:
        raise ConfigError(f"cache_policy per_head: {file} is not a CSV of classes: {error}") from None
    if not rows:
        raise ConfigError(f"cache_policy per_head: {file} is empty")
    if "layer" in rows[0] and "head" in rows[0]:
        rows = _from_columns(rows, file)
    if len({len(row) for row in rows}) != 1:
        raise ConfigError(f"cache_policy per_head: the rows of {file} have different numbers of heads")
    return tuple(tuple(label.strip() for label in row) for row in rows)


def _from_columns(rows: list[list[str]], file: str) -> list[list[str]]:
    layer, head = rows[0].index("layer"), rows[0].index("head")
    label = next((i for i in range(len(rows[0])) if i not in (layer, head)), None)
    if label is None:
        raise ConfigError(f"cache_policy per_head: {file} has no column of classes beside layer and head")
    try:
        found = {(int(row[layer]), int(row[head])): row[label] for row in rows[1:]}
        layers, heads = (max(index) + 1 for index in zip(*found, strict=True))
        return [[found[i, j] for j in range(heads)] for i in range(layers)]
    except (ValueError, IndexError, KeyError) as error:
        raise ConfigError(
            f"cache_policy per_head: {file} does not name every layer and head: {named(error)}"
        ) from None
