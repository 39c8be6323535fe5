"""The hook: what it promises to scripts, that looking changes nothing, and that leaving leaves nothing."""

from functools import partial

import pytest
import torch
from conftest import golden_arrays, golden_model
from helpers.pretended_gpu import pretended_gpu
from helpers.rollouts import MODEL_LAYERS, TINY, rollout, tiny_pipeline

from wan import capture as captured_call
from wan import capture as host_copies
from wan.attention import ATTENTION_WEIGHT_CAPTURE, attention
from wan.capture import Call, CapturedCall, CaptureRequest, Pass, Site
from wan.keys import KeyLayout
from wan.legacy_api import OlderCapture
from wan.model import Rope, WanModel, teacher_forcing_mask
from wan.pipeline import CausalInferencePipeline

EVERYTHING = {
    "token logits": CaptureRequest(kinds=("self", "cross")),
    "token probabilities": CaptureRequest(kinds=("self", "cross"), is_logits=False),
    "key": CaptureRequest(granularity="key", kinds=("self", "cross")),
    "frame": CaptureRequest(granularity="frame", kinds=("self", "cross")),
    "frame logits only": CaptureRequest(granularity="frame", mass=False),
}


@pytest.mark.real_gpu  # what these run on a pretended one, the tests of kernels, bands and policies run there
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("request_name", EVERYTHING)
def test_looking_changes_no_bit(request_name, dtype, device):
    pipeline = tiny_pipeline(dtype, device)
    plain = rollout(pipeline)
    with ATTENTION_WEIGHT_CAPTURE.capture(EVERYTHING[request_name]) as calls:
        watched = rollout(pipeline)
    assert calls and torch.equal(plain, watched) and torch.equal(plain, rollout(pipeline))


def test_window_and_batch_are_captured_without_changing_a_bit(device):
    pipeline = tiny_pipeline(device=device, local_attn_size=4, sink_size=1)
    plain = rollout(pipeline, 9)
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame") as calls:
        assert torch.equal(plain, rollout(pipeline, 9))
    assert calls[-1]["key_frames"] == [0, 6, 7, 8] and calls[-1]["query_frames"] == [6, 7, 8]


def test_the_fused_call_is_sdpa_bit_for_bit_on_the_cpu():
    q, k, v = (torch.randn(2, n, 3, 16) for n in (7, 11, 11))
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    assert torch.equal(attention(q, k, v), expected.transpose(1, 2))


@pytest.mark.parametrize("layer", range(MODEL_LAYERS))
def test_asking_for_a_layer_returns_that_layer(layer):
    """Perturb the query norm of one layer: with every layer fed the same input,
    only that layer's logits may change.
    """
    model = tiny_pipeline().model
    x, e = torch.randn(1, 15, 48), torch.randn(1, 1, 6, 48)
    text = model.text_keys_values(torch.randn(1, 4, 24))
    rope = Rope(*[model.rotary(range(3), 1, 5, x.device)] * 2)

    def logits_by_layer():
        ATTENTION_WEIGHT_CAPTURE.enable(layer_indices=[2 * layer], num_layers=2 * MODEL_LAYERS)
        for block, block_text in zip(model.blocks, text, strict=True):
            block(x, e, rope, block_text)
        calls = ATTENTION_WEIGHT_CAPTURE.captured_weights
        ATTENTION_WEIGHT_CAPTURE.disable()
        assert [(c["layer_idx"], c["layer"], c["kind"]) for c in calls] == [(2 * layer, layer, "self")]
        return calls[0]["attn_weights"]

    before = logits_by_layer()
    for other in range(MODEL_LAYERS):
        weight = model.blocks[other].self_attn.norm_q.weight
        weight.mul_(2)
        torch.testing.assert_close(logits_by_layer(), before * (2 if other == layer else 1))
        weight.div_(2)


def test_captured_weights_of_the_older_interface():
    pipeline = tiny_pipeline()
    ATTENTION_WEIGHT_CAPTURE.enable(
        layer_indices=[2 * 1, 2 * 3 + 1], capture_logits=True, num_layers=2 * MODEL_LAYERS
    )
    rollout(pipeline)
    calls = ATTENTION_WEIGHT_CAPTURE.captured_weights
    ATTENTION_WEIGHT_CAPTURE.disable()
    assert ATTENTION_WEIGHT_CAPTURE.captured_weights == [] and not ATTENTION_WEIGHT_CAPTURE.active
    assert [c["layer_idx"] for c in calls] == [2, 7] * (2 * 5)  # 2 blocks of 5 passes
    assert [(c["block"], c["step"]) for c in calls[::2]] == [(b, s) for b in range(2) for s in range(5)]
    last = calls[-2]
    assert last["attn_weights"].shape == (1, 3, 15, 30) and last["attn_weights"].dtype == torch.float32
    assert (last["q_shape"], last["k_shape"]) == ([1, 15, 3, 16], [1, 30, 3, 16])
    assert last["is_logits"] and last["is_clean_pass"] and last["timestep"] == 0.0
    assert (last["query_frames"], last["key_frames"]) == ([3, 4, 5], [0, 1, 2, 3, 4, 5])
    assert calls[-1]["kind"] == "cross" and calls[-1]["attn_weights"].shape == (1, 3, 15, 7)
    assert [c["timestep"] for c in calls[:10:2]] == pytest.approx([1000, 937.5, 833.3333, 625, 0])


def test_none_means_every_call():
    pipeline = tiny_pipeline()
    ATTENTION_WEIGHT_CAPTURE.enable(capture_logits=False)
    rollout(pipeline, 3)
    calls = ATTENTION_WEIGHT_CAPTURE.captured_weights
    ATTENTION_WEIGHT_CAPTURE.disable()
    assert [c["layer_idx"] for c in calls] == list(range(2 * MODEL_LAYERS)) * 5
    for call in calls:
        torch.testing.assert_close(call["attn_weights"].sum(-1), torch.ones(call["attn_weights"].shape[:3]))


def test_selection_by_layer_block_step_and_kind():
    requests = (
        CaptureRequest(layers=[2], blocks=[1], steps=[0, 4]),
        CaptureRequest(kinds=("cross",), blocks=[0], steps=[3], granularity="frame"),
    )
    with ATTENTION_WEIGHT_CAPTURE.capture(*requests) as calls:
        rollout(tiny_pipeline())
    assert [(c["layer"], c["kind"], c["block"], c["step"]) for c in calls if c["kind"] == "self"] == [
        (2, "self", 1, 0),
        (2, "self", 1, 4),
    ]
    assert [(c["layer"], c["block"], c["step"]) for c in calls if c["kind"] == "cross"] == [
        (n, 0, 3) for n in range(4)
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_what_was_captured_comes_to_the_cpu_as_it_was():
    """Small tensors in one copy, large ones alone; each is contiguous and holds no other's numbers."""
    values = {"large": torch.rand(host_copies.SMALL // 4, 5), "small": torch.rand(3, 4)}
    values["other"] = torch.rand(6, 2).half()
    with pretended_gpu() as gpu:
        call = CapturedCall(Site(0, "self"), None, {n: v.to(gpu).mT for n, v in values.items()}, (), ())
        captured_call.move_to_cpu([call])
    for name, value in values.items():
        found = call.values[name]
        assert found.device.type == "cpu" and found.is_contiguous() and torch.equal(found, value.mT)
        assert found.untyped_storage().nbytes() == value.nbytes


def test_an_exception_leaves_no_trace():
    before = dict(ATTENTION_WEIGHT_CAPTURE.__dict__)

    def fail():
        raise RuntimeError("in the middle of a rollout")

    pipeline = tiny_pipeline()
    with (
        pytest.raises(RuntimeError, match="in the middle"),
        ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame"),
    ):
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(1, 3, 16, 2, 10, generator=generator)
        pipeline.inference(noise, prompt_embeds=torch.randn(1, 4, 24), on_pass=fail)
    assert ATTENTION_WEIGHT_CAPTURE.__dict__ == before


def test_a_context_gives_back_what_was_enabled_before():
    pipeline = tiny_pipeline()
    ATTENTION_WEIGHT_CAPTURE.enable(layer_indices=[0], num_layers=2 * MODEL_LAYERS)
    with ATTENTION_WEIGHT_CAPTURE.capture(layers=[1]) as inner:
        rollout(pipeline, 3)
    rollout(pipeline, 3)
    outer = ATTENTION_WEIGHT_CAPTURE.captured_weights
    ATTENTION_WEIGHT_CAPTURE.disable()
    assert {c["layer"] for c in inner} == {1} and {c["layer"] for c in outer} == {0} and len(outer) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer_indices": [8], "num_layers": 8}, "call index 8 is not in 0..7"),
        ({"layer_indices": [-1], "num_layers": 8}, "call index -1"),
        ({"layer_indices": [-1]}, "call index -1"),
    ],
)
def test_an_index_outside_is_refused_when_asked(arguments, message):
    with pytest.raises(ValueError, match=message):
        ATTENTION_WEIGHT_CAPTURE.enable(**arguments)
    assert not ATTENTION_WEIGHT_CAPTURE.active


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer_indices": [0], "num_layers": 60}, "num_layers=60.*num_layers=8"),
        ({"num_layers": 60}, "num_layers=60"),
        ({"layer_indices": [8]}, "call index 8 is not in 0..7"),
    ],
)
def test_a_wrong_model_is_refused_before_the_rollout(arguments, message):
    ran = []
    pipeline = tiny_pipeline()
    try:
        ATTENTION_WEIGHT_CAPTURE.enable(**arguments)
        with pytest.raises(ValueError, match=message):
            pipeline.inference(
                torch.randn(1, 3, 16, 2, 10),
                prompt_embeds=torch.randn(1, 4, 24),
                on_pass=lambda: ran.append(1),
            )
        with pytest.raises(ValueError, match=message):  # and without the pipeline
            WanModel(**TINY)(torch.randn(1, 16, 3, 2, 10), torch.tensor([500.0]), torch.randn(1, 4, 24))
    finally:
        ATTENTION_WEIGHT_CAPTURE.disable()
    assert not ran


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": [4]}, "layer 4 is not in 0..3"),
        ({"blocks": [2]}, "block 2 is not in 0..1"),
        ({"steps": [5]}, "step 5 is not in 0..4"),
    ],
)
def test_a_request_outside_the_rollout_is_refused(fields, message):
    with pytest.raises(ValueError, match=message), ATTENTION_WEIGHT_CAPTURE.capture(**fields):
        rollout(tiny_pipeline())


def test_a_request_that_makes_no_sense_is_refused():
    for fields in (
        {"granularity": "pixel"},
        {"kinds": ("both",)},
        {"granularity": "key", "is_logits": False},
    ):
        with pytest.raises(ValueError):
            CaptureRequest(**fields)


def test_an_idle_hook_keeps_nothing():
    hook = OlderCapture()
    q = torch.randn(1, 5, 3, 16)
    hook.observe(Call(Site(0, "self"), None, q, q, q))
    assert hook.captured_weights == []


def test_frame_means_of_the_cache_are_those_of_the_keys(device):
    """The KV cache settles the means of past frames;
    clean passes in between and windows must not leave stale ones.
    """
    pipeline = tiny_pipeline(device=device, local_attn_size=5, sink_size=1)
    requests = CaptureRequest(granularity="frame", steps=[1, 4]), CaptureRequest(steps=[1, 4])
    with ATTENTION_WEIGHT_CAPTURE.capture(*requests) as calls:
        rollout(pipeline, 12)
    for frame_call, token_call in zip(calls[::2], calls[1::2], strict=True):
        tokens = token_call["attn_weights"].double().unflatten(2, (-1, 5)).unflatten(4, (-1, 5))
        torch.testing.assert_close(
            frame_call["frame_logits"].double(), tokens.mean((3, 5)), atol=1e-5, rtol=0
        )


def test_captured_logits_are_those_of_generation():
    """Capturing in another dtype than generating once changed the video;
    the golden rollout stays golden while watched.
    """
    arrays = golden_arrays("causal")
    pipeline = CausalInferencePipeline(golden_model())
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame"):
        _, latents = pipeline.inference(
            arrays["blocks9/noise"],
            prompt_embeds=arrays["blocks9/prompt_embeds"],
            renoise=arrays["blocks9/renoise"][:, None],
        )
    torch.testing.assert_close(latents, arrays["blocks9/latents"], atol=2e-5, rtol=0)


def test_announcing_restores_what_was_announced():
    hook = OlderCapture()
    outer, inner = Pass(query_frames=(0,)), Pass(query_frames=(1,))
    with hook.during(outer):
        with pytest.raises(KeyError), hook.during(inner):
            raise KeyError
        assert hook._pass == outer
    assert hook._pass is None


def test_a_masked_call_is_captured(device):
    """Training masks: the output is SDPA's, and what is kept is what the softmax saw, against float64."""
    torch.manual_seed(0)
    F, S = 4, 5
    q, k, v = (torch.randn(2, F * S, 3, 16, device=device) for _ in range(3))
    mask = teacher_forcing_mask([0, 0], S).to(device)
    site, layout = Site(1, "self"), KeyLayout.of_frames([0, 1, 0, 1], F * S)
    requests = [CaptureRequest(granularity=g) for g in ("frame", "token", "key")]
    with (
        ATTENTION_WEIGHT_CAPTURE.capture(*requests, CaptureRequest(is_logits=False)) as calls,
        ATTENTION_WEIGHT_CAPTURE.during(Pass(query_frames=(0, 1, 0, 1))),
    ):
        out = attention(q, k, v, site, mask, layout)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask
    )
    torch.testing.assert_close(
        out, expected.transpose(1, 2), atol=0 if device.type == "cpu" else 1e-5, rtol=0
    )
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()).cpu() / 4
    seen = logits.masked_fill(~mask.cpu(), torch.nan)
    probs = logits.masked_fill(~mask.cpu(), -torch.inf).softmax(-1)
    frames, tokens, curve, probabilities = (call.values for call in calls)
    close = partial(torch.testing.assert_close, atol=1e-5, rtol=0, equal_nan=True, check_dtype=False)
    close(tokens["token_logits"], seen)
    close(probabilities["token_probabilities"], probs)
    close(curve["key_curve"], seen.nanmean(2))
    close(frames["frame_logits"], seen.unflatten(2, (F, S)).unflatten(4, (F, S)).nanmean((3, 5)))
    close(frames["frame_mass"], probs.unflatten(2, (F, S)).unflatten(4, (F, S)).sum(5).mean(3))
