"""A flag that changes nothing in a run is refused in one line, before anything is made."""

import pytest
from conftest import ROOT
from helpers import synthetic_caches
from helpers.forked import refused

from experiments import (
    make_head_classes,
    run_attribution,
    run_extraction_all,
    run_extraction_each,
    run_intervention,
    run_notebooks,
)
from experiments.caches import save_cache

MINI = ["--config_path", "configs/wan_mini.yaml", "--output_path"]
CASES = {
    "workers of one run": (run_extraction_all, ["--workers", "2"], "--workers has no effect on one run"),
    "a scheduler": (run_extraction_all, ["--scheduler", "tcp://a:1"], "--scheduler has no effect on one run"),
    "a step of an atlas": (run_extraction_all, ["--step", "1"], "--step has no effect on an atlas"),
    "a decoder": (
        run_extraction_each,
        ["--vae_dtype", "float32"],
        "--vae_dtype has no effect without",
    ),
    "a preview": (
        run_extraction_each,
        ["--preview", "README.md"],
        "--preview has no effect without",
    ),
    "two devices": (run_extraction_each, ["--gpu_id", "0", "--device", "cpu"], "not allowed with argument"),
    "no video": (
        run_intervention,
        ["--interventions", "configs/edits/forget_past.yaml", "--no_video", "--save_video"],
        "not allowed with argument",
    ),
    "a video": (run_attribution, ["--source_prompt", "a", "--save_video"], "unrecognized.*--save_video"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_flag_without_effect_is_refused(case, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    script, flags, message = CASES[case]
    refused(script, [*MINI, tmp_path / "a.pt", *flags], capfd, message)
    assert not list(tmp_path.iterdir())


def test_flags_of_a_rollout_and_of_another_rule_are_refused_beside_an_atlas(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    save_cache(tmp_path / "a.pt", synthetic_caches.atlas())
    command = [tmp_path / "a.pt", "--output_path", tmp_path / "a.csv", "--rule"]
    for flags, message in (
        (["forcing_kv", "--num", "3"], "--num has no effect on rule forcing_kv"),
        (["mass", "--block", "2"], "--block has no effect on rule mass"),
        (["mass", "--seed", "2"], "--seed has no effect on the classes of an atlas"),
    ):
        refused(make_head_classes, [*command, *flags], capfd, message)
    notebook = ["plt_fig4.ipynb", tmp_path / "a.pt", "0", "--jobs", "2"]
    refused(run_notebooks, notebook, capfd, "--jobs has no effect")
