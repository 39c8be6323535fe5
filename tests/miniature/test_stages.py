"""The few-step stage and its teacher's paths; LoRAs, and that a rollout sees what they were trained for."""

import json
import shutil
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from experiments import train_mini
from experiments.miniature import stages, vae_training
from experiments.miniature.recipe import GUIDANCE, MODEL, RECIPES, StageRun
from experiments.miniature.stages import (
    CHANGES,
    FewStep,
    adapt,
    encode_text,
    frame_mask,
    lora_state,
    shipped_tokenizer,
    teacher_sigmas,
)
from experiments.miniature.training import generator_state
from wan.blocks import visible_frames
from wan.checkpoint import lora_of, merge_lora, read_lora, read_self_forcing_state
from wan.model import CausalWanModel

MINI = ROOT / "checkpoints" / "wan-mini"
SMALL_MODEL = replace(MODEL, num_layers=2, num_heads=2, dim=32, ffn_dim=64, freq_dim=64)
CAPTIONS = [
    "",
    "a red circle moving right over a dark blue background",
    "a square moving up behind a red wall",
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A stage whose teacher takes four steps, on two clips of six frames: noise, as good as any other."""
    monkeypatch.setattr(stages, "TEACHER_STEPS", 4)
    monkeypatch.setattr(stages, "EVERY", 1)
    shutil.copytree(MINI / "text_encoder", tmp_path / "text_encoder")
    monkeypatch.setattr(stages, "MODEL", SMALL_MODEL)
    torch.manual_seed(0)
    model = CausalWanModel(**asdict(SMALL_MODEL))
    model.init_weights()
    torch.nn.init.normal_(model.head.head.weight, std=0.02)  # which starts at 0
    torch.save(generator_state(model), tmp_path / "causal.pt")
    recipe = replace(RECIPES["few_step"], batch=2, clips=2)
    return StageRun("few_step", recipe, tmp_path, torch.device("cpu"), torch.float32)


@pytest.fixture
def clips():
    tokens = shipped_tokenizer()(CAPTIONS, padding=True, return_tensors="pt")
    latents = torch.randn(2, 16, 6, 8, 8, generator=torch.Generator().manual_seed(1))
    return SimpleNamespace(
        latents=latents,
        ids=tokens.input_ids,
        mask=tokens.attention_mask,
        draw=lambda size: torch.arange(size),
    )


def loss_of(run, clips) -> FewStep:
    """The stage's, of the weights that it starts from."""
    model = CausalWanModel(**asdict(SMALL_MODEL)).requires_grad_(False)
    model.load_state_dict(read_self_forcing_state(run.output_dir / "causal.pt"))
    return FewStep(run, model, clips, CHANGES["few_step"])


@torch.no_grad()
def test_a_path_is_what_a_guided_rollout_takes_after_the_clips_own_past(run, clips):
    """All blocks at once under the mask of teacher forcing, and one by one with a cache."""
    loss = loss_of(run, clips)
    paths, model = torch.stack(loss.path(torch.arange(2), seed=0), 1), loss.teacher
    sigmas = teacher_sigmas()
    clip, rows = clips.latents[1:].transpose(1, 2), torch.tensor([2, 0])  # its caption, and the empty one
    text = model.text_keys_values(encode_text(loss.encoder, clips, rows))
    cache = model.new_kv_cache(2, 6, 8, 8)
    for frames in (range(3), range(3, 6)):
        cache.advance(frames, text)
        x = paths[1:, 0, frames.start : frames.stop]
        for step in range(4):
            cache.begin_pass(False)
            guided, free = model(x.repeat(2, 1, 1, 1, 1), 1000 * sigmas[step], text, cache).chunk(2)
            x = x + (sigmas[step + 1] - sigmas[step]) * (free + GUIDANCE * (guided - free))
            at = paths[1:, step + 1, frames.start : frames.stop]
            torch.testing.assert_close(at, x, atol=1e-4, rtol=1e-4)
        cache.begin_pass(True)
        model(clip[:, frames.start : frames.stop].repeat(2, 1, 1, 1, 1), torch.tensor(0.0), text, cache)
    assert (paths[0, 0] - paths[1, 0]).abs().min() > 0  # other noise for every clip


def test_paths_are_made_anew_clip_by_clip_and_follow_from_the_step_alone(run, clips, monkeypatch):
    """Two clips, each a turn of its own; a step draws two paths, so one of them is new every other step."""
    monkeypatch.setattr(stages, "TEACHER_BATCH", 1)
    loss, later = loss_of(run, clips), loss_of(run, clips)
    first = loss.paths.clone()
    loss.before(1)
    assert torch.equal(loss.paths, first)
    changed = []
    for step in (2, 3, 4, 5, 6):
        before = loss.paths.clone()
        loss.before(step)
        changed.append([not torch.equal(old, new) for old, new in zip(before, loss.paths, strict=True)])
    assert changed == [[True, False], [False, False], [False, True], [False, False], [True, False]]
    later.before(6)  # as a training that goes on there
    assert torch.equal(later.paths, loss.paths)


# -- LoRAs --


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
    model = CausalWanModel(**asdict(SMALL_MODEL))
    base = {name: value.clone() for name, value in model.state_dict().items()}
    x, text = torch.randn(1, 3, 16, 8, 8), torch.randn(1, 4, MODEL.text_dim)
    adapt(model, rank=4)
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(adapters) == 20 * SMALL_MODEL.num_layers and all("lora_" in name for name in adapters)
    with torch.no_grad():
        for value in adapters.values():
            value.copy_(0.02 * torch.randn_like(value))
        tuned = model(x, torch.tensor(500.0), model.text_keys_values(text))
        lora = lora_of("made", lora_state(model)["generator_lora"], rank=4, alpha=4)
        plain = CausalWanModel(**asdict(SMALL_MODEL))
        plain.load_state_dict(merge_lora(base, lora, "base"))
        merged = plain(x, torch.tensor(500.0), plain.text_keys_values(text))
    torch.testing.assert_close(tuned, merged, atol=1e-4, rtol=1e-4)
    assert base.keys() == plain.state_dict().keys() and not torch.equal(
        base["blocks.0.ffn.0.weight"], plain.state_dict()["blocks.0.ffn.0.weight"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", [stage for stage, change in CHANGES.items() if change.rank])
def test_a_stage_writes_a_lora_that_loads(stage, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(vae_training, "FRAMES", 45)  # 12 latent frames, more than the window
    monkeypatch.setattr(stages, "TEACHER_STEPS", 4)
    monkeypatch.setattr(stages, "EVERY", 1)
    for name in ("transformer", "text_encoder", "tokenizer", "self_forcing_mini.pt"):
        (tmp_path / name).symlink_to(MINI / name)
    (tmp_path / "causal.pt").symlink_to(MINI / "self_forcing_mini.pt")  # as good a teacher as any
    (tmp_path / "vae").symlink_to(f"{tiny.config.ckpt_dir}/vae")
    small = ["--steps", "1", "--batch", "1", "--clips", "1", "--device", "cpu"]
    train_mini.run(["--stage", stage, "--output_dir", str(tmp_path), *small])
    change = CHANGES[stage]
    lora = read_lora(tmp_path / change.file, change.rank, alpha=change.rank)
    moved = [layer for layer, (_, up) in lora.pairs.items() if up.abs().max() > 0]
    assert len(lora.pairs) == 10 * MODEL.num_layers and len(moved) == len(lora.pairs)
    merge_lora(read_self_forcing_state(MINI / "self_forcing_mini.pt"), lora, "self_forcing_mini.pt")
    assert (tmp_path / change.file).stat().st_size < 3_000_000
    log = json.loads((tmp_path / "training.json").read_text())[stage]
    assert log["steps"] == 1 and log["rank"] == log["alpha"] == change.rank
    assert log["parameters"] == sum(down.numel() + up.numel() for down, up in lora.pairs.values())
