"""Policies that keep whole frames as they are:
all of them, a window, a window with other temporal positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from wan.errors import ConfigError
from wan.modules.key_layout import Slot
from wan.modules.policies.base import CachePolicy, WindowedPolicy

if TYPE_CHECKING:
    from wan.modules.kv_cache import KVCache

LONGLIVE = ("longlive", "longlive_infinity")


@dataclass
class Full(CachePolicy):
    """Everything stays. Self-Forcing, arXiv 2506.08009."""

    name = "full"
    keeps_whole_frames = True


class LongLiveSink:
    """LongLive's release: only the first pass of a block writes sink slots,
    and block 0 sees unwritten ones as zeros.

    Passes 1-4 of a later block leave its frames in the sink as pass 0 wrote them, at t = 1000.
    """

    source: str
    sink: int
    _written: list[bool]

    def start(self, cache: "KVCache") -> None:
        self._written = [False] * cache.num_layers

    def admit(self, cache: "KVCache", block: range, cut: bool) -> None:
        self._written = [False] * cache.num_layers
        super().admit(cache, block, cut)  # type: ignore[misc]
        if self.source in LONGLIVE and block.start == 0 and len(cache.slots) < self.sink:
            cache.append_empty(self.sink - len(cache.slots))

    def unwritten(self, cache: "KVCache", layer: int) -> int:
        if not self._written[layer] or self.source not in LONGLIVE or cache.newest.start == 0:
            return 0
        return min(max(0, self.sink - cache.own.start), len(cache.own))

    def written(self, cache: "KVCache", layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        self._written[layer] = True
        return super().written(cache, layer, q)  # type: ignore[misc]


@dataclass
class Window(LongLiveSink, WindowedPolicy):
    """The first S and the newest W - S frames stay, at their own positions.

    Self-Forcing; LongLive, arXiv 2509.22622.

    With global_sink the sink outlives a recache. With a stride (in a class of per_head) only every stride-th
    frame of the past stays.
    """

    global_sink: bool = False
    stride: int = 1

    name = "window"
    keeps_whole_frames = True
    releases = ("self_forcing", "longlive")
    block_bound = ("longlive",)

    @property
    def lasting_sink(self) -> int:
        return self.sink if self.global_sink else 0

    def validate(self) -> None:
        super().validate()
        if self.stride < 1:
            raise ConfigError(f"cache_policy window: stride must be at least 1, not {self.stride}")

    def capacity(self, num_frames: int, block_size: int) -> int:
        slots = min(self.window, num_frames)
        return max(slots, self.sink) if self.source == "longlive" else slots

    def make_room(self, cache: "KVCache", new: int) -> None:
        if self.stride > 1:
            for index in reversed(cache.own):
                if index >= self.sink and cache.slots[index].frame % self.stride:
                    cache.remove(index, 1)
        super().make_room(cache, new)


@dataclass
class Relative(LongLiveSink, WindowedPolicy):
    """The frames of a window, their keys at 0..n-1 and the queries at the last of them.

    Infinity-RoPE, LongLive.

    As Infinity-RoPE releases it, queries stand at their frames until those reach W, and slot 0 is never
    rotated: frame 0's key was stored rotated, and without a sink another one stands there without RoPE.
    """

    name = "relative"
    keeps_whole_frames = True
    releases = ("infinity_rope", "longlive_infinity")
    block_bound = ("infinity_rope", "longlive_infinity")
    stands_by_slot = True

    def capacity(self, num_frames: int, block_size: int) -> int:
        slots = min(self.window, num_frames)
        return max(slots, self.sink) if self.source == "longlive_infinity" else slots

    def place(self, cache: "KVCache", cut: bool) -> None:
        super().place(cache, cut)
        first = cache.slots[0]
        if self.source == "infinity_rope" and self.sink == 0 and first.frame != 0 and 0 not in cache.own:
            cache.slots[0] = Slot(first.frame, 0, is_rotated=False)
            tokens = cache.tokens(0, 1)
            for keys, raw in zip(cache.keys, cache.raw_keys, strict=True):
                keys[:, tokens] = raw[:, tokens]

    def query_positions(self, cache: "KVCache") -> Sequence[int]:
        at = self.key_positions(cache)
        is_cut = at[0] > len(cache.slots)
        late = cache.newest.start >= self.window
        return at if self.source != "infinity_rope" or late or is_cut else cache.newest


@dataclass
class DeepSink(WindowedPolicy):
    """A window whose sink stands right before the tail. Deep Forcing, arXiv 2512.05081.

    As released, the first roll does not rotate the sink and later ones turn it by as much as the window moves
    on, so that it trails at the distance of the first eviction.
    """

    name = "deep_sink"
    keeps_whole_frames = True
    releases = ("deep_forcing",)
    block_bound = ("deep_forcing",)

    def raw_slots(self, capacity: int) -> int:
        return min(self.sink, capacity)

    def start(self, cache: "KVCache") -> None:
        self._first_roll: int | None = None
        self._rolled = False

    def make_room(self, cache: "KVCache", new: int) -> None:
        self._rolled = False
        super().make_room(cache, new)

    def evict(self, cache: "KVCache", excess: int) -> None:
        super().evict(cache, excess)
        self._rolled = True

    def place(self, cache: "KVCache", cut: bool) -> None:
        sink = min(self.sink, len(cache.slots))
        if self.source:
            if not self._rolled:
                return
            if self._first_roll is None:
                self._first_roll = cache.newest.start
            first = cache.newest.start - self._first_roll
        elif len(cache.slots) <= sink:
            return
        else:
            first = cache.slots[sink].frame - sink
        cache.stand(range(first, first + sink))
