"""Noise that is drawn block by block is the noise that is drawn at once."""

import pytest
import torch
from conftest import golden_arrays, golden_model
from hypothesis import given, settings
from hypothesis import strategies as st

from wan.blocks import block_ranges
from wan.errors import ConfigError
from wan.noise import SeededNoise, TensorNoise
from wan.pipeline import CausalInferencePipeline
from wan.rolling_forcing import RollingForcingPipeline

SHAPE, FRAMES, STEPS = (16, 2, 10), 9, 4


def at_once(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What draw_noise and every earlier version draw."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, FRAMES, *SHAPE, generator=generator)
    return noise, torch.randn(STEPS - 1, 1, FRAMES, *SHAPE, generator=generator)


def test_blocks_have_the_bits_of_one_drawing(monkeypatch):
    monkeypatch.setattr("wan.noise.SKIPPED_AT_ONCE", 1000)  # winding forward takes several turns
    drawn = SeededNoise([7, 8], FRAMES, SHAPE, STEPS)
    for frames in block_ranges([1, 3, 3, 2]):
        now = slice(frames.start, frames.stop)
        for row, seed in enumerate((7, 8)):
            noise, renoise = at_once(seed)
            assert torch.equal(drawn.first(frames)[row], noise[0, now])
            for step in range(STEPS - 1):
                assert torch.equal(drawn.fresh(step, frames)[row], renoise[step, 0, now])


@given(st.lists(st.integers(0, FRAMES - 1), min_size=1, max_size=5))
@settings(max_examples=20, deadline=None)
def test_frames_may_be_asked_for_in_any_order(starts):
    drawn, (_, renoise) = SeededNoise([3], FRAMES, SHAPE, STEPS), at_once(3)
    for start in starts:
        assert torch.equal(drawn.fresh(1, range(start, FRAMES))[0], renoise[1, 0, start:])


def test_frames_that_torch_does_not_draw_by_themselves_are_refused():
    with pytest.raises(ConfigError, match="15 values is not drawn by itself"):
        SeededNoise([0], FRAMES, (1, 3, 5), STEPS)


def test_a_rollout_of_blocks_is_inference_and_may_end_early():
    arrays = golden_arrays("causal")
    embeds, shape = arrays["blocks9/prompt_embeds"], arrays["blocks9/noise"].shape
    pipeline, drawn = CausalInferencePipeline(golden_model()), SeededNoise([5], 9, tuple(shape[2:]), STEPS)
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(shape, generator=generator)
    renoise = torch.randn(STEPS - 1, *shape, generator=generator)
    whole = pipeline.inference(noise, prompt_embeds=embeds, renoise=renoise)[1]
    parts = list(pipeline.blocks(drawn, embeds))
    assert [frames for frames, _ in parts] == block_ranges([3, 3, 3])
    assert torch.equal(torch.cat([latents for _, latents in parts], 1), whole)
    short = torch.cat([latents for _, latents in pipeline.blocks(drawn, embeds, num_frames=6)], 1)
    assert torch.equal(short, whole[:, :6])


def test_finished_blocks_are_given_back_and_the_rollout_goes_on_with_the_same_bits():
    arrays = golden_arrays("causal")
    embeds, shape = arrays["blocks9/prompt_embeds"], arrays["blocks9/noise"].shape
    pipeline, drawn = CausalInferencePipeline(golden_model()), SeededNoise([5], 9, tuple(shape[2:]), STEPS)
    whole = torch.cat([latents for _, latents in pipeline.blocks(drawn, embeds)], 1)
    again = pipeline.blocks(
        drawn, embeds, num_frames=3, num_given=6, given=lambda f: whole[:, f.start : f.stop]
    )
    assert torch.equal(torch.cat([latents for _, latents in again], 1), whole)


def test_noise_begins_where_it_is_said_to_and_has_no_frames_beyond():
    drawn, later = SeededNoise([3], 6, SHAPE, STEPS), SeededNoise([3], 6, SHAPE, STEPS, start=3)
    for step in range(STEPS - 1):
        assert torch.equal(later.fresh(step, range(6, 9)), drawn.fresh(step, range(3, 6)))
    for noise, frames in ((drawn, range(6, 9)), (drawn, range(5, 7)), (later, range(2, 5))):
        for ask in (noise.first, lambda frames, noise=noise: noise.fresh(0, frames)):
            with pytest.raises(ConfigError, match=f"is not that of frames {frames[0]}..{frames[-1]}; draw"):
                ask(frames)


@pytest.mark.parametrize("sampler", [CausalInferencePipeline, RollingForcingPipeline])
def test_a_rollout_beyond_its_noise_is_refused_before_its_first_forward(sampler):
    arrays = golden_arrays("causal")
    embeds, noise = arrays["blocks9/prompt_embeds"], arrays["blocks9/noise"]
    pipeline = sampler(golden_model(), denoising_step_list=[1000, 500])
    options = [{"num_frames": 12}]
    if sampler is CausalInferencePipeline:
        options.append({"num_given": 3, "given": lambda f: noise[:, f.start : f.stop]})
    for drawn in (SeededNoise([5], 9, tuple(noise.shape[2:]), 2), TensorNoise(noise)):
        for more in options:
            forwards = pipeline.blocks(drawn, embeds, **more, on_pass=lambda: pytest.fail("too late"))
            with pytest.raises(ConfigError, match=r"noise of frames 0..8 is not that of frames \d..11"):
                next(forwards)


def test_noise_that_starts_behind_given_frames_is_what_inference_draws():
    arrays = golden_arrays("causal")
    embeds, given = arrays["blocks9/prompt_embeds"], arrays["extend/initial_latent"]
    shape = (1, 6, *given.shape[2:])
    generator = torch.Generator().manual_seed(5)
    noise, renoise = (torch.randn(*first, *shape, generator=generator) for first in ((), (STEPS - 1,)))
    pipeline = CausalInferencePipeline(golden_model())
    whole = pipeline.inference(noise, prompt_embeds=embeds, renoise=renoise, initial_latent=given)[1]
    drawn = SeededNoise([5], 6, tuple(shape[2:]), STEPS, start=3)
    parts = pipeline.blocks(drawn, embeds, num_given=3, given=lambda f: given[:, f.start : f.stop])
    assert torch.equal(torch.cat([latents for _, latents in parts], 1), whole)
