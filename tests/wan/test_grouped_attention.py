"""Attention by groups of keys against a float64 softmax under the same bias, on awkward sizes."""

import pytest
import torch
import torch.nn.functional as F

from wan.attention import attend_by_groups, attention_with_lse
from wan.keys import KeyBias

HEADS, QUERIES, DIM, SLOTS, S = 3, 10, 12, 5, 7


def inputs(device, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, HEADS, n, DIM, generator=generator) for n in (QUERIES, SLOTS * S, SLOTS * S))
    return [(2 * x).to(device, dtype) for x in (q, k, v)]


def by_formula(q, k, v, bias: KeyBias):
    """Output and log-sum-exp in float64."""
    logits = q.double() @ k.double().mT * DIM**-0.5 + bias.per_token().to(q.device).double()[:, None]
    return logits.softmax(-1) @ v.double(), logits.logsumexp(-1)


def random_bias(seed: int) -> KeyBias:
    """Any pattern of knocked-out and biased slots in which every head keeps a slot."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(HEADS, SLOTS, generator=generator) * (
        torch.rand(HEADS, SLOTS, generator=generator) < 0.5
    )
    out = torch.rand(HEADS, SLOTS, generator=generator) < 0.5
    out[:, torch.randint(SLOTS, (1,), generator=generator)] = False
    return KeyBias(values.masked_fill(out, -torch.inf), S)


@pytest.mark.parametrize("seed", range(12))
def test_groups_agree_with_a_float64_masked_softmax(seed, device):
    q, k, v = inputs(device, seed=seed)
    out, lse = attend_by_groups(attention_with_lse, q, k, v, random_bias(seed))
    expected, expected_lse = by_formula(q, k, v, random_bias(seed))
    assert out.dtype == q.dtype and out.shape == q.shape
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", range(6))
def test_in_bfloat16_it_rounds_once_more_than_the_library_under_the_same_mask(seed, device):
    q, k, v = inputs(device, torch.bfloat16, seed)
    bias = random_bias(seed)
    expected = by_formula(q, k, v, bias)[0]
    mask = bias.per_token().to(device, torch.bfloat16)[None, :, None].expand(2, HEADS, QUERIES, SLOTS * S)
    library = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    out, _ = attend_by_groups(attention_with_lse, q, k, v, bias)
    assert (out.double() - expected).abs().max() <= 3 * (library.double() - expected).abs().max()


def test_logits_far_apart_do_not_overflow():
    q, k, v = inputs("cpu")
    k[:, :, :S] *= 200  # the knocked-out slot has by far the largest logits
    bias = KeyBias(torch.zeros(HEADS, SLOTS), S)
    bias.values[1, 0] = -torch.inf
    out, _ = attend_by_groups(attention_with_lse, q, k, v, bias)
    torch.testing.assert_close(out.double(), by_formula(q, k, v, bias)[0], atol=1e-5, rtol=0)


def test_keys_that_no_head_sees_are_not_read():
    q, k, v = inputs("cpu")
    bias = KeyBias(torch.zeros(HEADS, SLOTS), S)
    bias.values[:, 2] = -torch.inf
    k[:, :, 2 * S : 3 * S] = v[:, :, 2 * S : 3 * S] = torch.nan
    read = []

    def attend(q, k, v):
        read.append(k.shape[2])
        return attention_with_lse(q, k, v)

    out, _ = attend_by_groups(attend, q, k, v, bias)
    assert out.isfinite().all() and read == [2 * S, 2 * S]


def test_without_a_bias_it_is_the_plain_call_bit_for_bit():
    q, k, v = inputs("cpu")
    out, lse = attend_by_groups(attention_with_lse, q, k, v, KeyBias(torch.zeros(HEADS, SLOTS), S))
    assert all(map(torch.equal, (out, lse), attention_with_lse(q, k, v)))


def test_a_head_without_keys_is_an_error():
    bias = KeyBias(torch.zeros(HEADS, SLOTS), S)
    bias.values[2] = -torch.inf
    with pytest.raises(ValueError, match="head 2 would see no key"):
        attend_by_groups(attention_with_lse, *inputs("cpu"), bias)
