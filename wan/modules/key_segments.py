"""The keys of a call in runs of one frame in one slot, and sums over those runs by slot and by frame."""

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from wan.modules import host_copies
from wan.modules.key_layout import KeyLayout

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
            self._gathering[device] = Gathering(*host_copies.send_together(tensors, device))
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
