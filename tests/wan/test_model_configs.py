"""The configurations of the family: each runs, is captured and labelled, at the shapes of a toy."""

import json

import pytest
from conftest import ROOT

from experiments.benchmarks import rollout
from wan.config import RunConfig, load_config

RELEASED = rollout.released()


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
def test_every_one_runs_plain_and_captured(tmp_path):
    """At tiny shapes."""
    output = tmp_path / "models.json"
    rollout.run(
        ["--what", "models", "--tiny", "--device", "cpu", "--repeats", "1", "--output_path", str(output)]
    )
    rows = json.loads(output.read_text())["rows"]
    assert list(rows) == [name for model in RELEASED for name in (model, f"{model}, captured")]
    assert all(row["same_bits"] for row in rows.values())
