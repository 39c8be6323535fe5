"""What an atlas keeps of slots: their frames and positions, and the values of those that are no frames."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.caches.averages import AVERAGE, averages_of_slots, averages_of_tokens, most_averages
from experiments.caches.frames import query_frame_curves
from experiments.extraction.result import Extraction
from wan.modules.captured_call import CapturedCall

LEAST_MASS = 1e-4  # what is less is rounding
NO_SLOT = -9  # in slot_frame, beside -1 an average, -2 zeros, -3 tokens of several frames


def slot_fields(run: Extraction, layers: Sequence[int], steps: Sequence[int]) -> dict[str, Any]:
    """slot_frame, slot_position, slot_tokens [layers, blocks, slots]; slot_logits, slot_mass, tokens_kept.

    Nothing under the policies that version 1 of the schema knows: the whole past, and a window.
    """
    if run.config.policy.name in ("full", "window") and not run.config.policy.source:
        return {}
    blocks = [[_of_blocks(run, layer, step) for step in steps] for layer in layers]  # [layers][steps][blocks]
    slots = max(len(call["slot_frame"]) for layer in blocks for calls in layer for call in calls)
    found: dict[str, Any] = {"schema_version": 2}
    for name, absent in (("slot_frame", NO_SLOT), ("slot_position", NO_SLOT), ("slot_tokens", 0)):
        rows = [[_padded(call[name], slots, absent) for call in layer[0]] for layer in blocks]
        found[name] = torch.tensor(rows, dtype=torch.int32)
    layouts = [call.layout for call in blocks[0][0] if call.layout is not None]
    found["sink_slots"] = [layout.sink.stop for layout in layouts]
    found["memory_slots"] = [sum(bool(slot.items) for slot in layout.slots) for layout in layouts]
    mixed = any("slot_logits" in call.values for layer in blocks for calls in layer for call in calls)
    if run.config.policy.keeps_whole_frames and not mixed:  # a release may have zeros among its frames
        return found
    for name in ("slot_logits", "slot_mass"):
        if name.replace("slot", "frame") in run.quantities:
            parts = [torch.stack([_rows(run, calls, name, slots) for calls in layer]) for layer in blocks]
            found[name] = torch.stack(parts)  # [layers, P, H, F, slots]
    if run.config.policy.name == "per_head" and "slot_mass" in found:
        _add_averages(found)
    if run.config.policy.name == "participative":
        kept = [[_tokens_of_frames(run, call) for call in layer[0]] for layer in blocks]
        found["tokens_kept"] = torch.tensor(kept, dtype=torch.int32)
    return found


def average_columns(run: Extraction, layer: int, step: int) -> Tensor | None:
    """Mean logits of averages of frames that are gone [H, F, averages]; None where no block sees one."""
    name = "token_logits" if "token_logits" in run.quantities else "frame_logits"
    found = [(call["query_frames"], _averages(run, call)) for call in run.captured(name, layer, step)]
    pieces = [(queries, values) for queries, values in found if values is not None]
    if not pieces:
        return None
    most = max(values.shape[-1] for _, values in pieces)
    columns = torch.full((len(pieces[0][1]), run.config.num_frames, most), torch.nan)
    for queries, values in pieces:
        columns[:, queries, : values.shape[-1]] = values
    return columns


def _averages(run: Extraction, call: CapturedCall) -> Tensor | None:
    """Mean logits of the averages that a call sees [H, Fq, averages], by slot or token; None for none."""
    values = call.values
    if "slot_logits" in values:
        slot_frame = torch.tensor(call["slot_frame"])
        count = most_averages(slot_frame)
        return averages_of_slots(values["slot_logits"][0], slot_frame, count) if count else None
    if "token_logits" not in values or "key_frame" not in values or AVERAGE not in values["key_frame"][0]:
        return None
    curves = query_frame_curves(values["token_logits"][0], run.common["frame_seq_length"])
    return averages_of_tokens(curves, values["key_frame"][0], values["key_token"][0], mean=True)


def _add_averages(found: dict[str, Any]) -> None:
    """Heads of a class may see averages, which are no frames: one more slot has their mass together."""
    mass = found["slot_mass"]  # [N, P, H, F, slots]
    rest = (1 - mass.nansum(-1, keepdim=True)).masked_fill(mass.isnan().all(-1, keepdim=True), torch.nan)
    if not (rest > LEAST_MASS).any():
        return
    found["slot_mass"] = torch.cat([mass, rest.clamp(min=0)], -1)
    found["slot_logits"] = torch.cat([found["slot_logits"], torch.full_like(rest, torch.nan)], -1)
    for name, code in (("slot_frame", AVERAGE), ("slot_position", AVERAGE), ("slot_tokens", 0)):
        column = torch.full_like(found[name][..., :1], code)
        found[name] = torch.cat([found[name], column], -1)


def _of_blocks(run: Extraction, layer: int, step: int) -> list[CapturedCall]:
    return run.captured("frame_logits", layer, step)


def _padded(values: list[int], length: int, filler: int) -> list[int]:
    return [*values, *[filler] * (length - len(values))]


def _rows(run: Extraction, calls: Sequence[CapturedCall], name: str, slots: int) -> Tensor:
    """Values of every slot for the queries of all blocks [H, F, slots]; NaN: no slot, or no query."""
    heads = calls[0].values["frame_logits"].shape[1]
    rows = torch.full((heads, run.config.num_frames, slots), torch.nan)
    for call in calls:
        values = call.values.get(name, call.values[name.replace("slot", "frame")])[0]  # frames are the slots
        rows[:, call["query_frames"], : values.shape[-1]] = values.float()
    return rows


def _tokens_of_frames(run: Extraction, call: CapturedCall) -> list[int]:
    """How many tokens of each frame a block's queries see."""
    kept = [0] * run.config.num_frames
    if "tokens_kept" in call.values:
        counts = call.values["tokens_kept"][0].tolist()
    else:
        counts = [run.common["frame_seq_length"]] * len(call["key_frames"])
    for frame, count in zip(call["key_frames"], counts, strict=True):
        kept[frame] = count
    return kept
