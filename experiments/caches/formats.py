"""The fields of each kind of .pt cache: a dataclass per format, one check, and the one writer.

Letters of lengths: H heads, F frames, S tokens per frame, L = F S, q/k: of the query and key frames, N
layers, P passes. Fields have the names that files have.

    typed = as_cache(load_cache("cache/atlas.pt"))      # an AtlasCache
    typed.frame_logits, typed.passes()                  # [N, P, H, F, F], P tags
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, NamedTuple, Self, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from experiments.caches.files import CacheError, replacing
from wan.blocks import block_ranges
from wan.errors import UserError, library_writes, require_known, require_text, short_repr
from wan.files import MAPPED_BYTES, MAX_COUNT, MAX_LAYERS, MAX_TEXT, UnreadableError, load_tensors
from wan.keys import later_block
from wan.sites import SITES

SCHEMA_VERSION = 2  # the newest that is read; caches carry the first that has all their fields
READ_BY = "0.1.0"  # the first version of this project that reads this schema; caches carry it
QUANTITIES = ("mean_logit", "mass", "mean_prob")
MASS_TOLERANCE = 1e-3  # float32 rows are good to 1e-5; a lost or doubled key frame is at least 1e-2
HALF_TOLERANCE = 0.1  # of 32,760 keys, of which most have less than the smallest float16

# In key_frame and slot_frame, where a key or slot is not of one frame:
AVERAGE = -1  # of evicted frames
NO_KEY = -9  # no key: others have more; between them -2 zeros, -3 tokens of several frames
ANY = -1  # in queries of maps; frame: all queries of the block; row and column: all of the frame


class PassTag(NamedTuple):
    """A denoising step, or the clean pass; None where a file does not say."""

    step: int | None
    timestep: float | None
    is_clean_pass: bool | None


@dataclass(frozen=True, kw_only=True)
class Fields:
    """A dict of a file with attributes; it keeps unknown ones."""

    nested: ClassVar[Mapping[str, type[Fields]]] = {}  # fields that are lists of dicts
    one_of: ClassVar[tuple[str, ...]] = ()  # at least one of these fields is there
    named_by: ClassVar[tuple[str, ...]] = ()  # of an entry of a list: no other has the same in these fields
    unique: ClassVar[tuple[str, ...]] = ()  # lists in which nothing is twice

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Wrap a dict, unchecked; a field that is absent has its default."""
        wrapped = object.__new__(cls)
        for name, value in values.items():
            if (kind := cls.nested.get(name)) and isinstance(value, list):
                value = [kind.from_dict(v) if isinstance(v, Mapping) else v for v in value]
            wrapped.__dict__[name] = value
        return wrapped


@cache
def declared_fields(kind: type[Fields]) -> dict[str, str]:
    """Return types and lengths of each field of a dataclass: "int | none", "f16/f32 [H, F, F]".

    A field that may be absent has a default; the entries of "a list of dicts" are of kind.nested.
    """
    found, hints = {}, get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        text, hint = "", hints[field.name]
        if get_origin(hint) is Annotated:  # its text says types and lengths; else the types are enough
            text, hint = hint.__metadata__[0], hint.__origin__
        options = get_args(hint) if NoneType in get_args(hint) else (hint,)
        names = [(get_origin(one) or one).__name__ for one in options if one is not NoneType]
        text = " | ".join([text or " | ".join(names), *["none"] * (NoneType in options)])
        found[field.name] = "a list of dicts" if field.name in kind.nested else text
    return found


# --- What the formats have in common
@dataclass(frozen=True, kw_only=True)
class WeightsFile(Fields):
    """A file that a run read: weights, text encoder and tokenizer, or the file in their place."""

    name: str
    size: int  # bytes
    sampled_sha256: str  # wan.checkpoint.sampled_sha256


@dataclass(frozen=True, kw_only=True)
class Cache(Fields):
    """The fields of every format."""

    # The script that makes one, the notebook that shows one, and the file where it goes
    script: ClassVar[str]
    notebook: ClassVar[str]
    flags: ClassVar[str] = ""  # with which the script makes all that the notebook shows
    default: ClassVar[str]
    nested: ClassVar[Mapping[str, type[Fields]]] = {"files": WeightsFile}

    format: str
    schema_version: int
    prompt: str
    seed: int | None
    num_frames: int  # latent frames
    num_frame_per_block: int
    frame_seq_length: int
    block_sizes: Annotated[list[int], "int [blocks]"]
    num_heads: int
    head_dim: int | None = None
    model: str
    weights: str  # base, checkpoint, published; unknown: older files, which did not record it
    weights_file: str | None
    weights_sha256: str | None
    files: list[WeightsFile] | None = None
    config: dict[str, Any] | None = None  # settings of the rollout that have no field of their own
    versions: dict[str, str] | None = None  # by package
    device: str | None = None  # cpu, or the GPU's name
    gpus: int | None = None  # how many made it together, where more than one: bits differ with their number
    dtype: str | None = None  # of generation
    quantised: str | None = None  # how the weights were stored, where they were dequantised
    attention: str | None = None  # a GPU's kernel of attention
    is_logits: bool
    quantity: str | None = None  # one of QUANTITIES where is_logits leaves it open
    first_frames: str | None = None  # how many were given, and a hash of their latents
    read_by: str | None = None  # the first version of this project that reads this schema
    fingerprint: str | None = None  # of all that the run's numbers depend on; older: of a sweep's settings
    partial: bool | None = None  # stopped after blocks_done blocks, or before some steps of the base model
    blocks_done: int | None = None
    interventions: dict[str, Any] | None = None  # edits, the same in words, and a hash: the run was edited
    # of a rolling window: the timestep of every step, which is that of a block of the window too
    rolling_timesteps: Annotated[list[float] | None, "float [steps]"] = None
    notes: Annotated[list[str] | None, "str [notes]"] = None  # such as a guess about an older file

    @property
    def done(self) -> int:
        """Number of finished blocks."""
        return len(self.block_sizes) if self.blocks_done is None else self.blocks_done

    @property
    def ahead(self) -> int:
        """Number of blocks after its own that a query may see."""
        return len(self.rolling_timesteps or [0.0]) - 1

    def passes(self) -> list[PassTag]:
        """List the passes that a cache holds of its last block, in its order; none where it has no pass."""
        return []


@dataclass(frozen=True, kw_only=True)
class OnePass(Fields):
    """The pass of a cache, or of a call."""

    step: int | None
    timestep: float | None
    is_clean_pass: bool | None

    @property
    def tag(self) -> PassTag:
        return PassTag(self.step, self.timestep, self.is_clean_pass)

    def passes(self) -> list[PassTag]:
        return [self.tag]


@dataclass(frozen=True, kw_only=True)
class Sampling(Fields):
    """Of bidirectional runs of base weights, all frames as one block."""

    orig_num_frames: int | None = None  # video frames
    vae_stride_t: int | None = None
    branch: str | None = None  # of guidance: cond or uncond, where a cache holds one
    guidance_scale: float | None = None
    timestep_shift: float | None = None
    num_steps: int | None = None
    negative_prompt: str | None = None


@dataclass(frozen=True, kw_only=True)
class Tokens(Fields):
    """The token matrix of a call; since schema_version 2 key_* where keys are not those of key_frames."""

    one_of: ClassVar[tuple[str, ...]] = ("attn_logits", "attn_weights")

    key_frame: Annotated[Tensor | None, "i32 [keys]"] = None  # -1 an average, -2 zeros
    key_token: Annotated[Tensor | None, "i32 [keys]"] = None  # index in its frame, row by row
    key_position: Annotated[Tensor | None, "i32 [keys]"] = None  # temporal RoPE index
    layer_idx: int
    is_logits: bool
    attn_logits: Annotated[Tensor | None, "f16/f32 [1, H, Lq, Lk] | f16/f32 [1, H, Lq, keys]"] = None
    attn_weights: Annotated[Tensor | None, "f16/f32 [1, H, Lq, Lk] | f16/f32 [1, H, Lq, keys]"] = None

    @property
    def has_tokens(self) -> bool:
        return self.attn_logits is not None or self.attn_weights is not None


# --- Token matrices: figure4 has an entry per layer, inference an entry per captured call
@dataclass(frozen=True, kw_only=True)
class Figure4Layer(Tokens):
    """One layer of a figure4 cache. attn_weights of logits are attn_logits: older notebooks read either."""

    one_of: ClassVar = (*Tokens.one_of, "key_curve", "frame_logits", "frame_mass")
    named_by: ClassVar = ("layer_idx",)

    num_frames: int
    frame_seq_length: int
    num_heads: int
    num_query_frames: int
    num_key_frames: int
    last_block_start_frame: int
    key_curve: Annotated[Tensor | None, "f16/f32 [H, Lk] | f16/f32 [H, keys]"] = None
    frame_logits: Annotated[Tensor | None, "f16/f32 [H, Fq, F]"] = None
    frame_mass: Annotated[Tensor | None, "f16/f32 [H, Fq, F]"] = None
    slot_frame: Annotated[Tensor | None, "i32 [slots]"] = None  # as in an atlas
    slot_position: Annotated[Tensor | None, "i32 [slots]"] = None
    slot_logits: Annotated[Tensor | None, "f16/f32 [H, Fq, slots]"] = None
    slot_mass: Annotated[Tensor | None, "f16/f32 [H, Fq, slots]"] = None
    tokens_kept: Annotated[Tensor | None, "i32 [F]"] = None


@dataclass(frozen=True, kw_only=True)
class Figure4Cache(OnePass, Cache):
    """The last block's attention of some layers, in one pass."""

    script, notebook, default = "run_extraction_figure4.py", "plt_fig4.ipynb", "attention_cache_figure4.pt"
    nested: ClassVar = {**Cache.nested, "attention_weights": Figure4Layer}

    attention_weights: list[Figure4Layer]
    layer_indices: Annotated[list[int], "int [N]"]
    capture_method: str
    query_frames: Annotated[list[int], "int [Fq]"]
    key_frames: Annotated[list[int], "int [Fk]"]


@dataclass(frozen=True, kw_only=True)
class InferenceCall(OnePass, Tokens):
    """One captured call of an inference cache."""

    named_by: ClassVar = ("layer_idx", "block", "step")

    block: int | None
    query_frames: Annotated[list[int], "int [Fq]"]
    key_frames: Annotated[list[int], "int [Fk]"]
    q_shape: Annotated[list[int], "int [four]"]
    k_shape: Annotated[list[int], "int [four]"]


@dataclass(frozen=True, kw_only=True)
class InferenceCache(Cache):
    """Captured calls in the order of the rollout, as token matrices."""

    script, notebook, default = "run_extraction.py", "plot_figure4.ipynb", "attention_cache.pt"
    nested: ClassVar = {**Cache.nested, "attention_weights": InferenceCall}

    attention_weights: list[InferenceCall]
    layer_indices: Annotated[list[int], "int [N]"]
    num_transformer_blocks: int

    def last_calls(self) -> list[InferenceCall]:
        """Return the calls of the last block that was captured."""
        block = max(call.block or 0 for call in self.attention_weights)
        return [call for call in self.attention_weights if (call.block or 0) == block]

    def passes(self) -> list[PassTag]:
        return list(dict.fromkeys(call.tag for call in self.last_calls()))


# --- Frame pairs: one layer in one pass, and the atlas of all layers and passes
@dataclass(frozen=True, kw_only=True)
class LayerCache(Sampling, OnePass, Cache):
    """Every frame pair of one layer, each block in one pass; with guidance its other branch too."""

    script, notebook, default = "run_extraction_each.py", "extract_all_attention.ipynb", "layer3.pt"
    layer_index: int
    full_frame_attention: Annotated[Tensor, "f16/f32 [H, F, F]"]
    last_block_frame_attention: Annotated[Tensor, "f16/f32 [H, F]"]
    query_frames: Annotated[list[int], "int [F]"]
    key_frames: Annotated[list[int], "int [F]"]
    last_block_query_frames: Annotated[list[int], "int [last]"]
    full_frame_attention_uncond: Annotated[Tensor | None, "f16/f32 [H, F, F]"] = None
    # Under some cache policies keys that are averages of evicted frames, in the order of their slots:
    average_attention: Annotated[Tensor | None, "f16/f32 [H, F, averages]"] = None


def build_layer_cache(
    common: Mapping[str, Any],
    at: PassTag,
    layer: int,
    matrix: Tensor,
    last_queries: list[int],
    profile: Tensor | None = None,
    uncond: Tensor | None = None,
    averages: Tensor | None = None,
) -> dict[str, Any]:
    """Return a layer cache of a run's fields and mean logits [H, F, F]; profile [H, F] is of last_queries."""
    own = {
        "format": "layer",
        "is_logits": True,
        "layer_index": layer,
        "full_frame_attention": matrix,
        **({} if uncond is None else {"full_frame_attention_uncond": uncond}),
        "last_block_frame_attention": matrix[:, last_queries].mean(1) if profile is None else profile,
        "query_frames": list(range(matrix.shape[-1])),
        "key_frames": list(range(matrix.shape[-1])),
        "last_block_query_frames": last_queries,
        **({} if averages is None else {"average_attention": averages}),
    }
    return {**common, **at._asdict(), **own}


@dataclass(frozen=True, kw_only=True)
class AtlasCache(Sampling, Cache):
    """A whole rollout at frame level."""

    script, notebook, default = "run_extraction_all.py", "layer_atlas.ipynb", "atlas.pt"
    flags = "--key_curve --cross --rope_bands"
    one_of: ClassVar = ("frame_logits", "frame_mass", "last_block_frame_logits")
    unique: ClassVar = ("layers", "pass_steps")

    layers: Annotated[list[int], "int [N]"]
    pass_timesteps: Annotated[list[float] | Tensor, "float [P] | f32 [P]"]
    pass_steps: Annotated[list[int] | None, "int [P]"] = None  # all passes of the rollout where absent
    pass_is_clean: Annotated[list[bool] | None, "bool [P]"] = None  # t == 0 where absent
    frame_logits: Annotated[Tensor | None, "f16/f32 [N, P, H, F, F]"] = None
    frame_mass: Annotated[Tensor | None, "f16/f32 [N, P, H, F, F]"] = None
    condition_mass: Annotated[Tensor | None, "f16/f32 [N, P, H, F, conditions]"] = (
        None  # on text beside frames
    )
    attended: Annotated[Tensor | None, "mask [N, P, H, F, F]"] = None  # False: an intervention left it out
    key_curve: Annotated[Tensor | None, "f16/f32 [N, P, H, L] | f16/f32 [N, P, H, keys]"] = None
    cross_mass: Annotated[Tensor | None, "f16/f32 [N, P, H, F, tokens]"] = None
    cross_tokens: Annotated[list[str] | None, "str [tokens]"] = None
    frame_logits_by_band: Annotated[Tensor | None, "f16/f32 [N, P, H, F, F, bands]"] = None
    rope_bands: Annotated[list[str] | None, "str [bands]"] = None  # a time frequency, height or width
    query_means: Annotated[Tensor | None, "f32 [N, P, H, F, pairs, 2]"] = None  # before RoPE; time's pairs
    key_means: Annotated[Tensor | None, "f32 [N, P, H, F, pairs, 2]"] = None  # real and imaginary part
    last_block_frame_logits: Annotated[Tensor | None, "f16/f32 [N, P, H, F]"] = None
    frame_logits_error: Annotated[Tensor | list[float] | None, "f32 [N] | float [N]"] = None
    # Since schema_version 2, under policies whose slots are not the frames of a window:
    slot_frame: Annotated[Tensor | None, "i32 [N, done, slots]"] = None  # a frame, AVERAGE ... NO_KEY
    slot_position: Annotated[Tensor | None, "i32 [N, done, slots]"] = None  # temporal RoPE index of the keys
    slot_tokens: Annotated[Tensor | None, "i32 [N, done, slots]"] = None
    sink_slots: Annotated[list[int] | None, "int [done]"] = None  # how many of the first slots never leave
    memory_slots: Annotated[list[int] | None, "int [done]"] = None  # after them, of a bank of frames
    key_frame: Annotated[Tensor | None, "i32 [N, keys]"] = None  # of key_curve, where slots are not frames
    key_token: Annotated[Tensor | None, "i32 [N, keys]"] = None  # index in its frame, row by row
    key_position: Annotated[Tensor | None, "i32 [N, keys]"] = None  # temporal RoPE index; -9 no key
    slot_logits: Annotated[Tensor | None, "f16/f32 [N, P, H, F, slots]"] = None
    slot_mass: Annotated[Tensor | None, "f16/f32 [N, P, H, F, slots]"] = None
    tokens_kept: Annotated[Tensor | None, "i32 [N, done, F]"] = None  # of each frame, where some are chosen

    def passes(self) -> list[PassTag]:
        timesteps = [float(t) for t in self.pass_timesteps]
        steps = self.pass_steps or range(len(timesteps))
        clean = self.pass_is_clean or [t == 0 for t in timesteps]
        return [PassTag(*tag) for tag in zip(steps, timesteps, clean, strict=True)]


# --- Maps over video frames: what chosen queries see of every key token, block by block
@dataclass(frozen=True, kw_only=True)
class BlockMaps(Fields):
    """The maps of one block. N layers, P passes, h heads, n queries, Lk keys."""

    one_of: ClassVar = ("map_mass", "word_map")
    named_by: ClassVar = ("block",)

    block: int
    query_frames: Annotated[list[int], "int [Fq]"]
    queries: Annotated[Tensor | None, "i32 [n, 3]"] = None  # frame, row, column; -1: all
    key_frame: Annotated[Tensor | None, "i32 [N, P, Lk]"] = None  # -1 average, -2 zeros, -9 no key
    key_token: Annotated[Tensor | None, "i32 [N, P, Lk]"] = None  # index in its frame, row by row
    key_position: Annotated[Tensor | None, "i32 [N, P, Lk]"] = None  # temporal RoPE index
    map_logits: Annotated[Tensor | None, "f16 [N, P, h, n, Lk]"] = None
    map_mass: Annotated[Tensor | None, "f16 [N, P, h, n, Lk]"] = None  # times S
    attended: Annotated[Tensor | None, "mask [N, P, h, Lk]"] = None  # False: an intervention left it out
    word_map: Annotated[Tensor | None, "f16 [N, P, h, Lq, words]"] = None


@dataclass(frozen=True, kw_only=True)
class MapsCache(Cache):
    """Maps over video frames: of each block that was asked for, layers x passes x heads x queries x keys."""

    script, notebook, default = "run_extraction_maps.py", "on_the_video.ipynb", "maps.pt"
    flags = "--query_patch 18,2,1 --words --save_video"
    nested: ClassVar = {**Cache.nested, "blocks": BlockMaps}
    unique: ClassVar = ("layers", "heads", "pass_steps")

    layers: Annotated[list[int], "int [N]"]
    heads: Annotated[list[int], "int [h]"]
    rows: int  # of the tokens of a frame
    columns: int
    pass_timesteps: Annotated[list[float], "float [P]"]
    pass_steps: Annotated[list[int], "int [P]"]
    pass_is_clean: Annotated[list[bool], "bool [P]"]
    words: Annotated[list[str] | None, "str [words]"] = None  # text of each prompt token
    blocks: list[BlockMaps]

    def passes(self) -> list[PassTag]:
        tags = zip(self.pass_steps, self.pass_timesteps, self.pass_is_clean, strict=True)
        return [PassTag(*tag) for tag in tags]


# --- What interventions did: one edited run, and the same edit on every head, layer or frame
@dataclass(frozen=True, kw_only=True)
class EffectsCache(Cache):
    """A run, edited and not, with the same noise. Distances are RMS differences of x0 per frame."""

    script, notebook, default = "run_intervention.py", "interventions.ipynb", "effects.pt"
    flags = "--interventions configs/edits/forget_past.yaml"
    interventions: dict[str, Any]
    latents_base: Annotated[Tensor, "f16/f32 [F, C, h, w]"]
    latents_edited: Annotated[Tensor, "f16/f32 [F, C, h, w]"]
    between_seeds: Annotated[Tensor, "f32 [F]"]  # of the base run to another seed: the unit of effects
    direct: Annotated[Tensor | None, "f32 [F]"] = None  # past of the base run, only this block edited
    own_block: Annotated[Tensor, "f32 [F]"]  # all passes of the first edited block, edited there alone
    total: Annotated[Tensor, "f32 [F]"]  # the edited rollout
    floor: Annotated[Tensor, "f32 [F]"]  # the rollout with noise of 1e-6, or another attention backend
    psnr: Annotated[Tensor | None, "f32 [video]"] = None  # of the two videos, per video frame
    ssim: Annotated[Tensor | None, "f32 [video]"] = None
    questions: Annotated[list[str] | None, "str [Q]"] = None  # of the miniature's tracker
    answers_base: Annotated[Tensor | None, "mask [Q]"] = None  # its answers for the unedited video
    answers_edited: Annotated[Tensor | None, "mask [Q]"] = None


@dataclass(frozen=True, kw_only=True)
class CausalAtlasCache(Cache):
    """Direct effects of one edit on every unit. R runs, N layers, U units; NaN: nothing to edit there."""

    script, notebook, default = "run_causal_atlas.py", "interventions.ipynb", "causal_atlas.pt"
    unique: ClassVar = ("layers", "units")
    interventions: dict[str, Any]
    prompts: Annotated[list[str], "str [R]"]
    seeds: Annotated[list[int], "int [R]"]
    each: str  # what a unit is: head, layer, frame or site (attn_out, cross_out, mlp_out)
    layers: Annotated[list[int], "int [N]"]  # one, of value 0, where frames are edited in all layers
    units: Annotated[list[int], "int [U]"]
    effects: Annotated[Tensor, "f32 [R, N, U, F]"]  # in units of the distance between seeds
    between_seeds: Annotated[Tensor, "f32 [R, F]"]
    floor: Annotated[Tensor, "f32 [R, F]"]
    frame_control: Annotated[Tensor | None, "f32 [R, N, U, F]"] = None  # the same on a random earlier frame
    head_control: Annotated[Tensor | None, "f32 [R, N, U, F]"] = None  # a random other head or site of it
    head_norms: Annotated[Tensor | None, "f32 [R, N, U]"] = None  # mean ‖z‖ in the base run


@dataclass(frozen=True, kw_only=True)
class AttributionSite(Fields):
    """The scores of one site: of its heads, or of a layer's whole activation."""

    named_by: ClassVar = ("site",)

    site: str
    scores: Annotated[Tensor, "f32 [N, P, U]"]


@dataclass(frozen=True, kw_only=True)
class AttributionCache(Cache):
    """(source - own activation) times gradient of a pass's metric. N layers, P passes, U heads or one."""

    script, notebook, default = "run_attribution.py", "interventions.ipynb", "attribution.pt"
    flags = "--source_prompt 'a blue square moving left'"
    nested: ClassVar = {**Cache.nested, "sites": AttributionSite}
    unique: ClassVar = ("layers",)

    source: dict[str, Any]  # what the other run has: prompt, seed or weights
    metric: str  # towards: the way of x0 to the source's; or the name of a function
    integrated: int  # points between both runs; 1 is the gradient of the own run
    layers: Annotated[list[int], "int [N]"]
    pass_timesteps: Annotated[list[float], "float [P]"]
    pass_blocks: Annotated[list[int], "int [P]"]
    pass_steps: Annotated[list[int], "int [P]"]
    metric_own: Annotated[Tensor, "f32 [P]"]
    metric_source: Annotated[Tensor, "f32 [P]"]  # NaN for a metric of activations
    sites: list[AttributionSite]


FORMATS: dict[str, type[Cache]] = {
    "figure4": Figure4Cache,
    "layer": LayerCache,
    "inference": InferenceCache,
    "atlas": AtlasCache,
    "maps": MapsCache,
    "effects": EffectsCache,
    "causal_atlas": CausalAtlasCache,
    "attribution": AttributionCache,
}


def as_cache(values: Mapping[str, Any]) -> Cache:
    """Wrap a dict in the dataclass of its format, unchecked. CacheError for a format that is not ours."""
    kind = values.get("format", "")
    require_known(kind, FORMATS, "format is {}", CacheError)
    return FORMATS[kind].from_dict(values)


# --- The writer of every format, and a glance at a file
def save_cache(path: str | Path, cache: Mapping[str, Any]) -> None:
    """Check a cache and write it, whole or not at all; the same content gives the same bytes under any name.

    Raises CacheError for a field that is missing or wrong and for a path that cannot be written. Tensors are
    written from where they are: the only copies are of those not contiguous on the CPU.
    """
    try:
        values = _plain(cache, "cache", {})
        check(values)
    except (UserError, RecursionError) as error:
        said = error if isinstance(error, UserError) else "it holds itself"
        raise CacheError(f"{path} not written: {said}") from None
    with library_writes(path, CacheError), replacing(path) as file:
        torch.save(values, file)  # an open file, not a path: its archive is then always called "archive"


def _plain(value: Any, where: str, kept: dict[int, Tensor]) -> Any:
    """Copy a dict's structure so that its bytes depend on its content alone; tensors are kept, not copied.

    Pickle writes an object it has seen as a reference to it, so two equal strings give other bytes than one
    string used twice: interning makes them one. A tensor under two names stays one. Raises CacheError for
    what is neither tensor nor plain value.
    """
    if isinstance(value, Tensor):
        if id(value) not in kept:
            # A view of a larger storage is copied: torch.save would write the whole storage
            x = value.detach()
            in_place = x.device.type == "cpu" and x.untyped_storage().nbytes() == x.nbytes
            kept[id(value)] = x.contiguous() if in_place else x.cpu().clone().contiguous()
        return kept[id(value)]
    if isinstance(value, Mapping):
        return {_plain(key, where, kept): _plain(v, f"{where}[{key!r}]", kept) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{where}[{i}]", kept) for i, v in enumerate(value)]
    if type(value) is str:
        return sys.intern(value)
    if value is None or type(value) in (bool, int, float):
        return value
    raise CacheError(f"{where} is a {type(value).__name__}; only tensors and plain Python values are stored")


def peek(path: str | Path) -> dict[str, Any]:
    """Return the fields of a cache that is as it was written, unchecked; none of any other file."""
    try:
        raw = load_tensors(path)
    except UnreadableError:  # not there, torn, older, or of another program
        return {}
    return raw if isinstance(raw, dict) else {}


# --- The one check of a cache: types and shapes by its dataclass, then values that would be drawn in silence
TYPES: dict[str, Any] = {"f16": torch.float16, "f32": torch.float32, "i32": torch.int32, "mask": torch.bool}
TYPES |= {"str": (str,), "int": (int,), "float": (float, int), "bool": (bool,), "dict": (dict,)}
TYPES |= {"none": (NoneType,)}
LENGTHS = {  # letter: an int field, or a list of this length
    "F": "num_frames",
    "S": "frame_seq_length",
    "H": "num_heads",
    "Fq": "query_frames",
    "Fk": "key_frames",
    "N": "layers",
    "P": "pass_timesteps",
    "h": "heads",
    "words": "words",
}
PAIRS = ("frame_logits", "frame_mass", "frame_logits_by_band", "full_frame_attention")
COUNTS = ("num_frames", "frame_seq_length", "num_frame_per_block", "num_heads", "head_dim")
LAYERS = ("layers", "layer_indices", "layer_idx", "layer_index")
PART_OF = {"key_frame": "F", "slot_frame": "F", "key_token": "S"}  # tensors of numbers below F or S
NOT_NEGATIVE: tuple[str, ...] = (
    "frame_mass",
    "slot_mass",
    "map_mass",
    "cross_mass",
    "direct",
    "own_block",
    "total",
)
NOT_NEGATIVE += ("floor", "between_seeds", "effects")
SAME = ("num_frames", "frame_seq_length", "num_heads", "is_logits")  # of an entry that repeats the cache's
WORDS = {"each": ("head", "layer", "frame", "site"), "quantity": (None, *QUANTITIES)}


def check(values: Mapping[str, Any]) -> None:
    """Raise CacheError for the first field that is missing, of a wrong type or shape, or inconsistent."""
    typed = as_cache(values)
    # 1. A file of a later version, whose fields are not known here
    version, reader = values.get("schema_version"), values.get("read_by", "later")
    if type(version) is int and not 1 <= version <= SCHEMA_VERSION:
        raise CacheError(
            f"schema_version {version} is not one of 1..{SCHEMA_VERSION}, which this code reads; "
            f"version {reader} of this project reads it (git pull)"
        )
    # 2. Types and shapes of every field
    _check_fields(values, type(typed))
    require_text(typed.prompt.replace("\0", ""), "prompt", MAX_TEXT)  # a page shows NUL as an escape
    # 3. Blocks, by which all frames are found
    blocks, done, total = typed.block_sizes, typed.done, len(typed.block_sizes)
    if sum(blocks) != typed.num_frames or min(blocks) < 1 or not 1 <= done <= total:
        raise CacheError(
            f"block_sizes {blocks} do not add up to num_frames {typed.num_frames}, or blocks_done {done} is "
            f"not in 1..{total}"
        )
    # 4. Values of the cache, and of its entries
    _check_values(typed, typed, "")
    for name in typed.nested:
        for i, entry in enumerate(getattr(typed, name) or ()):
            _check_values(entry, typed, f"{name}[{i}].")


def check_counts(values: Mapping[str, Any]) -> None:
    """Raise CacheError for counts that no video has: lists and masks are made from them early."""
    for name in COUNTS:
        value = values.get(name)
        if isinstance(value, (int, float)) and not 1 <= value <= MAX_COUNT:
            raise CacheError(f"{name} is {short_repr(value)}, not a number of 1..{MAX_COUNT}")


def _check_fields(
    values: Mapping[str, Any], kind: type[Fields], where: str = "", outer: Mapping[str, int] = {}
) -> None:
    """Raise CacheError for the first field that is missing, or of another type or length than is declared."""
    # 1. Lengths that fields of this dict say, or of the one around it
    sizes = {letter: n for letter, n in outer.items() if letter in LENGTHS}
    for letter, name in LENGTHS.items():
        if isinstance(value := values.get(name), (int, list, Tensor)):
            sizes[letter] = value if isinstance(value, int) else len(value)
    if isinstance(blocks := values.get("block_sizes"), list):
        sizes["done"] = len(blocks) if values.get("blocks_done") is None else values["blocks_done"]
    for tokens, frames in (("L", "F"), ("Lq", "Fq"), ("Lk", "Fk")):
        if frames in sizes and "S" in sizes:
            sizes[tokens] = sizes[frames] * sizes["S"]
    # 2. Every field against its declaration; the entries of lists of dicts likewise
    for name, declared in declared_fields(kind).items():  # type: ignore[arg-type]  # a class is hashable
        value, entries = values.get(name, MISSING), kind.nested.get(name)
        if value is MISSING and hasattr(kind, name):  # its default
            continue
        if entries and isinstance(value, list) and all(isinstance(v, Mapping) for v in value):
            for i, entry in enumerate(value):
                _check_fields(entry, entries, f"{where}{name}[{i}].", sizes)
        elif not any(_fits(value, option, sizes) for option in declared.split(" | ")):
            known = ", ".join(f"{letter} {n}" for letter, n in sizes.items() if letter in declared)
            known = f" ({known})" * bool(known and "[" in declared)
            raise CacheError(f"{where}{name} is {_describe(value)}, not {declared}{known}")
        # 3. Numbers that count, such as a layer, and timesteps
        low, high = (-(2**63) if name in ("seed", "seeds") else 0), MAX_LAYERS if name in LAYERS else 2**63
        low, high = (1, MAX_COUNT + 1) if name in COUNTS else (low, high)
        for one in value if isinstance(value, list) else [value]:
            is_int, is_float = type(one) is int, type(one) is float
            if (is_int and not low <= one < high) or (is_float and not isfinite(one)):
                fits = f"whole numbers in {low}..{high - 1}" if is_int else "finite"
                raise CacheError(f"{where}{name} is {_describe(value)}; must be {fits}")


def _fits(value: Any, option: str, sizes: dict[str, int]) -> bool:
    """Compare a value with its declared type and lengths; letters not yet known are learned from it."""
    kind, _, lengths = option.rstrip("]").partition(" [")
    letters = lengths.split(", ") if lengths else []
    if isinstance(value, Tensor):
        shape, fits = list(value.shape), value.dtype in [TYPES[name] for name in kind.split("/")]
    else:
        shape, allowed = [len(value)] if isinstance(value, list) else [], TYPES.get(kind, ())
        fits = isinstance(allowed, tuple) and all(
            type(item) in allowed for item in (value if shape else [value])
        )
    return (
        fits
        and len(shape) == len(letters)
        and all(
            n == (int(letter) if letter.isdigit() else sizes.setdefault(letter, n))
            for n, letter in zip(shape, letters, strict=True)
        )
    )


def _check_values(values: Fields, cache: Cache, where: str) -> None:
    """Raise CacheError for values of a cache, or of one of its entries, that contradict each other."""
    there = {name: value for name, value in vars(values).items() if value is not None}
    F, S, blocks = cache.num_frames, cache.frame_seq_length, cache.block_sizes
    if values.one_of and not there.keys() & set(values.one_of):
        raise CacheError(f"{where}none of {', '.join(values.one_of)} is there")

    def require(fine: Any, name: str, rule: str) -> None:
        if not fine:
            raise CacheError(f"{where}{name} is {_describe(there[name])}; {rule}")

    # 1. Frames are of the video, and no query sees a later block
    for name in there.keys() & {"query_frames", "key_frames", "last_block_query_frames"}:
        numbers = there[name]
        fine = numbers and numbers == sorted(set(numbers)) and numbers[0] >= 0 and numbers[-1] < F
        require(fine, name, f"must be increasing frames of 0 to {F - 1}")
    if "query_frames" in there and "key_frames" in there:
        later = later_block(blocks, cache.ahead)[there["query_frames"][-1], there["key_frames"]]
        require(not later.any(), "key_frames", "must not come after the queries' block")
    # 2. Keys are the tokens of key_frames, where key_frame does not say of what they are
    keys = len(there.get("key_frames", getattr(cache, "key_frames", range(F))))
    for name in there.keys() & {"key_curve", "attn_logits", "attn_weights"}:
        fits = "key_frame" in there or there[name].shape[-1] == keys * S
        require(fits, name, f"must be of {keys} key frames of {S} tokens")
    # 3. Everything has one name, and entries repeat what the cache says
    for name in values.unique:
        some = there.get(name, ())
        require(len(set(some)) == len(some), name, "must have each once")
    for name, kind in values.nested.items():
        ids = [tuple(getattr(one, key) for key in kind.named_by) for one in there.get(name, ())]
        twice = next((one for one in ids if ids.count(one) > 1), None) if kind.named_by else None
        if twice is not None:
            raise CacheError(f"{where}{name} has {', '.join(kind.named_by)} {short_repr(twice)} twice")
    for name in there.keys() & set(SAME) if where else ():
        require(there[name] == getattr(cache, name), name, f"the cache has {getattr(cache, name)}")
    for name, known in WORDS.items():
        require(name not in there or there[name] in known, name, f"must be of {', '.join(map(str, known))}")
    if "heads" in there:
        require(max(there["heads"], default=0) < cache.num_heads, "heads", f"must be of {cache.num_heads}")
    if isinstance(values, (Figure4Cache, InferenceCache)) and not cache.partial:
        found = {entry.layer_idx for entry in values.attention_weights}
        require({*values.layer_indices} == found, "layer_indices", f"its entries are of {sorted(found)}")
    if isinstance(values, InferenceCache):
        fine = max(values.layer_indices, default=0) < values.num_transformer_blocks
        require(fine, "num_transformer_blocks", f"it has layers {values.layer_indices}")
    if isinstance(values, AttributionSite):
        require(values.site in SITES, "site", "is no site of activations")
        require(values.scores.shape[-1] in (1, cache.num_heads), "scores", f"must be of {cache.num_heads}")
    # 4. Blocks hold their queries, and queries, keys and slots are of the video
    ranges = block_ranges(blocks)
    if "block" in there and "query_frames" in there:
        n = there["block"]
        fine = n < len(ranges) and {*there["query_frames"]} <= {*ranges[n]}
        require(fine, "block", f"its queries are {there['query_frames']}")
    if "last_block_query_frames" in there:
        fine = {*there["last_block_query_frames"]} <= {*ranges[cache.done - 1]}
        require(fine, "last_block_query_frames", f"the last block is {[*ranges[cache.done - 1]]}")
    for name in there.keys() & PART_OF.keys():
        most = F if PART_OF[name] == "F" else S
        require((there[name] < most).all(), name, f"must be below {most}")
    if isinstance(cache, MapsCache) and "queries" in there:
        places: Tensor = there["queries"]
        limits = torch.tensor([F, cache.rows, cache.columns])
        fine = (places >= ANY).all() and (places < limits).all()
        fine = fine and {*places[:, 0].tolist()} <= {ANY, *there["query_frames"]}
        require(fine, "queries", f"must be frame, row and column of {limits.tolist()}, in {ANY}: all")
    # 5. Numbers, but for those that stay on disk: finite, absent in later blocks, rows of mass that sum to 1
    tensors = {name for name, x in there.items() if isinstance(x, Tensor) and x.is_floating_point()}
    small = {
        name
        for name in tensors & declared_fields(type(values)).keys()  # type: ignore[arg-type]
        if there[name].nbytes <= MAPPED_BYTES
    }
    for name in small:
        require(not there[name].isinf().any(), name, "must be finite; absent is NaN")
        require(name not in NOT_NEGATIVE or not (there[name] < 0).any(), name, "must not be negative")
    for name in small & {"latents_base", "latents_edited"}:
        require(not there[name].isnan().any(), name, "must be finite")
    for name in small & {"attn_logits", "attn_weights"} if not cache.interventions else ():
        # Heads may see other keys: whole columns
        missing = there[name].isnan()
        require(torch.equal(missing.any(2), missing.all(2)), name, "must be finite; whole keys may be absent")
    for name in small & set(PAIRS) if not where else ():
        cells = there[name].movedim(-1, 0) if name == "frame_logits_by_band" else there[name]  # [..., F, F]
        absent = later_block(blocks, cache.ahead)
        absent[sum(blocks[: cache.done]) :] = True
        require(cells[..., absent].isnan().all(), name, "must be NaN in later blocks, and in those not done")
    of_tokens = ["attn_weights"] * (there.get("is_logits") is False and not cache.interventions)
    for mass in [n for n in ("map_mass", "slot_mass", "frame_mass", *of_tokens) if n in there][:1]:
        rows, unit = there[mass] if mass in small else torch.empty(0, 1), S if mass == "map_mass" else 1
        rows = rows.float()
        total = rows.nansum(-1) / unit
        if "condition_mass" in there and mass in small:  # of text that frames attend to in the same softmax
            total = total + there["condition_mass"].float().sum(-1)
        off = (total - 1)[~rows.isnan().all(-1)].abs()
        # Of the many small probabilities of a token matrix float16 loses some
        lost = HALF_TOLERANCE if mass == "attn_weights" and there[mass].dtype == torch.float16 else 0.0
        fine = (off <= MASS_TOLERANCE + lost).all() and not (rows < 0).any()
        require(fine, mass, f"must have rows that sum to {unit}")
    if "cross_mass" in small:  # the tokens of padding may be left out
        fine = (there["cross_mass"].float().nansum(-1) <= 1 + MASS_TOLERANCE).all()
        require(fine, "cross_mass", "must have rows of at most 1")
    if isinstance(values, MapsCache):
        fine = values.rows * values.columns == S
        require(fine, "rows", f"must make {S} tokens of a frame with {values.columns} columns")


def _describe(value: Any) -> str:
    """Return a value in a few words: "float32 [12, 21]", or the beginning of its text."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return "missing" if value is MISSING else short_repr(value, 60)
