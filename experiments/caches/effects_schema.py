"""The formats of what interventions did: one edited run, and the same edit on every head, layer or frame."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from experiments.caches.common import Cache, PassTag
from experiments.caches.errors import CacheError
from experiments.caches.value_checks import check_numbers


@dataclass(frozen=True, kw_only=True)
class EffectsCache(Cache):
    """A run, edited and not, with the same noise. Distances are RMS differences of x0 per frame."""

    latents_base: Annotated[Tensor, "f16/f32 [F, C, h, w]"]
    latents_edited: Annotated[Tensor, "f16/f32 [F, C, h, w]"]
    between_seeds: Annotated[
        Tensor, "f32 [F]"
    ]  # distance of the base run to another seed: the unit of effects
    direct: Annotated[Tensor | None, "f32 [F]"] = None  # past of the base run, only this block edited
    own_block: Annotated[Tensor, "f32 [F]"]  # all passes of the first edited block, edited there alone
    total: Annotated[Tensor, "f32 [F]"]  # the edited rollout
    floor: Annotated[Tensor, "f32 [F]"]  # the rollout with noise of 1e-6, or another attention backend
    psnr: Annotated[Tensor | None, "f32 [video]"] = None  # of the two videos, per video frame
    ssim: Annotated[Tensor | None, "f32 [video]"] = None
    questions: Annotated[list[str] | None, "str [Q]"] = None  # of the miniature's tracker
    answers_base: Annotated[Tensor | None, "mask [Q]"] = None  # its answers for the unedited video
    answers_edited: Annotated[Tensor | None, "mask [Q]"] = None

    def passes(self) -> list[PassTag]:
        return []

    def _check(self) -> None:
        super()._check()
        if not self.interventions:
            raise CacheError("an effects cache says what was edited, and interventions is missing")


@dataclass(frozen=True, kw_only=True)
class CausalAtlasCache(Cache):
    """Direct effects of one edit on every unit. R runs, N layers, U units; NaN: nothing to edit there."""

    prompts: Annotated[list[str], "str [R]"]
    seeds: Annotated[list[int], "int [R]"]
    each: str  # what a unit is: head, layer or frame
    layers: Annotated[list[int], "int [N]"]  # one, of value 0, where frames are edited in all layers
    units: Annotated[list[int], "int [U]"]
    effects: Annotated[Tensor, "f32 [R, N, U, F]"]  # in units of the distance between seeds
    between_seeds: Annotated[Tensor, "f32 [R, F]"]
    floor: Annotated[Tensor, "f32 [R, F]"]
    frame_control: Annotated[Tensor | None, "f32 [R, N, U, F]"] = (
        None  # the same edit on a random earlier frame
    )
    head_control: Annotated[Tensor | None, "f32 [R, N, U, F]"] = None  # on a random other head of the layer
    head_norms: Annotated[Tensor | None, "f32 [R, N, U]"] = None  # mean ‖z‖ in the base run

    def passes(self) -> list[PassTag]:
        return []

    def _check(self) -> None:
        super()._check()
        if self.each not in ("head", "layer", "frame"):
            raise CacheError(f"each is {self.each!r}, not one of head, layer, frame")
        check_numbers({"layers": self.layers, "units": self.units})
        if not self.interventions:
            raise CacheError("a causal atlas says what was edited, and interventions is missing")
        if (self.effects < 0).any() or self.effects.isinf().any():
            raise CacheError("effects has values that are negative or infinite; absent is NaN")
