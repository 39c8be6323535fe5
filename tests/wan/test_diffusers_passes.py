"""Which pass a forward of a pipeline is: chunk, step, evaluation and branch; and that nothing outlives it."""

from contextlib import ExitStack

import diffusers
import pytest
import torch
import torch.nn.attention.flex_attention as flex_attention
from helpers import video_pipelines
from helpers.checkpoints import sample, small_wan_pipeline
from helpers.video_transformers import made, noise

from wan.activations import SiteCapture
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.diffusers_capture import capture_diffusers, watching
from wan.interventions import at, intervene
from wan.sites import counting, watched

pipeline = pytest.fixture(scope="module")(small_wan_pipeline)


@pytest.fixture(autouse=True)
def eager_flex(monkeypatch):
    """On a CPU flex_attention would be traced anew for every mask."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def captured(pipe, given, **more):
    """The calls of layer 0 of one run, whose latents are those of a run that nobody sees."""
    plain = video_pipelines.call(pipe, given, **more)
    with capture_diffusers(pipe, layers=[0], granularity="frame") as calls:
        seen = video_pipelines.call(pipe, given, **more)
    assert torch.equal(torch.as_tensor(plain), torch.as_tensor(seen))
    assert {call.frames for call in calls} == {"verified"} and {call.at.evaluation for call in calls} == {0}
    return calls


def told(calls) -> list:
    return [(c.at.block, c.at.step, c.at.branch, c.at.query_frames) for c in calls]


def both(block: int, step: int, *frames: int) -> list:
    return [(block, step, branch, frames) for branch in ("cond", "uncond")]


# --- Chunks, steps and branches
def test_video_to_video_begins_at_the_step_of_its_timestep():
    """The first step was 0, then 4 and 5; both branches were None."""
    pipe, given = video_pipelines.video_to_video()
    calls = captured(pipe, given)
    assert told(calls) == [one for n in (3, 4, 5) for one in both(0, n, 0, 1, 2)]
    times = pipe.scheduler.timesteps.tolist()
    assert [c.at.timestep for c in calls] == [times[n] for n in (3, 3, 4, 4, 5, 5)]


def test_cosmos_names_its_branches_by_their_embeddings():
    calls = captured(*video_pipelines.cosmos())
    assert told(calls) == [one for n in range(3) for one in both(0, n, 0, 1, 2)]
    pipe, given = video_pipelines.cosmos()
    assert {c.at.branch for c in captured(pipe, given, guidance_scale=1.0)} == {"cond"}


def test_chunks_of_helios_are_blocks_of_frames_of_their_own():
    pipe, given = video_pipelines.helios()
    calls = captured(pipe, given)
    expected = [one for k in range(3) for n in (0, 1) for one in both(k, n, 3 * k, 3 * k + 1, 3 * k + 2)]
    assert told(calls) == expected and calls[0].beside == (("history", 37),)

    def with_callback(pipe, step, t, kwargs):
        return kwargs

    # Its loop over a callback's tensors overwrites the variable that numbers chunks.
    assert told(captured(pipe, given, callback_on_step_end=with_callback)) == expected


def test_diffusion_forcing_in_its_three_modes():
    pipe, given = video_pipelines.skyreels()
    frames = (0, 1, 2, 3, 4)
    assert told(captured(pipe, given)) == [one for n in range(3) for one in both(0, n, *frames)]
    pipe, given = video_pipelines.skyreels(ar_step=1, causal_block_size=1)
    calls = captured(pipe, given)
    assert told(calls) == [one for n in range(7) for one in both(0, n, *frames)]
    assert [round(t) for _, t in calls[4].at.levels] == [800, 941, 999, 999, 999]
    pipe, given = video_pipelines.skyreels(num_frames=25, overlap_history=5)
    parts = [one for n in range(3) for one in both(0, n, *frames)]
    parts += [one for n in range(3) for one in both(1, n, 3, 4, 5, 6)]
    calls = captured(pipe, given)
    assert told(calls) == parts and dict(calls[-1].at.levels).keys() == {3, 4, 5, 6}


def test_chunks_of_anyflow_have_a_batch_of_both_branches_and_a_clean_pass():
    calls = captured(*video_pipelines.anyflow())
    expected = []
    for block, frames, clean in ((0, (0,), (0,)), (1, (1,), (0, 1)), (2, (2, 3), None)):
        passes = [(n, frames) for n in (0, 1)]
        if clean is not None:  # it computes the keys of all chunks so far
            passes.append((2, clean))
        expected += [(block, n, branch, f) for n, f in passes for branch in ("uncond", "cond")]
    assert told(calls) == expected
    assert [c.at.is_clean_pass for c in calls] == [step == 2 for _, step, _, _ in expected]
    assert {c.q_shape[0] for c in calls} == {1}


def test_modular_wan_tells_steps_and_the_branches_of_its_guiders():
    calls = captured(*video_pipelines.modular())
    assert told(calls) == [one for n in (0, 1) for one in both(0, n, 0, 1, 2)]
    layer = diffusers.LayerSkipConfig(indices=[1], fqn="blocks")
    guider = diffusers.SkipLayerGuidance(
        skip_layer_config=layer, skip_layer_guidance_start=0.0, skip_layer_guidance_stop=1.0
    )
    calls = captured(*video_pipelines.modular(guider))
    assert {c.at.branch for c in calls} == {"cond", "uncond", "cond_skip"}


# --- Evaluations
def test_forwards_that_nothing_tells_apart_are_numbered_and_a_run_begins_anew(pipeline):
    """Of three calls of a bare transformer with the same step, stacks kept the last."""
    model, given = made("wan")
    with torch.no_grad(), capture_diffusers(model, layers=[0], granularity="frame") as calls:
        for t in (900.0, 500.0, 100.0):
            model(**given | {"timestep": torch.full((2,), t)})
        with counting():
            model(**given)
    assert [(c.at.step, c.at.evaluation, c["evaluation"]) for c in calls] == [
        (None, n, n) for n in (0, 1, 2, 0)
    ]
    with capture_diffusers(pipeline, layers=[0], granularity="frame") as calls:
        sample(pipeline, num_inference_steps=2)
        sample(pipeline, num_inference_steps=2)
    assert len(calls) == 8 and {c.at.evaluation for c in calls} == {0}


# --- Nothing outlives a forward
def raising(error):
    def stop(*args, **kwargs):
        raise error

    return stop


PLACES = ["site", "hook", "attention", "norm", "text", "scheduler", "decode"]
ENDS = [(KeyboardInterrupt, place) for place in PLACES]
ENDS += [(SystemExit, "site"), (GeneratorExit, "attention"), (RuntimeError, "hook")]


@pytest.mark.parametrize("error, place", ENDS)
def test_a_pass_ends_with_its_forward_whatever_ends_it(pipeline, error, place, monkeypatch):
    """torch's hooks do not run where a KeyboardInterrupt ends a forward: all later passes were its own."""

    def clean() -> bool:
        return ATTENTION_WEIGHT_CAPTURE.current_pass is None

    block = pipeline.transformer.blocks[1]
    with capture_diffusers(pipeline, layers=[1], granularity="frame") as expected:
        sample(pipeline, num_inference_steps=2)
    with capture_diffusers(pipeline, layers=[1], granularity="frame") as calls:
        with monkeypatch.context() as patch:
            edits, sizes = [], {"height": 64, "width": 64, "num_frames": 9, "max_sequence_length": 16}
            if place == "site":
                edits = [at("z", layers=[1], steps=[1]), raising(error)]
            elif place == "hook":
                handle = block.attn1.register_forward_hook(raising(error))
            elif place == "attention":
                patch.setattr(block.attn2.to_v, "forward", raising(error))
            elif place == "norm":
                patch.setattr(type(block.norm1), "forward", raising(error))
            elif place == "text":
                patch.setattr(type(pipeline.text_encoder), "forward", raising(error))
            elif place == "scheduler":
                patch.setattr(type(pipeline.scheduler), "step", raising(error))
            else:
                patch.setattr(type(pipeline.vae), "decode", raising(error))
            with pytest.raises(error), watching(pipeline), ExitStack() as stack:
                if edits:
                    stack.enter_context(intervene(*edits))
                pipeline("a circle", num_inference_steps=2, **sizes)
            if place == "hook":
                handle.remove()
        assert clean()
        count = len(calls)
        sample(pipeline, num_inference_steps=2)
    assert clean() and told(calls[count:]) == told(expected)
    for mine, other in zip(calls[count:], expected, strict=True):
        assert torch.equal(mine.values["frame_mass"], other.values["frame_mass"])
        assert mine.at.timestep == other.at.timestep


# --- What others do to a model meanwhile
def test_arguments_are_read_by_the_signature_of_the_class(pipeline):
    """A wrapper of (*args, **kwargs) in forward's place gave KeyError 'hidden_states'."""
    model = small_wan_pipeline().transformer
    original = model.forward
    model.forward = lambda *args, **kwargs: original(*args, **kwargs)
    given = [noise(1, 16, 3, 4, 6), torch.tensor([700.0]), noise(1, 7, 64)]
    with torch.no_grad(), capture_diffusers(model, layers=[0], granularity="frame") as calls:
        model(*given)
        model(hidden_states=given[0], timestep=given[1], encoder_hidden_states=given[2])
    assert [c.at.timestep for c in calls] == [700.0, 700.0]
    assert torch.equal(calls[0].values["frame_mass"], calls[1].values["frame_mass"])


def first_block(pipe):
    return diffusers.FirstBlockCacheConfig(threshold=0.0)


def pyramid_attention(pipe):
    return diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(100, 950),
        spatial_attention_block_identifiers=("blocks",),
        current_timestep_callback=lambda: pipe._current_timestep,
    )


def faster_cache(pipe):
    return diffusers.FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 681),
        tensor_format="BCFHW",
        is_guidance_distilled=True,
        current_timestep_callback=lambda: pipe._current_timestep,
    )


def taylor_seer(pipe):
    return diffusers.TaylorSeerCacheConfig(cache_interval=2)


@pytest.mark.parametrize("config", [first_block, pyramid_attention, faster_cache, taylor_seer])
def test_caches_that_come_and_go_neither_end_nor_double_a_capture(config):
    # 1. Enabled all the while: the latents are those that nobody sees.
    pipe = small_wan_pipeline()
    pipe.transformer.enable_cache(config(pipe))
    plain = sample(pipe, num_inference_steps=4, guidance_scale=1.0)
    pipe.transformer._reset_stateful_cache()
    with capture_diffusers(pipe, layers=[1], granularity="frame") as calls:
        seen = sample(pipe, num_inference_steps=4, guidance_scale=1.0)
    assert torch.equal(plain, seen) and len({c.at.step for c in calls}) == len(calls) <= 4
    pipe.transformer.disable_cache()
    # 2. Enabled and disabled inside.
    with capture_diffusers(pipe, layers=[1], granularity="frame") as calls:
        sample(pipe, num_inference_steps=2, guidance_scale=1.0)
        pipe.transformer.enable_cache(config(pipe))
        sample(pipe, num_inference_steps=2, guidance_scale=1.0)
        pipe.transformer.disable_cache()
        first = len(calls)
        sample(pipe, num_inference_steps=2, guidance_scale=1.0)
    assert [c.at.step for c in calls[:2]] == [c.at.step for c in calls[first:]] == [0, 1]
    for part in pipe.transformer.modules():
        assert "_call_impl" not in vars(part)


def test_sites_tell_their_evaluation_too():
    model, given = made("wan")
    keep = SiteCapture(("resid_post",), layers=[1])
    with torch.no_grad(), watching(model), watched(keep):
        for _ in range(2):
            model(**given)
    assert [one.where.evaluation for one in keep.kept] == [0, 1]
