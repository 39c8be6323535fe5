"""Time one rollout on one GPU and, by heads, on all of them.

    torchrun --nproc-per-node 2 experiments/benchmarks/parallel.py --output_path parallel.json
    torchrun --nproc-per-node 4 experiments/benchmarks/parallel.py --models Wan2.1-T2V-14B --num_frames 120 \
        --no-alone      # more than one GPU holds

The models have random weights. The first rank works alone while the others wait, then all work together:
launched by Python, and with the layers replayed from CUDA graphs. A shared rollout takes as long as its
slowest rank.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from experiments.benchmarks.harness import Rows, in_turn, print_rows, save_report
from experiments.benchmarks.worker import Active, Rollout, capture_requests, capturing
from experiments.caches.files import require_writable
from experiments.extraction.devices import choose_device
from experiments.extraction.provenance import environment
from experiments.running.cli import Parser, count, main
from experiments.running.ranks import on_own_device, this_rank
from experiments.running.run import end_at_once
from wan import parallel
from wan.config import DTYPES, MODELS, RunConfig
from wan.errors import ConfigError
from wan.kernels.graphs import apply_cuda_graphs, remove_cuda_graphs
from wan.parallel import apply_head_parallel, check_size, gather_calls, shard_of, wait_for_all

CAPTURED = ("plain", "mass")


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--models", nargs="+", choices=MODELS, default=list(MODELS), help="whose shapes are measured")
    flag("--num_frames", type=count, default=21, help="latent frames of a rollout")
    flag("--repeats", type=count, default=2, help="timed rounds, of all rows in turn")
    flag("--alone", action=argparse.BooleanOptionalAction, default=True, help="also on one GPU")
    flag("--num_layers", type=count, help="fewer layers than the models have, to try the script")
    flag("--height", type=count, default=60, help="of a latent frame")
    flag("--width", type=count, default=104, help="of a latent frame")
    flag("--device", choices=("auto", "cpu", "cuda"), default="auto")
    flag("--dtype", choices=DTYPES, default="auto", help="of weights and generation")
    flag("--output_path", help="where the JSON report goes")
    measure(parser.parse_args(argv))


def measure(args: argparse.Namespace) -> None:
    """Time every model's rollouts by the first rank alone, then by all; save what there is after each."""
    rank = this_rank()
    if rank.count < 2:
        raise ConfigError("start it by torchrun --nproc-per-node P: it compares P processes with one")
    if args.output_path:
        require_writable(args.output_path)
    shape = {"num_frames": args.num_frames, "height": args.height, "width": args.width}
    config = on_own_device(RunConfig(device=args.device, dtype=args.dtype, **shape), rank)
    device = choose_device(config.device)
    group = parallel.join(device)
    report = {"gpus": rank.count, "num_frames": args.num_frames, "environment": environment(device)}
    for name in args.models:
        sizes = replace(MODELS[name], num_layers=args.num_layers or MODELS[name].num_layers)
        tokens = [n * sizes.tokens_per_frame(config.height, config.width) for n in config.block_sizes]
        check_size(rank.count, name, sizes.num_heads, tokens)
        rollout = None  # the model before goes first
        rollout = Rollout(replace(config, model=name), sizes, True)
        rows: Rows = {}
        if args.alone and rank.is_first:
            rows |= time_ways(rollout, args.repeats, "1 GPU")
            apply_cuda_graphs(rollout.model)
            rows |= time_ways(rollout, args.repeats, "1 GPU, graphs")
            remove_cuda_graphs(rollout.model)
        wait_for_all(group)
        apply_head_parallel(rollout.model, group)
        rows |= time_ways(rollout, args.repeats, f"{rank.count} GPUs", group)
        apply_cuda_graphs(rollout.model)
        rows |= time_ways(rollout, args.repeats, f"{rank.count} GPUs, graphs", group)
        shard = shard_of(rollout.model)
        exchange = "peers' memory" if shard and shard.peer_memory else "all-to-all"
        if rank.is_first:
            print(f"{name}, {exchange}")
            print_rows(rows)
            report[name] = {"exchange": exchange, "rows": rows}
            save_report(report, args.output_path)
    parallel.leave()
    end_at_once()


def time_ways(rollout: Rollout, repeats: int, label: str, group: dist.ProcessGroup | None = None) -> Rows:
    """Time a rollout plain and captured; with a group by all its ranks, and with the calls gathered."""

    @contextmanager
    def gathered(active: Active) -> Iterator[Any]:
        with active() as calls:
            yield calls
        gather_calls(rollout.model, calls or [])

    def over_ranks(measure: Any, active: Active) -> float:
        if group is None:
            return measure(active)
        wait_for_all(group)
        value = torch.tensor([measure(partial(gathered, active))], dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
        return value.item()

    requests = capture_requests(rollout.config, rollout.sizes.num_layers)
    actives = {f"{name}, {label}": capturing(requests[name]) for name in CAPTURED}
    rows = {name: partial(over_ranks, rollout.seconds, active) for name, active in actives.items()}
    about = {name: {"gpu_peak_mib": rollout.peak_mib(row)} for name, row in rows.items()}  # not counted
    return in_turn(rows, repeats, about)


if __name__ == "__main__":
    main(run)
