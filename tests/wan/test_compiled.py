"""Transformers under torch.compile: they run uncompiled while they are watched, and are compiled afterwards.

The backends count what they are asked to compile, and compute what they get.
"""

import copy
import warnings

import pytest
import torch
from helpers.checkpoints import sample, small_wan_pipeline
from helpers.video_transformers import made

from experiments import Atlas, capture, intervene, load
from wan import compiled
from wan.diffusers_capture import capture_diffusers
from wan.errors import ConfigError
from wan.identity import live_weights
from wan.interventions import Knockout, at

OF_FIRST = Knockout(frames=(0,), layers=(0,), passes="all")


class Counting:
    """A backend of torch.compile that counts its graphs."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


def compile_forward(model, **options):
    model.forward = torch.compile(model.forward, **options)
    return model


def compile_in_place(model, **options):
    model.compile(**options)
    return model


def compile_blocks(model, **options):
    model.compile_repeated_blocks(fullgraph=True, **options)
    return model


def wrap_block(model, **options):
    model.blocks[1] = torch.compile(model.blocks[1], fullgraph=True, **options)
    return model


def wrap_attention(model, **options):
    model.blocks[0].attn1 = torch.compile(model.blocks[0].attn1, **options)
    return model


WAYS = {
    "wrapper": torch.compile,
    "in place": compile_in_place,
    "blocks": compile_blocks,
    "a block's wrapper": wrap_block,
    "an attention's wrapper": wrap_attention,
    "forward": compile_forward,
}


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


def run(model, arguments):
    with torch.no_grad():
        return model(**arguments)[0]


def state_of(model):
    """What makes every module of a model what it is."""
    return {
        path: {name: id(value) for name, value in vars(part).items()} for path, part in model.named_modules()
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_is_captured_uncompiled_and_left_as_it_was(way):
    (model, arguments), backend = made("wan"), Counting()
    with capture_diffusers(model, granularity="frame") as calls:
        plain = run(model, arguments)
    expected, weights = [call.values["frame_mass"] for call in calls], live_weights({None: model})
    model = WAYS[way](model, backend=backend)
    is_called = way == "blocks"  # tracing the others takes seconds
    if is_called:
        run(model, arguments)
        assert backend.count
    count, before = backend.count, state_of(model)
    frames = {"granularity": "frame"}
    with (
        pytest.warns(UserWarning, match="is compiled.* runs uncompiled") as messages,
        capture_diffusers(model, **frames),
        capture_diffusers(model, **frames) as calls,
    ):
        assert torch.equal(run(model, arguments), plain)
        assert live_weights({None: compiled.plain(model)}).sampled == weights.sampled
    assert all(torch.equal(a, b.values["frame_mass"]) for a, b in zip(expected, calls, strict=True))
    assert len(messages) == 1 and backend.count == count and state_of(model) == before
    assert live_weights({None: compiled.plain(model)}).sampled == weights.sampled
    if is_called:
        run(model, arguments)
        assert backend.count == count


# --- A pipeline's
def test_a_run_says_that_its_transformer_ran_uncompiled(tmp_path):
    pipe, backend = small_wan_pipeline(), Counting()
    session = load(pipe)
    with capture(pipe, layers=[1]) as seen:
        plain = sample(pipe)
    run_before = seen.runs[0]
    pipe.transformer.compile_repeated_blocks(backend=backend)
    pipe.transformer = torch.compile(pipe.transformer, backend=backend)
    wrapper = pipe.transformer
    with pytest.warns(UserWarning, match="Wan.* is compiled"), capture(pipe, layers=[1]) as seen:
        assert torch.equal(sample(pipe), plain)
    watched = seen.runs[0]
    assert load(pipe) is session and pipe.transformer is wrapper and not backend.count
    assert watched.common["uncompiled"] == ["transformer"] and "uncompiled" not in run_before.common
    assert "transformer ran uncompiled" in repr(watched) and "transformer ran uncompiled" in repr(seen)
    for name in ("fingerprint", "live_weights"):
        assert watched.common[name] == run_before.common[name]
    path = seen.atlas().save(tmp_path / "theirs.pt")
    assert Atlas.open(path)["uncompiled"] == ["transformer"]
    with (
        pytest.warns(UserWarning),
        capture(wrapper, "x_t") as seen,
    ):  # the wrapper alone, in a loop of one's own
        wrapper(torch.randn(1, 16, 1, 8, 8), torch.tensor([700.0]), torch.randn(1, 5, 64))
    assert seen.runs[0].common["uncompiled"] == ["WanTransformer3DModel"] and seen["x_t"].stack().numel()


def test_a_run_that_nobody_watches_stays_compiled():
    pipe, backend = small_wan_pipeline(), Counting()
    pipe.transformer.compile_repeated_blocks(backend=backend)
    arguments = {
        "height": 64,
        "width": 64,
        "num_frames": 5,
        "num_inference_steps": 1,
        "max_sequence_length": 16,
    }
    with warnings.catch_warnings(action="error", category=UserWarning):
        run = load(pipe).generate("a circle", **arguments, guidance_scale=1.0, output_type="latent")
    assert backend.count and "uncompiled" not in run.common


def test_edits_and_errors_leave_what_was_compiled():
    (model, arguments), backend = made("wan"), Counting()
    with intervene(model, OF_FIRST):
        edited = run(model, arguments)
    compiled_model = compile_blocks(torch.compile(model, backend=backend), backend=backend)
    before = state_of(compiled_model)
    with pytest.warns(UserWarning, match="runs uncompiled"), intervene(compiled_model, OF_FIRST):
        assert torch.equal(run(compiled_model, arguments), edited)

    def fail(x):
        raise ValueError("an edit's own")

    failing = intervene(compiled_model, at("resid_post"), fail)
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="an edit's own"), failing:
        run(compiled_model, arguments)
    assert state_of(compiled_model) == before
    refused = pytest.raises(ConfigError, match="was compiled while it is watched")
    with pytest.warns(UserWarning), refused, capture(compiled_model):
        compile_blocks(model, backend=backend)
        run(compiled_model, arguments)
    assert not backend.count


def test_of_two_experts_the_compiled_one_is_named():
    pipe, backend = small_wan_pipeline(), Counting()
    pipe.register_modules(transformer_2=copy.deepcopy(pipe.transformer))
    pipe.register_to_config(boundary_ratio=0.9)
    with capture(pipe, layers=[0]) as seen:
        plain = sample(pipe)
    assert {call["model"] for call in seen.calls} == {"transformer", "transformer_2"}
    pipe.transformer_2 = torch.compile(pipe.transformer_2, backend=backend)
    with pytest.warns(UserWarning, match="runs uncompiled") as messages, capture(pipe, layers=[0]) as seen:
        assert torch.equal(sample(pipe), plain)
    assert len(messages) == 1 and seen.runs[0].common["uncompiled"] == ["transformer_2"] and not backend.count
    assert {call["model"] for call in seen.calls} == {"transformer", "transformer_2"}
