"""Bidirectional sampling of the base model, against a loop on diffusers' own transformer and solver."""

import numpy as np
import pytest
import torch
from conftest import golden_arrays, golden_model
from diffusers import UniPCMultistepScheduler
from helpers.checkpoints import diffusers_model
from helpers.rollouts import drawn

from wan import checkpoint as weight_names
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.model import WanModel
from wan.text2video import TextToVideoPipeline

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
