"""The cache of a rollout whose heads are of several classes, each with a policy and buffers of its own."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wan.errors import ConfigError
from wan.modules.head_groups import HeadGroup
from wan.modules.head_shard import HeadShard
from wan.modules.host_copies import send
from wan.modules.kv_cache import KVCache
from wan.modules.policies.base import CachePolicy
from wan.modules.policies.per_head import PerHead

Text = Sequence[tuple[Tensor, Tensor]]


class _Part(NamedTuple):
    """The cache of a class of heads, and these heads in every layer."""

    cache: KVCache
    in_model: list[list[int]]  # also those of other processes
    numbers: list[tuple[int, ...]]  # among the heads that are here
    here: list[Tensor]  # these numbers on the device


class PerHeadCache:
    """A KVCache for each class of heads; what a KVCache offers the pipeline and the model,
    this one does too.
    """

    def __init__(
        self,
        policy: PerHead,
        build: Callable[[Sequence[int], CachePolicy], KVCache],
        device: torch.device,
        shard: HeadShard,
    ):
        """build makes the cache of a class from its numbers of heads per layer and its policy.

        A class has a cache in every process of a sharded model, also where none of its heads are.
        """
        self.policy = policy
        self._parts: list[_Part] = []
        for label, of_class in policy.classes.items():
            heads = policy.heads(label)
            if any(heads):
                numbers = [tuple(shard.local(row)) for row in heads]
                here = [send(torch.tensor(row, dtype=torch.long), device) for row in numbers]
                cache = build([len(row) for row in here], of_class)
                self._parts.append(_Part(cache, heads, numbers, here))

    @property
    def caches(self) -> list[KVCache]:
        return [part.cache for part in self._parts]

    @property
    def newest(self) -> range:
        return self.caches[0].newest

    @property
    def stores_raw(self) -> bool:
        return any(cache.stores_raw for cache in self.caches)

    @property
    def query_positions(self) -> Sequence[int]:
        return self.caches[0].query_positions

    @property
    def key_positions(self) -> Sequence[int]:
        return self.caches[0].key_positions

    def advance(self, block: range, text: Text = (), cut: bool = False) -> None:
        """Make room for the next block in every class."""
        for part in self._parts:
            rows = zip(text, part.here, strict=False)
            part.cache.advance(block, [(k[:, :, row], v[:, :, row]) for (k, v), row in rows], cut)
        positions = {tuple(cache.query_positions) for cache in self.caches}
        if len(positions) > 1:
            raise ConfigError(f"cache_policy per_head: classes put the queries at {sorted(positions)}")

    def flush(self) -> None:
        for cache in self.caches:
            cache.flush()

    def recache(self, frames: range, text: Text, lasts: bool = True) -> None:
        raise ConfigError("cache_policy per_head cannot compute its cache again; use keep or flush")

    def begin_pass(self, is_clean: bool) -> None:
        for cache in self.caches:
            cache.begin_pass(is_clean)

    def write(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_k: Tensor | None = None
    ) -> list[HeadGroup]:
        """Store the newest block's keys and values [B, L, H, D] -> what each class of heads sees."""
        groups = []
        for cache, in_model, numbers, here in self._parts:
            if not in_model[layer]:
                continue
            row = here[layer]
            raw = raw_k[:, :, row] if raw_k is not None and cache.stores_raw else None
            queries = q[:, :, row]
            keys, values = cache.write(layer, queries, k[:, :, row], v[:, :, row], raw)
            if len(row):
                groups.append(HeadGroup(numbers[layer], row, queries, keys, values, cache.layouts[layer]))
        return groups
