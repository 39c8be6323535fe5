"""What the README files list is what there is: every cache field, every room, every figure."""

import json
import re

import pytest
from conftest import ROOT

from experiments.caches import formats as schema

FIELDS, NOTEBOOKS = ((ROOT / name).read_text() for name in ("docs/cache_schema.md", "notebooks/README.md"))


def fields(declared):
    for name, kind in declared.items():
        yield name.rstrip("?")
        if isinstance(kind, list):
            yield from fields(kind[0])


@pytest.mark.parametrize("kind", schema.FORMATS)
def test_every_field_is_explained(kind):
    explained = set(re.findall(r"`(\w+)`", FIELDS))
    assert set(fields(schema.FORMATS[kind].cache.table())) <= explained
    assert f"`{schema.FORMATS[kind].script}`" in FIELDS and f"`{schema.FORMATS[kind].notebook}`" in NOTEBOOKS


def test_every_figure_and_default_is_explained():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        code = "".join(line for cell in cells for line in cell["source"])
        figures = re.findall(r'(?:/ |save\(figure, )f?"([^"\\]+\.svg)', code)
        assert figures, path
        for name in figures:
            shown = re.sub(r"\{(layer|LAYER)\}", "N", name).replace("{HEAD}", "M")
            assert shown.split("/")[-1] in NOTEBOOKS, (path.name, shown)
        for default in re.findall(r'(?:CACHE|DATA)_PATH = "\.\./(cache/[^"]+)', code):
            assert f"`{default}`" in NOTEBOOKS
