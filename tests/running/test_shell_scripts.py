"""Shell scripts with too few or too many words: exit code 2 and one line; --help: 0."""

import os
import shutil
import subprocess

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow
SHELL = {  # too few or too many words
    "base_and_causal": [["1", "2", "3"]],
    "download_weights": [["a", "b", "c"]],
    "extract_all_layers": [[], ["configs/wan_mini.yaml"]],
    "extract_attention": [[]],
    "published_figure": [["1"]],
    "quickstart": [["1"]],
    "run_notebooks": [[], ["a", "b"]],
}


@pytest.mark.parametrize("name", SHELL)
def test_every_shell_script(name):
    script = ["bash", f"experiments/{name}.sh"]
    usage = subprocess.run([*script, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert usage.returncode == 0 and " ".join(script) in usage.stdout and not usage.stderr, usage
    for case in (["--no_such_flag"], *SHELL[name]):
        done = subprocess.run([*script, *case], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("error: "), (case, done)
        assert done.stderr.count("\n") == 1, done


def test_a_venv_of_another_checkout_is_refused_before_anything_is_installed(tmp_path):
    (tmp_path / "ours/experiments/running").mkdir(parents=True)
    script = shutil.copy(ROOT / "experiments/running/env.sh", tmp_path / "ours/experiments/running")
    (tmp_path / "theirs/.venv/bin").mkdir(parents=True)
    (tmp_path / "theirs/.venv/bin/python").write_text("#!/bin/sh\ntouch called\n")
    (tmp_path / "theirs/.venv/bin/python").chmod(0o755)
    (tmp_path / "theirs/.venv/bin/activate").write_text("exit 7\n")  # as far as a .venv of its own comes
    (tmp_path / "ours/.venv").symlink_to(tmp_path / "theirs/.venv")
    done = subprocess.run(["bash", "-eu", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: .venv leads out of this checkout, to ")
    (tmp_path / "ours/.venv").unlink()
    (tmp_path / "theirs/.venv").rename(tmp_path / "ours/.venv")
    assert subprocess.run(["bash", "-eu", script], capture_output=True).returncode == 7
    shutil.rmtree(tmp_path / "ours/.venv")
    (tmp_path / "python3").symlink_to("/bin/false")
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-eu", script], capture_output=True, text=True, env=os.environ | path)
    assert done.stderr == "error: python3 must be 3.11 or newer\n"  # one is made where there is none
