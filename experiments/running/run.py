"""One run, from flags to files: check and lock the outputs, roll out on one GPU or several, save."""

import argparse
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from experiments.caches.files import PARTIAL, ROOT, CacheError, RunError, StoppedError, claimed, peek
from experiments.caches.formats import FORMATS
from experiments.caches.store import from_root, save_cache
from experiments.extraction import cache_builders as cache_builders  # scripts take both from here
from experiments.extraction.video import LiveVideo
from experiments.memory import estimate_bytes
from experiments.progress import Progress, memory, observed
from experiments.provenance import check_outputs
from experiments.running.cli import videos_of
from experiments.runs import Run
from experiments.session import Session
from wan.capture import CaptureRequest
from wan.config import RunConfig

BuildCache = Callable[[Run], dict[str, Any]]


def make_caches(
    args: argparse.Namespace,
    config: RunConfig,
    requests: Sequence[CaptureRequest],
    outputs: Mapping[str, BuildCache],
    kind: type[Session] = Session,
) -> None:
    """Roll out once and write a cache for each path, built by its function.

    Raises CacheError or ConfigError before anything is generated, RunError for later failures, and
    StoppedError after Ctrl-C.
    """
    # 1. Several GPUs make one rollout in a process each; the first of them prints and writes.
    started = os.environ.get("RANK") and os.environ.get("WORLD_SIZE", "1") != "1"  # by torchrun
    several = config.gpus > 1 or bool(started)
    if several:
        from experiments.running import torchrun

        config = torchrun.join_processes(args, config)
    writes = not several or torchrun.this_rank().is_first
    # 2. Check what is asked for, and lock the outputs.
    session, steps, branches = kind(config), None, 1
    parts, unit = len(config.block_sizes), "block"
    if kind.bidirectional:  # a step has two branches of guidance
        parts, unit, branches = config.base.num_steps, "step", 2
        steps = parts
    nbytes = branches * estimate_bytes(config, requests, steps) // len(outputs)
    videos = videos_of(args, outputs)
    check_outputs(args, config, [*outputs, *videos])
    sizes = dict.fromkeys(outputs, nbytes) | dict.fromkeys(videos, 0)
    locks = claimed(sizes, args.overwrite is not False) if writes else nullcontext()
    # 3. Roll out and save.
    has_video = videos and writes
    with (
        locks,
        observed(args, unit) as watch,
        video_of(args, config, videos[0], watch) if has_video else nullcontext(),
    ):
        start = time.monotonic()
        session.prepare(requests, observer=watch, decodes=args.save_video is not None)
        made = session.generate(requests=requests, observer=watch)
        if several:
            torchrun.leave()
        if writes:
            save(args, made, outputs, watch)
            what = f"{parts} {unit}s of {config.num_frames} frames"
            files = f"{len(outputs)} file{'s' * (len(outputs) > 1)}"
            watch.print(f"{what}, {files}: {time.monotonic() - start:.1f} s, {memory()}")
    if not writes:
        torchrun.end_at_once()


def notebook_command(caches: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the command that draws a run's caches: their notebook, with its parameter."""
    path, cache = next(iter(caches.items()))
    notebook, root = FORMATS[cache["format"]].notebook, ""
    if not Path.cwd().samefile(ROOT):
        root = f"{ROOT}/"
    if cache["format"] == "layer" and len(caches) > 1:
        folder = str(Path(path).parent)
        return shlex.join(["bash", f"{root}experiments/run_notebooks.sh", notebook, folder, "all"])
    from_notebooks = os.path.join("..", from_root(path))  # an absolute path stays
    words = ["papermill", "--cwd", f"{root}notebooks", f"{root}notebooks/{notebook}", f"outputs/{notebook}"]
    return f"mkdir -p outputs && {shlex.join([*words, '-p', 'CACHE_PATH', from_notebooks])}"


@contextmanager
def video_of(args: argparse.Namespace, config: RunConfig, path: str, watch: Progress) -> Iterator[None]:
    """Encode blocks to an mp4 while the run generates them."""
    with LiveVideo(config, path, args.vae_dtype, args.preview) as watch.video:
        try:
            yield
        finally:
            watch.video = None


def save(
    args: argparse.Namespace,
    result: Run,
    outputs: Mapping[str, BuildCache],
    watch: Progress,
) -> None:
    """Write a rollout's caches, each built by its function, and its video unless it was stopped.

    Save the finished blocks of a stopped rollout; never overwrite a complete cache with a partial one. Raises
    RunError if writing fails, and StoppedError after saving a stopped rollout.
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
            # A partial cache does not replace a whole one of an earlier run.
            there = peek(path) if cache.get("partial") else {}
            at = str(Path(path).with_suffix(PARTIAL)) if there and not there.get("partial") else path
            caches[at] = cache
            save_cache(at, cache)
            lines.append(
                f"{at}: {cache['format']} cache of {cache['model']} ({cache['weights']} weights), "
                f"{cache['num_frames']} latent frames, seed {cache['seed']}, {cache['prompt']!r}"
            )
        if watch.video is not None and not result.stopped:
            watch.video.save([result.latents], result.common["fingerprint"])
            lines.append(f"{watch.video.path}: the generated video")
    except (CacheError, OSError) as error:  # after the rollout: no longer the fault of the input
        raise RunError(str(error)) from error
    watch.log("saved", paths=list(caches), partial="partial" in result.common)
    if not result.stopped:
        lines.append(f"next: {notebook_command(caches)}")
        if not args.quiet:
            print("\n".join(lines))
        return
    how = "as partial" if "partial" in result.common else "whole"
    kept = f"saved {how}: {', '.join(caches)}" if caches else "none of what was asked for was captured yet"
    raise StoppedError(
        f"stopped after {result.stopped}; {kept}; to make the rest, run the same command again"
    )
