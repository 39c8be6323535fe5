"""What a run imports before its first block, and the script that times it."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

from experiments.caches.files import RunError
from experiments.dev import benchmark_start

IMPORTS = """
import sys
import experiments.extraction.cache_builders, experiments.running.jobs
heavy = {"transformers", "diffusers", "sklearn", "matplotlib", "torchvision"} & set(sys.modules)
assert not heavy, heavy
"""


def test_a_run_imports_umt5_and_the_vae_only_where_they_are_used():
    """Each takes about a second."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", IMPORTS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_wait_ends_with_the_line_that_was_awaited():
    script = "import time; print('block 1/7', flush=True); time.sleep(0.5); print('end')"
    seconds, cpu_seconds = benchmark_start.until(["-S", "-c", script], benchmark_start.FIRST_BLOCK)
    assert seconds > 0 and 0 <= cpu_seconds < 0.5
    rows = benchmark_start.measured({"a": (["-S", "-c", "print('there')"], "there")}, 2)
    assert len(rows["a"]["seconds"]) == len(rows["a"]["cpu_seconds"]) == 2


def test_a_process_that_ends_before_it_is_named():
    with pytest.raises(RunError, match="ended before 'block 1/': no model here"):
        benchmark_start.until(["-S", "-c", "print('no model here')"], benchmark_start.FIRST_BLOCK)


def test_every_command_is_the_scripts_own(tmp_path):
    commands = benchmark_start.commands(tmp_path)
    assert [awaited for _, awaited in commands.values()] == ["there", *2 * [benchmark_start.FIRST_BLOCK]]
    assert all((ROOT / arguments[0]).is_file() for arguments, _ in list(commands.values())[1:])
