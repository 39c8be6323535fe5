"""Gradients and attribution of a session: against exact patches, saved and opened, refused in one line."""

from dataclasses import replace

import pytest
import torch
from conftest import ROOT

from experiments import Scores, Source, attribute, gradients, intervene, load, memory, run_attribution
from experiments.configs import policy_settings
from experiments.session import pipeline_of
from wan.activations import SiteCapture
from wan.errors import ConfigError
from wan.files import read_json
from wan.interventions import Patch, at
from wan.sites import watched

PROMPT, OTHER = "a red circle moving right over a dark blue background", "a blue square moving left"
BLOCK, STEP = 1, 0
ONE, DENOISE = {"blocks": [BLOCK], "steps": [STEP]}, {"passes": "denoise"}


@pytest.fixture(scope="module")
def session():
    return load("wan_mini", num_frames=6, seed=1).prepare()


@pytest.fixture(scope="module")
def scores(session):
    return attribute(session, PROMPT, source=Source(prompt=OTHER), **ONE)


def x0_of(session, prompt, *edits):
    seen = SiteCapture(("x0",), **ONE)
    with watched(seen), intervene(*edits) if edits else watched():
        session.generate(prompt)
    return seen.kept[0].value.double()


def test_a_score_of_all_that_is_read_is_the_whole_effect(session):
    """The head reads resid_post of the last layer, and x0 is nearly linear in it near the own run."""
    own, theirs = x0_of(session, PROMPT), x0_of(session, OTHER)
    found = attribute(session, PROMPT, source=Source(prompt=OTHER), sites=["resid_post"], **ONE)
    edit = Patch(
        "resid_post", Source(prompt=OTHER), layers=[7], steps=[STEP], blocks=[BLOCK], passes="denoise"
    )
    way = theirs - own
    exact = (((x0_of(session, PROMPT, edit) - own) * way).sum() / way.square().sum()).item()
    assert found["resid_post"][7].item() == pytest.approx(exact, abs=0.1) and exact > 0.9
    assert found.cache["metric_own"].item() == 0 and found.cache["metric_source"].item() == 1


def test_scores_and_patches_of_heads_are_those_of_the_finding(session):
    """Of its first pair: all heads by one backward pass, the one of the largest effect patched."""
    pair = read_json(ROOT / "experiments/findings/attribution/results.json")["pairs"][0]
    source = Source(prompt=pair["source"])
    scores = attribute(session, pair["prompt"], source=source, **ONE)
    assert scores["mlp_out"].shape == (8, 1, 1)
    torch.testing.assert_close(scores["z"][:, 0], torch.tensor(pair["attribution"]), atol=1e-4, rtol=0)
    exact = torch.tensor(pair["exact"])
    layer, head = divmod(int(exact.argmax()), 12)
    edit = Patch("z", source, layers=[layer], heads=[head], steps=[STEP], blocks=[BLOCK], **DENOISE)
    own, theirs = x0_of(session, pair["prompt"]), x0_of(session, pair["source"])
    moved = ((x0_of(session, pair["prompt"], edit) - own) * (theirs - own)).sum() / (
        theirs - own
    ).square().sum()
    assert exact[layer, head].item() == pytest.approx(moved.item(), abs=1e-4)


def test_points_between_the_runs_leave_the_video_as_it_is(session, scores):
    plain = session.generate(PROMPT).latents
    found = attribute(session, PROMPT, source=Source(prompt=OTHER), integrated=2, **ONE)
    assert torch.equal(session.generate(PROMPT).latents, plain)
    difference = (found["z"] - scores["z"]).abs().max()
    assert 0 < difference < scores["z"].abs().max()
    assert found.cache["metric_own"].tolist() == [0] and found.cache["metric_source"].tolist() == [1]
    assert not session.model._forward_pre_hooks


def test_scores_are_saved_and_drawn(scores, tmp_path):
    again = Scores.open(scores.save(tmp_path / "scores.pt"))
    assert torch.equal(again["z"], scores["z"]) and again.passes == [(BLOCK, STEP)]
    assert scores.table().splitlines()[1].split()[:3] == ["z", "7", "3"] and len(scores) == 2
    assert len(scores.plot().axes) == 4 and "towards prompt" in repr(again)


def test_the_script_writes_scores(tmp_path):
    path = str(tmp_path / "scores.pt")
    flags = ["--config_path", "configs/wan_mini.yaml", "--num_frames", "6", "--blocks", "1", "--quiet"]
    run_attribution.run([*flags, "--source_prompt", OTHER, "--output_path", path])
    assert Scores.open(path)["z"].shape == (8, 4, 12)


def test_gradients_of_a_session_are_named_like_activations(session):
    plain = session.generate(PROMPT).latents
    with gradients(session, "resid_post", "z", layers=[3, 5], **ONE) as grads:
        run = session.generate(PROMPT)
        grads.backward(lambda x0: x0[:, :, :, 2:6, 2:6].mean())
    assert torch.equal(run.latents, plain)
    assert grads["z"].axes == ("layer", "block", "step", "B", "L", "H", "D")
    assert grads["z"].stack().shape == (2, 1, 1, 1, 48, 12, 16) and grads["z"].stack().any()
    assert [*grads] == ["resid_post", "z"] and "4 gradients" in repr(grads)


def test_gradients_go_through_keys_that_differ_by_head(session):
    """Later passes write where the keys of a graph were: graphs are freed at the end, and at once."""
    config = replace(session.config, cache_policy=policy_settings("mini_triattention_small"))
    pipeline, squares = pipeline_of(session.model, config), torch.square
    by_head = session.replaced(config=config, pipeline=pipeline)
    late, now = (
        gradients(by_head, "k", layers=2, **ONE, **how)
        for how in ({}, {"metric": lambda x: squares(x).sum()})
    )
    with late as found:
        assert not by_head.generate(PROMPT).latents.requires_grad
        found.backward(lambda x0: squares(x0).sum())
    with now as again:
        by_head.generate(PROMPT)
    [gradient] = found["k"]
    assert torch.equal(gradient, again["k"][0])
    direction, values = gradient / gradient.norm(), []
    for sign in (1, -1):
        shift = at("k", layers=2, **DENOISE, **ONE)(lambda x, s=sign: x + 3e-2 * s * direction)
        values.append(squares(x0_of(by_head, PROMPT, shift)).sum().item())
    assert values[0] - values[1] == pytest.approx(6e-2 * gradient.norm().item(), rel=1e-2)


def of(**settings):
    made = load("wan_mini", num_frames=6)
    made.config = replace(made.config, **settings)
    return made


@pytest.mark.parametrize(
    ("settings", "sites", "how", "message"),
    [
        ({}, ["z"], {"layers": [8]}, "layer 8 is not in 0..7"),
        ({}, [], {}, "name a site"),
        ({}, ["zz"], {}, "'zz' is no site"),
        ({"offload": True}, ["z"], {}, "leave offload out"),
        (
            {"recompute_context": 3},
            ["z"],
            {"through": "rollout"},
            "full or window, without recompute_context",
        ),
    ],
)
def test_what_has_no_gradient_is_refused_before_it_runs(settings, sites, how, message):
    with pytest.raises(ConfigError, match=message), gradients(of(**settings), *sites, **how):
        pass


def test_pattern_that_does_not_fit_is_refused(session, monkeypatch):
    """The matrices of one layer alone do not, the rest of a pass does."""
    chosen = SiteCapture(("z",), layers=[7], **ONE)
    how = (session.config, session.model_config)
    rest = memory.bytes_of_graphs(*how, chosen, "pass", torch.float32, False)
    whole = memory.bytes_of_graphs(*how, replace(chosen, sites=("pattern",)), "pass", torch.float32, False)
    assert whole - rest == 4 * 12 * 48 * 96 * 4
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Free", (), {"available": (rest + whole) // 2}))
    with gradients(session, "z", layers=[7], **ONE):
        pass
    with (
        pytest.raises(ConfigError, match=r"while holding graphs for gradients at pattern .* recompute"),
        gradients(session, "pattern", layers=[7], **ONE),
    ):
        pass


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"sites": ["x0"]}, "x0 belongs to no layer"),
        ({"integrated": 0}, "integrated is 0"),
        ({"source": Source(prompt=PROMPT)}, "is the run itself"),
        ({"steps": [4]}, "step 4 is the clean pass"),
    ],
)
def test_what_cannot_be_attributed_is_refused(session, how, message):
    with pytest.raises(ConfigError, match=message):
        attribute(session, PROMPT, **({"source": Source(prompt=OTHER)} | how))
