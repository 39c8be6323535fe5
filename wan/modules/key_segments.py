"""The keys of a call in runs of one frame in one slot, and sums over those runs by slot and by frame."""

from dataclasses import dataclass
from itertools import groupby

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

    def by_frame(self) -> Tensor:
        """Which segment is of which column: float32 [B or 1, length, columns]."""
        columns = torch.tensor(self.columns)
        frames = [self._padded([s.frame for s in segments], -1) for segments in self.items]
        return (torch.tensor(frames)[:, :, None] == columns).float()

    def by_slot(self) -> Tensor:
        """Which segment is in which slot: float32 [B or 1, length, slots]."""
        slots = [self._padded([s.slot for s in segments], -1) for segments in self.items]
        return (torch.tensor(slots)[:, :, None] == torch.arange(self.num_slots)).float()

    def tokens_kept(self) -> Tensor:
        """Tokens of each column's frame: [B or 1, columns]."""
        return (self.tokens[:, None].float() @ self.by_frame())[:, 0].long()

    def _padded(self, values: list[int], filler: int) -> list[int]:
        return values + [filler] * (self.length - len(values))


def summed(values: Tensor, members: Tensor) -> Tensor:
    """Masses of segments [B, H, Fq, n] added up by members [B or 1, n, m] -> [B, H, Fq, m]."""
    return values @ members[:, None].to(values.device)


def averaged(values: Tensor, members: Tensor, tokens: Tensor) -> Tensor:
    """Mean logits of segments [B, H, Fq, n] of tokens [B or 1, n] averaged by members;
    NaN where one has no token.
    """
    weights = members * tokens[:, :, None]
    weights = weights / weights.sum(1, keepdim=True)  # 0 / 0 is NaN
    return values @ weights[:, None].to(values.device)


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
    if chosen is not None:
        batch = len(chosen.token_frames)
    items = []
    for item in range(batch):
        segments: list[KeySegment] = []
        for index, slot in enumerate(layout.slots):
            if chosen is not None and index in chosen.slots:
                first = (index - chosen.slots.start) * S
                frames = chosen.token_frames[item][first : first + S]
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
        frames[:, at], positions[:, at] = layout.chosen.frames.cpu(), layout.chosen.positions.cpu()
    return frames, positions


def key_tokens(layout: KeyLayout, batch: int) -> Tensor:
    """Index of every key's token in its frame, row by row: int64 [B, Lk]."""
    S = layout.tokens_per_slot
    tokens = torch.arange(S).repeat(batch, len(layout.slots))
    if layout.chosen is not None:
        tokens[:, layout.chosen.slots.start * S : layout.chosen.slots.stop * S] = layout.chosen.indices.cpu()
    return tokens
