"""Golden numbers of the public implementation (tests/golden/README.md), small models, devices to test on."""

import gc
import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.pretended_gpu import pretended_gpu

from wan.model import CausalWanModel, WanModel

pytest_plugins = ["helpers.tiny_model", "helpers.warmed"]

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
torch.set_num_threads(1)  # the tensors are small: threads that wait for each other cost seconds

# What takes most of the time: real scripts, notebooks, figures of every size, kills and mutants.
SLOW_FOLDERS = ("notebooks", "robustness")
SLOW = "memory figures own_code tracking training evaluation long_rollout parallel "
SLOW += "causal_atlas intervention_runs policy_rollouts policy_comparison head_memory "
SLOW_FILES = [f"test_{name}" for name in (SLOW + "pretended_gpu").split()]

SIZES = ("dim", "ffn_dim", "freq_dim", "text_dim", "text_len", "in_dim", "out_dim")
SIZES += ("num_heads", "num_layers", "patch_size")


def pytest_collection():
    """Nothing that is imported is garbage."""
    gc.disable()


def pytest_collection_modifyitems(items):
    """Mark the slow ones; pytest -m "not slow" leaves them out. What runs beside is slow too.

    The longest file comes first, so that no process waits for it at the end.
    """
    items.sort(key=lambda item: item.path.stem != "test_readme_commands")
    for item in items:
        beside = item.get_closest_marker("beside") or "warm" in item.fixturenames
        if beside or item.path.parent.name in SLOW_FOLDERS or item.path.stem in SLOW_FILES:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """What tests have imported stays: looking through it for garbage took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(5000, 10, 100)  # and figures and models of single tests need no look at each other


@cache
def golden_arrays(name: str) -> dict[str, torch.Tensor]:
    """An .npz of tests/golden as tensors."""
    with np.load(GOLDEN / f"golden_{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


@cache
def golden_config() -> dict:
    return json.loads((GOLDEN / "golden_config.json").read_text())


def golden_model(model_class=CausalWanModel, **kwargs) -> WanModel:
    """The golden small model: random weights that are exact in float32."""
    sizes = {name: golden_config()["model"][name] for name in SIZES}
    with torch.device("meta"):  # nothing is drawn at random only to be replaced
        model = model_class(**sizes, **kwargs)
    weights = {name: value.float() for name, value in golden_arrays("weights").items()}
    model.load_state_dict(weights, strict=True, assign=True)
    return model.eval().requires_grad_(False)


PRETENDED = pytest.param("pretended GPU", marks=pytest.mark.beside)


@pytest.fixture(params=["cpu", "cuda" if torch.cuda.is_available() else PRETENDED])
def device(request) -> Iterator[torch.device]:
    if request.param == "pretended GPU":
        if request.node.get_closest_marker("real_gpu"):
            pytest.skip("no GPU here; the same test runs on the CPU path")
        with pretended_gpu() as there:
            yield there
    else:
        yield torch.device(request.param)
