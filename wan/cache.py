"""Keys and values of one rollout: buffers, and slots that a cache policy fills, moves and empties.

Letters: B batch, S tokens per frame, H heads, D head dim. What may stay, and where it stands, is the policy's
to say (wan/policies.py).
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from wan.captured_call import HeadGroup, HeadShard
from wan.errors import ConfigError
from wan.keys import EMPTY, STALE, ChosenTokens, KeyLayout, Slot, send
from wan.policies import CachePolicy, PerHead
from wan.rope import rotate_into

# --- Keys and values of one rollout: buffers, and slots that a cache policy fills, moves and empties
if TYPE_CHECKING:
    from wan.policies import CachePolicy

RopeTables = tuple[Tensor, Tensor]


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
        policy: "CachePolicy",
        block_size: int = 3,
        rope: Callable[[Sequence[int]], RopeTables] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        shard: HeadShard | None = None,
    ):
        """num_heads of each layer that are here; shard says which, where others are in other processes.

        rope gives the tables [n·S, 1, D] of n temporal positions; some policies need it.
        """
        self.num_frames, self.tokens_per_frame, self.rope = num_frames, tokens_per_frame, rope
        self.capacity = policy.capacity(num_frames, block_size)
        self.slots: list[Slot] = []
        self.own = range(0)
        self.newest = range(0)
        self.stores_raw = False  # whether the pass that runs has to bring its un-rotated keys
        self.text: Sequence[tuple[Tensor, Tensor]] = ()  # the prompt's keys and values per layer
        self.shard = shard or HeadShard.whole(max(num_heads, default=0))
        self.policy = copy(policy)  # state belongs to one video
        self.sink: int = getattr(policy, "sink", 0)  # the first slots, which are never let go

        def buffers(slots: int) -> list[Tensor]:
            shapes = [(batch, slots * tokens_per_frame, heads, head_dim) for heads in num_heads]
            return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]

        self.keys, self.values = buffers(self.capacity), buffers(self.capacity)
        self.raw_slots = min(policy.raw_slots(self.capacity), self.capacity)  # the first slots keep raw keys
        self.raw_keys = buffers(self.raw_slots) if self.raw_slots else []
        self.raw_keys_move = self.raw_slots == self.capacity
        self._rollout = object()
        self._given: tuple[Tensor, ...] = ()  # the last places()
        self.layouts = [KeyLayout((), tokens_per_frame)] * len(self.keys)
        self.policy.start(self)

    @property
    def frames(self) -> list[int]:
        """The frame of every slot."""
        return [slot.frame for slot in self.slots]

    @property
    def num_layers(self) -> int:
        return len(self.keys)

    @property
    def query_positions(self) -> Sequence[int]:
        """Temporal positions of the newest block's queries."""
        return self.policy.query_positions(self)

    @property
    def key_positions(self) -> Sequence[int]:
        """Temporal positions of the newest block's keys."""
        return self.policy.key_positions(self)

    # -- the rollout -----------------------------------------------------------------------------------------

    def advance(
        self,
        block: range,
        text: Sequence[tuple[Tensor, Tensor]] = (),
        cut: bool = False,
    ) -> None:
        """Make room for the next block. From here on its queries see slots, and writes go to own.

        text are the prompt's cross-attention keys and values, which some policies ask. cut: the block stands
        far away from what came before (Infinity-RoPE).
        """
        self.text = text or self.text
        self._drop_empty()
        self.policy.admit(self, block, cut)
        self.begin_pass(is_clean=True)
        self.publish()

    def flush(self) -> None:
        """Forget the past but for the policy's sink and the last two frames."""
        self._drop_empty()
        self.policy.flush(self)

    def recache(self, frames: range, text: Sequence[tuple[Tensor, Tensor]], lasts: bool = True) -> None:
        """Make room for a forward over clean frames of the past, whose keys become the cache.

        Where it lasts for one block alone, none of them becomes the sink.
        """
        self.text = text
        self.sink = self.sink if lasts else self.policy.lasting_sink
        self._drop_empty()
        self.policy.recache(self, frames)
        self.begin_pass(is_clean=True)
        self.publish()

    def begin_pass(self, is_clean: bool) -> None:
        """Say which pass comes next; raw keys are kept of clean ones alone."""
        self.stores_raw = is_clean and self.policy.raw_places(self, 0).start < self.raw_slots

    def places(self, layer: int, shape: torch.Size) -> tuple[Tensor, Tensor] | None:
        """Where write() will put keys and values [1, L, H, D] of tokens [1, L, dim], if in one piece."""
        own, length = self.policy.own_slots(self, layer), shape[1]
        whole = len(own) * self.tokens_per_frame == length and not self.policy.unwritten(self, layer)
        if not whole or shape[0] != 1:
            return None
        tokens = self.tokens(own.start, own.stop)
        self._given = self.keys[layer][:, tokens], self.values[layer][:, tokens]
        return self._given

    def write(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_k: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Store the newest block's keys and values [B, L, H, D], over those of its earlier passes.

        q [B, L, H, D] are its queries, for policies that choose by them. Returns views of all visible keys
        and values [B, Lk, H, D].
        """
        S, own = self.tokens_per_frame, self.policy.own_slots(self, layer)
        skipped = self.policy.unwritten(self, layer)
        start, end = (own.start + skipped) * S, own.stop * S
        first = k.shape[1] - (end - start)  # a recomputed cache may have no place for the first frames
        keys, values = self.keys[layer], self.values[layer]
        if first:
            k, v = k[:, first:], v[:, first:]
        if not any(k is place for place in self._given):  # else both were computed there
            keys[:, start:end] = k
            values[:, start:end] = v
        if raw_k is not None:
            place = self.policy.raw_places(self, layer)
            start, stop = (place.start + skipped) * S, min(place.stop, self.raw_slots) * S
            self.raw_keys[layer][:, start:stop] = raw_k[:, first : first + stop - start]
        return self.policy.written(self, layer, q)

    def view(self, layer: int, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of the first stop slots, or of all of them."""
        end = (len(self.slots) if stop is None else stop) * self.tokens_per_frame
        return self.keys[layer][:, :end], self.values[layer][:, :end]

    # -- what policies do ------------------------------------------------------------------------------------

    def tokens(self, start: int, stop: int) -> slice:
        """The tokens of slots start..stop - 1 in a buffer."""
        return slice(start * self.tokens_per_frame, stop * self.tokens_per_frame)

    def append(self, block: range, own: int | None = None) -> None:
        """The frames of the next block, or the last own of them, take the slots after the present ones."""
        frames = block[len(block) - (len(block) if own is None else own) :]
        if len(self.slots) + len(frames) > self.capacity:
            raise ValueError(
                f"frame {block.stop - 1} is beyond the {self.num_frames} frames that the KV cache was "
                "made for"
            )
        self.own = range(len(self.slots), len(self.slots) + len(frames))
        self.slots.extend(Slot(frame, frame) for frame in frames)
        self.newest = block

    def append_empty(self, count: int) -> None:
        """Slots of zeros after the present ones, until the next block."""
        zeros = self.tokens(len(self.slots), len(self.slots) + count)
        for buffer in (*self.keys, *self.values):
            buffer[:, zeros] = 0
        self.slots.extend(Slot(EMPTY, EMPTY) for _ in range(count))

    def remove(self, start: int, count: int) -> None:
        """count slots leave, and those after them close up."""
        if count <= 0:
            return
        self.move(start + count, len(self.slots), start)
        del self.slots[start : start + count]

    def move(self, start: int, stop: int, to: int) -> None:
        """Copy the keys and values of slots start..stop - 1 to the slots from to on;
        their Slots stay where they are.
        """
        source, target = self.tokens(start, stop), self.tokens(to, to + stop - start)
        moved = [*self.values, *(self.raw_keys if self.raw_keys_move else ())]
        if self.policy.stands_by_slot:  # their keys will be rotated anew
            self.slots[start:stop] = [Slot(slot.frame, STALE) for slot in self.slots[start:stop]]
        else:
            moved += self.keys
        for buffer in moved:
            buffer[:, target] = buffer[:, source].clone()  # the two ranges may overlap

    def stand(self, positions: Sequence[int], start: int = 0) -> None:
        """Put the keys of the slots from start on to these temporal positions,
        rotating those that stood elsewhere.
        """
        turned = []
        for index, position in enumerate(positions, start):
            slot = self.slots[index]
            if slot.position != position:
                self.slots[index] = Slot(slot.frame, position)
                if index not in self.own:
                    turned.append(index)
        for run in _runs(turned):
            self.rotate(run, [self.slots[index].position for index in run])

    def rotate(self, slots: range, positions: Sequence[int]) -> None:
        """Rotate the raw keys of slots to temporal positions."""
        if self.rope is None:
            raise ValueError("this policy moves keys: the KV cache needs the tables of RoPE")
        cos, sin = self.rope(_as_range(positions))
        tokens = self.tokens(slots.start, slots.stop)
        for keys, raw in zip(self.keys, self.raw_keys, strict=True):
            rotate_into(keys[:, tokens], raw[:, tokens], cos, sin)

    def _drop_empty(self) -> None:
        while self.slots and self.slots[-1].frame == EMPTY:
            self.slots.pop()

    # -- what others see -------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Make the layouts of the calls to come."""
        shared = self._layout(self.slots, self.layouts[0])
        if not self.policy.chooses_by_layer:
            self.layouts = [shared] * self.num_layers
            return
        self.layouts = [
            self._layout(self.policy.layer_slots(self, layer), before, self.policy.layer_tokens(layer))
            for layer, before in enumerate(self.layouts)
        ]

    def _layout(
        self, slots: Sequence[Slot], before: KeyLayout, chosen: ChosenTokens | None = None
    ) -> KeyLayout:
        same = [new is old for new, old in zip(slots, before.slots, strict=False)]
        return KeyLayout(
            tuple(slots),
            self.tokens_per_frame,
            own=self.own,
            query_positions=tuple(self.query_positions),
            rollout=self._rollout,
            version=before.version + 1,
            unchanged=same.index(False) if False in same else len(same),
            chosen=chosen,
            sink=range(min(self.sink, self.own.start)),
        )


def _runs(indices: Sequence[int]) -> list[range]:
    """Consecutive indices together: [0, 1, 4] -> [range(0, 2), range(4, 5)]."""
    runs: list[range] = []
    for index in indices:
        if runs and runs[-1].stop == index:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs


def _as_range(positions: Sequence[int]) -> Sequence[int]:
    """A range where the positions are consecutive: tables of a range are made on the device."""
    first = positions[0]
    consecutive = all(position == first + i for i, position in enumerate(positions))
    return range(first, first + len(positions)) if consecutive else positions


# --- The cache of a rollout whose heads are of several classes, each with a policy and buffers of its own
Text = Sequence[tuple[Tensor, Tensor]]


class _Part(NamedTuple):
    """The cache of a class of heads, and these heads in every layer."""

    cache: KVCache
    in_model: list[list[int]]  # also those of other processes
    numbers: list[tuple[int, ...]]  # among the heads that are here
    here: list[Tensor]  # these numbers on the device


class PerHeadCache:
    """A KVCache for each class of heads; what a KVCache offers the pipeline and the model,
    this one does too.
    """

    def __init__(
        self,
        policy: PerHead,
        build: Callable[[Sequence[int], CachePolicy], KVCache],
        device: torch.device,
        shard: HeadShard,
    ):
        """build makes the cache of a class from its numbers of heads per layer and its policy.

        A class has a cache in every process of a sharded model, also where none of its heads are.
        """
        self.policy = policy
        self._parts: list[_Part] = []
        for label, of_class in policy.classes.items():
            heads = policy.heads(label)
            if any(heads):
                numbers = [tuple(shard.local(row)) for row in heads]
                here = [send(torch.tensor(row, dtype=torch.long), device) for row in numbers]
                cache = build([len(row) for row in here], of_class)
                self._parts.append(_Part(cache, heads, numbers, here))

    @property
    def caches(self) -> list[KVCache]:
        return [part.cache for part in self._parts]

    @property
    def newest(self) -> range:
        return self.caches[0].newest

    @property
    def stores_raw(self) -> bool:
        return any(cache.stores_raw for cache in self.caches)

    @property
    def query_positions(self) -> Sequence[int]:
        return self.caches[0].query_positions

    @property
    def key_positions(self) -> Sequence[int]:
        return self.caches[0].key_positions

    def advance(self, block: range, text: Text = (), cut: bool = False) -> None:
        """Make room for the next block in every class."""
        for part in self._parts:
            rows = zip(text, part.here, strict=False)
            part.cache.advance(block, [(k[:, :, row], v[:, :, row]) for (k, v), row in rows], cut)
        positions = {tuple(cache.query_positions) for cache in self.caches}
        if len(positions) > 1:
            raise ConfigError(f"cache_policy per_head: classes put the queries at {sorted(positions)}")

    def flush(self) -> None:
        for cache in self.caches:
            cache.flush()

    def recache(self, frames: range, text: Text, lasts: bool = True) -> None:
        raise ConfigError("cache_policy per_head cannot compute its cache again; use keep or flush")

    def begin_pass(self, is_clean: bool) -> None:
        for cache in self.caches:
            cache.begin_pass(is_clean)

    def write(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_k: Tensor | None = None
    ) -> list[HeadGroup]:
        """Store the newest block's keys and values [B, L, H, D] -> what each class of heads sees."""
        groups = []
        for cache, in_model, numbers, here in self._parts:
            if not in_model[layer]:
                continue
            row = here[layer]
            raw = raw_k[:, :, row] if raw_k is not None and cache.stores_raw else None
            queries = q[:, :, row]
            keys, values = cache.write(layer, queries, k[:, :, row], v[:, :, row], raw)
            if len(row):
                groups.append(HeadGroup(numbers[layer], row, queries, keys, values, cache.layouts[layer]))
        return groups
