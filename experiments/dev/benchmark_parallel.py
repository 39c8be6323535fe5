"""One rollout on one GPU and, by heads, on all of them; and a sweep by one rank and by all. In one sitting.

    torchrun --nproc-per-node 2 experiments/dev/benchmark_parallel.py --output_path parallel.json
    torchrun --nproc-per-node 2 experiments/dev/benchmark_parallel.py --device cpu --num_layers 2 \
        --num_frames 6 --height 8 --width 8 --models Wan2.1-T2V-1.3B --output_path parallel.json

The models have random weights. The first rank works alone while the others wait, then all work together.
"""

import argparse

from experiments.dev.tables import markdown, measured_on
from experiments.running.cli import Parser, count, main
from wan.config import DTYPES, MODELS


def table(report: dict) -> str:
    """Rollouts and the sweep, and under them what was measured."""
    what = f"random weights, {report['num_frames']} latent frames, medians of {report['repeats']}"
    under = f"{what}; {report['gpus']} x {measured_on(report['environment'], report['dtype'])}"
    return f"{rows_of(report)}\n\n{sweep_line(report)}{under}"


def rows_of(report: dict) -> str:
    gpus = report["gpus"]
    header = ("model", "captured", "1 GPU", f"{gpus} GPUs", "ratio", "peak of 1", f"peak of each of {gpus}")
    rows = []
    for model, found in report["rollouts"].items():
        for name, row in found["rows"].items():
            alone, together = row["alone"], row["together"]
            rows.append(
                (
                    model,
                    name,
                    f"{alone['median_seconds']:.2f} s",
                    f"{together['median_seconds']:.2f} s",
                    f"{row['ratio']:.2f}",
                    f"{alone['peak_gb']:.1f} GB",
                    f"{together['peak_gb']:.1f} GB",
                )
            )
    return markdown(header, rows)


def sweep_line(report: dict) -> str:
    if not (sweep := report.get("sweep")):
        return ""
    return (
        f"Sweep of {sweep['items']} captured rollouts of {sweep['model']}, from the first claim to the last "
        f"file: {sweep['alone_seconds']:.1f} s by 1 rank, {sweep['together_seconds']:.1f} s by "
        f"{report['gpus']}, {sweep['ratio']:.2f} x\n\n"
    )


def run(argv=None):
    parser = Parser(description=__doc__.strip().splitlines()[0])
    flag = parser.add_argument
    flag("--models", nargs="+", choices=MODELS, default=list(MODELS), help="whose shapes are measured")
    flag("--num_frames", type=count, default=21, help="latent frames of a rollout")
    flag("--repeats", type=count, default=2, help="timed repeats of every row")
    flag("--sweep", type=count, default=16, help="rollouts of the sweep, of the first model")
    flag("--accuracy_frames", type=count, default=6, help="frames of the comparison with float32")
    flag("--num_layers", type=count, help="fewer layers than the models have, to try the script")
    flag("--height", type=count, default=60, help="of a latent frame")
    flag("--width", type=count, default=104, help="of a latent frame")
    flag("--device", choices=("auto", "cpu", "cuda"), default="auto")
    flag("--dtype", choices=DTYPES, default="auto", help="of weights and generation")
    flag("--output_path", help="where the JSON report goes")
    measure(parser.parse_args(argv))


def measure(args: argparse.Namespace) -> None:
    from experiments.caches.atomic_files import require_writable
    from experiments.dev import measure_parallel
    from experiments.dev.tables import save_report
    from experiments.extraction.provenance import environment
    from experiments.running.ranks import this_rank
    from wan.errors import ConfigError

    rank = this_rank()
    if rank.count < 2:
        raise ConfigError("start it by torchrun --nproc-per-node P: it compares P processes with one")
    if args.output_path:
        require_writable(args.output_path)
    bench = measure_parallel.start(args, rank)
    report = {
        "gpus": rank.count,
        "num_frames": args.num_frames,
        "repeats": args.repeats,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "environment": environment(bench.device) | {"nccl": measure_parallel.nccl_version(bench.device)},
        "rollouts": {},
    }
    for part in measure_parallel.parts(bench, args):
        if rank.is_first:
            report["rollouts"] |= part.pop("rollouts", {})
            report |= part
            save_report(report, args.output_path)  # what there is, should the next part fail
    measure_parallel.finish()
    if rank.is_first:
        print(table(report))


if __name__ == "__main__":
    main(run)
