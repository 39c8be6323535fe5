"""The benchmark of attention's kernels without a GPU: what it refuses, how it takes errors, its table."""

import pytest
import torch

from experiments.dev import benchmark_attention
from wan.errors import ConfigError


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so(tmp_path):
    with pytest.raises(ConfigError, match="none is here"):
        benchmark_attention.run(["--output_path", str(tmp_path / "attention.json")])
    assert not list(tmp_path.iterdir())


def test_errors_are_of_the_first_and_the_last_head(monkeypatch):
    monkeypatch.setattr(benchmark_attention, "CHUNK", 3)
    q, k, v = torch.randn(1, 3, 8, 16), torch.randn(1, 3, 10, 16), torch.randn(1, 3, 10, 16)
    logits = q @ k.mT / 4
    out, lse = logits.softmax(-1) @ v, logits.logsumexp(-1)
    assert max(benchmark_attention.errors_of(out, lse, q, k, v)) < 1e-5
    out[0, 1] += 1  # a head that is not looked at
    lse[0, 1] += 1
    assert max(benchmark_attention.errors_of(out, lse, q, k, v)) < 1e-5
    lse[0, 2, 7] += 0.25
    relative, largest = benchmark_attention.errors_of(1.5 * out, lse, q, k, v)
    assert (relative, largest) == pytest.approx((0.5, 0.25), abs=1e-5)


def test_its_table_has_a_row_a_number_of_keys():
    environment = {"device": "NVIDIA H200", "torch": "2.11", "date": "2026-01-01", "git": "0", "command": "x"}
    row = {"milliseconds": [0.2, 0.1, 0.9], "errors": [0.0022, 1e-6]}
    report = {
        "repeats": 15,
        "kernels": ["cuDNN"],
        "rows": [{"keys": 512, "kernels": {"cuDNN": row}}],
        "environment": environment,
    }
    lines = benchmark_attention.table(report).splitlines()
    assert lines[0] == "| keys | cuDNN | error of cuDNN, output; log-sum-exp |"
    assert lines[2] == "| 512 | 0.200 ms (0.100-0.900) | 0.22%; 1.0e-06 |"
