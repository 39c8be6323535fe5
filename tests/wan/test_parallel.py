"""One rollout in several processes, by heads: the latents and the captured numbers of one process."""

import csv
import dataclasses
import gc
import weakref
from functools import cache

import pytest
import torch
from conftest import golden_model
from helpers.processes import together
from helpers.rollouts import TWO_STEPS

from wan.errors import ConfigError
from wan.exchange import WIDE, widened
from wan.gathered_calls import gather_calls
from wan.modules.attention import ATTENTION_WEIGHT_CAPTURE
from wan.modules.cache_policies import make_policy
from wan.modules.capture import CaptureRequest
from wan.modules.edits import intervene
from wan.modules.head_outputs import ReferenceMeans, record_head_outputs
from wan.modules.interventions import Ablate, Bias, Jitter, Knockout, Move, Patch
from wan.modules.key_maps import MapQuery
from wan.modules.run_in_step import RunInStep
from wan.parallel import apply_head_parallel, check_size, legal_sizes
from wan.pipeline import CausalInferencePipeline
from wan.prompt_schedule import PromptSwitch

ATOL = 1e-5
HEADS, LAYERS = 12, 5
POLICIES = {
    "full": {"name": "full"},
    "window": {"name": "window", "window": 9, "sink": 3},
    "longlive": {"name": "window", "window": 9, "sink": 3, "released": "longlive"},
    "relative": {"name": "relative", "window": 9, "sink": 3},
    "deep_sink": {"name": "deep_sink", "window": 9, "sink": 3},
    "participative": {"name": "participative", "window": 9, "sink": 3, "budget": 7, "recent": 3},
    "ema_sink": {"name": "ema_sink", "window": 9, "sink": 3},
    "two_memories": {"name": "two_memories", "window": 9, "sink": 3},
    "rolling_sink": {"name": "rolling_sink", "window": 9},
    "memory_bank": {"name": "memory_bank", "window": 9, "sink": 3, "bank": 2, "interval": 1},
    "per_head": {"name": "per_head"},
}
REQUESTS = (
    CaptureRequest(granularity="frame", kinds=("self", "cross"), layers=[1, 3], rope_bands=True),
    CaptureRequest(granularity="key", layers=[1], steps=[0]),
    CaptureRequest(
        granularity="map", layers=[2], heads=(1, 3), queries=(MapQuery(), MapQuery(4, 2)), steps=[1]
    ),
    CaptureRequest(granularity="map", layers=[4], kinds=("cross",), num_words=5, blocks=[2], steps=[0]),
    CaptureRequest(granularity="token", layers=[2], blocks=[1], steps=[2], is_logits=False),
)


def policy_of(name: str, folder):
    settings = dict(POLICIES[name])
    if name == "per_head":  # a class lives in the first heads alone, another in one layer alone
        labels = [["a" if head < 4 else "b" for head in range(HEADS)] for _ in range(LAYERS)]
        labels[3] = ["c" if head % 2 else "a" for head in range(HEADS)]
        if not (folder / "labels.csv").exists():  # by the parent of all processes
            with (folder / "labels.csv").open("w", newline="") as file:
                csv.writer(file).writerows(labels)
        classes = {"a": "participative", "b": "full", "c": "memory_bank"}
        settings |= {"file": str(folder / "labels.csv")}
        settings |= {"policies": {label: POLICIES[policy] for label, policy in classes.items()}}
    return make_policy(**settings)


def roll_out(model, policy=None, *requests, num_frames=12, seed=1, batch=1, gathers=True, **more):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(batch, num_frames, 16, 4, 6, generator=generator)
    renoise = torch.randn(1, *noise.shape, generator=generator)
    embeds = torch.randn(batch, 32, 64, generator=generator)
    pipeline = CausalInferencePipeline(model, cache_policy=policy, **TWO_STEPS)
    with ATTENTION_WEIGHT_CAPTURE.capture(*(requests or [CaptureRequest(layers=[])])) as calls:
        latents = pipeline.inference(noise, prompt_embeds=embeds, renoise=renoise, **more)[1]
    return latents, gather_calls(model, calls) if gathers else []


def parallel_model(group):
    model = golden_model()
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


def every_policy(group, folder):
    """Latents and calls under each policy; token and key captures where slots are frames."""
    found = {}
    model = parallel_model(group)
    for name in POLICIES:
        requests = REQUESTS[: 1 if name in ("participative", "per_head") else None]
        if name == "per_head":
            requests = [dataclasses.replace(requests[0], rope_bands=False, kinds=("self",))]
        found[name] = stripped(
            roll_out(model, policy_of(name, folder), *requests, batch=1 + (name == "window"))
        )
    return found


def stripped(run):
    """Layouts and sites that can travel between processes."""
    latents, calls = run
    return latents, [
        dataclasses.replace(c, site=dataclasses.replace(c.site, shard=None),
                            layout=c.layout and dataclasses.replace(c.layout, rollout=None)) for c in calls
    ]  # fmt: skip


@pytest.mark.beside
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_policy(size, tmp_path):
    expected = one_process("every_policy", tmp_path)
    first, *others = together(size, lambda group: every_policy(group, tmp_path))
    for name in POLICIES:
        assert_same(first[name], expected[name])
        for other in others:
            assert torch.equal(other[name][0], first[name][0]) and not other[name][1]


@cache
def one_process(what, folder=None):
    return globals()[what](None, folder) if folder else globals()[what](None)


def edited_runs(group, folder):
    """Latents and calls under edits of some heads, of means, of another run, of text."""
    model, frames = parallel_model(group), CaptureRequest(granularity="frame", layers=[1, 3])
    with record_head_outputs() as outputs:
        roll_out(model)
    means = ReferenceMeans.over([outputs])
    frame_mean = Ablate("frame_mean", layers=[3], heads=[0, 7], passes="denoise")
    mean = Ablate("mean", layers=[1], heads=[5], passes="all")
    swap = Patch("kv", source={"seed": 5}, layers=[2], heads=[3, 11], passes="denoise")
    cases = {
        "knockout": [Knockout(frames="first", layers=[1, 3], heads=[1, 2, 10], passes="all")],
        "bias": [Bias(-2.0, frames="past", layers=[1], heads=[11], passes="denoise"), Jitter(seed=3)],
        "move": [Move(frames=[0], offset=3, heads=[0, 4, 8], passes="all"), frame_mean],
        "text": [Knockout(tokens=[0, 5], heads=[6], passes="denoise"), mean],
        "step": [swap],
        "per_head": [Knockout(frames="past", heads=[1, 10], passes="denoise"), swap],
    }
    by_class = policy_of("per_head", folder)
    by_class.policies["a"], by_class.policies["c"] = make_policy("window", window=6), make_policy("full")
    found = {}
    for name, edits in cases.items():
        policy = by_class if name == "per_head" else None
        with RunInStep(lambda p=policy: roll_out(model, p, seed=5, gathers=False)) as other:
            data = {frame_mean: outputs, mean: means, swap: other}
            with intervene(*edits, data={edit: data[edit] for edit in edits if edit in data}):
                found[name] = stripped(roll_out(model, policy, frames, num_frames=9))
    return found, outputs.norm_per_head()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.beside)])
def test_edits_of_some_heads(size, tmp_path):
    expected, norms = one_process("edited_runs", tmp_path)
    (first, first_norms), *_ = together(size, lambda group: edited_runs(group, tmp_path))
    for name, run in expected.items():
        assert_same(first[name], run)
    torch.testing.assert_close(first_norms, norms, rtol=0, atol=ATOL)


def looked_at(group):
    model = parallel_model(group)
    return roll_out(model)[0], roll_out(model, None, *REQUESTS)[0]


def test_looking_changes_no_bit():
    for plain, seen in together(2, looked_at):
        assert torch.equal(plain, seen)


def outlived(group):
    """Whether a cache is there after its last use, as long as nobody collects garbage."""
    gc.disable()
    model = parallel_model(group)
    cache = model.new_kv_cache(1, 3, 4, 6)
    cache.advance(range(3), model.head_shard.of_text(model.text_keys_values(torch.zeros(1, 3, 64))))
    cache = weakref.ref(cache)
    return cache() is not None


def test_a_cache_goes_with_its_rollout():
    assert not any(together(2, outlived))


def switched(group):
    text = torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(9))
    switch = [PromptSwitch(9, how="recache", prompt_embeds=text)]
    return roll_out(parallel_model(group), make_policy("window", window=9, sink=3), prompt_schedule=switch)[0]


def test_a_recache():
    torch.testing.assert_close(together(3, switched)[0], switched(None), rtol=0, atol=ATOL)


def test_sizes_that_split():
    assert legal_sizes(12) == [1, 2, 3, 4, 6, 12] and legal_sizes(40, [4680, 1560])[-1] == 40
    assert legal_sizes(12, [16, 48]) == [1, 2, 4]
    check_size(4, "m", 12, [48])
    said = "--gpus 8 does not split m: its 12 heads and blocks of 16 or 48 tokens go on 1, 2 or 4 GPUs"
    with pytest.raises(ConfigError, match=said):
        check_size(8, "m", 12, [48, 16])


def wrong_calls(group):
    model = golden_model()
    if group.size() == 5:
        return [refused(lambda: apply_head_parallel(model, group))]
    apply_head_parallel(model, group)
    text = model.text_keys_values(torch.zeros(1, 3, 64))
    calls = ((1, torch.zeros(1)), (2, torch.zeros(1, 2)))
    return [refused(lambda f=f, t=t: model(torch.zeros(1, f, 16, 4, 6), t, text)) for f, t in calls]


def refused(function) -> str:
    with pytest.raises(ConfigError) as raised:
        function()
    return str(raised.value)


def test_calls_that_do_not_split():
    (heads,), *_ = together(5, wrong_calls)
    assert heads == "12 heads do not split over 5 GPUs; 1, 2, 3, 4, 6 or 12 would do"
    (tokens, training), *_ = together(4, wrong_calls)
    assert tokens == "a call of 6 tokens does not split over 4 GPUs"
    assert training == "several GPUs make rollouts: no mask, and one timestep for all frames of a call"


SHAPE = (2, 6, 3, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_wide_elements_are_the_same_bits(dtype):
    source = torch.randn(SHAPE).to(dtype).transpose(0, 1)
    source[0, 0, 0, :2] = torch.tensor([float("nan"), -0.0])
    target = torch.zeros(6, 2, 5, 8, dtype=dtype)[:, :, 1:4]
    wide = widened(target, source)
    assert [x.dtype for x in wide] == [WIDE, WIDE]
    wide[0].copy_(wide[1])
    as_bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(target.contiguous().view(as_bits), source.contiguous().view(as_bits))


@pytest.mark.parametrize(
    "source",
    [
        torch.randn(2, 6, 3, 10)[..., 1:9],  # starts inside an element
        torch.randn(2, 6, 3, 9)[..., :8],  # rows do, from the second on
        torch.randn(2, 6, 8, 3).transpose(2, 3),  # numbers of a row are apart
        torch.randn(SHAPE, dtype=torch.float64),  # other numbers to write
        torch.randn(SHAPE, requires_grad=True),
        torch.randn(2, 6, 3, 3),  # rows are no whole elements
    ],
    ids=["offset", "stride", "transposed", "dtype", "gradients", "short"],
)
def test_other_memory_is_not_widened(source):
    target = torch.zeros(SHAPE)
    found = widened(target, source)
    assert found[0] is target and found[1] is source
