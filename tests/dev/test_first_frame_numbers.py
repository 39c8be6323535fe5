"""The numbers and figures of "What Figure 4 really shows" are those of the published data today."""

import contextlib
import json
import re

import numpy as np
import pytest
from conftest import ROOT

from experiments.dev import first_frame_numbers, first_frame_report, first_frame_training
from experiments.figures import style
from wan.errors import ConfigError

KEPT = {int(path.stem[5:]) for path in (ROOT / first_frame_training.ATLASES).glob("step_*.pt")}


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


def test_frame_0_stands_alone_only_where_most_heads_say_so():
    report = json.loads((ROOT / first_frame_numbers.OUTPUT).read_text())
    said = first_frame_report.table(report)
    assert "Frame 0 exceeds every other frame in most heads of eagle at 21 frames and castle at 21" in said
    assert "In eagle at 72 frames no frame does: frame 32" in said and "it alone" not in said
    for one in report["atlases"].values():
        one["placebos"]["heads_above_all"] = one["heads"]
    assert "no frame does" not in first_frame_report.table(report)


def test_the_figures_are_drawn_again(views, tmp_path):
    for name, figure in first_frame_report.draw(views).items():
        committed = ROOT / first_frame_numbers.FIGURES / name
        assert words(style.save_svg(figure, tmp_path / name)) == words(committed)
        assert committed.stat().st_size < 300_000


def test_the_checkpoints_are_measured_again(monkeypatch):
    monkeypatch.chdir(ROOT)
    committed = json.loads((ROOT / first_frame_training.OUTPUT).read_text())["checkpoints"]
    measured = first_frame_training.checkpoints()
    assert measured == [row for row in committed if row["seed"] == 0 and row["step"] in KEPT]


def test_seeds_stand_side_by_side(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    (tmp_path / "step_00000.pt").symlink_to(ROOT / first_frame_training.ATLASES / "step_00000.pt")
    output, figure = tmp_path / "out.json", tmp_path / "out.svg"
    flags = ["--output_path", str(output), "--figure", str(figure)]
    first_frame_training.run([str(first_frame_training.ATLASES), str(tmp_path), *flags])
    rows = first_frame_training.table(json.loads(output.read_text())).splitlines()[2:-2]
    assert len(rows) == 2 * len(KEPT)
    of_first, later = rows[0].split(" | "), rows[-1].split(" | ")
    assert len(set(of_first[2].split(", "))) == 1 and of_first[2].count(", ") == 1  # twice the same atlas
    assert later[2].endswith(", -")
    assert {"first pass, seed 0", "clean pass, seed 1"} <= set(words(figure))
    with pytest.raises(ConfigError, match="has no step_"):
        first_frame_training.checkpoints([tmp_path / "none"])


def test_a_report_keeps_the_rows_of_atlases_that_are_gone(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    for step in ("00000", "00500"):
        (tmp_path / step).mkdir()
        atlas = f"step_{step}.pt"
        (tmp_path / step / atlas).symlink_to(ROOT / first_frame_training.ATLASES / atlas)
    output = tmp_path / "out.json"
    flags = ["--extend", "--output_path", str(output), "--figure", str(tmp_path / "out.svg")]
    for step in ("00500", "00000"):
        first_frame_training.run([str(tmp_path / step), *flags])
    report = json.loads(output.read_text())
    assert [row["step"] for row in report["checkpoints"]] == [0, 0, 500, 500]
    assert [row.get("git") is None for row in report["checkpoints"]] == [True, True, False, False]
    assert first_frame_training.table(report).count("earlier rows: ") == 1
    again = first_frame_training.extended(
        report, report | {"checkpoints": first_frame_training.checkpoints()}
    )
    assert again["earlier"] == [] and "earlier rows" not in first_frame_training.table(again)
    output.write_text("{}")
    with pytest.raises(ConfigError, match="not what this script writes"):
        first_frame_training.run([str(tmp_path / "00000"), *flags])
