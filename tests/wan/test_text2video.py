"""Bidirectional sampling of the base model, against a loop on diffusers' own transformer and solver."""

import numpy as np
import pytest
import torch
from conftest import golden_arrays, golden_model
from diffusers import UniPCMultistepScheduler
from helpers.checkpoints import diffusers_model

from wan import checkpoint as weight_names
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.model import WanModel
from wan.text2video import TextToVideoPipeline

FRAMES, STEPS = 4, 25


def inputs(frames=FRAMES):
    """Noise [1, F, 16, 4, 6] and two prompt embeddings [1, 32, 64]."""
    generator = torch.Generator().manual_seed(3)
    texts = torch.randn(2, 1, 32, 64, generator=generator)
    return torch.randn(1, frames, 16, 4, 6, generator=generator), *texts


@pytest.fixture(scope="module")
def sampled() -> tuple[torch.Tensor, list[dict]]:
    """25 steps of the golden model, and the attention of two layers on the way."""
    pipeline = TextToVideoPipeline(golden_model(WanModel), num_steps=STEPS)
    with ATTENTION_WEIGHT_CAPTURE.capture(layers=[0, 4], granularity="frame") as calls:
        latents = pipeline.inference(*inputs())
    return latents, calls


def test_the_steps_are_those_of_the_native_solver():
    pipeline = TextToVideoPipeline(golden_model(WanModel))
    t = pipeline.pass_timesteps
    assert t[:6] == [999, 997, 994, 991, 989, 986] and t[-3:] == [337, 249, 140] and len(t) == 50
    assert pipeline.solver().sigmas[0].item() == pytest.approx(0.99987489, abs=5e-9)
    assert TextToVideoPipeline(golden_model(WanModel), shift=5.0, num_steps=1).pass_timesteps == [999]


def test_it_equals_a_loop_on_diffusers(sampled):
    """WanPipeline's loop on diffusers' transformer in float32."""
    theirs, native = diffusers_model(), weight_names.to_diffusers_names(golden_arrays("weights"))
    theirs.load_state_dict({name: value.float() for name, value in native.items()})
    solver = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0)
    solver.set_timesteps(sigmas=np.linspace(0.999, 0, STEPS + 1)[:-1])
    noise, prompt, negative = inputs()
    x = noise.transpose(1, 2)
    with torch.no_grad():
        for t in solver.timesteps:
            cond, uncond = (theirs(x, t.expand(1), text, return_dict=False)[0] for text in (prompt, negative))
            x = solver.step(uncond + 6.0 * (cond - uncond), t, x, return_dict=False)[0]
    latents, _ = sampled
    assert latents.std() > 0.5
    assert (latents.transpose(1, 2) - x).abs().max() < 1e-4


def test_every_forward_is_announced(sampled):
    _, calls = sampled
    steps = TextToVideoPipeline(golden_model(WanModel), num_steps=STEPS).pass_timesteps
    assert [(c["step"], c["branch"], c["layer"]) for c in calls] == [
        (step, branch, layer) for step in range(STEPS) for branch in ("cond", "uncond") for layer in (0, 4)
    ]
    everything = list(range(FRAMES))
    for call in calls:
        assert call["block"] == 0 and call["timestep"] == steps[call["step"]] and not call["is_clean_pass"]
        assert call["query_frames"] == call["key_frames"] == everything
        assert call["frame_logits"].shape == call["frame_mass"].shape == (1, 12, FRAMES, FRAMES)
    first = [c["frame_logits"] for c in calls if (c["step"], c["layer"]) == (0, 4)]
    assert not torch.equal(*first)  # the two branches read other texts


def test_capture_changes_no_bit_and_a_pipeline_runs_twice():
    pipeline = TextToVideoPipeline(golden_model(WanModel), num_steps=3)
    plain = pipeline.inference(*inputs(2))
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="token"):
        assert torch.equal(pipeline.inference(*inputs(2)), plain)
    refused = pytest.raises(ValueError, match=r"3 is not in 0\.\.2")
    with refused, ATTENTION_WEIGHT_CAPTURE.capture(steps=[3]):
        pipeline.inference(*inputs(2))
