"""What is kept of one call by frame, whatever its keys are: frames, averages of frames, or chosen tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from wan.modules import reductions
from wan.modules.key_layout import KeyLayout
from wan.modules.key_segments import Gathering, key_frames, key_tokens, segments_of
from wan.modules.rope import RotaryTable


class Call(NamedTuple):
    """One call of self-attention: q [B, Lq, H, D], k [B, Lk, H, D], lse [B, H, Lq].

    tails [2, B, H, slots, Lq] are what the attention kernel itself knows of the mass. exchanged: q came from
    other processes, into memory that the next layer takes too.
    """

    q: Tensor
    k: Tensor
    lse: Tensor
    layout: KeyLayout
    num_query_frames: int
    tails: Tensor | None = None
    exchanged: bool = False


def of_frames(call: Call, means: Tensor, mass: bool, rope_bands: bool) -> dict[str, Tensor]:
    """frame_logits and, where wanted, frame_mass and frame_logits_by_band of a call, [B, H, Fq, Fk].

    means [B, segments, H, D] are mean keys: of slots, and of runs in place of slots of chosen tokens.
    Where a slot is not one frame of its own, slot_logits and slot_mass [B, H, Fq, slots] come with them, and
    tokens_kept [B, Fk]: then frame values are over the kept tokens of a frame, and rows of slot_mass sum to
    1.
    """
    layout = call.layout
    segments = None if layout.is_plain else segments_of(layout)
    parts = {"logits": reductions.frame_logits(call.q, means, call.num_query_frames)}
    if rope_bands:
        bands = list(RotaryTable(call.q.shape[-1]).bands.values())
        by_band = reductions.frame_logits_by_band(call.q, means, call.num_query_frames, bands)
        parts["logits_by_band"] = by_band
    if mass:
        parts["mass"] = mass_of(call)
    if segments is None:
        return {f"frame_{name}": values for name, values in parts.items()}
    values = _gathered(parts, segments.gathering(call.q.device), reductions.kernels_take(call.q))
    return values | {"tokens_kept": segments.tokens_kept.expand(len(call.q), -1).clone()}


def mass_of(call: Call) -> Tensor:
    """Mass of every slot, or segment where some slots hold chosen tokens -> [B, H, Fq, n]."""
    q, k, lse, layout = call.q, call.k, call.lse, call.layout
    if layout.chosen is not None:
        segments, tokens = segments_of(layout), layout.tokens_per_slot
        bounds = segments.gathering(q.device).bounds
        return reductions.segment_mass(
            q, k, lse, call.num_query_frames, bounds, segments.chosen, tokens, call.tails
        )
    if call.tails is not None:
        return reductions.mass_of_tails(call.tails, call.num_query_frames)
    return reductions.frame_mass(q, k, lse, call.num_query_frames, len(layout.slots))


def of_keys(layout: KeyLayout | None, k: Tensor) -> dict[str, Tensor]:
    """key_frame, key_token and key_position of every key, int64 [B, Lk], where key_frames do not say it."""
    if layout is None or layout.is_in_place:
        return {}
    frames, positions = key_frames(layout, len(k))
    return {"key_frame": frames, "key_token": key_tokens(layout, len(k)), "key_position": positions}


def _gathered(parts: dict[str, Tensor], by: Gathering, with_kernel: bool) -> dict[str, Tensor]:
    """Values of segments [B, H, Fq, n] by frame and by slot; logits by band by frame alone."""
    found: dict[str, Tensor] = {}
    if with_kernel:
        from wan.modules import segment_kernel  # Triton is there only beside CUDA

        means, sums = (by.frame_means, by.slot_means), (by.frame_sums, by.slot_sums)
        for name, values in segment_kernel.gathered(parts["logits"], parts.get("mass"), means, sums).items():
            found |= {f"frame_{name}": values[0], f"slot_{name}": values[1]}
    else:
        found |= {
            "frame_logits": parts["logits"] @ by.frame_means,
            "slot_logits": parts["logits"] @ by.slot_means,
        }
        if "mass" in parts:
            found |= {"frame_mass": parts["mass"] @ by.frame_sums, "slot_mass": parts["mass"] @ by.slot_sums}
    if "logits_by_band" in parts:
        bands = [band @ by.frame_means for band in parts["logits_by_band"].unbind(-1)]
        found["frame_logits_by_band"] = torch.stack(bands, -1)
    return found
