"""Capture in diffusers' WanPipeline: no bit changes, every call says who it is, nothing stays behind."""

import pytest
import torch
from helpers.checkpoints import sample, small_wan_pipeline

from wan.capture import ATTENTION_WEIGHT_CAPTURE, Site
from wan.diffusers_capture import capture_diffusers
from wan.errors import ConfigError

pipeline = pytest.fixture(scope="module")(small_wan_pipeline)


def test_the_latents_are_those_of_diffusers_own_processors_and_calls_name_where_they_are(pipeline):
    processors = [block.attn1.processor for block in pipeline.transformer.blocks]
    plain = sample(pipeline)
    with capture_diffusers(pipeline.transformer, granularity="frame") as calls:
        captured = sample(pipeline)
        sample(pipeline, guidance_scale=1.0)  # another video, without the second branch
    assert torch.equal(plain, captured) and torch.equal(plain, sample(pipeline))
    assert [block.attn1.processor for block in pipeline.transformer.blocks] == processors
    assert ATTENTION_WEIGHT_CAPTURE.now is None and not ATTENTION_WEIGHT_CAPTURE.active
    sites = [Site(0, "self"), Site(1, "self")]
    guided = [(site, step, branch) for step in range(3) for branch in ("cond", "uncond") for site in sites]
    told = [(call.site, call.at.step, call.at.branch) for call in calls]
    assert told == guided + [(site, step, "cond") for step in range(3) for site in sites]
    assert calls[0].at.timestep > calls[4].at.timestep > calls[8].at.timestep
    for call in calls:
        assert call["query_frames"] == call["key_frames"] == [0, 1, 2]
        assert call.values["frame_mass"].shape == (1, 3, 3, 3)
        torch.testing.assert_close(call.values["frame_mass"].sum(-1), torch.ones(1, 3, 3))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_video_after_another_begins_with_its_own_first_call(pipeline, steps):
    def fail(*_):
        raise RuntimeError("stopped in its first step")

    with capture_diffusers(pipeline.transformer, layers=[0], granularity="frame") as calls:
        sample(pipeline, num_inference_steps=steps)
        hook = pipeline.transformer.blocks[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="stopped"):
            sample(pipeline, num_inference_steps=steps)
        hook.remove()
        sample(pipeline, num_inference_steps=steps)
    guided = [(step, branch) for step in range(steps) for branch in ("cond", "uncond")]
    assert [(call.at.step, call.at.branch) for call in calls] == [*guided, (0, "cond"), *guided]


def test_what_cannot_be_captured_is_refused(pipeline, monkeypatch):
    refused = pytest.raises(ValueError, match=r"layer 2 is not in 0..1")
    with refused, capture_diffusers(pipeline.transformer, layers=[2], granularity="frame"):
        pass
    monkeypatch.setattr(pipeline.transformer.blocks[1].attn2, "add_k_proj", torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="image-to-video"), capture_diffusers(pipeline.transformer):
        pass
