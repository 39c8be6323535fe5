"""What a plan says of each block, before the rollout, against the layouts that the rollout then has."""

import pytest
import torch
from helpers.rollouts import TINY, TWO_STEPS, rollout, tiny_pipeline

from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.interventions import InterventionError, Jitter, Knockout, intervene
from wan.pipeline import CausalInferencePipeline
from wan.policies import PromptSwitch, make_policy

FRAMES = 18
TEXT = torch.zeros(1, 4, TINY["text_dim"])
POLICIES = {
    "full": {},
    "window": {"window": 9, "sink": 1},
    "strided": {"name": "window", "window": 7, "sink": 1, "stride": 2},
    "lasting": {"name": "window", "window": 9, "sink": 2, "global_sink": True},
    "relative": {"window": 9, "sink": 1},
    "deep_sink": {"window": 7, "sink": 2},
    "longlive": {"name": "window", "window": 9, "sink": 4, "released": "longlive"},
}


def pipeline_of(policy: str, context: int = 0, **fields) -> CausalInferencePipeline:
    policy = make_policy(**{"name": policy} | POLICIES[policy] | fields)
    model = tiny_pipeline().model
    return CausalInferencePipeline(model, cache_policy=policy, recompute_context=context, **TWO_STEPS)


def switches(*hows: str) -> list[PromptSwitch]:
    """The same prompt again from frames 9 and 12 on."""
    return [PromptSwitch(9 + 3 * n, prompt_embeds=TEXT, how=how) for n, how in enumerate(hows)]


@pytest.mark.parametrize("context", [0, 4])
@pytest.mark.parametrize("hows", [(), ("flush",), ("recache",), ("flush", "recache")], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_has_the_frames_that_each_block_then_sees(policy, hows, context):
    pipeline, schedule = pipeline_of(policy, context), switches(*hows)
    with ATTENTION_WEIGHT_CAPTURE.capture(layers=[0], steps=[0], granularity="frame") as calls:
        rollout(pipeline, FRAMES, prompt_schedule=schedule)
    for planned, call in zip(pipeline.plan(FRAMES, 0, schedule).blocks, calls, strict=True):
        past = [slot.frame for slot in call.layout.slots if slot.frame not in planned.own]
        assert sorted(planned.past) == sorted(frame for frame in past if frame >= 0)
        assert list(planned.sink) == [call.layout.slots[index].frame for index in call.layout.sink]


def test_per_head_sees_what_its_classes_see(tmp_path):
    file = tmp_path / "labels.csv"
    file.write_text("a,b,b\n" * TINY["num_layers"])
    policies = {"a": {"name": "window", "window": 6}, "b": {"name": "window", "window": 6, "stride": 4}}
    policy = make_policy("per_head", file=str(file), policies=policies)
    pipeline = CausalInferencePipeline(tiny_pipeline().model, cache_policy=policy)
    assert pipeline.plan(FRAMES).blocks[4].past == (0, 4, 8, 9, 10, 11)


REFUSED = {
    "earlier blocks hold frames 9..11; own keys": (
        {"policy": "full", "context": 3},
        Knockout(frames="first", blocks=[4], passes="all"),
    ),
    "earlier blocks hold frames 0, 6, 8, 10; own": (
        {"policy": "strided"},
        Knockout(frames=9, blocks=[4], passes="all"),
    ),
    "no call can be edited: Knockout": (
        {"policy": "window", "context": 6},
        Knockout(frames="sink", passes="all"),
    ),
    "earlier blocks hold frames 7..8; own keys": (
        {"policy": "window", "sink": 0},
        Knockout(frames=6, blocks=[3], passes="all"),
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_edit_of_keys_that_left_is_refused_before_the_rollout(message, monkeypatch):
    fields, edit = REFUSED[message]
    pipeline = pipeline_of(**fields)
    monkeypatch.setattr(pipeline.model, "flow", None)  # nothing may run
    schedule = switches("flush") if fields.get("sink") == 0 else []
    with pytest.raises(InterventionError, match=message), intervene(edit):
        rollout(pipeline, FRAMES, prompt_schedule=schedule)


@pytest.mark.parametrize("context, hows", [(4, ()), (0, ("keep", "recache"))], ids=str)
def test_a_jitter_is_counted_in_every_forward(context, hows):
    pipeline, schedule = pipeline_of("window", context), switches(*hows)
    with intervene(Jitter()) as session:
        rollout(pipeline, FRAMES, prompt_schedule=schedule)
    assert session.changed == [pipeline.plan(FRAMES, 0, schedule).count(Jitter())]
