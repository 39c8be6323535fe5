"""Policies that keep running means of frames that are gone, un-rotated, in float32."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from wan.errors import ConfigError
from wan.modules.key_layout import AVERAGE, STALE, Slot
from wan.modules.policies.base import WindowedPolicy

if TYPE_CHECKING:
    from wan.modules.kv_cache import KVCache

Pair = tuple[Tensor, Tensor]  # keys and values


def blend(old: Pair, new: Pair, weight: float) -> None:
    """old = weight old + (1 - weight) new, in place."""
    for x, y in zip(old, new, strict=True):
        x.mul_(weight).add_(y.float(), alpha=1 - weight)


def check_weight(policy: str, name: str, weight: float) -> None:
    if not 0 <= weight <= 1:
        raise ConfigError(f"cache_policy {policy}: {name} must be in 0..1, not {weight:g}")


@dataclass
class EmaSink(WindowedPolicy):
    """A sink that takes in what leaves: sink = alpha sink + (1 - alpha) evicted, slot by slot.

    Reward Forcing.

    The i-th frame that leaves goes to sink slot i modulo S. As released, the first slots are overwritten
    where the frames that leave are not as many as the sink, and block 0 sees unwritten sink slots as zeros.
    """

    window: int = 9
    sink: int = 3
    alpha: float = 0.999

    name = "ema_sink"
    releases = ("reward_forcing",)
    block_bound = ("reward_forcing",)
    stands_by_slot = True

    def validate(self) -> None:
        super().validate()
        check_weight(self.name, "alpha", self.alpha)
        if self.sink < 1:
            raise ConfigError("cache_policy ema_sink: sink must be at least 1 frame; a window has none")

    def capacity(self, num_frames: int, block_size: int) -> int:
        slots = min(self.window, num_frames)
        return max(slots, self.sink) if self.source else slots

    def state_frames(self) -> int:
        return self.sink

    def start(self, cache: "KVCache") -> None:
        self._sinks: list[Pair] = []  # per layer, float32 [B, sink·S, H, D]

    def admit(self, cache: "KVCache", block: range, cut: bool) -> None:
        super().admit(cache, block, cut)
        if self.source and block.start == 0 and len(cache.slots) < self.sink:
            cache.append_empty(self.sink - len(cache.slots))

    def evict(self, cache: "KVCache", excess: int) -> None:
        at = cache.tokens(0, self.sink)
        buffers = list(zip(cache.raw_keys, cache.values, strict=True))
        if not self._sinks:
            self._sinks = [(raw[:, at].float(), values[:, at].float()) for raw, values in buffers]
        overwritten = self.source and excess != self.sink
        count = min(excess, self.sink) if overwritten else excess
        for (raw, values), sink in zip(buffers, self._sinks, strict=True):
            for index in range(count):
                leaving = cache.tokens(self.sink + index, self.sink + index + 1)
                target = cache.tokens(index % self.sink, index % self.sink + 1)
                there = (sink[0][:, target], sink[1][:, target])
                blend(there, (raw[:, leaving], values[:, leaving]), 0.0 if overwritten else self.alpha)
            raw[:, at], values[:, at] = sink
        for index in range(count):
            frame = cache.slots[self.sink + index].frame if overwritten else AVERAGE
            cache.slots[index % self.sink] = Slot(frame, STALE)
        super().evict(cache, excess)


@dataclass
class TwoMemories(WindowedPolicy):
    """After the sink a long and a short running mean of the frames that left, one token all over. MemRoPE.

    The first roll puts the mean of what leaves into both, and the frames that stood there are lost.
    """

    window: int = 12
    sink: int = 3
    alpha_long: float = 0.01
    alpha_short: float = 0.1

    name = "two_memories"
    releases = ("memrope",)
    stands_by_slot = True

    def validate(self) -> None:
        super().validate()
        check_weight(self.name, "alpha_long", self.alpha_long)
        check_weight(self.name, "alpha_short", self.alpha_short)

    def reserved(self) -> int:
        return 2

    def start(self, cache: "KVCache") -> None:
        self._memories: list[tuple[Pair, Pair]] = []  # per layer long and short, float32 [B, 1, H, D]

    def flush(self, cache: "KVCache") -> None:
        if self._memories:
            cache.remove(self.sink, 2)
            self._memories = []
        super().flush(cache)

    def evict(self, cache: "KVCache", excess: int) -> None:
        first = self.sink + 2
        leaving = cache.tokens(first, first + excess)
        buffers = list(zip(cache.raw_keys, cache.values, strict=True))
        means = [tuple(x[:, leaving].float().mean(1, keepdim=True) for x in pair) for pair in buffers]
        if not self._memories:
            self._memories = [((k.clone(), v.clone()), (k.clone(), v.clone())) for k, v in means]
        else:
            for memories, (k, v) in zip(self._memories, means, strict=True):
                for memory, alpha in zip(memories, (self.alpha_long, self.alpha_short), strict=True):
                    blend(memory, (k, v), 1 - alpha)
        for pair, memories in zip(buffers, self._memories, strict=True):
            for index, memory in enumerate(memories, self.sink):
                for buffer, mean in zip(pair, memory, strict=True):
                    buffer[:, cache.tokens(index, index + 1)] = mean.to(buffer.dtype)
        cache.slots[self.sink : first] = [Slot(AVERAGE, STALE), Slot(AVERAGE, STALE)]
        cache.remove(first, excess)
