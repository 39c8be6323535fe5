"""What the findings hold and draw is what their scripts make of the committed data today."""

import json
import re
import shutil

import numpy as np
import pytest
from conftest import ROOT
from helpers.long_findings import comparison

from experiments.analysis.results import attribution_rows
from experiments.findings.first_frame import run as first_frame
from experiments.findings.head_memory import presence
from experiments.findings.head_memory import run as head_memory
from experiments.findings.long_rollouts import run as long_rollouts

RESULTS = ROOT / "experiments/findings"
FILM = np.zeros((60, 64, 64, 3), np.uint8)


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
    output = tmp_path / "results.json"
    first_frame.run(["--output_path", str(output), "--figures", str(tmp_path)])
    measured = json.loads(output.read_text())
    committed = json.loads((RESULTS / "first_frame/results.json").read_text())
    assert measured.pop("environment").keys() == committed.pop("environment").keys()
    assert measured == committed
    check_figures(tmp_path, 2)
    text = " ".join(words(tmp_path / "figure4_published.svg"))
    agreement = [float(r) for r in re.findall(r"r\s=\s(\d\.\d{3})", text)]
    assert len(agreement) == 2 and min(agreement) >= 0.98


@pytest.mark.slow
def test_shares_of_head_memory_are_those_of_its_answers(tmp_path):
    output = tmp_path / "results.json"
    shutil.copy(RESULTS / "head_memory/results.json", output)
    head_memory.run(["--output_path", str(output), "--figures", str(tmp_path)])
    assert json.loads(output.read_text()) == json.loads((RESULTS / "head_memory/results.json").read_text())
    check_figures(tmp_path, 1)


@pytest.mark.slow
def test_contrasts_of_presence_and_identity_are_those_of_the_answers(tmp_path):
    committed, output = RESULTS / "head_memory/presence_and_identity.json", tmp_path / "results.json"
    shutil.copy(committed, output)
    presence.run(["--output_path", str(output), "--figures", str(tmp_path)])
    assert json.loads(output.read_text()) == json.loads(committed.read_text())
    check_figures(tmp_path, 2)
    page = (ROOT / "docs/head_memory.md").read_text().replace("−", "-")
    for one in json.loads(committed.read_text())["contrasts"].values():
        estimate, low, high = one["t"]
        assert (
            f"| {len(one['trainings'])} | {estimate:.2f} | {low:.2f}, {high:.2f} | {one['p_holm']:.2g} |"
            in page
        )


def test_the_page_has_the_correlations_of_attribution():
    rows = attribution_rows(json.loads((RESULTS / "attribution/results.json").read_text()))
    page = (ROOT / "docs/interventions.md").read_text()
    told = [f"| {row['pairs']} | {row['ρ of a pair']} | {row['least']:.2f} |" for row in rows]
    assert all(line in page for line in told)
    assert rows[0]["ranks apart"].startswith("L3H3")


def test_the_figure_of_long_rollouts_is_that_of_their_results(tmp_path):
    output = tmp_path / "results.json"
    long_rollouts.run(["--output_path", str(output), "--figures", str(tmp_path)])
    assert json.loads(output.read_text()) == json.loads((RESULTS / "long_rollouts/results.json").read_text())
    check_figures(tmp_path, 1)


def test_strips_show_one_caption_with_a_wall(tmp_path, monkeypatch):
    found = comparison({"full": 0.0, "window,window=9": 0.3}) | {"kinds": ["crossing", "wall"] * 9}
    for label in ("full", "window,window=9"):
        (tmp_path / f"{label}_1.mp4").touch()
    asked = []
    monkeypatch.setattr(long_rollouts.iio, "imread", lambda path: asked.append(path.name) or FILM)
    long_rollouts.make_strips(found, tmp_path, tmp_path / "strips.json")
    made = json.loads((tmp_path / "strips.json").read_text())
    assert asked == ["full_1.mp4", "window,window=9_1.mp4"] and made["prompt"] == found["prompts"][1]
    [video] = [
        v for v in found["videos"] if (v["label"], v["prompt"], v["seed"]) == ("full", made["prompt"], 0)
    ]
    assert made["rows"]["full"]["right"] == pytest.approx(np.mean(video["tracker"]["right"][5:60]), abs=1e-3)
