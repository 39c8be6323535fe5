"""Time rows in turn in one process: rollouts plain, captured, edited, under policies, and what serves them.

    python experiments/benchmarks/rows.py --config_path configs/wan_mini.yaml --repeats 15
    python experiments/benchmarks/rows.py --random_weights --device cuda --what plain mass maps
    torchrun --nproc-per-node 2 experiments/benchmarks/rows.py --random_weights --what plain mass
    python experiments/benchmarks/rows.py --what start --command "run_extraction_all --output_path a.pt"

Rows run in turn, round after round, after a round that is not counted. A ratio is the median over rounds of
a row's seconds over those of the first row of its round, with the 95 % interval of that median. By torchrun
all processes make each rollout together, and the slowest one counts. sha256 is of the latents and of all
that was captured: run the same row in two checkouts to compare them.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import experiments.benchmarks.harness as bench
from experiments.benchmarks import engine, public, videos
from experiments.caches.files import require_writable
from experiments.extraction.devices import choose_device, choose_dtype
from experiments.extraction.provenance import environment
from experiments.running.cli import config_from, count, main, policy_settings, run_parser
from experiments.running.ranks import end_at_once, on_own_device, this_rank
from wan import attention as attention_code
from wan import backends
from wan.capture import CaptureRequest
from wan.config import MODELS, RunConfig, load_config
from wan.errors import ConfigError
from wan.interventions import Ablate, Knockout, Move, intervene
from wan.policies import read_policy
from wan.reductions import mass_of_tails
from wan.sites import SiteCapture, watched
from wan.wings import parallel
from wan.wings.graphs import apply_cuda_graphs

CAPTURES = ("plain", "logits", "mass", "key_curve", "tokens")
LOOKED = ("maps", "interventions", "sites")
KEY_FRAMES, CALLS = (1, 3, 6, 12, 21), 5  # of kernels, and their calls of a timed turn


def run(argv=None):
    parser = run_parser(__doc__, None)
    flag = parser.add_argument
    flag("--what", nargs="+", choices=[*CAPTURES, *LOOKED, *GROUPS], default=CAPTURES, help="which rows")
    flag("--random_weights", action="store_true", help="the shapes of the config's model, without any file")
    flag("--repeats", type=count, default=5, help="timed rounds, of all rows in turn")
    flag("--graphs", action="store_true", help="replay layers from CUDA graphs")
    flag("--policies", nargs="+", default=[], help="rows as --cache_policy takes them, and with mass")
    flag("--models", nargs="+", metavar="NAME", help="of configs/; all that name a release")
    flag("--checkout", type=Path, help="of public: a checkout of Self-Forcing's repository")
    flag("--command", help="of start: a script of experiments/, without .py, and its flags")
    args = parser.parse_args(argv)
    rank = this_rank()
    config = on_own_device(config_from(args), rank)
    if args.output_path:
        require_writable(args.output_path)
    device = choose_device(config.device)
    report: dict[str, Any] = {
        "model": config.model,
        "random_weights": args.random_weights,
        "num_frames": config.num_frames,
        "dtype": str(dtype := choose_dtype(config.dtype, device)).removeprefix("torch."),
        "attention": backends.kernel_name(device, dtype),
        "graphs": args.graphs,
        "gpus": rank.count,
        "environment": environment(device),
        "rows": {},
    }

    def keep(found: bench.Rows) -> None:
        report["rows"].update(found)
        if rank.is_first:
            bench.save_report(report, args.output_path)

    groups = [make for name, make in GROUPS.items() if name in args.what]
    if not {*args.what} <= GROUPS.keys():
        groups.append(rollouts)
    with torch.no_grad():
        for rows, about in (part for group in groups for part in group(args, config)):
            found = bench.in_turn(rows, args.repeats, about, keep)
            if rank.is_first:
                bench.print_rows(found)
    if rank.count > 1:
        parallel.leave()
        end_at_once()


# --- Rollouts
def rollouts(args: argparse.Namespace, config: RunConfig) -> Iterator[bench.Part]:
    """Yield rollouts of one model: plain, captured, edited, and under the policies that are named."""
    rollout = bench.Rollout(config, args.random_weights)
    if args.graphs:
        if rollout.device.type != "cuda":
            raise ConfigError("--graphs replays layers on a GPU, and none is used; leave it out")
        apply_cuda_graphs(rollout.model)
    seconds = rollout.seconds
    if this_rank().count > 1:
        seconds = partial(shared_seconds, rollout, parallel.join(rollout.device))
    requests = bench.capture_requests(config, rollout.sizes.num_layers)
    rows: bench.Timed = {"plain": seconds}
    rows |= {
        name: partial(seconds, bench.capturing(what)) for name, what in requests.items() if name in args.what
    }
    for group, active in looked_at(rollout):
        if group.partition(":")[0] in args.what:
            rows[group] = partial(seconds, active)
    for name in args.policies:
        policy = read_policy(policy_settings(name))
        rows[name] = partial(seconds, policy=policy)
        rows[f"{name}, mass"] = partial(seconds, bench.capturing(requests["mass"]), policy)
    yield rows, seen(rollout, rows)


def seen(rollout: bench.Rollout, rows: bench.Timed) -> bench.Rows:
    """Warm rows up; note bytes of the cache, the last block's time and the bits."""
    latents, ends = list[torch.Tensor](), list[float]()

    def note_end(block: int, of_block: torch.Tensor) -> None:
        bench.wait()
        ends.append(time.perf_counter())

    def more() -> dict[str, Any]:
        latents.append(rollout.latents)
        return {
            "cache_mib": round(rollout.pipeline.cache_bytes / bench.MIB, 1),
            "last_block_ms": round(1000 * (ends[-1] - ends[-2]), 2) if len(ends) > 1 else None,
            "sha256": rollout.digest(),
            "same_bits": torch.equal(latents[-1], latents[0]),
        }

    rollout.on_block = note_end
    about = bench.warmed_up(rows, more)
    rollout.on_block = None
    return about


def looked_at(rollout: bench.Rollout) -> Iterator[tuple[str, bench.Active]]:
    """Yield maps of the last block, edits of every layer and pass, and captures of the residual stream."""
    config, half = rollout.config, tuple(range(rollout.sizes.num_heads // 2))
    last, tokens = config.num_frames - 1, rollout.sizes.tokens_per_frame(config.height, config.width)
    maps: dict[str, dict[str, Any]] = {
        "mean of the block": {},
        "4 patches": {"queries": tuple((last, n * tokens // 4) for n in range(4))},
        "20 words, pass 0": {"steps": [0], "kinds": ("cross",), "num_words": 20},
    }
    for name, more in maps.items():
        request = CaptureRequest(granularity="map", blocks=[len(config.block_sizes) - 1], **more)
        yield f"maps: {name}", bench.capturing([request])
    edits = {
        "knockout of frame 0, one head": Knockout(frames=("first",), heads=(0,), passes="all"),
        "knockout of frame 0, all heads": Knockout(frames=("first",), passes="all"),
        "frame 0 moved by 1, all heads": Move(("first",), offset=1, passes="all"),
        "zero ablation, half of the heads": Ablate("zero", heads=half, passes="all"),
    }
    for name, edit in edits.items():
        yield f"interventions: {name}", partial(intervene, edit)
    for to in (None, "cpu"):
        watcher = partial(SiteCapture, ("resid_post",), steps=(0,), to=to)
        yield f"sites: resid_post of all layers, step 0, to {to}", partial(watching, watcher)


@contextmanager
def watching(make: Callable[[], SiteCapture]) -> Iterator[None]:
    """Watch sites while the context lasts, until all is there."""
    capture = make()
    with watched(capture):
        yield
        capture.flush()


def shared_seconds(
    rollout: bench.Rollout, group: dist.ProcessGroup, active: bench.Active = nullcontext, policy: Any = None
) -> float:
    """Return the slowest rank's seconds of a rollout that all make together, with the calls gathered."""
    if rollout.model.head_shard.is_whole:
        parallel.apply_head_parallel(rollout.model, group)

    @contextmanager
    def gathered() -> Iterator[Any]:
        with active() as calls:
            yield calls
        rollout.model.head_shard.gather_calls(calls or [])

    parallel.wait_for_all(group)
    slowest = torch.tensor([rollout.seconds(gathered, policy)], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.item()


def models(args: argparse.Namespace, config: RunConfig) -> Iterator[bench.Part]:
    """Yield released models' configurations at their full shapes with random weights, plain and captured."""
    rollout: bench.Rollout | None = None
    for name in args.models or released():
        given = {"num_frames": args.num_frames, "device": config.device}
        settings = load_config(f"configs/{name}.yaml", given)
        model = rollout.model if rollout and rollout.config.model == settings.model else None
        rollout = None  # the model before goes first
        if model:
            model.local_attn_size, model.sink_size = settings.local_attn_size, settings.sink_size
        rollout = bench.Rollout(settings, True, model)
        mass = bench.capturing(bench.capture_requests(settings, rollout.sizes.num_layers)["mass"])
        rows: bench.Timed = {name: rollout.seconds, f"{name}, mass": partial(rollout.seconds, mass)}
        yield rows, seen(rollout, rows)


def released() -> list[str]:
    """Return the configurations that name a release, models of one size together."""
    paths = [path for path in sorted(Path("configs").glob("*.yaml")) if "\nckpt_dir:" in path.read_text()]
    found = {path.stem: load_config(path) for path in paths}
    return sorted((name for name, c in found.items() if c.release), key=lambda name: found[name].model)


# --- Kernels, and a command from its start
def kernels(args: argparse.Namespace, config: RunConfig) -> Iterator[bench.Part]:
    """Yield attention and mass of a block's queries at the shapes of 1.3B, kernel by kernel, in bfloat16."""
    videos.require_gpu(config)
    from wan.kernels.mass import query_frame_mass  # Triton, which is where GPUs are

    sizes, rows = MODELS["Wan2.1-T2V-1.3B"], bench.Timed()
    tokens = sizes.tokens_per_frame(config.height, config.width)
    for frames in KEY_FRAMES:
        generator = torch.Generator("cuda").manual_seed(0)
        q, k, v = (
            torch.randn(1, n * tokens, sizes.num_heads, sizes.head_dim, generator=generator, device="cuda")
            for n in (config.num_frame_per_block, frames, frames)
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
    yield rows, bench.warmed_up(rows)


def fa4_with_mass(heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor], frames: int) -> torch.Tensor:
    return mass_of_tails(backends.fa4_with_tails(*heads, frames)[2], heads[0].shape[2]).mT


def mean_seconds(call: Callable[[], Any]) -> float:
    return bench.seconds_of(lambda: [call() for _ in range(CALLS)]) / CALLS


def start(args: argparse.Namespace, config: RunConfig) -> Iterator[bench.Part]:
    """Yield --command in new processes, with the seconds of its phases by its own log, of the last one."""
    if not args.command:
        raise ConfigError('--what start needs --command, such as "run_extraction_all --overwrite"')
    script, *flags = shlex.split(args.command)
    phases: dict[str, Any] = {}

    def command() -> float:
        with tempfile.TemporaryDirectory() as folder:
            log, began = Path(folder, "log.jsonl"), time.time()
            called = [sys.executable, f"experiments/{script}.py", *flags, "--log_file", str(log)]
            subprocess.run(called, check=True)
            seconds, ended = time.time() - began, log.stat().st_mtime - began
            events = map(json.loads, log.read_text().splitlines())
            at = {event["event"]: event["seconds"] for event in events}  # of blocks the last one's
        phases["imports and flags"] = round(ended - at["end"], 2)
        phases["weights and prompt"] = at["rollout"]
        phases["rollout"] = round(at["block"] - at["rollout"], 2)
        phases["cache and video"] = round(at["end"] - at["block"], 2)
        return seconds

    yield {args.command: command}, {args.command: phases}


GROUPS = {
    "models": models,
    "kernels": kernels,
    "public": public.rows,
    "decoder": videos.decoder,
    "video": videos.beside,
    "cards": videos.cards,
    "start": start,
    "engine": engine.rows,
}

if __name__ == "__main__":
    main(run)
