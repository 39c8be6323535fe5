"""Notebooks run from top to bottom for tests, from the folder a user starts them in.

Their cells run in this process, in an IPython that is emptied before each: a kernel would load torch again
and draw every figure twice. Kernels are tested in tests/running.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from pytest import MonkeyPatch

from experiments.figures import style

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@cache
def ipython() -> InteractiveShell:
    shell = InteractiveShell(cache_size=0)  # keeps no outputs, and no search for garbage after each notebook
    shell.colors = "nocolor"
    shell.history_manager.enabled = False
    return shell


@contextmanager
def main_module_kept() -> Iterator[None]:
    """IPython takes the place of __main__, which processes that are spawned later import again."""
    main = sys.modules["__main__"]
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def run(name, folder, **parameters):
    """Printed text of an executed notebook; its figures go to folder/figures. An error's text comes last.

    Figures are not laid out, which takes most of the time: where panels lie is for tests/figures.
    """
    source = load_notebook_node(str(NOTEBOOKS / name))
    notebook = parameterize_notebook(source, {"SAVE_DIR": str(folder / "figures")} | parameters)
    patched = MonkeyPatch.context()
    with chdir(NOTEBOOKS), main_module_kept(), patched as patch, capture_output() as printed:
        patch.setattr(style, "_fit", lambda figure: None)
        ipython().reset(new_session=True)
        for cell in notebook.cells:
            if cell.cell_type == "code" and not (done := ipython().run_cell(cell.source)).success:
                break
    error = done.error_before_exec or done.error_in_exec
    assert error is None or type(error).__name__ == "CacheError", f"{error!r}\n{printed.stdout}"
    return printed.stdout if error is None else printed.stdout.rstrip("\n")


def figures(folder):
    """Bytes of the figures that a run wrote, by their path below folder/figures."""
    here = folder / "figures"
    return {str(path.relative_to(here)): path.read_bytes() for path in here.rglob("*.svg")}


def words(svg):
    """The words of an SVG, which are text."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", svg.decode()))


def smaller_atlas(atlas: dict[str, Any], layers: Sequence[int], heads: int) -> dict[str, Any]:
    """Some layers and the first heads of an atlas; layers are numbers of the model's."""
    rows = [atlas["layers"].index(layer) for layer in layers]
    part = atlas | {"layers": list(layers), "num_heads": heads}
    for name, values in atlas.items():
        if torch.is_tensor(values) and len(values) == len(atlas["layers"]):
            part[name] = values[rows]
            if values.ndim > 2 and values.shape[2] == atlas["num_heads"]:  # [N, P, H, ...]
                part[name] = part[name][:, :, :heads].contiguous()
    return part
