"""Fill the tables of documents from the JSON of the benchmarks, so that no number in them is typed.

    python experiments/dev/readme_tables.py [README.md docs/policies.md ...]

A table stands between "<!-- table: FILE.json -->" and "<!-- end of table -->". The first words of the file's
name say which benchmark wrote it: capture_h200.json is of benchmark_capture. Each benchmark has a function
table(report).
"""

import json
import re
from importlib import import_module
from pathlib import Path

from experiments.running.cli import Parser, main

ROOT = Path(__file__).parents[2]
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
BENCHMARKS = {
    "attention": "experiments.dev.benchmark_attention",
    "capture": "experiments.dev.benchmark_capture",
    "maps": "experiments.dev.benchmark_maps",
    "mass": "experiments.dev.benchmark_mass",
    "models": "experiments.dev.benchmark_models",
    "memory": "experiments.dev.benchmark_memory",
    "decoding": "experiments.dev.benchmark_decoding",
    "reading": "experiments.dev.benchmark_reading",
    "page": "experiments.dev.benchmark_page",
    "policies": "experiments.dev.benchmark_policies",
    "public": "experiments.dev.benchmark_public",
    "start": "experiments.dev.benchmark_start",
    "parallel": "experiments.dev.benchmark_parallel",
    "long_memory": "experiments.dev.benchmark_long_rollouts",
    "long_rollouts": "experiments.dev.long_rollout_findings",
    "first_contact": "experiments.dev.benchmark_first_contact",
    "first_frame": "experiments.dev.first_frame_report",
    "hidden_shapes": "experiments.dev.hidden_shapes_report",
    "interventions": "experiments.dev.benchmark_interventions",
    "checkpoints": "experiments.dev.first_frame_training",
    "evaluation": "experiments.dev.miniature_tables",
    "shape_attention": "experiments.dev.shape_attention",
    "released": "experiments.dev.policy_figures",
    "robustness": "experiments.dev.robustness_tables",
}


def table(path: Path) -> str:
    """The rows of one benchmark and what they were measured on. KeyError for what is not its report."""
    benchmark = import_module(BENCHMARKS[benchmark_of(path)])
    return benchmark.table(json.loads(path.read_text(encoding="utf-8")))


def benchmark_of(path: Path) -> str:
    """The name of the benchmark that wrote a report: the first words of the file's name."""
    found = [name for name in BENCHMARKS if f"{path.stem}_".startswith(f"{name}_")]
    if not found:
        raise KeyError(f"no benchmark writes {path.name}")
    return max(found, key=len)


def fill(text: str, root: Path = ROOT) -> str:
    """A document with every marked table filled."""
    return MARKED.sub(lambda found: found[1] + table(root / found[2]) + found[3], text)


def documents() -> list[Path]:
    """Every document that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "documents", nargs="*", type=Path, help="files whose tables are filled; README.md and docs/*.md"
    )
    for path in parser.parse_args(argv).documents or documents():
        fill_file(path)


def fill_file(path: Path) -> None:
    from experiments.caches.files import CacheError, replacing

    try:
        filled = fill(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, KeyError) as error:
        raise CacheError(f"a benchmark that {path} names cannot be read: {error}") from None
    with replacing(path) as file:
        file.write(filled.encode())


if __name__ == "__main__":
    main(run)
