"""Timed rollouts: rows in turn, and a second checkout beside this one."""

import json

import pytest
from conftest import ROOT

from experiments.benchmarks import rollout
from experiments.benchmarks.harness import in_turn

MINI = ["--config_path", str(ROOT / "configs/wan_mini.yaml"), "--num_frames", "6", "--repeats", "2"]


def test_rows_take_turns_and_ratios_are_of_one_round():
    clock = iter([1.0, 2.0, 9.0, 3.0, 4.0, 6.0])  # the second round runs to the front
    order: list[str] = []

    def row(name):
        def seconds():
            order.append(name)
            return next(clock)

        return seconds

    kept: list[dict] = []
    found = in_turn({"a": row("a"), "b": row("b")}, 3, keep=lambda rows: kept.append(dict(rows)))
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found["b"]["seconds"] == [2.0, 9.0, 6.0] and found["b"]["median_seconds"] == 6.0
    assert found["b"]["ratio"] == 2.0 and found["a"]["ratio_interval"] == [1.0, 1.0]
    assert [len(rows["a"]["seconds"]) for rows in kept] == [1, 2, 3] or len(kept) == 3


@pytest.mark.slow
def test_two_trees_take_turns_and_their_bits_are_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    output = tmp_path / "trees.json"
    rollout.run([*MINI, "--what", "plain", "mass", "--other", str(ROOT), "--output_path", str(output)])
    report = json.loads(output.read_text())
    assert list(report["rows"]) == ["plain, other", "plain", "mass, other", "mass"]
    assert report["rows"]["plain"]["same_bits"] and report["rows"]["mass"]["same_bits"]
    assert report["rows"]["mass"]["beside"] == "mass, other" and len(report["rows"]["mass"]["seconds"]) == 2
    assert report["rows"]["mass"]["sha256"] != report["rows"]["plain"]["sha256"]
