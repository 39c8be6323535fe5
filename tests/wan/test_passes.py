"""Passes where blocks differ: steps of the first block, a denoising step at t = 0, context computed again."""

import pytest
import torch

from tests.helpers.rollouts import TINY, TWO_STEPS, rollout, tiny_pipeline
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.interventions import Ablate, InterventionError, Jitter, Knockout, intervene
from wan.pipeline import CausalInferencePipeline, FlowSchedule, add_noise, flow_to_x0
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
    assert run.steps_of(1) == [0, 2]

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
