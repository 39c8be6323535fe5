"""From a request to files: claim the outputs, roll out, save what is complete, also of a stopped run."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from experiments.extraction import causal
from experiments.extraction.bidirectional import as_one_block, base_atlas_cache, base_layer_cache, sample
from experiments.extraction.memory_estimate import estimate_bytes
from experiments.extraction.observer import RunObserver
from experiments.extraction.provenance import named_files
from experiments.extraction.result import Extraction
from experiments.extraction.video import check_video
from experiments.running.cli import videos_of
from experiments.running.distributed import together
from experiments.running.output_locks import claimed
from experiments.running.progress import Progress, memory, stopping_when_asked
from experiments.running.ranks import this_rank
from experiments.running.results import BuildCache, partial_name, save
from experiments.running.run_files import RunFiles
from wan import process_group
from wan.config import RunConfig
from wan.modules.capture import CaptureRequest


def make_base_caches(
    args: argparse.Namespace, config: RunConfig, layer: int | None, steps: Sequence[int]
) -> list[str]:
    """Sample one video -> a cache of a layer at one step, or (None) atlases of all layers at steps -> the
    paths.

    Raises what run_observed raises.
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
    run_observed(
        args,
        config,
        outputs,
        each,
        lambda observer: sample(config, request, observer),
        f"{config.base.num_steps} steps of {config.num_frames} frames",
        "step",
    )
    return list(outputs)


def make_caches(
    args: argparse.Namespace,
    config: RunConfig,
    requests: Sequence[CaptureRequest],
    outputs: Mapping[str, BuildCache],
) -> None:
    """One rollout -> a cache for each path, built by its function. Raises what run_observed raises.

    Where several GPUs make it, the first process writes.
    """
    config, _ = together(args, config)
    each = estimate_bytes(config, requests) // len(outputs)
    what = f"{len(config.block_sizes)} blocks of {config.num_frames} frames"
    run_observed(
        args, config, outputs, each, lambda observer: causal.extract(config, requests, observer), what
    )


def run_observed(
    args: argparse.Namespace,
    config: RunConfig,
    outputs: Mapping[str, BuildCache],
    each: int,
    make: Callable[[RunObserver], Extraction],
    what: str,
    unit: str = "block",
) -> None:
    """make() -> a cache of at most each bytes for every path, built by its function.

    Raises CacheError or ConfigError for what is known to go wrong before anything is generated, RunError for
    what goes wrong later, and StoppedError after Ctrl-C. what and unit are for the observer.
    """
    videos = videos_of(args, outputs)
    name_files(args, config, outputs, videos)
    claims = dict.fromkeys(outputs, each) | dict.fromkeys(videos, 0)
    writes = config.gpus == 1 or this_rank().is_first
    with (
        Progress(args.quiet, args.log_file) as observer,
        claimed(claims, args.overwrite is not False) if writes else nullcontext(),
        stopping_when_asked(observer, unit),
        deterministic(args.deterministic),
    ):
        if videos:
            check_video(config)  # before the rollout, which may take hours
        start = time.monotonic()
        made = make(observer)
        process_group.leave()
        if writes:
            save(args, made, outputs, observer)
            observer.print(
                f"{what}, {len(outputs)} file{'s' * (len(outputs) > 1)}: {time.monotonic() - start:.1f} s, "
                f"{memory()}"
            )
    if not writes:
        end_at_once()


def end_at_once() -> NoReturn:
    """End a process of several without Python's shutdown, in which gloo's threads may abort it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def name_files(
    args: argparse.Namespace, config: RunConfig, outputs: Iterable[str], videos: Iterable[str]
) -> None:
    """Tell args.files all that a run reads and writes. Raises CacheError, before anything starts, for an
    overlap.
    """
    files: RunFiles = args.files
    name_inputs(args, config)
    for what, flag, paths in (("the cache", "output_path", outputs), ("the video", "save_video", videos)):
        for path in paths:
            files.writes(f"--{flag}" if path == getattr(args, flag, None) else what, path)
    files.writes("a partial cache", *map(partial_name, outputs))


def name_inputs(args: argparse.Namespace, config: RunConfig) -> None:
    """Tell args.files all that a run reads. Raises CacheError where it would write one of these."""
    files: RunFiles = args.files
    files.reads("the model's", config.ckpt_dir)
    files.reads("the checkpoint", config.checkpoint_path)
    files.reads("the prompt's states", config.prompt_embeds)
    files.reads("the config's", *named_files(config))


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
