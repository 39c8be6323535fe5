"""What the keys of one attention call are: slot by slot a frame, a temporal position and a number of tokens.

Frame: global index of a latent frame. Slot: place in the keys. Position: temporal RoPE index at which a
slot's keys stand.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from wan.modules.host_copies import Fetched, send

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
