"""What Rolling Forcing (arXiv 2509.25161) remembers: the first block as an anchor, and newest clean frames.

A window of frames at several noise levels attends to itself, to the newest clean frames before it, and to the
anchor, whose keys stand right before those. Clean frames attend to the newest ones alone.

Letters: B batch, S tokens per frame, H heads, D head dim. Source of the layout: the attention of
https://github.com/TencentARC/RollingForcing, attention_size 21 frames.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from wan.modules.key_layout import KeyLayout, Slot
from wan.modules.rope import rotate

Rope = Callable[[Sequence[int]], tuple[Tensor, Tensor]]


class RollingCache:
    """Keys and values of clean frames per layer, [B, capacity·S, H, D]: anchor, then newest frames.

    The model writes a forward's keys and gets those that it sees, as from a KVCache.
    """

    stores_raw = False

    def __init__(
        self,
        num_layers: int,
        shape: tuple[int, int, int],
        tokens_per_frame: int,
        anchor: int,
        attention_size: int,
        rope: Rope,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        """shape is (B, H, D), rope gives the tables [n·S, 1, D] of n positions; sizes count frames."""
        batch, heads, head_dim = shape
        self.tokens_per_frame, self.anchor, self.attention_size = tokens_per_frame, anchor, attention_size
        self.capacity, self.rope = anchor + attention_size, rope
        size = (batch, self.capacity * tokens_per_frame, heads, head_dim)
        self.keys, self.values = (
            [torch.empty(size, dtype=dtype, device=device) for _ in range(num_layers)] for _ in range(2)
        )
        self.raw_anchor: list[Tensor] = [torch.empty(0)] * num_layers
        self.frames: list[int] = []  # of the clean frames in the buffers
        self.newest = range(0)
        self.is_clean = False
        self.seen = range(0)  # slots of the buffers that a forward sees beside its own keys
        self.layouts: list[KeyLayout] = [KeyLayout((), tokens_per_frame)] * num_layers

    @property
    def query_positions(self) -> Sequence[int]:
        return self.newest

    @property
    def key_positions(self) -> Sequence[int]:
        return self.newest

    def begin_window(self, frames: range) -> None:
        """The next forward denoises frames; it writes nothing."""
        self.newest, self.is_clean, self.stores_raw = frames, False, False
        room = self.attention_size - len(frames) - self.anchor
        recent = [slot for slot, frame in enumerate(self.frames) if slot >= self.anchor][-max(room, 0) :]
        self.seen = range(recent[0], recent[-1] + 1) if recent and room > 0 else range(0)
        first = frames.start - len(self.seen) - self.anchor  # where the anchor stands
        past = [Slot(frame, first + frame) for frame in self.frames[: self.anchor]]
        past += [Slot(self.frames[slot], self.frames[slot]) for slot in self.seen]
        self._anchor_rope = self.rope(range(first, first + self.anchor)) if past else None
        self._publish(past, frames)

    def begin_clean(self, frames: range) -> None:
        """The next forward writes the clean keys and values of frames."""
        self.newest, self.is_clean, self.stores_raw = frames, True, not self.frames
        self._evict(len(self.frames) + len(frames) - self.capacity)
        self.frames += frames
        self.seen = range(max(0, len(self.frames) - self.attention_size), len(self.frames) - len(frames))
        self._publish([Slot(self.frames[slot], self.frames[slot]) for slot in self.seen], frames)

    def write(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_k: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Lk, H, D] that a forward with its own k and v [B, L, H, D] sees."""
        S, keys, values = self.tokens_per_frame, self.keys[layer], self.values[layer]
        if self.is_clean:
            now = slice((len(self.frames) - len(self.newest)) * S, len(self.frames) * S)
            keys[:, now], values[:, now] = k, v
            if raw_k is not None:
                self.raw_anchor[layer] = raw_k.clone()
            seen = slice(self.seen.start * S, now.stop)
            return keys[:, seen], values[:, seen]
        if self._anchor_rope is None:  # the window begins the video
            return k, v
        seen = slice(self.seen.start * S, self.seen.stop * S)
        anchor = rotate(self.raw_anchor[layer], *self._anchor_rope)
        return (
            torch.cat([anchor, keys[:, seen], k], 1),
            torch.cat([values[:, : self.anchor * S], values[:, seen], v], 1),
        )

    def _evict(self, excess: int) -> None:
        """The oldest frames after the anchor leave, and those after them close up."""
        if excess <= 0:
            return
        S, start = self.tokens_per_frame, self.anchor
        for buffer in (*self.keys, *self.values):
            kept = buffer[:, (start + excess) * S :].clone()
            buffer[:, start * S : start * S + kept.shape[1]] = kept
        del self.frames[start : start + excess]

    def _publish(self, past: Sequence[Slot], frames: range) -> None:
        """The layout of the forward to come."""
        slots = (*past, *(Slot(frame, frame) for frame in frames))
        layout = KeyLayout(
            slots,
            self.tokens_per_frame,
            own=range(len(past), len(slots)),
            query_positions=tuple(frames),
            sink=range(min(self.anchor, len(past))) if not self.is_clean else range(0),
        )
        self.layouts = [layout] * len(self.layouts)
