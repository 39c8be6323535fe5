"""Statistics of an attention call against their definitions in float64, at awkward sizes, on every device.

Error budgets are those asked of the capture: in float32 mean logits within 1e-5 of the largest logit and mass
within 1e-6; in bfloat16 no worse than twice the error of the same formula in plain PyTorch.
"""

import pytest
import torch

from wan import attention, reductions
from wan.attention import attention_with_lse

# heads, head dim, tokens a frame, query frames, key frames
SIZES = [
    (3, 16, 5, 3, 6),
    (3, 64, 5, 1, 7),
    (2, 128, 1560, 1, 2),
    (12, 16, 16, 3, 21),
    (1, 32, 24, 2, 2),
    (3, 128, 7, 3, 3),
]


def call(size, dtype, device):
    """q, k and lse of one fused attention call, and its logits and probabilities by definition in float64."""
    heads, dim, S, query_frames, key_frames = size
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, query_frames * S, heads, dim, generator=generator) * 2
    k = torch.randn(1, key_frames * S, heads, dim, generator=generator) + 0.5
    q, k = (x.to(device, dtype) for x in (q, k))
    _, lse = attention_with_lse(*(x.transpose(1, 2) for x in (q, k, k)))
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * dim**-0.5
    return q, k, lse, logits, logits.softmax(-1)


def per_frame(tokens: torch.Tensor, size) -> torch.Tensor:
    """[B, H, Lq, Lk] -> [B, H, Fq, S, Fk, S]."""
    S = size[2]
    return tokens.unflatten(2, (-1, S)).unflatten(4, (-1, S))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_frame_logits(size, device):
    q, k, _, logits, _ = call(size, torch.float32, device)
    means = reductions.frame_means(k, size[4])
    found = reductions.frame_logits(q, means, size[3])
    expected = per_frame(logits, size).mean((3, 5))
    assert found.dtype == torch.float32 and found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * logits.abs().max()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_key_curve(size, device, monkeypatch):
    q, k, _, logits, _ = call(size, torch.float32, device)
    monkeypatch.setattr(reductions, "CHUNK_ELEMENTS", 3 * size[0] * size[1])  # three keys at a time
    found = reductions.key_curve(q, k)
    assert (found - logits.mean(2)).abs().max() <= 1e-5 * logits.abs().max()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_frame_mass(size, device, monkeypatch):
    q, k, lse, _, probabilities = call(size, torch.float32, device)
    monkeypatch.setattr(reductions, "CHUNK_ELEMENTS", 7 * size[0] * k.shape[1])  # seven query rows at a time
    found = reductions.frame_mass(q, k, lse, size[3], size[4])
    expected = per_frame(probabilities, size).sum(5).mean(3)
    assert (found - expected).abs().max() <= 1e-6
    assert (found.sum(-1) - 1).abs().max() <= 1e-5


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bfloat16_is_no_worse_than_plain_pytorch(size, device):
    """Inputs are bfloat16; the reference sees the same rounded inputs,
    plain PyTorch rounds its products as it does.
    """
    q, k, lse, logits, probabilities = call(size, torch.bfloat16, device)
    expected_logits = per_frame(logits, size).mean((3, 5))
    expected_mass = per_frame(probabilities, size).sum(5).mean(3)
    plain = torch.einsum("bqhd,bkhd->bhqk", q, k) * size[1] ** -0.5
    plain_logits = per_frame(plain.float(), size).mean((3, 5))
    plain_mass = per_frame(plain.float().softmax(-1), size).sum(5).mean(3)

    found_logits = reductions.frame_logits(q, reductions.frame_means(k, size[4]), size[3])
    found_mass = reductions.frame_mass(q, k, lse, size[3], size[4])
    assert (found_logits - expected_logits).abs().max() <= 2 * (
        plain_logits - expected_logits
    ).abs().max() + 1e-6
    assert (found_mass - expected_mass).abs().max() <= 2 * (plain_mass - expected_mass).abs().max() + 1e-6
    assert (found_mass.sum(-1) - 1).abs().max() <= 1e-5


@pytest.mark.parametrize("size", SIZES[:2], ids=str)
def test_token_mass(size, device, monkeypatch):
    q, k, _, _, probabilities = call(size, torch.float32, device)
    monkeypatch.setattr(reductions, "CHUNK_ELEMENTS", 2 * size[0] * k.shape[1])
    found = reductions.token_mass(q, k, size[3])
    expected = probabilities.unflatten(2, (size[3], -1)).mean(3)
    assert (found - expected).abs().max() <= 1e-6


@pytest.mark.parametrize("length", [1, 3, 64, 337])
def test_a_softmax_in_place_is_that_of_torch(length, device):
    logits = (torch.randn(2, 3, 5, length, generator=torch.Generator().manual_seed(0)) * 9).to(device)
    assert torch.equal(reductions._softmax_(logits.clone()), logits.softmax(-1))


def test_a_softmax_under_gradients_leaves_its_logits():
    logits = torch.randn(3, 7, requires_grad=True)
    found, before = reductions._softmax_(logits), logits.clone()
    assert found.requires_grad and torch.equal(found, logits.softmax(-1)) and torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_token_matrix(dtype, device, monkeypatch):
    size = SIZES[0]
    q, k, _, logits, probabilities = call(size, torch.float32, device)
    monkeypatch.setattr(reductions, "CHUNK_ELEMENTS", 4 * size[0] * k.shape[1])
    for is_logits, expected in ((True, logits), (False, probabilities)):
        found = reductions.token_matrix(q, k, is_logits, dtype)
        assert found.device.type == "cpu" and found.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 2**-11
        assert (found - expected.cpu()).abs().max() <= tolerance * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_log_sum_exp_of_the_fused_call(size, device):
    q, _, lse, logits, _ = call(size, torch.float32, device)
    assert lse.shape == (1, size[0], q.shape[1]) and lse.dtype == torch.float32
    assert (lse - logits.logsumexp(-1)).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_device_without_fused_calls_goes_by_formula(dtype, monkeypatch):
    monkeypatch.setattr(attention, "_attention_by_formula", lambda *_: "by formula")
    q = torch.empty(1, 3, 5, 16, dtype=dtype, device="meta")
    assert attention.attention_with_lse(q, q, q) == "by formula"
