"""Policies that keep other keys for every head: by attention, by labels, by scores of tokens, by a list.

A HeadwiseCache holds, in every layer, kinds of heads: those that see equally many keys, which go through
attention together. After the clean pass of a block its policy says which of the tokens that a head saw stay.
Keys are stored rotated at their own frame and stay there. Letters: B batch, S tokens per frame, H heads, h
heads of a kind, D head dim, n keys; a is the block after which heads differ.
"""

import csv
import math
import zipfile
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from os.path import isfile
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from wan.cache import AnyCache, CachePolicy, Capacity, RopeTables, no_rope
from wan.errors import ConfigError, short_repr
from wan.files import CONFIG_BYTES, MAX_FRAMES, read_json, read_text
from wan.keys import (
    CHOSEN,
    MIXED,
    ROPE_THETA,
    ChosenTokens,
    HeadGroup,
    HeadShard,
    KeyLayout,
    RotaryTable,
    Slot,
    rotate,
    select,
    send,
)

MAX_TOKENS = 1 << 24  # of a budget
Index = Sequence[range] | Tensor  # of tokens that stay: [n] for all heads, or [B or 1, n, h]


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

    def make_room(self, own: int) -> None:
        """Make room for so many keys behind the past ones."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            if old.shape[1] != self.past + own:
                new = old.new_empty(old.shape[0], self.past + own, *old.shape[2:])
                new[:, : self.past] = old[:, : self.past]
                setattr(self, name, new)


class HeadwiseCache:
    """The face of a KVCache whose write() returns kinds of heads, as groups of wan/keys.py."""

    def __init__(
        self,
        num_heads: Sequence[int],
        batch: int,
        head_dim: int,
        tokens_per_frame: int,
        num_frames: int,
        policy: "HeadwisePolicy",
        block_size: int = 3,
        rope: Callable[[Sequence[int]], RopeTables] = no_rope,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        shard: HeadShard | None = None,
    ):
        """Take the arguments of a KVCache."""
        self.tokens_per_frame, self.rope, self.device = tokens_per_frame, rope, torch.device(device)
        self.shard = shard or HeadShard.whole(num_heads[0])
        self.head_dim, self.num_layers, self.block_size = head_dim, len(num_heads), block_size
        self.time_pairs = RotaryTable(head_dim).axes_dim[0] // 2
        self.policy = copy(policy)  # its state belongs to one video
        # Where items of a batch keep other frames, heads are those of all items, one item behind the other.
        self.items = batch if policy.keeps_items_apart else 1
        self.num_heads = num_heads[0] * self.items
        empty = torch.empty(batch // self.items, 0, self.num_heads, head_dim, dtype=dtype, device=device)
        nothing = torch.empty(1, 0, 1, dtype=torch.long, device=device)
        everyone = tuple(range(self.num_heads))
        self.kinds = [[Kind(everyone, slice(None), empty, empty, nothing)] for _ in num_heads]
        self.block = -1  # the number of the newest block
        self.sink = range(policy.sink)  # the frames of the sink
        self.newest = range(0)
        self.own = 0  # tokens of the newest frames that have room; of a cache computed again the last ones
        self.is_recache = self.is_clean = self.stores_raw = False
        self.query_positions: Sequence[int] = ()
        self.key_positions: Sequence[int] = ()
        self.policy.start(self)

    def advance(self, block: range, text: Any = (), cut: bool = False) -> None:
        """Make room for the next block."""
        self.block += 1
        self.policy.admit(self, block)
        self._announce(block, len(block) * self.tokens_per_frame, is_recache=False)

    def recache(self, frames: range, text: Any = (), lasts: bool = True) -> None:
        """Make room for a forward over clean frames of the past, whose keys become the cache."""
        own = self.policy.forget(self, frames)
        self._announce(frames, own, is_recache=True)

    def begin_pass(self, is_clean: bool) -> None:
        self.is_clean = is_clean

    def write(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_k: Tensor | None = None
    ) -> list[HeadGroup]:
        """Store the newest frames' keys and values [B, L, H, D] -> what each kind of heads sees.

        The clean pass's last layer ends the block: from then on heads hold what the policy lets them keep.
        """
        groups = []
        if self.items > 1:
            q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k, v))  # [1, L, items·H, D]
        for kind in self.kinds[layer]:
            asking = q if isinstance(kind.here, slice) else q.index_select(2, kind.here)
            for buffer, x in ((kind.keys, k), (kind.values, v)):
                place, own = buffer[:, kind.past :], x[:, -self.own :]
                if isinstance(kind.here, slice):
                    place.copy_(own)
                else:
                    torch.index_select(own, 2, kind.here, out=place)
            groups.append(HeadGroup(kind.heads, kind.here, asking, kind.keys, kind.values, Parts(kind, self)))
        if self.is_clean:
            self.policy.observe(self, layer, q)
            if layer + 1 == self.num_layers:
                (self.policy.recached if self.is_recache else self.policy.finish)(self)
        return groups

    # -- for policies ----------------------------------------------------------------------------------------

    def keep(self, layer: int, kept: Sequence[tuple[Sequence[int], Index]]) -> None:
        """Let heads hold these of the tokens that they see: for heads that become a kind, an index.

        Heads that become one kind were of one kind before.
        """
        before, self.kinds[layer] = self.kinds[layer], []
        for heads, index in kept:
            if not len(heads):
                continue
            old = next(kind for kind in before if heads[0] in kind.heads)
            found = [old.keys, old.values, self.seen(old)]
            here = old.here
            if len(heads) < len(old.heads):
                columns = [old.heads.index(head) for head in heads]
                found = [x if x.shape[2] == 1 else select(x, columns, 2) for x in found]
                here = send(torch.tensor(heads), self.device)
            keys, values, ids = (
                self._taken(x, index, room) for x, room in zip(found, (1, 1, 0), strict=True)
            )
            self.kinds[layer].append(Kind(tuple(heads), here, keys, values, ids))

    def seen(self, kind: Kind) -> Tensor:
        """Return the number in the video of every key that a kind sees, its own too, [B or 1, n, h or 1]."""
        stop = self.newest.stop * self.tokens_per_frame
        own = torch.arange(stop - self.own, stop, device=self.device)[None, :, None]
        return torch.cat([kind.ids, own.expand(kind.ids.shape[0], -1, kind.ids.shape[2])], 1)

    def _taken(self, x: Tensor, index: Index, room: int) -> Tensor:
        """Take tokens of x [B, N, h, ...], with room for as many own ones as now, or none."""
        n = index.shape[1] if isinstance(index, Tensor) else sum(map(len, index))
        if isinstance(index, Tensor):  # [B or 1, n, h or 1]
            if x.ndim == 3:
                return x.take_along_dim(index, 1)
            out = x.new_empty(x.shape[0], n + room * self.own, *x.shape[2:])
            torch.gather(x, 1, index[..., None].expand(x.shape[0], n, *x.shape[2:]), out=out[:, :n])
            return out
        out, start = x.new_empty(x.shape[0], n + room * self.own, *x.shape[2:]), 0
        for tokens in index:
            out[:, start : start + len(tokens)] = x[:, tokens.start : tokens.stop]
            start += len(tokens)
        return out

    def _announce(self, frames: range, own: int, is_recache: bool) -> None:
        self.newest, self.own, self.is_recache = frames, own, is_recache
        self.query_positions = self.key_positions = frames
        for kinds in self.kinds:
            for kind in kinds:
                kind.make_room(own)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(x.nbytes for kinds in self.kinds for kind in kinds for x in (kind.keys, kind.values))


class Parts:
    """The layouts of a kind's keys, made when somebody asks: heads that see the same tokens share one."""

    def __init__(self, kind: Kind, cache: HeadwiseCache):
        self.ids, self.count = kind.ids, len(kind.heads)
        self.S, self.newest, self.own, self.sink = cache.tokens_per_frame, cache.newest, cache.own, cache.sink
        self.items, self.policy = cache.items, cache.policy

    def __call__(self) -> list[tuple[list[int], KeyLayout]]:
        """Return heads of the kind, by their places in it, with the layout of their keys."""
        if self.items > 1:
            problem = f"videos of a batch of {self.items} keep other frames"
            self.policy.require(False, f"{problem}; capture and edit them one by one")
        past, stop = self.ids.cpu(), self.newest.stop * self.S  # [B or 1, past, h or 1]
        own = torch.arange(stop - self.own, stop).expand(len(past), -1)
        if past.shape[2] == 1:
            return [(list(range(self.count)), self._layout(torch.cat([past[..., 0], own], 1)))]
        alike: dict[bytes, list[int]] = {}
        for head in range(self.count):
            alike.setdefault(past[..., head].numpy().tobytes(), []).append(head)
        return [(heads, self._layout(torch.cat([past[..., heads[0]], own], 1))) for heads in alike.values()]

    def _layout(self, ids: Tensor) -> KeyLayout:
        """Return the layout of keys by their numbers in the video, int64 [B or 1, n].

        Slots are of whole frames where they can be, else of as many tokens as divide all. A slot whose tokens
        are of several frames, or of other ones for each batch item, is CHOSEN.
        """
        seen = torch.stack([ids // self.S, ids % self.S])
        size = math.gcd(self.S, ids.shape[1])
        frames, tokens = seen.unflatten(2, (-1, size))  # [B or 1, slots, size]
        one_frame = (frames == frames[:1, :, :1]).all(2).all(0)
        whole = one_frame & (tokens == torch.arange(self.S)[:size]).all(2).all(0) & (size == self.S)
        slots = tuple(
            Slot(frame, frame) if is_one else Slot(CHOSEN, MIXED)
            for frame, is_one in zip(frames[0, :, 0].tolist(), one_frame.tolist(), strict=True)
        )
        chosen, mixed = None, (~whole).nonzero().flatten().tolist()
        if mixed:
            at = slice(mixed[0] * size, (mixed[-1] + 1) * size)
            rows = seen[:, :, at]
            chosen = ChosenTokens(
                range(mixed[0], mixed[-1] + 1), rows[0], rows[1], rows[0], torch.zeros_like(rows[0])
            )
        own, sink = range(len(slots) - self.own // size, len(slots)), 0
        while sink < own.start and slots[sink].frame in self.sink:
            sink += 1
        return KeyLayout(slots, size, own, tuple(self.newest), chosen, sink=range(sink))


# --- The face of the policies
@dataclass
class HeadwisePolicy(CachePolicy):
    """Decide which of the tokens that a head saw it keeps, after the clean pass of a block.

    A change of prompts keeps the cache, or computes it again over the last num_recomputed frames.
    """

    by_heads = True
    keeps_items_apart: ClassVar[bool] = False  # videos of a batch have classes of their own
    can_recache = False  # before every block; at a change of prompts they do
    sink: ClassVar[int] = 0
    num_recomputed: ClassVar[int | None] = None

    @property
    def recomputed_frames(self) -> int | None:
        return self.num_recomputed

    def check_switch(self, how: str, frame: int) -> None:
        self.require(how in ("keep", "recache"), f"cannot {how} a cache of every head; use keep or recache")

    def new_cache(self, build: Callable[..., Any], num_layers: int, shard: HeadShard) -> AnyCache:
        self.check_model(num_layers, shard.total)
        return build([len(shard.heads)] * num_layers, self, HeadwiseCache)

    def check_model(self, num_layers: int, num_heads: int) -> None:
        """Raise ConfigError where the policy is of another model."""

    def start(self, cache: HeadwiseCache) -> None:  # type: ignore[override]  # its own cache
        """Begin a video: set the policy's state."""

    def admit(self, cache: HeadwiseCache, block: range) -> None:  # type: ignore[override]
        """Make room for the frames of a block, where that takes more than finish() did."""

    def observe(self, cache: HeadwiseCache, layer: int, q: Tensor) -> None:
        """Look at the queries [B, L, H, D] of a clean pass, whose keys lie in the cache."""

    def finish(self, cache: HeadwiseCache) -> None:
        """Let heads keep what they may of what they saw, after a block's clean pass; by default all of it."""
        for layer, kinds in enumerate(cache.kinds):
            cache.keep(layer, [(kind.heads, [range(kind.keys.shape[1])]) for kind in kinds])

    def forget(self, cache: HeadwiseCache, frames: range) -> int:
        """Empty the cache before frames are computed again; return how many of their tokens have room."""
        self._keep_first(cache, 0)
        return len(frames) * cache.tokens_per_frame

    def recached(self, cache: HeadwiseCache) -> None:
        """Let heads keep what they may of frames that were computed again."""
        self.finish(cache)

    @staticmethod
    def _keep_first(cache: HeadwiseCache, count: int) -> None:
        """Make all heads of a layer one kind again, with its first tokens, which all of them have."""
        for layer, kinds in enumerate(cache.kinds):
            everyone = tuple(range(cache.num_heads))
            first, count = kinds[0], min(count, kinds[0].past)
            keys = first.keys.new_empty(first.keys.shape[0], count, len(everyone), cache.head_dim)
            values, ids = torch.empty_like(keys), first.ids[:, :count]
            for kind in kinds:
                keys[:, :, kind.here], values[:, :, kind.here] = kind.keys[:, :count], kind.values[:, :count]
            ids = ids if len(kinds) == 1 else ids[:1, :, :1]
            cache.kinds[layer] = [Kind(everyone, slice(None), keys, values, ids)]


def tail(start: int, stop: int, count: int) -> range:
    """Return the last count of start..stop - 1."""
    return range(max(start, stop - count), stop)


# --- The policies
SINK, NEIGHBOUR, DUMMY = range(3)


@dataclass
class DummyForcing(HeadwisePolicy):
    """Half of the heads see hardly any past: Dummy Forcing, arXiv 2601.20499.

    Until the clean pass of block ar_start all heads see frame 0 and local_context_length blocks. Attention of
    rows of that pass, drawn by row_seed (None: by torch's own generator, as released), then makes three
    classes over all layers: the num_dummy heads with the least mass on first and middle frames see the last
    frame, the others frame 0 (sink) or local_context_length blocks (neighbour). As released, those of a
    batch's first item are the classes of all.

    Released by https://github.com/csguoh/DummyForcing at 28128ed (wan/modules/dummyforcing.py). The clean
    rule is the same, for blocks of any size: in both, neighbour heads see all recomputed frames but the first
    in the block after a recache that begins before block local_context_length.
    """

    ar_start: int = 1
    local_context_length: int = 1
    num_dummy: int = 180
    row_seed: int | None = None
    num_recomputed: int = 12  # type: ignore[misc]  # a field here

    name = "dummy_forcing"
    releases = block_bound = ("dummy_forcing",)
    sink = 1
    bounds: ClassVar = {
        **dict.fromkeys(("ar_start", "num_dummy"), (0, MAX_FRAMES)),
        **dict.fromkeys(("local_context_length", "num_recomputed"), (1, MAX_FRAMES)),
    }

    def check(self, block_sizes: Sequence[int] = ()) -> None:
        super().check(block_sizes)
        problem = "ar_start 0 has no middle frames to classify by; take 1 or more"
        self.require(self.ar_start > 0 or bool(self.source), problem)

    @property
    def keeps_items_apart(self) -> bool:  # type: ignore[override]  # of others a constant
        return not self.source

    def check_switch(self, how: str, frame: int) -> None:
        super().check_switch(how, frame)
        fits = how != "recache" or not self.source or frame > 3 * self.ar_start
        self.require(fits, f"has no classes at frame {frame}; switch after frame {3 * self.ar_start}")

    def check_model(self, num_layers: int, num_heads: int) -> None:
        total = num_layers * num_heads
        self.require(self.num_dummy <= total, f"num_dummy {self.num_dummy} of a model of {total} heads")

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        return Capacity(min(num_frames, 1 + (self.local_context_length + 1) * block_size))

    def most_slots(self, frames: int) -> int:
        return self.capacity(frames, 3).slots if self.source else frames

    def start(self, cache: HeadwiseCache) -> None:  # type: ignore[override]
        self.head_class: Tensor | None = None  # [items, layers, heads]
        self.head_mass: list[Tensor] = []  # per layer [items, heads, (first, middle, own)]
        self.sampled_rows: list[Tensor] = []
        self._generator = None if self.row_seed is None else torch.Generator().manual_seed(self.row_seed)

    def observe(self, cache: HeadwiseCache, layer: int, q: Tensor) -> None:
        if cache.is_recache or cache.block != self.ar_start:
            return
        own = q.shape[1]
        first = cache.tokens_per_frame if self.ar_start == 1 else own
        rows = torch.randint(0, own, (first // 3,), generator=self._generator)
        [kind] = cache.kinds[layer]
        asking = q[0, send(rows, q.device)].float().transpose(0, 1)  # [H, rows, D]
        logits = asking @ kind.keys[0].float().permute(1, 2, 0) * cache.head_dim**-0.5
        weights, shares = logits.softmax(-1), (slice(first), slice(first, -own), slice(-own, None))
        mass = torch.stack([weights[:, :, keys].sum(-1).mean(-1) for keys in shares], -1)  # [H, 3]
        self.sampled_rows.append(rows)
        self.head_mass.append(cache.shard.gather(mass.unflatten(0, (cache.items, -1)), 1).cpu())

    def finish(self, cache: HeadwiseCache) -> None:
        S, size = cache.tokens_per_frame, cache.block_size
        number = cache.newest.start // size if cache.is_recache else cache.block
        is_whole = self.head_class is None or cache.is_recache  # all heads have seen the same
        if cache.block == self.ar_start and not cache.is_recache:
            self.head_class = torch.stack([*map(self._classes, torch.stack(self.head_mass, 1))])
        for layer, kinds in enumerate(cache.kinds):
            kept: list[tuple[Sequence[int], Index]] = []
            for heads, n in [(kind.heads, kind.keys.shape[1]) for kind in kinds]:
                first = S if self.head_class is None else 0
                local = tail(first, n, self.local_context_length * size * S)
                if is_whole and number < self.local_context_length:
                    local = range(S, n)
                if self.head_class is None:
                    kept.append((heads, [range(S), local]))
                    continue
                here = slice(cache.shard.heads.start, cache.shard.heads.stop)
                of_head = self.head_class[:, layer, here].flatten().tolist()
                kept.append(([head for head in heads if of_head[head] == NEIGHBOUR], [local]))
                # Sink and dummy heads keep a frame each, and so go through attention together.
                packed = [head for head in heads if of_head[head] != NEIGHBOUR]
                starts = torch.tensor([0 if of_head[head] == SINK else n - S for head in packed]).long()
                index = send(starts, cache.device) + torch.arange(S, device=cache.device)[:, None]
                kept.append((packed, index[None]))  # [1, S, h]
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
    """Static heads keep few recent frames, dynamic heads what changes: Forcing-KV, arXiv 2605.09681.

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

    sink: int = 1  # type: ignore[misc]  # a field here
    ar_start: int = 1
    spatial_context_length: int = 1
    temporal_context_length: int = 1
    dynamic_context_length: int = 1
    dynamic_temporal_enabled: bool = True
    num_frame_patch: int = 6
    sim_retention_ratio: float = 0.33
    heads: Any = ""
    global_sink: bool = True
    num_recomputed: int | None = None  # type: ignore[misc]

    name = "forcing_kv"
    releases = block_bound = ("forcing_kv",)
    lengths: ClassVar = ("spatial_context_length", "temporal_context_length", "dynamic_context_length")
    bounds: ClassVar = {
        **dict.fromkeys(("sink", "ar_start", *lengths), (0, MAX_FRAMES)),
        **dict.fromkeys(("num_frame_patch", "num_recomputed"), (1, MAX_FRAMES)),
        "sim_retention_ratio": (0, 1),
    }

    def __post_init__(self) -> None:
        self.is_static = read_static_heads(self.heads)
        super().__post_init__()

    @property
    def lasting_sink(self) -> int:
        return self.sink if self.global_sink else 0

    @property
    def chunks_kept(self) -> int:
        return self.dynamic_context_length * self.num_frame_patch if self.dynamic_temporal_enabled else 0

    def check(self, block_sizes: Sequence[int] = ()) -> None:
        super().check(block_sizes)
        if not self.dynamic_temporal_enabled:
            return
        recent, kept = self.temporal_context_length, self.chunks_kept
        fits = set(block_sizes) <= {3} and 1 <= recent <= 3
        problem = "chosen chunks need blocks of 3 frames and a temporal_context_length of 1 to 3"
        self.require(fits, f"{problem}; set dynamic_temporal_enabled: false")
        asked = round(3 * self.num_frame_patch * self.sim_retention_ratio)
        problem = f"sim_retention_ratio {self.sim_retention_ratio:g} keeps {asked} chunks"
        remedy = f"dynamic_context_length x num_frame_patch are {kept}; make them equal"
        self.require(asked == kept <= 3 * self.num_frame_patch, f"{problem}, {remedy}")

    def check_model(self, num_layers: int, num_heads: int) -> None:
        check_sizes(self, self.is_static.shape, num_layers, num_heads)

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        """Return the memory of the mean head after the division, rounded up; layer 0 keeps the longer one."""
        static, dynamic = self.spatial_context_length, self.temporal_context_length
        dynamic += self.dynamic_context_length if self.dynamic_temporal_enabled else 0
        share = float(self.is_static[1:].mean()) if len(self.is_static) > 1 else 1.0
        mean = (len(self.is_static) - 1) * (share * static + (1 - share) * dynamic) + max(static, dynamic)
        return Capacity(min(num_frames, self.sink + block_size + math.ceil(mean / len(self.is_static))))

    def most_slots(self, frames: int) -> int:
        longest = max(self.spatial_context_length, self.temporal_context_length + self.dynamic_context_length)
        return min(frames, self.sink + longest + 3)

    def start(self, cache: HeadwiseCache) -> None:  # type: ignore[override]
        fits = not self.chunks_kept or cache.tokens_per_frame % self.num_frame_patch == 0
        tokens = f"a frame of {cache.tokens_per_frame} tokens"
        self.require(fits, f"num_frame_patch {self.num_frame_patch} does not divide {tokens}")
        self.is_divided = False
        self.dynamic_keep: list[Tensor] = []  # per choice the numbers of the chunks kept, [B or 1, n]
        self.dynamic_score: list[Tensor] = []  # and the scores of all of them, [B or 1, 3, chunks a frame]
        self._recent = 0  # tokens of recent frames that dynamic heads hold
        self._chosen = 0  # tokens of chosen chunks before them
        self._rings: dict[bool, Ring] = {}  # as released, of static heads and of dynamic ones

    def forget(self, cache: HeadwiseCache, frames: range) -> int:
        self._keep_first(cache, self.lasting_sink * cache.tokens_per_frame)
        return len(frames) * cache.tokens_per_frame

    def recached(self, cache: HeadwiseCache) -> None:
        cache.sink = cache.sink if self.global_sink else cache.newest[: self.sink]
        self._divide(cache)

    def finish(self, cache: HeadwiseCache) -> None:
        S, own = cache.tokens_per_frame, cache.own
        if not self.is_divided and cache.block == self.ar_start:
            self._divide(cache)
            return
        longest = max(self.spatial_context_length, self.temporal_context_length)
        chunks = self._choose(cache) if self.is_divided and self._recent >= S else None
        dynamic: Tensor | None = None
        for layer, kinds in enumerate(cache.kinds):
            kept: list[tuple[Sequence[int], Index]] = []
            for kind in kinds:
                n, is_static = kind.keys.shape[1], self._is_static(cache, layer, kind)
                sink, length = min(self.sink * S, n), self._length(is_static)
                if not self.is_divided or layer == 0:
                    index: Index = [range(sink), tail(sink, n, longest * S)]
                elif is_static in self._rings:
                    order = [*range(sink), *self._rings[is_static].keys(sink, n, own)]
                    index = send(torch.tensor(order), cache.device)[None, :, None]
                elif is_static or chunks is None:
                    index = [range(sink), tail(sink + (0 if is_static else self._chosen), n, length * S)]
                else:
                    if dynamic is None:  # the same in all layers
                        at = torch.arange(n, device=cache.device)
                        ends = (at[:sink], at[n - length * S :])
                        first, recent = (each.expand(len(chunks), -1) for each in ends)
                        chosen = sink + self._chosen + chunks
                        dynamic = torch.cat([first, chosen, recent], 1)[:, :, None]
                    index = dynamic
                kept.append((kind.heads, index))
            cache.keep(layer, kept)
            for kind, old in zip(cache.kinds[layer], kinds, strict=True):
                ring = self._rings.get(self._is_static(cache, layer, kind))
                if ring and layer:
                    ring.write(layer, kind, old.values[:, -own:])
        for ring in self._rings.values():
            ring.advance(own)
        self._recent = min(self.temporal_context_length * S, self._recent + own)
        self._chosen = 0 if chunks is None else chunks.shape[1]

    def _length(self, is_static: bool) -> int:
        return self.spatial_context_length if is_static else self.temporal_context_length

    def _is_static(self, cache: HeadwiseCache, layer: int, kind: Kind) -> bool:
        """Return the class of a kind by its first head."""
        return bool(kind.heads) and bool(self.is_static[layer, cache.shard.heads[kind.heads[0]]])

    def _divide(self, cache: HeadwiseCache) -> None:
        """Let static and dynamic heads keep frames of their own, of what all of them saw."""
        S, n = cache.tokens_per_frame, cache.kinds[0][0].keys.shape[1]
        sink, own = min(self.sink * S, n), cache.block_size * S
        self.is_divided, self._chosen = True, 0
        self._recent = min(self.temporal_context_length * S, n - sink)
        self._rings = {}
        for is_static in (True, False) if self.source else ():
            if self._length(is_static) * S > own:
                self._rings[is_static] = Ring(self._length(is_static) * S, n - sink)
        for layer in range(cache.num_layers):
            here = self.is_static[layer, cache.shard.heads.start : cache.shard.heads.stop]
            classes = [(np.flatnonzero(here).tolist(), True), (np.flatnonzero(~here).tolist(), False)]
            lengths = [(heads, self._length(is_static)) for heads, is_static in classes]
            if layer == 0:
                lengths = [(list(range(len(here))), max(self._length(True), self._length(False)))]
            cache.keep(
                layer, [(heads, [range(sink), tail(sink, n, length * S)]) for heads, length in lengths]
            )
            for kind in cache.kinds[layer] if layer else ():
                if ring := self._rings.get(self._is_static(cache, layer, kind)):
                    ring.begin(layer, kind)

    def _choose(self, cache: HeadwiseCache) -> Tensor | None:
        """Return the tokens of the chunks to keep, ascending from the first recent one on, [B or 1, n]."""
        if not self.chunks_kept or cache.num_layers < 2:
            return None
        S, P, heads = cache.tokens_per_frame, self.num_frame_patch, self.is_static[1]
        first = self.sink * S + self._chosen
        parts = torch.zeros(3, 1, 3, S, device=cache.device)  # products and squares of frame i and i + 1
        for kind in cache.kinds[1]:
            if not heads[cache.shard.heads[kind.heads[0]]]:
                frames = kind.keys[:, first : first + 4 * S].float().unflatten(1, (4, S))  # [B, 4, S, h, D]
                one, other = frames[:, :3], frames[:, 1:]
                pairs = ((one, other), (one, one), (other, other))
                parts = torch.stack([(x * y).sum((-1, -2)) for x, y in pairs])  # [3, B, 3, S]
        dot, *squares = cache.shard.sum(parts)
        cosine = dot / (squares[0].sqrt().clamp_min(1e-8) * squares[1].sqrt().clamp_min(1e-8))
        score = cosine.unflatten(2, (P, -1)).mean(3)  # [B, 3, P]
        score = score[:1] if self.source else score
        chosen = score.flatten(1).topk(self.chunks_kept, largest=False).indices.sort().values
        self.dynamic_score.append(score)
        self.dynamic_keep.append(chosen)
        size = S // P
        return (chosen[:, :, None] * size + torch.arange(size, device=cache.device)).flatten(1)


class Ring:
    """A ring of recent tokens as Forcing-KV releases it: values are written where the next keys belong."""

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
        """Store a block's values, and let a kind that has its keys see those of the ring."""
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
    """A window's tokens compressed to budget_tokens by a score of each head: TriAttention, arXiv 2604.04921.

    After a block's clean pass, compress_every_n_frames or more after the last time, the sink, the last
    keep_last_frames and the tokens of highest score stay. The score of a key is what the calibrated mean
    query of its head would give it from 1, 2, 4, ... offset_max_frames frames later, their mean or max, and
    the mean modulus of queries beyond that mean times the modulus of the key. pruning_mode layer_perhead
    ranks by (layer, head), perhead by the mean (mean_of_layer_max) or max over layers. statistics: an .npz or
    a mapping of q_mean_real, q_mean_imag (or a complex q_mean) and q_abs_mean, [layers, heads, D / 2]; of a
    file of several, "FILE:120f" takes q_mean_120f and q_abs_mean_120f.

    Released by https://github.com/WeianMao/triattention at c3744ee (longlive/kv_compression.py). As there,
    rows and columns of keys are taken as if nothing had been chosen before (_sync_position_state), and a
    pipeline's next video goes on with the noise of the one before and is compressed only beyond its last
    compressed frame (unless it has a schedule of prompts). The clean rule knows where keys stand and begins
    every video anew.
    """

    window: int = 12
    sink: int = 3  # type: ignore[misc]  # a field here
    budget_tokens: int = 9360
    compress_every_n_frames: int = 3
    keep_last_frames: int = 3
    pruning_mode: str = "layer_perhead"
    score_aggregation: str = "mean"
    perhead_layer_aggregation: str = "mean_of_layer_max"
    offset_max_frames: int = 128
    normalize_scores: bool = True
    tie_break_noise: bool = True
    tie_break_noise_scale: float = 1e-6
    random_seed: int = 0
    protect_sink: bool = True
    statistics: Any = ""

    name = "triattention"
    releases = block_bound = ("triattention",)
    is_interactive = False
    bounds: ClassVar = {
        **dict.fromkeys(("sink", "keep_last_frames", "offset_max_frames"), (0, MAX_FRAMES)),
        "budget_tokens": (1, MAX_TOKENS),
        "compress_every_n_frames": (1, MAX_FRAMES),
        "tie_break_noise_scale": (0, 1),
        "random_seed": (0, 2**63 - 1),
    }
    words: ClassVar = {
        "pruning_mode": ("layer_perhead", "perhead"),
        "score_aggregation": ("mean", "max"),
        "perhead_layer_aggregation": ("mean_of_layer_max", "mean", "max"),
    }

    def __post_init__(self) -> None:
        self.q_mean, self.q_abs_mean = read_statistics(self.statistics)
        self._before: dict[str, Any] = {"frame": 0, "noise": None}  # of the pipeline's last video
        super().__post_init__()

    @property
    def num_frames(self) -> int | None:
        return self.window

    @property
    def lasting_sink(self) -> int:
        return self.sink

    @property
    def recomputed_frames(self) -> int | None:
        return self.window

    def check(self, block_sizes: Sequence[int] = ()) -> None:
        super().check(block_sizes)
        for name, known in self.words.items():
            value = getattr(self, name)
            said = f"{name} {short_repr(value)} is not one of {', '.join(known)}"
            self.require(value in known, said)
        least = self.sink + max(block_sizes, default=1)
        self.require(self.window >= least, f"window {self.window} is too small; it must be at least {least}")
        fits = self.sink <= 3 or not self.source
        self.require(fits, f"released knows a sink of at most 3 frames, not {self.sink}; leave released out")

    def check_switch(self, how: str, frame: int) -> None:
        super().check_switch(how, frame)
        fits = how != "recache" or not self.source or frame > self.window
        self.require(fits, f"released cannot recache at frame {frame}; switch after frame {self.window}")

    def check_model(self, num_layers: int, num_heads: int) -> None:
        check_sizes(self, self.q_mean.shape, num_layers, num_heads)

    def of_video(self, has_switches: bool) -> "TriAttention":
        policy = copy(self)
        policy.is_interactive = has_switches
        return policy

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        return Capacity(min(num_frames, self.window))

    def start(self, cache: HeadwiseCache) -> None:  # type: ignore[override]
        most, pairs = self.window * cache.tokens_per_frame, cache.head_dim // 2
        problem = f"budget_tokens {self.budget_tokens} must be below those of the window, {most}"
        self.require(self.budget_tokens < most, problem)
        problem = f"statistics have {self.q_mean.shape[2]} frequencies, heads of this model {pairs}"
        self.require(self.q_mean.shape[2] == pairs, problem)
        self.compressions: list[tuple[int, int]] = []  # frames done and tokens held at every compression
        self.raw_scores: Tensor | None = None  # of the last one, [layers, B, h, tokens]
        self._noise, self._last = torch.Generator().manual_seed(self.random_seed), 0
        if self.source:
            self._last = 0 if self.is_interactive else self._before["frame"]
            if self._before["noise"] is not None:
                self._noise.set_state(self._before["noise"])

    def admit(self, cache: HeadwiseCache, block: range) -> None:  # type: ignore[override]
        """As in LongLive's window, the oldest tokens behind the sink leave where the block finds no room."""
        S, n = cache.tokens_per_frame, cache.kinds[0][0].past
        excess = n + (len(block) - self.window) * S
        if excess > 0:
            sink, cache.own = self.sink * S, 0
            for layer, [kind] in enumerate(cache.kinds):
                cache.keep(layer, [(kind.heads, [range(sink), range(sink + excess, n)])])

    def forget(self, cache: HeadwiseCache, frames: range) -> int:
        S, n = cache.tokens_per_frame, cache.kinds[0][0].past
        sink = min(self.sink * S, n)
        self._keep_first(cache, sink)
        return min(n - sink, len(frames) * S)

    def recached(self, cache: HeadwiseCache) -> None:
        self._compress_or_not(cache, is_due=True)

    def finish(self, cache: HeadwiseCache) -> None:
        is_due = cache.newest.stop - self._last >= self.compress_every_n_frames
        self._compress_or_not(cache, is_due)

    def _compress_or_not(self, cache: HeadwiseCache, is_due: bool) -> None:
        S, n, done = cache.tokens_per_frame, cache.kinds[0][0].keys.shape[1], cache.newest.stop
        if not is_due or n <= self.budget_tokens:
            super().finish(cache)
            return
        sink = min(self.sink * S, n) if self.protect_sink else 0  # even where it exceeds the budget
        last = min(self.keep_last_frames * S, max(0, self.budget_tokens - sink))
        between, count = range(sink, n - last), max(0, self.budget_tokens - sink - last)
        scores = self._scores(cache, between, done) if count else None
        self.compressions.append((done, n))
        for layer, [kind] in enumerate(cache.kinds):
            if scores is None:
                cache.keep(layer, [(kind.heads, [range(sink), range(n - last, n)])])
                continue
            chosen = sink + scores[layer].topk(count).indices.sort().values.mT  # [B, count, h]
            ends = (send(torch.arange(*each), cache.device) for each in ((0, sink), (n - last, n)))
            first, newest = (each[None, :, None].expand(len(chosen), -1, chosen.shape[2]) for each in ends)
            cache.keep(layer, [(kind.heads, torch.cat([first, chosen, newest], 1))])
        self._last = done
        if self.source:
            self._before |= {"frame": done, "noise": self._noise.get_state()}

    def _scores(self, cache: HeadwiseCache, between: range, done: int) -> list[Tensor]:
        """Return for each layer scores [B, h, tokens] of tokens that may leave."""
        S, here = cache.tokens_per_frame, slice(cache.shard.heads.start, cache.shard.heads.stop)
        # 1. The mean query of each head, in time at its distance from frame 0; as pairs of dims of a key.
        offsets = [2**i for i in range(max(1, self.offset_max_frames.bit_length()))]
        omega = 1 / ROPE_THETA ** (torch.arange(cache.time_pairs).double() / cache.time_pairs)
        angles = torch.outer(torch.tensor(offsets).double() + done, omega)  # [offsets, pairs of time]
        turns = torch.ones(len(offsets), self.q_mean.shape[2], dtype=torch.complex128)
        turns[:, : cache.time_pairs] = torch.polar(torch.ones_like(angles), angles)
        asking = torch.view_as_real(self.q_mean[:, here, None] * turns).flatten(-2)  # [layers, h, offsets, D]
        if self.score_aggregation == "mean":
            asking = asking.mean(2, keepdim=True)
        beyond = self.q_abs_mean[:, here] - self.q_mean[:, here].abs()  # [layers, h, D / 2]
        asking, beyond = (send(x.float(), cache.device) for x in (asking, beyond))
        # 2. Keys at frame 0, row 0 and column 0, but for their own frame.
        cos, sin = (table[:, 0] for table in cache.rope(range(1)))  # [S, D]
        raw = []
        for layer, [kind] in enumerate(cache.kinds):
            if self.source:  # as if nothing had been chosen: sink, and the newest tokens of the video
                n, sink = kind.keys.shape[1], self.sink * S
                places = torch.arange(n, device=cache.device)
                places[sink:] += done * S - n
                places = (places % S)[None, between.start : between.stop, None]
            else:
                places = cache.seen(kind)[:, between.start : between.stop] % S
            keys = kind.keys[:, between.start : between.stop].float()  # [B, n, h, D]
            keys = rotate(keys, cos[places], -sin[places])
            sizes = keys.unflatten(-1, (-1, 2)).norm(dim=-1)
            score = torch.einsum("bnhd,hod->bhno", keys, asking[layer]).amax(3)
            raw.append(score + torch.einsum("bnhf,hf->bhn", sizes, beyond[layer]))
        # 3. Normalise rows, break ties, and let all layers of a head agree where they shall.
        scores = self.raw_scores = torch.stack(raw)  # [layers, B, h, n]
        if self.normalize_scores:
            spread = scores.std(-1, unbiased=False, keepdim=True).clamp_min(1e-6)
            scores = (scores - scores.mean(-1, keepdim=True)) / spread
        if self.tie_break_noise:
            noise = torch.rand(cache.num_layers, cache.shard.total, len(between), generator=self._noise)
            scores = scores + send(noise[:, None, here] * self.tie_break_noise_scale, cache.device)
        if self.pruning_mode == "perhead":
            is_max = self.perhead_layer_aggregation == "max"
            scores = (scores.amax(0) if is_max else scores.mean(0)).expand_as(scores)
        return list(scores)


@dataclass
class HeadBudget(HeadwisePolicy):
    """Give every head a window and a sink of its own, in frames. file: a CSV of layer, head, window, sink."""

    file: str = ""

    name = "head_budget"

    def __post_init__(self) -> None:
        columns = read_columns(self.name, self.file)
        problem = f"{self.file} has columns {', '.join(columns)}; it needs layer, head, window and sink"
        self.require({"window", "sink"} <= {*columns}, problem)
        try:
            self.windows, self.sinks = (np.array(columns[name]).astype(int) for name in ("window", "sink"))
        except ValueError as error:
            raise ConfigError(f"cache_policy {self.name}: {self.file}: {short_repr(error)}") from None
        super().__post_init__()

    def check(self, block_sizes: Sequence[int] = ()) -> None:
        super().check(block_sizes)
        block = max(block_sizes, default=1)
        fits = (self.sinks >= 0) & (self.windows >= self.sinks + block) & (self.windows <= MAX_FRAMES)
        if not fits.all():
            layer, head = (int(i) for i in np.argwhere(~fits)[0])
            here = f"layer {layer}, head {head}: window {self.windows[layer, head]}"
            self.require(False, f"{here} does not hold sink {self.sinks[layer, head]} and a block of {block}")

    def check_switch(self, how: str, frame: int) -> None:
        self.require(how == "keep", f"cannot {how}; use keep")

    def check_model(self, num_layers: int, num_heads: int) -> None:
        check_sizes(self, self.windows.shape, num_layers, num_heads)

    @property
    def num_frames(self) -> int | None:
        return int(self.windows.max())

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        """Return the memory of the mean head, rounded up."""
        return Capacity(math.ceil(np.minimum(self.windows, num_frames).mean()))

    def admit(self, cache: HeadwiseCache, block: range) -> None:  # type: ignore[override]
        S, first = cache.tokens_per_frame, cache.shard.heads.start
        cache.own = 0  # the block before is past
        for layer, kinds in enumerate(cache.kinds):
            kept: list[tuple[Sequence[int], Index]] = []
            for kind in kinds:
                windows, sinks = (x[layer, first:][list(kind.heads)] for x in (self.windows, self.sinks))
                room = np.minimum((windows - len(block)) * S, kind.past)
                for size in sorted({*room.tolist()}):
                    of_size = np.flatnonzero(room == size)
                    sink = torch.from_numpy(sinks[of_size] * S)  # [h]
                    index = torch.arange(size)[:, None].expand(-1, len(of_size))  # [size, h]
                    index = torch.where(index < sink, index, index + kind.past - size)
                    kept.append(([kind.heads[i] for i in of_size], send(index[None], cache.device)))
            cache.keep(layer, kept)


# --- What policies are given
def check_sizes(policy: CachePolicy, shape: Sequence[int], num_layers: int, num_heads: int) -> None:
    """Raise ConfigError where what a policy is given is of another model."""
    here = f"it is of {shape[0]} layers x {shape[1]} heads, the model of {num_layers} x {num_heads}"
    policy.require(tuple(shape[:2]) == (num_layers, num_heads), here)


def read_columns(policy: str, file: str) -> dict[str, list[list[str]]]:
    """Read values of layers x heads from a CSV: rows of layers (named ""), or columns layer, head and others.

    Raises ConfigError, which names the policy, for a file that is none.
    """
    if not isfile(file):
        raise ConfigError(f"cache_policy {policy}: {short_repr(file)} not found; give a CSV of heads")
    lines = (line for line in read_text(file, CONFIG_BYTES).splitlines() if not line.startswith("#"))
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines) if row]
        header, found = rows[0], {"": rows}
        if {"layer", "head"} <= {*header}:
            at = {(int(row[header.index("layer")]), int(row[header.index("head")])): row for row in rows[1:]}
            layers, heads = (max(index) + 1 for index in zip(*at, strict=True))
            names = [name for name in header if name not in ("layer", "head")]
            found = {
                name: [[at[i, j][header.index(name)] for j in range(heads)] for i in range(layers)]
                for name in names
            }
        if not found or len({len(row) for table in found.values() for row in table}) != 1:
            raise ValueError("rows of different lengths")
    except (csv.Error, ValueError, LookupError) as error:
        raise ConfigError(
            f"cache_policy {policy}: {file} is no CSV of layers x heads, or of columns layer, head and more "
            f"that name every head: {short_repr(error)}"
        ) from None
    return found


def read_static_heads(heads: Any) -> np.ndarray:
    """Return bool [layers, heads] from a CSV or an array of 1 (static) and 0, or Forcing-KV's JSON.

    A layer that the JSON leaves out has dynamic heads alone.
    """
    fits = "cache_policy forcing_kv: heads"
    if isinstance(heads, str) and heads.endswith(".json") and isfile(heads):
        content = read_json(heads)
        try:
            table = np.zeros((int(content["num_layers"]), int(content["num_heads"])), bool)
            for row in content["layers"]:
                table[row["layer_idx"], row["static_head"]] = True
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(f"{fits}: {heads} is no file of Forcing-KV: {short_repr(error)}") from None
        return table
    labels = next(iter(read_columns("forcing_kv", heads).values())) if isinstance(heads, str) else heads
    try:
        table = np.asarray(labels).astype(float)
    except (TypeError, ValueError):
        table = np.full((0, 0), np.nan)
    if table.ndim != 2 or not table.size or not np.isin(table, (0, 1)).all():
        raise ConfigError(f"{fits} must be a file or an array [layers, heads] of 1 (static) and 0 (dynamic)")
    return table.astype(bool)


def read_statistics(statistics: Any) -> tuple[Tensor, Tensor]:
    """Return mean queries complex64 and their mean moduli float32, [layers, heads, D / 2] each."""
    fits = "cache_policy triattention: statistics"
    suffix, arrays = "", statistics
    if isinstance(statistics, str):
        path, _, suffix = statistics.partition(":")
        if not isfile(path):
            remedy = "make_head_classes.py --rule triattention makes them"
            raise ConfigError(f"{fits} {short_repr(path)} not found; give an .npz ({remedy})")
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{fits} {path} is no .npz: {short_repr(error)}") from None
    try:
        end = f"_{suffix}" if suffix else ""
        if f"q_mean{end}" in arrays:
            mean = torch.as_tensor(arrays[f"q_mean{end}"]).to(torch.complex64)
        else:
            parts = (torch.as_tensor(arrays[f"q_mean_{part}{end}"]).float() for part in ("real", "imag"))
            mean = torch.complex(*parts)
        sizes = torch.as_tensor(arrays[f"q_abs_mean{end}"]).float()
        if mean.ndim != 3 or mean.shape != sizes.shape:
            raise ValueError(f"shapes {tuple(mean.shape)} and {tuple(sizes.shape)}")
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{fits} need q_mean (or q_mean_real and q_mean_imag) and q_abs_mean, [layers, heads, D / 2]: "
            f"{short_repr(error)}"
        ) from None
    return mean, sizes
