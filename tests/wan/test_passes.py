"""Passes where blocks differ: steps of the first block, a denoising step at t = 0, context computed again."""

from dataclasses import replace

import pytest
import torch

from experiments.caches.formats import check
from experiments.caches.view import open_passes, open_profiles
from experiments.extraction import cache_builders, causal
from experiments.extraction import memory as memory_estimate
from tests.helpers.rollouts import TINY, TWO_STEPS, rollout, tiny_pipeline
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.capture import CaptureRequest
from wan.config import load_config
from wan.errors import ConfigError
from wan.interventions import Ablate, InterventionError, Jitter, Knockout, intervene
from wan.pipeline import RECACHE, CausalInferencePipeline, FlowSchedule, add_noise, flow_to_x0
from wan.policies import PromptSwitch, make_policy

TWO_STEP = {"denoising_step_list": [1000, 500], "first_block_steps": [1000, 750, 500, 250]}


def test_the_first_block_takes_its_own_steps():
    """Against the algorithm by hand: denoise at each level, then write clean keys."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(1, 2, 16, 2, 10, generator=generator)
    renoise = torch.randn(3, *noise.shape, generator=generator)
    embeds = torch.randn(1, 4, TINY["text_dim"], generator=generator)
    model = tiny_pipeline().model
    run = CausalInferencePipeline(model, num_frame_per_block=1, **TWO_STEP)
    latents = run.inference(noise, prompt_embeds=embeds, renoise=renoise)[1]
    assert run.pass_timesteps == pytest.approx([1000, 937.5, 833.3333, 625, 0])
    assert [run.has_pass(1, step) for step in range(6)] == [True, False, True, False, True, False]

    schedule = FlowSchedule(5.0)
    levels = [(float(t), float(schedule.sigma(t))) for t in schedule.warp([1000, 750, 500, 250])]
    cache, text = model.new_kv_cache(1, 2, 2, 10, block_size=1), model.text_keys_values(embeds)
    for frame, chosen in ((0, levels), (1, levels[::2])):
        cache.advance(range(frame, frame + 1), text)
        x = noise[:, frame : frame + 1]
        for number, (t, sigma) in enumerate(chosen):
            x0 = flow_to_x0(model(x, torch.tensor(t), text, cache), x, sigma)
            if number + 1 < len(chosen):
                x = add_noise(x0, renoise[number, :, frame : frame + 1], chosen[number + 1][1])
        model(x0, torch.tensor(0.0), text, cache)
        assert torch.equal(latents[:, frame : frame + 1], x0)


@pytest.mark.parametrize("context", [3, 6])
def test_context_is_computed_again_before_every_block(context):
    policy = make_policy("relative", window=context + 3)
    run = CausalInferencePipeline(tiny_pipeline().model, cache_policy=policy, recompute_context=context)
    request = CaptureRequest(layers=[0], steps=[RECACHE, 0], granularity="frame")
    with ATTENTION_WEIGHT_CAPTURE.capture(request) as calls:
        rollout(run, 12)
    first = [max(0, start - context) for start in (3, 6, 9)]
    again = [list(range(a, b)) for a, b in zip(first, (3, 6, 9), strict=True)]
    assert [c["query_frames"] for c in calls if c["step"] == RECACHE] == again
    assert calls[-1]["key_frames"] == list(range(9 - context, 12))
    assert calls[-1]["slot_position"] == list(range(context + 3))


def with_context(**policy):
    """Two steps a block, and the six frames before it computed again."""
    policy = make_policy(**{"window": 9, "sink": 1} | policy)
    model = tiny_pipeline().model
    return CausalInferencePipeline(model, cache_policy=policy, recompute_context=6, **TWO_STEPS)


@pytest.mark.parametrize(
    "how, policy",
    [
        ("flush", {"name": "window"}),
        ("cut", {"name": "relative"}),
        ("flush", {"name": "window", "sink": 3, "global_sink": True}),
    ],
    ids=str,
)
def test_context_that_a_switch_forgot_is_not_computed_again(how, policy):
    switch = PromptSwitch(12, prompt_embeds=torch.ones(1, 4, TINY["text_dim"]), how=how)
    with ATTENTION_WEIGHT_CAPTURE.capture(layers=[0], granularity="frame", steps=[0]) as calls:
        rollout(with_context(**policy), 18, prompt_schedule=[switch])
    seen = [c["key_frames"] for c in calls]
    sink = [0, 1, 2] if "sink" in policy else []  # which window's global_sink keeps
    assert seen[3] == [*(sink or [3, 4, 5]), *range(6, 12)]
    assert seen[4] == [*sink, *range(10, 15)]
    assert seen[5] == [*sink, *range(12 if sink else 10, 18)]


def test_edits_of_keys_that_are_computed_again_are_refused_and_jitter_is_of_every_forward(monkeypatch):
    run, forwards = with_context(name="relative"), []
    with intervene(Jitter(layers=[0])) as session:
        rollout(run, 12, on_pass=lambda: forwards.append(session.changed[0]))
    assert forwards == list(range(1, 4 * 3 + 3 + 1))
    edit = Ablate("zero", passes="clean")
    sunk = with_context(name="window", global_sink=True)  # its sink's keys are those of clean passes
    sunk.plan(12).check([edit])
    monkeypatch.setattr(run.model, "flow", None)  # nothing may run
    with pytest.raises(InterventionError, match="recompute_context computes"), intervene(edit):
        rollout(run, 12)


def test_an_edit_of_a_step_is_counted_where_blocks_have_it():
    """Step 1 (t = 938) is the first block's alone, which has no past to lose."""
    run = CausalInferencePipeline(tiny_pipeline().model, num_frame_per_block=1, **TWO_STEP)
    assert run.plan(3).count(Ablate("zero", layers=[0], passes="denoise")) == 4 + 2 + 2
    lost = Knockout(frames="past", layers=[0], steps=[1], passes="denoise")
    with pytest.raises(InterventionError, match="no call can be edited"), intervene(lost):
        rollout(run, 3)


def test_an_atlas_keeps_and_labels_each_pass_at_its_level():
    """Four frames of the miniature, frame by frame in two steps, with four for the first block."""
    config = load_config("configs/wan_mini.yaml", {**TWO_STEP, "num_frames": 4, "num_frame_per_block": 1})
    requests = cache_builders.atlas_requests(config, mass=True, key_curve=True, cross=True)
    atlas = cache_builders.atlas_cache(causal.extract(config, requests))
    check(atlas)
    assert atlas["pass_timesteps"][2] == pytest.approx(833.333)
    whole, first = [True] * 4, [True] + [False] * 3
    for name in ("frame_logits", "cross_mass"):  # [N, P, H, F, ...]
        assert (~atlas[name].isnan().all(-1).all(2).all(0)).tolist() == [whole, first, whole, first, whole]
    assert atlas["key_curve"][:, 1].isnan().all() and not atlas["key_curve"][:, 2].isnan().all()
    labels = {view.pass_label: view.query_frames for view in open_passes(atlas, open_profiles(atlas))}
    assert labels == {
        "pass 0 (t = 1000)": (3,),
        "pass 1 (t = 937.5)": (0,),
        "pass 2 (t = 833.333)": (3,),
        "pass 3 (t = 625)": (0,),
        "clean pass (t = 0)": (3,),
    }
    at_0 = atlas | {"pass_timesteps": [1000.0, 937.0, 833.0, 0.0, 0.0], "pass_is_clean": [False] * 4 + [True]}
    at_0 |= {name: atlas[name][:, [0, 0, 0, 0, 4]] for name in ("frame_logits", "frame_mass")}
    views = open_passes(at_0, open_profiles(at_0))
    assert [view.pass_label for view in views[-2:]] == ["pass 3, denoising (t = 0)", "clean pass (t = 0)"]
    assert views[-2].noise_frames == (3,) and not views[-1].noise_frames


def test_a_pass_that_the_last_block_has_not_is_refused_before_the_rollout():
    config = load_config("configs/wan_mini.yaml", {**TWO_STEP, "num_frame_per_block": 1, "step": 1})
    sizes = causal.checkpoint.read_model_config(config.ckpt_dir)
    message = "step 1 is a pass of other blocks than block 20, which has 0, 2, 4"
    with pytest.raises(ConfigError, match=message):
        memory_estimate.check_requests(config, sizes, cache_builders.layer_requests(config))
    there = replace(config, step=2)
    memory_estimate.check_requests(there, sizes, cache_builders.layer_requests(there))
