"""Deep Forcing's participative compression: of the past those tokens stay that recent queries look at."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wan.errors import ConfigError
from wan.modules.key_layout import CHOSEN, MIXED, ChosenTokens, Slot
from wan.modules.policies.base import WindowedPolicy
from wan.modules.rope import rotate_into

if TYPE_CHECKING:
    from wan.modules.kv_cache import KVCache


@dataclass
class Participative(WindowedPolicy):
    """When a block would make more than W frames, its first pass compresses them to N,
    in every layer on its own.

    The sink (S) and the last R frames stay. Of the tokens between them those with the highest score stay, in
    order of time: the sum over the queries of the last R frames and all heads of q·k, where they stand,
    without softmax. The sink then stands right before the positions of the chosen tokens, and those right
    before the recent frames. A token that was chosen reuse_limit times comes after all others.

    As released (arXiv 2512.05081), chosen tokens keep their positions, and the sink is turned first by
    first_turn - N frames, later by as much as the window moved on.
    """

    sink: int = 10
    budget: int = 16
    recent: int = 4
    reuse_limit: int | None = None  # 7 as released
    first_turn: int = 21

    name = "participative"
    releases = ("deep_forcing",)
    block_bound = ("deep_forcing",)
    chooses_by_layer = True
    can_recache = False

    @property
    def places(self) -> int:
        """Frames' worth of tokens that are chosen."""
        return self.budget - self.recent - self.sink

    def validate(self) -> None:
        super().validate()
        if self.source and self.reuse_limit is None:
            self.reuse_limit = 7
        if self.recent < 1:
            raise ConfigError("cache_policy participative: recent must be at least 1 frame")
        if self.places < 0:
            raise ConfigError(
                f"cache_policy participative: budget {self.budget} cannot hold {self.sink} sink frames and "
                f"{self.recent} recent ones; it must be at least {self.sink + self.recent}"
            )
        if self.budget > self.window:
            raise ConfigError(
                f"cache_policy participative: budget {self.budget} is more than window {self.window} and "
                "cannot "
                f"roll; it may be at most {self.window}"
            )
        if self.reuse_limit is not None and self.reuse_limit < 1:
            raise ConfigError("cache_policy participative: reuse_limit must be at least 1")
        if self.first_turn < 0:
            raise ConfigError("cache_policy participative: first_turn must be 0 or more frames")

    def check(self, block_sizes: Sequence[int]) -> None:
        super().check(block_sizes)
        if self.recent < max(block_sizes):
            raise ConfigError(
                f"cache_policy participative: recent {self.recent} cannot hold a block of "
                f"{max(block_sizes)}, "
                f"which its later passes overwrite; it must be at least {max(block_sizes)}"
            )

    def capacity(self, num_frames: int, block_size: int) -> int:
        return min(self.window + block_size, num_frames)

    def raw_slots(self, capacity: int) -> int:
        return min(self.sink, capacity) if self.source else capacity

    # -- a block ---------------------------------------------------------------------------------------------

    def start(self, cache: "KVCache") -> None:
        self._chosen: list[ChosenTokens | None] = [None] * cache.num_layers
        self._queries = [_QuerySums() for _ in cache.keys]
        self._wide: list[Slot] = []  # the slots of a first pass that compresses; empty where none does
        self._pending = [False] * cache.num_layers  # whether a layer's first pass is still to come
        self._sink_at, self._turned_at = self.first_turn - self.budget, -1  # as released

    def admit(self, cache: "KVCache", block: range, cut: bool) -> None:
        cache.append(block)
        self._pending = [True] * cache.num_layers
        self._wide = list(cache.slots) if len(cache.slots) > self.window else []
        if not self._wide:
            return
        recent = self._wide[-self.recent :]
        first = recent[0].frame - self.places  # where the chosen tokens stand
        positions = [MIXED] * self.places if self.source else range(first, first + self.places)
        cache.slots[self.sink :] = [*(Slot(CHOSEN, position) for position in positions), *recent]
        cache.own = range(len(cache.slots) - len(block), len(cache.slots))
        cache.stand(self._sink_positions(first, block.start))

    def _sink_positions(self, chosen: int, start: int) -> range:
        """Where the sink stands when the block at start compresses,
        and chosen tokens stand from a position on.
        """
        if not self.source:
            return range(chosen - self.sink, chosen)
        if self._turned_at >= 0:
            self._sink_at += start - self._turned_at
        self._turned_at = start
        return range(self._sink_at, self._sink_at + self.sink)

    def own_slots(self, cache: "KVCache", layer: int) -> range:
        wide = len(self._wide)
        return range(wide - len(cache.own), wide) if wide and self._pending[layer] else cache.own

    def written(self, cache: "KVCache", layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        compresses = bool(self._wide) and self._pending[layer]
        if compresses or self.recent > len(cache.newest):
            sums = q.unflatten(1, (len(cache.newest), -1)).sum(2, dtype=torch.float32)  # [B, frames, H, D]
            keeps = self._pending[layer] or bool(self.source)  # the release counts every pass
            self._queries[layer].add(sums, keeps, self.recent)
        self._pending[layer] = False
        if compresses:
            self._compress(cache, layer)
        return cache.view(layer)

    def flush(self, cache: "KVCache") -> None:
        super().flush(cache)
        self._chosen = [None] * cache.num_layers

    def layer_tokens(self, layer: int) -> ChosenTokens | None:
        return self._chosen[layer]

    # -- the choice ------------------------------------------------------------------------------------------

    def _compress(self, cache: "KVCache", layer: int) -> None:
        """Choose tokens and close up: sink, chosen, recent."""
        S, total = cache.tokens_per_frame, len(self._wide)
        known = self._candidates(cache, layer)
        between = cache.tokens(self.sink, total - self.recent)
        queries = self._queries[layer].total(self.recent)
        scores = cache.shard.sum(self.scores(cache.keys[layer][:, between], queries))
        if self.reuse_limit is not None:
            scores = scores.masked_fill(known.uses >= self.reuse_limit, -torch.inf)
        best = scores.argsort(dim=1, descending=True, stable=True)[
            :, : self.places * S
        ]  # ties: the lower index
        order = best.sort(1).values  # [B, places·S], in order of time
        self._chosen[layer] = chosen = known.take(order, range(self.sink, self.sink + self.places))
        recent = cache.tokens(total - self.recent, total)
        target = cache.tokens(self.sink + self.places, self.budget)
        place = cache.tokens(self.sink, self.sink + self.places)
        moved = [cache.keys[layer], cache.values[layer]]
        moved += [] if self.source else [cache.raw_keys[layer]]
        for buffer in moved:
            kept, tail = (
                buffer[:, between].take_along_dim(order[:, :, None, None], 1),
                buffer[:, recent].clone(),
            )
            buffer[:, place], buffer[:, target] = kept, tail
        if not self.source and self.places:
            self._stand(cache, layer, chosen, place)
        cache.layouts[layer] = replace(cache.layouts[layer], chosen=self._chosen[layer])

    @staticmethod
    def scores(keys: Tensor, queries: Tensor) -> Tensor:
        """Sum over heads of summed queries [B, H, D] · keys [B, n, H, D] -> float32 [B, n]."""
        return torch.einsum("bhd,bnhd->bn", queries, keys.float())

    def _candidates(self, cache: "KVCache", layer: int) -> ChosenTokens:
        """What is known of the tokens between the sink and the recent frames."""
        S, before = cache.tokens_per_frame, self._chosen[layer]
        first = self.sink + (0 if before is None else self.places)
        frames = [slot.frame for slot in self._wide[first : len(self._wide) - self.recent]]
        keys = cache.keys[layer]
        whole = ChosenTokens.of_frames(frames, S, keys.shape[0], keys.device)
        return whole if before is None else before.followed_by(whole)

    def _stand(self, cache: "KVCache", layer: int, chosen: ChosenTokens, place: slice) -> None:
        """Rotate the chosen keys to the positions of their slots; each keeps its row and column."""
        S = cache.tokens_per_frame
        positions = [slot.position for slot in cache.slots[self.sink : self.sink + self.places]]
        assert cache.rope is not None
        slot = torch.arange(place.stop - place.start, device=chosen.indices.device) // S
        row = slot * S + chosen.indices  # [B, places·S] into tables [places·S, 1, D]
        cos, sin = (table[row] for table in cache.rope(range(positions[0], positions[-1] + 1)))
        rotate_into(cache.keys[layer][:, place], cache.raw_keys[layer][:, place], cos, sin)
        chosen.positions.copy_((slot + positions[0]).expand_as(chosen.positions))


class _QuerySums:
    """Summed queries of the newest frames of one layer, [B, frames, H, D] in float32."""

    def __init__(self) -> None:
        self._past: Tensor | None = None
        self._last: Tensor | None = None

    def add(self, sums: Tensor, keeps: bool, frames: int) -> None:
        """Take those of one pass.

        keeps: the pass before it is not the same block's, or counts all the same.
        """
        if keeps and self._last is not None:
            past = [self._last] if self._past is None else [self._past, self._last]
            self._past = torch.cat(past, 1)[:, -frames:]
        self._last = sums

    def total(self, frames: int) -> Tensor:
        """Sum over the newest frames -> [B, H, D]."""
        assert self._last is not None
        known = [self._last] if self._past is None else [self._past, self._last]
        return torch.cat(known, 1)[:, -frames:].sum(1)
