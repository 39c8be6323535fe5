"""A rollout in each cache format: what the format asks of the capture (*_requests), and its dict (*_cache)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.caches import frames
from experiments.caches.errors import RunError
from experiments.extraction.result import Extraction
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
    chosen = {"layers": config.layer_indices, "blocks": [len(config.block_sizes) - 1], "steps": [config.step]}
    if granularity == "token":
        dtype = torch.float16 if is_logits else torch.float32
        return [CaptureRequest(granularity="token", is_logits=is_logits, token_dtype=dtype, **chosen)]
    frame = CaptureRequest(granularity="frame", **chosen)
    return [frame] if granularity == "frame" else [CaptureRequest(granularity="key", **chosen), frame]


def figure4_cache(run: Extraction, is_logits: bool = True) -> dict[str, Any]:
    """Attention of the last block over all key frames, a dict per layer: tokens, or key curve, frame logits and mass."""
    layers = []
    if run.blocks_done < len(run.config.block_sizes):
        raise RunError("the last block was not reached")
    for layer in dict.fromkeys(run.config.layer_indices):
        calls = [r for r in run.records if r["layer"] == layer]
        entry = {
            "layer_idx": layer,
            "is_logits": is_logits,
            "num_frames": run.config.num_frames,
            "frame_seq_length": run.common["frame_seq_length"],
            "num_heads": run.common["num_heads"],
            "num_query_frames": len(calls[0]["query_frames"]),
            "num_key_frames": len(calls[0]["key_frames"]),
            "last_block_start_frame": run.last_block[0],
        }
        for call in calls:
            if "attn_weights" in call:
                entry["attn_logits" if is_logits else "attn_weights"] = call["attn_weights"]
            if "key_curve" in call:
                entry["key_curve"] = call["key_curve"][0]
            for name in ("frame_logits", "frame_mass"):
                if name in call:
                    entry[name] = frames.spread_keys(call[name][0], call["key_frames"], run.config.num_frames)
        layers.append(entry)
    return (
        run.common
        | run.pass_fields(run.config.step)
        | {
            "format": "figure4",
            "is_logits": is_logits,
            "attention_weights": layers,
            "capture_method": "native_inference_capture",
            "layer_indices": list(dict.fromkeys(run.config.layer_indices)),
            "query_frames": run.last_block,
            "key_frames": run.records[0]["key_frames"],
        }
    )


def inference_requests(
    config: RunConfig,
    blocks: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    is_logits: bool = False,
) -> list[CaptureRequest]:
    """Token matrices of the chosen layers, blocks (None: the last; -1 counts from the end) and passes (None: the config's).

    Float32 probabilities, or float16 logits.
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
    """The captured calls in the order of the rollout, each with its tags; layer_idx is the layer, not the call index."""
    is_logits = run.records[0]["is_logits"]
    tags = (
        "is_logits",
        "block",
        "step",
        "timestep",
        "is_clean_pass",
        "query_frames",
        "key_frames",
        "q_shape",
        "k_shape",
    )
    calls = [
        {"layer_idx": r["layer"], "attn_logits" if is_logits else "attn_weights": r["attn_weights"]}
        | {tag: r[tag] for tag in tags}
        for r in run.records
    ]
    return run.common | {
        "format": "inference",
        "is_logits": is_logits,
        "attention_weights": calls,
        "layer_indices": list(dict.fromkeys(run.config.layer_indices)),
        "num_transformer_blocks": run.num_layers,
    }


def layer_requests(config: RunConfig, granularity: str = "frame") -> list[CaptureRequest]:
    """All blocks of one layer in the chosen pass; token granularity gives the same numbers the long way, as a check."""
    return [
        CaptureRequest(layers=[config.layer_index], steps=[config.step], granularity=granularity, mass=False)
    ]


def layer_cache(run: Extraction, layer: int) -> dict[str, Any]:
    """Mean logits of every frame pair of one layer, each block at the chosen pass."""
    full = run.frame_matrix("frame_logits", layer, run.config.step)
    all_frames = list(range(run.config.num_frames))
    return (
        run.common
        | run.pass_fields(run.config.step)
        | {
            "format": "layer",
            "is_logits": True,
            "layer_index": layer,
            "full_frame_attention": full,
            "last_block_frame_attention": full[:, run.last_block].mean(1),
            "query_frames": all_frames,
            "key_frames": all_frames,
            "last_block_query_frames": run.last_block,
        }
    )


def atlas_requests(
    config: RunConfig, mass: bool, key_curve: bool, cross: bool, rope_bands: bool = False
) -> list[CaptureRequest]:
    """Every layer, block and pass at frame granularity; the key curve of the last block."""
    requests = [CaptureRequest(granularity="frame", mass=mass, rope_bands=rope_bands)]
    if key_curve:
        requests.append(CaptureRequest(granularity="key", blocks=[len(config.block_sizes) - 1]))
    if cross:
        requests.append(CaptureRequest(granularity="frame", kinds=("cross",)))
    return requests


def atlas_cache(run: Extraction) -> dict[str, Any]:
    """Everything a rollout's frame-level figures need, [layers, passes, H, F, F] and the like."""
    layers, steps = range(run.num_layers), range(len(run.pass_timesteps))
    captured = {name for record in run.records for name in record}

    def stacked(matrix_of: Callable[[int, int], Tensor]) -> Tensor:
        return torch.stack([torch.stack([matrix_of(layer, step) for step in steps]) for layer in layers])

    atlas = run.common | {
        "format": "atlas",
        "is_logits": True,
        "layers": list(layers),
        "pass_timesteps": run.pass_timesteps,
    }
    atlas["frame_logits"] = stacked(lambda layer, step: run.frame_matrix("frame_logits", layer, step))
    if "frame_mass" in captured:
        atlas["frame_mass"] = stacked(lambda layer, step: run.frame_matrix("frame_mass", layer, step))
    if "frame_logits_by_band" in captured:
        atlas["frame_logits_by_band"] = stacked(
            lambda layer, step: run.frame_matrix("frame_logits_by_band", layer, step)
        )
        atlas["rope_bands"] = list(RotaryTable(run.records[0]["q_shape"][-1]).bands)
    if "key_curve" in captured:
        atlas["key_curve"] = stacked(
            lambda layer, step: _spread_curve(run, run.kept("key_curve", layer, step)[0])
        )
    if "cross_mass" in captured:
        words = len(run.prompt_tokens)
        atlas["cross_mass"] = stacked(
            lambda layer, step: _stack_queries(
                [r["cross_mass"][0, ..., :words] for r in run.kept("cross_mass", layer, step)],
                run.config.num_frames,
            )
        )
        atlas["cross_tokens"] = run.prompt_tokens
    return atlas


def _stack_queries(pieces: Sequence[Tensor], num_frames: int) -> Tensor:
    """Values [H, Fq, ...] of blocks in order -> [H, F, ...], NaN for frames that were not reached."""
    rows = torch.cat(list(pieces), 1)
    missing = rows.new_full((rows.shape[0], num_frames - rows.shape[1], *rows.shape[2:]), float("nan"))
    return torch.cat([rows, missing], 1)


def _spread_curve(run: Extraction, call: dict) -> Tensor:
    """Key curve [H, Lk] of a call at its keys' places among all keys: [H, F·S] float16, NaN where not attended."""
    S = run.common["frame_seq_length"]
    per_frame = call["key_curve"][0].unflatten(-1, (-1, S)).mT  # [H, S, Fk]
    spread = frames.spread_keys(per_frame, call["key_frames"], run.config.num_frames)
    return spread.mT.flatten(1).half()
