"""What the processes of one rollout captured, each of its own heads, as calls of all heads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from wan.capture import BY_FRAME, CapturedCall, joint_layout, spread
from wan.model import WanModel
from wan.parallel import ProcessShard, shard_of

WITHOUT_HEADS = ("tokens_kept", "key_frame", "key_token", "key_position", "map_queries")  # same everywhere
BATCH_BYTES = 1 << 28  # sent at once


@dataclass(frozen=True)
class _Kept:
    """Of calls in one process: the frames of their columns, and what they keep by name."""

    frames: tuple[int, ...] | None
    values: tuple[tuple[str, torch.Size, torch.dtype], ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(shape.numel() * dtype.itemsize for _, shape, dtype in self.values)


def gather_calls(model: WanModel, calls: Sequence[CapturedCall]) -> list[CapturedCall]:
    """The captured calls of all heads in the first process; none in the others. They must be on the CPU.

    Every process that shares the model has to call this, after the same rollout.
    """
    shard = shard_of(model)
    if shard is None:
        return list(calls)
    mine = _kept(calls)
    kept: list[list[_Kept]] = [[]] * shard.size
    dist.all_gather_object(kept, mine, group=shard.group)
    if shard.group.rank():
        for batch in _batches(mine):
            dist.send(_packed(calls[batch]), group=shard.group, group_dst=0)
        return []
    parts = [[dict(call.values) for call in calls]]
    for process in range(1, shard.size):
        parts.append([])
        for batch in _batches(kept[process]):
            flat = torch.empty(sum(k.nbytes for k in kept[process][batch]), dtype=torch.uint8)
            dist.recv(flat, group=shard.group, group_src=process)
            parts[-1] += _unpacked(flat, kept[process][batch])
    return [
        _joined(call, [part[i] for part in parts], [of[i] for of in kept], shard)
        for i, call in enumerate(calls)
    ]


def _kept(calls: Sequence[CapturedCall]) -> list[_Kept]:
    """Of every call; the same object for calls that keep the same, which is sent and added up once."""
    known: dict[_Kept, _Kept] = {}
    found = []
    for call in calls:
        frames = None if call.layout is None else call.layout.frames
        kept = _Kept(frames, tuple((n, v.shape, v.dtype) for n, v in call.values.items()))
        found.append(known.setdefault(kept, kept))
    return found


def _batches(kept: Sequence[_Kept]) -> Iterator[slice]:
    """Consecutive calls of about BATCH_BYTES together."""
    start, total = 0, 0
    for stop, call in enumerate(kept, 1):
        total += call.nbytes
        if total >= BATCH_BYTES or stop == len(kept):
            yield slice(start, stop)
            start, total = stop, 0


def _packed(calls: Sequence[CapturedCall]) -> Tensor:
    """All values of calls as bytes."""
    values = [value for call in calls for value in call.values.values()]
    return torch.cat([value.contiguous().flatten().view(torch.uint8) for value in values])


def _unpacked(flat: Tensor, kept: Sequence[_Kept]) -> list[dict[str, Tensor]]:
    """The values of calls from their bytes, all calls together that keep the same."""
    found: list[dict[str, Tensor]] = []
    for same, calls in groupby(kept):
        run: list[dict[str, Tensor]] = [{} for _ in calls]
        rows, flat = flat.split([len(run) * same.nbytes, len(flat) - len(run) * same.nbytes])
        rows = rows.view(len(run), same.nbytes)
        start = 0
        for name, shape, dtype in same.values:
            stop = start + shape.numel() * dtype.itemsize
            column = rows[:, start:stop].clone(memory_format=torch.contiguous_format).flatten()
            for values, value in zip(run, column.view(dtype).view(len(run), *shape), strict=True):
                values[name] = value
            start = stop
        found += run
    return found


def _joined(
    call: CapturedCall, parts: Sequence[dict[str, Tensor]], kept: Sequence[_Kept], shard: ProcessShard
) -> CapturedCall:
    """One call from its parts of some heads each."""
    layout, seen = call.layout, [of.frames or () for of in kept]
    edited = any("attended" in part for part in parts)
    if layout is not None and len(set(seen)) > 1:  # under per_head: their heads see different frames
        layout = joint_layout(seen, layout)
        columns = zip(parts, seen, strict=True)
        parts = [
            {n: spread(part[n], has, layout.frames) for n in BY_FRAME if n in part} for part, has in columns
        ]
    if edited:  # also where no head lost a key
        parts = [
            part if "attended" in part else part | {"attended": _attended(part, parts)} for part in parts
        ]
    values = {
        name: like if name in WITHOUT_HEADS else torch.cat([part[name] for part in parts], 1)
        for name, like in parts[0].items()
    }
    shapes = ((*shape[:2], shard.total, shape[3]) for shape in (call.q_shape, call.k_shape))
    q_shape, k_shape = shapes
    if layout is not None:
        k_shape = (k_shape[0], len(layout.slots) * layout.tokens_per_slot, *k_shape[2:])
    return replace(call, values=values, q_shape=q_shape, k_shape=k_shape, layout=layout)


def _attended(part: dict[str, Tensor], parts: Sequence[dict[str, Tensor]]) -> Tensor:
    """Which keys the heads of one part attended to, where none of them was left out by an edit."""
    if "frame_logits" in part:
        return ~part["frame_logits"].isnan()
    return torch.ones_like(next(other["attended"] for other in parts if "attended" in other))
