"""Time rollouts plain, captured, edited, under cache policies and of other models, side by side.

    python experiments/benchmarks/rollout.py --config_path configs/wan_mini.yaml --repeats 15
    python experiments/benchmarks/rollout.py --random_weights --device cuda --what plain mass maps
    python experiments/benchmarks/rollout.py --random_weights --device cuda --other ../older

Rows run in turn, round after round, after a round that is not counted. A ratio is the median over rounds of
a row's seconds over those of the plain rollout of its round, with the 95 % interval of that median.
--other TREE has another checkout of this repository take turns with this one, each in a process of its own;
a row's ratio is then to the same row of the other tree. --output_path keeps the numbers as JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import copy
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks.harness import Rows, benchmark_parser, in_turn, print_rows, save_report
from experiments.benchmarks.worker import Active, Rollout, capture_requests, capturing
from experiments.caches.files import require_writable
from experiments.extraction.devices import choose_device, choose_dtype
from experiments.extraction.provenance import environment
from experiments.running.cli import config_from, count, main
from wan.backends import kernel_name
from wan.cache import CachePolicy
from wan.checkpoint import read_model_config
from wan.config import MODELS, RunConfig, load_config
from wan.errors import ConfigError
from wan.interventions import Ablate, Bias, Edit, Knockout, Move, intervene
from wan.kernels.graphs import apply_cuda_graphs
from wan.policies import make_policy

CAPTURES = ("plain", "logits", "mass", "key_curve", "tokens")
Timed = dict[str, Callable[[], float]]
Part = tuple[Timed, Rows, dict[str, str]]  # rows, what is known of them, beside which each stands


def run(argv=None):
    parser = benchmark_parser(__doc__, repeats=5)
    flag, groups = parser.add_argument, ("maps", "interventions", "policies", "models")
    flag("--what", nargs="+", choices=CAPTURES + groups, default=CAPTURES, help="which rows")
    flag("--graphs", action="store_true", help="replay layers from CUDA graphs")
    flag("--other", type=Path, metavar="TREE", help="another checkout, which takes turns with this one")
    flag("--blocks", type=count, default=4, help="timed blocks of the policies, once every window is full")
    flag("--models", nargs="+", metavar="NAME", help="of configs/; all that name a release")
    flag("--tiny", action="store_true", help="tiny shapes of the models, to see that they run")
    args = parser.parse_args(argv)

    if args.output_path:
        require_writable(args.output_path)
    config = config_from(args)
    report = described(config, args)
    if args.other:
        parts = compared_trees(args, config, report)
    elif "policies" in args.what:
        parts = policies(args, config)
    elif "models" in args.what:
        parts = models(args, config)
    else:
        parts = one_model(args, config)
    for rows, about, beside in parts:

        def keep(found: Rows) -> None:
            report["rows"].update(found)
            save_report(report, args.output_path)

        print_rows(in_turn(rows, args.repeats, about, beside, keep))


def described(config: RunConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Return the head of a report: what is rolled out, and on what."""

    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    return {
        "model": config.model,
        "random_weights": args.random_weights,
        "num_frames": config.num_frames,
        "dtype": str(dtype).removeprefix("torch."),
        "attention": kernel_name(device, dtype),
        "graphs": getattr(args, "graphs", False),
        "environment": environment(device),
        "rows": {},
    }


def make_rollout(config: RunConfig, random_weights: bool) -> Rollout:
    """Load a config's model, or make one of its shapes with random weights."""

    if not random_weights:
        return Rollout(config, read_model_config(config.ckpt_dir), False)
    if config.model not in MODELS:
        raise ConfigError(f"--random_weights knows the sizes of {', '.join(MODELS)}, not of {config.model}")
    return Rollout(config, MODELS[config.model], True)


def warmed_up(rollout: Rollout, rows: Timed, beside: dict[str, str]) -> Part:
    """Call every row once; note its peak memory, and whether its latents equal those of the row beside it."""
    about, latents = {}, {}
    for name, row in rows.items():
        about[name] = {"gpu_peak_mib": rollout.peak_mib(row)}
        latents[name] = rollout.latents
    for name in rows:
        about[name]["same_bits"] = torch.equal(latents[name], latents[beside.get(name, next(iter(rows)))])
    return rows, about, beside


# --- One model: captures, maps, edits
def one_model(args: argparse.Namespace, config: RunConfig) -> Iterator[Part]:
    """Yield the rows that --what names, the plain one first."""

    rollout = make_rollout(config, args.random_weights)
    if args.graphs:
        if rollout.device.type != "cuda":
            raise ConfigError("--graphs replays layers on a GPU, and none is used; leave it out")
        apply_cuda_graphs(rollout.model)
    requests = capture_requests(config, rollout.sizes.num_layers)
    actives: dict[str, Active] = {
        name: capturing(asked) for name, asked in requests.items() if name in ("plain", *args.what)
    }
    if "maps" in args.what:
        actives |= {f"maps: {name}": capturing([asked]) for name, asked in map_requests(rollout).items()}
    if "interventions" in args.what:
        actives |= {f"edit: {name}": partial(intervene, edit) for name, edit in edits(rollout).items()}
    rows: Timed = {name: partial(rollout.seconds, active) for name, active in actives.items()}
    yield warmed_up(rollout, rows, {})


def map_requests(rollout: Rollout) -> dict[str, dict[str, Any]]:
    """Return maps over key tokens of the last block, of all layers and heads."""
    config, last = rollout.config, len(rollout.config.block_sizes) - 1
    frames = range(config.num_frames - config.block_sizes[-1], config.num_frames)
    tokens = rollout.sizes.tokens_per_frame(config.height, config.width)
    patches = tuple((frames[0], n * tokens // 4) for n in range(4))
    of_block = {"granularity": "map", "blocks": [last]}
    return {
        "mean of the block, every pass": of_block,
        "mean of the block, pass 0": of_block | {"steps": [0]},
        "each query frame, every pass": of_block | {"queries": tuple((frame, -1) for frame in frames)},
        "4 patches, every pass": of_block | {"queries": patches},
        "20 words, pass 0": of_block | {"steps": [0], "kinds": ("cross",), "num_words": 20},
    }


def edits(rollout: Rollout) -> dict[str, Edit]:
    """Return edits of every layer and pass."""

    half, first = tuple(range(rollout.sizes.num_heads // 2)), ("first",)
    earlier = tuple(range(rollout.config.num_frames // 2))
    return {
        "knockout of 3 frames, half of the heads": Knockout(frames=(3, 4, 5), heads=half, passes="all"),
        "knockout of frame 0, one head": Knockout(frames=first, heads=(0,), passes="all"),
        "knockout of frame 0, all heads": Knockout(frames=first, passes="all"),
        "knockout of the first half, all heads": Knockout(frames=earlier, passes="all"),
        "bias on frame 0, half of the heads": Bias(1.0, frames=first, heads=half, passes="all"),
        "frame 0 moved by 1, all heads": Move(first, offset=1, passes="all"),
        "zero ablation, half of the heads": Ablate("zero", heads=half, passes="all"),
    }


# --- Cache policies, once their windows are full
POLICIES: list[tuple[dict[str, Any], int]] = [  # a policy, and the size of the window beside it
    ({"name": "ema_sink", "window": 9, "sink": 3}, 9),
    ({"name": "relative", "window": 12, "sink": 3}, 12),
    ({"name": "two_memories", "window": 12, "sink": 3}, 12),
    ({"name": "memory_bank", "window": 12, "sink": 3, "bank": 3, "interval": 3}, 15),
    ({"name": "deep_sink", "window": 21, "sink": 10}, 21),
    ({"name": "participative", "window": 21, "sink": 10, "budget": 16, "recent": 4}, 21),
    ({"name": "rolling_sink", "window": 21}, 21),
]
WARM_UP = 2  # blocks before the timed ones: participative compresses in every second one


def policies(args: argparse.Namespace, config: RunConfig) -> Iterator[Part]:
    """Yield the last blocks of a rollout under every policy, plain and captured, beside a window of its size.

    A given beginning fills every window by clean passes alone, up to the last blocks of --num_frames.
    """

    n, num_frames = config.num_frame_per_block, args.num_frames or 45
    least = max(size for _, size in POLICIES) + n
    least += -least % n + (WARM_UP + args.blocks) * n
    if num_frames < least:
        raise ConfigError(f"--num_frames {num_frames} leaves no full window; at least {least} do")
    rollout = make_rollout(replace(config, num_frames=num_frames - num_frames % n), args.random_weights)
    rows: Timed = {}
    beside: dict[str, str] = {}
    for settings, size in POLICIES:
        window = make_policy(name="window", window=size, sink=3)
        own = " ".join(map(str, settings.values()))
        for name, policy in ((f"window {size}", window), (own, make_policy(**settings))):
            rows[name] = partial(block_seconds, rollout, policy, False, args.blocks)
            rows[f"{name}, captured"] = partial(block_seconds, rollout, policy, True, args.blocks)
            beside |= {name: f"window {size}", f"{name}, captured": name}
    yield warmed_up(rollout, rows, beside)


def block_seconds(rollout: Rollout, policy: CachePolicy, is_captured: bool, blocks: int) -> float:
    """Return the mean seconds of the last blocks under a policy."""

    n, num_frames = rollout.config.num_frame_per_block, rollout.config.num_frames
    given = num_frames - (WARM_UP + blocks) * n
    pipeline = copy(rollout.pipeline)
    pipeline.cache_policy = policy
    stamps: list[float] = []

    def on_block(block: int, latents: object) -> None:
        if block * n >= given + (WARM_UP - 1) * n:  # the end of the last one that warms up
            rollout.wait()
            stamps.append(time.perf_counter())

    request = {"granularity": "frame", "blocks": range(given // n, num_frames // n)}
    with capturing([request] if is_captured else [])():
        rollout.latents = pipeline.inference(
            rollout.noise[:, given:],
            prompt_embeds=rollout.text,
            renoise=rollout.renoise[:, :, given:],
            initial_latent=rollout.noise[:, :given],
            on_block=on_block,
        )[1]
    return (stamps[-1] - stamps[0]) / blocks


# --- The configurations of released models, with random weights
TINY: dict[str, Any] = {
    "dim": 48,
    "ffn_dim": 64,
    "num_heads": 3,
    "num_layers": 2,
    "freq_dim": 32,
    "text_dim": 24,
}


def models(args: argparse.Namespace, config: RunConfig) -> Iterator[Part]:
    """Yield every model's configuration at its full shapes, plain and captured."""
    rollout: Rollout | None = None
    for name in args.models or released():
        given = {"num_frames": args.num_frames, "device": config.device}
        settings = load_config(f"configs/{name}.yaml", given)
        if settings.model not in MODELS:
            raise ConfigError(f"{name} is of {settings.model}, not of {', '.join(MODELS)}")
        sizes = MODELS[settings.model]
        if args.tiny:
            settings, sizes = replace(settings, height=4, width=4), replace(sizes, **TINY)
        model = rollout.model if rollout and rollout.sizes == sizes else None
        rollout = None  # the model before goes first
        if model:
            model.local_attn_size, model.sink_size = settings.local_attn_size, settings.sink_size
        rollout = Rollout(settings, sizes, True, model)
        mass = capturing(capture_requests(settings, sizes.num_layers)["mass"])
        rows: Timed = {name: rollout.seconds, f"{name}, captured": partial(rollout.seconds, mass)}
        yield warmed_up(rollout, rows, {})


def released() -> list[str]:
    """Return the configurations that name a release, models of one size together."""

    paths = [path for path in sorted(Path("configs").glob("*.yaml")) if "\nckpt_dir:" in path.read_text()]
    found = {path.stem: load_config(path) for path in paths}
    return sorted((name for name, c in found.items() if c.release), key=lambda name: found[name].model)


# --- Another checkout, turn by turn
class Worker:
    """A process that holds a model by the code of one tree, and makes a video when it is told to."""

    def __init__(self, tree: Path, settings: dict[str, Any]):
        if not (tree / "wan/config.py").is_file():
            raise ConfigError(f"{tree} has no wan/config.py; --other TREE is a checkout of this repository")
        self.tree = tree.resolve()
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("worker.py"))],
            env=os.environ | {"PYTHONPATH": str(self.tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        package = self.ask(settings)["wan"]
        if Path(package).resolve() != self.tree / "wan":
            raise ConfigError(f"the worker of {tree} imported {package}")

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send a question and wait for its answer."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise ConfigError(f"the worker of {self.tree} ended; its error stands above")
        return json.loads(answer)

    def seconds(self, row: str) -> float:
        return self.ask({"row": row, "timed": True})["seconds"]

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()


def compared_trees(args: argparse.Namespace, config: RunConfig, report: dict[str, Any]) -> Iterator[Part]:
    """Yield rows by this tree and by another; say whether latents and captured values have equal bits."""
    settings = {name: value for name, value in asdict(config).items() if name != "base"}
    given = {"config": settings, "random_weights": args.random_weights}
    rows: Timed = {}
    about: Rows = {}
    beside: dict[str, str] = {}
    with ExitStack() as stack:
        trees = (args.other, Path(__file__).parents[2])
        other, this = (stack.enter_context(Worker(tree, given)) for tree in trees)
        report["trees"] = {"this": commit_of(this.tree), "other": commit_of(other.tree)}
        for row in (name for name in args.what if name in CAPTURES):
            theirs = f"{row}, other"
            for worker, name in ((other, theirs), (this, row)):
                rows[name], beside[name] = partial(worker.seconds, row), theirs
                about[name] = worker.ask({"row": row, "timed": False})
            about[row]["same_bits"] = about[row]["sha256"] == about[theirs]["sha256"]
        yield rows, about, beside


def commit_of(tree: Path) -> str:
    """Return the commit of a checkout; nothing where it travelled without its history."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True)
    return found.stdout.strip()


if __name__ == "__main__":
    main(run)
