"""From a request to files, safely: outputs claimed, the rollout watched, what is complete saved, also when stopped."""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.caches import load_cache, save_cache
from experiments.caches.errors import CacheError, RunError, StoppedError
from experiments.extraction import causal
from experiments.extraction.bidirectional import as_one_block, base_atlas_cache, base_layer_cache, sample
from experiments.extraction.memory_estimate import estimate_bytes
from experiments.extraction.observer import RunObserver
from experiments.extraction.result import Extraction
from experiments.running.cli import save_results, videos_of
from experiments.running.output_locks import claimed
from experiments.running.progress import Progress, memory, stopping_when_asked
from wan.config import RunConfig
from wan.modules.capture import CaptureRequest


def make_base_caches(
    args: argparse.Namespace, config: RunConfig, layer: int | None, steps: Sequence[int]
) -> list[str]:
    """Sample one video -> a cache of a layer at one step, or (None) atlases of all layers at steps -> the paths.

    Raises what run_watched raises.
    """
    config, folder = as_one_block(config), Path(args.output_dir)
    request = CaptureRequest(
        layers=None if layer is None else [layer], steps=steps, granularity="frame", mass=layer is None
    )
    one_branch = estimate_bytes(config, [request], config.base.num_steps)
    if layer is not None:
        each, outputs = (
            2 * one_branch,
            {f"layer{layer}.pt": partial(base_layer_cache, layer=layer, step=steps[0])},
        )
    else:
        each, outputs = (
            one_branch,
            {
                f"atlas_base{name}.pt": partial(base_atlas_cache, steps=steps, branch=branch)
                for name, branch in (("", "cond"), ("_uncond", "uncond"))
            },
        )
    outputs = {str(folder / name): build_cache for name, build_cache in outputs.items()}
    run_watched(
        args,
        outputs,
        each,
        lambda watch: sample(config, request, watch),
        f"{config.base.num_steps} steps of {config.num_frames} frames",
        "step",
    )
    return list(outputs)


BuildCache = Callable[[Extraction], dict[str, Any]]


def make_caches(
    args: argparse.Namespace,
    config: RunConfig,
    requests: Sequence[CaptureRequest],
    outputs: Mapping[str, BuildCache],
) -> None:
    """One rollout -> a cache for each path, arranged by its function. Raises what run_watched raises."""
    each = estimate_bytes(config, requests) // len(outputs)
    what = f"{len(config.block_sizes)} blocks of {config.num_frames} frames"
    run_watched(args, outputs, each, lambda watch: causal.extract(config, requests, watch), what)


def run_watched(
    args: argparse.Namespace,
    outputs: Mapping[str, BuildCache],
    each: int,
    make: Callable[[RunObserver], Extraction],
    what: str,
    unit: str = "block",
) -> None:
    """make() -> a cache of at most each bytes for every path, arranged by its function.

    Raises CacheError or ConfigError for what is known to go wrong before anything is generated, RunError for what goes
    wrong later, and StoppedError after Ctrl-C. what and unit are for those who watch.
    """
    claims = dict.fromkeys(outputs, each) | dict.fromkeys(videos_of(args, outputs), 0)
    with (
        Progress(args.quiet, args.log_file) as watch,
        claimed(claims, args.overwrite is not False),
        stopping_when_asked(watch, unit),
        deterministic(args.deterministic),
    ):
        start = time.monotonic()
        save(args, make(watch), outputs, watch)
        watch.print(
            f"{what}, {len(outputs)} file{'s' * (len(outputs) > 1)}: {time.monotonic() - start:.1f} s, {memory()}"
        )


def save(
    args: argparse.Namespace, result: Extraction, outputs: Mapping[str, BuildCache], watch: RunObserver
) -> None:
    """Write a rollout's caches. Raises RunError where that fails, and StoppedError after what a stopped one has is saved."""
    try:
        if not result.stopped:
            save_results(args, result, {path: build_cache(result) for path, build_cache in outputs.items()})
            watch.log("saved", paths=list(outputs))
            return
        written = save_partial(result, outputs)
    except CacheError as error:  # after the rollout: no longer the fault of the input
        raise RunError(str(error)) from error
    partial = "partial" in result.common
    watch.log("saved", paths=written, partial=partial)
    kept = (
        f"saved {'as partial' if partial else 'whole'}: {', '.join(written)}"
        if written
        else ("none of what was asked for was captured yet")
    )
    raise StoppedError(
        f"stopped after {result.stopped}; {kept}; to make the rest, run the same command again"
    )


def save_partial(result: Extraction, outputs: Mapping[str, BuildCache]) -> list[str]:
    """Write what a stopped rollout completed -> the paths. What is partial goes beside a whole cache that is there already."""
    written = []
    for path, build_cache in outputs.items():
        try:
            cache = build_cache(result)
        except (RunError, IndexError):  # the blocks that it needs were not reached
            continue
        target = str(Path(path).with_suffix(".partial.pt")) if "partial" in cache and is_whole(path) else path
        save_cache(target, cache)
        written.append(target)
    return written


def is_whole(path: str | Path) -> bool:
    """Whether a cache that is complete lies at path."""
    try:
        return not load_cache(path).get("partial", False)
    except CacheError:
        return False


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Refuse operations whose results differ from run to run on one device, where wanted."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
