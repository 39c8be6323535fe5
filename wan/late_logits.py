"""Mean logits of all calls of a forward from one product: that of a single call costs little but its launch.

Sums over the queries of each call and its mean keys are kept until the forward ends. Then the heads of all
layers stand side by side. Of calls so small that on a CPU an operation takes longer to begin than to do,
queries and keys themselves are kept: sums and means of all layers are then formed together, too.
"""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wan import keys as host_copies
from wan import reductions
from wan import reductions as frame_reductions
from wan.key_means import KeyMeans
from wan.keys import KeyLayout

# --- Mean logits of all calls of a forward from one product: that of a single call costs little but its
SMALL = 1 << 15  # elements of queries


class _Waiting(NamedTuple):
    """A call of which frame_logits are not there yet."""

    queries: Tensor  # sums, float32 [B, Fq, H, D], or with a layout the queries themselves [B, Lq, H, D]
    keys: Tensor  # means, float32 [B, Fk, H, D], or with a layout the keys themselves [B, Lk, H, D]
    layout: KeyLayout | None
    num_query_frames: int
    tokens: int  # of a query frame
    others: dict[str, Tensor]  # what else is kept of it
    values: dict[str, Tensor]  # to be filled

    @property
    def alike(self) -> Hashable:
        """Equal for calls from one product."""
        batch, _, _, head_dim = self.queries.shape
        of_keys = self.keys.shape[1] if self.layout is None else id(self.layout)
        return batch, head_dim, self.num_query_frames, self.tokens, self.layout is None, of_keys


class LateLogits:
    """Calls whose frame_logits [B, H, Fq, Fk] finish() forms together; before that their values are empty."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, _Waiting] = {}  # by layer
        self.key_means = KeyMeans()

    def add(
        self, layer: Hashable, call: frame_reductions.Call, others: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The values of a call, where frame_logits and then the others will be."""
        assert layer not in self._waiting
        q, k, layout, frames = call.q, call.k, call.layout, call.num_query_frames
        tokens, values = q.shape[1] // frames, dict[str, Tensor]()
        if _stay(call):
            waiting = _Waiting(q, k, layout, frames, tokens, others, values)
        else:
            sums, means = self.key_means.with_queries(layer, q, k, layout, frames)
            waiting = _Waiting(sums, means, None, frames, tokens, others, values)
        self._waiting[layer] = waiting
        return values

    def make_way(self, layer: Hashable) -> None:
        """Before the mean keys of a layer change: a call of it that waits needs those that are there."""
        if layer in self._waiting:
            self.finish()

    def finish(self) -> None:
        """Fill the values of all calls that wait."""
        together: dict[Hashable, dict[Hashable, _Waiting]] = {}
        for layer, call in self._waiting.items():
            together.setdefault(call.alike, {})[layer] = call
        for calls in together.values():
            for call, logits in zip(calls.values(), self._products(calls), strict=True):
                call.values.update({"frame_logits": logits} | call.others)
                host_copies.start(call.values)
        self._waiting.clear()

    def forget(self) -> list[dict[str, Tensor]]:
        """Fill none of them -> the values that stay empty."""
        empty = [call.values for call in self._waiting.values()]
        self._waiting.clear()
        return empty

    def _products(self, calls: Mapping[Hashable, _Waiting]) -> Sequence[Tensor]:
        """frame_logits [B, H, Fq, Fk] of calls that are alike."""
        first = next(iter(calls.values()))
        queries = torch.cat([call.queries for call in calls.values()], 2)  # [B, ..., heads of all, D]
        keys = [call.keys for call in calls.values()]
        if first.layout is None:
            means = torch.cat(keys, 2)
        else:
            queries = reductions.frame_sums(queries, first.num_query_frames)
            means = self.key_means.of(tuple(calls), first.layout, *keys)
        logits = reductions.logits_of_sums(queries, means, first.tokens)
        heads = [call.queries.shape[2] for call in calls.values()]
        parts = logits.split(heads, 1)
        return parts if logits.is_cuda else [part.clone() for part in parts]  # as move_to_cpu() does later


def _stay(call: frame_reductions.Call) -> bool:
    """Whether queries and keys of a small call stay as they are until its forward ends.

    The keys of a rollout do, whose cache every layer writes once, and queries that were never written in
    place: they lie in no buffer that the next layer takes too.
    """
    q = call.q
    small = q.device.type == "cpu" and q.numel() <= SMALL and call.layout.rollout is not None
    return small and not call.exchanged and not q.is_inference() and q._version == 0


# --- What is kept of a call may need numbers from the GPU first: it is launched when they have come
BEHIND = 3  # calls of attention: the GPU is busy with them while the host makes out what to launch

Work = Callable[[], None]


class LateWork:
    """Functions that wait for their turn, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: deque[Work] = deque()

    def is_for(self, layout: KeyLayout | None) -> bool:
        """Whether work on a call with this layout has to wait: for its chosen tokens, or behind others."""
        chosen = None if layout is None else layout.chosen
        return (chosen is not None and chosen.fetch()) or bool(self._waiting)

    def add(self, work: Work) -> None:
        """Call it BEHIND others later, or in finish()."""
        self._waiting.append(work)
        if len(self._waiting) > BEHIND:
            self._waiting.popleft()()

    def finish(self) -> None:
        """Call all that wait."""
        while self._waiting:
            self._waiting.popleft()()

    def forget(self) -> None:
        """Call none of them."""
        self._waiting.clear()
