"""Averages of frames that are gone: keys of a cache policy that are of no frame, as columns of their own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wan.blocks import block_ranges

AVERAGE = -1  # in slot_frame and key_frame


def average_names(count: int) -> tuple[str, ...]:
    """What their columns are called: μ1, μ2, ..., in the order of their slots."""
    return tuple(f"μ{n}" for n in range(1, count + 1))


def averages_of_slots(values: Tensor, slot_frame: Tensor, count: int) -> Tensor:
    """Values of slots [H, rows, slots], which hold the frames slot_frame [slots] -> [H, rows, count]; NaN for
    an average that is not there."""
    found = torch.full((*values.shape[:-1], count), torch.nan)
    columns = (slot_frame == AVERAGE).nonzero()[:, 0]
    found[..., : len(columns)] = values[..., columns].float()
    return found


def averages_of_blocks(values: Tensor, slot_frame: Tensor, block_sizes: Sequence[int]) -> Tensor:
    """Values of slots [H, F, slots] of every block's queries; slot_frame [blocks, slots] -> [H, F, most]."""
    found = torch.full((*values.shape[:2], most_averages(slot_frame)), torch.nan)
    blocks = block_ranges(list(block_sizes))
    for queries, frames in zip(blocks, slot_frame, strict=False):  # slot_frame ends with the blocks done
        rows = slice(queries.start, queries.stop)
        found[:, rows] = averages_of_slots(values[:, rows], frames, found.shape[-1])
    return found


def averages_of_tokens(curves: Tensor, key_frame: Tensor, key_token: Tensor, mean: bool) -> Tensor:
    """Curves per key token [H, rows, Lk] -> their mean or sum over each average's tokens [H, rows, count].

    The tokens of a slot lie together; an average begins where key_token [Lk] is 0.
    """
    there = key_frame == AVERAGE
    index = (there & (key_token == 0)).cumsum(0) - 1
    members = ((index[:, None] == torch.arange(int(index.max()) + 1)) & there[:, None]).float()
    values = curves.float() @ members
    return values / members.sum(0) if mean else values


def most_averages(slot_frame: Tensor) -> int:
    """How many averages a row of slots [..., slots] holds at most."""
    return int((slot_frame == AVERAGE).sum(-1).max()) if slot_frame.numel() else 0
