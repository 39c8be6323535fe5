"""Edited runs end to end: caches and subtitles say it, effects are what they are called."""

import json
from dataclasses import replace

import pytest
import torch

from experiments import run_intervention
from experiments.analysis import published
from experiments.base_session import BaseSession
from experiments.caches import load_cache, save_cache, titles
from experiments.caches.files import CacheError
from experiments.caches.view import open_profiles
from experiments.edits import edited
from experiments.extraction.cache_builders import atlas_cache, atlas_requests
from experiments.session import Session
from experiments.studies import interventions
from experiments.studies.interventions import distance
from wan.blocks import block_ranges
from wan.capture import CaptureRequest
from wan.config import as_one_block
from wan.errors import ConfigError
from wan.interventions import Ablate, Knockout, Patch, Source, intervene
from wan.noise import draw_noise

EDIT = Knockout(frames="first", layers=[1], heads=[0], passes="denoise")
ANOTHER = "a cyan square moving up over a gray background"


def test_an_edited_atlas_says_so_and_shows_what_the_softmax_saw(tiny, tmp_path):
    config, session = tiny.config, tiny.session
    requests = atlas_requests(config, mass=True, key_curve=False, cross=False)
    run = session.generate(config=replace(config, interventions=[EDIT.to_dict()]), requests=requests)
    save_cache(tmp_path / "atlas.pt", atlas_cache(run))
    cache = load_cache(tmp_path / "atlas.pt")
    assert cache["interventions"]["edits"] == [EDIT.to_dict()] and len(cache["interventions"]["hash"]) == 16
    assert not cache["attended"][1, 0, 0, 3:, 0].any()
    assert cache["attended"][1, 2, 0, 3:, 0].all()  # the clean pass was not edited
    assert not cache["frame_mass"][1, 0, 0, 3:, 0].any()
    assert cache["frame_logits"][1, 0, 0, 3:, 0].isnan().all()
    view = open_profiles(cache)
    assert view.caption.subtitle.endswith(f"edited: {titles.edit_in_words(EDIT.to_dict())}")
    assert view.edits_hash == cache["interventions"]["hash"]
    assert "this run was edited" in published.curves_for(view, published.FOLDER / published.FIGURE4_CSV)[1]
    with intervene(EDIT):  # one's own context is recorded too
        again = session.generate(requests=requests)
    assert again.common["interventions"] == cache["interventions"]
    assert torch.equal(again.latents, run.latents)
    plain = atlas_cache(session.generate(requests=requests))
    assert "interventions" not in plain and "attended" not in plain


def test_effects_are_what_they_are_called(tiny):
    config, session = tiny.config, tiny.session
    base, other = interventions.base_runs(None, session, config)
    found = interventions.measure(session, config, [EDIT], base, other)
    total, own, direct = (found[name] for name in ("total", "own_block", "direct"))
    assert (total[:3] == 0).all() and (own[:3] == 0).all() and direct[:3].isnan().all()
    assert torch.equal(direct[3:6], total[3:6])  # the first edited block has an unedited past
    assert not torch.isclose(direct[6:], total[6:]).any()
    assert torch.equal(own[3:6], total[3:6])  # a clean pass does not change its own block
    assert found["floor"].max() < 1e-3 * found["between_seeds"].min()
    with intervene(replace(EDIT, blocks=(1,), passes="all")):
        there = session.rollout(config)
    assert torch.equal(own, distance(base, there)[0].float())  # its past is then edited, for good
    some = interventions.measure(session, config, [replace(EDIT, steps=(0,))], base, other)
    assert torch.equal(some["own_block"], own)
    noise, renoise = draw_noise(config, session.model_config, session.dtype, session.device)
    more = torch.randn(noise.shape, generator=torch.Generator().manual_seed(0))
    text, _ = session.texts[config.prompt]
    shaken = session.pipeline.inference(noise + 1e-6 * more, prompt_embeds=text, renoise=renoise)[1]
    assert torch.equal(found["floor"], distance(base, shaken)[0].float())
    source = Patch("z", Source(seed=9), layers=[1], passes="denoise")
    assert "direct" not in interventions.measure(session, config, [source], base, other)


@pytest.mark.parametrize(
    "given", [{"seed": 9}, {"prompt": ANOTHER, "seed": 9}, {"weights": "a file", "seed": 9}]
)
def test_a_source_is_the_run_that_it_names(given, tiny, tmp_path, monkeypatch):
    """Its weights are those of the session or a file's."""
    if "weights" in given:
        given = given | {"weights": str(tmp_path / "weights.pt")}
        torch.save({"generator_ema": tiny.session.pipeline.model.state_dict()}, given["weights"])
    config, session, source, ran = replace(tiny.config, num_frames=3), tiny.session, Source(**given), []
    rollout = Session.rollout

    def seen(self, one, **kwargs):
        ran.append((one.prompt, one.seed, one.checkpoint_path, self.pipeline is session.pipeline))
        return rollout(self, one, **kwargs)

    monkeypatch.setattr(Session, "rollout", seen)
    with edited(session, config, [Patch("z", source, layers=[1], steps=[0], passes="denoise")]):
        latents = session.rollout(config)
    other = source.prompt or config.prompt, source.seed, source.weights, source.weights is None
    assert ran == [(config.prompt, config.seed, None, True), other]
    assert not torch.equal(latents, rollout(session, config))


def test_every_ablation_runs_with_what_it_needs(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr("experiments.edits.MEANS", tmp_path / "means")
    session, few = tiny.session, replace(tiny.config, reference_prompts=tiny.config.reference_prompts[:1])
    plain = session.rollout(few)

    def latents(edit, config=few):
        config = replace(config, interventions=[edit.to_dict()])
        return session.replaced(config=config).generate().latents

    made, where = [], {"layers": [1], "heads": [1], "passes": "denoise"}
    for how, source in (("zero", None), ("mean", None), ("frame_mean", None), ("resample", Source(seed=3))):
        made.append(latents(Ablate(how, source, **where)))
        assert not torch.equal(made[-1], plain)
    [means] = (tmp_path / "means").glob("*.pt")
    assert torch.equal(latents(Ablate("mean", str(means), **where)), made[1])
    lost, gone = Source(weights="no/weights.pt"), "no/means.pt"
    with pytest.raises(ConfigError, match=r"no/weights.pt not found; bash experiments/download_weights.sh"):
        latents(Patch("z", lost, passes="denoise"))
    with pytest.raises(ConfigError, match=r"cannot serve two runs in step; leave offload out for "):
        latents(Patch("z", Source(seed=3), passes="all"), replace(few, offload=True))
    with pytest.raises(ConfigError, match=r"no/means.pt not found; leave source out"):
        latents(Ablate("mean", gone, passes="denoise"))


def test_the_script_writes_a_cache_and_a_video_and_keeps_the_base_run(tiny, tmp_path, capsys, monkeypatch):
    (tmp_path / "edits.yaml").write_text(json.dumps([EDIT.to_dict()]))
    files = {"--interventions": "edits.yaml", "--output_path": "effects.pt", "--save_base": "base.pt"}
    flags = ["--config_path", tiny.path, "--num_frames", "6"]
    flags += [word for flag, name in files.items() for word in (flag, str(tmp_path / name))]
    run_intervention.run([*flags, "--dry_run"])
    assert "edits: Knockout(" in capsys.readouterr().err and not (tmp_path / "effects.pt").exists()
    run_intervention.run([*flags, "--quiet"])
    cache = load_cache(tmp_path / "effects.pt", expect=("effects",))
    base = (tmp_path / "base.pt").read_bytes()
    assert cache["interventions"]["words"] == str(EDIT) and len(cache["psnr"]) == 21
    assert (tmp_path / "effects.mp4").stat().st_size > 1000
    assert cache["questions"] == ["background", "shape", "direction", "color"]  # of the config's caption
    assert cache["answers_base"].shape == cache["answers_edited"].shape == (4,)
    seed = tiny.config.seed + interventions.ANOTHER_SEED
    other = tiny.session.rollout(replace(tiny.config, num_frames=6, seed=seed))
    monkeypatch.setattr(Session, "rollout", lambda *_: pytest.fail("rolled out again"))
    kept = interventions.base_runs(f"{tmp_path}/base.pt", tiny.session, replace(tiny.config, num_frames=6))
    assert torch.equal(kept[1], other) and torch.equal(kept[0][0], cache["latents_base"])
    assert (tmp_path / "base.pt").read_bytes() == base
    with pytest.raises(CacheError, match=r"base.pt belongs to another run .*; choose another --save_base"):
        run_intervention.run([*flags, "--quiet", "--seed", "1"])


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("frames: 6", r"frame 6 is not in 0\.\.5"),
        ("frames: past, heads: [99]", r"head 99 is not in 0\.\."),
        ("frames: past, layers: 99", r"layer 99 is not in 0\.\."),
    ],
)
def test_the_script_refuses_an_index_that_the_run_lacks_before_it_loads(
    setting, said, tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr(Session, "prepare", lambda *_, **__: pytest.fail("loaded"))
    path = tmp_path / "edits.yaml"
    path.write_text(f"- {{edit: knockout, {setting}}}")
    flags = ["--config_path", tiny.path, "--num_frames", "6", "--output_path", str(tmp_path / "effects.pt")]
    with pytest.raises(ConfigError, match=f"^{path}: intervention 1: (Knockout: )?{said}"):
        run_intervention.run([*flags, "--interventions", str(path)])


def test_the_base_model_is_edited_by_its_config_too(tiny):
    edits = [Ablate("zero", heads=[1], layers=[1], passes="denoise").to_dict()]
    small = replace(tiny.config, base=replace(tiny.config.base, num_video_frames=5, num_steps=2))
    request = CaptureRequest(layers=[0], steps=[0], granularity="frame")

    def sample(some):
        one = as_one_block(replace(small, interventions=some))
        return BaseSession(one).generate(requests=[request])

    changed, plain = sample(edits), sample([])
    assert not torch.equal(changed.latents, plain.latents)
    assert changed.common["interventions"]["edits"] == edits and "interventions" not in plain.common
    with pytest.raises(ConfigError, match="runs of the base model take no edit that needs means"):
        sample([Ablate("mean", passes="denoise").to_dict()])


@pytest.mark.parametrize(("window", "sink"), [(3, 0), (4, 1)])
def test_knockouts_are_the_window_of_a_policy(window, sink, tiny):
    """Each head of each block loses what the window would drop."""
    seen = {"local_attn_size": window, "sink_size": sink}
    expected = tiny.session.with_weights(replace(tiny.config, **seen)).rollout(replace(tiny.config, **seen))
    edits = []
    for number, block in enumerate(block_ranges(tiny.config.block_sizes)):
        lost = tuple(range(sink, max(sink, block.stop - (window - sink))))
        if lost:
            edits.append(Knockout(frames=lost, blocks=(number,), passes="all"))
    with intervene(*edits):
        found = tiny.session.rollout(tiny.config)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    assert (found - tiny.session.rollout(tiny.config))[:, 3:].abs().max() > 1e-3
