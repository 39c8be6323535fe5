"""Rolling Forcing: against full forwards under a mask, and what captures say of its noise levels."""

import pytest
import torch
from helpers.rollouts import TINY, drawn, tiny_pipeline

from experiments.analysis.panels import describe
from experiments.caches.view import open_profiles
from experiments.extraction import cache_builders
from experiments.session import load
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.config import load_config
from wan.errors import ConfigError
from wan.interventions import Knockout, intervene
from wan.keys import rotate
from wan.pipeline import add_noise, flow_to_x0
from wan.wings.rolling_forcing import CleanFrames, RollingForcingPipeline

STEPS = [1000, 800, 600, 400, 200]


def sampler(steps=STEPS, **kwargs) -> RollingForcingPipeline:
    return RollingForcingPipeline(tiny_pipeline(**kwargs).model, denoising_step_list=steps)


def inputs(frames: int, steps: int = 5):
    noise = drawn(steps, 1, frames, 16, 2, 10)
    return noise[0], noise[1:], drawn(1, 4, TINY["text_dim"])


def by_hand(run, noise, renoise, embeds) -> torch.Tensor:
    """The rollout with no cache: each forward is clean blocks and the window under one mask.

    Holds while the anchor stands at its own frames, which is so for windows that begin before frame 9.
    """
    steps, count = len(run.timesteps), noise.shape[1] // 3
    x, clean = list(noise.split(3, 1)), []
    text = run.model.text_keys_values(embeds)
    for newest in range(count + steps - 1):
        first, shown = len(clean), range(len(clean), min(count, newest + 1))
        past = torch.cat([*clean, *(x[b] for b in shown)], 1)
        levels = [0.0] * 3 * first + [run.timesteps[newest - b] for b in shown for _ in range(3)]
        block = torch.arange(past.shape[1]).repeat_interleave(5) // 3
        room = (21 - 3 - 3 * len(shown)) // 3  # blocks of clean frames that fit beside anchor and window
        mask = block[None, :] <= block[:, None]
        mask[block >= first] = (block < 1) | (block >= first - room)  # a window sees later blocks of itself
        flow = run.model(past, torch.tensor([levels]), text, frames=range(past.shape[1]), mask=mask)
        for block_flow, b in zip(flow[:, 3 * first :].split(3, 1), shown, strict=True):
            step = newest - b
            x0 = flow_to_x0(block_flow, x[b], run.sigmas[step])
            if step + 1 < steps:
                x[b] = add_noise(x0, renoise[step][:, 3 * b : 3 * b + 3], run.sigmas[step + 1])
            else:
                clean.append(x0)
    return torch.cat(clean, 1)


@pytest.mark.parametrize(("frames", "steps"), [(3, 5), (6, 5), (9, 3), (9, 2), (12, 1)])
def test_the_rollout_is_that_of_full_forwards(frames, steps):
    noise, renoise, embeds = inputs(frames, steps)
    run = sampler(STEPS[:steps])
    latents = run.inference(noise, prompt_embeds=embeds, renoise=renoise)[1]
    expected = by_hand(run, noise, renoise, embeds)
    first = min(frames, 9)  # later windows move the anchor
    torch.testing.assert_close(latents[:, :first], expected[:, :first], atol=2e-5, rtol=1e-4)


def test_every_block_is_seen_once_at_every_level():
    """Layer 1 of a rollout of 30 frames."""
    noise, renoise, embeds = inputs(30)
    with ATTENTION_WEIGHT_CAPTURE.capture(layers=[1], granularity="frame") as found:
        latents = sampler().inference(noise, prompt_embeds=embeds, renoise=renoise)[1]
    assert torch.equal(latents, sampler().inference(noise, prompt_embeds=embeds, renoise=renoise)[1])
    calls = {(call["block"], call["step"]): call for call in found}
    assert sorted(calls) == [(block, step) for block in range(10) for step in range(6)]
    for (block, step), call in calls.items():
        assert call["query_frames"] == list(range(3 * block, 3 * block + 3))
        assert call["is_clean_pass"] == (step == 5)
        assert all(call["frame_timesteps"][frame] == call["timestep"] for frame in call["query_frames"])
        assert call["frame_mass"].shape[-2:] == (3, len(call["key_frames"]))
        torch.testing.assert_close(call["frame_mass"].sum(-1), torch.ones(1, 3, 3), atol=1e-5, rtol=0)
    levels = sampler().timesteps  # block 6 at step 2 stands in the window of blocks 4-8, from frame 12 on
    assert calls[6, 2]["frame_timesteps"] == {frame: levels[8 - frame // 3] for frame in range(12, 27)}
    for at, frames, positions in (
        ((0, 0), range(3), range(3)),  # windows that begin with block 0 see themselves
        ((0, 4), range(15), range(15)),
        ((1, 4), range(18), range(18)),  # the anchor stands at its own frames
        ((6, 2), [0, 1, 2, 9, 10, 11, *range(12, 27)], range(6, 27)),  # or right before the clean frames
        ((9, 4), [0, 1, 2, *range(12, 30)], range(9, 30)),  # the last window is one block: more clean frames
        ((9, 0), [0, 1, 2, *range(12, 30)], range(9, 30)),
        ((7, 5), range(3, 24), range(3, 24)),  # a clean pass sees the newest 21
        ((6, 5), range(21), range(21)),
        ((9, 5), range(9, 30), range(9, 30)),
    ):
        assert calls[at]["key_frames"] == list(frames) and calls[at]["slot_position"] == list(positions), at


def test_the_anchor_is_rotated_from_its_own_keys():
    S = 2
    cache = tiny_pipeline().model.new_kv_cache(1, 6, 2, 4, CleanFrames(window=5, sink=1), 1)
    raw, values = drawn(2, 6, 1, S, 3, 16)

    def turned(frame: int, position: int) -> torch.Tensor:
        return rotate(raw[frame], *cache.rope(range(position, position + 1)))

    for frame in range(5):
        cache.begin_clean(range(frame, frame + 1))
        key = turned(frame, frame)
        cache.write(0, key, key, values[frame], raw[frame] if cache.stores_raw else None)
    cache.begin_window(range(5, 6))
    own = turned(5, 5)
    k, v = cache.write(0, own, own, values[5])
    torch.testing.assert_close(k, torch.cat([turned(0, 2), turned(3, 3), turned(4, 4), own], 1))
    assert torch.equal(v, torch.cat([values[0], values[3], values[4], values[5]], 1))


def test_what_it_does_not_know_is_refused():
    noise, _, embeds = inputs(6)
    for steps, sizes, message in (
        ([1000, 500], {"local_attn_size": 6}, "must be at least 9"),
        (STEPS, {"local_attn_size": 15}, "a window of 5 blocks; it must be at least 18"),
    ):
        with pytest.raises(ConfigError, match=message):
            sampler(steps, **sizes)
    with pytest.raises(ConfigError, match="equal blocks and steps"):
        unequal = RollingForcingPipeline(tiny_pipeline().model, first_block_steps=[1000])
        unequal.inference(noise, prompt_embeds=embeds)
    with pytest.raises(ConfigError, match=r"without .*given beginning"):
        sampler().inference(noise, prompt_embeds=embeds, initial_latent=noise)
    knockout = intervene(Knockout(frames="first", passes="denoise"))
    with knockout, pytest.raises(ConfigError, match="interventions"):
        sampler().inference(noise, prompt_embeds=embeds)


# -- in caches and figures -----------------------------------------------------------------------------------

ROLLING = {"sampler": "rolling_forcing", "denoising_step_list": [1000, 600, 200], "num_frames": 15}


def test_an_atlas_holds_what_the_window_saw_and_views_say_which_frames_are_noise_at_which_level():
    config = load_config("configs/wan_mini.yaml", ROLLING)
    requests = cache_builders.atlas_requests(config, mass=True, key_curve=True, cross=True)
    atlas = cache_builders.atlas_cache(load(config).generate(requests=requests))
    assert len(atlas["rolling_timesteps"]) == 3
    seen = ~atlas["frame_logits"][0, :, 0].isnan()  # [P, F, F]
    for step in range(3):
        for block in range(5):
            later = min(5, block + step + 1)  # the window ends so many blocks later
            assert seen[step, 3 * block].nonzero()[-1].item() == 3 * later - 1
    assert not seen[3].triu(3).any()  # clean passes look back alone
    t, view, late = atlas["pass_timesteps"], open_profiles(atlas, 0), open_profiles(atlas, 2)
    assert view.noise_levels == {f: t[4 - f // 3] for f in range(6, 15)}
    assert view.context_frames == tuple(range(6))
    assert describe(view)["Window"] == "frames 6–8 at t = 555.6, 9–11 at t = 882.4, 12–14 at t = 1000"
    assert late.noise_frames == (12, 13, 14)
    assert open_profiles(atlas, 3).noise_levels == {}
