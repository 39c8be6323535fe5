"""Edited runs end to end on the miniature: caches and subtitles say it, effects are what they are called."""

import json
from dataclasses import replace

import pytest
import torch
from helpers.rollouts import TWO_STEPS

from experiments import run_intervention
from experiments.analysis import published
from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError
from experiments.caches.view import open_profiles
from experiments.extraction import base as bidirectional
from experiments.extraction import causal
from experiments.extraction.cache_builders import atlas_cache, atlas_requests
from experiments.extraction.causal import edited
from experiments.extraction.rollout import RunObserver
from experiments.studies import intervention_job
from experiments.studies.runs import distance
from wan.capture import CaptureRequest
from wan.config import load_config
from wan.errors import ConfigError
from wan.interventions import Ablate, Knockout, Patch, Source, intervene

EDIT = Knockout(frames="first", layers=[2], heads=[0, 3], passes="denoise")


@pytest.fixture(scope="module")
def config():
    return load_config("configs/wan_mini.yaml", {"num_frames": 9} | TWO_STEPS)


@pytest.fixture(scope="module")
def session(config):
    return causal.prepare(config, [])


def test_an_edited_atlas_says_so_and_shows_what_the_softmax_saw(session, config, tmp_path):
    requests = atlas_requests(config, mass=True, key_curve=False, cross=False)
    edited = replace(config, interventions=[EDIT.to_dict()])
    run = causal.extract_next(session, edited, requests)
    save_cache(tmp_path / "atlas.pt", atlas_cache(run))
    cache = load_cache(tmp_path / "atlas.pt")
    assert cache["interventions"]["edits"] == [EDIT.to_dict()] and len(cache["interventions"]["hash"]) == 16
    left_out = ~cache["attended"][2, 0, [0, 3], 3:, 0]
    assert left_out.all() and cache["attended"][2, 2, 0, 3:, 0].all()  # the clean pass was not edited
    assert (cache["frame_mass"][2, 0, [0, 3], 3:, 0] == 0).all()
    assert cache["frame_logits"][2, 0, 0, 3:, 0].isnan().all()
    view = open_profiles(cache)
    assert view.caption.subtitle.endswith(f"edited: {EDIT} ({cache['interventions']['hash']})")
    assert "this run was edited" in published.curves_for(view, published.FOLDER / published.FIGURE4_CSV)[1]
    with intervene(EDIT):  # one's own context is recorded too
        again = causal.extract_next(session, config, requests)
    assert again.common["interventions"] == cache["interventions"]
    assert torch.equal(again.latents, run.latents)
    plain = atlas_cache(causal.extract_next(session, config, requests))
    assert "interventions" not in plain and "attended" not in plain


def test_effects_are_what_they_are_called(session, config):
    base, other = intervention_job.base_runs(None, session, config)
    found = intervention_job.measure(session, config, [EDIT], base, other)
    total, own, direct = (found[name] for name in ("total", "own_block", "direct"))
    assert (total[:3] == 0).all() and (own[:3] == 0).all() and direct[:3].isnan().all()
    assert torch.equal(direct[3:6], total[3:6])  # the first edited block has an unedited past
    assert not torch.isclose(direct[6:], total[6:]).any()
    assert torch.equal(own[3:6], total[3:6])  # a clean pass does not change its own block
    assert found["floor"].max() < 1e-3 * found["between_seeds"].min()
    with intervene(replace(EDIT, blocks=(1,), passes="all")):
        there = session.rollout(config)
    assert torch.equal(own, distance(base, there)[0].float())  # its past is then edited, for good
    some = intervention_job.measure(session, config, [replace(EDIT, steps=(0,))], base, other)
    assert torch.equal(some["own_block"], own)
    noise, renoise = causal.draw_noise(config, session.model_config, session.dtype, session.device)
    more = torch.randn(noise.shape, generator=torch.Generator().manual_seed(0))
    text, _ = session.texts[config.prompt]
    shaken = session.pipeline.inference(noise + 1e-6 * more, prompt_embeds=text, renoise=renoise)[1]
    assert torch.equal(found["floor"], distance(base, shaken)[0].float())
    source = Patch("z", Source(seed=9), layers=[1], passes="denoise")
    assert "direct" not in intervention_job.measure(session, config, [source], base, other)


CAUSAL = "checkpoints/wan-mini/self_forcing_mini.pt"
ANOTHER = "a cyan square moving up over a gray background"


@pytest.mark.parametrize(
    "source, loaded",
    [
        (Source(seed=9), []),
        (Source(prompt=ANOTHER, seed=9), []),
        (Source(weights="base"), [None]),
        (Source(seed=9, weights=CAUSAL), [CAUSAL]),
    ],
    ids=["seed", "prompt and seed", "base weights", "seed and a file"],
)
def test_a_source_is_the_run_that_it_names(source, loaded, session, config, monkeypatch):
    """Its weights are those of the session, the base ones, or a file's."""
    config, ran, weights = replace(config, num_frames=3), [], []
    rollout, with_weights = causal.LoadedModel.rollout, causal.LoadedModel.with_weights

    def seen(self, one, **kwargs):
        ran.append((one.prompt, one.seed, self.pipeline is session.pipeline))
        return rollout(self, one, **kwargs)

    def loads(self, one):
        weights.append(one.checkpoint_path)
        return with_weights(self, one)

    monkeypatch.setattr(causal.LoadedModel, "rollout", seen)
    monkeypatch.setattr(causal.LoadedModel, "with_weights", loads)
    with edited(session, config, [Patch("z", source, layers=[1], steps=[0], passes="denoise")]):
        latents = session.rollout(config)
    prompt = source.prompt or config.prompt
    seed = config.seed if source.seed is None else source.seed
    assert ran == [(config.prompt, config.seed, True), (prompt, seed, source.weights is None)]
    assert weights == loaded
    assert not torch.equal(latents, rollout(session, config))


def test_every_ablation_runs_with_what_it_needs(session, config, monkeypatch, tmp_path):
    monkeypatch.setattr("experiments.extraction.causal.MEANS", tmp_path / "means")
    few = replace(config, reference_prompts=config.reference_prompts[:1])
    plain, latents = session.rollout(few), []
    for how, source in (("zero", None), ("mean", None), ("frame_mean", None), ("resample", Source(seed=3))):
        edit = Ablate(how, source, layers=[4], heads=[1, 2], passes="denoise")
        latents.append(causal.extract_next(session, replace(few, interventions=[edit.to_dict()]), []).latents)
        assert not torch.equal(latents[-1], plain)
    assert len(list((tmp_path / "means").glob("*.pt"))) == 1
    kept = Ablate(
        "mean", str(next((tmp_path / "means").iterdir())), layers=[4], heads=[1, 2], passes="denoise"
    )
    named = causal.extract_next(session, replace(few, interventions=[kept.to_dict()]), [])
    assert torch.equal(named.latents, latents[1])
    lost = Patch("z", Source(weights="no/weights.pt"), passes="denoise")
    with pytest.raises(ConfigError, match=r"no/weights.pt not found; bash experiments/download_weights.sh"):
        causal.extract_next(session, replace(few, interventions=[lost.to_dict()]), [])
    streamed = replace(few, offload=True, interventions=[Patch("z", Source(seed=3), passes="all").to_dict()])
    with pytest.raises(ConfigError, match=r"cannot serve two runs in step; leave offload out for "):
        causal.extract_next(replace(session, config=streamed), streamed, [])
    gone = Ablate("mean", "no/means.pt", passes="denoise")
    with pytest.raises(ConfigError, match=r"no/means.pt not found; leave source out"):
        causal.extract_next(session, replace(few, interventions=[gone.to_dict()]), [])


def test_the_script_writes_a_cache_and_a_video_and_keeps_the_base_run(tmp_path, capsys):
    (tmp_path / "edits.yaml").write_text(json.dumps([EDIT.to_dict()]))
    files = {"--interventions": "edits.yaml", "--output_path": "effects.pt", "--save_base": "base.pt"}
    flags = ["--config_path", "configs/wan_mini.yaml", "--num_frames", "6"]
    flags += [word for flag, name in files.items() for word in (flag, str(tmp_path / name))]
    run_intervention.run([*flags, "--dry_run"])
    assert "4 calls" in capsys.readouterr().err
    assert not (tmp_path / "effects.pt").exists()
    run_intervention.run([*flags, "--quiet"])
    cache, base = (
        load_cache(tmp_path / "effects.pt", expect=("effects",)),
        (tmp_path / "base.pt").read_bytes(),
    )
    assert cache["interventions"]["words"] == str(EDIT) and len(cache["psnr"]) == 21
    assert (tmp_path / "effects.mp4").stat().st_size > 1000
    assert cache["questions"] == ["background", "shape", "direction", "color"]  # of the config's caption
    assert cache["answers_base"].shape == cache["answers_edited"].shape == (4,) and cache["answers_base"][0]
    run_intervention.run([*flags, "--quiet"])
    assert (tmp_path / "base.pt").read_bytes() == base
    with pytest.raises(CacheError, match=r"base.pt is of another run .*; choose another --save_base"):
        run_intervention.run([*flags, "--quiet", "--seed", "1"])


def test_the_base_model_is_edited_by_its_config_too():
    settings = {"interventions": [Ablate("zero", heads=[1], layers=[3], passes="denoise").to_dict()]}
    config = load_config("configs/wan_mini.yaml", settings)
    small = replace(config, checkpoint_path=None, base=replace(config.base, num_video_frames=5, num_steps=2))
    request = CaptureRequest(layers=[0], steps=[0], granularity="frame")
    runs = [
        bidirectional.sample(bidirectional.as_one_block(one), request, RunObserver())
        for one in (small, replace(small, interventions=[]))
    ]
    assert not torch.equal(runs[0].latents, runs[1].latents)
    assert runs[0].common["interventions"]["edits"] == small.interventions
    assert "interventions" not in runs[1].common
    mean = replace(small, interventions=[Ablate("mean", passes="denoise").to_dict()])
    with pytest.raises(ConfigError, match="runs of the base model cannot make this edit, which needs means"):
        bidirectional.sample(bidirectional.as_one_block(mean), request, RunObserver())
