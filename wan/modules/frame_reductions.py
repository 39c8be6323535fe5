"""What is kept of one call by frame, whatever its keys are: frames, averages of frames, or chosen tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from wan.modules import reductions
from wan.modules.key_layout import KeyLayout
from wan.modules.key_segments import key_frames, key_tokens, segments_of
from wan.modules.rope import RotaryTable


class Call(NamedTuple):
    """One call of self-attention: q [B, Lq, H, D], k [B, Lk, H, D], lse [B, H, Lq].

    slot_means [B, slots, H, D] are mean keys, chosen_means [B, n, H, D] those of segments of chosen tokens,
    tails [2, B, H, Fk, Lq] what the attention kernel itself knows of the mass.
    """

    q: Tensor
    k: Tensor
    lse: Tensor
    layout: KeyLayout
    slot_means: Tensor
    num_query_frames: int
    chosen_means: Tensor | None = None
    tails: Tensor | None = None


def of_frames(call: Call, mass: bool, rope_bands: bool) -> dict[str, Tensor]:
    """frame_logits and, where wanted, frame_mass and frame_logits_by_band of a call, [B, H, Fq, Fk].

    Where a slot is not one frame of its own, slot_logits and slot_mass [B, H, Fq, slots] come with them, and
    tokens_kept [B, Fk]: then frame values are over the kept tokens of a frame, and rows of slot_mass sum to
    1.
    """
    layout = call.layout
    segments = None if layout.is_plain else segments_of(layout)
    means = call.slot_means
    if layout.chosen is not None:
        assert call.chosen_means is not None
        at = layout.chosen.slots
        means = torch.cat([means[:, : at.start], call.chosen_means, means[:, at.stop :]], 1)
    parts = {"logits": reductions.frame_logits(call.q, means, call.num_query_frames)}
    if rope_bands:
        bands = list(RotaryTable(call.q.shape[-1]).bands.values())
        by_band = reductions.frame_logits_by_band(call.q, means, call.num_query_frames, bands)
        parts["logits_by_band"] = by_band
    if mass:
        if call.tails is not None:
            parts["mass"] = reductions.mass_of_tails(call.tails, call.num_query_frames)
        elif layout.chosen is None or segments is None:
            parts["mass"] = reductions.frame_mass(
                call.q, call.k, call.lse, call.num_query_frames, len(layout.slots)
            )
        else:
            parts["mass"] = reductions.segment_mass(
                call.q,
                call.k,
                call.lse,
                call.num_query_frames,
                segments.gathering(call.q.device).bounds,
                segments.chosen,
                layout.tokens_per_slot,
            )
    if segments is None:
        return {f"frame_{name}": values for name, values in parts.items()}
    gather = segments.gathering(call.q.device)
    values = _gathered(parts, "frame", gather.frame_sums, gather.frame_means)
    values |= _gathered(parts, "slot", gather.slot_sums, gather.slot_means)
    values.pop("slot_logits_by_band", None)
    return values | {"tokens_kept": segments.tokens_kept.expand(len(call.q), -1).clone()}


def of_keys(layout: KeyLayout | None, k: Tensor) -> dict[str, Tensor]:
    """key_frame, key_token and key_position of every key, int64 [B, Lk], where key_frames do not say it."""
    if layout is None or layout.is_in_place:
        return {}
    frames, positions = key_frames(layout, len(k))
    return {"key_frame": frames, "key_token": key_tokens(layout, len(k)), "key_position": positions}


def _gathered(parts: dict[str, Tensor], kind: str, sums: Tensor, means: Tensor) -> dict[str, Tensor]:
    """Values of segments by frame or by slot, whichever the matrices [B or 1, 1, segments, n] are of."""
    found = {f"{kind}_logits": parts["logits"] @ means}
    if "logits_by_band" in parts:
        bands = [band @ means for band in parts["logits_by_band"].unbind(-1)]
        found[f"{kind}_logits_by_band"] = torch.stack(bands, -1)
    if "mass" in parts:
        found[f"{kind}_mass"] = parts["mass"] @ sums
    return found
