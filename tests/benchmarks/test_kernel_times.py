"""The kernels' benchmark without a GPU: what it refuses, and how it takes errors."""

import pytest
import torch

from experiments.benchmarks import kernels
from wan.errors import ConfigError


@pytest.fixture
def inputs(monkeypatch):
    monkeypatch.setattr(kernels, "CHUNK", 3)
    q, k, v = torch.randn(1, 3, 8, 16), torch.randn(1, 3, 10, 16), torch.randn(1, 3, 10, 16)
    return q, k, v, torch.einsum("bhqd,bhkd->bhqk", q, k) / 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so(tmp_path):
    with pytest.raises(ConfigError, match="none is here"):
        kernels.run(["--output_path", str(tmp_path / "report.json")])
    assert not list(tmp_path.iterdir())


def test_errors_of_attention_are_of_the_first_and_the_last_head(inputs):
    q, k, v, logits = inputs
    out, lse = logits.softmax(-1) @ v, logits.logsumexp(-1)
    out[0, 1] += 1  # a head that is not looked at
    lse[0, 1] += 1
    assert max(kernels.attention_errors(out, lse, q, k, v)) < 1e-5
    lse[0, 2, 7] += 0.25
    assert kernels.attention_errors(1.5 * out, lse, q, k, v) == pytest.approx([0.5, 0.25], abs=1e-5)


def test_the_error_of_mass_is_the_largest(inputs):
    q, k, _, logits = inputs
    mass = logits.softmax(-1).unflatten(-1, (5, 2)).sum(-1).mT.clone()
    mass[0, 1] += 1
    assert kernels.mass_error(mass, q, k, 5) < 1e-6
    mass[0, 2, 4, 7] += 0.25
    assert kernels.mass_error(mass, q, k, 5) == pytest.approx(0.25, abs=1e-5)
