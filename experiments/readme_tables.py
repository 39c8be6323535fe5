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
