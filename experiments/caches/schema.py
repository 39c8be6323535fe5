"""What is in each kind of .pt cache: tables of fields, and the check that a cache keeps to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.caches.errors import CacheError
from wan.blocks import block_frames, later_block

SCHEMA_VERSION = 1

READ_BY = "0.1.0"  # the first version of this project that reads this schema; caches carry it

WEIGHTS = ("base", "checkpoint", "published", "unknown")  # unknown: older files, which did not record it

MAX_COUNT = 1 << 17  # frames, tokens per frame, heads; an hour of video has 14400 latent frames

MASS_TOLERANCE = 1e-3  # float32 rows are good to 1e-5; a lost or doubled key frame is at least 1e-2

QUANTITIES = ("mean_logit", "mass", "mean_prob")

# The fields of each format: "type" or "type [lengths]", "|" between alternatives, "?" after an optional key.
# "f16/f32" is a tensor, "int [Fq]" a list. H heads, F frames, S tokens per frame, L = F S, q/k: of the query and
# key frames, N layers, P passes; a letter without a meaning of its own takes the first length it meets.
FILE = {"name": "str", "size": "int", "sampled_sha256": "str"}  # bytes; wan.checkpoint.sampled_sha256

COMMON = {
    "format": "str",
    "schema_version": "int",
    "prompt": "str",
    "seed": "int | none",
    "num_frames": "int",  # latent frames
    "num_frame_per_block": "int",
    "frame_seq_length": "int",
    "block_sizes": "int [blocks]",
    "num_heads": "int",
    "model": "str",
    "weights": "str",
    "weights_file": "str | none",
    "weights_sha256": "str | none",
    "files?": [FILE],  # that the run read: weights, text encoder and tokenizer or the file in their place
    "config?": "dict",  # settings of the rollout that have no field of their own
    "versions?": "dict",  # by package
    "device?": "str",  # cpu, or the GPU's name
    "dtype?": "str",  # of generation
    "is_logits": "bool",
    "quantity?": "str",  # one of QUANTITIES where is_logits leaves it open
    "read_by?": "str",  # the first version of this project that reads this schema
    "partial?": "bool",  # stopped after blocks_done blocks, or before some steps of the base model
    "blocks_done?": "int",
    "notes?": "str [notes]",  # what a reader should know, such as a guess about an older file
}

SAMPLING = {  # bidirectional runs of base weights, all frames as one block
    "orig_num_frames?": "int",  # video frames
    "vae_stride_t?": "int",
    "branch?": "str",  # of guidance: cond or uncond, where a cache holds one
    "guidance_scale?": "float",
    "timestep_shift?": "float",
    "num_steps?": "int",
    "negative_prompt?": "str",
}

PASS = {
    "step": "int | none",
    "timestep": "float | none",
    "is_clean_pass": "bool | none",
}  # none: not recorded

FIGURE4_LAYER = {
    "layer_idx": "int",
    "is_logits": "bool",
    "num_frames": "int",
    "frame_seq_length": "int",
    "num_heads": "int",
    "num_query_frames": "int",
    "num_key_frames": "int",
    "last_block_start_frame": "int",
    "attn_logits?": "f16/f32 [1, H, Lq, Lk]",
    "attn_weights?": "f16/f32 [1, H, Lq, Lk]",
    "key_curve?": "f16/f32 [H, Lk]",
    "frame_logits?": "f16/f32 [H, Fq, F]",
    "frame_mass?": "f16/f32 [H, Fq, F]",
}

FIGURE4 = (
    COMMON
    | PASS
    | {
        "attention_weights": [FIGURE4_LAYER],
        "layer_indices": "int [N]",
        "capture_method": "str",
        "query_frames": "int [Fq]",
        "key_frames": "int [Fk]",
    }
)

LAYER = (
    COMMON
    | PASS
    | SAMPLING
    | {
        "layer_index": "int",
        "full_frame_attention": "f16/f32 [H, F, F]",
        "last_block_frame_attention": "f16/f32 [H, F]",
        "query_frames": "int [F]",
        "key_frames": "int [F]",
        "last_block_query_frames": "int [last]",
        "full_frame_attention_uncond?": "f16/f32 [H, F, F]",
    }
)

CALL = PASS | {
    "layer_idx": "int",
    "is_logits": "bool",
    "block": "int | none",
    "query_frames": "int [Fq]",
    "key_frames": "int [Fk]",
    "q_shape": "int [four]",
    "k_shape": "int [four]",
    "attn_logits?": "f16/f32 [1, H, Lq, Lk]",
    "attn_weights?": "f16/f32 [1, H, Lq, Lk]",
}

INFERENCE = COMMON | {
    "attention_weights": [CALL],
    "layer_indices": "int [N]",
    "num_transformer_blocks": "int",
}

ATLAS = (
    COMMON
    | SAMPLING
    | {
        "layers": "int [N]",
        "pass_timesteps": "float [P] | f32 [P]",
        "pass_steps?": "int [P]",  # which passes of the rollout; all of them where absent
        "pass_is_clean?": "bool [P]",  # t == 0 where absent
        "frame_logits?": "f16/f32 [N, P, H, F, F]",
        "frame_mass?": "f16/f32 [N, P, H, F, F]",
        "key_curve?": "f16/f32 [N, P, H, L]",
        "cross_mass?": "f16/f32 [N, P, H, F, tokens]",
        "cross_tokens?": "str [tokens]",
        "frame_logits_by_band?": "f16/f32 [N, P, H, F, F, bands]",
        "rope_bands?": "str [bands]",  # what each band is: a time frequency, height or width
        "last_block_frame_logits?": "f16/f32 [N, P, H, F]",
        "frame_logits_error?": "f32 [N] | float [N]",
    }
)

TOKENS = ("attn_logits", "attn_weights")

FRAME_MATRICES = ("full_frame_attention", "frame_logits", "frame_mass", "frame_logits_by_band")

TENSORS = {"f16": torch.float16, "f32": torch.float32}

PLAIN = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "dict": (dict,),
    "none": (type(None),),
}

LENGTHS_OF = {"F": "num_frames", "S": "frame_seq_length", "H": "num_heads"}  # letter: an int field

LENGTHS_FROM = {
    "Fq": "query_frames",
    "Fk": "key_frames",
    "N": "layers",
    "P": "pass_timesteps",
}  # letter: a list


@dataclass(frozen=True)
class Format:
    fields: dict[str, Any]
    script: str  # makes one
    notebook: str  # shows one
    default: str  # where the script puts it
    any_of: tuple[str, ...] = ()  # at least one of these, in the cache or in each entry of its list


FORMATS = {
    "figure4": Format(
        FIGURE4,
        "run_extraction_figure4.py",
        "plt_fig4.ipynb",
        "attention_cache_figure4.pt",
        (*TOKENS, "key_curve", "frame_logits", "frame_mass"),
    ),
    "layer": Format(LAYER, "run_extraction_each.py", "extract_all_attention.ipynb", "layer3.pt"),
    "inference": Format(INFERENCE, "run_extraction.py", "plot_figure4.ipynb", "attention_cache.pt", TOKENS),
    "atlas": Format(
        ATLAS,
        "run_extraction_all.py",
        "layer_atlas.ipynb",
        "atlas.pt",
        ("frame_logits", "frame_mass", "last_block_frame_logits"),
    ),
}


def check(cache: Mapping[str, Any]) -> None:
    """Raise CacheError for the first field of a cache that is missing, of a wrong type or shape, or inconsistent."""
    kind = cache.get("format")
    if type(kind) is not str or kind not in FORMATS:
        raise CacheError(f"format is {kind!r}, not one of {', '.join(FORMATS)}")
    version = cache.get("schema_version")
    if type(version) is int and version < 1:
        raise CacheError(f"schema_version is {version}; they count from 1")
    if type(version) is int and version > SCHEMA_VERSION:
        reader = cache.get("read_by")
        needs = f"version {reader}" if type(reader) is str else "a later version"
        raise CacheError(
            f"schema_version {version} is newer than this code's {SCHEMA_VERSION}; "
            f"{needs} of this project reads it (git pull)"
        )
    check_counts(cache)
    _check_fields(cache, FORMATS[kind].fields, _sizes(cache, {}), "")
    entries = cache.get("attention_weights", [cache])
    for i, entry in enumerate(entries):
        if FORMATS[kind].any_of and not any(name in entry for name in FORMATS[kind].any_of):
            raise CacheError(f"{_entry(cache, i)}none of {', '.join(FORMATS[kind].any_of)} is there")
    _check_values(cache, entries)


def check_counts(cache: Mapping[str, Any]) -> None:
    """Raise CacheError for counts that no video has: lists and masks are made from them before tensors confirm them."""
    for name in ("num_frames", "frame_seq_length", "num_frame_per_block", "num_heads"):
        value = cache.get(name)
        if isinstance(value, (int, float)) and not 1 <= value <= MAX_COUNT:
            raise CacheError(f"{name} is {value!r}, not a number of 1..{MAX_COUNT}")


def _check_fields(
    values: Mapping[str, Any], fields: Mapping[str, Any], sizes: dict[str, int], where: str
) -> None:
    for key, declared in fields.items():
        name = key.rstrip("?")
        if name not in values:
            if key == name:
                raise CacheError(f"{where}{name} is missing")
        elif isinstance(declared, list):
            if not isinstance(values[name], list) or not all(
                isinstance(entry, Mapping) for entry in values[name]
            ):
                raise CacheError(f"{where}{name} is {_describe(values[name])}, not a list of dicts")
            for i, entry in enumerate(values[name]):
                _check_fields(entry, declared[0], _sizes(entry, sizes), f"{where}{name}[{i}].")
        elif not any(_fits(values[name], option, sizes) for option in declared.split("|")):
            raise CacheError(
                f"{where}{name} is {_describe(values[name])}, not {_with_sizes(declared, sizes)}"
            )


def _fits(value: Any, option: str, sizes: dict[str, int]) -> bool:
    """Whether a value has the declared type and lengths; letters not yet known are learned from it."""
    kind, _, lengths = option.strip().rstrip("]").partition(" [")
    letters = [letter.strip() for letter in lengths.split(",")] if lengths else []
    if isinstance(value, Tensor):
        shape = value.shape
        if value.dtype not in [TENSORS.get(name) for name in kind.split("/")]:
            return False
    else:
        shape = (len(value),) if isinstance(value, list) else ()
        if any(
            type(item) not in PLAIN.get(kind, ()) for item in (value if isinstance(value, list) else [value])
        ):
            return False
    return len(shape) == len(letters) and all(
        n == (int(letter) if letter.isdigit() else sizes.setdefault(letter, n))
        for n, letter in zip(shape, letters, strict=True)
    )


def _sizes(values: Mapping[str, Any], outer: dict[str, int]) -> dict[str, int]:
    """Lengths by letter, from the fields that fix them."""
    sizes = {k: n for k, n in outer.items() if k in (*LENGTHS_OF, *LENGTHS_FROM)}
    sizes |= {k: values[name] for k, name in LENGTHS_OF.items() if type(values.get(name)) is int}
    sizes |= {
        k: len(values[name]) for k, name in LENGTHS_FROM.items() if hasattr(values.get(name), "__len__")
    }
    tokens = {"L": "F", "Lq": "Fq", "Lk": "Fk"}
    return sizes | {k: sizes[f] * sizes["S"] for k, f in tokens.items() if f in sizes and "S" in sizes}


def _check_values(cache: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> None:
    """What types and shapes do not show: frames inside the video, layers as announced, no values where none can be."""
    F, blocks = cache["num_frames"], cache["block_sizes"]
    done = cache.get("blocks_done", len(blocks))
    if not 1 <= done <= len(blocks) or ("blocks_done" in cache and not cache.get("partial")):
        raise CacheError(f"blocks_done is {done}, not in 1..{len(blocks)} of a partial cache")
    if sum(blocks) != F or min(blocks, default=0) < 1:
        raise CacheError(f"block_sizes {blocks} do not add up to num_frames {F}")
    for name, allowed in (("weights", WEIGHTS), ("quantity", QUANTITIES)):
        if cache.get(name, allowed[0]) not in allowed:
            raise CacheError(f"{name} is {cache[name]!r}, not one of {', '.join(allowed)}")
    for i, values in enumerate([cache, *entries]):
        for name in (
            "layers",
            "layer_indices",
            "layer_index",
            "layer_idx",
            "step",
            "pass_steps",
            "block",
            "timestep",
            "pass_timesteps",
        ):
            _check_numbers(f"{_entry(cache, i - 1)}{name}", values.get(name))
        for name in ("query_frames", "key_frames", "last_block_query_frames"):
            numbers = values.get(name, [])
            if numbers != sorted(set(numbers)) or not all(0 <= n < F for n in numbers):
                raise CacheError(
                    f"{_entry(cache, i - 1)}{name} {numbers} are not increasing frames of 0..{F - 1}"
                )
    for i, entry in enumerate(entries if "attention_weights" in cache else []):
        _check_call(cache, entry, _entry(cache, i))
    if "layer_indices" in cache and {entry["layer_idx"] for entry in entries} != set(cache["layer_indices"]):
        raise CacheError(
            f"layer_indices {cache['layer_indices']} are not the layers of attention_weights, "
            f"{sorted({entry['layer_idx'] for entry in entries})}"
        )
    for name in FRAME_MATRICES:
        if cache["format"] in ("layer", "atlas") and name in cache:
            later = later_block(blocks)
            matrices = cache[name].movedim(-1, 0) if name.endswith("by_band") else cache[name]  # [..., F, F]
            if not matrices[..., later].isnan().all():
                raise CacheError(
                    f"{name} has values where the key's block comes after the query's; absent is NaN"
                )
            if not matrices[..., sum(blocks[:done]) :, :].isnan().all():
                raise CacheError(f"{name} has values in blocks that were not done; absent is NaN")
    for i, values in enumerate([cache, *entries]):
        for name in (*FRAME_MATRICES, "last_block_frame_attention", "last_block_frame_logits"):
            if name in values and values[name].isinf().any():
                raise CacheError(f"{_entry(cache, i - 1)}{name} has values that are infinite; absent is NaN")
        if "frame_mass" in values:
            rows = values["frame_mass"].float()
            there = ~rows.isnan().all(-1)
            off = (rows.nan_to_num().sum(-1) - 1)[there].abs()
            if (rows < 0).any() or (off > MASS_TOLERANCE).any():
                raise CacheError(f"{_entry(cache, i - 1)}rows of frame_mass do not sum to 1")


def _check_numbers(name: str, values: Any) -> None:
    """Layers, passes and blocks count from 0, each once in an atlas; timesteps are numbers from 0."""
    numbers = (
        values.tolist() if isinstance(values, Tensor) else values if isinstance(values, list) else [values]
    )
    if not numbers or not all(number is None or 0 <= number < float("inf") for number in numbers):
        raise CacheError(f"{name} is {_describe(values)}; it counts from 0")
    if name in ("layers", "pass_steps") and len(set(numbers)) < len(numbers):
        raise CacheError(f"{name} {values} name one twice")


def _check_call(cache: Mapping[str, Any], call: Mapping[str, Any], where: str) -> None:
    """What a call says of itself is what the cache says: its frames are those of its block, its sizes those of its tensors."""
    blocks, queries, keys = (
        call.get(name, cache.get(name)) for name in ("block_sizes", "query_frames", "key_frames")
    )
    said = {
        "num_query_frames": len(queries),
        "num_key_frames": len(keys),
        "last_block_start_frame": queries[0],
        "num_frames": cache["num_frames"],
        "frame_seq_length": cache["frame_seq_length"],
        "num_heads": cache["num_heads"],
    }
    for name, value in said.items():
        if call.get(name, value) != value:
            raise CacheError(f"{where}{name} is {call[name]}, and the cache says {value}")
    block = call.get("block")
    if block is not None and queries != (block_frames(blocks, block) if block < len(blocks) else None):
        raise CacheError(f"{where}query_frames {queries} are not those of block {block} of {blocks}")
    if later_block(blocks)[queries[-1], keys].any():
        raise CacheError(f"{where}key_frames {keys} come after the queries' block")
    for name, frames in (("q_shape", queries), ("k_shape", keys)):
        if name in call and call[name][1:3] != [len(frames) * cache["frame_seq_length"], cache["num_heads"]]:
            raise CacheError(
                f"{where}{name} {call[name]} is not [B, {len(frames)} frames of {cache['frame_seq_length']} "
                f"tokens, {cache['num_heads']} heads, D]"
            )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    text = repr(value)
    return f"{text[:60]}{'...' if len(text) > 60 else ''}"


def _with_sizes(declared: str, sizes: dict[str, int]) -> str:
    """[H, Lk] -> [H=12, Lk=336], for messages."""
    head, bracket, rest = declared.partition("[")
    letters = [x.strip() for x in rest.partition("]")[0].split(",")]
    return head + (
        f"[{', '.join(f'{x}={sizes[x]}' if x in sizes else x for x in letters)}]" if bracket else ""
    )


def _entry(cache: Mapping[str, Any], i: int) -> str:
    return f"attention_weights[{i}]." if i >= 0 and "attention_weights" in cache else ""
