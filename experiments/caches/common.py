"""What the formats of caches have in common: fields of every run, of a pass, of a token matrix."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

from torch import Tensor

from experiments.caches.errors import CacheError
from experiments.caches.fields import Fields, check_fields
from experiments.caches.value_checks import check_counts, check_numbers, check_texts

SCHEMA_VERSION = 2  # the newest that is read; caches carry the first that has all their fields

READ_BY = "0.1.0"  # the first version of this project that reads this schema; caches carry it

WEIGHTS = ("base", "checkpoint", "published", "unknown")  # unknown: older files, which did not record it

QUANTITIES = ("mean_logit", "mass", "mean_prob")


class PassTag(NamedTuple):
    """A denoising step, or the clean pass; None where a file does not say."""

    step: int | None
    timestep: float | None
    is_clean_pass: bool | None


@dataclass(frozen=True, kw_only=True)
class WeightsFile(Fields):
    """A file that a run read: weights, text encoder and tokenizer, or the file in their place."""

    name: str
    size: int  # bytes
    sampled_sha256: str  # wan.checkpoint.sampled_sha256


@dataclass(frozen=True, kw_only=True)
class Cache(Fields, ABC):
    """The fields of every format."""

    format: str
    schema_version: int
    prompt: str
    seed: int | None
    num_frames: int  # latent frames
    num_frame_per_block: int
    frame_seq_length: int
    block_sizes: Annotated[list[int], "int [blocks]"]
    num_heads: int
    model: str
    weights: str  # one of WEIGHTS
    weights_file: str | None
    weights_sha256: str | None
    files: list[WeightsFile] | None = None
    config: dict[str, Any] | None = None  # settings of the rollout that have no field of their own
    versions: dict[str, str] | None = None  # by package
    device: str | None = None  # cpu, or the GPU's name
    gpus: int | None = None  # how many made it together, where more than one: bits differ with their number
    dtype: str | None = None  # of generation
    attention: str | None = None  # a GPU's kernel of attention
    is_logits: bool
    quantity: str | None = None  # one of QUANTITIES where is_logits leaves it open
    read_by: str | None = None  # the first version of this project that reads this schema
    fingerprint: str | None = None  # of the settings of a sweep
    partial: bool | None = None  # stopped after blocks_done blocks, or before some steps of the base model
    blocks_done: int | None = None
    interventions: dict[str, Any] | None = None  # edits, the same in words, and a hash: the run was edited
    # of a rolling window: the timestep of every step, which is that of a block of the window too
    rolling_timesteps: Annotated[list[float] | None, "float [steps]"] = None
    notes: Annotated[list[str] | None, "str [notes]"] = None  # such as a guess about an older file

    @property
    def done(self) -> int:
        """How many blocks were finished."""
        return len(self.block_sizes) if self.blocks_done is None else self.blocks_done

    @property
    def ahead(self) -> int:
        """How many blocks after its own a query may see."""
        return len(self.rolling_timesteps or [0.0]) - 1

    @abstractmethod
    def passes(self) -> list[PassTag]:
        """The passes that a cache holds of its last block, in its order."""

    def validate(self) -> None:
        """Raise CacheError for the first field that is missing, of a wrong type or shape, or inconsistent."""
        values = self.to_dict()
        _check_version(values)
        check_texts(values)
        check_counts(values)
        check_fields(values, self.table())
        self._check()

    def _check(self) -> None:
        """What the fields' types and shapes do not show. Each format adds its own."""
        blocks, done = self.block_sizes, self.done
        if not 1 <= done <= len(blocks) or (self.blocks_done is not None and not self.partial):
            raise CacheError(f"blocks_done is {done}, not in 1..{len(blocks)} of a partial cache")
        if sum(blocks) != self.num_frames or min(blocks, default=0) < 1:
            raise CacheError(f"block_sizes {blocks} do not add up to num_frames {self.num_frames}")
        for name, value, allowed in (
            ("weights", self.weights, WEIGHTS),
            ("quantity", self.quantity, (None, *QUANTITIES)),
        ):
            if value not in allowed:
                raise CacheError(f"{name} is {value!r}, not one of {', '.join(filter(None, allowed))}")


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

    def _check_pass(self, where: str = "") -> None:
        check_numbers({"step": self.step, "timestep": self.timestep}, where)


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
    """The token matrix of a call: logits or probabilities. Files know both, and the layer, by older names."""

    in_files: ClassVar[Mapping[str, str]] = {
        "layer": "layer_idx",
        "token_logits": "attn_logits",
        "token_probabilities": "attn_weights",
    }

    layer: int
    is_logits: bool
    # Since schema_version 2, where keys are not those of key_frames in order: what each key is.
    key_frame: Annotated[Tensor | None, "i32 [keys]"] = None  # -1 an average, -2 zeros
    key_token: Annotated[Tensor | None, "i32 [keys]"] = None  # index in its frame, row by row
    key_position: Annotated[Tensor | None, "i32 [keys]"] = None  # temporal RoPE index
    token_logits: Annotated[Tensor | None, "f16/f32 [1, H, Lq, Lk] | f16/f32 [1, H, Lq, keys]"] = None
    token_probabilities: Annotated[Tensor | None, "f16/f32 [1, H, Lq, Lk] | f16/f32 [1, H, Lq, keys]"] = None

    @property
    def matrices(self) -> dict[str, Tensor | None]:
        """Logits and probabilities by their names in files."""
        return {"attn_logits": self.token_logits, "attn_weights": self.token_probabilities}

    @property
    def named_keys(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.key_frame, self.key_token, self.key_position


def _check_version(values: Mapping[str, Any]) -> None:
    version = values.get("schema_version")
    if type(version) is int and version < 1:
        raise CacheError(f"schema_version is {version}; they count from 1")
    if type(version) is int and version > SCHEMA_VERSION:
        reader = values.get("read_by")
        needs = f"version {reader}" if type(reader) is str else "a later version"
        raise CacheError(
            f"schema_version {version} is newer than this code's {SCHEMA_VERSION}; "
            f"{needs} of this project reads it (git pull)"
        )
