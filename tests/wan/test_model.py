"""The parts of a layer against their formulas in float64: on the CPU in PyTorch, on CUDA the fused kernels.

In bfloat16 the budget is half a unit in the last place of the result plus what float32 arithmetic may add.
"""

import copy

import pytest
import torch
from helpers.behind_attention import LAYER_ERROR, error_behind_attention

from wan import model as layers
from wan.config import ModelConfig
from wan.keys import RotaryTable
from wan.model import FeedForward, GatedAdd, ModulatedNorm, QueryKeyNorm

real_gpu = pytest.mark.real_gpu  # its kernels; test_kernels.py interprets them
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SHAPES = pytest.mark.parametrize(
    ("batch", "frames", "tokens", "heads", "head_dim", "rows"),
    [(2, 3, 5, 3, 16, 3), (2, 4, 7, 12, 16, 1), (1, 3, 24, 12, 128, 3)],
)


def inputs(dtype, device, *shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def assert_near(found, expected, dtype, twice=0.0):
    """twice: the largest number that PyTorch's own operations on the CPU round to bfloat16 on their way."""
    half = dtype == torch.bfloat16
    budget = expected.abs() * (2**-8 if half else 0) + 3e-6 * expected.abs().max()
    extra = twice * 2**-8 if half and found.device.type == "cpu" else 0
    assert found.dtype == dtype and found.shape == expected.shape
    assert ((found - expected).abs() <= budget + extra).all()


@real_gpu
@DTYPES
@SHAPES
@torch.no_grad()
def test_norm_and_gate(batch, frames, tokens, heads, head_dim, rows, dtype, device):
    dim = heads * head_dim
    x, y = inputs(dtype, device, *[(batch, frames * tokens, dim)] * 2)
    (e,) = inputs(torch.float32, device, (batch, rows, 6, dim))
    shift, scale, *_, gate = e.unbind(2)  # strided, as in a layer
    wide = (x * 3 + 2).double().unflatten(1, (rows, -1))
    normed = (wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    expected = (normed * (1 + scale.double()[:, :, None]) + shift.double()[:, :, None]).flatten(1, 2)
    most = normed.abs().max() * (1 + scale.abs().max()) / 2
    assert_near(ModulatedNorm(dim, 1e-6)(x * 3 + 2, scale, shift), expected, dtype, most)
    expected = x.double() + (y.double().unflatten(1, (rows, -1)) * gate.double()[:, :, None]).flatten(1, 2)
    assert_near(total := GatedAdd()(x, y, gate), expected, dtype)
    if device.type == "cuda":  # with graphs a layer's last sum and the next one's norm are one kernel
        from wan.kernels import fused

        added, normed = fused.add_norm(x, y, gate, scale, shift, 1e-6)
        assert torch.equal(added, total)
        assert torch.equal(normed, ModulatedNorm(dim, 1e-6)(total, scale, shift))


@real_gpu
@DTYPES
@SHAPES
@pytest.mark.parametrize("turned", [True, False])
@torch.no_grad()
def test_query_key_norm(batch, frames, tokens, heads, head_dim, rows, turned, dtype, device):
    dim = heads * head_dim
    norm = QueryKeyNorm(ModelConfig(dim=dim, ffn_dim=8, num_heads=heads, num_layers=1)).to(device, dtype)
    x, weight = inputs(dtype, device, (batch, frames * tokens, dim), (dim,))
    norm.weight.copy_(weight)
    rope = RotaryTable(head_dim)
    positions = range(1030, 1030 + frames)  # the time index has no limit at 1024
    found = norm(x, rope(positions, 1, tokens, device) if turned else None)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    expected = expected.unflatten(-1, (heads, head_dim))
    if turned:
        axes = (torch.tensor(positions), torch.arange(1), torch.arange(tokens))
        time, row, column = (rope.freqs_cis(axis, p).to(device) for axis, p in enumerate(axes))
        grid = (frames, tokens, -1)
        parts = [time[:, None].expand(grid), row[None].expand(grid), column[None].expand(grid)]
        turns = torch.cat(parts, -1).flatten(0, 1)[:, None]  # [L, 1, D/2]
        pairs = torch.view_as_complex(expected.unflatten(-1, (-1, 2)))
        expected = torch.view_as_real(pairs * turns).flatten(-2)
    assert_near(found, expected, dtype, expected.abs().max())


@real_gpu
@DTYPES
@pytest.mark.parametrize("rows", [1, 3])
def test_a_layer_behind_attention(rows, dtype, device):
    assert error_behind_attention(rows, dtype, device) <= LAYER_ERROR[dtype]


@real_gpu
@DTYPES
@pytest.mark.parametrize("fused", [False, True])
@torch.no_grad()
def test_feed_forward(fused, dtype, device, monkeypatch):
    """No worse than twice the error of three plain PyTorch operations, also in a GPU's way on a CPU."""
    torch.manual_seed(0)
    ffn = FeedForward(48, 96).to(device, dtype)
    (x,) = inputs(dtype, device, (2, 15, 48))
    expected = copy.deepcopy(ffn).double().cpu()(x.double().cpu()).to(device)
    plain = torch.nn.Sequential.forward(ffn, x)
    if fused:
        monkeypatch.setattr(layers, "fused_kernels", lambda _: True)
    assert ffn(x).shape == x.shape
    assert (ffn(x) - expected).abs().max() <= 2 * (plain - expected).abs().max() + 1e-6


# RoPE and its bands.
