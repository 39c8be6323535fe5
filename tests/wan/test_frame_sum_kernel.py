"""The kernel that reads queries and keys for mean logits, against float64: interpreted, or run on a GPU."""

import pytest
import torch
from conftest import golden_model
from helpers.kernels import drawn, require_triton, where
from helpers.rollouts import TWO_STEPS

from wan import late_logits, reductions
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.capture import CaptureRequest
from wan.pipeline import CausalInferencePipeline

require_triton()


@where
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "size",
    [(3, 16, 5, 3, 4), (2, 24, 300, 1, 2), (1, 64, 256, 2, 1), (5, 16, 7, 3, 0)],
    ids=lambda size: "heads {} of {}, {} tokens a frame, frames {} and {}".format(*size),
)
def test_sums_of_queries_and_mean_keys(place, dtype, size):
    """Of queries between others, and keys in a cache; what lies around the means stays."""
    from wan.kernels import frame_sum as frame_sum_kernel

    heads, dim, S, query_frames, count = size
    q = drawn(2, query_frames * S, 3, heads, dim).to(place, dtype)[:, :, 1]  # as an exchange gives them
    cache = (drawn(2, (count + 3) * S, heads, dim) + 0.5).to(place, dtype)
    k, means = cache[:, 2 * S : (2 + count) * S], torch.full((2, count + 3, heads, dim), 7.0, device=place)
    sums = frame_sum_kernel.sums_and_means(q, query_frames, k, means[:, 2 : 2 + count])
    expected = q.double().unflatten(1, (query_frames, S)).sum(2)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums.double(), expected, atol=1e-6 * S, rtol=1e-6)
    expected = k.double().unflatten(1, (count, S)).mean(2)
    torch.testing.assert_close(means[:, 2 : 2 + count].double(), expected, atol=1e-6, rtol=1e-6)
    assert (means[:, :2] == 7).all() and (means[:, 2 + count :] == 7).all()


@where
def test_heads_that_do_not_lie_together(place):
    from wan.kernels import frame_sum as frame_sum_kernel

    q, k = (drawn(1, 10, 4, 16).to(place)[:, :, 1:] for _ in range(2))
    means = torch.empty(1, 2, 3, 16, device=place)
    sums = frame_sum_kernel.sums_and_means(q, 2, k, means)
    torch.testing.assert_close(sums, q.unflatten(1, (2, 5)).sum(2))
    torch.testing.assert_close(means, k.unflatten(1, (2, 5)).mean(2))


@where
@torch.no_grad()
def test_a_rollout(place, monkeypatch):
    """Captured with the kernel and without, block after block of a window."""
    dtype, atol = (torch.float32, 1e-5) if place == "cpu" else (torch.bfloat16, 1e-4)
    model = golden_model().to(place, dtype)
    noise, text = drawn(2, 12, 16, 4, 6).to(place, dtype), drawn(2, 32, 64).to(place, dtype)
    pipeline = CausalInferencePipeline(model, **TWO_STEPS)
    from wan.kernels import frame_sum as frame_sum_kernel

    found, launched, kernel = [], [], frame_sum_kernel.sums_and_means
    monkeypatch.setattr(
        frame_sum_kernel, "sums_and_means", lambda *given: launched.append(len(found)) or kernel(*given)
    )
    monkeypatch.setattr(late_logits, "SMALL", 0)  # calls of a GPU do not wait for their forward's end
    for kernels in (True, False):
        monkeypatch.setattr(reductions, "kernels_take", lambda q, kernels=kernels: kernels)
        with ATTENTION_WEIGHT_CAPTURE.capture(CaptureRequest(granularity="frame", mass=False)) as calls:
            pipeline.inference(noise, prompt_embeds=text, renoise=noise[None])
        found.append(calls)
    assert launched == [0] * len(found[0])
    for call, expected in zip(*found, strict=True):
        torch.testing.assert_close(call["frame_logits"], expected["frame_logits"], atol=atol, rtol=1e-5)
