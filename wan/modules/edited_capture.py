"""What is kept of a call under edit: of the q and k that its softmax saw, with what was added to its logits.

Knocked-out keys are NaN in logits and 0 in mass. attended, which is bool, tells them from keys that were
never there: [B, H, Fq, Fk], [B, H, Lk], or [B, H, 1, Lk] beside token matrices.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wan.modules import reductions
from wan.modules.edited_call import EditedCall
from wan.modules.frame_reductions import of_keys
from wan.modules.host_copies import picked, send
from wan.modules.key_layout import KeyLayout
from wan.modules.key_maps import key_maps, of_chosen_heads, word_map
from wan.modules.key_segments import key_frames, segments_of
from wan.modules.rope import RotaryTable

if TYPE_CHECKING:
    from wan.modules.capture import CaptureRequest


def edited_values(request: "CaptureRequest", call: EditedCall, lse: Tensor) -> dict[str, Tensor]:
    """The quantities that a request asks for, of a call with other keys or a bias; lse [B, H, Lq]."""
    q, k, bias = call.q, call.k, call.bias
    on_host = None if bias is None else bias.per_token()
    per_token = None if on_host is None else send(on_host, q.device)
    if request.granularity == "token":
        name = "token_logits" if request.is_logits else "token_probabilities"
        matrix = reductions.token_matrix(q, k, request.is_logits, request.token_dtype, bias=per_token)
        attended = _attended((*matrix.shape[:2], 1, matrix.shape[3]), on_host, q.device)
        return {name: matrix} | attended | of_keys(call.layout, k)
    if request.granularity == "key":
        curve = _biased(reductions.key_curve(q, k), per_token)
        return {"key_curve": curve} | _attended(curve.shape, on_host, q.device) | of_keys(call.layout, k)
    if request.granularity == "map":
        return _maps(request, call, lse, on_host)
    num_query_frames = len(call.at.query_frames)
    if call.site.kind == "cross":
        mass = reductions.token_mass(q, k, num_query_frames, per_token)
        return {"cross_mass": mass} | _attended(mass.shape, on_host, q.device)
    return _frames(request, call, lse, num_query_frames)


def _maps(request: "CaptureRequest", call: EditedCall, lse: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    """Maps of the chosen heads; lse [B, H, Lq], bias [H, Lk] on the host."""

    def of(heads: list[int]) -> dict[str, Tensor]:
        q, k = picked(call.q, heads, 2), picked(call.k, heads, 2)
        chosen = None if bias is None else picked(bias, heads, 0)
        added = None if chosen is None else send(chosen, q.device)
        if call.site.kind == "cross":
            return {"word_map": word_map(q, k, request.num_words, added)}
        S = call.known.tokens_per_slot
        maps = key_maps(q, k, picked(lse, heads, 1), request.queries, call.at.query_frames, S, added)
        return maps | _attended((*maps["map_mass"].shape[:2], 1, k.shape[1]), chosen, q.device)

    return of_chosen_heads(request.heads, call.shard, of)


def _frames(
    request: "CaptureRequest", call: EditedCall, lse: Tensor, num_query_frames: int
) -> dict[str, Tensor]:
    q, k = call.q, call.k
    if call.layout is None:
        raise ValueError(f"layer {call.site.layer}: self-attention was called without the layout of its keys")
    if call.of_heads is not None and not call.layout.is_plain:
        raise ValueError(
            "what edits change is captured under cache_policy per_head for classes of whole frames alone"
        )
    if not call.layout.is_plain:
        return _mixed_frames(request, call, call.layout, num_query_frames)
    slots = len(call.layout.slots)
    on_host = None if call.bias is None else call.bias.values
    per_slot = None if on_host is None else send(on_host, q.device)
    means = reductions.frame_means(k, slots)
    logits = _biased(reductions.frame_logits(q, means, num_query_frames), per_slot)
    values = {"frame_logits": logits} | _attended(logits.shape, on_host, q.device)
    if request.rope_bands:
        bands = list(RotaryTable(q.shape[-1]).bands.values())
        by_band = reductions.frame_logits_by_band(q, means, num_query_frames, bands)
        if "attended" in values:  # a bias belongs to no band: only what was left out shows here
            by_band = by_band.masked_fill(~values["attended"][..., None], torch.nan)
        values["frame_logits_by_band"] = by_band
    if request.mass:
        values["frame_mass"] = reductions.frame_mass(q, k, lse, num_query_frames, slots, per_slot)
    return values


def _mixed_frames(
    request: "CaptureRequest", call: EditedCall, layout: KeyLayout, num_query_frames: int
) -> dict[str, Tensor]:
    """What frame_reductions.of_frames keeps, token by token, because an edit may leave some of them out."""
    q, k, segments = call.q, call.k, segments_of(layout)
    on_host = None if call.bias is None else call.bias.per_token()
    bias = None if on_host is None else send(on_host, q.device)
    frames = key_frames(layout, len(k))[0]
    slots = (torch.arange(k.shape[1]) // layout.tokens_per_slot).expand_as(frames)
    logits = _biased(reductions.frame_logits(q, k.float(), num_query_frames), bias)  # [B, H, Fq, Lk]
    mass = reductions.token_mass(q, k, num_query_frames, bias) if request.mass else None
    values = {"tokens_kept": segments.tokens_kept.expand(len(k), -1).clone()}
    for kind, names, columns in (
        ("frame", frames, segments.columns),
        ("slot", slots, range(len(layout.slots))),
    ):
        members = (names[:, :, None] == torch.tensor(columns)).float()[:, None]  # [B, 1, Lk, n]
        members = send(members, q.device)
        values[f"{kind}_logits"] = _visible_mean(logits, members)
        if mass is not None:
            values[f"{kind}_mass"] = mass @ members
        if kind == "frame" and request.rope_bands:
            sizes = list(RotaryTable(q.shape[-1]).bands.values())
            by_band = reductions.frame_logits_by_band(q, k.float(), num_query_frames, sizes)
            out = logits.isnan()
            parts = [_visible_mean(band.masked_fill(out, torch.nan), members) for band in by_band.unbind(-1)]
            values["frame_logits_by_band"] = torch.stack(parts, -1)
    if on_host is not None and not on_host.isfinite().all():
        values["attended"] = ~values["frame_logits"].isnan()
    return values


def _visible_mean(logits: Tensor, members: Tensor) -> Tensor:
    """Mean over the members [B, 1, Lk, n] that are not NaN of logits [B, H, Fq, Lk]; NaN where all are."""
    return (logits.nan_to_num() @ members) / ((~logits.isnan()).float() @ members)


def _biased(logits: Tensor, bias: Tensor | None) -> Tensor:
    """Logits [B, H, ..., keys] plus a bias [H, keys], NaN where it is -inf."""
    if bias is None:
        return logits
    bias = bias.view(bias.shape[0], *[1] * (logits.ndim - 3), bias.shape[1])
    return (logits + bias).masked_fill(bias == -torch.inf, torch.nan)


def _attended(shape: Sequence[int], bias: Tensor | None, device: torch.device) -> dict[str, Tensor]:
    """Which keys were attended, bool of this shape [B, H, ..., keys]; nothing where all were.

    The bias [H, keys] is on the host, which thus need not ask the device.
    """
    if bias is None or bias.isfinite().all():
        return {}
    view = send(bias.isfinite(), device).view(bias.shape[0], *[1] * (len(shape) - 3), bias.shape[1])
    return {"attended": view.expand(shape).clone()}
