"""Frame means of a large token cache: by memory map, a few rows at a time, against converting it to float32.

    python experiments/dev/benchmark_reading.py --output_path docs/benchmarks/reading.json

Makes a figure4 cache of one layer with random logits, then opens and reduces it both ways in turn, each time
in a process of its own and with the file in the page cache. Private memory is the peak of anonymous memory
above the start.
"""

import argparse
import tempfile
from pathlib import Path

from experiments.dev.tables import markdown, measured_on
from experiments.running.cli import Parser, main

WAYS = {"streamed": "by memory map, a few rows at a time", "converted": "to float32, then mean"}


def table(report: dict) -> str:
    """Both ways of reducing a token cache to frames."""
    header = (
        f"{report['file_mib']} MiB of float16 tokens to frames",
        *("open, compare checksums", "reduce", "private memory"),
    )
    rows = [
        (
            name,
            f"{report[way]['open_seconds']:.2f} s",
            f"{report[way]['median_seconds']:.2f} s",
            f"{report[way]['private_mib']:.0f} MiB",
        )
        for way, name in WAYS.items()
    ]
    faster = f"Reduced {report['times_faster']:.1f} x faster"
    return f"{markdown(header, rows)}\n\n{faster}; {measured_on(report['environment'])}"


def run(argv=None):
    from wan.config import MODELS, RunConfig

    parser = Parser(description=__doc__.splitlines()[0])
    real = RunConfig()
    sizes = MODELS[real.model]
    defaults = {
        "heads": sizes.num_heads,
        "query_frames": real.num_frame_per_block,
        "key_frames": real.num_frames,
        "tokens": sizes.tokens_per_frame(real.height, real.width),
        "repeats": 3,
    }
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output_path", help="write the numbers as JSON")
    args = parser.parse_args(argv)
    for name in defaults:
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(args, name)}")
    measure(args)


def measure(args: argparse.Namespace) -> None:
    import torch

    from experiments.caches.files import require_writable
    from experiments.dev import measure_reading
    from experiments.dev.tables import save_report
    from experiments.extraction.provenance import environment

    if args.output_path:
        require_writable(args.output_path)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.pt"
        measure_reading.make_cache(path, args.heads, args.query_frames, args.key_frames, args.tokens)
        mib = round(path.stat().st_size / 2**20)
        results = measure_reading.measure(path, args.tokens, args.repeats)
    for way in WAYS:
        row = results[way]
        print(
            f"{way:10s} opened {row['open_seconds']:.3f} s, reduced {row['median_seconds']:.3f} s, "
            f"{row['private_mib']} MiB private"
        )
    print(f"{results['times_faster']:.1f} x faster; largest difference {results['largest_difference']:.1e}")
    report = {"file_mib": mib, "environment": environment(torch.device("cpu")), **results}
    save_report(report, args.output_path)


if __name__ == "__main__":
    main(run)
