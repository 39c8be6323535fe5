"""Kernels over segments of unequal length, against float64: interpreted, or run where there is a GPU."""

import math
from itertools import pairwise

import pytest
import torch
from conftest import golden_model
from helpers.kernels import drawn, require_triton, where
from helpers.pretended_gpu import pretended_gpu
from helpers.rollouts import TWO_STEPS

from wan import keys as host_copies
from wan import reductions
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.key_means import KeyMeans
from wan.keys import CHOSEN, ChosenTokens, KeyLayout, Slot
from wan.pipeline import CausalInferencePipeline
from wan.policies import make_policy

require_triton()


@where
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["bounds of all", "bounds of each item"])
def test_mean_keys_of_runs(place, dtype, shared):
    """Of keys that lie in a cache; some runs are empty, one is longer than a tile."""
    from wan.kernels import mass as segment_kernel

    edges = [[20, 20, 21, 150, 150, 163], [20, 64, 64, 84, 163, 163]][: 1 if shared else 2]
    bounds = torch.tensor(edges, dtype=torch.int32, device=place)
    cache, out = drawn(2, 200, 3, 24).to(place, dtype), torch.full((2, 9, 3, 24), 7.0, device=place)
    segment_kernel.run_means(cache[:, 20:163], bounds, 20, out[:, 2:7])
    for item, row in enumerate(edges * (2 if shared else 1)):
        expected = [cache[item, a:b].double().sum(0) / max(1, b - a) for a, b in pairwise(row)]
        torch.testing.assert_close(out[item, 2:7].double(), torch.stack(expected), atol=1e-6, rtol=1e-6)
    assert (out[:, :2] == 7).all() and (out[:, 7:] == 7).all()


@where
@pytest.mark.parametrize(("before", "after"), [(2, 1), (0, 2), (3, 0), (0, 0)])
def test_masses_of_segments(place, before, after, monkeypatch):
    """Whole slots are means over queries, runs are sums over tokens, more than are read at once."""
    from wan.kernels import mass as segment_kernel

    monkeypatch.setattr(segment_kernel, "SUMMED", 16)
    S, whole = 40, drawn(2, 3, before + after, 2 * 18).abs().to(place)
    tokens = drawn(2, 3, 2, 80).abs().to(place)
    first, end = before * S, before * S + 80
    runs = torch.tensor([[0, 0, 33, 33, 80], [0, 1, 2, 79, 80]]) + first
    around = [torch.arange(n + 1) * S + start for n, start in ((before, 0), (after, end))]
    bounds = torch.cat([around[0].expand(2, -1)[:, :-1], runs, around[1].expand(2, -1)[:, 1:]], 1).int()
    means = whole.double().unflatten(3, (2, -1)).mean(4).mT
    at = range(before, before + 4)
    found = segment_kernel.segment_sums(whole, tokens, bounds.to(place), at, first)
    by_slot = torch.cat(
        [means[..., :before], means.new_full((2, 3, 2, 2), 7), means[..., before:]], -1
    ).float()
    again = segment_kernel.segment_sums(by_slot.mT, tokens, bounds.to(place), at, first)
    torch.testing.assert_close(
        found, again, atol=1e-6, rtol=1e-6
    )  # slots that the runs are in are passed over
    for item, row in enumerate((runs - first).tolist()):
        sums = [tokens[item, ..., a:b].double().sum(-1) for a, b in pairwise(row)]
        expected = torch.cat(
            [means[item, ..., :before], torch.stack(sums, -1), means[item, ..., before:]], -1
        )
        torch.testing.assert_close(found[item].double(), expected, atol=1e-6, rtol=1e-6)


@where
@pytest.mark.parametrize("runs", [range(1, 5), range(1, 1)], ids=["runs", "slots alone"])
def test_whole_slots_are_taken_from_what_attention_kept(place, runs, monkeypatch):
    """Sums and maxima of the logits from each slot on, instead of another walk over their keys."""
    S, slots = 16, 5
    q, k = (
        drawn(2, n, 3, 32).to(place, torch.bfloat16 if place == "cuda" else None) for n in (12, S * slots)
    )
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * 32**-0.5
    rest = [logits[..., start:] / math.log(2) for start in range(0, S * slots, S)]
    maxima = [x.amax(-1) for x in rest]
    sums = [(x - maximum[..., None]).exp2().sum(-1) for x, maximum in zip(rest, maxima, strict=True)]
    tails = torch.stack([torch.stack(x, 2) for x in (sums, maxima)]).float()
    inner = [S, S + 1, S + 9, S + 9] if runs else []  # of two slots
    edges = [0, *inner, *range(3 * S if runs else S, S * slots + 1, S)]
    bounds = torch.tensor([edges], dtype=torch.int32, device=place)
    monkeypatch.setattr(reductions, "kernels_take", lambda q: True)
    found = reductions.segment_mass(q, k, logits.logsumexp(-1).float(), 3, bounds, runs, S, tails)
    by_token = logits.softmax(-1).unflatten(2, (3, -1)).mean(3)
    expected = torch.stack([by_token[..., a:b].sum(-1) for a, b in pairwise(edges)], -1)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)


@where
@pytest.mark.parametrize("mass", [True, False])
@pytest.mark.parametrize("items", [1, 2])
def test_values_by_frame_and_by_slot(place, mass, items):
    """Products with four matrices at once; a mean over no token stays NaN, and is nobody else's."""
    from wan.kernels import mass as segment_kernel

    logits, masses = drawn(2, 3, 2, 70).to(place), drawn(2, 3, 2, 70)[..., :].abs().to(place)
    means, sums = ([drawn(items, 1, 70, n).to(place) for n in (37, 5)] for _ in range(2))
    means[1][..., 3] = torch.nan
    found = segment_kernel.gathered(logits, masses if mass else None, means, sums)
    assert found.keys() == ({"logits", "mass"} if mass else {"logits"})
    wanted = {"logits": [logits.double() @ x.double() for x in means]}
    wanted["mass"] = [masses.double() @ x.double() for x in sums]
    for name, values in found.items():
        for value, expected in zip(values, wanted[name], strict=True):
            torch.testing.assert_close(value.double(), expected, atol=1e-5, rtol=0, equal_nan=True)


@where
@torch.no_grad()
def test_a_rollout_that_chooses_tokens(place, monkeypatch):
    """Captured with the kernels and without."""
    policy = make_policy(name="participative", window=9, sink=2, budget=7, recent=3)
    dtype, atol = (torch.float32, 1e-5) if place == "cpu" else (torch.bfloat16, 1e-4)
    model = golden_model().to(place, dtype)
    noise, text = drawn(2, 15, 16, 4, 6).to(place, dtype), drawn(2, 32, 64).to(place, dtype)
    pipeline = CausalInferencePipeline(model, **TWO_STEPS, cache_policy=policy)
    found = []
    for kernels in (True, False):
        monkeypatch.setattr(reductions, "kernels_take", lambda q, kernels=kernels: kernels)
        with ATTENTION_WEIGHT_CAPTURE.capture(
            granularity="frame", layers=[1], blocks=[3, 4], steps=[0, 1]
        ) as calls:
            pipeline.inference(noise, prompt_embeds=text, renoise=noise[None])
        found.append(calls)
    assert any(call.layout.chosen is not None for call in calls)
    for call, expected in zip(*found, strict=True):
        for name, values in expected.values.items():
            torch.testing.assert_close(call[name], values, atol=atol, rtol=1e-5, equal_nan=True)
        for kind in ("frame_mass", "slot_mass") if call.layout.chosen else ():
            torch.testing.assert_close(
                call[kind].sum(-1), torch.ones(call[kind].shape[:-1]), atol=atol, rtol=0
            )


def test_mean_keys_of_chosen_tokens_stay_as_long_as_the_choice():
    """What lies before what changed is not computed again; another choice is."""
    S, rollout, means = 3, object(), KeyMeans()
    rows = torch.zeros(3, 1, 6, dtype=torch.long)
    slots = [Slot(0, 0), Slot(CHOSEN, 1), Slot(CHOSEN, 2), Slot(8, 3)]

    def of(k, version, unchanged, frames):
        chosen = choices.setdefault(frames, ChosenTokens(range(1, 3), torch.tensor([frames]), *rows))
        own = range(len(slots) - 1, len(slots))
        layout = KeyLayout(
            tuple(slots), S, own, rollout=rollout, version=version, unchanged=unchanged, chosen=chosen
        )
        return means.of("layer", layout, k).clone()

    choices, first, k = {}, (4, 4, 4, 4, 5, 5), drawn(1, 12, 2, 4)
    expected = [k[:, a:b].mean(1) for a, b in ((0, 3), (3, 6), (6, 7), (7, 9), (9, 12))]
    torch.testing.assert_close(of(k, 1, 0, first), torch.stack(expected, 1))
    slots.append(Slot(9, 4))
    k = torch.cat([k[:, :9] + 1, drawn(1, 6, 2, 4)], 1)  # nobody looks at what is settled
    torch.testing.assert_close(of(k, 2, 4, first)[:, :4], torch.stack(expected[:4], 1))
    found = of(k, 3, 1, (4, 5, 5, 5, 5, 5))
    assert found.shape[1] == 6  # runs end where slots do
    expected = [expected[0]] + [k[:, a:b].mean(1) for a, b in ((3, 4), (4, 6), (6, 9), (9, 12), (12, 15))]
    torch.testing.assert_close(found, torch.stack(expected, 1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_several_tensors_go_by_one_copy(monkeypatch):
    given = [
        torch.tensor([[1.5, torch.nan, 2], [3, 4, 5]]),
        torch.arange(3, dtype=torch.int32),
        torch.zeros(0, 2),
    ]
    with pretended_gpu() as gpu:
        sent, send = [], host_copies.send
        monkeypatch.setattr(host_copies, "send", lambda x, device: sent.append(x) or send(x, device))
        found = host_copies.send_together(given, gpu)
        assert len(sent) == 1 and all(x.is_cuda and x.storage_offset() % 4 == 0 for x in found)
        for x, expected in zip(found, given, strict=True):
            torch.testing.assert_close(x.cpu(), expected, atol=0, rtol=0, equal_nan=True)
