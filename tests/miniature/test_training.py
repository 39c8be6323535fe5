"""Stages of the training: teachers' paths, LoRAs, Muon; a killed training goes on to the same bytes."""

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from diffusers import AutoencoderKLWan
from helpers.forked import refused

from experiments import train_mini
from experiments.caches.files import StoppedError
from experiments.miniature import stages, training, vae_training
from experiments.miniature.recipe import GUIDANCE, MODEL, RECIPES, SHIPPED, Recipe, StageRun
from experiments.miniature.stages import CHANGES, FewStep, adapt, encode_text, frame_mask, lora_state
from experiments.miniature.training import Muon, Trainer, generator_state
from experiments.miniature.vae_training import receptive_field
from wan.blocks import visible_frames
from wan.checkpoint import lora_of, merge_lora, read_lora, read_self_forcing_state
from wan.model import CausalWanModel

LR = 1e-3
SMALL = ["--batch", "1", "--clips", "2", "--device", "cpu", "--no-compile"]
STEPS = {"vae": "2", "base": "2", "causal": "3", "few_step": "2"}
WEIGHTS = {
    "vae": "vae/diffusion_pytorch_model.safetensors",
    "base": "transformer/diffusion_pytorch_model.safetensors",
    "causal": "causal.pt",
    "few_step": "self_forcing_mini.pt",
}


@pytest.fixture(autouse=True, scope="module")
def small_models_and_short_clips_without_measurements():
    """The VAE's PSNR and the teacher's paths take longer than these trainings."""
    with pytest.MonkeyPatch.context() as patch:
        short = {"FRAMES": 9, "SHORT_CLIPS": (5,), "LONG_CLIPS": (9,)}
        short |= {"VAE": vae_training.VAE | {"base_dim": 8, "decoder_base_dim": 8}}
        short |= {"vae_quality": lambda *_: {"psnr": 0.0}, "final_quality": lambda *_: {}}
        few = {"MODEL": SMALL_MODEL, "TEACHER_STEPS": 4, "EVERY": 1}
        for module, values in ((vae_training, short), (stages, few)):
            for name, value in values.items():
                patch.setattr(module, name, value)
        yield


def train(folder, stage: str, *more: str) -> None:
    train_mini.run(["--stage", stage, "--steps", STEPS[stage], "--output_dir", str(folder), *SMALL, *more])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A folder with all four stages, each of a few steps, and with checkpoints of two."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for stage in STEPS:
        kept = ["--training_checkpoints", str(folder / "kept")] if stage in ("causal", "few_step") else []
        train(folder, stage, *kept)
        if stage == "causal":
            (folder / "kept/step_last.pt").touch()  # a user's own: of no step
    return folder


def train_until(folder, undisturbed, stage, monkeypatch, step: int, error: type) -> None:
    """Train a stage on what the others made until this step fails."""
    for name in RECIPES[stage].needs:
        (folder / name).symlink_to(undisturbed / name)

    def update(self, kind, loss, update=Trainer.update):
        if self.step == step:
            raise error
        update(self, kind, loss)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "update", update)
        train(folder, stage)


class Killed(BaseException):
    """Nothing in the loop may handle it, as nothing handles SIGKILL."""


@pytest.mark.parametrize(("stage", "stopped"), [("vae", False), ("few_step", False), ("causal", True)])
def test_a_training_goes_on_to_the_same_bytes(stage, stopped, undisturbed, tmp_path, monkeypatch):
    """Behind a Ctrl-C, or from the state of the last minute."""
    if stopped:
        monkeypatch.setattr(training, "SAVE_SECONDS", 0)
    how = (2, Killed) if stopped else (1, KeyboardInterrupt)
    with pytest.raises(Killed) if stopped else pytest.raises(StoppedError, match=r"step 1; .* --resume"):
        train_until(tmp_path, undisturbed, stage, monkeypatch, *how)
    assert (tmp_path / f"{stage}.resume.pt").is_file() and not (tmp_path / WEIGHTS[stage]).exists()
    torch.manual_seed(99)  # another process has other random numbers
    train(tmp_path, stage, "--resume")
    assert (tmp_path / WEIGHTS[stage]).read_bytes() == (undisturbed / WEIGHTS[stage]).read_bytes()
    assert not (tmp_path / f"{stage}.resume.pt").exists()
    logs = [folder / "training.json" for folder in (tmp_path, undisturbed)]
    ours, theirs = (json.loads(log.read_text())[stage] for log in logs)
    assert ours["steps"] == theirs["steps"] == int(STEPS[stage])
    assert [row[::2] for row in ours["loss_curve"]] == [row[::2] for row in theirs["loss_curve"]]


def test_checkpoints_of_the_training_are_kept(undisturbed):
    """Without a trace in what is trained: the resumed trainings, which keep none, have the same bytes."""
    kept = {path.name: path.read_bytes() for path in (undisturbed / "kept").iterdir()}
    assert kept.keys() == {"step_00000.pt", "step_00003.pt", "step_00005.pt", "step_last.pt"}
    assert kept["step_00003.pt"] == (undisturbed / WEIGHTS["causal"]).read_bytes() != kept["step_00000.pt"]
    assert kept["step_00005.pt"] == (undisturbed / WEIGHTS["few_step"]).read_bytes()


def test_bad_input(undisturbed, tmp_path, capfd):
    (tmp_path / "vae").symlink_to(undisturbed / "vae")
    flags = ["--stage", "base", "--steps", "2", "--output_dir", tmp_path, *SMALL]
    wrong = [*flags, "--start_from", "."]
    refused(train_mini, wrong, capfd, "--start_from takes the stages vae, base, causal")
    refused(train_mini, [*flags, "--resume"], capfd, "not found, so nothing can be resumed")
    (tmp_path / "base.resume.pt").write_bytes(b"not a state")
    refused(train_mini, [*flags, "--resume"], capfd, "a stage's state, cannot be read")


def test_a_step_is_of_the_clipped_gradient_and_the_warm_rate_and_moves_the_average():
    """AdamW alone, by PyTorch itself."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(3, 2, bias=False), torch.randn(5, 3)
    weight = torch.nn.Parameter(layer.weight.detach().clone())
    average = weight.detach().clone()
    reference = torch.optim.AdamW([weight], betas=(0.9, 0.95), weight_decay=0.01)
    stage = StageRun("base", Recipe(4, LR, batch=4), Path(), torch.device("cpu"), torch.float32)
    trainer = Trainer(stage, [layer])
    for step in range(3):
        trainer.update("rows", lambda: 100 * layer(x).square().mean())
        reference.param_groups[0]["lr"] = LR * 0.5 * (1 + math.cos(math.pi * step / 4)) * (step + 1) / 200
        weight.grad = None
        (100 * (x @ weight.T).square().mean()).backward()
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        reference.step()
        average.lerp_(weight.detach(), 1 - (1 + step) / (10 + step))
        torch.testing.assert_close(layer.weight, weight, atol=1e-7, rtol=0)
    torch.testing.assert_close(trainer.averages[0], average, atol=1e-7, rtol=0)
    numbers = trainer.numbers()
    assert numbers["steps"] == 3 and numbers["parameters"] == 6 and len(numbers["loss_curve"]) == 1


def test_the_receptive_field_is_the_evaluations():
    evaluated = json.loads((SHIPPED / "evaluation.json").read_text())["vae"]
    assert receptive_field(AutoencoderKLWan.load_config(SHIPPED / "vae")) == evaluated["receptive_field"]


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


MINI = ROOT / "checkpoints" / "wan-mini"
SMALL_MODEL = replace(MODEL, num_layers=2, num_heads=2, dim=32, ffn_dim=64, freq_dim=64)
CAPTIONS = ["", "a red circle moving right over a dark blue background", "a square moving up behind a wall"]


@pytest.fixture
def run(tmp_path):
    """A stage whose teacher takes four steps, on two clips of six frames: noise, as good as any other."""
    shutil.copytree(MINI / "text_encoder", tmp_path / "text_encoder")
    torch.manual_seed(0)
    model = CausalWanModel(**asdict(SMALL_MODEL))
    model.init_weights()
    torch.nn.init.normal_(model.head.head.weight, std=0.02)  # which starts at 0
    torch.save(generator_state(model), tmp_path / "causal.pt")
    recipe = replace(RECIPES["few_step"], batch=2, clips=2)
    return StageRun("few_step", recipe, tmp_path, torch.device("cpu"), torch.float32)


@pytest.fixture
def clips():
    tokens = stages.shipped_tokenizer()(CAPTIONS, padding=True, return_tensors="pt")
    latents = torch.randn(2, 16, 6, 8, 8, generator=torch.Generator().manual_seed(1))
    ids, mask = tokens.input_ids, tokens.attention_mask
    return SimpleNamespace(latents=latents, ids=ids, mask=mask, draw=torch.arange)


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
    sigmas = stages.teacher_sigmas()
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
    assert not torch.equal(base["blocks.0.ffn.0.weight"], plain.blocks[0].ffn[0].weight)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [stage for stage, change in CHANGES.items() if change.rank])
def test_a_stage_writes_a_lora_that_loads(stage, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(vae_training, "FRAMES", 45)  # 12 latent frames, more than the window
    monkeypatch.setattr(stages, "MODEL", MODEL)
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
    log = json.loads((tmp_path / "training.json").read_text())[stage]
    assert log["steps"] == 1 and log["rank"] == log["alpha"] == change.rank
    assert log["parameters"] == sum(down.numel() + up.numel() for down, up in lora.pairs.values())


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
