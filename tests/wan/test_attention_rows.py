"""Head dims whose rows a GPU's attention kernels cannot read: the same numbers, and no kernel of theirs."""

from functools import partial

import pytest
import torch
from helpers import pretended_gpu

from wan.attention import attention_with_lse, masked_attention_with_lse

aten = torch.ops.aten
HALF, FLOAT = torch.bfloat16, torch.float32
CUDNN = aten._scaled_dot_product_cudnn_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
LEN_Q, LEN_K = 5, 9


def inputs(device, dtype, head_dim):
    generator = torch.Generator().manual_seed(head_dim)
    return [
        torch.randn(2, 3, n, head_dim, generator=generator).to(device, dtype) for n in (LEN_Q, LEN_K, LEN_K)
    ]


def by_formula(q, k, v, mask):
    """Output and log-sum-exp in float64."""
    logits = (q.cpu().double() @ k.cpu().double().mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    return logits.softmax(-1) @ v.cpu().double(), logits.logsumexp(-1)


@pytest.mark.parametrize("head_dim", [6, 10, 12, 16, 128])
@pytest.mark.parametrize("dtype", [HALF, torch.float16, FLOAT])
def test_every_head_dim_is_that_of_the_formula(dtype, head_dim, device):
    q, k, v = inputs(device, dtype, head_dim)
    everything = torch.ones(LEN_Q, LEN_K, dtype=torch.bool)
    some = torch.arange(LEN_K) <= torch.arange(LEN_Q)[:, None]
    for mask, (out, lse) in (
        (everything, attention_with_lse(q, k, v)),
        (some, masked_attention_with_lse(q, k, v, some.to(device))),
    ):
        expected, expected_lse = by_formula(q, k, v, mask)
        rounding = 2 * torch.finfo(dtype).eps * v.abs().max().item() + 1e-5
        assert out.dtype == dtype and lse.shape == expected_lse.shape
        torch.testing.assert_close(out.cpu().double(), expected, atol=rounding, rtol=0)
        torch.testing.assert_close(lse.cpu().double(), expected_lse, atol=1e-3, rtol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: this counts calls of the pretended one")
@pytest.mark.parametrize(
    ("dtype", "head_dim", "plain", "masked"),
    [(HALF, dim, CUDNN, EFFICIENT) for dim in (8, 16, 64, 128)]  # 16 and 128 are the models'
    + [(HALF, dim, None, None) for dim in (4, 12, 20)]
    + [(FLOAT, dim, EFFICIENT, EFFICIENT) for dim in (12, 16, 128)]
    + [(FLOAT, dim, None, None) for dim in (6, 10)],
)
def test_kernels_get_the_rows_that_they_can_read(dtype, head_dim, plain, masked, monkeypatch):
    called = []

    def counted(operation, does, *given):
        called.append(operation)
        return does(*given)

    for operation, does in pretended_gpu.FUSED_ATTENTION.items():
        monkeypatch.setitem(pretended_gpu.FUSED_ATTENTION, operation, partial(counted, operation, does))
    with pretended_gpu.pretended_gpu() as gpu:
        q, k, v = inputs(gpu, dtype, head_dim)
        attention_with_lse(q, k, v)
        masked_attention_with_lse(q, k, v, torch.ones(LEN_Q, LEN_K, dtype=torch.bool, device=gpu))
    assert called == [one for one in (plain, masked) if one is not None]
