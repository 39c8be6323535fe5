"""Statistics of an attention call against their definitions in float64, at awkward sizes, on every device.

Error budgets are those asked of the capture: in float32 mean logits within 1e-5 of the largest logit and mass
within 1e-6; in bfloat16 no worse than twice the error of the same formula in plain PyTorch.
"""

import pytest
import torch
from conftest import golden_model
from helpers.rollouts import TWO_STEPS, drawn, golden_inputs
from hypothesis import given, settings
from hypothesis import strategies as st

from wan import keys, reductions
from wan.attention import attention_with_lse
from wan.capture import ATTENTION_WEIGHT_CAPTURE, CaptureRequest
from wan.keys import AVERAGE, CHOSEN, EMPTY, KeyBias, KeyLayout, RotaryTable, Slot, key_frames, key_tokens
from wan.pipeline import CausalInferencePipeline
from wan.policies import make_policy

# heads, head dim, tokens a frame, query frames, key frames
SIZES = [(3, 16, 5, 3, 6), (2, 128, 130, 1, 2), (12, 16, 16, 3, 21)]


def call(size, dtype, device):
    """q, k and lse of one fused attention call, and its logits and probabilities by definition in float64."""
    heads, dim, S, query_frames, key_frames = size
    q, k = drawn(1, query_frames * S, heads, dim) * 2, drawn(1, key_frames * S, heads, dim) + 0.5
    q, k = (x.to(device, dtype) for x in (q, k))
    _, lse = attention_with_lse(*(x.transpose(1, 2) for x in (q, k, k)))
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * dim**-0.5
    return q, k, lse, logits, logits.softmax(-1)


def per_frame(tokens: torch.Tensor, size) -> torch.Tensor:
    """[B, H, Lq, Lk] -> [B, H, Fq, S, Fk, S]."""
    return tokens.unflatten(2, (-1, size[2])).unflatten(4, (-1, size[2]))


def close(values: torch.Tensor, expected: torch.Tensor, atol: float, rtol: float = 0) -> None:
    values, expected = values.cpu().double(), expected.cpu().double()
    torch.testing.assert_close(values, expected, atol=atol, rtol=rtol, equal_nan=True)


# --- One call
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_quantity_of_a_call(size, device, monkeypatch):
    """A few rows, or keys, at a time: chunks do not end where frames do."""
    q, k, lse, logits, probabilities = call(size, torch.float32, device)
    monkeypatch.setattr(reductions, "CHUNK_ELEMENTS", 7 * size[0] * k.shape[1])
    edge = 1e-5 * logits.abs().max().item()
    found = reductions.frame_logits(q, reductions.frame_sums(k, size[4]) / (k.shape[1] // size[4]), size[3])
    assert found.dtype == torch.float32
    close(found, per_frame(logits, size).mean((3, 5)), edge)
    close(reductions.key_curve(q, k), logits.mean(2), edge)
    mass = per_frame(probabilities, size).sum(5).mean(3)
    close(reductions.frame_mass(q, k, lse, size[3], size[4]), mass, 1e-6)
    tokens = probabilities.unflatten(2, (size[3], -1)).mean(3)
    close(reductions.token_mass(q, k, size[3]), tokens, 1e-6)
    curve, columns = reductions.key_token_means(q, k, lse)
    close(curve, logits.mean(2), edge)
    close(columns, probabilities.mean(2), 1e-5)
    monkeypatch.setattr(reductions, "CHUNK_ELEMENTS", 3 * size[2] * size[0] * k.shape[1])  # whole frames
    close(reductions.token_mass(q, k, size[3]), tokens, 1e-6)
    assert lse.dtype == torch.float32 and lse.shape == (1, size[0], q.shape[1])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_in_bfloat16_no_worse_than_twice_plain_pytorch(size, device):
    q, k, lse, logits, probabilities = call(size, torch.bfloat16, device)
    plain = (torch.einsum("bqhd,bkhd->bhqk", q, k) * size[1] ** -0.5).float()
    means = reductions.frame_logits(q, reductions.frame_sums(k, size[4]) / (k.shape[1] // size[4]), size[3])
    exact, rough = (per_frame(x, size).mean((3, 5)) for x in (logits, plain))
    assert (means - exact).abs().max() <= 2 * (rough - exact).abs().max() + 1e-6
    mass = reductions.frame_mass(q, k, lse, size[3], size[4])
    exact, rough = (per_frame(x, size).sum(5).mean(3) for x in (probabilities, plain.softmax(-1)))
    assert (mass - exact).abs().max() <= 2 * (rough - exact).abs().max() + 1e-6
    assert (mass.sum(-1) - 1).abs().max() <= 1e-5


# --- Any layout, any bias, in float64
@st.composite
def layouts(draw):
    """Slots of frames, of averages, zeros, other frames for each item, or chosen tokens, two batch items."""
    S, slots, chosen = draw(st.integers(1, 5)), [], None
    frame = st.integers(0, 5)
    for _ in range(draw(st.integers(1, 5))):
        items = draw(st.sampled_from([(), (draw(frame), draw(frame))]))
        named = draw(st.sampled_from([draw(frame), AVERAGE, EMPTY]))
        slots.append(Slot(items[0] if items else named, draw(st.integers(0, 9)), items=items))
    if draw(st.booleans()):
        first = draw(st.integers(0, len(slots) - 1))
        count = draw(st.integers(1, len(slots) - first))
        slots[first : first + count] = [Slot(CHOSEN, n) for n in range(count)]
        rows = torch.tensor([[draw(frame) for _ in range(count * S)] for _ in range(2)]).sort(1)[0]
        zeros = torch.zeros_like(rows)
        chosen = keys.ChosenTokens(range(first, first + count), rows, zeros + 1, zeros + 2)
    return KeyLayout(tuple(slots), S, chosen=chosen)


@given(layout=layouts(), query_frames=st.integers(1, 3), biased=st.booleans(), seed=st.integers(0, 2**30))
@settings(max_examples=70, deadline=None)
def test_frames_and_slots_of_any_layout(layout, query_frames, biased, seed):
    dice, S, heads, dim = torch.Generator().manual_seed(seed), layout.tokens_per_slot, 3, 12
    num_slots = len(layout.slots)
    q = torch.randn(2, query_frames * 4, heads, dim, generator=dice) * 2
    k = torch.randn(2, num_slots * S, heads, dim, generator=dice)
    bias = None
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * dim**-0.5
    if biased:
        values = torch.randn(heads, num_slots, generator=dice)
        out = torch.rand(heads, num_slots, generator=dice) < 0.4
        out[:, torch.randint(num_slots, (1,), generator=dice)] = False
        bias = KeyBias(values.masked_fill(out, -torch.inf), S)
        logits = logits + bias.per_token().double()[:, None]
    probs = logits.softmax(-1).unflatten(2, (query_frames, -1)).mean(3)
    means = logits.unflatten(2, (query_frames, -1)).mean(3).masked_fill(probs == 0, torch.nan)
    lse = logits.logsumexp(-1).float()
    bands = list(RotaryTable(dim).bands.values())
    values = reductions.frame_values(q, k, lse, layout, query_frames, True, bands, bias)
    frames, positions = key_frames(layout, 2)
    assert frames.shape == positions.shape == key_tokens(layout, 2).shape == (2, num_slots * S)
    for item in range(2):
        for column, frame in enumerate(layout.columns):
            members = frames[item] == frame
            close(values["frame_logits"][item, ..., column], means[item][..., members].nanmean(-1), 1e-5)
            close(values["frame_mass"][item, ..., column], probs[item][..., members].sum(-1), 1e-6)
            if "tokens_kept" in values:
                assert values["tokens_kept"][item, column] == members.sum()
    close(values.get("slot_logits", values["frame_logits"]), means.unflatten(-1, (-1, S)).nanmean(-1), 1e-5)
    close(values.get("slot_mass", values["frame_mass"]), probs.unflatten(-1, (-1, S)).sum(-1), 1e-6)
    assert ("slot_mass" in values) == ("tokens_kept" in values) == (not layout.is_plain)
    assert ("attended" in values) == (bias is not None and bool(bias.values.isinf().any()))
    by_band, gone = values["frame_logits_by_band"], values["frame_logits"].isnan()
    assert torch.equal(values.get("attended", ~gone), ~gone) and by_band.shape[-1] == len(bands)
    assert torch.equal(by_band.isnan(), gone[..., None].expand_as(by_band))
    if bias is None:
        close(by_band.sum(-1), values["frame_logits"], 1e-5)


# --- Rollouts under policies: captured values are those of the token matrices
CHOSEN_TOKENS = {"name": "participative", "window": 9, "sink": 2, "budget": 7, "recent": 3}
AVERAGES = {"name": "ema_sink", "window": 6, "sink": 2, "alpha": 0.9}


@pytest.mark.real_gpu
@pytest.mark.parametrize("policy", [CHOSEN_TOKENS, AVERAGES], ids=lambda policy: policy["name"])
def test_captured_values_are_those_of_the_token_matrices(policy, device):
    """Of the golden model; batch items have noise of their own."""
    dtype, atol, S = (torch.float32, 1e-5, 3) if device.type == "cpu" else (torch.bfloat16, 1e-4, 3)
    inputs = {name: x.to(device, dtype) for name, x in golden_inputs(12, batch=2).items()}
    model, policy = golden_model().to(device, dtype), make_policy(**policy)
    pipeline = CausalInferencePipeline(model, **TWO_STEPS, cache_policy=policy)
    requests = CaptureRequest(layers=[3], granularity="frame"), CaptureRequest(layers=[3])
    with ATTENTION_WEIGHT_CAPTURE.capture(*requests) as calls:
        latents = pipeline.inference(**inputs)[1]
    assert torch.equal(latents, pipeline.inference(**inputs)[1])
    by_frame, tokens = ([c for c in calls if name in c] for name in ("frame_logits", "attn_weights"))
    for call, matrix in zip(by_frame, tokens, strict=True):
        logits = matrix["attn_weights"].double().unflatten(2, (3, S)).mean(3)  # [B, H, Fq, Lk]
        probs = matrix["attn_weights"].double().softmax(-1).unflatten(2, (3, S)).mean(3)
        of_keys, _ = key_frames(call.layout, len(logits))
        if not call.layout.is_in_place:
            assert torch.equal(matrix["key_frame"], of_keys)
        for item in range(len(logits)):
            columns = torch.stack([of_keys[item] == frame for frame in call["key_frames"]], -1).double()
            close(call["frame_mass"][item], probs[item] @ columns, atol)
            close(call["frame_logits"][item], logits[item] @ (columns / columns.sum(0)), atol)
        close(call.get("slot_mass", call["frame_mass"]), probs.unflatten(-1, (-1, S)).sum(-1), atol)
