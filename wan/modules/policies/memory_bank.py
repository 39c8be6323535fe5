"""MemFlow: between sink and window a bank of first frames of blocks, kept by their score under the prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wan.errors import ConfigError
from wan.modules.key_layout import AVERAGE, Slot
from wan.modules.policies.base import WindowedPolicy

if TYPE_CHECKING:
    from wan.modules.kv_cache import KVCache


@dataclass
class MemoryBank(WindowedPolicy):
    """[sink, bank, local], at their frames' positions. W counts sink and local, the bank comes on top.

    Before block b the first frame of block b - 1 is the candidate. The bank grows by one slot every interval
    blocks, and the candidate overwrites its newest. Once it is full the best of its frames stay, best first,
    then the candidate. The score is the mean over heads, text tokens and the frame's tokens of
    cross-attention key · key.
    """

    window: int = 12
    sink: int = 3
    bank: int = 3
    interval: int = 3

    name = "memory_bank"
    releases = ("memflow",)
    block_bound = ("memflow",)
    chooses_by_layer = True
    can_recache = False

    @property
    def num_frames(self) -> int | None:
        return self.window + self.bank

    def validate(self) -> None:
        super().validate()
        for name in ("bank", "interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"cache_policy memory_bank: {name} must be at least 1")

    def capacity(self, num_frames: int, block_size: int) -> int:
        return min(self.window, num_frames) + self.bank

    def most_slots(self, frames: int) -> int:
        return min(frames, self.window) + self.bank  # a banked frame may lie in the window, too

    def start(self, cache: "KVCache") -> None:
        self._block = 0
        self._at = 0  # the bank's first slot
        self._frames: list[list[list[int]]] = [[] for _ in cache.keys]  # per layer and batch item

    @property
    def banked(self) -> int:
        """Slots of the bank so far."""
        return len(self._frames[0][0]) if self._frames[0] else 0

    def admit(self, cache: "KVCache", block: range, cut: bool) -> None:
        if self._block:
            self._remember(cache)
        self._block += 1
        excess = len(cache.slots) - self.banked + len(block) - self.window
        if excess > 0:
            cache.remove(self._at + self.banked, excess)
        cache.append(block)

    def flush(self, cache: "KVCache") -> None:
        cache.remove(self._at, self.banked)
        self.start(cache)
        super().flush(cache)
        self._at = min(self.sink, len(cache.slots))

    # -- the bank --------------------------------------------------------------------------------------------

    def _remember(self, cache: "KVCache") -> None:
        """Take the first frame of the last block into the bank."""
        candidate, frame = cache.slots[cache.own.start], cache.newest.start
        wanted = (self._block - 1) // self.interval + 1
        grows = max(0, min(wanted, self.bank) - self.banked)
        self._settle(cache, grows)
        if wanted > self.bank:
            self._keep_best(cache)
        last = self.banked + grows - 1  # its place in the bank
        source, target = (cache.tokens(i, i + 1) for i in (cache.slots.index(candidate), self._at + last))
        for buffer in (*cache.keys, *cache.values):
            buffer[:, target] = buffer[:, source]
        for layer, items in enumerate(self._frames):
            items = items or [[] for _ in range(len(cache.keys[layer]))]
            self._frames[layer] = [[*frames[:last], frame] for frames in items]
        cache.slots[self._at + last] = Slot(frame, frame)

    def _settle(self, cache: "KVCache", grows: int) -> None:
        """Put the bank right after the sink, with room for as many slots as it grows."""
        at, held = min(self.sink, len(cache.slots) - self.banked), self.banked
        if at != self._at and held:  # frames that came after the bank belong to the sink
            order = [*range(self._at + held, at + held), *range(self._at, self._at + held)]
            places = [cache.tokens(i, i + 1) for i in order]
            tokens = torch.cat([torch.arange(place.start, place.stop) for place in places])
            for buffer in (*cache.keys, *cache.values):
                buffer[:, cache.tokens(self._at, at + held)] = buffer[:, tokens.to(buffer.device)]
            cache.slots[self._at : at + held] = [cache.slots[i] for i in order]
        self._at = at
        if grows:
            first = at + held
            cache.move(first, len(cache.slots), first + grows)
            cache.slots[first:first] = [Slot(AVERAGE, AVERAGE)] * grows

    def _keep_best(self, cache: "KVCache") -> None:
        """Order the bank by score, best first, but for its last slot, which is about to be overwritten."""
        held = self.banked
        where, kept = (cache.tokens(self._at, self._at + n) for n in (held, held - 1))
        orders = []
        found = [self.scores(cache, layer, keys[:, where]) for layer, keys in enumerate(cache.keys)]
        scores = cache.shard.sum(torch.stack(found))  # [layers, B, bank]
        for keys, values, of_layer in zip(cache.keys, cache.values, scores, strict=True):
            best = of_layer.argsort(dim=1, descending=True, stable=True)[:, : held - 1]  # ties: lower index
            for buffer in (keys, values):
                slots = buffer[:, where].unflatten(1, (held, -1))  # [B, bank, S, H, D]
                buffer[:, kept] = torch.take_along_dim(slots, best[:, :, None, None, None], 1).flatten(1, 2)
            orders.append(best)
        for layer, items in enumerate(torch.stack(orders).tolist()):  # one wait for the device
            pairs = zip(self._frames[layer], items, strict=True)
            self._frames[layer] = [[*(frames[i] for i in order), AVERAGE] for frames, order in pairs]

    def scores(self, cache: "KVCache", layer: int, keys: Tensor) -> Tensor:
        """Score of each frame of bank keys [B, bank·S, H, D] under the prompt -> float32 [B, bank]."""
        text = cache.text[layer][0].float().mean(1)  # [B, H, D]
        frames = keys.unflatten(1, (self.banked, -1)).mean(2, dtype=torch.float32)  # [B, bank, H, D]
        return torch.einsum("bhd,bfhd->bf", text, frames)

    def layer_slots(self, cache: "KVCache", layer: int) -> Sequence[Slot]:
        slots = list(cache.slots)
        for index in range(self.banked):
            chosen = tuple(frames[index] for frames in self._frames[layer])
            slots[self._at + index] = Slot(chosen[0], chosen[0], items=chosen)
        return slots
