"""The KV cache of a rollout, and the face of the policies that fill and empty it.

A KVCache holds slots of one frame each. It appends, moves, drops and rotates them; which ones, a CachePolicy
says (wan/policies.py has ten). Letters: B batch, S tokens per frame, H heads, D head dim.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from wan.errors import ConfigError, short_repr
from wan.kernels import fused_kernels
from wan.keys import EMPTY, ChosenTokens, HeadGroup, HeadShard, KeyLayout, Slot, rotate, send

CUT_POSITION = 45  # where Infinity-RoPE's cut puts a block
FLUSH_KEEPS = 2  # the newest frames that a flush leaves
NEEDS_ROTATION = -97  # Slot.position of keys that were moved and are about to be rotated

RopeTables = tuple[Tensor, Tensor]
Text = Sequence[tuple[Tensor, Tensor]]  # the prompt's cross-attention keys and values of every layer
Seen = tuple[Tensor, Tensor] | list[HeadGroup]  # keys and values [B, Lk, H, D], or those of groups of heads


def rotate_into(target: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """target[...] = rotate(x, cos, sin), [B, L, H, D], in one kernel where both lie as a KV cache does."""
    rows = (x.shape[2] * x.shape[3], x.shape[3], 1)
    if x.numel() and x.stride()[1:] == target.stride()[1:] == rows and (kernels := fused_kernels(x)):
        kernels.rotate_into(target, x, cos, sin)
    else:
        target.copy_(rotate(x, cos, sin))


def no_rope(positions: Sequence[int]) -> RopeTables:
    raise ValueError("this policy moves keys: the KV cache needs the tables of RoPE")


class Capacity(NamedTuple):
    """Memory of a policy, in slots of one frame."""

    slots: int
    raw_slots: int = 0  # the first slots that keep un-rotated keys as well
    state_frames: int = 0  # keys and values in float32 that the policy holds beside the cache


@dataclass
class CachePolicy:
    """Decide what a block may look at: which slots stay, and at which temporal positions their keys stand.

    A policy is a subclass with its settings as fields. Every KV cache works with a copy, so state set in
    start() lives as long as one video. `released` asks for the numbers of a public release, quirks included:
    by its name, or True for the first of `releases`.
    """

    released: bool | str = False

    name: ClassVar[str]
    releases: ClassVar[tuple[str, ...]] = ()
    block_bound: ClassVar[tuple[str, ...]] = ()  # releases that only know blocks of 3 frames
    positions_follow_slots: ClassVar[bool] = False  # keys stand at 0..n-1, whatever their frames
    keeps_whole_frames: ClassVar[bool] = False  # every slot is a frame of its own
    chooses_by_layer: ClassVar[bool] = False  # layers, and batch items, may keep different frames
    can_recache: ClassVar[bool] = True
    by_heads: ClassVar[bool] = False  # heads of a layer may keep different keys
    raw_by_frame: ClassVar[bool] = False  # un-rotated keys lie at their frame's number, not at its slot
    bounds: ClassVar[dict[str, tuple[float, float]]] = {}  # the least and greatest value of a field

    def __post_init__(self) -> None:
        fits = self.released in (False, *self.releases) or (self.released is True and bool(self.releases))
        known = ", ".join(self.releases) or "none"
        self.require(fits, f"released {short_repr(self.released)} is not one of {known}; leave it out")
        self.check()

    def require(self, fits: bool, problem: str) -> None:
        """Raise ConfigError where something does not fit."""
        if not fits:
            raise ConfigError(f"cache_policy {self.name}: {problem}")

    @property
    def source(self) -> str:
        """The public release to reproduce, or ""."""
        return self.releases[0] if self.released is True else str(self.released or "")

    @property
    def num_frames(self) -> int | None:
        """Frames that a call sees at most; None without a limit."""
        return None

    @property
    def recomputed_frames(self) -> int | None:
        """Frames that a change of prompts computes again at most; None for all of the past."""
        return self.num_frames

    @property
    def lasting_sink(self) -> int:
        """Frames of the sink that outlive a recache."""
        return 0

    def describe(self) -> dict[str, Any]:
        """Return the policy as a config has it: its name and the fields that differ from their defaults."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = {f.name: f.default for f in fields(self)}
        differ = {key: x for key, x in values.items() if type(x) is not type(plain[key]) or x != plain[key]}
        return {"name": self.name, **differ}

    def check(self, block_sizes: Sequence[int] = ()) -> None:
        """Raise ConfigError where fields contradict each other, or blocks of these sizes do not fit."""
        fits = self.source not in self.block_bound or set(block_sizes) <= {3}
        self.require(fits, f"released by {self.source} has blocks of 3 frames; leave released out")
        for name, (low, high) in self.bounds.items():
            value = getattr(self, name)
            fits = value is None or low <= value <= high
            self.require(fits, f"{name} must be in {low:g}..{high:g}, not {value}")

    def check_switch(self, how: str, frame: int) -> None:
        """Raise ConfigError where a prompt that changes at a frame cannot change the cache in this way."""
        fits = how != "recache" or self.can_recache
        self.require(fits, "cannot compute its cache again; use keep or flush")
        fits = how != "cut" or self.positions_follow_slots
        self.require(fits, "cannot cut, as policies with keys at 0..n-1 can, such as relative; use flush")

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        """Return the memory for a video of num_frames frames in blocks of at most block_size."""
        return Capacity(num_frames, num_frames if self.positions_follow_slots else 0)

    def most_slots(self, frames: int) -> int:
        """Return how many slots a block sees at most once there were so many frames, its own among them."""
        return min(frames, self.num_frames or frames)

    def of_video(self, has_switches: bool) -> "CachePolicy":
        """Return the policy of one video, whose prompt may change."""
        return self

    def start(self, cache: "KVCache") -> None:
        """Begin a video, or go on after the cache was computed again: set the policy's state."""

    def admit(self, cache: "KVCache", block: range) -> None:
        """Make room for the frames of a block, and append them."""
        cache.append(block)

    def positions(self, cache: "KVCache", cut: bool) -> Sequence[int]:
        """Return the temporal positions of all slots up to the block's own, which come last."""
        if not self.positions_follow_slots:
            return [slot.position for slot in cache.slots[: cache.own.stop]]
        first = CUT_POSITION if cut else cache.own.start
        return [*range(cache.own.start), *range(first, first + len(cache.own))]

    def query_positions(self, cache: "KVCache") -> Sequence[int]:
        """Return the temporal positions of the block's queries."""
        return cache.key_positions

    def own_slots(self, cache: "KVCache", layer: int) -> range:
        """Return the slots that the present pass writes in a layer: of the block's frames the last ones."""
        return cache.own

    def written(self, cache: "KVCache", layer: int, q: Tensor) -> Seen:
        """Return what the call sees, after a write by queries q [B, L, H, D]."""
        return cache.view(layer)

    def of_layer(self, cache: "KVCache", layer: int) -> tuple[Sequence[Slot], ChosenTokens | None]:
        """Return the slots as one layer has them, and the tokens it chose, where chooses_by_layer."""
        return cache.slots, None

    def flush(self, cache: "KVCache") -> None:
        """Forget the past but for the sink and the last two frames."""
        sink = min(getattr(self, "sink", 0), len(cache.slots))
        cache.drop(sink, len(cache.slots) - sink - FLUSH_KEEPS)
        kept = min(len(cache.slots), len(cache.newest), FLUSH_KEEPS)
        cache.own = range(len(cache.slots) - kept, len(cache.slots))
        cache.newest = range(cache.newest.stop - kept, cache.newest.stop)

    def recache(self, cache: "KVCache", frames: range) -> None:
        """Make the slots of frames, whose keys one forward is about to compute, the whole cache."""
        kept = min(self.lasting_sink, len(cache.slots))
        self.start(cache)
        del cache.slots[kept:]
        cache.append(frames, own=len(frames) - kept)

    def new_cache(self, build: "Callable[..., KVCache]", num_layers: int, shard: HeadShard) -> "AnyCache":
        """Return an empty cache; build makes one from its number of heads in every layer and its policy."""
        return build([len(shard.heads)] * num_layers, self)


class KVCache:
    """One buffer of keys and one of values per layer, [B, capacity·S, H, D], written in place.

    slots say what lies in them, in order; own are those of the newest block, which its passes overwrite.
    Policies whose keys change their position keep them un-rotated as well, in raw_keys.
    """

    def __init__(
        self,
        num_heads: Sequence[int],
        batch: int,
        head_dim: int,
        tokens_per_frame: int,
        num_frames: int,
        policy: CachePolicy,
        block_size: int = 3,
        rope: Callable[[Sequence[int]], RopeTables] = no_rope,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        shard: HeadShard | None = None,
    ):
        """num_heads: local heads per layer (see shard under head parallelism).

        rope gives the tables [n·S, 1, D] of n temporal positions; policies that move keys need it.
        """
        self.num_layers, self.tokens_per_frame, self.rope = len(num_heads), tokens_per_frame, rope
        self.policy = copy(policy)  # its state belongs to one video
        size = self.policy.capacity(num_frames, block_size)
        self.capacity, self.raw_slots = size.slots, min(size.raw_slots, size.slots)
        self.sink: int = getattr(policy, "sink", 0)  # the first slots, which are never dropped
        self.shard = shard or HeadShard.whole(max(num_heads, default=0))
        self.slots: list[Slot] = []
        self.own, self.newest = range(0), range(0)  # slots and frames of the newest block
        self.query_positions: Sequence[int] = ()
        self.key_positions: Sequence[int] = ()
        self.stores_raw = False  # whether the pass that runs has to bring its un-rotated keys
        self.text: Text = ()

        def buffers(slots: int) -> list[Tensor]:
            shapes = [(batch, slots * tokens_per_frame, heads, head_dim) for heads in num_heads]
            return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]

        self.keys, self.values = buffers(self.capacity), buffers(self.capacity)
        self.raw_keys = buffers(self.raw_slots) if self.raw_slots else []
        self._given: tuple[Tensor, ...] = ()  # the last places()
        self.layouts = [KeyLayout((), tokens_per_frame)] * len(self.keys)
        self.policy.start(self)

    @property
    def frames(self) -> list[int]:
        """The frame of every slot."""
        return [slot.frame for slot in self.slots]

    def advance(self, block: range, text: Text = (), cut: bool = False) -> None:
        """Make room for the next block. From here on its queries see slots, and writes go to own.

        text is for policies that choose by the prompt. cut: the block stands far away from what came before.
        """
        self.text = text or self.text
        self._drop_empty()
        self.policy.admit(self, block)
        self._publish(cut)

    def flush(self) -> None:
        """Forget the past but for the policy's sink and the last two frames."""
        self._drop_empty()
        self.policy.flush(self)

    def recache(self, frames: range, text: Text, lasts: bool = True) -> None:
        """Make room for a forward over clean frames of the past, whose keys become the cache.

        Where it lasts for one block alone, none of them becomes the sink.
        """
        self.text = text
        self.sink = self.sink if lasts else self.policy.lasting_sink
        self._drop_empty()
        self.policy.recache(self, frames)
        self._publish(cut=False)

    def begin_pass(self, is_clean: bool) -> None:
        """Announce the next pass; only clean ones store un-rotated keys."""
        self.stores_raw = is_clean and self._raw_rows(self.policy.own_slots(self, 0)).start < self.raw_slots

    def places(self, layer: int, shape: torch.Size) -> tuple[Tensor, Tensor] | None:
        """Return where write() will put keys and values [1, L, H, D] of L tokens, if in one piece.

        shape is that of the tokens, [B, L, dim].
        """
        own = self.policy.own_slots(self, layer)
        if shape[0] != 1 or len(own) * self.tokens_per_frame != shape[1]:
            return None
        self._given = self.keys[layer][:, self.tokens(own)], self.values[layer][:, self.tokens(own)]
        return self._given

    def write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_k: Tensor | None = None) -> Seen:
        """Store the newest block's keys and values [B, L, H, D], over those of its earlier passes.

        q [B, L, H, D] are its queries, for policies that choose by them. Returns what the call sees.
        """
        own, S = self.policy.own_slots(self, layer), self.tokens_per_frame
        first = k.shape[1] - len(own) * S  # the first frames may have no slot
        if not any(k is place for place in self._given):  # else both were computed there
            self.keys[layer][:, self.tokens(own)] = k[:, first:]
            self.values[layer][:, self.tokens(own)] = v[:, first:]
        if raw_k is not None:
            rows = self._raw_rows(own)
            rows = range(rows.start, min(rows.stop, self.raw_slots))
            self.raw_keys[layer][:, self.tokens(rows)] = raw_k[:, first : first + len(rows) * S]
        return self.policy.written(self, layer, q)

    def view(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of the keys and values of all slots [B, Lk, H, D]."""
        seen = self.tokens(range(len(self.slots)))
        return self.keys[layer][:, seen], self.values[layer][:, seen]

    def parts(self, layer: int, num_heads: int) -> list[tuple[list[int], KeyLayout]]:
        """Return the layout of all heads of a layer, as HeadGroup wants it."""
        return [(list(range(num_heads)), self.layouts[layer])]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, with and without RoPE."""
        return sum(x.nbytes for x in (*self.keys, *self.values, *self.raw_keys))

    def tokens(self, slots: range | int) -> slice:
        """Return the tokens of consecutive slots, or of one, in a buffer."""
        start, stop = (slots, slots + 1) if isinstance(slots, int) else (slots.start, slots.stop)
        return slice(start * self.tokens_per_frame, stop * self.tokens_per_frame)

    def append(self, block: range, own: int | None = None) -> None:
        """Give the frames of the next block, or the last own of them, the slots after the present ones."""
        frames = block if own is None else block[len(block) - own :]
        if len(self.slots) + len(frames) > self.capacity:
            raise ValueError(f"frame {block.stop - 1} is beyond the frames that the KV cache was made for")
        self.own = range(len(self.slots), len(self.slots) + len(frames))
        self.slots.extend(Slot(frame, frame) for frame in frames)
        self.newest = block

    def append_empty(self, count: int) -> None:
        """Append slots of zeros, which leave before the next block."""
        zeros = self.tokens(range(len(self.slots), len(self.slots) + count))
        for buffer in (*self.keys, *self.values):
            buffer[:, zeros] = 0
        self.slots.extend(Slot(EMPTY, EMPTY) for _ in range(count))

    def drop(self, start: int, count: int) -> None:
        """Delete count slots from start on; shift the rest left."""
        if count > 0:
            self.keep([*range(start), *range(start + count, len(self.slots))])

    def keep(self, slots: Sequence[int]) -> None:
        """Make slots, in this order, the whole cache; one may come twice."""
        moved = [index for index, slot in enumerate(slots) if index != slot]
        kept = [self.slots[slot] for slot in slots]
        if moved:
            buffers = self.values + (self.raw_keys if self.raw_slots == self.capacity else [])
            if not self.policy.positions_follow_slots:
                buffers = buffers + self.keys
            else:
                for index in moved:  # their keys will be rotated anew
                    kept[index] = Slot(kept[index].frame, NEEDS_ROTATION)
            target = self.tokens(range(moved[0], len(slots)))
            source = send(torch.tensor(slots[moved[0] :]), self.keys[0].device)
            for buffer in buffers:
                frames = buffer.unflatten(1, (self.capacity, -1))  # [B, slots, S, H, D]
                buffer[:, target] = frames[:, source].flatten(1, 2)
        self.slots = kept

    def set_positions(self, positions: Sequence[int]) -> None:
        """Put the keys of the first slots on to temporal positions; rotate past ones that stood elsewhere."""
        moved = [index for index, position in enumerate(positions) if self.slots[index].position != position]
        for index in moved:
            self.slots[index] = Slot(self.slots[index].frame, positions[index])
        moved = [index for index in moved if index not in self.own]
        for _, run in groupby(enumerate(moved), lambda pair: pair[1] - pair[0]):  # consecutive slots together
            indices = [index for _, index in run]
            slots = range(indices[0], indices[-1] + 1)
            cos, sin = self.rope(positions[slots.start : slots.stop])
            for keys, raw in zip(self.keys, self.raw_keys, strict=True):
                rotate_into(keys[:, self.tokens(slots)], raw[:, self.tokens(slots)], cos, sin)

    def _raw_rows(self, own: range) -> range:
        return self.newest if self.policy.raw_by_frame else own

    def _drop_empty(self) -> None:
        self.slots = [slot for slot in self.slots if slot.frame != EMPTY]

    def _publish(self, cut: bool) -> None:
        """Put keys on to their positions, and make the layouts of the calls to come."""
        self.set_positions(self.policy.positions(self, cut))
        self.key_positions = self.newest  # of a recomputed cache, where some frames get no slot
        if len(self.own) == len(self.newest):
            first = self.slots[self.own.start].position
            self.key_positions = range(first, first + len(self.own))
        self.query_positions = self.policy.query_positions(self)
        self.begin_pass(is_clean=True)
        asks, sink = tuple(self.query_positions), range(min(self.sink, self.own.start))
        shared = KeyLayout(tuple(self.slots), self.tokens_per_frame, self.own, asks, sink=sink)
        self.layouts = [shared] * self.num_layers
        if self.policy.chooses_by_layer:
            own = [self.policy.of_layer(self, layer) for layer in range(self.num_layers)]
            self.layouts = [replace(shared, slots=tuple(slots), chosen=chosen) for slots, chosen in own]


class HeadClass(NamedTuple):
    """The cache of a class of heads, and in every layer its heads among those that are here."""

    cache: KVCache
    has_heads: list[bool]  # here or in other processes
    numbers: list[tuple[int, ...]]
    here: list[Tensor]  # the numbers on the device


class PerHeadCache:
    """A KVCache for each class of heads, with the face of one; write() returns groups of heads.

    A class has a cache in every process of a sharded model, also where none of its heads are.
    """

    def __init__(self, policy: CachePolicy, classes: Sequence[HeadClass]):
        self.policy, self._classes = policy, classes
        self.caches = [one.cache for one in classes]
        self.newest, self.stores_raw = range(0), False
        self.query_positions: Sequence[int] = ()
        self.key_positions: Sequence[int] = ()

    def advance(self, block: range, text: Text = (), cut: bool = False) -> None:
        """Make room for the next block in every class."""
        for one in self._classes:
            rows = zip(text, one.here, strict=False)
            one.cache.advance(block, [(k[:, :, row], v[:, :, row]) for (k, v), row in rows], cut)
        first, self.newest = self.caches[0], block
        self.query_positions, self.key_positions = first.query_positions, first.key_positions
        self.begin_pass(is_clean=True)

    def flush(self) -> None:
        for cache in self.caches:
            cache.flush()

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def begin_pass(self, is_clean: bool) -> None:
        for cache in self.caches:
            cache.begin_pass(is_clean)
        self.stores_raw = any(cache.stores_raw for cache in self.caches)

    def write(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_k: Tensor | None = None
    ) -> list[HeadGroup]:
        """Store the newest block's keys and values [B, L, H, D] -> what each class of heads sees."""
        groups = []
        for cache, has_heads, numbers, here in self._classes:
            if not has_heads[layer]:
                continue
            row = here[layer]
            raw = raw_k[:, :, row] if raw_k is not None and cache.stores_raw else None
            queries = q[:, :, row]
            seen = cast(tuple[Tensor, Tensor], cache.write(layer, queries, k[:, :, row], v[:, :, row], raw))
            if len(row):
                parts = partial(cache.parts, layer, len(row))
                groups.append(HeadGroup(numbers[layer], row, queries, *seen, parts))
        return groups


class HeadCaches(Protocol):
    """The face that PerHeadCache shares with the HeadwiseCache of wan/headwise.py."""

    policy: CachePolicy
    newest: range
    stores_raw: bool
    query_positions: Sequence[int]
    key_positions: Sequence[int]

    @property
    def nbytes(self) -> int: ...
    def advance(self, block: range, text: Text = (), cut: bool = False) -> None: ...
    def flush(self) -> None: ...
    def begin_pass(self, is_clean: bool) -> None: ...
    def write(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_k: Tensor | None = None
    ) -> list[HeadGroup]: ...


AnyCache = KVCache | HeadCaches
