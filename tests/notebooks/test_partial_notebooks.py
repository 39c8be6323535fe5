"""Notebooks on caches of runs that were stopped:
they run from top to bottom and show what is absent as absent.
"""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from conftest import ROOT
from helpers import executed
from helpers.executed import smaller_atlas

from experiments import run_extraction, run_extraction_all, run_extraction_each
from experiments.caches import load_cache, save_cache
from experiments.running import cli
from experiments.running.progress import Progress

MINI = ["--config_path", "configs/wan_mini.yaml", "--quiet"]
FOUR_BLOCKS = [*MINI, "--num_frames", "12"]
STOPPED = "partial: the run was stopped after 3 of 4 blocks; what comes later is absent"
NOTEBOOKS = {  # name of the cache -> notebook, its parameters, and what it prints of the stop
    "atlas": ("layer_atlas.ipynb", {"CACHE_PATH": "atlas.pt", "LAYER": 5}, STOPPED),
    "layer": ("extract_all_attention.ipynb", {"DATA_PATH": "layer.pt"}, STOPPED),
    "inference": ("plot_figure4.ipynb", {"CACHE_PATH": "inference.pt"}, STOPPED),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A folder of caches of runs that were stopped."""
    folder = tmp_path_factory.mktemp("partial")

    block = Progress.block

    def advance(self, index, *more):
        block(self, index, *more)
        if index == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(Progress, "block", advance)
        for script, name, flags in (
            (run_extraction_all, "atlas", ["--cross", "--key_curve", "--rope_bands"]),
            (run_extraction_each, "layer", []),
            (run_extraction, "inference", ["--blocks", "1", "2", "-1"]),
        ):
            stop(script, [*FOUR_BLOCKS, *flags, "--output_path", str(folder / f"{name}.pt")])
        assert all(load_cache(path)["partial"] for path in folder.glob("*.pt"))
        atlas = load_cache(folder / "atlas.pt", mmap=False)
        save_cache(folder / "atlas.pt", smaller_atlas(atlas, (1, 5), heads=3))
    return folder


def stop(script, flags) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(script.run, flags)
    assert ended.value.code == 130


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_says_where_the_run_was_stopped(name, stopped, tmp_path):
    notebook, parameters, _ = NOTEBOOKS[name]
    paths = {key: str(stopped / value) for key, value in parameters.items() if key.endswith("PATH")}
    printed, figures = executed.run(notebook, tmp_path, **parameters | paths), executed.figures(tmp_path)
    assert NOTEBOOKS[name][2] in printed and figures
    assert not re.search(r"\bnan\b", printed + "".join(map(executed.words, figures.values())), re.IGNORECASE)
    hidden = [
        file
        for file, svg in figures.items()
        if "Key frame" in executed.words(svg) and "not attended" not in executed.words(svg)
    ]
    assert hidden == []
