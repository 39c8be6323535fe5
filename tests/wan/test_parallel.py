"""One rollout in several processes, by heads: the latents and the captured numbers of one process."""

import csv
import os
from dataclasses import replace

import pytest
import torch
from helpers.parallel_rollouts import HEADS, LAYERS, REQUESTS, SIZES, roll_out, small_model, together

from wan import interventions
from wan.cache import PromptSwitch
from wan.capture import CaptureRequest
from wan.errors import ConfigError
from wan.interventions import Ablate, Bias, Jitter, Knockout, Move, Patch, RunInStep, intervene
from wan.model import CausalWanModel
from wan.policies import make_policy
from wan.wings import parallel
from wan.wings.parallel import apply_head_parallel, check_size, legal_sizes

ATOL = 1e-5
POLICIES = {
    "window": {"name": "window", "window": 6, "sink": 2},
    "relative": {"name": "relative", "window": 6, "sink": 2},
    "participative": {"name": "participative", "window": 6, "sink": 1, "budget": 5, "recent": 3},
    "ema_sink": {"name": "ema_sink", "window": 6, "sink": 2},
    "memory_bank": {"name": "memory_bank", "window": 6, "sink": 2, "bank": 2, "interval": 1},
    "per_head": {"name": "per_head"},
    "dummy_forcing": {"name": "dummy_forcing", "num_dummy": 6, "row_seed": 2},
    "forcing_kv": {"name": "forcing_kv", "heads": [[n % 3 == 0 for n in range(HEADS)]] * LAYERS},
    "triattention": {"name": "triattention", "budget_tokens": 40, "sink": 1},
}
LONG = ("memory_bank", "per_head", "triattention")  # what they choose is seen in the fourth block


def policy_of(name: str, folder):
    settings = dict(POLICIES[name])
    if name == "per_head":  # a class lives in the first heads alone, another in one layer alone
        labels = [["a", "a", "b", "b", "b", "b"], ["a", "c", "a", "c", "a", "c"]]
        path = folder / f"labels_{os.getpid()}.csv"  # no process reads what another one is writing
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(labels)
        classes = {"a": "participative", "b": "window", "c": "memory_bank"}
        settings |= {"file": str(path)}
        settings |= {"policies": {label: POLICIES[policy] for label, policy in classes.items()}}
    if name == "triattention":
        random = torch.Generator().manual_seed(4)
        means = torch.randn(LAYERS, HEADS, 4, generator=random, dtype=torch.complex64)
        settings["statistics"] = {"q_mean": means, "q_abs_mean": means.abs() + 0.5}
    return make_policy(**settings)


def every_policy(model, folder):
    """Latents and calls under each policy; token and key captures where slots are frames."""
    found = {}
    for name in POLICIES:
        policy = policy_of(name, folder)
        requests = REQUESTS if name in ("window", "memory_bank") else REQUESTS[:1]
        if policy.by_heads:
            requests = [replace(requests[0], rope_bands=False, kinds=("self",))]
        size = {"frames": 12 if name in LONG else 9, "batch": 1 + (name == "window")}
        found[name] = stripped(roll_out(model, policy, *requests, **size))
    return found


def stripped(run):
    """Layouts and sites that can travel between processes."""
    return run[0], [replace(call, site=replace(call.site, shard=None)) for call in run[1]]


def edited_runs(model, folder):
    """Latents and calls under edits of some heads, of means, of another run, of text."""
    with interventions.record_head_outputs() as outputs:
        roll_out(model)
    frame_mean = Ablate("frame_mean", layers=[1], heads=[0, 4], passes="denoise")
    mean = Ablate("mean", layers=[0], heads=[5], passes="all")
    swap = Patch("kv", source={"seed": 5}, layers=[1], heads=[3, 5], passes="denoise")
    of_keys = [Knockout(frames="first", heads=[1, 2, 5], passes="all"), Jitter(seed=3)]
    of_keys += [Bias(-2.0, frames="past", layers=[1], heads=[5], passes="denoise")]
    of_keys += [Move(frames=[0], offset=3, heads=[0, 2, 4], passes="all")]
    text = Knockout(tokens=[0, 5], heads=[4], passes="denoise")
    by_class = policy_of("per_head", folder)
    by_class.policies["a"], by_class.policies["c"] = make_policy("window", window=6), make_policy("full")
    found = {}
    for policy, edits in (
        (None, [*of_keys, frame_mean, text, mean, swap]),
        (by_class, [Knockout(frames="past", heads=[1, 5], passes="denoise"), swap]),
    ):
        with RunInStep(lambda p=policy: roll_out(model, p, seed=5, gathers=False)) as other:
            data = {frame_mean: outputs, mean: interventions.ReferenceMeans.over([outputs]), swap: other}
            with intervene(*edits, data={edit: data[edit] for edit in edits if edit in data}) as session:
                run = roll_out(model, policy, CaptureRequest(granularity="frame"), frames=9)
        assert all(session.changed)
        found["edits" if policy is None else "per_head"] = stripped(run)
    return found, torch.cat([norms.flatten() for norms in outputs.norms.values()])


def parallel_model(group):
    model = small_model()
    if group is not None:
        apply_head_parallel(model, group)
    return model


def assert_same(found, expected):
    (latents, calls), (wanted, wanted_calls) = found, expected
    torch.testing.assert_close(latents, wanted, rtol=0, atol=ATOL)
    assert len(calls) == len(wanted_calls)
    for call, other in zip(calls, wanted_calls, strict=True):
        assert (call.site, call.at, call.q_shape, call.k_shape) == (
            other.site, other.at, other.q_shape, other.k_shape)  # fmt: skip
        assert call.values.keys() == other.values.keys() and call["key_frames"] == other["key_frames"]
        for name, values in call.values.items():
            half = 2**-10 if values.dtype == torch.float16 else 0.0  # two roundings of nearly one number
            torch.testing.assert_close(values, other.values[name], rtol=half, atol=ATOL, equal_nan=True)


def test_every_policy(tmp_path):
    expected = every_policy(small_model(), tmp_path)
    first, *others = together(2, lambda group: every_policy(parallel_model(group), tmp_path))
    for name in POLICIES:
        assert_same(first[name], expected[name])
        for other in others:
            assert torch.equal(other[name][0], first[name][0]) and not other[name][1]


def test_edits_of_some_heads(tmp_path):
    expected, norms = edited_runs(small_model(), tmp_path)
    (first, first_norms), *_ = together(2, lambda group: edited_runs(parallel_model(group), tmp_path))
    for name, run in expected.items():
        assert_same(first[name], run)
    torch.testing.assert_close(first_norms, norms, rtol=0, atol=ATOL)


def test_processes_that_have_less_of_a_call_send_it_with_the_others(monkeypatch):
    monkeypatch.setattr(parallel, "BYTES_AT_ONCE", 200)
    one_head = CaptureRequest(granularity="map", heads=(1,))  # which the first process has
    expected = stripped(roll_out(small_model(), None, one_head, frames=6))
    first, _ = together(2, lambda group: stripped(roll_out(parallel_model(group), None, one_head, frames=6)))
    assert len(expected[1]) > 10
    assert_same(first, expected)


def looked_at_and_switched(group):
    model, window = parallel_model(group), make_policy("window", window=9, sink=3)
    text = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(9))
    switch = {"prompt_schedule": [PromptSwitch(9, how="recache", prompt_embeds=text)]}
    return *(roll_out(model, None, *seen)[0] for seen in ((), REQUESTS)), roll_out(model, window, **switch)[0]


def test_looking_changes_no_bit_and_a_recache_is_that_of_one_process():
    *_, expected = looked_at_and_switched(None)
    for plain, seen, switched in together(3, looked_at_and_switched):
        assert torch.equal(plain, seen)
        torch.testing.assert_close(switched, expected, rtol=0, atol=ATOL)


def test_sizes_and_calls_that_do_not_split():
    assert legal_sizes(12) == [1, 2, 3, 4, 6, 12] and legal_sizes(12, [16, 48]) == [1, 2, 4]
    check_size(4, "m", 12, [48])
    said = "--gpus 8 does not split m: its 12 heads and blocks of 16 or 48 tokens go on 1 or 2 or 4 GPUs"
    with pytest.raises(ConfigError, match=said):
        check_size(8, "m", 12, [48, 16])
    together(2, wrong_calls)


def wrong_calls(group):
    with pytest.raises(ConfigError, match="--gpus 2 does not split the model: its 3 heads go on 1 or 3 GPUs"):
        apply_head_parallel(CausalWanModel(**SIZES | {"num_heads": 3}), group)
    model = parallel_model(group)
    text = model.text_keys_values(torch.zeros(1, 3, 16))
    with pytest.raises(ConfigError, match="a call of 1 tokens does not split over 2 GPUs"):
        model(torch.zeros(1, 1, 16, 2, 2), torch.zeros(1), text)
    with pytest.raises(ConfigError, match="no mask, and one timestep for all frames of a call"):
        model(torch.zeros(1, 2, 16, 4, 6), torch.zeros(1, 2), text)
