"""Capture under cache policies: frame and slot values against the definition in float64,
choices per layer and item.
"""

import pytest
import torch
from conftest import golden_model
from helpers.rollouts import TWO_STEPS

from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.capture import CaptureRequest
from wan.interventions import Knockout, intervene
from wan.keys import key_frames
from wan.pipeline import CausalInferencePipeline
from wan.policies import make_policy

S = 6  # tokens per frame: latents of 4 x 6
POLICIES = [
    {"name": "full"},
    {"name": "window", "window": 6, "sink": 1},
    {"name": "window", "window": 9, "sink": 6, "released": "longlive"},
    {"name": "relative", "window": 6, "sink": 2},
    {"name": "deep_sink", "window": 9, "sink": 4},
    {"name": "participative", "window": 9, "sink": 2, "budget": 7, "recent": 3},
    {"name": "participative", "window": 9, "sink": 2, "budget": 7, "recent": 3, "released": True},
    {"name": "ema_sink", "window": 6, "sink": 2, "alpha": 0.9},
    {"name": "two_memories", "window": 9, "sink": 2},
    {"name": "rolling_sink", "window": 9},
    {"name": "memory_bank", "window": 9, "sink": 3, "bank": 2, "interval": 1},
]


def roll_out(policy: dict, *requests: CaptureRequest, batch: int = 2, num_frames: int = 15, device="cpu"):
    """Latents and captured calls of a rollout of the golden model; batch items have noise of their own.

    On CUDA in bfloat16, whose kernels are other ones.
    """
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(batch, num_frames, 16, 4, 6, generator=generator)
    renoise = torch.randn(1, *noise.shape, generator=generator)
    embeds = torch.randn(batch, 32, 64, generator=generator)
    model = golden_model().to(device)
    if torch.device(device).type == "cuda":
        model = model.bfloat16()
        noise, renoise, embeds = (x.to(device, torch.bfloat16) for x in (noise, renoise, embeds))
    pipeline = CausalInferencePipeline(model, **TWO_STEPS, cache_policy=make_policy(**policy))
    with ATTENTION_WEIGHT_CAPTURE.capture(*requests) as calls:
        latents = pipeline.inference(noise, prompt_embeds=embeds, renoise=renoise)[1]
    return latents, calls


ON_DEVICES = [  # a pretended GPU runs no line for the marked ones that it does not run for the others
    pytest.param(policy, marks=pytest.mark.real_gpu) if number in (0, 1, 5) else policy
    for number, policy in enumerate(POLICIES)
]


@pytest.mark.parametrize("policy", ON_DEVICES, ids=lambda policy: "-".join(map(str, policy.values())))
def test_values_are_those_of_the_definition(policy, device):
    atol = 1e-5 if device.type == "cpu" else 1e-4
    of_frames = CaptureRequest(layers=[0, 3], granularity="frame")
    of_tokens = CaptureRequest(layers=[0, 3])
    latents, calls = roll_out(policy, of_frames, of_tokens, device=device)
    of_keys = CaptureRequest(layers=[0], blocks=[1], granularity="key")
    assert torch.equal(latents, roll_out(policy, of_keys, device=device)[0])
    for call, tokens in zip(calls[::2], calls[1::2], strict=True):
        logits = tokens["attn_weights"].double().unflatten(2, (3, S)).mean(3)  # [B, H, Fq, Lk]
        probs = tokens["attn_weights"].double().softmax(-1).unflatten(2, (3, S)).mean(3)
        frames, _ = key_frames(call.layout, len(logits))
        for item in range(len(logits)):
            columns = torch.stack([frames[item] == frame for frame in call["key_frames"]], -1).double()
            close(call["frame_mass"][item], probs[item] @ columns, atol)
            close(call["frame_logits"][item], logits[item] @ (columns / columns.sum(0)), atol)
            if not call.layout.is_plain:
                assert call["tokens_kept"][item].tolist() == columns.sum(0).tolist()
        if not call.layout.is_plain:
            close(call["slot_logits"], logits.unflatten(-1, (-1, S)).mean(-1), atol)
            close(call["slot_mass"], probs.unflatten(-1, (-1, S)).sum(-1), atol)
            close(call["slot_mass"].sum(-1), torch.ones(call["slot_mass"].shape[:-1]), atol)
            assert torch.equal(tokens["key_frame"], frames)


def close(values: torch.Tensor, expected: torch.Tensor, atol: float) -> None:
    torch.testing.assert_close(values.double(), expected.double(), atol=atol, rtol=0, equal_nan=True)


@pytest.mark.parametrize(
    "policy", [*POLICIES[5:7], POLICIES[-1] | {"bank": 4}], ids=lambda policy: policy["name"]
)
def test_a_choice_is_made_per_batch_item(policy):
    """An item of a batch chooses as it does alone."""
    request = CaptureRequest(blocks=[4, 7, 8], steps=[0], granularity="key")
    both = roll_out(policy, request, num_frames=27)[1]
    assert any(not torch.equal(*call["key_frame"]) for call in both)  # or this test says nothing
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(2, 27, 16, 4, 6, generator=generator)
    renoise = torch.randn(1, *noise.shape, generator=generator)
    embeds = torch.randn(2, 32, 64, generator=generator)
    for item in range(2):
        pipeline = CausalInferencePipeline(golden_model(), **TWO_STEPS, cache_policy=make_policy(**policy))
        one = slice(item, item + 1)
        with ATTENTION_WEIGHT_CAPTURE.capture(request) as alone:
            pipeline.inference(noise[one], prompt_embeds=embeds[one], renoise=renoise[:, one])
        for here, there in zip(alone, both, strict=True):
            assert torch.equal(here["key_frame"][0], there["key_frame"][item])


@pytest.mark.parametrize("policy", POLICIES[5:], ids=lambda policy: policy["name"])
def test_a_knockout_leaves_the_other_heads_values(policy):
    """Of slots that are no frames, too: the first edited call differs in its head alone."""
    request = CaptureRequest(layers=[0], blocks=[4], steps=[0], granularity="frame", rope_bands=True)
    edit = Knockout(layers=[0], heads=[1], frames="past", blocks=[4], passes="all")
    plain = roll_out(policy, request)[1][0]
    with intervene(edit):
        edited = roll_out(policy, request)[1][0]
    assert plain.values.keys() == edited.values.keys() - {"attended"}
    others = [head for head in range(12) if head != 1]
    for name in plain.values.keys() - {"tokens_kept"}:
        torch.testing.assert_close(
            edited[name][:, others], plain[name][:, others], atol=1e-5, rtol=0, equal_nan=True
        )
    own = [frame in range(12, 15) for frame in edited["key_frames"]]
    assert (edited["frame_mass"][:, 1].sum(-1) - 1).abs().max() < 1e-5
    assert edited["frame_logits"][:, 1].isfinite().all((0, 1)).tolist() == own
