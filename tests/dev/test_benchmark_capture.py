"""The capture benchmark measures the rollout that its config describes."""

import json
from types import SimpleNamespace

import pytest
import torch

from experiments.dev import benchmark_capture, benchmark_maps, measure_capture
from wan.config import ModelConfig, load_config


def test_random_weights_keep_the_configs_cache_policy():
    settings = {"cache_policy": {"name": "deep_sink", "window": 12, "sink": 6}}
    config = load_config("configs/wan_mini.yaml", settings)
    sizes = ModelConfig(dim=24, ffn_dim=16, num_heads=2, num_layers=1, freq_dim=8, text_dim=8, text_len=4)
    pipeline = measure_capture.random_pipeline(config, sizes, torch.float32, torch.device("cpu"))
    assert (pipeline.cache_policy.name, pipeline.cache_policy.window) == ("deep_sink", 12)


def test_graphs_are_said_under_the_table(monkeypatch):
    """And put on the model before anything is measured."""
    replayed = []
    monkeypatch.setattr("wan.kernels.graphs.apply_cuda_graphs", replayed.append)
    monkeypatch.setattr("experiments.extraction.devices.choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(measure_capture, "measure", lambda rollout, *given: replayed.append("measured") or {})
    pipeline = SimpleNamespace(model="a model")
    rollout, sizes = SimpleNamespace(pipeline=pipeline, noise=torch.zeros(1)), SimpleNamespace(num_layers=1)
    monkeypatch.setattr(measure_capture, "make_rollout", lambda *given: (rollout, sizes))
    benchmark_capture.run(["--config_path", "configs/wan_mini.yaml", "--graphs"])
    assert replayed == ["a model", "measured"]
    report = {"random_weights": False, "model": "wan-mini", "num_frames": 21, "rows": {}, "dtype": None}
    report["environment"] = dict.fromkeys(("device", "torch", "date", "git", "command"), "x")
    assert "layers replayed from CUDA graphs" in benchmark_capture.table(report | {"graphs": True})
    assert "graphs" not in benchmark_capture.table(report)


class Killed(BaseException):
    pass


@pytest.mark.parametrize(("module", "untimed"), [(benchmark_capture, 5), (benchmark_maps, 6)])
def test_a_benchmark_that_is_killed_leaves_its_rows(module, untimed, tmp_path, monkeypatch, capsys):
    """After each row of a round the file has it, and a line was printed."""
    runs = []

    def run(self, requests):
        runs.append(requests)
        if len(runs) > 1 + untimed + 3:  # plain, the untimed round, three rows
            raise Killed
        return measure_capture.Result(1.5, 7, torch.zeros(1))

    monkeypatch.setattr(measure_capture.Rollout, "run", run)
    path = tmp_path / "benchmark.json"
    with pytest.raises(Killed):
        module.run(["--config_path", "configs/wan_mini.yaml", "--output_path", str(path)])
    kept, said = json.loads(path.read_text()), capsys.readouterr().out.splitlines()
    assert len(kept["rows"]) == 3 and kept["environment"]
    assert said[-1] == f"{list(kept['rows'])[-1]}: 1.500 s"
    assert kept["rows"]["plain"]["median_seconds"] == 1.5
