"""Heads without a past: against a window of one block, batches against single runs, orders, resuming."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from helpers.rollouts import TWO_STEPS

from experiments.analysis import effects as knockout_curves
from experiments.analysis.effects import head_correlation
from experiments.analysis.first_frame import first_frame_effect
from experiments.benchmarks.reproduce import hidden_shapes as script
from experiments.caches.files import StoppedError
from experiments.extraction import causal
from experiments.extraction.observer import RunObserver
from experiments.miniature.tracking import EvalPool
from experiments.studies import causal_atlas, hidden_shapes
from experiments.studies.hidden_shapes import (
    Condition,
    Design,
    HiddenShapes,
    captions_behind_a_wall,
    measures_by_pass,
)
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.config import load_config
from wan.interventions import intervene

FRAMES = 6  # latent: two blocks
DESIGN = Design(captions=2, selection=1, seeds=1, draws=1, counts=(1, 2))
HEADS = [(1, 2), (1, 7), (6, 0)]


@pytest.fixture(scope="module")
def config():
    return load_config("configs/wan_mini.yaml", {"num_frames": FRAMES} | TWO_STEPS)


@pytest.fixture(scope="module")
def session(config):
    scenes = [scene for part in captions_behind_a_wall(DESIGN) for _, scene in part]
    return causal.prepare(config, [], [scene.caption for scene in scenes])


@pytest.fixture(scope="module")
def judges():
    with EvalPool(1) as one:
        yield one


def study(folder, config, session, judges):
    one = HiddenShapes(DESIGN, config, session, folder, pool=judges)
    one.heads = HEADS
    return one


@pytest.fixture(scope="module")
def finished(tmp_path_factory, config, session, judges):
    one = study(tmp_path_factory.mktemp("shapes"), config, session, judges)
    one.run(RunObserver())
    return one


@pytest.mark.beside
def test_no_head_with_a_past_is_a_window_of_one_block(finished, config, session):
    runs = finished.runs("test")
    sizes = session.model_config
    heads = tuple((n, h) for n in range(sizes.num_layers) for h in range(sizes.num_heads))
    everything = Condition("test", "all", heads)
    with intervene(*everything.edits):
        edited = runs.inference()
    alone = session.with_weights(replace(config, local_attn_size=3))
    expected = torch.cat([alone.rollout(replace(one, local_attn_size=3)) for one in runs.configs])
    torch.testing.assert_close(edited, expected, atol=2e-4, rtol=0)
    assert (edited - runs.latents)[:, 3:].abs().max() > 0.1


def test_measures_of_a_batch_are_those_of_each_run(finished, session):
    runs = finished.runs("test")
    found = measures_by_pass(runs, [0, 1])
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame", layers=[6], steps=[1]) as calls:
        session.rollout(runs.configs[1])
    logits = np.full((FRAMES, FRAMES), np.nan)
    for block, call in enumerate(calls):
        logits[3 * block : 3 * block + 3, : 3 * block + 3] = call["frame_logits"][0, 4].numpy()
    s = first_frame_effect(logits, runs.configs[0].block_sizes).effect
    assert found["s"][1, 1, 6, 4] == pytest.approx(float(s), abs=1e-4)
    of_past = calls[1]["frame_logits"][0, 4][:, :3]
    assert found["share of positive logits"][1, 1, 6, 4] == pytest.approx((of_past > 0).float().mean().item())
    mass = calls[1]["frame_mass"][0, 4]
    assert found["mass on frame 0"][1, 1, 6, 4] == pytest.approx(mass[:, 0].mean().item(), abs=1e-5)
    assert found["mass on the past"][1, 1, 6, 4] == pytest.approx(mass[:, :3].sum(1).mean().item(), abs=1e-5)


def test_the_study_says_what_it_was_made_of_and_is_not_made_again(finished, config, session, judges):
    said, watch = [], RunObserver()
    watch.print = said.append
    again = study(finished.folder, config, session, judges)
    before = {path: path.stat().st_mtime_ns for path in made(again)}
    again.run(watch)  # nothing is rolled out
    done = [f"{n} of {n} are done already" for n in (4, len(before))]
    assert said[::2] == done and said[1::2] == [f"{name} are done" for name in (
        "selection: 4 conditions", f"test: {len(before)} conditions"
    )]  # fmt: skip
    assert before == {path: path.stat().st_mtime_ns for path in made(again)}
    orders = again.orders()
    change = again.selection_measures()["change"]
    assert orders["change"] == sorted(HEADS, key=lambda head: -change[head])
    assert sorted(orders["random 0"]) == HEADS and min(change.values()) > 0
    report = script.knockouts(again)
    json.dumps(report)  # plain values alone
    assert set(report["curves"]) == {*knockout_curves.ORDERS, "random"}
    assert report["ranking"][0]["layer"] == orders["effect"][0][0]


def made(one):
    return {one.store.path(one.name(condition)) for condition in one.conditions()}


def test_a_stopped_study_keeps_what_is_judged(tmp_path, config, session, judges, monkeypatch):
    watch = RunObserver()
    one = study(tmp_path, config, session, judges)
    make = HiddenShapes.make

    def asked_to_stop(self, *given):
        watch.stopping = True
        return make(self, *given)

    monkeypatch.setattr(HiddenShapes, "make", asked_to_stop)
    with pytest.raises(StoppedError):
        one.run(watch)
    done = [one.store.path(one.name(condition)).is_file() for condition in one.singles()]
    assert done == [True, False, False, False]


def test_curves_come_back_from_planted_answers():
    captions = np.arange(64) % 4 / 4  # shares of 0, 1/4, 1/2, 3/4
    draws = np.stack([np.stack([captions, captions]), np.stack([captions + 0.25, captions])])
    rows = knockout_curves.random_curve(draws)
    assert [row[0] for row in rows] == [0.5, 0.375]
    assert [row[3:] for row in rows] == [[0.375, 0.625], [0.375, 0.375]]
    assert knockout_curves.heads_for_half([0.9, 0.5, 0.1], [1, 2, 4], 1.0, 0.0) == 2
    assert knockout_curves.heads_for_half([0.9, 0.8, 0.7], [1, 2, 4], 1.0, 0.0) is None
    exactly_half = 171 / 288  # of 247 and 95: no rounding may decide
    assert knockout_curves.heads_for_half([exactly_half], [4], 247 / 288, 95 / 288) == 4


def test_a_planted_dependence_on_frame_0_is_found(monkeypatch):
    few = partial(head_correlation, draws=300)  # the planted one is far from any interval's end
    monkeypatch.setattr(knockout_curves, "head_correlation", few)
    rng = np.random.default_rng(0)
    mass = rng.uniform(size=(20, 4, 6))
    norm = np.broadcast_to(rng.uniform(size=(4, 6)), mass.shape)
    found = {
        "effect": mass + 0.05 * rng.uniform(size=mass.shape),
        "control": np.full_like(mass, 0.001),
        "norm": norm,
        "floor": np.full((20,), 1e-6),
        "mass on frame 0, first pass": mass,
        "s, first pass": rng.uniform(size=mass.shape),
        "share of positive logits, first pass": np.broadcast_to(np.arange(6) / 5, mass.shape),
    }
    report = knockout_curves.first_frame_report(found, range(4))
    by = {name: values["partial_rho"] for name, values in report["correlations"].items()}
    assert by["mass on frame 0, first pass"][0] > 0.8 and by["mass on frame 0, first pass"][1] > 0.5
    assert by["s, first pass"][1] < 0 < by["s, first pass"][2]
    assert {name: one["heads"] for name, one in report["kinds"].items()} == {
        "anchor": 4,
        "wave": 16,
        "veil": 4,
    }
    assert report["kinds"]["veil"]["effect"][0] == pytest.approx(found["effect"][..., 0].mean(), abs=1e-4)
    assert report["heads_above_control"] == 24 and report["prompts"] == 20


@pytest.mark.slow
def test_frame_0_is_removed_from_the_view_of_each_head(tmp_path, config, session):
    prompts = {scene.caption: number for number, scene in captions_behind_a_wall(DESIGN)[0]}
    study = hidden_shapes.first_frame_study(prompts, 1, config, session, tmp_path)
    study = replace(study, edit=replace(study.edit, layers=(6,)))
    causal_atlas.run(study, 2, RunObserver())
    found = hidden_shapes.first_frame_numbers(study, 1)
    atlas = causal_atlas.merged(study)
    np.testing.assert_allclose(found["effect"], np.nanmean(atlas["effects"].numpy(), -1))
    assert {found[name].shape for name in ("effect", "control", "s, first pass")} == {(2, 1, 12)}
    again = measures_by_pass(causal_atlas.begin(session, study.configs), [0])
    np.testing.assert_allclose(found["s, first pass"][:, 0], again["s"][0][:, 6], atol=1e-5)
