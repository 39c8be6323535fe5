"""Causal Forcing against its own inference: the minute-long sampler, and framewise videos from a picture."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import GOLDEN, golden_model
from helpers.longlive2 import read_arrays

from wan.noise import TensorNoise
from wan.pipeline import CausalInferencePipeline, RolloutInputs, frames_of
from wan.wings.rolling_forcing import RollingForcingPipeline

ATOL = 2e-5
close = partial(torch.testing.assert_close, rtol=0, atol=ATOL)
STEPS = [1000, 750, 500, 250]
FRAMEWISE = {  # steps, steps of the first block that is denoised
    "i2v_4step": (STEPS, None),
    "i2v_2step": ([1000, 500], STEPS),
    "i2v_1step": ([1000], STEPS),
    "i2v_4step_batch": (STEPS, None),
    "i2v_2step_longer": ([1000, 500], STEPS),
}


def run_of(case: str) -> dict[str, torch.Tensor]:
    return {name: x.float() for name, x in read_arrays(GOLDEN / f"causal_forcing/{case}.npz").items()}


MINUTES = dict.fromkeys(("long12", "long15_batch", "long21", "long33"), STEPS)
MINUTES["long18_5step"] = [1000, 800, 600, 400, 200]  # of Rolling Forcing, and of Wave Forcing's reference


@pytest.mark.parametrize("case", MINUTES)
def test_minutes_by_a_rolling_window(case):
    run = run_of(case)
    pipeline = RollingForcingPipeline(golden_model(), denoising_step_list=MINUTES[case])
    latents = pipeline.inference(run["noise"], prompt_embeds=run["prompt_embeds"], renoise=run["renoise"])[1]
    close(latents, run["latents"])


@pytest.mark.parametrize("case", FRAMEWISE)
def test_a_picture_begins_a_framewise_video(case):
    run, (steps, first_steps) = run_of(case), FRAMEWISE[case]
    pipeline = CausalInferencePipeline(
        golden_model(), num_frame_per_block=1, denoising_step_list=steps, first_block_steps=first_steps
    )
    latents = pipeline.inference(
        run["noise"][:, 1:],
        prompt_embeds=run["prompt_embeds"],
        renoise=run["renoise"][:, :, 1:],
        initial_latent=run["noise"][:, :1],
    )[1]
    close(latents, run["latents"])


def test_an_interrupted_rollout_keeps_the_steps_of_its_first_block():
    """Frames that an earlier call finished are no beginning: the block behind them takes later steps."""
    run, (steps, first_steps) = run_of("i2v_2step"), FRAMEWISE["i2v_2step"]
    pipeline = CausalInferencePipeline(
        golden_model(), num_frame_per_block=1, denoising_step_list=steps, first_block_steps=first_steps
    )
    noise = TensorNoise(run["noise"], run["renoise"])
    inputs = RolloutInputs(noise, run["prompt_embeds"])
    whole = torch.cat([x0 for _, x0 in pipeline.blocks(inputs)], 1)
    rest = replace(inputs, num_given=2, num_frames=3, given=frames_of(whole), resumes=True)
    assert torch.equal(torch.cat([x0 for _, x0 in pipeline.blocks(rest)], 1), whole)
