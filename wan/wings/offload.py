"""Keep layers' weights on the host; copy each layer to the GPU while the one before it computes.

model = build_model(CausalWanModel, sizes, state, source, dtype=None, device="cpu")
apply_offload(model, torch.bfloat16, "cuda")
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wan.errors import ConfigError

if TYPE_CHECKING:
    from wan.model import WanModel

ALIGNMENT = 512  # bytes, that of torch's CUDA allocator: products choose their kernels by it
PIECE = 1 << 20  # bytes; a layer is rounded up to it


def apply_offload(model: "WanModel", dtype: torch.dtype, device: torch.device | str) -> None:
    """Move a model to a device and dtype; weights of its layers stay on the host and are streamed."""
    for name, part in model.named_children():
        if name != "blocks":
            part.to(device).to(dtype)
    model.blocks = StreamedBlocks(model.blocks, dtype, device)


class StreamedBlocks(nn.ModuleList):
    """The layers of a model, all of one structure, with room on the device for two of them.

    Iterate to compute in order: a layer has its weights from when it is yielded until the next one is
    requested. Values and alignment are those of a resident model, so results are equal bit for bit. Raises
    ConfigError if another iteration began in between, since it reused the room.
    """

    def __init__(self, blocks: nn.ModuleList, dtype: torch.dtype, device: torch.device | str):
        super().__init__(blocks)
        self.device = torch.device(device)
        # 1. Room for two layers on the device.
        nbytes = streamed_bytes(blocks[0], dtype)
        self._slots = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(2)]
        self._on_host: list[list[Tensor]] = []  # per layer, page-locked pieces
        self._running = object()  # the iteration that has the room
        self._copies: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._copies = torch.cuda.Stream(self.device)
        layer_bytes = torch.empty(nbytes, dtype=torch.uint8)
        # 2. Page-locked copies on the host, laid out as on the device: one copy moves a layer.
        for layer, block in enumerate(blocks):
            for name, view in _views(block, layer_bytes, dtype).items():
                view.copy_(block.get_parameter(name))
            # torch would round a page-locked tensor up to the next power of two.
            parts = layer_bytes.split(
                [1 << b for b in reversed(range(nbytes.bit_length())) if nbytes >> b & 1]
            )
            if self._copies:
                self._on_host.append([part.pin_memory() for part in parts])
            else:
                self._on_host.append([part.clone() for part in parts])
            block.load_state_dict(_views(block, self._slots[layer % 2], dtype), assign=True)

    def __iter__(self) -> Iterator[nn.Module]:
        # Slot n % 2 holds layer n; while it computes, layer n + 1 comes into the other one.
        self._running = iteration = object()
        self._fetch(0)
        for layer, block in enumerate(super().__iter__()):
            if self._copies:
                torch.cuda.current_stream(self.device).wait_stream(self._copies)
            if layer + 1 < len(self):
                self._fetch(layer + 1)
            yield block
            if self._running is not iteration:
                raise ConfigError("streamed layers cannot serve two runs in step; leave offload out")

    def _fetch(self, layer: int) -> None:
        """Start copying a layer's weights over those of the layer before the last one."""
        if self._copies:  # what still computes with that place was launched before
            self._copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies):
            pieces = self._on_host[layer]
            targets = self._slots[layer % 2].split([len(piece) for piece in pieces])
            for target, piece in zip(targets, pieces, strict=True):
                target.copy_(piece, non_blocking=True)


def streamed_bytes(block: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of one layer, on the device and on the host."""
    return _round_up(sum(_round_up(p.numel() * dtype.itemsize, ALIGNMENT) for p in block.parameters()), PIECE)


def _views(block: nn.Module, flat: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return views into flat bytes for each parameter of a layer."""
    views, start = {}, 0
    for name, parameter in block.named_parameters():
        end = start + parameter.numel() * dtype.itemsize
        views[name] = flat[start:end].view(dtype).view(parameter.shape)
        start = _round_up(end, ALIGNMENT)
    return views


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
