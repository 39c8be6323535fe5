"""Whole rollouts under edit: where an edit reaches, what is refused before, and that leaving restores all."""

import threading
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import golden_model
from helpers.rollouts import MODEL_LAYERS, rollout, tiny_pipeline

from wan import interventions
from wan.activations import SiteCapture
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.interventions import Ablate, InterventionError, Jitter, Knockout, Patch, RunInStep, intervene
from wan.model import WanModel
from wan.pipeline import CausalInferencePipeline
from wan.policies import make_policy
from wan.sites import active_edits, watched, watchers
from wan.text2video import TextToVideoPipeline

FRAMES = 9  # three blocks of 3; 4 + 1 passes each
SEED_2 = interventions.Source(seed=2)
EMA = {"name": "ema_sink", "window": 6, "sink": 1}
BANK = {"name": "memory_bank", "window": 6, "sink": 1, "bank": 2, "interval": 1}


def block(latents, number):
    return latents[:, 3 * number : 3 * number + 3]


# --- Where an edit reaches
@pytest.mark.parametrize("layer", [2, MODEL_LAYERS - 1])
def test_a_clean_edit_leaves_its_block_and_changes_keys_of_deeper_layers_and_later_blocks(layer, monkeypatch):
    pipeline, caches = tiny_pipeline(), []
    make = pipeline.model.new_kv_cache
    monkeypatch.setattr(
        pipeline.model, "new_kv_cache", lambda *a, **k: caches.append(make(*a, **k)) or caches[-1]
    )
    base = rollout(pipeline, FRAMES)
    with intervene(Ablate("zero", layers=[layer], heads=[1], blocks=[1], passes="clean")):
        edited = rollout(pipeline, FRAMES)
    assert torch.equal(edited[:, :6], base[:, :6])
    assert torch.equal(block(edited, 2), block(base, 2)) == (layer == MODEL_LAYERS - 1)
    for name in ("keys", "values"):
        pairs = zip(*(getattr(cache, name) for cache in caches), strict=True)
        same = [torch.equal(one[:, 15:30], other[:, 15:30]) for one, other in pairs]
        assert same == [n <= layer for n in range(MODEL_LAYERS)]


def test_leaving_restores_everything_also_on_an_error_and_idle_edits_see_no_call(monkeypatch):
    pipeline = tiny_pipeline()
    plain = rollout(pipeline)
    outer, inner = Knockout(frames=0, passes="all"), Jitter()
    with intervene(outer) as active:
        alone = rollout(pipeline)
        with pytest.raises(RuntimeError, match="inside"), intervene(inner):
            assert active_edits() == [outer, inner]
            raise RuntimeError("inside")
        assert active_edits() == [outer] and torch.equal(rollout(pipeline), alone)
        with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame"), intervene(inner):
            rollout(pipeline)
    assert active.changed == [3 * MODEL_LAYERS * 5]  # three rollouts, one block of two with a past, 5 passes
    monkeypatch.setattr(interventions.Edits, "on_activation", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not active_edits() and torch.equal(rollout(pipeline), plain)


def test_a_probe_denoises_a_block_again_and_leaves_no_trace():
    pipeline, again, edited, others = tiny_pipeline(local_attn_size=5, sink_size=1), [], [], []
    base, edit = rollout(pipeline, FRAMES), Ablate("zero", layers=[1], passes="denoise")

    def probe(number, denoise):
        with intervene(edit):
            edited.append(denoise())
        again.append(denoise())
        others.append(denoise(torch.zeros_like(again[-1])))

    assert torch.equal(rollout(pipeline, FRAMES, probe=probe), base)
    assert torch.equal(torch.cat(again, 1), base) and not torch.equal(torch.cat(others, 1), base)
    with intervene(replace(edit, blocks=(1,))):
        assert torch.equal(block(rollout(pipeline, FRAMES), 1), edited[1])


def test_the_base_model_is_edited_in_one_branch_and_by_own_keys():
    pipeline = TextToVideoPipeline(golden_model(WanModel), num_steps=2)
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(1, 4, 16, 4, 6, generator=generator)
    texts = torch.randn(2, 1, 32, 64, generator=generator)
    plain = pipeline.inference(noise, *texts)
    edit = Knockout(frames="own:0", heads=[1], layers=[2], branch="uncond", passes="denoise")
    with intervene(edit) as active, ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame") as calls:
        edited = pipeline.inference(noise, *texts)
    assert active.changed == [2] and not torch.equal(edited, plain)
    assert {(c["layer"], c["branch"]) for c in calls if "attended" in c} == {(2, "uncond")}
    for wrong in (Ablate("zero", passes="clean"), Knockout(frames="first", passes="denoise")):
        with pytest.warns(UserWarning, match="no call was edited by: "), intervene(wrong):
            pipeline.inference(noise, *texts)


# --- What is refused before

ERRORS = {
    "frame 9 is not in 0..8": Knockout(frames=[0, 9], passes="all"),
    "layer 4 is not in 0..3": Ablate("zero", layers=[4], passes="all"),
    "head 3 is not in 0..2": Ablate("zero", heads=[3], passes="all"),
    "prompt token 7 is not in 0..6": Knockout(tokens=[7], passes="all"),
    "step 4 is not in 0..3": Ablate("zero", steps=[4], passes="denoise"),
}


@pytest.mark.parametrize("message", ERRORS)
def test_an_edit_that_cannot_be_made_is_refused_before_the_rollout(message, monkeypatch):
    pipeline, edit = tiny_pipeline(), ERRORS[message]
    monkeypatch.setattr(pipeline.model, "flow", None)  # nothing may run
    with pytest.raises(InterventionError, match=message) as error, intervene(edit, data={edit: None}):
        rollout(pipeline, FRAMES)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "edit", [Ablate("zero", branch="uncond", passes="all"), Knockout(frames=6, passes="all")], ids=str
)
def test_an_edit_that_touches_nothing_is_told_by_a_warning(edit):
    with pytest.warns(UserWarning, match="no call was edited by: "), intervene(edit) as active:
        rollout(tiny_pipeline(), FRAMES)
    assert active.first_block is None


# --- Heads of several classes, under cache_policy per_head, against one policy for all
def test_classes_with_one_policy_are_edited_as_one_call(tmp_path):
    """All kinds of edits at once, each in a layer of its own, of a head of either class."""
    path, full = tmp_path / "classes.csv", {"name": "full"}
    path.write_text("a,b,a\n" * MODEL_LAYERS)
    policy = make_policy("per_head", file=str(path), policies={"a": full, "b": full})
    chosen = [{"layers": [layer], "heads": [1, 2], "passes": "all"} for layer in range(MODEL_LAYERS)]
    edits = Knockout(frames=[0, 4], **chosen[0]), Jitter(0.5, layers=[1], heads=[1, 2])
    mean, patch = Ablate("mean", **chosen[2]), Patch("kv", {"seed": 5}, **chosen[3])
    whole, found = tiny_pipeline(), []
    for pipeline in (whole, CausalInferencePipeline(whole.model, 3, cache_policy=policy)):
        with interventions.record_head_outputs() as outputs:
            plain = rollout(pipeline, FRAMES)
        norms = torch.cat([*map(torch.flatten, outputs.norms.values())])
        source = RunInStep(lambda run=pipeline: rollout(run, FRAMES, seed=5))
        with source, ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame") as calls:
            data = {mean: interventions.ReferenceMeans.over([outputs]), patch: source}
            with intervene(*edits, mean, patch, data=data) as active:
                found.append((rollout(pipeline, FRAMES), norms, calls))
        assert all(active.changed) and not torch.equal(found[-1][0], plain)
    (*one, calls), (*other, of_classes) = found
    torch.testing.assert_close(other, one, atol=5e-6, rtol=0)
    for mine, expected in zip(of_classes, calls, strict=True):
        for name in {"frame_logits", "frame_mass", "attended"} & expected.values.keys():
            torch.testing.assert_close(mine[name], expected[name], atol=5e-6, rtol=0, equal_nan=True)


# --- Outputs of heads
def test_means_are_those_of_every_token_and_of_the_blocks_that_have_a_place():
    """Blocks of 1, 3 and 3 frames, twice: three have a first frame, two a second and a third."""
    pipeline, seen = CausalInferencePipeline(tiny_pipeline().model, 3, True), SiteCapture(("z", "cross_z"))
    plain = rollout(pipeline, 7)
    with interventions.record_head_outputs() as outputs, watched(seen):
        assert torch.equal(rollout(pipeline, 7), plain)
    for one in seen.kept:
        found, tokens = outputs.of(one.where), one.value.double().unflatten(1, (-1, 5))
        kind, at = one.where.site.replace("cross_z", "cross").replace("z", "self"), one.where
        key = (kind, at.layer, at.step, "cond"), at.block
        assert found is outputs.means[key]
        for values, expected in ((found, tokens.mean(2)), (outputs.norms[key], tokens.norm(dim=-1).mean(2))):
            torch.testing.assert_close(values.double(), expected, atol=1e-6, rtol=0)
    assert len(seen.kept) == len(outputs.means) == len(outputs.norms)
    reference = interventions.ReferenceMeans.over([outputs, outputs])
    assert len(reference.values) == MODEL_LAYERS * 5 * len({key[0] for key in reference.values})
    for key, values in reference.values.items():
        blocks = [outputs.means[key, number][0] for number in range(3)]
        assert [len(block) for block in blocks] == [1, 3, 3] and len(values) == 3
        first = (blocks[0][0] + blocks[1][0] + blocks[2][0]) / 3
        torch.testing.assert_close(values[0], first, atol=1e-6, rtol=0)
        torch.testing.assert_close(values[1:], (blocks[1][1:] + blocks[2][1:]) / 2, atol=1e-6, rtol=0)
    one, two = ({(key, 0): torch.tensor(row).view(-1, 1, 1, 1)} for row in ([1.0, 2.0], [6.0]))
    runs = interventions.HeadOutputs(means=one), interventions.HeadOutputs(means=two)
    assert interventions.ReferenceMeans.over(runs).values[key].item() == 3  # batch items of runs count alike


# --- A second run in step
def of_seed(pipeline, seed: int, frames: int = 6):
    """A rollout that can be started any number of times."""
    return partial(rollout, pipeline, frames, seed=seed)


def test_a_run_patched_from_itself_keeps_its_bits_and_many_edits_share_a_source():
    """Under policies whose means and choices are of one run; keys that others choose are an error."""
    edits = [Patch(what, SEED_2, passes="all") for what in ("qk", "z", "kv")]
    for policy in (EMA, BANK):
        pipeline = CausalInferencePipeline(tiny_pipeline().model, cache_policy=make_policy(**policy))
        mine = of_seed(pipeline, 1, 15)
        plain = mine()
        with RunInStep(mine) as other, intervene(*edits, data=dict.fromkeys(edits, other)):
            assert torch.equal(mine(), plain)
    refused = pytest.raises(InterventionError, match=r"the source chose other keys for slot [01]")
    with refused, RunInStep(of_seed(pipeline, 2, 15)) as other, intervene(edits[2], data={edits[2]: other}):
        mine()


def test_nothing_is_left_behind_also_where_the_edited_run_fails():
    def fail_in_main(*_):
        if len(calls) > 1 and threading.current_thread() is threading.main_thread():
            raise RuntimeError("in the middle")

    pipeline, before = tiny_pipeline(), threading.active_count()
    edit = Patch("z", SEED_2, layers=[0], passes="all")
    with (
        pytest.raises(RuntimeError, match="in the middle"),
        RunInStep(of_seed(pipeline, 2)) as other,
        intervene(edit, data={edit: other}),
        ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame") as calls,
    ):
        pipeline.model.blocks[1].register_forward_pre_hook(fail_in_main)
        of_seed(pipeline, 1)()
    assert threading.active_count() == before and ATTENTION_WEIGHT_CAPTURE.current_pass is None
    assert not watchers() and not ATTENTION_WEIGHT_CAPTURE.active


def no_weights():
    raise InterventionError("no weights")


def test_a_source_that_does_not_fit_is_an_error():
    for source, message in (
        (of_seed(tiny_pipeline(), 2, frames=3), "the source has no (self|z): layer 1, block 1, step 1"),
        (no_weights, "no weights"),  # its own error reaches whoever waits for it
    ):
        for what in ("z", "kv"):
            edit = Patch(what, SEED_2, layers=[1], heads=[2], blocks=[1], steps=[1], passes="denoise")
            refused = pytest.raises(InterventionError, match=message)
            with refused, RunInStep(source) as other, intervene(edit, data={edit: other}):
                of_seed(tiny_pipeline(), 1)()
