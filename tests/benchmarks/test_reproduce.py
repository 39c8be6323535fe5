"""What the published findings quote is what their scripts make of the data today."""

import json
import re

import pytest
from conftest import ROOT

from experiments.benchmarks.reproduce import (
    first_frame,
    hidden_shapes,
    readme_figures,
)
from wan.errors import ConfigError

KEPT = sorted(int(path.stem[5:]) for path in (ROOT / first_frame.TRAINING).glob("step_*.pt"))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def words(path):
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def check_figures(folder):
    made = sorted(folder.glob("*.svg"))
    for file in made:
        committed = ROOT / "notebooks/figures" / file.name
        assert words(committed) == words(file) and committed.stat().st_size < 300_000, file.name
    return made


def test_the_first_frame_is_measured_and_drawn_again(tmp_path):
    output = tmp_path / "first_frame.json"
    first_frame.run(["--output_path", str(output), "--figures", str(tmp_path)])
    measured, committed = json.loads(output.read_text()), json.loads(
        (ROOT / "docs/first_frame.json").read_text()
    )  # fmt: skip
    assert measured.pop("environment").keys() == committed.pop("environment").keys()
    assert measured == committed
    assert len(check_figures(tmp_path)) == 2


def test_the_checkpoints_are_measured_again():
    committed = json.loads((ROOT / "docs/checkpoints_first_frame.json").read_text())["checkpoints"]
    measured = first_frame.checkpoints([first_frame.TRAINING])
    assert measured == [row for row in committed if row["seed"] == 0 and row["step"] in KEPT]


def test_a_training_keeps_the_rows_of_atlases_that_are_gone(tmp_path):
    steps = [f"{step:05d}" for step in KEPT[:2]]
    for step in steps:
        (tmp_path / step).mkdir()
        atlas = f"step_{step}.pt"
        (tmp_path / step / atlas).symlink_to(ROOT / first_frame.TRAINING / atlas)
    output = tmp_path / "out.json"
    flags = ["--output_path", str(output), "--figures", str(tmp_path)]
    for step in reversed(steps):
        first_frame.run(["--training", str(tmp_path / step), *flags])
    report = json.loads(output.read_text())
    assert [row["step"] for row in report["checkpoints"]] == [KEPT[0], KEPT[0], KEPT[1], KEPT[1]]
    assert [row.get("git") is None for row in report["checkpoints"]] == [True, True, False, False]
    output.write_text("{}")
    with pytest.raises(ConfigError, match="not what this script writes"):
        first_frame.run(["--training", str(tmp_path / steps[0]), *flags])
    with pytest.raises(ConfigError, match="has no step_"):
        first_frame.checkpoints([tmp_path / "none"])


def test_the_figures_of_the_readme_are_up_to_date(tmp_path):
    readme_figures.run(["--output_dir", str(tmp_path)])
    assert len(check_figures(tmp_path)) == 2
    text = " ".join(words(tmp_path / "figure4_published.svg"))
    agreement = [float(r) for r in re.findall(r"r\s=\s(\d\.\d{3})", text)]
    assert len(agreement) == 2 and min(agreement) >= 0.98
    assert "90.0% agree" in " ".join(words(tmp_path / "kinds_of_heads_published.svg"))


def test_the_figures_of_hidden_shapes_are_those_of_their_report(tmp_path):
    hidden_shapes.run(["--draw", "--figures", str(tmp_path)])
    assert len(check_figures(tmp_path)) == 2
