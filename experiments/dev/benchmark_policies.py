"""Time per block and memory of a rollout under each cache policy, against a window of the same size.

    python experiments/dev/benchmark_policies.py --config_path configs/wan_mini.yaml
    python experiments/dev/benchmark_policies.py --random_weights --device cuda --num_frames 240

A given beginning fills every window by clean passes alone, up to the last blocks of --num_frames. Those are
timed, plain and captured (mean logits and mass of every call); on a CPU it is processor time. Ratios are of
one repeat. Their median over the repeats is reported with a 95 % interval by bootstrap. The file is written
after every row: a run that is stopped leaves what it measured.
"""

import argparse

from experiments.dev.benchmark_flags import benchmark_parser
from experiments.dev.tables import markdown, measured_on
from experiments.running.cli import config_from, count, main


def table(report: dict) -> str:
    """Policies beside the window of their size, and under it what was measured."""
    weights = " shapes, random weights" if report["random_weights"] else ""
    what = (
        f"{report['model']}{weights}, the last {report['blocks']} blocks of {report['num_frames']} frames, "
        f"{report['repeats']} repeats"
    )
    return f"{rows_of(report['rows'])}\n\n{what}; {measured_on(report['environment'], report['dtype'])}"


def rows_of(rows: list[dict]) -> str:
    header = (
        "policy",
        "seconds a block",
        "x window",
        "captured, x plain",
        "peak over weights",
        "its keys and values",
    )
    return markdown(
        header,
        [
            (
                row["name"],
                f"{row['seconds']:.4f}",
                "" if row["name"] == row["window"] else with_interval(row, "times_window"),
                with_interval(row, "captured_times_plain"),
                f"{row['peak_mib']:.0f} MiB" if row["peak_mib"] else "",
                f"{row['cache_mib']:.0f} MiB",
            )
            for row in rows
        ],
    )


def with_interval(row: dict, name: str) -> str:
    """A ratio and its 95 % interval, where it was repeated."""
    interval = row[f"{name}_95"]
    return f"{row[name]:.3f}" + (f" ({interval[0]:.3f}-{interval[1]:.3f})" if interval else "")


def run(argv=None):
    parser = benchmark_parser(__doc__, repeats=3)
    parser.add_argument("--blocks", type=count, default=4, help="timed blocks of every repeat")
    measure(parser.parse_args(argv))


def measure(args: argparse.Namespace) -> None:
    from experiments.caches.files import require_writable
    from experiments.dev import measure_policies
    from experiments.dev.measure_capture import described
    from experiments.dev.tables import save_report

    num_frames = 45 if args.num_frames is None else args.num_frames
    config = config_from(args)
    if args.output_path:
        require_writable(args.output_path)
    bench = measure_policies.make_bench(config, args.random_weights, args.blocks, num_frames)
    report = described(config, args.random_weights, bench.rollout.noise) | {
        "num_frames": num_frames,
        "blocks": args.blocks,
        "repeats": args.repeats,
        "passes": config.num_passes,
    }
    rows = measure_policies.measure(
        bench, args.repeats, lambda rows: save_report(report | {"rows": rows}, args.output_path)
    )
    print(rows_of(rows))


if __name__ == "__main__":
    main(run)
