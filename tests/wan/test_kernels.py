"""The Triton kernels without a GPU: interpreted against float64, and compiled for GPUs that are not here."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from helpers.rollouts import drawn, require_triton

from wan import attention, reductions
from wan import cache as caches
from wan.keys import KeyBias, RotaryTable, rotate

require_triton()
from wan.kernels import fused, mass  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU is here: the other tests run them on it"
)
BFLOAT16 = 2**-7  # relative: the interpreter cuts off where a GPU rounds


@pytest.fixture(params=[(2, 2, 16, 33, 70), (1, 1, 24, 130, 135)], ids=str)
def call(request, monkeypatch):
    """q and k that lie in larger buffers, as a cache's do, with their log-sum-exp and logits in float64."""
    batch, heads, dim, len_q, len_k = request.param
    q = drawn(batch, len_q + 3, heads + 1, dim)[:, 2:-1, 1:] * 2
    k = (drawn(batch, len_k + 5, heads + 1, dim) + 0.5)[:, 5:, :-1]
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * dim**-0.5
    monkeypatch.setattr(reductions, "mass_kernels", lambda q: mass)
    return q, k, logits.logsumexp(-1).float(), logits


def test_mass_of_frames(call):
    q, k, lse, logits = call
    for frames in (1, k.shape[1] // 5):
        found = reductions.frame_mass(q, k, lse, 1, frames)
        expected = logits.softmax(-1).unflatten(-1, (frames, -1)).sum(-1).mean(2, keepdim=True)
        torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)


def test_segments_have_a_log_sum_exp_each(call):
    """Of sizes below, at and above a tile's; a row's sum is that of all of them."""
    q, k, lse, logits = call
    segments = [(0, 5), (5, 69), (69, k.shape[1]), (3, 70), (2, 3)]
    found = reductions.segment_lse(q, k, segments)
    expected = torch.stack([logits[..., start:stop].logsumexp(-1) for start, stop in segments], 2)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(found[:, :, :3].logsumexp(2), lse, atol=2e-6, rtol=1e-6)


def test_key_tokens(call):
    q, k, lse, logits = call
    for frames in (1, next(n for n in (3, 5, 7) if q.shape[1] % n == 0)):
        found, masses = mass.key_token_means(q, k, lse, frames)
        by_frame = logits.unflatten(2, (frames, -1)).mean(3)
        torch.testing.assert_close(found.double(), by_frame, atol=1e-5 * logits.abs().max().item(), rtol=0)
        expected = logits.softmax(-1).unflatten(2, (frames, -1)).mean(3)
        torch.testing.assert_close(masses.double(), expected, atol=1e-6, rtol=0)
        assert torch.equal(mass.key_token_mass(q, k, lse, frames), masses)


def test_groups_of_keys_that_are_merged(monkeypatch):
    """Three groups, of which heads see some; against float64."""
    q, k, v = (drawn(2, 3, n, 24) * 2 for n in (7, 20, 20))
    values = torch.tensor([[0, -torch.inf, 1.5, 0], [0, 0, 0, 0], [-torch.inf, -3, 0, -torch.inf]])
    bias = KeyBias(values, 5)
    logits = q.double() @ k.double().mT * 24**-0.5 + bias.per_token()[:, None]
    monkeypatch.setattr(attention, "fused_kernels", lambda x: fused)
    out, lse = attention.attend_by_groups(q, k, v, bias)
    # torch's own float32 attention is off by up to 3.2e-6 here, by what the processor's kernels round
    exact = logits.softmax(-1) @ v.double()
    plain = (q @ k.mT * 24**-0.5 + bias.per_token()[:, None]).softmax(-1) @ v
    off = (plain - exact).abs().max().item()
    torch.testing.assert_close(out.double(), exact, atol=2 * off, rtol=0)
    torch.testing.assert_close(lse.double(), logits.logsumexp(-1), atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tables", [1, 2], ids=["of all", "of each item"])
def test_keys_that_are_turned_into_a_cache(tables, dtype, monkeypatch):
    """And what lies around them stays; rows that do not lie as a cache's do are turned without the kernel."""
    raw, keys = drawn(2, 9, 3, 24).to(dtype), drawn(2, 12, 3, 24).to(dtype)
    cos, sin = RotaryTable(24)(range(4, 9), 1, 1, torch.device("cpu"))
    cos, sin = (torch.stack([x, x.flip(0)]) if tables == 2 else x for x in (cos, sin))
    expected = keys.clone()
    expected[:, 3:8] = rotate(raw[:, 2:7].double(), cos, sin).to(dtype)
    called = []
    monkeypatch.setattr(caches, "fused_kernels", lambda x, *_: called.append(x) or fused)
    strided = drawn(2, 12, 4, 24).to(dtype)[:, :, 1:].copy_(keys)
    for target in (keys, strided):
        caches.rotate_into(target[:, 3:8], raw[:, 2:7], cos, sin)
        rtol = BFLOAT16 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(target, expected, atol=1e-6, rtol=rtol)
    assert len(called) == 1


@pytest.mark.beside
def test_they_compile(tmp_path):
    """For Hopper, as callers call them: on tensor cores, within registers and memory."""
    command = [sys.executable, "tests/helpers/compiled_kernels.py"]
    more = {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(command, cwd=ROOT, env=os.environ | more, capture_output=True, text=True)
    assert run.returncode == 0 and len(run.stdout.splitlines()) == 11, run.stderr


# Masses from the sums that FlashAttention-4 stores where a key frame begins (wan/wings/fa4.py).
LOG2_E = 1.4426950408889634


def test_masses_from_tails_of_frames():
    """Formulas in float64 stand in for the kernel, which walks from the last key to the first."""
    q, k = drawn(1, 30, 3, 16) * 3, drawn(1, 120, 3, 16)
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 4
    tails = torch.empty(2, 1, 3, 3, 30)
    for frame in range(3):
        behind = logits[..., frame * 40 :] * LOG2_E
        maximum = behind.amax(-1)
        tails[0, :, :, frame] = (behind - maximum[..., None]).exp2().sum(-1)
        tails[1, :, :, frame] = maximum
    of_frames = logits.softmax(-1).unflatten(-1, (3, 40)).sum(-1)  # [B, H, Lq, Fk]
    for frames in (1, 3, 30):
        expected = of_frames.unflatten(2, (frames, -1)).mean(3)
        found = reductions.mass_of_tails(tails, frames)
        torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=0)
