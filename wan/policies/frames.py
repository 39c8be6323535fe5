"""Cache policies in which all heads of a layer see the same keys.

Each class is the policy of a publication, under its name in configs. Their common interface is CachePolicy
in wan/cache.py. Letters: B batch, S tokens per frame, H heads, D head dim, W window, n keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from wan.cache import NEEDS_ROTATION, CachePolicy, Capacity, How, KVCache, rotate_into
from wan.files import Count, Frames, Share
from wan.keys import AVERAGE, CHOSEN, MIXED, ChosenTokens, KeyLayout, Slot, send


@dataclass
class WindowedPolicy(CachePolicy):
    """Keep a window of W frames, the first S of them a sink; evict the oldest after the sink.

    This is the base of most policies. Your own can override evict(), which drops frames:

        @dataclass
        class Earliest(WindowedPolicy):  # keeps the first frames instead of the newest
            name = "earliest"

            def evict(self, cache, count):
                cache.drop(len(cache.slots) - count, count)
    """

    window: Count = 21
    sink: Frames = 0

    # Releases that allocate the whole sink at once: block 0 sees zeros where no frame has come yet.
    zero_sink: ClassVar[tuple[str, ...]] = ()

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        return super().capacity(max(num_frames, self.sink * (self.source in self.zero_sink)), block_size)

    def admit(self, cache: KVCache, block: range) -> None:
        excess = len(cache.slots) + len(block) - self.window
        if excess > 0:
            self.evict(cache, excess)
        cache.append(block)
        if self.source in self.zero_sink and block.start == 0 and len(cache.slots) < self.sink:
            cache.append_empty(self.sink - len(cache.slots))

    def evict(self, cache: KVCache, count: int) -> None:
        """Drop as many frames as the next block needs room for."""
        cache.drop(self.sink, count)


@dataclass
class LongLiveSink(WindowedPolicy):
    """Write sink slots in the first pass of a block alone, as LongLive's code does.

    So a sink deeper than block 0 keeps frames of later blocks as pass 0 wrote them, at t = 1000.
    """

    def own_slots(self, cache: KVCache) -> range:
        own = cache.own
        # The releases with this quirk are those with the zeros; the clean rule writes in every pass.
        if cache.passes < 2 or self.source not in self.zero_sink or cache.newest.start == 0:
            return own
        return range(max(own.start, min(self.sink, own.stop)), own.stop)


@dataclass
class Window(LongLiveSink):
    """Keep the first S and the newest W - S frames, at their own positions.

    The rolling KV cache of Self-Forcing (arXiv 2506.08009), with S = 0, and the frame sink of LongLive (arXiv
    2509.22622). With global_sink the sink outlives a recache. With a stride only every stride-th frame of the
    past stays (wave heads in configs/policies/pyramid_heads.yaml).
    """

    global_sink: bool = False
    stride: Count = 1

    name = "window"
    keeps_whole_frames = True
    releases = ("self_forcing", "longlive")
    block_bound = zero_sink = ("longlive",)

    def admit(self, cache: KVCache, block: range) -> None:
        if self.stride > 1:
            for index in reversed(cache.own):  # of the block before; from behind, so that indices hold
                if index >= self.sink and cache.slots[index].frame % self.stride:
                    cache.drop(index, 1)
        super().admit(cache, block)


@dataclass
class Relative(LongLiveSink):
    """Keep the frames of a window, their keys at 0..n-1 and the queries at the last of them.

    Block-Relativistic RoPE of Infinity-RoPE (arXiv 2511.20649), whose KV flush and RoPE cut are `flush` and
    `cut` of a prompt schedule; LongLive's infinite attention.

    As Infinity-RoPE releases it, queries stand at their frames until those reach W, and slot 0 is never
    rotated: frame 0's key was stored rotated, and without a sink another one stands there without RoPE.
    """

    name = "relative"
    keeps_whole_frames = True
    releases = block_bound = ("infinity_rope", "longlive_infinity")
    zero_sink = ("longlive_infinity",)
    positions_follow_slots = True

    def switch_from(self, how: How) -> int | None:
        # Before frame S the sink of that release has no un-rotated keys, which a cut needs.
        is_late = how == "cut" and self.source == "longlive_infinity"
        return self.sink if is_late else super().switch_from(how)

    def query_positions(self, cache: KVCache) -> Sequence[int]:
        own = cache.key_positions
        is_cut, is_late = own[0] > len(cache.slots), cache.newest.start >= self.window
        return own if self.source != "infinity_rope" or is_late or is_cut else cache.newest

    def admit(self, cache: KVCache, block: range) -> None:
        super().admit(cache, block)
        first = cache.slots[0]
        # As released slot 0 is never rotated: the frame that moved there stands without RoPE.
        if self.source == "infinity_rope" and self.sink == 0 and first.frame != 0 and 0 not in cache.own:
            cache.slots[0] = Slot(first.frame, 0, is_rotated=False)
            tokens = cache.tokens(0)
            for keys, raw in zip(cache.keys, cache.raw_keys, strict=True):
                keys[:, tokens] = raw[:, tokens]


@dataclass
class DeepSink(WindowedPolicy):
    """Put the sink of a window right before its tail: Deep Sink of Deep Forcing, arXiv 2512.05081.

    As released, the first roll does not rotate the sink and later ones turn it by as much as the window moves
    on, so that it trails at the distance of the first eviction.
    """

    name = "deep_sink"
    keeps_whole_frames = True
    releases = block_bound = ("deep_forcing",)

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        return super().capacity(num_frames, block_size)._replace(raw_slots=self.sink)

    def start(self, cache: KVCache) -> None:
        self._first_roll: int | None = None
        self._rolls = False

    def admit(self, cache: KVCache, block: range) -> None:
        self._rolls = len(cache.slots) + len(block) > self.window
        if self._rolls and self._first_roll is None:
            self._first_roll = block.start
        super().admit(cache, block)

    def positions(self, cache: KVCache, cut: bool) -> Sequence[int]:
        plain, sink = super().positions(cache, cut), self.sink
        if len(plain) <= sink or (self.source and not self._rolls):
            return plain
        first = cache.slots[sink].frame - sink  # so that the sink ends where the tail begins
        if self.source:
            first = cache.newest.start - (self._first_roll or 0)
        return [*range(first, first + sink), *plain[sink:]]


@dataclass
class RollingSink(WindowedPolicy):
    """Show late blocks the first frames of the video again, forwards and backwards.

    https://github.com/Rolling-Sink/Rolling-Sink: a window without a sink, in which the block before a
    finished one gives way to frames of the first W - n, n the size of a block. The slot at position p takes
    the clean keys and values of frame p modulo (W - n), counted backwards in every second round, the keys
    turned to p.
    """

    sink: Literal[0] = 0

    name = "rolling_sink"
    releases = block_bound = ("rolling_sink",)
    can_recache = False
    least_blocks = 2
    raw_by_frame = True  # of the first frames, which keep their places where a flush moves slots

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        self._first = self.window - block_size  # how many frames of the beginning are shown again
        slots = min(self.window, num_frames)
        first = min(self._first, slots)
        return Capacity(slots, first, -(-first // 2))  # beside the cache the values alone

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
        # 1. Remember values of the first frames; their un-rotated keys lie in cache.raw_keys already.
        for index, frame in zip(cache.own, cache.newest, strict=True):
            if frame < self._first:
                for first, values in zip(self._values, cache.values, strict=True):
                    first[:, cache.tokens(frame)] = values[:, cache.tokens(index)]
        if cache.newest.start < self.window:
            return
        # 2. The block before gives way: position p shows frame p mod (W - n), backwards in odd rounds.
        for index in range(max(0, cache.own.start - len(cache.own)), cache.own.start):
            position = cache.slots[index].position
            turn, place = divmod(position, self._first)
            frame = self._first - 1 - place if turn % 2 else place
            source, target = cache.tokens(frame), cache.tokens(index)
            tables = cache.rope(range(position, position + 1))
            for layer, values in enumerate(self._values):
                rotate_into(cache.keys[layer][:, target], cache.raw_keys[layer][:, source], *tables)
                cache.values[layer][:, target] = values[:, source]
            cache.slots[index] = Slot(frame, position)


def blend(old: Tensor, new: Tensor, weight: float) -> None:
    """Compute old = weight old + (1 - weight) new, in place."""
    old.mul_(weight).add_(new.float(), alpha=1 - weight)


@dataclass
class EmaSink(WindowedPolicy):
    """Blend evicted frames into the sink: sink = alpha sink + (1 - alpha) evicted.

    EMA-Sink of Reward Forcing, arXiv 2512.04678. The i-th frame that leaves goes to sink slot i modulo S. As
    released, the first slots are overwritten where the frames that leave are not as many as the sink, and
    block 0 sees unwritten sink slots as zeros.
    """

    window: Count = 9
    sink: Count = 3
    alpha: Share = 0.999

    name = "ema_sink"
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
    """Put a long and a short running mean of evicted frames after the sink.

    MemRoPE, https://github.com/YoungRaeKimm/MemRoPE: keys are averaged without RoPE, and rotated to where the
    mean stands. A mean is of all tokens, the same one all over its frame. The first roll puts the mean of
    what leaves into both, and the frames that stood there are lost.
    """

    window: Count = 12
    sink: Frames = 3
    alpha_long: Share = 0.01
    alpha_short: Share = 0.1

    name = "two_memories"
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
        # 1. The mean of what leaves goes into both memories.
        leaving = cache.tokens(range(first, first + count))
        means = [buffer[:, leaving].float().mean(1, keepdim=True) for buffer in buffers]
        if not self._memories:
            self._memories = [(mean.clone(), mean.clone()) for mean in means]
        else:
            for (long, short), mean in zip(self._memories, means, strict=True):
                blend(long, mean, 1 - self.alpha_long)
                blend(short, mean, 1 - self.alpha_short)
        # 2. They fill the two slots behind the sink.
        for buffer, memories in zip(buffers, self._memories, strict=True):
            for index, memory in enumerate(memories, self.sink):
                buffer[:, cache.tokens(index)] = memory.to(buffer.dtype)
        cache.slots[self.sink : first] = [Slot(AVERAGE, NEEDS_ROTATION)] * 2
        cache.drop(first, count)


@dataclass
class MemoryBank(WindowedPolicy):
    """Keep [sink, bank, local], at their frames' positions. W counts sink and local, the bank comes on top.

    Narrative adaptive memory of MemFlow, arXiv 2512.14699, Sec. 3.2. Before block b the first frame of block
    b - 1 is the candidate. The bank grows by one slot every interval blocks, and the candidate overwrites its
    newest. Once it is full the best of its frames stay, best first, then the candidate. The score is the mean
    over heads, text tokens and the frame's tokens of cross-attention key · key. A frame of the bank that is
    in the window too counts twice, so that even a window as large as the video is not the whole past.
    """

    window: Count = 12
    sink: Frames = 3
    bank: Count = 3
    interval: Count = 3

    name = "memory_bank"
    releases = block_bound = ("memflow",)
    chooses_by_layer = True
    can_recache = False

    @property
    def num_frames(self) -> int | None:
        return self.window + self.bank

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        return Capacity(min(num_frames, self.window) + self.bank)  # a banked frame may lie in the window, too

    def start(self, cache: KVCache) -> None:
        self._blocks = 0
        self._at = 0  # the bank's first slot
        self._frames: list[list[list[int]]] = [[] for _ in cache.keys]  # per layer and batch item

    @property
    def banked(self) -> int:
        """Slots of the bank so far."""
        return len(self._frames[0][0]) if self._frames[0] else 0

    def admit(self, cache: KVCache, block: range) -> None:
        # 1. The slots of whole frames, of which the oldest behind the sink leave.
        bank = range(self._at, self._at + self.banked)
        frames = [index for index in range(len(cache.slots)) if index not in bank]  # in order of time
        excess = max(0, len(frames) + len(block) - self.window)
        self._at = min(self.sink, len(frames))
        # 2. The first frame of the block before comes into the bank.
        banked: list[int] = []
        if self._blocks:
            wanted = (self._blocks - 1) // self.interval + 1
            if wanted > self.bank:
                self._sort_bank(cache, bank)
            kept = min(wanted, self.bank) - 1
            banked = [*bank[:kept], cache.own.start]
            for layer, of_items in enumerate(self._frames):
                of_items = of_items or [[]] * len(cache.keys[layer])
                self._frames[layer] = [[*of_item[:kept], cache.newest.start] for of_item in of_items]
        self._blocks += 1
        # 3. Sink, bank, local frames, block.
        cache.keep([*frames[: self._at], *banked, *frames[self._at + excess :]])
        cache.append(block)

    def flush(self, cache: KVCache) -> None:
        cache.drop(self._at, self.banked)
        self.start(cache)
        super().flush(cache)

    def layout(self, cache: KVCache, layer: int, shared: KeyLayout) -> KeyLayout:
        slots = list(shared.slots)
        for index, chosen in enumerate(zip(*self._frames[layer], strict=True), self._at):
            slots[index] = Slot(chosen[0], chosen[0], items=chosen)
        return replace(shared, slots=tuple(slots))

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

    Participative Compression of Deep Forcing, arXiv 2512.05081. The sink (S) and the last R frames stay. Of
    the tokens between them those with the highest score stay, in order of time: the sum over the queries of
    the last R frames and all heads of q·k, where they stand, without softmax. The sink then stands right
    before the positions of the chosen tokens, and those right before the recent frames. A token that was
    chosen reuse_limit times comes after all others.

    As released, chosen tokens keep their positions, reuse_limit is 7, and the sink is turned first by
    first_turn - N frames, later by as much as the window moved on.
    """

    sink: Frames = 10
    budget: Frames = 16
    recent: Frames = 4
    reuse_limit: Count | None = None
    first_turn: Frames = 21

    name = "participative"
    releases = block_bound = ("deep_forcing",)
    chooses_by_layer = True
    can_recache = False

    @property
    def num_chosen(self) -> int:
        """Frames' worth of tokens that are chosen."""
        return self.budget - self.recent - self.sink

    def conflict(self, block_sizes: Sequence[int] = ()) -> str:
        budget, least, block = self.budget, self.sink + self.recent, max(block_sizes, default=1)
        if not least <= budget <= self.window:
            return f"budget {budget} must be at least sink + recent, {least}, at most {self.window}"
        if self.recent < block:
            return f"recent {self.recent} must be at least a block, {block}"
        return super().conflict(block_sizes)

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        slots = min(self.window + block_size, num_frames)
        return Capacity(slots, min(self.sink, slots) if self.source else slots)

    def start(self, cache: KVCache) -> None:
        self._places = range(self.sink, self.sink + self.num_chosen)  # slots of chosen tokens
        # Of each layer's chosen tokens frame, index in it, position and how often chosen, int64 [4, B, n].
        self._chosen: list[Tensor | None] = [None] * cache.num_layers
        self._queries: list[Tensor | None] = [None] * cache.num_layers  # sums of recent frames [B, n, H, D]
        self._wide: list[Slot] = []  # the slots of a first pass that compresses; empty where none does
        self._sink_at, self._turned_at = self.first_turn - self.budget, -1  # as released

    def admit(self, cache: KVCache, block: range) -> None:
        cache.append(block)
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
        plain = super().positions(cache, cut)
        sink = range(self._sink_at, self._sink_at + self.sink)
        return [*sink, *plain[self.sink :]] if self._wide else plain

    def own_slots(self, cache: KVCache) -> range:
        wide = len(self._wide)  # the first pass writes behind all that is there, and closes up afterwards
        return range(wide - len(cache.own), wide) if wide and cache.passes < 2 else cache.own

    def written(self, cache: KVCache, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        n, past = len(cache.newest), self._queries[layer]
        # 1. Sum the queries of the recent frames over tokens: a sum of scores is the score of a sum.
        sums = q.unflatten(1, (n, -1)).sum(2, dtype=torch.float32)  # [B, n, H, D]
        if past is not None:  # a later pass takes the place of the one before; the release counts every pass
            past = past if cache.passes < 2 or self.source else past[:, :-n]
            sums = torch.cat([past, sums], 1)[:, -self.recent :]
        self._queries[layer] = sums
        # 2. The first pass of a block chooses; later ones see what it chose.
        if self._wide and cache.passes < 2:
            self._compress(cache, layer, sums.sum(1))
        return cache.view(layer)

    def flush(self, cache: KVCache) -> None:
        super().flush(cache)
        self._chosen = [None] * cache.num_layers

    def layout(self, cache: KVCache, layer: int, shared: KeyLayout) -> KeyLayout:
        chosen = self._chosen[layer]
        return replace(shared, chosen=None if chosen is None else ChosenTokens(self._places, *chosen[:3]))

    def _compress(self, cache: KVCache, layer: int, queries: Tensor) -> None:
        """Choose tokens by summed queries [B, H, D] and close up: sink, chosen, recent."""
        S, keys, before = cache.tokens_per_frame, cache.keys[layer], self._chosen[layer]
        # 1. Score the tokens between the sink and the recent frames.
        stop = len(self._wide) - self.recent
        between = cache.tokens(range(self.sink, stop))
        scores = cache.shard.sum(torch.einsum("bhd,bnhd->bn", queries, keys[:, between].float()))
        first = self.sink + (0 if before is None else self.num_chosen)
        frames = [slot.frame for slot in self._wide[first:stop]]
        # Whole frames stand at their own positions, and were never chosen. [4, B, n] as in self._chosen.
        each = send(torch.tensor(frames, dtype=torch.long), keys.device).repeat_interleave(S)
        indices = torch.arange(S, device=keys.device).repeat(len(frames))
        whole = torch.stack([each, indices, each, torch.zeros_like(each)])[:, None].expand(-1, len(keys), -1)
        known = whole if before is None else torch.cat([before, whole], 2)
        limit = 7 if self.source and self.reuse_limit is None else self.reuse_limit
        if limit is not None:
            scores = scores.masked_fill(known[3] >= limit, -torch.inf)
        # 2. Choose the best; of equal ones those of lower index.
        best = scores.argsort(dim=1, descending=True, stable=True)[:, : self.num_chosen * S]
        order = best.sort(1).values  # [B, chosen·S], in order of time
        chosen = known.gather(2, order.expand(4, -1, -1))
        chosen[3] += 1
        # 3. Close up.
        recent = torch.arange(between.stop, len(self._wide) * S, device=keys.device).expand(len(keys), -1)
        rows = torch.cat([order + between.start, recent], 1)
        place = cache.tokens(range(self.sink, self.budget))
        for buffers in (cache.keys, cache.values, *(() if self.source else (cache.raw_keys,))):
            buffers[layer][:, place] = buffers[layer].take_along_dim(rows[:, :, None, None], 1)
        # 4. Rotate the chosen keys to the positions of their slots; each keeps its row and column.
        if not self.source and self.num_chosen:
            at, place = cache.slots[self.sink].position, cache.tokens(self._places)
            slot = torch.arange(self.num_chosen * S, device=keys.device) // S
            row = slot * S + chosen[1]  # [B, chosen·S] into tables [chosen·S, 1, D]
            tables = (table[row] for table in cache.rope(range(at, at + self.num_chosen)))
            rotate_into(keys[:, place], cache.raw_keys[layer][:, place], *tables)
            chosen[2] = slot + at
        self._chosen[layer] = chosen
        cache.layouts[layer] = self.layout(cache, layer, cache.layouts[layer])
