"""Whole rollouts of a small model under every cache policy: again, in batches, with switches of prompts."""

from functools import cache

import pytest
import torch
from conftest import golden_model
from helpers.policy_inputs import policy_inputs
from helpers.rollouts import TWO_STEPS

from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.errors import ConfigError
from wan.pipeline import CausalInferencePipeline
from wan.policies import PromptSwitch, make_policy

ANY = [
    {"name": "full"},
    {"name": "window", "window": 7, "sink": 2},
    {"name": "relative", "window": 7, "sink": 1},
    {"name": "deep_sink", "window": 8, "sink": 3},
    {"name": "participative", "window": 9, "sink": 2, "budget": 7, "recent": 4},
    {"name": "ema_sink", "window": 7, "sink": 2, "alpha": 0.5},
    {"name": "two_memories", "window": 8, "sink": 1},
    {"name": "rolling_sink", "window": 9},
    {"name": "memory_bank", "window": 7, "sink": 2, "bank": 2, "interval": 1},
]


@cache
def model():
    """It keeps nothing of a rollout."""
    return golden_model()


def roll_out(policy, pipeline=None, num_frames=15, given=0, batch=1, schedule=(), item=None, **options):
    inputs = policy_inputs(2, 2, num_frames, batch, given, item)
    pipeline = pipeline or pipeline_of(policy, **options)
    return pipeline.inference(**inputs, prompt_schedule=schedule)[1]


def pipeline_of(policy, **options):
    return CausalInferencePipeline(model(), cache_policy=policy, **TWO_STEPS, **options)


@cache
def plain(name: str, num_frames: int = 15) -> torch.Tensor:
    """The latents of a policy without batches and switches, from a pipeline that made nothing before."""
    (settings,) = [settings for settings in ANY if settings["name"] == name]
    return roll_out(make_policy(**settings), num_frames=num_frames)


@pytest.mark.parametrize("settings", ANY, ids=lambda settings: settings["name"])
def test_a_second_video_equals_the_first_and_short_ones_need_no_policy(settings):
    policy = make_policy(**settings)
    pipeline = pipeline_of(policy)
    short = roll_out(policy, pipeline, num_frames=6)
    if settings["name"] != "memory_bank":  # whose bank repeats frames from the second block on
        assert torch.equal(short, plain("full", num_frames=6))
    assert torch.equal(roll_out(policy, pipeline), plain(settings["name"]))


@pytest.mark.parametrize("settings", ANY, ids=lambda settings: settings["name"])
def test_a_batch_is_its_items(settings):
    policy = make_policy(**settings)
    for options in (
        {"num_frame_per_block": 1, "num_frames": 12},
        {"given": 6},
        {"independent_first_frame": True, "num_frames": 16},
    ):
        both = roll_out(policy, batch=2, **options)
        alone = roll_out(policy, batch=2, item=1, **options)
        torch.testing.assert_close(both[1:], alone, atol=1e-5, rtol=0)


CANNOT = {
    "recache": [settings for settings in ANY if not make_policy(**settings).can_recache],
    "cut": [settings for settings in ANY if not make_policy(**settings).positions_follow_slots],
}


@pytest.mark.parametrize("how", CANNOT)
def test_a_switch_that_a_policy_cannot_make_is_refused(how):
    """What the others do, test_policy_rules.py compares with an oracle."""
    embeds = torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(9))
    assert 0 < len(CANNOT[how]) < len(ANY)
    for settings in CANNOT[how]:
        with pytest.raises(ConfigError, match="prompt_schedule"):
            roll_out(make_policy(**settings), schedule=[PromptSwitch(9, how=how, prompt_embeds=embeds)])


def test_a_flush_finds_nothing_to_forget_while_the_sink_is_all_there_is():
    """After the first block of three frames, which are the sink, it does what keep does."""
    embeds = torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(9))
    policy = make_policy("window", window=9, sink=3)
    flushed, kept = (
        roll_out(policy, num_frames=6, schedule=[PromptSwitch(3, how=how, prompt_embeds=embeds)])
        for how in ("flush", "keep")
    )
    assert torch.equal(flushed, kept)


def test_the_cache_that_is_computed_again_is_captured_where_it_is_asked_for():
    embeds = torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(9))
    schedule = [PromptSwitch(6, how="recache", prompt_embeds=embeds)]
    for chosen, steps in ({}, {0, 1, 2}), ({"steps": [-1]}, {-1}):
        with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame", layers=[0], **chosen) as calls:
            roll_out(make_policy("window", window=6, sink=1), num_frames=9, schedule=schedule)
        assert {call["step"] for call in calls} == steps


@pytest.mark.parametrize(
    "settings, left_out, message",
    [
        ({"name": "full"}, "renoise", "a probe needs renoise: fresh noise would change"),
        (
            {"name": "window", "window": 9, "sink": 6, "released": "longlive"},
            None,
            "window changes its cache",
        ),
        ({"name": "memory_bank", "window": 6, "sink": 1}, None, "memory_bank changes its cache"),
    ],
    ids=["no renoise", "released", "chooses"],
)
def test_a_probe_that_would_change_the_rollout_is_refused(settings, left_out, message):
    inputs = {name: x for name, x in policy_inputs(2, 2, 9).items() if name != left_out}
    with pytest.raises(ConfigError, match=message):
        pipeline_of(make_policy(**settings)).inference(**inputs, probe=lambda block, denoise: denoise())
