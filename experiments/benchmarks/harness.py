"""Time rows in turn, and keep the numbers as JSON with command, machine, date and commit."""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.caches.files import replacing
from experiments.running.cli import Parser, count, run_parser

Rows = dict[str, dict[str, Any]]


def benchmark_parser(description: str, repeats: int) -> Parser:
    """Return the flags of a run with --random_weights and --repeats."""
    parser = run_parser(description, None)
    parser.add_argument(
        "--random_weights",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="the shapes of the config's model with random weights: no files needed",
    )
    parser.add_argument("--repeats", type=count, default=repeats, help="timed rounds, of all rows in turn")
    return parser


def save_report(report: Mapping[str, Any], path: str | Path | None) -> None:
    """Write a report as JSON; do nothing without a path."""
    if path:
        with replacing(Path(path)) as file:
            file.write((json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode())


def in_turn(
    rows: Mapping[str, Callable[[], float]],
    repeats: int,
    about: Mapping[str, dict[str, Any]] | None = None,
    beside: Mapping[str, str] | None = None,
    keep: Callable[[Rows], None] = lambda found: None,
) -> Rows:
    """Call every row once a round; return its seconds, their median, and its ratio to another row.

    A row returns its own seconds. Its ratio is the median over rounds of its seconds over those of
    beside[row] (the first row where not given) in the same round: a machine that slows down slows both.
    Fields of about[row] stand before the numbers. keep gets the results after every round, so that a run
    that is stopped leaves what it measured.
    """
    first = next(iter(rows))
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    found: Rows = {}
    for number in range(repeats):
        for name in list(rows)[:: -1 if number % 2 else 1]:  # to and fro: no row always follows the same one
            seconds[name].append(rows[name]())
        for name, taken in seconds.items():
            other = (beside or {}).get(name, first)
            ratios = [a / b for a, b in zip(taken, seconds[other], strict=True)]
            found[name] = (about or {}).get(name, {}) | {
                "median_seconds": round(statistics.median(taken), 6),
                "beside": other,
                "ratio": round(statistics.median(ratios), 4),
                "ratio_interval": [round(bound, 4) for bound in median_interval(ratios)],
                "seconds": [round(x, 6) for x in taken],
            }
        keep(found)
    return found


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a median by order statistics; of fewer than six values their range."""
    ordered, outside, tail = sorted(values), 0, 0.0
    while (tail := tail + math.comb(len(ordered), outside) / 2 ** len(ordered)) <= 0.025:
        outside += 1
    outside = max(outside - 1, 0)
    return ordered[outside], ordered[-1 - outside]


def print_rows(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a line a row: median seconds, the ratio with its interval, and what else is known of it."""
    numbers = ("median_seconds", "beside", "ratio", "ratio_interval", "seconds", "sha256")
    for name, row in rows.items():
        low, high = row["ratio_interval"]
        more = "".join(f", {field} {value}" for field, value in row.items() if field not in numbers)
        ratio = f"{row['ratio']:.3f} ({low:.3f}-{high:.3f}) x {row['beside']}"
        print(f"{row['median_seconds']:10.5f} s  {name}: {ratio}{more}", flush=True)
