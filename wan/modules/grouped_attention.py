"""Attention whose heads see different keys, without a mask kernel: attend to groups of keys, merge by LSE.

A run of slots with the same biases is one fused call over all heads, which reads keys and values in place.
Softmax over all of them is out = Σ_g exp(LSE_g + b_g − LSE') out_g, with LSE' the log-sum-exp of LSE_g + b_g.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from wan.modules.host_copies import send

Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # q, k, v -> out, LSE; heads first


@dataclass(frozen=True, eq=False)
class KeyBias:
    """What is added to the logits of each head's keys, slot by slot; −inf leaves a slot out.

    values float32 [H, slots] lie on the CPU, where groups are found without waiting for the device.
    """

    values: Tensor
    tokens_per_slot: int = 1

    def runs(self) -> Iterator[tuple[slice, Tensor]]:
        """Tokens and biases [H] of each run of equal slots that some head sees."""
        slots = self.values.T  # [slots, H]
        ends = [0, *(n for n in range(1, len(slots)) if not torch.equal(slots[n - 1], slots[n])), len(slots)]
        for start, stop in pairwise(ends):
            if slots[start].isfinite().any():
                yield slice(start * self.tokens_per_slot, stop * self.tokens_per_slot), slots[start]

    @property
    def blind_heads(self) -> list[int]:
        """Heads that see no key at all."""
        return (~self.values.isfinite().any(1)).nonzero().flatten().tolist()

    def per_token(self) -> Tensor:
        """float32 [H, Lk] on the CPU."""
        return self.values.repeat_interleave(self.tokens_per_slot, 1)


def attend_by_groups(attend: Attend, q: Tensor, k: Tensor, v: Tensor, bias: KeyBias) -> tuple[Tensor, Tensor]:
    """Attention of q [B, H, Lq, D] over k, v [B, H, Lk, D] under a bias -> out, its LSE float32 [B, H, Lq].

    attend is the fused attention of one group. Raises ValueError where a head would see no key.
    """
    if bias.blind_heads:
        raise ValueError(f"head {bias.blind_heads[0]} would see no key at all")
    parts = []
    for tokens, added in bias.runs():
        out, lse = attend(q, k[:, :, tokens], v[:, :, tokens])
        parts.append((out, lse if not added.any() else lse + send(added, lse.device)[:, None]))
    if len(parts) == 1:
        return parts[0]
    lse = torch.stack([part for _, part in parts]).logsumexp(0)  # [B, H, Lq]
    merged = torch.zeros_like(parts[0][0], dtype=torch.float32)
    for out, part in parts:
        merged.addcmul_(out, (part - lse).exp()[..., None])
    return merged.to(q.dtype), lse
