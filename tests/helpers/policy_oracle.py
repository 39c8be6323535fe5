"""Cache policies once more, as lists of frames in float64: an oracle that shares no code with the policies.

Letters: B batch, S tokens per frame, H heads, D head dim. Only the clean rules.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

THETA = 10000.0
BY_SLOT = ("relative", "ema_sink", "two_memories")  # whose keys stand at 0..n-1
NAMES = (
    "full",
    "window",
    "multi_shot",
    "deep_sink",
    "rolling_sink",
    "memory_bank",
    "participative",
    *BY_SLOT,
)


@dataclass(frozen=True)
class Frame:
    """The keys without RoPE and the values of a slot, [B, S, H, D], and where each token stands, [B, S]."""

    raw: Tensor
    values: Tensor
    frame: Tensor  # -1 an average
    index: Tensor  # token within its frame: row and column
    position: Tensor

    def at(self, position: int) -> "Frame":
        return replace(self, position=torch.full_like(self.position, position))


def rotated(x: Tensor, position: Tensor, index: Tensor, width: int) -> Tensor:
    """RoPE of x [B, L, H, D] at temporal positions and token indices [B, L]."""
    spatial = 2 * (x.shape[-1] // 6)
    sizes = (x.shape[-1] - 2 * spatial, spatial, spatial)
    angles = [
        place.double()[..., None] * THETA ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        for size, place in zip(sizes, (position, index // width, index % width), strict=True)
    ]
    turn = torch.polar(torch.ones(()).double(), torch.cat(angles, -1))[:, :, None]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)


class LayerOracle:
    """The cache of one layer under a policy given by its fields, name included."""

    def __init__(self, fields: dict, block_size: int, width: int):
        self.fields, self.name, self.width, self.block_size = fields, fields["name"], width, block_size
        self.window, self.sink = fields.get("window"), fields.get("sink", 0)
        self.past: list[Frame] = []
        self.own: list[Frame] = []
        self.forget()
        self.archive: dict[int, Frame] = {}

    def forget(self) -> None:
        """What a policy remembers beside the frames: bank, memories, the sink's means, chosen tokens."""
        self.bank: list[Frame] = []
        self.memories: list[Frame] = []
        self.chosen: list[Frame] = []
        self.uses: dict[tuple, int] = {}
        self.queries: dict[int, Tensor] = {}
        self.blocks = 0

    def begin(self, block: range, text: Tensor, how: str) -> None:
        """The block before is finished; a switch may come before the next. text [B, n, H, D] are its keys."""
        if self.name == "rolling_sink" and self.own:
            self.replace_late()
        self.past, before = [*self.past, *self.own], self.own
        self.own = []
        if how in ("flush", "cut"):
            sink, rest = self.past[: self.sink], self.past[self.sink :]
            if self.name == "two_memories" and self.memories:
                rest = rest[2:]
            self.past = [*sink, *rest[-2:]]
            queries = self.queries
            self.forget()
            self.queries = queries
        elif self.name == "memory_bank" and before:
            self.remember(before[0], text)
        self.blocks += 1
        if self.name not in ("participative", "full"):
            self.roll(len(self.past) + len(block) - self.window)
        self.is_cut = how == "cut"

    def recache(self, q: Tensor, frames: list[Frame]) -> Tensor:
        """Clean frames of the past, which see each other, become the cache -> their attention."""
        kept = [*self.past, *self.own][: self.sink] if self.fields.get("global_sink") else []
        self.forget()
        first = int(frames[0].frame[0, 0])
        by_slot = self.name in BY_SLOT
        frames = [f.at(i if by_slot else first + i) for i, f in enumerate(frames)]
        self.past, self.own = [*kept, *frames[len(kept) :]], []
        return self.softmax(q, frames, self.past)

    def attend(self, q: Tensor, frames: list[Frame], first_pass: bool) -> Tensor:
        """Queries without RoPE [B, L, H, D] over the past and their block -> [B, L, H, D]."""
        self.own = frames
        for i, frame in enumerate(frames):
            number = int(frame.frame[0, 0])
            part = q.unflatten(1, (len(frames), -1))[:, i]
            self.queries[number] = rotated(part, frame.position, frame.index, self.width).sum(1)  # [B, H, D]
        if self.name == "participative" and first_pass and len(self.past) + len(frames) > self.window:
            self.compress()
        past, own = self.placed()
        return self.softmax(q, own, [*past, *self.bank, *own])

    def softmax(self, q: Tensor, asking: list[Frame], seen: list[Frame]) -> Tensor:
        """Attention of queries that stand where these frames do over all tokens of other ones."""
        told = [torch.stack([f.frame, f.position, f.index], -1) for f in seen]
        self.seen = torch.cat(told, 1)  # frame, position and index in its frame of every key, [B, Lk, 3]
        places = [torch.cat([getattr(f, x) for f in asking], 1) for x in ("position", "index")]
        q = rotated(q, *places, self.width)
        keys = torch.cat([rotated(f.raw, f.position, f.index, self.width) for f in seen], 1)
        values = torch.cat([f.values for f in seen], 1)
        logits = torch.einsum("bqhd,bkhd->bhqk", q, keys) * q.shape[-1] ** -0.5
        return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), values)

    def placed(self) -> tuple[list[Frame], list[Frame]]:
        past, own, sink = self.past, self.own, self.sink
        if self.name in BY_SLOT:
            first = 45 if self.is_cut else len(past)
            return [f.at(i) for i, f in enumerate(past)], [f.at(first + i) for i, f in enumerate(own)]
        if self.name == "deep_sink":
            tail = [*past, *own][sink:]
            first = int(tail[0].position[0, 0]) - sink if tail else 0
            moved = [f.at(first + i) for i, f in enumerate([*past, *own][:sink])]
            everything = [*moved, *tail]
            return everything[: len(past)], everything[len(past) :]
        return past, own

    def roll(self, excess: int) -> None:
        if excess <= 0:
            return
        if self.name == "two_memories":
            self.take_in(excess)
            return
        leaving = self.past[self.sink : self.sink + excess]
        del self.past[self.sink : self.sink + excess]
        if self.name == "ema_sink":
            for i, gone in enumerate(leaving):
                self.past[i % self.sink] = mixed(self.past[i % self.sink], gone, 1 - self.fields["alpha"])

    def take_in(self, excess: int) -> None:
        at = self.sink + 2
        gone = self.past[at : at + excess]
        first = gone[0]
        means = [
            torch.cat([getattr(f, x) for f in gone], 1).mean(1, keepdim=True).expand_as(first.raw)
            for x in ("raw", "values")
        ]
        mean = replace(first, raw=means[0], values=means[1], frame=torch.full_like(first.frame, -1))
        weights = [self.fields[name] for name in ("alpha_long", "alpha_short")]
        old = self.memories or [mean, mean]
        self.memories = [mixed(m, mean, w) for m, w in zip(old, weights, strict=True)]
        self.past = [*self.past[: self.sink], *self.memories, *self.past[at + excess :]]

    def replace_late(self) -> None:
        """Rolling sink, after the clean pass of a block: its first W - n frames take the place before it."""
        kept = self.window - self.block_size
        for frame in self.own:
            if (number := int(frame.frame[0, 0])) < kept:
                self.archive[number] = frame
        if int(self.own[0].frame[0, 0]) < self.window:
            return
        for i in range(max(0, len(self.past) - len(self.own)), len(self.past)):
            position = int(self.past[i].position[0, 0])
            turn, place = position // kept, position % kept
            self.past[i] = self.archive[kept - 1 - place if turn % 2 else place].at(position)

    def remember(self, candidate: Frame, text: Tensor) -> None:
        """The first frame of the block before comes into the bank."""
        count, size = (self.blocks - 1) // self.fields["interval"] + 1, self.fields["bank"]
        if count <= size:
            self.bank = [*self.bank[: count - 1], candidate]
            return
        scores = []
        for f in self.bank:
            keys = rotated(f.raw, f.position, f.index, self.width)
            scores.append(torch.einsum("bthd,bshd->b", text, keys))
        order = torch.stack(scores, 1).argsort(dim=1, descending=True, stable=True)[:, : size - 1]
        columns, batch = self.columns(self.bank), range(len(order))
        best = [[torch.stack([x[order[b, i]][b] for b in batch]) for x in columns] for i in range(size - 1)]
        self.bank = [*(Frame(*fields) for fields in best), candidate]

    @staticmethod
    def columns(frames: list[Frame]) -> list[list[Tensor]]:
        return [[getattr(f, x) for f in frames] for x in ("raw", "values", "frame", "index", "position")]

    def compress(self) -> None:
        """Participative: the tokens between sink and recent frames that recent queries look at most."""
        R, sink = self.fields["recent"], self.sink
        places = self.fields["budget"] - R - sink
        everything = [*self.past, *self.own]
        recent, between = everything[-R:], everything[sink:-R]
        raw, values, frame, index, position = (torch.cat(x, 1) for x in self.columns(between))
        total = sum(self.queries[n] for n in sorted(self.queries)[-R:])
        scores = torch.einsum("bhd,bshd->bs", total, rotated(raw, position, index, self.width))
        S, batch = self.own[0].raw.shape[1], len(raw)
        if limit := self.fields.get("reuse_limit"):
            for b in range(batch):
                for j in range(raw.shape[1]):
                    if self.uses.get((b, int(frame[b, j]), int(index[b, j])), 0) >= limit:
                        scores[b, j] = -torch.inf
        order = scores.argsort(dim=1, descending=True, stable=True)[:, : places * S].sort(1).values
        for b in range(batch):
            for j in order[b].tolist():
                token = (b, int(frame[b, j]), int(index[b, j]))
                self.uses[token] = self.uses.get(token, 0) + 1
        first = int(recent[0].frame[0, 0]) - places
        self.chosen = []
        for i in range(places):
            rows = order[:, i * S : (i + 1) * S]
            taken = [torch.stack([x[b, rows[b]] for b in range(batch)]) for x in (raw, values, frame, index)]
            self.chosen.append(Frame(*taken, torch.full_like(taken[2], first + i)))
        moved = [f.at(first - sink + i) for i, f in enumerate(everything[:sink])]
        self.past = [*moved, *self.chosen, *recent[: R - len(self.own)]]


def mixed(old: Frame, new: Frame, weight: float) -> Frame:
    """(1 - weight) old + weight new."""
    raw, values = ((1 - weight) * x + weight * y for x, y in ((old.raw, new.raw), (old.values, new.values)))
    return replace(old, raw=raw, values=values, frame=torch.full_like(old.frame, -1))
