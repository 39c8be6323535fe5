"""Time rollouts in turn in one process: plain, captured, edited, under policies, and decoded meanwhile.

    python experiments/benchmarks/rollouts.py --config_path configs/wan_mini.yaml --repeats 15
    python experiments/benchmarks/rollouts.py --random_weights --device cuda --what plain mass maps
    torchrun --nproc-per-node 2 experiments/benchmarks/rollouts.py --random_weights --what plain mass
    python experiments/benchmarks/rollouts.py --random_weights --graphs --what video
    python experiments/benchmarks/rollouts.py --random_weights --device cuda --what gradients
    python experiments/benchmarks/rollouts.py --write_random_weights wan_models/random --text_encoder

Rows run in turn, round after round, after a round that is not counted. A ratio is the median over rounds of
a row's seconds over those of the first row of its round, with the 95 % interval of that median. By torchrun
all processes make each rollout together, and the slowest one counts. sha256 is of the latents and of all
that was captured: run the same row in two checkouts to compare them. --write_random_weights makes the files
of a release instead, to try what loads and streams a model whose weights cannot be had.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.backends import cudnn
from transformers import UMT5Config, UMT5EncoderModel

from experiments import memory
from experiments.caches.files import require_writable, save_report
from experiments.configs import policy_settings
from experiments.extraction import video
from experiments.provenance import choose_device, choose_dtype, environment
from experiments.running.cli import config_from, count, main, run_parser
from experiments.running.torchrun import end_at_once, this_rank
from experiments.session import load_pipeline, pipeline_of
from wan import backends
from wan.activations import SiteCapture
from wan.cache import read_switches
from wan.capture import ATTENTION_WEIGHT_CAPTURE, CapturedCall, CaptureRequest
from wan.checkpoint import (
    TOKENIZER_DIR,
    UMT5_FILE,
    UMT5_TO_TRANSFORMERS,
    UMT5_XXL,
    read_model_config,
    renamed,
)
from wan.config import MODELS, ModelConfig, RunConfig, load_config
from wan.errors import ConfigError, require_known
from wan.gradients import Gradients
from wan.interventions import Ablate, Knockout, Move, intervene
from wan.model import CausalWanModel
from wan.policies import policy_of, read_policy
from wan.sites import SITES, ActivationSite, Watcher, watched
from wan.vae import VAE, StreamedDecoder
from wan.wings import parallel
from wan.wings.graphs import apply_cuda_graphs

MIB = 2**20
CAPTURES = ("plain", "logits", "mass", "key_curve", "tokens")
INSTRUMENTS = ("maps", "interventions", "sites")
SPREAD = 0.5  # standard deviation of a random VAE's pictures, in -1..1
TOKENIZER = Path("checkpoints/wan-mini/tokenizer")  # umT5's cannot be made up; this one's ids are among its

Rows = dict[str, dict[str, Any]]
Timed = dict[str, Callable[[], float]]
Part = tuple[Timed, Rows]  # rows, and what is known of them before they are timed
Active = Callable[[], AbstractContextManager]  # makes what is on while a model generates: a capture, an edit


def run(argv=None):
    parser = run_parser(__doc__, None)
    flag = parser.add_argument
    flag("--what", nargs="+", choices=[*CAPTURES, *INSTRUMENTS, *GROUPS], default=CAPTURES, help="which rows")
    flag("--random_weights", action="store_true", help="the shapes of the config's model, without any file")
    flag("--repeats", type=count, default=5, help="timed rounds, of all rows in turn")
    flag("--graphs", action="store_true", help="replay layers from CUDA graphs")
    flag("--policies", nargs="+", default=[], help="rows as --cache_policy takes them, and with mass")
    flag("--models", nargs="+", metavar="NAME", help="of configs/; all that name a release")
    flag("--write_random_weights", type=Path, metavar="DIR", help="write a release's files, and time nothing")
    flag("--text_encoder", action="store_true", help="of --write_random_weights: also umT5-XXL, 11 GB")
    args = parser.parse_args(argv)
    config = parallel.on_own_device(config_from(args))
    if args.write_random_weights:
        write_random_weights(args.write_random_weights, config, args.text_encoder)
        return
    groups = [make for name, make in GROUPS.items() if name in args.what]
    if not {*args.what} <= GROUPS.keys():
        groups.append(rollouts)
    time_rows(args, config, (part for group in groups for part in group(args, config)))


def time_rows(args: argparse.Namespace, config: RunConfig, parts: Iterable[Part]) -> None:
    """Time the rows of each part in turn, print them, and write --output_path after every round."""
    rank, device = this_rank(), choose_device(config.device)
    if args.output_path:
        require_writable(args.output_path)
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

    def keep(found: Rows) -> None:
        report["rows"].update(found)
        if rank.is_first and args.output_path:
            save_report(report, args.output_path)

    with torch.no_grad():
        for rows, about in parts:
            keep({name: row for name, row in about.items() if name not in rows})
            found = in_turn(rows, args.repeats, about, keep)
            if rank.is_first:
                print_rows(found | {name: row for name, row in about.items() if name not in rows})
    if rank.count > 1:
        parallel.leave()
        end_at_once()


# --- Rollouts
def rollouts(args: argparse.Namespace, config: RunConfig) -> Iterator[Part]:
    """Yield rollouts of one model: plain, captured, edited, and under the policies that are named."""
    rollout = Rollout(config, args.random_weights, graphs=args.graphs)
    seconds = rollout.seconds
    if this_rank().count > 1:
        seconds = partial(shared_seconds, rollout, parallel.join(rollout.device))
    requests = capture_requests(config, rollout.sizes.num_layers)
    rows: Timed = {"plain": seconds}
    rows |= {name: partial(seconds, capturing(what)) for name, what in requests.items() if name in args.what}
    for group, active in instrumented(rollout):
        if group.partition(":")[0] in args.what:
            rows[group] = partial(seconds, active)
    for name in args.policies:
        policy = read_policy(policy_settings(name))
        rows[name] = partial(seconds, policy=policy)
        rows[f"{name}, mass"] = partial(seconds, capturing(requests["mass"]), policy)
    about = warmed_rollouts(rollout, rows)
    for _ in range(2 if args.graphs else 0):  # whole passes are recorded when they come again
        for row in rows.values():
            row()
    yield rows, about


def warmed_rollouts(rollout: Rollout, rows: Timed) -> Rows:
    """Warm rows up; note bytes of the cache, the last block's time and the bits."""
    # Waiting after each block costs time, so last_block_ms is of the warm-up alone.
    latents, ends = list[Tensor](), list[float]()

    def note_end(block: int, of_block: Tensor) -> None:
        wait()
        ends.append(time.perf_counter())

    def more() -> dict[str, Any]:
        latents.append(rollout.latents)
        return {
            "cache_mib": round(rollout.pipeline.cache_bytes / MIB, 1),
            "last_block_ms": round(1000 * (ends[-1] - ends[-2]), 2) if len(ends) > 1 else None,
            "sha256": rollout.digest(),
            "same_bits": torch.equal(latents[-1], latents[0]),
        }

    rollout.on_block = note_end
    about = warmed_up(rows, more)
    rollout.on_block = None
    return about


def instrumented(rollout: Rollout) -> Iterator[tuple[str, Active]]:
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
        yield f"maps: {name}", capturing([request])
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
    rollout: Rollout, group: dist.ProcessGroup, active: Active = nullcontext, policy: Any = None
) -> float:
    """Return the slowest rank's seconds of a rollout that all make together, with the calls gathered."""
    together(rollout, group)
    return slowest(group, rollout.seconds(partial(gathered, rollout, active), policy))


def together(rollout: Rollout, group: dist.ProcessGroup) -> None:
    """Let all processes of a group make a rollout's videos, and wait until they are here."""
    if rollout.model.head_shard is None:
        parallel.apply_head_parallel(rollout.model, group)
    parallel.wait_for_all(group)


def slowest(group: dist.ProcessGroup, seconds: float) -> float:
    of_all = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(of_all, dist.ReduceOp.MAX, group=group)
    return of_all.item()


@contextmanager
def gathered(rollout: Rollout, active: Active) -> Iterator[Any]:
    """Gather what was captured in the first process, where there are several."""
    with active() as calls:
        yield calls
    if rollout.model.head_shard is not None:
        rollout.model.head_shard.gather_calls(calls or [])


def models(args: argparse.Namespace, config: RunConfig) -> Iterator[Part]:
    """Yield released models' configurations at their full shapes with random weights, plain and captured."""
    rollout: Rollout | None = None
    for name in args.models or released():
        given = {"num_frames": args.num_frames, "device": config.device}
        settings = load_config(f"configs/{name}.yaml", given)
        model = rollout.model if rollout and rollout.config.model == settings.model else None
        # A model is kept for the next configuration of its size, or goes before the next is made.
        rollout = None
        if model:
            model.local_attn_size, model.sink_size = settings.local_attn_size, settings.sink_size
        rollout = Rollout(settings, True, model)
        mass = capturing(capture_requests(settings, rollout.sizes.num_layers)["mass"])
        rows: Timed = {name: rollout.seconds, f"{name}, mass": partial(rollout.seconds, mass)}
        yield rows, warmed_rollouts(rollout, rows)


def released() -> list[str]:
    """Return the configurations that name a release, models of one size together."""
    paths = [path for path in sorted(Path("configs").glob("*.yaml")) if "\nckpt_dir:" in path.read_text()]
    found = {path.stem: load_config(path) for path in paths}
    return sorted((name for name, c in found.items() if c.release), key=lambda name: found[name].model)


# --- The decoder alone
def decoder(args: argparse.Namespace, config: RunConfig) -> Iterator[Part]:
    """Yield diffusers' decoder and ours, at once and in blocks, with dB to diffusers' in float32, no TF32.

    The pictures are those that a random VAE makes of a moving disc, its last layer scaled to SPREAD.
    """
    device = choose_device(config.device)
    vae = vae_of(args, config, device)
    latents = latents_of(vae, config, device)
    # Random weights make pictures of any size: the last layer is scaled until they spread as real ones do.
    with cudnn.flags(enabled=True, allow_tf32=False):
        scale = SPREAD / 2 / by_diffusers(vae, latents[:, :3]).std()
        for parameter in vae.vae.decoder.conv_out.parameters():
            parameter.mul_(scale)
        reference = by_diffusers(vae, latents).cpu()
    half = VAE(deepcopy(vae.vae).to(torch.bfloat16)).to(device)
    made: dict[str, Tensor] = {}

    def timed(name: str, call: Callable[[], Tensor]) -> float:
        return seconds_of(lambda: made.update({name: call()}))

    def in_blocks() -> Tensor:
        streamed = StreamedDecoder(half)
        parts = [video.to_pixels(streamed(block)).cpu() for block in latents.split(config.block_sizes, 1)]
        return torch.cat(parts, 1).movedim(-1, 2).float() / 255

    calls: dict[str, Callable[[], Tensor]] = {
        "diffusers float32": partial(by_diffusers, vae, latents),
        "diffusers bfloat16": partial(by_diffusers, half, latents),
        "ours bfloat16": partial(half.decode, latents),
        "ours bfloat16, block by block": in_blocks,
    }
    rows: Timed = {name: partial(timed, name, call) for name, call in calls.items()}
    about = warmed_up(rows)
    for name, pictures in made.items():
        error = (pictures.cpu().float() - reference).square().mean()
        about[name]["psnr"] = round(-10 * error.clamp_min(1e-12).log10().item(), 2)
    yield rows, about


def vae_of(args: argparse.Namespace, config: RunConfig, device: torch.device) -> VAE:
    """Return the config's VAE, or one of Wan2.1's sizes with random weights and norms that are not all 1."""
    if not args.random_weights:
        return VAE.from_pretrained(config.ckpt_dir, device=device)
    torch.manual_seed(0)
    vae = AutoencoderKLWan().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in vae.named_parameters():
        if name.endswith("gamma"):
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return VAE(vae).to(device)


def latents_of(vae: VAE, config: RunConfig, device: torch.device) -> Tensor:
    """Encode a moving picture, a disc over waves, and give its latents a standard deviation of 1."""
    height, width, frames = 8 * config.height, 8 * config.width, 4 * config.num_frames - 3
    y, x = torch.linspace(-1, 1, height, device=device)[:, None], torch.linspace(-1, 1, width, device=device)
    t = torch.linspace(0, 1, frames, device=device)[:, None, None]
    disc = torch.where((x - t + 0.5).square() + y.square() < 0.1, 1.0, -0.6)
    moving = torch.stack([torch.sin(9 * x + 12 * t + 3 * y * y), disc, torch.cos(20 * x * y + 6 * t)], 1)
    latents = vae.encode(moving[None] / 2 + 0.5)
    return latents / latents.std()


def by_diffusers(vae: VAE, latents: Tensor) -> Tensor:
    """Decode by AutoencoderKLWan, frame by frame -> [B, frames, 3, H, W] in 0..1."""
    z = latents.transpose(1, 2).float() * vae.latents_std + vae.latents_mean
    return vae.vae.decode(z.to(vae.vae.dtype)).sample.float().transpose(1, 2) / 2 + 0.5


# --- Gradients of a pass
@dataclass
class PassClock(Watcher):
    """Time one pass: from its x_t to its x0, with what watchers before this one do there."""

    block: int
    step: int
    seconds: float = 0.0

    def on_activation(self, x: Any, where: ActivationSite) -> None:
        if (where.block, where.step) == (self.block, self.step) and where.site in ("x_t", "x0"):
            wait()
            self.seconds = time.perf_counter() - self.seconds  # begun, and then passed


def gradients(args: argparse.Namespace, config: RunConfig) -> Iterator[Part]:
    """Yield the last block's first pass without kernels of ours, and with gradients at z and resid_post.

    Seconds are of the pass, peaks of the whole rollout. Then gradients at every site, in the second block:
    whether they have the activations' shapes, and are finite.
    """
    rollout, last = Rollout(config, args.random_weights), len(config.block_sizes) - 1
    model, chosen = rollout.model, SiteCapture(("z", "resid_post"), blocks=[last], steps=[0])

    def seconds(*contexts: Active) -> float:
        clock = PassClock(last, 0)
        entered: list[Active] = [*contexts, partial(watched, clock)]  # the clock is asked last
        with ExitStack() as stack:
            for enter in entered:
                stack.enter_context(enter())
            rollout.generate()
        return clock.seconds

    def recorded(to: str | None = None, recompute: bool = False) -> float:
        recorder = recorder_of(chosen, to)
        return seconds(
            partial(watched, recorder), partial(recorder.recomputed, model) if recompute else nullcontext
        )

    imported = ("wan.model.fused_kernels", "wan.cache.fused_kernels")
    # A function: a mock would remember all tensors that it was ever given.
    unfused = [partial(mock.patch, name, lambda *given: None) for name in imported]
    rows: Timed = {
        "pass, unfused": partial(seconds, *unfused),
        "pass": seconds,
        "gradients": recorded,
        "gradients, to the host": partial(recorded, "cpu"),
        "gradients, recomputed": partial(recorded, recompute=True),
    }
    about = warmed_up(rows)
    for name in rows:
        if name.startswith("gradients"):
            how = config, rollout.sizes, chosen, "pass", rollout.dtype, "recomputed" in name
            about[name]["estimated_mib"] = round(memory.bytes_of_graphs(*how) / MIB, 1)
    yield rows, about

    found: Rows = {}
    yield (
        {"gradients at every site": partial(seconds_of, partial(every_site, rollout, found))},
        {"gradients at every site": found},
    )


def recorder_of(chosen: SiteCapture, to: str | None = None) -> Gradients:
    """Record what is chosen, and differentiate each pass when it is complete."""
    where: Any = {"layers": chosen.layers, "blocks": chosen.blocks, "steps": chosen.steps}
    return Gradients(chosen.sites, **where, metric=lambda x0: x0.float().square().mean(), to=to)


def every_site(rollout: Rollout, found: dict[str, Any]) -> None:
    """Note of each site its gradients' shape and dtype, whether that is the activations', and finiteness."""
    last, matrices = rollout.sizes.num_layers - 1, ("scores", "pattern")  # gigabytes a layer
    blocks = [min(1, len(rollout.config.block_sizes) - 1)]
    others = tuple(name for name in SITES if name not in matrices)
    for sites, layers in ((matrices, [last]), (others, [0, last])):
        shapes = SiteCapture(sites, layers, blocks, [0], reduce=lambda x: torch.tensor(x.shape))
        recorder = recorder_of(shapes)
        with watched(shapes, recorder):
            rollout.generate()
        expected = {one.where: one.value.tolist() for one in shapes.kept}
        for one in recorder.found:
            about = found.setdefault(one.where.site, {"is_finite": True, "is_zero": True, "is_shaped": True})
            about |= {"shape": [*one.value.shape], "dtype": str(one.value.dtype).removeprefix("torch.")}
            about["is_finite"] &= bool(one.value.isfinite().all())
            about["is_zero"] &= not one.value.any()
            about["is_shaped"] &= [*one.value.shape] == expected[one.where]


# --- While the model runs
def with_video(args: argparse.Namespace, config: RunConfig) -> Iterator[Part]:
    """Yield noise to latents, to pictures on the host and to an mp4: one after the other, and at once.

    By torchrun the first process decodes, on a GPU of its own where there is one more than processes.
    """
    rollout, rank = Rollout(config, args.random_weights, graphs=args.graphs), this_rank()
    group = parallel.join(rollout.device) if rank.count > 1 else None
    config = replace(config, gpus=rank.count)
    decoders = video.decoders_device(config)
    vae = vae_of(args, config, decoders)
    vae.vae.to(rollout.dtype)
    if group is not None:
        choose_device(config.device)  # the rollout's is the current one again
    mass = capturing(capture_requests(config, rollout.sizes.num_layers)["mass"])
    mp4, append = Path(tempfile.mkdtemp()) / "video.mp4", video.VideoWriter.append
    about: Rows = {}

    def pictures() -> None:
        latents = rollout.generate()
        if rank.is_first:
            video.write_mp4(video.decode(latents.to(decoders), vae).numpy(), mp4)

    def timed(call: Callable[[], Any]) -> float:
        if group is None:
            return seconds_of(call)
        together(rollout, group)
        return slowest(group, seconds_of(call))

    def at_once(name: str, encodes: bool, active: Active) -> None:
        if not rank.is_first:
            with gathered(rollout, active):
                rollout.generate()
            return
        start, arrived = time.perf_counter(), list[float]()

        def append_timed(self: video.VideoWriter, pixels: Any) -> None:
            if encodes:
                append(self, pixels)
            arrived.append(time.perf_counter() - start)

        with (
            mock.patch.object(video, "load_vae", return_value=vae),
            mock.patch.object(video, "require_ffmpeg"),  # not needed for pictures alone
            mock.patch("experiments.caches.mp4.require_ffmpeg"),
            mock.patch.object(video.VideoWriter, "append", append_timed),
            video.LiveVideo(config, mp4) as live,
        ):
            with gathered(rollout, active):
                rollout.generate(lambda _, latents: live.add(latents.clone()))
            live.wait()
            if encodes and live.file is not None:
                live.file.finish()
        about.setdefault(name, {})["first_pictures_s"] = round(arrived[0], 3)

    seconds = rollout.seconds if group is None else partial(shared_seconds, rollout, group)
    rows: Timed = {
        "rollout": seconds,
        "rollout, atlas": partial(seconds, mass),
    }
    shows, about["an mp4"] = {"decoded": False}, {"absent": "imageio_ffmpeg is not installed"}
    if find_spec("imageio_ffmpeg"):
        rows["rollout, then decoder, then mp4"] = partial(timed, pictures)
        shows["decoded, in an mp4"] = True
        del about["an mp4"]
    for shown, encodes in shows.items():
        for more, active in {"": nullcontext, ", atlas": mass}.items():
            name = f"blocks {shown} beside{more}"
            rows[name] = partial(timed, partial(at_once, name, encodes, active))
    warmed_up(rows)  # by --graphs, layers record themselves
    for name, known in warmed_up(rows).items():  # graphs are recorded
        about[name] = about.get(name, {}) | known
    yield rows, about


# --- Turns
def warmed_up(rows: Timed, more: Callable[[], dict[str, Any]] = dict) -> Rows:
    """Call every row once -> its seconds, a GPU's peak memory above the start and in all, and more()."""
    about: Rows = {}
    for name, row in rows.items():
        # Peaks are above what the model and earlier rows hold.
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
        # To and fro: no row always follows the same one.
        for name in list(rows)[:: -1 if number % 2 else 1]:
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
    # As many values may lie outside on each side as coin flips fall there with at most 2.5 %.
    ordered, outside, tail = sorted(values), 0, 0.0
    while (tail := tail + math.comb(len(ordered), outside) / 2 ** len(ordered)) <= 0.025:
        outside += 1
    outside = max(outside - 1, 0)
    return ordered[outside], ordered[-1 - outside]


def print_rows(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a line a row: median seconds, the ratio with its interval, and what else is known of it."""
    numbers = ("median_seconds", "ratio", "ratio_interval", "seconds", "sha256")
    for name, row in rows.items():
        if "absent" in row:
            print(f"    absent  {name}: {row['absent']}", flush=True)
            continue
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

    latents [1, F, C, h, w] and captured, which the active context gave, are those of the last rollout.
    """

    latents: Tensor
    captured: Any = None
    on_block: Any = None

    def __init__(self, config: RunConfig, random_weights: bool, model: Any = None, graphs: bool = False):
        self.config = config
        self.sizes = released_sizes(config) if random_weights else read_model_config(config.ckpt_dir)
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, self.device)
        # Rollouts on a CPU are small ones, and others use its cores.
        torch.set_num_threads(1)
        self.model = model or self.build_model(random_weights)
        if graphs and self.device.type != "cuda":
            raise ConfigError("--graphs replays layers on a GPU, and none is used; leave it out")
        if graphs:
            apply_cuda_graphs(self.model)
        self.pipeline = pipeline_of(self.model, config)
        shape = (1, config.num_frames, self.sizes.in_dim, config.height, config.width)
        self.noise = self.randn(shape, config.seed)
        steps = max(len(config.denoising_step_list), len(config.first_block_steps or ()))
        self.renoise = self.randn((steps - 1, *shape), config.seed + 1)
        self.text = self.randn((1, self.sizes.text_len, self.sizes.text_dim), config.seed + 2)
        self.switches = [
            replace(switch, prompt_embeds=self.text.flip(1))
            for switch in read_switches(config.prompt_schedule)
        ]

    def randn(self, shape: tuple[int, ...], seed: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device, self.dtype)

    def build_model(self, random_weights: bool) -> Any:
        """Return the model with the config's weights, or with random ones made on its device in its dtype."""
        if not random_weights:
            return load_pipeline(self.config, self.sizes, self.dtype, self.device).model
        # On meta first: nothing is made in float32 and cast.
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
        self.pipeline.cache_policy = policy or policy_of(self.config)

        def rolled() -> None:
            with active() as self.captured:
                self.latents = self.generate(self.on_block)

        return seconds_of(rolled)

    def digest(self) -> str:
        """Return the SHA-256 of the last latents and of everything that was captured."""
        found = hashlib.sha256()
        calls = self.captured if isinstance(self.captured, Iterable) else ()
        calls = [call for call in calls if isinstance(call, CapturedCall)]
        captured = [call.values[name] for call in calls for name in sorted(call.values)]
        for tensor in (self.latents, *captured):
            found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


# --- Random weights in the files of a release
def released_sizes(config: RunConfig) -> ModelConfig:
    """Return the sizes of the config's model, one of MODELS."""
    require_known(config.model, MODELS, "no random weights are made for {}")
    return MODELS[config.model]


def write_random_weights(folder: Path, config: RunConfig, text_encoder: bool) -> None:
    """Write a model and a Self-Forcing style checkpoint, and umT5-XXL: names, shapes and dtypes of a release.

    1.3B takes 6 GB for each of the two.
    """
    device, sizes = choose_device(config.device), released_sizes(config)
    dtype = torch.bfloat16 if config.model.endswith("14B") else torch.float32  # as released
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(vars(sizes)), encoding="utf-8")
    with torch.device("meta"):
        model = CausalWanModel(**vars(sizes))
    save_file(random_state(model, dtype, device), folder / "diffusion_pytorch_model.safetensors")
    state = random_state(model, torch.float32, device)
    ema = {f"model.{name}": tensor for name, tensor in state.items()}
    torch.save({"generator_ema": ema}, folder / "self_forcing_dmd.pt")
    if text_encoder:
        with torch.device("meta"):
            encoder = UMT5EncoderModel(UMT5Config(**UMT5_XXL))
        state = random_state(encoder, torch.bfloat16, device)
        native = {theirs: ours for ours, theirs in UMT5_TO_TRANSFORMERS.items()}
        torch.save(renamed(state, native), folder / UMT5_FILE)
        shutil.copytree(TOKENIZER, folder / TOKENIZER_DIR, dirs_exist_ok=True)


GROUPS = {"models": models, "decoder": decoder, "video": with_video, "gradients": gradients}

if __name__ == "__main__":
    main(run)
