"""Cache policies: what a block may look at, and what a change of prompts does to the cache.

Each class is a policy of a publication. The face that they share is CachePolicy in wan/cache.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, get_args, get_origin

import torch
from torch import Tensor

from wan.cache import (
    FLUSH_KEEPS,
    NEEDS_ROTATION,
    AnyCache,
    CachePolicy,
    Capacity,
    HeadClass,
    KVCache,
    PerHeadCache,
    rotate_into,
)
from wan.errors import ConfigError, require_text, short_repr
from wan.files import MAX_FRAMES, MAX_TEXT
from wan.headwise import DummyForcing, ForcingKV, HeadBudget, TriAttention, read_columns
from wan.keys import AVERAGE, CHOSEN, MIXED, ChosenTokens, HeadShard, Slot, send

Pair = tuple[Tensor, Tensor]  # keys and values


@dataclass
class Full(CachePolicy):
    """Keep everything. Self-Forcing, arXiv 2506.08009."""

    name = "full"
    keeps_whole_frames = True


@dataclass
class WindowedPolicy(CachePolicy):
    """A window of W frames, the first S of them a sink: the oldest after the sink leave."""

    window: int = 21
    sink: int = 0

    bounds: ClassVar = {"sink": (0, MAX_FRAMES)}
    reserved: ClassVar[int] = 0  # slots of the window that are neither sink nor recent frames
    least_blocks: ClassVar[int] = 1  # that a window holds
    zero_sink: ClassVar[tuple[str, ...]] = ()  # releases whose block 0 sees a whole sink, the rest zeros

    @property
    def num_frames(self) -> int | None:
        return self.window

    def check(self, block_sizes: Sequence[int] = ()) -> None:
        super().check(block_sizes)
        least = self.sink + self.reserved + self.least_blocks * max(block_sizes, default=1)
        self.require(self.window >= least, f"window {self.window} is too small; it must be at least {least}")

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        slots = min(self.window, num_frames)
        if self.source in self.zero_sink:
            slots = max(slots, self.sink)
        return Capacity(slots, slots if self.positions_follow_slots else 0)

    def admit(self, cache: KVCache, block: range) -> None:
        excess = len(cache.slots) + len(block) - self.window
        if excess > 0:
            self.evict(cache, excess)
        cache.append(block)
        if self.source in self.zero_sink and block.start == 0 and len(cache.slots) < self.sink:
            cache.append_empty(self.sink - len(cache.slots))

    def evict(self, cache: KVCache, count: int) -> None:
        """Let count frames leave."""
        cache.drop(self.sink, count)


@dataclass
class LongLiveSink(WindowedPolicy):
    """As LongLive releases it, only the first pass of a block writes sink slots.

    Later passes leave frames of later blocks in the sink as pass 0 wrote them, at t = 1000.
    """

    def start(self, cache: KVCache) -> None:
        self._is_written = [False] * cache.num_layers

    def admit(self, cache: KVCache, block: range) -> None:
        self._is_written = [False] * cache.num_layers
        super().admit(cache, block)

    def own_slots(self, cache: KVCache, layer: int) -> range:
        own = cache.own
        if not self._is_written[layer] or self.source not in self.zero_sink or cache.newest.start == 0:
            return own
        return range(max(own.start, min(self.sink, own.stop)), own.stop)

    def written(self, cache: KVCache, layer: int, q: Tensor) -> Pair:
        self._is_written[layer] = True
        return cache.view(layer)


@dataclass
class Window(LongLiveSink):
    """Keep the first S and the newest W - S frames, at their own positions.

    Self-Forcing; LongLive, arXiv 2509.22622. With global_sink the sink outlives a recache. With a stride only
    every stride-th frame of the past stays.
    """

    global_sink: bool = False
    stride: int = 1

    name = "window"
    keeps_whole_frames = True
    bounds = WindowedPolicy.bounds | {"stride": (1, MAX_FRAMES)}
    releases = ("self_forcing", "longlive")
    block_bound = zero_sink = ("longlive",)

    @property
    def lasting_sink(self) -> int:
        return self.sink if self.global_sink else 0

    def admit(self, cache: KVCache, block: range) -> None:
        if self.stride > 1:
            for index in reversed(cache.own):  # the slots of the block before
                if index >= self.sink and cache.slots[index].frame % self.stride:
                    cache.drop(index, 1)
        super().admit(cache, block)


@dataclass
class Relative(LongLiveSink):
    """Keep the frames of a window, their keys at 0..n-1 and the queries at the last of them.

    Infinity-RoPE, LongLive. As Infinity-RoPE releases it, queries stand at their frames until those reach W,
    and slot 0 is never rotated: frame 0's key was stored rotated, and without a sink another one stands there
    without RoPE.
    """

    name = "relative"
    keeps_whole_frames = True
    releases = block_bound = ("infinity_rope", "longlive_infinity")
    zero_sink = ("longlive_infinity",)
    positions_follow_slots = True

    def check_switch(self, how: str, frame: int) -> None:
        super().check_switch(how, frame)
        fits = how != "cut" or self.source != "longlive_infinity" or frame >= self.sink
        self.require(fits, f"no raw keys of the sink; cut after its {self.sink} frames, or use flush")

    def query_positions(self, cache: KVCache) -> Sequence[int]:
        at = cache.key_positions
        is_cut, is_late = at[0] > len(cache.slots), cache.newest.start >= self.window
        return at if self.source != "infinity_rope" or is_late or is_cut else cache.newest

    def admit(self, cache: KVCache, block: range) -> None:
        super().admit(cache, block)
        first = cache.slots[0]
        if self.source == "infinity_rope" and self.sink == 0 and first.frame != 0 and 0 not in cache.own:
            cache.slots[0] = Slot(first.frame, 0, is_rotated=False)
            tokens = cache.tokens(0)
            for keys, raw in zip(cache.keys, cache.raw_keys, strict=True):
                keys[:, tokens] = raw[:, tokens]


@dataclass
class DeepSink(WindowedPolicy):
    """Put the sink of a window right before its tail. Deep Forcing, arXiv 2512.05081.

    As released, the first roll does not rotate the sink and later ones turn it by as much as the window moves
    on, so that it trails at the distance of the first eviction.
    """

    name = "deep_sink"
    keeps_whole_frames = True
    releases = block_bound = ("deep_forcing",)

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        slots = min(self.window, num_frames)
        return Capacity(slots, min(self.sink, slots))

    def start(self, cache: KVCache) -> None:
        self._first_roll: int | None = None
        self._rolls = False

    def admit(self, cache: KVCache, block: range) -> None:
        self._rolls = len(cache.slots) + len(block) > self.window
        if self._rolls and self._first_roll is None:
            self._first_roll = block.start
        super().admit(cache, block)

    def positions(self, cache: KVCache, cut: bool) -> Sequence[int]:
        now, sink = super().positions(cache, cut), self.sink
        if len(now) <= sink or (self.source and not self._rolls):
            return now
        first = cache.slots[sink].frame - sink
        if self.source:
            first = cache.newest.start - (self._first_roll or 0)
        return [*range(first, first + sink), *now[sink:]]


@dataclass
class RollingSink(WindowedPolicy):
    """Show late blocks the first frames of the video again, forwards and backwards.

    https://github.com/Rolling-Sink/Rolling-Sink: a window without a sink, in which the block before a
    finished one gives way to frames of the first W - n, n the size of a block. The slot at position p takes
    the clean keys and values of frame p modulo (W - n), counted backwards in every second round, the keys
    turned to p.
    """

    name = "rolling_sink"
    releases = block_bound = ("rolling_sink",)
    can_recache = False
    bounds: ClassVar = {"sink": (0, 0)}
    least_blocks = 2
    raw_by_frame = True  # of the first frames, which keep their places where a flush moves slots

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        self._kept = self.window - block_size
        slots = min(self.window, num_frames)
        kept = min(self._kept, slots)
        return Capacity(slots, kept, -(-kept // 2))  # of the first frames the values alone

    def start(self, cache: KVCache) -> None:
        self._values = [torch.empty_like(raw) for raw in cache.raw_keys]  # of the first frames, in order

    def admit(self, cache: KVCache, block: range) -> None:
        self._finish(cache)
        super().admit(cache, block)

    def flush(self, cache: KVCache) -> None:
        self._finish(cache)
        super().flush(cache)

    def _finish(self, cache: KVCache) -> None:
        """After the clean pass of a block, remember the first frames, or replace the block before it."""
        for index, frame in zip(cache.own, cache.newest, strict=True):
            if frame < self._kept:
                for kept, values in zip(self._values, cache.values, strict=True):
                    kept[:, cache.tokens(frame)] = values[:, cache.tokens(index)]
        if cache.newest.start < self.window:
            return
        for index in range(max(0, cache.own.start - len(cache.own)), cache.own.start):
            position = cache.slots[index].position
            turn, place = divmod(position, self._kept)
            frame = self._kept - 1 - place if turn % 2 else place
            source, target = cache.tokens(frame), cache.tokens(index)
            tables = cache.rope(range(position, position + 1))
            for layer, kept in enumerate(self._values):
                rotate_into(cache.keys[layer][:, target], cache.raw_keys[layer][:, source], *tables)
                cache.values[layer][:, target] = kept[:, source]
            cache.slots[index] = Slot(frame, position)


def blend(old: Tensor, new: Tensor, weight: float) -> None:
    """Compute old = weight old + (1 - weight) new, in place."""
    old.mul_(weight).add_(new.float(), alpha=1 - weight)


@dataclass
class EmaSink(WindowedPolicy):
    """Let the sink take in what leaves: sink = alpha sink + (1 - alpha) evicted. Reward Forcing.

    The i-th frame that leaves goes to sink slot i modulo S. As released, the first slots are overwritten
    where the frames that leave are not as many as the sink, and block 0 sees unwritten sink slots as zeros.
    """

    window: int = 9
    sink: int = 3
    alpha: float = 0.999

    name = "ema_sink"
    bounds: ClassVar = {"sink": (1, MAX_FRAMES), "alpha": (0, 1)}
    releases = block_bound = zero_sink = ("reward_forcing",)
    positions_follow_slots = True

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        return super().capacity(num_frames, block_size)._replace(state_frames=self.sink)

    def start(self, cache: KVCache) -> None:
        self._sinks: list[Tensor] = []  # of raw keys and values per layer, float32 [B, sink·S, H, D]

    def evict(self, cache: KVCache, count: int) -> None:
        at, buffers = cache.tokens(range(self.sink)), [*cache.raw_keys, *cache.values]
        self._sinks = self._sinks or [buffer[:, at].float() for buffer in buffers]
        overwrites = self.source and count != self.sink
        taken = range(min(count, self.sink) if overwrites else count)
        for buffer, sink in zip(buffers, self._sinks, strict=True):
            for index in taken:
                leaving = buffer[:, cache.tokens(self.sink + index)]
                blend(sink[:, cache.tokens(index % self.sink)], leaving, 0.0 if overwrites else self.alpha)
            buffer[:, at] = sink
        for index in taken:
            frame = cache.slots[self.sink + index].frame if overwrites else AVERAGE
            cache.slots[index % self.sink] = Slot(frame, NEEDS_ROTATION)
        super().evict(cache, count)


@dataclass
class TwoMemories(WindowedPolicy):
    """Put a long and a short running mean of the frames that left behind the sink. MemRoPE.

    A mean is of all tokens, the same one all over its frame. The first roll puts the mean of what leaves into
    both, and the frames that stood there are lost.
    """

    window: int = 12
    sink: int = 3
    alpha_long: float = 0.01
    alpha_short: float = 0.1

    name = "two_memories"
    bounds = WindowedPolicy.bounds | {"alpha_long": (0, 1), "alpha_short": (0, 1)}
    releases = ("memrope",)
    positions_follow_slots = True
    reserved = 2

    def start(self, cache: KVCache) -> None:
        self._memories: list[tuple[Tensor, Tensor]] = []  # long and short, float32 [B, 1, H, D]

    def flush(self, cache: KVCache) -> None:
        if self._memories:
            cache.drop(self.sink, 2)
            self._memories = []
        super().flush(cache)

    def evict(self, cache: KVCache, count: int) -> None:
        first, buffers = self.sink + 2, [*cache.raw_keys, *cache.values]
        leaving = cache.tokens(range(first, first + count))
        means = [buffer[:, leaving].float().mean(1, keepdim=True) for buffer in buffers]
        if not self._memories:
            self._memories = [(mean.clone(), mean.clone()) for mean in means]
        else:
            for (long, short), mean in zip(self._memories, means, strict=True):
                blend(long, mean, 1 - self.alpha_long)
                blend(short, mean, 1 - self.alpha_short)
        for buffer, memories in zip(buffers, self._memories, strict=True):
            for index, memory in enumerate(memories, self.sink):
                buffer[:, cache.tokens(index)] = memory.to(buffer.dtype)
        cache.slots[self.sink : first] = [Slot(AVERAGE, NEEDS_ROTATION)] * 2
        cache.drop(first, count)


@dataclass
class MemoryBank(WindowedPolicy):
    """Keep [sink, bank, local], at their frames' positions. W counts sink and local, the bank comes on top.

    MemFlow. Before block b the first frame of block b - 1 is the candidate. The bank grows by one slot every
    interval blocks, and the candidate overwrites its newest. Once it is full the best of its frames stay,
    best first, then the candidate. The score is the mean over heads, text tokens and the frame's tokens of
    cross-attention key · key. A frame of the bank that is in the window too counts twice, so that even a
    window as large as the video is not the whole past.
    """

    window: int = 12
    sink: int = 3
    bank: int = 3
    interval: int = 3

    name = "memory_bank"
    bounds = WindowedPolicy.bounds | {"bank": (1, MAX_FRAMES), "interval": (1, MAX_FRAMES)}
    releases = block_bound = ("memflow",)
    chooses_by_layer = True
    can_recache = False

    @property
    def num_frames(self) -> int | None:
        return self.window + self.bank

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        return Capacity(self.most_slots(num_frames))

    def most_slots(self, frames: int) -> int:
        return min(frames, self.window) + self.bank  # a banked frame may lie in the window, too

    def start(self, cache: KVCache) -> None:
        self._blocks = 0
        self._at = 0  # the bank's first slot
        self._frames: list[list[list[int]]] = [[] for _ in cache.keys]  # per layer and batch item

    @property
    def banked(self) -> int:
        """Slots of the bank so far."""
        return len(self._frames[0][0]) if self._frames[0] else 0

    def admit(self, cache: KVCache, block: range) -> None:
        bank = range(self._at, self._at + self.banked)
        frames = [index for index in range(len(cache.slots)) if index not in bank]  # in order of time
        excess = max(0, len(frames) + len(block) - self.window)
        self._at = min(self.sink, len(frames))
        banked: list[int] = []
        if self._blocks:  # the first frame of the block before comes into the bank
            wanted = (self._blocks - 1) // self.interval + 1
            if wanted > self.bank:
                self._sort_bank(cache, bank)
            kept = min(wanted, self.bank) - 1
            banked = [*bank[:kept], cache.own.start]
            for layer, of_items in enumerate(self._frames):
                of_items = of_items or [[]] * len(cache.keys[layer])
                self._frames[layer] = [[*of_item[:kept], cache.newest.start] for of_item in of_items]
        self._blocks += 1
        cache.keep([*frames[: self._at], *banked, *frames[self._at + excess :]])
        cache.append(block)

    def flush(self, cache: KVCache) -> None:
        cache.drop(self._at, self.banked)
        self.start(cache)
        super().flush(cache)

    def of_layer(self, cache: KVCache, layer: int) -> tuple[Sequence[Slot], None]:
        slots = list(cache.slots)
        for index in range(self.banked):
            chosen = tuple(frames[index] for frames in self._frames[layer])
            slots[self._at + index] = Slot(chosen[0], chosen[0], items=chosen)
        return slots, None

    def _sort_bank(self, cache: KVCache, bank: range) -> None:
        """Order the slots of the bank by score, best first, in every layer and batch item."""
        where = cache.tokens(bank)
        found = []
        for (text, _), keys in zip(cache.text, cache.keys, strict=True):
            frames = keys[:, where].unflatten(1, (len(bank), -1))  # [B, bank, S, H, D]
            means = text.float().mean(1), frames.mean(2, dtype=torch.float32)
            found.append(torch.einsum("bhd,bfhd->bf", *means))
        scores = cache.shard.sum(torch.stack(found))  # [layers, B, bank]
        best = scores.argsort(dim=2, descending=True, stable=True)  # ties: lower index
        for buffers in (cache.keys, cache.values):
            for buffer, order in zip(buffers, best, strict=True):
                slots = buffer[:, where].unflatten(1, (len(bank), -1))  # [B, bank, S, H, D]
                buffer[:, where] = slots.take_along_dim(order[:, :, None, None, None], 1).flatten(1, 2)
        for layer, orders in enumerate(best.tolist()):  # one wait for the device
            pairs = zip(self._frames[layer], orders, strict=True)
            self._frames[layer] = [[frames[i] for i in order] for frames, order in pairs]


@dataclass
class Participative(WindowedPolicy):
    """Compress to N frames when a block would make more than W, in its first pass, in every layer on its own.

    The sink (S) and the last R frames stay. Of the tokens between them those with the highest score stay, in
    order of time: the sum over the queries of the last R frames and all heads of q·k, where they stand,
    without softmax. The sink then stands right before the positions of the chosen tokens, and those right
    before the recent frames. A token that was chosen reuse_limit times comes after all others.

    As released (arXiv 2512.05081), chosen tokens keep their positions, reuse_limit is 7, and the sink is
    turned first by first_turn - N frames, later by as much as the window moved on.
    """

    sink: int = 10
    budget: int = 16
    recent: int = 4
    reuse_limit: int | None = None
    first_turn: int = 21

    name = "participative"
    releases = block_bound = ("deep_forcing",)
    bounds = WindowedPolicy.bounds | {"reuse_limit": (1, MAX_FRAMES), "first_turn": (0, MAX_FRAMES)}
    chooses_by_layer = True
    can_recache = False

    @property
    def num_chosen(self) -> int:
        """Frames' worth of tokens that are chosen."""
        return self.budget - self.recent - self.sink

    def check(self, block_sizes: Sequence[int] = ()) -> None:
        super().check(block_sizes)
        budget, least, block = self.budget, self.sink + self.recent, max(block_sizes, default=1)
        fits = least <= budget <= self.window
        self.require(fits, f"budget {budget} must be at least sink + recent, {least}, at most {self.window}")
        self.require(self.recent >= block, f"recent {self.recent} must be at least a block, {block}")

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        slots = min(self.window + block_size, num_frames)
        return Capacity(slots, min(self.sink, slots) if self.source else slots)

    def start(self, cache: KVCache) -> None:
        self._chosen: list[ChosenTokens | None] = [None] * cache.num_layers
        self._queries: list[Tensor | None] = [None] * cache.num_layers  # sums of recent frames [B, n, H, D]
        self._wide: list[Slot] = []  # the slots of a first pass that compresses; empty where none does
        self._is_first = [True] * cache.num_layers  # whether a layer's first pass of the block is to come
        self._sink_at, self._turned_at = self.first_turn - self.budget, -1  # as released

    def admit(self, cache: KVCache, block: range) -> None:
        cache.append(block)
        self._is_first = [True] * cache.num_layers
        self._wide = list(cache.slots) if len(cache.slots) > self.window else []
        if not self._wide:
            return
        recent = self._wide[-self.recent :]
        first = recent[0].frame - self.num_chosen  # where the chosen tokens stand
        positions = [MIXED] * self.num_chosen if self.source else range(first, first + self.num_chosen)
        cache.slots[self.sink :] = [*(Slot(CHOSEN, position) for position in positions), *recent]
        cache.own = range(len(cache.slots) - len(block), len(cache.slots))
        if not self.source:
            self._sink_at = first - self.sink
        else:
            self._sink_at += block.start - self._turned_at if self._turned_at >= 0 else 0
            self._turned_at = block.start

    def positions(self, cache: KVCache, cut: bool) -> Sequence[int]:
        now = super().positions(cache, cut)
        return [*range(self._sink_at, self._sink_at + self.sink), *now[self.sink :]] if self._wide else now

    def own_slots(self, cache: KVCache, layer: int) -> range:
        wide = len(self._wide)
        return range(wide - len(cache.own), wide) if wide and self._is_first[layer] else cache.own

    def written(self, cache: KVCache, layer: int, q: Tensor) -> Pair:
        n, past = len(cache.newest), self._queries[layer]
        sums = q.unflatten(1, (n, -1)).sum(2, dtype=torch.float32)  # [B, n, H, D]
        if past is not None:  # a later pass takes the place of the one before; the release counts every pass
            past = past if self._is_first[layer] or self.source else past[:, :-n]
            sums = torch.cat([past, sums], 1)[:, -self.recent :]
        self._queries[layer] = sums
        if self._wide and self._is_first[layer]:
            self._compress(cache, layer, sums.sum(1))
        self._is_first[layer] = False
        return cache.view(layer)

    def flush(self, cache: KVCache) -> None:
        super().flush(cache)
        self._chosen = [None] * cache.num_layers

    def of_layer(self, cache: KVCache, layer: int) -> tuple[Sequence[Slot], ChosenTokens | None]:
        return cache.slots, self._chosen[layer]

    def _compress(self, cache: KVCache, layer: int, queries: Tensor) -> None:
        """Choose tokens by summed queries [B, H, D] and close up: sink, chosen, recent."""
        S, keys, before = cache.tokens_per_frame, cache.keys[layer], self._chosen[layer]
        # 1. Score the tokens between the sink and the recent frames.
        stop = len(self._wide) - self.recent
        between = cache.tokens(range(self.sink, stop))
        scores = cache.shard.sum(torch.einsum("bhd,bnhd->bn", queries, keys[:, between].float()))
        first = self.sink + (0 if before is None else self.num_chosen)
        frames = [slot.frame for slot in self._wide[first:stop]]
        known = ChosenTokens.of_frames(frames, S, len(keys), keys.device)
        known = known if before is None else before.followed_by(known)
        limit = 7 if self.source and self.reuse_limit is None else self.reuse_limit
        if limit is not None:
            scores = scores.masked_fill(known.uses >= limit, -torch.inf)
        # 2. Choose the best; of equal ones those of lower index.
        best = scores.argsort(dim=1, descending=True, stable=True)[:, : self.num_chosen * S]
        order = best.sort(1).values  # [B, chosen·S], in order of time
        chosen = known.take(order, range(self.sink, self.sink + self.num_chosen))
        # 3. Close up.
        recent = torch.arange(between.stop, len(self._wide) * S, device=keys.device).expand(len(keys), -1)
        rows = torch.cat([order + between.start, recent], 1)
        place = cache.tokens(range(self.sink, self.budget))
        for buffers in (cache.keys, cache.values, *(() if self.source else (cache.raw_keys,))):
            buffers[layer][:, place] = buffers[layer].take_along_dim(rows[:, :, None, None], 1)
        # 4. Rotate the chosen keys to the positions of their slots; each keeps its row and column.
        if not self.source and self.num_chosen:
            at, place = cache.slots[self.sink].position, cache.tokens(chosen.slots)
            slot = torch.arange(self.num_chosen * S, device=keys.device) // S
            row = slot * S + chosen.indices  # [B, chosen·S] into tables [chosen·S, 1, D]
            tables = (table[row] for table in cache.rope(range(at, at + self.num_chosen)))
            rotate_into(keys[:, place], cache.raw_keys[layer][:, place], *tables)
            chosen.positions.copy_((slot + at).expand_as(chosen.positions))
        self._chosen[layer] = chosen
        cache.layouts[layer] = replace(cache.layouts[layer], chosen=chosen)


@dataclass
class PerHead(CachePolicy):
    """Give each class of heads a policy and a cache of its own. Pyramid Forcing, Forcing-KV, Dummy Forcing.

    file: a CSV of classes, layers x heads. policies: a policy for each class. All classes have the same query
    positions.
    """

    file: str = ""
    policies: dict[str, CachePolicy] = field(default_factory=dict)

    name = "per_head"
    by_heads = True
    can_recache = False

    def __post_init__(self) -> None:
        fits = bool(self.file) and isinstance(self.policies, Mapping) and bool(self.policies)
        self.require(fits, "needs a file of head classes and policies for them")
        classes = self.policies.items()
        self.policies = {
            str(label): one if isinstance(one, CachePolicy) else read_policy(one) for label, one in classes
        }
        self.labels = next(iter(read_columns(self.name, self.file).values()))
        super().__post_init__()

    def describe(self) -> dict[str, Any]:
        classes = {label: policy.describe() for label, policy in self.policies.items()}
        return {"name": self.name, "file": self.file, "policies": classes}

    def check(self, block_sizes: Sequence[int] = ()) -> None:
        for label in sorted({label for row in self.labels for label in row}):
            self.require(label in self.policies, f"class {short_repr(label)} of {self.file} has no policy")
        for label, policy in self.policies.items():
            fits = not policy.source and not policy.by_heads
            self.require(fits, f"class {short_repr(label)} has no clean rule; leave released out")
            policy.check(block_sizes)
        by_slot = {label: one for label, one in self.policies.items() if one.positions_follow_slots}
        windows = {one.num_frames for one in by_slot.values()}
        fits = not by_slot or (len(by_slot) == len(self.policies) and len(windows) == 1)
        problem = "queries of classes stand at different positions; policies with keys at 0..n-1"
        self.require(fits, f"{problem} ({', '.join(by_slot)}) go together only, with one window")

    def check_switch(self, how: str, frame: int) -> None:
        sinks = {getattr(one, "sink", 0) for one in self.policies.values() if one.positions_follow_slots}
        fits = how not in ("flush", "cut") or len(sinks) < 2
        problem = f"after a flush, queries behind sinks of {sorted(sinks)} frames would stand apart"
        self.require(fits, f"{problem}; use keep, or one sink")
        super().check_switch(how, frame)

    @property
    def chooses_by_layer(self) -> bool:  # type: ignore[override]  # of a class's policy a constant
        return any(policy.chooses_by_layer for policy in self.policies.values())

    @property
    def num_frames(self) -> int | None:
        seen = [policy.num_frames for policy in self.policies.values()]
        return None if None in seen else max(size for size in seen if size is not None)

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        """Return the memory of the mean head, rounded up."""
        sizes = [policy.capacity(num_frames, block_size) for policy in self.policies.values()]
        counts = [sum(row.count(label) for row in self.labels) for label in self.policies]
        slots = -(-sum(n * size.slots for n, size in zip(counts, sizes, strict=True)) // sum(counts))
        has_raw = any(size.raw_slots for size in sizes)
        return Capacity(slots, slots if has_raw else 0, max(size.state_frames for size in sizes))

    def new_cache(self, build: Callable[..., KVCache], num_layers: int, shard: HeadShard) -> PerHeadCache:
        here, model = (len(self.labels), len(self.labels[0])), (num_layers, shard.total)
        sizes = f"{here[0]} layers x {here[1]} heads, the model {model[0]} x {model[1]}"
        self.require(here == model, f"{self.file} has {sizes}")
        classes = []
        for label, policy in self.policies.items():
            heads = [[head for head, other in enumerate(row) if other == label] for row in self.labels]
            if any(heads):
                numbers = [tuple(shard.local(row)) for row in heads]
                cache = build([len(row) for row in numbers], policy)
                device = cache.keys[0].device
                there = [send(torch.tensor(row, dtype=torch.long), device) for row in numbers]
                classes.append(HeadClass(cache, [bool(row) for row in heads], numbers, there))
        return PerHeadCache(self, classes)


POLICIES: dict[str, type[CachePolicy]] = {
    policy.name: policy
    for policy in (
        Full,
        Window,
        Relative,
        DeepSink,
        Participative,
        EmaSink,
        TwoMemories,
        RollingSink,
        MemoryBank,
        PerHead,
        DummyForcing,
        ForcingKV,
        TriAttention,
        HeadBudget,
    )
}


def make_policy(name: str, **chosen: Any) -> CachePolicy:
    """Return a policy by its name in configs, with its fields.

    Raises ConfigError for a field that it does not have, or a value that it cannot have.
    """
    if name not in POLICIES:
        raise ConfigError(f"cache_policy {short_repr(name)} is not one of {', '.join(POLICIES)}")
    known: dict[str, Any] = {f.name: f.type for f in fields(POLICIES[name])}
    for key, value in chosen.items():
        if key not in known:
            names = ", ".join(known)
            raise ConfigError(f"cache_policy {name} has no field {short_repr(key)}; it has {names}")
        types = get_args(known[key]) or (known[key],)
        fits = type(value) in types or (float in types and type(value) is int) or Any in types
        most = max(MAX_FRAMES, POLICIES[name].bounds.get(key, (0, 0))[1])
        fits = fits and (type(value) is not int or value <= most)
        if not fits and get_origin(known[key]) is not dict:
            kinds = " or ".join("null" if one is type(None) else one.__name__ for one in types)
            said = f"{kinds}, numbers at most {MAX_FRAMES}, not {short_repr(value)}"
            raise ConfigError(f"cache_policy {name}: {key} must be {said}")
    return POLICIES[name](**chosen)


def read_policy(settings: Mapping[str, Any]) -> CachePolicy:
    """Return a policy from its settings in a config: {"name": "deep_sink", "window": 21, "sink": 10}."""
    if not isinstance(settings, Mapping) or not isinstance(settings.get("name"), str):
        raise ConfigError(f"cache_policy needs settings with a name, one of {', '.join(POLICIES)}")
    return make_policy(**{str(key): value for key, value in settings.items()})


def of_window(local_attn_size: int, sink_size: int) -> CachePolicy:
    """Return the policy that the older settings mean: the whole past (-1), or a window with a sink."""
    if local_attn_size == -1:
        return make_policy("full")
    return make_policy("window", window=local_attn_size, sink=sink_size)


# -- prompts that change, and keys that are computed again ---------------------------------------------------

How = Literal["keep", "recache", "flush", "cut"]


@dataclass(frozen=True, eq=False)
class PromptSwitch:
    """From frame on, which must begin a block, another prompt: a text, or its states [B, n, text_dim].

    keep: the cache stays as it is. recache (LongLive): the newest frames are computed again under the new
    prompt. flush (Infinity-RoPE): only the sink and the last two frames stay. cut: flush, and the next block
    stands far away.
    """

    frame: int
    prompt: str | None = None
    how: How = "keep"
    prompt_embeds: Tensor | None = None

    def __post_init__(self) -> None:
        if self.how not in get_args(How):
            known = ", ".join(get_args(How))
            raise ConfigError(f"prompt_schedule: {short_repr(self.how)} is not one of {known}")


def read_switch(settings: Mapping[str, Any]) -> PromptSwitch:
    """Return a switch from its settings: {"frame": 18, "prompt": "a red circle", "how": "flush"}."""
    if unknown := [name for name in settings if name not in ("frame", "prompt", "how")]:
        raise ConfigError(
            f"prompt_schedule has no {short_repr(unknown[0])}; a switch has frame, prompt and how"
        )
    frame, prompt = settings.get("frame"), settings.get("prompt")
    if type(frame) is not int or not isinstance(prompt, str) or not prompt.strip():
        said = short_repr(dict(settings))
        raise ConfigError(f"prompt_schedule: a switch needs a frame (a number) and a prompt, not {said}")
    return PromptSwitch(frame, require_text(prompt, "prompt_schedule", MAX_TEXT), settings.get("how", "keep"))


def check_schedule(schedule: Sequence[PromptSwitch], blocks: Sequence[range], policy: CachePolicy) -> None:
    """Raise ConfigError for a switch that does not begin a later block, a second one there, or one that the
    policy cannot make.
    """
    starts, frames = [block.start for block in blocks[1:]], [switch.frame for switch in schedule]
    for switch in schedule:
        if switch.frame not in starts or frames.count(switch.frame) > 1:
            there = ", ".join(map(str, starts)) or "no later frame"
            raise ConfigError(
                f"prompt_schedule: frame {switch.frame} does not begin a block after the first, or has two "
                f"prompts; blocks begin at {there}"
            )
        policy.check_switch(switch.how, switch.frame)


def apply_switch(cache: AnyCache, how: How, past: int, context: int) -> tuple[int, int]:
    """Let a cache forget what a switch wants before a block, of past frames whose latents are remembered.

    context is recompute_context. Returns how many of them are remembered still, and how many, the newest, are
    now to be computed again.
    """
    if how in ("flush", "cut"):
        cache.flush()
        past = min(past, cache.policy.lasting_sink + FLUSH_KEEPS)  # what is forgotten is not computed again
    return past, past if how == "recache" else min(past, context)


def check_recompute(context: int, policy: CachePolicy, block_size: int) -> None:
    """Raise ConfigError where keys of the last context frames cannot be computed again (0: they are not)."""
    if context < 0:
        raise ConfigError(f"recompute_context must be 0 or more frames, not {context}")
    if context:
        policy.require(policy.can_recache, "cannot compute its cache again; take window or relative")
        least = context + block_size
        fits = policy.num_frames is None or least <= policy.num_frames
        policy.require(fits, f"recompute_context {context} and a block do not fit; take a window of {least}")
