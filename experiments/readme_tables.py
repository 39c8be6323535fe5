"""Write the README's tables from the JSON of the benchmarks, so that no number in it is typed.

    python experiments/readme_tables.py

A table stands between "<!-- table: FILE.json -->" and "<!-- end of table -->".
"""

import json
import re
from pathlib import Path

from experiments.benchmark import as_table

MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def table(path: Path) -> str:
    """The rows of one benchmark, and under them what they were measured on."""
    report = json.loads(path.read_text())
    return reading_table(report) if "streamed" in report else rollout_table(report)


def reading_table(report: dict) -> str:
    """Both ways of reducing a token cache to frames (experiments/benchmark_reading.py)."""
    env, ways = report["environment"], {"streamed": "by memory map, a few rows at a time", "converted": "to float32, then mean"}
    lines = [f"| {report['file_mib']} MiB of float16 tokens to frames | seconds | private memory |", "|---|---|---|"]
    lines += [f"| {name} | {report[way]['median_seconds']:.2f} | {report[way]['private_mib']:.0f} MiB |"
              for way, name in ways.items()]
    where = f"{env['device']}, torch {env['torch']}, {env['date']}, `{env['git'][:9]}`"
    return "\n".join(lines) + f"\n\n{report['times_faster']:.1f} x faster; {where}: `{env['command']}`\n"


def rollout_table(report: dict) -> str:
    """A rollout, plain and captured (experiments/benchmark.py)."""
    env = report["environment"]
    weights = " shapes, random weights" if report["random_weights"] else ""
    what = f"{report['model']}{weights}, {report['num_frames']} latent frames"
    where = f"{env['device']}, torch {env['torch']}, {report['dtype']}, {env['date']}, `{env['git'][:9]}`"
    return f"{as_table(report['rows'])}\n\n{what}; {where}: `{env['command']}`\n"


def fill(readme: str, root: Path) -> str:
    """The README with every marked table made anew."""
    return MARKED.sub(lambda found: found[1] + table(root / found[2]) + found[3], readme)


if __name__ == "__main__":
    root = Path(__file__).parent.parent
    readme = root / "README.md"
    readme.write_text(fill(readme.read_text(), root))
