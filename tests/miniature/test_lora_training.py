"""The LoRA stages: what they train, what they write, and that the rollout is the one they trained for."""

import json
from dataclasses import asdict

import pytest
import torch
from conftest import ROOT

from experiments import train_mini
from experiments.miniature import stages as few_step
from experiments.miniature import vae_training as autoencoder
from experiments.miniature.recipe import MODEL
from experiments.miniature.stages import CHANGES, adapt, frame_mask, lora_state
from wan.blocks import visible_frames
from wan.checkpoint import lora_of, merge_lora, read_lora, read_self_forcing_state
from wan.model import CausalWanModel, teacher_forcing_mask

MINI = ROOT / "checkpoints" / "wan-mini"
SMALL = ["--steps", "1", "--batch", "1", "--clips", "1", "--device", "cpu"]


def test_without_a_window_the_mask_is_teacher_forcings():
    blocks = [0, 0, 0, 1, 1, 1]
    assert torch.equal(frame_mask([3, 3]), teacher_forcing_mask(blocks, 1))
    assert torch.equal(frame_mask([1] * 4), teacher_forcing_mask(range(4), 1))


def test_a_window_hides_what_a_rollout_forgets():
    sizes = [3] * 5
    mask = frame_mask(sizes, window=9, sink=3)
    for frame in range(15):
        seen = visible_frames(sizes, frame // 3, 9, 3)
        assert mask[frame].nonzero().flatten().tolist() == seen
        own = range(frame // 3 * 3, frame // 3 * 3 + 3)
        noisy = [f for f in seen if f not in own] + [15 + f for f in own]
        assert mask[15 + frame].nonzero().flatten().tolist() == noisy


def test_an_adapted_model_is_the_merged_one():
    """What training sees, W x + B A x, is what the loader makes of the file."""
    torch.manual_seed(0)
    model = CausalWanModel(**asdict(MODEL))
    base = {name: value.clone() for name, value in model.state_dict().items()}
    x, text = torch.randn(1, 3, 16, 8, 8), torch.randn(1, 4, MODEL.text_dim)
    adapters = adapt(model, rank=4)
    assert not any(p.requires_grad for p in model.parameters())
    with torch.no_grad():
        for value in adapters.values():
            value.copy_(0.02 * torch.randn_like(value))
        tuned = model(x, torch.tensor(500.0), model.text_keys_values(text))
        lora = lora_of("made", lora_state(adapters), rank=4, alpha=4)
        plain = CausalWanModel(**asdict(MODEL))
        untuned = plain.load_state_dict(base) and plain(x, torch.tensor(500.0), plain.text_keys_values(text))
        plain.load_state_dict(merge_lora(base, lora, "base"))
        merged = plain(x, torch.tensor(500.0), plain.text_keys_values(text))
    assert len(lora.pairs) == 10 * MODEL.num_layers
    torch.testing.assert_close(tuned, merged, atol=1e-4, rtol=1e-4)
    assert (tuned - untuned).abs().max() > 1e-2


@pytest.fixture(params=CHANGES)
def trained(request, tmp_path, monkeypatch):
    monkeypatch.setattr(autoencoder, "FRAMES", 45)  # 12 latent frames, more than the window
    monkeypatch.setattr(few_step, "TEACHER_STEPS", 4)
    monkeypatch.setattr(few_step, "EVERY", 1)
    for name in ("vae", "transformer", "text_encoder", "tokenizer", "self_forcing_mini.pt"):
        (tmp_path / name).symlink_to(MINI / name)
    (tmp_path / "causal.pt").symlink_to(MINI / "self_forcing_mini.pt")  # as good a teacher as any
    train_mini.run(["--stage", request.param, "--output_dir", str(tmp_path), *SMALL])
    return request.param, tmp_path


def test_a_stage_writes_a_lora_that_loads(trained):
    stage, folder = trained
    change = CHANGES[stage]
    lora = read_lora(folder / change.file, change.rank, alpha=change.rank)
    moved = [layer for layer, (_, up) in lora.pairs.items() if up.abs().max() > 0]
    assert len(lora.pairs) == 10 * MODEL.num_layers and len(moved) == len(lora.pairs)
    merge_lora(read_self_forcing_state(MINI / "self_forcing_mini.pt"), lora, "self_forcing_mini.pt")
    assert (folder / change.file).stat().st_size < 3_000_000
    log = json.loads((folder / "training.json").read_text())[stage]
    assert log["steps"] == 1 and log["rank"] == log["alpha"] == change.rank
    assert log["parameters"] == sum(down.numel() + up.numel() for down, up in lora.pairs.values())
