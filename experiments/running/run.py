"""One run, from flags to files: check and lock the outputs, roll out on one GPU or several, save."""

import argparse
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch

from experiments.caches import save_cache
from experiments.caches.files import CacheError, RunError, StoppedError
from experiments.caches.store import peek
from experiments.extraction import devices
from experiments.extraction.cache_builders import Run
from experiments.extraction.memory import SAVE_VIDEO, estimate_bytes
from experiments.extraction.rollout import RunObserver, memory
from experiments.running.cli import EXPLAINED, fail, videos_of
from experiments.running.locks import claimed
from experiments.running.progress import check_outputs, observed, partial_name
from experiments.running.ranks import end_at_once, on_own_device, this_rank
from experiments.session import load
from wan.capture import CaptureRequest
from wan.checkpoint import read_model_config
from wan.config import RunConfig
from wan.errors import ConfigError

BuildCache = Callable[[Run], dict[str, Any]]


def make_caches(
    args: argparse.Namespace,
    config: RunConfig,
    requests: Sequence[CaptureRequest],
    outputs: Mapping[str, BuildCache],
) -> None:
    """Roll out once and write a cache for each path, built by its function. Raises what make_outputs raises.

    Where several GPUs make the rollout, the first process writes.
    """
    config, decodes = join_processes(args, config), "" if args.save_video is None else SAVE_VIDEO
    nbytes = estimate_bytes(config, requests) // len(outputs)
    what = f"{len(config.block_sizes)} blocks of {config.num_frames} frames"

    def make(watch: RunObserver) -> Run:
        session = load(config).prepare(requests, observer=watch, decodes=decodes)
        return session.generate(requests=requests, observer=watch)

    make_outputs(args, config, outputs, nbytes, make, what)


def make_outputs(
    args: argparse.Namespace,
    config: RunConfig,
    outputs: Mapping[str, BuildCache],
    nbytes: int,
    make: Callable[[RunObserver], Run],
    what: str,
    unit: str = "block",
) -> None:
    """Call make() and write a cache of at most nbytes for every path, built by its function.

    Raises CacheError or ConfigError for what is known to go wrong before anything is generated, RunError for
    what goes wrong later, and StoppedError after Ctrl-C. what and unit are for the lines that are printed.
    """
    videos = videos_of(args, outputs)
    check_outputs(args, config, [*outputs, *videos])
    writes = config.gpus == 1 or this_rank().is_first
    sizes = dict.fromkeys(outputs, nbytes) | dict.fromkeys(videos, 0)
    locks = claimed(sizes, args.overwrite is not False) if writes else nullcontext()
    with locks, observed(args, unit) as watch, video_of(args, config, videos if writes else [], watch):
        start = time.monotonic()
        made = make(watch)
        if config.gpus > 1:
            from wan.wings import parallel

            parallel.leave()
        if writes:
            save(args, made, outputs, watch)
            files = f"{len(outputs)} file{'s' * (len(outputs) > 1)}"
            watch.print(f"{what}, {files}: {time.monotonic() - start:.1f} s, {memory()}")
    if not writes:
        end_at_once()


@contextmanager
def video_of(
    args: argparse.Namespace, config: RunConfig, videos: Sequence[str], watch: RunObserver
) -> Iterator[None]:
    """Let a run's blocks become the first of the mp4s that are asked for, while they come."""
    if not videos:
        yield
        return
    from experiments.extraction.video import LiveVideo  # with the VAE's decoder

    with LiveVideo(config, videos[0], args.vae_dtype, args.preview) as watch.video:
        try:
            yield
        finally:
            watch.video = None


def save(
    args: argparse.Namespace, result: Run, outputs: Mapping[str, BuildCache], watch: RunObserver
) -> None:
    """Write a rollout's caches, each built by its function, and the video of a rollout that was not stopped.

    Of a stopped rollout what it completed is written, and partial caches replace no whole one. Raises
    RunError where writing fails, and StoppedError after what a stopped rollout has is saved.
    """
    caches, lines = dict[str, dict[str, Any]](), list[str]()
    try:
        for path, build in outputs.items():
            try:
                cache = build(result)
            except (RunError, IndexError):  # the blocks that it needs were not reached
                if not result.stopped:
                    raise
                continue
            there = peek(path) if cache.get("partial") else {}
            at = partial_name(path) if there and not there.get("partial") else path
            caches[at] = cache
            save_cache(at, cache)
            lines.append(
                f"{at}: {cache['format']} cache of {cache['model']} ({cache['weights']} weights), "
                f"{cache['num_frames']} latent frames, seed {cache['seed']}, {cache['prompt']!r}"
            )
        if watch.video is not None and not result.stopped:
            watch.video.save(result.latents, result.common["fingerprint"])
            lines.append(f"{watch.video.path}: the generated video")
    except (CacheError, OSError) as error:  # after the rollout: no longer the fault of the input
        raise RunError(str(error)) from error
    watch.log("saved", paths=list(caches), partial="partial" in result.common)
    if not result.stopped:
        if not args.quiet:
            print("\n".join(lines))
        return
    how = "as partial" if "partial" in result.common else "whole"
    kept = f"saved {how}: {', '.join(caches)}" if caches else "none of what was asked for was captured yet"
    raise StoppedError(
        f"stopped after {result.stopped}; {kept}; to make the rest, run the same command again"
    )


# --- One rollout by several GPUs: torchrun's agent starts a process for each, and one of them prints
def join_processes(args: argparse.Namespace, config: RunConfig) -> RunConfig:
    """Return the config of this process of a rollout; one process alone needs nothing.

    Starts the processes where --gpus asks for more than there are, and then does not return. Raises
    ConfigError for missing GPUs, and for a number over which the rollout does not split.
    """
    rank = this_rank()
    if rank.count == config.gpus == 1:
        return config
    from wan.wings import parallel

    if rank.count > 1 and config.gpus not in (1, rank.count):
        raise ConfigError(f"--gpus {config.gpus} under {rank.count} ranks: start as many, or leave it out")
    config = replace(config, gpus=max(config.gpus, rank.count))
    there = torch.cuda.device_count()
    if config.device != "cpu" and there < config.gpus and not os.environ.get("LOCAL_RANK"):
        raise ConfigError(f"--gpus {config.gpus}, and the number of GPUs here is {there}; try --device cpu")
    sizes = read_model_config(config.ckpt_dir)
    per_frame = sizes.tokens_per_frame(config.height, config.width)
    tokens = [frames * per_frame for frames in config.block_sizes]
    parallel.check_size(config.gpus, config.model, sizes.num_heads, tokens)
    if rank.count == 1:
        _start_processes(args, config.gpus)
    config = on_own_device(config, rank)
    if not rank.is_first:
        args.quiet, args.log_file = True, None
    parallel.join(devices.choose_device(config.device))
    return config


def _start_processes(args: argparse.Namespace, count: int) -> NoReturn:
    """Run this command in count processes, and end as the first of them that fails."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # the agent's own report of what the processes printed already
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # of a process whose partner is gone
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    launch = LaunchConfig(1, 1, count, run_id=uuid.uuid4().hex, max_restarts=0, monitor_interval=0.1)
    launch.rdzv_backend, launch.rdzv_endpoint = "c10d", "localhost:0"
    try:
        elastic_launch(launch, sys.executable)(sys.argv[0], *args.words)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    except (SignalException, KeyboardInterrupt):
        raise SystemExit(130) from None
    else:
        raise SystemExit(0)
    if explained := [code for code in codes.values() if code in EXPLAINED]:
        raise SystemExit(explained[0])
    for rank, code in codes.items():
        if code < 0 and -code != signal.SIGTERM:
            name = signal.Signals(-code).name
            hint = "; there may have been too little host memory" if name == "SIGKILL" else ""
            fail(f"process {rank} of {count} was ended by {name}, and the others with it{hint}", 1)
    fail(f"one of {count} processes was lost, and the others with it", 1)
