"""Blocks of a rollout under each cache policy once its window is full: seconds, plain and captured, memory.

On a GPU seconds are of the clock, on a CPU of its processor time.
"""

import gc
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

from experiments.dev.measure_capture import MIB, Rollout, make_rollout
from experiments.extraction import devices
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.modules.attention import ATTENTION_WEIGHT_CAPTURE
from wan.modules.cache_policies import CachePolicy, make_policy
from wan.modules.capture import CaptureRequest
from wan.pipeline import CausalInferencePipeline

WINDOW: dict[str, Any] = {"name": "window", "sink": 3}
PAIRS: list[tuple[dict[str, Any], int]] = [  # a policy, and the window of the size that it sees
    ({"name": "ema_sink", "window": 9, "sink": 3}, 9),
    ({"name": "relative", "window": 12, "sink": 3}, 12),
    ({"name": "two_memories", "window": 12, "sink": 3}, 12),
    ({"name": "memory_bank", "window": 12, "sink": 3, "bank": 3, "interval": 3}, 15),
    ({"name": "deep_sink", "window": 21, "sink": 10}, 21),
    ({"name": "participative", "window": 21, "sink": 10, "budget": 16, "recent": 4}, 21),
    ({"name": "rolling_sink", "window": 21}, 21),
]
RESAMPLES = 2000  # of the bootstrap


@dataclass
class Bench:
    """One model, frames that are given, and how many blocks are timed after them and one more."""

    rollout: Rollout
    blocks: int
    given: int

    def block_seconds(self, policy: CachePolicy, captured: bool) -> float:
        """Mean seconds of a timed block; the first one after the given frames only warms up."""
        old = self.rollout.pipeline
        device, n = self.rollout.noise.device, old.num_frame_per_block
        pipeline = CausalInferencePipeline(old.model, n, cache_policy=policy)
        pipeline.passes, pipeline.timesteps, pipeline.sigmas = old.passes, old.timesteps, old.sigmas
        stamps: list[float] = []
        clock = time.perf_counter if device.type == "cuda" else time.process_time  # others use the CPU too

        def on_block(block: int, latents: torch.Tensor) -> None:
            if block * n >= self.given:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                stamps.append(clock())

        first, rest = self.rollout.noise[:, : self.given], self.rollout.noise[:, self.given :]
        generated = range(self.given // n, self.rollout.noise.shape[1] // n)
        request = CaptureRequest(granularity="frame", blocks=generated)
        capture = ATTENTION_WEIGHT_CAPTURE.capture(request) if captured else nullcontext()
        with capture, devices.threads_for(self.rollout.noise, old.model.config):
            pipeline.inference(
                rest,
                prompt_embeds=self.rollout.prompt_embeds,
                renoise=self.rollout.renoise[:, :, self.given :],
                initial_latent=first,
                on_block=on_block,
            )
        return (stamps[-1] - stamps[0]) / self.blocks

    def seconds_and_peak(self, policy: CachePolicy) -> tuple[float, float]:
        """Mean seconds of a block, and MiB of the GPU's peak over what was held before, 0 on a CPU."""
        device = self.rollout.noise.device
        if device.type != "cuda":
            return self.block_seconds(policy, captured=False), 0.0
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        seconds = self.block_seconds(policy, captured=False)
        return seconds, round((torch.cuda.max_memory_allocated(device) - before) / MIB, 1)

    def cache_mib(self, policy: CachePolicy) -> float:
        """MiB of the policy's keys and values in a rollout without an end."""
        shape = self.rollout.noise.shape
        with torch.device("meta"):
            model = self.rollout.pipeline.model
            cache: Any = model.new_kv_cache(1, 10**6, shape[3], shape[4], policy)
        held = sum(b.nbytes for buffers in (cache.keys, cache.values, cache.raw_keys) for b in buffers)
        return round(held / MIB, 1)


def make_bench(config: RunConfig, random_weights: bool, blocks: int, num_frames: int) -> Bench:
    """A bench whose rollout ends at num_frames.

    Raises ConfigError where no window would be full by then.
    """
    n = config.num_frame_per_block
    least = max(size for _, size in PAIRS) + (blocks + 3) * n  # the first roll, and the warm-up
    if num_frames < least:
        raise ConfigError(f"--num_frames {num_frames} leaves no full window; it must be at least {least}")
    num_frames -= num_frames % n
    rollout, _ = make_rollout(replace(config, num_frames=num_frames), random_weights)
    return Bench(rollout, blocks, num_frames - (blocks + 1) * n)


def measure(bench: Bench, repeats: int) -> list[dict]:
    """One row a policy, after the window of its size; rows take turns in every repeat."""
    policies, against = _policies()
    peaks: dict[str, float] = {}
    plain: dict[str, list[float]] = {name: [] for name in policies}
    captured: dict[str, list[float]] = {name: [] for name in policies}
    for _ in range(repeats):
        for name, policy in policies.items():
            seconds, peaks[name] = bench.seconds_and_peak(policy)
            plain[name].append(seconds)
        for name, policy in policies.items():
            captured[name].append(bench.block_seconds(policy, captured=True))
    return [
        {
            "name": name,
            "policy": policy.describe(),
            "window": against[name],
            "seconds": round(statistics.median(plain[name]), 5),
            **_ratio("times_window", plain[name], plain[against[name]]),
            **_ratio("captured_times_plain", captured[name], plain[name]),
            "peak_mib": peaks[name],
            "cache_mib": bench.cache_mib(policy),
            "all_seconds": [round(seconds, 5) for seconds in plain[name]],
            "all_captured": [round(seconds, 5) for seconds in captured[name]],
        }
        for name, policy in policies.items()
    ]


def _policies() -> tuple[dict[str, CachePolicy], dict[str, str]]:
    """The policies by their names, and for each the window that it is compared with."""
    policies: dict[str, CachePolicy] = {}
    against = {}
    for settings, size in PAIRS:
        window = f"window {size}"
        policies[window], against[window] = make_policy(**WINDOW, window=size), window
        name = " ".join(str(value) for value in settings.values())
        policies[name], against[name] = make_policy(**settings), window
    return policies, against


def _ratio(name: str, over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    """Median over repeats of over / under of one repeat, and its 95 % interval by bootstrap."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    random = Random(0)
    draws = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    low, high = draws[RESAMPLES // 40], draws[-RESAMPLES // 40]
    return {
        name: round(statistics.median(ratios), 4),
        f"{name}_95": [round(low, 4), round(high, 4)] if len(ratios) > 1 else None,
    }
