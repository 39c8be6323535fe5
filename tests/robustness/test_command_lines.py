"""Every script with every kind of bad input: exit code 2 and one line; --help: 0. In forks of one process."""

import os
import subprocess
import sys
from functools import partial
from importlib import import_module

import pytest
from conftest import ROOT
from helpers.bad_command_lines import readers, rollouts, workshop, write_wrong_files
from helpers.forked import forked, one_after_another, tell

from experiments.running import cli

CASES = rollouts.CASES | readers.CASES | workshop.CASES
PACKAGES = dict.fromkeys(CASES, "experiments") | dict.fromkeys(workshop.CASES, "experiments.dev")
SCRIPTS = {name: import_module(f"{package}.{name}") for name, package in PACKAGES.items()}


@pytest.fixture
def files(tmp_path):
    """Names in the matrix -> files of the wrong kind."""
    write_wrong_files(tmp_path)
    return tmp_path


def test_every_script_is_here():
    starts = {
        path.stem: package
        for package in ("experiments", "experiments.dev")
        for path in (ROOT / package.replace(".", "/")).glob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    assert starts == PACKAGES
    assert len(CASES) == len(rollouts.CASES) + len(readers.CASES) + len(workshop.CASES)


@pytest.mark.parametrize("name", SCRIPTS)
def test_bad_input_is_one_line_and_exit_code_2(name, files, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    before, wrong, cases = sorted(files.iterdir()), [], [*CASES[name], ["--help"]]
    runs = [partial(cli.main, SCRIPTS[name].run, [part.format(files) for part in case]) for case in cases]
    done = forked(lambda: one_after_another(runs), timeout=60)
    assert done.code == 0, done
    *refused, usage = done.value
    for case, (code, said) in zip(cases, refused, strict=False):
        one_line = said.startswith("error: ") and said.count("\n") == 1 and said.endswith("\n")
        if (code, one_line) != (2, True):
            wrong.append((case, code, said[-300:]))
    assert len(refused) == len(CASES[name]) and not wrong, "\n".join(map(str, wrong))
    left = [
        path
        for path in sorted(files.iterdir())
        if path not in before and (not path.is_dir() or os.listdir(path))
    ]
    assert not left
    assert usage == (0, "")
    tell(capfd, f"{name}: {len(refused)} bad command lines, exit code 2 and one line each; --help 0")


HELPS = """
import contextlib, io, runpy, sys
for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        runpy.run_path(path, run_name="__main__")
    assert "torch" not in sys.modules, path
"""


def test_no_help_of_the_workshop_imports_torch():
    """Those of users: tests/robustness/test_streams.py."""
    paths = [str(path) for path in (ROOT / "experiments/dev").glob("*.py") if path.stem in SCRIPTS]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", HELPS, *paths], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and len(paths) > 15, done.stderr
