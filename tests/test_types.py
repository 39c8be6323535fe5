"""Types, checked by mypy beside the other tests: alone after them it left a core idle."""

import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.beside
def test_types_are_those_that_are_said():
    pytest.importorskip("mypy")
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
