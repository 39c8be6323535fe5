"""The capture benchmark measures the rollout that its config describes."""

import json

import torch

from experiments.dev import benchmark_capture, benchmark_maps, measure_capture
from wan.config import ModelConfig, load_config


def test_random_weights_keep_the_configs_cache_policy():
    settings = {"cache_policy": {"name": "deep_sink", "window": 12, "sink": 6}}
    config = load_config("configs/wan_mini.yaml", settings)
    sizes = ModelConfig(dim=24, ffn_dim=16, num_heads=2, num_layers=1, freq_dim=8, text_dim=8, text_len=4)
    pipeline = measure_capture.random_pipeline(config, sizes, torch.float32, torch.device("cpu"))
    assert (pipeline.cache_policy.name, pipeline.cache_policy.window) == ("deep_sink", 12)


def test_a_benchmark_that_is_killed_leaves_its_rows(tmp_path, monkeypatch, capsys):
    """After each row of a round the file has it, and a line was printed."""
    runs, killed_at = [], 1 + 5 + 3  # plain, the untimed round, three rows

    class Killed(BaseException):
        pass

    def run(self, requests):
        runs.append(requests)
        if len(runs) > killed_at:
            raise Killed
        return measure_capture.Result(1.5, 7, torch.zeros(1))

    monkeypatch.setattr(measure_capture.Rollout, "run", run)
    for module in (benchmark_capture, benchmark_maps):
        runs.clear()
        path = tmp_path / f"{module.__name__}.json"
        try:
            module.run(["--config_path", "configs/wan_mini.yaml", "--output_path", str(path)])
        except Killed:
            kept = json.loads(path.read_text())
            said = capsys.readouterr().out.splitlines()
            rows = list(kept["rows"])
            assert len(rows) == len(runs) - 1 - (5 if module is benchmark_capture else 6) - 1
            assert rows[0] == "plain" and f"{rows[-1]}: 1.500 s" == said[-1]
            assert kept["rows"]["plain"]["median_seconds"] == 1.5 and kept["environment"]
        else:
            raise AssertionError("it was not killed")
