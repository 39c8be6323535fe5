"""Roll out one model again and again, time rows in turn, and keep the numbers as JSON."""

import argparse
import gc
import hashlib
import json
import math
import re
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
from torch import Tensor, nn

from experiments.caches.files import replacing
from experiments.extraction.devices import choose_device, choose_dtype
from experiments.extraction.provenance import environment
from experiments.figures.style import save_svg
from experiments.running.cli import Parser, count
from experiments.session import load_pipeline, pipeline_of
from wan.capture import ATTENTION_WEIGHT_CAPTURE, CapturedCall, CaptureRequest
from wan.checkpoint import read_model_config
from wan.config import MODELS, RunConfig, load_config
from wan.errors import ConfigError
from wan.model import CausalWanModel

MIB = 2**20
Rows = dict[str, dict[str, Any]]
Timed = dict[str, Callable[[], float]]
Part = tuple[Timed, Rows]  # rows, and what is known of them before they are timed
Active = Callable[[], AbstractContextManager]  # makes what is on while a model generates: a capture, an edit


def finding_parser(description: str, output_path: str, several: bool = False) -> Parser:
    """Return the flags of a script that makes a published finding, of one miniature or of several."""
    parser = Parser(description=description.splitlines()[0])
    flag = parser.add_argument
    flag("--config_path", default="configs/wan_mini.yaml")
    flag("--device", default="auto")
    flag("--output_path", type=Path, default=Path(output_path))
    flag("--figures", type=Path, default=Path("notebooks/figures"), help="folder of the SVGs")
    other = "directory of another miniature, with self_forcing_mini.pt in it"
    flag("--ckpt_dir", nargs="+" if several else None, help=other)
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


def save_report(report: Mapping[str, Any], path: str | Path | None) -> None:
    """Write a report as JSON, a list of numbers in a line; do nothing without a path."""
    if path:
        text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
        lists = r"\[\n\s+([^][{}]+)\n\s+\]"
        text = re.sub(lists, lambda one: "[" + re.sub(r"\n\s+", " ", one[1]) + "]", text)
        with replacing(Path(path)) as file:
            file.write(text.encode())


def warmed_up(rows: Timed, more: Callable[[], dict[str, Any]] = dict) -> Rows:
    """Call every row once -> its seconds, a GPU's peak memory above the start and in all, and more()."""
    about: Rows = {}
    for name, row in rows.items():
        before = 0
        if torch.cuda.is_initialized():
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        about[name] = {"first_seconds": round(row(), 3)}
        if torch.cuda.is_initialized():
            peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            used, reserved = (round(peak / MIB, 1) for peak in peaks)
            own = round(used - before / MIB, 1)
            about[name] |= {"gpu_peak_mib": own, "used_mib": used, "reserved_mib": reserved}
        about[name] |= more()
    return about


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
    numbers = ("median_seconds", "ratio", "ratio_interval", "seconds", "sha256")
    for name, row in rows.items():
        more = "".join(f", {field} {value}" for field, value in row.items() if field not in numbers)
        ratio = "{} ({}-{})".format(row["ratio"], *row["ratio_interval"])
        print(f"{row['median_seconds']:10.5f} s  {name}: {ratio} x{more}", flush=True)


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
def capture_requests(config: RunConfig, num_layers: int) -> dict[str, list[CaptureRequest]]:
    """Return what is asked for in every row."""
    last, frame = len(config.block_sizes) - 1, CaptureRequest(granularity="frame")
    tokens = CaptureRequest([num_layers // 2], blocks=[last], steps=[0], granularity="token")
    return {
        "plain": [],
        "logits": [replace(frame, mass=False)],
        "mass": [frame],
        "key_curve": [frame, CaptureRequest(granularity="key", blocks=[last])],
        "tokens": [replace(tokens, token_dtype=torch.float16)],
    }


def capturing(requests: Sequence[CaptureRequest]) -> Active:
    """Return what captures these requests; nothing is active without any."""
    return (lambda: ATTENTION_WEIGHT_CAPTURE.capture(*requests)) if requests else nullcontext


def fill_(values: Tensor, name: str) -> Tensor:
    """Fill a parameter with normal noise of std 0.02 (a norm's weights around 1), which its name decides."""
    generator = torch.Generator(values.device).manual_seed(zlib.crc32(name.encode()))
    values.normal_(0, 0.02, generator=generator)
    return values.add_(1) if "norm" in name and name.endswith("weight") else values


def random_state(module: nn.Module, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return a tensor on the CPU for each parameter of a module on meta, drawn in float32 on the device."""
    return {
        name: fill_(torch.empty(parameter.shape, device=device), name).to(dtype).cpu()
        for name, parameter in module.named_parameters()
    }


class Rollout:
    """A model on its device, with noise and random prompt states.

    latents [1, F, C, h, w] and kept, which the active context gave, are those of the last rollout.
    """

    latents: Tensor
    kept: Any = None
    on_block: Any = None

    def __init__(self, config: RunConfig, random_weights: bool, model: Any = None):
        if random_weights and config.model not in MODELS:
            raise ConfigError(f"--random_weights knows {', '.join(MODELS)}, not {config.model}")
        self.config = config
        self.sizes = MODELS[config.model] if random_weights else read_model_config(config.ckpt_dir)
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, self.device)
        torch.set_num_threads(1)  # rollouts on a CPU are small ones, and others use its cores
        self.model = model or self.build_model(random_weights)
        self.pipeline = pipeline_of(self.model, config)
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
            return load_pipeline(self.config, self.sizes, self.dtype, self.device).model
        window = {"local_attn_size": self.config.local_attn_size, "sink_size": self.config.sink_size}
        with torch.device("meta"):
            model = CausalWanModel(**vars(self.sizes), **window)
        model.to(self.dtype).to_empty(device=self.device).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            fill_(parameter, name)
        return model

    def generate(self, on_block: Any = None) -> Tensor:
        more = {"renoise": self.renoise, "prompt_schedule": self.switches, "on_block": on_block}
        return self.pipeline.inference(self.noise, prompt_embeds=self.text, **more)[1]

    def seconds(self, active: Active = nullcontext, policy: Any = None) -> float:
        """Generate one video and return the seconds until the device and the host have everything."""
        self.pipeline.cache_policy = policy or self.config.policy

        def rolled() -> None:
            with active() as self.kept:
                self.latents = self.generate(self.on_block)

        return seconds_of(rolled)

    def digest(self) -> str:
        """Return the SHA-256 of the last latents and of everything that was captured."""
        found = hashlib.sha256()
        kept = self.kept if isinstance(self.kept, Iterable) else ()
        calls = [call for call in kept if isinstance(call, CapturedCall)]
        captured = [call.values[name] for call in calls for name in sorted(call.values)]
        for tensor in (self.latents, *captured):
            found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()
