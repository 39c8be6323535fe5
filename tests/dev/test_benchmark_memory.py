"""The benchmark of real shapes, on small ones and the CPU: the loaders take its files."""

from dataclasses import replace

import pytest
import torch
from conftest import ROOT, golden_config
from helpers.checkpoints import GOLDEN_MODEL, SMALL_UMT5

from experiments.dev import measure_memory, random_weights
from wan import checkpoint
from wan import text_encoder as native
from wan.checkpoint import read_self_forcing_state
from wan.config import load_config
from wan.model import CausalWanModel

CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A run of small random weights in the native layout, with prompt embeddings from a file."""
    monkeypatch.setattr(random_weights, "SHARD_BYTES", 1 << 20)
    random_weights.make_transformer(tmp_path / "small", GOLDEN_MODEL, torch.float32, CPU)
    states = torch.randn(1, GOLDEN_MODEL.text_len, GOLDEN_MODEL.text_dim)
    torch.save({"prompt_embeds": states}, tmp_path / "states.pt")
    config = load_config(
        ROOT / "configs/wan_mini.yaml", {"ckpt_dir": str(tmp_path / "small"), "num_frames": 6}
    )
    return replace(
        config,
        model="small",
        checkpoint_path=None,
        prompt_embeds=str(tmp_path / "states.pt"),
        height=4,
        width=4,
    )


def test_shards_and_checkpoint_load(config, tmp_path):
    shards = checkpoint.shards(checkpoint.transformer_file(config.ckpt_dir))
    assert len(shards) > 1 and checkpoint.read_model_config(config.ckpt_dir) == GOLDEN_MODEL
    random_weights.make_checkpoint(tmp_path / "sf.pt", GOLDEN_MODEL, torch.float32, CPU)
    states = (
        checkpoint.read_transformer_state(config.ckpt_dir),
        read_self_forcing_state(tmp_path / "sf.pt"),
    )
    assert states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][k], states[1][k]) for k in states[0]
    )
    checkpoint.build_model(CausalWanModel, GOLDEN_MODEL, states[0], "shards")


def test_the_text_encoder_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "UMT5_XXL", SMALL_UMT5.to_dict())
    monkeypatch.chdir(ROOT)
    random_weights.make_text_encoder(tmp_path, torch.bfloat16, CPU)
    encoder = native.load_umt5(tmp_path, SMALL_UMT5, torch.bfloat16)
    assert encoder.shared.weight.std() < 0.03 and (tmp_path / "google/umt5-xxl/tokenizer.json").is_file()


@pytest.mark.beside
def test_a_load_and_a_rollout_are_measured(config):
    loaded = measure_memory.apart(measure_memory.load, config)
    assert loaded["file_bytes"] > 4 * 10**5 and 0 < loaded["seconds"] < 60 and loaded["private_of_file"] < 10
    ran = [measure_memory.roll_out(config) for _ in range(2)]
    assert ran[0]["calls"] == golden_config()["model"]["num_layers"] * 5 * 2
    assert ran[0]["sha256_of_latents_and_capture"] == ran[1]["sha256_of_latents_and_capture"]
    assert ran[0]["predicted_bytes"]["host"]["rolling out"] > 0 and ran[0]["encoded_on"] is None
    assert 0 < ran[0]["rollout_seconds"] < ran[0]["seconds"]
    other = measure_memory.roll_out(replace(config, seed=1))
    assert other["sha256_of_latents_and_capture"] != ran[0]["sha256_of_latents_and_capture"]
