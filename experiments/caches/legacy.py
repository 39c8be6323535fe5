"""Convert caches written before they carried a `format` to today's fields, and back for the forks' notebooks.

Older scripts always kept the first pass of a block (t = 1000), stored 0 where a frame was not attended, put
configuration objects and numpy values among plain ones, and called 19 generated frames 21.
"""

import collections
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf, base, nodes
from torch import Tensor

from experiments.caches.files import Record
from wan.blocks import block_frames, block_sizes
from wan.keys import later_block

# All that weights_only loading may build beside tensors: omegaconf's containers and scalars, and numpy's.
NUMPY_PARTS = {"_reconstruct": np.array(0).__reduce__()[0], "scalar": np.float64(0).__reduce__()[0]}
ALLOWED = [
    ListConfig, DictConfig, base.ContainerMetadata, base.Metadata,
    nodes.AnyNode, nodes.StringNode, nodes.IntegerNode, nodes.FloatNode, nodes.BooleanNode,
    typing.Any, collections.defaultdict, list, dict, int, str, float, bool,
    np.ndarray, np.dtype, *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdU"},
    *[(part, f"numpy.core.multiarray.{name}") for name, part in NUMPY_PARTS.items()],
    *[(part, f"numpy._core.multiarray.{name}") for name, part in NUMPY_PARTS.items()],
]  # fmt: skip

FIRST_PASS: Record = {"step": 0, "timestep": 1000.0, "is_clean_pass": False}
UNKNOWN_PASS = dict.fromkeys(FIRST_PASS)
UNRECORDED = {"prompt": "", "model": "unknown", "weights": "unknown", "num_frame_per_block": 3}
UNRECORDED |= dict.fromkeys(("seed", "weights_file", "weights_sha256"))


def to_plain(value: Any) -> Any:
    """Configuration objects and numpy values -> lists, dicts, numbers; arrays -> tensors or lists of text."""
    if isinstance(value, (ListConfig, DictConfig)):
        return OmegaConf.to_container(value, resolve=False)  # resolving could read this machine's environment
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "US":
            return value.tolist()
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, base.Node):
        return value._value()
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    return value


def modernise(raw: dict[str, Any]) -> dict[str, Any]:
    """Convert plain values of an older file. ValueError where its keys are those of no cache."""
    entries = raw.get("attention_weights")
    if "full_frame_attention" in raw:
        kind, convert = "layer", _layer
    elif entries and all("q_shape" in entry for entry in entries):
        kind, convert = "inference", _inference
    elif entries:
        kind, convert = "figure4", _figure4
    else:
        raise ValueError(f"not an attention cache, its keys are {', '.join(map(str, raw))}")
    for name, value in raw.items():  # numbers that came as arrays are lists and numbers again
        if isinstance(value, Tensor) and value.ndim < 2 and "attention" not in name:
            raw[name] = value.tolist()
    raw = UNRECORDED | {"notes": []} | raw
    return raw | {"format": kind, "schema_version": 1} | convert(raw)


def to_attention_weights(atlas: Mapping[str, Any], at: int = 0) -> dict[str, Any]:
    """Return pass number `at` of an atlas as the forks' notebooks read it: a list of layers.

    >>> torch.save(to_attention_weights(atlas), "attention_cache_figure4.pt")

    They average tokens to frames by frame_seq_length, which is 1 here: attn_logits [1, H, Fq, F] are mean
    logits of the last block's frames, 0 where a frame was not attended.
    """
    queries, keys = block_frames(atlas["block_sizes"], -1), list(range(atlas["num_frames"]))
    logits = atlas["frame_logits"][:, at][:, :, queries].float().nan_to_num(0)  # [layers, H, Fq, F]
    shared = {"num_frames": len(keys), "frame_seq_length": 1, "is_logits": True}
    lengths = {"num_query_frames": len(queries), "num_key_frames": len(keys)}
    of_layers = {**shared, **lengths, "num_heads": logits.shape[1], "last_block_start_frame": queries[0]}
    layers = [
        {"layer_idx": layer, "attn_logits": of_layer[None].clone(), **of_layers}
        for layer, of_layer in zip(atlas["layers"], logits, strict=True)
    ]
    told = {name: atlas[name] for name in ("prompt", "num_frame_per_block", "block_sizes")}
    frames = {"query_frames": queries, "key_frames": keys, "layer_indices": list(atlas["layers"])}
    return {"attention_weights": layers, **shared, **told, **frames, "capture_method": "atlas"}


def _figure4(raw: dict[str, Any]) -> dict[str, Any]:
    # All layers hold the last block's queries: [1, H, Lq, Lk]
    S, entries = int(raw["frame_seq_length"]), raw["attention_weights"]
    _, H, Lq, Lk = _tokens(entries[0]).shape
    frames, notes = _true_frames(raw, Lk // S)
    logits = bool(raw.get("is_logits", "attn_logits" in entries[0]))
    keys, note = _key_frames(raw, Lk // S, frames)
    queries = list(range(frames - Lq // S, frames))
    shared = {"num_frames": frames, "frame_seq_length": S, "num_heads": H}
    lengths = {"num_query_frames": len(queries), "num_key_frames": len(keys)}
    of_layers = {**shared, **lengths, "last_block_start_frame": queries[0]}
    layers = []
    for entry in entries:
        of_layer = {"layer_idx": int(entry["layer_idx"]), "is_logits": bool(entry.get("is_logits", logits))}
        layers.append({**entry, **of_layers, **of_layer})
    return {
        **shared,
        **FIRST_PASS,
        "attention_weights": layers,
        "layer_indices": [entry["layer_idx"] for entry in layers],
        "capture_method": str(raw.get("capture_method", "unknown")),
        "block_sizes": _blocks(raw, frames),
        "is_logits": logits,
        "query_frames": queries,
        "key_frames": keys,
        "notes": notes + note,
    }


def _layer(raw: dict[str, Any]) -> dict[str, Any]:
    matrix = torch.as_tensor(raw["full_frame_attention"])
    H, F = matrix.shape[:2]  # [H, F, F]
    # The base model's script wrote orig_num_frames, and has one block; its pass is not in the file
    if "orig_num_frames" in raw:
        at, blocks, last = UNKNOWN_PASS, [F], list(range(max(F - 3, 0), F))
    else:
        at, blocks = FIRST_PASS, _blocks(raw, F)
        last = block_frames(blocks, -1)
    queries = [int(frame) for frame in raw.get("last_block_query_frames", last)]
    matrix = matrix.masked_fill(later_block(blocks), torch.nan)  # zeros never attended; a real 0 stays
    profile = raw.get("last_block_frame_attention", matrix[:, queries].float().mean(1))
    return {
        **at,
        "layer_index": int(raw["layer_index"]),
        "full_frame_attention": matrix,
        "last_block_frame_attention": torch.as_tensor(profile),
        "num_frames": F,
        "num_heads": H,
        "block_sizes": blocks,
        "is_logits": bool(raw.get("is_logits", True)),
        "frame_seq_length": int(raw["frame_seq_length"]),
        "query_frames": list(range(F)),
        "key_frames": list(range(F)),
        "last_block_query_frames": queries,
    }


def _inference(raw: dict[str, Any]) -> dict[str, Any]:
    """Calls without tags: a layer's lie in order, equally many for each block, the first one at t = 1000."""
    S, calls = int(raw["frame_seq_length"]), raw["attention_weights"]
    frames, notes = _true_frames(raw, max(_tokens(call).shape[3] for call in calls) // S)
    blocks, by_layer, tagged = _blocks(raw, frames), dict[int, list[Any]](), []
    # 1. Each layer's calls in the order of the rollout: that tells their block and pass
    for call in calls:
        by_layer.setdefault(int(call["layer_idx"]), []).append(call)
    # 2. Tags of every call
    for call in calls:
        layer = int(call["layer_idx"])
        number = next(i for i, other in enumerate(by_layer[layer]) if other is call)
        Fq, Fk = (length // S for length in _tokens(call).shape[2:])
        block, at = _place(number, len(by_layer[layer]), blocks, Fq)
        queries = block_frames(blocks, block)
        keys, note = _key_frames(call, Fk, queries[-1] + 1)
        notes += [text for text in note if text not in notes]
        shapes = {name: [int(n) for n in call[name]] for name in ("q_shape", "k_shape")}
        names = {"layer_idx": layer, "block": block, "query_frames": queries[-Fq:], "key_frames": keys}
        tagged.append({**call, **at, **shapes, **names, "is_logits": "attn_logits" in call})
    return {
        "attention_weights": tagged,
        "layer_indices": sorted(by_layer),
        "num_frames": frames,
        "frame_seq_length": S,
        "num_heads": _tokens(calls[0]).shape[1],
        "block_sizes": blocks,
        "is_logits": "attn_logits" in calls[0],
        "num_transformer_blocks": int(raw.get("num_transformer_blocks", max(by_layer) + 1)),
        "notes": notes,
    }


def _place(position: int, count: int, blocks: list[int], query_frames: int) -> tuple[int, dict[str, Any]]:
    """Block and pass of one of a layer's count calls; where calls are missing, the last block and no pass."""
    # Steps at t = 1000 ... then the clean pass at 0; what lies between, older files do not say
    passes, left_over = divmod(count, len(blocks))
    block = position // max(passes, 1)
    if left_over or passes < 1 or blocks[block] != query_frames:
        return len(blocks) - 1, UNKNOWN_PASS
    if passes == 1:
        return block, UNKNOWN_PASS
    step, last = position % passes, passes - 1
    return block, {"step": step, "timestep": {0: 1000.0, last: 0.0}.get(step), "is_clean_pass": step == last}


def _tokens(entry: Mapping[str, Any]) -> Tensor:
    if "attn_logits" in entry:
        return entry["attn_logits"]
    return entry["attn_weights"]


def _true_frames(raw: Mapping[str, Any], Fk: int) -> tuple[int, list[str]]:
    """Older scripts rounded 21 frames to 1 + 3 x 6 = 19 and still wrote 21."""
    claimed, n = int(raw["num_frames"]), int(raw["num_frame_per_block"])
    if Fk != claimed and Fk == 1 + (claimed - 1) // n * n:
        return Fk, [f"the file says {claimed} frames, its attention covers {Fk}"]
    return claimed, []


def _key_frames(raw: Mapping[str, Any], Fk: int, seen: int) -> tuple[list[int], list[str]]:
    # Files of a window wrote 0..Fk-1 for key frames: local numbers, not those of the video
    keys = [int(frame) for frame in raw.get("key_frames", [])]
    if Fk == seen:
        return list(range(seen)), []
    if len(keys) == Fk and keys != list(range(Fk)):
        return keys, []
    note = f"a window of {Fk} frames without their numbers: taken as the newest"
    return list(range(seen - Fk, seen)), [note]


def _blocks(raw: Mapping[str, Any], frames: int) -> list[int]:
    sizes, n = [int(size) for size in raw.get("block_sizes", [])], int(raw["num_frame_per_block"])
    if sum(sizes) == frames:
        return sizes
    return block_sizes(frames, n, independent_first_frame=frames % n == 1)
