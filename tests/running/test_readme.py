"""The README's tables are those of the benchmarks' JSON, and its commands and links lead somewhere."""

import re

from conftest import ROOT

from experiments.dev.readme_tables import MARKED, fill

README = (ROOT / "README.md").read_text()


def test_no_number_in_a_table_is_typed():
    assert len(MARKED.findall(README)) == 5 and fill(README, ROOT) == README


MOVED = {  # scripts that the commands recorded in older JSON name: history keeps its text
    "experiments/benchmark.py": "experiments/dev/benchmark_capture.py",
    "experiments/benchmark_real.py": "experiments/dev/benchmark_memory.py",
    "experiments/benchmark_reading.py": "experiments/dev/benchmark_reading.py",
}


def test_every_script_and_file_named_is_there():
    named = re.findall(r"(?:bash|python) ((?:experiments|tests)/\S+\.(?:sh|py))", README)
    named += re.findall(r"\]\((?!http)([^)]+)\)", README)
    assert len(named) > 12 and not [name for name in named if not (ROOT / MOVED.get(name, name)).exists()]
