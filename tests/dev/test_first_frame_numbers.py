"""The numbers and figures of "What Figure 4 really shows" are those of the published data today."""

import contextlib
import json
import re

import numpy as np
import pytest
from conftest import ROOT

from experiments.dev import first_frame_numbers, first_frame_report, first_frame_training
from experiments.figures import style


def words(path):
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


@pytest.fixture(scope="module")
def views():
    with contextlib.chdir(ROOT):
        return first_frame_report.published_views()


def test_the_json_is_measured_again(views, monkeypatch):
    monkeypatch.chdir(ROOT)
    committed = json.loads((ROOT / first_frame_numbers.OUTPUT).read_text())
    measured = json.loads(json.dumps(first_frame_report.report(views)))
    assert measured.pop("environment").keys() == committed.pop("environment").keys()
    assert measured == committed
    for one in committed["atlases"].values():  # contrasts do not depend on how many frames are free
        np.testing.assert_allclose(
            list(one["contrasts_by_free_frames"].values()), [one["contrasts"][:3]] * 3, atol=0.011
        )


def test_the_figures_are_drawn_again(views, tmp_path):
    for name, figure in first_frame_report.draw(views).items():
        committed = ROOT / first_frame_numbers.FIGURES / name
        assert words(style.save_svg(figure, tmp_path / name)) == words(committed)
        assert committed.stat().st_size < 300_000


def test_the_checkpoints_are_measured_again(monkeypatch):
    monkeypatch.chdir(ROOT)
    committed = json.loads((ROOT / first_frame_training.OUTPUT).read_text())["checkpoints"]
    assert first_frame_training.checkpoints() == committed
