"""One row a cache policy, which every test of policies goes through; and a cache fed with random keys."""

from typing import Any

import torch
from hypothesis import strategies as st

from wan.cache import CacheSizes, KVCache
from wan.keys import CHOSEN, RotaryTable, rotate

POLICIES: list[dict[str, Any]] = [  # all of them forget within 8 frames, in blocks of two or three
    {"name": "full"},
    {"name": "window", "window": 7, "sink": 2},
    {"name": "relative", "window": 7, "sink": 1},
    {"name": "deep_sink", "window": 7, "sink": 3},
    {"name": "participative", "window": 7, "sink": 1, "budget": 6, "recent": 4},
    {"name": "ema_sink", "window": 7, "sink": 2, "alpha": 0.5},
    {"name": "two_memories", "window": 7, "sink": 1, "alpha_long": 0.1, "alpha_short": 0.6},
    {"name": "rolling_sink", "window": 6},
    {"name": "memory_bank", "window": 7, "sink": 2, "bank": 2, "interval": 1},
]


@st.composite
def settings_of_any_size(draw, block_size: int, rows: list[dict[str, Any]] = POLICIES) -> dict[str, Any]:
    """Draw the settings of a policy that fit blocks of a size."""
    row = draw(st.sampled_from(rows))
    name = row["name"]
    sink, extra = draw(st.integers(1 if name == "ema_sink" else 0, 4)), draw(st.integers(0, 4))
    sizes = {"window": sink + block_size + extra, "sink": sink}
    if "window" not in row:
        return row
    if name == "rolling_sink":
        return {"name": name, "window": 2 * block_size + extra}
    if name == "participative":
        recent = block_size + draw(st.integers(0, 3))
        budget = sink + recent + draw(st.integers(0, 2))
        limit = draw(st.sampled_from([None, 1, 2]))
        sizes |= {"recent": recent, "budget": budget, "window": budget + extra, "reuse_limit": limit}
    if name == "memory_bank":
        sizes |= {"bank": draw(st.integers(1, 3)), "interval": draw(st.integers(1, 3))}
    if name == "window":
        sizes |= {"global_sink": draw(st.booleans())}
    if name == "ema_sink":
        sizes |= {"alpha": draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))}
    if name == "two_memories":
        sizes |= {"window": sizes["window"] + 2}
    return row | sizes


class Simulation:
    """A KV cache in float64 that is fed random keys, and everything that it was ever fed."""

    LAYERS, HEADS, DIM, GRID, BATCH = 2, 3, 12, (1, 2), 2
    S = GRID[0] * GRID[1]

    def __init__(self, policy, sizes):
        table = RotaryTable(self.DIM)
        self.rope = lambda positions: table(positions, *self.GRID, torch.device("cpu"))
        shape = [self.HEADS] * self.LAYERS, self.DIM, self.S, sum(sizes), self.BATCH, max(sizes)
        self.cache = KVCache(CacheSizes(*shape, self.rope, torch.float64), policy)
        self.generator = torch.Generator().manual_seed(0)
        self.text = [(self.draw(5), self.draw(5)) for _ in range(self.LAYERS)]
        self.fed: list[dict[int, tuple]] = [{} for _ in range(self.LAYERS)]  # raw keys, values [B, S, H, D]

    def draw(self, tokens):
        shape = self.BATCH, tokens, self.HEADS, self.DIM
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def run(self, frames: range):
        """Run two passes of the next block, the last one clean; yield after each what every layer sees."""
        self.cache.advance(frames, self.text)
        for is_clean in (False, True):
            self.cache.begin_pass(is_clean)
            seen = []
            for layer in range(self.LAYERS):
                q, raw, v = (self.draw(len(frames) * self.S) for _ in range(3))
                k = rotate(raw, *self.rope(self.cache.key_positions))
                for frame, *own in zip(frames, raw.split(self.S, 1), v.split(self.S, 1), strict=True):
                    self.fed[layer][frame] = tuple(own)
                seen.append(self.cache.write(layer, q, k, v, raw if self.cache.stores_raw else None))
            yield seen

    def check(self, seen):
        """Every slot holds the values of its frame, and its keys rotated to its position."""
        for layer, (keys, values) in enumerate(seen):
            layout = self.cache.layouts[layer]
            assert keys.shape[1] == len(layout.slots) * self.S
            for index, slot in enumerate(layout.slots):
                for item in range(self.BATCH):
                    self._check_slot(layer, item, index, slot, layout, keys, values)

    def _check_slot(self, layer, item, index, slot, layout, keys, values):
        at = slice(index * self.S, (index + 1) * self.S)
        position, rows = slot.position, list(range(self.S))
        if slot.frame == CHOSEN:
            first = (index - layout.chosen.slots.start) * self.S
            of = [getattr(layout.chosen, name)[item, first : first + self.S].tolist() for name in TOKENS]
            frames, rows, positions = of
            assert positions == [position] * self.S
        elif slot.frame >= 0:
            frames = [slot.by_item[item if slot.items else 0]] * self.S
            position = frames[0] if slot.items else position
        else:
            return  # an average, or zeros
        raw, v = (
            torch.stack([self.fed[layer][f][kind][item, row] for f, row in zip(frames, rows, strict=True)])
            for kind in (0, 1)
        )
        cos, sin = (table[rows] for table in self.rope([position]))
        assert (keys[item, at] - rotate(raw[None], cos, sin)[0]).abs().max() < 1e-6
        assert (values[item, at] - v).abs().max() < 1e-6  # a mean of frames is kept in float32


TOKENS = ("frames", "indices", "positions")
