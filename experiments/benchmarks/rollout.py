"""Time rollouts plain, captured, edited, under cache policies and of other models, side by side.

    python experiments/benchmarks/rollout.py --config_path configs/wan_mini.yaml --repeats 15
    python experiments/benchmarks/rollout.py --random_weights --device cuda --what plain mass maps
    python experiments/benchmarks/rollout.py --random_weights --device cuda --other ../older
    torchrun --nproc-per-node 2 experiments/benchmarks/rollout.py --random_weights --what plain mass

Rows run in turn, round after round, after a round that is not counted. A ratio is the median over rounds of
a row's seconds over those of the plain rollout of its round, with the 95 % interval of that median.
--other TREE has another checkout of this repository take turns with this one, each in a process of its own;
a row's ratio is then to the same row of the other tree. By torchrun all processes make each rollout together,
a GPU each, and the slowest one counts. --output_path keeps the numbers as JSON.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from experiments.benchmarks.harness import Rows, benchmark_parser, in_turn, print_rows, save_report
from experiments.benchmarks.worker import MIB, Active, Rollout, capture_requests, capturing
from experiments.caches.files import require_writable
from experiments.extraction.devices import choose_device, choose_dtype
from experiments.extraction.provenance import environment
from experiments.running.cli import config_from, main, policy_settings
from experiments.running.ranks import end_at_once, on_own_device, this_rank
from wan import attention as attention_code
from wan import model as model_code
from wan import parallel
from wan import pipeline as pipeline_code
from wan.backends import kernel_name
from wan.checkpoint import read_model_config
from wan.config import MODELS, ModelConfig, RunConfig, load_config
from wan.errors import ConfigError
from wan.interventions import Ablate, Knockout, Move, intervene
from wan.kernels.graphs import apply_cuda_graphs
from wan.policies import make_policy, read_policy
from wan.sites import SiteCapture, Where, watched

CAPTURES = ("plain", "logits", "mass", "key_curve", "tokens")
GROUPS = ("maps", "interventions", "sites", "policies", "heads", "models")
POLICIES: list[tuple[dict[str, Any], int]] = [  # a policy, and the size of the window beside it
    ({"name": "ema_sink", "window": 9, "sink": 3}, 9),
    ({"name": "relative", "window": 12, "sink": 3}, 12),
    ({"name": "two_memories", "window": 12, "sink": 3}, 12),
    ({"name": "memory_bank", "window": 12, "sink": 3, "bank": 3, "interval": 3}, 15),
    ({"name": "deep_sink", "window": 21, "sink": 10}, 21),
    ({"name": "participative", "window": 21, "sink": 10, "budget": 16, "recent": 4}, 21),
    ({"name": "rolling_sink", "window": 21}, 21),
]
HEADS: dict[str, list[tuple[int, int]]] = {  # policies of configs, and windows and sinks beside them
    "longlive": [],
    "dummy_forcing": [(5, 1)],  # about as many keys as the mean head has
    "forcing_kv": [(6, 1)],
    "triattention": [(9, 1)],
}
Timed = dict[str, Callable[[], float]]
Part = tuple[Timed, Rows, dict[str, str]]  # rows, what is known of them, beside which each stands


def run(argv=None):
    parser = benchmark_parser(__doc__, repeats=5)
    flag = parser.add_argument
    flag("--what", nargs="+", choices=CAPTURES + GROUPS, default=CAPTURES, help="which rows")
    flag("--graphs", action="store_true", help="replay layers from CUDA graphs")
    flag("--other", type=Path, metavar="TREE", help="another checkout, which takes turns with this one")
    flag("--models", nargs="+", metavar="NAME", help="of configs/; all that name a release")
    flag("--tiny", action="store_true", help="tiny shapes of the models, to see that they run")
    args = parser.parse_args(argv)
    if args.output_path:
        require_writable(args.output_path)
    rank = this_rank()
    config = on_own_device(config_from(args), rank)
    report = described(config, args) | {"gpus": rank.count}
    if args.other:
        parts = compared_trees(args, config, report)
    else:
        parts = models(args, config) if "models" in args.what else one_model(args, config)
    for rows, about, beside in parts:

        def keep(found: Rows) -> None:
            report["rows"].update(found)
            if rank.is_first:
                save_report(report, args.output_path)

        found = in_turn(rows, args.repeats, about, beside, keep)
        if rank.is_first:
            print_rows(found)
    if rank.count > 1:
        parallel.leave()
        end_at_once()


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


def sizes_of(config: RunConfig, random_weights: bool) -> ModelConfig:
    """Return the sizes of a config's model; of one with random weights without any file."""
    if not random_weights:
        return read_model_config(config.ckpt_dir)
    if config.model not in MODELS:
        raise ConfigError(f"--random_weights knows the sizes of {', '.join(MODELS)}, not of {config.model}")
    return MODELS[config.model]


def warmed_up(rollout: Rollout, rows: Timed, beside: dict[str, str], ends: bool = False) -> Part:
    """Call every row once; note its peak memory, and whether its latents equal those of the row beside it.

    ends: also what its cache holds after the last block, and in every round how long that block took.
    """
    about: dict[str, dict[str, Any]] = {}
    latents: dict[str, torch.Tensor] = {}

    def with_end(name: str, row: Callable[[], float]) -> float:
        seconds = row()
        about[name]["last_block_ms"] = round(rollout.last_block_ms, 2)
        return seconds

    for name, row in rows.items():
        about[name] = {"gpu_peak_mib": rollout.peak_mib(row)}
        latents[name] = rollout.latents
        if ends:
            about[name]["cache_mib"] = round(rollout.pipeline.cache_bytes / MIB, 1)
    for name in rows:
        about[name]["same_bits"] = torch.equal(latents[name], latents[beside.get(name, next(iter(rows)))])
    if ends:
        rows = {name: partial(with_end, name, row) for name, row in rows.items()}
    return rows, about, beside


def one_model(args: argparse.Namespace, config: RunConfig) -> Iterator[Part]:
    """Yield the rows that --what names: captures, maps and edits beside the plain rollout, policies."""
    rollout = Rollout(config, sizes_of(config, args.random_weights), args.random_weights)
    if args.graphs:
        if rollout.device.type != "cuda":
            raise ConfigError("--graphs replays layers on a GPU, and none is used; leave it out")
        apply_cuda_graphs(rollout.model)
    seconds = rollout.seconds
    if this_rank().count > 1:
        seconds = partial(shared_seconds, rollout, parallel.join(rollout.device))
    requests = capture_requests(config, rollout.sizes.num_layers)
    rows: Timed = {
        name: partial(seconds, capturing(asked))
        for name, asked in requests.items()
        if name in ("plain", *args.what)
    }
    if "maps" in args.what:  # of the last block, all layers and heads
        last, tokens = config.num_frames - 1, rollout.sizes.tokens_per_frame(config.height, config.width)
        of_block = {"granularity": "map", "blocks": [len(config.block_sizes) - 1]}
        patches = {"queries": tuple((last, n * tokens // 4) for n in range(4))}
        words = {"steps": [0], "kinds": ("cross",), "num_words": 20}
        for name, more in (("mean of the block", {}), ("4 patches", patches), ("20 words, pass 0", words)):
            rows[f"maps: {name}"] = partial(seconds, capturing([of_block | more]))
    if "interventions" in args.what:  # of every layer and pass
        half = tuple(range(rollout.sizes.num_heads // 2))
        for name, edit in {
            "knockout of frame 0, one head": Knockout(frames=("first",), heads=(0,), passes="all"),
            "knockout of frame 0, all heads": Knockout(frames=("first",), passes="all"),
            "frame 0 moved by 1, all heads": Move(("first",), offset=1, passes="all"),
            "zero ablation, half of the heads": Ablate("zero", heads=half, passes="all"),
        }.items():
            rows[f"edit: {name}"] = partial(seconds, partial(intervene, edit))
    if "sites" in args.what:
        one_step: dict[str, Any] = {"sites": ("resid_post",), "steps": (0,)}
        rows["without sites in the code"] = partial(seconds, without_sites)
        for name, watcher in {
            "resid_post of all layers, step 0": partial(SiteCapture, **one_step, to=None),
            "resid_post of all layers, step 0, to the host": partial(SiteCapture, **one_step),
            "mean resid_post of a frame, all passes": partial(
                SiteCapture, ("resid_post",), to=None, reduce=mean_of_frames
            ),
        }.items():
            rows[f"sites: {name}"] = partial(seconds, partial(watching, watcher))
    if {*args.what} != {"heads"}:
        yield warmed_up(rollout, rows, {})
    if "policies" in args.what:
        rows = {}
        beside: dict[str, str] = {}
        mass = capturing(requests["mass"])
        for settings, size in POLICIES:
            window = make_policy(name="window", window=size, sink=3)
            own = " ".join(map(str, settings.values()))
            for name, policy in ((f"window {size}", window), (own, make_policy(**settings))):
                rows[name] = partial(seconds, policy=policy)
                rows[f"{name}, mass"] = partial(seconds, mass, policy=policy)
                beside |= {name: f"window {size}", f"{name}, mass": name}
        yield warmed_up(rollout, rows, beside)
    if "heads" in args.what:
        rows = {"full": partial(seconds, policy=make_policy(name="full"))}
        for name, windows in HEADS.items():
            rows[name] = partial(seconds, policy=read_policy(policy_settings(name)))
            for frames, sink in windows:
                beside_it = make_policy("window", window=frames, sink=sink)
                rows[f"window {frames}/{sink}"] = partial(seconds, policy=beside_it)
        yield warmed_up(rollout, rows, {}, ends=True)


@contextmanager
def watching(make: Callable[[], SiteCapture]) -> Iterator[None]:
    """Watch sites while the context lasts, until all is there."""
    capture = make()
    with watched(capture):
        yield
        capture.flush()


@contextmanager
def without_sites() -> Iterator[None]:
    """Let the model's code be as if it visited no site."""
    with ExitStack() as stack:
        for module in (model_code, attention_code, pipeline_code):
            for name, idle in (("visit", lambda site, layer, x, *more: x), ("watchers", tuple)):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, idle))
        stack.enter_context(mock.patch.object(model_code, "wanted", lambda site, layer: False))
        yield


def mean_of_frames(x: torch.Tensor, where: Where) -> torch.Tensor:
    return x.unflatten(1, (len(where.frames), -1)).mean(2)


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
        given = {"num_frames": args.num_frames, "device": config.device}
        settings = load_config(f"configs/{name}.yaml", given)
        sizes = sizes_of(settings, random_weights=True)
        if args.tiny:
            tiny: dict[str, Any] = {"dim": 48, "ffn_dim": 64, "num_heads": 3, "num_layers": 2, "text_dim": 24}
            settings, sizes = replace(settings, height=4, width=4), ModelConfig(**tiny)
        model = rollout.model if rollout and rollout.sizes == sizes else None
        rollout = None  # the model before goes first
        if model:
            model.local_attn_size, model.sink_size = settings.local_attn_size, settings.sink_size
        rollout = Rollout(settings, sizes, True, model)
        mass = capturing(capture_requests(settings, sizes.num_layers)["mass"])
        rows: Timed = {name: rollout.seconds, f"{name}, mass": partial(rollout.seconds, mass)}
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
        self.tree = tree.resolve()
        if not (tree / "wan/config.py").is_file():
            raise ConfigError(f"{tree} has no wan/config.py; --other TREE is a checkout of this repository")
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("worker.py"))],
            env=os.environ | {"PYTHONPATH": str(self.tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert Path(self.ask(settings)["wan"]).resolve() == self.tree / "wan"

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send a question and wait for its answer."""
        assert self.process.stdin and self.process.stdout
        print(json.dumps(question), file=self.process.stdin, flush=True)
        if answer := self.process.stdout.readline():
            return json.loads(answer)
        raise ConfigError(f"the worker of {self.tree} ended; its error stands above")

    def seconds(self, row: str) -> float:
        return self.ask({"row": row, "timed": True})["seconds"]


def compared_trees(args: argparse.Namespace, config: RunConfig, report: dict[str, Any]) -> Iterator[Part]:
    """Yield rows by this tree and by another; say whether latents and captured values have equal bits."""
    settings = {name: value for name, value in asdict(config).items() if name != "base"}
    given = {"config": settings, "random_weights": args.random_weights}
    rows: Timed = {}
    about: Rows = {}
    beside: dict[str, str] = {}
    with ExitStack() as stack:
        workers = {}
        for name, tree in (("other", args.other), ("this", Path(__file__).parents[2])):
            workers[name] = worker = Worker(tree, given)
            stack.callback(worker.process.kill)
            git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True)
            report[f"{name} tree"] = git.stdout.strip()
        for row in (name for name in args.what if name in CAPTURES):
            theirs = f"{row}, other"
            for worker, name in ((workers["other"], theirs), (workers["this"], row)):
                rows[name], beside[name] = partial(worker.seconds, row), theirs
                about[name] = worker.ask({"row": row, "timed": False})
            about[row]["same_bits"] = about[row]["sha256"] == about[theirs]["sha256"]
        yield rows, about, beside


if __name__ == "__main__":
    main(run)
