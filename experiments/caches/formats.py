"""The fields of each kind of .pt cache: a dataclass per format, and one check.

Letters of lengths: H heads, F frames, S tokens per frame, L = F S, q/k: of the query and key frames, N
layers, P passes. Fields have the names that files have.

    typed = as_cache(load_cache("cache/atlas.pt"))      # an AtlasCache
    typed.frame_logits, typed.passes()                  # [N, P, H, F, F], P tags
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_type_hints

import torch
from pydantic import ConfigDict, Field, Strict, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from experiments.caches.files import CacheError
from wan import errors
from wan.blocks import block_ranges
from wan.files import MAPPED_BYTES, MAX_COUNT, MAX_LAYERS, MAX_TEXT
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

# A check is made when its format is first met: all of them take 70 ms
CONFIG = ConfigDict(arbitrary_types_allowed=True, extra="ignore", defer_build=True)
# Types of plain values. Those of tensors, and lengths, are texts beside their fields: "f16/f32 [H, F, F]"
Text = Annotated[str, Strict()]
Flag = Annotated[bool, Strict()]
Index = Annotated[int, Strict(), Field(ge=0, lt=1 << 63)]
Count = Annotated[int, Strict(), Field(ge=1, le=MAX_COUNT)]
Layer = Annotated[int, Strict(), Field(ge=0, lt=MAX_LAYERS)]
Seed = Annotated[int, Strict(), Field(ge=-(1 << 63), lt=1 << 63)]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Quantity = Literal["mean_logit", "mass", "mean_prob"]


class PassTag(NamedTuple):
    """A denoising step, or the clean pass; None where a file does not say."""

    step: int | None
    timestep: float | None
    is_clean_pass: bool | None


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class Fields:
    """The fields of a dict of a file, of the declared types; unknown ones are left out."""

    one_of: ClassVar[tuple[str, ...]] = ()  # at least one of these fields is there
    named_by: ClassVar[tuple[str, ...]] = ()  # of an entry of a list: no other has the same in these fields
    unique: ClassVar[tuple[str, ...]] = ()  # lists in which nothing is twice

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return a dict with attributes; absent ones have their defaults. CacheError for another type."""
        try:
            return cls(**values)
        except ValidationError as error:
            problem = error.errors()[0]
            name, rule = field_name(problem["loc"]), problem["msg"].removeprefix("Input ")
            if problem["type"] == "missing":
                raise CacheError(f"{name} is missing") from None
            raise CacheError(f"{name} is {_describe(problem['input'])}; it {rule}") from None

    @property
    def present(self) -> dict[str, Any]:
        """The fields that are not None, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def entries(self) -> list[tuple[str, Fields]]:
        """The dicts in its lists, by their names: ("attention_weights[0].", InferenceCall(...))."""
        return [
            (f"{name}[{n}].", entry)
            for name, value in self.present.items()
            if isinstance(value, list)
            for n, entry in enumerate(value)
            if isinstance(entry, Fields)
        ]


# --- What the formats have in common
@dataclass(frozen=True, kw_only=True)
class WeightsFile(Fields):
    """A file that a run read: weights, text encoder and tokenizer, or the file in their place."""

    name: Text
    size: Index  # bytes
    sampled_sha256: Text  # wan.checkpoint.sampled_sha256


@dataclass(frozen=True, kw_only=True)
class Cache(Fields):
    """The fields of every format."""

    # The script that makes one, the notebook that shows one, and the file where it goes
    script: ClassVar[str]
    notebook: ClassVar[str]
    flags: ClassVar[str] = ""  # with which the script makes all that the notebook shows
    default: ClassVar[str]

    format: Text
    schema_version: Index
    prompt: Text | None  # None: of embeddings that nobody saw being made
    seed: Seed | None
    num_frames: Count  # latent frames
    num_frame_per_block: Count
    frame_seq_length: Count
    block_sizes: list[Index]
    num_heads: Count
    head_dim: Count | None = None
    model: Text
    weights: Text  # base, checkpoint, published; unknown: older files, which did not record it
    weights_file: Text | None
    weights_sha256: Text | None
    files: list[WeightsFile] | None = None
    config: dict[str, object] | None = None  # settings of the rollout that have no field of their own
    versions: dict[str, Text] | None = None  # by package
    device: Text | None = None  # cpu, or the GPU's name
    gpus: Index | None = None  # how many made it together, where more than one: bits differ with their number
    dtype: Text | None = None  # of generation
    live_weights: Text | None = None  # a hash of those in memory (wan/identity.py), and of their hooks
    quantised: Text | None = None  # how the weights were stored, where they were dequantised
    uncompiled: list[Text] | None = None  # transformers that are compiled, and ran uncompiled: watched
    attention: Text | None = None  # a GPU's kernel of attention
    is_logits: Flag
    quantity: Quantity | None = None  # where is_logits leaves it open
    first_frames: Text | None = None  # how many were given, and a hash of their latents
    read_by: Text | None = None  # the first version of this project that reads this schema
    fingerprint: Text | None = None  # of all that the run's numbers depend on; older: of a sweep's settings
    partial: Flag | None = None  # stopped after blocks_done blocks, or before some steps of the base model
    blocks_done: Index | None = None
    interventions: dict[str, object] | None = None  # edits, the same in words, and a hash: the run was edited
    # of a rolling window: the timestep of every step, which is that of a block of the window too
    rolling_timesteps: list[Number] | None = None
    notes: list[Text] | None = None  # such as a guess about an older file

    @property
    def done(self) -> int:
        """Number of finished blocks."""
        if self.blocks_done is None:
            return len(self.block_sizes)
        return self.blocks_done

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

    step: Index | None
    timestep: Number | None
    is_clean_pass: Flag | None

    @property
    def tag(self) -> PassTag:
        return PassTag(self.step, self.timestep, self.is_clean_pass)

    def passes(self) -> list[PassTag]:
        return [self.tag]


@dataclass(frozen=True, kw_only=True)
class Sampling(Fields):
    """Of bidirectional runs of base weights, all frames as one block."""

    orig_num_frames: Index | None = None  # video frames
    vae_stride_t: Index | None = None
    branch: Text | None = None  # of guidance: cond or uncond, where a cache holds one
    guidance_scale: Number | None = None
    timestep_shift: Number | None = None
    num_steps: Index | None = None
    negative_prompt: Text | None = None


@dataclass(frozen=True, kw_only=True)
class Tokens(Fields):
    """The token matrix of a call; since schema_version 2 key_* where keys are not those of key_frames."""

    one_of: ClassVar[tuple[str, ...]] = ("attn_logits", "attn_weights")

    key_frame: Annotated[Tensor | None, "i32 [keys]"] = None  # -1 an average, -2 zeros
    key_token: Annotated[Tensor | None, "i32 [keys]"] = None  # index in its frame, row by row
    key_position: Annotated[Tensor | None, "i32 [keys]"] = None  # temporal RoPE index
    layer_idx: Layer
    is_logits: Flag
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

    num_frames: Count
    frame_seq_length: Count
    num_heads: Count
    num_query_frames: Index
    num_key_frames: Index
    last_block_start_frame: Index
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

    attention_weights: list[Figure4Layer]
    layer_indices: Annotated[list[Layer], "[N]"]
    capture_method: Text
    query_frames: Annotated[list[Index], "[Fq]"]
    key_frames: Annotated[list[Index], "[Fk]"]


@dataclass(frozen=True, kw_only=True)
class InferenceCall(OnePass, Tokens):
    """One captured call of an inference cache."""

    named_by: ClassVar = ("layer_idx", "block", "step")

    block: Index | None
    query_frames: Annotated[list[Index], "[Fq]"]
    key_frames: Annotated[list[Index], "[Fk]"]
    q_shape: Annotated[list[Index], "[4]"]
    k_shape: Annotated[list[Index], "[4]"]


@dataclass(frozen=True, kw_only=True)
class InferenceCache(Cache):
    """Captured calls in the order of the rollout, as token matrices."""

    script, notebook, default = "run_extraction.py", "plot_figure4.ipynb", "attention_cache.pt"

    attention_weights: list[InferenceCall]
    layer_indices: Annotated[list[Layer], "[N]"]
    num_transformer_blocks: Index

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
    layer_index: Layer
    full_frame_attention: Annotated[Tensor, "f16/f32 [H, F, F]"]
    last_block_frame_attention: Annotated[Tensor, "f16/f32 [H, F]"]
    query_frames: Annotated[list[Index], "[F]"]
    key_frames: Annotated[list[Index], "[F]"]
    last_block_query_frames: Annotated[list[Index], "[last]"]
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
    if profile is None:
        profile = matrix[:, last_queries].mean(1)
    fields_of_layer = {
        "format": "layer",
        "is_logits": True,
        "layer_index": layer,
        "full_frame_attention": matrix,
        "full_frame_attention_uncond": uncond,
        "last_block_frame_attention": profile,
        "query_frames": list(range(matrix.shape[-1])),
        "key_frames": list(range(matrix.shape[-1])),
        "last_block_query_frames": last_queries,
        "average_attention": averages,
    }
    present = {name: value for name, value in fields_of_layer.items() if value is not None}
    return {**common, **at._asdict(), **present}


@dataclass(frozen=True, kw_only=True)
class AtlasCache(Sampling, Cache):
    """A whole rollout at frame level."""

    script, notebook, default = "run_extraction_all.py", "layer_atlas.ipynb", "atlas.pt"
    flags = "--key_curve --cross --rope_bands"
    one_of: ClassVar = ("frame_logits", "frame_mass", "last_block_frame_logits")
    unique: ClassVar = ("layers", "pass_steps")

    layers: Annotated[list[Layer], "[N]"]
    pass_timesteps: Annotated[list[Number] | Tensor, "[P] | f32 [P]"]
    pass_steps: Annotated[list[Index] | None, "[P]"] = None  # all passes of the rollout where absent
    pass_is_clean: Annotated[list[Flag] | None, "[P]"] = None  # t == 0 where absent
    frame_logits: Annotated[Tensor | None, "f16/f32 [N, P, H, F, F]"] = None
    frame_mass: Annotated[Tensor | None, "f16/f32 [N, P, H, F, F]"] = None
    condition_mass: Annotated[Tensor | None, "f16/f32 [N, P, H, F, conditions]"] = (
        None  # on text beside frames
    )
    attended: Annotated[Tensor | None, "mask [N, P, H, F, F]"] = None  # False: an intervention left it out
    key_curve: Annotated[Tensor | None, "f16/f32 [N, P, H, L] | f16/f32 [N, P, H, keys]"] = None
    cross_mass: Annotated[Tensor | None, "f16/f32 [N, P, H, F, tokens]"] = None
    cross_tokens: Annotated[list[Text] | None, "[tokens]"] = None
    frame_logits_by_band: Annotated[Tensor | None, "f16/f32 [N, P, H, F, F, bands]"] = None
    rope_bands: Annotated[list[Text] | None, "[bands]"] = None  # a time frequency, height or width
    query_means: Annotated[Tensor | None, "f32 [N, P, H, F, pairs, 2]"] = None  # before RoPE; time's pairs
    key_means: Annotated[Tensor | None, "f32 [N, P, H, F, pairs, 2]"] = None  # real and imaginary part
    last_block_frame_logits: Annotated[Tensor | None, "f16/f32 [N, P, H, F]"] = None
    frame_logits_error: Annotated[Tensor | list[Number] | None, "f32 [N] | [N]"] = None
    # Since schema_version 2, under policies whose slots are not the frames of a window:
    slot_frame: Annotated[Tensor | None, "i32 [N, done, slots]"] = None  # a frame, AVERAGE ... NO_KEY
    slot_position: Annotated[Tensor | None, "i32 [N, done, slots]"] = None  # temporal RoPE index of the keys
    slot_tokens: Annotated[Tensor | None, "i32 [N, done, slots]"] = None
    sink_slots: Annotated[list[Index] | None, "[done]"] = None  # how many of the first slots never leave
    memory_slots: Annotated[list[Index] | None, "[done]"] = None  # after them, of a bank of frames
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

    block: Index
    query_frames: Annotated[list[Index], "[Fq]"]
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
    unique: ClassVar = ("layers", "heads", "pass_steps")

    layers: Annotated[list[Layer], "[N]"]
    heads: Annotated[list[Index], "[h]"]
    rows: Index  # of the tokens of a frame
    columns: Index
    pass_timesteps: Annotated[list[Number], "[P]"]
    pass_steps: Annotated[list[Index], "[P]"]
    pass_is_clean: Annotated[list[Flag], "[P]"]
    words: Annotated[list[Text] | None, "[words]"] = None  # text of each prompt token
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
    interventions: dict[str, object]
    latents_base: Annotated[Tensor, "f16/f32 [F, C, h, w]"]
    latents_edited: Annotated[Tensor, "f16/f32 [F, C, h, w]"]
    between_seeds: Annotated[Tensor, "f32 [F]"]  # of the base run to another seed: the unit of effects
    direct: Annotated[Tensor | None, "f32 [F]"] = None  # past of the base run, only this block edited
    own_block: Annotated[Tensor, "f32 [F]"]  # all passes of the first edited block, edited there alone
    total: Annotated[Tensor, "f32 [F]"]  # the edited rollout
    floor: Annotated[Tensor, "f32 [F]"]  # the rollout with noise of 1e-6, or another attention backend
    psnr: Annotated[Tensor | None, "f32 [video]"] = None  # of the two videos, per video frame
    ssim: Annotated[Tensor | None, "f32 [video]"] = None
    questions: Annotated[list[Text] | None, "[Q]"] = None  # of the miniature's tracker
    answers_base: Annotated[Tensor | None, "mask [Q]"] = None  # its answers for the unedited video
    answers_edited: Annotated[Tensor | None, "mask [Q]"] = None


@dataclass(frozen=True, kw_only=True)
class CausalAtlasCache(Cache):
    """Direct effects of one edit on every unit. R runs, N layers, U units; NaN: nothing to edit there."""

    script, notebook, default = "run_causal_atlas.py", "interventions.ipynb", "causal_atlas.pt"
    unique: ClassVar = ("layers", "units")
    interventions: dict[str, object]
    prompts: Annotated[list[Text], "[R]"]
    seeds: Annotated[list[Seed], "[R]"]
    each: Literal["head", "layer", "frame", "site"]  # what a unit is; sites are attn_out, cross_out, mlp_out
    layers: Annotated[list[Layer], "[N]"]  # one, of value 0, where frames are edited in all layers
    units: Annotated[list[Index], "[U]"]
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

    site: Text
    scores: Annotated[Tensor, "f32 [N, P, U]"]


@dataclass(frozen=True, kw_only=True)
class AttributionCache(Cache):
    """(source - own activation) times gradient of a pass's metric. N layers, P passes, U heads or one."""

    script, notebook, default = "run_attribution.py", "interventions.ipynb", "attribution.pt"
    flags = "--source_prompt 'a blue square moving left'"
    unique: ClassVar = ("layers",)

    source: dict[str, object]  # what the other run has: prompt, seed or weights
    metric: Text  # towards: the way of x0 to the source's; or the name of a function
    integrated: Index  # points between both runs; 1 is the gradient of the own run
    layers: Annotated[list[Layer], "[N]"]
    pass_timesteps: Annotated[list[Number], "[P]"]
    pass_blocks: Annotated[list[Index], "[P]"]
    pass_steps: Annotated[list[Index], "[P]"]
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
    """Return a dict as the dataclass of its format. CacheError: of no format, or a field of another type."""
    kind = values.get("format", "")
    errors.require_known(kind, FORMATS, "format is {}", CacheError)
    return FORMATS[kind].from_dict(values)


@cache
def declared_fields(kind: type[Fields]) -> dict[str, str]:
    """Return the fields of a dataclass, and declared shapes: "f16/f32 [H, F, F]", "[N]" of a list, or ""."""
    hints = get_type_hints(kind, include_extras=True)
    shapes = {}
    for field in fields(kind):
        texts = [text for text in getattr(hints[field.name], "__metadata__", ()) if isinstance(text, str)]
        shapes[field.name] = "".join(texts)
    return shapes


def field_name(location: Sequence[str | int]) -> str:
    """Return where pydantic found a problem: attention_weights[0].layer_idx."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier():  # others are alternatives of a type
            name += f".{part}" if name else part
    return name


# --- The check of a cache: types, shapes, and values that would be drawn in silence
DTYPES = {"f16": torch.float16, "f32": torch.float32, "i32": torch.int32, "mask": torch.bool}
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
PAIRS = ("frame_logits", "frame_mass", "frame_logits_by_band", "full_frame_attention")  # of frames
OF_KEYS = ("key_curve", "attn_logits", "attn_weights")  # whose last axis is key tokens
MASSES = ("map_mass", "slot_mass", "frame_mass")  # rows of the first that is there sum to 1
NOT_NEGATIVE = ("frame_mass", "slot_mass", "map_mass", "cross_mass", "direct", "own_block", "total", "floor")
NOT_NEGATIVE += ("between_seeds", "effects")  # type: ignore[assignment]
SAME = ("num_frames", "frame_seq_length", "num_heads", "is_logits")  # of an entry that repeats the cache's


def check(values: Mapping[str, Any]) -> None:
    """Raise CacheError for the first field that is missing, of a wrong type or shape, or inconsistent."""
    # 1. A file of a later version, whose fields are not known here
    version, reader = values.get("schema_version"), values.get("read_by", "later")
    if type(version) is int and not 1 <= version <= SCHEMA_VERSION:
        raise CacheError(
            f"schema_version {version} is not one of 1..{SCHEMA_VERSION}, which this code reads; "
            f"version {reader} of this project reads it (git pull)"
        )
    # 2. Types of every field, and lengths of tensors and lists
    typed = as_cache(values)
    errors.require_text(
        (typed.prompt or "").replace("\0", ""), "prompt", MAX_TEXT
    )  # a page shows NUL as an escape
    sizes = _sizes(typed, {})
    parts = [("", typed), *typed.entries]
    for where, part in parts:
        _check_shapes(part, where, _sizes(part, sizes))
    # 3. Blocks, by which all frames are found
    blocks, total = typed.block_sizes, len(typed.block_sizes)
    if sum(blocks) != typed.num_frames or min(blocks) < 1 or not 1 <= typed.done <= total:
        raise CacheError(
            f"block_sizes {blocks} do not add up to num_frames {typed.num_frames}, or blocks_done "
            f"{typed.done} is not in 1..{total}"
        )
    # 4. Values of the cache, and of its entries
    for where, part in parts:
        _check_names(part, typed, where)
        _check_frames(part, typed, where)
        _check_numbers(part, typed, where)


def check_counts(values: Mapping[str, Any]) -> None:
    """Raise CacheError for counts that no video has: an older file's lists and masks are made from them."""
    for name in ("num_frames", "frame_seq_length", "num_frame_per_block", "num_heads"):
        value = values.get(name)
        if isinstance(value, (int, float)) and not 1 <= value <= MAX_COUNT:
            raise CacheError(f"{name} is {errors.short_repr(value)}, not a number of 1..{MAX_COUNT}")


def _sizes(part: Fields, outer: Mapping[str, int]) -> dict[str, int]:
    """Return the lengths that letters stand for: those that a dict says, or the one around it."""
    sizes = dict(outer)
    for letter, name in LENGTHS.items():
        value = getattr(part, name, None)
        if isinstance(value, int):
            sizes[letter] = value
        elif value is not None:
            sizes[letter] = len(value)
    if isinstance(part, Cache):
        sizes["done"] = part.done
    for tokens, frames in (("L", "F"), ("Lq", "Fq"), ("Lk", "Fk")):
        if frames in sizes:
            sizes[tokens] = sizes[frames] * sizes["S"]
    return sizes


def _check_shapes(part: Fields, where: str, sizes: dict[str, int]) -> None:
    """Raise CacheError for the first tensor or list of another type or length than is declared."""
    values = part.present
    for name, declared in declared_fields(type(part)).items():  # type: ignore[arg-type]  # hashable
        if name not in values or not declared:
            continue
        if not any(_fits(values[name], option, sizes) for option in declared.split(" | ")):
            lengths = ", ".join(f"{letter} {n}" for letter, n in sizes.items() if letter in declared)
            raise CacheError(f"{where}{name} is {_describe(values[name])}, not {declared} ({lengths})")


def _fits(value: Tensor | list[Any], option: str, sizes: dict[str, int]) -> bool:
    """Compare a value with a declared type and lengths; letters that are not known are learned from it."""
    dtypes, _, lengths = option.rstrip("]").rpartition("[")
    letters = lengths.split(", ")
    if isinstance(value, Tensor):
        shape = list(value.shape)
        if value.dtype not in [DTYPES[name] for name in dtypes.strip().split("/") if name]:
            return False
    else:
        shape = [len(value)]
        if dtypes:
            return False
    if len(shape) != len(letters):
        return False
    for n, letter in zip(shape, letters, strict=True):
        expected = int(letter) if letter.isdigit() else sizes.setdefault(letter, n)
        if n != expected:
            return False
    return True


def _require(is_fine: Any, part: Fields, where: str, name: str, rule: str) -> None:
    """Raise CacheError for a field's value, unless it is fine."""
    if not is_fine:
        raise CacheError(f"{where}{name} is {_describe(getattr(part, name))}; {rule}")


def _check_names(part: Fields, cache: Cache, where: str) -> None:
    """Raise CacheError for what is there twice, or not at all, and for entries that contradict the cache."""
    values = part.present
    # 1. Something is there, and everything has one name
    if part.one_of and not values.keys() & set(part.one_of):
        raise CacheError(f"{where}none of {', '.join(part.one_of)} is there")
    for name in part.unique:
        numbers = values.get(name, ())
        _require(len(set(numbers)) == len(numbers), part, where, name, "must have each once")
    named = set()
    for entry_name, entry in part.entries:
        identity = tuple(getattr(entry, name) for name in entry.named_by)
        name = entry_name.partition("[")[0]
        if identity and (name, identity) in named:
            raise CacheError(
                f"{where}{name} has {', '.join(entry.named_by)} {errors.short_repr(identity)} twice"
            )
        named.add((name, identity))
    # 2. Entries repeat what the cache says
    for name in values.keys() & set(SAME):
        _require(
            values[name] == getattr(cache, name), part, where, name, f"the cache has {getattr(cache, name)}"
        )
    if isinstance(part, Figure4Cache | InferenceCache) and not cache.partial:
        layers = {entry.layer_idx for entry in part.attention_weights}
        rule = f"its entries are of {sorted(layers)}"
        _require({*part.layer_indices} == layers, part, where, "layer_indices", rule)
    # 3. Heads, layers, sites and tokens are of the model
    if "heads" in values:
        is_fine = max(values["heads"], default=0) < cache.num_heads
        _require(is_fine, part, where, "heads", f"must be of {cache.num_heads}")
    if isinstance(part, InferenceCache):
        is_fine = max(part.layer_indices, default=0) < part.num_transformer_blocks
        _require(is_fine, part, where, "num_transformer_blocks", f"it has layers {part.layer_indices}")
    if isinstance(part, AttributionSite):
        _require(part.site in SITES, part, where, "site", "is no site of activations")
        is_fine = part.scores.shape[-1] in (1, cache.num_heads)
        _require(is_fine, part, where, "scores", f"must be of {cache.num_heads}")
    if isinstance(part, MapsCache):
        S = part.frame_seq_length
        rule = f"must make {S} tokens of a frame with {part.columns} columns"
        _require(part.rows * part.columns == S, part, where, "rows", rule)


def _check_frames(part: Fields, cache: Cache, where: str) -> None:
    """Raise CacheError for queries, keys and slots that are not of the video, or of a block."""
    values, F, S, blocks = part.present, cache.num_frames, cache.frame_seq_length, cache.block_sizes
    ranges = block_ranges(blocks)
    # 1. Frames are of the video, and no query sees a later block
    for name in values.keys() & {"query_frames", "key_frames", "last_block_query_frames"}:
        frames = values[name]
        is_fine = frames and frames == sorted(set(frames)) and frames[-1] < F
        _require(is_fine, part, where, name, f"must be increasing frames of 0 to {F - 1}")
    if "query_frames" in values and "key_frames" in values:
        later = later_block(blocks, cache.ahead)[values["query_frames"][-1], values["key_frames"]]
        _require(not later.any(), part, where, "key_frames", "must not come after the queries' block")
    # 2. Keys are the tokens of key_frames, where key_frame does not say of what they are
    count = len(values.get("key_frames", getattr(cache, "key_frames", range(F))))
    if "key_frame" not in values:
        for name in values.keys() & set(OF_KEYS):
            is_fine = values[name].shape[-1] == count * S
            _require(is_fine, part, where, name, f"must be of {count} key frames of {S} tokens")
    for name, most in (("key_frame", F), ("slot_frame", F), ("key_token", S)):
        if name in values:
            _require((values[name] < most).all(), part, where, name, f"must be below {most}")
    # 3. Blocks hold their queries
    if "block" in values and "query_frames" in values:
        block, queries = values["block"], values["query_frames"]
        is_fine = block < len(ranges) and {*queries} <= {*ranges[block]}
        _require(is_fine, part, where, "block", f"its queries are {queries}")
    if "last_block_query_frames" in values:
        last = [*ranges[cache.done - 1]]
        is_fine = {*values["last_block_query_frames"]} <= {*last}
        _require(is_fine, part, where, "last_block_query_frames", f"the last block is {last}")
    if isinstance(part, BlockMaps) and isinstance(cache, MapsCache) and part.queries is not None:
        places, limits = part.queries, torch.tensor([F, cache.rows, cache.columns])
        is_fine = (places >= ANY).all() and (places < limits).all()
        is_fine = is_fine and {*places[:, 0].tolist()} <= {ANY, *part.query_frames}
        rule = f"must be frame, row and column of {limits.tolist()}, in {ANY}: all"
        _require(is_fine, part, where, "queries", rule)


def _check_numbers(part: Fields, cache: Cache, where: str) -> None:
    """Raise CacheError for numbers that are not finite, of blocks to come, or shares that do not add up."""
    # 1. Tensors of numbers, but for those that stay on disk
    values = {
        name: x
        for name, x in part.present.items()
        if isinstance(x, Tensor) and x.is_floating_point() and x.nbytes <= MAPPED_BYTES
    }
    for name, x in values.items():
        _require(not x.isinf().any(), part, where, name, "must be finite; absent is NaN")
        if name in NOT_NEGATIVE:
            _require(not (x < 0).any(), part, where, name, "must not be negative")
        if name in ("latents_base", "latents_edited"):
            _require(not x.isnan().any(), part, where, name, "must be finite")
        if name in ("attn_logits", "attn_weights") and not cache.interventions:
            missing = x.isnan()  # heads may see other keys: whole columns
            is_fine = torch.equal(missing.any(2), missing.all(2))
            _require(is_fine, part, where, name, "must be finite; whole keys may be absent")
    # 2. Pairs of frames are absent in later blocks, and in those that are not done
    absent = later_block(cache.block_sizes, cache.ahead)
    absent[sum(cache.block_sizes[: cache.done]) :] = True
    for name in values.keys() & set(PAIRS):
        if part is cache:
            cells = values[name]  # [..., F, F]
            if name == "frame_logits_by_band":
                cells = cells.movedim(-1, 0)
            rule = "must be NaN in later blocks, and in those not done"
            _require(cells[..., absent].isnan().all(), part, where, name, rule)
    # 3. Rows of mass sum to 1, those of maps to the tokens of a frame
    masses = [name for name in MASSES if getattr(part, name, None) is not None]
    has_probabilities = getattr(part, "is_logits", None) is False and "attn_weights" in values
    if has_probabilities and not cache.interventions:
        masses.append("attn_weights")
    if masses and masses[0] in values:
        name, unit, tolerance = masses[0], 1, MASS_TOLERANCE
        if name == "map_mass":
            unit = cache.frame_seq_length
        rows = values[name].float()
        total = rows.nansum(-1) / unit
        if "condition_mass" in values:  # of text that frames attend to in the same softmax
            total = total + values["condition_mass"].float().sum(-1)
        if name == "attn_weights" and values[name].dtype == torch.float16:
            tolerance += HALF_TOLERANCE  # of the many small probabilities of a token matrix some are lost
        off = (total - 1)[~rows.isnan().all(-1)].abs()
        is_fine = bool((off <= tolerance).all() and not (rows < 0).any())
        _require(is_fine, part, where, name, f"must have rows that sum to {unit}")
    if "cross_mass" in values:  # the tokens of padding may be left out
        total = values["cross_mass"].float().nansum(-1)
        _require(
            (total <= 1 + MASS_TOLERANCE).all(), part, where, "cross_mass", "must have rows of at most 1"
        )


def _describe(value: Any) -> str:
    """Return a value in a few words: "float32 [12, 21]", or the beginning of its text."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return errors.short_repr(value, 60)
