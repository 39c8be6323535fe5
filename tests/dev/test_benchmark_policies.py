"""The policy benchmark leaves the rows that it has, and counts only blocks that are timed."""

import json

import pytest
import torch

from experiments.dev import benchmark_policies, measure_capture, measure_policies
from wan.model import CausalWanModel
from wan.pipeline import CausalInferencePipeline
from wan.policies import make_policy


class Stopped(Exception):
    pass


def small_model() -> CausalWanModel:
    return CausalWanModel(dim=48, ffn_dim=16, num_heads=2, num_layers=2, freq_dim=8, text_dim=6, text_len=3)


def bench_of(seconds, monkeypatch):
    """A bench whose runs take what seconds() says; nothing is rolled out."""
    bench = measure_policies.Bench.__new__(measure_policies.Bench)
    monkeypatch.setattr(measure_policies.Bench, "compile_kernels", lambda self, policies: None)
    monkeypatch.setattr(measure_policies.Bench, "cache_mib", lambda self, policy: 1.0)
    monkeypatch.setattr(measure_policies.Bench, "block_seconds", lambda self, policy, captured: seconds())
    monkeypatch.setattr(measure_policies.Bench, "seconds_and_peak", lambda self, policy: (seconds(), 0.0))
    return bench


def test_a_run_that_is_stopped_leaves_its_rows(monkeypatch, tmp_path):
    runs = iter([1.0, 2.0, 3.0, 6.0, 5.0])  # window 9 and ema_sink, each plain and captured, and half a row

    def seconds():
        if (value := next(runs, None)) is None:
            raise Stopped
        return value

    kept = []
    with pytest.raises(Stopped):
        measure_policies.measure(bench_of(seconds, monkeypatch), 2, kept.append)
    assert [[row["name"] for row in rows] for rows in kept] == [["window 9"], ["window 9", "ema_sink 9 3"]]
    last = kept[-1][-1]
    assert (last["times_window"], last["captured_times_plain"], last["all_seconds"]) == (3.0, 2.0, [3.0])


def test_every_repeat_gives_a_ratio(monkeypatch):
    runs = iter(range(1, 1000))
    rows = measure_policies.measure(bench_of(lambda: next(runs), monkeypatch), 2, lambda rows: None)
    assert len(rows) == 11 and all(len(row["all_captured"]) == 2 for row in rows)
    assert rows[1]["all_seconds"] == [3, 25] and rows[1]["times_window"] == round((3 / 1 + 25 / 23) / 2, 4)


def test_the_smallest_run(tmp_path, monkeypatch):
    """Two policies on the miniature: the file has a row for each, and the memory that their caches have."""
    monkeypatch.setattr(measure_policies, "PAIRS", [({"name": "ema_sink", "window": 6, "sink": 3}, 6)])
    kept = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("experiments.dev.tables.save_report", lambda report, path: kept.append(report))
        flags = ["--num_frames", "18", "--repeats", "1", "--blocks", "1"]
        benchmark_policies.run(["--config_path", "configs/wan_mini.yaml", "--device", "cpu", *flags])
    assert [len(report["rows"]) for report in kept] == [1, 2] and json.dumps(kept)
    rows = kept[-1]["rows"]
    assert [row["name"] for row in rows] == ["window 6", "ema_sink 6 3"]
    assert all(row["seconds"] > 0 and row["captured_times_plain"] > 0 for row in rows)


def test_memory_is_that_of_the_buffers():
    """Without a rollout: what is counted is what a cache allocates."""
    model = small_model()
    noise = torch.zeros(1, 6, 16, 8, 8)
    pipeline = CausalInferencePipeline(model, 3)
    bench = measure_policies.Bench(measure_capture.Rollout(pipeline, noise, noise, noise), 1, 0, 0)
    for settings, _ in measure_policies.PAIRS:
        policy = make_policy(**settings)
        cache = model.new_kv_cache(1, 10**6, 8, 8, policy)
        held = sum(b.nbytes for buffers in (cache.keys, cache.values, cache.raw_keys) for b in buffers)
        assert bench.cache_mib(policy) == round(held / 2**20, 1) > 0
