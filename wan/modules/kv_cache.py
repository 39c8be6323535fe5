"""Keys and values of one rollout, with an optional sliding window that keeps the first frames as a sink."""

import torch
from torch import Tensor

from wan.blocks import check_window
from wan.modules.key_layout import KeyLayout, Slot


class KVCache:
    """One buffer of keys and one of values per layer, [B, capacity·S, H, D], written in place.

    frames are the global indices of the latent frames a query of the newest block sees, in the order of the
    buffer. With local_attn_size (frames) these are the first sink_size frames and the newest of the rest, the
    block included.
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        num_heads: int,
        head_dim: int,
        tokens_per_frame: int,
        num_frames: int,
        local_attn_size: int = -1,
        sink_size: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        check_window(local_attn_size, sink_size, block_size=1)
        self.local_attn_size, self.sink_size = local_attn_size, sink_size
        self.capacity = num_frames if local_attn_size == -1 else min(local_attn_size, num_frames)
        self.tokens_per_frame = tokens_per_frame
        self.frames: list[int] = []
        self.newest = range(0)
        shape = (batch, self.capacity * tokens_per_frame, num_heads, head_dim)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._rollout = object()
        self.layout = KeyLayout((), tokens_per_frame)

    def advance(self, block: range) -> None:
        """Make room for the next block; from here on its queries see frames, and writes go to its slots."""
        check_window(self.local_attn_size, self.sink_size, len(block))
        excess = len(self.frames) + len(block) - self.capacity
        if excess > 0 and self.capacity != self.local_attn_size:
            raise ValueError(
                f"frame {block.stop - 1} is beyond the {self.capacity} frames that the KV cache was made for"
            )
        if excess > 0:
            sink = min(self.sink_size, len(self.frames))
            self._move(source=slice(sink + excess, len(self.frames)), to=sink)
            del self.frames[sink : sink + excess]
        unchanged = min(self.sink_size, len(self.frames)) if excess > 0 else len(self.frames)
        self.frames.extend(block)
        self.newest = block
        self.layout = KeyLayout(
            tuple(Slot(frame, frame) for frame in self.frames),
            self.tokens_per_frame,
            range(len(self.frames) - len(block), len(self.frames)),
            tuple(block),
            self._rollout,
            self.layout.version + 1,
            unchanged,
        )

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the newest block's keys and values [B, L, H, D], over those of its earlier passes.

        Returns views of all visible keys and values [B, Lk, H, D].
        """
        end = len(self.frames) * self.tokens_per_frame
        start = end - len(self.newest) * self.tokens_per_frame
        keys, values = self.keys[layer], self.values[layer]
        keys[:, start:end] = k
        values[:, start:end] = v
        return keys[:, :end], values[:, :end]

    def _move(self, source: slice, to: int) -> None:
        S = self.tokens_per_frame
        tokens = slice(source.start * S, source.stop * S)
        target = slice(to * S, (to + source.stop - source.start) * S)
        for buffer in (*self.keys, *self.values):
            buffer[:, target] = buffer[:, tokens].clone()  # the two ranges may overlap
