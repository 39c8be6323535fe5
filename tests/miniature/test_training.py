"""Training the miniature: a killed training goes on to the same bytes, and the recipe is what it says."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import ROOT

from experiments import train_mini
from experiments.caches.files import CacheError, StoppedError
from experiments.miniature import stages as few_step
from experiments.miniature import training, vae_training
from experiments.miniature import vae_training as autoencoder
from experiments.miniature.recipe import FRAMES, LONG_CLIPS, RECIPES, SHORT_CLIPS, VAE
from experiments.miniature.training import Schedule, Trainer
from experiments.miniature.vae_training import SHORT_SHARE, clip_length, decode, receptive_field
from experiments.running import cli
from wan.checkpoint import file_sha256, read_self_forcing_state

SMALL = ["--batch", "1", "--clips", "2", "--device", "cpu", "--no-compile"]
STAGES = {"vae": "2", "base": "2", "causal": "3", "few_step": "2"}
WEIGHTS = {
    "vae": "vae/diffusion_pytorch_model.safetensors",
    "base": "transformer/diffusion_pytorch_model.safetensors",
    "causal": "causal.pt",
    "few_step": "self_forcing_mini.pt",
}


@pytest.fixture(autouse=True, scope="module")
def short_clips_without_measurements():
    """Of 21 video frames at most; the VAE's PSNR and the teacher's paths take longer than these trainings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoencoder, "FRAMES", 21)
        patch.setattr(vae_training, "FRAMES", 9)
        patch.setattr(vae_training, "SHORT_CLIPS", (5, 9))
        patch.setattr(vae_training, "LONG_CLIPS", (9, 13))
        patch.setattr(vae_training, "vae_quality", lambda *_: {"psnr": 0.0})
        patch.setattr(vae_training, "final_quality", lambda *_: {})
        patch.setattr(few_step, "TEACHER_STEPS", 4)
        patch.setattr(few_step, "EVERY", 1)
        yield


def train(folder, stage: str, *more: str) -> None:
    train_mini.run(["--stage", stage, "--steps", STAGES[stage], "--output_dir", str(folder), *SMALL, *more])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A folder with all four stages, each of a few steps, and with checkpoints of two."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for stage, more in {
        "vae": [],
        "base": [],
        "causal": ["--moments", str(folder / "kept")],  # the older name of --training_checkpoints
        "few_step": ["--training_checkpoints", str(folder / "kept")],
    }.items():
        train(folder, stage, *more)
        if stage == "causal":
            (folder / "kept/step_last.pt").touch()  # a user's own: of no step
    return folder


def stop_at(monkeypatch, number: int) -> None:
    """Ctrl-C before this step."""
    step = Trainer.step

    def stopped(self, kind, loss):
        if self.steps == number:
            raise KeyboardInterrupt
        step(self, kind, loss)

    monkeypatch.setattr(Trainer, "step", stopped)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stopped_training_goes_on_to_the_same_bytes(stage, undisturbed, tmp_path, monkeypatch):
    for name in RECIPES[stage].needs:
        (tmp_path / name).symlink_to(undisturbed / name)
    with monkeypatch.context() as patched:
        stop_at(patched, 1)
        with pytest.raises(StoppedError, match=r"at step 1; .* --resume"):
            train(tmp_path, stage)
    assert (tmp_path / f"{stage}.resume.pt").is_file() and not (tmp_path / WEIGHTS[stage]).exists()
    torch.manual_seed(99)  # another process has other random numbers
    train(tmp_path, stage, "--resume")
    assert (tmp_path / WEIGHTS[stage]).read_bytes() == (undisturbed / WEIGHTS[stage]).read_bytes()
    assert not (tmp_path / f"{stage}.resume.pt").exists()
    ours, theirs = (
        json.loads((folder / "training.json").read_text())[stage] for folder in (tmp_path, undisturbed)
    )
    assert ours["steps"] == theirs["steps"] == int(STAGES[stage])
    assert [row[::2] for row in ours["loss_curve"]] == [row[::2] for row in theirs["loss_curve"]]


def test_a_killed_training_goes_on_from_the_state_of_the_last_minute(undisturbed, tmp_path, monkeypatch):
    class Killed(BaseException):
        """Nothing in the loop may handle it, as nothing handles SIGKILL."""

    def kill_at_the_last_step(self, kind, loss, step=Trainer.step):
        if self.steps == 2:
            raise Killed
        step(self, kind, loss)

    for name in RECIPES["causal"].needs:
        (tmp_path / name).symlink_to(undisturbed / name)
    with monkeypatch.context() as patched:
        patched.setattr(training, "SAVE_SECONDS", 0)
        patched.setattr(Trainer, "step", kill_at_the_last_step)
        with pytest.raises(Killed):
            train(tmp_path, "causal")
    train(tmp_path, "causal", "--resume")
    assert (tmp_path / WEIGHTS["causal"]).read_bytes() == (undisturbed / WEIGHTS["causal"]).read_bytes()


def test_the_causal_stage_goes_on_from_few_step_weights(undisturbed, tmp_path):
    for name in RECIPES["causal"].needs:
        (tmp_path / name).symlink_to(undisturbed / name)
    train(tmp_path, "causal", "--start_from", str(undisturbed), "--steps", "1", "--lr", "1e-12")
    found, started = (
        read_self_forcing_state(path)
        for path in (tmp_path / WEIGHTS["causal"], undisturbed / WEIGHTS["few_step"])
    )
    for name, weight in started.items():
        assert torch.equal(found[name], weight.to(found[name].dtype)), name
    log = json.loads((tmp_path / "training.json").read_text())["causal"]
    assert log["start_from"] == file_sha256(undisturbed / WEIGHTS["few_step"])


def test_other_seeds_give_other_weights(undisturbed, tmp_path):
    for name in RECIPES["causal"].needs:
        (tmp_path / name).symlink_to(undisturbed / name)
    train(tmp_path, "causal", "--seed", "1")
    assert (tmp_path / WEIGHTS["causal"]).read_bytes() != (undisturbed / WEIGHTS["causal"]).read_bytes()


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
        (["--resume", "--steps", "9"], "is of a stage of 2 steps, not 9"),
        (["--resume", "DAMAGED"], "is no state of this stage"),
    ],
)
def test_what_cannot_be_resumed(more, said, undisturbed, tmp_path, monkeypatch, capfd):
    (tmp_path / "vae").symlink_to(undisturbed / "vae")
    if "--steps" in more:
        with monkeypatch.context() as patched:
            stop_at(patched, 1)
            with pytest.raises(StoppedError):
                train(tmp_path, "base")
    if "DAMAGED" in more:
        (tmp_path / "base.resume.pt").write_bytes(b"not a state")
    argv = ["--stage", "base", "--steps", "2", "--output_dir", str(tmp_path), *SMALL, *more]
    with pytest.raises(SystemExit) as ended:
        cli.main(train_mini.run, [word for word in argv if word != "DAMAGED"])
    assert ended.value.code == 2 and said in capfd.readouterr().err


def test_progress_is_of_steps_or_minutes_whichever_is_further(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(training.time, "monotonic", lambda: now[0])
    by_steps, both = Schedule(10), Schedule(10, minutes=1)
    for schedule in (by_steps, both):
        schedule.step = 2
    now[0] += 30
    assert by_steps.progress == 0.2 and both.progress == 0.5
    both.step, both.earlier_seconds = 9, 0.0
    assert both.progress == 0.9
    now[0] += 3000
    assert both.progress == 1.0 and by_steps.progress == 0.2


def test_the_longest_clips_are_longer_than_the_decoder_sees(monkeypatch):
    assert max(LONG_CLIPS) > receptive_field(VAE) == 109
    monkeypatch.setattr(vae_training, "SHORT_CLIPS", SHORT_CLIPS)
    monkeypatch.setattr(vae_training, "LONG_CLIPS", LONG_CLIPS)
    lengths = {clip_length(step, progress) for step in range(12) for progress in (0.0, 0.99 * SHORT_SHARE)}
    assert max(lengths) < FRAMES < max(clip_length(step, 0.9) for step in range(12))


def test_the_receptive_field_is_what_the_decoder_reads():
    """A change of the latents beyond it changes nothing, a change within it does."""
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=4, decoder_base_dim=4, z_dim=2, num_res_blocks=1, dim_mult=[1, 1, 1, 1])
    vae = vae.double().requires_grad_(False)
    seen = (receptive_field(vae.config) - 1) // 4 + 1
    z = torch.randn(1, 2, seen + 6, 1, 1, dtype=torch.float64)
    for latent, changes in ((5, False), (6, True)):
        other = z.clone()
        other[:, :, latent] += 1
        assert (decode(vae, other)[:, :, -1] != decode(vae, z)[:, :, -1]).any() == changes


def test_outlines_weigh_more():
    """A wall that ends at column 8, in the second frame: two pixels on both sides of its end weigh more, the
    video's border does not."""
    video = torch.zeros(1, 3, 2, 16, 16)
    video[:, 1, 1, :, :8] = 0.7
    weights = vae_training.pixel_weights(video)
    assert weights.shape == (1, 1, 2, 16, 16)
    near = torch.ones(2, 16, 16)
    near[1, :, 6:10] = vae_training.EDGE_WEIGHT
    assert torch.equal(weights[0, 0], near)


def test_recipes_can_be_narrowed():
    assert {stage: recipe.needs for stage, recipe in RECIPES.items()} == {
        "vae": (),
        "base": ("vae",),
        "causal": ("vae", "transformer", "text_encoder"),
        "few_step": ("vae", "text_encoder", "causal.pt"),
        "lora": ("vae", "text_encoder", "causal.pt", "self_forcing_mini.pt"),
        "framewise": ("vae", "text_encoder", "causal.pt", "self_forcing_mini.pt"),
    }
    hard = RECIPES["base"].kinds
    assert hard.count("crossing") == hard.count("wall") == 2 > hard.count("single")
    assert replace(RECIPES["base"], kinds=("single",)).kinds == ("single",)


def test_a_damaged_log_is_said_in_one_line(tmp_path):
    from experiments.miniature.training import log_stage

    (tmp_path / "training.json").write_text("not JSON")
    with pytest.raises(CacheError, match="is no log of a training"):
        log_stage(tmp_path / "training.json", "vae", {})


def test_the_tokenizer_is_the_shipped_one(tmp_path):
    from experiments.miniature.latent_clips import build_tokenizer

    build_tokenizer().save_pretrained(tmp_path)
    shipped = ROOT / "checkpoints/wan-mini/tokenizer/tokenizer.json"
    assert json.loads((tmp_path / "tokenizer.json").read_text()) == json.loads(shipped.read_text())
