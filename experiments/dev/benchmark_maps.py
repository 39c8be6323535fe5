"""Time and memory of maps over key tokens: one call beside its attention, and rollouts that keep them.

    python experiments/dev/benchmark_maps.py --config_path configs/wan_mini.yaml
    python experiments/dev/benchmark_maps.py --random_weights --device cuda --output_path maps_gpu.json

Rollouts keep the last block of all layers and heads. Every row's latents are compared with the plain ones.
The file is written after the call and after every row: a run that is stopped leaves what it measured.
"""

import argparse

from experiments.dev.benchmark_capture import rows_of
from experiments.dev.benchmark_flags import benchmark_parser
from experiments.dev.tables import markdown, measured_on
from experiments.running.cli import config_from, main


def table(report: dict) -> str:
    """One call, then rollouts, and under them what was measured."""
    weights = " shapes, random weights" if report["random_weights"] else ""
    what = f"{report['model']}{weights}, {report['num_frames']} latent frames"
    measured = measured_on(report["environment"], report["dtype"])
    return f"{calls_of(report['call'])}\n\n{rows_of(report['rows'])}\n\n{what}; {measured}"


def calls_of(call: dict[str, dict]) -> str:
    header = ("one call of the last block", "milliseconds", "x attention")
    return markdown(
        header,
        [(name, f"{row['milliseconds']:.3f}", f"{row['times_attention']:.2f}") for name, row in call.items()],
    )


def run(argv=None):
    parser = benchmark_parser(__doc__, repeats=3)
    measure(parser.parse_args(argv))


def measure(args: argparse.Namespace) -> None:
    from experiments.caches.files import require_writable
    from experiments.dev import measure_capture, measure_maps
    from experiments.dev.tables import line, save_report

    config = config_from(args)
    if args.output_path:
        require_writable(args.output_path)
    rollout, sizes = measure_capture.make_rollout(config, args.random_weights)
    S, like = sizes.tokens_per_frame(config.height, config.width), rollout.noise
    report = measure_capture.described(config, args.random_weights, like) | {
        "layers": sizes.num_layers,
        "call": measure_maps.one_call(config, sizes, like.dtype, like.device, 5 * args.repeats),
    }
    print(calls_of(report["call"]), end="\n\n", flush=True)

    def keep(rows: dict[str, dict]) -> None:
        save_report(report | {"rows": rows}, args.output_path)

    keep({})
    table = measure_maps.requests_of(config, S)
    rows = measure_capture.measure(rollout, table, args.repeats, keep, line)
    print(rows_of(rows))


if __name__ == "__main__":
    main(run)
