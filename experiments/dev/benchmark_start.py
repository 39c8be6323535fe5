"""How long a script takes from its command to the first block of its rollout, imports counted.

    python experiments/dev/benchmark_start.py --output_path docs/benchmarks/start_mini.json

Every row is a process, run in turn, round after round. A block's line is printed when the block is finished:
its moment is read here, and beside it the CPU seconds that the process has used until then.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments.dev.tables import markdown, measured_on, median_interval, save_report
from experiments.running.cli import Parser, count, main

ROOT = Path(__file__).parents[2]
CONFIG, LAYER = "configs/wan_mini.yaml", "3"
EMBEDS, CACHE = "embeds.pt", "layer.pt"  # in a folder that is gone afterwards
FIRST_BLOCK = "block 1/"


def commands(folder: Path) -> dict[str, tuple[list[str], str]]:
    """What is waited for -> Python's arguments, and the first words of the line that ends the wait."""
    each = ["experiments/run_extraction_each.py", "--config_path", CONFIG, "--layer_index", LAYER]
    each += ["--device", "cpu", "--output_path", str(folder / CACHE), "--overwrite"]
    return {
        "import torch": (["-c", "import torch; print('there', flush=True)"], "there"),
        "first block, prompt embeddings given": (
            [*each, "--prompt_embeds", str(folder / EMBEDS)],
            FIRST_BLOCK,
        ),
        "first block, umT5 encodes the prompt": (each, FIRST_BLOCK),
    }


def table(report: dict) -> str:
    """Wall and CPU seconds of every row: medians, and the interval of the wall's."""
    rows = []
    for name, row in report["rows"].items():
        low, high = median_interval(row["seconds"])
        cpu = statistics.median(row["cpu_seconds"])
        rows.append((name, f"{statistics.median(row['seconds']):.2f} ({low:.2f}–{high:.2f})", f"{cpu:.2f}"))
    header = ("from the command to", "seconds (95 %)", "CPU seconds")
    return f"{markdown(header, rows)}\n\n{report['what']}; {measured_on(report['environment'])}"


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=count, default=7, help="processes of every row")
    parser.add_argument("--output_path", help="write the numbers as JSON")
    measure(parser.parse_args(argv))


def measure(args: argparse.Namespace) -> None:
    import torch

    from experiments.caches.files import require_writable
    from experiments.extraction.provenance import environment
    from wan.checkpoint import read_model_config
    from wan.config import load_config

    if args.output_path:
        require_writable(args.output_path)
    sizes = read_model_config(str(ROOT / load_config(ROOT / CONFIG).ckpt_dir))
    with tempfile.TemporaryDirectory() as name:
        torch.save({"prompt_embeds": torch.zeros(1, 8, sizes.text_dim)}, Path(name) / EMBEDS)
        rows = measured(commands(Path(name)), args.repeats)
    print(f"{markdown(('row', 'seconds'), [(name, str(row['seconds'])) for name, row in rows.items()])}")
    what = f"run_extraction_each.py of wan-mini, layer {LAYER}"
    report = {"what": what, "environment": environment(torch.device("cpu")), "rows": rows}
    save_report(report, args.output_path)


def measured(rows: dict[str, tuple[list[str], str]], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Wall and CPU seconds of every row; an untimed round comes first, so that files lie in memory."""
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "cpu_seconds": []} for name in rows}
    for number in range(repeats + 1):
        for name, (arguments, awaited) in rows.items():
            seconds, cpu_seconds = until(arguments, awaited)
            if number:
                found[name]["seconds"].append(round(seconds, 3))
                found[name]["cpu_seconds"].append(round(cpu_seconds, 3))
    return found


def until(arguments: list[str], awaited: str) -> tuple[float, float]:
    """Wall and CPU seconds of a Python process until it prints a line that starts with awaited.

    RunError where it ends before that.
    """
    import psutil

    from experiments.caches.files import RunError

    command, last = [sys.executable, *arguments], "nothing"
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process:
        assert process.stdout
        for line in process.stdout:
            if line.startswith(awaited):
                seconds, used = time.perf_counter() - start, psutil.Process(process.pid).cpu_times()
                process.stdout.read()  # to its end: the next one starts alone
                return seconds, used.user + used.system
            last = line.strip()
    raise RunError(f"{' '.join(arguments)} ended before {awaited!r}: {last}")


if __name__ == "__main__":
    main(run)
