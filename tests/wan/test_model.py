"""The parts of a layer against their formulas in float64: in PyTorch, by interpreted kernels, on a GPU.

In bfloat16 the budget is half a unit in the last place of the result plus what float32 arithmetic may add;
the interpreter cuts off where a GPU rounds, which doubles it.
"""

import copy

import pytest
import torch
from helpers.rollouts import drawn, require_triton

from wan import model as layers
from wan.config import ModelConfig
from wan.keys import RotaryTable
from wan.model import Block, FeedForward, QueryKeyNorm, gated_add, modulated_norm

GPU = torch.cuda.is_available()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SIZES = [(2, 3, 5, 5, 24, 3), (1, 2, 7, 12, 16, 1), *[(1, 3, 24, 12, 128, 3)] * GPU]
SHAPES = pytest.mark.parametrize(("batch", "frames", "tokens", "heads", "head_dim", "rows"), SIZES)
LAYER_ERROR = {torch.float32: 2e-6, torch.bfloat16: 2**-7}  # relative, a few roundings


@pytest.fixture(params=["PyTorch", "cuda" if GPU else "interpreted"])
def way(request, monkeypatch) -> str:
    if request.param == "interpreted":
        require_triton()
        from wan.kernels import fused

        monkeypatch.setattr(
            layers, "fused_kernels", lambda x, *_: None if x.dtype == torch.float64 else fused
        )
    return request.param


def to(way, dtype, *values):
    device = "cuda" if way == "cuda" else "cpu"
    return [value.to(device, dtype) for value in values]


def assert_near(found, expected, dtype, way, twice=0.0):
    """twice: the largest number that PyTorch's own operations on the CPU round to bfloat16 on their way."""
    half = dtype == torch.bfloat16
    rounding = 2**-7 if way == "interpreted" else 2**-8
    budget = expected.abs() * (rounding if half else 0) + 3e-6 * expected.abs().max()
    extra = twice * 2**-8 if half and way == "PyTorch" else 0
    assert found.dtype == dtype and found.shape == expected.shape
    assert ((found - expected).abs() <= budget + extra).all()


@DTYPES
@SHAPES
@torch.no_grad()
def test_norm_and_gate(batch, frames, tokens, heads, head_dim, rows, dtype, way):
    dim, length = heads * head_dim, frames * tokens
    x, y = to(way, dtype, drawn(batch, length, dim) * 3 + 2, drawn(batch, length + 1, dim)[:, 1:])
    (e,) = to(way, torch.float32, drawn(batch, rows, 6, dim))
    shift, scale, *_, gate = e.unbind(2)  # strided, as in a layer
    wide = x.double().unflatten(1, (rows, -1))
    normed = (wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    expected = (normed * (1 + scale.double()[:, :, None]) + shift.double()[:, :, None]).flatten(1, 2)
    most = normed.abs().max() * (1 + scale.abs().max()) / 2
    assert_near(modulated_norm(x, scale, shift, 1e-6), expected, dtype, way, most)
    expected = x.double() + (y.double().unflatten(1, (rows, -1)) * gate.double()[:, :, None]).flatten(1, 2)
    assert_near(total := gated_add(x, y, gate), expected, dtype, way)
    if way == "cuda":  # with graphs a layer's last sum and the next one's norm are one kernel
        from wan.kernels import fused

        added, normed = fused.add_norm(x, y, gate, scale, shift, 1e-6)
        assert torch.equal(added, total)
        assert torch.equal(normed, modulated_norm(total, scale, shift, 1e-6))


@DTYPES
@SHAPES
@torch.no_grad()
def test_query_key_norm(batch, frames, tokens, heads, head_dim, rows, dtype, way):
    dim = heads * head_dim
    norm = QueryKeyNorm(ModelConfig(dim=dim, ffn_dim=8, num_heads=heads, num_layers=1))
    norm.weight.copy_(drawn(dim))
    norm.to(dtype=dtype, device="cuda" if way == "cuda" else "cpu")
    (x,), rope = to(way, dtype, drawn(batch, frames * tokens, dim)), RotaryTable(head_dim)
    positions = range(1030, 1030 + frames)  # the time index has no limit at 1024
    wide = x.double()
    plain = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    plain = plain.unflatten(-1, (heads, head_dim))
    axes = (torch.tensor(positions), torch.arange(1), torch.arange(tokens))
    time, row, column = (rope.freqs_cis(axis, p).to(x.device) for axis, p in enumerate(axes))
    grid = (frames, tokens, -1)
    parts = [time[:, None].expand(grid), row[None].expand(grid), column[None].expand(grid)]
    turns = torch.cat(parts, -1).flatten(0, 1)[:, None]  # [L, 1, D/2]
    turned = torch.view_as_real(torch.view_as_complex(plain.unflatten(-1, (-1, 2))) * turns).flatten(-2)
    for expected, tables in ((plain, None), (turned, rope(positions, 1, tokens, x.device))):
        assert_near(norm(x, tables), expected, dtype, way, expected.abs().max())


@DTYPES
@pytest.mark.parametrize("rows", [1, 3])
@torch.no_grad()
def test_a_layer_behind_attention(rows, dtype, way, monkeypatch):
    """Interpreted, by the kernels that add and norm at once."""
    dim, length, called = 48, 15, []
    x, seen, *text = (drawn(*size) for size in [(2, length, dim)] * 2 + [(2, 7, 3, 16)] * 2)
    block = Block(ModelConfig(dim=dim, ffn_dim=64, num_heads=3, num_layers=1), 0)
    time = drawn(2, rows, 6, dim)
    for parameter in block.parameters():
        parameter.copy_(drawn(*parameter.shape) * dim**-0.5)
    x, seen, *text = (value.to(dtype) for value in (x, seen, *text))
    exact = copy.deepcopy(block.to(dtype)).double()
    if way == "interpreted":
        kernels = layers.fused_kernels(x)
        kernel = kernels.add_norm
        monkeypatch.setattr(kernels, "add_norm", lambda *a, **more: called.append(1) or kernel(*a, **more))
        monkeypatch.setattr(FeedForward, "forward", torch.nn.Sequential.forward)  # cuBLAS's is CUDA's

    def finish(block, x, seen, time, *text):
        attend, feed = block.modulations(time)
        assert attend.gate.dtype == time.dtype
        x, fed = block.feed(x, seen, attend, feed, text)
        return gated_add(x, fed, feed.gate)

    expected = finish(exact, *(value.double() for value in (x, seen, time, *text)))
    if way == "cuda":
        block, x, seen, time, *text = (value.cuda() for value in (block, x, seen, time, *text))
    found = finish(block, x, seen, time, *text)
    error = found.double().cpu() - expected
    cut_off = 2 if way == "interpreted" and dtype == torch.bfloat16 else 1  # where a GPU rounds
    assert found.dtype == dtype and len(called) == 2 * (way == "interpreted")
    assert (error.square().mean() / expected.square().mean()).sqrt() <= cut_off * LAYER_ERROR[dtype]


@DTYPES
@pytest.mark.parametrize("fused", [False, True])
@torch.no_grad()
def test_feed_forward(fused, dtype, monkeypatch):
    """No worse than twice the error of three plain PyTorch operations, also in a GPU's way on a CPU."""
    torch.manual_seed(0)
    device = torch.device("cuda" if GPU else "cpu")
    ffn, x = FeedForward(48, 96).to(device, dtype), drawn(2, 15, 48).to(device, dtype)
    expected = copy.deepcopy(ffn).double().cpu()(x.double().cpu()).to(device)
    plain = torch.nn.Sequential.forward(ffn, x)
    if fused:
        monkeypatch.setattr(layers, "fused_kernels", lambda *_: True)
    assert ffn(x).shape == x.shape
    assert (ffn(x) - expected).abs().max() <= 2 * (plain - expected).abs().max() + 1e-6


@torch.no_grad()
def test_results_are_written_into_out(way, dtype=torch.bfloat16):
    """The same bits, also over what was read, and nothing around them."""
    (x, y), rows = to(way, dtype, *drawn(2, 2, 15, 48)), drawn(2, 3, 4, 48).unbind(2)
    rows, cache = to(way, torch.float32, *rows), to(way, dtype, drawn(1, 25, 3, 16))[0]
    how, out = (*rows[:2], 1e-6), torch.empty_like(x)
    assert modulated_norm(x, *how, out) is out and torch.equal(out, modulated_norm(x, *how))
    added = gated_add(x, y, rows[2])
    assert gated_add(x, y, rows[2], x) is x and torch.equal(x, added)
    turned = QueryKeyNorm(ModelConfig(dim=48, ffn_dim=8, num_heads=3, num_layers=1)).to(x)
    tables, before = RotaryTable(16)(range(3), 1, 5, x.device), cache.clone()
    expected = turned(x[:1], tables)
    assert turned(x[:1], tables, out := cache[:, 5:20]) is out and torch.equal(out, expected)
    assert torch.equal(cache[:, :5], before[:, :5]) and torch.equal(cache[:, 20:], before[:, 20:])
