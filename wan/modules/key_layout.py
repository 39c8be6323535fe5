"""What the keys of one attention call are: slot by slot a frame, a temporal position and a number of tokens.

Frame: global index of a latent frame. Slot: place in the keys. Position: temporal RoPE index at which a
slot's keys stand.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

AVERAGE, EMPTY, CHOSEN = -1, -2, -3  # Slot.frame of a mean of frames, of zeros, of tokens of several frames
MIXED = -98  # Slot.position of tokens that stand at several positions


@dataclass(frozen=True, eq=False)
class Slot:
    """A place of the keys and what stands there; replaced, never changed, when its keys or values change."""

    frame: int  # or AVERAGE, EMPTY, CHOSEN
    position: int  # or MIXED
    is_rotated: bool = True  # False: the keys stand there without RoPE


@dataclass(frozen=True, eq=False)
class KeyLayout:
    """The slots of a call's keys, in order, of tokens_per_slot tokens each.

    own are the slots of the queries' block. version counts the layouts of one rollout, told apart by its
    object rollout; the first unchanged slots hold what they held in the version before.
    """

    slots: tuple[Slot, ...]
    tokens_per_slot: int
    own: range = range(0)
    query_positions: tuple[int, ...] = ()
    rollout: object = None
    version: int = 0
    unchanged: int = 0

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
    def frames(self) -> tuple[int, ...]:
        return tuple(slot.frame for slot in self.slots)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        return tuple(slot.position for slot in self.slots)
