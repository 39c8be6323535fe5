"""Stages of the training: the loop against PyTorch's optimizers, teachers' paths, LoRAs."""

import json
import math
import shutil
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from helpers.forked import refused

from experiments import train_mini
from experiments.miniature import training
from experiments.miniature.training import (
    GUIDANCE,
    MODEL,
    STAGES,
    FewStep,
    Muon,
    Stage,
    adapt,
    encode_text,
    fit,
    frame_mask,
    generator_state,
    lora_state,
)
from wan.blocks import visible_frames
from wan.cache import of_window
from wan.checkpoint import (
    lora_of,
    merge_lora,
    read_lora,
    read_model_config,
    read_self_forcing_state,
    read_transformer_state,
)
from wan.errors import ConfigError
from wan.model import CausalWanModel

LR = 1e-3
MINI = ROOT / "checkpoints" / "wan-mini"
SMALL_MODEL = replace(MODEL, num_layers=2, num_heads=2, dim=32, ffn_dim=64, freq_dim=64)
SMALL = ["--batch", "1", "--clips", "2", "--device", "cpu"]
CAPTIONS = ["", "a red circle moving right over a dark blue background", "a square moving up behind a wall"]


@pytest.fixture(autouse=True)
def small_models_and_short_clips_without_measurements(monkeypatch):
    """The VAE's PSNR and the teacher's paths take longer than these trainings."""
    short = {"FRAMES": 9, "SHORT_CLIPS": (5,), "LONG_CLIPS": (9,), "vae_quality": lambda *_: {"psnr": 0.0}}
    short |= {"VAE": training.VAE | {"base_dim": 8, "decoder_base_dim": 8}}
    short |= {"MODEL": SMALL_MODEL, "TEACHER_STEPS": 4, "EVERY": 1}
    for name, value in short.items():
        monkeypatch.setattr(training, name, value)


def test_four_stages_make_a_model_that_loads(tmp_path):
    """Each from the files of the one before; the same command makes the same bytes."""
    for stage in ("vae", "base", "causal", "few_step"):
        train_mini.run(["--stage", stage, "--steps", "3", "--output_dir", str(tmp_path), *SMALL])
    log = json.loads((tmp_path / "training.json").read_text())
    assert [(name, entry["steps"]) for name, entry in log.items()] == [
        ("vae", 3), ("base", 3), ("causal", 3), ("few_step", 3)
    ]  # fmt: skip
    assert log["vae"]["psnr_curve"] == [[0, 0.0], [1, 0.0], [2, 0.0]]
    assert read_model_config(tmp_path) == MODEL  # whose config is copied
    base, causal = read_transformer_state(tmp_path), read_self_forcing_state(tmp_path / "causal.pt")
    few_step = read_self_forcing_state(tmp_path / "self_forcing_mini.pt")
    assert base.keys() == causal.keys() == few_step.keys()
    assert all(tensor.dtype == torch.bfloat16 for tensor in few_step.values())
    for earlier, later in ((base, causal), (causal, few_step)):
        assert not all(torch.equal(earlier[name], later[name]) for name in later)
    before = (tmp_path / "causal.pt").read_bytes()
    again = ["--stage", "causal", "--steps", "3", "--output_dir", str(tmp_path), *SMALL]
    with pytest.raises(ConfigError, match=r"causal.pt is there; .*--overwrite"):
        train_mini.run(again)
    train_mini.run([*again, "--overwrite"])
    assert (tmp_path / "causal.pt").read_bytes() == before


def test_a_stage_without_its_files_is_refused(tmp_path, capfd):
    flags = ["--stage", "few_step", "--output_dir", tmp_path, *SMALL]
    refused(train_mini, flags, capfd, "vae not found; --stage few_step needs it")


def test_a_step_is_of_the_clipped_gradient_and_the_warm_rate_and_moves_the_average():
    """AdamW alone, by PyTorch itself."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(3, 2, bias=False), torch.randn(5, 3)
    weight = torch.nn.Parameter(layer.weight.detach().clone())
    average = weight.detach().clone()
    reference = torch.optim.AdamW([weight], betas=(0.9, 0.95), weight_decay=0.01)
    seen: list[torch.Tensor] = []
    stage = Stage("base", steps=4, lr=LR, batch=4)
    [copy], numbers = fit(
        stage,
        [layer],
        lambda *_: ("rows", lambda: 100 * layer(x).square().mean()),
        lambda *_: False,
        lambda step, averaged: seen.append(layer.weight.detach().clone()),
    )
    for step in range(4):
        reference.param_groups[0]["lr"] = LR * 0.5 * (1 + math.cos(math.pi * step / 4)) * (step + 1) / 200
        weight.grad = None
        (100 * (x @ weight.T).square().mean()).backward()
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        reference.step()
        average.lerp_(weight.detach(), 1 - (1 + step) / (10 + step))
        now = [*seen, layer.weight][step + 1]
        torch.testing.assert_close(now, weight, atol=1e-7, rtol=0)
    assert torch.equal(copy.weight, average.bfloat16())
    assert numbers["steps"] == 4 and numbers["parameters"] == 6 and len(numbers["loss_curve"]) == 1


def test_muon_is_pytorchs_muon_matrix_by_matrix(monkeypatch):
    monkeypatch.setitem(training.FAST, "cpu", torch.bfloat16)  # as PyTorch's, everywhere
    torch.manual_seed(0)
    shapes = [(8, 8), (8, 24), (24, 8), (8, 8)]
    ours = [torch.randn(shape) for shape in shapes]
    theirs = [torch.nn.Parameter(m.clone()) for m in ours]
    muon = Muon(ours, {"lr": torch.tensor(LR)})
    reference = torch.optim.Muon(theirs, lr=LR, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        muon.step()
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other.data, atol=2e-5, rtol=0)  # products of bf16 in another order


@pytest.fixture
def stage(tmp_path):
    """A stage whose teacher takes four steps, on two clips of six frames: noise, as good as any other."""
    shutil.copytree(MINI / "text_encoder", tmp_path / "text_encoder")
    torch.manual_seed(0)
    model = CausalWanModel(**asdict(SMALL_MODEL))
    model.init_weights()
    torch.nn.init.normal_(model.head.head.weight, std=0.02)  # which starts at 0
    torch.save(generator_state(model), tmp_path / "causal.pt")
    return replace(STAGES["few_step"], batch=2, clips=2, output_dir=tmp_path)


@pytest.fixture
def clips():
    tokens = training.shipped_tokenizer()(CAPTIONS, padding=True, return_tensors="pt")
    latents = torch.randn(2, 16, 6, 8, 8, generator=torch.Generator().manual_seed(1))
    ids, mask = tokens.input_ids, tokens.attention_mask
    return SimpleNamespace(latents=latents, ids=ids, mask=mask, draw=torch.arange)


def loss_of(stage, clips) -> FewStep:
    """The stage's, of the weights that it starts from."""
    model = CausalWanModel(**asdict(SMALL_MODEL)).requires_grad_(False)
    model.load_state_dict(read_self_forcing_state(stage.output_dir / "causal.pt"))
    return FewStep(stage, model, clips)


@torch.no_grad()
def test_a_path_is_what_a_guided_rollout_takes_after_the_clips_own_past(stage, clips):
    """All blocks at once under the mask of teacher forcing, and one by one with a cache."""
    loss = loss_of(stage, clips)
    paths, model = torch.stack(loss.path(torch.arange(2), seed=0), 1), loss.teacher
    sigmas = training.teacher_sigmas()
    clip, rows = clips.latents[1:].transpose(1, 2), torch.tensor([2, 0])  # its caption, and the empty one
    text = model.text_keys_values(encode_text(loss.encoder, clips, rows))
    cache = model.new_kv_cache(2, 6, 8, 8, of_window(-1, 0))
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


def test_paths_are_made_anew_clip_by_clip_and_follow_from_the_step_alone(stage, clips, monkeypatch):
    """Two clips, each a turn of its own; a step draws two paths, so one of them is new every other step."""
    monkeypatch.setattr(training, "TEACHER_BATCH", 1)
    loss, later = loss_of(stage, clips), loss_of(stage, clips)
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
    assert not torch.equal(base["blocks.0.ffn.0.weight"], plain.blocks[0].ffn[0].weight)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "framewise"])
def test_a_stage_writes_a_lora_that_loads(name, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "FRAMES", 45)  # 12 latent frames, more than the window
    monkeypatch.setattr(training, "MODEL", MODEL)
    for file in ("transformer", "text_encoder", "tokenizer", "self_forcing_mini.pt"):
        (tmp_path / file).symlink_to(MINI / file)
    (tmp_path / "causal.pt").symlink_to(MINI / "self_forcing_mini.pt")  # as good a teacher as any
    (tmp_path / "vae").symlink_to(f"{tiny.config.ckpt_dir}/vae")
    small = ["--steps", "1", "--batch", "1", "--clips", "1", "--device", "cpu"]
    train_mini.run(["--stage", name, "--output_dir", str(tmp_path), *small])
    change = STAGES[name]
    lora = read_lora(tmp_path / change.file, change.rank, alpha=change.rank)
    assert len(lora.terms) == 10 * MODEL.num_layers
    assert all(pair.up.abs().max() > 0 for pair in lora.terms)
    merge_lora(read_self_forcing_state(MINI / "self_forcing_mini.pt"), lora, "self_forcing_mini.pt")
    log = json.loads((tmp_path / "training.json").read_text())[name]
    assert log["steps"] == 1 and log["rank"] == change.rank
    assert log["parameters"] == sum(pair.down.numel() + pair.up.numel() for pair in lora.terms)


def test_layers_compile_into_one_graph():
    """A break makes steps slower: nobody watches, so no site may be asked about."""
    model = CausalWanModel(**asdict(replace(MODEL, num_layers=2)))
    model.init_weights()
    text, mask = model.text_keys_values(torch.randn(1, 5, MODEL.text_dim)), torch.ones(64, 64).bool()
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(fullgraph=True, backend="eager")
    torch._dynamo.utils.counters.clear()
    model(torch.randn(1, 4, 16, 8, 8), torch.full((1, 4), 500.0), text, frames=[0, 1, 0, 1], mask=mask)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
