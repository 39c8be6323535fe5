"""Every script with every kind of bad input: exit code 2 and one line; --help: 0. In forks of one process."""

import os
from functools import partial
from importlib import import_module

import pytest
from conftest import ROOT
from helpers.bad_command_lines import readers, rollouts, write_wrong_files
from helpers.forked import forked, one_after_another, tell

from experiments.running import cli

CASES = rollouts.CASES | readers.CASES
SCRIPTS = {name: import_module(f"experiments.{name}") for name in CASES}


@pytest.fixture
def files(tmp_path):
    """Names in the matrix -> files of the wrong kind."""
    write_wrong_files(tmp_path)
    return tmp_path


def test_every_script_is_here():
    starts = {
        path.stem
        for path in (ROOT / "experiments").glob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    assert starts == set(CASES) and len(CASES) == len(rollouts.CASES) + len(readers.CASES)


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
