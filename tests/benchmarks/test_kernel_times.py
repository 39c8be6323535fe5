"""The kernels' benchmark without a GPU: what it refuses, and how it takes errors."""

import pytest
import torch

from experiments.benchmarks import kernels
from wan.errors import ConfigError


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so(tmp_path):
    with pytest.raises(ConfigError, match="none is here"):
        kernels.run(["--output_path", str(tmp_path / "report.json")])
    assert not list(tmp_path.iterdir())


def test_errors_are_of_the_first_and_the_last_head(monkeypatch):
    monkeypatch.setattr(kernels, "CHUNK", 3)
    q, k, v = torch.randn(1, 3, 8, 16), torch.randn(1, 3, 10, 16), torch.randn(1, 3, 10, 16)
    weights = (torch.einsum("bhqd,bhkd->bhqk", q, k) / 4).softmax(-1)
    out, mass = weights @ v, weights.unflatten(-1, (5, 2)).sum(-1).mT.clone()
    out[0, 1] += 1  # a head that is not looked at
    mass[0, 1] += 1
    assert kernels.attention_error(out, q, k, v) < 1e-5 and kernels.mass_error(mass, q, k, 5) < 1e-6
    mass[0, 2, 4, 7] += 0.25
    assert kernels.attention_error(1.5 * out, q, k, v) == pytest.approx(0.5, abs=1e-5)
    assert kernels.mass_error(mass, q, k, 5) == pytest.approx(0.25, abs=1e-5)
