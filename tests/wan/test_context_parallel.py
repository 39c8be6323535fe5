"""diffusers' Ulysses context parallelism in two processes: what one captures, gathered in the first."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig  # imported before processes are forked
from diffusers.hooks import context_parallel
from helpers.checkpoints import sample, small_wan_pipeline
from helpers.parallel_rollouts import together
from helpers.video_transformers import made, noise, wan

from experiments import capture, intervene
from wan.capture import CaptureRequest, MapQuery
from wan.diffusers_capture import capture_diffusers
from wan.interventions import Ablate, Bias, Jitter, Knockout, Move, at
from wan.wings import ulysses

ATOL = 1e-5
QUERIES = (MapQuery(), MapQuery(1), MapQuery(2, 1))
WORDS = CaptureRequest(granularity="words", kinds=("cross",), words=(((0,), (1, 2)),))
FRAMES = CaptureRequest(granularity="frame", kinds=("self", "cross", "cross_image"))
REQUESTS = (
    FRAMES,
    CaptureRequest(granularity="frame", layers=[1], rope_bands=True, mass=False),
    CaptureRequest(granularity="key", layers=[0]),
    CaptureRequest(granularity="token", layers=[1], is_logits=False),
    CaptureRequest(granularity="map", layers=[0], heads=(1, 2), queries=QUERIES),
    CaptureRequest(granularity="map", layers=[1], heads=(0,), queries=QUERIES, kinds=("self", "cross")),
    WORDS,
    replace(WORDS, by_head=True),
)


def gather_any(x, dim, group):
    """What diffusers gathers: gloo takes tensors of one length, and has no all_gather_tensor on a GPU."""
    lengths = [torch.zeros(1, dtype=torch.long) for _ in range(group.size())]
    dist.all_gather(lengths, torch.tensor([x.shape[dim]]), group=group)
    padded = torch.zeros(int(max(lengths)), *x.movedim(dim, 0).shape[1:], dtype=x.dtype)
    padded[: x.shape[dim]] = x.movedim(dim, 0)
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    whole = torch.cat([part[: int(n)] for part, n in zip(parts, lengths, strict=True)])
    return whole.movedim(0, dim).to(x.device)


def unshard(x, dim, mesh):
    return gather_any(x, dim, mesh.get_group())


def shared(model, group, **options):
    """A model whose tokens the processes of a group share; alone without a group."""
    if group is not None and "nccl" not in dist.get_backend_config(group):
        context_parallel._all_gather_anything = gather_any
        context_parallel.EquipartitionSharder.unshard = unshard
        if model.device.type == "cpu":  # diffusers divides by the number of GPUs there, too
            torch.accelerator.device_count = lambda: 1
    if group is not None:
        options = options or {"ulysses_degree": group.size()}
        model.enable_parallelism(config=ContextParallelConfig(**options))
    return model.eval()


def run(model, arguments):
    with torch.no_grad():
        return model(**arguments | {"return_dict": False})[0]


def captured(model, arguments, *requests):
    """What comes out without a capture and with it, and its calls."""
    plain = run(model, arguments)
    with capture_diffusers(model, *requests) as calls:
        out = run(model, arguments)
    return plain, out, list(calls)


def every_model(group):
    """Heads and tokens that split evenly, tokens and heads that do not, images, and shared keys of text."""
    torch.manual_seed(0)
    uneven = {"ulysses_degree": 2, "ulysses_anything": True}
    results = []
    model, arguments = wan(num_attention_heads=4)
    results.append(captured(shared(model, group), arguments, *REQUESTS))
    model, arguments = wan()
    arguments["hidden_states"] = noise(2, 4, 3, 2, 6)
    results.append(captured(shared(model, group, **uneven), arguments, *REQUESTS))
    for name in ("wan_i2v", "ltx"):
        model, arguments = made(name)
        if "encoder_attention_mask" in arguments:
            arguments["encoder_attention_mask"] = None  # diffusers' own call fails, whose mask has all heads
        results.append(captured(shared(model, group, **uneven), arguments, FRAMES))
    return results


def test_every_quantity_of_two_processes_is_that_of_one():
    first, second = together(2, every_model)
    alone = every_model(None)
    for (plain, out, calls), (_, other, none), (_, wanted, like) in zip(first, second, alone, strict=True):
        torch.testing.assert_close(out, wanted, atol=ATOL, rtol=0)
        assert torch.equal(out, plain) and torch.equal(out, other)
        assert not none and len(calls) == len(like) > 0
        assert_same_calls(calls, like)


def assert_same_calls(calls, like, atol=ATOL):
    for call, wanted in zip(calls, like, strict=True):
        assert (call.site, call.at, call["key_frames"]) == (wanted.site, wanted.at, wanted["key_frames"])
        assert (call.q_shape, call.k_shape) == (wanted.q_shape, wanted.k_shape)
        assert (call.frames, call.beside) == (wanted.frames, wanted.beside)
        assert call.values.keys() == wanted.values.keys()
        for name, value in call.values.items():
            expected = wanted.values[name]
            if name == "word_share" and expected.shape[1] == 1:
                value = value.mean(1, keepdim=True)
            half = 2**-10 if value.dtype == torch.float16 else 0.0
            torch.testing.assert_close(value, expected, atol=atol, rtol=half, equal_nan=True)


EDITS = (
    Knockout(frames=(0,), heads=(1, 2), layers=(0,), passes="all"),
    Bias(-2.0, tokens=(1, 3), heads=(3,), passes="all"),
    Ablate("zero", layers=(1,), heads=(0, 3), passes="all"),
    Move(frames=(2,), offset=3, heads=(1,), passes="all"),
    Jitter(seed=3, layers=(1,), passes="all"),
)


def edited(group):
    torch.manual_seed(0)
    model, arguments = wan(num_attention_heads=4)
    shared(model, group)
    plain = run(model, arguments)
    results = []
    for edit in EDITS:
        with intervene(model, edit) as active:
            results.append(run(model, arguments))
        assert all(active.changed) and not torch.equal(results[-1], plain)
    with capture_diffusers(model, FRAMES) as calls, intervene(model, *EDITS):
        results.append(run(model, arguments))
    return results, list(calls)


def test_edits_of_heads_in_two_processes_are_those_of_one():
    (first, calls), (second, none) = together(2, edited)
    alone, like = edited(None)
    for out, other, wanted in zip(first, second, alone, strict=True):
        torch.testing.assert_close(out, wanted, atol=ATOL, rtol=0)
        assert torch.equal(out, other)
    assert not none
    assert_same_calls(calls, like)


def message_of(function):
    """The one line of an error, or what a function returned."""
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def refusals(group):
    """What is refused, by name; the same in all processes."""
    torch.manual_seed(0)
    frames = {"granularity": "frame"}
    messages = {}
    # 1. Other kinds of parallelism, tokens that no plan splits, heads that do not split.
    model, arguments = wan(num_attention_heads=4)
    messages["ring"] = message_of(lambda: captured_alone(shared(model, group, ring_degree=2), arguments))
    model, arguments = made("cosmos")
    messages["diffusers"] = message_of(lambda: shared(model, group))
    messages["no plan"] = message_of(lambda: captured_alone(model, arguments))
    model, arguments = wan(num_attention_heads=4)
    model._parallel_config = SimpleNamespace(context_parallel_config=None)
    messages["tensor"] = message_of(lambda: captured_alone(model, arguments))
    model, arguments = wan(num_attention_heads=3)
    messages["heads"] = message_of(lambda: captured_alone(shared(model, group), arguments))
    # 2. What needs whole tokens in one process; different captures; and none in the other.
    model, arguments = wan(num_attention_heads=4)
    shared(model, group)
    with capture(model, "resid_post"):
        messages["site"] = message_of(lambda: run(model, arguments))
    doubled = at("z", layers=(0,))
    with intervene(model, doubled, lambda z: 2 * z):
        messages["function"] = message_of(lambda: run(model, arguments))
    with intervene(model, Ablate("zero", site="mlp_out", layers=(0,), passes="all")):
        messages["edit"] = message_of(lambda: run(model, arguments))
    with capture_diffusers(model, layers=[group.rank()], **frames):
        messages["different"] = message_of(lambda: run(model, arguments))
    with capture_diffusers(model, **frames):
        messages["gradients"] = message_of(lambda: model(**arguments, return_dict=False))
    ulysses.WAIT = ulysses.timedelta(seconds=1)
    model, arguments = wan(num_attention_heads=4)
    shared(model, group)
    if group.rank() == 0:
        messages["alone"] = message_of(lambda: captured_alone(model, arguments))
    dist.barrier()
    return messages


def captured_alone(model, arguments):
    with capture_diffusers(model, granularity="frame"):
        run(model, arguments)


REFUSED = {
    "ring": "ConfigError: WanTransformer3DModel: ring attention cannot be seen, since no GPU has all keys",
    "diffusers": "ValueError: `cp_plan` must be provided",
    "no plan": r"ConfigError: CosmosTransformer3DModel: context parallelism has no plan of its tokens",
    "tensor": "ConfigError: WanTransformer3DModel: tensor parallelism cannot be seen",
    "heads": "ConfigError: 3 heads do not split over 2 GPUs: take .*ulysses_anything=True",
    "site": "ConfigError: several GPUs share the tokens of WanTransformer3DModel: .* take one GPU",
    "function": "ConfigError: several GPUs share the tokens and heads of Wan.*: .* takes one GPU",
    "edit": "ConfigError: several GPUs share the tokens and heads of Wan.*: .* takes one GPU",
    "different": "ConfigError: processes that share a transformer capture different things",
    "gradients": "ConfigError: no gradients are computed of a call that several GPUs share",
    "alone": "ConfigError: another process did not capture within 1 s",
}


def test_what_cannot_be_right_is_refused_in_one_line():
    first, second = together(2, refusals)
    assert first.keys() == REFUSED.keys() and second == {
        name: first[name] for name in first if name != "alone"
    }
    for name, message in first.items():
        assert isinstance(message, str) and len(message.splitlines()) == 1, name
        with pytest.raises(RuntimeError, match=REFUSED[name]):
            raise RuntimeError(message)


def pipeline_run(group):
    torch.manual_seed(0)
    pipe = small_wan_pipeline()
    kind = type(pipe.transformer)
    pipe.transformer = kind.from_config(dict(pipe.transformer.config) | {"num_attention_heads": 4})
    shared(pipe.transformer, group)
    if group is not None:
        streamed = message_of(lambda: capture(pipe, "x_t", stream_to="folder").__enter__())
        assert "the processes of 2 GPUs would write to one folder" in streamed
    with capture(pipe, "x_t"), capture(pipe, layers=[1], cross=True) as seen:
        sample(pipe)
    with capture(pipe, words=["circle"]) as of_words:
        sample(pipe)
    results = repr(seen), message_of(lambda: seen.atlas()["frame_mass"])
    results += (message_of(lambda: of_words.words().mean("circle")),)
    return seen.runs[0].latents, *results, seen.runs[0].common.get("gpus")


def test_a_pipeline_in_two_processes_has_its_atlas_in_the_first():
    first, second = together(2, pipeline_run)
    latents, text, mass, words, gpus = pipeline_run(None)
    for other in (first[0], second[0]):
        torch.testing.assert_close(other, latents, atol=ATOL, rtol=0)
    torch.testing.assert_close(first[2], mass, atol=ATOL, rtol=0)
    torch.testing.assert_close(first[3], words, atol=ATOL, rtol=0)
    assert first[1] == text and gpus is None and first[4] == 2 and "rank 1 of 2 GPUs" in second[3]
    assert "rank 0 has what was captured" in second[1] and "rank 1 of 2 GPUs" in second[2]
