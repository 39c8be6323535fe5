"""Notebooks run from top to bottom for tests, from the folder a user starts them in."""

import re
from pathlib import Path

import nbformat
import papermill
from papermill.exceptions import PapermillExecutionError

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def run(name, folder, **parameters):
    """Printed text of an executed notebook; its figures go to folder/figures. An error's text comes after what was printed."""
    out = folder / "out.ipynb"
    try:
        papermill.execute_notebook(
            NOTEBOOKS / name,
            out,
            cwd=NOTEBOOKS,
            progress_bar=False,
            kernel_name="python3",
            parameters={"SAVE_DIR": str(folder / "figures")} | parameters,
        )
    except PapermillExecutionError as error:
        assert error.ename == "CacheError"
    outputs = [output for cell in nbformat.read(out, 4).cells for output in cell.get("outputs", [])]
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
