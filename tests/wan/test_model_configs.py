"""The configurations of the family: each runs, is captured and labelled, at the shapes of a toy."""

import json

import pytest
from conftest import ROOT

from experiments.dev import benchmark_models
from wan.config import RunConfig, load_config

RELEASED = benchmark_models.released()


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_all_of_the_family_are_there():
    family = (
        "self_forcing_dmd causal_forcing causal_forcing_framewise causal_forcing_framewise_2step "
        "causal_forcing_framewise_1step rolling_forcing infinity_rope reward_forcing longlive "
        "longlive_two_prompts memflow causvid krea_realtime_14b"
    )
    assert sorted(RELEASED) == sorted(family.split())


@pytest.mark.parametrize("name", [*RELEASED, "wan_mini_lora", "wan_mini_framewise"])
def test_a_configuration_says_all_that_its_model_needs(name):
    path = ROOT / "configs" / f"{name}.yaml"
    text, config = path.read_text(encoding="utf-8"), load_config(path)
    assert isinstance(config, RunConfig) and config.checkpoint_path
    for key in ("num_frame_per_block", "denoising_step_list", "warp_denoising_step", "timestep_shift"):
        assert f"\n{key}:" in text  # said, and not a default
    if config.lora_path:
        assert config.lora_rank and config.lora_alpha


@pytest.mark.beside
def test_every_one_runs_plain_and_captured(tmp_path, capsys):
    """Tiny shapes; the report is what the table of docs/models.md is made of."""
    output = tmp_path / "models_rehearsal.json"
    benchmark_models.run(["--rehearse", "--device", "cpu", "--output_path", str(output)])
    report = json.loads(output.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert sorted(rows) == sorted(RELEASED) and all(row["seconds"] > 0 for row in rows.values())
    assert rows["causal_forcing_framewise_2step"]["steps"] == "2 (4 first)"
    assert rows["krea_realtime_14b"]["passes"] == 6 and rows["rolling_forcing"]["policy"] == "rolling window"
    text = benchmark_models.table(report)
    assert "tiny shapes (a rehearsal)" in text and len(text.splitlines()) == 4 + len(rows)
    assert "longlive_two_prompts" in capsys.readouterr().out
