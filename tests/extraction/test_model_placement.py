"""A model on several GPUs, replayed from graphs, aside while the encoder has the GPU."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from experiments.extraction import causal
from experiments.extraction.prompt_embeds import PROMPTS_AT_ONCE
from wan.config import load_config
from wan.errors import ConfigError
from wan.offload import StreamedBlocks


@pytest.fixture
def config():
    return load_config(ROOT / "configs/wan_mini.yaml", {"num_frames": 6, "device": "cpu"})


@pytest.mark.parametrize(
    ("device", "is_streamed", "done"),
    [("cpu", False, ["parallel"]), ("cuda", False, ["parallel", 1]), ("cuda", True, ["parallel"])],
)
def test_gpus_that_share_a_model_replay_its_layers(config, device, is_streamed, done, monkeypatch):
    blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    if is_streamed:
        blocks = StreamedBlocks(blocks, torch.float32, "cpu")
    model, found = SimpleNamespace(device=torch.device(device), blocks=blocks), []
    report = type("Report", (), {"quantised": "", "__str__": lambda self: "report"})()
    monkeypatch.setattr(causal, "read_weights", lambda *given: ({}, report))
    monkeypatch.setattr(causal.checkpoint, "build_model", lambda *given, **more: model)
    monkeypatch.setattr(causal, "pipeline_of", lambda *given: SimpleNamespace())
    monkeypatch.setattr(causal.parallel, "joined", lambda: SimpleNamespace(size=lambda: 2))
    monkeypatch.setattr(causal, "apply_head_parallel", lambda *given: found.append("parallel"))
    monkeypatch.setattr(causal, "apply_cuda_graphs", lambda model, after: found.append(after))
    given = causal.checkpoint.read_model_config(config.ckpt_dir), torch.float32, torch.device("cpu")
    assert causal.load_pipeline(config, *given).weights == "report" and not found
    causal.load_pipeline(replace(config, gpus=2), *given)
    assert found == done
    with pytest.raises(ConfigError, match="gpus is 3"):
        causal.load_pipeline(replace(config, gpus=3), *given)


def test_graphs_are_forgotten_before_weights_leave_for_the_encoder(config, monkeypatch):
    """A graph that knows where weights were would compute with whatever lies there now."""
    done = []
    model = SimpleNamespace(to=lambda device: done.append(str(device)))
    pipeline = SimpleNamespace(model=model, weights="", quantised="")

    def encode(config, prompts, *given):
        done.append(f"encoded {len(prompts)}")
        return dict.fromkeys(prompts)

    monkeypatch.setattr(causal, "choose_device", lambda *given: torch.device("meta"))
    monkeypatch.setattr(causal, "forget_cuda_graphs", lambda model: done.append("forgotten"))
    monkeypatch.setattr(causal, "load_pipeline", lambda *given: pipeline)
    monkeypatch.setattr(causal, "encode_prompts", encode)
    prompts = [str(i) for i in range(PROMPTS_AT_ONCE + 1)]
    loaded = causal.prepare(config, [], prompts)
    loaded.texts[prompts[-1]]
    assert done == [f"encoded {PROMPTS_AT_ONCE}", "forgotten", "cpu", "encoded 1", "meta"]
