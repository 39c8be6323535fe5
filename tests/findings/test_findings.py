"""What the findings hold and draw is what their scripts make of the committed data today."""

import json
import re
import shutil

import numpy as np
import pytest
from conftest import ROOT
from helpers.long_findings import comparison

from experiments.findings.first_frame import run as first_frame
from experiments.findings.head_memory import run as head_memory
from experiments.findings.long_rollouts import run as long_rollouts

RESULTS = ROOT / "experiments/findings"


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
    first_frame.run(["--output_path", str(output), "--figures", str(tmp_path), "--device", "cpu"])
    measured = json.loads(output.read_text())
    committed = json.loads((RESULTS / "first_frame/results.json").read_text())
    assert measured.pop("environment").keys() == committed.pop("environment").keys()
    assert measured == committed
    check_figures(tmp_path, 4)
    text = " ".join(words(tmp_path / "figure4_published.svg"))
    agreement = [float(r) for r in re.findall(r"r\s=\s(\d\.\d{3})", text)]
    assert len(agreement) == 2 and min(agreement) >= 0.98


@pytest.mark.slow
def test_shares_of_head_memory_are_those_of_its_answers(tmp_path):
    output = tmp_path / "results.json"
    shutil.copy(RESULTS / "head_memory/results.json", output)
    head_memory.run(["--output_path", str(output), "--figures", str(tmp_path)])
    assert json.loads(output.read_text()) == json.loads((RESULTS / "head_memory/results.json").read_text())
    check_figures(tmp_path, 3)


def test_the_figures_of_long_rollouts_are_those_of_their_results(tmp_path):
    long_rollouts.run(["--figures", str(tmp_path)])
    check_figures(tmp_path, 2)


def test_strips_show_median_videos():
    found = comparison({"full": 0.0, "window,window=9": 0.3})
    number, right = long_rollouts.median_video(found, "window,window=9")
    videos = [v for v in found["videos"] if v["seed"] == 0 and v["label"] != "full"]
    shares = [np.mean(v["tracker"]["right"][5:60]) for v in videos]  # of 18 prompts
    assert min(shares) < right == shares[number] == sorted(shares)[8] < max(shares)
