"""What queries see along frames or along temporal positions, with averages of gone frames as columns.

Frame: global latent index. Position: temporal RoPE index of a slot's keys. An atlas without slot fields has
frames in their places: there the two axes are one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.analysis.slots import AVERAGE, CHOSEN, EMPTY, NO_SLOT, slots_of
from experiments.caches.errors import CacheError
from experiments.caches.schema import as_cache
from wan.blocks import block_ranges

AXES = ("frame", "position")
SINK, MEAN, MEMORY, TOKENS, ZEROS = "sink", "average", "memory", "chosen tokens", "zeros"
STORED = {"mean_logit": "logits", "mass": "mass", "mean_prob": "mass"}


@dataclass(frozen=True)
class KeyColumns:
    """Values of the last block's queries per column of keys; what each column is, and how it is marked."""

    axis: str
    labels: tuple[str, ...]  # frame or position; μ: an average
    marks: tuple[str, ...]  # sink, average, memory, chosen tokens, zeros, or nothing
    values: np.ndarray  # [H, columns]; NaN: not there


def has_slots(atlas: dict[str, Any]) -> bool:
    """Whether slots are not the frames of a window."""
    return "slot_frame" in atlas


def check_axis(axis: str) -> str:
    if axis not in AXES:
        raise CacheError(f"KEY_AXIS {axis!r} is not one of {', '.join(AXES)}")
    return axis


def key_columns(
    atlas: dict[str, Any], layer: int, step: int | None, quantity: str, axis: str = "frame"
) -> KeyColumns:
    """What the last block's queries see in one layer and pass, along an axis. CacheError for another axis."""
    check_axis(axis)
    i, block = atlas["layers"].index(layer), as_cache(atlas).done - 1
    queries = list(block_ranges(list(atlas["block_sizes"]))[block])
    frames, positions = (rows[block] for rows in slots_of(atlas, i))
    count = int((frames != NO_SLOT).sum())
    frames, positions = frames[:count], positions[:count]
    by_slot = _slot_values(atlas, i, step, quantity)[:, queries, :count].mean(1)
    marks = slot_marks(atlas, i, block)
    if axis == "position":
        order = range(count) if positions.min() < 0 else np.argsort(positions, kind="stable").tolist()
        labels = tuple(str(positions[n]) if positions[n] >= 0 else "·" for n in order)
        return KeyColumns(axis, labels, tuple(marks[n] for n in order), by_slot[:, list(order)])
    gone = [n for n in range(count) if frames[n] == AVERAGE]
    whole = _frame_values(atlas, i, step, quantity)[:, queries].mean(1)  # [H, F]
    of_frame = {int(frames[n]): marks[n] for n in reversed(range(count)) if frames[n] >= 0}
    of_frame |= {f: TOKENS for f in _frames_of_tokens(atlas, i, block) if f not in of_frame}
    names = [str(f) for f in range(whole.shape[1])] + [f"μ{k}" for k in range(1, len(gone) + 1)]
    seen = [of_frame.get(f, "") for f in range(whole.shape[1])] + [MEAN] * len(gone)
    return KeyColumns(axis, tuple(names), tuple(seen), np.concatenate([whole, by_slot[:, gone]], 1))


def key_matrix(
    atlas: dict[str, Any], layer: int, step: int | None, quantity: str, axis: str = "frame"
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Query frames × keys of one layer and pass along an axis: [H, F, columns] and the columns' labels.

    Averages are columns after the frames. Along positions tokens that stand at several ones are left out.
    """
    check_axis(axis)
    i = atlas["layers"].index(layer)
    frames, positions = slots_of(atlas, i)
    by_slot = _slot_values(atlas, i, step, quantity)
    blocks = block_ranges(list(atlas["block_sizes"]))[: as_cache(atlas).done]
    if axis == "position":
        names = tuple(str(p) for p in range(max(0, int(positions.max())) + 1))
        places, matrix = positions, np.full((*by_slot.shape[:2], len(names)), np.nan, np.float32)
    else:
        whole = _frame_values(atlas, i, step, quantity)
        count = int((frames == AVERAGE).sum(1).max(initial=0))
        names = (*map(str, range(whole.shape[2])), *(f"μ{k}" for k in range(1, count + 1)))
        matrix = np.concatenate([whole, np.full((*whole.shape[:2], count), np.nan, np.float32)], 2)
        rank = np.cumsum(frames == AVERAGE, 1) - 1
        places = np.where(frames == AVERAGE, whole.shape[2] + rank, -1)
    for block, queries in enumerate(blocks):
        _place(matrix, by_slot, list(queries), places[block], adds=quantity != "mean_logit")
    return matrix, names


def slot_marks(atlas: dict[str, Any], i: int, block: int) -> list[str]:
    """What is special about each slot that a block sees; i is the index of a layer.

    Slots of frames between the sink and the unbroken run of the newest frames are memories.
    """
    frames = slots_of(atlas, i)[0][block]
    frames = frames[frames != NO_SLOT].tolist()
    recent = len(frames) - 1
    while recent and frames[recent - 1] == frames[recent] - 1:
        recent -= 1
    sinks = atlas.get("sink_slots")
    sink = recent if sinks is None else sinks[block]  # a window lets nothing stand between the two
    recent = max(recent, sink + atlas["memory_slots"][block] if "memory_slots" in atlas else 0)
    special = {AVERAGE: MEAN, CHOSEN: TOKENS, EMPTY: ZEROS}
    return [
        special.get(frame, SINK if n < sink else MEMORY if n < recent else "")
        for n, frame in enumerate(frames)
    ]


def _frames_of_tokens(atlas: dict[str, Any], i: int, block: int) -> list[int]:
    """Frames of which a block sees tokens."""
    if "tokens_kept" not in atlas:
        return []
    return np.flatnonzero(atlas["tokens_kept"][i, block].numpy()).tolist()


def _frame_values(atlas: dict[str, Any], i: int, step: int | None, quantity: str) -> np.ndarray:
    """Values of frames [H, F, F] of the layer at index i in a quantity."""
    return _stored(atlas, "frame", i, step, quantity)


def _slot_values(atlas: dict[str, Any], i: int, step: int | None, quantity: str) -> np.ndarray:
    """Values of slots [H, F, slots]; where slots are frames, those of the frames."""
    if f"slot_{STORED[quantity]}" in atlas:
        return _stored(atlas, "slot", i, step, quantity)
    whole, (frames, _) = _frame_values(atlas, i, step, quantity), slots_of(atlas, i)
    found = np.full((*whole.shape[:2], frames.shape[1]), np.nan, np.float32)
    for block, queries in enumerate(block_ranges(list(atlas["block_sizes"]))):
        there = np.flatnonzero(frames[block] >= 0)
        rows = list(queries)
        found[:, np.array(rows)[:, None], there] = whole[:, np.array(rows)[:, None], frames[block][there]]
    return found


def _stored(atlas: dict[str, Any], kind: str, i: int, step: int | None, quantity: str) -> np.ndarray:
    name = f"{kind}_{STORED[quantity]}"
    if name not in atlas:
        raise CacheError(f"this cache holds no {quantity}")
    steps = [at.step for at in as_cache(atlas).passes()]
    values = atlas[name][i, 0 if step is None else steps.index(step)].float().numpy()
    return values / atlas["frame_seq_length"] if quantity == "mean_prob" else values


def _place(
    matrix: np.ndarray, by_slot: np.ndarray, rows: Sequence[int], places: np.ndarray, adds: bool
) -> None:
    """Put slots at their places, in the rows of a block; several at one place are added up, or averaged."""
    for place in sorted({int(p) for p in places if p >= 0}):
        slots = np.flatnonzero(places == place)
        values = by_slot[:, rows][:, :, slots]
        matrix[:, rows, place] = values.sum(2) if adds else values.mean(2)
