"""Time and memory of a rollout, plain and while being captured, side by side in one process.

    python experiments/dev/benchmark_capture.py --config_path configs/wan_mini.yaml
    python experiments/dev/benchmark_capture.py --random_weights --device cuda --output_path capture_gpu.json

Rows are run in turn, round after round. "x plain" is the median over rounds of a row's seconds over those of
the plain rollout of its round, with the 95 % interval of that median. Every row's latents are compared with
the plain ones. The file is written after every row: a run that is stopped leaves what it measured.
"""

import argparse

from experiments.dev.benchmark_flags import benchmark_parser
from experiments.dev.tables import markdown, measured_on
from experiments.running.cli import config_from, main


def table(report: dict) -> str:
    """A rollout, plain and captured, and under it what was rolled out."""
    weights = " shapes, random weights" if report["random_weights"] else ""
    what = f"{report['model']}{weights}, {report['num_frames']} latent frames"
    what += f"; attention: {kernel}" if (kernel := report.get("attention")) else ""
    what += "; layers replayed from CUDA graphs" if report.get("graphs") else ""
    return f"{rows_of(report['rows'])}\n\n{what}; {measured_on(report['environment'], report['dtype'])}"


def rows_of(results: dict[str, dict]) -> str:
    header = ("captured", "seconds", "x plain", "GPU over plain", "host over plain", "calls", "same bits")
    rows = [
        (
            name,
            f"{row['median_seconds']:.3f}",
            f"{row['times_plain']:.3f}{_interval(row)}",
            f"{row['gpu_mib_over_plain']:.0f} MiB",
            f"{row['host_mib_over_plain']:.0f} MiB",
            f"{row['calls']:.0f}",
            "yes" if row["bit_identical"] else "NO",
        )
        for name, row in results.items()
    ]
    return markdown(header, rows)


def _interval(row: dict) -> str:
    """The interval of the ratio; older reports have none, and the plain row needs none."""
    low, high = row.get("times_plain_interval", (1, 1))
    return "" if low == high else f" ({low:.3f}–{high:.3f})"


def run(argv=None):
    parser = benchmark_parser(__doc__, repeats=5)
    parser.add_argument("--graphs", action="store_true", help="replay layers from CUDA graphs; on a GPU")
    measure(parser.parse_args(argv))


def measure(args: argparse.Namespace) -> None:
    from experiments.caches.files import require_writable
    from experiments.dev import measure_capture
    from experiments.dev.tables import line, save_report
    from experiments.extraction.devices import choose_device
    from wan.errors import ConfigError
    from wan.kernels.graphs import apply_cuda_graphs

    config = config_from(args)
    if args.graphs and choose_device(config.device).type != "cuda":
        raise ConfigError("--graphs replays layers on a GPU, and none is used; leave it out")
    if args.output_path:
        require_writable(args.output_path)
    rollout, sizes = measure_capture.make_rollout(config, args.random_weights)
    if args.graphs:
        apply_cuda_graphs(rollout.pipeline.model)
    rows = measure_capture.rows(config, sizes.num_layers)
    report = measure_capture.described(config, args.random_weights, rollout.noise)
    report |= {"passes": config.num_passes, "layers": sizes.num_layers, "graphs": args.graphs}

    def keep(results: dict[str, dict]) -> None:
        save_report(report | {"rows": results}, args.output_path)

    print(rows_of(measure_capture.measure(rollout, rows, args.repeats, keep, line)))


if __name__ == "__main__":
    main(run)
