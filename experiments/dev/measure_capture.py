"""A rollout, plain and while being captured: seconds, peak memory, and whether its latents stay the same."""

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from experiments.dev.process_memory import gpu_peak, host_peak
from experiments.dev.random_weights import fill_
from experiments.dev.tables import median_interval
from experiments.extraction import causal, devices
from experiments.extraction.prompt_embeds import encode_prompts
from experiments.extraction.provenance import environment
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.backends import kernel_name
from wan.capture import CaptureRequest
from wan.checkpoint import read_model_config
from wan.config import MODELS, ModelConfig, RunConfig
from wan.errors import ConfigError
from wan.model import CausalWanModel
from wan.pipeline import CausalInferencePipeline

MIB = 2**20


def rows(config: RunConfig, num_layers: int) -> dict[str, list[CaptureRequest]]:
    """What is captured, by the name of its row."""
    last, layer = len(config.block_sizes) - 1, num_layers // 2
    everything = CaptureRequest(granularity="frame")
    return {
        "plain": [],
        "mean logits": [CaptureRequest(granularity="frame", mass=False)],
        "mean logits + mass": [everything],
        "mean logits + mass + key curve": [everything, CaptureRequest(granularity="key", blocks=[last])],
        f"tokens of layer {layer}, last block, pass 0": [
            CaptureRequest(layers=[layer], blocks=[last], steps=[0], token_dtype=torch.float16)
        ],
    }


@dataclass(frozen=True)
class Result:
    seconds: float
    calls: int  # captured
    latents: torch.Tensor


@dataclass
class Rollout:
    """One model with its inputs, run again and again."""

    pipeline: CausalInferencePipeline
    noise: torch.Tensor
    renoise: torch.Tensor
    prompt_embeds: torch.Tensor

    def run(self, requests: list[CaptureRequest]) -> Result:
        device = self.noise.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        with ExitStack() as stack, devices.threads_for(self.noise, self.pipeline.model.config):
            calls = stack.enter_context(ATTENTION_WEIGHT_CAPTURE.capture(*requests)) if requests else []
            latents = self.pipeline.inference(
                self.noise, prompt_embeds=self.prompt_embeds, renoise=self.renoise
            )[1]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return Result(time.perf_counter() - start, len(calls), latents)

    def latents(self, requests: list[CaptureRequest]) -> torch.Tensor:
        """[B, F, C, h, w]."""
        return self.run(requests).latents

    def run_and_watch_memory(self, requests: list[CaptureRequest]) -> tuple[Result, dict[str, float]]:
        """The same, and the peaks above the start, in MiB, of the GPU's tensors and of this process."""
        device = self.noise.device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        before = gpu_peak(device).get("gpu_peak_bytes", 0)
        with host_peak() as host:
            ran = self.run(requests)
        gpu = gpu_peak(device).get("gpu_peak_bytes", 0) - before
        return ran, {"gpu_mib": round(gpu / MIB, 1), "host_mib": round(host["host_private_bytes"] / MIB, 1)}


def random_pipeline(
    config: RunConfig, sizes: ModelConfig, dtype: torch.dtype, device: torch.device
) -> CausalInferencePipeline:
    """The model's shapes with random weights, made on the device."""
    with torch.device("meta"):
        model = CausalWanModel(
            **vars(sizes), local_attn_size=config.local_attn_size, sink_size=config.sink_size
        )
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)  # never in float32
    generator = torch.Generator(device).manual_seed(0)
    for name, value in model.named_parameters():
        fill_(value, name, generator)
    return causal.pipeline_of(model, config)


def make_rollout(config: RunConfig, random_weights: bool) -> tuple[Rollout, ModelConfig]:
    device = devices.choose_device(config.device, config.offload)
    dtype = devices.choose_dtype(config.dtype, device)
    if random_weights:
        if config.model not in MODELS:
            raise ConfigError(
                f"--random_weights knows the sizes of {', '.join(MODELS)}, not of {config.model}"
            )
        sizes = MODELS[config.model]
        pipeline = random_pipeline(config, sizes, dtype, device)
        embeds = torch.randn(1, sizes.text_len, sizes.text_dim, device=device, dtype=dtype)
    else:
        sizes = read_model_config(config.ckpt_dir)
        pipeline = causal.load_pipeline(config, sizes, dtype, device)
        embeds, _ = encode_prompts(config, [config.prompt], sizes, dtype, device)[config.prompt]
    noise, renoise = causal.draw_noise(config, sizes, dtype, device)
    return Rollout(pipeline, noise, renoise, embeds), sizes


def described(config: RunConfig, random_weights: bool, noise: torch.Tensor) -> dict[str, Any]:
    """What every report of rollouts says of them."""
    return {
        "model": config.model,
        "random_weights": random_weights,
        "num_frames": config.num_frames,
        "dtype": str(noise.dtype).removeprefix("torch."),
        "attention": kernel_name(noise.device, noise.dtype),
        "environment": environment(noise.device),
    }


def measure(
    rollout: Rollout,
    table: dict[str, list[CaptureRequest]],
    repeats: int,
    keep: Callable[[dict[str, dict]], None] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, dict]:
    """Medians over repeats, rows in turn; memory from an untimed round before.

    bit_identical: the latents equal those of a plain rollout. keep gets the rows so far after each one, say a
    line.
    """
    plain = rollout.run([]).latents
    peaks: dict[str, dict] = {}
    same = dict.fromkeys(table, True)
    seconds: dict[str, list[float]] = {name: [] for name in table}
    for name, requests in table.items():
        ran, memory = rollout.run_and_watch_memory(requests)
        same[name] &= torch.equal(ran.latents, plain)
        peaks[name] = {"calls": ran.calls} | memory
        say(f"{name}: {ran.seconds:.3f} s, not counted")
    results: dict[str, dict] = {}
    for _ in range(repeats):
        for name, requests in table.items():
            ran = rollout.run(requests)
            same[name] &= torch.equal(ran.latents, plain)
            seconds[name].append(round(ran.seconds, 4))
            results = {name: _row(name, seconds, same, peaks) for name in table if seconds[name]}
            say(f"{name}: {ran.seconds:.3f} s")
            if keep:
                keep(results)
    return results


def _row(name: str, seconds: dict[str, list[float]], same: dict[str, bool], peaks: dict[str, dict]) -> dict:
    """A row beside the plain one.

    times_plain is the median over rounds of its seconds over those of the plain rollout of its round.
    """
    rounds = zip(seconds[name], seconds["plain"], strict=False)  # its last one may be under way
    ratios = [of_row / plain for of_row, plain in rounds]
    over = {
        f"{kind}_mib_over_plain": round(peaks[name][f"{kind}_mib"] - peaks["plain"][f"{kind}_mib"], 1)
        for kind in ("gpu", "host")
    }
    return peaks[name] | {
        "seconds": list(seconds[name]),
        "median_seconds": statistics.median(seconds[name]),
        "bit_identical": same[name],
        "times_plain": round(statistics.median(ratios), 3),
        "times_plain_interval": [round(bound, 3) for bound in median_interval(ratios)],
        **over,
    }
