"""Heads without a past: against a window of one block, batches against single runs, orders, resuming."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from helpers.rollouts import TWO_STEPS

from experiments.analysis import effects
from experiments.analysis.effects import head_correlation
from experiments.analysis.first_frame import first_frame_effect
from experiments.benchmarks.reproduce import hidden_shapes as script
from experiments.extraction import causal
from experiments.running.progress import Progress
from experiments.studies import causal_atlas, hidden_shapes
from experiments.studies.hidden_shapes import (
    Design,
    HiddenShapes,
    Trials,
    captions_behind_a_wall,
    measures_of_pass,
)
from experiments.studies.runs import PAST, Runs, knockouts, outside
from experiments.studies.shape_attention import return_block
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.config import load_config
from wan.interventions import intervene

FRAMES = 6  # latent: two blocks
DESIGN = Design(captions=2, selection=1, seeds=1, draws=1, counts=(1,))
HEADS = [(1, 2), (6, 0)]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A finished study of two heads."""
    config = load_config("configs/wan_mini.yaml", {"num_frames": FRAMES} | TWO_STEPS)
    test, selection = captions_behind_a_wall(DESIGN)
    session = causal.prepare(config, [], [scene.caption for _, scene in (*test, *selection)])
    folder = tmp_path_factory.mktemp("shapes")
    sets = (Trials(scenes, config, session, folder) for scenes in (selection, test))
    one = HiddenShapes(DESIGN, *sets)
    one.selection.heads = one.test.heads = HEADS
    one.run(Progress(quiet=True))
    return one


@pytest.mark.beside
@pytest.mark.parametrize(("window", "sink"), [(3, 0), (4, 1)])
def test_knockouts_are_the_windows_of_a_policy(study, window, sink):
    trials = study.test
    runs = trials.runs(trials.everyone)
    seen = {"local_attn_size": window, "sink_size": sink}
    policy = trials.session.with_weights(replace(trials.config, **seen))
    expected = torch.cat([policy.rollout(replace(one, **seen)) for one in runs.configs])
    everyone = [(layer, head) for layer in range(8) for head in range(12)]
    with intervene(*knockouts(everyone, outside(window, sink), trials.config.block_sizes)):
        found = runs.rollout()
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    assert (found - runs.latents)[:, 3:].abs().max() > 0.1
    one = trials.runs((1,))
    torch.testing.assert_close(one.latents, runs.latents[1:], atol=2e-4, rtol=0)


def test_parts_of_the_past():
    parts = {name: [*dropped(range(6, 9))] for name, dropped in PAST.items()}
    assert parts["older past"] + parts["last block"] == parts["past"] and parts["frame 0"] == [0]
    sizes = [3] * 4
    assert return_block([False] * 4 + [True] * 4 + [False] * 4, sizes) == 2
    assert return_block([False] * 12, sizes) == return_block([False] * 6 + [True] * 6, sizes) == 0


def test_measures_of_a_batch_are_those_of_each_run(study):
    runs = study.test.runs(study.test.everyone)
    found = {name: values[1, 6, 4] for name, values in measures_of_pass(runs, 1).items()}
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame", layers=[6], steps=[1]) as calls:
        study.test.session.rollout(runs.configs[1])
    logits = np.full((FRAMES, FRAMES), np.nan)
    for block, call in enumerate(calls):
        logits[3 * block : 3 * block + 3, : 3 * block + 3] = call["frame_logits"][0, 4].numpy()
    s = first_frame_effect(logits, runs.configs[0].block_sizes).effect
    of_past, mass = calls[1]["frame_logits"][0, 4][:, :3], calls[1]["frame_mass"][0, 4]
    expected = {"s": float(s), "share of positive logits": (of_past > 0).float().mean().item()}
    expected |= {"mass on frame 0": mass[:, 0].mean().item()}
    expected |= {"mass on the past": mass[:, :3].sum(1).mean().item()}
    assert found == pytest.approx(expected, abs=1e-4)


def test_a_study_is_not_made_again(study, monkeypatch):
    made = {path: path.stat().st_mtime_ns for path in study.test.store.folder.glob("*.json")}
    monkeypatch.setattr(Trials, "measure", lambda *_: pytest.fail("made again"))
    study.run(Progress(quiet=True))
    assert made == {path: path.stat().st_mtime_ns for path in study.test.store.folder.glob("*.json")}
    orders, change = study.orders(), study.selection_measures()["change"]
    assert orders["change"] == sorted(HEADS, key=lambda head: -change[head])
    assert sorted(orders["random 0"]) == HEADS and min(change.values()) > 0
    report = script.knockouts(study)
    json.dumps(report)  # plain values alone
    assert report["ranking"][0]["layer"] == orders["effect"][0][0] and len(report["names_color"]) == 2


def test_curves_are_of_captions_that_do_not_name_the_colour():
    rows = {"base": "2222", "all": "0011"} | {f"{name}: 4": "0011" for name in effects.ORDERS}
    found = {"seeds": 2, "counts": [4], "draws": 1, "names_color": "0011"}
    curves = effects.curves_of(found | {"seeds_that_come_back": rows | {"random 0: 4": "2011"}})
    assert curves["ends"]["base"][0] == 1 and curves["ends"]["all"][0] == 0
    assert curves["curves"]["random"][0][0] == 0.5 and curves["colour named"]["effect"][0][0] == 0.5
    captions = np.arange(64) % 4 / 4  # shares of 0, 1/4, 1/2, 3/4
    draws = np.stack([np.stack([captions, captions]), np.stack([captions + 0.25, captions])])
    assert [row[3:] for row in effects.random_curve(draws)] == [[0.375, 0.625], [0.375, 0.375]]
    exactly_half = 171 / 288  # of 247 and 95: no rounding may decide
    assert effects.heads_for_half([exactly_half], [4], 247 / 288, 95 / 288) == 4
    assert effects.heads_for_half([0.9, 0.8, 0.7], [1, 2, 4], 1.0, 0.0) is None


def test_a_planted_dependence_on_frame_0_is_found(monkeypatch):
    few = partial(head_correlation, draws=200)  # the planted one is far from any interval's end
    monkeypatch.setattr(effects, "head_correlation", few)
    rng = np.random.default_rng(0)
    mass = rng.uniform(size=(20, 4, 6))
    found = {
        "effect": mass + 0.05 * rng.uniform(size=mass.shape),
        "control": np.full_like(mass, 0.001),
        "norm": np.broadcast_to(rng.uniform(size=(4, 6)), mass.shape),
        "floor": np.full((20,), 1e-6),
        "mass on frame 0, first pass": mass,
        "s, first pass": rng.uniform(size=mass.shape),
        "share of positive logits, first pass": np.broadcast_to(np.arange(6) / 5, mass.shape),
    }
    report = effects.first_frame_report(found, range(4))
    by = {name: values["partial_rho"] for name, values in report["correlations"].items()}
    assert by["mass on frame 0, first pass"][0] > 0.8 and by["mass on frame 0, first pass"][1] > 0.5
    assert by["s, first pass"][1] < 0 < by["s, first pass"][2]
    kinds = {name: one["heads"] for name, one in report["kinds"].items()}
    assert kinds == {"anchor": 4, "wave": 16, "veil": 4}
    assert report["kinds"]["veil"]["effect"][0] == pytest.approx(found["effect"][..., 0].mean(), abs=1e-4)
    assert report["heads_above_control"] == 24 and report["prompts"] == 20


@pytest.mark.slow
def test_frame_0_is_removed_from_the_view_of_each_head(study, tmp_path):
    session, config = study.test.session, study.test.config
    prompts = {scene.caption: number for number, scene in study.test.scenes}
    removed = hidden_shapes.first_frame_study(prompts, 1, config, session, tmp_path)
    removed = replace(removed, edit=replace(removed.edit, layers=(6,)))
    causal_atlas.run(removed, 2, Progress(quiet=True))
    found = hidden_shapes.first_frame_numbers(removed, 1)
    np.testing.assert_allclose(
        found["effect"], np.nanmean(causal_atlas.merged(removed)["effects"].numpy(), -1)
    )
    assert {found[name].shape for name in ("effect", "control", "s, first pass")} == {(2, 1, 12)}
    again = measures_of_pass(Runs(session, removed.configs), 0)
    np.testing.assert_allclose(found["s, first pass"][:, 0], again["s"][:, 6], atol=1e-5)
