"""Policies that choose, after each block, which tokens every single head keeps.

Each class is the policy of a publication, under its name in configs; a subclass right behind it has the
quirks of its public code. Letters: B batch, L tokens of a block, S tokens per frame, H heads, h heads of a
kind, D head dim, n keys.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from wan import errors, files
from wan.cache import AnyCache, CachePolicy, CacheSizes, Capacity, How, Text
from wan.keys import CHOSEN, MIXED, ChosenTokens, HeadGroup, KeyLayout, RotaryTable, Slot, rotate, send

# --- The cache


@dataclass(eq=False)
class Kind:
    """Heads of a layer that see equally many keys: the past ones, with room for the block behind them."""

    heads: tuple[int, ...]  # among those that are here
    here: Tensor | slice  # the same as an index on the device
    keys: Tensor  # [B, past + own, h, D]
    values: Tensor
    ids: Tensor  # number in the video, frame·S + place, of every past key, [B or 1, past, h or 1]

    @property
    def past(self) -> int:
        return self.ids.shape[1]

    def of(self, x: Tensor) -> Tensor:
        """Its heads of x [B, L, H, D]."""
        if isinstance(self.here, slice):
            return x
        return x.index_select(2, self.here)


class HeadwiseCache(AnyCache):
    """Keys that differ from head to head; write() returns kinds of heads, as groups of wan/keys.py.

    Keys are stored rotated at their own frame and stay there. After the clean pass of a block the policy says
    which of the tokens that a head saw stay.
    """

    policy: "HeadwisePolicy"

    def __init__(self, sizes: CacheSizes, policy: CachePolicy):
        super().__init__(sizes, policy)
        self.head_dim, self.block_size = sizes.head_dim, sizes.block_size
        self.device = torch.device(sizes.device)
        # Where items of a batch keep other frames, heads of all items stand one item after the other.
        self.items = 1
        if self.policy.keeps_items_apart:
            self.items = sizes.batch
        self.num_heads = sizes.num_heads[0] * self.items
        shape = sizes.batch // self.items, 0, self.num_heads, sizes.head_dim
        empty = torch.empty(shape, dtype=sizes.dtype, device=sizes.device)
        no_ids = torch.empty(1, 0, 1, dtype=torch.long, device=sizes.device)
        self.kinds = [[self.one_kind(empty, empty, no_ids)] for _ in sizes.num_heads]  # by layer
        self.block = -1  # the number of the newest block
        self.sink = range(self.policy.sink)  # the frames of the sink
        self.own = 0  # how many of the newest frames' tokens have room; of a cache computed again the last
        self.is_recache = self.is_clean = False
        self.policy.start(self)

    def advance(self, block: range, text: Text = (), cut: bool = False) -> None:
        self.block += 1
        self.policy.admit(self, block)
        self._announce(block, len(block) * self.tokens_per_frame, is_recache=False)

    def recache(self, frames: range, text: Text = (), lasts: bool = True) -> None:
        self._announce(frames, self.policy.forget(self, frames), is_recache=True)

    def begin_pass(self, is_clean: bool) -> None:
        self.is_clean = is_clean

    def write(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_k: Tensor | None = None
    ) -> list[HeadGroup]:
        """Store the newest frames' keys and values [B, L, H, D]; return what each kind of heads sees.

        The clean pass's last layer ends the block: from then on heads hold what the policy lets them keep.
        """
        if self.items > 1:
            q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k, v))  # [1, L, items·H, D]
        groups = []
        # 1. Each kind stores its heads of the newest frames behind its past.
        for kind in self.kinds[layer]:
            new_k, new_v = kind.of(k[:, -self.own :]), kind.of(v[:, -self.own :])
            kind.keys[:, kind.past :], kind.values[:, kind.past :] = new_k.detach(), new_v.detach()
            keys, values = kind.keys, kind.values
            if torch.is_grad_enabled():  # a copy, as of KVCache.write: the block's keys keep their gradients
                keys = torch.cat([keys[:, : kind.past], new_k], 1)
                values = torch.cat([values[:, : kind.past], new_v], 1)
            group = HeadGroup(
                numbers=kind.heads,
                heads=kind.here,
                q=kind.of(q),
                k=keys,
                v=values,
                parts=partial(self.parts, kind, self.sink),
            )
            groups.append(group)
        # 2. A clean pass is the last over its frames: the policy chooses once all layers have come.
        if self.is_clean:
            self.policy.observe(self, layer, q.detach())
            if layer + 1 == self.num_layers and self.is_recache:
                self.policy.recached(self)
            elif layer + 1 == self.num_layers:
                self.policy.finish(self)
        return groups

    def parts(self, kind: Kind, sink: range) -> list[tuple[list[int], KeyLayout]]:
        """Return the layouts of a kind's keys, each with the places of its heads that see the same tokens."""
        if self.items > 1:
            problem = f"cache_policy {self.policy.name}: videos of a batch of {self.items} keep other frames"
            raise errors.ConfigError(f"{problem}; capture and edit them one by one")
        stop = self.newest.stop * self.tokens_per_frame
        past = kind.ids.cpu()  # [B or 1, past, h or 1]; one wait for the device
        alike: dict[bytes, tuple[Tensor, list[int]]] = {}
        newest = torch.arange(stop - self.own, stop).expand(len(past), -1)
        for head in range(len(kind.heads)):
            row = past[..., min(head, past.shape[2] - 1)]
            alike.setdefault(row.numpy().tobytes(), (row, []))[1].append(head)
        return [(heads, self._layout(torch.cat([row, newest], 1), sink)) for row, heads in alike.values()]

    def _layout(self, ids: Tensor, sink: range) -> KeyLayout:
        """Return the layout of keys by their numbers in the video, int64 [B or 1, n].

        Slots are of whole frames where they can be, else of as many tokens as divide all. A slot whose tokens
        are of several frames, or of other ones for each batch item, is CHOSEN.
        """
        # 1. Cut the keys into slots, and find those that hold tokens 0..S-1 of one frame.
        S, size = self.tokens_per_frame, math.gcd(self.tokens_per_frame, ids.shape[1])
        seen = torch.stack([ids // S, ids % S])
        frames, tokens = seen.unflatten(2, (-1, size))  # [B or 1, slots, size]
        one_frame = (frames == frames[:1, :, :1]).all(2).all(0)
        whole = one_frame & (tokens == torch.arange(S)[:size]).all(2).all(0) & (size == S)
        slots = [Slot(frame, frame) for frame in frames[0, :, 0].tolist()]
        for number in (~one_frame).nonzero().flatten().tolist():
            slots[number] = Slot(CHOSEN, MIXED)
        # 2. From the first to the last slot that is none of these, every token is named.
        chosen, mixed = None, (~whole).nonzero().flatten().tolist()
        if mixed:
            named = range(mixed[0], mixed[-1] + 1)
            of_frame, place = seen[:, :, named.start * size : named.stop * size]
            chosen = ChosenTokens(named, frames=of_frame, indices=place, positions=of_frame)
        # 3. The block's own slots, which come last, and those of the sink, which come first.
        own_slots = range(len(slots) - self.own // size, len(slots))
        deep = next((n for n in range(own_slots.start) if slots[n].frame not in sink), own_slots.start)
        alone: tuple[KeyLayout, ...] = ()
        if len(ids) > 1:
            alone = tuple(self._layout(row, sink) for row in ids.split(1))
        return KeyLayout(
            slots=tuple(slots),
            tokens_per_slot=size,
            own=own_slots,
            query_positions=tuple(self.newest),
            chosen=chosen,
            sink=range(deep),
            alone=alone,
        )

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for kinds in self.kinds for kind in kinds for x in (kind.keys, kind.values))

    # -- for policies ----------------------------------------------------------------------------------------

    def rows(self, *tokens: range) -> Tensor:
        """Return an index [1, n, 1] of these tokens, as keep() takes it."""
        numbers = [torch.arange(part.start, part.stop, device=self.device) for part in tokens]
        return torch.cat(numbers)[None, :, None]

    def keep(self, layer: int, kinds: Sequence[tuple[Sequence[int], Tensor]]) -> None:
        """Let heads hold these of the tokens that they see: for heads that become a kind, an index.

        An index is [B or 1, n, h or 1]. Heads that become one kind were of one kind before.
        """
        before, self.kinds[layer] = self.kinds[layer], []
        for heads, index in kinds:
            if not len(heads):
                continue
            # 1. The kind that these heads were of, and their columns in it.
            old = next(kind for kind in before if heads[0] in kind.heads)
            here, keys, values, ids = old.here, old.keys, old.values, self.seen(old)
            if len(heads) < len(old.heads):
                here = send(torch.tensor(heads), self.device)
                columns = send(torch.tensor([old.heads.index(head) for head in heads]), self.device)
                keys, values = keys.index_select(2, columns), values.index_select(2, columns)
                if ids.shape[2] > 1:
                    ids = ids.index_select(2, columns)
            # 2. The tokens that stay, with room for the next block behind them.
            kind = Kind(
                heads=tuple(heads),
                here=here,
                keys=taken(keys, index, room=self.own),
                values=taken(values, index, room=self.own),
                ids=ids.take_along_dim(index, 1),
            )
            self.kinds[layer].append(kind)

    def one_kind(self, keys: Tensor, values: Tensor, ids: Tensor) -> Kind:
        """Return a kind of all heads of a layer."""
        return Kind(heads=tuple(range(self.num_heads)), here=slice(None), keys=keys, values=values, ids=ids)

    def keep_first(self, count: int) -> None:
        """Make all heads of a layer one kind again, with its first tokens, which all of them have."""
        for layer, kinds in enumerate(self.kinds):
            first = kinds[0]
            count = min(count, first.past)
            keys = first.keys.new_empty(first.keys.shape[0], count, self.num_heads, self.head_dim)
            values, ids = torch.empty_like(keys), first.ids[:, :count]
            for kind in kinds:
                keys[:, :, kind.here], values[:, :, kind.here] = kind.keys[:, :count], kind.values[:, :count]
            if len(kinds) > 1:
                ids = ids[:1, :, :1]
            self.kinds[layer] = [self.one_kind(keys, values, ids)]

    def seen(self, kind: Kind) -> Tensor:
        """Return the number in the video of every key that a kind sees, its own too, [B or 1, n, h or 1]."""
        stop = self.newest.stop * self.tokens_per_frame
        newest = torch.arange(stop - self.own, stop, device=self.device)[None, :, None]
        return torch.cat([kind.ids, newest.expand(kind.ids.shape[0], -1, kind.ids.shape[2])], 1)

    def _announce(self, frames: range, room: int, is_recache: bool) -> None:
        """Make room for so many of the frames' tokens behind the past of every kind."""
        self.newest, self.own, self.is_recache = frames, room, is_recache
        self.query_positions = self.key_positions = frames
        for kind in (kind for kinds in self.kinds for kind in kinds):
            if kind.keys.shape[1] != kind.past + room:
                past = self.rows(range(kind.past))
                kind.keys, kind.values = taken(kind.keys, past, room), taken(kind.values, past, room)


def taken(x: Tensor, index: Tensor, room: int) -> Tensor:
    """Return tokens [B or 1, n, h or 1] of x [B, N, h, D], with room behind them, [B, n + room, h, D]."""
    n = index.shape[1]
    out = x.new_empty(x.shape[0], n + room, *x.shape[2:])
    if index.shape[0] == index.shape[2] == 1:
        torch.index_select(x, 1, index.flatten(), out=out[:, :n])
    else:
        torch.gather(x, 1, index[..., None].expand(x.shape[0], n, *x.shape[2:]), out=out[:, :n])
    return out


@dataclass
class HeadwisePolicy(CachePolicy):
    """Choose after the clean pass of a block which of the tokens that a head saw it keeps.

    A change of prompts keeps the cache, or computes it again over the last recomputed_frames.
    """

    cache_type = HeadwiseCache
    by_heads = True
    keeps_items_apart: ClassVar[bool] = False  # videos of a batch have classes of their own
    can_recache = False  # before every block; at a change of prompts they do

    def switch_from(self, how: How) -> int | None:
        if how in ("keep", "recache"):
            return 0
        return None

    def admit(self, cache: HeadwiseCache, block: range) -> None:
        """Make room for the frames of a block, if finish() has not done so."""

    def observe(self, cache: HeadwiseCache, layer: int, q: Tensor) -> None:
        """Read the queries [B, L, H, D] of a clean pass, whose keys lie in the cache."""

    def finish(self, cache: HeadwiseCache) -> None:
        """Choose after a block's clean pass which of the keys that they saw heads keep; by default all."""
        for layer, kinds in enumerate(cache.kinds):
            cache.keep(layer, [(kind.heads, cache.rows(range(kind.keys.shape[1]))) for kind in kinds])

    def forget(self, cache: HeadwiseCache, frames: range) -> int:
        """Empty the cache but for a lasting sink; return how many tokens of frames to compute have room."""
        cache.keep_first(self.lasting_sink * cache.tokens_per_frame)
        return len(frames) * cache.tokens_per_frame

    def recached(self, cache: HeadwiseCache) -> None:
        """Let heads keep what they may of frames that were computed again."""
        self.finish(cache)


def tail(start: int, stop: int, count: int) -> range:
    """Return the last count of start..stop - 1."""
    return range(max(start, stop - count), stop)


SINK, NEIGHBOUR, DUMMY = range(3)


@dataclass
class DummyForcing(HeadwisePolicy):
    """Let half of the heads see hardly any past: Dummy Forcing, arXiv 2601.20499.

    Until the clean pass of block ar_start all heads see frame 0 and local_context_length blocks. Attention of
    rows of that pass, drawn by row_seed, then makes three classes over all layers: the num_dummy heads with
    the least mass on first and middle frames see the last frame, the others frame 0 (sink) or
    local_context_length blocks (neighbour). In the block after a recache that begins before block
    local_context_length, neighbour heads see all recomputed frames but the first.
    """

    ar_start: files.Frames = 1
    local_context_length: files.Count = 1
    num_dummy: files.Frames = 180
    row_seed: int = 0
    num_recomputed: files.Count = 12

    name = "dummy_forcing"
    sink = 1
    keeps_items_apart = True

    def conflict(self, block_sizes: Sequence[int] = ()) -> str:
        if self.ar_start == 0:
            return "ar_start 0 has no middle frames to classify by; take 1 or more"
        return super().conflict(block_sizes)

    def misfit(self, num_layers: int, num_heads: int, tokens_per_frame: int) -> str:
        total = num_layers * num_heads
        if self.num_dummy > total:
            return f"num_dummy {self.num_dummy} of a model of {total} heads"
        return ""

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        return Capacity(min(num_frames, 1 + (self.local_context_length + 1) * block_size))

    def start(self, cache: HeadwiseCache) -> None:
        self.head_class: Tensor | None = None  # [items, layers, heads]
        self.head_mass: list[Tensor] = []  # per layer [items, heads, (first, middle, own)]
        self._generator = torch.Generator().manual_seed(self.row_seed)

    def observe(self, cache: HeadwiseCache, layer: int, q: Tensor) -> None:
        if cache.is_recache or cache.block != self.ar_start:
            return
        # 1. Drawn rows of the block's queries; where videos of a batch stand apart, q[0] has heads of all.
        tokens = first = q.shape[1]
        if self.ar_start == 1:
            first = cache.tokens_per_frame
        rows = torch.randint(0, tokens, (first // 3,), generator=self._generator)
        queries = q[0, send(rows, q.device)].float().transpose(0, 1)  # [H, rows, D]
        [kind] = cache.kinds[layer]
        logits = queries @ kind.keys[0].float().permute(1, 2, 0) * cache.head_dim**-0.5
        # 2. Mass on the first frame (or block), on those between, and on the block itself.
        weights, shares = logits.softmax(-1), (slice(first), slice(first, -tokens), slice(-tokens, None))
        mass = torch.stack([weights[:, :, keys].sum(-1).mean(-1) for keys in shares], -1)  # [H, 3]
        self.head_mass.append(cache.shard.gather(mass.unflatten(0, (cache.items, -1)), 1).cpu())

    def finish(self, cache: HeadwiseCache) -> None:
        S, block = cache.tokens_per_frame, cache.block
        if cache.is_recache:
            block = cache.newest.start // cache.block_size
        sees_all = self.head_class is None or cache.is_recache  # every head
        # 1. The clean pass of block ar_start divides the heads.
        if cache.block == self.ar_start and not cache.is_recache:
            self.head_class = torch.stack([self._classes(mass) for mass in torch.stack(self.head_mass, 1)])
        # 2. Until then all keep frame 0 and the last blocks; later each class what it sees.
        last_blocks = self.local_context_length * cache.block_size * S  # tokens
        for layer, kinds in enumerate(cache.kinds):
            holds: list[tuple[Sequence[int], Tensor]] = []
            for kind in kinds:
                n = kind.keys.shape[1]
                if sees_all and block < self.local_context_length:
                    local = range(S, n)  # there are no more blocks
                elif self.head_class is None:
                    local = tail(S, n, last_blocks)
                else:
                    local = tail(0, n, last_blocks)
                if self.head_class is None:
                    holds.append((kind.heads, cache.rows(range(S), local)))
                else:
                    classes = self.head_class[:, layer, cache.shard.heads.start : cache.shard.heads.stop]
                    holds += self.of_classes(cache, kind, classes.flatten().tolist(), local)
            cache.keep(layer, holds)

    def of_classes(
        self, cache: HeadwiseCache, kind: Kind, classes: Sequence[int], local: range
    ) -> list[tuple[Sequence[int], Tensor]]:
        """Return which heads of a kind keep which tokens, as keep() takes it; classes are of all heads."""
        S, n = cache.tokens_per_frame, kind.keys.shape[1]
        neighbours = [head for head in kind.heads if classes[head] == NEIGHBOUR]
        # Sink and dummy heads keep a frame each, and so go through attention together.
        others = [head for head in kind.heads if classes[head] != NEIGHBOUR]
        first_token = {SINK: 0, DUMMY: n - S}
        starts = torch.tensor([first_token[classes[head]] for head in others]).long()
        frames = send(starts, cache.device) + cache.rows(range(S))  # [1, S, h]
        return [(neighbours, cache.rows(local)), (others, frames)]

    def recached(self, cache: HeadwiseCache) -> None:
        cache.sink = cache.newest[:1]
        self.finish(cache)

    def _classes(self, mass: Tensor) -> Tensor:
        """Return the class of every head [layers, heads] from masses [layers, heads, 3]."""
        first, middle = (mass[..., i].flatten() / mass[..., i].sum() for i in (0, 1))
        classes = torch.where(first < middle, NEIGHBOUR, SINK)
        classes[torch.maximum(first, middle).argsort()[: self.num_dummy]] = DUMMY
        return classes.view(mass.shape[:2])


class DummyForcingRelease(DummyForcing):
    """Dummy Forcing as released: https://github.com/csguoh/DummyForcing at 28128ed.

    The classes of a batch's first item are those of all, and ar_start may be 0 (wan/modules/dummyforcing.py).
    """

    release = "dummy_forcing"
    blocks_of_three = True
    keeps_items_apart = False

    def conflict(self, block_sizes: Sequence[int] = ()) -> str:
        return HeadwisePolicy.conflict(self, block_sizes)

    def switch_from(self, how: How) -> int | None:
        if how == "recache":
            return 3 * self.ar_start + 1
        return super().switch_from(how)


@dataclass
class ForcingKV(HeadwisePolicy):
    """Keep few recent frames in static heads, and what changes in dynamic ones: Forcing-KV, arXiv 2605.09681.

    Until the clean pass of block ar_start all heads see a sink and the last max(spatial_context_length,
    temporal_context_length) frames; layer 0 goes on so. Then static heads keep the last
    spatial_context_length frames, dynamic ones the last temporal_context_length, and before them
    dynamic_context_length frames' worth of chunks, num_frame_patch a frame, of the three frames from the
    recent ones on: those least like the same tokens of the next frame, by the cosine of the rotated keys of
    layer 1's dynamic heads. heads: a CSV or an array [layers, heads], 1 static, 0 dynamic. num_recomputed:
    frames that a recache computes, None for all of the past (the release's local_attn_size -1); with a window
    the release takes max(sink, context lengths, 1).
    """

    sink: files.Frames = 1
    ar_start: files.Frames = 1
    spatial_context_length: files.Frames = 1
    temporal_context_length: files.Frames = 1
    dynamic_context_length: Annotated[int, Field(ge=0, le=3)] = 1  # 0: no chunks
    num_frame_patch: files.Count = 6
    heads: object = ""
    num_recomputed: files.Count | None = None

    name = "forcing_kv"
    global_sink = True

    def __post_init__(self) -> None:
        self.is_static = read_static_heads(self.heads)
        self.of_model = self.is_static.shape
        super().__post_init__()

    @property
    def num_frames(self) -> int:
        longest = max(self.spatial_context_length, self.temporal_context_length + self.dynamic_context_length)
        return self.sink + longest + 3

    @property
    def lengths(self) -> dict[bool | None, int]:
        """Recent frames of static heads, of dynamic ones, and of layers that are not divided."""
        static, dynamic = self.spatial_context_length, self.temporal_context_length
        return {True: static, False: dynamic, None: max(static, dynamic)}

    def conflict(self, block_sizes: Sequence[int] = ()) -> str:
        has_room = set(block_sizes) <= {3} and 1 <= self.temporal_context_length <= 3
        if self.dynamic_context_length and not has_room:
            problem = "chosen chunks need blocks of 3 frames and a temporal_context_length of 1 to 3"
            return f"{problem}; or set dynamic_context_length: 0"
        return super().conflict(block_sizes)

    def misfit(self, num_layers: int, num_heads: int, tokens_per_frame: int) -> str:
        if self.dynamic_context_length and tokens_per_frame % self.num_frame_patch:
            patch = f"num_frame_patch {self.num_frame_patch}"
            return f"{patch} does not divide a frame of {tokens_per_frame} tokens"
        return super().misfit(num_layers, num_heads, tokens_per_frame)

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        """Return the memory of the mean head after the division, rounded up; layer 0 keeps the longer one."""
        static, dynamic = self.spatial_context_length, self.temporal_context_length
        dynamic += self.dynamic_context_length
        frames = np.where(self.is_static, static, dynamic)
        frames[0] = max(static, dynamic)
        return Capacity(min(num_frames, self.sink + block_size + math.ceil(frames.mean())))

    def start(self, cache: HeadwiseCache) -> None:
        self.is_divided = False
        self._recent = 0  # tokens of recent frames that dynamic heads hold
        self._chosen = 0  # tokens of chosen chunks before them

    def recached(self, cache: HeadwiseCache) -> None:
        self.divide(cache)

    def finish(self, cache: HeadwiseCache) -> None:
        if not self.is_divided and cache.block == self.ar_start:
            self.divide(cache)
        else:
            self.roll(cache)

    def divide(self, cache: HeadwiseCache) -> None:
        """Divide static from dynamic heads: each kind keeps its own part of the frames that all saw."""
        S, n = cache.tokens_per_frame, cache.kinds[0][0].keys.shape[1]
        sink = min(self.sink * S, n)
        self.is_divided, self._chosen = True, 0
        self._recent = min(self.temporal_context_length * S, n - sink)
        # Two kinds of heads in every layer but the first
        for layer in range(cache.num_layers):
            is_static = self.is_static[layer, cache.shard.heads.start : cache.shard.heads.stop]
            classes: dict[bool | None, np.ndarray] = {True: is_static, False: ~is_static}
            if layer == 0:
                classes = {None: np.ones_like(is_static)}
            holds = []
            for label, heads in classes.items():
                index = cache.rows(range(sink), tail(sink, n, self.lengths[label] * S))
                holds.append((np.flatnonzero(heads).tolist(), index))
            cache.keep(layer, holds)

    def roll(self, cache: HeadwiseCache) -> None:
        """Let every kind keep its sink, chosen chunks and recent frames."""
        S, chunks = cache.tokens_per_frame, None
        if self.is_divided and self._recent >= S and self.dynamic_context_length and cache.num_layers > 1:
            chunks = self._choose(cache)
        for layer in range(cache.num_layers):
            self.keep(cache, layer, chunks)
        self._recent = min(self.temporal_context_length * S, self._recent + cache.own)
        self._chosen = 0
        if chunks is not None:
            self._chosen = chunks.shape[1]

    def keep(self, cache: HeadwiseCache, layer: int, chunks: Tensor | None) -> None:
        """Let the kinds of a layer keep what they may, with chunks [B or 1, n] of tokens from the sink on."""
        kinds = cache.kinds[layer]
        cache.keep(layer, [(kind.heads, self.remaining(cache, layer, kind, chunks)) for kind in kinds])

    def remaining(self, cache: HeadwiseCache, layer: int, kind: Kind, chunks: Tensor | None) -> Tensor:
        """Return the index of the tokens that a kind keeps."""
        S, n, label = cache.tokens_per_frame, kind.keys.shape[1], self.class_of(cache, layer, kind)
        sink, recent = range(min(self.sink * S, n)), self.lengths[label] * S
        if label is not False:
            return cache.rows(sink, tail(sink.stop, n, recent))
        first = sink.stop + self._chosen
        if chunks is None:
            return cache.rows(sink, tail(first, n, recent))
        ends = [cache.rows(tokens).expand(len(chunks), -1, -1) for tokens in (sink, range(n - recent, n))]
        return torch.cat([ends[0], first + chunks[:, :, None], ends[1]], 1)

    def class_of(self, cache: HeadwiseCache, layer: int, kind: Kind) -> bool | None:
        """Return whether a kind's heads are static; None before kinds are divided."""
        if not self.is_divided or layer == 0:
            return None
        return bool(self.is_static[layer, cache.shard.heads[kind.heads[0]]])

    def _choose(self, cache: HeadwiseCache) -> Tensor:
        """Return the tokens of the chunks to keep, ascending from the first recent one on, [B or 1, n]."""
        # 1. Products and squares of frames i and i + 1 in layer 1's dynamic heads, summed over heads.
        S, P = cache.tokens_per_frame, self.num_frame_patch
        first = self.sink * S + self._chosen
        parts = torch.zeros(3, 1, 3, S, device=cache.device)  # stays where a process has none of them
        for kind in cache.kinds[1]:
            if not self.class_of(cache, 1, kind):
                frames = kind.keys[:, first : first + 4 * S].float().unflatten(1, (4, S))  # [B, 4, S, h, D]
                before, after = frames[:, :3], frames[:, 1:]
                pairs = ((before, after), (before, before), (after, after))
                parts = torch.stack([(x * y).sum((-1, -2)) for x, y in pairs])  # [3, B, 3, S]
        # 2. The cosine of each token and the same one a frame later, and its mean over a chunk.
        dot, *squares = cache.shard.sum(parts)
        cosine = dot / (squares[0].sqrt().clamp_min(1e-8) * squares[1].sqrt().clamp_min(1e-8))
        scores = self.deciding(cosine.unflatten(2, (P, -1)).mean(3))  # [B, 3, P]
        # 3. The chunks that are least alike, as tokens.
        count, size = self.dynamic_context_length * P, S // P
        chosen = scores.flatten(1).topk(count, largest=False).indices.sort().values
        return (chosen[:, :, None] * size + torch.arange(size, device=cache.device)).flatten(1)

    def deciding(self, scores: Tensor) -> Tensor:
        """Return the scores [B or 1, 3, P] by which videos of a batch choose: each by its own."""
        return scores


@dataclass
class ForcingKVRelease(ForcingKV):
    """Forcing-KV as released: https://github.com/zju-jiyicheng/Forcing-KV at 50ac1f4.

    The first item of a batch chooses for all, rings of more than three frames write values behind their keys,
    and without global_sink recomputed frames become the sink (wan/modules/causal_model_forcingkv.py).
    """

    global_sink: bool = True

    release = "forcing_kv"
    blocks_of_three = True

    def recached(self, cache: HeadwiseCache) -> None:
        if not self.global_sink:
            cache.sink = cache.newest[: self.sink]
        super().recached(cache)

    def start(self, cache: HeadwiseCache) -> None:
        super().start(cache)
        self._rings: dict[bool | None, Ring] = {}  # of static heads and of dynamic ones

    def deciding(self, scores: Tensor) -> Tensor:
        return scores[:1]

    def divide(self, cache: HeadwiseCache) -> None:
        S, n = cache.tokens_per_frame, cache.kinds[0][0].keys.shape[1]
        super().divide(cache)
        tokens, self._rings = n - min(self.sink * S, n), {}
        for label in (True, False):
            if self.lengths[label] > cache.block_size:
                self._rings[label] = Ring(self.lengths[label] * S, tokens)
        for layer, kinds in enumerate(cache.kinds):
            for kind in kinds:
                ring = self._rings.get(self.class_of(cache, layer, kind))
                if ring is not None:
                    ring.begin(layer, kind)

    def roll(self, cache: HeadwiseCache) -> None:
        super().roll(cache)
        for ring in self._rings.values():
            ring.advance(cache.own)

    def keep(self, cache: HeadwiseCache, layer: int, chunks: Tensor | None) -> None:
        before = cache.kinds[layer]
        super().keep(cache, layer, chunks)
        for kind, old in zip(cache.kinds[layer], before, strict=True):
            ring = self._rings.get(self.class_of(cache, layer, kind))
            if ring is not None:
                ring.write(layer, kind, old.values[:, -cache.own :])

    def remaining(self, cache: HeadwiseCache, layer: int, kind: Kind, chunks: Tensor | None) -> Tensor:
        ring = self._rings.get(self.class_of(cache, layer, kind))
        if ring is None:
            return super().remaining(cache, layer, kind, chunks)
        n = kind.keys.shape[1]
        sink = range(min(self.sink * cache.tokens_per_frame, n))
        order = [*sink, *ring.keys(sink.stop, n, cache.own)]
        return send(torch.tensor(order), cache.device)[None, :, None]


class Ring:
    """Hold recent tokens as Forcing-KV releases it: values are written where the next keys belong.

    _ring_append_ of the release moves the pointer before it writes the values.
    """

    def __init__(self, size: int, tokens: int):
        self.size, self.valid = size, min(size, tokens)
        self.pointer = self.valid % size
        self.values: dict[int, Tensor] = {}  # per layer [B, size, h, D]

    def keys(self, first: int, n: int, new: int) -> list[int]:
        """Return which of n tokens, the last of them new, lie in the ring that begins at first."""
        order = [*range(first, first + self.valid), *[-1] * (self.size - self.valid)]
        for i in range(new):
            order[(self.pointer + i) % self.size] = n - new + i
        return order[: self.valid + new]

    def begin(self, layer: int, kind: Kind) -> None:
        values = kind.values[:, kind.past - self.valid : kind.past]
        self.values[layer] = values.new_zeros(values.shape[0], self.size, *values.shape[2:])
        self.values[layer][:, : self.valid] = values

    def write(self, layer: int, kind: Kind, new: Tensor) -> None:
        """Store a block's values in the ring, and copy its newest ones beside a kind's keys."""
        count = new.shape[1]
        rows = (self.pointer + count + torch.arange(count, device=new.device)) % self.size
        self.values[layer][:, rows] = new
        valid = min(self.size, self.valid + count)
        kind.values[:, kind.past - valid : kind.past] = self.values[layer][:, :valid]

    def advance(self, count: int) -> None:
        self.pointer = (self.pointer + count) % self.size
        self.valid = min(self.size, self.valid + count)


@dataclass
class TriAttention(HeadwisePolicy):
    """Compress a window's tokens to budget_tokens by a score of each head: TriAttention, arXiv 2604.04921.

    After a block's clean pass, compress_every_n_frames or more after the last time, the sink, the last
    keep_last_frames and the tokens of highest score stay. The score of a key is the mean of what the
    calibrated mean query of its head would give it from 1, 2, 4, ... 128 frames later, and the mean modulus
    of queries beyond that mean times the modulus of the key; scores of a (layer, head) are normalised, and
    noise breaks ties. statistics: an .npz or a mapping of q_mean_real, q_mean_imag (or a complex q_mean) and
    q_abs_mean, [layers, heads, D / 2]; of a file of several, "FILE:120f" takes q_mean_120f and
    q_abs_mean_120f.
    """

    window: files.Count = 12
    sink: files.Frames = 3
    budget_tokens: Annotated[int, Field(ge=1, le=1 << 24)] = 9360
    compress_every_n_frames: files.Count = 3
    keep_last_frames: files.Frames = 3
    statistics: object = ""

    name = "triattention"
    global_sink = True
    offset_max_frames = 128
    random_seed = 0
    tie_break_noise_scale = 1e-6

    def __post_init__(self) -> None:
        self.q_mean, self.q_abs_mean = read_statistics(self.statistics)
        self.of_model = tuple(self.q_mean.shape[:2])
        super().__post_init__()

    def misfit(self, num_layers: int, num_heads: int, tokens_per_frame: int) -> str:
        most = self.window * tokens_per_frame
        if self.budget_tokens >= most:
            return f"budget_tokens {self.budget_tokens} must be below those of the window, {most}"
        return super().misfit(num_layers, num_heads, tokens_per_frame)

    def start(self, cache: HeadwiseCache) -> None:
        self._noise, self._last = torch.Generator().manual_seed(self.random_seed), 0

    def admit(self, cache: HeadwiseCache, block: range) -> None:
        """As in LongLive's window, the oldest tokens behind the sink leave where the block finds no room."""
        S, n = cache.tokens_per_frame, cache.kinds[0][0].past
        excess = n + (len(block) - self.window) * S
        if excess > 0:
            sink, cache.own = self.sink * S, 0
            for layer, [kind] in enumerate(cache.kinds):
                cache.keep(layer, [(kind.heads, cache.rows(range(sink), range(sink + excess, n)))])

    def forget(self, cache: HeadwiseCache, frames: range) -> int:
        n, room = cache.kinds[0][0].past, super().forget(cache, frames)
        return min(n - cache.kinds[0][0].past, room)

    def recached(self, cache: HeadwiseCache) -> None:
        self._compress(cache, is_due=True)

    def finish(self, cache: HeadwiseCache) -> None:
        self._compress(cache, is_due=cache.newest.stop - self._last >= self.compress_every_n_frames)

    def _compress(self, cache: HeadwiseCache, is_due: bool) -> None:
        # 1. Without need all tokens stay.
        S, n = cache.tokens_per_frame, cache.kinds[0][0].keys.shape[1]
        if not is_due or n <= self.budget_tokens:
            super().finish(cache)
            return
        # 2. The sink stays even beyond the budget, then the last frames; the rest is for tokens between them.
        sink = min(self.protected * S, n)
        last = min(self.keep_last_frames * S, max(0, self.budget_tokens - sink))
        count = max(0, self.budget_tokens - sink - last)
        first, newest = cache.rows(range(sink)), cache.rows(range(n - last, n))
        # 3. Each head keeps those of the highest score, in order of time.
        if count == 0:
            for layer, [kind] in enumerate(cache.kinds):
                cache.keep(layer, [(kind.heads, torch.cat([first, newest], 1))])
        else:
            scores = self.rank(cache, self._scores(cache, range(sink, n - last)))
            for layer, [kind] in enumerate(cache.kinds):
                chosen = sink + scores[layer].topk(count).indices.sort().values.mT  # [B, count, h]
                batch, _, heads = chosen.shape
                ends = [tokens.expand(batch, -1, heads) for tokens in (first, newest)]
                cache.keep(layer, [(kind.heads, torch.cat([ends[0], chosen, ends[1]], 1))])
        self.compressed(cache)

    @property
    def protected(self) -> int:
        """Frames that stay whatever their score."""
        return self.sink

    def compressed(self, cache: HeadwiseCache) -> None:
        """Remember the last frame that was compressed."""
        self._last = cache.newest.stop

    def places(self, cache: HeadwiseCache, kind: Kind) -> Tensor:
        """Return the number in the video of every key that a kind sees, [B or 1, n, h or 1]."""
        return cache.seen(kind)

    def aggregate(self, queries: Tensor) -> Tensor:
        """Return queries [layers, h, offsets, D] of which the best one scores a key: here their mean."""
        return queries.mean(2, keepdim=True)

    def rank(self, cache: HeadwiseCache, scores: Tensor) -> Tensor:
        """Return scores [layers, B, h, n], normalised and without ties, by which heads choose."""
        return self.without_ties(cache, self.normalised(scores))

    def normalised(self, scores: Tensor) -> Tensor:
        spread = scores.std(-1, unbiased=False, keepdim=True).clamp_min(1e-6)
        return (scores - scores.mean(-1, keepdim=True)) / spread

    def without_ties(self, cache: HeadwiseCache, scores: Tensor) -> Tensor:
        noise = torch.rand(cache.num_layers, cache.shard.total, scores.shape[-1], generator=self._noise)
        here = slice(cache.shard.heads.start, cache.shard.heads.stop)
        return scores + send(noise[:, None, here] * self.tie_break_noise_scale, cache.device)

    def _scores(self, cache: HeadwiseCache, between: range) -> Tensor:
        """Return scores [layers, B, h, n] of tokens that may leave."""
        S, here = cache.tokens_per_frame, slice(cache.shard.heads.start, cache.shard.heads.stop)
        # 1. The mean query of each head, in time at its distance from frame 0; as pairs of dims of a key.
        offsets = [2**i for i in range(max(1, self.offset_max_frames.bit_length()))]
        times = torch.tensor(offsets) + cache.newest.stop
        of_time = RotaryTable(cache.head_dim).freqs_cis(0, times)  # [offsets, pairs of time]
        turns = torch.ones(len(offsets), self.q_mean.shape[2], dtype=torch.complex128)
        turns[:, : of_time.shape[1]] = of_time
        turned = torch.view_as_real(self.q_mean[:, here, None] * turns)  # [layers, h, offsets, D / 2, 2]
        queries = self.aggregate(turned.flatten(-2))
        beyond = self.q_abs_mean[:, here] - self.q_mean[:, here].abs()  # [layers, h, D / 2]
        queries, beyond = send(queries.float(), cache.device), send(beyond.float(), cache.device)
        # 2. Keys at frame 0, row 0 and column 0, but for their own frame.
        cos, sin = (table[:, 0] for table in cache.rope(range(1)))  # [S, D]
        layer_scores = []
        for layer, [kind] in enumerate(cache.kinds):
            places = self.places(cache, kind)[:, between.start : between.stop] % S
            keys = kind.keys[:, between.start : between.stop].float()  # [B, n, h, D]
            keys = rotate(keys, cos[places], -sin[places])
            sizes = keys.unflatten(-1, (-1, 2)).norm(dim=-1)
            score = torch.einsum("bnhd,hod->bhno", keys, queries[layer]).amax(3)
            layer_scores.append(score + torch.einsum("bnhf,hf->bhn", sizes, beyond[layer]))
        return torch.stack(layer_scores)


@dataclass(eq=False)
class LastVideo:
    """What a pipeline's next video takes from the one before."""

    frame: int = 0  # the last one that was compressed
    noise: Tensor | None = None  # the state of the generator that breaks ties


@dataclass
class TriAttentionRelease(TriAttention):
    """TriAttention as released: https://github.com/WeianMao/triattention at c3744ee, with all its options.

    Rows and columns of keys are taken as if nothing had been chosen before (longlive/kv_compression.py,
    _sync_position_state). A pipeline's next video goes on with the noise of the one before, and is compressed
    only beyond its last compressed frame, unless its prompt changes. pruning_mode layer_perhead ranks by
    (layer, head), perhead by the mean (mean_of_layer_max) or max over layers.
    """

    pruning_mode: Literal["layer_perhead", "perhead"] = "layer_perhead"
    score_aggregation: Literal["mean", "max"] = "mean"
    perhead_layer_aggregation: Literal["mean_of_layer_max", "max"] = "mean_of_layer_max"
    offset_max_frames: files.Frames = 128
    normalize_scores: bool = True
    tie_break_noise: bool = True
    tie_break_noise_scale: files.Share = 1e-6
    random_seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    protect_sink: bool = True

    release = "triattention"
    blocks_of_three = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._before = LastVideo()  # caches share it

    def conflict(self, block_sizes: Sequence[int] = ()) -> str:
        if self.sink > 3:
            return f"released knows a sink of at most 3 frames, not {self.sink}; leave released out"
        return super().conflict(block_sizes)

    def switch_from(self, how: How) -> int | None:
        if how == "recache":
            return self.window + 1
        return super().switch_from(how)

    def start(self, cache: HeadwiseCache) -> None:
        super().start(cache)
        if self._before.noise is not None:
            self._noise.set_state(self._before.noise)

    def finish(self, cache: HeadwiseCache) -> None:
        if not cache.has_switches:
            self._last = self._before.frame
        super().finish(cache)

    def compressed(self, cache: HeadwiseCache) -> None:
        super().compressed(cache)
        self._before.frame, self._before.noise = self._last, self._noise.get_state()

    @property
    def protected(self) -> int:
        if self.protect_sink:
            return self.sink
        return 0

    def places(self, cache: HeadwiseCache, kind: Kind) -> Tensor:
        # The sink, and the newest tokens of the video
        S, n, sink = cache.tokens_per_frame, kind.keys.shape[1], self.sink * cache.tokens_per_frame
        stop = cache.newest.stop * S
        return cache.rows(range(sink), range(stop - n + sink, stop))

    def aggregate(self, queries: Tensor) -> Tensor:
        if self.score_aggregation == "max":
            return queries
        return super().aggregate(queries)

    def rank(self, cache: HeadwiseCache, scores: Tensor) -> Tensor:
        if self.normalize_scores:
            scores = self.normalised(scores)
        if self.tie_break_noise:
            scores = self.without_ties(cache, scores)
        if self.pruning_mode == "layer_perhead":
            return scores
        if self.perhead_layer_aggregation == "max":
            return scores.amax(0).expand_as(scores)
        return scores.mean(0).expand_as(scores)


# --- What policies read about heads


def read_static_heads(heads: Any) -> np.ndarray:
    """Return bool [layers, heads] from a CSV or an array of 1 (static) and 0."""
    remedy = "give a CSV or an array [layers, heads] of 1 (static) and 0 (dynamic)"
    with errors.library_reads(f"cache_policy forcing_kv: heads {errors.short_repr(heads)}", remedy=remedy):
        if isinstance(heads, str):
            heads = np.loadtxt(
                files.read_text(heads, files.CONFIG_BYTES).splitlines(), delimiter=",", ndmin=2
            )
        table = np.asarray(heads).astype(float)
        if table.ndim != 2 or not table.size or not np.isin(table, (0, 1)).all():
            raise ValueError(f"an array of shape {table.shape}, or of other values")
    return table.astype(bool)


def read_statistics(statistics: Any) -> tuple[Tensor, Tensor]:
    """Return mean queries complex64 and their mean moduli float32, [layers, heads, D / 2] each."""
    suffix, arrays, source = "", statistics, "given as a mapping"
    if isinstance(statistics, str):
        source = errors.short_repr(statistics)
    remedy = (
        "give an .npz (make_head_classes.py --rule triattention makes it) or a mapping of q_mean, or "
        "q_mean_real and q_mean_imag, and q_abs_mean, [layers, heads, D / 2]"
    )
    with errors.library_reads(f"cache_policy triattention: statistics {source}", remedy=remedy):
        if isinstance(statistics, str):
            path, _, suffix = statistics.partition(":")
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file)
        end = ""
        if suffix:
            end = f"_{suffix}"
        if f"q_mean{end}" in arrays:
            mean = torch.as_tensor(arrays[f"q_mean{end}"]).to(torch.complex64)
        else:
            parts = (torch.as_tensor(arrays[f"q_mean_{part}{end}"]).float() for part in ("real", "imag"))
            mean = torch.complex(*parts)
        sizes = torch.as_tensor(arrays[f"q_abs_mean{end}"]).float()
        if mean.ndim != 3 or mean.shape != sizes.shape:
            raise ValueError(f"shapes {tuple(mean.shape)} and {tuple(sizes.shape)}")
    return mean, sizes
