"""Heads of one layer that see keys of their own, and what is kept of them as of one call."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wan.modules.host_copies import places
from wan.modules.key_layout import KeyLayout, Slot

BY_FRAME = ("frame_logits", "frame_mass")  # what is kept of calls whose heads see different frames


class HeadGroup(NamedTuple):
    """Heads (indices, also on the device) with their queries [B, Lq, h, D], keys and values [B, Lk, h, D],
    and what the keys are.
    """

    numbers: tuple[int, ...]
    heads: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    layout: KeyLayout


def joint_layout(columns: Sequence[Sequence[int]], like: KeyLayout) -> KeyLayout:
    """A layout of all frames that some head sees."""
    frames = sorted({frame for frames in columns for frame in frames})
    slots = tuple(Slot(frame, frame) for frame in frames)
    return KeyLayout(slots, like.tokens_per_slot, query_positions=like.query_positions)


def joined(
    parts: Sequence[dict[str, Tensor]], columns: Sequence[Sequence[int]], groups: Sequence[HeadGroup]
) -> dict[str, Tensor]:
    """Values by frame of groups of heads as those of one call [B, H, Fq, Fk];
    NaN where a head does not see a frame.
    """
    frames = [slot.frame for slot in joint_layout(columns, groups[0].layout).slots]
    num_heads = sum(len(group.heads) for group in groups)
    values: dict[str, Tensor] = {}
    for name in BY_FRAME:
        if name not in parts[0]:
            continue
        batch, _, queries, _ = parts[0][name].shape
        whole = parts[0][name].new_full((batch, num_heads, queries, len(frames)), torch.nan)
        for part, seen, group in zip(parts, columns, groups, strict=True):
            whole[:, group.heads] = spread(part[name], seen, frames)
        values[name] = whole
    if any("attended" in part for part in parts):  # of an edited call
        values["attended"] = ~values["frame_logits"].isnan()
    return values


def spread(values: Tensor, seen: Sequence[int], frames: Sequence[int]) -> Tensor:
    """Values [..., seen] by some frames as values [..., frames], NaN for those that are not among them."""
    whole = values.new_full((*values.shape[:-1], len(frames)), torch.nan)
    whole[..., places([frames.index(frame) for frame in seen], values.device)] = values
    return whole
