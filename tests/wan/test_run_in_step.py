"""Patches from a second run in step: they are that run's own tensors, and the run leaves nothing behind."""

import threading

import pytest
import torch
from helpers.rollouts import TINY, tiny_pipeline

from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.errors import ConfigError
from wan.interventions import ACTIVE_EDITS, Ablate, InterventionError, Patch, Source, intervene
from wan.offload import StreamedBlocks
from wan.pipeline import CausalInferencePipeline
from wan.policies import make_policy
from wan.recorders import RunInStep, record_head_outputs

CHOSEN = {"layers": [1], "heads": [2], "blocks": [1], "steps": [1], "passes": "denoise"}
CALL = {"layers": [1], "blocks": [1], "steps": [1]}
OTHER = Source(seed=2)


def of_seed(pipeline, seed: int, frames: int = 6, width: int = 10):
    """A rollout that can be started any number of times."""

    def start() -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(1, frames, 16, 2, width, generator=generator)
        renoise = torch.randn(3, *noise.shape, generator=generator)
        text = torch.randn(1, 4, TINY["text_dim"], generator=generator)
        return pipeline.inference(noise, prompt_embeds=text, renoise=renoise)[1]

    return start


def captured(start, **capture) -> torch.Tensor:
    with ATTENTION_WEIGHT_CAPTURE.capture(**(CALL | {"granularity": "token"} | capture)) as calls:
        start()
    return calls[0]["token_logits"]


def patched(edit, mine, source, **capture):
    with RunInStep(source) as other, intervene(edit, data={edit: other}):
        return captured(mine, **capture)


@pytest.mark.parametrize("edit", [Patch("z", OTHER, **CHOSEN), Ablate("resample", OTHER, **CHOSEN)], ids=str)
def test_z_is_that_of_the_source(edit):
    pipeline = tiny_pipeline()
    mine, source = of_seed(pipeline, 1), of_seed(tiny_pipeline(seed=5), 2)  # other weights, too
    with record_head_outputs() as of_mine:
        mine()
    with record_head_outputs() as of_source:
        source()
    with RunInStep(source) as other, intervene(edit, data={edit: other}), record_head_outputs() as edited:
        mine()
    where = (("self", 1, 1, "cond"), 1)
    assert torch.equal(edited.means[where][:, :, 2], of_source.means[where][:, :, 2])
    assert torch.equal(edited.means[where][:, :, :2], of_mine.means[where][:, :, :2])
    assert len(edited.means) == len(of_mine.means)  # the source's calls were not recorded among these


def test_qk_transfers_the_attention_map():
    pipeline = tiny_pipeline()
    mine, source = of_seed(pipeline, 1), of_seed(pipeline, 2)
    logits = patched(Patch("qk", OTHER, **CHOSEN), mine, source)
    assert torch.equal(logits[:, 2], captured(source)[:, 2])
    assert torch.equal(logits[:, :2], captured(mine)[:, :2])


def test_kv_of_cached_frames_is_that_of_the_source_and_own_keys_stay():
    pipeline = tiny_pipeline()
    mine, source = of_seed(pipeline, 1), of_seed(pipeline, 2)
    chosen = CHOSEN | {"steps": [0], "layers": [0]}  # there the queries are the same, but for what is patched
    edit, keep = Patch("kv", OTHER, frames=[1, 2], **chosen), {"layers": [0], "steps": [0]}
    logits, plain = patched(edit, mine, source, **keep), captured(mine, **keep)
    S = 5
    assert torch.equal(logits[..., :S], plain[..., :S]) and torch.equal(
        logits[..., 3 * S :], plain[..., 3 * S :]
    )
    assert torch.equal(logits[:, :2], plain[:, :2])
    assert not torch.isclose(logits[:, 2, :, S : 3 * S], plain[:, 2, :, S : 3 * S]).any(-1).all()


@pytest.mark.parametrize(
    "policy, frames",
    [({"name": "full"}, 6), ({"name": "ema_sink", "window": 6, "sink": 1}, 15)],
    ids=["full", "ema_sink, whose means the two must not share"],
)
def test_a_run_patched_from_itself_keeps_its_bits_and_many_edits_share_a_source(policy, frames):
    pipeline = CausalInferencePipeline(tiny_pipeline().model, cache_policy=make_policy(**policy))
    mine = of_seed(pipeline, 1, frames)
    plain = mine()
    everything = [Patch(what, OTHER, passes="all") for what in ("qk", "z")]
    cached = Patch("kv", OTHER, passes="all")
    with (
        RunInStep(of_seed(pipeline, 1, frames)) as other,
        intervene(*everything, cached, data=dict.fromkeys([*everything, cached], other)),
    ):
        assert torch.equal(mine(), plain)


def test_nothing_is_left_behind_also_where_the_edited_run_fails():
    pipeline = tiny_pipeline()
    mine, before = of_seed(pipeline, 1), threading.active_count()
    edit = Patch("z", OTHER, layers=[0], passes="all")
    with (
        pytest.raises(RuntimeError, match="in the middle"),
        RunInStep(of_seed(pipeline, 2)) as other,
        intervene(edit, data={edit: other}),
        ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame") as calls,
    ):
        pipeline.model.blocks[1].register_forward_pre_hook(lambda *_: fail_in_main(len(calls) > 1))
        mine()
    assert threading.active_count() == before
    assert not ACTIVE_EDITS.active and not ATTENTION_WEIGHT_CAPTURE.active
    assert ATTENTION_WEIGHT_CAPTURE.now is None


def fail_in_main(now: bool) -> None:
    if now and threading.current_thread() is threading.main_thread():
        raise RuntimeError("in the middle")


@pytest.mark.parametrize(
    "source, message",
    [
        ({"frames": 3}, "the source has no call of layer 1, block 1, step 1"),
        ({"width": 8}, "the source's call is of another shape"),
    ],
)
def test_a_source_of_other_shapes_is_an_error(source, message):
    pipeline = tiny_pipeline()
    for what in ("z", "qk", "kv"):
        with pytest.raises(InterventionError, match=message):
            patched(Patch(what, OTHER, **CHOSEN), of_seed(pipeline, 1), of_seed(pipeline, 2, **source))


@pytest.mark.parametrize(
    "policy",
    [
        make_policy("participative", window=9, sink=1, budget=8, recent=3),
        make_policy("memory_bank", window=6, sink=1, bank=2, interval=1),
    ],
    ids=lambda policy: policy.name,
)
def test_kv_that_the_source_chose_otherwise_is_an_error(policy):
    pipeline = CausalInferencePipeline(tiny_pipeline().model, cache_policy=policy)
    mine, edit = of_seed(pipeline, 1, frames=21), Patch("kv", OTHER, passes="all")
    with RunInStep(of_seed(pipeline, 1, frames=21)) as same, intervene(edit, data={edit: same}):
        edited = mine()
    assert torch.equal(edited, mine())
    with (
        pytest.raises(InterventionError, match="the source chose other keys for slot 1"),
        RunInStep(of_seed(pipeline, 2, frames=21)) as other,
        intervene(edit, data={edit: other}),
    ):
        mine()


def test_an_error_in_the_source_reaches_whoever_waits_for_it():
    def source():
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        patched(Patch("z", OTHER, **CHOSEN), of_seed(tiny_pipeline(), 1), source)


@pytest.mark.parametrize("layers", [[1], [0, 3], None])
def test_streamed_layers_are_not_shared_by_two_runs(layers):
    """Each would compute with weights that the other one fetched; a source of its own weights may."""
    resident, pipeline, of_source = tiny_pipeline(), tiny_pipeline(), tiny_pipeline(seed=5)
    expected = of_source_in(resident, tiny_pipeline(seed=5), layers)
    for one in (pipeline, of_source):
        one.model.blocks = StreamedBlocks(one.model.blocks, torch.float32, "cpu")
    with pytest.raises(ConfigError, match="cannot serve two runs in step; leave offload out"):
        of_source_in(pipeline, pipeline, layers)
    assert torch.equal(of_source_in(pipeline, of_source, layers), expected)


def of_source_in(pipeline, other, layers) -> torch.Tensor:
    edit = Patch("z", OTHER, layers=layers, heads=[0], passes="all")
    with RunInStep(of_seed(other, 2)) as source, intervene(edit, data={edit: source}):
        return of_seed(pipeline, 1)()
