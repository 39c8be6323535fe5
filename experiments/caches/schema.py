"""What is in each kind of .pt cache: a dataclass per format, whose fields are the table, and its own check.

Letters of lengths: H heads, F frames, S tokens per frame, L = F S, q/k: of the query and key frames, N
layers, P passes. experiments/caches/fields.py says how a field is declared, common.py has the fields of every
format.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torch import Tensor

from experiments.caches.common import SCHEMA_VERSION, Cache, OnePass, PassTag, Sampling
from experiments.caches.effects_schema import CausalAtlasCache, EffectsCache
from experiments.caches.errors import CacheError
from experiments.caches.fields import Table
from experiments.caches.maps_schema import MapsCache
from experiments.caches.token_schema import Figure4Cache, InferenceCache
from experiments.caches.value_checks import (
    check_absent,
    check_any_of,
    check_frames,
    check_keys,
    check_numbers,
    check_once,
    check_values,
)

__all__ = [
    "FORMATS",
    "SCHEMA_VERSION",
    "AtlasCache",
    "Cache",
    "Figure4Cache",
    "InferenceCache",
    "LayerCache",
    "check",
]


@dataclass(frozen=True, kw_only=True)
class LayerCache(Sampling, OnePass, Cache):
    """Every frame pair of one layer, each block in one pass; with guidance its other branch too."""

    layer_index: int
    full_frame_attention: Annotated[Tensor, "f16/f32 [H, F, F]"]
    last_block_frame_attention: Annotated[Tensor, "f16/f32 [H, F]"]
    query_frames: Annotated[list[int], "int [F]"]
    key_frames: Annotated[list[int], "int [F]"]
    last_block_query_frames: Annotated[list[int], "int [last]"]
    full_frame_attention_uncond: Annotated[Tensor | None, "f16/f32 [H, F, F]"] = None
    # Under some cache policies keys that are averages of frames that are gone, in the order of their slots:
    average_attention: Annotated[Tensor | None, "f16/f32 [H, F, averages]"] = None

    @classmethod
    def build(
        cls,
        common: Mapping[str, Any],
        at: PassTag,
        layer: int,
        matrix: Tensor,
        last_queries: list[int],
        profile: Tensor | None = None,
        uncond: Tensor | None = None,
        averages: Tensor | None = None,
    ) -> "LayerCache":
        """From a run's fields and mean logits [H, F, F]; profile [H, F] is their mean over last_queries.

        averages [H, F, averages] are those of keys that are averages of frames.
        """
        all_frames = list(range(matrix.shape[-1]))
        own = {
            "format": "layer",
            "is_logits": True,
            "layer_index": layer,
            "full_frame_attention": matrix,
            "full_frame_attention_uncond": uncond,
            "last_block_frame_attention": matrix[:, last_queries].mean(1) if profile is None else profile,
            "query_frames": all_frames,
            "key_frames": all_frames,
            "last_block_query_frames": last_queries,
        }
        if uncond is None:
            del own["full_frame_attention_uncond"]
        if averages is not None:
            own["average_attention"] = averages
        return cls.from_dict({**common, **at._asdict(), **own})

    def _check(self) -> None:
        super()._check()
        self._check_pass()
        check_numbers({"layer_index": self.layer_index})
        frames = ("query_frames", "key_frames", "last_block_query_frames")
        check_frames({name: getattr(self, name) for name in frames}, self.num_frames)
        check_absent(
            "full_frame_attention", self.full_frame_attention, self.block_sizes, self.done, self.ahead
        )
        for name in ("full_frame_attention", "last_block_frame_attention"):
            check_values({name: getattr(self, name)})


@dataclass(frozen=True, kw_only=True)
class AtlasCache(Sampling, Cache):
    """A whole rollout at frame level."""

    any_of: ClassVar = ("frame_logits", "frame_mass", "last_block_frame_logits")

    layers: Annotated[list[int], "int [N]"]
    pass_timesteps: Annotated[list[float] | Tensor, "float [P] | f32 [P]"]
    pass_steps: Annotated[list[int] | None, "int [P]"] = None  # all passes of the rollout where absent
    pass_is_clean: Annotated[list[bool] | None, "bool [P]"] = None  # t == 0 where absent
    frame_logits: Annotated[Tensor | None, "f16/f32 [N, P, H, F, F]"] = None
    frame_mass: Annotated[Tensor | None, "f16/f32 [N, P, H, F, F]"] = None
    attended: Annotated[Tensor | None, "mask [N, P, H, F, F]"] = None  # False: an intervention left it out
    key_curve: Annotated[Tensor | None, "f16/f32 [N, P, H, L] | f16/f32 [N, P, H, keys]"] = None
    cross_mass: Annotated[Tensor | None, "f16/f32 [N, P, H, F, tokens]"] = None
    cross_tokens: Annotated[list[str] | None, "str [tokens]"] = None
    frame_logits_by_band: Annotated[Tensor | None, "f16/f32 [N, P, H, F, F, bands]"] = None
    rope_bands: Annotated[list[str] | None, "str [bands]"] = None  # a time frequency, height or width
    last_block_frame_logits: Annotated[Tensor | None, "f16/f32 [N, P, H, F]"] = None
    frame_logits_error: Annotated[Tensor | list[float] | None, "f32 [N] | float [N]"] = None
    # Since schema_version 2, under policies whose slots are not the frames of a window:
    slot_frame: Annotated[Tensor | None, "i32 [N, blocks, slots]"] = (
        None  # -1 average, -2 zeros, -3 tokens, -9 none
    )
    slot_position: Annotated[Tensor | None, "i32 [N, blocks, slots]"] = (
        None  # temporal RoPE index of the keys
    )
    slot_tokens: Annotated[Tensor | None, "i32 [N, blocks, slots]"] = None
    sink_slots: Annotated[list[int] | None, "int [blocks]"] = None  # how many of the first slots never leave
    memory_slots: Annotated[list[int] | None, "int [blocks]"] = None  # after them, of a bank of frames
    key_frame: Annotated[Tensor | None, "i32 [N, keys]"] = None  # of key_curve, where slots are not frames
    key_token: Annotated[Tensor | None, "i32 [N, keys]"] = None  # index in its frame, row by row
    key_position: Annotated[Tensor | None, "i32 [N, keys]"] = None  # temporal RoPE index; -9 no key
    slot_logits: Annotated[Tensor | None, "f16/f32 [N, P, H, F, slots]"] = None
    slot_mass: Annotated[Tensor | None, "f16/f32 [N, P, H, F, slots]"] = None
    tokens_kept: Annotated[Tensor | None, "i32 [N, blocks, F]"] = (
        None  # of each frame, where tokens are chosen
    )

    def passes(self) -> list[PassTag]:
        timesteps = [float(t) for t in self.pass_timesteps]
        steps = self.pass_steps or range(len(timesteps))
        clean = self.pass_is_clean or [t == 0 for t in timesteps]
        return [PassTag(*tag) for tag in zip(steps, timesteps, clean, strict=True)]

    def _check(self) -> None:
        super()._check()
        check_any_of(self.to_dict(), self.any_of)
        passes = {"pass_steps": self.pass_steps}
        numbers = {"layers": self.layers, "pass_timesteps": self.pass_timesteps}
        check_numbers(numbers | (passes if self.pass_steps is not None else {}))
        check_once({"layers": self.layers} | passes)
        check_keys(
            (self.key_frame, self.key_token, self.key_position),
            {"key_curve": self.key_curve},
            self.num_frames,
            self.frame_seq_length,
            self.num_frames,
        )
        matrices = {"frame_logits": self.frame_logits, "frame_mass": self.frame_mass}
        if self.frame_logits_by_band is not None:
            matrices["frame_logits_by_band"] = self.frame_logits_by_band.movedim(-1, 0)
        for name, matrix in matrices.items():
            if matrix is not None:
                check_absent(name, matrix, self.block_sizes, self.done, self.ahead)
        mass_by_slot = {"frame_mass": None, "slot_mass": self.slot_mass} if self.slot_mass is not None else {}
        check_values(matrices | {"last_block_frame_logits": self.last_block_frame_logits} | mass_by_slot)


@dataclass(frozen=True)
class Format:
    """A format's dataclass, the script that makes one, where it puts it, the notebook that shows one."""

    cache: type[Cache]
    script: str
    notebook: str
    default: str

    @property
    def fields(self) -> Table:
        """The table of fields."""
        return self.cache.table()


FORMATS = {
    "figure4": Format(
        Figure4Cache, "run_extraction_figure4.py", "plt_fig4.ipynb", "attention_cache_figure4.pt"
    ),
    "layer": Format(LayerCache, "run_extraction_each.py", "extract_all_attention.ipynb", "layer3.pt"),
    "inference": Format(InferenceCache, "run_extraction.py", "plot_figure4.ipynb", "attention_cache.pt"),
    "atlas": Format(AtlasCache, "run_extraction_all.py", "layer_atlas.ipynb", "atlas.pt"),
    "maps": Format(MapsCache, "run_extraction_maps.py", "on_the_video.ipynb", "maps.pt"),
    "effects": Format(EffectsCache, "run_intervention.py", "interventions.ipynb", "effects.pt"),
    "causal_atlas": Format(CausalAtlasCache, "run_causal_atlas.py", "interventions.ipynb", "causal_atlas.pt"),
}


def as_cache(values: Mapping[str, Any]) -> Cache:
    """The typed cache of a dict, unchecked. Raises CacheError for a format that is not one of ours."""
    kind = values.get("format")
    if type(kind) is not str or kind not in FORMATS:
        raise CacheError(f"format is {kind!r}, not one of {', '.join(FORMATS)}")
    return FORMATS[kind].cache.from_dict(values)


def check(values: Mapping[str, Any]) -> None:
    """Raise CacheError for the first field that is missing, of a wrong type or shape, or inconsistent."""
    as_cache(values).validate()
