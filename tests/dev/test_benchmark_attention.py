"""The benchmark of attention's kernels without a GPU: how it takes errors, its table."""

import json

import pytest
import torch

from experiments.dev import benchmark_attention, measure_kernels


def gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def test_errors_are_of_the_first_and_the_last_head(monkeypatch):
    monkeypatch.setattr(measure_kernels, "CHUNK", 3)
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
        **{"queries": 4680, "heads": 12, "head_dim": 128, "repeats": 15, "calls_a_turn": 5},
        "kernels": ["cuDNN"],
        "rows": [{"keys": 512, "kernels": {"cuDNN": row}}],
        "environment": environment,
    }
    lines = benchmark_attention.table(report).splitlines()
    assert lines[0] == "| keys | cuDNN | error of cuDNN, output; log-sum-exp |"
    assert lines[2] == "| 512 | 0.200 ms (0.100-0.900) | 0.22%; 1.0e-06 |"
    measured = {"milliseconds": [0.2, 0.1, 0.9], "errors": [0.0017]}
    products = [
        {"product": "4680 x 1536 by 8960, GELU", "kernels": {"cuBLAS": measured, "quack": measured}},
        {"product": "4680 x 1536 by 1536", "kernels": {"cuBLAS": measured}},
    ]
    below = benchmark_attention.table(report | {"products": products}).splitlines()[4:8]
    assert below[0] == "| product | cuBLAS | quack |"
    assert below[2].endswith("| 0.200 ms (0.100-0.900), error 0.17% | 0.200 ms (0.100-0.900), error 0.17% |")
    assert below[3] == "| 4680 x 1536 by 1536 | 0.200 ms (0.100-0.900), error 0.17% |  |"


def test_every_kernel_runs_over_every_number_of_keys(tmp_path, monkeypatch, capsys):
    """On a CPU, whose own attention stands in for both kernels, one of them wrong."""
    cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found = {"right": cpu, "wrong": lambda q, k, v: (2 * cpu(q, k, v)[0], cpu(q, k, v)[1] + 0.5)}
    monkeypatch.setattr(benchmark_attention, "kernels", lambda device: found)
    monkeypatch.setattr(measure_kernels, "QUERIES", 8)
    monkeypatch.setattr(measure_kernels, "require_gpu", lambda script: torch.device("cpu"))
    monkeypatch.setattr(measure_kernels, "milliseconds", lambda call: float(len(call())))
    monkeypatch.setattr(torch, "_addmm_activation", lambda b, x, w, use_gelu: gelu(x @ w + b))
    path = tmp_path / "attention_x.json"
    benchmark_attention.run(["--keys", "5", "12", "--repeats", "3", "--output_path", str(path)])
    report = json.loads(path.read_text())
    assert [row["keys"] for row in report["rows"]] == [5, 12] and report["queries"] == 8
    for row in report["rows"]:
        right, wrong = (row["kernels"][name] for name in found)
        assert right["milliseconds"] == [2, 2, 2] and right["errors"][0] < 0.01 and right["errors"][1] < 1e-3
        assert wrong["errors"] == pytest.approx([1, 0.5], abs=0.02)
    sizes = ["8 x 1536 by 8960, GELU", "8 x 8960 by 1536", "8 x 1536 by 1536"]
    assert [product["product"] for product in report["products"]] == sizes
    for product in report["products"]:
        assert product["kernels"]["cuBLAS"]["milliseconds"] == [8, 8, 8]
        assert product["kernels"]["cuBLAS"]["errors"][0] < 0.01
    assert benchmark_attention.table(report) in capsys.readouterr().out
