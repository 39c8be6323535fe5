"""What the published findings quote is what their scripts make of the data today."""

import json
import re

import pytest
from conftest import ROOT

from experiments.benchmarks.reproduce import first_frame, hidden_shapes, readme_figures

KEPT = sorted(int(path.stem[5:]) for path in (ROOT / first_frame.TRAINING).glob("step_*.pt"))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def words(path):
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def check_figures(folder, count):
    made = sorted(folder.glob("*.svg"))
    assert len(made) == count
    for file in made:
        committed = ROOT / "notebooks/figures" / file.name
        assert words(committed) == words(file) and committed.stat().st_size < 300_000, file.name


@pytest.mark.slow
def test_the_first_frame_is_measured_and_drawn_again(tmp_path):
    output = tmp_path / "first_frame.json"
    first_frame.run(["--output_path", str(output), "--figures", str(tmp_path)])
    measured = json.loads(output.read_text())
    committed = json.loads((ROOT / "docs/first_frame.json").read_text())
    assert measured.pop("environment").keys() == committed.pop("environment").keys()
    assert measured == committed
    check_figures(tmp_path, 1)


def test_checkpoints_are_measured_again_and_rows_of_atlases_that_are_gone_stay(tmp_path):
    committed = json.loads((ROOT / "docs/checkpoints_first_frame.json").read_text())["checkpoints"]
    (tmp_path / "one").mkdir()
    step = KEPT[0]
    name = f"step_{step:05d}.pt"
    (tmp_path / "one" / name).symlink_to(ROOT / first_frame.TRAINING / name)
    (tmp_path / "out.json").write_text(json.dumps({"checkpoints": committed}))
    flags = ["--output_path", str(tmp_path / "out.json"), "--figures", str(tmp_path)]
    first_frame.run(["--training", str(tmp_path / "one"), *flags])
    rows = json.loads((tmp_path / "out.json").read_text())["checkpoints"]
    without = [[{k: v for k, v in row.items() if k != "git"} for row in each] for each in (rows, committed)]
    assert without[0] == without[1]
    check_figures(tmp_path, 1)


def test_the_figures_of_the_readme_are_up_to_date(tmp_path):
    readme_figures.run(["--output_dir", str(tmp_path)])
    check_figures(tmp_path, 1)
    text = " ".join(words(tmp_path / "figure4_published.svg"))
    agreement = [float(r) for r in re.findall(r"r\s=\s(\d\.\d{3})", text)]
    assert len(agreement) == 2 and min(agreement) >= 0.98


def test_the_figures_of_hidden_shapes_are_those_of_their_report(tmp_path):
    hidden_shapes.run(["--draw", "--figures", str(tmp_path)])
    check_figures(tmp_path, 2)
