"""Training checkpoints of the causal stage: the committed numbers come out again, the figures are theirs."""

import json
import re
import shutil

import numpy as np
import pytest
from conftest import ROOT

from experiments import measure_checkpoints
from experiments.caches import load_cache
from experiments.caches.files import CacheError
from experiments.dev import readme_drawings, readme_figures
from experiments.figures import style
from experiments.miniature import checkpoint_analysis
from experiments.miniature.checkpoint_analysis import read_report
from experiments.miniature.frozen import SETS, held_out_scenes
from experiments.running import cli

REPORT = read_report(ROOT / "cache/wan-mini-training/moments.json")
LAST = REPORT["training_checkpoints"][-1]["step"]


def words(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.beside
def test_the_last_checkpoint_is_the_shipped_checkpoint_and_measures_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    shutil.copy("checkpoints/wan-mini/self_forcing_mini.pt", tmp_path / f"step_{LAST:05d}.pt")
    out = tmp_path / "out" / "checkpoints.json"
    measure_checkpoints.run([str(tmp_path), "--device", "cpu", "--steps", "-1", "--output_path", str(out)])
    report = json.loads(out.read_text())
    assert report["captions"] == REPORT["captions"]
    for name in ("first pass", "clean pass"):
        for measure, values in report["training_checkpoints"][0][
            name
        ].items():  # rounded to 4 places; 1e-4 between CPU and GPU
            np.testing.assert_allclose(
                values, REPORT["training_checkpoints"][-1][name][measure], atol=5e-4, rtol=0
            )
    ours, theirs = (
        load_cache(folder / f"step_{LAST:05d}.pt")
        for folder in (out.parent, ROOT / "cache/wan-mini-training")
    )
    assert theirs["prompt"] == REPORT["captions"][0] and theirs["weights"] == "checkpoint"
    np.testing.assert_allclose(
        ours["frame_logits"], theirs["frame_logits"], atol=5e-3, rtol=0
    )  # 1.3e-3 between CPU and GPU


def test_atlases_of_three_checkpoints_are_there_and_differ():
    atlases = [load_cache(path) for path in sorted((ROOT / "cache/wan-mini-training").glob("step_*.pt"))]
    assert len(atlases) == 3 and len({atlas["weights_sha256"] for atlas in atlases}) == 3
    assert {"frame_logits", "frame_mass"} <= atlases[0].keys()
    assert all(atlas["pass_steps"] == [0, 4] and atlas["pass_is_clean"] == [False, True] for atlas in atlases)


@pytest.mark.parametrize("name", ["training", "moments"])
def test_figures_of_the_training_are_up_to_date(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    made = style.save_svg(getattr(readme_drawings, name)(), tmp_path / f"{name}.svg").read_text()
    committed = (readme_figures.FOLDER / f"{name}_mini.svg").read_text()
    assert words(made) == words(committed), "run: python experiments/dev/readme_figures.py --miniature"


def test_the_videos_shown_are_the_first_of_each_set():
    shown = " ".join(words((ROOT / "notebooks/figures/videos_mini.svg").read_text()))
    for name, count in readme_drawings.STRIPS.items():
        assert all(scene.caption in shown for scene in held_out_scenes(SETS[name], count))


def test_a_report_is_extended_by_other_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    shutil.copy("cache/wan-mini-training/moments.json", tmp_path / "out.json")
    (tmp_path / "step_00007.pt").write_bytes(b"")
    made = {"step": 7, "first pass": {"equal_distance_excess": [[1.0]]}}
    monkeypatch.setattr(checkpoint_analysis, "measure", lambda *_: iter([(made, {})]))
    flags = [str(tmp_path), "--device", "cpu", "--output_path", str(tmp_path / "out.json"), "--extend"]
    measure_checkpoints.run(flags)
    rows = read_report(tmp_path / "out.json")["training_checkpoints"]
    assert [row["step"] for row in rows] == sorted(
        [7, *(row["step"] for row in REPORT["training_checkpoints"])]
    )
    before = REPORT["training_checkpoints"][0].get("environment", REPORT["environment"])
    assert rows[0]["environment"] == before
    assert rows[1]["step"] == 7 and rows[1]["environment"]["device"].endswith("CPU threads")
    with pytest.raises(CacheError, match="is of other captions; leave --extend out"):
        measure_checkpoints.run([*flags, "--captions", "2"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere has no step_*.pt; make them with"),
        (["FOLDER", "--steps", "7"], "has no step_*.pt of step 7"),
    ],
)
def test_bad_input(arguments, said, tmp_path, capfd):
    (tmp_path / "step_00001.pt").write_bytes(b"")
    with pytest.raises(SystemExit) as ended:
        cli.main(measure_checkpoints.run, [str(tmp_path) if a == "FOLDER" else a for a in arguments])
    assert ended.value.code == 2 and said in capfd.readouterr().err
