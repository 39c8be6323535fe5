"""The one place where softmax(q kᵀ / √D) v is computed, and the hook that observes it.

Plain and captured runs make the same fused call, which returns its log-sum-exp (LSE) anyway, so looking changes no bit
of what is generated. What is kept is computed beside it, from q, k and that LSE (wan/modules/reductions.py).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.modules.capture import AttentionCapture, Site

ATTENTION_WEIGHT_CAPTURE = AttentionCapture()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    site: Site | None = None,
    mask: Tensor | None = None,
    frame_key_means: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Multi-head attention of queries [B, Lq, H, D] over keys and values [B, Lk, H, D] -> [B, Lq, H, D].

    site says who calls, for the capture. mask [Lq, Lk] (True: may attend) is for training and is not captured.
    frame_key_means gives the mean key per frame [B, Fk, H, D] where the caller keeps them (the KV cache does).
    """
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]  # [B, H, L, D]
    if mask is not None:
        return F.scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(1, 2)
    out, lse = attention_with_lse(*heads_first)  # [B, H, Lq, D], [B, H, Lq]
    if site is not None and ATTENTION_WEIGHT_CAPTURE.active:
        ATTENTION_WEIGHT_CAPTURE.observe(site, q, k, lse, frame_key_means)
    return out.transpose(1, 2)  # [B, Lq, H, D]


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Fused attention over [B, H, L, D] and its natural log-sum-exp of q·k/√D, float32 [B, H, Lq].

    The backend follows from device and dtype alone: never from whether anybody is looking.
    """
    aten = torch.ops.aten
    if q.device.type == "cpu":  # bit for bit what F.scaled_dot_product_attention returns there
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    if q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16):
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
        return out, lse.reshape(q.shape[:3])
    if q.device.type == "cuda" and q.dtype == torch.float32:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
        return out, lse[..., : q.shape[2]]  # its rows are padded to 32
    logits = (q @ k.mT).float() * q.shape[-1] ** -0.5  # other devices: by the formula
    lse = logits.logsumexp(-1)
    return (logits - lse[..., None]).exp().to(v.dtype) @ v, lse
