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
from collections.abc import Mapping
from contextlib import ExitStack
from copy import copy
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.benchmarks.harness import benchmark_parser, in_turn, print_rows, save_report
from experiments.running.cli import config_from, count, main
from wan.errors import ConfigError

if TYPE_CHECKING:
    from experiments.benchmarks.worker import Active, Rollout
    from wan.cache import CachePolicy
    from wan.config import RunConfig

CAPTURES = ("plain", "logits", "mass", "key_curve", "tokens")
GROUPS = ("maps", "interventions", "policies", "models")


def run(argv=None):
    parser = benchmark_parser(__doc__, repeats=5)
    flag = parser.add_argument
    flag("--what", nargs="+", choices=CAPTURES + GROUPS, default=CAPTURES, help="which rows")
    flag("--graphs", action="store_true", help="replay layers from CUDA graphs")
    flag("--other", type=Path, metavar="TREE", help="another checkout, which takes turns with this one")
    flag("--blocks", type=count, default=4, help="timed blocks of the policies, once every window is full")
    flag("--models", nargs="+", metavar="NAME", help="configurations of configs/; all that name a release")
    flag("--tiny", action="store_true", help="tiny shapes for the models, to see that they run")
    measure(parser.parse_args(argv))


def measure(args: argparse.Namespace) -> None:
    """Measure what the flags ask for and write the report after every round."""
    from experiments.caches.files import require_writable

    if args.output_path:
        require_writable(args.output_path)
    config = config_from(args)
    if args.other:
        report = compare_trees(args, config)
    elif "models" in args.what:
        report = time_models(args)
    else:
        report = time_rows(args, config)
    save_report(report, args.output_path)


# --- Rows of one model
def make_rollout(config: "RunConfig", random_weights: bool) -> "Rollout":
    """Load a config's model, or make one of its shapes with random weights."""
    from experiments.benchmarks.worker import Rollout
    from experiments.extraction.devices import choose_device
    from wan.checkpoint import read_model_config
    from wan.config import MODELS

    choose_device(config.device)  # ConfigError for one that is not there
    if not random_weights:
        return Rollout(config, read_model_config(config.ckpt_dir), False)
    if config.model not in MODELS:
        raise ConfigError(f"--random_weights knows the sizes of {', '.join(MODELS)}, not of {config.model}")
    return Rollout(config, MODELS[config.model], True)


def describe(rollout: "Rollout", args: argparse.Namespace) -> dict[str, Any]:
    """Return what every report says of its rollouts."""
    from experiments.extraction.provenance import environment
    from wan.backends import kernel_name

    return {
        "model": rollout.config.model,
        "random_weights": args.random_weights,
        "num_frames": rollout.config.num_frames,
        "dtype": str(rollout.dtype).removeprefix("torch."),
        "attention": kernel_name(rollout.device, rollout.dtype),
        "graphs": args.graphs,
        "environment": environment(rollout.device),
    }


def time_rows(args: argparse.Namespace, config: "RunConfig") -> dict[str, Any]:
    """Time the rows that --what names, the plain one first."""
    import torch

    from wan.kernels.graphs import apply_cuda_graphs

    if "policies" in args.what:
        if args.num_frames is None:
            config = replace(config, num_frames=45)
        return time_policies(args, config)
    rollout = make_rollout(config, args.random_weights)
    if args.graphs:
        if rollout.device.type != "cuda":
            raise ConfigError("--graphs replays layers on a GPU, and none is used; leave it out")
        apply_cuda_graphs(rollout.model)
    actives = active_contexts(rollout, [name for name in args.what if name != "plain"])
    report = describe(rollout, args)
    about: dict[str, dict[str, Any]] = {}
    for name, active in actives.items():  # the round that is not counted
        about[name] = {"gpu_peak_mib": rollout.peak_mib(active)}
        if name == "plain":
            plain = rollout.latents
        about[name]["same_bits"] = torch.equal(rollout.latents, plain)

    def keep(found: dict[str, dict]) -> dict[str, Any]:
        report["rows"] = {name: about[name] | row for name, row in found.items()}
        save_report(report, args.output_path)
        return report

    rows = {name: partial(rollout.seconds, active) for name, active in actives.items()}
    keep(in_turn(rows, args.repeats, keep=keep))
    print_rows(report["rows"], "gpu_peak_mib", "same_bits")
    return report


def active_contexts(rollout: "Rollout", names: list[str]) -> "dict[str, Active]":
    """Return what is active in each row, by the row's name."""
    from experiments.benchmarks.worker import capture_requests, capturing
    from wan.interventions import intervene

    requests = capture_requests(rollout.config, rollout.sizes.num_layers)
    found = {name: capturing(requests[name]) for name in ("plain", *names) if name in requests}
    if "maps" in names:
        found |= {f"maps: {name}": capturing(asked) for name, asked in map_requests(rollout).items()}
    if "interventions" in names:
        found |= {f"edit: {name}": partial(intervene, edit) for name, edit in edits(rollout).items()}
    return found


def map_requests(rollout: "Rollout") -> dict[str, list[dict[str, Any]]]:
    """Return maps over key tokens of the last block, of all layers and heads."""
    config, last = rollout.config, len(rollout.config.block_sizes) - 1
    frames = range(config.num_frames - config.block_sizes[-1], config.num_frames)
    tokens = rollout.sizes.tokens_per_frame(config.height, config.width)
    patches = tuple((frames[0], n * tokens // 4) for n in range(4))
    of_block = {"granularity": "map", "blocks": [last]}
    return {
        "mean of the block, every pass": [of_block],
        "mean of the block, pass 0": [of_block | {"steps": [0]}],
        "each query frame, every pass": [of_block | {"queries": tuple((frame, -1) for frame in frames)}],
        "4 patches, every pass": [of_block | {"queries": patches}],
        "20 words, pass 0": [of_block | {"steps": [0], "kinds": ("cross",), "num_words": 20}],
    }


def edits(rollout: "Rollout") -> dict[str, Any]:
    """Return edits of every layer and pass."""
    from wan.interventions import Ablate, Bias, Knockout, Move

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
        self.wan = self.ask(settings)["wan"]
        if Path(self.wan).resolve() != self.tree / "wan":
            raise ConfigError(f"the worker of {tree} imported {self.wan}")

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send a question and wait for its answer."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise ConfigError(f"the worker of {self.tree} ended; its error stands above")
        return json.loads(answer)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()


def compare_trees(args: argparse.Namespace, config: "RunConfig") -> dict[str, Any]:
    """Time rows by this tree and another in turn; say whether latents and captured values have equal bits."""
    from experiments.extraction.devices import choose_device
    from experiments.extraction.provenance import environment

    names = [name for name in args.what if name in CAPTURES]
    settings = {name: value for name, value in asdict(config).items() if name != "base"}
    given = {"config": settings, "random_weights": args.random_weights}
    trees = {"this": Path(__file__).parents[2], "other": args.other}
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(tree, given)) for name, tree in trees.items()}
        untimed = {
            (row, tree): worker.ask({"row": row, "timed": False})
            for row in names
            for tree, worker in workers.items()
        }
        report = {
            "model": config.model,
            "random_weights": args.random_weights,
            "num_frames": config.num_frames,
            "environment": environment(choose_device(config.device)),
            "trees": {name: [str(worker.tree), commit_of(worker.tree)] for name, worker in workers.items()},
        }

        def keep(found: Mapping[str, dict]) -> None:
            rows = {}
            for row in names:
                rows[f"{row}, other"] = untimed[row, "other"] | found[f"{row}, other"]
                same = untimed[row, "this"]["sha256"] == untimed[row, "other"]["sha256"]
                rows[row] = untimed[row, "this"] | found[row] | {"same_bits": same}
            save_report(report | {"rows": rows}, args.output_path)
            report["rows"] = rows

        def seconds(row: str, tree: str) -> float:
            return workers[tree].ask({"row": row, "timed": True})["seconds"]

        rows, beside = {}, {}
        for row in names:
            for tree, name in (("other", f"{row}, other"), ("this", row)):
                rows[name], beside[name] = partial(seconds, row, tree), f"{row}, other"
        in_turn(rows, args.repeats, beside, keep)
    print_rows(report["rows"], "gpu_peak_mib", "same_bits")
    return report


def commit_of(tree: Path) -> str:
    """Return the commit of a checkout, or nothing where it travelled without its history."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True)
    return found.stdout.strip()


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


def time_policies(args: argparse.Namespace, config: "RunConfig") -> dict[str, Any]:
    """Time the last blocks of a rollout under every policy, plain and captured, beside a window of its size.

    A given beginning fills every window by clean passes alone, up to the last blocks of --num_frames.
    """
    from wan.policies import make_policy

    n = config.num_frame_per_block
    least = max(size for _, size in POLICIES) + n
    least += -least % n + (WARM_UP + args.blocks) * n
    if config.num_frames < least:
        raise ConfigError(f"--num_frames {config.num_frames} leaves no full window; at least {least} do")
    config = replace(config, num_frames=config.num_frames - config.num_frames % n)
    rollout = make_rollout(config, args.random_weights)
    rows, beside = {}, {}
    for settings, size in POLICIES:
        window = make_policy(name="window", window=size, sink=3)
        name = " ".join(map(str, settings.values()))
        for label, policy in ((f"window {size}", window), (name, make_policy(**settings))):
            for captured in (False, True):
                row = f"{label}{', captured' * captured}"
                rows[row] = partial(block_seconds, rollout, policy, captured, args.blocks)
                beside[row] = label if captured else f"window {size}"
    for row in rows.values():  # the round that is not counted
        row()
    report = describe(rollout, args) | {"blocks": args.blocks}
    keep = partial(save_rows, report, args.output_path)
    keep(in_turn(rows, args.repeats, beside, keep))
    print_rows(report["rows"])
    return report


def save_rows(report: dict[str, Any], path: str | None, found: dict[str, dict]) -> None:
    report["rows"] = found
    save_report(report, path)


def block_seconds(rollout: "Rollout", policy: "CachePolicy", captured: bool, blocks: int) -> float:
    """Return the mean seconds of the last blocks under a policy."""
    import time

    from experiments.benchmarks.worker import capturing

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
    with capturing([request] if captured else [])():
        pipeline.inference(
            rollout.noise[:, given:],
            prompt_embeds=rollout.text,
            renoise=rollout.renoise[:, :, given:],
            initial_latent=rollout.noise[:, :given],
            on_block=on_block,
        )
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


def time_models(args: argparse.Namespace) -> dict[str, Any]:
    """Time every model's configuration at its full shapes: plain and captured, with peak memory."""
    import torch

    from experiments.benchmarks.worker import Rollout, capture_requests, capturing
    from wan.config import MODELS, load_config

    report: dict[str, Any] = {"tiny": args.tiny, "rows": {}}
    args.random_weights, rollout = True, None
    for name in args.models or released():
        config = load_config(f"configs/{name}.yaml", {"num_frames": args.num_frames, "device": args.device})
        sizes = MODELS[config.model]
        if args.tiny:
            config, sizes = replace(config, height=4, width=4), replace(sizes, **TINY)
        if rollout and rollout.sizes == sizes:
            rollout.model.local_attn_size, rollout.model.sink_size = config.local_attn_size, config.sink_size
            rollout = Rollout(config, sizes, True, rollout.model)
        else:
            rollout = None  # the model before goes first
            rollout = Rollout(config, sizes, True)
        switches = [
            replace(switch, prompt_embeds=torch.randn_like(rollout.text)) for switch in config.switches
        ]
        rows, about = {}, {}
        for row in ("plain", "mass"):
            active = capturing(capture_requests(config, sizes.num_layers)[row])
            label = name if row == "plain" else f"{name}, captured"
            rows[label] = partial(rollout.seconds, active, prompt_schedule=switches)
            about[label] = {"gpu_peak_mib": rollout.peak_mib(active, prompt_schedule=switches)}
        found = in_turn(rows, args.repeats)
        report["rows"] |= {row: about[row] | numbers for row, numbers in found.items()}
        save_report(describe(rollout, args) | report, args.output_path)
        print_rows({row: report["rows"][row] for row in found}, "gpu_peak_mib")
    assert rollout
    return describe(rollout, args) | report


def released() -> list[str]:
    """Return the configurations that name a release, models of one size together."""
    from wan.config import load_config

    paths = [path for path in sorted(Path("configs").glob("*.yaml")) if "\nckpt_dir:" in path.read_text()]
    found = {path.stem: load_config(path) for path in paths}
    return sorted((name for name, c in found.items() if c.release), key=lambda name: found[name].model)


if __name__ == "__main__":
    main(run)
