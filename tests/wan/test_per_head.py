"""A policy for each class of heads, against a float64 masked softmax over everything."""

import csv
from contextlib import ExitStack, nullcontext

import pytest
import torch
from helpers.rollouts import TWO_STEPS, golden_inputs, shared_golden_model

from wan.cache import PromptSwitch
from wan.capture import ATTENTION_WEIGHT_CAPTURE, CaptureRequest
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.pipeline import CausalInferencePipeline
from wan.policies import make_policy, policy_of

HEADS, LAYERS, S = 12, 5, 3
LABELS = [["far" if (layer + head) % 3 else "near" for head in range(HEADS)] for layer in range(LAYERS)]
LABELS[2] = ["near"] * HEADS  # a class may have no head in a layer
FULL, WINDOW = {"name": "full"}, {"name": "window", "window": 6, "sink": 1}
RELATIVE = {"name": "relative", "window": 9, "sink": 1}


def write_labels(path, labels=LABELS):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(labels)
    return str(path)


@pytest.fixture
def per_head(tmp_path):
    """Return a policy of two classes."""
    file = write_labels(tmp_path / "labels.csv")
    return lambda far, near: make_policy("per_head", file=file, policies={"far": far, "near": near})


def roll_out(policy, *requests, options=None, **inputs):
    pipeline = CausalInferencePipeline(
        shared_golden_model(), cache_policy=policy, **TWO_STEPS, **options or {}
    )
    with ATTENTION_WEIGHT_CAPTURE.capture(*requests) if requests else nullcontext([]) as calls:
        latents = pipeline.inference(**golden_inputs(**inputs))[1]
    return latents, calls


def test_heads_see_what_their_class_keeps(per_head):
    """Every call against the softmax over the keys of all frames so far, masked per head, in float64."""
    past: dict[int, dict[int, tuple]] = {layer: {} for layer in range(LAYERS)}
    blocks: list[int] = []

    def compare(self, args, out):
        x, inputs = args
        rope, kv_cache = inputs.rope, inputs.kv_cache
        q, k = self.norm_q(self.q(x), rope.queries), self.norm_k(self.k(x), rope.keys)
        layer = self.site.layer
        own = zip(kv_cache.newest, k[0].double().split(S), self.values(x)[0].double().split(S), strict=True)
        past[layer] |= {frame: pair for frame, *pair in own}
        frames = sorted(past[layer])
        keys, values = (torch.cat([past[layer][f][i] for f in frames]) for i in (0, 1))
        logits = torch.einsum("qhd,khd->hqk", q[0].double(), keys) / 4
        near = torch.tensor([f < 1 or f > frames[-1] - 5 for f in frames]).repeat_interleave(S)
        for head, label in enumerate(LABELS[layer]):
            if label == "near" and len(frames) > 6:
                logits[head, :, ~near] = -torch.inf
        seen = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values).flatten(1)
        expected = seen @ self.o.weight.double().T + self.o.bias
        torch.testing.assert_close(out[0].double(), expected, atol=1e-5, rtol=0)
        blocks.append(kv_cache.newest.start)

    with ExitStack() as hooks:
        for block in shared_golden_model().blocks:
            hooks.callback(block.self_attn.register_forward_hook(compare).remove)
        roll_out(per_head(FULL, WINDOW))
    assert set(blocks) == {0, 3, 6, 9, 12}


def test_capture_has_every_head_over_its_own_frames(per_head):
    request = CaptureRequest(granularity="frame", layers=[1, 2], blocks=[4], steps=[0, 2])
    latents, calls = roll_out(per_head(FULL, WINDOW), request)
    assert torch.equal(latents, roll_out(per_head(FULL, WINDOW))[0])
    near = [f for f in range(15) if f < 1 or f > 9]
    for call in calls:
        frames = call["key_frames"]
        assert frames == (near if call["layer"] == 2 else list(range(15)))
        for head, label in enumerate(LABELS[call["layer"]]):
            mass = call["frame_mass"][0, head]
            seen = [f for f, row in zip(frames, mass.mT, strict=True) if not row.isnan().any()]
            assert seen == (near if label == "near" else list(range(15)))
            torch.testing.assert_close(mass.nansum(-1), torch.ones(3))
            assert torch.equal(mass.isnan(), call["frame_logits"][0, head].isnan())


DEEP, EMA = {"name": "deep_sink", "window": 9, "sink": 3}, {"name": "ema_sink", "window": 6, "sink": 2}


@pytest.mark.parametrize(
    "far, near, size, inputs",
    [(DEEP, WINDOW, 3, {"given": 6}), (RELATIVE | {"window": 6}, EMA, 1, {"num_frames": 6})],
)
def test_an_item_of_a_batch_is_what_it_is_alone(per_head, far, near, size, inputs):
    request, options = CaptureRequest(granularity="frame", layers=[1, 2]), {"num_frame_per_block": size}
    both, calls = roll_out(per_head(far, near), request, options=options, batch=2, **inputs)
    alone, of_one = roll_out(per_head(far, near), request, options=options, batch=2, item=1, **inputs)
    torch.testing.assert_close(both[1:], alone, atol=1e-5, rtol=0)
    for call, one in zip(calls, of_one, strict=True):
        if call["key_frames"] == one["key_frames"]:  # items may choose other frames
            for name in ("frame_mass", "frame_logits"):
                torch.testing.assert_close(call[name][1:], one[name], atol=1e-5, rtol=0, equal_nan=True)


def test_classes_of_one_sink_go_on_behind_a_flush_and_others_are_refused(per_head):
    """Each forgets all but its sink and the last two frames."""
    inputs, memories = golden_inputs(15), {"name": "two_memories", "window": 9, "sink": 1}
    schedule = [PromptSwitch(9, how="flush", prompt_embeds=inputs["prompt_embeds"])]
    for far, near, kept in ((FULL, WINDOW, [0, *range(7, 12)]), (RELATIVE, memories, None)):
        options = {"cache_policy": per_head(far, near), **TWO_STEPS}
        pipeline = CausalInferencePipeline(shared_golden_model(), **options)
        with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame", layers=[1, 2], blocks=[3]) as calls:
            assert pipeline.inference(**inputs, prompt_schedule=schedule)[1].isfinite().all()
        for call in calls if kept else ():
            assert call["key_frames"] == kept  # in layer 2 of the class with a sink alone
            seen = ~call["frame_logits"][0, :, 0, 0].isnan()
            assert seen.tolist() == [label == "near" for label in LABELS[call["layer"]]]
    for how in ("flush", "cut"):
        settings = per_head(RELATIVE, memories | {"sink": 3}).describe()
        switch = {"frame": 12, "prompt": "a", "how": how}
        with pytest.raises(ConfigError, match=f"frame 12 cannot {how} under .*; it can keep"):
            policy_of(RunConfig(cache_policy=settings, prompt_schedule=[switch]))


def test_a_budget_of_every_head_is_its_window(per_head, tmp_path):
    """The calls of classes of windows, with keys of one length together."""
    rows = [["layer", "head", "window", "sink"]]
    for layer, labels in enumerate(LABELS):
        rows += [[layer, head, *((9, 3) if label == "far" else (6, 1))] for head, label in enumerate(labels)]
    file = write_labels(tmp_path / "budget.csv", rows)
    request, window = CaptureRequest(granularity="frame", layers=[1]), {"name": "window", "window": 9}
    latents, calls = roll_out(make_policy("head_budget", file=file), request)
    expected, of_classes = roll_out(per_head(window | {"sink": 3}, WINDOW), request)
    torch.testing.assert_close(latents, expected, atol=1e-5, rtol=0)
    for call, other in zip(calls, of_classes, strict=True):
        assert call["key_frames"] == other["key_frames"]
        torch.testing.assert_close(call["frame_mass"], other["frame_mass"], atol=1e-5, rtol=0, equal_nan=True)
    write_labels(tmp_path / "budget.csv", [*rows[:-1], [4, 11, 3, 1]])
    with pytest.raises(ConfigError, match="window 3 is too small"):
        make_policy("head_budget", file=file).check([3])


def test_forcing_kv_has_memory_for_the_mean_head():
    """Layer 0 keeps 3 frames in both heads, the others 1, 1, 1 and 3: 2 on average, a sink of 2, a block."""
    policy = make_policy(**STATIC | {"heads": [[1, 0], [1, 1], [1, 0]]}, sink=2, temporal_context_length=2)
    assert [policy.capacity(frames, 3).slots for frames in (21, 5)] == [7, 5]


CLASSES = {"name": "per_head", "file": LABELS, "policies": {"far": FULL, "near": WINDOW}}
STATIC, TRI = {"name": "forcing_kv", "heads": [[1, 0]]}, {"name": "triattention"}
REFUSED = {  # what is said -> settings; a file by its content
    "class 'near' of .* has no policy": CLASSES | {"policies": {"far": FULL}},
    "different positions": CLASSES | {"policies": {"far": FULL, "near": {"name": "relative"}}},
    "'near': it has no clean": CLASSES
    | {"policies": {"far": FULL, "near": WINDOW | {"released": "longlive"}}},
    "give a CSV of layers x heads": CLASSES | {"file": b""},
    "columns layer, head, window and sink": {"name": "head_budget", "file": b"layer,head\n99999999999,0\n"},
    "rows of different lengths": CLASSES | {"file": b"a,b\nc\n"},
    "ar_start 0 has no middle frames": {"name": "dummy_forcing", "ar_start": 0},
    "num_dummy 61 of a model of 60 heads": {"name": "dummy_forcing", "num_dummy": 61},
    "cannot be read": {"name": "forcing_kv"},
    "dynamic_context_length 4 should be": STATIC | {"dynamic_context_length": 4},
    "length of 1 to 3": STATIC | {"temporal_context_length": 4},
    r"its file has \(1, 2\) layers and heads, the model \(5, 12\)": STATIC | {"num_frame_patch": 3},
    r"give a CSV or an array \[layers, heads\]": STATIC | {"heads": LABELS},
    "or a mapping of q_mean": TRI | {"statistics": {"q_mean": 1}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_heads_cannot_keep_is_refused_in_one_line(message, tmp_path):
    settings, path = dict(REFUSED[message]), tmp_path / "labels.csv"
    if isinstance(file := settings.get("file"), bytes):
        settings["file"] = str(path)
        path.write_bytes(file)
    elif file:
        settings["file"] = write_labels(path)
    with pytest.raises(ConfigError, match=message) as refused:
        roll_out(make_policy(**settings))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500
