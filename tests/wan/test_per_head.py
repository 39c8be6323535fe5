"""A policy for each class of heads, against a float64 masked softmax over everything."""

import csv
from contextlib import nullcontext

import pytest
import torch
from conftest import golden_model
from helpers.rollouts import TWO_STEPS, golden_inputs

from wan import model as layers
from wan.capture import ATTENTION_WEIGHT_CAPTURE, CaptureRequest
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.pipeline import CausalInferencePipeline
from wan.policies import PromptSwitch, make_policy

HEADS, LAYERS, S = 12, 5, 3
LABELS = [["far" if (layer + head) % 3 else "near" for head in range(HEADS)] for layer in range(LAYERS)]
LABELS[2] = ["near"] * HEADS  # a class may have no head in a layer
FULL, WINDOW = {"name": "full"}, {"name": "window", "window": 6, "sink": 1}


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
    pipeline = CausalInferencePipeline(golden_model(), cache_policy=policy, **TWO_STEPS, **options or {})
    with ATTENTION_WEIGHT_CAPTURE.capture(*requests) if requests else nullcontext([]) as calls:
        latents = pipeline.inference(**golden_inputs(**inputs))[1]
    return latents, calls


def test_heads_see_what_their_class_keeps(per_head, monkeypatch):
    """Every call against the softmax over the keys of all frames so far, masked per head, in float64."""
    past: dict[int, dict[int, tuple]] = {layer: {} for layer in range(LAYERS)}
    blocks: list[int] = []
    original = layers.SelfAttention.forward

    def forward(self, x, rope, kv_cache=None, *rest):
        out = original(self, x, rope, kv_cache, *rest)
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
        return out

    monkeypatch.setattr(layers.SelfAttention, "forward", forward)
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


@pytest.mark.parametrize(
    "far, near",
    [
        ({"name": "deep_sink", "window": 9, "sink": 3}, {"name": "window", "window": 6}),
        ({"name": "relative", "window": 6, "sink": 1}, {"name": "ema_sink", "window": 6, "sink": 2}),
    ],
    ids=lambda policy: policy["name"],
)
@pytest.mark.parametrize("size, inputs", [(1, {"num_frames": 6}), (3, {"given": 6})])
def test_an_item_of_a_batch_is_what_it_is_alone(per_head, far, near, size, inputs):
    request, options = CaptureRequest(granularity="frame", layers=[1, 2]), {"num_frame_per_block": size}
    both, calls = roll_out(per_head(far, near), request, options=options, batch=2, **inputs)
    alone, of_one = roll_out(per_head(far, near), request, options=options, batch=2, item=1, **inputs)
    torch.testing.assert_close(both[1:], alone, atol=1e-5, rtol=0)
    for call, one in zip(calls, of_one, strict=True):
        if call["key_frames"] == one["key_frames"]:  # items may choose other frames
            for name in ("frame_mass", "frame_logits"):
                torch.testing.assert_close(call[name][1:], one[name], atol=1e-5, rtol=0, equal_nan=True)


def test_a_flush_is_one_of_all_classes(per_head):
    """Each forgets all but its sink and the last two frames."""
    cache = golden_model().new_kv_cache(1, 15, 4, 6, per_head(FULL, WINDOW))
    for block in (range(3), range(3, 6), range(6, 9)):
        cache.advance(block)
    far, near = cache.caches
    assert far.frames == [*range(9)] and near.frames == [0, 4, 5, 6, 7, 8]
    cache.flush()
    assert far.frames == [7, 8] and near.frames == [0, 7, 8]


RELATIVE = {"name": "relative", "window": 9, "sink": 1}


def test_classes_of_one_sink_go_on_behind_a_flush_and_others_are_refused(per_head):
    inputs = golden_inputs(15)
    schedule = [PromptSwitch(12, how="flush", prompt_embeds=inputs["prompt_embeds"])]
    memories = {"name": "two_memories", "window": 9, "sink": 1}
    pipeline = CausalInferencePipeline(golden_model(), cache_policy=per_head(RELATIVE, memories), **TWO_STEPS)
    assert pipeline.inference(**inputs, prompt_schedule=schedule)[1].isfinite().all()
    for how in ("flush", "cut"):
        settings = per_head(RELATIVE, memories | {"sink": 3}).describe()
        switch = {"frame": 12, "prompt": "a", "how": how}
        with pytest.raises(ConfigError, match=f"cannot {how} at frame 12; it can keep"):
            RunConfig(cache_policy=settings, prompt_schedule=[switch])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policies": {"far": FULL}}, "class 'near' of .* has no policy"),
        ({"policies": {"far": FULL, "near": {"name": "relative"}}}, "different positions"),
        ({"policies": {"far": FULL, "near": WINDOW | {"released": "longlive"}}}, "'near' has no clean rule"),
    ],
)
def test_what_cannot_be_is_refused(fields, message, tmp_path):
    settings = {"file": write_labels(tmp_path / "labels.csv")} | fields
    with pytest.raises(ConfigError, match=message) as refused:
        make_policy("per_head", **settings)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "give a CSV"),
        (b"layer,head,class\n0,0,a\n99999999999,0,a\n", "give a CSV of layers x heads"),
        (b"a,b\nc\n", "rows of different lengths"),
        (b"\xff\xfea", "is not text in UTF-8"),
    ],
    ids=range(4),
)
def test_a_file_of_classes_that_is_none_is_one_line(content, message, tmp_path):
    (tmp_path / "labels.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        make_policy("per_head", file=str(tmp_path / "labels.csv"), policies={"a": FULL})


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "dummy_forcing", "ar_start": 0}, "ar_start 0 has no middle frames"),
        ({"name": "dummy_forcing", "num_dummy": 61}, "num_dummy 61 of a model of 60 heads"),
        ({"name": "forcing_kv"}, "cannot be read"),
        ({"name": "forcing_kv", "heads": [[1, 0]], "sim_retention_ratio": 0.5}, "keeps 9 chunks"),
        ({"name": "forcing_kv", "heads": [[1, 0]], "temporal_context_length": 4}, "length of 1 to 3"),
        ({"name": "forcing_kv", "heads": [[1, 0]]}, r"of \(1, 2\) layers and heads, the model has \(5, 12\)"),
        ({"name": "forcing_kv", "heads": LABELS}, "give a CSV, Forcing-KV's JSON or an array"),
        ({"name": "triattention", "statistics": "nowhere.npz"}, "nowhere.npz' cannot be read"),
        ({"name": "triattention", "statistics": {"q_mean": 1}}, "or a mapping of q_mean"),
    ],
)
def test_what_heads_cannot_keep_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message) as refused:
        roll_out(make_policy(**fields))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500
