"""A policy for each class of heads, against a float64 masked softmax over everything."""

import csv
from contextlib import nullcontext

import pytest
import torch
from conftest import golden_model
from helpers.policy_inputs import policy_inputs
from helpers.rollouts import TWO_STEPS

from wan import model as layers
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.capture import CaptureRequest
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.pipeline import CausalInferencePipeline
from wan.policies import PromptSwitch, make_policy

HEADS, LAYERS, S = 12, 5, 6
LABELS = [["far" if (layer + head) % 3 else "near" for head in range(HEADS)] for layer in range(LAYERS)]
LABELS[2] = ["near"] * HEADS  # a class may have no head in a layer


def write_labels(path, labels=LABELS):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(labels)
    return str(path)


def roll_out(policy, *requests, num_frames=15, batch=1, given=0, item=None, **options):
    inputs = policy_inputs(1, 4, num_frames, batch, given, item)
    pipeline = CausalInferencePipeline(golden_model(), cache_policy=policy, **TWO_STEPS, **options)
    with ATTENTION_WEIGHT_CAPTURE.capture(*requests) if requests else nullcontext([]) as calls:
        latents = pipeline.inference(**inputs)[1]
    return latents, calls


def test_heads_see_what_their_class_keeps(tmp_path, monkeypatch):
    """Every call against the softmax over the keys of all frames so far, masked per head, in float64."""
    policies = {"far": {"name": "full"}, "near": {"name": "window", "window": 6, "sink": 1}}
    policy = make_policy("per_head", file=write_labels(tmp_path / "labels.csv"), policies=policies)
    past: dict[int, dict[int, tuple]] = {layer: {} for layer in range(LAYERS)}
    blocks: list[int] = []
    original = layers.SelfAttention.forward

    def forward(self, x, rope, kv_cache=None, mask=None, layout=None):
        out = original(self, x, rope, kv_cache, mask, layout)
        q, k = self.norm_q(self.q(x), rope.queries), self.norm_k(self.k(x), rope.keys)
        v, layer = self.values(x), self.site.layer
        for i, frame in enumerate(kv_cache.newest):
            past[layer][frame] = tuple(y[0, i * S : (i + 1) * S].double() for y in (k, v))
        frames = sorted(past[layer])
        keys, values = (torch.cat([past[layer][f][i] for f in frames]) for i in (0, 1))
        logits = torch.einsum("qhd,khd->hqk", q[0].double(), keys) / 4
        near = torch.tensor([f < 1 or f > frames[-1] - 5 for f in frames]).repeat_interleave(S)
        for head, label in enumerate(LABELS[layer]):
            if label == "near" and len(frames) > 6:
                logits[head, :, ~near] = -torch.inf
        seen = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values).flatten(1)
        torch.testing.assert_close(
            out[0].double(), seen @ self.o.weight.double().T + self.o.bias, atol=1e-5, rtol=0
        )
        blocks.append(kv_cache.newest.start)
        return out

    monkeypatch.setattr(layers.SelfAttention, "forward", forward)
    roll_out(policy)
    assert set(blocks) == {0, 3, 6, 9, 12}


def test_capture_has_every_head_over_its_own_frames(tmp_path):
    policies = {"far": {"name": "full"}, "near": {"name": "window", "window": 6, "sink": 1}}
    policy = make_policy("per_head", file=write_labels(tmp_path / "labels.csv"), policies=policies)
    request = CaptureRequest(granularity="frame", layers=[1, 2], blocks=[4], steps=[0, 2])
    latents, calls = roll_out(policy, request)
    assert torch.equal(latents, roll_out(policy, CaptureRequest(layers=[], granularity="frame"))[0])
    for call in calls:
        frames = call["key_frames"]
        near = [f for f in range(15) if f < 1 or f > 9]
        assert frames == (near if call["layer"] == 2 else list(range(15)))
        for head, label in enumerate(LABELS[call["layer"]]):
            mass = call["frame_mass"][0, head]
            seen = [f for f, row in zip(frames, mass.mT, strict=True) if not row.isnan().any()]
            assert seen == (near if label == "near" else list(range(15)))
            torch.testing.assert_close(mass.nansum(-1), torch.ones(3))
            assert torch.equal(mass.isnan(), call["frame_logits"][0, head].isnan())


@pytest.mark.parametrize(
    "policies",
    [
        {"far": {"name": "deep_sink", "window": 9, "sink": 3}, "near": {"name": "window", "window": 6}},
        {"far": {"name": "window", "window": 9, "sink": 1, "stride": 2}, "near": {"name": "full"}},
        {
            "far": {"name": "relative", "window": 6, "sink": 1},
            "near": {"name": "ema_sink", "window": 6, "sink": 2},
        },
        {
            "far": {"name": "participative", "window": 9, "sink": 2, "budget": 7, "recent": 3},
            "near": {"name": "memory_bank", "window": 6, "sink": 1, "bank": 2, "interval": 1},
        },
    ],
    ids=str,
)
def test_classes_of_many_policies_run(policies, tmp_path):
    policy = make_policy("per_head", file=write_labels(tmp_path / "labels.csv"), policies=policies)
    latents, calls = roll_out(policy, CaptureRequest(granularity="frame", layers=[3], steps=[0]), batch=2)
    assert latents.isfinite().all() and len(calls) == 5
    assert torch.equal(latents, roll_out(policy, batch=2)[0])  # a second video equals the first


@pytest.mark.parametrize(
    "options",
    [
        {"num_frame_per_block": 1, "num_frames": 12},
        {"given": 6},
        {"independent_first_frame": True, "num_frames": 13},
        {"num_frames": 3},  # shorter than every window
    ],
    ids=str,
)
def test_batches_and_blocks_of_any_kind(options, tmp_path):
    """Captured: an item of a batch is what it is alone, and of every head all mass is on its frames."""
    policies = {"far": {"name": "deep_sink", "window": 9, "sink": 3}, "near": {"name": "window", "window": 6}}
    policy = make_policy("per_head", file=write_labels(tmp_path / "labels.csv"), policies=policies)
    request = CaptureRequest(granularity="frame", layers=[1, 2], steps=[0, 2])
    both, calls = roll_out(policy, request, batch=2, **options)
    alone, of_one = roll_out(policy, request, batch=2, item=1, **options)
    torch.testing.assert_close(both[1:], alone, atol=1e-5, rtol=0)
    for call, one in zip(calls, of_one, strict=True):
        torch.testing.assert_close(call["frame_mass"].nansum(-1), torch.ones(call["frame_mass"].shape[:-1]))
        for name in ("frame_mass", "frame_logits"):
            torch.testing.assert_close(call[name][1:], one[name], atol=1e-5, rtol=0, equal_nan=True)


def test_memory_is_that_of_the_mean_head(tmp_path):
    """What a policy says of its slots is what the caches of its classes allocate, rounded up to a slot."""
    policies = {"far": {"name": "full"}, "near": {"name": "window", "window": 6, "sink": 1}}
    policy = make_policy("per_head", file=write_labels(tmp_path / "labels.csv"), policies=policies)
    cache = golden_model().new_kv_cache(1, 30, 4, 6, policy)
    held = sum(b.nbytes for one in cache.caches for buffers in (one.keys, one.values) for b in buffers)
    of_a_slot = 2 * golden_model().config.dim * S * 4 * LAYERS
    assert held <= policy.capacity(30, 3).slots * of_a_slot < held + of_a_slot


def test_one_class_is_that_policy(tmp_path):
    """With all heads in one class the numbers are those of the class's policy."""
    file = write_labels(tmp_path / "labels.csv", [["all"] * HEADS] * LAYERS)
    settings = {"name": "deep_sink", "window": 6, "sink": 2}
    per_head = make_policy("per_head", file=file, policies={"all": settings})
    torch.testing.assert_close(roll_out(per_head)[0], roll_out(make_policy(**settings))[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "window, sink, frames", [(7, 1, [0, 6, 8, 10, 12, 13, 14]), (9, 3, [0, 1, 2, 6, 8, 10, 12, 13, 14])]
)
def test_a_stride_keeps_every_other_frame_of_the_past_and_the_whole_sink(window, sink, frames):
    _, calls = roll_out(
        make_policy("window", window=window, sink=sink, stride=2),
        CaptureRequest(granularity="frame", layers=[0], steps=[0]),
    )
    assert [call["key_frames"] for call in calls][-1] == frames


def test_a_flush_is_one_of_all_classes(tmp_path):
    """Each forgets all but its sink and the last two frames."""
    policies = {"far": {"name": "full"}, "near": {"name": "window", "window": 6, "sink": 1}}
    policy = make_policy("per_head", file=write_labels(tmp_path / "labels.csv"), policies=policies)
    cache = golden_model().new_kv_cache(1, 15, 4, 6, policy)
    for block in (range(3), range(3, 6), range(6, 9)):
        cache.advance(block)
    far, near = cache.caches
    assert far.frames == [*range(9)] and near.frames == [0, 4, 5, 6, 7, 8]
    cache.flush()
    assert far.frames == [7, 8] and near.frames == [0, 7, 8]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policies": {"far": {"name": "full"}}}, "class 'near' of .* has no policy"),
        ({"policies": {"far": {"name": "full"}, "near": {"name": "relative"}}}, "different positions"),
        (
            {
                "policies": {
                    "far": {"name": "relative", "window": 9},
                    "near": {"name": "relative", "window": 6},
                }
            },
            "different positions",
        ),
        (
            {"policies": {"far": {"name": "full"}, "near": {"name": "window", "released": "longlive"}}},
            "class 'near' is released or per_head again; only clean rules go here",
        ),
        ({"policies": {}}, "needs a file of head classes and policies"),
        ({"file": "nowhere.csv", "policies": {"a": {"name": "full"}}}, "nowhere.csv.* not found"),
    ],
)
def test_what_cannot_be_is_refused(fields, message, tmp_path):
    settings = {"file": write_labels(tmp_path / "labels.csv")} | fields
    with pytest.raises(ConfigError, match=message):
        make_policy("per_head", **settings)


def test_labels_of_another_model_are_refused(tmp_path):
    file = write_labels(tmp_path / "labels.csv", [["a"] * 4] * 2)
    policy = make_policy("per_head", file=file, policies={"a": {"name": "full"}})
    with pytest.raises(ConfigError, match="2 layers x 4 heads, the model 5 x 12"):
        roll_out(policy)


def by_slot(tmp_path, sink):
    near = {"name": "two_memories", "window": 9, "sink": sink}
    policies = {"far": {"name": "relative", "window": 9, "sink": 1}, "near": near}
    return {"name": "per_head", "file": write_labels(tmp_path / "labels.csv"), "policies": policies}


@pytest.mark.parametrize("how", ["flush", "cut"])
def test_a_flush_that_parts_the_queries_of_classes_is_refused_before_the_rollout(how, tmp_path):
    with pytest.raises(ConfigError, match=r"sinks of 1, 3 frames .*; use keep, or one sink"):
        RunConfig(
            cache_policy=by_slot(tmp_path, 3), prompt_schedule=[{"frame": 12, "prompt": "a", "how": how}]
        )


def test_classes_of_one_sink_go_on_behind_a_flush(tmp_path):
    inputs, policy = policy_inputs(1, 4, 18), make_policy(**by_slot(tmp_path, 1))
    schedule = [PromptSwitch(12, how="flush", prompt_embeds=inputs["prompt_embeds"])]
    pipeline = CausalInferencePipeline(golden_model(), cache_policy=policy, **TWO_STEPS)
    assert pipeline.inference(**inputs, prompt_schedule=schedule)[1].isfinite().all()


@pytest.mark.parametrize("chooses", [{"name": "participative", "window": 9, "sink": 2, "budget": 8}, None])
def test_a_probe_is_refused_where_a_class_changes_its_cache_in_a_first_pass(chooses, tmp_path):
    """It would make that class's choice by the probe's queries, and the block would keep it."""
    policies = {"far": {"name": "full"}, "near": chooses or {"name": "window", "window": 6}}
    policy = make_policy("per_head", file=write_labels(tmp_path / "labels.csv"), policies=policies)
    pipeline = CausalInferencePipeline(golden_model(), cache_policy=policy, **TWO_STEPS)
    inputs = policy_inputs(1, 4, 12, 1, 0, None)
    refused = pytest.raises(ConfigError, match="per_head changes its cache") if chooses else nullcontext()
    with refused:
        pipeline.inference(**inputs, probe=lambda block, denoise: denoise())
