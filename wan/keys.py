"""What the keys of one attention call are: slot by slot a frame, a temporal position and a number of tokens.

Frame: global index of a latent frame. Slot: place in the keys. Position: temporal RoPE index at which a
slot's keys stand.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# --- Copies between a GPU and the host while the rollout goes on: what launches its kernels does not wait
SMALL = 1 << 15  # elements; values up to here are copied together at the end
THREADS = 4
ALIGNED = 4  # elements of 4 bytes: a kernel is compiled anew for memory that does not start at 16 bytes
STAGED = 1 << 24  # bytes of pinned memory of a thread

_under_way: list[Future[None]] = []
_of_thread = threading.local()


def send(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device."""
    leaves = x.device.type == "cpu" and device.type == "cuda"
    return x.pin_memory().to(device, non_blocking=True) if leaves else x.to(device)


def send_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the host, of 4 bytes an element, on a device: a GPU gets them by one copy."""
    if device.type != "cuda":
        return [x.to(device) for x in tensors]
    sizes = [-(-x.numel() // ALIGNED) * ALIGNED for x in tensors]
    together = torch.zeros(sum(sizes), dtype=torch.int32)
    for place, x in zip(together.split(sizes), tensors, strict=True):
        place[: x.numel()] = x.flatten().view(torch.int32)
    sent = send(together, device).split(sizes)
    return [part[: x.numel()].view(x.dtype).view(x.shape) for part, x in zip(sent, tensors, strict=True)]


def places(numbers: Sequence[int], device: torch.device) -> slice | Tensor:
    """An index of a dim's places; a list would have to go there, and whoever gave it would wait."""
    first = numbers[0] if numbers else 0
    if list(numbers) == list(range(first, first + len(numbers))):
        return slice(first, first + len(numbers))
    return send(torch.tensor(numbers, dtype=torch.long), device)


def picked(x: Tensor, numbers: Sequence[int], dim: int) -> Tensor:
    """x at these places of a dim; a view where they follow each other."""
    return x[(slice(None),) * dim + (places(numbers, x.device),)]


class Fetched:
    """A tensor of a GPU on its way to the host."""

    def __init__(self, x: Tensor):
        self._host = x.to("cpu", non_blocking=True)  # pinned memory
        self._arrived = torch.cuda.current_stream(x.device).record_event()

    def wait(self) -> Tensor:
        """It, in host memory that is not pinned."""
        self._arrived.synchronize()
        return self._host.clone()


def start(values: dict[str, Tensor]) -> None:
    """Begin to replace the large values that are on a GPU by copies on the CPU, in place."""
    for name, value in values.items():
        if value.is_cuda and value.numel() > SMALL:
            ready = torch.cuda.current_stream(value.device).record_event()
            _under_way.append(_threads().submit(_copy, values, name, ready))


def wait() -> None:
    """Until all copies have been made. What one of them raised is raised here."""
    waiting = _under_way.copy()
    forget()
    for pending in waiting:
        pending.result()


def forget() -> None:
    """Wait for none of them."""
    _under_way.clear()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="host_copies")


def _copy(values: dict[str, Tensor], name: str, ready: torch.cuda.Event) -> None:
    value = values[name]
    host, place = np.empty(value.nbytes, np.uint8), _pinned()
    with torch.cuda.stream(_stream(value.device)):
        ready.wait()
        whole = value.contiguous().view(-1).view(torch.uint8)
        for start in range(0, len(whole), STAGED):
            part = whole[start : start + STAGED]
            place[: len(part)].copy_(part, non_blocking=True)
            torch.cuda.current_stream(value.device).synchronize()
            host[start : start + len(part)] = place[: len(part)].numpy()
    values[name] = torch.from_numpy(host).view(value.dtype).view(value.shape)


def _pinned() -> Tensor:
    """Of this thread, uint8 [STAGED]."""
    if "pinned" not in _of_thread.__dict__:
        _of_thread.pinned = torch.empty(STAGED, dtype=torch.uint8, pin_memory=True)
    return _of_thread.pinned


def _stream(device: torch.device) -> torch.cuda.Stream:
    """Of this thread: copies on the stream of the rollout would wait for what it was given since."""
    streams = _of_thread.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]


# --- What the keys of one attention call are: slot by slot a frame, a temporal position and a number of
AVERAGE, EMPTY, CHOSEN = -1, -2, -3  # Slot.frame of a mean of frames, of zeros, of tokens of several frames
MIXED = -98  # Slot.position of tokens that stand at several positions
STALE = -97  # Slot.position of keys that were moved and are about to be rotated


@dataclass(frozen=True, eq=False)
class Slot:
    """A place of the keys and what stands there; replaced, never changed, when its keys or values change."""

    frame: int  # or AVERAGE, EMPTY, CHOSEN
    position: int  # or MIXED
    is_rotated: bool = True  # False: the keys stand there without RoPE
    items: tuple[
        int, ...
    ] = ()  # the frame of each batch item where a choice is made; frame is that of the first

    @property
    def by_item(self) -> tuple[int, ...]:
        """The frame of each batch item, or of all of them."""
        return self.items or (self.frame,)


@dataclass(frozen=True, eq=False)
class ChosenTokens:
    """Tokens of several frames in the slots given, in order: for each its frame, its index in that frame,
    its position and how often it was chosen, int64 [B, n] each.
    """

    slots: range
    frames: Tensor
    indices: Tensor
    positions: Tensor
    uses: Tensor

    @classmethod
    def of_frames(
        cls, frames: Sequence[int], tokens_per_frame: int, batch: int, device: torch.device
    ) -> "ChosenTokens":
        """All tokens of whole frames, at their own positions, never chosen yet."""
        each = send(torch.tensor(frames, dtype=torch.long), device).repeat_interleave(tokens_per_frame)
        indices = torch.arange(tokens_per_frame, device=device).repeat(len(frames))
        rows = [row.expand(batch, -1) for row in (each, indices, each, torch.zeros_like(each))]
        return cls(range(len(frames)), *rows)

    @cached_property
    def on_host(self) -> "ChosenTokens":
        """The same in host memory, int32: fetched once, for all that is captured of a block."""
        if self.frames.dtype == torch.int32:
            return self
        rows = self._fetched.wait() if self.frames.is_cuda else torch.stack(self._rows).int()
        return ChosenTokens(self.slots, *rows)

    def fetch(self) -> bool:
        """Begin to bring it to the host -> whether on_host, asked for now, may wait for the GPU."""
        return self.frames.is_cuda and "on_host" not in self.__dict__ and bool(self._fetched)

    @cached_property
    def _fetched(self) -> Fetched:
        return Fetched(torch.stack(self._rows).int())

    def followed_by(self, other: "ChosenTokens") -> "ChosenTokens":
        """These tokens and then the other ones."""
        pairs = zip(self._rows, other._rows, strict=True)
        return ChosenTokens(range(0), *(torch.cat(pair, 1) for pair in pairs))

    def take(self, order: Tensor, slots: range) -> "ChosenTokens":
        """The tokens of the indices order [B, n], which fill the slots and were chosen once more."""
        frames, indices, positions, uses = (row.gather(1, order) for row in self._rows)
        return ChosenTokens(slots, frames, indices, positions, uses + 1)

    @property
    def _rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.frames, self.indices, self.positions, self.uses


@dataclass(frozen=True, eq=False)
class KeyLayout:
    """The slots of a call's keys, in order, of tokens_per_slot tokens each.

    own are the slots of the queries' block, sink those that the cache policy never lets go. version counts
    the layouts of one rollout, told apart by its object rollout; the first unchanged slots hold what they
    held in the version before.
    """

    slots: tuple[Slot, ...]
    tokens_per_slot: int
    own: range = range(0)
    query_positions: tuple[int, ...] = ()
    rollout: object = None
    version: int = 0
    unchanged: int = 0
    chosen: ChosenTokens | None = None  # of one layer, where tokens of several frames stay
    sink: range = range(0)

    def follows(self, other: "KeyLayout") -> bool:
        """Whether this layout came right after another one of the same rollout."""
        return (
            self.rollout is not None and self.rollout is other.rollout and self.version == other.version + 1
        )

    @classmethod
    def of_frames(cls, frames: Sequence[int], num_tokens: int) -> "KeyLayout":
        """Keys of num_tokens tokens that are these frames and nothing else, each at its own position."""
        slots = tuple(Slot(frame, frame) for frame in frames)
        return cls(slots, num_tokens // len(slots), range(len(slots)), tuple(frames))

    @cached_property
    def on_host(self) -> "KeyLayout":
        """The same without tensors of a device, for what outlives its block."""
        if self.chosen is None:
            return self
        layout = replace(self, chosen=self.chosen.on_host)
        if "_segments" in self.__dict__:
            layout.__dict__["_segments"] = self.__dict__["_segments"].without_matrices()
        return layout

    @cached_property
    def frames(self) -> tuple[int, ...]:
        return tuple(slot.frame for slot in self.slots)

    @cached_property
    def is_plain(self) -> bool:
        """Whether every slot holds a frame of its own."""
        frames = self.frames
        return (
            self.chosen is None
            and min(frames) >= 0
            and len(set(frames)) == len(frames)
            and not any(slot.items for slot in self.slots)
        )

    @cached_property
    def is_in_place(self) -> bool:
        """Whether frames say it all: one to a slot, in order, each at its own position."""
        return self.is_plain and self.positions == self.frames and list(self.frames) == sorted(self.frames)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        return tuple(slot.position for slot in self.slots)


# --- The keys of a call in runs of one frame in one slot, and sums over those runs by slot and by frame
KINDS = ("slot", "frame", "tokens")  # what is known of a segment
NO_FRAME = -99  # the frame of a segment without tokens
MOST_FRAMES = 1 << 32  # more than a rollout has


class KeySegments:
    """Segments of a layout, in order, for each batch item [B or 1]: items differ only where a choice is made.

    Each is consecutive keys of one frame (or an average, or zeros) in one slot. chosen are those of chosen
    tokens, filled up with empty ones where an item has fewer; all others are whole slots. columns are the
    frames that some key is of, ascending. Averages and zeros belong to none.
    """

    def __init__(self, layout: KeyLayout):
        self.num_slots, self.tokens_per_slot = len(layout.slots), layout.tokens_per_slot
        self.of, self.chosen = _segments(layout)
        frames, self.tokens = self.of["frame"], self.of["tokens"]  # int64 [B or 1, segments]
        self.columns = tuple(frames[frames >= 0].unique().tolist())
        self.bounds = F.pad(self.tokens.cumsum(1), (1, 0))  # [B or 1, segments + 1]

        self.tokens_kept = (self.tokens[:, None].float() @ self._members("frame", self.columns))[:, 0].long()
        self._gathering: dict[torch.device, Gathering] = {}

    def without_matrices(self) -> "KeySegments":
        """The same, which holds no memory of a device: for what outlives its block."""
        segments = copy(self)
        segments._gathering = {}
        return segments

    def gathering(self, device: torch.device) -> "Gathering":
        """The matrices that gather values of segments, made once for all passes of a block."""
        if device not in self._gathering:
            parts = [self._members("frame", self.columns), self._members("slot", range(self.num_slots))]
            means = [_shares(members * self.tokens[:, :, None]) for members in parts]
            tensors = [*(x[:, None] for x in (*parts, *means)), self.bounds.int()]
            self._gathering[device] = Gathering(*send_together(tensors, device))
        return self._gathering[device]

    def chosen_shares(self, device: torch.device) -> Tensor:
        """Which share of its segment's mean each chosen token has: float32 [B, chosen segments, n].

        Formed where it is used: it has millions of numbers, and every layer has its own.
        """
        at = self.chosen
        place = torch.arange(*self.bounds[0, [at.start, at.stop]].tolist(), device=device)
        bounds = self.gathering(device).bounds[:, at.start : at.stop + 1, None]
        inside = (place >= bounds[:, :-1]) & (place < bounds[:, 1:])
        return inside / bounds.diff(dim=1).clamp(min=1)

    def _members(self, kind: str, values: Sequence[int]) -> Tensor:
        """Which segment is of which slot or frame: float32 [B or 1, segments, values]."""
        return (self.of[kind][:, :, None] == torch.tensor(values)).float()


class Gathering(NamedTuple):
    """Values of segments [B, H, Fq, n] times these, [B or 1, 1, n, m]:
    sums by frame and slot for masses, means for logits; a mean over no token is NaN.
    """

    frame_sums: Tensor
    slot_sums: Tensor
    frame_means: Tensor
    slot_means: Tensor
    bounds: Tensor  # of the segments, int32 [B or 1, n + 1]


def _shares(weights: Tensor) -> Tensor:
    return weights / weights.sum(1, keepdim=True)  # 0 / 0 is NaN


def segments_of(layout: KeyLayout) -> KeySegments:
    """The segments of a layout, made once."""
    made = layout.__dict__.get("_segments")
    if made is None:
        made = layout.__dict__["_segments"] = KeySegments(layout)
    return made


def _segments(layout: KeyLayout) -> tuple[dict[str, Tensor], range]:
    """Slot, frame and tokens of every item's segments, and which of these are of chosen tokens."""
    S, slots = layout.tokens_per_slot, layout.slots
    batch = max([1, *(len(slot.items) for slot in slots)])
    rows = [[slot.items[b] if slot.items else slot.frame for slot in slots] for b in range(batch)]
    frames = torch.tensor(rows)
    parts = [torch.arange(len(slots)).expand_as(frames), frames, torch.full_like(frames, S)]
    if layout.chosen is None:
        return dict(zip(KINDS, parts, strict=True)), range(0)
    at = layout.chosen.slots
    runs = _runs(layout.chosen.on_host.frames.long(), at.start, S)
    whole = [part.expand(len(runs[0]), -1) for part in parts]
    parts = [torch.cat([x[:, : at.start], y, x[:, at.stop :]], 1) for x, y in zip(whole, runs, strict=True)]
    return dict(zip(KINDS, parts, strict=True)), range(at.start, at.start + runs[0].shape[1])


def _runs(frames: Tensor, first_slot: int, tokens_per_slot: int) -> list[Tensor]:
    """Slot, frame and tokens of every run of one frame in one slot, [B, most runs] each, of tokens [B, n]."""
    place = first_slot + torch.arange(frames.shape[1]) // tokens_per_slot
    found = []
    for row in frames:
        runs, tokens = torch.unique_consecutive(place * MOST_FRAMES + row, return_counts=True)
        found.append((runs // MOST_FRAMES, runs % MOST_FRAMES, tokens))
    return [
        pad_sequence(list(rows), batch_first=True, padding_value=fill)
        for rows, fill in zip(zip(*found, strict=True), (-1, NO_FRAME, 0), strict=True)
    ]


def key_frames(layout: KeyLayout, batch: int) -> tuple[Tensor, Tensor]:
    """Frame and temporal position of every key: int64 [B, Lk] each."""
    S = layout.tokens_per_slot
    items = [[slot.items[i] if slot.items else slot.frame for slot in layout.slots] for i in range(batch)]
    frames = torch.tensor(items).repeat_interleave(S, 1)
    positions = torch.tensor([layout.positions]).repeat_interleave(S, 1).repeat(batch, 1)
    for index, slot in enumerate(layout.slots):
        if slot.items:  # such slots stand at their frames
            positions[:, index * S : (index + 1) * S] = frames[:, index * S : (index + 1) * S]
    if layout.chosen is not None:
        at = slice(layout.chosen.slots.start * S, layout.chosen.slots.stop * S)
        chosen = layout.chosen.on_host
        frames[:, at], positions[:, at] = chosen.frames, chosen.positions
    return frames, positions


def key_tokens(layout: KeyLayout, batch: int) -> Tensor:
    """Index of every key's token in its frame, row by row: int64 [B, Lk]."""
    S = layout.tokens_per_slot
    tokens = torch.arange(S).repeat(batch, len(layout.slots))
    if layout.chosen is not None:
        tokens[:, layout.chosen.slots.start * S : layout.chosen.slots.stop * S] = (
            layout.chosen.on_host.indices
        )
    return tokens
