"""Mean logits of all calls of a forward from one product: that of a single call costs little but its launch.

Sums over the queries of each call and its mean keys are kept until the forward ends. Then the heads of all
layers stand side by side.
"""

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from wan.modules import host_copies, reductions


class _Waiting(NamedTuple):
    """A call of which all but the product is there."""

    q_sums: Tensor  # [B, Fq, H, D], float32
    key_means: Tensor  # [B, Fk, H, D], float32
    tokens: int  # of a query frame
    others: dict[str, Tensor]  # what else is kept of it
    values: dict[str, Tensor]  # to be filled


class LateLogits:
    """Calls whose frame_logits [B, H, Fq, Fk] finish() forms together; before that their values are empty."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, _Waiting] = {}  # by layer

    def add(
        self, layer: Hashable, q_sums: Tensor, key_means: Tensor, tokens: int, others: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The values of a call, where frame_logits and then the others will be."""
        assert layer not in self._waiting
        self._waiting[layer] = _Waiting(q_sums, key_means, tokens, others, {})
        return self._waiting[layer].values

    def make_way(self, layer: Hashable) -> None:
        """Before the mean keys of a layer change: a call of it that waits needs those that are there."""
        if layer in self._waiting:
            self.finish()

    def finish(self) -> None:
        """Fill the values of all calls that wait."""
        alike: dict[Hashable, list[_Waiting]] = {}
        for call in self._waiting.values():
            batch, query_frames, _, head_dim = call.q_sums.shape
            key = batch, query_frames, head_dim, call.key_means.shape[1], call.tokens
            alike.setdefault(key, []).append(call)
        for calls in alike.values():
            for call, logits in zip(calls, _products(calls), strict=True):
                call.values.update({"frame_logits": logits} | call.others)
                host_copies.start(call.values)
        self._waiting.clear()

    def forget(self) -> list[dict[str, Tensor]]:
        """Fill none of them -> the values that stay empty."""
        empty = [call.values for call in self._waiting.values()]
        self._waiting.clear()
        return empty


def _products(calls: list[_Waiting]) -> list[Tensor]:
    """frame_logits [B, H, Fq, Fk] of calls of the same sizes."""
    q_sums = torch.cat([call.q_sums for call in calls], 2)  # [B, Fq, heads of all, D]
    key_means = torch.cat([call.key_means for call in calls], 2)
    logits = reductions.logits_of_sums(q_sums, key_means, calls[0].tokens)
    heads = [call.q_sums.shape[2] for call in calls]
    parts = logits.split(heads, 1)
    return list(parts) if logits.is_cuda else [part.clone() for part in parts]  # as move_to_cpu() does later
