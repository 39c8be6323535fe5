"""Noise that is drawn block by block is that of one drawing; released noise is the public scripts'."""

import numpy as np
import pytest
import torch
from helpers.rollouts import TINY, drawn, tiny_pipeline
from hypothesis import given, settings
from hypothesis import strategies as st

from wan.blocks import block_ranges
from wan.config import CARDS, RunConfig
from wan.errors import ConfigError
from wan.noise import CardGenerator, TensorNoise, released_noise
from wan.pipeline import RolloutInputs, frames_of
from wan.wings.rolling_forcing import RollingForcingPipeline
from wan.wings.seeded_noise import SeededNoise

SHAPE, FRAMES, STEPS = (16, 2, 10), 9, 4
EMBEDS = drawn(1, 4, TINY["text_dim"])


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
        # Advancing may take several turns
        patch.setattr("wan.wings.seeded_noise.SKIPPED_AT_ONCE", skipped_at_once)
        drawn = SeededNoise([7, 8], FRAMES, SHAPE, STEPS, start=start)
        for step, first, count in asked:
            stop = min(first + count, FRAMES)
            frames = range(start + first, start + stop)
            found = drawn.fresh(step - 1, frames) if step else drawn.first(frames)
            assert torch.equal(found, torch.stack([noise[step, first:stop] for noise in expected]))


def test_what_is_not_drawn_is_refused_before_the_first_forward():
    with pytest.raises(ConfigError, match="15 values is not drawn by itself"):
        SeededNoise([0], FRAMES, (1, 3, 5), STEPS)
    for frames in (range(2, 5), range(11, 13)):
        with pytest.raises(ConfigError, match=rf"is not that of frames {frames[0]}\.\.{frames[-1]}; draw"):
            SeededNoise([3], FRAMES, SHAPE, STEPS, start=3).first(frames)
    pipeline = tiny_pipeline()
    for run in (pipeline, RollingForcingPipeline(pipeline.model, denoising_step_list=[1000, 500])):
        for noise in (SeededNoise([5], FRAMES, SHAPE, STEPS), TensorNoise(torch.zeros(1, 9, *SHAPE))):
            forwards = run.blocks(RolloutInputs(noise, EMBEDS, num_frames=12, on_pass=pytest.fail))
            with pytest.raises(ConfigError, match=r"noise of frames 0\.\.8 is not that of frames 0\.\.11"):
                next(forwards)


def test_a_rollout_of_blocks_is_inference_and_goes_on_behind_given_frames():
    pipeline, seeded, noise = tiny_pipeline(), SeededNoise([5], FRAMES, SHAPE, STEPS), at_once(5)
    whole = pipeline.inference(noise[None, 0], prompt_embeds=EMBEDS, renoise=noise[1:, None])[1]
    parts = list(pipeline.blocks(RolloutInputs(seeded, EMBEDS)))
    assert [frames for frames, _ in parts] == [range(3), range(3, 6), range(6, 9)]
    assert torch.equal(torch.cat([x0 for _, x0 in parts], 1), whole)
    short = torch.cat([x0 for _, x0 in pipeline.blocks(RolloutInputs(seeded, EMBEDS, num_frames=6))], 1)
    assert torch.equal(short, whole[:, :6])
    behind = RolloutInputs(seeded, EMBEDS, num_frames=3, num_given=6, given=frames_of(whole))
    again = pipeline.blocks(behind)
    assert torch.equal(torch.cat([x0 for _, x0 in again], 1), whole)


def test_blocks_takes_the_fields_of_rollout_inputs_as_arguments():
    """As in version 2."""
    pipeline, noise = tiny_pipeline(), SeededNoise([5], FRAMES, SHAPE, STEPS)
    inputs = RolloutInputs(noise, EMBEDS, num_frames=6)
    by_name = list(pipeline.blocks(noise, EMBEDS, num_frames=6))
    for (frames, x0), (expected_frames, expected) in zip(by_name, pipeline.blocks(inputs), strict=True):
        assert frames == expected_frames and torch.equal(x0, expected)
    with pytest.raises(TypeError, match="num_frame"):
        pipeline.blocks(noise, EMBEDS, num_frame=6)


def public_draws(config: RunConfig, device: str) -> list[torch.Tensor]:
    """The calls of inference.py and of its pipeline's loop, in their order."""
    torch.manual_seed(config.seed)
    sampled_noise = torch.randn([1, config.num_frames, 16, 4, 6], device=device, dtype=torch.bfloat16)
    found = [sampled_noise]
    if config.sampler == "blocks":
        for block, size in enumerate(config.block_sizes):
            x0 = torch.zeros(1, size, 16, 4, 6, device=device, dtype=torch.bfloat16)
            steps = (not block and config.first_block_steps) or config.denoising_step_list
            found += [torch.randn_like(x0.flatten(0, 1)) for _ in steps[:-1]]
        return found
    blocks, steps = len(config.block_sizes), len(config.denoising_step_list)  # Rolling Forcing
    for window in range(blocks + steps - 1):
        first, last = max(0, window - steps + 1), min(blocks - 1, window)
        x0 = torch.zeros(1, 3 * (last - first + 1), 16, 4, 6, device=device, dtype=torch.bfloat16)
        for block in range(first, last + 1):
            if window - block < steps - 1:
                drawn = torch.randn_like(x0.flatten(0, 1))
                found.append(drawn[3 * (block - first) : 3 * (block - first + 1)])
    return found


@pytest.mark.parametrize("device", ["cpu", *["cuda"] * torch.cuda.is_available()])
@pytest.mark.parametrize("settings", [
    {"num_frames": 9},  # Self-Forcing, Causal Forcing, Reward Forcing, LongLive, MemFlow, Krea, CausVid
    {"num_frames": 7, "independent_first_frame": True},
    {"num_frames": 4, "num_frame_per_block": 1, "denoising_step_list": [1000, 500],
     "first_block_steps": [1000, 750, 500, 250]},  # Causal Forcing++
    {"num_frames": 12, "sampler": "rolling_forcing", "denoising_step_list": [1000, 600, 200],
     "local_attn_size": 15, "sink_size": 3},
])  # fmt: skip
def test_released_noise_has_the_bits_of_the_public_calls_in_their_order(settings, device):
    config = RunConfig(height=4, width=6, seed=42, noise="released", **settings)
    noise, renoise = released_noise(config, 16, torch.device(device))
    first, *between = public_draws(config, device)
    assert torch.equal(noise, first) and noise.dtype == torch.bfloat16
    blocks = block_ranges(config.block_sizes)
    if config.sampler == "blocks":
        order = [(b, step) for b in range(len(blocks)) for step in range(len(config.passes_of_block(b)) - 2)]
    else:
        order = [(b, newest - b) for newest in range(6) for b in range(4) if 0 <= newest - b < 2]
    ours = [renoise[step, 0, blocks[b].start : blocks[b].stop] for b, step in order]
    assert len(ours) == len(between)
    assert all(torch.equal(one, other) for one, other in zip(ours, between, strict=True))


def test_a_cards_noise_is_philox_by_the_cards_threads():
    """The generator against Random123's published answers, and the places by a small card's threads."""
    from wan import noise as module

    words = module._philox([np.array([v], np.uint64) for v in (0, 0, 0, 0)], 0)
    assert [int(w[0]) for w in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    pi = [np.array([v], np.uint64) for v in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    words = module._philox(pi, 0xA4093822 | 0x299F31D0 << 32)
    assert [int(w[0]) for w in words] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    L40, A100 = (CardGenerator(42, card).randn(3, 16, 60, 104).flatten().float() for card in ("L40", "A100"))
    threads = 142 * (1536 // 256) * 256
    assert torch.equal(L40[:threads], A100[:threads]) and not torch.equal(L40, A100)
    assert abs(L40.mean()) < 0.01 and abs(L40.std() - 1) < 0.01
    small = CardGenerator(42, "L40")
    small.randn(1000)
    assert not torch.equal(small.randn(1000), CardGenerator(42, "L40").randn(1000))  # it goes on


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_this_cards_noise_is_computed():
    name = torch.cuda.get_device_name().replace("H200", "H100")
    if not (card := next((card for card in CARDS if card in name), None)):
        pytest.skip(f"{name} is none of CARDS")
    torch.manual_seed(7)
    ours = CardGenerator(7, card)
    for frames in (21, 3, 3):
        drawn = torch.randn(frames, 16, 60, 104, device="cuda", dtype=torch.bfloat16).cpu()
        found = ours.randn(frames, 16, 60, 104)
        assert (drawn == found).float().mean() > 0.99
        assert (drawn.float() - found.float()).abs().max() <= 2**-6
