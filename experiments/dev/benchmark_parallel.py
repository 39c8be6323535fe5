"""One rollout on one GPU and, by heads, on all of them; and a sweep by one rank and by all. In one sitting.

    torchrun --nproc-per-node 2 experiments/dev/benchmark_parallel.py --output_path parallel.json
    torchrun --nproc-per-node 2 experiments/dev/benchmark_parallel.py --device cpu --num_layers 2 \
        --num_frames 6 --height 8 --width 8 --models Wan2.1-T2V-1.3B --output_path parallel.json

The models have random weights. The first rank works alone while the others wait, then all work together:
launched by Python, and with the CUDA graphs of wan/kernels/graphs.py.
"""

import argparse

from experiments.dev.tables import markdown, measured_on
from experiments.running.cli import Parser, count, main
from wan.config import DTYPES, MODELS

PARTS = ("rollouts", "sweep", "error", "long")
HOW = {"together": "", "graphs": ", CUDA graphs"}


def table(report: dict) -> str:
    """Rollouts and the sweep, and under them what was measured."""
    what = f"random weights, {report['num_frames']} latent frames, medians of {report['repeats']}"
    under = f"{what}; {report['gpus']} x {measured_on(report['environment'], report['dtype'])}"
    return f"{rows_of(report)}\n\n{other_lines(report)}{under}"


def rows_of(report: dict) -> str:
    gpus = report["gpus"]
    header = ("model", "captured", "1 GPU", f"{gpus} GPUs", "ratio", "peak of 1", f"peak of each of {gpus}")
    rows = []
    for model, found in report["rollouts"].items():
        for name, row in found["rows"].items():
            alone = row["alone"]
            for way in (way for way in HOW if way in row):
                rows.append(
                    (
                        model,
                        f"{name}{HOW[way]}",
                        f"{alone['median_seconds']:.2f} s",
                        f"{row[way]['median_seconds']:.2f} s",
                        f"{row[way]['ratio']:.2f}",
                        f"{alone['peak_gb']:.1f} GB",
                        f"{row[way]['peak_gb']:.1f} GB",
                    )
                )
    return markdown(header, rows)


def other_lines(report: dict) -> str:
    lines = ""
    if sweep := report.get("sweep"):
        lines += (
            f"Sweep of {sweep['items']} captured rollouts of {sweep['model']}, {sweep['num_frames']} frames, "
            f"from the first claim to the last file: {sweep['alone_seconds']:.1f} s by 1 rank, "
            f"{sweep['together_seconds']:.1f} s by {report['gpus']}, {sweep['ratio']:.2f} x\n\n"
        )
    if long := report.get("long"):
        lines += (
            f"{long['model']}, {long['num_frames']} frames by {report['gpus']} GPUs{HOW[long['way']]}, the "
            f"first rollout of its processes: {long['seconds']:.1f} s, {long['peak_gb']:.1f} GB each\n\n"
        )
    return lines


def run(argv=None):
    parser = Parser(description=__doc__.strip().splitlines()[0])
    flag = parser.add_argument
    flag("--models", nargs="+", choices=MODELS, default=list(MODELS), help="whose shapes are measured")
    flag("--num_frames", type=count, default=21, help="latent frames of a rollout")
    flag("--repeats", type=count, default=2, help="timed repeats of every row")
    flag("--parts", nargs="+", choices=PARTS, default=PARTS[:3], help="what is measured, in this order")
    flag("--ways", nargs="+", choices=[*HOW], default=[*HOW], help="launched by Python, or by CUDA graphs")
    flag("--sweep", type=count, default=32, help="rollouts of the sweep, of the first model")
    flag("--sweep_frames", type=count, default=9, help="latent frames of each of them")
    flag("--long_frames", type=count, default=120, help="of the long rollout, by all GPUs, of the last model")
    flag("--profile", action="store_true", help="of a block by all GPUs, the first rank's dearest operators")
    flag("--accuracy_frames", type=count, default=6, help="frames of the comparison with float32")
    flag("--num_layers", type=count, help="fewer layers than the models have, to try the script")
    flag("--height", type=count, default=60, help="of a latent frame")
    flag("--width", type=count, default=104, help="of a latent frame")
    flag("--device", choices=("auto", "cpu", "cuda"), default="auto")
    flag("--dtype", choices=DTYPES, default="auto", help="of weights and generation")
    flag("--output_path", help="where the JSON report goes")
    measure(parser.parse_args(argv))


def measure(args: argparse.Namespace) -> None:
    from experiments.caches.files import require_writable
    from experiments.dev import measure_parallel
    from experiments.dev.tables import save_report
    from experiments.extraction.provenance import environment
    from experiments.running.jobs import end_at_once
    from experiments.running.ranks import this_rank
    from wan import process_group
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
    if rank.is_first:
        print(table(report))
    process_group.leave()
    end_at_once()


if __name__ == "__main__":
    main(run)
