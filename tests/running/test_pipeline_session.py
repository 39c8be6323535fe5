"""Pipelines of diffusers behind the doors of a session: capture, intervene, and the atlas of a run."""

import re
import shutil
from dataclasses import replace
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from helpers import video_pipelines
from helpers.checkpoints import sample, small_wan_pipeline
from helpers.video_transformers import made

from experiments import (
    ActivationStore,
    Atlas,
    Scores,
    Source,
    attribute,
    capture,
    compare,
    gradients,
    intervene,
    load,
    x0_lens,
)
from experiments.caches.files import CacheError, RunError
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.config import RunConfig
from wan.errors import ConfigError, UserError
from wan.interventions import Ablate, Knockout, Patch, at
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
    assert re.fullmatch(r"Edits: Knockout\(.*\) \(2 calls\)", str(active))
    unopened = capture(pipeline, layers=[1])
    assert str(unopened).startswith("capture(...): a context")
    with pytest.raises(AttributeError, match=r"no 'atlas' until it is opened: with capture\(\.\.\.\) as"):
        unopened.atlas()
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
    assert "seed not recorded" in repr(seen.runs[0])
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


# --- What sessions of ours have, by the same code
def test_a_run_has_latents_video_seed_and_settings(pipeline):
    session = load(pipeline)
    assert session is load(pipeline) and session.models == {"transformer": pipeline.transformer}
    given = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 2, "max_sequence_length": 16}
    run = session.generate("a circle", generator=torch.Generator().manual_seed(7), **given)
    latent = session.generate(
        "a circle", generator=torch.Generator().manual_seed(7), output_type="latent", **given
    )
    assert torch.equal(run.latents, latent.latents) and run.latents.shape == (1, 3, 16, 8, 8)
    assert torch.equal(run.video, latent.video)  # the pipeline's own, and what its VAE makes of the latents
    assert run.common["fingerprint"] == latent.common["fingerprint"]
    facts = run.common
    assert (facts["seed"], facts["prompt"], facts["model"]) == (7, "a circle", "WanPipeline")
    assert facts["scheduler"]["class"] == "UniPCMultistepScheduler" and facts["guidance_scale"] == 5.0
    assert facts["config"]["num_inference_steps"] == 2 and facts["weights"] == "pipeline"
    assert compare(run, latent).psnr.isinf().all()
    others = [
        session.generate("a circle", generator=torch.Generator().manual_seed(8), **given),
        session.generate("a square", generator=torch.Generator().manual_seed(7), **given),
        session.generate("a circle", generator=torch.Generator().manual_seed(7), **given | {"width": 32}),
    ]
    assert len({other.common["fingerprint"] for other in [run, *others]}) == 4
    with pytest.raises(ValueError, match="takes no 'num_steps'"):
        session.generate("a circle", num_steps=3)
    with pytest.raises(ValueError, match="WanTransformer3DModel alone makes no video"):
        load(pipeline.transformer).generate("a circle")
    with pytest.raises(ValueError, match="takes num_frames when it is called"):
        load(pipeline, num_frames=3)
    for thing in (5, [1], SimpleNamespace(unet=pipeline.transformer)):
        with pytest.raises(ValueError, match="is no session, no pipeline") as error, capture(thing):
            pass
        assert "such as WanPipeline" in str(error.value) and len(str(error.value)) < 190
    with pytest.raises(ValueError, match="5 is no name or path of a config, no folder"):
        load(5)


def test_a_batch_is_reduced_video_by_video(pipeline):
    """One video's mean was that of both."""
    prompts = ["a circle", "a red square"]
    with capture(pipeline, "resid_post", layers=[1], reduce=lambda x, where: x.mean((0, 1))) as seen:
        call(pipeline, prompts)
    with capture(pipeline, "resid_post", layers=[1]) as whole:
        call(pipeline, prompts)
    assert [run.config.prompt for run in seen.runs] == prompts
    for run, other in zip(seen.runs, whole.runs, strict=True):
        mean = other.activations["resid_post"][0].mean((0, 1))
        assert torch.equal(run.activations["resid_post"][0], mean)


def test_prompts_are_those_whose_embeddings_were_used(pipeline):
    """The first video was of the prompt that was encoded first, whichever it got."""
    with capture(pipeline, layers=[0]) as seen:
        encoded = [pipeline.encode_prompt(text, negative_prompt="", max_sequence_length=16)
                   for text in ("first", "second")]  # fmt: skip
        for positive, negative in encoded[::-1]:
            call(pipeline, None, prompt_embeds=positive, negative_prompt_embeds=negative)
        call(pipeline, None, prompt_embeds=2 * positive, negative_prompt_embeds=negative)
    assert [run.config.prompt for run in seen.runs] == ["second", "first", None]
    assert Atlas(seen.atlas())["prompt"] is None


def test_edits_are_recorded_in_runs_that_they_touched(pipeline):
    """Those that were opened inside of a capture were not."""
    edit = Knockout(frames=0, layers=[1], heads=[2], passes="all")
    with capture(pipeline) as seen, intervene(pipeline, edit):
        call(pipeline)
    with intervene(pipeline, edit), capture(pipeline) as outer:
        call(pipeline)
    with capture(pipeline) as plain:
        call(pipeline)
    edited, other = seen.atlas(), plain.atlas()
    assert float(edited["frame_mass"][1, :, 2, :, 0].max()) == 0
    assert edited["interventions"]["calls"] == outer.atlas()["interventions"]["calls"] == [1]
    assert "interventions" not in other and "(1 calls)" in repr(seen.runs[0])
    assert edited["fingerprint"] == outer.atlas()["fingerprint"] != other["fingerprint"]
    with pytest.raises(ValueError, match="edits"):
        Atlas.mean([edited, other])


def test_edits_that_begin_amid_a_run_are_its_own(pipeline):
    context = intervene(pipeline, at("z", layers=[1]), lambda z, where: 0 * z)

    def on_step(pipe, step, t, given):
        if step == 0:
            context.__enter__()
        return given

    with capture(pipeline, layers=[0]) as seen:
        call(pipeline, num_inference_steps=3, callback_on_step_end=on_step)
    context.__exit__(None, None, None)
    assert seen.runs[0].common["interventions"]["calls"] == [2]


def test_a_suspended_generator_edits_no_run_of_its_caller(pipeline):
    def edited():
        with intervene(pipeline, Knockout(frames=0, layers=[1], passes="all")):
            yield

    suspended = edited()
    next(suspended)
    with pytest.raises(ValueError, match="is suspended inside intervene"):
        call(pipeline)
    suspended.close()
    call(pipeline)


def test_a_patch_comes_from_another_prompt_and_means_from_others(pipeline, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain, square = call(pipeline), call(pipeline, "a red square")
    with intervene(pipeline, Patch("flow", Source(prompt="a red square"), passes="all")) as active:
        patched = call(pipeline, num_inference_steps=1)
    assert active.changed == [1] and torch.equal(patched, square)
    edit = Patch("z", Source(prompt="a red square"), layers=[1], heads=[0], passes="all")
    for other in (edit, Ablate("mean", layers=[1], passes="all")):
        with intervene(pipeline, other) as active:
            assert not torch.equal(call(pipeline), plain)
        assert active.changed == [1]
    assert torch.equal(call(pipeline), plain)
    session = load(pipeline)
    edited = []
    for prompts in (["a dog"], ["a cat"]):
        session.config = replace(session.config, reference_prompts=prompts)
        with intervene(session, Ablate("mean", layers=[1], passes="all")):
            edited.append(call(pipeline))
    assert not torch.equal(*edited)  # means are of the prompts that were named
    session.config = replace(session.config, reference_prompts=RunConfig().reference_prompts)
    other = Patch("z", Source(weights="base", prompt="a red square"), passes="all")
    with intervene(pipeline, other), pytest.raises(ValueError, match="leave weights out"):
        call(pipeline)


def test_gradients_of_a_steps_x0_are_those_of_small_changes(pipeline):
    session = load(pipeline)
    plain = call(pipeline, num_inference_steps=2)

    def metric(x0):
        return x0[:, :, :, 2:6].double().square().mean()

    with gradients(session, "z", layers=[1], steps=[1]) as grads:
        assert torch.equal(call(pipeline, num_inference_steps=2), plain)
        grads.backward(metric)
    (gradient,) = grads["z"].values
    way, values = torch.randn_like(gradient), []
    for change in (1e-2, -1e-2):
        edit = at("z", layers=[1], steps=[1])(lambda z, where, change=change: z + change * way)
        with capture(pipeline, "x0", steps=[1]) as seen, intervene(pipeline, edit):
            call(pipeline, num_inference_steps=2)
        values.append(float(metric(seen["x0"][0])))
    slope = (values[0] - values[1]) / 2e-2
    assert abs(slope - float((gradient * way).sum())) < 2e-2 * abs(slope)
    probe = torch.nn.Linear(8, 1)
    with gradients(session, "z", layers=[1], steps=[1]) as grads:
        call(pipeline, num_inference_steps=2)
        with pytest.raises(ValueError, match="depends on no x0"):
            grads.backward(lambda x0: probe(x0.detach().flatten()[:8]).sum())
    refused = pytest.raises(ValueError, match="its sampler cannot be differentiated")
    with refused, gradients(session, "z", through="rollout"):
        pass


@pytest.mark.parametrize("name", ["ltx", "hunyuan15", "skyreels", "helios"])
def test_a_transformer_alone_has_gradients(name):
    model, given = made(name)
    with gradients(model, "z", layers=[1]) as grads, torch.no_grad():
        model(**given)
        grads.backward(lambda x0: x0.square().mean())
    assert grads["z"][0].abs().max() > 0


def test_attribution_of_a_pipeline_takes_its_arguments(pipeline):
    given = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 2, "guidance_scale": 1.0}
    source = Source(prompt="a red square")
    scores = attribute(
        pipeline, "a circle", seed=1, source=source, steps=[1], max_sequence_length=16, **given
    )
    assert scores["z"].shape == (2, 1, 3) and scores["mlp_out"].shape == (2, 1, 1)
    assert scores["z"].abs().max() > 0
    # All of the last layer's MLP and attention leads where the source went, to first order.
    assert scores.cache["metric_source"] == pytest.approx([1.0], abs=1e-5)


def test_attribution_scores_the_branch_of_the_prompt(pipeline):
    """With guidance on, where the runs' other branches are equal in the first step."""
    given = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 2, "max_sequence_length": 16}
    given |= {"prompt": "a circle", "seed": 1, "source": Source(prompt="a red square")}
    found = {branch: attribute(pipeline, branch=branch, **given) for branch in (None, "uncond")}
    assert found[None].cache["pass_branches"] == ["cond", "cond"]
    assert found[None].cache["metric_source"] == pytest.approx([1, 1], abs=1e-5)
    assert "2 passes, branch cond" in repr(found[None])
    assert found["uncond"].cache["metric_source"] == pytest.approx([0, 1], abs=1e-5)
    assert found["uncond"]["z"][:, 0].eq(0).all() and found["uncond"]["z"][:, 1].any()
    for wrong, problem in (({"branch": "x"}, "it has cond, uncond"), ({"brnch": 1}, "takes no 'brnch'")):
        with pytest.raises(ConfigError, match=problem):
            attribute(pipeline, **given | wrong)


def test_attribution_leaves_out_sites_that_a_layer_lacks(tmp_path):
    """The second layer is a single-stream one."""
    pipe, given = video_pipelines.hunyuan()
    source = Source(prompt="a red square")
    scores = attribute(pipe, seed=1, source=source, **given)
    assert scores["z"].isfinite().all()
    assert scores["mlp_out"].isfinite().flatten(1).all(1).tolist() == [True, False]
    assert "nan" not in scores.table() and scores.plot()
    path = scores.save(tmp_path / "scores.pt")
    assert Scores.open(path)["mlp_out"].isnan().any()
    assert list(attribute(pipe, seed=1, source=source, layers=[1], **given)) == ["z"]
    with pytest.raises(ConfigError, match="no layer that was chosen has mlp_out in step 0"):
        attribute(pipe, seed=1, source=source, layers=[1], sites=["mlp_out"], **given)


def test_a_seed_makes_a_new_generator(pipeline):
    given = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 1, "max_sequence_length": 16}
    session = load(pipeline)
    run = session.generate("a circle", seed=3, **given)
    same = session.generate("a circle", generator=torch.Generator().manual_seed(3), **given)
    assert run.config.seed == 3 and torch.equal(run.latents, same.latents)
    with pytest.raises(ConfigError, match="leave one out"):
        session.generate("a circle", seed=3, generator=torch.Generator(), **given)


# --- Refusals name what helps
def test_refusals_name_what_helps(pipeline):
    def refused(problem: str):
        return pytest.raises(UserError, match=problem)

    with refused(r"step 5 is not in 0\.\.1"), capture(pipeline, steps=[5]):
        call(pipeline, num_inference_steps=2)
    with refused("heads go with a site, or with words="), capture(pipeline, heads=[1]):
        pass
    every = Knockout(frames=[0, 1, 2], passes="all")
    with refused("leave it a frame or a token$"), intervene(pipeline, every):
        call(pipeline)
    with capture(pipeline, words=["circle"]) as seen:
        call(pipeline)
    with refused("for an atlas leave words= out"):
        seen.atlas()
    with capture(pipeline), refused("or leave the one that is open first"), capture(pipeline):
        pass
    with refused("another prompt or seed of it; leave weights out"):
        attribute(pipeline, "a circle", seed=1, source=Source(weights="none.pt"))
    with refused("numbers of tokens: run.prompt_tokens lists their texts"):
        Knockout(tokens="circle")
    with capture(pipeline) as seen:
        thread = Thread(target=call, args=(pipeline,))
        thread.start()
        thread.join()
    with refused("in the same thread"):
        seen.atlas()
    hint = r"a pipeline comes first: intervene\(pipe"
    with pytest.warns(UserWarning, match=hint), intervene(every):
        call(pipeline)
    with pytest.warns(UserWarning) as warned, intervene(Knockout(frames=0, passes="clean")):
        load(pipeline).generate("a circle", height=64, width=64, num_frames=9, num_inference_steps=1)
    assert "no call was edited by" in str(warned[0].message) and "comes first" not in str(warned[0].message)


# --- Weights as they are
def test_changed_weights_are_others(pipeline, tmp_path):
    pipeline = small_wan_pipeline()

    def run():
        with capture(pipeline, "z", layers=[1], stream_to=tmp_path) as seen:
            call(pipeline)
        return seen.runs[0].common

    first = run()
    weight = pipeline.transformer.blocks[0].attn1.to_q.weight
    with torch.no_grad():
        weight.mul_(3)
    with pytest.raises(CacheError, match="weights is 'pipeline', not 'changed'"):
        run()
    with torch.no_grad():
        weight.div_(3)
    before = weight.clone()
    for change in ("hook", "dtype", "load"):
        if change == "hook":
            hook = pipeline.transformer.blocks[1].register_forward_hook(lambda module, inputs, out: out)
        elif change == "dtype":
            pipeline.transformer.to(torch.bfloat16)
        else:
            state = pipeline.transformer.state_dict()
            state["blocks.0.attn1.to_q.weight"] = 2 * before
            pipeline.transformer.load_state_dict(state)
        with capture(pipeline, layers=[0]) as seen:
            call(pipeline)
        facts = seen.runs[0].common
        assert facts["weights"] == "changed" and facts["fingerprint"] != first["fingerprint"]
        if change == "hook":
            hook.remove()
        pipeline.transformer.to(torch.float32)
    other = small_wan_pipeline()  # another fine-tune of the same name
    with torch.no_grad():
        other.transformer.blocks[0].attn1.to_q.weight.mul_(2)
    refused = pytest.raises(CacheError, match="live_weights")
    with refused, capture(other, "z", layers=[1], stream_to=tmp_path):
        call(other)


def test_a_session_reads_the_transformer_that_the_pipeline_has(pipeline):
    pipeline = small_wan_pipeline()
    session = load(pipeline)
    pipeline.transformer = type(pipeline.transformer)(**pipeline.transformer.config).eval()
    with capture(session, layers=[1]) as seen:
        call(pipeline)
    with intervene(session, Knockout(frames=0, passes="all")) as edits:
        call(pipeline)
    assert seen.atlas()["weights"] == "changed" and edits.changed == [2]


def test_two_experts_have_one_session(pipeline):
    torch.manual_seed(5)
    second = type(pipeline.transformer)(**pipeline.transformer.config).eval()
    names = ("tokenizer", "text_encoder", "vae", "scheduler", "transformer")
    parts = {name: getattr(pipeline, name) for name in names}
    both = type(pipeline)(**parts, transformer_2=second, boundary_ratio=0.95)
    both.set_progress_bar_config(disable=True)
    session = load(both)
    assert list(session.models) == ["transformer", "transformer_2"]
    with capture(session, "z", layers=[1]) as seen, capture(session, layers=[1]) as calls:
        call(both, num_inference_steps=3)
    experts = {place.step: place.model for place in seen["z"].places}
    assert {*experts.values()} == {"transformer", "transformer_2"}
    assert [call["model"] for call in calls.calls] == [experts[step] for step in range(3)]
    assert seen["z"].stack().shape == (1, 1, 3, 1, 48, 3, 16)
    assert calls.atlas()["pass_steps"] == [0, 1, 2]


def test_calls_that_nothing_tells_apart_are_an_axis_or_refused():
    """The last of three forwards was all of them."""
    model, given = made("wan")
    with torch.no_grad(), capture(model, "resid_post", layers=[1]) as seen:
        for scale in (1, 2, 3):
            model(**given | {"hidden_states": scale * given["hidden_states"]})
    table = seen["resid_post"]
    assert table.axes[:3] == ("layer", "block", "evaluation") and table.stack().shape[:3] == (1, 1, 3)
    assert torch.equal(table.stack()[0, 0, 1], table[1])
    same = replace(table.places[0])
    with pytest.raises(CacheError, match="two calls are of"):
        replace(table, places=(same, same, same)).stack()


def test_the_lens_of_the_last_layer_is_the_steps_x0(pipeline):
    given = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 2, "max_sequence_length": 16}
    with capture(pipeline, "x0") as seen:
        lens = x0_lens(pipeline, "a circle", seed=1, output_type="latent", **given)
    assert (lens.layers, lens.blocks, lens.steps) == ([0, 1], [0], [0, 1])
    for step in (0, 1):
        own = seen["x0"].at(branch="cond", step=step)[0]
        torch.testing.assert_close(lens.latents[1, 0, step], own, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(lens.latents[0, 0, step], own, atol=1e-2)
    assert lens.distance.shape == (2, 1, 2) and lens.frames(0, 0, 1).shape == (9, 64, 64, 3)
    assert lens.run.common["weights"] == "pipeline"


def test_packed_latents_are_those_of_frames():
    """Of LTX, whoever watches: a run of it can be compared with an edited one."""
    pipe, given = video_pipelines.ltx()
    session = load(pipe)
    run = session.generate(seed=3, **given)
    with capture(session, layers=[1]) as seen:
        same = session.generate(seed=3, **given)
    with intervene(session, Knockout(frames=0, passes="all")):
        edited = session.generate(seed=3, **given)
    assert run.latents.shape == (1, 3, 4, 2, 3) and torch.equal(run.latents, same.latents)
    assert run.config.num_frames == 3 and seen.atlas()["num_frames"] == 3
    compared = compare(run, edited)
    assert compared.psnr.isfinite().all() and repr(compared).endswith(f"at least {compared.psnr.min():.1f}")


def test_a_comparison_says_where_noise_differs(pipeline, tmp_path):
    small = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 1, "max_sequence_length": 16}
    session = load(pipeline)
    runs = [session.generate("a circle", seed=seed, **small) for seed in (1, 2)]
    runs += [session.generate("a circle", **small) for _ in range(2)]
    for one, other in ((runs[0], runs[1]), (runs[0], runs[2]), (runs[2], runs[3])):
        assert repr(compare(one, other)).endswith("; they began with different noise: give both one seed")
    path = tmp_path / "both.mp4"
    assert compare(runs[0], runs[0]).noise == "" and compare(runs[0], runs[1]).save(path) == path
    # A loop of one's own tells no noise.
    unknown = replace(runs[0], config=replace(runs[0].config, seed=None), common={"generator_state": None})
    assert "is not known" in compare(unknown, unknown).noise


# --- Other families: what a call of the pipeline returned is what its run and atlas are of
@pytest.mark.parametrize(
    ("family", "steps", "num_frames"),
    [
        ("video_to_video", [3, 4, 5], 3),
        ("cosmos", [0, 1, 2], 3),
        ("helios", [0, 1], 9),
        ("skyreels", [0, 1, 2], 5),
    ],
)
def test_a_call_of_another_family_has_the_atlas_and_latents_of_its_video(family, steps, num_frames):
    pipe, arguments = getattr(video_pipelines, family)()
    plain = torch.as_tensor(video_pipelines.call(pipe, arguments))
    with capture(pipe, layers=[0]) as captured:
        returned = torch.as_tensor(video_pipelines.call(pipe, arguments))
    atlas, [run] = captured.atlas(), captured.runs
    assert torch.equal(returned, plain) and torch.equal(run.latents, returned.transpose(1, 2))
    assert (atlas["pass_steps"], atlas["branch"], atlas["frames"]) == (steps, "cond", "verified")
    assert atlas["frame_logits"].shape == (1, len(steps), 3, num_frames, num_frames)
    assert run.config.seed == 1
