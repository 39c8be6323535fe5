"""The mass benchmark without a GPU: what it refuses, how it takes errors, its table."""

import pytest
import torch

from experiments.dev import benchmark_attention, benchmark_mass, measure_kernels
from wan.errors import ConfigError


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("benchmark", [benchmark_mass, benchmark_attention])
def test_without_a_gpu_it_says_so(benchmark, tmp_path):
    with pytest.raises(ConfigError, match="none is here"):
        benchmark.run(["--output_path", str(tmp_path / "report.json")])
    assert not list(tmp_path.iterdir())


def test_the_error_is_the_largest_of_the_first_and_the_last_head(monkeypatch):
    monkeypatch.setattr(measure_kernels, "CHUNK", 3)
    q, k = torch.randn(1, 8, 3, 16), torch.randn(1, 10, 3, 16)
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4
    mass = logits.softmax(-1).unflatten(-1, (5, 2)).sum(-1).mT.clone()
    assert benchmark_mass.largest_error(mass, q, k, 5) < 1e-6
    mass[0, 1] += 1  # a head that is not looked at
    mass[0, 2, 4, 7] += 0.25
    assert benchmark_mass.largest_error(mass, q, k, 5) == pytest.approx(0.25, abs=1e-5)


def test_its_table_has_a_row_a_way_and_a_column_a_number_of_frames():
    environment = {"device": "NVIDIA H200", "torch": "2.11", "date": "2026-01-01", "git": "0", "command": "x"}
    rows = [
        {"way": way, "key_frames": n, "milliseconds": [n / 10, 0.1, 0.9], "largest_error": error}
        for way, n, error in ((benchmark_mass.ATTENTION, 3, None), ("mass", 3, 1e-6), ("mass", 21, 2e-6))
    ]
    said = benchmark_mass.table({"rows": rows, "repeats": 15, "calls_a_turn": 5, "environment": environment})
    lines = said.splitlines()
    assert lines[0] == "| a call | 3 key frames | 21 key frames | largest error |"
    assert lines[2].endswith("| 0.300 ms (0.100-0.900) |  |  |")
    assert lines[3] == "| mass | 0.300 ms (0.100-0.900) | 2.100 ms (0.100-0.900) | 2.0e-06 |"
