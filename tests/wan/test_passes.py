"""Passes where blocks differ: steps of the first block, a denoising step at t = 0, context computed again."""

from dataclasses import replace

import pytest
import torch

from experiments.caches.formats import check
from experiments.caches.view import open_passes, open_profiles
from experiments.extraction import cache_builders, causal
from experiments.extraction import memory as memory_estimate
from tests.helpers.rollouts import TINY, TWO_STEPS, tiny_pipeline
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.capture import CaptureRequest
from wan.config import load_config
from wan.errors import ConfigError
from wan.interventions import Ablate, InterventionError, Jitter, Knockout, intervene
from wan.pipeline import RECACHE, CausalInferencePipeline, FlowSchedule, add_noise, flow_to_x0
from wan.policies import PromptSwitch, make_policy

TWO_STEP = {"denoising_step_list": [1000, 500], "first_block_steps": [1000, 750, 500, 250]}


def inputs(frames: int):
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(1, frames, 16, 2, 10, generator=generator)
    renoise = torch.randn(3, *noise.shape, generator=generator)
    return noise, renoise, torch.randn(1, 4, TINY["text_dim"], generator=generator)


def one_block(model, cache, text, x, renoise, levels):
    """Denoise x at the given noise levels (t, sigma), then write its clean keys; the algorithm by hand."""
    for number, (t, sigma) in enumerate(levels):
        x0 = flow_to_x0(model(x, torch.tensor(t), text, cache), x, sigma)
        if number + 1 < len(levels):
            x = add_noise(x0, renoise[number], levels[number + 1][1])
    model(x0, torch.tensor(0.0), text, cache)
    return x0


def test_a_pass_is_named_by_its_noise_level():
    run = CausalInferencePipeline(tiny_pipeline().model, **TWO_STEP)
    assert run.timesteps == pytest.approx((1000, 937.5, 833.3333, 625))
    assert run.steps_of(0) == [0, 1, 2, 3] and run.steps_of(1) == run.steps_of(6) == [0, 2]
    assert [run.has_pass(1, step) for step in range(6)] == [True, False, True, False, True, False]


def test_the_first_block_takes_its_own_steps():
    noise, renoise, embeds = inputs(2)
    model = tiny_pipeline().model
    run = CausalInferencePipeline(model, num_frame_per_block=1, **TWO_STEP)
    latents = run.inference(noise, prompt_embeds=embeds, renoise=renoise)[1]

    schedule = FlowSchedule(5.0)
    levels = [(float(t), float(schedule.sigma(t))) for t in schedule.warp([1000, 750, 500, 250])]
    cache, text = model.new_kv_cache(1, 2, 2, 10, block_size=1), model.text_keys_values(embeds)
    for frame, chosen in ((0, levels), (1, levels[::2])):
        cache.advance(range(frame, frame + 1), text)
        now = slice(frame, frame + 1)
        x0 = one_block(model, cache, text, noise[:, now], renoise[:, :, now], chosen)
        assert torch.equal(latents[:, now], x0)


def test_a_step_at_0_denoises_and_the_clean_pass_follows():
    noise, renoise, embeds = inputs(3)
    model = tiny_pipeline().model
    run = CausalInferencePipeline(model, denoising_step_list=[1000, 937, 0], warp_denoising_step=False)
    assert run.pass_timesteps == [1000, 937, 0, 0]
    with ATTENTION_WEIGHT_CAPTURE.capture(layers=[1], granularity="frame") as calls:
        run.inference(noise, prompt_embeds=embeds, renoise=renoise)
    assert [(c["step"], c["timestep"], c["is_clean_pass"]) for c in calls] == [
        (0, 1000, False),
        (1, 937, False),
        (2, 0, False),
        (3, 0, True),
    ]


@pytest.mark.parametrize("context", [3, 6])
def test_context_is_computed_again_before_every_block(context):
    noise, renoise, embeds = inputs(12)
    policy = make_policy("relative", window=context + 3)
    run = CausalInferencePipeline(tiny_pipeline().model, cache_policy=policy, recompute_context=context)
    with ATTENTION_WEIGHT_CAPTURE.capture(
        CaptureRequest(layers=[0], steps=[RECACHE, 0], granularity="frame")
    ) as calls:
        run.inference(noise, prompt_embeds=embeds, renoise=renoise)
    first = [max(0, start - context) for start in (3, 6, 9)]
    again = [list(range(a, b)) for a, b in zip(first, (3, 6, 9), strict=True)]
    assert [c["query_frames"] for c in calls if c["step"] == RECACHE] == again
    late = calls[-1]
    assert late["key_frames"] == list(range(9 - context, 12))
    assert late["slot_position"] == list(range(context + 3))


def with_context(**policy):
    """Two steps a block, and the six frames before it computed again."""
    policy = make_policy(**{"window": 9, "sink": 1} | policy)
    model = tiny_pipeline().model
    return CausalInferencePipeline(model, cache_policy=policy, recompute_context=6, **TWO_STEPS)


@pytest.mark.parametrize(
    "how, policy",
    [
        ("flush", {"name": "window"}),
        ("flush", {"name": "relative"}),
        ("cut", {"name": "relative"}),
        ("flush", {"name": "window", "sink": 3, "global_sink": True}),
    ],
    ids=str,
)
def test_context_that_a_switch_forgot_is_not_computed_again(how, policy):
    noise, renoise, embeds = inputs(18)
    switch = PromptSwitch(12, prompt_embeds=embeds, how=how)
    with ATTENTION_WEIGHT_CAPTURE.capture(layers=[0], granularity="frame", steps=[0]) as calls:
        with_context(**policy).inference(
            noise, prompt_embeds=embeds, renoise=renoise, prompt_schedule=[switch]
        )
    seen = [c["key_frames"] for c in calls]
    sink = [0, 1, 2] if "sink" in policy else []  # which window's global_sink keeps
    assert seen[3] == [*(sink or [3, 4, 5]), *range(6, 12)]
    assert seen[4] == [*sink, *range(10, 15)]
    assert seen[5] == [*sink, *range(12 if sink else 10, 18)]


def test_edits_of_keys_that_are_computed_again_are_refused_and_jitter_is_of_every_forward(monkeypatch):
    noise, renoise, embeds = inputs(12)
    run, forwards = with_context(name="relative"), []
    with intervene(Jitter(layers=[0])) as session:
        run.inference(
            noise, prompt_embeds=embeds, renoise=renoise, on_pass=lambda: forwards.append(session.changed[0])
        )
    assert forwards == list(range(1, 4 * 3 + 3 + 1))
    edit = Ablate("zero", passes="clean")
    sunk = with_context(name="window", global_sink=True)  # its sink's keys are those of clean passes
    sunk.plan(12).check([edit])
    monkeypatch.setattr(run.model, "flow", None)  # nothing may run
    with pytest.raises(InterventionError, match="recompute_context computes"), intervene(edit):
        run.inference(noise, prompt_embeds=embeds, renoise=renoise)


def test_what_context_cannot_be_computed_again_is_refused():
    model = tiny_pipeline().model
    for policy, context, message in (
        (make_policy("window", window=6), 6, "take a window of 9"),
        (make_policy("memory_bank", window=12, sink=3), 3, "cannot compute its cache again"),
        (make_policy("full"), -1, "must be 0 or more"),
    ):
        with pytest.raises(ConfigError, match=message):
            CausalInferencePipeline(model, cache_policy=policy, recompute_context=context)


@pytest.fixture(scope="module")
def framewise_atlas():
    """Four frames of the miniature, frame by frame in two steps, with four for the first block."""
    config = load_config("configs/wan_mini.yaml", {**TWO_STEP, "num_frames": 4, "num_frame_per_block": 1})
    requests = cache_builders.atlas_requests(config, mass=True, key_curve=True, cross=True)
    return cache_builders.atlas_cache(causal.extract(config, requests))


def test_an_atlas_keeps_each_pass_at_its_level(framewise_atlas):
    check(framewise_atlas)
    logits = framewise_atlas["frame_logits"]
    assert logits.shape[1] == 5 and framewise_atlas["pass_timesteps"][2] == pytest.approx(833.333)
    rows = ~logits.isnan().all(-1).all(2).all(0)  # [P, F]
    assert rows.tolist() == [
        [True] * 4,
        [True, False, False, False],
        [True] * 4,
        [True] + [False] * 3,
        [True] * 4,
    ]
    words = ~framewise_atlas["cross_mass"].isnan().all(-1).all(2).all(0)
    assert torch.equal(words, rows)
    assert (
        framewise_atlas["key_curve"][:, 1].isnan().all()
        and not framewise_atlas["key_curve"][:, 2].isnan().all()
    )


def test_every_pass_of_it_opens_and_is_labelled(framewise_atlas):
    first = open_profiles(framewise_atlas)
    labels = {view.pass_label: view.query_frames for view in open_passes(framewise_atlas, first)}
    assert labels == {
        "pass 0 (t = 1000)": (3,),
        "pass 1 (t = 937.5)": (0,),
        "pass 2 (t = 833.333)": (3,),
        "pass 3 (t = 625)": (0,),
        "clean pass (t = 0)": (3,),
    }


def test_a_denoising_pass_at_0_is_labelled_as_one(framewise_atlas):
    atlas = dict(framewise_atlas) | {
        "pass_timesteps": [1000.0, 937.0, 833.0, 0.0, 0.0],
        "pass_is_clean": [False] * 4 + [True],
        "frame_logits": framewise_atlas["frame_logits"][:, [0, 0, 0, 0, 4]],
        "frame_mass": framewise_atlas["frame_mass"][:, [0, 0, 0, 0, 4]],
    }
    views = open_passes(atlas, open_profiles(atlas))
    assert [view.pass_label for view in views[-2:]] == ["pass 3, denoising (t = 0)", "clean pass (t = 0)"]
    assert views[-2].noise_frames == (3,) and not views[-1].noise_frames


def test_a_pass_that_the_last_block_has_not_is_refused_before_the_rollout():
    config = load_config("configs/wan_mini.yaml", {**TWO_STEP, "num_frame_per_block": 1, "step": 1})
    sizes = causal.checkpoint.read_model_config(config.ckpt_dir)
    with pytest.raises(
        ConfigError, match="step 1 is a pass of other blocks than block 20, which has 0, 2, 4"
    ):
        memory_estimate.check_requests(config, sizes, cache_builders.layer_requests(config))
    there = replace(config, step=2)
    memory_estimate.check_requests(there, sizes, cache_builders.layer_requests(there))


def test_an_edit_of_a_step_is_counted_where_blocks_have_it():
    """Step 1 (t = 938) is the first block's alone, which has no past to lose."""
    run = CausalInferencePipeline(tiny_pipeline().model, num_frame_per_block=1, **TWO_STEP)
    noise, renoise, embeds = inputs(3)
    assert run.plan(3).count(Ablate("zero", layers=[0], passes="denoise")) == 4 + 2 + 2
    lost = Knockout(frames="past", layers=[0], steps=[1], passes="denoise")
    with intervene(lost), pytest.raises(InterventionError, match="no call can be edited"):
        run.inference(noise, prompt_embeds=embeds, renoise=renoise)
