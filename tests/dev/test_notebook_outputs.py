"""Stored outputs of notebooks: what makes them old, how they are made small, and whether ours are current."""

import base64
import io
import json

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image

from experiments.caches.files import RunError
from experiments.dev import notebook_outputs
from experiments.dev.notebook_outputs import TOO_LARGE, mark, shrunk, state


@pytest.mark.parametrize("name", notebook_outputs.RECIPES)
def test_stored_outputs_are_current(name):
    said = state(ROOT / f"notebooks/{name}.ipynb")
    if said == "no outputs":
        pytest.skip("stored without outputs: python experiments/dev/notebook_outputs.py makes them")
    assert said == "current", f"run: python experiments/dev/notebook_outputs.py {name}"


def test_every_notebook_has_a_recipe_whose_inputs_are_there():
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == notebook_outputs.RECIPES.keys()
    for recipe in notebook_outputs.RECIPES.values():
        assert all(list(ROOT.glob(pattern)) for pattern in recipe.inputs)


def test_cells_and_inputs_make_outputs_old(tmp_path, monkeypatch, capsys):
    notebook = {"cells": [{"cell_type": "code", "source": ["a = 1"], "metadata": {}, "outputs": []}]}
    (tmp_path / "cache/published").mkdir(parents=True)
    data = tmp_path / "cache/published/a.pt"
    data.write_bytes(b"1")
    monkeypatch.setattr(notebook_outputs, "ROOT", tmp_path)
    monkeypatch.setattr(notebook_outputs, "FOLDER", tmp_path)
    path = tmp_path / "plt_fig4.ipynb"

    def said(**metadata):
        path.write_text(json.dumps(notebook | {"metadata": metadata}))
        return state(path)

    assert said() == "no outputs"
    stored = {"sha256": mark(notebook, "plt_fig4")}
    assert said(outputs=stored) == "current"
    notebook["cells"][0]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "1"}]
    assert said(outputs=stored) == "current"
    data.write_bytes(b"2")
    assert said(outputs=stored) == "old"
    with pytest.raises(RunError, match=r"old outputs; run: .* plt_fig4"):
        notebook_outputs.run(["--check", "plt_fig4"])
    assert capsys.readouterr().out == "plt_fig4: old\n"
    data.write_bytes(b"1")
    notebook["cells"][0]["source"] = ["a = 2"]
    assert said(outputs=stored) == "old"


def noise(width, height):
    """A picture that no PNG makes small, in base64."""
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, format="png")
    return base64.b64encode(file.getvalue()).decode()


def test_pictures_shrink_and_the_largest_are_left_out(monkeypatch):
    monkeypatch.setattr(notebook_outputs, "SIZES", ((120, 128), (60, 32)))
    outputs = [{"output_type": "display_data", "metadata": {}, "data": {"image/png": noise(w, h)}}
               for w, h in ((50, 50), (90, 900), (90, 90))]  # fmt: skip
    cell = {"cell_type": "code", "source": [], "metadata": {}, "outputs": outputs}
    text, note = shrunk({"cells": [cell]}, [cell], limit=30_000)
    assert len(text.encode()) <= 30_000 and note == ", 1 of 3 pictures left out"
    assert [set(one["data"]) for one in outputs] == [{"image/png"}, {"text/plain"}, {"image/png"}]
    assert outputs[1]["data"]["text/plain"] == TOO_LARGE
    png = base64.b64decode(outputs[2]["data"]["image/png"])
    assert Image.open(io.BytesIO(png)).width == 60
