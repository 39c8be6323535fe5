"""Noise that is drawn block by block is the noise that is drawn at once."""

import pytest
import torch
from helpers.rollouts import TINY, tiny_pipeline
from hypothesis import given, settings
from hypothesis import strategies as st

from wan.errors import ConfigError
from wan.noise import SeededNoise, TensorNoise
from wan.rolling_forcing import RollingForcingPipeline

SHAPE, FRAMES, STEPS = (16, 2, 10), 9, 4


def at_once(seed: int) -> torch.Tensor:
    """What draw_noise and every earlier version draw: [steps, F, C, h, w]."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, FRAMES, *SHAPE, generator=generator)
    return torch.cat([noise, torch.randn(STEPS - 1, FRAMES, *SHAPE, generator=generator)])


@given(
    st.lists(st.tuples(st.integers(0, STEPS - 1), st.integers(0, FRAMES - 1), st.integers(1, 3)), max_size=6),
    st.sampled_from([1000, 1 << 20]),
    st.integers(0, 5),
)
@settings(max_examples=25, deadline=None)
def test_blocks_have_the_bits_of_one_drawing_in_any_order(asked, skipped_at_once, start):
    expected = [at_once(seed) for seed in (7, 8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wan.noise.SKIPPED_AT_ONCE", skipped_at_once)  # advancing may take several turns
        drawn = SeededNoise([7, 8], FRAMES, SHAPE, STEPS, start=start)
        for step, first, count in asked:
            stop = min(first + count, FRAMES)
            frames = range(start + first, start + stop)
            found = drawn.fresh(step - 1, frames) if step else drawn.first(frames)
            assert torch.equal(found, torch.stack([noise[step, first:stop] for noise in expected]))


def test_frames_that_torch_does_not_draw_by_themselves_are_refused():
    with pytest.raises(ConfigError, match="15 values is not drawn by itself"):
        SeededNoise([0], FRAMES, (1, 3, 5), STEPS)


@pytest.mark.parametrize("start, frames", [(0, range(6, 10)), (3, range(2, 5)), (3, range(11, 13))])
def test_frames_beyond_the_noise_are_refused(start, frames):
    noise = SeededNoise([3], FRAMES, SHAPE, STEPS, start=start)
    for ask in (noise.first, lambda frames: noise.fresh(0, frames)):
        with pytest.raises(ConfigError, match=rf"is not that of frames {frames[0]}\.\.{frames[-1]}; draw"):
            ask(frames)


def embeds() -> torch.Tensor:
    return torch.randn(1, 4, TINY["text_dim"], generator=torch.Generator().manual_seed(1))


def test_a_rollout_of_blocks_is_inference_and_goes_on_behind_given_frames():
    pipeline, drawn, noise = tiny_pipeline(), SeededNoise([5], FRAMES, SHAPE, STEPS), at_once(5)
    whole = pipeline.inference(noise[None, 0], prompt_embeds=embeds(), renoise=noise[1:, None])[1]
    parts = list(pipeline.blocks(drawn, embeds()))
    assert [frames for frames, _ in parts] == [range(3), range(3, 6), range(6, 9)]
    assert torch.equal(torch.cat([x0 for _, x0 in parts], 1), whole)
    short = torch.cat([x0 for _, x0 in pipeline.blocks(drawn, embeds(), num_frames=6)], 1)
    assert torch.equal(short, whole[:, :6])
    again = pipeline.blocks(
        drawn, embeds(), num_frames=3, num_given=6, given=lambda f: whole[:, f.start : f.stop]
    )
    assert torch.equal(torch.cat([x0 for _, x0 in again], 1), whole)


@pytest.mark.parametrize("rolls", [False, True])
@pytest.mark.parametrize(
    "drawn", [SeededNoise([5], FRAMES, SHAPE, STEPS), TensorNoise(torch.zeros(1, 9, *SHAPE))]
)
def test_a_rollout_beyond_its_noise_is_refused_before_its_first_forward(rolls, drawn):
    pipeline = tiny_pipeline()
    if rolls:
        pipeline = RollingForcingPipeline(pipeline.model, denoising_step_list=[1000, 500])
    forwards = pipeline.blocks(drawn, embeds(), num_frames=12, on_pass=lambda: pytest.fail("too late"))
    with pytest.raises(ConfigError, match=r"noise of frames 0\.\.8 is not that of frames 0\.\.11"):
        next(forwards)
