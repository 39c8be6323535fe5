"""Every shell script with too few or too many words: exit code 2 and one line; --help: 0."""

import os
import shutil
import subprocess

import pytest
from conftest import ROOT
from helpers.bad_command_lines import NO_DISK, write_wrong_files
from helpers.forked import tell

SHELL = {  # too few or too many words
    "base_and_causal": [["1", "2", "3"], ["x"]],
    "download_weights": [["a", "b"]],
    "extract_all_layers": [[], ["configs/wan_mini.yaml"]],
    "extract_attention": [[]],
    "published_figure": [["1"]],
    "quickstart": [["1"]],
    "run_notebooks": [[], ["a", "b"]],
}
BEHIND = {  # what the script behind it refuses
    "extract_all_layers": [["{}/none.yaml", "{}/o"]],
    "extract_attention": [["checkpoints/wan-mini", "1", NO_DISK]],
    "run_notebooks": [["extract_all_attention.ipynb", "{}/text.txt", "all"]],
}


def bad_lines(cases, files):
    """How many lines were tried, and those that did not end with code 2 and one line."""
    wrong, tried = [], 0
    for name, lines in cases.items():
        for case in lines:
            argv = ["bash", f"experiments/{name}.sh", *(part.format(files) for part in case)]
            done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
            tried += 1
            if done.returncode != 2 or not done.stderr.startswith("error: ") or done.stderr.count("\n") != 1:
                wrong.append((name, case, done.returncode, done.stderr[-300:]))
    return tried, wrong


def test_every_shell_script(tmp_path, capfd):
    paths = (ROOT / "experiments").glob("*.sh")
    assert {path.stem for path in paths} - {"env", "usage"} == SHELL.keys()  # these two are sourced
    for name in SHELL:
        script = ["bash", f"experiments/{name}.sh", "--help"]
        usage = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)
        assert usage.returncode == 0 and " ".join(script[:2]) in usage.stdout and not usage.stderr, usage
    tried, wrong = bad_lines({name: [["--no_such_flag"], *cases] for name, cases in SHELL.items()}, tmp_path)
    assert not wrong, "\n".join(map(str, wrong))
    tell(
        capfd,
        f"{len(SHELL)} shell scripts: {tried} bad command lines, exit code 2 and one line each; --help 0",
    )


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
    assert (
        done.stderr.startswith("error: .venv leads out of this checkout, to ") and "rm .venv" in done.stderr
    )
    (tmp_path / "ours/.venv").unlink()
    (tmp_path / "theirs/.venv").rename(tmp_path / "ours/.venv")
    assert subprocess.run(["bash", "-eu", script], capture_output=True).returncode == 7
    shutil.rmtree(tmp_path / "ours/.venv")
    (tmp_path / "python3").symlink_to("/bin/false")
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-eu", script], capture_output=True, text=True, env=os.environ | path)
    assert done.stderr == "error: python3 must be 3.11 or newer\n"  # one is made where there is none


@pytest.mark.beside
def test_a_shell_script_passes_on_what_the_script_behind_it_refuses(tmp_path):
    write_wrong_files(tmp_path)
    assert bad_lines(BEHIND, tmp_path) == (len(BEHIND), [])
