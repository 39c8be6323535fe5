"""A model on several GPUs, replayed from graphs, aside while the encoder has the GPU."""

from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from experiments.extraction import causal
from experiments.extraction import causal as model_placement
from wan.config import RunConfig, load_config
from wan.errors import ConfigError
from wan.offload import StreamedBlocks


@pytest.mark.parametrize(
    ("device", "is_streamed", "done"),
    [
        ("cpu", False, ["parallel"]),
        ("cuda", False, ["parallel", "graphs after 1"]),
        ("cuda", True, ["parallel"]),
    ],
)
def test_gpus_that_share_a_model_replay_its_layers(device, is_streamed, done, monkeypatch):
    blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    if is_streamed:
        blocks = StreamedBlocks(blocks, torch.float32, "cpu")
    model, group = (
        SimpleNamespace(device=torch.device(device), blocks=blocks),
        SimpleNamespace(size=lambda: 2),
    )
    found = []
    monkeypatch.setattr(model_placement.parallel, "joined", lambda: group)
    monkeypatch.setattr(model_placement, "apply_head_parallel", lambda *given: found.append("parallel"))
    monkeypatch.setattr(
        model_placement, "apply_cuda_graphs", lambda model, after: found.append(f"graphs after {after}")
    )
    model_placement.share(model, 1)
    assert not found
    model_placement.share(model, 2)
    assert found == done
    with pytest.raises(ConfigError, match="gpus is 3"):
        model_placement.share(model, 3)


def test_a_sweep_on_one_gpu_replays_layers_after_a_short_video_without(monkeypatch):
    found = []
    monkeypatch.setattr(causal, "replay_layers", lambda model, after: found.append(after))
    config = load_config(ROOT / "configs/wan_mini.yaml", {"num_frames": 6, "device": "cpu"})
    causal.prepare(config, [])
    assert not found  # one's own code may hook into layers
    causal.prepare(config, [], replays=True)
    whole = load_config(ROOT / "configs/wan_mini.yaml")
    assert found == [model_placement.FORWARDS] == [len(whole.block_sizes) * whole.num_passes]


def test_graphs_are_forgotten_before_weights_leave_for_the_encoder(monkeypatch):
    """A graph that knows where weights were would compute with whatever lies there now."""
    done = []
    model = SimpleNamespace(to=lambda device: done.append(str(device)))
    monkeypatch.setattr(model_placement, "forget_cuda_graphs", lambda model: done.append("forgotten"))
    with model_placement.model_aside([SimpleNamespace(model=model)], torch.device("meta"), RunConfig()):
        done.append("encoded")
    assert done == ["forgotten", "cpu", "encoded", "meta"]
