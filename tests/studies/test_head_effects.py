"""Effects of heads from pairs of prompts, without a tracker, and the budget that they give."""

import json
from dataclasses import replace

import numpy as np
import pytest
from helpers.rollouts import TWO_STEPS

from experiments import measure_head_effects as script
from experiments.running.cli import config_from
from experiments.studies.paired_prompts import HeadEffects, budget_rows, read_pairs
from wan.errors import ConfigError

PAIRS = "pairs: [{prompts: [a red fox, a blue fox], then: a fox}, {prompts: [a cat, a dog], then: a pet}]"


def test_budget_rows_cost_what_they_say():
    effects = np.arange(96.0).reshape(8, 12)
    rows = np.array(budget_rows(effects, 9, 6, 3, 21))
    assert rows[:, 2].mean() <= 9 < rows[:, 2].mean() + 15 / 96 and set(rows[rows[:, 2] == 6, 3]) == {3}
    assert {tuple(row[:2]) for row in rows if row[2] == 21} == {divmod(n, 12) for n in range(77, 96)}


def test_the_shipped_pairs_differ_and_share_what_follows():
    pairs = read_pairs("configs/paired_prompts.yaml")
    assert len(pairs) == 16 and all(len(set(pair.texts)) == 3 for pair in pairs)
    assert [pair.seed for pair in pairs] == [*range(16)]


def test_bad_pairs(tmp_path):
    (tmp_path / "pairs.yaml").write_text("pairs: [{prompts: [a], then: b}]")
    with pytest.raises(ConfigError, match=r"write pairs: \[\{prompts: \[A, B\]"):
        read_pairs(tmp_path / "pairs.yaml")


@pytest.mark.parametrize("how", ["knockout", "patch"])
def test_a_command_from_pairs_to_a_video_with_the_budget(how, tmp_path, monkeypatch, capsys):
    (tmp_path / "pairs.yaml").write_text(
        "pairs: [{prompts: [a red circle moving up, a blue circle moving up], then: a circle moving up}]"
    )
    flags = [
        "--config_path",
        "configs/wan_mini.yaml",
        "--num_frames",
        "6",
        "--pairs",
        f"{tmp_path}/pairs.yaml",
    ]
    flags += ["--measure", how, "--budget", "5", "--window", "4", "--sink", "1", "--device", "cpu", "--quiet"]
    flags += ["--output_path", f"{tmp_path}/heads.csv", "--folder", f"{tmp_path}/kept"]
    monkeypatch.setattr(script, "config_from", lambda args: replace(config_from(args), **TWO_STEPS))
    script.run(flags)
    report = json.loads((tmp_path / "heads.json").read_text())
    effects, rows = np.array(report["effects"]), (tmp_path / "heads.csv").read_text().splitlines()
    assert effects.shape == (8, 12) and (effects > 0).mean() > 0.9 and effects.max() < 3
    best = divmod(int(effects.argmax()), 12)
    assert rows[0] == "layer,head,window,sink" and f"{best[0]},{best[1]},6,0" in rows
    assert sum(row.endswith(",4,1") for row in rows) == 48 and report["seconds with budget"] > 0
    assert 0 < report["distance / standard deviation"] < 2
    monkeypatch.setattr(HeadEffects, "make", lambda *_: pytest.fail("measured again"))
    script.run(flags)
