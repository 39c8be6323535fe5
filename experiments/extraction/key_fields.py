"""What caches keep per key: values of one call, and the key curves of an atlas, whatever the keys are."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.caches import frames
from experiments.caches.value_checks import NO_KEY
from experiments.extraction.result import Extraction
from wan.modules.captured_call import CapturedCall

OF_KEYS = ("key_frame", "key_token", "key_position")
WHOLE = ("token_logits", "token_probabilities", "attended")  # kept with their axis of one batch item


def call_values(call: CapturedCall) -> dict[str, Any]:
    """The values of a call as caches have them: of one video, key and token numbers as int32."""
    return {
        name: value if name in WHOLE else value[0] if value.is_floating_point() else value[0].int()
        for name, value in call.values.items()
    }


def slot_entries(call: CapturedCall, num_frames: int) -> dict[str, Tensor]:
    """slot_frame, slot_position and tokens_kept of a call whose slots are not frames in their places."""
    if call.layout is None or call.layout.is_in_place:
        return {}
    slots = {name: torch.tensor(call[name], dtype=torch.int32) for name in ("slot_frame", "slot_position")}
    if "tokens_kept" not in call.values:
        return slots
    kept = torch.zeros(num_frames, dtype=torch.int32)
    kept[call["key_frames"]] = call.values["tokens_kept"][0].int()
    return slots | {"tokens_kept": kept}


def last_key_curves(run: Extraction, layers: Sequence[int], steps: Sequence[int]) -> dict[str, Tensor]:
    """key_curve [N, P, H, keys] float16 of the last block's queries, NaN where not attended.

    keys are the tokens of all frames, F·S. Where slots are not frames in their places they are the cache's
    keys as they lie, and key_frame, key_token, key_position [N, keys] say what each is.
    """
    calls = {layer: run.captured("key_curve", layer, _last_step(run)) for layer in layers}
    named = {layer: found[0] for layer, found in calls.items() if "key_frame" in found[0].values}
    if not named:
        return {"key_curve": run.stack(partial(_by_frame, run), layers, steps)}
    length = max(call.k_shape[1] for (call, *_) in calls.values())
    fields: dict[str, Tensor] = {"key_curve": run.stack(partial(_by_key, run, length), layers, steps)}
    for name, filler in zip(OF_KEYS, (NO_KEY, 0, NO_KEY), strict=True):
        rows = [named[layer].values[name][0] for layer in layers]
        fields[name] = torch.stack([_padded(row.int(), length, filler) for row in rows])
    return fields


def _last_step(run: Extraction) -> int:
    return run.config.passes_of_block(len(run.config.block_sizes) - 1)[-1]


def _by_key(run: Extraction, length: int, layer: int, step: int) -> Tensor:
    """Key curve of the last block over its keys as they lie: [H, length] float16."""
    if step not in run.config.passes_of_block(len(run.config.block_sizes) - 1):
        return torch.full((run.common["num_heads"], length), torch.nan).half()
    curve = run.captured("key_curve", layer, step)[0].values["key_curve"][0]
    return _padded(curve.half(), length, torch.nan)


def _padded(row: Tensor, length: int, filler: float) -> Tensor:
    """[..., n] -> [..., length]."""
    missing = row.new_full((*row.shape[:-1], length - row.shape[-1]), filler)
    return torch.cat([row, missing], -1)


def _by_frame(run: Extraction, layer: int, step: int) -> Tensor:
    """Key curve of the last block among all tokens: [H, F·S] float16, NaN where not attended."""
    S, there = run.common["frame_seq_length"], run.config.passes_of_block(len(run.config.block_sizes) - 1)
    if step not in there:  # a pass of the first block alone
        return torch.full((run.common["num_heads"], run.config.num_frames * S), torch.nan).half()
    call = run.captured("key_curve", layer, step)[0]
    per_frame = call.values["key_curve"][0].unflatten(-1, (-1, S)).mT  # [H, S, Fk]
    spread = frames.spread_keys(per_frame, call["key_frames"], run.config.num_frames)
    return spread.mT.flatten(1).half()
