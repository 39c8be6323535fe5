"""The README's tables are those of the benchmarks' JSON, and its commands and links lead somewhere."""

import re

from conftest import ROOT

from experiments.readme_tables import MARKED, fill

README = (ROOT / "README.md").read_text()


def test_no_number_in_a_table_is_typed():
    assert len(MARKED.findall(README)) == 5 and fill(README, ROOT) == README


def test_every_script_and_file_named_is_there():
    named = re.findall(r"(?:bash|python) ((?:experiments|tests)/\S+\.(?:sh|py))", README)
    named += re.findall(r"\]\((?!http)([^)]+)\)", README)
    assert len(named) > 12 and not [name for name in named if not (ROOT / name).exists()]
