"""Commands that people type, as older projects print them; the miniature has the names of real weights."""

import os
import shlex
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT, make_clone

from experiments.caches import load_cache
from experiments.caches.files import located
from experiments.running.cli import config_file

SHELL = {  # of each command that begins with bash, the caches that it writes and its notebook
    "bash experiments/extract_attention.sh ./Wan2.1-T2V-1.3B 7 cache --num_frames 9 --num_steps 2": (
        ["cache/layer7.pt"],
        "mkdir -p outputs && papermill --cwd notebooks notebooks/extract_all_attention.ipynb "
        "outputs/extract_all_attention_layer7.ipynb -p SAVE_DIR extract_all_attention_layer7 "
        "-p CACHE_PATH ../cache/layer7.pt",
    ),
    "bash experiments/extract_figure4.sh wan_mini 0 4 --granularity frame --output_path 'cache/my own.pt'": (
        ["cache/my own.pt"],
        "mkdir -p outputs && papermill --cwd notebooks notebooks/plt_fig4.ipynb "
        "'outputs/plt_fig4_my own.ipynb' -p SAVE_DIR 'plt_fig4_my own' -p CACHE_PATH '../cache/my own.pt'",
    ),
    "bash experiments/extract_all_layers.sh configs/wan_mini.yaml cache/layers --quiet": (
        [f"cache/layers/layer{layer}.pt" for layer in range(8)],
        None,
    ),
}
TUNED = "--config_path configs/self_forcing_dmd.yaml --checkpoint_path checkpoints/self_forcing_dmd.pt"
PYTHON = {  # folder, command: the cache that it writes, below that folder
    (".", "run_extraction_figure4.py --no_checkpoint --output_path cache/attention_cache_wan_base.pt"): (
        "cache/attention_cache_wan_base.pt"
    ),
    (
        ".",
        "run_extraction_each.py --layer_index 3 --output_path cache/layer3.pt "
        "--checkpoint_path checkpoints/self_forcing_dmd.pt",
    ): "cache/layer3.pt",
    (".", "run_extraction_each.py --layer_index 3 --output_path cache/layer3_wan.pt --no_checkpoint"): (
        "cache/layer3_wan.pt"
    ),
    (
        "experiments",
        f"run_extraction_figure4.py {TUNED} --output_path attention_cache_figure4.pt --layer_indices 0 4",
    ): "attention_cache_figure4.pt",
    ("experiments", f"run_extraction.py {TUNED} --output_path attention_cache.pt"): "attention_cache.pt",
}
IN_ONE_PROCESS = """
import os, runpy, shlex, sys
root = os.getcwd()
for line in sys.stdin.read().splitlines():
    folder, command = line.split(": ", 1)
    os.chdir(os.path.join(root, folder))
    sys.argv = shlex.split(command)
    if folder == ".":
        sys.argv[0] = f"experiments/{sys.argv[0]}"
    runpy.run_path(sys.argv[0], run_name="__main__")
    print("END", flush=True)
"""
# In place of Python: it writes down the script and the flags that a shell script hands on
RECORDER = """#!/bin/bash
printf "%q " "$@" > handed_on
"""


@pytest.fixture(scope="module")
def mini_clone(tmp_path_factory):
    """A clone under a path with a space, in which the miniature has the names of the real weights."""
    folder = make_clone(tmp_path_factory.mktemp("a clone") / "of ours")
    mini = folder / "checkpoints/wan-mini"
    (folder / "wan_models").mkdir()
    for name in ("Wan2.1-T2V-1.3B", "wan_models/Wan2.1-T2V-1.3B"):
        (folder / name).symlink_to(mini)
    (folder / "checkpoints/self_forcing_dmd.pt").symlink_to(mini / "self_forcing_mini.pt")
    settings = yaml.safe_load((folder / "configs/wan_mini.yaml").read_text())
    settings |= {"ckpt_dir": "wan_models/Wan2.1-T2V-1.3B", "num_frames": 6}
    settings |= {"checkpoint_path": "checkpoints/self_forcing_dmd.pt"}
    (folder / "configs/self_forcing_dmd.yaml").write_text(yaml.safe_dump(settings))
    return folder


def run(folder, command, text=None):
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    shell = ["bash", "-ec", f"source .venv/bin/activate; {command}"]
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(shell, input=text, **options)
    assert done.returncode == 0, done.stderr[-1000:]
    return done.stdout


def handed_on(folder, commands) -> list[str]:
    """Return the script of experiments/ and its flags that each shell command starts."""
    python = folder / ".venv/bin/python"
    original = python.rename(python.with_name("python.original"))
    python.write_text(RECORDER)
    python.chmod(0o755)
    started = []
    for command in commands:
        run(folder, command)
        started.append((folder / "handed_on").read_text().removeprefix("experiments/"))
    (folder / "handed_on").unlink()
    original.rename(python)
    return started


@pytest.fixture(scope="module")
def printed(mini_clone) -> dict[object, list[str]]:
    """Run all commands in one process -> the lines that each printed."""
    lines = [f".: {command}" for command in handed_on(mini_clone, SHELL)]
    lines += [f"{folder}: {command}" for folder, command in PYTHON]
    output = run(mini_clone, f"python -c {shlex.quote(IN_ONE_PROCESS)}", "\n".join(lines))
    parts = [part.splitlines() for part in output.split("END\n")[:-1]]
    return dict(zip([*SHELL, *PYTHON], parts, strict=True))


@pytest.mark.beside
@pytest.mark.parametrize("command", SHELL)
def test_a_shell_command_writes_its_caches_and_names_the_next_one(command, printed, mini_clone):
    paths, notebook = SHELL[command]
    lines = printed[command]
    for path in paths:
        assert load_cache(mini_clone / path)["model"] == "wan-mini"
    if notebook is None:  # --quiet
        assert not lines
        return
    assert lines[-2].startswith(f"{paths[0]}: ") and lines[-1] == f"next: {notebook}"
    _, command = notebook.split(" && ")
    folder, name = shlex.split(command)[2:4]
    assert (mini_clone / folder / shlex.split(command)[-1]).is_file() and (mini_clone / name).is_file()


@pytest.mark.beside
def test_python_commands_run_from_the_root_and_from_experiments(printed, mini_clone):
    """Inputs are looked up at the root; outputs are below the working folder, and nothing else is written."""
    for (folder, command), path in PYTHON.items():
        assert printed[folder, command]
        cache = load_cache(mini_clone / folder / path)
        assert cache["weights"] == ("base" if "--no_checkpoint" in command else "checkpoint")
    status = run(mini_clone, "git status --porcelain experiments")
    written = {f"?? experiments/{path}" for (folder, _), path in PYTHON.items() if folder == "experiments"}
    assert set(status.splitlines()) == written


@pytest.mark.beside
@pytest.mark.parametrize("folder", [".", "experiments"])
@pytest.mark.parametrize("path", [None, "."])
def test_scripts_run_from_a_shell_with_pythonpath_and_without(folder, path):
    script = "run_extraction_each.py" if folder == "experiments" else "experiments/run_extraction_each.py"
    environment = os.environ | {"PYTHONPATH": path} if path else {"PATH": "/usr/bin:/bin"}
    command = [sys.executable, script, "--help"]
    done = subprocess.run(command, cwd=ROOT / folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "--layer_index" in done.stdout, done.stderr


def test_an_input_is_looked_up_at_the_root_where_it_is_not_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert located("configs/wan_mini.yaml") == str(ROOT / "configs/wan_mini.yaml")
    assert config_file("wan_mini") == str(ROOT / "configs/wan_mini.yaml")
    assert located("configs/none.yaml") == "configs/none.yaml"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/wan_mini.yaml").touch()
    assert located("configs/wan_mini.yaml") == "configs/wan_mini.yaml"
