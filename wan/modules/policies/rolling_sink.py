"""Rolling Sink: late blocks see the first frames of the video again, forwards and backwards,
as if they were recent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from wan.errors import ConfigError
from wan.modules.key_layout import Slot
from wan.modules.policies.base import WindowedPolicy
from wan.modules.rope import rotate_into

if TYPE_CHECKING:
    from wan.modules.kv_cache import KVCache


@dataclass
class RollingSink(WindowedPolicy):
    """A window without a sink, in which the block before a finished one gives way to frames of the first W
    - n.

    n is the size of a block. The slot at position p takes the clean keys and values of frame p modulo (W -
    n), counted backwards in every second round, the keys turned to p.
    """

    name = "rolling_sink"
    releases = ("rolling_sink",)
    block_bound = ("rolling_sink",)
    can_recache = False

    def validate(self) -> None:
        super().validate()
        if self.sink:
            raise ConfigError("cache_policy rolling_sink has no sink; leave it out or set it to 0")

    def check(self, block_sizes: Sequence[int]) -> None:
        super().check(block_sizes)
        self._kept = self.window - max(block_sizes)
        if self.window < 2 * max(block_sizes):
            raise ConfigError(
                f"cache_policy rolling_sink: window {self.window} cannot hold two blocks of "
                f"{max(block_sizes)}; "
                f"it must be at least {2 * max(block_sizes)}"
            )

    def capacity(self, num_frames: int, block_size: int) -> int:
        self._kept = self.window - block_size
        return super().capacity(num_frames, block_size)

    def raw_slots(self, capacity: int) -> int:
        return min(self._kept, capacity)  # they are filled once, by the first frames, and never move

    def raw_places(self, cache: "KVCache", layer: int) -> range:
        return cache.newest  # the first frames keep their places where a flush moves slots

    def state_frames(self) -> int:
        return self.window  # values of the first frames; their raw keys are counted by the cache

    def start(self, cache: "KVCache") -> None:
        self._values: list[Tensor] = [x.new_empty(x.shape) for x in cache.values] if cache.raw_keys else []
        self._values = [x[:, : cache.raw_slots * cache.tokens_per_frame] for x in self._values]

    def make_room(self, cache: "KVCache", new: int) -> None:
        self._finish(cache)
        super().make_room(cache, new)

    def flush(self, cache: "KVCache") -> None:
        self._finish(cache)
        super().flush(cache)

    def archived(self, position: int) -> int:
        """The frame whose keys and values stand at a late position."""
        turn, place = divmod(position, self._kept)
        return self._kept - 1 - place if turn % 2 else place

    def _finish(self, cache: "KVCache") -> None:
        """After the clean pass of a block: remember the first frames, or replace the block before it."""
        for index, frame in zip(cache.own, cache.newest, strict=True):
            if frame < self._kept:
                for kept, values in zip(self._values, cache.values, strict=True):
                    kept[:, cache.tokens(frame, frame + 1)] = values[:, cache.tokens(index, index + 1)]
        if cache.newest.start < self.window:
            return
        for index in range(max(0, cache.own.start - len(cache.own)), cache.own.start):
            self._replace(cache, index)

    def _replace(self, cache: "KVCache", index: int) -> None:
        position = cache.slots[index].position
        frame = self.archived(position)
        source, target = cache.tokens(frame, frame + 1), cache.tokens(index, index + 1)
        assert cache.rope is not None
        cos, sin = cache.rope(range(position, position + 1))
        for layer, kept in enumerate(self._values):
            rotate_into(cache.keys[layer][:, target], cache.raw_keys[layer][:, source], cos, sin)
            cache.values[layer][:, target] = kept[:, source]
        cache.slots[index] = Slot(frame, position)
