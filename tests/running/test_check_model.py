"""The check of a model: right, wrong and other ones, and borders that separate what was measured."""

import json

import pytest
from conftest import ROOT

from experiments import check_model, run_extraction_all
from experiments.analysis import agreement
from experiments.caches.files import RunError
from wan.errors import ConfigError

MINI = ["--config_path", str(ROOT / "configs/wan_mini.yaml"), "--device", "cpu", "--quiet"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.slow
def test_the_miniature_agrees_with_itself_and_its_base_weights_do_not(tmp_path, capsys):
    atlas, figure = tmp_path / "atlas.pt", tmp_path / "check.svg"
    short = [*MINI, "--num_frames", "12", "--no-mass", "--noise", "L40"]  # an atlas says whose noise it has
    run_extraction_all.run([*short, "--output_path", str(atlas)])
    flags = [*MINI, "--reference", str(atlas), "--output_path", str(figure)]
    check_model.run(flags)
    said = capsys.readouterr().out
    assert "wan-mini agrees" in said and len(said.split("atlas\n")[-1].splitlines()) >= 10
    assert "All heads, ordered" in figure.read_text()
    with pytest.raises(RunError, match="wan-mini is wrong"):
        check_model.run([*flags, "--no_checkpoint"])
    with pytest.raises(ConfigError, match="name an atlas of this model by --reference"):
        check_model.run(MINI)


def test_the_borders_separate_what_was_measured():
    report = json.loads((ROOT / "docs/check_model.json").read_text())
    borders = agreement.AGREES, agreement.OTHER_R, agreement.OTHER_OWN
    assert tuple(report["borders"].values()) == borders
    verdicts = {
        name: set(row["verdicts"]) for part in ("published", "wan-mini") for name, row in report[part].items()
    }
    for name, found in verdicts.items():
        if name.startswith("another prompt"):
            assert found == {"differs like another prompt"}, name
        if name.startswith(
            ("heads", "layers", "base", "random", "no ", "RoPE off", "RoPE of base 1,000,000", "blocks of 1")
        ):
            assert found == {"wrong"}, name
    assert verdicts["the same in bfloat16"] == {"agrees"}
