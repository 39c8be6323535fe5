"""Time what this repository does, in rows that take turns in one process.

    python experiments/benchmarks/rows.py --config_path configs/wan_mini.yaml --repeats 15
    python experiments/benchmarks/rows.py --random_weights --what plain logits mass edits pipeline
    torchrun --nproc-per-node 2 experiments/benchmarks/rows.py --random_weights --graphs

A ratio is the median over rounds of a row's seconds over those of the first row of its group, with the 95 %
interval of that median. By torchrun all processes make each rollout, and the slowest one counts. sha256 is of
latents and of what was captured. python_seconds is what a loop of Python took between the rounds: short rows
wait for Python, and a shared core doubles it. With PYTHONPATH=OTHER these rows time another checkout's code.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from scipy.stats import quantile_test
from torch import Tensor, nn

from experiments import session
from experiments.benchmarks import video_models
from experiments.caches import files, outputs
from experiments.configs import policy_settings
from experiments.extraction import video
from experiments.provenance import choose_device, choose_dtype, environment
from experiments.running import cli, torchrun
from experiments.running.parameters import NOTEBOOKS
from wan import backends, diffusers_attention, diffusers_capture, errors, interventions, kernels
from wan.activations import SiteCapture
from wan.cache import read_switches
from wan.capture import ATTENTION_WEIGHT_CAPTURE, CaptureRequest
from wan.checkpoint import read_model_config
from wan.config import MODELS, ModelConfig, RunConfig
from wan.gradients import Gradients
from wan.model import CausalWanModel
from wan.noise import num_draws
from wan.policies import read_policy
from wan.sites import watched
from wan.vae import VAE, WIDE_SIZES
from wan.wings import parallel
from wan.wings.graphs import apply_cuda_graphs

MIB = 2**20
FRAME = CaptureRequest(granularity="frame")  # mean logits and mass, of every layer and pass
WORD = CaptureRequest(kinds=("cross",), granularity="words", words=(((3,),),))  # of the prompt's fourth token
OF_ROLLOUTS = ("plain", "logits", "mass", "words", "maps", "edits", "sites", "gradients", "video")

Active = Callable[[], AbstractContextManager[Any]]  # enters what is on during a rollout: a capture, an edit
Group = Callable[[argparse.Namespace, RunConfig], Iterator["list[Row]"]]
Table = dict[str, dict[str, Any]]


@dataclass
class Row:
    """What is measured, a function that does it once -> seconds, and one that returns what else to note."""

    name: str
    measured: str
    seconds: Callable[[], float]
    facts: Callable[[], files.Record] = dict
    optional: bool = False  # of another's package: an error makes it absent
    warms_up: bool = True  # a command of its own does not


def run(argv=None):
    groups: dict[str, Group] = dict.fromkeys(OF_ROLLOUTS, rollouts)
    groups |= {"pipeline": pipeline, "pipeline_words": pipeline_words}
    groups |= {"transformers": transformers, "notebooks": notebooks}
    parser = row_parser(__doc__, groups, default=["plain", "logits", "mass"])
    more = "more rows, as --cache_policy takes them"
    parser.add_argument("--policies", nargs="+", metavar="POLICY", default=[], help=more)
    args = parser.parse_args(argv)
    time_groups(args, [groups[name] for name in args.what])


def row_parser(doc: str, names: Iterable[str], default: list[str]) -> argparse.ArgumentParser:
    """Return a parser with the flags of a run and those of rows."""
    parser = cli.run_parser(doc, suffixes=(".json",))
    flag = parser.add_argument
    flag("--what", nargs="+", choices=[*names], default=default, help="which rows")
    flag("--random_weights", action="store_true", help="the shapes of the config's model, without any file")
    flag("--repeats", type=cli.count, default=5, help="timed rounds, of all rows of a group in turn")
    flag("--graphs", action="store_true", help="replay our layers from CUDA graphs, on a GPU")
    return parser


# --- Turns
def time_groups(args: argparse.Namespace, groups: Iterable[Group]) -> None:
    """Time groups of rows one after the other; print each, and write --output_path after each."""
    config, rank = parallel.on_own_device(cli.config_from(args)), torchrun.this_rank()
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    if args.output_path:
        files.require_writable(args.output_path)
        if rank.is_first:
            outputs.require_replaceable(
                args.output_path, outputs.Contents("report"), overwrite=args.overwrite
            )
    table: Table = {}
    report = {
        "model": config.model,
        "dtype": str(dtype).removeprefix("torch."),
        "attention": backends.kernel_name(device, dtype),
        "gpus": rank.count,
        "environment": environment(device),  # command, machine, date, commit
        "rows": table,
    }
    with torch.no_grad():
        for group in dict.fromkeys(groups):
            for rows in group(args, config):
                # Graphs of whole passes are recorded when a pass comes again.
                table |= in_turn(rows, args.repeats, warm_ups=3 if args.graphs else 1)
                if args.output_path and rank.is_first:
                    files.save_report(report, args.output_path)
    if rank.count > 1:
        parallel.leave()
        torchrun.end_at_once()


def in_turn(rows: list[Row], repeats: int, warm_ups: int = 1) -> Table:
    """Call every row once a round; return its seconds, their median, and its ratio to the first row."""
    # 1. Calls that are not counted
    table: Table = {}
    for row in rows:
        table[row.name] = {"measured": row.measured}
        try:
            calls = warm_ups
            if not row.warms_up:
                calls = 0
            table[row.name] |= warmed_up(row, calls)
        except Exception as error:
            if not row.optional:
                raise
            table[row.name]["absent"] = errors.reason_of(error)
    for thread in threading.enumerate():  # kernels that compile would take turns with the first rounds
        if thread.name == kernels.THREAD:
            thread.join()
    # 2. Rounds
    timed = [row for row in rows if "absent" not in table[row.name]]
    seconds: dict[str, list[float]] = {row.name: [] for row in timed}
    loops = list[float]()
    for number in range(repeats):
        loops.append(seconds_of(python_loop))
        order = timed if number % 2 == 0 else timed[::-1]  # to and fro: no row always follows the same one
        for row in order:
            seconds[row.name].append(row.seconds())
    # 3. Ratios within a round
    for name, of_row in seconds.items():
        ratios = [a / b for a, b in zip(of_row, seconds[timed[0].name], strict=True)]
        low, high = min(ratios), max(ratios)
        if repeats > 5:  # the range of fewer is no 95 % interval, but all that is known
            low, high = map(float, quantile_test(ratios, p=0.5).confidence_interval(0.95))
        table[name] |= {
            "median_seconds": round(statistics.median(of_row), 6),
            "beside": timed[0].name,
            "ratio": round(statistics.median(ratios), 4),
            "ratio_interval": [round(low, 4), round(high, 4)],
            "seconds": [round(x, 6) for x in of_row],
            "python_seconds": round(statistics.median(loops), 4),
        }
    if torchrun.this_rank().is_first:
        for name, facts in table.items():
            numbers = "{median_seconds} s, {ratio} x {ratio_interval}" if name in seconds else "{absent}"
            print(f"{name}: {numbers.format(**facts)}", flush=True)
    return table


def warmed_up(row: Row, warm_ups: int) -> dict[str, Any]:
    """Call a row; return its facts and a GPU's peak memory, above what was held before and in all.

    The first call counts: it compiles kernels, and an experiment finds where a model's frames lie.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds = [row.seconds() for _ in range(warm_ups)]
    peak = torch.cuda.max_memory_allocated()
    memory = {"gpu_peak_mib": round((peak - before) / MIB, 1), "used_mib": round(peak / MIB, 1)}
    return memory | {"first_seconds": round(sum(seconds[:1]), 3)} | row.facts()


def python_loop() -> None:
    """Add numbers, always as many: the seconds say how fast the host runs Python now."""
    total = 0
    for number in range(200_000):
        total += number * number % 7


def seconds_of(call: Callable[[], Any]) -> float:
    """Call once and return the seconds until the GPU is done."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


# --- A model and its inputs
def sizes_of(config: RunConfig) -> ModelConfig:
    """Return the sizes of the config's model, which need no files where its name is known."""
    return MODELS.get(config.model) or read_model_config(config.ckpt_dir)


def vae_of(config: RunConfig, random_weights: bool, device: torch.device) -> VAE:
    """Return the config's VAE, or one of its real sizes with random weights."""
    if not random_weights:
        return VAE.from_pretrained(config.ckpt_dir, device=device)
    torch.manual_seed(0)
    if sizes_of(config).in_dim == WIDE_SIZES["z_dim"]:
        vae = AutoencoderKLWan(**WIDE_SIZES)
    else:
        vae = AutoencoderKLWan()  # diffusers' defaults are Wan2.1's
    return VAE(vae.eval().requires_grad_(False)).to(device)


def randomize(module: nn.Module) -> None:
    """Fill parameters with normal noise of std 0.02 (a norm's weights around 1), which their names decide."""
    module.eval().requires_grad_(False)
    for name, values in module.named_parameters():
        generator = torch.Generator(values.device).manual_seed(zlib.crc32(name.encode()))
        values.normal_(0, 0.02, generator=generator)
        if "norm" in name and name.endswith("weight"):
            values.add_(1)


def sha256_of(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 of tensors' bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Rollout:
    """A model on its device, with noise and random prompt states; all processes of torchrun make it together.

    latents [1, F, C, h, w] and calls, those that the active context captured, are of the last rollout.
    """

    def __init__(self, args: argparse.Namespace, config: RunConfig, graphs: bool = False):
        self.config, self.sizes, self.random_weights = config, sizes_of(config), args.random_weights
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, self.device)
        torch.set_num_threads(1)  # rollouts on a CPU are small ones, and others use its cores
        # 1. The model, with weights of a file or random ones: on meta first, so that nothing is cast
        if args.random_weights:
            window = {"local_attn_size": config.local_attn_size, "sink_size": config.sink_size}
            with torch.device("meta"):
                self.model = CausalWanModel(**vars(self.sizes), **window)
            randomize(self.model.to(self.dtype).to_empty(device=self.device))
        else:
            self.model = session.load_pipeline(config, self.sizes, self.dtype, self.device).model
        if graphs and self.device.type != "cuda":
            raise errors.ConfigError("--graphs replays layers on a GPU, and none is used; leave it out")
        if graphs:
            apply_cuda_graphs(self.model)
        self.group = None
        if torchrun.this_rank().count > 1:
            self.group = parallel.join(self.device)
            parallel.apply_head_parallel(self.model, self.group)
        # 2. Inputs
        self.pipeline = session.pipeline_of(self.model, config)
        shape = (1, config.num_frames, self.sizes.in_dim, config.height, config.width)
        self.noise = self.randn(shape, config.seed)
        self.renoise = self.randn((num_draws(config) - 1, *shape), config.seed + 1)
        self.text = self.randn((1, self.sizes.text_len, self.sizes.text_dim), config.seed + 2)
        switches = read_switches(config.prompt_schedule)
        self.switches = [replace(switch, prompt_embeds=self.text.flip(1)) for switch in switches]
        self.on_block: Callable[[int, Tensor], None] | None = None

    def randn(self, shape: tuple[int, ...], seed: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device, self.dtype)

    def generate(self, active: Active = nullcontext) -> None:
        """Generate one video; the first process gets all captured calls."""
        with active() as captured:
            self.latents = self.pipeline.inference(
                self.noise,
                prompt_embeds=self.text,
                renoise=self.renoise,
                prompt_schedule=self.switches,
                on_block=self.on_block,
            )[1]
        self.calls = captured if isinstance(captured, list) else []
        if self.model.head_shard is not None:
            self.model.head_shard.gather_calls(self.calls)

    def seconds(self, active: Active) -> float:
        """Generate one video; return the seconds of the slowest process, until its host has everything."""
        if self.group is None:
            return seconds_of(partial(self.generate, active))
        parallel.wait_for_all(self.group)
        seconds = torch.tensor([seconds_of(partial(self.generate, active))], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=self.group)
        return seconds.item()

    @cached_property
    def vae(self) -> VAE:
        """A decoder on the GPU that the rollout leaves free, where there is one."""
        device = video.decoders_device(replace(self.config, gpus=torchrun.this_rank().count))
        vae = vae_of(self.config, self.random_weights, device)
        choose_device(self.config.device)  # the rollout's is the current one again
        vae.vae.to(self.dtype)
        vae.files = []
        return vae

    def facts(self) -> dict[str, Any]:
        captured = [call.values[name] for call in self.calls for name in sorted(call.values)]
        cache_mib = round(self.pipeline.cache_bytes / MIB, 1)
        return {"cache_mib": cache_mib, "sha256": sha256_of([self.latents, *captured])}

    def row(self, name: str, measured: str, active: Active) -> Row:
        """Return a row of whole rollouts."""
        return Row(name, measured, partial(self.seconds, active), self.facts)


# --- Rollouts, and what is on meanwhile
def rollouts(args: argparse.Namespace, config: RunConfig) -> Iterator[list[Row]]:
    """Yield rollouts of one model: plain, with what is asked for, and under the policies that are named."""
    rollout = Rollout(args, config, args.graphs)
    rows = rollout_rows(rollout, args.what)
    for name in args.policies:
        policy = partial(
            mock.patch.object, rollout.pipeline, "cache_policy", read_policy(policy_settings(name))
        )
        rows.append(rollout.row(name, "noise to latents under a cache policy", policy))
    yield rows


def rollout_rows(rollout: Rollout, what: Iterable[str]) -> list[Row]:
    """Return a plain row and those of captures, edits, gradients and videos that are asked for."""
    last, capture = len(rollout.config.block_sizes) - 1, ATTENTION_WEIGHT_CAPTURE.capture
    logits, mass = partial(capture, replace(FRAME, mass=False)), partial(capture, FRAME)
    maps = partial(capture, CaptureRequest(granularity="map", blocks=[last]))
    gradients = partial(differentiated, rollout.model, last)
    one_head = interventions.Knockout(frames=("first",), heads=(0,), passes="all")
    moved = interventions.Move(("first",), offset=1, passes="all")
    contexts: dict[str, tuple[str, Active]] = {
        "plain": ("noise to latents", nullcontext),
        "logits": ("mean logits of all calls", logits),
        "mass": ("mean logits and mass of all calls", mass),
        "words": ("the map of one word, in all layers and passes", partial(capture, WORD)),
        "maps": ("of the last block", maps),
        "edits: knockout of frame 0, one head": (
            "every layer and pass",
            partial(interventions.intervene, one_head),
        ),
        "edits: frame 0 moved by 1, all heads": (
            "every layer and pass",
            partial(interventions.intervene, moved),
        ),
        "sites": ("resid_post of all layers at step 0, copied to the host", residual_stream),
        "gradients": ("at z and resid_post of the last block's first pass", gradients),
        "gradients: to the host": ("and copied there", partial(gradients, to="cpu")),
        "gradients: recomputed": ("activations computed again", partial(gradients, recompute=True)),
        "video": ("noise to an mp4", partial(live_video, rollout)),
        "video: mass": ("and mean logits and mass", partial(live_video, rollout, mass)),
    }
    return [
        rollout.row(name, measured, active)
        for name, (measured, active) in contexts.items()
        if name.partition(":")[0] in ("plain", *what)
    ]


@contextmanager
def residual_stream() -> Iterator[None]:
    """Capture resid_post of all layers at step 0, until all of it is on the host."""
    capture = SiteCapture(("resid_post",), steps=(0,))
    with watched(capture):
        yield
        capture.flush()


@contextmanager
def differentiated(
    model: CausalWanModel, block: int, to: str | None = None, recompute: bool = False
) -> Iterator[None]:
    """Compute gradients of a block's first pass at z and resid_post of all layers."""
    chosen: files.Record = {"blocks": [block], "steps": [0], "to": to}
    recorder = Gradients(("z", "resid_post"), metric=lambda x0: x0.float().square().mean(), **chosen)
    recomputed = recorder.recomputed(model) if recompute else nullcontext()
    with watched(recorder), recomputed:
        yield


@contextmanager
def live_video(rollout: Rollout, active: Active = nullcontext) -> Iterator[Any]:
    """Decode and encode a rollout's blocks to an mp4 while the model runs.

    By torchrun the first process does, on a GPU of its own where there is one more than processes.
    """
    if not torchrun.this_rank().is_first:
        with active() as captured:
            yield captured
        return
    config = replace(rollout.config, gpus=torchrun.this_rank().count)
    with (
        TemporaryDirectory() as folder,
        mock.patch.object(video, "load_vae", return_value=rollout.vae),
        video.LiveVideo(config, Path(folder) / "video.mp4") as mp4,
        mock.patch.object(rollout, "on_block", lambda block, latents: mp4.add(latents.clone())),
        active() as captured,
    ):
        yield captured
        mp4.save([rollout.latents], "")


# --- A pipeline of diffusers
class RandomPipeline:
    """diffusers' WanPipeline of the config's sizes with random weights; latents are its last ones."""

    def __init__(self, args: argparse.Namespace, config: RunConfig):
        self.config, self.sizes, self.device = config, sizes_of(config), choose_device(config.device)
        dtype = choose_dtype(config.dtype, self.device)
        same = {name: getattr(self.sizes, name) for name in ("ffn_dim", "num_layers", "freq_dim", "text_dim")}
        heads = {"num_attention_heads": self.sizes.num_heads, "attention_head_dim": self.sizes.head_dim}
        channels = {"in_channels": self.sizes.in_dim, "out_channels": self.sizes.out_dim}
        with torch.device(self.device):
            self.transformer = WanTransformer3DModel(**same, **heads, **channels).to(dtype)
            self.text = torch.randn(1, self.sizes.text_len, self.sizes.text_dim, dtype=dtype)
        randomize(self.transformer)
        scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
        )
        self.pipe = WanPipeline(None, None, None, scheduler, self.transformer)
        self.pipe.set_progress_bar_config(disable=True)

    def sample(self, *requests: CaptureRequest, steps: int = 2) -> None:
        """Sample two steps without guidance, from the same noise each time, and capture what is requested."""
        with ExitStack() as stack:
            if requests:
                stack.enter_context(diffusers_capture.capture_diffusers(self.pipe, *requests))
            self.latents = self.pipe(
                prompt_embeds=self.text,
                generator=torch.Generator().manual_seed(self.config.seed),
                height=self.config.pixels_per_latent * self.config.height,
                width=self.config.pixels_per_latent * self.config.width,
                num_frames=4 * self.config.num_frames - 3,
                num_inference_steps=steps,
                guidance_scale=1.0,
                output_type="latent",
            ).frames

    def row(self, name: str, measured: str, call: Callable[[], None], optional: bool = False) -> Row:
        """Return a row of calls of the pipeline."""
        seconds = partial(seconds_of, call)
        return Row(name, measured, seconds, lambda: {"sha256": sha256_of([self.latents])}, optional)


def pipeline(args: argparse.Namespace, config: RunConfig) -> Iterator[list[Row]]:
    """Yield WanPipeline by attention backend: plain, and with mean logits and mass of a layer or all."""
    sampler, measured = RandomPipeline(args, config), "2 steps, mean logits and mass"
    of_one_layer, every = (partial(sampler.sample, replace(FRAME, layers=layers)) for layers in ([1], None))

    def by_second_call() -> None:  # as where no kernel of the backend returns the log-sum-exp
        with mock.patch.object(diffusers_attention, "kernel_of", lambda call: None):
            every()

    for backend in ("native", "_native_cudnn") if sampler.device.type == "cuda" else ("native",):
        sampler.transformer.set_attention_backend(backend)
        title = f"WanPipeline, {backend.removeprefix('_native_')}"
        yield [
            sampler.row(f"{title}, plain", "2 steps", sampler.sample),
            sampler.row(f"{title}, layer 1", measured, of_one_layer),
            sampler.row(f"{title}, all layers", measured, every),
            sampler.row(f"{title}, all layers, second attention call", measured, by_second_call),
        ]


def pipeline_words(args: argparse.Namespace, config: RunConfig) -> Iterator[list[Row]]:
    """Yield WanPipeline in ten steps: plain, and with the maps of one word and of three, mean over heads."""
    sampler = RandomPipeline(args, config)
    three = replace(WORD, words=(((3,), (5, 6), (9,)),))
    by_head = replace(WORD, by_head=True)
    sample = partial(sampler.sample, steps=10)
    yield [
        sampler.row("WanPipeline in 10 steps, plain", "10 steps", sample),
        sampler.row("WanPipeline in 10 steps, one word", "of all layers", partial(sample, WORD)),
        sampler.row("WanPipeline in 10 steps, three words", "of all layers", partial(sample, three)),
        sampler.row("WanPipeline in 10 steps, one word by head", "of all layers", partial(sample, by_head)),
    ]


# --- Video transformers of diffusers
@dataclass
class Forward:
    """A forward of a transformer, under a capture of what is requested."""

    model: nn.Module
    arguments: video_models.Arguments
    requests: Sequence[CaptureRequest] = ()
    output: Tensor | None = None  # of the last one

    def __call__(self) -> None:
        with ExitStack() as stack:
            if self.requests:
                stack.enter_context(diffusers_capture.capture_diffusers(self.model, *self.requests))
            self.output = self.model(**self.arguments)[0]

    def facts(self) -> files.Record:
        assert self.output is not None
        return {"sha256": sha256_of([self.output])}

    def row(self, name: str) -> Row:
        measured = f"a forward of {video_models.LAYERS} layers"
        return Row(name, measured, partial(seconds_of, self), self.facts)


def transformers(args: argparse.Namespace, config: RunConfig) -> Iterator[list[Row]]:
    """Yield a forward of each model of VIDEO_MODELS: plain, and with mean logits and mass of every head."""
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    for title, sizes in video_models.VIDEO_MODELS.items():
        model, arguments = video_models.made(sizes, device, dtype)
        plain, every_head = Forward(model, arguments), Forward(model, arguments, [FRAME])
        rows = [plain.row(f"{title}, plain"), every_head.row(f"{title}, every head")]
        yield rows
        del model, arguments, plain, every_head, rows  # the next model takes their memory
        if device.type == "cuda":
            torch.cuda.empty_cache()


# --- A notebook for each layer
ATLAS, FURTHER = "cache/atlas.pt", 2  # layers after the first


def notebooks(args: argparse.Namespace, config: RunConfig) -> Iterator[list[Row]]:
    """Yield the first layer of each notebook that run_notebooks.py runs, beside each further one."""
    if not Path(ATLAS).is_file():
        raise errors.ConfigError(f"{ATLAS} is not there; run: bash experiments/quickstart.sh")
    for notebook in NOTEBOOKS:
        stem = notebook.removesuffix(".ipynb")
        first, further = partial(cpu_seconds, notebook, 0), partial(seconds_of_further, notebook)
        yield [
            Row(f"{stem}, first layer", "CPU seconds of the command", first, warms_up=False),
            Row(f"{stem}, each further layer", "CPU seconds", further, warms_up=False),
        ]


def cpu_seconds(notebook: str, last_layer: int) -> float:
    """Return the CPU seconds of run_notebooks.py and its kernel for layers 0..last_layer, on one thread."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with TemporaryDirectory() as folder:
        command = [sys.executable, "experiments/run_notebooks.py", notebook, ATLAS, f"0-{last_layer}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*command, "--output_dir", folder], env=environment, check=True, stdout=subprocess.DEVNULL
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def seconds_of_further(notebook: str) -> float:
    """Return what each further layer adds to the command of one layer, in CPU seconds."""
    return (cpu_seconds(notebook, FURTHER) - cpu_seconds(notebook, 0)) / FURTHER


if __name__ == "__main__":
    cli.main(run)
