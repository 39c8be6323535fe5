"""Notebooks run from top to bottom for tests, from the folder a user starts them in."""

import atexit
import re
from functools import cache
from pathlib import Path

from nbclient.exceptions import CellExecutionError
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from experiments.running.warm_kernel import WarmKernel

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@cache
def kernel() -> WarmKernel:
    """One kernel for all tests of a process: starting one takes longer than most notebooks."""
    warm = WarmKernel(NOTEBOOKS)
    warm.__enter__()
    atexit.register(warm.__exit__)
    return warm


def run(name, folder, **parameters):
    """Printed text of an executed notebook; its figures go to folder/figures. An error's text comes last."""
    source = load_notebook_node(str(NOTEBOOKS / name))
    notebook = parameterize_notebook(source, {"SAVE_DIR": str(folder / "figures")} | parameters)
    try:
        kernel().execute(notebook)
    except CellExecutionError as error:
        assert error.ename == "CacheError", error
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(
        "\n".join(o["traceback"]) if o["output_type"] == "error" else o.get("text", "") for o in outputs
    )


def figures(folder):
    """Bytes of the figures that a run wrote, by their path below folder/figures."""
    return {
        str(path.relative_to(folder / "figures")): path.read_bytes()
        for path in (folder / "figures").rglob("*.svg")
    }


def words(svg):
    """The words of an SVG, which are text."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", svg.decode()))
