"""Heads without a past, and heads that keep theirs at equal bytes: against policies, by hand, resumed."""

import json
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from experiments.analysis.first_frame import first_frame_effect
from experiments.analysis.stats import head_correlation
from experiments.extraction.rollout import Progress
from experiments.findings.head_memory import run as finding
from experiments.findings.head_memory.captions import Design, captions_behind_a_wall, unnamed_captions
from experiments.findings.head_memory.presence import answers_of, contrast, letters
from experiments.findings.head_memory.presence_trials import (
    BlindHeads,
    agrees,
    judge_returns,
    knockouts_of,
    plain_pairs,
)
from experiments.findings.head_memory.trials import (
    QUESTIONS,
    HeadMemory,
    Sizes,
    attention_measures,
    measures_of_pass,
    regressed,
)
from experiments.miniature.moving_shapes import rendered
from experiments.studies import causal_atlas
from experiments.studies.batches import Runs, knockouts, matched, outside
from experiments.studies.paired_prompts import PairedRuns
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.interventions import intervene

DESIGN = Design(captions=2, selection=1, seeds=1)
QUIET = Progress(quiet=True)


@pytest.fixture(scope="module")
def memory(tmp_path_factory, tiny):
    sizes = Sizes(captions=2, samples=2, budgets=(6, 7, 8), narrow=((4, 1),), folds=2)
    folder = tmp_path_factory.mktemp("memory")
    return HeadMemory(unnamed_captions(2), tiny.config, tiny.session, folder, sizes=sizes)


def test_knockouts_are_the_windows_of_a_policy(memory):
    runs = memory.runs(memory.everyone)
    for window, sink in ((3, 0), (4, 1)):
        seen = {"local_attn_size": window, "sink_size": sink}
        policy = memory.session.with_weights(replace(memory.config, **seen))
        expected = torch.cat([policy.rollout(replace(one, **seen)) for one in runs.configs])
        with intervene(*knockouts(memory.heads, outside(window, sink), memory.config.block_sizes)):
            found = runs.rollout()
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
        assert (found - runs.latents)[:, 3:].abs().max() > 1e-3
    torch.testing.assert_close(memory.runs((1,)).latents, runs.latents[1:], atol=2e-4, rtol=0)


def test_measures_of_a_batch_are_those_of_each_run(memory):
    runs = memory.runs(memory.everyone)
    found = {name: values[1, 1, 0] for name, values in measures_of_pass(runs, 1).items()}
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame", layers=[1], steps=[1]) as calls:
        memory.session.rollout(runs.configs[1])
    logits, mass = np.full((9, 9), np.nan), np.zeros((9, 9))
    for block, call in enumerate(calls):
        now, seen = slice(3 * block, 3 * block + 3), slice(3 * block + 3)
        logits[now, seen], mass[now, seen] = call["frame_logits"][0, 0], call["frame_mass"][0, 0]
    past = np.arange(9) < np.arange(9)[:, None] // 3 * 3
    expected = {"s": float(first_frame_effect(logits, runs.configs[0].block_sizes).effect)}
    expected |= {"share of positive logits": (logits[past] > 0).mean(), "mass on frame 0": mass[3:, 0].mean()}
    expected |= {"mass on the past": (mass * past)[3:].sum(1).mean()}
    assert found == pytest.approx(expected, abs=1e-4)


def test_a_trial_is_judged_and_not_made_again(memory, monkeypatch):
    trials = [memory.base(), next(memory.singles())]
    memory.run("first", trials, QUIET)
    base, single = map(memory.read, trials)
    assert max(base["change"]) == 0 < min(single["change"])
    assert all({*base[question]} <= {0, 1} for question in QUESTIONS)
    monkeypatch.setattr(HeadMemory, "measure", lambda *_: pytest.fail("made again"))
    memory.run("first", trials, QUIET)


def test_a_planted_dependence_on_frame_0_is_found(monkeypatch):
    few = partial(head_correlation, draws=40)  # the planted one is far from any interval's end
    monkeypatch.setattr(finding, "head_correlation", few)
    rng = np.random.default_rng(0)
    mass = rng.uniform(size=(20, 4, 6))
    found = {"effect": mass + 0.05 * rng.uniform(size=mass.shape), "mass on frame 0": mass}
    found |= {"norm": np.broadcast_to(rng.uniform(size=(4, 6)), mass.shape), "floor": np.full((20,), 1e-6)}
    found |= {"control": np.full_like(mass, 0.001), "s": rng.uniform(size=mass.shape)}
    found["share of positive logits"] = np.broadcast_to(np.arange(6) / 5, mass.shape)
    report = finding.first_frame_report(found, range(4))
    by = {name: values["partial_rho"] for name, values in report["correlations"].items()}
    assert by["mass on frame 0"][0] > 0.8 and by["mass on frame 0"][1] > 0.5
    assert by["s"][1] < 0 < by["s"][2]
    assert report["prompts"] == 20


def test_frame_0_is_removed_from_the_view_of_each_head(memory, tiny, tmp_path):
    prompts = {scene.caption: number for number, scene in memory.scenes}
    removed = finding.first_frame_study(prompts, 1, tiny.config, tiny.session, tmp_path)
    causal_atlas.run(removed, 2, QUIET)
    found, effects_of_heads = finding.first_frame_numbers(removed, 1), causal_atlas.merged(removed)["effects"]
    np.testing.assert_allclose(found["effect"], np.nanmean(effects_of_heads.numpy(), -1))
    again = measures_of_pass(Runs(tiny.session, removed.configs), 0)
    np.testing.assert_allclose(found["s"], again["s"], atol=1e-5)
    assert found["control"].shape == found["effect"].shape == found["s"].shape == (2, 2, 2)


def test_chosen_heads_cost_what_they_say_and_matched_ones_are_others_of_their_layers(memory):
    few = replace(memory)
    few.heads = [(layer, head) for layer in range(8) for head in range(12)]
    for budget in (5, 7):
        heads = few.chosen({"s": np.arange(96.0).reshape(8, 12)}, "s", budget)
        assert heads[0] == (7, 11)
        assert 96 * budget - 6 < 9 * len(heads) + 4 * (96 - len(heads)) <= 96 * budget
    for draw in range(5):
        found = matched(few.heads, [(3, 1), (3, 2), (1, 0)], draw)
        assert sorted(layer for layer, _ in found) == [1, 3, 3] and not {(3, 1), (3, 2), (1, 0)} & {*found}


@pytest.mark.parametrize("folds", [2, 5])
def test_heads_are_chosen_on_captions_of_other_folds(memory, monkeypatch, folds):
    sizes = replace(memory.sizes, folds=folds, budgets=(6,))
    study = replace(memory, scenes=unnamed_captions(10), sizes=sizes)
    heads = {row: [(0, 0), (0, 1), (1, 0)][row % 3] for row in range(10)}

    def scores_of(self, rows, narrow=None):
        """Choose the head of the one row that is left out, or of the first of them."""
        scores = np.zeros(self.shape)
        scores[heads[min({*range(10)} - {*rows})]] = 1
        return {"effect": scores}

    monkeypatch.setattr(HeadMemory, "scores_of", scores_of)
    trials = [trial for trial in study.budgets(4, 1) if trial.name.startswith("effect")]
    rows = [row for trial in trials for row in trial.rows]
    assert len(rows) == len({*rows}) == 10 and len(trials) == min(3, folds)
    for trial in trials:
        [whole] = {*study.heads} - {(edit.layers[0], head) for edit in trial.edits for head in edit.heads}
        assert {heads[row % folds] for row in trial.rows} == {whole}


def test_planted_values_of_heads_are_found():
    rng, heads = random.Random(0), [(0, head) for head in range(12)]
    narrow = [sorted(rng.sample(heads, 6)) for _ in range(60)]
    returns = np.array([0.5 * ((0, 3) not in one) + 0.3 * ((0, 5) not in one) for one in narrow])
    assert list(np.argsort(-regressed(narrow, returns, heads))[:2]) == [3, 5]


def test_a_report_of_planted_answers(memory, monkeypatch, tmp_path):
    def planted(self, trial):
        rng, count = random.Random(f"{self.folder.name} {trial.name}"), len(trial.rows)
        found = {q: [rng.randint(0, 1) for _ in range(count)] for q in QUESTIONS}
        found |= {"trial": trial.name, "change": [rng.random() for _ in range(count)]}
        if trial.measured:
            measures = {name: x.tolist() for name, x in attention_measures(self.runs(trial.rows)).items()}
            found |= {"measures": measures, "same": [1, 1]}
        return found

    monkeypatch.setattr(HeadMemory, "measure", planted)
    monkeypatch.setattr(HeadMemory, "ceilings", lambda self: {"rendered": [1, 1], "VAE": [1, 0]})
    measured = attention_measures(memory.runs(memory.everyone))
    assert {values.shape for values in measured.values()} == {(2, 2, 2)}
    assert all(np.isfinite(x).all() and (x.min() >= 0 or name == "s") for name, x in measured.items())
    assert (measured["mass on the older past"] <= measured["mass on the past"] + 1e-9).all()
    assert measured["mass on the past"].max() < 1
    studies = {"one": memory, "other": replace(memory, folder=tmp_path / "other")}
    for study in studies.values():
        study.make_all(QUIET)
    made = {name: finding.about(study) for name, study in studies.items()}
    budgets = json.loads(json.dumps({"miniatures": made}))
    shares = finding.shares_of(budgets)  # their numbers: test_findings.py, of the committed answers
    rules = {"effect", "interactions", "random", "Dummy Forcing"}
    assert {f"{rule}, 7, 4 with sink 1" for rule in rules} | {"uniform, 7, sink 1"} <= shares.keys()
    assert budgets["miniatures"]["other"]["rho of halves"].keys() >= {"effect", "interactions"}


def test_a_batch_of_videos_is_judged_as_the_tracker_judges_each():
    # Every other shape hides for ever after frame 30, two are never there, and the colour of some changes.
    scenes = [scene for _, scene in captions_behind_a_wall(DESIGN)[0]] * 4
    videos = torch.stack(rendered(scenes, 81))
    videos[2:4, 30:] = videos[2:4, 30:31]
    videos[4:6] = videos[4:6, 30:31]
    videos[6:, 50:] = videos[6:, 50:].flip(2)
    answers = judge_returns(videos, scenes, [3] * 7)
    assert agrees(answers, videos, scenes) == len(scenes)
    assert len({*answers["comes_back"]}) == 2


def test_a_head_of_each_video_sees_its_own_block_alone(tiny):
    pairs = plain_pairs([(1, scene) for _, scene in captions_behind_a_wall(DESIGN)[0]])
    runs = PairedRuns(tiny.config, tiny.session, pairs)
    heads = [(0, 1), (1, 0)]
    found = runs.rollout(0, BlindHeads(heads))
    for n, head in enumerate(heads):
        with intervene(*knockouts_of([head])):
            torch.testing.assert_close(found[n], runs.rollout(0)[n], atol=2e-4, rtol=0)


def test_contrasts_are_means_of_differences_within_videos():
    line = {"hides": "1111", "comes_back": "0111", "color": "1111", "last_color": "-123", "shape": "2222"}
    text = letters(line, [2, 2, 2, 0], "2222")
    assert {name: x.astype(int).tolist() for name, x in answers_of(text).items()} == {
        "hides": [1, 1, 1, 1],
        "comes_back": [0, 1, 1, 1],
        "right": [0, 1, 0, 0],
        "donor": [0, 0, 1, 0],
        "shape": [1, 1, 1, 0],
    }
    # Six captions and two seeds, of which the first four captions are left out; one pair is missing.
    pairs, back, gone = {"rescue": [4, 5, 10]}, "Q", "A"
    trainings = {
        name: {
            "seeds": 2,
            "pairs": pairs,
            "answers": {"unedited": back * 12, "rescue, P": p, "rescue, random of P: 0": back * 3}
            | {"rescue, random of P: 1": other},
        }
        for name, p, other in (("a", gone + back * 2, back * 3), ("b", gone * 3, back * 2 + gone))
    }
    found = contrast(trainings, "rescue", "comes_back", "random of P", "P")
    # a: captions of 0.5 and 0; b: captions of 0.75 (one draw of the second seed is gone) and 1
    assert found["each"] == [0.25, 0.875] and found["videos"] == 6
    assert found["bootstrap"][0] == pytest.approx(0.5625, abs=1e-3)
