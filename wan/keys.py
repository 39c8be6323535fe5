"""Describe the keys of one attention call: slot by slot a frame, a temporal position and a number of tokens.

Frame: global index of a latent frame. Slot: place in the keys. Position: temporal RoPE index at which a
slot's keys stand.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor


# --- Indices and host tensors for a device, without making the host wait for it
def send(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device."""
    if x.device.type == "cpu" and device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


LEFT: set[torch.device] = set()  # GPUs from which copies to the host were started


def to_host(x: Tensor) -> Tensor:
    """Start copying a tensor to the host; call wait_for_host() before reading it."""
    if x.is_cuda:
        LEFT.add(x.device)
    return x.to("cpu", non_blocking=True)  # pinned memory, if from a GPU


def wait_for_host() -> None:
    """Wait for all copies that to_host() started, also from GPUs other than the current one."""
    for device in tuple(LEFT):  # other threads may add theirs meanwhile
        torch.cuda.synchronize(device)


def as_index(numbers: Sequence[int], device: torch.device) -> slice | Tensor:
    """Return an index of these numbers, a slice where they are consecutive.

    A list as an index would be copied to the device, and the host would wait for it.
    """
    if not numbers:
        return slice(0, 0)
    first, stop = numbers[0], numbers[0] + len(numbers)
    if list(numbers) == list(range(first, stop)):
        return slice(first, stop)
    return send(torch.tensor(numbers, dtype=torch.long), device)


def select(x: Tensor, numbers: Sequence[int], dim: int) -> Tensor:
    """Select these numbers along a dim; a view where they are consecutive."""
    return x[(slice(None),) * dim + (as_index(numbers, x.device),)]


# --- Rotary position embedding over time, height and width (arXiv 2104.09864), laid out as in Wan2.1
ROPE_THETA = 10000.0


def rope_dims(head_dim: int) -> tuple[int, int, int]:
    """Return how many of a head's dims turn with time, height and width."""
    spatial = 2 * (head_dim // 6)
    return head_dim - 2 * spatial, spatial, spatial


def rope_frequencies(
    dims: int, base: float | Tensor = ROPE_THETA, device: torch.device | None = None
) -> Tensor:
    """Return base^(-2i / dims), the radians per step of each pair i of dims, float64 [..., dims / 2]."""
    exponents = torch.arange(0, dims, 2, dtype=torch.float64, device=device) / dims
    return 1 / base**exponents


def time_frequencies(head_dim: int) -> Tensor:
    """Return the radians per latent frame of a head's pairs that turn with time, fastest first, float64."""
    return rope_frequencies(rope_dims(head_dim)[0])


class RotaryTable:
    """Rotary position embedding over time, height and width (rope_dims).

    Time is the absolute latent frame, without limit. Tables are computed in float64, once per block of a
    rollout.
    """

    def __init__(self, head_dim: int):
        self.head_dim = head_dim
        self.axes_dim = rope_dims(head_dim)
        self._last: dict[tuple, tuple[Tensor, Tensor]] = {}

    @property
    def bands(self) -> dict[str, int]:
        """Consecutive bands of a head's dims, name -> size: one per time frequency, then height and width."""
        bands = {}
        for frequency in time_frequencies(self.head_dim).tolist():
            period, decimals = 2 * math.pi / frequency, 2  # frames
            if period > 100:
                decimals = 0
            bands[f"time, period {period:.{decimals}f} frames"] = 2
        _, height, width = self.axes_dim
        return bands | {"height": height, "width": width}

    def freqs_cis(self, axis: int, positions: Tensor) -> Tensor:
        """Return exp(i position frequency) of each pair of dims along time (0), height (1) or width (2).

        positions [n] -> complex128 [n, axes_dim / 2].
        """
        frequencies = rope_frequencies(self.axes_dim[axis], device=positions.device)
        angles = torch.outer(positions.double(), frequencies)
        return torch.polar(torch.ones_like(angles), angles)

    def __call__(
        self, frames: Sequence[int], height: int, width: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin for rotate(), float32 [L, 1, D]; kept until others are asked for."""
        key = (tuple(frames), height, width, device)
        tables = self._last.get(key)  # another thread may replace what is kept
        if tables is None:
            if isinstance(frames, range):  # made on the device: a copy from the host would wait for it
                positions = torch.arange(frames.start, frames.stop, frames.step, device=device)
            else:
                positions = send(torch.tensor(frames), device)
            rows, columns = (torch.arange(n, device=device) for n in (height, width))
            time, row, column = (self.freqs_cis(axis, p) for axis, p in enumerate((positions, rows, columns)))
            grid = (len(positions), height, width, -1)
            parts = time[:, None, None], row[None, :, None], column[None, None]
            turns = torch.cat([part.expand(grid) for part in parts], -1).flatten(0, 2)[:, None]  # [L, 1, D/2]
            cos, sin = turns.real.float(), turns.imag.float()
            tables = cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
            self._last = {key: tables}
        return tables


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of dims (a, b) to (a cos − b sin, a sin + b cos): x [B, L, H, D], tables [L, 1, D]."""
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)


# --- Slots, and the layout of all keys of a call
AVERAGE, EMPTY, CHOSEN = -1, -2, -3  # Slot.frame of a mean of frames, of zeros, of tokens of several frames
MIXED = -98  # Slot.position of tokens that stand at several positions


@dataclass(frozen=True, eq=False)
class Slot:
    """One cache slot, immutable: the frame whose keys it holds and their position."""

    frame: int  # or AVERAGE, EMPTY, CHOSEN
    position: int  # or MIXED
    is_rotated: bool = True  # False: the keys are stored without RoPE
    items: tuple[int, ...] = ()  # the frame of each batch item where items choose; frame is the first's

    @property
    def by_item(self) -> tuple[int, ...]:
        """The frame of each batch item, or of all of them."""
        return self.items or (self.frame,)


@dataclass(frozen=True, eq=False)
class ChosenTokens:
    """Tokens of several frames in some slots, in order: [B, n] frames, indices in their frames, positions."""

    slots: range
    frames: Tensor
    indices: Tensor
    positions: Tensor

    @cached_property
    def on_host(self) -> "ChosenTokens":
        """The same in host memory, int32, copied once per block."""
        if self.frames.dtype == torch.int32:
            return self
        rows = torch.stack([self.frames, self.indices, self.positions])
        return ChosenTokens(self.slots, *rows.int().cpu())


@dataclass(frozen=True, eq=False)
class KeyLayout:
    """The slots of a call's keys, in order, of tokens_per_slot tokens each.

    own are the slots of the queries' block, sink those that the cache policy never evicts.
    """

    slots: tuple[Slot, ...]
    tokens_per_slot: int
    own: range = range(0)
    query_positions: tuple[int, ...] = ()
    chosen: ChosenTokens | None = None  # of one layer, where tokens of several frames stay
    sink: range = range(0)
    alone: tuple["KeyLayout", ...] = ()  # that of each batch item, where a cache cuts slots by items

    @classmethod
    def of_frames(cls, frames: Sequence[int], num_tokens: int) -> "KeyLayout":
        """Keys of num_tokens tokens that are these frames and nothing else, each at its own position."""
        slots = tuple(Slot(frame, frame) for frame in frames)
        return cls(slots, num_tokens // len(slots), range(len(slots)), tuple(frames))

    @cached_property
    def on_host(self) -> "KeyLayout":
        """The same without tensors on a device, for values that outlive the block."""
        if self.chosen is None:
            return self
        return replace(self, chosen=self.chosen.on_host)

    @property
    def differs(self) -> bool:
        """True where items of a batch keep other frames or tokens."""
        has_rows = self.chosen is not None and len(self.chosen.frames) > 1
        return has_rows or bool(self.alone) or any(len(slot.items) > 1 for slot in self.slots)

    def of_item(self, item: int) -> "KeyLayout":
        """Return the layout of one item of the batch, as in a run of that item alone."""
        if self.alone:
            return self.alone[item]
        slots, chosen = list(self.slots), self.chosen and self.chosen.on_host
        for number, slot in enumerate(slots):
            if slot.items:  # such slots stand at their frames
                frame = slot.items[item]
                slots[number] = replace(slot, frame=frame, position=frame, items=(frame,))
        if chosen is not None and len(chosen.frames) > 1:
            rows = (x[item : item + 1] for x in (chosen.frames, chosen.indices, chosen.positions))
            chosen = ChosenTokens(chosen.slots, *rows)
        return replace(self, slots=tuple(slots), chosen=chosen)

    @cached_property
    def frames(self) -> tuple[int, ...]:
        """The frame of every slot."""
        return tuple(slot.frame for slot in self.slots)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The position of every slot."""
        return tuple(slot.position for slot in self.slots)

    @cached_property
    def names(self) -> tuple[frozenset[int | str], ...]:
        """The names by which edits call the frame of every slot (wan/interventions.py: Frames)."""
        of_slots = []
        for n, slot in enumerate(self.slots):
            names: set[int | str] = set()
            for frame in slot.by_item:
                if n in self.own:  # frames of the block itself are "own", never a number
                    names |= {"own", f"own:{frame}"}
                    continue
                names.add(frame)
                if frame == 0:
                    names.add("first")
                if frame != EMPTY:
                    names.add("past")
                if n in self.sink:
                    names.add("sink")
            of_slots.append(frozenset(names))
        return tuple(of_slots)

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """The frames of captured values, ascending: the slots' frames, or every frame that has a key.

        Averages and zeros belong to no frame.
        """
        if self.is_plain:
            return self.frames
        frames = {frame for slot in self.slots for frame in slot.by_item}
        if self.chosen is not None:
            frames |= set(self.chosen.on_host.frames.unique().tolist())
        return tuple(sorted(frame for frame in frames if frame >= 0))

    @cached_property
    def is_plain(self) -> bool:
        """True where every slot holds a frame of its own."""
        return (
            self.chosen is None
            and min(self.frames) >= 0
            and len(set(self.frames)) == len(self.frames)
            and not any(slot.items for slot in self.slots)
        )

    @cached_property
    def is_in_place(self) -> bool:
        """True where slots are the frames in order, each at its own position."""
        return self.is_plain and self.positions == self.frames and list(self.frames) == sorted(self.frames)


def slot_frames(layout: KeyLayout, batch: int) -> Tensor:
    """Return the frame of every slot, int64 [B, slots]."""
    frames = torch.tensor([layout.frames]).repeat(batch, 1)
    for index, slot in enumerate(layout.slots):
        if slot.items:
            frames[:, index] = torch.tensor(slot.items[:batch])
    return frames


def key_frames(layout: KeyLayout, batch: int) -> tuple[Tensor, Tensor]:
    """Return frame and temporal position of every key, int64 [B, Lk] each."""
    S = layout.tokens_per_slot
    frames = slot_frames(layout, batch).repeat_interleave(S, 1)
    positions = torch.tensor([layout.positions]).repeat_interleave(S, 1).repeat(batch, 1)
    for index, slot in enumerate(layout.slots):
        if slot.items:  # such slots stand at their frames
            positions[:, index * S : (index + 1) * S] = frames[:, index * S : (index + 1) * S]
    if layout.chosen is not None:
        # Tokens of several frames share a slot: each has a frame and a position of its own.
        at, chosen = _chosen_keys(layout.chosen, S), layout.chosen.on_host
        frames[:, at], positions[:, at] = chosen.frames, chosen.positions
    return frames, positions


def key_tokens(layout: KeyLayout, batch: int) -> Tensor:
    """Return the index of every key's token in its frame, row by row, int64 [B, Lk]."""
    S = layout.tokens_per_slot
    tokens = torch.arange(S).repeat(batch, len(layout.slots))
    if layout.chosen is not None:
        tokens[:, _chosen_keys(layout.chosen, S)] = layout.chosen.on_host.indices
    return tokens


def _chosen_keys(chosen: ChosenTokens, tokens_per_slot: int) -> slice:
    return slice(chosen.slots.start * tokens_per_slot, chosen.slots.stop * tokens_per_slot)


# --- What edits add to the logits of keys
@dataclass(frozen=True, eq=False)
class KeyBias:
    """A number added to the logits of each head's keys, slot by slot; -inf leaves a slot out.

    values float32 [H, slots] lie on the CPU, where equal slots are found without waiting for the device.
    """

    values: Tensor
    tokens_per_slot: int = 1

    def runs(self) -> Iterator[tuple[slice, list[float]]]:
        """Yield tokens and biases [H] of each run of equal slots that some head sees."""
        # Equal neighbours go through attention as one group of keys. Lists: each call of a run asks anew, and
        # an operation on a tensor costs as much as all of this.
        slots, start = self.values.T.tolist(), 0  # [slots][H]
        for stop in range(1, len(slots) + 1):
            if stop < len(slots) and slots[stop] == slots[start]:
                continue
            if max(slots[start]) > -math.inf:
                yield slice(start * self.tokens_per_slot, stop * self.tokens_per_slot), slots[start]
            start = stop

    @property
    def leaves_out(self) -> bool:
        """True where some head does not see some key."""
        return not bool(self.values.isfinite().all())

    @property
    def blind_heads(self) -> list[int]:
        """Heads that see no key at all."""
        return (~self.values.isfinite().any(1)).nonzero().flatten().tolist()

    def per_token(self) -> Tensor:
        """float32 [H, Lk] on the CPU."""
        return self.values.repeat_interleave(self.tokens_per_slot, 1)


# --- Which heads a process has, and heads that see keys of their own
@dataclass(frozen=True, eq=False)
class HeadShard:
    """The heads of a range out of total. Others' heads are in other processes (wan/wings/parallel.py)."""

    heads: range
    total: int

    @classmethod
    def whole(cls, num_heads: int) -> "HeadShard":
        return cls(range(num_heads), num_heads)

    @property
    def is_whole(self) -> bool:
        return len(self.heads) == self.total

    def of(self, x: Tensor) -> Tensor:
        """The shard's heads of all heads [B, n, H, D]."""
        return x[:, :, self.heads.start : self.heads.stop]

    def of_text(self, text: Sequence[tuple[Tensor, Tensor]]) -> Sequence[tuple[Tensor, Tensor]]:
        """The shard's heads of the prompt's keys and values per layer."""
        return [(self.of(k), self.of(v)) for k, v in text]

    def local(self, heads: range | list[int]) -> list[int]:
        """Map heads of the model to local indices; heads of other processes are left out."""
        return [head - self.heads.start for head in heads if head in self.heads]

    def sum(self, x: Tensor) -> Tensor:
        """Sum x over all processes, given each one's sum over its own heads."""
        return x

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Concatenate all processes' heads along dim, in order, on the CPU."""
        return x

    def gather_calls(self, calls: Sequence[Any]) -> list[Any]:
        """Return captured calls with all heads in the first process, none in the others; all must call it."""
        return list(calls)

    def any_process(self, flag: bool) -> bool:
        """Return True if any process's flag is set; all must call it."""
        return flag


class HeadGroup(NamedTuple):
    """Heads that share an attention call, and the keys that each of them sees."""

    numbers: tuple[int, ...]  # among the heads that are here
    heads: Tensor | slice  # the same as an index on the device
    q: Tensor  # [B, Lq, h, D]
    k: Tensor  # [B, Lk, h, D]
    v: Tensor
    parts: Callable[[], list[tuple[list[int], KeyLayout]]]  # layouts, each with the places here of its heads


def later_block(block_sizes: Sequence[int], ahead: int = 0) -> Tensor:
    """Return [F, F] bool: the key's block comes more than `ahead` blocks after the query's.

    Such a cell was never attended. Only a rolling window looks ahead.
    """
    block = torch.repeat_interleave(torch.arange(len(block_sizes)), torch.as_tensor(block_sizes))
    return block[None, :] > block[:, None] + ahead
