"""The formats with token matrices: figure4, an entry per layer, and inference, an entry per captured call."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from torch import Tensor

from experiments.caches.common import Cache, OnePass, PassTag, Tokens
from experiments.caches.errors import CacheError
from experiments.caches.value_checks import (
    check_any_of,
    check_block,
    check_frames,
    check_keys,
    check_numbers,
    check_values,
)


@dataclass(frozen=True, kw_only=True)
class Figure4Layer(Tokens):
    """One layer of a figure4 cache. What it says again of its cache comes from repeated()."""

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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The entry of a dict; attn_weights that are attn_logits under another name are left out."""
        logits, weights = (values.get(name) for name in ("attn_logits", "attn_weights"))
        if isinstance(logits, Tensor) and isinstance(weights, Tensor) and _one_tensor(logits, weights):
            values = {name: value for name, value in values.items() if name != "attn_weights"}
        return super().from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """The dict of a file: logits under both names that older notebooks read, one tensor."""
        values = super().to_dict()
        if "attn_logits" in values and "attn_weights" not in values:
            values["attn_weights"] = values["attn_logits"]
        return values

    @staticmethod
    def repeated(
        num_frames: int,
        frame_seq_length: int,
        num_heads: int,
        query_frames: Sequence[int],
        key_frames: Sequence[int],
    ) -> dict[str, int]:
        """The fields that follow from those of the cache."""
        return {
            "num_frames": num_frames,
            "frame_seq_length": frame_seq_length,
            "num_heads": num_heads,
            "num_query_frames": len(query_frames),
            "num_key_frames": len(key_frames),
            "last_block_start_frame": query_frames[0],
        }


@dataclass(frozen=True, kw_only=True)
class Figure4Cache(OnePass, Cache):
    """The last block's attention of some layers, in one pass."""

    in_files: ClassVar[Mapping[str, str]] = {"entries": "attention_weights"}
    any_of: ClassVar = ("attn_logits", "attn_weights", "key_curve", "frame_logits", "frame_mass")

    entries: list[Figure4Layer]  # attention_weights in files
    layer_indices: Annotated[list[int], "int [N]"]
    capture_method: str
    query_frames: Annotated[list[int], "int [Fq]"]
    key_frames: Annotated[list[int], "int [Fk]"]

    def _check(self) -> None:
        super()._check()
        frames = {"query_frames": self.query_frames, "key_frames": self.key_frames}
        self._check_pass()
        check_frames(frames, self.num_frames)
        _check_entries(self.entries, self.layer_indices, self.any_of)
        for where, entry in _named(self.entries):
            for name, said in entry.repeated(
                self.num_frames, self.frame_seq_length, self.num_heads, **frames
            ).items():
                if getattr(entry, name) != said:
                    raise CacheError(f"{where}{name} is {getattr(entry, name)}, and the cache says {said}")
            check_block(where, self.block_sizes, None, **frames, ahead=self.ahead)
            if entry.token_logits is not None and entry.token_probabilities is not None:
                raise CacheError(f"{where}attn_weights is another tensor than attn_logits")
            by_keys = {"key_curve": entry.key_curve, **entry.matrices}
            sizes = self.num_frames, self.frame_seq_length, len(self.key_frames)
            check_keys(entry.named_keys, by_keys, *sizes, where)
            mass = {"frame_mass": entry.frame_mass} if entry.slot_mass is None else {}  # averages have mass
            check_values({"frame_logits": entry.frame_logits, "slot_mass": entry.slot_mass} | mass, where)


@dataclass(frozen=True, kw_only=True)
class InferenceCall(OnePass, Tokens):
    """One captured call of an inference cache."""

    block: int | None
    query_frames: Annotated[list[int], "int [Fq]"]
    key_frames: Annotated[list[int], "int [Fk]"]
    q_shape: Annotated[list[int], "int [four]"]
    k_shape: Annotated[list[int], "int [four]"]

    def check(self, cache: "InferenceCache", where: str) -> None:
        """Raise CacheError where a call's numbers are not those of its cache and its block."""
        self._check_pass(where)
        check_numbers({"block": self.block}, where)
        frames = {"query_frames": self.query_frames, "key_frames": self.key_frames}
        check_frames(frames, cache.num_frames, where)
        check_block(where, cache.block_sizes, self.block, **frames, ahead=cache.ahead)
        S = cache.frame_seq_length
        check_keys(self.named_keys, self.matrices, cache.num_frames, S, len(self.key_frames), where)
        asks, seen = (f"{len(x)} frames of {S} tokens" for x in (self.query_frames, self.key_frames))
        keys = len(self.key_frames) * S
        if self.key_frame is not None:
            keys, seen = len(self.key_frame), f"{len(self.key_frame)} keys"
        for name, shape, tokens, words in (
            ("q_shape", self.q_shape, len(self.query_frames) * S, asks),
            ("k_shape", self.k_shape, keys, seen),
        ):
            if shape[1:3] != [tokens, cache.num_heads]:
                raise CacheError(f"{where}{name} {shape} is not [B, {words}, {cache.num_heads} heads, D]")


@dataclass(frozen=True, kw_only=True)
class InferenceCache(Cache):
    """Captured calls in the order of the rollout, as token matrices."""

    in_files: ClassVar[Mapping[str, str]] = {"entries": "attention_weights"}
    any_of: ClassVar = ("attn_logits", "attn_weights")

    entries: list[InferenceCall]  # attention_weights in files
    layer_indices: Annotated[list[int], "int [N]"]
    num_transformer_blocks: int

    def last_calls(self) -> list[InferenceCall]:
        """The calls of the last block that was captured."""
        block = max(call.block or 0 for call in self.entries)
        return [call for call in self.entries if (call.block or 0) == block]

    def passes(self) -> list[PassTag]:
        return list(dict.fromkeys(call.tag for call in self.last_calls()))

    def _check(self) -> None:
        super()._check()
        _check_entries(self.entries, self.layer_indices, self.any_of)
        for where, call in _named(self.entries):
            call.check(self, where)


def _one_tensor(a: Tensor, b: Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.dtype) == (b.data_ptr(), b.shape, b.dtype)


def _named(entries: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Every entry of attention_weights with the beginning of a message about it."""
    return ((f"attention_weights[{i}].", entry) for i, entry in enumerate(entries))


def _check_entries(entries: Sequence[Tokens], layers: list[int], any_of: Sequence[str]) -> None:
    """Every entry holds values of a layer that is announced, and every layer has one."""
    check_numbers({"layer_indices": layers})
    for where, entry in _named(entries):
        check_any_of(entry.to_dict(), any_of, where)
        check_numbers({"layer_idx": entry.layer}, where)
    found = {entry.layer for entry in entries}
    if found != set(layers):
        raise CacheError(f"layer_indices {layers} are not the layers of attention_weights, {sorted(found)}")
