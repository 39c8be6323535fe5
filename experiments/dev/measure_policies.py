"""Blocks of a rollout under each cache policy once its window is full: seconds, plain and captured, memory.

On a GPU seconds are of the clock, on a CPU of its processor time.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch

from experiments.dev.measure_capture import MIB, Rollout, make_rollout
from experiments.extraction import devices
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.cache import CachePolicy
from wan.capture import CaptureRequest
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.policies import make_policy

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
WARM_UP = (
    2  # blocks before the timed ones: participative compresses in every second one, in shapes of its own
)


@dataclass
class Bench:
    """One model, frames that are given, and how many blocks are timed after them and WARM_UP more.

    least frames fill every window.
    """

    rollout: Rollout
    blocks: int
    given: int
    least: int

    @property
    def device(self) -> torch.device:
        return self.rollout.noise.device

    def compile_kernels(self, policies: Iterable[CachePolicy]) -> None:
        """On a GPU one short captured rollout of every policy: a kernel's first call takes a second."""
        if self.device.type == "cuda":
            for policy in policies:
                self.block_seconds(policy, captured=True, given=self.least)

    def block_seconds(self, policy: CachePolicy, captured: bool, given: int | None = None) -> float:
        """Mean seconds of a timed block after given frames (None: those of the bench)."""
        old, given = self.rollout.pipeline, self.given if given is None else given
        device, n = self.device, old.num_frame_per_block
        end = given + (WARM_UP + self.blocks) * n
        pipeline = copy(old)
        pipeline.cache_policy = policy
        stamps: list[float] = []
        clock = time.perf_counter if device.type == "cuda" else time.process_time  # others use the CPU too

        def on_block(block: int, latents: torch.Tensor) -> None:
            if block * n >= given + (WARM_UP - 1) * n:  # the end of the last one that warms up
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                stamps.append(clock())

        first, rest = self.rollout.noise[:, :given], self.rollout.noise[:, given:end]
        generated = range(given // n, end // n)
        request = CaptureRequest(granularity="frame", blocks=generated)
        capture = ATTENTION_WEIGHT_CAPTURE.capture(request) if captured else nullcontext()
        with capture, devices.threads_for(self.rollout.noise, old.model.config):
            pipeline.inference(
                rest,
                prompt_embeds=self.rollout.prompt_embeds,
                renoise=self.rollout.renoise[:, :, given:end],
                initial_latent=first,
                on_block=on_block,
            )
        return (stamps[-1] - stamps[0]) / self.blocks

    def seconds_and_peak(self, policy: CachePolicy) -> tuple[float, float]:
        """Mean seconds of a block, and MiB of the GPU's peak over what was held before, 0 on a CPU."""
        device = self.device
        if device.type != "cuda":
            return self.block_seconds(policy, captured=False), 0.0
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        seconds = self.block_seconds(policy, captured=False)
        return seconds, round((torch.cuda.max_memory_allocated(device) - before) / MIB, 1)

    def cache_mib(self, policy: CachePolicy) -> float:
        """MiB of the policy's keys and values in a rollout without an end; nothing is allocated."""
        noise, pipeline = self.rollout.noise, self.rollout.pipeline
        sizes = pipeline.model.config
        slots, raw_slots, _ = policy.capacity(10**6, pipeline.num_frame_per_block)
        buffers = 2 * slots + raw_slots
        token = sizes.num_layers * sizes.dim * noise.element_size()
        return round(buffers * sizes.tokens_per_frame(*noise.shape[3:]) * token / MIB, 1)


def make_bench(config: RunConfig, random_weights: bool, blocks: int, num_frames: int) -> Bench:
    """A bench whose rollout ends at num_frames.

    Raises ConfigError where no window would be full by then.
    """
    n = config.num_frame_per_block
    full = max(size for _, size in PAIRS) + n  # the first roll
    full += -full % n
    least = full + (WARM_UP + blocks) * n
    if num_frames < least:
        raise ConfigError(f"--num_frames {num_frames} leaves no full window; it must be at least {least}")
    num_frames -= num_frames % n
    rollout, _ = make_rollout(replace(config, num_frames=num_frames), random_weights)
    return Bench(rollout, blocks, num_frames - (WARM_UP + blocks) * n, full)


@dataclass
class Taken:
    """What was measured of one policy so far, a value a repeat."""

    plain: list[float] = field(default_factory=list)
    captured: list[float] = field(default_factory=list)
    peak: float = 0.0
    cache: float = 0.0


def measure(bench: Bench, repeats: int, keep: Callable[[list[dict]], None]) -> list[dict]:
    """One row a policy, after the window of its size; rows take turns in every repeat.

    keep gets the rows so far after each: a run that is killed leaves them.
    """
    policies, against = _policies()
    taken = {name: Taken(cache=bench.cache_mib(policy)) for name, policy in policies.items()}
    bench.compile_kernels(policies.values())
    rows: dict[str, dict] = {}
    for _ in range(repeats):
        for name, policy in policies.items():
            seconds, taken[name].peak = bench.seconds_and_peak(policy)
            taken[name].plain.append(seconds)
            taken[name].captured.append(bench.block_seconds(policy, captured=True))
            window = against[name]
            rows[name] = _row(name, policy, window, taken[name], taken[window])
            keep(list(rows.values()))
    return list(rows.values())


def _row(name: str, policy: CachePolicy, window: str, taken: Taken, beside: Taken) -> dict[str, Any]:
    """A policy beside the window of its size."""
    return {
        "name": name,
        "policy": policy.describe(),
        "window": window,
        "seconds": round(statistics.median(taken.plain), 5),
        **_ratio("times_window", taken.plain, beside.plain),
        **_ratio("captured_times_plain", taken.captured, taken.plain),
        "peak_mib": taken.peak,
        "cache_mib": taken.cache,
        "all_seconds": [round(seconds, 5) for seconds in taken.plain],
        "all_captured": [round(seconds, 5) for seconds in taken.captured],
    }


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
