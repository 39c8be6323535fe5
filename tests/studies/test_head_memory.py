"""Heads with less of their past: controls, budgets, rules, and a report of planted answers."""

import json
import random

import numpy as np
import pytest
from helpers.rollouts import TWO_STEPS

from experiments.benchmarks.reproduce import head_memory as script
from experiments.extraction import causal
from experiments.running.progress import Progress
from experiments.studies.hidden_shapes import (
    QUESTIONS,
    HeadMemory,
    Sizes,
    attention_measures,
    regressed,
    unnamed_captions,
)
from wan.config import load_config

SIZES = Sizes(captions=2, draws=2, budget_draws=1, samples=2, budgets=(5, 7), narrow=4, sink=1)
KNOWN = [(1, 6), (3, 6)]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    config = load_config("configs/wan_mini.yaml", {"num_frames": 9} | TWO_STEPS)
    scenes = unnamed_captions(2, {})
    session = causal.prepare(config, [], [scene.caption for _, scene in scenes])
    folder = tmp_path_factory.mktemp("memory")
    return HeadMemory(scenes, config, session, folder, sizes=SIZES, known=KNOWN)


def test_matched_heads_are_others_of_the_same_layers(study):
    for draw in range(5):
        found = study.matched([(3, 1), (3, 2), (1, 0)], draw)
        assert sorted(layer for layer, _ in found) == [1, 3, 3] and not {(3, 1), (3, 2), (1, 0)} & {*found}


def test_budgets_cost_what_they_say(study):
    scores = np.arange(96.0).reshape(8, 12)
    for budget, window in ((5, 4), (7, 4)):
        heads = study.chosen(scores, budget)
        assert (
            heads[0] == (7, 11)
            and 96 * budget - 6 < 9 * len(heads) + window * (96 - len(heads)) <= 96 * budget
        )


def test_what_heads_attend_to_is_a_share(study):
    found = attention_measures(study.runs(study.everyone))
    assert {values.shape for values in found.values()} == {(2, 8, 12)}
    assert all(np.isfinite(x).all() and (x.min() >= 0 or name == "s") for name, x in found.items())
    assert (found["mass on the older past"] <= found["mass on the past"] + 1e-9).all()
    assert found["mass on the past"].max() < 1


def test_planted_values_of_heads_are_found():
    rng, heads = random.Random(0), [(0, head) for head in range(12)]
    narrow = [sorted(rng.sample(heads, 6)) for _ in range(60)]
    returns = np.array([0.5 * ((0, 3) not in one) + 0.3 * ((0, 5) not in one) for one in narrow])
    assert list(np.argsort(-regressed(narrow, returns, heads))[:2]) == [3, 5]


def test_a_report_of_planted_answers(study, monkeypatch):
    def planted(self, trial):
        rng, count = random.Random(trial.name), len(trial.rows)
        found = {q: [rng.randint(0, 1) for _ in range(count)] for q in QUESTIONS}
        found |= {"trial": trial.name, "change": [rng.random() for _ in range(count)]}
        if trial.measured:
            measures = {name: x.tolist() for name, x in attention_measures(self.runs(self.everyone)).items()}
            found |= {"returns": [2, 1], "measures": measures, "same": [1, 1]}
        return found

    monkeypatch.setattr(HeadMemory, "measure", planted)
    study.make_all(Progress(quiet=True))
    report = script.report_of(study, {"rendered": [1, 1], "VAE": [1, 0]})
    json.dumps(report)
    assert report["ceilings"]["VAE"][0] == 0.5 and report["base"]["same"][0] == 1
    assert len(report["matched"]["draws"]) == 2
    assert {"known: past, before it returns", "known: frame 0, clean"} <= report["routes"].keys()
    curves = report["budgets"]["same, sink 1"]
    assert {"effect", "interactions", "random", "uniform", "Dummy Forcing"} <= curves.keys()
    rows = [report["answers"][f"effect, 5, sink 1, half {half}"] for half in range(2)]
    assert curves["effect"]["5"][0][0] == np.mean([int(row) for row in rows])
    more = curves["effect"]["5"][0][0] - curves["uniform"]["5"][0]
    assert curves["effect"]["5"][1][0] == pytest.approx(more, abs=2e-3)
    assert report["chosen"]["effect"]["rho with effect"] == 1
