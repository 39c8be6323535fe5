"""Mean keys per slot, kept from call to call: those of past blocks are computed once, not once a pass."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from wan.modules.key_layout import KeyLayout
from wan.modules.key_segments import segments_of


@dataclass(eq=False)
class _LayerMeans:
    layout: KeyLayout
    means: Tensor  # [B, slots, H, D], float32; the first settled ones will not change while the layout lasts
    settled: int
    chosen: Tensor | None = None  # [B, segments, H, D], of segments of chosen tokens


class KeyMeans:
    """The mean key of each slot of a rollout, per layer, as far as they are settled."""

    def __init__(self) -> None:
        self._layers: dict[Hashable, _LayerMeans] = {}

    def of(self, layer: Hashable, k: Tensor, layout: KeyLayout) -> Tensor:
        """Mean key of each slot of keys k [B, Lk, H, D] -> float32 [B, slots, H, D]."""
        slots, S = len(layout.slots), layout.tokens_per_slot
        known = self._layers.get(layer)
        settled = 0 if known is None else _settled(known, layout)
        if known is None or known.layout is not layout or known.means.shape[0] != k.shape[0]:
            means = k.new_empty((k.shape[0], slots, *k.shape[2:]), dtype=torch.float32)
            if known is not None and settled:
                means[:, :settled] = known.means[:, :settled]
            self._layers[layer] = known = _LayerMeans(layout, means, layout.own.start)
        own = k[:, settled * S :].unflatten(1, (slots - settled, -1))
        torch.mean(own, 2, dtype=torch.float32, out=known.means[:, settled:])
        return known.means

    def of_chosen(self, layer: Hashable, k: Tensor, layout: KeyLayout) -> Tensor | None:
        """Mean key of each segment of chosen tokens [B, segments, H, D]; None where there is no choice.

        Called after of(). Chosen tokens stay as they are while the layout lasts.
        """
        known, chosen = self._layers[layer], layout.chosen
        if chosen is None:
            return None
        if known.chosen is None:
            S = layout.tokens_per_slot
            tokens = k[:, chosen.slots.start * S : chosen.slots.stop * S].float()  # [B, n, H, D]
            shares = segments_of(layout).chosen_shares(k.device)
            known.chosen = torch.einsum("bsn,bnhd->bshd", shares, tokens)
        return known.chosen


def _settled(known: _LayerMeans, layout: KeyLayout) -> int:
    """How many leading slots of a layout hold keys whose means are known."""
    if known.layout is layout:
        return known.settled
    return min(known.settled, layout.unchanged) if layout.follows(known.layout) else 0
