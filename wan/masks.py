"""Masks of attention as runs of queries that see the same few intervals of keys.

    [runs] = runs_of_mask(mask, batch=1, len_q=48616, len_k=48616)
    runs[0].rows, runs[0].keys                          # (0, 48616), ((0, 48500),)

A padding mask is one run, a mask of causal blocks has one for each block. Where more runs or intervals are
needed there are none, and whoever asks forms the softmax in chunks.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor

MOST_RUNS, MOST_INTERVALS = 128, 8
ROWS_AT_ONCE = 1024  # of a mask that is read


class QueryRun(NamedTuple):
    """Consecutive queries, and the intervals of keys that each sees: the first, and one after the last."""

    rows: tuple[int, int]
    keys: tuple[tuple[int, int], ...]


Runs = tuple[QueryRun, ...]
_newest: tuple[ReferenceType[Any], int, tuple[Runs, ...] | None] | None = None  # of the layers of a forward


def runs_of_mask(mask: Any, batch: int, len_q: int, len_k: int) -> tuple[Runs, ...] | None:
    """Return the runs of each item of the batch, or None for a mask that is more than a few intervals.

    mask is a call's: None, boolean or added to logits, up to [B, H, Lq, Lk], or flex_attention's BlockMask.
    """
    global _newest
    if mask is None:
        return ((QueryRun((0, len_q), ((0, len_k),)),),) * batch
    version = getattr(mask, "_version", 0)
    if _newest is not None and _newest[0]() is mask and _newest[1] == version:
        return _newest[2]
    runs = _runs_of(mask, batch, len_q, len_k)
    _newest = ref(mask), version, runs
    return runs


def _runs_of(mask: Any, batch: int, len_q: int, len_k: int) -> tuple[Runs, ...] | None:
    # 1. A reader of rows, [items, rows, Lk] boolean.
    if type(mask).__name__ == "BlockMask":
        items, heads = mask.shape[:2]
        read: Callable[[int, int], Tensor] | None = _reader_of_blocks(mask, len_k)
        num_rows = len_q
    else:
        if mask.ndim == 2 and mask.shape == (batch, len_k):  # of keys, as diffusers reads it
            mask = mask[:, None, None]
        mask = mask.view(*[1] * (4 - mask.ndim), *mask.shape)
        items, heads, num_rows, _ = mask.shape
        read = _reader(mask)
    if heads > 1 or read is None:
        return None
    # 2. Where rows change, and the rows that begin a run.
    starts = []
    for first in range(0, num_rows, ROWS_AT_ONCE):
        rows = read(max(first - 1, 0), min(first + ROWS_AT_ONCE, num_rows))
        is_new = (rows[:, 1:] != rows[:, :-1]).any(-1).any(0)
        starts.append(is_new.nonzero().flatten() + max(first - 1, 0) + 1)
    begins = [0, *torch.cat(starts).tolist()]
    if len(begins) > MOST_RUNS:
        return None
    ends = [*begins[1:], num_rows]
    shown = torch.cat([read(begin, begin + 1) for begin in begins], 1).cpu()  # [items, runs, Lk]
    if num_rows == 1:
        ends = [len_q]
    # 3. Their intervals.
    of_items = []
    for rows in shown:
        runs = []
        for begin, end, row in zip(begins, ends, rows, strict=True):
            edges = torch.nn.functional.pad(row.int(), (1, 1)).diff().nonzero().flatten().tolist()
            if len(edges) > 2 * MOST_INTERVALS:
                return None
            runs.append(QueryRun((begin, end), tuple(zip(edges[::2], edges[1::2], strict=True))))
        of_items.append(tuple(runs))
    if items == 1:
        of_items *= batch
    return tuple(of_items)


def _reader(mask: Tensor) -> Callable[[int, int], Tensor] | None:
    """Return a reader of the rows of a mask [B, 1, Lq, Lk]; None where it adds other numbers than -inf."""

    def read(start: int, stop: int) -> Tensor:
        rows = mask[:, 0, start:stop]
        if rows.dtype == torch.bool:
            return rows
        return rows == 0

    if mask.dtype != torch.bool:
        for start in range(0, mask.shape[2], ROWS_AT_ONCE):
            rows = mask[:, :, start : start + ROWS_AT_ONCE]
            if not bool(((rows == 0) | (rows == -torch.inf)).all()):
                return None
    return read


def _reader_of_blocks(mask: Any, len_k: int) -> Callable[[int, int], Tensor]:
    """Return a reader of the rows of a BlockMask, which computes what it hides where that is needed."""
    flex = sys.modules[type(mask).__module__]

    def read(start: int, stop: int) -> Tensor:
        def shifted(item: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return mask.mask_mod(item, head, row + start, column)

        device = str(mask.kv_indices.device)
        return flex.create_mask(shifted, mask.shape[0], 1, stop - start, len_k, device=device)[:, 0]

    return read
