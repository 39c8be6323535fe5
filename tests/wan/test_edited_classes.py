"""Edits of heads that are of several classes: under cache_policy per_head, against one policy for all."""

import csv

import pytest
import torch
from helpers.rollouts import MODEL_LAYERS, TINY, rollout, tiny_pipeline

from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.interventions import Ablate, Bias, InterventionError, Jitter, Knockout, Move, Patch, intervene
from wan.pipeline import CausalInferencePipeline
from wan.policies import make_policy
from wan.recorders import ReferenceMeans, RunInStep, record_head_outputs

FRAMES, HEADS = 12, 3


def per_head(path, **policies):
    """Heads 0 and 2 are of class a, head 1 of class b."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["a", "b", "a"]] * MODEL_LAYERS)
    return make_policy("per_head", file=str(path), policies=policies)


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    """The whole past for all heads: as one call, and as a call for each of two classes."""
    whole = tiny_pipeline()
    policy = per_head(tmp_path_factory.mktemp("classes") / "a.csv", a={"name": "full"}, b={"name": "full"})
    return whole, CausalInferencePipeline(whole.model, 3, cache_policy=policy)


def run(pipeline, edit, data=None):
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame") as calls, intervene(edit, data=data) as made:
        latents = rollout(pipeline, FRAMES)
    return latents, calls, made.changed[0]


def of_another_prompt(pipeline):
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(1, FRAMES, 16, 2, 10, generator=generator)
    renoise = torch.randn(3, *noise.shape, generator=generator)
    return pipeline.inference(noise, prompt_embeds=torch.ones(1, 4, TINY["text_dim"]), renoise=renoise)[1]


EDITS = {
    "knockout": Knockout(frames=[0, 4], heads=[1, 2], passes="all"),
    "bias": Bias(1.5, frames="past", heads=[0, 1], passes="denoise"),
    "zero": Ablate("zero", heads=[2], passes="all"),
    "move": Move("first", offset=5, heads=[0, 1], passes="all"),
    "jitter": Jitter(scale=0.5, heads=[1, 2]),
}


@pytest.mark.parametrize("name", EDITS)
def test_classes_with_one_policy_are_edited_as_one_call(pipelines, name):
    whole, classes = (run(pipeline, EDITS[name]) for pipeline in pipelines)
    torch.testing.assert_close(classes[0], whole[0], atol=5e-6, rtol=0)
    assert not torch.equal(whole[0], rollout(pipelines[0], FRAMES))
    assert len(classes[1]) == len(whole[1])
    for mine, expected in zip(classes[1], whole[1], strict=True):
        for quantity in ("frame_logits", "frame_mass"):
            torch.testing.assert_close(mine[quantity], expected[quantity], atol=5e-6, rtol=0, equal_nan=True)
        if "attended" in expected.values:
            assert torch.equal(mine["attended"], expected["attended"])


def test_means_are_those_of_the_heads_of_a_class(pipelines):
    found = []
    for pipeline in pipelines:
        with record_head_outputs() as outputs:
            rollout(pipeline, FRAMES)
        edit = Ablate("mean", heads=[1, 2], passes="all")
        own = Ablate("frame_mean", heads=[0, 1], passes="denoise")
        found.append(
            [
                torch.cat([norms.flatten() for norms in outputs.norms.values()]),
                run(pipeline, edit, {edit: ReferenceMeans.over([outputs])})[0],
                run(pipeline, own, {own: outputs})[0],
            ]
        )
    for mine, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize("what", ["z", "qk", "kv"])
def test_a_source_goes_in_step_with_each_class(pipelines, what):
    edit = Patch(what, {"seed": 5}, layers=[1], heads=[1, 2], passes="all")
    found = []
    for pipeline in pipelines:
        with RunInStep(lambda pipeline=pipeline: of_another_prompt(pipeline)) as source:
            found.append(run(pipeline, edit, {edit: source}))
    whole, classes = found
    torch.testing.assert_close(classes[0], whole[0], atol=5e-6, rtol=0)
    assert not torch.equal(whole[0], rollout(pipelines[0], FRAMES))


def test_an_edit_changes_what_its_classes_hold_and_no_class_loses_all_keys(tmp_path):
    whole = tiny_pipeline()
    policy = per_head(tmp_path / "a.csv", a={"name": "full"}, b={"name": "window", "window": 6, "sink": 0})
    pipeline = CausalInferencePipeline(whole.model, 3, cache_policy=policy)
    base = rollout(pipeline, FRAMES)
    edit = Knockout(frames=0, heads=[1], blocks=[3], passes="denoise")  # gone from its window by then
    with pytest.warns(UserWarning, match="no call was edited"):
        assert torch.equal(run(pipeline, edit)[0], base)
    _, calls, changed = run(pipeline, Knockout(frames=0, blocks=[3], passes="denoise"))
    assert changed == 4 * MODEL_LAYERS  # of class a
    last = next(call for call in calls if call.at.block == 3)
    assert not last["attended"][:, [0, 2], :, 0].any() and last["attended"][:, 0, :, 1:].all()
    with pytest.raises(InterventionError, match="head 1 would lose all its keys"):
        run(pipeline, Knockout(frames=["past", "own"], heads=[1], passes="denoise"))
