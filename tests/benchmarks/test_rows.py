"""Timed rollouts: rows in turn; bad input is one line."""

import json
from importlib import import_module

import pytest
from conftest import ROOT

from experiments.benchmarks import rows
from experiments.benchmarks.harness import in_turn
from experiments.running import cli

MINI = ["--config_path", "configs/wan_mini.yaml"]
FOLDER = ROOT / "experiments/benchmarks"
CASES: dict[str, list[list[str]]] = {  # bad input of scripts, beside an unknown flag
    "rows": [
        [*MINI, "--graphs", "--device", "cpu"],
        [*MINI, "--random_weights"],
        ["--what", "models", "--models", "wan_mini", "--device", "cpu"],
        ["--what", "kernels", "--device", "cpu"],
        ["--what", "start", "--device", "cpu"],
        ["--what", "public", "--checkout", "{}/none", *MINI],
    ],
    "reproduce.hidden_shapes": [["--config_path", "configs/wan_14b.yaml"]],
    "reproduce.long_rollouts": [[], ["{}/none.json"], ["{}/text.json"], ["--first_frame", "--lengths", "22"]],
}


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
def test_rows_of_the_miniature(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    output = tmp_path / "rows.json"
    groups = ["mass", "interventions"]
    flags = ["--num_frames", "6", "--repeats", "1", "--device", "cpu", "--output_path", str(output)]
    rows.run([*MINI, *flags, "--what", *groups])
    found = json.loads(output.read_text())["rows"]
    assert found["mass"]["same_bits"] and found["mass"]["sha256"] != found["plain"]["sha256"]
    assert not found["interventions: knockout of frame 0, all heads"]["same_bits"]
    assert found["plain"]["last_block_ms"] > 0


SCRIPTS = [
    ".".join(path.relative_to(FOLDER).with_suffix("").parts)
    for path in sorted(FOLDER.rglob("*.py"))
    if "main(run)" in path.read_text()
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_bad_input_is_one_line_and_exit_code_2(name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    (tmp_path / "text.json").write_text("not JSON")
    run = import_module(f"experiments.benchmarks.{name}").run
    for case in [["--no_such_flag"], *CASES.get(name, [])]:
        with pytest.raises(SystemExit) as ended:
            cli.main(run, [word.format(tmp_path) for word in case])
        said = capfd.readouterr().err
        assert ended.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1, (case, said)
    assert [path.name for path in tmp_path.iterdir()] == ["text.json"]
