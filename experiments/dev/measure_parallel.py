"""Rollouts of a model by one process and by all of them: seconds, memory, how far the latents differ."""

import argparse
import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.caches.atomic_files import replacing
from experiments.dev.measure_capture import random_pipeline
from experiments.extraction import causal, devices
from experiments.running.claims import Claims
from experiments.running.ranks import Rank, on_own_device
from wan.config import MODELS, ModelConfig, RunConfig
from wan.gathered_calls import gather_calls
from wan.modules.attention import ATTENTION_WEIGHT_CAPTURE
from wan.modules.capture import CaptureRequest
from wan.parallel import apply_head_parallel, check_size
from wan.pipeline import CausalInferencePipeline
from wan.process_group import join, leave, wait_for_all

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

    def roll_out(self, requests: list[CaptureRequest], seed: int = 0) -> tuple[Tensor, list]:
        parameter = next(self.pipeline.model.parameters())
        config = replace(self.config, seed=seed)
        noise, renoise = causal.draw_noise(config, self.sizes, parameter.dtype, parameter.device)
        text = torch.randn(1, 64, self.sizes.text_dim, generator=torch.Generator().manual_seed(seed))
        with ExitStack() as stack, devices.threads_for(noise, self.sizes):
            calls = stack.enter_context(ATTENTION_WEIGHT_CAPTURE.capture(*requests)) if requests else []
            latents = self.pipeline.inference(noise, prompt_embeds=text.to(noise), renoise=renoise)[1]
        return latents, gather_calls(self.pipeline.model, calls)


def start(args: argparse.Namespace, rank: Rank) -> Bench:
    config = on_own_device(RunConfig(device=args.device), rank)
    device = devices.choose_device(config.device)
    return Bench(rank, join(device), device, devices.choose_dtype(args.dtype, device))


def finish() -> None:
    leave()


def nccl_version(device: torch.device) -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None


def make_inputs(bench: Bench, args: argparse.Namespace, name: str) -> Inputs:
    sizes = MODELS[name]
    if args.num_layers:
        sizes = replace(sizes, num_layers=args.num_layers)
    config = RunConfig(model=name, num_frames=args.num_frames, height=args.height, width=args.width)
    tokens = [n * sizes.tokens_per_frame(config.height, config.width) for n in config.block_sizes]
    check_size(bench.rank.count, name, sizes.num_heads, tokens)
    return Inputs(random_pipeline(config, sizes, bench.dtype, bench.device), config, sizes)


def parts(bench: Bench, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is measured, model by model, the sweep after the first."""
    for number, name in enumerate(args.models):
        inputs = make_inputs(bench, args, name)
        alone = bench.first_alone(partial(timed_rows, bench, inputs, args.repeats))
        sweep = None if number else measure_sweep(bench, inputs, args)
        error = None if number else measure_error(bench, inputs, args)
        apply_head_parallel(inputs.pipeline.model, bench.group)
        together = timed_rows(bench, inputs, args.repeats, bench.max)
        found: dict[str, Any] = {"weights_gb": round(weights_gb(inputs), 2)}
        if bench.rank.is_first:
            found["rows"] = {row: joined(alone[row], together[row]) for row in ROWS}
        yield {"rollouts": {name: found}} | (sweep or {})
        if error is not None:
            yield {"error": error(inputs)}
        del inputs
        free()


def weights_gb(inputs: Inputs) -> float:
    return sum(p.nbytes for p in inputs.pipeline.model.parameters()) / GB


def joined(alone: dict[str, Any], together: dict[str, Any]) -> dict[str, Any]:
    ratio = alone["median_seconds"] / together["median_seconds"]
    return {"alone": alone, "together": together, "ratio": round(ratio, 3)}


def timed_rows(
    bench: Bench, inputs: Inputs, repeats: int, over_ranks: Callable[[float], float] = float
) -> dict[str, dict[str, Any]]:
    """Seconds of each row and the GPU's peak, after an untimed round; over_ranks joins those of all ranks."""
    found: dict[str, dict[str, Any]] = {}
    for name, requests in ROWS.items():
        seconds = []
        free()
        reset_peak(bench.device)
        for repeat in range(repeats + 1):
            begin = now(bench.device)
            inputs.roll_out(requests)
            if repeat:
                seconds.append(round(over_ranks(now(bench.device) - begin), 4))
        peak = round(over_ranks(peak_gb(bench.device)), 2)
        median = statistics.median(seconds)
        found[name] = {"seconds": seconds, "median_seconds": median, "peak_gb": peak}
    return found


def measure_error(
    bench: Bench, inputs: Inputs, args: argparse.Namespace
) -> Callable[[Inputs], dict[str, float]]:
    """Distance to float32 of a short rollout by one process; the function returned adds that by all."""
    inputs.config = replace(inputs.config, num_frames=args.accuracy_frames)

    def by_one() -> tuple[Tensor, Tensor]:
        latents = inputs.roll_out([])[0].float()
        exact = Inputs(inputs.pipeline, inputs.config, inputs.sizes)
        exact.pipeline = random_pipeline(inputs.config, inputs.sizes, bench.dtype, bench.device)
        exact.pipeline.model.float()  # the same weights
        return latents, exact.roll_out([])[0]

    one = bench.first_alone(by_one)
    inputs.config = replace(inputs.config, num_frames=args.num_frames)
    free()

    def by_all(inputs: Inputs) -> dict[str, float]:
        inputs.config = replace(inputs.config, num_frames=args.accuracy_frames)
        latents = inputs.roll_out([])[0].float()
        if one is None:
            return {}
        exact = one[1]
        size = exact.square().mean().sqrt()
        far = [((x - exact).square().mean().sqrt() / size).item() for x in (one[0], latents)]
        between = ((latents - one[0]).square().mean().sqrt() / size).item()
        return {"frames": args.accuracy_frames, "alone": far[0], "together": far[1], "between": between}

    return by_all


def measure_sweep(bench: Bench, inputs: Inputs, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the same captured rollouts, claimed one by one, by the first rank and by all."""
    names = [f"seed{seed}" for seed in range(args.sweep)]
    folders = [tempfile.mkdtemp(prefix="sweep") if bench.rank.is_first else "" for _ in range(2)]
    dist.broadcast_object_list(folders, src=0, group=bench.group)

    def sweep(folder: Path, rank: Rank) -> float:
        start = time.perf_counter()
        with Claims(folder / "items", rank) as claims:
            for name in claims.to_make(names, lambda name: (folder / f"{name}.pt").exists()):
                latents, calls = inputs.roll_out([EVERYTHING], int(name.removeprefix("seed")))
                with replacing(folder / f"{name}.pt") as file:
                    torch.save({"latents": latents.cpu(), "calls": [call.values for call in calls]}, file)
        return time.perf_counter() - start

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
            "items": len(names),
            "alone_seconds": round(alone, 3),
            "together_seconds": round(together, 3),
            "ratio": round(alone / together, 3),
            "same_bytes": same,
        }
    }


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
