"""The parts of a layer against their formulas in float64:
on the CPU the PyTorch definitions, on CUDA the fused kernels.

In bfloat16 the budget is half a unit in the last place of the result plus what float32 arithmetic may add.
"""

import copy

import pytest
import torch
from conftest import golden_config
from helpers.behind_attention import LAYER_ERROR, error_behind_attention

from wan import model as layers
from wan.config import ModelConfig
from wan.model import FeedForward, GatedAdd, ModulatedNorm, QueryKeyNorm, teacher_forcing_mask
from wan.rope import RotaryTable

pytestmark = pytest.mark.real_gpu  # its kernels; test_kernels.py interprets them
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SHAPES = pytest.mark.parametrize(
    ("batch", "frames", "tokens", "heads", "head_dim", "rows"),
    [(1, 3, 5, 3, 16, 3), (2, 3, 5, 3, 16, 3), (2, 4, 7, 12, 16, 1), (1, 3, 24, 12, 128, 3)],
)


def budget(expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return expected.abs() * (2**-8 if dtype == torch.bfloat16 else 0) + 3e-6 * expected.abs().max()


def inputs(dtype, device, *shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


@DTYPES
@SHAPES
@torch.no_grad()
def test_modulated_norm(batch, frames, tokens, heads, head_dim, rows, dtype, device):
    dim = heads * head_dim
    (x,) = inputs(dtype, device, (batch, frames * tokens, dim))
    (e,) = inputs(torch.float32, device, (batch, rows, 6, dim))
    _, scale, shift, *_ = e.unbind(2)  # strided, as in a layer
    found = ModulatedNorm(dim, 1e-6)(x * 3 + 2, scale, shift)
    wide = (x * 3 + 2).double().unflatten(1, (rows, -1))
    normed = (wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    expected = (normed * (1 + scale.double()[:, :, None]) + shift.double()[:, :, None]).flatten(1, 2)
    assert found.dtype == dtype
    # PyTorch's own LayerNorm is stored in bfloat16 before it is modulated, which the fused kernel avoids
    extra = (
        normed.abs().max() * (1 + scale.abs().max()) * 2**-9
        if dtype == torch.bfloat16 and device.type == "cpu"
        else 0
    )
    assert ((found - expected).abs() <= budget(expected, dtype) + extra).all()


@DTYPES
@SHAPES
@torch.no_grad()
def test_gated_add(batch, frames, tokens, heads, head_dim, rows, dtype, device):
    dim = heads * head_dim
    x, y = inputs(dtype, device, (batch, frames * tokens, dim), (batch, frames * tokens, dim))
    (e,) = inputs(torch.float32, device, (batch, rows, 6, dim))
    gate = e.unbind(2)[5]
    found = GatedAdd()(x, y, gate)
    expected = x.double() + (y.double().unflatten(1, (rows, -1)) * gate.double()[:, :, None]).flatten(1, 2)
    assert found.dtype == dtype and ((found - expected).abs() <= budget(expected, dtype)).all()


@DTYPES
@SHAPES
@torch.no_grad()
def test_a_norm_behind_a_sum_has_the_bits_of_both_apart(
    batch, frames, tokens, heads, head_dim, rows, dtype, device
):
    """With graphs a layer's last sum and the next one's norm are one kernel, without they are two."""
    if device.type != "cuda":
        pytest.skip("it is a kernel of GPUs, which test_kernels.py interprets")
    from wan.kernels import fused

    dim = heads * head_dim
    x, y = inputs(dtype, device, (batch, frames * tokens, dim), (batch, frames * tokens, dim))
    (e,) = inputs(torch.float32, device, (batch, rows, 6, dim))
    shift, scale, *_, gate = e.unbind(2)
    total = GatedAdd()(x, y, gate)
    expected, place = ModulatedNorm(dim, 1e-6)(total, scale, shift), torch.empty_like(x)
    fused.add_norm(x, y, gate, scale, shift, 1e-6, places=(x, place))
    assert torch.equal(x, total) and torch.equal(place, expected)


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
        turns = torch.cat(
            [
                time[:, None].expand(-1, tokens, -1),
                row[None].expand(frames, tokens, -1),
                column[None].expand(frames, -1, -1),
            ],
            -1,
        ).flatten(0, 1)[:, None]  # [L, 1, D/2]
        expected = torch.view_as_real(torch.view_as_complex(expected.unflatten(-1, (-1, 2))) * turns).flatten(
            -2
        )
    extra = expected.abs().max() * 2**-8 if dtype == torch.bfloat16 and device.type == "cpu" else 0
    assert (
        found.shape == expected.shape and ((found - expected).abs() <= budget(expected, dtype) + extra).all()
    )


@DTYPES
@SHAPES
@torch.no_grad()
def test_keys_and_values_come_to_their_places(batch, frames, tokens, heads, head_dim, rows, dtype, device):
    """In the same bits as elsewhere."""
    config = ModelConfig(dim=heads * head_dim, ffn_dim=8, num_heads=heads, num_layers=1)
    attn = layers.SelfAttention(config, 0)
    attn.norm_q.weight.copy_(torch.linspace(-1, 2, config.dim))
    attn.norm_k.weight.copy_(torch.linspace(1, -2, config.dim))
    attn.to(device, dtype)
    table, (x,) = RotaryTable(head_dim), inputs(dtype, device, (batch, frames * tokens, config.dim))
    rope = layers.Rope(*(table(range(at, at + frames), 1, tokens, device) for at in (4, 1)))
    expected = attn.norm_q(attn.q(x), rope.queries), attn.norm_k(attn.k(x), rope.keys), attn.values(x)
    places = tuple(torch.empty_like(part) for part in expected[1:])
    for given in (None, places):
        found = attn.project(x, rope, False, given)
        assert all(map(torch.equal, found, expected))
    assert found[1] is places[0] and found[2] is places[1]


@DTYPES
@pytest.mark.parametrize("rows", [1, 3])
def test_a_layer_behind_attention(rows, dtype, device):
    assert error_behind_attention(rows, dtype, device) <= LAYER_ERROR[dtype]


@DTYPES
@torch.no_grad()
def test_feed_forward(dtype, device):
    """No worse than twice the error of three plain PyTorch operations in the same dtype."""
    torch.manual_seed(0)
    ffn = FeedForward(48, 96).to(device, dtype)
    (x,) = inputs(dtype, device, (2, 15, 48))
    expected = copy.deepcopy(ffn).double().cpu()(x.double().cpu()).to(device)
    plain = torch.nn.Sequential.forward(ffn, x)
    assert (ffn(x) - expected).abs().max() <= 2 * (plain - expected).abs().max() + 1e-6


@torch.no_grad()
def test_the_fused_feed_forward_is_the_same_function(monkeypatch):
    """The GPU's way, which PyTorch also has on a CPU: bfloat16 rounds it once less."""
    torch.manual_seed(0)
    ffn = FeedForward(48, 96).to(torch.bfloat16)
    (x,) = inputs(torch.bfloat16, "cpu", (2, 15, 48))
    expected = copy.deepcopy(ffn).double()(x.double())
    plain = (ffn(x) - expected).abs().max()
    monkeypatch.setattr(layers, "fused_kernels", lambda _: True)
    assert ffn(x).shape == x.shape and (ffn(x) - expected).abs().max() <= 2 * plain


def test_time_turns_once_in_two_pi_frames():
    """The fastest time frequency is 1 rad a frame, the wave that passes for a sink at frame 0 (21 frames:
    3.3 periods).
    """
    turns = RotaryTable(128).freqs_cis(0, torch.arange(7))
    assert turns[:, 0].angle()[1].item() == pytest.approx(1.0) and turns.shape == (7, 22)
    assert RotaryTable(golden_config()["model"]["head_dim"]).axes_dim == (8, 4, 4) and RotaryTable(
        128
    ).axes_dim == (44, 42, 42)


def test_teacher_forcing_mask():
    """Against its sentence, cell by cell: two blocks, [1, 2] frames of two tokens."""
    blocks, S = [0, 1, 1], 2
    mask = teacher_forcing_mask(blocks, S)
    block = [b for b in blocks for _ in range(S)]
    for q in range(12):
        for k in range(12):
            q_clean, k_clean, q_block, k_block = q < 6, k < 6, block[q % 6], block[k % 6]
            noisy_query = k_block < q_block if k_clean else k_block == q_block
            assert bool(mask[q, k]) == ((k_clean and k_block <= q_block) if q_clean else noisy_query)
