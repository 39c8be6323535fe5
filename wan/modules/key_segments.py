"""The keys of a call in runs of one frame in one slot, and sums over those runs by slot and by frame."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from wan.modules.key_layout import KeyLayout


@dataclass(frozen=True)
class KeySegment:
    """Consecutive keys of one frame (or an average, or zeros) in one slot."""

    slot: int
    frame: int
    tokens: int


class KeySegments:
    """Segments of a layout, in order, for each batch item [B or 1]: items differ only where a choice is made.

    columns are the frames that some key is of, ascending. Averages and zeros belong to none.
    """

    def __init__(self, layout: KeyLayout):
        self.items = _segments(layout)
        self.length = max(len(segments) for segments in self.items)
        self.num_slots = len(layout.slots)
        frames = {segment.frame for segments in self.items for segment in segments}
        self.columns = tuple(sorted(frame for frame in frames if frame >= 0))
        self.tokens = torch.tensor([self._padded([s.tokens for s in segments], 0) for segments in self.items])
        starts = torch.zeros(len(self.items), 1, dtype=torch.long)
        self.bounds = torch.cat([starts, self.tokens.cumsum(1)], 1)  # [B or 1, length + 1]

        self.tokens_kept = (self.tokens[:, None].float() @ self._members("frame", self.columns))[:, 0].long()
        self._gathering: dict[torch.device, Gathering] = {}

    def gathering(self, device: torch.device) -> "Gathering":
        """The matrices that gather values of segments, made once for all passes of a block."""
        if device not in self._gathering:
            parts = [self._members("frame", self.columns), self._members("slot", range(self.num_slots))]
            means = [_shares(members * self.tokens[:, :, None]) for members in parts]
            self._gathering[device] = Gathering(*(x[:, None].to(device) for x in (*parts, *means)))
        return self._gathering[device]

    def chosen_shares(self, chosen: range, tokens_per_slot: int) -> Tensor:
        """Which share of a segment's mean each token of the chosen slots has: float32 [B or 1, length, n]."""
        place = torch.arange(chosen.start * tokens_per_slot, chosen.stop * tokens_per_slot)
        inside = spans(self.bounds, place).float()
        return inside / self.tokens.clamp(min=1)[:, :, None]

    def whole_slots(self, chosen: range) -> Tensor:
        """Which segments are whole slots, and of which: float32 [B or 1, length, slots]."""
        slots = [slot if slot not in chosen else -2 for slot in range(self.num_slots)]
        return self._members("slot", slots)

    def _members(self, kind: str, values: Sequence[int]) -> Tensor:
        """Which segment is of which slot or frame: float32 [B or 1, length, values]."""
        rows = [self._padded([getattr(s, kind) for s in segments], -1) for segments in self.items]
        return (torch.tensor(rows)[:, :, None] == torch.tensor(values)).float()

    def _padded(self, values: list[int], filler: int) -> list[int]:
        return values + [filler] * (self.length - len(values))


class Gathering(NamedTuple):
    """Values of segments [B, H, Fq, n] times these, [B or 1, 1, n, m]:
    sums by frame and slot for masses, means for logits; a mean over no token is NaN.
    """

    frame_sums: Tensor
    slot_sums: Tensor
    frame_means: Tensor
    slot_means: Tensor


def spans(bounds: Tensor, place: Tensor) -> Tensor:
    """Which tokens, by their place, are in which segment of bounds [B, n + 1]: bool [B, n, tokens]."""
    return (place >= bounds[:, :-1, None]) & (place < bounds[:, 1:, None])


def _shares(weights: Tensor) -> Tensor:
    return weights / weights.sum(1, keepdim=True)  # 0 / 0 is NaN


def segments_of(layout: KeyLayout) -> KeySegments:
    """The segments of a layout, made once."""
    made = layout.__dict__.get("_segments")
    if made is None:
        made = layout.__dict__["_segments"] = KeySegments(layout)
    return made


def _segments(layout: KeyLayout) -> list[list[KeySegment]]:
    S = layout.tokens_per_slot
    batch = max([1, *(len(slot.items) for slot in layout.slots)])
    chosen = layout.chosen
    token_frames = [] if chosen is None else chosen.on_host.frames.tolist()
    batch = max(batch, len(token_frames))
    items = []
    for item in range(batch):
        segments: list[KeySegment] = []
        for index, slot in enumerate(layout.slots):
            if chosen is not None and index in chosen.slots:
                first = (index - chosen.slots.start) * S
                frames = token_frames[item][first : first + S]
                segments += [KeySegment(index, frame, len([*run])) for frame, run in groupby(frames)]
            else:
                segments.append(KeySegment(index, slot.items[item] if slot.items else slot.frame, S))
        items.append(segments)
    return items


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
        tokens[:, layout.chosen.slots.start * S : layout.chosen.slots.stop * S] = layout.chosen.indices.cpu()
    return tokens
