"""Maps over key tokens against the token matrix: of calls, rollouts, policies, edits, hostile requests."""

import pytest
import torch
from helpers.rollouts import MODEL_LAYERS, rollout, tiny_pipeline

from wan import reductions
from wan.attention import ATTENTION_WEIGHT_CAPTURE, attention_with_lse
from wan.capture import CaptureRequest, MapQuery
from wan.interventions import Bias, Knockout, intervene
from wan.keys import key_frames, key_tokens
from wan.policies import make_policy

S = 5  # tokens of a frame of the tiny rollout
HALF = 2**-10  # of float16's rounding, with a little room: relative


def close(half: torch.Tensor, expected: torch.Tensor) -> None:
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.double(), expected.double(), atol=2e-5, rtol=HALF, equal_nan=True)


@pytest.mark.parametrize("size", [(3, 16, 5, 6), (2, 128, 70, 300), (3, 24, 130, 129)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_means_over_queries_are_those_of_the_matrix(size, bias, device, monkeypatch):
    heads, dim, len_q, len_k = size
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = (torch.randn(2, len_q, heads, dim, generator=generator) * 2).to(device, dtype)
    k = (torch.randn(2, len_k, heads, dim, generator=generator) + 0.5).to(device, dtype)
    lse = attention_with_lse(*(x.transpose(1, 2) for x in (q, k, k)))[1]
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * dim**-0.5
    added = None
    if bias:
        added = torch.randn(heads, len_k, generator=generator).to(device)
        added[:, 1::3] = -torch.inf
        logits = logits + added[:, None]
        lse = logits.logsumexp(-1).float()
    monkeypatch.setattr(reductions, "CHUNK_ELEMENTS", 7 * heads * len_k)  # a few rows at a time
    found, mass = reductions.key_token_means(q, k, lse, added)
    expected = logits.mean(2).masked_fill(logits.mean(2) == -torch.inf, torch.nan)
    edge = logits[logits.isfinite()].abs().max()
    exact = 1e-5 if dtype == torch.float32 else 1e-4  # a bfloat16 call's log-sum-exp has its own error
    torch.testing.assert_close(found.double(), expected, atol=1e-5 * edge.item(), rtol=0, equal_nan=True)
    torch.testing.assert_close(mass.double(), logits.softmax(-1).mean(2), atol=exact, rtol=0)


QUERIES = (MapQuery(), MapQuery(4), MapQuery(4, 3), MapQuery(5, 0), MapQuery(1, 2), MapQuery(4, 1))


def expected_rows(tokens, queries, first: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Rows of a token matrix [B, H, Lq, Lk] of logits, as maps define them; first: the first query frame."""
    logits, mass = tokens.double(), tokens.double().nan_to_num(nan=-torch.inf).softmax(-1)
    rows = []
    for frame, token in queries:
        start = 0 if frame < 0 else (frame - first) * S + max(token, 0)
        some = slice(start, None if frame < 0 else start + (S if token < 0 else 1))
        rows.append((logits[:, :, some].mean(2), mass[:, :, some].mean(2) * S))
    return tuple(list(each) for each in zip(*rows, strict=True))


def captured(pipeline, *requests, num_frames=9):
    with ATTENTION_WEIGHT_CAPTURE.capture(*requests) as calls:
        latents = rollout(pipeline, num_frames)
    return latents, calls


def test_a_rollouts_maps_are_rows_of_its_matrices():
    of_maps = CaptureRequest(layers=[1, 3], granularity="map", queries=QUERIES, heads=(2, 0))
    of_tokens = CaptureRequest(layers=[1, 3], blocks=[0, 1, 2])
    latents, calls = captured(tiny_pipeline(), of_maps, of_tokens)
    assert torch.equal(latents, rollout(tiny_pipeline(), 9))
    for maps, tokens in zip(calls[::2], calls[1::2], strict=True):
        here = [query for query in QUERIES if query.frame in (-1, *maps["query_frames"])]
        assert maps["map_queries"].tolist() == [list(query) for query in here]
        matrix = tokens["token_logits"][:, [2, 0]]
        logits, mass = expected_rows(matrix, here, maps["query_frames"][0])
        close(maps["map_logits"], torch.stack(logits, 2))
        close(maps["map_mass"], torch.stack(mass, 2))
    assert {call["block"] for call in calls[::2]} == {0, 1, 2}


def test_only_calls_with_the_query_are_kept():
    request = CaptureRequest(layers=[0], granularity="map", queries=((4, 2),), steps=[0])
    (call,) = captured(tiny_pipeline(), request)[1]
    assert call["block"] == 1 and call["map_mass"].shape == (1, 3, 1, 6 * S)


@pytest.mark.parametrize(
    "policy",
    [
        {"name": "window", "window": 6, "sink": 1},
        {"name": "participative", "window": 9, "sink": 2, "budget": 7, "recent": 3},
        {"name": "two_memories", "window": 9, "sink": 2},
        {"name": "rolling_sink", "window": 9},
    ],
    ids=lambda policy: policy["name"],
)
def test_under_policies_every_key_is_known(policy):
    pipeline = tiny_pipeline()
    pipeline.cache_policy = make_policy(**policy)
    queries = (MapQuery(), MapQuery(16, 4))
    maps, tokens = captured(
        pipeline,
        CaptureRequest(layers=[2], granularity="map", queries=queries, blocks=[5], steps=[0, 4]),
        CaptureRequest(layers=[2], blocks=[5], steps=[0, 4]),
        num_frames=18,
    )[1][:2]
    logits, mass = expected_rows(tokens["token_logits"], queries, 15)
    close(maps["map_logits"], torch.stack(logits, 2))
    close(maps["map_mass"], torch.stack(mass, 2))
    frames, _ = key_frames(maps.layout, 1)
    if "key_frame" in tokens:
        assert torch.equal(frames, tokens["key_frame"])
    places = key_tokens(maps.layout, 1)
    assert places.shape == frames.shape and places.min() == 0 and places.max() == S - 1
    if maps.layout.chosen is not None:  # a token that stays keeps its place in its frame
        first = maps.layout.chosen.slots.start * S
        assert torch.equal(places[:, first:][:, : 2 * S], maps.layout.chosen.indices[:, : 2 * S])
    else:
        assert torch.equal(places[0].view(-1, S), torch.arange(S).expand(len(maps.layout.slots), S))


@pytest.mark.parametrize("edit", [Knockout, Bias])
def test_maps_of_an_edited_call(edit):
    b = {} if edit is Knockout else {"b": 1.5}
    change = edit(frames=[0, 2], layers=[1], heads=[2], passes="denoise", **b)
    queries = (MapQuery(), MapQuery(3, 1))
    of_maps = CaptureRequest(
        layers=[1], granularity="map", queries=queries, heads=(0, 2), blocks=[1], steps=[0]
    )
    of_tokens = CaptureRequest(layers=[1], blocks=[1], steps=[0])
    with intervene(change):
        maps, tokens = captured(tiny_pipeline(), of_maps, of_tokens)[1]
    matrix = tokens["token_logits"][:, [0, 2]]
    logits, mass = expected_rows(matrix, queries, 3)
    close(maps["map_logits"], torch.stack(logits, 2))
    close(maps["map_mass"], torch.stack(mass, 2))
    left_out = maps["map_logits"].isnan()
    assert left_out.any() == (edit is Knockout) and not left_out[:, 0].any()
    if edit is Knockout:
        assert torch.equal(~maps["attended"].expand_as(left_out), left_out)
        assert (maps["map_mass"][left_out] == 0).all()


def test_cross_attention_by_word_and_query_token():
    of_maps = CaptureRequest(layers=[1], kinds=("cross",), granularity="map", num_words=2, heads=(1,))
    of_frames = CaptureRequest(layers=[1], kinds=("cross",), granularity="frame")
    _, calls = captured(tiny_pipeline(), of_maps, of_frames, num_frames=6)
    for words, frames in zip(calls[::2], calls[1::2], strict=True):
        assert words["word_map"].shape == (1, 1, 3 * S, 2) and not words.is_logits
        by_frame = words["word_map"].float().unflatten(2, (3, S)).mean(3)
        torch.testing.assert_close(by_frame, frames["cross_mass"][:, 1:2, :, :2], atol=1e-4, rtol=HALF)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"queries": ()}, "needs a query"),
        ({"queries": ((-1, 3),)}, r"\(-1, 3\)"),
        ({"queries": ((-2, -1),)}, r"\(-2, -1\)"),
        ({"queries": ((1, 2), (1, 2))}, "named twice"),
        ({"granularity": "frame", "heads": (1,)}, "granularity 'map'"),
    ],
    ids=str,
)
def test_requests_that_no_call_can_answer(fields, message):
    with pytest.raises(ValueError, match=message):
        CaptureRequest(**{"granularity": "map"} | fields)


@pytest.mark.parametrize("fields", [{"heads": (3,)}, {"queries": ((0, S),)}], ids=str)
def test_heads_and_tokens_that_a_call_does_not_have(fields):
    request = CaptureRequest(granularity="map", layers=[MODEL_LAYERS - 1], **fields)
    with pytest.raises(ValueError, match=r"is not in 0\.\."):
        captured(tiny_pipeline(), request)
