"""A rollout in each cache format: what it asks of the capture (*_requests), and its dict (*_cache)."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from experiments.caches import frames
from experiments.caches.files import RunError
from experiments.caches.formats import AVERAGE, NO_KEY, Figure4Layer, build_layer_cache
from experiments.caches.frames import query_frame_curves
from experiments.caches.view import averages_of_slots, averages_of_tokens, most_averages
from experiments.extraction.result import Extraction
from wan.capture import CapturedCall, CaptureRequest
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.rope import RotaryTable

# --- What an atlas keeps of slots: their frames and positions, and the values of those that are no frames
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


# --- What caches keep per key: values of one call, and the key curves of an atlas, whatever the keys are
OF_KEYS = ("key_frame", "key_token", "key_position")
WHOLE = ("token_logits", "token_probabilities", "attended")  # kept with their axis of one batch item


def call_values(call: CapturedCall) -> dict[str, Any]:
    """The values of a call as caches have them: of one video, key and token numbers as int32."""
    names = {"token_logits": "attn_logits", "token_probabilities": "attn_weights"}
    return {
        names.get(name, name): value
        if name in WHOLE
        else value[0]
        if value.is_floating_point()
        else value[0].int()
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
        fields[name] = torch.stack([_padded_keys(row.int(), length, filler) for row in rows])
    return fields


def _last_step(run: Extraction) -> int:
    return run.config.passes_of_block(len(run.config.block_sizes) - 1)[-1]


def _by_key(run: Extraction, length: int, layer: int, step: int) -> Tensor:
    """Key curve of the last block over its keys as they lie: [H, length] float16."""
    if step not in run.config.passes_of_block(len(run.config.block_sizes) - 1):
        return torch.full((run.common["num_heads"], length), torch.nan).half()
    curve = run.captured("key_curve", layer, step)[0].values["key_curve"][0]
    return _padded_keys(curve.half(), length, torch.nan)


def _padded_keys(row: Tensor, length: int, filler: float) -> Tensor:
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


# --- A rollout in each cache format: what it asks of the capture (*_requests), and its dict (*_cache)
def figure4_requests(config: RunConfig, granularity: str, is_logits: bool = True) -> list[CaptureRequest]:
    """The last block of the chosen layers in the chosen pass."""
    if granularity != "token" and not is_logits:
        raise ConfigError(
            f"--capture probabilities needs --granularity token, not {granularity}; its mass is in every one"
        )
    frame = CaptureRequest(
        layers=config.layer_indices,
        blocks=[len(config.block_sizes) - 1],
        steps=[config.step],
        granularity="frame",
    )
    if granularity == "token":
        dtype = torch.float16 if is_logits else torch.float32
        return [replace(frame, granularity="token", is_logits=is_logits, token_dtype=dtype)]
    return [frame] if granularity == "frame" else [replace(frame, granularity="key"), frame]


def figure4_cache(run: Extraction, is_logits: bool = True) -> dict[str, Any]:
    """Attention of the last block, an entry per layer: tokens, or key curve, mean logits and mass."""
    if run.blocks_done < len(run.config.block_sizes):
        raise RunError("the last block was not reached")
    layers = list(dict.fromkeys(run.config.layer_indices))
    seen = {frame for call in run.records for frame in call["key_frames"]}
    own = {
        "format": "figure4",
        "is_logits": is_logits,
        "attention_weights": [_figure4_layer(run, layer, is_logits, sorted(seen)) for layer in layers],
        "capture_method": "native_inference_capture",
        "layer_indices": layers,
        "query_frames": run.last_block,
        "key_frames": sorted(seen),
    }
    return {**run.common, **_version(run), **run.pass_tag(run.config.step)._asdict(), **own}


def _figure4_layer(run: Extraction, layer: int, is_logits: bool, key_frames: list[int]) -> dict[str, Any]:
    """The last block's calls of one layer as an entry of attention_weights."""
    calls = [call for call in run.records if call.site.layer == layer]
    sizes = {name: run.common[name] for name in ("num_frames", "frame_seq_length", "num_heads")}
    repeated = Figure4Layer.repeated(**sizes, query_frames=run.last_block, key_frames=key_frames)
    values: dict[str, Any] = {}
    for call in calls:
        values |= call_values(call) | slot_entries(call, run.config.num_frames)
        for name in ("frame_logits", "frame_mass"):
            if name in values and name in call.values:
                values[name] = frames.spread_keys(values[name], call["key_frames"], run.config.num_frames)
    entry = {"layer_idx": layer, "is_logits": is_logits, **repeated, **values}
    if "attn_logits" in entry:
        entry["attn_weights"] = entry["attn_logits"]  # older notebooks read either name
    return entry


def _version(run: Extraction) -> dict[str, int]:
    """schema_version 2 where keys are not frames in their places: who reads 1 alone would misread them."""
    in_place = all(call.layout is None or call.layout.is_in_place for call in run.records)
    return {} if in_place else {"schema_version": 2}


def inference_requests(
    config: RunConfig,
    blocks: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    is_logits: bool = False,
) -> list[CaptureRequest]:
    """Token matrices of the config's layers: float32 probabilities, or float16 logits.

    blocks None is the last one, and -1 counts from the end; steps None is the config's.
    """
    count = len(config.block_sizes)
    chosen = [block + count if -count <= block < 0 else block for block in (blocks or [-1])]
    return [
        CaptureRequest(
            layers=config.layer_indices,
            blocks=chosen,
            steps=steps or [config.step],
            is_logits=is_logits,
            token_dtype=torch.float16 if is_logits else torch.float32,
        )
    ]


def inference_cache(run: Extraction) -> dict[str, Any]:
    """The captured calls in the order of the rollout, each with its layer and pass."""
    tags = ("is_logits", "block", "step", "timestep", "is_clean_pass")
    shapes = ("query_frames", "q_shape", "k_shape")
    calls = [
        {"layer_idx": call.site.layer, **call_values(call), **{name: call[name] for name in (*tags, *shapes)}}
        | {"key_frames": sorted(call["key_frames"])}
        for call in run.records
    ]
    own = {
        "format": "inference",
        "is_logits": run.records[0].is_logits,
        "attention_weights": calls,
        "layer_indices": list(dict.fromkeys(run.config.layer_indices)),
        "num_transformer_blocks": run.num_layers,
    }
    return {**run.common, **_version(run), **own}


def layer_requests(
    config: RunConfig, granularity: Literal["token", "frame"] = "frame"
) -> list[CaptureRequest]:
    """All blocks of one layer in the chosen pass; token granularity gives the same numbers the long way."""
    return [
        CaptureRequest(layers=[config.layer_index], steps=[config.step], granularity=granularity, mass=False)
    ]


def layer_cache(run: Extraction, layer: int) -> dict[str, Any]:
    """Mean logits of every frame pair of one layer, each block at the chosen pass."""
    matrix = run.frame_matrix("frame_logits", layer, run.config.step)
    at = run.pass_tag(run.config.step)
    averages = average_columns(run, layer, run.config.step)
    return build_layer_cache(run.common, at, layer, matrix, run.last_block, averages=averages)


def atlas_requests(
    config: RunConfig,
    mass: bool,
    key_curve: bool,
    cross: bool,
    rope_bands: bool = False,
    layers: Collection[int] | None = None,
) -> list[CaptureRequest]:
    """Every block and pass of some layers (None: all) by frame; the key curve of the last block."""
    requests = [CaptureRequest(layers=layers, granularity="frame", mass=mass, rope_bands=rope_bands)]
    if key_curve:
        last = [len(config.block_sizes) - 1]
        requests.append(CaptureRequest(layers=layers, granularity="key", blocks=last))
    if cross:
        requests.append(CaptureRequest(layers=layers, granularity="frame", kinds=("cross",)))
    return requests


def atlas_cache(run: Extraction) -> dict[str, Any]:
    """Everything a rollout's frame-level figures need, [layers, passes, H, F, F] and the like."""
    layers, steps = run.layers, range(len(run.pass_timesteps))
    atlas: dict[str, Any] = {
        **run.common,
        "format": "atlas",
        "is_logits": True,
        "layers": layers,
        "pass_timesteps": run.pass_timesteps,
        "frame_logits": run.frame_matrices("frame_logits", layers, steps),
    }
    clean = [run.pass_tag(step).is_clean_pass for step in steps]
    if clean != [t == 0 for t in run.pass_timesteps]:  # what readers take it for
        atlas["pass_is_clean"] = clean
    atlas |= slot_fields(run, layers, steps)
    for name in ("frame_mass", "frame_logits_by_band"):
        if name in run.quantities:
            atlas[name] = run.frame_matrices(name, layers, steps)
    if "attended" in run.quantities:
        atlas["attended"] = run.stack(partial(_attended, run), layers, steps)
    if "frame_logits_by_band" in atlas:
        atlas["rope_bands"] = list(RotaryTable(run.records[0].q_shape[-1]).bands)
    if "key_curve" in run.quantities:
        atlas |= last_key_curves(run, layers, steps)
    if "cross_mass" in run.quantities:
        atlas["cross_mass"] = run.stack(partial(_cross_mass, run), layers, steps)
        atlas["cross_tokens"] = run.prompt_tokens
    return atlas


def _attended(run: Extraction, layer: int, step: int) -> Tensor:
    """Which frames each head attended to, bool [H, F, F]; False where an edit left one out, too."""
    calls = run.captured("frame_logits", layer, step)
    pieces = [
        (call["query_frames"], call["key_frames"], (~call.values["frame_logits"][0].isnan()).float())
        for call in calls
    ]
    return frames.assemble(pieces, run.config.num_frames) == 1


def _cross_mass(run: Extraction, layer: int, step: int) -> Tensor:
    """Mass on every prompt token, [H, F, tokens]; NaN for frames that were not reached."""
    calls, words = run.captured("cross_mass", layer, step), len(run.prompt_tokens)
    heads = calls[0].values["cross_mass"].shape[1]
    rows = torch.full((heads, run.config.num_frames, words), torch.nan)
    for call in calls:
        rows[:, call["query_frames"]] = call.values["cross_mass"][0, ..., :words].float()
    return rows
