"""Items are named by all that their numbers depend on: another input is another name."""

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from experiments.extraction import causal
from experiments.studies.causal_atlas import Study
from experiments.studies.intervention_job import base_runs
from experiments.studies.policy_comparison import Comparison
from wan.config import ModelConfig, load_config
from wan.interventions import Knockout

EDIT = Knockout(frames="first", layers=[1], passes="denoise")
OF_RUNS = {
    "prompt": {"prompt": "a cyan square moving up"},
    "seed": {"seed": 7},
    "frames": {"num_frames": 9},
    "prompts of means": {"reference_prompts": ["a"]},
}
OF_FILES = {
    "weights": {"weights": "1"},
    "dtype": {"dtype": torch.bfloat16},
    "a LoRA": {"files": [{"name": "lora.pt", "sha256": "2"}]},
}


def session_of(config, weights="0", dtype=torch.float32, files=()):
    """What names need of a session; its rollouts are asked for by prompt and seed, and make nothing."""
    sha256, asked = Future(), []
    sha256.set_result(weights)
    return SimpleNamespace(
        sha256=sha256,
        dtype=dtype,
        common={"config": {"height": config.height}, "files": list(files)},
        model_config=ModelConfig(dim=48, ffn_dim=64, num_heads=3, num_layers=4),
        asked=asked,
        rollout=lambda one: asked.append((one.prompt, one.seed)) or torch.zeros(1),
    )


def of_atlas(session, config, tmp_path):
    [name] = Study(tmp_path, EDIT, "head", [config], session, session.common["files"]).items
    return name


def of_comparison(session, config, tmp_path):
    read = session.sha256.result(), str(session.dtype)
    files = session.common["files"]
    [item] = Comparison(tmp_path, {"full": {}}, [config], {}, *read, batch=1, files=files).items
    return item.name


def of_base_runs(session, config, tmp_path):
    (tmp_path / "base.pt").unlink(missing_ok=True)
    base_runs(str(tmp_path / "base.pt"), session, config)
    return torch.load(tmp_path / "base.pt")["made_of"]


def of_means(session, config, tmp_path):
    return causal.means_name(session, config)


EVERYTHING = OF_RUNS | OF_FILES
BUT_ITS_OWN = {name: EVERYTHING[name] for name in EVERYTHING if name not in ("prompt", "seed")}


@pytest.fixture
def config():
    return load_config("configs/wan_mini.yaml", {"num_frames": 6})


@pytest.mark.parametrize(
    "name_of, inputs",
    [
        (of_atlas, EVERYTHING),
        (of_comparison, EVERYTHING),
        (of_base_runs, EVERYTHING),
        (of_means, BUT_ITS_OWN),
    ],
    ids=["atlas", "comparison", "base runs", "means"],
)
def test_another_input_is_another_name(name_of, inputs, config, tmp_path):
    names = {"as it is": name_of(session_of(config), config, tmp_path)}
    for what, change in inputs.items():
        other = replace(config, **change) if what in OF_RUNS else config
        session = session_of(config, **(change if what in OF_FILES else {}))
        names[what] = name_of(session, other, tmp_path)
    assert len(set(names.values())) == len(names), names
    assert name_of(session_of(config), config, tmp_path) == names["as it is"]


def test_a_reference_set_is_every_prompt_with_two_seeds(config, tmp_path, monkeypatch):
    monkeypatch.setattr(causal, "MEANS", tmp_path)
    few, session = replace(config, reference_prompts=["a", "b"]), session_of(config)
    causal.reference_means(session, few)
    assert session.asked == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    causal.reference_means(session, few)
    assert len(session.asked) == 4  # they are made once
