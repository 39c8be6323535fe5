"""Golden numbers of the public implementation (tests/golden/README.md), small models, devices to test on."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import without_hypothesis
from helpers.pretended_gpu import pretended_gpu

from wan.model import CausalWanModel, WanModel

pytest_plugins = ["helpers.tiny_model", "helpers.tiny_longlive2"]

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
# Whether a GPU is here is asked of its driver's library: CUDA, once asked, is lost to forks of this process.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the scripts that tests start, as of torch below
for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):  # the scripts of a clone take the clone's .venv
    os.environ.pop(name, None)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
torch.set_num_threads(1)  # the tensors are small: threads that wait for each other cost seconds

# What takes most of the time: real scripts, notebooks, figures of every size, kills and mutants.
SLOW_FOLDERS = ("notebooks", "robustness")
SLOW = "memory figures own_code tracking training evaluation long_rollout parallel "
SLOW += "causal_atlas intervention_runs policy_rollouts policy_comparison "
SLOW_FILES = [f"test_{name}" for name in (SLOW + "pretended_gpu").split()]

# Files of ten seconds and more on one core, the longest first. tests/run.sh tells xdist to keep this order:
# its own begins with files of many tests, and ends with a few that are long.
LONGEST = "readme_commands notebooks golden_policies own_code sweep run cli figures atlases rows "
LONGEST += "stopping remedies findings scripts long_rollout parallel training layout kernels"
LONGEST_FIRST = {f"test_{name}": place for place, name in enumerate(LONGEST.split())}

SIZES = ("dim", "ffn_dim", "freq_dim", "text_dim", "text_len", "in_dim", "out_dim")
SIZES += ("num_heads", "num_layers", "patch_size")


try:
    from hypothesis import given  # noqa: F401
except ImportError:
    sys.modules["hypothesis"] = without_hypothesis

# Machines with a GPU often have PyTorch and none of these; tests/run.sh installs all of them.
OFTEN_ABSENT = ("dask", "diffusers", "imageio", "imageio_ffmpeg", "nbformat", "nnsight", "papermill")
OFTEN_ABSENT += ("matplotlib", "scipy")


def absent_library(error: str) -> str | None:
    """Return the library for whose absence something failed."""
    named = re.search(r"No module named '(\w+)", error)
    absent = named and named[1] in OFTEN_ABSENT and find_spec(named[1]) is None
    return f"{named[1]} is not installed" if absent else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """A file that imports an absent library is skipped, and so is a test that fails for one."""
    report = yield
    if report.failed and (reason := absent_library(str(report.longrepr))):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: {reason}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and (reason := absent_library(str(call.excinfo.value))):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {reason}")
    return report


def handle_ignored_signals() -> None:
    """Handle what a shell has this process ignore, so that processes which tests start do not.

    `command &` in a script ignores Ctrl-C, nohup a hang-up. What is ignored is inherited; a handler is not.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_configure():
    handle_ignored_signals()


def require_forks() -> None:
    """Skip where forks of this process would fail, or say more than their scripts do."""
    if torch.cuda.is_initialized():
        pytest.skip("this process has used a GPU, which its forks then cannot: run this file alone")


def pytest_collection():
    """Nothing that is imported is garbage."""
    gc.disable()


def pytest_collection_modifyitems(items):
    """Mark the slow ones; pytest -m "not slow" leaves them out. What runs beside is slow too.

    The longest files come first, so that no process waits for one at the end.
    """
    items.sort(key=lambda item: LONGEST_FIRST.get(item.path.stem, len(LONGEST_FIRST)))
    for item in items:
        beside = item.get_closest_marker("beside")
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


NOTING_LATE_IMPORTS = """
import sys, threading

def audit(event, args):
    is_late = event == "import" and threading.current_thread() is not threading.main_thread()
    if is_late and "/run_extraction" in getattr(sys, "argv", [""])[0]:
        with open("late_imports", "a") as file:
            print(args[0], file=file)

sys.addaudithook(audit)
"""


@pytest.fixture(scope="session")
def clone(tmp_path_factory) -> Path:
    """A clone of what is committed, whose environment is this one, with six frames of the miniature."""
    return make_clone(tmp_path_factory.mktemp("clone") / "clone")


def make_clone(folder: Path) -> Path:
    """Clone what is committed into a folder, with this environment and six frames of the miniature."""
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    # 1. An environment of its own, as env.sh asks for, with the packages and commands of this one
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    [site] = (folder / ".venv/lib").glob("python*/site-packages")
    packages = [path for path in sys.path if path.endswith("-packages")]
    (site / "here.pth").write_text("\n".join([*packages, "import noting_late_imports"]))
    (site / "noting_late_imports.py").write_text(NOTING_LATE_IMPORTS)
    for name, module in (("papermill", "papermill"), ("hf", "huggingface_hub.cli.hf")):
        (folder / ".venv/bin" / name).write_text(f'#!/bin/sh\nexec python -m {module} "$@"\n')
        (folder / ".venv/bin" / name).chmod(0o755)
    # 2. The mark of what env.sh has installed, so that it installs nothing
    files = [(folder / name).read_bytes() for name in ("requirements.txt", "pyproject.toml")]
    checksum = subprocess.run(["cksum"], input=b"".join(files), capture_output=True).stdout
    (folder / ".venv/installed").write_bytes(checksum)
    # 3. Fewer frames
    config = folder / "configs/wan_mini.yaml"
    config.write_text(config.read_text().replace("num_frames: 21", "num_frames: 6"))
    commit = ["-c", "user.name=t", "-c", "user.email=t", "commit", "-qam", "few frames"]
    subprocess.run(["git", *commit], cwd=folder, check=True)
    return folder
