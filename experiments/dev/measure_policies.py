"""Blocks of a rollout under each cache policy, once its window is full:
seconds, plain and captured, and memory.
"""

import gc
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from experiments.dev.measure_capture import MIB, Rollout, make_rollout
from experiments.extraction import devices
from wan.config import RunConfig
from wan.modules.attention import ATTENTION_WEIGHT_CAPTURE
from wan.modules.cache_policies import CachePolicy, make_policy
from wan.modules.capture import CaptureRequest
from wan.pipeline import CausalInferencePipeline

WINDOW: dict[str, Any] = {"name": "window", "sink": 3}
PAIRS: list[tuple[dict[str, Any], int]] = [  # a policy, and the window of the size that it sees
    ({"name": "relative", "window": 12, "sink": 3}, 12),
    ({"name": "deep_sink", "window": 21, "sink": 10}, 21),
    ({"name": "participative", "window": 21, "sink": 10, "budget": 16, "recent": 4}, 21),
    ({"name": "ema_sink", "window": 9, "sink": 3}, 9),
    ({"name": "two_memories", "window": 12, "sink": 3}, 12),
    ({"name": "rolling_sink", "window": 21}, 21),
    ({"name": "memory_bank", "window": 12, "sink": 3, "bank": 3, "interval": 3}, 15),
]
EVERYTHING = [CaptureRequest(granularity="frame")]


@dataclass
class Bench:
    """One model, frames that fill every window, and how many blocks are timed after them."""

    rollout: Rollout
    blocks: int
    given: int

    def block_seconds(self, policy: CachePolicy, captured: bool) -> float:
        """Mean seconds of a block after the given ones."""
        old = self.rollout.pipeline
        device, n = self.rollout.noise.device, old.num_frame_per_block
        pipeline = CausalInferencePipeline(old.model, n, cache_policy=policy)
        pipeline.timesteps, pipeline.sigmas = old.timesteps, old.sigmas
        stamps: list[float] = []

        def on_block(block: int, latents: torch.Tensor) -> None:
            if (block + 1) * n >= self.given:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                stamps.append(time.perf_counter())

        first, rest = self.rollout.noise[:, : self.given], self.rollout.noise[:, self.given :]
        capture = ATTENTION_WEIGHT_CAPTURE.capture(*EVERYTHING) if captured else nullcontext()
        with capture, devices.threads_for(self.rollout.noise, old.model.config):
            pipeline.inference(
                rest,
                prompt_embeds=self.rollout.prompt_embeds,
                renoise=self.rollout.renoise[:, :, self.given :],
                initial_latent=first,
                on_block=on_block,
            )
        return (stamps[-1] - stamps[0]) / (len(stamps) - 1)

    def memory(self, policy: CachePolicy) -> dict[str, float]:
        """MiB: of the GPU's peak over what is held before, and of the policy's keys and values."""
        device, model = self.rollout.noise.device, self.rollout.pipeline.model
        peak = 0.0
        if device.type == "cuda":
            gc.collect()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            self.block_seconds(policy, captured=False)
            peak = (torch.cuda.max_memory_allocated(device) - before) / MIB
        shape = self.rollout.noise.shape
        with torch.device("meta"):
            cache: Any = model.new_kv_cache(1, 10**6, shape[3], shape[4], policy)
        held = sum(b.nbytes for buffers in (cache.keys, cache.values, cache.raw_keys) for b in buffers)
        return {"peak_mib": round(peak, 1), "cache_mib": round(held / MIB, 1)}


def make_bench(config: RunConfig, random_weights: bool, blocks: int) -> Bench:
    n = config.num_frame_per_block
    largest = max(size for _, size in PAIRS) + 2 * n  # two more, so that the first roll is over
    given = -(-largest // n) * n
    rollout, _ = make_rollout(replace(config, num_frames=given + blocks * n), random_weights)
    return Bench(rollout, blocks, given)


def measure(bench: Bench, repeats: int) -> list[dict]:
    """One row a policy, windows first; rows take turns in every repeat."""
    sizes = sorted({size for _, size in PAIRS})
    policies = {f"window {size}": make_policy(**WINDOW, window=size) for size in sizes}
    against = {f"window {size}": f"window {size}" for size in sizes}
    for settings, size in PAIRS:
        name = " ".join(str(value) for value in settings.values())
        policies[name], against[name] = make_policy(**settings), f"window {size}"
    memory = {name: bench.memory(policy) for name, policy in policies.items()}  # also warms up
    seconds: dict[tuple[str, bool], list[float]] = {}
    for _ in range(repeats):
        for name, policy in policies.items():
            for captured in (False, True):
                seconds.setdefault((name, captured), []).append(bench.block_seconds(policy, captured))
    median = {key: statistics.median(values) for key, values in seconds.items()}
    return [
        {
            "name": name,
            "policy": policy.describe(),
            "window": against[name],
            "seconds": round(median[name, False], 5),
            "times_window": round(median[name, False] / median[against[name], False], 4),
            "captured_times_plain": round(median[name, True] / median[name, False], 4),
            **memory[name],
        }
        for name, policy in policies.items()
    ]
