"""From a request to files: claim the outputs, roll out, save what is complete, also of a stopped run."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError, RunError, StoppedError
from experiments.caches.formats import Cache
from experiments.extraction import causal
from experiments.extraction.base import as_one_block, base_atlas_cache, base_layer_cache, sample
from experiments.extraction.memory import estimate_bytes
from experiments.extraction.observer import RunObserver
from experiments.extraction.provenance import named_files
from experiments.extraction.result import Extraction
from experiments.extraction.video import check_video, save_video
from experiments.running.cli import videos_of
from experiments.running.distributed import together
from experiments.running.locks import RunFiles, claimed
from experiments.running.progress import Progress, memory, stopping_when_asked
from experiments.running.ranks import this_rank
from wan import process_group
from wan.capture import CaptureRequest
from wan.config import RunConfig

# --- What a rollout leaves on disk: caches and the video, whole or as far as a stopped run came
BuildCache = Callable[[Extraction], Cache | dict[str, Any]]


def partial_name(path: str) -> str:
    """Where a cache that is not whole goes, so that it does not replace one that is."""
    return str(Path(path).with_suffix(".partial.pt"))


def save(
    args: argparse.Namespace, result: Extraction, outputs: Mapping[str, BuildCache], observer: RunObserver
) -> None:
    """Write a rollout's caches, each built by its function.

    Raises RunError where that fails, and StoppedError after what a stopped rollout has is saved.
    """
    try:
        args.files.unchanged()
        if not result.stopped:
            lines = save_whole(args, result, outputs)
            observer.log("saved", paths=list(outputs))
            if not args.quiet:  # last: a pipe that is closed must not keep a file from being written
                print("\n".join(lines))
            return
        written = save_partial(result, outputs)
    except (CacheError, OSError) as error:  # after the rollout: no longer the fault of the input
        raise RunError(str(error)) from error
    partial = "partial" in result.common
    observer.log("saved", paths=written, partial=partial)
    how = "as partial" if partial else "whole"
    kept = f"saved {how}: {', '.join(written)}" if written else "none of what was asked for was captured yet"
    raise StoppedError(
        f"stopped after {result.stopped}; {kept}; to make the rest, run the same command again"
    )


def save_whole(args: argparse.Namespace, result: Extraction, outputs: Mapping[str, BuildCache]) -> list[str]:
    """Write all caches, and the video where it was asked for -> a line about each."""
    lines = []
    caches = {path: build(result) for path, build in outputs.items()}
    for path, built in caches.items():
        save_cache(path, built)
        cache = built.to_dict() if isinstance(built, Cache) else built
        lines.append(
            f"{path}: {cache['format']} cache of {cache['model']} ({cache['weights']} weights), "
            f"{cache['num_frames']} latent frames, seed {cache['seed']}, {cache['prompt']!r}"
        )
    for video in videos_of(args, outputs):
        save_video(result, video)
        lines.append(f"{video}: the generated video")
    return lines


def save_partial(result: Extraction, outputs: Mapping[str, BuildCache]) -> list[str]:
    """Write what a stopped rollout completed -> the paths; what is partial does not replace a whole cache."""
    written = []
    for path, build in outputs.items():
        try:
            cache = build(result)
        except (RunError, IndexError):  # the blocks that it needs were not reached
            continue
        partial = (cache.to_dict() if isinstance(cache, Cache) else cache).get("partial", False)
        target = partial_name(path) if partial and is_whole(path) else path
        save_cache(target, cache)
        written.append(target)
    return written


def is_whole(path: str | Path) -> bool:
    """Whether a cache that is complete lies at path."""
    try:
        return not load_cache(path).get("partial", False)
    except CacheError:
        return False


# --- From a request to files: claim the outputs, roll out, save what is complete, also of a stopped run
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
