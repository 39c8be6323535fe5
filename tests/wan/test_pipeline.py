"""Rollouts: what they accept and refuse, steps and passes that differ by block, context computed again."""

import numpy as np
import pytest
import torch
from conftest import golden_arrays, golden_model
from diffusers import UniPCMultistepScheduler
from helpers.checkpoints import diffusers_model
from helpers.rollouts import TINY, TWO_STEPS, drawn, rollout, shared_golden_model, tiny_pipeline

from wan import checkpoint as weight_names
from wan.cache import PromptSwitch, of_window
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.errors import ConfigError
from wan.interventions import Ablate, InterventionError, Jitter, Knockout, intervene
from wan.model import WanModel
from wan.pipeline import CausalInferencePipeline, FlowSchedule, add_noise, flow_to_x0
from wan.policies import make_policy
from wan.text2video import TextToVideoPipeline

ARRAYS = golden_arrays("causal")
NOISE, EMBEDS = ARRAYS["blocks9/noise"], ARRAYS["blocks9/prompt_embeds"]
SIX, GIVEN = NOISE[:, :6], NOISE[:, :3]


def pipeline(**kwargs) -> CausalInferencePipeline:
    return CausalInferencePipeline(shared_golden_model(), **kwargs)


def test_text_encoder_and_vae_are_used_and_everybody_is_called():
    seen, passes, blocks = [], [], []

    class Vae:
        def decode(self, latents):
            seen.append(latents)
            return "video"

    run = pipeline(text_encoder=lambda prompts: seen.append(prompts) or EMBEDS, vae=Vae())
    callbacks = {"on_pass": lambda: passes.append(1), "on_block": lambda *block: blocks.append(block)}
    video, latents = run.inference(NOISE[:, :6], text_prompts=["a prompt"], **callbacks)
    assert video == "video" and seen[0] == ["a prompt"] and seen[1] is latents and len(passes) == 2 * 5
    assert [block for block, _ in blocks] == [0, 1]
    assert torch.equal(torch.cat([x0 for _, x0 in blocks], 1), latents)
    assert run.inference(NOISE[:, :3], text_prompts=["a prompt"], return_latents=False) == "video"


TWO = EMBEDS.repeat(2, 1, 1)  # attention would read memory that is not theirs
REFUSED = [  # what is said, noise, and other arguments
    ("8 frames do not fit blocks of 3; try 6 or 9", NOISE[:, :8], {}),
    (
        "prompt embeddings of 320 tokens, the model reads 32",
        NOISE,
        {"prompt_embeds": EMBEDS.repeat(1, 10, 1)},
    ),
    ("give prompt_embeds, or text_prompts and a text_encoder", NOISE, {"prompt_embeds": None}),
    ("1 given frames end within a block; blocks end at", NOISE[:, :8], {"initial_latent": NOISE[:, :1]}),
    ("embeddings of batch 1 for latents of batch 2; give each", torch.cat([SIX, SIX]), {}),
    ("embeddings of batch 2 for latents of batch 1", SIX, {"prompt_embeds": TWO}),
]


@pytest.mark.parametrize(("message", "noise", "arguments"), REFUSED)
def test_bad_input_is_refused(message, noise, arguments):
    with pytest.raises(ConfigError, match=message):
        pipeline().inference(noise, **{"prompt_embeds": EMBEDS} | arguments, on_pass=pytest.fail)


# --- Passes where blocks differ
FIRST_STEPS = {"first_block_steps": [1000, 750, 500, 250], **TWO_STEPS}


def test_the_first_block_takes_its_own_steps():
    """Against the algorithm by hand: denoise at each level, then write clean keys."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(1, 2, 16, 2, 10, generator=generator)
    renoise = torch.randn(3, *noise.shape, generator=generator)
    embeds = torch.randn(1, 4, TINY["text_dim"], generator=generator)
    model = tiny_pipeline().model
    run = CausalInferencePipeline(model, num_frame_per_block=1, **FIRST_STEPS)
    latents = run.inference(noise, prompt_embeds=embeds, renoise=renoise)[1]
    assert run.pass_timesteps == pytest.approx([1000, 937.5, 833.3333, 625, 0])
    assert run.later_steps == [0, 2]

    schedule = FlowSchedule(5.0)
    levels = [(float(t), float(schedule.sigma(t))) for t in schedule.warp([1000, 750, 500, 250])]
    cache = model.new_kv_cache(1, 2, 2, 10, of_window(-1, 0), block_size=1)
    text = model.text_keys_values(embeds)
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


SUNK = {"name": "window", "sink": 3, "global_sink": True}  # which it keeps


@pytest.mark.parametrize(
    ("how", "policy"), [("flush", {"name": "window"}), ("cut", {"name": "relative"}), ("flush", SUNK)]
)
def test_context_that_a_switch_forgot_is_not_computed_again(how, policy):
    switch = PromptSwitch(12, prompt_embeds=torch.ones(1, 4, TINY["text_dim"]), how=how)
    with ATTENTION_WEIGHT_CAPTURE.capture(layers=[0], granularity="frame", steps=[0]) as calls:
        rollout(with_context(**policy), 18, prompt_schedule=[switch])
    seen, sink = [c["key_frames"] for c in calls], [0, 1, 2] if policy is SUNK else []
    assert seen[3] == [*(sink or [3, 4, 5]), *range(6, 12)]
    assert seen[4] == [*sink, *range(10, 15)]
    assert seen[5] == [*sink, *range(12 if sink else 10, 18)]


def test_edits_of_keys_that_are_computed_again_are_refused_and_jitter_is_of_every_forward(monkeypatch):
    run, forwards = with_context(name="relative"), []
    with intervene(Jitter(layers=[0])) as active:
        rollout(run, 12, on_pass=lambda: forwards.append(active.changed[0]))
    assert forwards == list(range(1, 4 * 3 + 3 + 1))
    edit = Ablate("zero", passes="clean")
    sunk = with_context(name="window", global_sink=True)  # its sink's keys are those of clean passes
    edit.check(sunk.sizes(12))
    monkeypatch.setattr(run.model, "flow", None)  # nothing may run
    with pytest.raises(InterventionError, match="recompute_context computes"), intervene(edit):
        rollout(run, 12)


def test_an_edit_of_a_step_is_counted_where_blocks_have_it():
    """Step 1 (t = 938) is the first block's alone, which has no past to lose."""
    run = CausalInferencePipeline(tiny_pipeline().model, num_frame_per_block=1, **FIRST_STEPS)
    with intervene(Ablate("zero", layers=[0], passes="denoise")) as active:
        rollout(run, 3)
    assert active.changed == [4 + 2 + 2] and active.first_block == 0
    lost = Knockout(frames="past", layers=[0], steps=[1], passes="denoise")
    with pytest.warns(UserWarning, match="no call was edited by: Knockout"), intervene(lost) as active:
        rollout(run, 3)
    assert active.first_block is None


# --- Bidirectional sampling of the base model, against a loop on diffusers' own transformer and solver
FRAMES, STEPS = 2, 25
INPUTS = drawn(1, FRAMES, 16, 4, 6), *drawn(2, 1, 32, 64)  # noise and two prompts


def sampler(num_steps: int = STEPS, **options) -> TextToVideoPipeline:
    return TextToVideoPipeline(golden_model(WanModel), num_steps=num_steps, **options)


def test_the_steps_are_those_of_the_native_solver():
    t = sampler(50).pass_timesteps
    assert t[:6] == [999, 997, 994, 991, 989, 986] and t[-3:] == [337, 249, 140] and len(t) == 50
    assert sampler(50).solver().sigmas[0].item() == pytest.approx(0.99987489, abs=5e-9)
    assert sampler(1, shift=5.0).pass_timesteps == [999]


def test_it_equals_a_loop_on_diffusers_looked_at_or_not():
    """WanPipeline's loop on diffusers' transformer in float32; every forward is announced."""
    pipeline, everything = sampler(), list(range(FRAMES))
    with ATTENTION_WEIGHT_CAPTURE.capture(layers=[0, 4], granularity="frame") as calls:
        latents = pipeline.inference(*INPUTS)
    assert torch.equal(latents, pipeline.inference(*INPUTS))
    theirs, native = diffusers_model(), weight_names.to_diffusers_names(golden_arrays("weights"))
    theirs.load_state_dict({name: value.float() for name, value in native.items()})
    solver = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0)
    solver.set_timesteps(sigmas=np.linspace(0.999, 0, STEPS + 1)[:-1])
    x, texts = INPUTS[0].transpose(1, 2), INPUTS[1:]
    with torch.no_grad():
        for t in solver.timesteps:
            cond, uncond = (theirs(x, t.expand(1), text, return_dict=False)[0] for text in texts)
            x = solver.step(uncond + 6.0 * (cond - uncond), t, x, return_dict=False)[0]
    assert latents.std() > 0.5
    assert (latents.transpose(1, 2) - x).abs().max() < 1e-4
    assert [(c["step"], c["branch"], c["layer"]) for c in calls] == [
        (step, branch, layer) for step in range(STEPS) for branch in ("cond", "uncond") for layer in (0, 4)
    ]
    for call in calls:
        timestep = pipeline.pass_timesteps[call["step"]]
        assert call["block"] == 0 and call["timestep"] == timestep and not call["is_clean_pass"]
        assert call["query_frames"] == call["key_frames"] == everything
        assert call["frame_logits"].shape == call["frame_mass"].shape == (1, 12, FRAMES, FRAMES)
    first = [c["frame_logits"] for c in calls if (c["step"], c["layer"]) == (0, 4)]
    assert not torch.equal(*first)  # the two branches read other texts
    refused = pytest.raises(ValueError, match=r"25 is not in 0\.\.24")
    with refused, ATTENTION_WEIGHT_CAPTURE.capture(steps=[STEPS]):
        pipeline.inference(*INPUTS)
