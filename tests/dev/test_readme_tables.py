"""The README's tables are those of the benchmarks' JSON, and its commands and links lead somewhere."""

import json
import re

import pytest
from conftest import ROOT

from experiments.dev import tables
from experiments.dev.readme_tables import BENCHMARKS, MARKED, benchmark_of, documents, fill

README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_no_number_in_a_table_is_typed(path):
    text = path.read_text()
    assert fill(text) == text, "run: python experiments/dev/readme_tables.py"


def test_every_benchmark_has_its_table():
    """A benchmark that has none has no report either: it is yet to run."""
    named = {name for path in documents() for _, name, _ in MARKED.findall(path.read_text())}
    without = set(BENCHMARKS) - {benchmark_of(ROOT / name) for name in named}
    assert not [path for name in without for path in (ROOT / "docs").rglob(f"{name}*.json")]


MOVED = {  # scripts that the commands recorded in older JSON name: history keeps its text
    "experiments/benchmark.py": "experiments/dev/benchmark_capture.py",
    "experiments/benchmark_real.py": "experiments/dev/benchmark_memory.py",
    "experiments/benchmark_reading.py": "experiments/dev/benchmark_reading.py",
}


def test_every_script_and_file_named_is_there():
    named = re.findall(r"(?:bash|python) ((?:experiments|tests)/\S+\.(?:sh|py))", README)
    named += re.findall(r"\]\((?!http)([^)]+)\)", README)
    assert len(named) > 12 and not [name for name in named if not (ROOT / MOVED.get(name, name)).exists()]


def test_a_finding_says_whether_the_miniature_still_has_its_weights():
    now = json.loads(tables.EVALUATION.read_text())["weights"]["self_forcing_mini.pt"]
    assert tables.of_weights(now) == f"weights `{now[:9]}`"
    assert tables.of_weights("0" * 64) == f"weights `000000000`, before the present `{now[:9]}`"


def test_a_command_of_a_script_that_moved_says_so():
    assert tables.command_said("python experiments/benchmark_reading.py --repeats 3").endswith(
        "` (the script's place at that commit)"
    )
    for there in ("python experiments/dev/benchmark_reading.py", "bash .ci/run"):
        assert tables.command_said(there) == f"`{there}`"
    named = [path.name for path in documents() if "experiments/benchmark_re" in path.read_text()]
    assert all("the script's place at that commit" in (ROOT / "docs" / name).read_text() for name in named)
