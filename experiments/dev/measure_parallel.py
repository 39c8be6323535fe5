"""Rollouts of a model by one process and by all of them: seconds, memory, how far the latents differ."""

import argparse
import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.caches.files import replacing
from experiments.dev.measure_capture import random_pipeline
from experiments.extraction import causal, devices
from experiments.running.ranks import Rank, on_own_device
from experiments.running.work_items import WorkItems
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.capture import CaptureRequest
from wan.config import MODELS, ModelConfig, RunConfig
from wan.gathered_calls import gather_calls
from wan.kernels.graphs import apply_cuda_graphs, remove_cuda_graphs
from wan.parallel import apply_head_parallel, check_size, shard_of
from wan.pipeline import CausalInferencePipeline
from wan.process_group import join, wait_for_all

GB = 1e9
EVERYTHING = CaptureRequest(granularity="frame")
ROWS: dict[str, list[CaptureRequest]] = {"nothing": [], "mean logits + mass": [EVERYTHING]}


@dataclass(frozen=True)
class Bench:
    """The ranks, and where and in what dtype each computes."""

    rank: Rank
    group: dist.ProcessGroup
    device: torch.device
    dtype: torch.dtype

    def first_alone(self, work: Callable[[], Any]) -> Any:
        """What work() gives in the first rank, while the others wait."""
        found = work() if self.rank.is_first else None
        wait_for_all(self.group)
        return found

    def max(self, value: float) -> float:
        """The largest of all ranks' values."""
        found = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found.item()


@dataclass
class Inputs:
    """One model's pipeline with noise and text that are the same in all ranks."""

    pipeline: CausalInferencePipeline
    config: RunConfig
    sizes: ModelConfig

    def draw(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Noise, noise between steps and text, on the device; the CPU draws them, which takes its time."""
        parameter = next(self.pipeline.model.parameters())
        config = replace(self.config, seed=seed)
        noise, renoise = causal.draw_noise(config, self.sizes, parameter.dtype, parameter.device)
        text = torch.randn(1, 64, self.sizes.text_dim, generator=torch.Generator().manual_seed(seed))
        return noise, renoise, text.to(noise)

    def roll_out(
        self, requests: list[CaptureRequest], drawn: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> tuple[Tensor, list]:
        noise, renoise, text = drawn or self.draw()
        with ExitStack() as stack, devices.threads_for(noise, self.sizes):
            calls = stack.enter_context(ATTENTION_WEIGHT_CAPTURE.capture(*requests)) if requests else []
            latents = self.pipeline.inference(noise, prompt_embeds=text, renoise=renoise)[1]
        return latents, gather_calls(self.pipeline.model, calls)

    def of(self, num_frames: int) -> "Inputs":
        """The same model with another number of frames."""
        return replace(self, config=replace(self.config, num_frames=num_frames))


def start(args: argparse.Namespace, rank: Rank) -> Bench:
    config = on_own_device(RunConfig(device=args.device), rank)
    device = devices.choose_device(config.device)
    return Bench(rank, join(device), device, devices.choose_dtype(args.dtype, device))


def nccl_version(device: torch.device) -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None


def make_inputs(bench: Bench, args: argparse.Namespace, name: str) -> Inputs:
    free()  # the model before
    sizes = MODELS[name]
    if args.num_layers:
        sizes = replace(sizes, num_layers=args.num_layers)
    config = RunConfig(model=name, num_frames=args.num_frames, height=args.height, width=args.width)
    tokens = [n * sizes.tokens_per_frame(config.height, config.width) for n in config.block_sizes]
    check_size(bench.rank.count, name, sizes.num_heads, tokens)
    return Inputs(random_pipeline(config, sizes, bench.dtype, bench.device), config, sizes)


def parts(bench: Bench, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is measured, what matters most first; the sweep and the error are of the first model."""
    for number, name in enumerate(args.models):
        if "rollouts" in args.parts:
            for found in measure_rollouts(bench, make_inputs(bench, args, name), args):
                yield {"rollouts": {name: found}}
        if "sweep" in args.parts and not number:
            yield measure_sweep(bench, make_inputs(bench, args, name).of(args.sweep_frames), args.sweep)
        if "error" in args.parts and not number:
            inputs = make_inputs(bench, args, name).of(args.accuracy_frames)
            yield {"error": measure_error(bench, inputs, args.ways)}
            del inputs  # the next model's peak is its own
    if "long" in args.parts:
        inputs = make_inputs(bench, args, args.models[-1]).of(args.long_frames)
        yield {"long": measure_long(bench, inputs, args.ways[-1])}


def measure_rollouts(
    bench: Bench, inputs: Inputs, args: argparse.Namespace
) -> Iterator[dict[str, dict[str, Any]]]:
    """One model's rollouts by one GPU and by all of them, in every way that is asked for."""
    alone = bench.first_alone(partial(timed_alone, bench, inputs, args))
    apply_head_parallel(inputs.pipeline.model, bench.group)
    shard = shard_of(inputs.pipeline.model)
    found: dict[str, Any] = {
        "weights_gb": round(weights_gb(inputs), 2),
        "exchange": "peers' memory" if shard and shard.peer_memory else "all-to-all",
        "rows": {},
    }
    for way in args.ways:
        if way == "graphs":
            apply_cuda_graphs(inputs.pipeline.model)
        rows = timed_rows(bench, inputs, args.repeats, is_shared=True)
        if args.profile:
            found.setdefault("profiles", {})[way] = profile(bench, inputs)
        for name, row in rows.items() if bench.rank.is_first else ():
            of_row = found["rows"].setdefault(name, {"alone": alone[name]})
            of_row[way] = row | {"ratio": round(alone[name]["median_seconds"] / row["median_seconds"], 3)}
        yield found


def timed_alone(bench: Bench, inputs: Inputs, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Of each row on one GPU the faster way: one that waits for its host is no measure of two."""
    rows = timed_rows(bench, inputs, args.repeats)
    if "graphs" not in args.ways:
        return rows
    apply_cuda_graphs(inputs.pipeline.model)
    replayed = timed_rows(bench, inputs, args.repeats)
    remove_cuda_graphs(inputs.pipeline.model)
    ways = {name: (row | {"graphs": False}, replayed[name] | {"graphs": True}) for name, row in rows.items()}
    both = {name: sorted(of_row, key=lambda row: row["median_seconds"]) for name, of_row in ways.items()}
    return {name: x | {"other_way_seconds": y["median_seconds"]} for name, (x, y) in both.items()}


def weights_gb(inputs: Inputs) -> float:
    return sum(p.nbytes for p in inputs.pipeline.model.parameters()) / GB


def timed_rows(
    bench: Bench, inputs: Inputs, repeats: int, is_shared: bool = False
) -> dict[str, dict[str, Any]]:
    """Seconds of each row, from inputs on the device to captured numbers on the host, and the GPU's peak.

    host_seconds is when Python had launched it all: where both are equal, the GPU waited for Python. What all
    ranks share takes as long as the slowest. An untimed round comes first, after the first row of one block.
    """
    over_ranks = bench.max if is_shared else float
    found: dict[str, dict[str, Any]] = {}
    drawn = inputs.draw()
    for name, requests in ROWS.items():
        (inputs if not found else inputs.of(inputs.config.block_sizes[0])).roll_out(requests)
        free()
        reset_peak(bench.device)
        seconds, launched = [], []
        for _ in range(repeats):
            if is_shared:
                wait_for_all(bench.group)
            begin = now(bench.device)
            inputs.roll_out(requests, drawn)
            at_host, at_end = time.perf_counter() - begin, now(bench.device) - begin
            launched.append(round(over_ranks(at_host), 4))
            seconds.append(round(over_ranks(at_end), 4))
        found[name] = {
            "seconds": seconds,
            "median_seconds": statistics.median(seconds),
            "host_seconds": statistics.median(launched),
            "peak_gb": round(over_ranks(peak_gb(bench.device)), 2),
        }
    return found


def profile(bench: Bench, inputs: Inputs) -> dict[str, list[str]]:
    """Of a rollout of one block, plain: what took most of the first rank's CPU, and of its GPU."""
    block = inputs.of(inputs.config.block_sizes[0])
    drawn = block.draw()
    if not bench.rank.is_first:
        block.roll_out([], drawn)
        return {}
    with torch.profiler.profile() as seen:
        block.roll_out([], drawn)
        now(bench.device)
    orders = ["cpu", *(["cuda"] if bench.device.type == "cuda" else [])]
    table = seen.key_averages().table
    return {on: table(sort_by=f"self_{on}_time_total", row_limit=25).splitlines() for on in orders}


def measure_error(bench: Bench, inputs: Inputs, ways: Sequence[str]) -> dict[str, Any]:
    """Distance to float32 of a short rollout by one process and by all, and between the two."""

    def by_one() -> tuple[Tensor, Tensor]:
        latents = inputs.roll_out([])[0].float()
        exact = random_pipeline(inputs.config, inputs.sizes, bench.dtype, bench.device)
        exact.model.float()  # the same weights
        return latents, replace(inputs, pipeline=exact).roll_out([])[0]

    one = bench.first_alone(by_one)
    apply_head_parallel(inputs.pipeline.model, bench.group)
    latents = {}
    for way in ways:
        if way == "graphs":
            apply_cuda_graphs(inputs.pipeline.model)
        latents[way] = inputs.roll_out([])[0].float()
    if one is None:
        return {}
    alone, exact = one
    size = exact.square().mean().sqrt()

    def apart(x: Tensor, y: Tensor) -> float:
        return ((x - y).square().mean().sqrt() / size).item()

    return (
        {"frames": inputs.config.num_frames, "alone": apart(alone, exact)}
        | {way: apart(x, exact) for way, x in latents.items()}
        | {"between": max(apart(x, alone) for x in latents.values())}
        | {"ways_differ": any(not torch.equal(x, latents[ways[0]]) for x in latents.values())}
    )


def measure_sweep(bench: Bench, inputs: Inputs, items: int) -> dict[str, Any]:
    """Seconds of the same captured rollouts, claimed one by one, by the first rank and by all."""
    names = [f"seed{seed}" for seed in range(items)]
    folders = [tempfile.mkdtemp(prefix="sweep") if bench.rank.is_first else "" for _ in range(2)]
    dist.broadcast_object_list(folders, src=0, group=bench.group)
    inputs.roll_out([EVERYTHING])  # of a sweep's many rollouts the first one loads and chooses kernels
    wait_for_all(bench.group)

    def sweep(folder: Path, rank: Rank) -> float:
        start = last = time.perf_counter()
        with WorkItems(folder / "items", rank) as claims:
            for name in claims.claim(names, lambda name: (folder / f"{name}.pt").exists()):
                drawn = inputs.draw(int(name.removeprefix("seed")))
                latents, calls = inputs.roll_out([EVERYTHING], drawn)
                with replacing(folder / f"{name}.pt") as file:
                    torch.save({"latents": latents.cpu(), "calls": [call.values for call in calls]}, file)
                last = time.perf_counter()
        return last - start  # who has nothing left to make looks once a second whether others are done

    alone = bench.first_alone(lambda: sweep(Path(folders[0]), Rank()))
    together = bench.max(sweep(Path(folders[1]), bench.rank))
    if alone is None:
        return {}
    same = all(
        Path(folders[0], f"{name}.pt").read_bytes() == Path(folders[1], f"{name}.pt").read_bytes()
        for name in names
    )
    for folder in folders:
        shutil.rmtree(folder)
    return {
        "sweep": {
            "model": inputs.config.model,
            "items": items,
            "num_frames": inputs.config.num_frames,
            "alone_seconds": round(alone, 3),
            "together_seconds": round(together, 3),
            "ratio": round(alone / together, 3),
            "same_bytes": same,
        }
    }


def measure_long(bench: Bench, inputs: Inputs, way: str) -> dict[str, Any]:
    """Seconds and peak of one long rollout by all, which one GPU may not hold; nothing comes before it."""
    apply_head_parallel(inputs.pipeline.model, bench.group)
    if way == "graphs":
        apply_cuda_graphs(inputs.pipeline.model)
    drawn = inputs.draw()
    reset_peak(bench.device)
    begin = now(bench.device)
    inputs.roll_out([], drawn)
    seconds, peak = bench.max(now(bench.device) - begin), bench.max(peak_gb(bench.device))
    found = {"model": inputs.config.model, "num_frames": inputs.config.num_frames, "way": way}
    return found | {"seconds": round(seconds, 3), "peak_gb": round(peak, 2)}


# -- the device ----------------------------------------------------------------------------------------------


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gb(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / GB if device.type == "cuda" else 0.0
