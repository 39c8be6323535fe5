"""The capture benchmark measures the rollout that its config describes."""

import torch

from experiments.dev import measure_capture
from wan.config import ModelConfig, load_config


def test_random_weights_keep_the_configs_cache_policy():
    settings = {"cache_policy": {"name": "deep_sink", "window": 12, "sink": 6}}
    config = load_config("configs/wan_mini.yaml", settings)
    sizes = ModelConfig(dim=24, ffn_dim=16, num_heads=2, num_layers=1, freq_dim=8, text_dim=8, text_len=4)
    pipeline = measure_capture.random_pipeline(config, sizes, torch.float32, torch.device("cpu"))
    assert (pipeline.cache_policy.name, pipeline.cache_policy.window) == ("deep_sink", 12)
