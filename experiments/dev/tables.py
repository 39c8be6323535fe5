"""What every benchmark's report has: a JSON file, and a Markdown table that says what it was measured on."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EVALUATION = ROOT / "checkpoints/wan-mini/evaluation.json"


def line(text: str) -> None:
    """A line of a benchmark under way, which a kill does not lose."""
    print(text, flush=True)


def save_report(report: dict[str, Any], path: str | Path | None) -> None:
    """Write a report as JSON; nothing without a path."""
    from experiments.caches.files import replacing

    if path:
        with replacing(Path(path)) as file:
            file.write((json.dumps(report, indent=1) + "\n").encode())


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, without a newline at its end."""
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def milliseconds_said(row: dict[str, Any] | None) -> str:
    """The median of a row's milliseconds and its 95 % interval; nothing where there is no row."""
    return "" if row is None else "{:.3f} ms ({:.3f}-{:.3f})".format(*row["milliseconds"])


def measured_on(env: dict[str, Any], dtype: str | None = None) -> str:
    """Device, versions, date, commit and command, as the last line of a table."""
    parts = [env["device"], f"torch {env['torch']}", dtype, env["date"], f"`{env['git'][:9]}`"]
    return f"{', '.join(part for part in parts if part)}: {command_said(env['command'])}\n"


def command_said(command: str) -> str:
    """A recorded command; of a script that is no longer there it says so, for history keeps its text."""
    scripts = [word for word in command.split() if word.endswith(".py")]
    moved = bool(scripts) and not (ROOT / scripts[0]).is_file()
    return f"`{command}`" + (" (the script's place at that commit)" if moved else "")


def of_weights(sha256: str) -> str:
    """Which weights of the miniature were measured, and whether they are those that it has now."""
    now = json.loads(EVALUATION.read_text(encoding="utf-8"))["weights"]["self_forcing_mini.pt"]
    return f"weights `{sha256[:9]}`" + (f", before the present `{now[:9]}`" if sha256 != now else "")


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a median by order statistics, whatever the distribution: the 4th and 12th of 15.

    Of fewer than six values it is their range, which holds the median less often.
    """
    ordered, outside, tail = sorted(values), 0, 0.0
    while (tail := tail + math.comb(len(ordered), outside) / 2 ** len(ordered)) <= 0.025:
        outside += 1
    outside = max(outside - 1, 0)
    return ordered[outside], ordered[-1 - outside]


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"
