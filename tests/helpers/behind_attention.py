"""What a layer does behind self-attention, against itself in float64."""

import copy

import torch

from wan.config import ModelConfig
from wan.model import Block

LAYER_ERROR = {torch.float32: 2e-6, torch.bfloat16: 2**-7}  # relative, a few roundings


@torch.no_grad()
def error_behind_attention(rows: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> float:
    """Return the relative error, against float64, of what follows attention in a layer."""
    dim, length, generator = 48, 15, torch.Generator().manual_seed(0)
    sizes = (2, length, dim), (2, length, dim), (2, 7, 3, 16), (2, 7, 3, 16)
    x, seen, *text = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    time = torch.randn(2, rows, 6, dim, generator=generator)
    block = Block(ModelConfig(dim=dim, ffn_dim=64, num_heads=3, num_layers=1), 0)
    for parameter in block.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * dim**-0.5)
    exact = copy.deepcopy(block.to(dtype)).double()

    def finish(block, x, seen, time, text):
        attend, feed = block.modulations(time)
        assert attend.gate.dtype == time.dtype
        x, fed = block.feed(x, seen, attend, feed, text)
        return block.gate2(x, fed, feed.gate)

    expected = finish(exact, x.double(), seen.double(), time.double(), [part.double() for part in text])
    block, x, seen, time = (value.to(device) for value in (block, x, seen, time))
    found = finish(block, x, seen, time, [part.to(device) for part in text])
    assert found.dtype == dtype
    error = found.double().cpu() - expected
    return (error.square().mean() / expected.square().mean()).sqrt().item()
