"""The few-step stage: where the teacher's paths lead, and that its loss is the distance from their ends."""

import shutil
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from experiments.miniature import stages as few_step
from experiments.miniature.latent_clips import build_tokenizer, encode_text
from experiments.miniature.ranks import Ranks
from experiments.miniature.recipe import GUIDANCE, MODEL, RECIPES, SAMPLER_STEPS, SHIFT, StageRun
from experiments.miniature.stages import FewStep, teacher_sigmas
from wan.checkpoint import read_self_forcing_state
from wan.model import CausalWanModel
from wan.pipeline import FlowSchedule

MINI = ROOT / "checkpoints" / "wan-mini"
CAPTIONS = [
    "",
    "a red circle moving right over a dark blue background",
    "a square moving up behind a red wall",
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A stage whose teacher takes four steps, on two clips of six frames: noise, as good as any other."""
    monkeypatch.setattr(few_step, "TEACHER_STEPS", 4)
    monkeypatch.setattr(few_step, "EVERY", 1)
    shutil.copytree(MINI / "text_encoder", tmp_path / "text_encoder")
    shutil.copy(MINI / "self_forcing_mini.pt", tmp_path / "causal.pt")
    recipe = replace(RECIPES["few_step"], batch=2, clips=2)
    return StageRun("few_step", recipe, tmp_path, torch.device("cpu"), torch.float32)


@pytest.fixture
def clips():
    tokens = build_tokenizer()(CAPTIONS, padding=True, return_tensors="pt")
    latents = torch.randn(2, 16, 6, 8, 8, generator=torch.Generator().manual_seed(1))
    return SimpleNamespace(
        latents=latents,
        ids=tokens.input_ids,
        mask=tokens.attention_mask,
        draw=lambda size: torch.arange(size),
    )


def loss_of(run, clips) -> FewStep:
    """The stage's, of the weights that it starts from."""
    model = CausalWanModel(**asdict(MODEL)).requires_grad_(False)
    model.load_state_dict(read_self_forcing_state(run.output_dir / "causal.pt"))
    return FewStep(run, model, clips)


def test_the_samplers_noise_levels_are_on_the_teachers_way():
    samplers = FlowSchedule(SHIFT).warp(SAMPLER_STEPS) / 1000
    torch.testing.assert_close(teacher_sigmas()[:: few_step.EVERY], torch.cat([samplers, torch.zeros(1)]))


@torch.no_grad()
def test_a_path_is_what_a_guided_rollout_takes_after_the_clips_own_past(run, clips):
    """All blocks at once under the mask of teacher forcing, and one by one with a cache."""
    teacher = loss_of(run, clips).teacher
    paths, model = torch.stack(teacher.path(torch.arange(2), seed=0), 1), teacher.model
    sigmas = teacher_sigmas()
    clip, rows = clips.latents[1:].transpose(1, 2), torch.tensor([2, 0])  # its caption, and the empty one
    text = model.text_keys_values(encode_text(teacher.encoder, clips.ids[rows], clips.mask[rows]))
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
    monkeypatch.setattr(few_step, "TEACHER_BATCH", 1)
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
    assert torch.equal(later.paths, loss.paths) and later.numbers() == loss.numbers() == {"paths": 5}


@pytest.mark.parametrize("own_past", [False, True])
def test_the_loss_is_the_distance_of_jumps_from_the_ends(run, clips, own_past, monkeypatch):
    loss, off = loss_of(run, clips), 0.3

    def jumps(past, x, t, text):
        """Flow of a model that lands `off` beside the end of the path from wherever it is."""
        return (x - loss.paths[:, -1] - off) / (t / 1000)[..., None, None, None]

    monkeypatch.setattr(loss, "predict", jumps)
    assert loss(own_past).item() == pytest.approx(off**2, rel=1e-4)


def test_all_paths_are_counted(run, clips, monkeypatch):
    """Two clips are a turn that is not full, in each of two processes; after eight steps it is the third."""
    run = replace(run, ranks=Ranks(0, 2), recipe=replace(run.recipe, batch=4))
    loss = loss_of(run, clips)
    assert loss.numbers() == {"paths": 4}
    loss.before(8)
    assert loss.numbers() == {"paths": 12}
