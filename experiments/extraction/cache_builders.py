"""A rollout in each cache format: what it asks of the capture (*_requests), and its dict (*_cache)."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from experiments.caches import frames
from experiments.caches.errors import RunError
from experiments.caches.schema import LayerCache
from experiments.caches.token_schema import Figure4Layer, InferenceCall
from experiments.extraction.key_fields import call_values, last_key_curves, slot_entries
from experiments.extraction.result import Extraction
from experiments.extraction.slot_fields import average_columns, slot_fields
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.modules.capture import CaptureRequest
from wan.modules.rope import RotaryTable


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
    return Figure4Layer.from_dict({"layer": layer, "is_logits": is_logits, **repeated, **values}).to_dict()


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
        InferenceCall.from_dict(
            {"layer": call.site.layer, **call_values(call), **{name: call[name] for name in (*tags, *shapes)}}
            | {"key_frames": sorted(call["key_frames"])}
        )
        for call in run.records
    ]
    own = {
        "format": "inference",
        "is_logits": run.records[0].is_logits,
        "attention_weights": [call.to_dict() for call in calls],
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
    return LayerCache.build(run.common, at, layer, matrix, run.last_block, averages=averages).to_dict()


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
