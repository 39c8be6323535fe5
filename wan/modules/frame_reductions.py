"""What is kept of one call by frame, whatever its keys are: frames, averages of frames, or chosen tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from wan.modules import reductions
from wan.modules.key_layout import KeyLayout
from wan.modules.key_segments import KeySegments, averaged, key_frames, segments_of, summed
from wan.modules.rope import RotaryTable


class Call(NamedTuple):
    """One call of self-attention: q [B, Lq, H, D], k [B, Lk, H, D], lse [B, H, Lq], slot_means [B, slots, H,
    D].
    """

    q: Tensor
    k: Tensor
    lse: Tensor
    layout: KeyLayout
    slot_means: Tensor
    num_query_frames: int


def of_frames(call: Call, mass: bool, rope_bands: bool) -> dict[str, Tensor]:
    """frame_logits and, where wanted, frame_mass and frame_logits_by_band of a call, [B, H, Fq, Fk].

    Where a slot is not one frame of its own, slot_logits and slot_mass [B, H, Fq, slots] come with them, and
    tokens_kept [B, Fk]: then frame values are over the kept tokens of a frame, and rows of slot_mass sum to
    1.
    """
    layout = call.layout
    segments = None if layout.is_plain else segments_of(layout)
    means = call.slot_means if layout.chosen is None or segments is None else _segment_means(call, segments)
    parts = {"logits": reductions.frame_logits(call.q, means, call.num_query_frames)}
    if rope_bands:
        bands = list(RotaryTable(call.q.shape[-1]).bands.values())
        by_band = reductions.frame_logits_by_band(call.q, means, call.num_query_frames, bands)
        parts["logits_by_band"] = by_band
    if mass:
        if layout.chosen is None or segments is None:
            parts["mass"] = reductions.frame_mass(
                call.q, call.k, call.lse, call.num_query_frames, len(layout.slots)
            )
        else:
            parts["mass"] = reductions.segment_mass(
                call.q, call.k, call.lse, call.num_query_frames, segments.bounds
            )
    if segments is None:
        return {f"frame_{name}": values for name, values in parts.items()}
    values = _gathered(parts, segments, "frame", segments.by_frame())
    values |= _gathered(parts, segments, "slot", segments.by_slot())
    values.pop("slot_logits_by_band", None)
    return values | {"tokens_kept": segments.tokens_kept().expand(len(call.q), -1).clone()}


def of_keys(layout: KeyLayout | None, k: Tensor) -> dict[str, Tensor]:
    """key_frame and key_position of every key, int64 [B, Lk], where slots do not say it."""
    if layout is None or layout.is_plain:
        return {}
    frames, positions = key_frames(layout, len(k))
    return {"key_frame": frames, "key_position": positions}


def _gathered(
    parts: dict[str, Tensor], segments: KeySegments, kind: str, members: Tensor
) -> dict[str, Tensor]:
    """Values of segments by frame or by slot, whichever the members [B or 1, segments, n] are."""
    found = {f"{kind}_logits": averaged(parts["logits"], members, segments.tokens)}
    if "logits_by_band" in parts:
        bands = [averaged(band, members, segments.tokens) for band in parts["logits_by_band"].unbind(-1)]
        found[f"{kind}_logits_by_band"] = torch.stack(bands, -1)
    if "mass" in parts:
        found[f"{kind}_mass"] = summed(parts["mass"], members)
    return found


def _segment_means(call: Call, segments: KeySegments) -> Tensor:
    """Mean key of each segment [B, segments, H, D];
    whole slots are known, those of chosen tokens are averaged here.
    """
    chosen, S = call.layout.chosen, call.layout.tokens_per_slot
    assert chosen is not None
    tokens = call.k[:, chosen.slots.start * S : chosen.slots.stop * S].float()  # [B, n, H, D]
    place = torch.arange(tokens.shape[1]) + chosen.slots.start * S
    bounds = segments.bounds
    inside = (place >= bounds[:, :-1, None]) & (place < bounds[:, 1:, None])  # [B, segments, n]
    weights = inside.float() / segments.tokens.clamp(min=1)[:, :, None]
    means = torch.einsum("bsn,bnhd->bshd", weights.to(tokens.device), tokens)
    for item, parts in enumerate(segments.items):
        whole = [(i, part.slot) for i, part in enumerate(parts) if part.slot not in chosen.slots]
        at, slots = (torch.tensor(indices, device=tokens.device) for indices in zip(*whole, strict=True))
        means[item, at] = call.slot_means[item, slots]
    return means
