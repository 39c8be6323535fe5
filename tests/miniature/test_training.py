"""Training: Muon is PyTorch's, a killed training goes on to the same bytes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan
from helpers.refusals import refused

from experiments import train_mini
from experiments.caches.files import StoppedError
from experiments.miniature import stages, training, vae_training
from experiments.miniature.recipe import MODEL, RECIPES, SHIPPED, Recipe, StageRun
from experiments.miniature.training import Muon, Trainer
from experiments.miniature.vae_training import receptive_field

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
        narrow = replace(MODEL, num_layers=2, num_heads=2, dim=32, ffn_dim=64, freq_dim=64)
        few = {"MODEL": narrow, "TEACHER_STEPS": 4, "EVERY": 1}
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


@pytest.mark.parametrize("stage", ["vae", "few_step"])
def test_a_stopped_training_goes_on_to_the_same_bytes(stage, undisturbed, tmp_path, monkeypatch):
    with pytest.raises(StoppedError, match=r"at step 1; .* --resume"):
        train_until(tmp_path, undisturbed, stage, monkeypatch, 1, KeyboardInterrupt)  # Ctrl-C
    assert (tmp_path / f"{stage}.resume.pt").is_file() and not (tmp_path / WEIGHTS[stage]).exists()
    torch.manual_seed(99)  # another process has other random numbers
    train(tmp_path, stage, "--resume")
    assert (tmp_path / WEIGHTS[stage]).read_bytes() == (undisturbed / WEIGHTS[stage]).read_bytes()
    assert not (tmp_path / f"{stage}.resume.pt").exists()
    ours, theirs = (
        json.loads((folder / "training.json").read_text())[stage] for folder in (tmp_path, undisturbed)
    )
    assert ours["steps"] == theirs["steps"] == int(STEPS[stage])
    assert [row[::2] for row in ours["loss_curve"]] == [row[::2] for row in theirs["loss_curve"]]


def test_a_killed_training_goes_on_from_the_state_of_the_last_minute(undisturbed, tmp_path, monkeypatch):
    class Killed(BaseException):
        """Nothing in the loop may handle it, as nothing handles SIGKILL."""

    monkeypatch.setattr(training, "SAVE_SECONDS", 0)
    with pytest.raises(Killed):
        train_until(tmp_path, undisturbed, "causal", monkeypatch, 2, Killed)
    train(tmp_path, "causal", "--resume")
    assert (tmp_path / WEIGHTS["causal"]).read_bytes() == (undisturbed / WEIGHTS["causal"]).read_bytes()


def test_checkpoints_of_the_training_are_kept(undisturbed):
    """Without a trace in what is trained: the resumed trainings, which keep none, have the same bytes."""
    kept = {path.name: path.read_bytes() for path in (undisturbed / "kept").iterdir()}
    assert kept.keys() == {"step_00000.pt", "step_00003.pt", "step_00005.pt", "step_last.pt"}
    assert kept["step_00003.pt"] == (undisturbed / WEIGHTS["causal"]).read_bytes() != kept["step_00000.pt"]
    assert kept["step_00005.pt"] == (undisturbed / WEIGHTS["few_step"]).read_bytes()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--resume"], "not found, so nothing can be resumed"),
        (["--resume", "DAMAGED"], "a stage's state, cannot be read"),
        (["--start_from", "."], "--start_from takes the stages vae, base, causal"),
    ],
)
def test_bad_input(more, said, undisturbed, tmp_path, capfd):
    (tmp_path / "vae").symlink_to(undisturbed / "vae")
    if "DAMAGED" in more:
        (tmp_path / "base.resume.pt").write_bytes(b"not a state")
        more = ["--resume"]
    flags = ["--stage", "base", "--steps", "2", "--output_dir", tmp_path, *SMALL, *more]
    refused(train_mini, flags, capfd, said)


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
        reference.param_groups[0]["lr"] = (
            LR * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / 4))) * ((step + 1) / 200)
        )
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
