"""Roll out one model again and again, time rows in turn, and keep the numbers as JSON."""

import argparse
import hashlib
import json
import math
import statistics
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments.caches.files import replacing, require_writable
from experiments.extraction import causal
from experiments.extraction.devices import choose_device, choose_dtype
from experiments.extraction.provenance import environment
from experiments.figures.style import save_svg
from experiments.running.cli import Parser, count, run_parser
from wan.backends import kernel_name
from wan.capture import ATTENTION_WEIGHT_CAPTURE, CapturedCall, CaptureRequest
from wan.checkpoint import read_model_config
from wan.config import MODELS, ModelConfig, RunConfig, load_config
from wan.errors import ConfigError

MIB = 2**20
Rows = dict[str, dict[str, Any]]
Timed = dict[str, Callable[[], float]]
Active = Callable[[], AbstractContextManager]  # makes what is on while a model generates: a capture, an edit


def benchmark_parser(description: str) -> Parser:
    """Return the flags of a run with --random_weights and --repeats."""
    parser = run_parser(description, None)
    flag = parser.add_argument
    flag("--random_weights", action="store_true", help="the shapes of the config's model, without any file")
    flag("--repeats", type=count, default=5, help="timed rounds, of all rows in turn")
    return parser


def finding_parser(description: str, output_path: str) -> Parser:
    """Return the flags of a script that makes a published finding."""
    parser = Parser(description=description.splitlines()[0])
    flag = parser.add_argument
    flag("--config_path", default="configs/wan_mini.yaml")
    flag("--device", default="auto")
    flag("--output_path", type=Path, default=Path(output_path))
    flag("--figures", type=Path, default=Path("notebooks/figures"), help="folder of the SVGs")
    flag("--ckpt_dir", help="directory of another miniature, with self_forcing_mini.pt in it")
    flag("--judges", type=count, help="processes that judge videos")
    return parser


def miniature_config(args: argparse.Namespace) -> RunConfig:
    """Return the config of --config_path, --device and --ckpt_dir, in float32."""
    settings = {"device": args.device, "dtype": "float32"}
    if args.ckpt_dir:
        weights = f"{args.ckpt_dir}/self_forcing_mini.pt"
        settings |= {"ckpt_dir": args.ckpt_dir, "checkpoint_path": weights}
    return load_config(args.config_path, settings)


def save_finding(
    args: argparse.Namespace, report: Mapping[str, Any], figures: Mapping[str, Figure] | None = None
) -> None:
    """Write a report and its figures, and print their paths."""
    made = {} if "environment" in report else {"environment": environment(choose_device(args.device))}
    save_report(made | dict(report), args.output_path)
    print(args.output_path)
    for name, figure in (figures or {}).items():
        print(save_svg(figure, args.figures / f"{name}.svg"))


def new_report(config: RunConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Return the head of a report: what is rolled out, and on what. CacheError where it cannot be written."""
    if args.output_path:
        require_writable(args.output_path)
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


def save_report(report: Mapping[str, Any], path: str | Path | None) -> None:
    """Write a report as JSON; do nothing without a path."""
    if path:
        with replacing(Path(path)) as file:
            file.write((json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode())


def in_turn(
    rows: Timed,
    repeats: int,
    about: Mapping[str, dict[str, Any]] | None = None,
    keep: Callable[[Rows], None] = lambda found: None,
) -> Rows:
    """Call every row once a round; return its seconds, their median, and its ratio to the first row.

    A ratio is the median over rounds of a row's seconds over those of the first row in the same round.
    Fields of about[row] stand before the numbers. keep gets the results after every round.
    """
    first = next(iter(rows))
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    found: Rows = {}
    for number in range(repeats):
        for name in list(rows)[:: -1 if number % 2 else 1]:  # to and fro: no row always follows the same one
            seconds[name].append(rows[name]())
        for name, taken in seconds.items():
            ratios = [a / b for a, b in zip(taken, seconds[first], strict=True)]
            found[name] = (about or {}).get(name, {}) | {
                "median_seconds": round(statistics.median(taken), 6),
                "beside": first,
                "ratio": round(statistics.median(ratios), 4),
                "ratio_interval": [round(bound, 4) for bound in median_interval(ratios)],
                "seconds": [round(x, 6) for x in taken],
            }
        keep(found)
    return found


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a median by order statistics; of fewer than six values their range."""
    ordered, outside, tail = sorted(values), 0, 0.0
    while (tail := tail + math.comb(len(ordered), outside) / 2 ** len(ordered)) <= 0.025:
        outside += 1
    outside = max(outside - 1, 0)
    return ordered[outside], ordered[-1 - outside]


def print_rows(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a line a row: median seconds, the ratio with its interval, and what else is known of it."""
    numbers = ("median_seconds", "beside", "ratio", "ratio_interval", "seconds", "sha256")
    for name, row in rows.items():
        low, high = row["ratio_interval"]
        more = "".join(f", {field} {value}" for field, value in row.items() if field not in numbers)
        ratio = f"{row['ratio']:.3f} ({low:.3f}-{high:.3f}) x {row['beside']}"
        print(f"{row['median_seconds']:10.5f} s  {name}: {ratio}{more}", flush=True)


def wait() -> None:
    """Wait for the GPU, where one is used."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], Any]) -> float:
    """Call once and return the seconds until the GPU is done."""
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


# --- What is timed
def sizes_of(config: RunConfig, random_weights: bool) -> ModelConfig:
    """Return the sizes of a config's model; of one with random weights without any file."""
    if not random_weights:
        return read_model_config(config.ckpt_dir)
    if config.model not in MODELS:
        raise ConfigError(f"--random_weights knows the sizes of {', '.join(MODELS)}, not of {config.model}")
    return MODELS[config.model]


def capture_requests(config: RunConfig, num_layers: int) -> dict[str, list[dict[str, Any]]]:
    """Return the arguments of `capture` of every row."""
    last, everything = len(config.block_sizes) - 1, {"granularity": "frame"}
    half = {"granularity": "token", "token_dtype": torch.float16}
    return {
        "plain": [],
        "logits": [everything | {"mass": False}],
        "mass": [everything],
        "key_curve": [everything, {"granularity": "key", "blocks": [last]}],
        "tokens": [half | {"layers": [num_layers // 2], "blocks": [last], "steps": [0]}],
    }


def capturing(requests: list[dict[str, Any]]) -> Active:
    """Return what captures these requests; nothing is active without any."""
    asked = [CaptureRequest(**fields) for fields in requests]
    return (lambda: ATTENTION_WEIGHT_CAPTURE.capture(*asked)) if asked else nullcontext


def fill_(values: Tensor, name: str) -> Tensor:
    """Fill a parameter with normal noise of std 0.02 (a norm's weights around 1), which its name decides."""
    generator = torch.Generator(values.device).manual_seed(zlib.crc32(name.encode()))
    values.normal_(0, 0.02, generator=generator)
    return values.add_(1) if "norm" in name and name.endswith("weight") else values


class Rollout:
    """A model on its device, with noise and random prompt states.

    latents [1, F, C, h, w] and kept, which the active context gave, are those of the last rollout.
    """

    latents: Tensor
    kept: Any = None

    def __init__(self, config: RunConfig, random_weights: bool, model: Any = None):
        self.config, self.sizes = config, sizes_of(config, random_weights)
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, self.device)
        torch.set_num_threads(1)  # rollouts on a CPU are small ones, and others use its cores
        self.model = model or self.build_model(random_weights)
        self.pipeline = causal.pipeline_of(self.model, config)
        shape = (1, config.num_frames, self.sizes.in_dim, config.height, config.width)
        self.noise = self.randn(shape, config.seed)
        steps = max(len(config.denoising_step_list), len(config.first_block_steps or ()))
        self.renoise = self.randn((steps - 1, *shape), config.seed + 1)
        self.text = self.randn((1, self.sizes.text_len, self.sizes.text_dim), config.seed + 2)
        self.switches = [replace(switch, prompt_embeds=self.text.flip(1)) for switch in config.switches]

    def randn(self, shape: tuple[int, ...], seed: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device, self.dtype)

    def build_model(self, random_weights: bool) -> Any:
        """Return the model with the config's weights, or with random ones made on its device in its dtype."""
        if not random_weights:
            return causal.load_pipeline(self.config, self.sizes, self.dtype, self.device).model
        model = causal.blank_model(self.config, self.sizes, self.dtype, self.device)
        for name, parameter in model.named_parameters():
            fill_(parameter, name)
        return model

    def generate(self, **more: Any) -> Tensor:
        more |= {"prompt_embeds": self.text, "renoise": self.renoise, "prompt_schedule": self.switches}
        return self.pipeline.inference(self.noise, **more)[1]

    def seconds(self, active: Active = nullcontext, policy: Any = None) -> float:
        """Generate one video and return the seconds until the device and the host have everything."""
        self.pipeline.cache_policy = policy or self.config.policy

        def rolled() -> None:
            with active() as self.kept:
                self.latents = self.generate()

        return seconds_of(rolled)

    def peak_mib(self, row: Callable[[], float]) -> float:
        """Call a row and return the GPU's peak memory above the start; 0 on a CPU."""
        if self.device.type != "cuda":
            row()
            return 0.0
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        row()
        return round((torch.cuda.max_memory_allocated(self.device) - before) / MIB, 1)

    def digest(self) -> str:
        """Return the SHA-256 of the last latents and of everything that was captured."""
        found = hashlib.sha256()
        kept = self.kept if isinstance(self.kept, Iterable) else ()
        calls = [call for call in kept if isinstance(call, CapturedCall)]
        captured = [call.values[name] for call in calls for name in sorted(call.values)]
        for tensor in (self.latents, *captured):
            found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()
