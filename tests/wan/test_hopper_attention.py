"""FlashAttention-4's kernel as launched here, with sums at key frames: on a Hopper GPU with the package."""

import pytest
import torch

from wan import backends as attention_backend
from wan import reductions

GPU = torch.device("cuda")
pytestmark = pytest.mark.skipif(
    not (
        torch.cuda.is_available()
        and attention_backend.installed_version("flash-attn-4") == attention_backend.LAUNCHED
    )
    or torch.cuda.get_device_capability()[0] != attention_backend.HOPPER,
    reason=f"no Hopper GPU with flash-attn-4 {attention_backend.LAUNCHED} here",
)

CALLS = {  # batch, heads, queries, key frames, keys of a frame
    "a block of 1.3B": (1, 12, 4680, 21, 1560),
    "whole tiles": (1, 2, 256, 4, 128),
    "a frame ends in each tile": (2, 3, 130, 9, 131),
    "one frame": (2, 2, 77, 1, 600),
    "two items": (2, 5, 390, 7, 390),
}


def call(sizes, factor: float = 1.0):
    """Queries, keys and values [B, H, L, D], which lie in larger buffers as a cache's do."""
    batch, heads, queries, frames, size = sizes
    generator = torch.Generator(GPU).manual_seed(0)

    def drawn(length):
        x = torch.randn(batch, length + 3, heads + 1, 128, generator=generator, device=GPU) * factor
        return x.bfloat16()[:, 2:-1, 1:].transpose(1, 2)

    return drawn(queries), drawn(frames * size), drawn(frames * size)


@pytest.mark.parametrize("factor", [1.0, 5.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("sizes", CALLS.values(), ids=CALLS)
def test_masses_are_those_of_the_softmax(sizes, factor):
    """Against float64, no worse than the kernel of their own; and the output is the same, bit for bit."""
    from wan.kernels.mass import query_frame_mass  # Triton is there only beside CUDA

    q, k, v = call(sizes, factor)
    frames = sizes[3]
    out, lse = attention_backend.fa4_attention(q, k, v)
    again, lse_again, tails = attention_backend.fa4_with_tails(q, k, v, frames)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)
    found = reductions.mass_of_tails(tails, 1)[:, :, 0]
    rows = q.double() * 128**-0.5
    exact = torch.cat([(part @ k.double().mT).softmax(-1) for part in rows.split(390, 2)], 2)
    expected = exact.unflatten(-1, (frames, -1)).sum(-1).mean(2)
    own_kernel = query_frame_mass(q.transpose(1, 2), k.transpose(1, 2), lse, frames).mean(3)
    worst = max(2 * (own_kernel - expected).abs().max().item(), 2e-6)
    assert (found - expected).abs().max() <= worst
    torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("factor", [1.0, 5.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("heads", [12, 6, 3, 40])
def test_queries_whose_keys_are_taken_in_chunks(heads, factor):
    """They are rounded twice, so their error may be √2 times that of one rounding, in both directions alike;
    the others are what the kernel alone gives, bit for bit.
    """
    from wan.kernels import split_keys as waves

    q, k, v = call((1, heads, 4680, 21, 1560), factor)
    whole, chunks = waves.plan(
        4680, 32760, 1, heads, torch.cuda.get_device_properties(0).multi_processor_count
    )
    assert chunks > 1 and whole < 4680
    out, lse = attention_backend.fa4_by_function(q, k, v)
    found, found_lse = attention_backend.fa4_attention(q, k, v)
    assert torch.equal(found[:, :, :whole], out[:, :, :whole])
    assert torch.equal(found_lse[..., :whole], lse[..., :whole])
    weights = (q[:, :2, whole:].double() @ k[:, :2].double().mT * 128**-0.5).softmax(-1)
    exact = weights @ v[:, :2].double()
    errors = [(x[:, :2, whole:] - exact).square().mean().sqrt() for x in (found, out)]
    assert errors[0] <= 2**0.5 * errors[1]
    torch.testing.assert_close(found_lse, lse, atol=1e-5, rtol=1e-6)
