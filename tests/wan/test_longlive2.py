"""LongLive 2.0 against its own inference, and against a naive second way where shots and images meet."""

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from conftest import GOLDEN
from helpers.longlive2 import read_run, replay, replay_with_cache
from helpers.longlive2_oracle import MARK, attended_blocks, naive_latents, random_run
from helpers.rollouts import TINY, drawn, tiny_pipeline

from wan.cache import PromptSwitch
from wan.config import ModelConfig, RunConfig
from wan.errors import ConfigError
from wan.gradients import Gradients
from wan.interventions import at, intervene
from wan.noise import draw_noise
from wan.pipeline import CausalInferencePipeline, UniPC
from wan.policies import make_policy, policy_of
from wan.sites import watched

ATOL = 2e-5  # the smallest mistake of those in the recorded runs moves latents by 0.11
close = partial(torch.testing.assert_close, rtol=0)
RUNS = GOLDEN / "longlive2"


@pytest.mark.parametrize("case", ["a", "c", "e"])
def test_recorded_runs(case):
    """One shot within the window, two shots beyond it, a first image: latents and cached keys."""
    config, arrays = read_run(RUNS / case)
    latents, cache = replay_with_cache(config, arrays)
    close(latents, arrays["latents"], atol=ATOL)
    tokens = len(cache.slots) * cache.tokens_per_frame
    for name, ours in (("cache_k", cache.keys), ("cache_v", cache.values)):
        close(torch.stack(ours)[:, :, :tokens], arrays[name][:, :, :tokens], atol=ATOL)
        assert not arrays[name][:, :, tokens:].any()


def shots(*lengths: int, other_prompts: bool = False) -> list[str]:
    """Return the prompts of shots of so many blocks."""
    prompts = []
    for shot, length in enumerate(lengths):
        for block in range(length):
            text = f"shot {shot}"
            if other_prompts:
                text += f", block {block}"
            if shot and block == 0:
                text = MARK + text
            prompts.append(text)
    return prompts


CASES = {
    "window": {"prompts": [shots(7)], "frames": 8},
    "three shots, another prompt in every block": {"prompts": [shots(2, 3, 5, other_prompts=True)]},
    "shots of the first video": {"prompts": [shots(2, 4), ["a", MARK + "b", "c", "d", "d", "d"]]},
    "image, a pin behind block 0, one that moves": {"prompts": [shots(1, 3, 1, 4)], "image": True},
    "image in a batch": {"prompts": [shots(3, 3), shots(6)], "image": True},
    "two cuts with one prompt": {"prompts": [["a", "a", MARK + "b", MARK + "b", "b", "b", "b"]]},
    "a cut in every block": {"prompts": [["a", *[MARK + "b"] * 6]], "offset": 3},
    "a wider window": {"prompts": [shots(3, 1, 5)], "blocks_in_window": 5},
    "the narrowest window": {"prompts": [shots(3, 4)], "blocks_in_window": 3},
}


@pytest.mark.parametrize("case", CASES)
def test_runs_of_a_naive_second_way(case):
    config, arrays = random_run(**CASES[case])
    latents, _ = replay_with_cache(config, arrays)
    close(latents.double(), naive_latents(config, arrays), atol=ATOL)


@pytest.mark.parametrize("case", ["a", "c", "e"])
def test_the_naive_way_repeats_recorded_runs(case):
    config, arrays = read_run(RUNS / case)
    close(naive_latents(config, arrays), arrays["latents"].double(), atol=ATOL)


def test_blocks_that_are_attended():
    seen = attended_blocks(9, 4, [2, 5])
    assert seen[4:] == [[0, 2, 3, 4], [0, 2, 4, 5], [0, 4, 5, 6], [0, 5, 6, 7], [0, 5, 7, 8]]


def test_a_run_is_replayed_from_a_file(tmp_path):
    arrays = {}
    for part in sorted((RUNS / "a").glob("*.npz")):
        arrays |= dict(np.load(part))
    np.savez(tmp_path / "run.npz", **arrays)
    assert torch.equal(replay(tmp_path / "run.npz"), replay(RUNS / "a"))


def test_levels_of_the_schedule():
    timesteps, sigmas = UniPC.levels([1000, 750, 500, 250], shift=5.0, warp=True)
    assert timesteps == [999, 937, 833, 624]
    config, _ = read_run(RUNS / "a")
    close(torch.tensor(sigmas), torch.tensor(config["sigmas"][:-1]), atol=1e-7)
    assert UniPC.levels([1000, 500], shift=5.0, warp=True)[0] == [999, 833]


def test_no_noise_is_drawn_between_steps():
    """Of the released noise only the first draw is made, in any sampler the same."""
    config = RunConfig(num_frames=6, height=2, width=4, noise="H100")
    sizes = ModelConfig(dim=32, ffn_dim=64, num_heads=2, num_layers=1, in_dim=48, out_dim=48)
    draw = partial(draw_noise, model_config=sizes, dtype=torch.float32, device=torch.device("cpu"))
    for noise in ("H100", "seeded"):
        config = replace(config, noise=noise)
        first, between = draw(config)
        only, none = draw(replace(config, solver="unipc"))
        assert torch.equal(only, first) and len(between) == 3 and len(none) == 0


# --- What is refused, in one line
TWO_SHOTS = {"prompt_schedule": [{"frame": 16, "prompt": MARK + "a dog"}]}
POLICY = {"name": "multi_shot", "window": 32, "sink": 8}
IN_EIGHTS = {"num_frames": 32, "num_frame_per_block": 8, "cache_policy": POLICY}
REFUSED = {
    "frame 12 does not begin a later block": {
        "prompt_schedule": [{"frame": 12, "prompt": MARK + "a dog"}],
    },
    r"shots take equal blocks, sink 6 and window 32 of whole blocks \(8 frames\)": {
        "cache_policy": POLICY | {"sink": 6},
    },
    "a window of at least 24": {"cache_policy": POLICY | {"window": 16}},
    "cannot recache under cache_policy multi_shot; it can keep": {
        "prompt_schedule": [{"frame": 16, "prompt": "a dog", "how": "recache"}],
    },
    "solver unipc ends at 0 by itself": {"solver": "unipc", "denoising_step_list": [1000, 500, 0]},
    "rolling_forcing knows no solver unipc": {
        "solver": "unipc",
        "sampler": "rolling_forcing",
        "cache_policy": None,
        "prompt_schedule": None,
        "local_attn_size": 48,
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(message):
    with pytest.raises(ConfigError, match=message):
        policy_of(RunConfig(**IN_EIGHTS | TWO_SHOTS | REFUSED[message]))


def test_a_window_of_any_size_holds_a_video_of_one_shot():
    """Shots alone need whole blocks: without a cut the policy is a window."""
    changed = {"cache_policy": POLICY | {"sink": 6}, "prompt_schedule": [{"frame": 16, "prompt": "a dog"}]}
    assert policy_of(RunConfig(**IN_EIGHTS | changed)).sink == 6


# --- Gradients, through the solver and through keys of several shots
@cache
def wide_pipeline() -> CausalInferencePipeline:
    policy = make_policy("multi_shot", window=6, sink=2, rope_offset=3)
    model = tiny_pipeline(torch.float64).model
    torch.nn.init.normal_(model.head.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    how = {"denoising_step_list": [1000, 750, 500], "solver": "unipc"}
    return CausalInferencePipeline(model, num_frame_per_block=2, cache_policy=policy, **how)


def roll_out_shots() -> torch.Tensor:
    pipeline = wide_pipeline()
    embeds = drawn(1, 4, TINY["text_dim"]).double()
    cut = [PromptSwitch(4, MARK + "a dog", prompt_embeds=embeds + 1)]
    noise = drawn(1, 10, 16, 2, 10).double()
    return pipeline.inference(noise, prompt_embeds=embeds, prompt_schedule=cut)[1]


@pytest.mark.parametrize(("through", "steps"), [("pass", [2]), ("block", [0]), ("rollout", [0])])
def test_gradients_are_those_of_central_differences(through, steps):
    """z of block 2, which begins a shot, is shifted; later blocks and steps follow by way of the solver."""
    place = {"layers": [1], "blocks": [2], "steps": steps}
    recorder = Gradients(("z",), through=through, **place)
    with watched(recorder):
        latents = roll_out_shots()
    recorder.backward(lambda x0: (x0**3).mean())
    assert torch.equal(latents, roll_out_shots())
    [found] = recorder.found
    direction, values = drawn(*found.value.shape).double(), []
    for sign in (1, -1):
        with intervene(
            at("z", passes="denoise", **place), lambda x, where, sign=sign: x + sign * 1e-4 * direction
        ):
            seen = roll_out_shots()
        if through != "rollout":
            seen = seen[:, 4:6]
        values.append((seen**3).mean().item())
    predicted = 2e-4 * (found.value * direction).sum().item()
    assert predicted == pytest.approx(values[0] - values[1], rel=1e-4) and predicted != 0
