"""Caches written before they carried a `format`: what may be inside, and how they become today's.

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

from experiments.caches.formats import Figure4Layer
from wan.blocks import block_frames, block_sizes, later_block
from wan.errors import ConfigError

# All that weights_only loading may build beside tensors: omegaconf's containers and scalars, and numpy's.
_NUMPY_PARTS = {  # what numpy names when it is pickled
    "_reconstruct": np.array(0).__reduce__()[0],
    "scalar": np.float64(0).__reduce__()[0],
}

ALLOWED = [
    ListConfig, DictConfig, base.ContainerMetadata, base.Metadata,
    nodes.AnyNode, nodes.StringNode, nodes.IntegerNode, nodes.FloatNode, nodes.BooleanNode,
    typing.Any, collections.defaultdict, list, dict, int, str, float, bool,
    np.ndarray, np.dtype, *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdU"},
    *[(part, f"numpy.core.multiarray.{name}") for name, part in _NUMPY_PARTS.items()],
    *[(part, f"numpy._core.multiarray.{name}") for name, part in _NUMPY_PARTS.items()],
]  # fmt: skip


def to_plain(value: Any) -> Any:
    """Configuration objects and numpy values -> lists, dicts, numbers; arrays -> tensors or lists of text."""
    if isinstance(value, (ListConfig, DictConfig)):
        return OmegaConf.to_container(value, resolve=False)  # resolving could read this machine's environment
    if isinstance(value, np.ndarray):
        return value.tolist() if value.dtype.kind in "US" else torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, (np.generic, base.Node)):
        return value.item() if isinstance(value, np.generic) else value._value()
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    return value


def modernise(raw: dict[str, Any]) -> dict[str, Any]:
    """Plain values of an older file -> today's fields. ValueError where its keys are those of no cache."""
    entries = raw.get("attention_weights")
    if "full_frame_attention" in raw:
        kind, convert = "layer", _layer
    elif entries and all("q_shape" in entry for entry in entries):
        kind, convert = "inference", _inference
    elif entries:
        kind, convert = "figure4", _figure4
    else:
        raise ValueError(f"not an attention cache, its keys are {', '.join(map(str, raw))}")
    unrecorded: dict[str, Any] = {
        "prompt": "",
        "seed": None,
        "model": "unknown",
        "weights": "unknown",
        "weights_file": None,
        "weights_sha256": None,
        "num_frame_per_block": 3,
        "notes": [],
    }
    try:
        return (
            unrecorded
            | _numbers_as_lists(raw)
            | {"format": kind, "schema_version": 1}
            | convert(unrecorded | raw)
        )
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(f"looks like an older {kind} cache, but {type(error).__name__}: {error}") from None


FIRST_PASS = {"step": 0, "timestep": 1000.0, "is_clean_pass": False}

UNKNOWN_PASS = {"step": None, "timestep": None, "is_clean_pass": None}


def _figure4(raw: dict[str, Any]) -> dict[str, Any]:
    S, n = int(raw["frame_seq_length"]), int(raw["num_frame_per_block"])
    tokens = [_tokens(entry) for entry in raw["attention_weights"]]
    Fq, Fk = (length // S for length in tokens[0].shape[2:])
    frames, notes = _true_frames(int(raw["num_frames"]), n, Fk)
    blocks = _blocks(raw, frames)
    logits = bool(raw.get("is_logits", "attn_logits" in raw["attention_weights"][0]))
    shared = {
        "num_frames": frames,
        "frame_seq_length": S,
        "num_heads": tokens[0].shape[1],
    }
    keys, more = _key_frames(raw, Fk, frames)
    queries = list(range(frames - Fq, frames))
    repeated = Figure4Layer.repeated(**shared, query_frames=queries, key_frames=keys)
    layers = [
        entry
        | repeated
        | {
            "layer_idx": int(entry["layer_idx"]),
            "is_logits": bool(entry.get("is_logits", logits)),
        }
        for entry in raw["attention_weights"]
    ]
    return (
        shared
        | FIRST_PASS
        | {
            "attention_weights": layers,
            "layer_indices": [entry["layer_idx"] for entry in layers],
            "capture_method": str(raw.get("capture_method", "unknown")),
            "block_sizes": blocks,
            "is_logits": logits,
            "query_frames": queries,
            "key_frames": keys,
            "notes": notes + more,
        }
    )


def _layer(raw: dict[str, Any]) -> dict[str, Any]:
    matrix = torch.as_tensor(raw["full_frame_attention"])
    H, F = matrix.shape[:2]
    bidirectional = "orig_num_frames" in raw
    blocks = [F] if bidirectional else _blocks(raw, F)
    queries = [F - 3 + i for i in range(3) if F - 3 + i >= 0] if bidirectional else block_frames(blocks, -1)
    queries = _ints(raw.get("last_block_query_frames", queries))
    absent = later_block(blocks)
    matrix = matrix.masked_fill(absent, float("nan"))  # zeros there were never attended; a real 0 stays
    last = torch.as_tensor(raw.get("last_block_frame_attention", matrix[:, queries].float().mean(1)))
    return (UNKNOWN_PASS if bidirectional else FIRST_PASS) | {
        "layer_index": int(raw["layer_index"]),
        "full_frame_attention": matrix,
        "last_block_frame_attention": last,
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
    S, n = int(raw["frame_seq_length"]), int(raw["num_frame_per_block"])
    calls = raw["attention_weights"]
    frames, notes = _true_frames(
        int(raw["num_frames"]), n, max(_tokens(call).shape[3] for call in calls) // S
    )
    blocks = _blocks(raw, frames)
    by_layer = collections.defaultdict(list)
    for call in calls:
        by_layer[int(call["layer_idx"])].append(call)
    tagged = []
    for call in calls:
        layer = int(call["layer_idx"])
        position = next(i for i, other in enumerate(by_layer[layer]) if other is call)
        Fq, Fk = (length // S for length in _tokens(call).shape[2:])
        block, place = _place(position, len(by_layer[layer]), blocks, Fq)
        queries = block_frames(blocks, block)
        keys, more = _key_frames(call, Fk, queries[-1] + 1)
        notes += [note for note in more if note not in notes]
        tags = {
            "layer_idx": layer,
            "block": block,
            "query_frames": queries[-Fq:],
            "key_frames": keys,
            "is_logits": "attn_logits" in call,
        }
        shapes = {name: _ints(call[name]) for name in ("q_shape", "k_shape")}
        tagged.append({**call, **place, **shapes, **tags})
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
    passes, left_over = divmod(count, len(blocks))
    block = position // max(passes, 1)
    if left_over or passes < 1 or blocks[block] != query_frames:
        return len(blocks) - 1, UNKNOWN_PASS
    if passes == 1:
        return block, UNKNOWN_PASS
    step, last = position % passes, passes - 1
    return block, {"step": step, "timestep": {0: 1000.0, last: 0.0}.get(step), "is_clean_pass": step == last}


def _tokens(entry: Mapping[str, Any]) -> torch.Tensor:
    return entry["attn_logits"] if "attn_logits" in entry else entry["attn_weights"]


def _true_frames(claimed: int, per_block: int, Fk: int) -> tuple[int, list[str]]:
    """Older scripts rounded 21 frames to 1 + 3 x 6 = 19 and still wrote 21."""
    if Fk != claimed and Fk == 1 + (claimed - 1) // per_block * per_block:
        return Fk, [f"the file says {claimed} frames, its attention covers {Fk}"]
    return claimed, []


def _key_frames(raw: Mapping[str, Any], Fk: int, seen: int) -> tuple[list[int], list[str]]:
    keys = _ints(raw.get("key_frames", []))
    if Fk == seen:
        return list(range(seen)), []
    if len(keys) == Fk and keys != list(range(Fk)):
        return keys, []
    return list(range(seen - Fk, seen)), [
        f"a window of {Fk} frames without their numbers: taken as the newest"
    ]


def _blocks(raw: Mapping[str, Any], frames: int) -> list[int]:
    sizes, n = _ints(raw.get("block_sizes", [])), int(raw["num_frame_per_block"])
    if sum(sizes) == frames:
        return sizes
    try:
        return block_sizes(frames, n)
    except ConfigError:
        return block_sizes(frames, n, independent_first_frame=True)


def _ints(values: Any) -> list[int]:
    return [int(v) for v in values]


def _numbers_as_lists(raw: dict[str, Any]) -> dict[str, Any]:
    """Lists of numbers that came as arrays, and arrays of one, are lists and numbers again."""
    small = {
        k: v for k, v in raw.items() if isinstance(v, torch.Tensor) and v.ndim < 2 and "attention" not in k
    }
    return raw | {k: v.tolist() for k, v in small.items()}
