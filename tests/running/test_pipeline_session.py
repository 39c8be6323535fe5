"""Pipelines of diffusers behind the doors of a session: capture, intervene, and the atlas of a run."""

import shutil

import pytest
import torch
from helpers.checkpoints import sample, small_wan_pipeline
from helpers.video_transformers import made

from experiments import ActivationStore, Atlas, capture, intervene
from experiments.caches.files import RunError
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.interventions import Knockout, at
from wan.sites import Pass

pipeline = pytest.fixture(scope="module")(small_wan_pipeline)


def call(pipeline, prompt="a circle", seed=1, **more):
    """One step of a small video without guidance, from a fresh generator."""
    given = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 1, "max_sequence_length": 16}
    given |= {"generator": torch.Generator().manual_seed(seed), "guidance_scale": 1.0}
    return pipeline(prompt, **given | {"output_type": "latent"} | more).frames


def test_an_atlas_of_a_pipeline_names_model_prompt_and_steps(pipeline, tmp_path):
    with capture(pipeline, layers=[1], cross=True) as seen:
        plain = sample(pipeline)
        pipeline("a square", height=64, width=64, num_frames=9, num_inference_steps=2, max_sequence_length=16,
                 guidance_scale=1.0, output_type="latent")  # fmt: skip
    assert torch.equal(plain, sample(pipeline))
    first, second = seen.runs
    path = seen.atlas(first).save(tmp_path / "theirs.pt")
    atlas = Atlas.open(path)
    assert (atlas["model"], atlas["prompt"], atlas["branch"]) == ("WanPipeline", "a circle", "cond")
    assert atlas["layers"] == [1] and atlas["pass_steps"] == [0, 1, 2]
    assert atlas["cross_tokens"] == ["▁a", "▁circle", "</s>"] and atlas["cross_mass"].shape == (1, 3, 3, 3, 3)
    calls = [c for c in first.records if (c["kind"], c["step"], c["branch"]) == ("self", 2, "uncond")]
    uncond = seen.atlas(first, branch="uncond")
    assert torch.equal(uncond["frame_mass"][0, 2], calls[0].values["frame_mass"][0])
    assert uncond["pass_timesteps"][2] == calls[0]["timestep"]
    assert seen.atlas()["prompt"] == "a square" == second.config.prompt
    with pytest.raises(RunError, match="branch 'uncond' is not in what was captured; it has cond"):
        seen.atlas(branch="uncond")
    assert torch.equal(first.latents, plain.transpose(1, 2)) and first.video.shape == (9, 64, 64, 3)
    assert "encode_prompt" not in vars(pipeline)


def test_items_of_a_batch_are_runs(pipeline):
    with capture(pipeline, layers=[0], steps=[1]) as seen:
        pipeline(["a circle", "a square"], height=64, width=64, num_frames=5, num_inference_steps=2,
                 max_sequence_length=16, output_type="latent")  # fmt: skip
    assert [run.config.prompt for run in seen.runs] == ["a circle", "a square"]
    one, other = (seen.atlas(run) for run in seen.runs)
    assert one["pass_steps"] == [1] and not torch.equal(one["frame_mass"], other["frame_mass"])


@pytest.mark.parametrize("name", ["skyreels", "hunyuan15"])
def test_one_forward_of_a_transformer_makes_an_atlas_and_several_need_their_steps(name, tmp_path):
    model, given = made(name)
    with capture(model) as seen, torch.no_grad():
        model(**given)
    atlas = Atlas.open(seen.atlas().save(tmp_path / "theirs.pt"))
    total = atlas["frame_mass"].sum(-1)
    if name == "hunyuan15":  # frames attend to text in the same softmax
        assert (total < 1).all()
        total = total + atlas["condition_mass"].sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))
    assert name != "skyreels" or torch.equal(atlas["attended"][0, 0, 0].int(), torch.tensor(
        [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.int32))  # fmt: skip
    with capture(model) as seen, torch.no_grad():
        for _ in range(2):
            model(**given)
    with pytest.raises(RunError, match=r"have evaluation 0, 1: choose one, captured.atlas\(evaluation=0\)"):
        seen.atlas()
    assert seen.atlas(evaluation=1)["frame_mass"].shape == atlas["frame_mass"].shape
    frames = tuple(range(len(atlas["frame_mass"][0, 0, 0])))
    with capture(model) as seen, torch.no_grad():
        for step in (0, 1):
            with ATTENTION_WEIGHT_CAPTURE.during(Pass(query_frames=frames, step=step)):
                model(**given)
    assert seen.atlas()["pass_steps"] == [0, 1]


def test_activations_and_edits_of_a_pipeline(pipeline):
    with capture(pipeline, "resid_post", "z", layers=[1], steps=[0]) as seen:
        plain = sample(pipeline)
    assert seen["resid_post"].stack().shape == (1, 1, 1, 2, 1, 48, 48)  # both branches
    assert [place.branch for place in seen["z"].places] == ["cond", "uncond"]
    with intervene(pipeline, Knockout(frames="first", steps=[1], branch="cond", passes="all")) as active:
        edited = sample(pipeline)
    assert active.changed == [2] and not torch.equal(plain, edited)
    with intervene(pipeline.transformer, at("z", layers=[0]), lambda z, where: 0 * z) as active:
        assert not torch.equal(plain, sample(pipeline))
    assert active.changed == [6]
    for chosen, message in (
        ({"layers": [2]}, "layer 2 is not in 0..1"),
        ({"blocks": [0]}, "leave blocks out"),
        ({"steps": -1}, "step -1: a pipeline tells its steps when it runs"),
        ({"layer": 0}, r"knows no 'layer'; did you mean layers\?"),
        ({"mass": "yes"}, "mass 'yes' should be True or False"),
        ({"stream_to": "folder"}, "stream_to= takes activations: name a site"),
    ):
        with pytest.raises(ValueError, match=message), capture(pipeline, **chosen):
            pass


def test_videos_of_a_pipeline_go_to_a_store_as_they_come(pipeline, tmp_path):
    chosen = {"layers": [1], "dtype": "float16"}
    with capture(pipeline, "resid_post", **chosen) as seen:
        plain = sample(pipeline)
    with capture(pipeline, "resid_post", stream_to=tmp_path, **chosen) as streamed:
        assert torch.equal(sample(pipeline), plain)
        sample(pipeline, guidance_scale=1.0)
    assert [run.common["seed"] for run in streamed.runs] == [1, 1]
    store = ActivationStore(tmp_path)
    store.check()
    assert [run.about["prompt"] for run in store.runs] == ["a circle"] * 2
    guided = next(
        run for run in store.runs if run.about["fingerprint"] == streamed.runs[0].common["fingerprint"]
    )
    assert len(guided.blocks) == 3  # a step each
    assert torch.equal(guided.tables["resid_post"].stack(), seen["resid_post"].stack())
    assert torch.equal(guided.latents, streamed.runs[0].latents)
    rows = store.rows("resid_post", 1)
    assert (len(rows), *rows[0].shape) == (3 * (2 + 1) * 48, 48)
    assert streamed["resid_post"].stack().shape == (1, 1, 3, 1, 48, 48)


def test_a_store_has_each_run_of_a_pipeline_once(pipeline, tmp_path):
    """Three runs of one seed were three, and a removed one gave its number to another."""

    def add(seed, **more):
        with capture(pipeline, "z", layers=[1], stream_to=tmp_path):
            call(pipeline, seed=seed, **more)

    for seed in (3, 3, 4):
        add(seed)
    runs = ActivationStore(tmp_path).runs
    assert [(run.about["seed"], len(run.tables["z"])) for run in runs] == [(3, 1), (4, 1)]
    shutil.rmtree(runs[0].path)
    add(3)
    assert [run.about["seed"] for run in ActivationStore(tmp_path).runs] == [3, 4]
    add(5, num_videos_per_prompt=2)  # a batch is a run a video
    assert [run.about["seed"] for run in ActivationStore(tmp_path).runs] == [3, 4, 5, 5]
    drawn = torch.Generator().manual_seed(6)
    torch.randn(1, generator=drawn)
    with capture(pipeline, "z", layers=[1], stream_to=tmp_path) as seen:
        call(pipeline, generator=drawn)
    assert seen.runs[0].common["seed"] is None and len(seen.runs[0].common["generator_state"]) == 16
    assert ActivationStore(tmp_path).runs[-1].about["seed"] is None


def fail_in_step(number: int, **more):
    def on_step(pipe, step, t, given):
        if step == number:
            pipe.encode_prompt("another prompt", max_sequence_length=16)
            raise RuntimeError("stopped")
        return given

    return {"callback_on_step_end": on_step, **more}


def test_an_error_amid_a_video_loses_no_other_and_is_no_whole_run(pipeline, tmp_path):
    with pytest.raises(RuntimeError, match="stopped"), capture(pipeline, layers=[0]) as seen:
        sample(pipeline, num_inference_steps=2)
        sample(pipeline, **fail_in_step(1))
    assert [(len(run.records), run.config.prompt) for run in seen.runs] == [(4, "a circle"), (4, "a circle")]
    with capture(pipeline, "z", layers=[0], stream_to=tmp_path):
        with pytest.raises(RuntimeError, match="stopped"):
            sample(pipeline, **fail_in_step(1))
        sample(pipeline, num_inference_steps=2)
    assert [len(run.blocks) for run in ActivationStore(tmp_path).runs] == [2]


def test_two_pipelines_are_captured_and_edited_apart(pipeline):
    """It was refused; an edit of one holds for it alone, and each capture sees its own calls."""
    other, edit = small_wan_pipeline(), Knockout(frames=0, layers=[0], passes="all")
    plain = sample(other, num_inference_steps=1)
    with (
        capture(pipeline, layers=[0]) as mine,
        capture(other, "z", layers=[0]) as theirs,
        intervene(pipeline, edit) as active,
    ):
        assert torch.equal(sample(other, num_inference_steps=1), plain)
        sample(pipeline, num_inference_steps=1)
    assert (len(mine.runs), len(theirs.runs), active.changed) == (1, 1, [2])
    assert len(mine.calls) == len(theirs["z"]) == 2
    assert "interventions" not in theirs.runs[0].common and mine.runs[0].edits
    refused = pytest.raises(ValueError, match="this pipeline is captured already")
    with capture(pipeline, layers=[0]), refused, capture(pipeline, layers=[1]):
        pass
    # Of one pipeline they nest, and end in any order; its transformer alone may come first.
    contexts = [intervene(pipeline.transformer, edit), capture(pipeline, "z"), capture(pipeline, layers=[0])]
    _, seen, calls = [context.__enter__() for context in contexts]
    sample(pipeline, num_inference_steps=1)
    for context in contexts:
        context.__exit__(None, None, None)
    assert (len(seen.runs), len(calls.runs), calls.calls[0]["model"]) == (1, 1, "transformer")
    assert "encode_prompt" not in vars(pipeline)


def test_words_are_those_that_the_encoder_was_given(pipeline):
    """As they stood in the prompt, and the prompt's beside what the negative prompt's tokens get."""
    small = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 1, "output_type": "latent"}
    with capture(pipeline, layers=[0], cross=True) as seen:
        pipeline(" a &amp;  circle ", max_sequence_length=16, **small)
        pipeline("a red circle over a blue square", max_sequence_length=4, **small)
    cleaned, cut = (seen.atlas(run) for run in seen.runs)
    assert cleaned["cross_tokens"] == ["▁a", "▁", "&", "▁circle", "</s>"]
    assert cut["cross_tokens"] == ["▁a", "▁red", "▁circle", "</s>"] and cut["cross_mass"].shape[-1] == 4
    assert "cross_mass" not in seen.atlas(branch="uncond")


def test_every_layer_of_joint_models_can_be_named():
    model, given = made("hunyuan")
    with capture(model, layers=[1]) as seen, torch.no_grad():
        model(**given)
    assert {call.site.layer for call in seen.calls} == {1}
