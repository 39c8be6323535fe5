"""Policies under which heads of a layer keep different keys: by classes of heads, or token by token.

Each class is the policy of a publication, under its name in configs. PerHead and HeadBudget give classes of
heads a policy of wan/policies/frames.py and a KVCache each, in a PerHeadCache; the others choose single
tokens in a HeadwiseCache. Letters: B batch, L tokens of a block, S tokens per frame, H heads, h heads of a
kind, D head dim, n keys.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from wan.cache import AnyCache, CachePolicy, CacheSizes, Capacity, How, KVCache, Text
from wan.errors import ConfigError, library_reads, short_repr
from wan.files import CONFIG_BYTES, Count, Frames, Share, read_json, read_text
from wan.keys import CHOSEN, MIXED, ChosenTokens, HeadGroup, KeyLayout, RotaryTable, Slot, rotate, send
from wan.policies.frames import Window

# --- Classes of heads, each with a policy and a cache of its own


class PerHeadCache(AnyCache):
    """A KVCache for each class of heads. A class has one in every process, also where no head of it is."""

    def __init__(self, sizes: CacheSizes, policy: CachePolicy):
        super().__init__(sizes, policy)
        # For each class its cache and, per layer: if it has heads at all, those that are here, their index.
        self.classes: list[tuple[KVCache, list[bool], list[tuple[int, ...]], list[Tensor]]] = []
        for label, of_class in self.policy.policies.items():
            heads = [[head for head, other in enumerate(row) if other == label] for row in self.policy.labels]
            numbers = [tuple(self.shard.local(row)) for row in heads]
            cache = KVCache(replace(sizes, num_heads=[*map(len, numbers)]), of_class)
            there = [torch.tensor(row, dtype=torch.long, device=sizes.device) for row in numbers]
            if any(heads):
                self.classes.append((cache, [*map(bool, heads)], numbers, there))
        self.caches = [cache for cache, *_ in self.classes]

    def advance(self, block: range, text: Text = (), cut: bool = False) -> None:
        for cache, _, _, here in self.classes:
            rows = zip(text, here, strict=False)
            cache.advance(block, [(k[:, :, row], v[:, :, row]) for (k, v), row in rows], cut)
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
        for cache, has_heads, numbers, here in self.classes:
            if not has_heads[layer]:
                continue
            row = here[layer]
            raw = raw_k[:, :, row] if raw_k is not None and cache.stores_raw else None
            queries = q[:, :, row]
            seen = cache.write(layer, queries, k[:, :, row], v[:, :, row], raw)
            if len(row):
                parts = partial(cache.parts, layer, len(row))
                groups.append(HeadGroup(numbers[layer], row, queries, *seen, parts))
        return groups

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)


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
    file_has = "layers x heads, or of columns layer, head and more that name every head"

    def __post_init__(self) -> None:
        remedy = f"give a CSV of {self.file_has}"
        with library_reads(f"cache_policy {self.name}: {short_repr(self.file)}", remedy=remedy):
            self.labels = self.classes(read_columns(self.file))
        self.of_model = len(self.labels), len(self.labels[0])
        super().__post_init__()

    def classes(self, columns: dict[str, list[list[str]]]) -> list[list[str]]:
        """Return the class of every head [layers][heads] from the columns of the file."""
        return next(iter(columns.values()))

    def describe(self) -> dict[str, Any]:
        classes = {label: policy.describe() for label, policy in self.policies.items()}
        return {"name": self.name, "file": self.file, "policies": classes}

    def conflict(self, block_sizes: Sequence[int] = ()) -> str:
        if lost := sorted({label for row in self.labels for label in row} - {*self.policies}):
            return f"class {short_repr(lost[0])} of {self.file} has no policy"
        for label, policy in self.policies.items():
            problem = policy.conflict(block_sizes)
            if policy.source or policy.by_heads:
                problem = "it has no clean rule; leave released out"
            if problem:
                return f"class {short_repr(label)}: {problem}"
        # The model rotates the queries of a block once for all heads.
        by_slot = {label: one for label, one in self.policies.items() if one.positions_follow_slots}
        windows = {one.num_frames for one in by_slot.values()}
        if by_slot and (len(by_slot) < len(self.policies) or len(windows) > 1):
            problem = "queries of classes stand at different positions; policies with keys at 0..n-1"
            return f"{problem} ({', '.join(by_slot)}) go together only, with one window"
        return super().conflict(block_sizes)

    def switch_from(self, how: How) -> int | None:
        """Return None for a flush, too, where queries behind sinks of several sizes would stand apart."""
        sinks = {one.sink for one in self.policies.values() if one.positions_follow_slots}
        return None if how in ("flush", "cut") and len(sinks) > 1 else super().switch_from(how)

    @property
    def chooses_by_layer(self) -> bool:  # type: ignore[override]  # of a class's policy a constant
        return any(policy.chooses_by_layer for policy in self.policies.values())

    @property
    def num_frames(self) -> int | None:
        seen = [policy.num_frames for policy in self.policies.values()]
        return None if None in seen else max(size for size in seen if size is not None)

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        """Return the memory of the mean head, rounded up."""
        sizes = {label: one.capacity(num_frames, block_size) for label, one in self.policies.items()}
        slots = [sizes[label].slots for row in self.labels for label in row]
        has_raw, mean = any(size.raw_slots for size in sizes.values()), math.ceil(sum(slots) / len(slots))
        return Capacity(mean, mean if has_raw else 0, max(size.state_frames for size in sizes.values()))


@dataclass
class HeadBudget(PerHead):
    """Give every head a window and a sink of its own, in frames. file: a CSV of layer, head, window, sink."""

    policies: dict[str, CachePolicy] = field(init=False, default_factory=dict)

    name = "head_budget"
    file_has = "columns layer, head, window and sink"

    def classes(self, columns: dict[str, list[list[str]]]) -> list[list[str]]:
        pairs = [[*zip(*rows, strict=True)] for rows in zip(columns["window"], columns["sink"], strict=True)]
        self.policies = {
            f"{window}, {sink}": Window(window=int(window), sink=int(sink))
            for window, sink in sorted({pair for row in pairs for pair in row})
        }
        return [[", ".join(pair) for pair in row] for row in pairs]

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "file": self.file}


# --- Policies that say after each block which tokens every head keeps


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
        return x if isinstance(self.here, slice) else x.index_select(2, self.here)


class HeadwiseCache(AnyCache):
    """Keys that differ from head to head; write() returns kinds of heads, as groups of wan/keys.py.

    Keys are stored rotated at their own frame and stay there. After the clean pass of a block the policy says
    which of the tokens that a head saw stay.
    """

    def __init__(self, sizes: CacheSizes, policy: CachePolicy):
        super().__init__(sizes, policy)
        self.head_dim, self.block_size = sizes.head_dim, sizes.block_size
        self.device = torch.device(sizes.device)
        # Where items of a batch keep other frames, heads of all items stand one item after the other.
        self.items = sizes.batch if self.policy.keeps_items_apart else 1
        self.num_heads = sizes.num_heads[0] * self.items
        shape = sizes.batch // self.items, 0, self.num_heads, sizes.head_dim
        empty = torch.empty(shape, dtype=sizes.dtype, device=sizes.device)
        nothing = torch.empty(1, 0, 1, dtype=torch.long, device=sizes.device)
        everyone = tuple(range(self.num_heads))
        self.kinds = [[Kind(everyone, slice(None), empty, empty, nothing)] for _ in sizes.num_heads]
        self.block = -1  # the number of the newest block
        self.sink = range(self.policy.sink)  # the frames of the sink
        self.own = 0  # tokens of the newest frames that have room; of a cache computed again the last ones
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
            own = kind.of(k[:, -self.own :]), kind.of(v[:, -self.own :])
            kind.keys[:, kind.past :], kind.values[:, kind.past :] = (new.detach() for new in own)
            keys, values = kind.keys, kind.values
            if torch.is_grad_enabled():  # a copy, as of KVCache.write: the own keys keep their gradients
                keys, values = (
                    torch.cat([buffer[:, : kind.past], new], 1)
                    for buffer, new in zip((keys, values), own, strict=True)
                )
            parts = partial(self.parts, kind, self.sink)
            groups.append(HeadGroup(kind.heads, kind.here, kind.of(q), keys, values, parts))
        # 2. A clean pass is the last over its frames: the policy chooses once all layers have come.
        if self.is_clean:
            self.policy.observe(self, layer, q.detach())
            if layer + 1 == self.num_layers:
                (self.policy.recached if self.is_recache else self.policy.finish)(self)
        return groups

    def parts(self, kind: Kind, sink: range) -> list[tuple[list[int], KeyLayout]]:
        """Return the layouts of a kind's keys, each with the places of its heads that see the same tokens."""
        if self.items > 1:
            problem = f"cache_policy {self.policy.name}: videos of a batch of {self.items} keep other frames"
            raise ConfigError(f"{problem}; capture and edit them one by one")
        stop = self.newest.stop * self.tokens_per_frame
        past = kind.ids.cpu()  # [B or 1, past, h or 1]; one wait for the device
        alike: dict[bytes, tuple[Tensor, list[int]]] = {}
        own = torch.arange(stop - self.own, stop).expand(len(past), -1)
        for head in range(len(kind.heads)):
            row = past[..., min(head, past.shape[2] - 1)]
            alike.setdefault(row.numpy().tobytes(), (row, []))[1].append(head)
        return [(heads, self._layout(torch.cat([row, own], 1), sink)) for row, heads in alike.values()]

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
        slots = tuple(
            Slot(frame, frame) if is_one else Slot(CHOSEN, MIXED)
            for frame, is_one in zip(frames[0, :, 0].tolist(), one_frame.tolist(), strict=True)
        )
        # 2. From the first to the last slot that is none of these, every token is named.
        chosen, mixed = None, (~whole).nonzero().flatten().tolist()
        if mixed:
            at = range(mixed[0], mixed[-1] + 1)
            of, place = seen[:, :, at.start * size : at.stop * size]
            chosen = ChosenTokens(at, of, place, of)
        # 3. The block's own slots, which come last, and those of the sink, which come first.
        own = range(len(slots) - self.own // size, len(slots))
        deep = next((n for n in range(own.start) if slots[n].frame not in sink), own.start)
        alone = tuple(self._layout(row, sink) for row in ids.split(1)) if len(ids) > 1 else ()
        return KeyLayout(slots, size, own, tuple(self.newest), chosen, range(deep), alone)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for kinds in self.kinds for kind in kinds for x in (kind.keys, kind.values))

    # -- for policies ----------------------------------------------------------------------------------------

    def rows(self, *tokens: range) -> Tensor:
        """Return an index [1, n, 1] of these tokens, as keep() takes it."""
        each = [torch.arange(one.start, one.stop, device=self.device) for one in tokens]
        return torch.cat(each)[None, :, None]

    def keep(self, layer: int, kept: Sequence[tuple[Sequence[int], Tensor]]) -> None:
        """Let heads hold these of the tokens that they see: for heads that become a kind, an index.

        An index is [B or 1, n, h or 1]. Heads that become one kind were of one kind before.
        """
        before, self.kinds[layer] = self.kinds[layer], []
        for heads, index in kept:
            if not len(heads):
                continue
            # 1. The kind that these heads were of, and their columns in it.
            old = next(kind for kind in before if heads[0] in kind.heads)
            here, found = old.here, [old.keys, old.values, self.seen(old)]
            if len(heads) < len(old.heads):
                here = send(torch.tensor(heads), self.device)
                columns = send(torch.tensor([old.heads.index(head) for head in heads]), self.device)
                found = [x if x.shape[2] == 1 else x.index_select(2, columns) for x in found]
            # 2. The tokens that stay, with room for the next block behind them.
            keys, values = (taken(x, index, self.own) for x in found[:2])
            ids = found[2].take_along_dim(index, 1)
            self.kinds[layer].append(Kind(tuple(heads), here, keys, values, ids))

    def keep_first(self, count: int) -> None:
        """Make all heads of a layer one kind again, with its first tokens, which all of them have."""
        for layer, kinds in enumerate(self.kinds):
            first, everyone = kinds[0], tuple(range(self.num_heads))
            count = min(count, first.past)
            keys = first.keys.new_empty(first.keys.shape[0], count, self.num_heads, self.head_dim)
            values, ids = torch.empty_like(keys), first.ids[:, :count]
            for kind in kinds:
                keys[:, :, kind.here], values[:, :, kind.here] = kind.keys[:, :count], kind.values[:, :count]
            ids = ids if len(kinds) == 1 else ids[:1, :, :1]
            self.kinds[layer] = [Kind(everyone, slice(None), keys, values, ids)]

    def seen(self, kind: Kind) -> Tensor:
        """Return the number in the video of every key that a kind sees, its own too, [B or 1, n, h or 1]."""
        stop = self.newest.stop * self.tokens_per_frame
        own = torch.arange(stop - self.own, stop, device=self.device)[None, :, None]
        return torch.cat([kind.ids, own.expand(kind.ids.shape[0], -1, kind.ids.shape[2])], 1)

    def _announce(self, frames: range, own: int, is_recache: bool) -> None:
        self.newest, self.own, self.is_recache = frames, own, is_recache
        self.query_positions = self.key_positions = frames
        for kind in (kind for kinds in self.kinds for kind in kinds):
            if kind.keys.shape[1] != kind.past + own:
                past = self.rows(range(kind.past))
                kind.keys, kind.values = (taken(x, past, own) for x in (kind.keys, kind.values))


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
        return 0 if how in ("keep", "recache") else None

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
    rows of that pass, drawn by row_seed (None: by torch's own generator, as released), then makes three
    classes over all layers: the num_dummy heads with the least mass on first and middle frames see the last
    frame, the others frame 0 (sink) or local_context_length blocks (neighbour). As released, those of a
    batch's first item are the classes of all.

    Released by https://github.com/csguoh/DummyForcing at 28128ed (wan/modules/dummyforcing.py). The clean
    rule is the same, for blocks of any size: in both, neighbour heads see all recomputed frames but the first
    in the block after a recache that begins before block local_context_length.
    """

    ar_start: Frames = 1
    local_context_length: Count = 1
    num_dummy: Frames = 180
    row_seed: int | None = None
    num_recomputed: Count = 12

    name = "dummy_forcing"
    releases = block_bound = ("dummy_forcing",)
    sink = 1

    def conflict(self, block_sizes: Sequence[int] = ()) -> str:
        if self.ar_start == 0 and not self.source:
            return "ar_start 0 has no middle frames to classify by; take 1 or more"
        return super().conflict(block_sizes)

    def misfit(self, num_layers: int, num_heads: int, tokens_per_frame: int) -> str:
        total = num_layers * num_heads
        return f"num_dummy {self.num_dummy} of a model of {total} heads" if self.num_dummy > total else ""

    @property
    def keeps_items_apart(self) -> bool:  # type: ignore[override]  # of others a constant
        return not self.source

    def switch_from(self, how: How) -> int | None:
        return 3 * self.ar_start + 1 if how == "recache" and self.source else super().switch_from(how)

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        return Capacity(min(num_frames, 1 + (self.local_context_length + 1) * block_size))

    def start(self, cache: HeadwiseCache) -> None:
        self.head_class: Tensor | None = None  # [items, layers, heads]
        self.head_mass: list[Tensor] = []  # per layer [items, heads, (first, middle, own)]
        self._generator = None if self.row_seed is None else torch.Generator().manual_seed(self.row_seed)

    def observe(self, cache: HeadwiseCache, layer: int, q: Tensor) -> None:
        if cache.is_recache or cache.block != self.ar_start:
            return
        # Drawn rows of the block's queries; where videos of a batch stand apart, q[0] has heads of all.
        own = q.shape[1]
        first = cache.tokens_per_frame if self.ar_start == 1 else own
        rows = torch.randint(0, own, (first // 3,), generator=self._generator)
        [kind] = cache.kinds[layer]
        asking = q[0, send(rows, q.device)].float().transpose(0, 1)  # [H, rows, D]
        logits = asking @ kind.keys[0].float().permute(1, 2, 0) * cache.head_dim**-0.5
        # Mass on the first frame (or block), on those between, and on the block itself.
        weights, shares = logits.softmax(-1), (slice(first), slice(first, -own), slice(-own, None))
        mass = torch.stack([weights[:, :, keys].sum(-1).mean(-1) for keys in shares], -1)  # [H, 3]
        self.head_mass.append(cache.shard.gather(mass.unflatten(0, (cache.items, -1)), 1).cpu())

    def finish(self, cache: HeadwiseCache) -> None:
        S, L = cache.tokens_per_frame, self.local_context_length
        number = cache.newest.start // cache.block_size if cache.is_recache else cache.block
        is_whole = self.head_class is None or cache.is_recache  # all heads have seen the same
        # 1. The clean pass of block ar_start divides the heads.
        if cache.block == self.ar_start and not cache.is_recache:
            self.head_class = torch.stack([*map(self._classes, torch.stack(self.head_mass, 1))])
        here = slice(cache.shard.heads.start, cache.shard.heads.stop)
        # 2. Until then all keep frame 0 and the last blocks; later each class what it sees.
        for layer, kinds in enumerate(cache.kinds):
            kept: list[tuple[Sequence[int], Tensor]] = []
            for kind in kinds:
                n = kind.keys.shape[1]
                local = tail(S if self.head_class is None else 0, n, L * cache.block_size * S)
                if is_whole and number < L:
                    local = range(S, n)
                if self.head_class is None:
                    kept.append((kind.heads, cache.rows(range(S), local)))
                    continue
                of_head = self.head_class[:, layer, here].flatten().tolist()
                kept.append(([head for head in kind.heads if of_head[head] == NEIGHBOUR], cache.rows(local)))
                # Sink and dummy heads keep a frame each, and so go through attention together.
                packed = [head for head in kind.heads if of_head[head] != NEIGHBOUR]
                starts = torch.tensor([0 if of_head[head] == SINK else n - S for head in packed]).long()
                kept.append((packed, send(starts, cache.device) + cache.rows(range(S))))  # [1, S, h]
            cache.keep(layer, kept)

    def recached(self, cache: HeadwiseCache) -> None:
        cache.sink = cache.newest[:1]
        self.finish(cache)

    def _classes(self, mass: Tensor) -> Tensor:
        """Return the class of every head [layers, heads] from masses [layers, heads, 3]."""
        first, middle = (mass[..., i].flatten() / mass[..., i].sum() for i in (0, 1))
        found = torch.where(first < middle, NEIGHBOUR, SINK)
        found[torch.maximum(first, middle).argsort()[: self.num_dummy]] = DUMMY
        return found.view(mass.shape[:2])


@dataclass
class ForcingKV(HeadwisePolicy):
    """Keep few recent frames in static heads, and what changes in dynamic ones: Forcing-KV, arXiv 2605.09681.

    Until the clean pass of block ar_start all heads see a sink and the last max(spatial_context_length,
    temporal_context_length) frames; layer 0 goes on so. Then static heads keep the last
    spatial_context_length frames, dynamic ones the last temporal_context_length, and before them
    dynamic_context_length frames' worth of chunks, num_frame_patch a frame, of the three frames from the
    recent ones on: those least like the same tokens of the next frame, by the cosine of the rotated keys of
    layer 1's dynamic heads. heads: a CSV or the release's JSON, or an array [layers, heads], 1 static.

    Released by https://github.com/zju-jiyicheng/Forcing-KV at 50ac1f4
    (wan/modules/causal_model_forcingkv.py). As there, the first item of a batch chooses for all, and rings of
    more than three frames write values behind their keys (_ring_append_ moves the pointer first); the clean
    rule does neither. num_recomputed: frames that a recache computes, None for all of the past (the release's
    local_attn_size -1); with a window the release takes max(sink, context lengths, 1).
    """

    sink: Frames = 1
    ar_start: Frames = 1
    spatial_context_length: Frames = 1
    temporal_context_length: Frames = 1
    dynamic_context_length: Frames = 1
    dynamic_temporal_enabled: bool = True
    num_frame_patch: Count = 6
    sim_retention_ratio: Share = 0.33
    heads: Any = ""
    global_sink: bool = True
    num_recomputed: Count | None = None

    name = "forcing_kv"
    releases = block_bound = ("forcing_kv",)

    def __post_init__(self) -> None:
        self.is_static = read_static_heads(self.heads)
        self.of_model = self.is_static.shape
        super().__post_init__()

    @property
    def num_frames(self) -> int:
        longest = max(self.spatial_context_length, self.temporal_context_length + self.dynamic_context_length)
        return self.sink + longest + 3

    @property
    def chunks_kept(self) -> int:
        return self.dynamic_context_length * self.num_frame_patch if self.dynamic_temporal_enabled else 0

    @property
    def lengths(self) -> dict[bool | None, int]:
        """Recent frames of static heads, of dynamic ones, and of layers that are not divided."""
        static, dynamic = self.spatial_context_length, self.temporal_context_length
        return {True: static, False: dynamic, None: max(static, dynamic)}

    def conflict(self, block_sizes: Sequence[int] = ()) -> str:
        if not self.dynamic_temporal_enabled:
            return super().conflict(block_sizes)
        if not (set(block_sizes) <= {3} and 1 <= self.temporal_context_length <= 3):
            problem = "chosen chunks need blocks of 3 frames and a temporal_context_length of 1 to 3"
            return f"{problem}; set dynamic_temporal_enabled: false"
        asked, kept = round(3 * self.num_frame_patch * self.sim_retention_ratio), self.chunks_kept
        if not asked == kept <= 3 * self.num_frame_patch:
            problem = f"sim_retention_ratio {self.sim_retention_ratio:g} keeps {asked} chunks"
            return f"{problem}, dynamic_context_length x num_frame_patch are {kept}; make them equal"
        return super().conflict(block_sizes)

    def misfit(self, num_layers: int, num_heads: int, tokens_per_frame: int) -> str:
        if not self.chunks_kept or tokens_per_frame % self.num_frame_patch == 0:
            return super().misfit(num_layers, num_heads, tokens_per_frame)
        return f"num_frame_patch {self.num_frame_patch} does not divide a frame of {tokens_per_frame} tokens"

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        """Return the memory of the mean head after the division, rounded up; layer 0 keeps the longer one."""
        static, dynamic = self.spatial_context_length, self.temporal_context_length
        dynamic += self.dynamic_context_length if self.dynamic_temporal_enabled else 0
        frames = np.where(self.is_static, static, dynamic)
        frames[0] = max(static, dynamic)
        return Capacity(min(num_frames, self.sink + block_size + math.ceil(frames.mean())))

    def start(self, cache: HeadwiseCache) -> None:
        self.is_divided = False
        self._recent = 0  # tokens of recent frames that dynamic heads hold
        self._chosen = 0  # tokens of chosen chunks before them
        self._rings: dict[bool | None, Ring] = {}  # as released, of static heads and of dynamic ones

    def recached(self, cache: HeadwiseCache) -> None:
        cache.sink = cache.sink if self.global_sink else cache.newest[: self.sink]
        self._divide(cache)

    def finish(self, cache: HeadwiseCache) -> None:
        if not self.is_divided and cache.block == self.ar_start:
            self._divide(cache)
            return
        S, own = cache.tokens_per_frame, cache.own
        chunks = self._choose(cache) if self.is_divided and self._recent >= S else None
        for layer, kinds in enumerate(cache.kinds):
            cache.keep(layer, [(kind.heads, self._kept(cache, layer, kind, chunks)) for kind in kinds])
            for kind, old in zip(cache.kinds[layer], kinds, strict=True):
                if ring := self._rings.get(self._class(cache, layer, kind)):
                    ring.write(layer, kind, old.values[:, -own:])
        for ring in self._rings.values():
            ring.advance(own)
        self._recent = min(self.temporal_context_length * S, self._recent + own)
        self._chosen = 0 if chunks is None else chunks.shape[1]

    def _class(self, cache: HeadwiseCache, layer: int, kind: Kind) -> bool | None:
        """Return whether a kind's heads are static; None before kinds are divided."""
        if not self.is_divided or layer == 0:
            return None
        return bool(self.is_static[layer, cache.shard.heads[kind.heads[0]]])

    def _kept(self, cache: HeadwiseCache, layer: int, kind: Kind, chunks: Tensor | None) -> Tensor:
        """Return the index of the tokens that a kind keeps."""
        S, n, is_static = cache.tokens_per_frame, kind.keys.shape[1], self._class(cache, layer, kind)
        first, recent = range(min(self.sink * S, n)), self.lengths[is_static] * S
        if ring := self._rings.get(is_static):
            order = [*first, *ring.keys(first.stop, n, cache.own)]
            return send(torch.tensor(order), cache.device)[None, :, None]
        if is_static is not False:
            return cache.rows(first, tail(first.stop, n, recent))
        if chunks is None:
            return cache.rows(first, tail(first.stop + self._chosen, n, recent))
        ends = (cache.rows(one).expand(len(chunks), -1, -1) for one in (first, range(n - recent, n)))
        sink, newest = ends
        return torch.cat([sink, first.stop + self._chosen + chunks[:, :, None], newest], 1)

    def _divide(self, cache: HeadwiseCache) -> None:
        """Divide static from dynamic heads: each kind keeps its own part of the frames that all saw."""
        # 1. What recent frames there are, and as released the rings that hold them.
        S, n = cache.tokens_per_frame, cache.kinds[0][0].keys.shape[1]
        sink, own = min(self.sink * S, n), cache.block_size * S
        self.is_divided, self._chosen = True, 0
        self._recent = min(self.temporal_context_length * S, n - sink)
        rings = {one: self.lengths[one] * S for one in (True, False) if self.source}
        self._rings = {one: Ring(size, n - sink) for one, size in rings.items() if size > own}
        # 2. Two kinds of heads in every layer but the first.
        for layer in range(cache.num_layers):
            here = self.is_static[layer, cache.shard.heads.start : cache.shard.heads.stop]
            classes: dict[bool | None, Any] = {True: here, False: ~here} if layer else {None: here | ~here}
            kept = []
            for one, heads in classes.items():
                index = cache.rows(range(sink), tail(sink, n, self.lengths[one] * S))
                kept.append((np.flatnonzero(heads).tolist(), index))
            cache.keep(layer, kept)
            for kind in cache.kinds[layer]:
                if ring := self._rings.get(self._class(cache, layer, kind)):
                    ring.begin(layer, kind)

    def _choose(self, cache: HeadwiseCache) -> Tensor | None:
        """Return the tokens of the chunks to keep, ascending from the first recent one on, [B or 1, n]."""
        if not self.chunks_kept or cache.num_layers < 2:
            return None
        # 1. Products and squares of frames i and i + 1 in layer 1's dynamic heads, summed over heads.
        S, P = cache.tokens_per_frame, self.num_frame_patch
        first = self.sink * S + self._chosen
        parts = torch.zeros(3, 1, 3, S, device=cache.device)  # stays where a process has none of them
        for kind in cache.kinds[1]:
            if not self._class(cache, 1, kind):
                frames = kind.keys[:, first : first + 4 * S].float().unflatten(1, (4, S))  # [B, 4, S, h, D]
                one, other = frames[:, :3], frames[:, 1:]
                pairs = ((one, other), (one, one), (other, other))
                parts = torch.stack([(x * y).sum((-1, -2)) for x, y in pairs])  # [3, B, 3, S]
        # 2. The cosine of each token and the same one a frame later, and its mean over a chunk.
        dot, *squares = cache.shard.sum(parts)
        cosine = dot / (squares[0].sqrt().clamp_min(1e-8) * squares[1].sqrt().clamp_min(1e-8))
        score = cosine.unflatten(2, (P, -1)).mean(3)  # [B, 3, P]
        score = score[:1] if self.source else score
        # 3. The chunks that are least alike, as tokens.
        chosen = score.flatten(1).topk(self.chunks_kept, largest=False).indices.sort().values
        size = S // P
        return (chosen[:, :, None] * size + torch.arange(size, device=cache.device)).flatten(1)


class Ring:
    """Hold recent tokens as Forcing-KV releases it: values are written where the next keys belong.

    _ring_append_ of the release moves the pointer before it writes the values.
    """

    def __init__(self, size: int, held: int):
        self.size, self.valid = size, min(size, held)
        self.pointer = self.valid % size
        self.values: dict[int, Tensor] = {}  # per layer [B, size, h, D]

    def keys(self, first: int, n: int, own: int) -> list[int]:
        """Return which of n tokens, the last of them own, lie in the ring that begins at first."""
        order = [*range(first, first + self.valid), *[-1] * (self.size - self.valid)]
        for i in range(own):
            order[(self.pointer + i) % self.size] = n - own + i
        return order[: self.valid + own]

    def begin(self, layer: int, kind: Kind) -> None:
        held = kind.values[:, kind.past - self.valid : kind.past]
        self.values[layer] = held.new_zeros(held.shape[0], self.size, *held.shape[2:])
        self.values[layer][:, : self.valid] = held

    def write(self, layer: int, kind: Kind, own: Tensor) -> None:
        """Store a block's values in the ring, and copy its newest ones beside a kind's keys."""
        count = own.shape[1]
        rows = (self.pointer + count + torch.arange(count, device=own.device)) % self.size
        self.values[layer][:, rows] = own
        valid = min(self.size, self.valid + count)
        kind.values[:, kind.past - valid : kind.past] = self.values[layer][:, :valid]

    def advance(self, count: int) -> None:
        self.pointer = (self.pointer + count) % self.size
        self.valid = min(self.size, self.valid + count)


@dataclass
class TriAttention(HeadwisePolicy):
    """Compress a window's tokens to budget_tokens by a score of each head: TriAttention, arXiv 2604.04921.

    After a block's clean pass, compress_every_n_frames or more after the last time, the sink, the last
    keep_last_frames and the tokens of highest score stay. The score of a key is what the calibrated mean
    query of its head would give it from 1, 2, 4, ... offset_max_frames frames later, their mean or max, and
    the mean modulus of queries beyond that mean times the modulus of the key. pruning_mode layer_perhead
    ranks by (layer, head), perhead by the mean (mean_of_layer_max) or max over layers. statistics: an .npz or
    a mapping of q_mean_real, q_mean_imag (or a complex q_mean) and q_abs_mean, [layers, heads, D / 2]; of a
    file of several, "FILE:120f" takes q_mean_120f and q_abs_mean_120f.

    Released by https://github.com/WeianMao/triattention at c3744ee (longlive/kv_compression.py). As there,
    rows and columns of keys are taken as if nothing had been chosen before (_sync_position_state). A
    pipeline's next video goes on with the noise of the one before, and is compressed only beyond its last
    compressed frame, unless its prompt changes. The clean rule knows where keys stand and begins every video
    anew.
    """

    window: Count = 12
    sink: Frames = 3
    budget_tokens: Annotated[int, Field(ge=1, le=1 << 24)] = 9360
    compress_every_n_frames: Count = 3
    keep_last_frames: Frames = 3
    pruning_mode: Literal["layer_perhead", "perhead"] = "layer_perhead"
    score_aggregation: Literal["mean", "max"] = "mean"
    perhead_layer_aggregation: Literal["mean_of_layer_max", "mean", "max"] = "mean_of_layer_max"
    offset_max_frames: Frames = 128
    normalize_scores: bool = True
    tie_break_noise: bool = True
    tie_break_noise_scale: Share = 1e-6
    random_seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    protect_sink: bool = True
    statistics: Any = ""

    name = "triattention"
    global_sink = True
    releases = block_bound = ("triattention",)

    def __post_init__(self) -> None:
        self.q_mean, self.q_abs_mean = read_statistics(self.statistics)
        self.of_model = tuple(self.q_mean.shape[:2])
        self._before: dict[str, Any] = {"frame": 0, "noise": None}  # of the pipeline's last video
        super().__post_init__()

    def conflict(self, block_sizes: Sequence[int] = ()) -> str:
        if self.sink > 3 and self.source:
            return f"released knows a sink of at most 3 frames, not {self.sink}; leave released out"
        return super().conflict(block_sizes)

    def misfit(self, num_layers: int, num_heads: int, tokens_per_frame: int) -> str:
        most = self.window * tokens_per_frame
        if self.budget_tokens >= most:
            return f"budget_tokens {self.budget_tokens} must be below those of the window, {most}"
        return super().misfit(num_layers, num_heads, tokens_per_frame)

    def switch_from(self, how: How) -> int | None:
        return self.window + 1 if how == "recache" and self.source else super().switch_from(how)

    def start(self, cache: HeadwiseCache) -> None:
        self._noise, self._last = torch.Generator().manual_seed(self.random_seed), 0
        if self.source and self._before["noise"] is not None:
            self._noise.set_state(self._before["noise"])

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
        last = self._before["frame"] if self.source and not cache.has_switches else self._last
        self._compress(cache, is_due=cache.newest.stop - last >= self.compress_every_n_frames)

    def _compress(self, cache: HeadwiseCache, is_due: bool) -> None:
        # 1. Without need all tokens stay.
        S, n, done = cache.tokens_per_frame, cache.kinds[0][0].keys.shape[1], cache.newest.stop
        if not is_due or n <= self.budget_tokens:
            super().finish(cache)
            return
        # 2. The sink and the last frames stay; the rest of the budget is for tokens between them.
        sink = min(self.sink * S, n) if self.protect_sink else 0  # even where it exceeds the budget
        last = min(self.keep_last_frames * S, max(0, self.budget_tokens - sink))
        between, count = range(sink, n - last), max(0, self.budget_tokens - sink - last)
        first, newest = cache.rows(range(sink)), cache.rows(range(n - last, n))
        # 3. Each head keeps those of the highest score, in order of time.
        scores = self._scores(cache, between, done) if count else None
        for layer, [kind] in enumerate(cache.kinds):
            index = torch.cat([first, newest], 1)
            if scores is not None:
                chosen = sink + scores[layer].topk(count).indices.sort().values.mT  # [B, count, h]
                ends = (each.expand(len(chosen), -1, chosen.shape[2]) for each in (first, newest))
                index = torch.cat([next(ends), chosen, next(ends)], 1)
            cache.keep(layer, [(kind.heads, index)])
        # 4. As released, the next video of this policy goes on from here.
        self._last = done
        if self.source:
            self._before |= {"frame": done, "noise": self._noise.get_state()}

    def _scores(self, cache: HeadwiseCache, between: range, done: int) -> Tensor:
        """Return scores [layers, B, h, tokens] of tokens that may leave."""
        S, here = cache.tokens_per_frame, slice(cache.shard.heads.start, cache.shard.heads.stop)
        # 1. The mean query of each head, in time at its distance from frame 0; as pairs of dims of a key.
        offsets = [2**i for i in range(max(1, self.offset_max_frames.bit_length()))]
        of_time = RotaryTable(cache.head_dim).freqs_cis(
            0, torch.tensor(offsets) + done
        )  # [offsets, pairs of time]
        turns = torch.ones(len(offsets), self.q_mean.shape[2], dtype=torch.complex128)
        turns[:, : of_time.shape[1]] = of_time
        asking = torch.view_as_real(self.q_mean[:, here, None] * turns).flatten(-2)  # [layers, h, offsets, D]
        if self.score_aggregation == "mean":
            asking = asking.mean(2, keepdim=True)
        beyond = self.q_abs_mean[:, here] - self.q_mean[:, here].abs()  # [layers, h, D / 2]
        asking, beyond = (send(x.float(), cache.device) for x in (asking, beyond))
        # 2. Keys at frame 0, row 0 and column 0, but for their own frame.
        cos, sin = (table[:, 0] for table in cache.rope(range(1)))  # [S, D]
        raw = []
        for layer, [kind] in enumerate(cache.kinds):
            places = cache.seen(kind)
            if self.source:  # as if nothing had been chosen: sink, and the newest tokens of the video
                n, sink = kind.keys.shape[1], self.sink * S
                places = cache.rows(range(sink), range(done * S - n + sink, done * S))
            places = places[:, between.start : between.stop] % S
            keys = kind.keys[:, between.start : between.stop].float()  # [B, n, h, D]
            keys = rotate(keys, cos[places], -sin[places])
            sizes = keys.unflatten(-1, (-1, 2)).norm(dim=-1)
            score = torch.einsum("bnhd,hod->bhno", keys, asking[layer]).amax(3)
            raw.append(score + torch.einsum("bnhf,hf->bhn", sizes, beyond[layer]))
        # 3. Normalise rows, break ties, and let all layers of a head agree where they shall.
        scores = torch.stack(raw)  # [layers, B, h, n]
        if self.normalize_scores:
            spread = scores.std(-1, unbiased=False, keepdim=True).clamp_min(1e-6)
            scores = (scores - scores.mean(-1, keepdim=True)) / spread
        if self.tie_break_noise:
            noise = torch.rand(cache.num_layers, cache.shard.total, len(between), generator=self._noise)
            scores = scores + send(noise[:, None, here] * self.tie_break_noise_scale, cache.device)
        if self.pruning_mode == "perhead":
            is_max = self.perhead_layer_aggregation == "max"
            scores = (scores.amax(0) if is_max else scores.mean(0)).expand_as(scores)
        return scores


# --- Files of heads


def read_columns(file: str) -> dict[str, list[list[str]]]:
    """Read values of layers x heads from a CSV: rows of layers (named ""), or columns layer, head and others.

    Raises ValueError or LookupError for a file that is none.
    """
    lines = (line for line in read_text(file, CONFIG_BYTES).splitlines() if not line.startswith("#"))
    rows = [[cell.strip() for cell in row] for row in csv.reader(lines) if row]
    header = rows[0]
    if len({*map(len, rows)}) != 1:
        raise ValueError("rows of different lengths")
    if not {"layer", "head"} <= {*header}:
        return {"": rows}
    at = {(int(row[header.index("layer")]), int(row[header.index("head")])): row for row in rows[1:]}
    layers, heads = (max(index) + 1 for index in zip(*at, strict=True))
    names = [name for name in header if name not in ("layer", "head")]
    return {x: [[at[i, j][header.index(x)] for j in range(heads)] for i in range(layers)] for x in names}


def read_static_heads(heads: Any) -> np.ndarray:
    """Return bool [layers, heads] from a CSV or an array of 1 (static) and 0, or Forcing-KV's JSON.

    A layer that the JSON leaves out has dynamic heads alone.
    """
    remedy = "give a CSV, Forcing-KV's JSON or an array [layers, heads] of 1 (static) and 0 (dynamic)"
    with library_reads(f"cache_policy forcing_kv: heads {short_repr(heads)}", remedy=remedy):
        if isinstance(heads, str) and heads.endswith(".json"):
            content = read_json(heads)
            table = np.zeros((int(content["num_layers"]), int(content["num_heads"])))
            for row in content["layers"]:
                table[row["layer_idx"], row["static_head"]] = 1
        else:
            labels = next(iter(read_columns(heads).values())) if isinstance(heads, str) else heads
            table = np.asarray(labels).astype(float)
        if table.ndim != 2 or not table.size or not np.isin(table, (0, 1)).all():
            raise ValueError(f"an array of shape {table.shape}, or of other values")
    return table.astype(bool)


def read_statistics(statistics: Any) -> tuple[Tensor, Tensor]:
    """Return mean queries complex64 and their mean moduli float32, [layers, heads, D / 2] each."""
    suffix, arrays = "", statistics
    named = short_repr(statistics) if isinstance(statistics, str) else "given as a mapping"
    remedy = (
        "give an .npz (make_head_classes.py --rule triattention makes it) or a mapping of q_mean, or "
        "q_mean_real and q_mean_imag, and q_abs_mean, [layers, heads, D / 2]"
    )
    with library_reads(f"cache_policy triattention: statistics {named}", remedy=remedy):
        if isinstance(statistics, str):
            path, _, suffix = statistics.partition(":")
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file)
        end = f"_{suffix}" if suffix else ""
        if f"q_mean{end}" in arrays:
            mean = torch.as_tensor(arrays[f"q_mean{end}"]).to(torch.complex64)
        else:
            parts = (torch.as_tensor(arrays[f"q_mean_{part}{end}"]).float() for part in ("real", "imag"))
            mean = torch.complex(*parts)
        sizes = torch.as_tensor(arrays[f"q_abs_mean{end}"]).float()
        if mean.ndim != 3 or mean.shape != sizes.shape:
            raise ValueError(f"shapes {tuple(mean.shape)} and {tuple(sizes.shape)}")
    return mean, sizes
