"""Whole rollouts under edit: where an edit reaches, what can be planned, and that leaving restores all."""

import warnings
from dataclasses import replace

import pytest
import torch
from conftest import golden_model
from helpers.rollouts import MODEL_LAYERS, TINY, rollout, tiny_pipeline

from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.errors import ConfigError
from wan.interventions import ACTIVE_EDITS, Ablate, Bias, InterventionError, Jitter, Knockout, Move, intervene
from wan.model import WanModel
from wan.pipeline import CausalInferencePipeline, flow_to_x0
from wan.policies import make_policy
from wan.recorders import ReferenceMeans, record_head_outputs
from wan.text2video import TextToVideoPipeline

FRAMES = 9  # three blocks of 3; 4 + 1 passes each


def watched(pipeline, *edits, frames=FRAMES, data=None, **capture):
    """Latents and captured calls of a rollout under edits, and its keys and values per layer at the end."""
    caches, make = [], pipeline.model.new_kv_cache
    pipeline.model.new_kv_cache = lambda *args, **kwargs: caches.append(make(*args, **kwargs)) or caches[-1]
    try:
        with ATTENTION_WEIGHT_CAPTURE.capture(**({"granularity": "frame"} | capture)) as calls:
            if edits:
                with intervene(*edits, data=data):
                    latents = rollout(pipeline, frames)
            else:
                latents = rollout(pipeline, frames)
    finally:
        del pipeline.model.new_kv_cache
    return latents, calls, list(zip(caches[0].keys, caches[0].values, strict=True))


def same(one, other) -> bool:
    return all(map(torch.equal, one, other))


def block(latents, number):
    return latents[:, 3 * number : 3 * number + 3]


def of_block(buffers, number, tokens_per_frame=5):
    """Keys and values of a block's own frames, per layer."""
    rows = slice(3 * number * tokens_per_frame, 3 * (number + 1) * tokens_per_frame)
    return [(k[:, rows], v[:, rows]) for k, v in buffers]


@pytest.mark.parametrize("layer", [0, 2])
def test_a_clean_edit_leaves_its_block_and_changes_keys_of_deeper_layers_and_later_blocks(layer):
    pipeline = tiny_pipeline()
    base, _, base_cache = watched(pipeline)
    edit = Ablate("zero", layers=[layer], heads=[1], blocks=[1], passes="clean")
    edited, _, cache = watched(pipeline, edit)
    assert same((block(edited, 0), block(edited, 1)), (block(base, 0), block(base, 1)))
    assert not torch.equal(block(edited, 2), block(base, 2))
    pairs = zip(of_block(cache, 1), of_block(base_cache, 1), strict=True)
    assert [same(*pair) for pair in pairs] == [n <= layer for n in range(MODEL_LAYERS)]


def test_a_clean_edit_of_the_last_layer_changes_nothing():
    pipeline = tiny_pipeline()
    edited = watched(pipeline, Ablate("zero", layers=[MODEL_LAYERS - 1], passes="clean"))[0]
    assert torch.equal(edited, watched(pipeline)[0])


def test_a_denoising_edit_reaches_later_blocks_only_through_its_x0(monkeypatch):
    pipeline = tiny_pipeline()
    base, _, base_cache = watched(pipeline)
    edit = Knockout(frames="past", layers=[1], blocks=[1], passes="denoise")
    edited, _, _ = watched(pipeline, edit)
    assert not torch.equal(block(edited, 1), block(base, 1))
    forwards = []

    def put_back(flow, x, sigma):
        forwards.append(sigma)
        last_of_block_1 = len(forwards) == 8
        return block(base, 1) if last_of_block_1 else flow_to_x0(flow, x, sigma)

    monkeypatch.setattr("wan.pipeline.flow_to_x0", put_back)
    again, _, cache = watched(pipeline, edit)
    assert torch.equal(again, base) and all(same(*pair) for pair in zip(cache, base_cache, strict=True))


def test_layers_at_or_below_the_edited_one_see_what_they_saw():
    pipeline = tiny_pipeline()
    edit = Ablate("zero", layers=[2], heads=[0], blocks=[1], steps=[0], passes="denoise")
    keep = {"granularity": "token", "blocks": [1], "steps": [0]}
    _, base, _ = watched(pipeline, **keep)
    _, calls, _ = watched(pipeline, edit, **keep)
    equal = [torch.equal(a["token_logits"], b["token_logits"]) for a, b in zip(calls, base, strict=True)]
    assert equal == [True, True, True, False]


def test_unedited_heads_of_an_edited_call_agree():
    pipeline = tiny_pipeline()
    chosen = {"layers": [1], "heads": [1], "blocks": [2], "steps": [0], "passes": "denoise"}
    with record_head_outputs() as plain:
        rollout(pipeline, FRAMES)
    for edit in (Knockout(frames="past", **chosen), Bias(3, frames=[0, 4], **chosen)):
        with intervene(edit), record_head_outputs() as edited:
            rollout(pipeline, FRAMES)
        where = (("self", 1, 0, "cond"), 2)
        difference = (edited.means[where] - plain.means[where]).abs()
        assert difference[:, :, [0, 2]].max() < 1e-5 < difference[:, :, 1].max()


def test_windows_and_batches_are_edited(device):
    pipeline = tiny_pipeline(device=device, local_attn_size=5, sink_size=1)
    edit = Knockout(frames="sink", heads=[0], passes="all")
    _, calls, _ = watched(pipeline, edit, frames=12)
    last = calls[-1]
    assert last["key_frames"] == [0, 8, 9, 10, 11]
    assert last["frame_logits"][:, 0, :, 0].isnan().all() and last["frame_logits"].isnan().sum() == 3
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 6, 16, 2, 10, generator=generator).to(device)
    renoise = torch.randn(3, *noise.shape, generator=generator).to(device)
    text = torch.randn(2, 4, TINY["text_dim"], generator=generator).to(device)
    with intervene(edit):
        both = pipeline.inference(noise, prompt_embeds=text, renoise=renoise)[1]
        alone = pipeline.inference(noise[1:], prompt_embeds=text[1:], renoise=renoise[:, 1:])[1]
    torch.testing.assert_close(both[1:], alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize("granularity", ["token", "key", "frame"])
def test_looking_changes_no_bit_of_an_edited_rollout(granularity, device):
    for dtype in (torch.float32, torch.bfloat16):
        pipeline = tiny_pipeline(dtype, device)
        edits = (Knockout(frames="first", heads=[1], passes="all"), Move(1, offset=2, passes="denoise"))
        with intervene(*edits):
            plain = rollout(pipeline)
        assert torch.equal(plain, watched(pipeline, *edits, frames=6, granularity=granularity)[0])


def test_leaving_restores_everything_also_on_an_error():
    pipeline = tiny_pipeline()
    plain = rollout(pipeline)
    outer, inner = Knockout(frames=0, passes="all"), Jitter()
    with intervene(outer) as session:
        alone = rollout(pipeline)
        with pytest.raises(RuntimeError, match="inside"), intervene(inner):
            assert ACTIVE_EDITS.edits == [outer, inner]
            raise RuntimeError("inside")
        assert ACTIVE_EDITS.edits == [outer] and torch.equal(rollout(pipeline), alone)
        with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame"), intervene(inner):
            rollout(pipeline)
    assert not ACTIVE_EDITS.active and torch.equal(rollout(pipeline), plain)
    assert session.changed == [3 * MODEL_LAYERS * 5]  # three rollouts, one block of two with a past, 5 passes


ERRORS = {
    "layer 4 is not in 0..3": Ablate("zero", layers=[4], passes="all"),
    "head 3 is not in 0..2": Ablate("zero", heads=[3], passes="all"),
    "block 3 is not in 0..2": Ablate("zero", blocks=[3], passes="all"),
    "prompt token 7 is not in 0..6": Knockout(tokens=[7], passes="all"),
    "step 4 is the clean pass: name it by passes": Ablate("zero", steps=[4], passes="denoise"),
    "step 5 is not in 0..3": Ablate("zero", steps=[5], passes="denoise"),
    "branch uncond is not there": Ablate("zero", branch="uncond", passes="all"),
    "earlier blocks hold frames 0..5; own keys are frames 0..8": Knockout(frames=6, passes="all"),
    "earlier blocks hold nothing; own keys are frames 0..2": Knockout(
        frames="first", blocks=[0], passes="all"
    ),
    "no call can be edited: Knockout": Knockout(frames="sink", passes="all"),
}


@pytest.mark.parametrize("message", ERRORS)
def test_an_edit_that_cannot_be_made_is_refused_before_the_rollout(message, monkeypatch):
    pipeline = tiny_pipeline()
    monkeypatch.setattr(pipeline.model, "flow", None)  # nothing may run
    with pytest.raises(InterventionError, match=message), intervene(ERRORS[message]):
        rollout(pipeline, FRAMES)


PLANS = [
    (
        Knockout(frames=0, layers=[1], heads=[0], passes="all"),
        "1 of 3 heads in 1 of 4 layers, 5 passes of 2 blocks: 10 calls",
    ),
    (
        Ablate("zero", layers=[0, 3], passes="denoise", steps=[0]),
        "3 of 3 heads in 2 of 4 layers, 1 passes of 3 blocks: 6 calls",
    ),
    (
        Knockout(frames=5, heads=[0, 2], passes="clean"),
        "2 of 3 heads in 4 of 4 layers, 1 passes of 1 blocks: 4 calls",
    ),
]


@pytest.mark.parametrize("edit, words", PLANS, ids=[words for _, words in PLANS])
def test_a_dry_run_counts_the_calls_that_are_then_edited(edit, words):
    pipeline = tiny_pipeline()
    assert pipeline.plan(FRAMES).in_words(edit) == f"edits {words}"
    with intervene(edit) as session:
        rollout(pipeline, FRAMES)
    assert f": {session.changed[0]} calls" in words


def test_given_blocks_have_a_clean_pass_alone():
    plan = tiny_pipeline().plan(num_frames=6, given=3)
    assert plan.in_words(Ablate("zero", layers=0, passes="all")).endswith("5 passes of 3 blocks: 11 calls")


def test_means_of_the_same_run_are_recorded_without_changing_a_bit():
    pipeline = tiny_pipeline()
    plain = rollout(pipeline, FRAMES)
    with record_head_outputs() as outputs:
        assert torch.equal(rollout(pipeline, FRAMES), plain)
    assert {norms.shape for norms in outputs.norms.values()} == {(1, 3, 3)}  # [B, Fq, H]
    assert {key[1] for key, _ in outputs.norms} == set(range(MODEL_LAYERS))
    chosen = {"layers": [1], "heads": [2], "passes": "denoise", "blocks": [1], "steps": [0]}
    by_frame, by_reference = Ablate("frame_mean", **chosen), Ablate("mean", **chosen)
    where = (("self", 1, 0, "cond"), 1)
    reference = ReferenceMeans.over([outputs, outputs])
    blocks = torch.stack([outputs.means[where[0], n] for n in range(3)])
    torch.testing.assert_close(reference.values[where[0]], blocks.mean(0)[0], atol=1e-6, rtol=0)
    for edit, data in ((by_frame, outputs), (by_reference, reference)):
        with intervene(edit, data={edit: data}), record_head_outputs() as edited:
            rollout(pipeline, FRAMES)
        expected = outputs.means[where] if edit is by_frame else reference.values[where[0]][None]
        torch.testing.assert_close(edited.means[where][:, :, 2], expected[:, :, 2], atol=1e-6, rtol=0)
        assert torch.equal(edited.means[where][:, :, :2], outputs.means[where][:, :, :2])


def test_the_base_model_is_edited_in_one_branch_and_by_own_keys():
    pipeline = TextToVideoPipeline(golden_model(WanModel), num_steps=2)
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(1, 4, 16, 4, 6, generator=generator)
    texts = torch.randn(2, 1, 32, 64, generator=generator)
    plain = pipeline.inference(noise, *texts)
    edit = Knockout(frames="own:0", heads=[1], layers=[2], branch="uncond", passes="denoise")
    with intervene(edit) as session, ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame") as calls:
        edited = pipeline.inference(noise, *texts)
    assert session.changed == [2] and not torch.equal(edited, plain)
    changed = {(c["layer"], c["branch"]) for c in calls if "attended" in c}
    assert changed == {(2, "uncond")}
    assert (
        pipeline.plan(4).in_words(edit)
        == "edits 1 of 12 heads in 1 of 5 layers, 2 passes of 1 blocks: 2 calls"
    )
    for message, wrong in {
        "the base model has no clean pass": Ablate("zero", passes="clean"),
        "own keys are frames 0..3, named by own": Knockout(frames="first", passes="denoise"),
    }.items():
        with pytest.raises(InterventionError, match=message), intervene(wrong):
            pipeline.inference(noise, *texts)


def test_with_nothing_active_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(ACTIVE_EDITS, "apply", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rollout(tiny_pipeline())


POLICIES = {
    "window": {"window": 6, "sink": 1},
    "relative": {"window": 6, "sink": 1},
    "deep_sink": {"window": 6, "sink": 2},
    "participative": {"window": 9, "sink": 1, "budget": 8, "recent": 3},
    "ema_sink": {"window": 6, "sink": 1},
    "two_memories": {"window": 8, "sink": 1},
    "rolling_sink": {"window": 9},
    "memory_bank": {"window": 6, "sink": 1, "bank": 2, "interval": 1},
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_cache_policy_is_edited_by_its_own_layout(name):
    policy = make_policy(name, **POLICIES[name])
    pipeline = CausalInferencePipeline(tiny_pipeline().model, cache_policy=policy)
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame") as plain:
        latents = rollout(pipeline, 15)
    for edit in (Knockout(frames="past", heads=[1], passes="all"), Move("past", offset=1, passes="denoise")):
        with intervene(edit) as session, ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame") as calls:
            edited = rollout(pipeline, 15)
        assert session.changed[0] == pipeline.plan(15).count(edit) and not torch.equal(edited, latents)
        assert [c["key_frames"] for c in calls] == [c["key_frames"] for c in plain] or name == "participative"
        if isinstance(edit, Knockout):
            past = torch.tensor([n not in calls[-1].layout.own for n in range(len(calls[-1].layout.slots))])
            own = torch.tensor([frame in calls[-1]["query_frames"] for frame in calls[-1]["key_frames"]])
            assert torch.equal(calls[-1]["attended"][0, 1, 0], own)
            mass = calls[-1].get("slot_mass", calls[-1]["frame_mass"])
            assert mass[:, 1, :, past].abs().max() == 0
            assert mass.sum(-1).allclose(torch.ones(1))
    if name != "participative":  # its chosen tokens have no position of their own here
        with intervene(Jitter(scale=0.0)):
            torch.testing.assert_close(rollout(pipeline, 15), latents, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [{}, {"local_attn_size": 5, "sink_size": 1}], ids=["full", "window"])
def test_a_probe_denoises_a_block_again_and_leaves_no_trace(window):
    pipeline = tiny_pipeline(**window)
    base, edit = rollout(pipeline, FRAMES), Ablate("zero", layers=[1], passes="denoise")
    again, edited = [], []

    def probe(number, denoise):
        with intervene(edit):
            edited.append(denoise())
        again.append(denoise())

    assert torch.equal(rollout(pipeline, FRAMES, probe=probe), base)
    assert torch.equal(torch.cat(again, 1), base)
    with intervene(replace(edit, blocks=(1,))):
        assert torch.equal(block(rollout(pipeline, FRAMES), 1), edited[1])
    chooses = make_policy("participative", window=9, sink=1, budget=8, recent=3)
    with pytest.raises(ConfigError, match="participative changes its cache"):
        rollout(CausalInferencePipeline(pipeline.model, cache_policy=chooses), FRAMES, probe=probe)
