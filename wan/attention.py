"""The one place where softmax(q kᵀ / √D) v is computed, and the hook that observes it.

Plain and captured runs make the same fused call, which returns its log-sum-exp (LSE) anyway, so looking
changes no bit of what is generated. What is kept is computed beside it, from q, k and that LSE
(wan/reductions.py).
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from wan import backends as attention_backend
from wan.backends import attend_by_groups
from wan.captured_call import HeadGroup, Site
from wan.edits import ACTIVE_EDITS, EditedCall
from wan.keys import KeyLayout
from wan.legacy_api import OlderCapture

MaskedAttention = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # of q, k, v [B, H, L, D], under a mask of its own

ATTENTION_WEIGHT_CAPTURE = OlderCapture()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    site: Site | None = None,
    mask: Tensor | MaskedAttention | None = None,
    layout: KeyLayout | None = None,
) -> Tensor:
    """Multi-head attention of queries [B, Lq, H, D] over keys and values [B, Lk, H, D] -> [B, Lq, H, D].

    mask [Lq, Lk] (True: may attend), or attention that knows its mask, is for training. site says who calls
    and layout what the keys are, for whoever observes the call.
    """
    if site is not None and ACTIVE_EDITS.active:
        return _edited_attention(
            ACTIVE_EDITS.begin(site, ATTENTION_WEIGHT_CAPTURE.now, layout, q, k, v), mask
        )
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]  # [B, H, L, D]
    if mask is not None and not isinstance(mask, Tensor):
        if ATTENTION_WEIGHT_CAPTURE.active:
            raise ValueError("a training step is captured with a mask [Lq, Lk]")
        return mask(*heads_first).transpose(1, 2)
    observed = site if ATTENTION_WEIGHT_CAPTURE.active else None
    tails = None
    if mask is not None:
        out, lse = masked_attention_with_lse(heads_first[0], heads_first[1], heads_first[2], mask)
    elif observed is None:
        out, lse = attention_with_lse(*heads_first)  # [B, H, Lq, D], [B, H, Lq]
    else:
        out, lse, tails = _attention_with_tails(observed, layout, heads_first)
    if observed is not None:
        ATTENTION_WEIGHT_CAPTURE.observe(observed, q, k, lse, layout, mask, tails)
    return out.transpose(1, 2)  # [B, Lq, H, D]


def _attention_with_tails(
    site: Site, layout: KeyLayout | None, heads_first: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """attention_with_lse(), bit for bit, and what its kernel knows of a mass that is asked for."""
    q, k, v = heads_first
    if attention_backend.gives_tails(q, k, v):
        frames = ATTENTION_WEIGHT_CAPTURE.frames_weighed(site, layout)
        if 0 < frames * attention_backend.TILE <= k.shape[2]:
            return attention_backend.fa4_with_tails(q, k, v, frames)
    return *attention_with_lse(q, k, v), None


def attention_by_heads(groups: Sequence[HeadGroup], site: Site) -> Tensor:
    """attention() of heads that see keys of their own: groups of h heads each -> [B, Lq, H, D]."""
    batch, len_q, _, head_dim = groups[0].q.shape
    num_heads = sum(len(group.heads) for group in groups)
    out, lses = groups[0].q.new_empty(batch, len_q, num_heads, head_dim), []
    edited: list[EditedCall] = []
    for group in groups:
        if ACTIVE_EDITS.active:
            heads, at = group.numbers, ATTENTION_WEIGHT_CAPTURE.now
            call = ACTIVE_EDITS.begin(site, at, group.layout, group.q, group.k, group.v, heads, num_heads)
            seen, lse = _edited_softmax(call)
            out[:, :, group.heads] = call.finish(seen)  # before the next: a source stops in each call
            edited.append(call)
        else:
            seen, lse = attention_with_lse(*(x.transpose(1, 2) for x in (group.q, group.k, group.v)))
            out[:, :, group.heads] = seen.transpose(1, 2)
        lses.append(lse)
    if ATTENTION_WEIGHT_CAPTURE.active:
        ATTENTION_WEIGHT_CAPTURE.observe_groups(site, groups, lses, edited)
    return out


def _edited_attention(call: EditedCall, mask: Tensor | MaskedAttention | None) -> Tensor:
    """attention() of a call as edits left it; what is captured is what the softmax saw."""
    if mask is not None:
        raise ValueError("edits are of rollouts: a training step with a mask takes none")
    out, lse = _edited_softmax(call)
    if ATTENTION_WEIGHT_CAPTURE.active:
        ATTENTION_WEIGHT_CAPTURE.observe_edited(call, lse)
    return call.finish(out)


def _edited_softmax(call: EditedCall) -> tuple[Tensor, Tensor]:
    """Output [B, Lq, H, D] and log-sum-exp [B, H, Lq] of a call's q, k and v under its bias."""
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    if call.bias is None:
        out, lse = attention_with_lse(q, k, v)
    else:
        out, lse = attend_by_groups(attention_with_lse, q, k, v, call.bias)
    return out.transpose(1, 2), lse


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Fused attention over [B, H, L, D] and its natural log-sum-exp of q·k/√D, float32 [B, H, Lq].

    The backend follows from device, dtype and sizes (attention_backend.py says which GPU kernel): never from
    whether anybody is looking.
    """
    aten = torch.ops.aten
    if q.device.type == "cpu":  # bit for bit what F.scaled_dot_product_attention returns there
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    if q.device.type == "cuda" and attention_backend.takes(q, k, v):
        return attention_backend.fa4_attention(q, k, v)
    if not attention_backend.kernels_can_read(q):
        return _attention_by_formula(q, k, v)
    if q.device.type == "cuda" and q.dtype in attention_backend.HALF:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
        return out, lse.reshape(q.shape[:3])
    if q.device.type == "cuda" and q.dtype == torch.float32:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
        return out, lse[..., : q.shape[2]]  # its rows are padded to 32
    return _attention_by_formula(q, k, v)


def masked_attention_with_lse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """attention_with_lse under a mask [Lq, Lk], True where a query may attend; every query has a key."""
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
    aten = torch.ops.aten
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)
    if q.device.type == "cuda" and q.dtype != torch.float64 and attention_backend.kernels_can_read(q):
        padded = F.pad(bias, (0, -bias.shape[1] % 16))[
            :, : bias.shape[1]
        ]  # rows must start at multiples of 16
        padded = padded.expand(*q.shape[:2], *bias.shape)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, padded, True)
        return out, lse[..., : q.shape[2]]
    return _attention_by_formula(q, k, v, bias)


def _attention_by_formula(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """attention_with_lse in plain products, for other devices and sizes; logits are float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = (q.to(wide) @ k.to(wide).mT).float() * q.shape[-1] ** -0.5
    if bias is not None:
        logits = logits + bias
    lse = logits.logsumexp(-1)
    return (logits - lse[..., None]).exp().to(v.dtype) @ v, lse
