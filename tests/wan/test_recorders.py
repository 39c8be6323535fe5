"""Outputs of heads and their means against sums by hand, and patches from a second run in step."""

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.rollouts import MODEL_LAYERS, rollout, tiny_pipeline

from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.interventions import (
    Ablate,
    HeadOutputs,
    InterventionError,
    Patch,
    ReferenceMeans,
    RunInStep,
    Source,
    intervene,
    record_head_outputs,
)
from wan.pipeline import CausalInferencePipeline
from wan.policies import make_policy
from wan.sites import Pass, Where, watchers

FRAMES, TOKENS, HEADS = 3, 5, 4
CHOSEN = {"layers": [1], "heads": [2], "blocks": [1], "steps": [1], "passes": "denoise"}
OTHER = Source(seed=2)


# --- Outputs of heads
def test_means_and_sizes_are_those_of_every_token():
    z = torch.randn(2, FRAMES * TOKENS, HEADS, 6, generator=torch.Generator().manual_seed(0))
    at, outputs = Pass(query_frames=range(FRAMES), block=1), HeadOutputs()
    outputs.visit(z, Where("z", 2, at))
    where = (("self", 2, 0, "cond"), 1)
    assert set(outputs.means) == set(outputs.norms) == {where}
    tokens = z.double().unflatten(1, (FRAMES, TOKENS))
    torch.testing.assert_close(outputs.means[where].double(), tokens.mean(2), atol=1e-6, rtol=0)
    sizes = (tokens**2).sum(-1).sqrt().mean(2)
    torch.testing.assert_close(outputs.norms[where].double(), sizes, atol=1e-6, rtol=0)
    assert outputs.of(Where("z", 2, at)) is outputs.means[where]
    with pytest.raises(InterventionError, match="layer 2, block 2, step 0: no output was recorded"):
        outputs.of(Where("z", 2, replace(at, block=2)))


def test_a_place_that_few_blocks_have_is_a_mean_of_these():
    """Blocks of 1, 3 and 3 frames, twice: three have a first frame, two a second and a third."""
    pipeline = CausalInferencePipeline(tiny_pipeline().model, independent_first_frame=True)
    plain = rollout(pipeline, 7)
    with record_head_outputs() as outputs:
        assert torch.equal(rollout(pipeline, 7), plain)
    reference = ReferenceMeans.over([outputs, outputs])
    assert len(reference.values) == MODEL_LAYERS * 5 * len({key[0] for key in reference.values})
    for key, values in reference.values.items():
        blocks = [outputs.means[key, number][0] for number in range(3)]
        assert [len(block) for block in blocks] == [1, 3, 3] and len(values) == 3
        first = (blocks[0][0] + blocks[1][0] + blocks[2][0]) / 3
        torch.testing.assert_close(values[0], first, atol=1e-6, rtol=0)
        torch.testing.assert_close(values[1:], (blocks[1][1:] + blocks[2][1:]) / 2, atol=1e-6, rtol=0)
    one, two = ({(key, 0): torch.tensor(row).view(-1, 1, 1, 1)} for row in ([1.0, 2.0], [6.0]))
    runs = HeadOutputs(means=one), HeadOutputs(means=two)
    assert ReferenceMeans.over(runs).values[key].item() == 3  # batch items of runs count alike


@pytest.mark.parametrize("how", ["frame_mean", "mean"])
def test_means_take_the_place_of_one_heads_outputs(how):
    pipeline, where = tiny_pipeline(), (("self", 1, 1, "cond"), 1)
    with record_head_outputs() as outputs:
        rollout(pipeline)
    edit, reference = Ablate(how, **CHOSEN), ReferenceMeans.over([outputs])
    data = outputs if how == "frame_mean" else reference
    with intervene(edit, data={edit: data}), record_head_outputs() as edited:
        rollout(pipeline)
    expected = outputs.means[where] if how == "frame_mean" else reference.values[where[0]][None]
    torch.testing.assert_close(edited.means[where][:, :, 2], expected[:, :, 2], atol=1e-6, rtol=0)
    assert torch.equal(edited.means[where][:, :, :2], outputs.means[where][:, :, :2])
    other = Ablate("mean", layers=[1], passes="clean")
    with pytest.raises(InterventionError, match="layer 1, block 0, step 4: no means"):
        few = ReferenceMeans({key: x for key, x in reference.values.items() if key[2] < 4})
        with intervene(other, data={other: few}):
            rollout(pipeline)


# --- A second run in step
def of_seed(pipeline, seed: int, frames: int = 6):
    """A rollout that can be started any number of times."""
    return partial(rollout, pipeline, frames, seed=seed)


def test_a_run_patched_from_itself_keeps_its_bits_and_many_edits_share_a_source():
    """Under a policy whose running means the two runs must not share."""
    policy, frames = make_policy("ema_sink", window=6, sink=1), 12
    pipeline = CausalInferencePipeline(tiny_pipeline().model, cache_policy=policy)
    mine = of_seed(pipeline, 1, frames)
    plain, edits = mine(), [Patch(what, OTHER, passes="all") for what in ("qk", "z", "kv")]
    with RunInStep(mine) as other, intervene(*edits, data=dict.fromkeys(edits, other)):
        assert torch.equal(mine(), plain)
    with (
        RunInStep(of_seed(pipeline, 2, frames)) as other,
        intervene(edits[0], data={edits[0]: other}),
        ATTENTION_WEIGHT_CAPTURE.capture(layers=[1], steps=[1], blocks=[1]) as mixed,
    ):
        mine()
    with ATTENTION_WEIGHT_CAPTURE.capture(layers=[1], steps=[1], blocks=[1]) as theirs:
        of_seed(pipeline, 2, frames)()
    assert torch.equal(mixed[0]["token_logits"], theirs[0]["token_logits"])  # qk transfers the map


def test_nothing_is_left_behind_also_where_the_edited_run_fails():
    def fail_in_main(*_):
        if len(calls) > 1 and threading.current_thread() is threading.main_thread():
            raise RuntimeError("in the middle")

    pipeline, before = tiny_pipeline(), threading.active_count()
    edit = Patch("z", OTHER, layers=[0], passes="all")
    with (
        pytest.raises(RuntimeError, match="in the middle"),
        RunInStep(of_seed(pipeline, 2)) as other,
        intervene(edit, data={edit: other}),
        ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame") as calls,
    ):
        pipeline.model.blocks[1].register_forward_pre_hook(fail_in_main)
        of_seed(pipeline, 1)()
    assert threading.active_count() == before and ATTENTION_WEIGHT_CAPTURE.now is None
    assert not watchers() and not ATTENTION_WEIGHT_CAPTURE.active


def no_weights():
    raise InterventionError("no weights")


def wider():
    """Latents of another size."""
    noise, text = torch.randn(1, 6, 16, 2, 8), torch.randn(1, 4, 24)
    tiny_pipeline().inference(noise, prompt_embeds=text, renoise=torch.randn(3, *noise.shape))


@pytest.mark.parametrize(
    "source, message",
    [
        (of_seed(tiny_pipeline(), 2, frames=3), "the source has no (self|z): layer 1, block 1, step 1"),
        (wider, "the source's call is of another shape"),
        (no_weights, "no weights"),  # its own error reaches whoever waits for it
    ],
    ids=["shorter", "wider", "failing"],
)
def test_a_source_that_does_not_fit_is_an_error(source, message):
    for what in ("z", "kv"):
        edit = Patch(what, OTHER, **CHOSEN)
        with (
            pytest.raises(InterventionError, match=message),
            RunInStep(source) as other,
            intervene(edit, data={edit: other}),
        ):
            of_seed(tiny_pipeline(), 1)()


@pytest.mark.parametrize(
    "policy",
    [
        make_policy("participative", window=9, sink=1, budget=8, recent=3),
        make_policy("memory_bank", window=6, sink=1, bank=2, interval=1),
    ],
    ids=lambda policy: policy.name,
)
def test_keys_that_the_source_chose_otherwise_are_an_error(policy):
    pipeline = CausalInferencePipeline(tiny_pipeline().model, cache_policy=policy)
    mine, edit = of_seed(pipeline, 1, frames=15), Patch("kv", OTHER, passes="all")
    with RunInStep(mine) as same, intervene(edit, data={edit: same}):
        edited = mine()
    assert torch.equal(edited, mine())
    with (
        pytest.raises(InterventionError, match=r"the source chose other keys for slot [01]"),
        RunInStep(of_seed(pipeline, 2, frames=15)) as other,
        intervene(edit, data={edit: other}),
    ):
        mine()
