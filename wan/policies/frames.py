"""Cache policies in which all heads of a layer, or all of a class, see the same keys.

Each class is the policy of a publication, under its name in configs. Where the public code of a release gives
other numbers, a subclass right behind the policy has its quirks. Their common interface is CachePolicy in
wan/cache.py. Letters: B batch, S tokens per frame, H heads, D head dim, W window, n keys.
"""

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from wan import errors, files
from wan.cache import (
    NEEDS_ROTATION,
    AnyCache,
    CachePolicy,
    CacheSizes,
    Capacity,
    How,
    KVCache,
    PromptSwitch,
    Text,
    Window,
    WindowedPolicy,
    rotate_into,
)
from wan.keys import AVERAGE, CHOSEN, MIXED, ChosenTokens, HeadGroup, KeyLayout, Slot, send

# --- Quirks that several releases share


class ZeroSink(WindowedPolicy):
    """Allocate the whole sink at once: block 0 sees zeros where no frame has come yet."""

    blocks_of_three = True

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        return super().capacity(max(num_frames, self.sink), block_size)

    def admit(self, cache: KVCache, block: range) -> None:
        super().admit(cache, block)
        if block.start == 0 and len(cache.slots) < self.sink:
            cache.append_empty(self.sink - len(cache.slots))


class LongLiveSink(ZeroSink):
    """Write sink slots in the first pass of a block alone, too, as LongLive's code does.

    So a sink deeper than block 0 keeps frames of later blocks as pass 0 wrote them, at t = 1000.
    """

    def own_slots(self, cache: KVCache) -> range:
        slots = cache.own
        if cache.passes < 2 or cache.newest.start == 0:
            return slots
        return range(max(slots.start, min(self.sink, slots.stop)), slots.stop)


# --- The policies, each with its releases


class LongLiveWindow(LongLiveSink, Window):
    """The window of LongLive as released."""

    release = "longlive"


@dataclass
class Relative(WindowedPolicy):
    """Keep the frames of a window, their keys at 0..n-1 and the queries at the last of them.

    Block-Relativistic RoPE of Infinity-RoPE (arXiv 2511.20649), whose KV flush and RoPE cut are `flush` and
    `cut` of a prompt schedule; LongLive's infinite attention.
    """

    name = "relative"
    keeps_whole_frames = True
    positions_follow_slots = True


class InfinityRope(Relative):
    """Infinity-RoPE as released: queries stand at their frames until those reach W, slot 0 is never rotated.

    Frame 0's key was stored rotated; without a sink another one stands there without RoPE.
    """

    release = "infinity_rope"
    blocks_of_three = True

    def query_positions(self, cache: KVCache) -> Sequence[int]:
        positions = cache.key_positions
        is_cut = positions[0] > len(cache.slots)
        if is_cut or cache.newest.start >= self.window:
            return positions
        return cache.newest

    def admit(self, cache: KVCache, block: range) -> None:
        super().admit(cache, block)
        first = cache.slots[0]
        if self.sink == 0 and first.frame != 0 and 0 not in cache.own:
            cache.slots[0] = Slot(first.frame, 0, is_rotated=False)
            tokens = cache.tokens(0)
            for keys, raw in zip(cache.keys, cache.raw_keys, strict=True):
                keys[:, tokens] = raw[:, tokens]


class LongLiveInfinity(LongLiveSink, Relative):
    """LongLive's infinite attention as released."""

    release = "longlive_infinity"

    def switch_from(self, how: How) -> int | None:
        if how == "cut":
            return self.sink  # before that frame its sink has no un-rotated keys, which a cut needs
        return super().switch_from(how)


@dataclass
class DeepSink(WindowedPolicy):
    """Put the sink of a window right before its tail: Deep Sink of Deep Forcing, arXiv 2512.05081."""

    name = "deep_sink"
    keeps_whole_frames = True

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        return super().capacity(num_frames, block_size)._replace(raw_slots=self.sink)

    def positions(self, cache: KVCache, cut: bool) -> Sequence[int]:
        plain = super().positions(cache, cut)
        if len(plain) <= self.sink:
            return plain
        first = self.sink_position(cache)
        return [*range(first, first + self.sink), *plain[self.sink :]]

    def sink_position(self, cache: KVCache) -> int:
        """Return the position of the sink's first frame, so that the sink ends where the tail begins."""
        return cache.slots[self.sink].frame - self.sink


class DeepForcingSink(DeepSink):
    """Deep Sink as released: the first roll does not rotate the sink, later ones turn it with the window.

    So it trails at the distance of the first eviction.
    """

    release = "deep_forcing"
    blocks_of_three = True

    def start(self, cache: KVCache) -> None:
        self._first_roll = 0  # the first frame of the block that evicted first
        self._rolls = False

    def admit(self, cache: KVCache, block: range) -> None:
        self._rolls = len(cache.slots) + len(block) > self.window
        if self._rolls and not self._first_roll:
            self._first_roll = block.start
        super().admit(cache, block)

    def positions(self, cache: KVCache, cut: bool) -> Sequence[int]:
        if not self._rolls:
            return [slot.position for slot in cache.slots]
        return super().positions(cache, cut)

    def sink_position(self, cache: KVCache) -> int:
        return cache.newest.start - self._first_roll


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
            turn, frame = divmod(position, self._first)
            if turn % 2:
                frame = self._first - 1 - frame
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

    EMA-Sink of Reward Forcing, arXiv 2512.04678. The i-th frame that leaves goes to sink slot i modulo S.
    """

    window: files.Count = 9
    sink: files.Count = 3
    alpha: files.Share = 0.999

    name = "ema_sink"
    positions_follow_slots = True

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        return super().capacity(num_frames, block_size)._replace(state_frames=self.sink)

    def start(self, cache: KVCache) -> None:
        self._means: list[Tensor] = []  # from the first eviction on

    def evict(self, cache: KVCache, count: int) -> None:
        self.take_in(cache, count)
        super().evict(cache, count)

    def take_in(self, cache: KVCache, count: int) -> None:
        """Blend the first count frames behind the sink into it."""
        for buffer, mean in self.means(cache):
            for index in range(count):
                leaving = buffer[:, cache.tokens(self.sink + index)]
                blend(mean[:, cache.tokens(index % self.sink)], leaving, self.alpha)
            buffer[:, cache.tokens(range(self.sink))] = mean
        for index in range(count):
            cache.slots[index % self.sink] = Slot(AVERAGE, NEEDS_ROTATION)

    def means(self, cache: KVCache) -> Iterable[tuple[Tensor, Tensor]]:
        """Return each buffer of raw keys or values with the mean of its sink, float32 [B, sink·S, H, D]."""
        buffers = [*cache.raw_keys, *cache.values]
        if not self._means:
            self._means = [buffer[:, cache.tokens(range(self.sink))].float() for buffer in buffers]
        return zip(buffers, self._means, strict=True)


class RewardForcing(ZeroSink, EmaSink):
    """Reward Forcing as released: frames that leave overwrite the sink where they are not as many as it."""

    release = "reward_forcing"

    def take_in(self, cache: KVCache, count: int) -> None:
        if count == self.sink:
            super().take_in(cache, count)
            return
        for index in range(min(count, self.sink)):
            source, target = cache.tokens(self.sink + index), cache.tokens(index)
            for buffer, mean in self.means(cache):
                mean[:, target] = buffer[:, source]
                buffer[:, target] = buffer[:, source]
            cache.slots[index] = Slot(cache.slots[self.sink + index].frame, NEEDS_ROTATION)


@dataclass
class TwoMemories(WindowedPolicy):
    """Put a long and a short running mean of evicted frames after the sink.

    MemRoPE, https://github.com/YoungRaeKimm/MemRoPE: keys are averaged without RoPE, and rotated to where the
    mean stands. A mean is of all tokens, the same one all over its frame. The first roll puts the mean of
    what leaves into both, and the frames that stood there are lost.
    """

    window: files.Count = 12
    sink: files.Frames = 3
    alpha_long: files.Share = 0.01
    alpha_short: files.Share = 0.1

    name = "two_memories"
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

    window: files.Count = 12
    sink: files.Frames = 3
    bank: files.Count = 3
    interval: files.Count = 3

    name = "memory_bank"
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
        if not self._frames[0]:
            return 0
        return len(self._frames[0][0])

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
            stays = min(wanted, self.bank) - 1  # of the bank's slots; the candidate follows them
            banked = [*bank[:stays], cache.own.start]
            for layer, of_items in enumerate(self._frames):
                of_items = of_items or [[]] * len(cache.keys[layer])
                self._frames[layer] = [[*of_item[:stays], cache.newest.start] for of_item in of_items]
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
        tokens = cache.tokens(bank)
        layer_scores = []
        for (text, _), keys in zip(cache.text, cache.keys, strict=True):
            frames = keys[:, tokens].unflatten(1, (len(bank), -1))  # [B, bank, S, H, D]
            means = text.float().mean(1), frames.mean(2, dtype=torch.float32)
            layer_scores.append(torch.einsum("bhd,bfhd->bf", *means))
        scores = cache.shard.sum(torch.stack(layer_scores))  # [layers, B, bank]
        best = scores.argsort(dim=2, descending=True, stable=True)  # ties: lower index
        for buffers in (cache.keys, cache.values):
            for buffer, order in zip(buffers, best, strict=True):
                slots = buffer[:, tokens].unflatten(1, (len(bank), -1))  # [B, bank, S, H, D]
                buffer[:, tokens] = slots.take_along_dim(order[:, :, None, None, None], 1).flatten(1, 2)
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
    """

    sink: files.Frames = 10
    budget: files.Frames = 16
    recent: files.Frames = 4
    reuse_limit: files.Count | None = None

    name = "participative"
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
        return Capacity(slots, raw_slots=slots)

    def start(self, cache: KVCache) -> None:
        self._places = range(self.sink, self.sink + self.num_chosen)  # slots of chosen tokens
        # Of each layer's chosen tokens frame, index in it, position and how often chosen, int64 [4, B, n].
        self._chosen: list[Tensor | None] = [None] * cache.num_layers
        self._queries: list[Tensor | None] = [None] * cache.num_layers  # sums of recent frames [B, n, H, D]
        self._wide: list[Slot] = []  # the slots of a first pass that compresses; empty where none does

    def admit(self, cache: KVCache, block: range) -> None:
        cache.append(block)
        self._wide = []
        if len(cache.slots) > self.window:
            self._wide = list(cache.slots)
            recent = self._wide[-self.recent :]
            cache.slots[self.sink :] = [*self.place(block, recent[0].frame), *recent]
            cache.own = range(len(cache.slots) - len(block), len(cache.slots))

    def place(self, block: range, first_recent: int) -> list[Slot]:
        """Set where the sink stands once a block compresses; return the slots of chosen tokens."""
        first = first_recent - self.num_chosen
        self._sink_position = first - self.sink
        return [Slot(CHOSEN, position) for position in range(first, first_recent)]

    def positions(self, cache: KVCache, cut: bool) -> Sequence[int]:
        plain = super().positions(cache, cut)
        if not self._wide:
            return plain
        return [*range(self._sink_position, self._sink_position + self.sink), *plain[self.sink :]]

    def own_slots(self, cache: KVCache) -> range:
        if self._wide and cache.passes < 2:
            # The first pass writes behind all slots, and closes up afterwards
            return range(len(self._wide) - len(cache.own), len(self._wide))
        return cache.own

    def written(self, cache: KVCache, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        # 1. Sum the queries of the recent frames over tokens: a sum of scores is the score of a sum.
        sums = q.unflatten(1, (len(cache.newest), -1)).sum(2, dtype=torch.float32)  # [B, n, H, D]
        earlier = self._queries[layer]
        if earlier is not None:
            sums = torch.cat([self.counted(cache, earlier), sums], 1)[:, -self.recent :]
        self._queries[layer] = sums
        # 2. The first pass of a block chooses; later ones see what it chose.
        if self._wide and cache.passes < 2:
            self._compress(cache, layer, sums.sum(1))
        return cache.view(layer)

    def counted(self, cache: KVCache, sums: Tensor) -> Tensor:
        """Return earlier sums of queries [B, n, H, D] without those of the block, which a pass replaces."""
        if cache.passes < 2:
            return sums
        return sums[:, : -len(cache.newest)]

    def flush(self, cache: KVCache) -> None:
        super().flush(cache)
        self._chosen = [None] * cache.num_layers

    def layout(self, cache: KVCache, layer: int, shared: KeyLayout) -> KeyLayout:
        chosen = self._chosen[layer]
        if chosen is None:
            return replace(shared, chosen=None)
        return replace(shared, chosen=ChosenTokens(self._places, *chosen[:3]))

    def _compress(self, cache: KVCache, layer: int, queries: Tensor) -> None:
        """Choose tokens by summed queries [B, H, D] and close up: sink, chosen, recent."""
        S, keys, before = cache.tokens_per_frame, cache.keys[layer], self._chosen[layer]
        # 1. Score the tokens between the sink and the recent frames.
        stop = len(self._wide) - self.recent
        between = cache.tokens(range(self.sink, stop))
        scores = cache.shard.sum(torch.einsum("bhd,bnhd->bn", queries, keys[:, between].float()))
        # 2. Whole frames stand at their own positions, and were never chosen. [4, B, n] as in self._chosen.
        first = self.sink
        if before is not None:
            first += self.num_chosen
        numbers = torch.tensor([slot.frame for slot in self._wide[first:stop]], dtype=torch.long)
        frames = send(numbers, keys.device).repeat_interleave(S)
        indices = torch.arange(S, device=keys.device).repeat(len(numbers))
        tokens = torch.stack([frames, indices, frames, torch.zeros_like(frames)])[:, None]
        tokens = tokens.expand(-1, len(keys), -1)
        if before is not None:
            tokens = torch.cat([before, tokens], 2)
        if self.reuse_limit is not None:
            scores = scores.masked_fill(tokens[3] >= self.reuse_limit, -torch.inf)
        # 3. Choose the best; of equal ones those of lower index.
        best = scores.argsort(dim=1, descending=True, stable=True)[:, : self.num_chosen * S]
        order = best.sort(1).values  # [B, chosen·S], in order of time
        chosen = tokens.gather(2, order.expand(4, -1, -1))
        chosen[3] += 1
        # 4. Close up.
        recent = torch.arange(between.stop, len(self._wide) * S, device=keys.device).expand(len(keys), -1)
        rows = torch.cat([order + between.start, recent], 1)
        self.close_up(cache, layer, rows, chosen)
        self._chosen[layer] = chosen
        cache.layouts[layer] = self.layout(cache, layer, cache.layouts[layer])

    def close_up(self, cache: KVCache, layer: int, rows: Tensor, chosen: Tensor) -> None:
        """Move rows [B, n] of keys and values behind the sink, and turn chosen keys to their slots."""
        target = cache.tokens(range(self.sink, self.budget))
        for buffers in (cache.keys, cache.values, cache.raw_keys):
            buffers[layer][:, target] = buffers[layer].take_along_dim(rows[:, :, None, None], 1)
        if not self.num_chosen:
            return
        # Each chosen key keeps its row and column.
        S, keys = cache.tokens_per_frame, cache.keys[layer]
        first, target = cache.slots[self.sink].position, cache.tokens(self._places)
        slot = torch.arange(self.num_chosen * S, device=keys.device) // S
        row = slot * S + chosen[1]  # [B, chosen·S] into tables [chosen·S, 1, D]
        cos, sin = cache.rope(range(first, first + self.num_chosen))
        rotate_into(keys[:, target], cache.raw_keys[layer][:, target], cos[row], sin[row])
        chosen[2] = slot + first


@dataclass
class DeepForcing(Participative):
    """Participative Compression as released.

    Chosen tokens keep their positions, queries of every pass count, and the sink is turned first by
    first_turn - N frames, later by as much as the window moved on.
    """

    reuse_limit: files.Count | None = 7
    first_turn: files.Frames = 21

    release = "deep_forcing"
    blocks_of_three = True

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        plain = super().capacity(num_frames, block_size)
        return plain._replace(raw_slots=min(self.sink, plain.slots))

    def start(self, cache: KVCache) -> None:
        super().start(cache)
        self._sink_position = self.first_turn - self.budget
        self._last_turn: int | None = None  # the first frame of the block that compressed last

    def place(self, block: range, first_recent: int) -> list[Slot]:
        if self._last_turn is not None:
            self._sink_position += block.start - self._last_turn
        self._last_turn = block.start
        return [Slot(CHOSEN, MIXED)] * self.num_chosen

    def counted(self, cache: KVCache, sums: Tensor) -> Tensor:
        return sums

    def close_up(self, cache: KVCache, layer: int, rows: Tensor, chosen: Tensor) -> None:
        target = cache.tokens(range(self.sink, self.budget))
        for buffers in (cache.keys, cache.values):
            buffers[layer][:, target] = buffers[layer].take_along_dim(rows[:, :, None, None], 1)


SCENE_CUT = "The scene transitions. "  # how the prompt of a later shot begins, in LongLive 2.0's captions


def begins_shot(prompt: str | None) -> bool:
    """Return whether a later block with this prompt begins a shot."""
    return prompt is not None and prompt.startswith(SCENE_CUT)


@dataclass
class MultiShot(WindowedPolicy):
    """Keep the first S frames, those of the shot, and the newest: the multi-shot sink of LongLive 2.0.

    https://github.com/NVlabs/LongLive (2.0). A block whose prompt begins with SCENE_CUT begins a shot. Once
    its clean keys are there, its first S frames are pinned, in place of the last shot's. The pin moves left
    with each eviction until it is right behind the sink, and stays there. Every shot places its blocks
    rope_offset frames further on; keys of the past stay where they are.
    """

    window: files.Count = 32
    sink: files.Frames = 8
    rope_offset: files.Frames = 8

    name = "multi_shot"
    keeps_whole_frames = True
    can_recache = False

    def check_schedule(self, schedule: Sequence[PromptSwitch], blocks: Sequence[range]) -> None:
        super().check_schedule(schedule, blocks)
        if not self.cuts(schedule):
            return
        sizes = {len(block) for block in blocks}
        size = max(sizes)
        least = self.sink + min(self.sink, size) + size
        if len(sizes) > 1 or self.sink % size or self.window % size or self.window < least:
            raise errors.ConfigError(
                f"cache_policy {self.name}: shots take equal blocks, sink {self.sink} and window "
                f"{self.window} of whole blocks ({size} frames), and a window of at least {least}"
            )

    def cuts(self, schedule: Sequence[PromptSwitch]) -> list[int]:
        return [switch.frame for switch in schedule if begins_shot(switch.prompt)]

    def switch_from(self, how: How) -> int | None:
        if how == "keep":
            return 0
        return None

    def start(self, cache: KVCache) -> None:
        self._cuts = 0  # shots that a prompt has begun
        self._begins_shot = False  # whether the next block does
        self._began_shot = False  # whether the newest block did
        self._pinned = range(0)  # slots

    def see_prompt(self, prompt: str) -> None:
        self._begins_shot = begins_shot(prompt)

    def admit(self, cache: KVCache, block: range) -> None:
        # 1. The newest block is finished. If it began a shot, the clean keys of its slots are pinned.
        if self._began_shot:
            self._pinned = cache.own[: self.sink]
        # 2. Make room for the block, and place it behind the offsets of all shots so far, its own included.
        super().admit(cache, block)
        if self._begins_shot:
            self._cuts += 1
        offset = self._cuts * self.rope_offset
        for index, frame in zip(cache.own, block, strict=True):
            cache.slots[index] = Slot(frame, frame + offset)
        self._began_shot, self._begins_shot = self._begins_shot, False

    def evict(self, cache: KVCache, count: int) -> None:
        protected = self.sink
        if self._pinned.start == self.sink:
            protected += len(self._pinned)
        cache.drop(protected, count)
        if self._pinned.start >= protected:
            self._pinned = range(self._pinned.start - count, self._pinned.stop - count)


# --- Classes of heads, each with a policy and a cache of its own


@dataclass(eq=False)
class HeadClass:
    """The heads of a class and their cache. Every process has one, also where no head of it is."""

    cache: KVCache
    in_layer: list[bool]  # per layer whether the model has heads of this class there
    numbers: list[tuple[int, ...]]  # per layer those of this process
    index: list[Tensor]  # the same, on the device


class PerHeadCache(AnyCache):
    """A KVCache for each class of heads."""

    policy: "PerHead"

    def __init__(self, sizes: CacheSizes, policy: CachePolicy):
        super().__init__(sizes, policy)
        self.classes: list[HeadClass] = []
        for label, of_class in self.policy.policies.items():
            heads = [[head for head, other in enumerate(row) if other == label] for row in self.policy.labels]
            if not any(heads):
                continue
            numbers = [tuple(self.shard.local(row)) for row in heads]
            self.classes.append(
                HeadClass(
                    cache=KVCache(replace(sizes, num_heads=[len(row) for row in numbers]), of_class),
                    in_layer=[bool(row) for row in heads],
                    numbers=numbers,
                    index=[torch.tensor(row, dtype=torch.long, device=sizes.device) for row in numbers],
                )
            )
        self.caches = [head_class.cache for head_class in self.classes]

    def advance(self, block: range, text: Text = (), cut: bool = False) -> None:
        for head_class in self.classes:
            rows = zip(text, head_class.index, strict=False)
            head_class.cache.advance(block, [(k[:, :, row], v[:, :, row]) for (k, v), row in rows], cut)
        first, self.newest = self.caches[0], block
        self.query_positions, self.key_positions = first.query_positions, first.key_positions
        self.stores_raw = any(cache.stores_raw for cache in self.caches)

    def flush(self) -> None:
        for cache in self.caches:
            cache.flush()

    def begin_pass(self, is_clean: bool) -> None:
        for cache in self.caches:
            cache.begin_pass(is_clean)
        self.stores_raw = any(cache.stores_raw for cache in self.caches)

    def write(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_k: Tensor | None = None
    ) -> list[HeadGroup]:
        groups = []
        for head_class in self.classes:
            if not head_class.in_layer[layer]:
                continue
            cache, row, raw = head_class.cache, head_class.index[layer], None
            if raw_k is not None and cache.stores_raw:
                raw = raw_k[:, :, row]
            queries = q[:, :, row]
            keys, values = cache.write(layer, queries, k[:, :, row], v[:, :, row], raw)
            if not len(row):
                continue
            group = HeadGroup(
                numbers=head_class.numbers[layer],
                heads=row,
                q=queries,
                k=keys,
                v=values,
                parts=partial(cache.parts, layer, len(row)),
            )
            groups.append(group)
        return groups

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)


def read_rows(file: str) -> list[list[str]]:
    """Return the cells of a CSV without its lines of #; ValueError for rows of different lengths."""
    lines = [
        line for line in files.read_text(file, files.CONFIG_BYTES).splitlines() if not line.startswith("#")
    ]
    rows = [[cell.strip() for cell in row] for row in csv.reader(lines) if row]
    if any(len(row) != len(rows[0]) for row in rows):
        raise ValueError("rows of different lengths")
    return rows


@dataclass
class PerHead(CachePolicy):
    """Give each class of heads a policy and a cache of its own.

    For labels as those of Pyramid Forcing (https://github.com/IF-LAB-PKU/Pyramid-Forcing) and Forcing-KV.
    file: a CSV of classes, layers x heads. policies: a policy for each class. All classes have the same query
    positions.

        make_policy("per_head", file="labels.csv",
                    policies={"near": {"name": "window", "window": 6}, "far": {"name": "full"}})
    """

    file: str = ""
    policies: dict[str, CachePolicy] = field(default_factory=dict)

    name = "per_head"
    cache_type = PerHeadCache
    by_heads = True
    can_recache = False

    def __post_init__(self) -> None:
        remedy = "give a CSV of layers x heads"
        with errors.library_reads(f"cache_policy {self.name}: {errors.short_repr(self.file)}", remedy=remedy):
            self.labels = read_rows(self.file)  # [layers][heads]
            self.of_model = len(self.labels), len(self.labels[0])
        super().__post_init__()

    def describe(self) -> dict[str, Any]:
        classes = {label: policy.describe() for label, policy in self.policies.items()}
        return {"name": self.name, "file": self.file, "policies": classes}

    def conflict(self, block_sizes: Sequence[int] = ()) -> str:
        lost = sorted({label for row in self.labels for label in row} - {*self.policies})
        if lost:
            return f"class {errors.short_repr(lost[0])} of {self.file} has no policy"
        for label, policy in self.policies.items():
            problem = policy.conflict(block_sizes)
            if policy.release or policy.by_heads:
                problem = "it has no clean rule; leave released out"
            if isinstance(policy, MultiShot):
                problem = "multi_shot places the queries of all heads; give it alone"
            if problem:
                return f"class {errors.short_repr(label)}: {problem}"
        # The model rotates the queries of a block once for all heads.
        by_slot = {label: policy for label, policy in self.policies.items() if policy.positions_follow_slots}
        windows = {policy.num_frames for policy in by_slot.values()}
        if by_slot and (len(by_slot) < len(self.policies) or len(windows) > 1):
            problem = "queries of classes stand at different positions; policies with keys at 0..n-1"
            return f"{problem} ({', '.join(by_slot)}) go together only, with one window"
        return super().conflict(block_sizes)

    def switch_from(self, how: How) -> int | None:
        """Return None for a flush, too, where queries behind sinks of several sizes would stand apart."""
        sinks = {policy.sink for policy in self.policies.values() if policy.positions_follow_slots}
        if how in ("flush", "cut") and len(sinks) > 1:
            return None
        return super().switch_from(how)

    @property
    def chooses_by_layer(self) -> bool:  # type: ignore[override]  # of a class's policy a constant
        return any(policy.chooses_by_layer for policy in self.policies.values())

    @property
    def num_frames(self) -> int | None:
        sizes = [policy.num_frames for policy in self.policies.values()]
        limited = [size for size in sizes if size is not None]
        if len(limited) < len(sizes):
            return None
        return max(limited)

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        """Return the memory of the mean head, rounded up."""
        sizes = {label: policy.capacity(num_frames, block_size) for label, policy in self.policies.items()}
        slots = [sizes[label].slots for row in self.labels for label in row]
        mean = math.ceil(sum(slots) / len(slots))
        state_frames = max(size.state_frames for size in sizes.values())
        if any(size.raw_slots for size in sizes.values()):
            return Capacity(mean, raw_slots=mean, state_frames=state_frames)
        return Capacity(mean, state_frames=state_frames)


@dataclass
class HeadBudget(PerHead):
    """Give every head a window and a sink of its own, in frames. file: a CSV of layer, head, window, sink."""

    policies: dict[str, CachePolicy] = field(init=False, default_factory=dict)

    name = "head_budget"

    def __post_init__(self) -> None:
        remedy = "give a CSV of columns layer, head, window and sink, a row for every head"
        with errors.library_reads(f"cache_policy {self.name}: {errors.short_repr(self.file)}", remedy=remedy):
            header, *lines = read_rows(self.file)
            rows = [dict(zip(header, map(int, line), strict=True)) for line in lines]
            of_head = {(row["layer"], row["head"]): (row["window"], row["sink"]) for row in rows}
            layers, heads = (max(index) + 1 for index in zip(*of_head, strict=True))
            budgets = [[of_head[layer, head] for head in range(heads)] for layer in range(layers)]
        # A class for every window and sink
        self.labels = [[f"{window}, {sink}" for window, sink in row] for row in budgets]
        self.policies = {
            f"{window}, {sink}": Window(window=window, sink=sink)
            for window, sink in sorted({*of_head.values()})
        }
        self.of_model = layers, heads
        CachePolicy.__post_init__(self)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "file": self.file}
