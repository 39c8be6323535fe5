"""Mean keys per segment, kept from call to call: those of past blocks are computed once, not once a pass."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wan import reductions
from wan.keys import KeyLayout, segments_of


@dataclass(eq=False)
class _LayerMeans:
    layout: KeyLayout
    means: Tensor  # [B, segments, H, D], float32
    settled: int  # the means of so many leading slots are there, and stay while the layout lasts


class KeyMeans:
    """The mean key of each segment of a rollout's keys, per layer, as far as they are settled.

    A segment is a slot; in place of slots of chosen tokens stand their runs (key_segments.py).
    """

    def __init__(self) -> None:
        self._layers: dict[Hashable, _LayerMeans] = {}

    def of(self, layer: Hashable, layout: KeyLayout, *keys: Tensor) -> Tensor:
        """Mean key of each segment of keys k [B, Lk, H, D] -> float32 [B, segments, H, D].

        0 where a segment has no token. Valid until the next call for this layer. Keys of several layers,
        without chosen tokens, stand side by side: layer names them together, H counts the heads of all.
        """
        known = self._known(layer, layout, *keys)
        _fill(known, keys)
        known.settled = layout.own.start
        return known.means

    def with_queries(
        self, layer: Hashable, q: Tensor, k: Tensor, layout: KeyLayout, num_query_frames: int
    ) -> tuple[Tensor, Tensor]:
        """Sums over the tokens of each query frame, float32 [B, Fq, H, D], and what of() gives.

        On CUDA one kernel reads the queries and the keys, where there are no chosen tokens.
        """
        if layout.chosen is not None or not reductions.kernels_take(q):
            return reductions.frame_sums(q, num_query_frames), self.of(layer, layout, k)
        from wan.kernels import frame_sum as frame_sum_kernel  # Triton is there only beside CUDA

        known = self._known(layer, layout, k)
        keys, out = k[:, known.settled * layout.tokens_per_slot :], known.means[:, known.settled :]
        q_sums = frame_sum_kernel.sums_and_means(q, num_query_frames, keys, out)
        known.settled = layout.own.start
        return q_sums, known.means

    def _known(self, layer: Hashable, layout: KeyLayout, *keys: Tensor) -> _LayerMeans:
        known, batch = self._layers.get(layer), keys[0].shape[0]
        if known is None or known.layout is not layout or known.means.shape[0] != batch:
            known = self._layers[layer] = _begun(known, layout, keys)
        return known


def _begun(before: _LayerMeans | None, layout: KeyLayout, keys: Sequence[Tensor]) -> _LayerMeans:
    """Room for the means of a layout, with those that the layout before it knew."""
    chosen, count = layout.chosen, len(layout.slots)
    batch, _, _, head_dim = keys[0].shape
    heads = sum(k.shape[2] for k in keys)
    if chosen is not None:
        count += len(segments_of(layout).chosen) - len(chosen.slots)
    means = keys[0].new_empty((batch, count, heads, head_dim), dtype=torch.float32)
    known = _LayerMeans(layout, means, 0)
    if before is None or len(before.means) != batch or not layout.follows(before.layout):
        return known
    settled = min(before.settled, layout.unchanged)
    if chosen is not before.layout.chosen:  # slots of another choice are other ones
        starts = [x.slots.start for x in (chosen, before.layout.chosen) if x is not None]
        settled = min(settled, *starts)
    elif chosen is not None and settled in chosen.slots:
        settled = chosen.slots.start
    same = slice(_segment_at(known, settled))
    known.means[:, same] = before.means[:, same]
    known.settled = settled
    return known


def _segment_at(known: _LayerMeans, slot: int) -> int:
    """The first segment of a slot that is not of chosen tokens, or of the first one that is."""
    chosen, more = known.layout.chosen, known.means.shape[1] - len(known.layout.slots)
    return slot if chosen is None or slot <= chosen.slots.start else slot + more


def _fill(known: _LayerMeans, keys: Sequence[Tensor]) -> None:
    """Compute the means from the settled slots on."""
    layout, count = known.layout, len(known.layout.slots)
    if layout.chosen is None:
        return _slot_means(known, keys, known.settled, count)
    (k,) = keys  # each layer chooses its own
    chosen = layout.chosen.slots
    for first, stop in ((known.settled, chosen.start), (max(known.settled, chosen.stop), count)):
        if first < stop:
            _slot_means(known, keys, first, stop)
    if chosen and known.settled <= chosen.start:
        runs = segments_of(layout).chosen
        _run_means(k, layout, out=known.means[:, runs.start : runs.stop])


def _slot_means(known: _LayerMeans, keys: Sequence[Tensor], first: int, stop: int) -> None:
    """Mean keys of whole slots."""
    S, at = known.layout.tokens_per_slot, _segment_at(known, first)
    count = stop - first
    new = [k.narrow(1, first * S, count * S) for k in keys]
    tokens = (new[0] if len(new) == 1 else torch.cat(new, 2)).unflatten(1, (count, -1))
    torch.mean(tokens, 2, dtype=torch.float32, out=known.means.narrow(1, at, count))


def _run_means(k: Tensor, layout: KeyLayout, out: Tensor) -> None:
    """Mean key of each run of chosen tokens -> out [B, runs, H, D]."""
    assert layout.chosen is not None
    S, slots, segments = layout.tokens_per_slot, layout.chosen.slots, segments_of(layout)
    tokens, at = k[:, slots.start * S : slots.stop * S], segments.chosen
    if reductions.kernels_take(k):
        from wan.kernels import mass as segment_kernel  # Triton is there only beside CUDA

        bounds = segments.gathering(k.device).bounds[:, at.start : at.stop + 1]
        segment_kernel.run_means(tokens, bounds, slots.start * S, out)
    else:
        shares = segments.chosen_shares(k.device)
        out.copy_(torch.einsum("bsn,bnhd->bshd", shares, tokens.float()))
