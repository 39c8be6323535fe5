"""Time rollouts plain, captured, edited, under cache policies and of other models, and the GPU's kernels.

    python experiments/benchmarks/rollout.py --config_path configs/wan_mini.yaml --repeats 15
    python experiments/benchmarks/rollout.py --random_weights --device cuda --what plain mass maps
    python experiments/benchmarks/rollout.py --random_weights --what plain --policies longlive
    torchrun --nproc-per-node 2 experiments/benchmarks/rollout.py --random_weights --what plain mass

Rows run in turn, round after round, after a round that is not counted. A ratio is the median over rounds of
a row's seconds over those of the plain rollout of its round, with the 95 % interval of that median. By
torchrun all processes make each rollout together, and the slowest one counts. sha256 is of the latents and
of all that was captured: run the same row in two checkouts to compare them.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from experiments.benchmarks.harness import (
    MIB,
    Active,
    Rollout,
    Rows,
    Timed,
    benchmark_parser,
    capture_requests,
    capturing,
    in_turn,
    new_report,
    print_rows,
    save_report,
    seconds_of,
    wait,
)
from experiments.running.cli import config_from, main, policy_settings
from experiments.running.ranks import end_at_once, on_own_device, this_rank
from wan import attention as attention_code
from wan import backends, parallel
from wan.config import MODELS, RunConfig, load_config
from wan.errors import ConfigError
from wan.interventions import Ablate, Knockout, Move, intervene
from wan.kernels.graphs import apply_cuda_graphs
from wan.policies import read_policy
from wan.reductions import mass_of_tails
from wan.sites import SiteCapture, watched

CAPTURES = ("plain", "logits", "mass", "key_curve", "tokens")
GROUPS = ("maps", "interventions", "sites", "models", "kernels")
KEY_FRAMES, CALLS = (1, 3, 6, 12, 21), 5  # of kernels, and their calls of a timed turn
Part = tuple[Timed, Rows]  # rows, and what is known of them


def run(argv=None):
    parser = benchmark_parser(__doc__)
    flag = parser.add_argument
    flag("--what", nargs="+", choices=CAPTURES + GROUPS, default=CAPTURES, help="which rows")
    flag("--graphs", action="store_true", help="replay layers from CUDA graphs")
    flag("--policies", nargs="+", default=[], help="rows as --cache_policy takes them, and with mass")
    flag("--models", nargs="+", metavar="NAME", help="of configs/; all that name a release")
    args = parser.parse_args(argv)
    rank = this_rank()
    config = on_own_device(config_from(args), rank)
    report = new_report(config, args) | {"gpus": rank.count}

    def keep(found: Rows) -> None:
        report["rows"].update(found)
        if rank.is_first:
            save_report(report, args.output_path)

    for rows, about in parts(args, config):
        found = in_turn(rows, args.repeats, about, keep)
        if rank.is_first:
            print_rows(found)
    if rank.count > 1:
        parallel.leave()
        end_at_once()


def parts(args: argparse.Namespace, config: RunConfig) -> Iterator[Part]:
    """Yield the rows that --what names, in groups that run in turn."""
    asked = {*args.what}
    if "models" in asked:
        yield from models(args, config)
    if "kernels" in asked:
        yield kernels(config.device), {}
    if asked <= {"models", "kernels"}:
        return
    rollout = Rollout(config, args.random_weights)
    if args.graphs:
        if rollout.device.type != "cuda":
            raise ConfigError("--graphs replays layers on a GPU, and none is used; leave it out")
        apply_cuda_graphs(rollout.model)
    seconds = rollout.seconds
    if this_rank().count > 1:
        seconds = partial(shared_seconds, rollout, parallel.join(rollout.device))
    requests = capture_requests(config, rollout.sizes.num_layers)
    rows: Timed = {"plain": seconds}
    rows |= {name: partial(seconds, capturing(what)) for name, what in requests.items() if name in asked}
    for group, make in {"maps": maps, "interventions": edits, "sites": sites}.items():
        if group in asked:
            rows |= {name: partial(seconds, active) for name, active in make(rollout).items()}
    for name in args.policies:
        policy = read_policy(policy_settings(name))
        rows[name] = partial(seconds, policy=policy)
        rows[f"{name}, mass"] = partial(seconds, capturing(requests["mass"]), policy)
    yield warmed_up(rollout, rows)


def warmed_up(rollout: Rollout, rows: Timed) -> Part:
    """Call every row once; note peak memory, bytes of the cache, the last block's time and the bits."""
    about: Rows = {}
    latents = {}
    for name, row in rows.items():
        ends = [time.perf_counter()]
        on_block = partial(note_end, ends)
        with mock.patch.object(rollout, "generate", partial(rollout.generate, on_block=on_block)):
            peak = rollout.peak_mib(row)
        latents[name] = rollout.latents
        about[name] = {
            "gpu_peak_mib": peak,
            "cache_mib": round(rollout.pipeline.cache_bytes / MIB, 1),
            "last_block_ms": round(1000 * (ends[-1] - ends[-2]), 2),
            "sha256": rollout.digest(),
        }
    for name in rows:
        about[name]["same_bits"] = torch.equal(latents[name], latents[next(iter(rows))])
    return rows, about


def note_end(ends: list[float], block: int, latents: torch.Tensor) -> None:
    """Append when a block was done; waits for the GPU, so only the round that is not counted takes it."""
    wait()
    ends.append(time.perf_counter())


def maps(rollout: Rollout) -> dict[str, Active]:
    """Return captures of maps of the last block, all layers and heads."""
    config = rollout.config
    last, tokens = config.num_frames - 1, rollout.sizes.tokens_per_frame(config.height, config.width)
    of_block = {"granularity": "map", "blocks": [len(config.block_sizes) - 1]}
    asked: dict[str, dict[str, Any]] = {
        "maps: mean of the block": {},
        "maps: 4 patches": {"queries": tuple((last, n * tokens // 4) for n in range(4))},
        "maps: 20 words, pass 0": {"steps": [0], "kinds": ("cross",), "num_words": 20},
    }
    return {name: capturing([of_block | more]) for name, more in asked.items()}


def edits(rollout: Rollout) -> dict[str, Active]:
    """Return edits of every layer and pass."""
    half = tuple(range(rollout.sizes.num_heads // 2))
    made = {
        "edit: knockout of frame 0, one head": Knockout(frames=("first",), heads=(0,), passes="all"),
        "edit: knockout of frame 0, all heads": Knockout(frames=("first",), passes="all"),
        "edit: frame 0 moved by 1, all heads": Move(("first",), offset=1, passes="all"),
        "edit: zero ablation, half of the heads": Ablate("zero", heads=half, passes="all"),
    }
    return {name: partial(intervene, edit) for name, edit in made.items()}


def sites(rollout: Rollout) -> dict[str, Active]:
    """Return captures of the residual stream."""
    asked = partial(SiteCapture, ("resid_post",), steps=(0,))
    made = {
        "sites: resid_post of all layers, step 0": partial(asked, to=None),
        "sites: resid_post of all layers, step 0, to the host": asked,
    }
    return {name: partial(watching, make) for name, make in made.items()}


@contextmanager
def watching(make: Callable[[], SiteCapture]) -> Iterator[None]:
    """Watch sites while the context lasts, until all is there."""
    capture = make()
    with watched(capture):
        yield
        capture.flush()


def shared_seconds(
    rollout: Rollout, group: dist.ProcessGroup, active: Active = nullcontext, policy: Any = None
) -> float:
    """Return the slowest rank's seconds of a rollout that all make together, with the calls gathered."""
    if parallel.shard_of(rollout.model) is None:
        parallel.apply_head_parallel(rollout.model, group)

    @contextmanager
    def gathered() -> Iterator[Any]:
        with active() as calls:
            yield calls
        parallel.gather_calls(rollout.model, calls or [])

    parallel.wait_for_all(group)
    slowest = torch.tensor([rollout.seconds(gathered, policy)], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.item()


def models(args: argparse.Namespace, config: RunConfig) -> Iterator[Part]:
    """Yield released models' configurations at their full shapes with random weights, plain and captured."""
    rollout: Rollout | None = None
    for name in args.models or released():
        settings = load_config(
            f"configs/{name}.yaml", {"num_frames": args.num_frames, "device": config.device}
        )
        model = rollout.model if rollout and rollout.config.model == settings.model else None
        rollout = None  # the model before goes first
        if model:
            model.local_attn_size, model.sink_size = settings.local_attn_size, settings.sink_size
        rollout = Rollout(settings, True, model)
        mass = capturing(capture_requests(settings, rollout.sizes.num_layers)["mass"])
        yield warmed_up(rollout, {name: rollout.seconds, f"{name}, mass": partial(rollout.seconds, mass)})


def released() -> list[str]:
    """Return the configurations that name a release, models of one size together."""
    paths = [path for path in sorted(Path("configs").glob("*.yaml")) if "\nckpt_dir:" in path.read_text()]
    found = {path.stem: load_config(path) for path in paths}
    return sorted((name for name, c in found.items() if c.release), key=lambda name: found[name].model)


def kernels(device: str) -> Timed:
    """Return attention and mass of a block's queries at the shapes of 1.3B, kernel by kernel, in bfloat16."""
    if not torch.cuda.is_available() or device == "cpu":
        raise ConfigError("--what kernels times kernels of a GPU, and none is used")
    from wan.kernels.mass import query_frame_mass  # Triton, which is where GPUs are

    run, sizes, rows = RunConfig(), MODELS["Wan2.1-T2V-1.3B"], Timed()
    tokens = sizes.tokens_per_frame(run.height, run.width)
    for frames in KEY_FRAMES:
        generator = torch.Generator("cuda").manual_seed(0)
        q, k, v = (
            torch.randn(1, n * tokens, sizes.num_heads, sizes.head_dim, generator=generator, device="cuda")
            for n in (run.num_frame_per_block, frames, frames)
        )
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        heads = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        lse = attention_code.attention_with_lse(*heads)[1].contiguous()
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        calls: dict[str, Callable[[], Any]] = {
            "cuDNN": partial(cudnn, *heads, None, True),
            "mass": partial(query_frame_mass, q, k, lse, frames),
        }
        if backends.has_fa4(q.device):
            calls["FlashAttention-4"] = partial(backends.fa4_attention, *heads)
        if backends.gives_tails(*heads):
            calls["FlashAttention-4 with mass"] = partial(fa4_with_mass, heads, frames)
        for name, call in calls.items():
            rows[f"{name}, {frames} key frames"] = partial(mean_seconds, call)
    for row in rows.values():
        row()
    return rows


def fa4_with_mass(heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor], frames: int) -> torch.Tensor:
    return mass_of_tails(backends.fa4_with_tails(*heads, frames)[2], heads[0].shape[2]).mT


def mean_seconds(call: Callable[[], Any]) -> float:
    return seconds_of(lambda: [call() for _ in range(CALLS)]) / CALLS


if __name__ == "__main__":
    main(run)
