"""The table of docs/robustness.md, from what the tests of tests/robustness counted with ROBUSTNESS=full."""

from typing import Any

from experiments.dev.tables import markdown

COLUMNS = ("tried", "inside", "seed", "refused", "read", "tracebacks", "hangs", "lost")
HEADER = (
    "class",
    "tried",
    "inside valid structure",
    "seed",
    "refused in one line",
    "read, or run to its end",
    "tracebacks",
    "hangs above 10 s",
    "files lost",
    "slowest (mutants: of the CPU)",
)


def table(report: dict[str, Any]) -> str:
    """A row for each class, and their sum."""
    rows = dict(sorted(report["rows"].items()))
    sums = {name: sum(row[name] for row in rows.values()) for name in COLUMNS if name != "seed"}
    slowest = max(row["slowest"] for row in rows.values())
    lines = [
        (what, *(str(row[name]) for name in COLUMNS), f"{row['slowest']} s") for what, row in rows.items()
    ]
    total = ("**all**", *(str(sums.get(name, "")) for name in COLUMNS), f"{slowest} s")
    return f"{markdown(HEADER, [*lines, total])}\n\n{report['date']}, two CPU cores.\n"
