"""A KV cache under a policy, fed with random keys in float64."""

import torch

from wan.cache import KVCache
from wan.keys import CHOSEN
from wan.rope import RotaryTable, rotate

LAYERS, HEADS, DIM, GRID, BATCH = 2, 3, 12, (1, 2), 2
S = GRID[0] * GRID[1]


class Simulation:
    """A KV cache that is fed random keys, and everything that it was ever fed."""

    def __init__(self, policy, sizes):
        table = RotaryTable(DIM)
        self.rope = lambda positions: table(positions, *GRID, torch.device("cpu"))
        self.cache = KVCache(
            [HEADS] * LAYERS,
            BATCH,
            DIM,
            S,
            sum(sizes),
            policy,
            max(sizes),
            rope=self.rope,
            dtype=torch.float64,
        )
        self.generator = torch.Generator().manual_seed(0)
        self.text = [(self.draw(5), self.draw(5)) for _ in range(LAYERS)]
        self.raw: list[dict[int, torch.Tensor]] = [{} for _ in range(LAYERS)]  # per frame [B, S, H, D], clean
        self.values: list[dict[int, torch.Tensor]] = [{} for _ in range(LAYERS)]
        self.queries: list[dict[int, torch.Tensor]] = [{} for _ in range(LAYERS)]
        self.start = 0

    def draw(self, tokens):
        return torch.randn(BATCH, tokens, HEADS, DIM, generator=self.generator, dtype=torch.float64)

    def block(self, size, passes=2):
        """Run the passes of the next block, the last one clean;
        yield after each, with what every layer sees.
        """
        frames = range(self.start, self.start + size)
        self.start += size
        self.cache.advance(frames, self.text)
        for step in range(passes):
            self.cache.begin_pass(is_clean=step == passes - 1)
            seen = []
            for layer in range(LAYERS):
                q, raw, v = (self.draw(size * S) for _ in range(3))
                k = rotate(raw, *self.rope(self.cache.key_positions))
                for i, frame in enumerate(frames):
                    at = slice(i * S, (i + 1) * S)
                    self.raw[layer][frame], self.values[layer][frame] = raw[:, at], v[:, at]
                    self.queries[layer][frame] = q[:, at]
                seen.append(self.cache.write(layer, q, k, v, raw if self.cache.stores_raw else None))
            yield frames, step, seen

    def check(self, seen):
        """Keys of every slot are its frame's, rotated to its position, and so are its values."""
        for layer, (keys, values) in enumerate(seen):
            layout = self.cache.layouts[layer]
            assert keys.shape[1] == len(layout.slots) * S
            for index, slot in enumerate(layout.slots):
                at = slice(index * S, (index + 1) * S)
                for item in range(BATCH):
                    if slot.frame == CHOSEN:
                        first = (index - layout.chosen.slots.start) * S
                        tokens = slice(first, first + S)
                        raw, v = self.of_tokens(layer, item, layout.chosen, tokens)
                        positions = layout.chosen.positions[item, tokens].tolist()
                        assert positions == [slot.position] * S
                        tables = [x[layout.chosen.indices[item, tokens]] for x in self.rope([slot.position])]
                    elif slot.frame >= 0:
                        frame = slot.items[item] if slot.items else slot.frame
                        position = slot.items[item] if slot.items else slot.position
                        raw, v = self.raw[layer][frame][item], self.values[layer][frame][item]
                        tables = self.rope([position])
                    else:
                        continue
                    close(keys[item, at], rotate(raw[None], *tables)[0])
                    close(values[item, at], v)

    def of_tokens(self, layer, item, chosen, tokens):
        pairs = zip(chosen.frames[item, tokens].tolist(), chosen.indices[item, tokens].tolist(), strict=True)
        rows = [(self.raw[layer][f][item, i], self.values[layer][f][item, i]) for f, i in pairs]
        return tuple(torch.stack(column) for column in zip(*rows, strict=True))


def close(x, y, atol=1e-6):  # RoPE's tables are float32
    torch.testing.assert_close(x, y, atol=atol, rtol=0)
