"""One run, from flags to files: check and lock the outputs, roll out on one GPU or several, save."""

import argparse
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from experiments import progress
from experiments.caches import store
from experiments.caches.contents import PlannedCache as PlannedCache  # scripts take it from here, too
from experiments.caches.contents import contents_of
from experiments.caches.files import PARTIAL, ROOT, CacheError, RunError, StoppedError, claimed
from experiments.caches.formats import FORMATS
from experiments.caches.outputs import Contents, require_replaceable
from experiments.caches.titles import prompt_in_words, seed_in_words
from experiments.extraction import cache_builders as cache_builders  # scripts take both from here
from experiments.extraction import video
from experiments.memory import estimate_bytes
from experiments.provenance import check_outputs
from experiments.running.cli import videos_of
from experiments.runs import Run
from experiments.session import Session
from wan.capture import CaptureRequest
from wan.config import RunConfig


def make_caches(
    args: argparse.Namespace,
    config: RunConfig,
    requests: Sequence[CaptureRequest],
    outputs: Mapping[str, PlannedCache],
    kind: type[Session] = Session,
) -> None:
    """Roll out once and write the cache that is planned for each path.

    Raises CacheError or ConfigError before anything is generated, RunError for later failures, and
    StoppedError after Ctrl-C.
    """
    # 1. Several GPUs make one rollout in a process each; the first of them prints and writes.
    is_rank = bool(os.environ.get("RANK")) and os.environ.get("WORLD_SIZE", "1") != "1"  # of torchrun
    several = config.gpus > 1 or is_rank
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
    if writes and not args.overwrite:
        for path in filter(os.path.exists, outputs):
            planned = outputs[path]
            cache_builders.require_free_cache(path, planned.kind, planned.parts(config, requests), config)
        for path in filter(os.path.exists, videos):
            video.require_free(path, config)
    # 3. Roll out and save.
    with ExitStack() as stack:
        if writes:
            stack.enter_context(claimed(sizes))
        watch = stack.enter_context(progress.observed(args, unit))
        if writes and videos:
            stack.enter_context(video_of(args, config, videos[0], watch))
        start = time.monotonic()
        session.prepare(requests, observer=watch, decodes=args.save_video is not None)
        result = session.generate(requests=requests, observer=watch)
        if several:
            torchrun.leave()
        if writes:
            save(args, result, outputs, watch)
            files = "1 file"
            if len(outputs) > 1:
                files = f"{len(outputs)} files"
            what = f"{parts} {unit}s of {config.num_frames} frames, {files}"
            watch.print(f"{what}: {time.monotonic() - start:.1f} s, {progress.memory()}")
    if not writes:
        torchrun.end_at_once()


def place_of(path: str, cache: Mapping[str, Any], overwrite: bool) -> tuple[str, Contents | None]:
    """Return where a cache of a finished or stopped run goes, and what it replaces there.

    A partial cache replaces no whole one, and nothing replaces a file that appeared during the run: the new
    one goes beside it.
    """
    names = [path]
    if cache.get("partial"):
        names.append(str(Path(path).with_suffix(PARTIAL)))
        overwrite = False
    last, number = Path(names[-1]), 1
    while True:
        for name in names:
            with suppress(CacheError):
                return name, require_replaceable(name, contents_of(cache), store.cache_contents, overwrite)
        number += 1
        names = [str(last.with_suffix(f".{number}.pt"))]


def notebook_command(caches: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the command that draws a run's caches: their notebook, with its parameters.

    The executed notebook and the folder of its figures have the cache's name: another cache replaces neither.
    """
    path, cache = next(iter(caches.items()))
    notebook, root = FORMATS[cache["format"]].notebook, ""
    if not Path.cwd().samefile(ROOT):
        root = f"{ROOT}/"
    if cache["format"] == "layer" and len(caches) > 1:
        folder = str(Path(path).parent)
        return shlex.join(["bash", f"{root}experiments/run_notebooks.sh", notebook, folder, "all"])
    from_notebooks = os.path.join("..", store.from_root(path))  # an absolute path stays
    name = f"{Path(notebook).stem}_{Path(path).stem}"
    words = ["papermill", "--cwd", f"{root}notebooks", f"{root}notebooks/{notebook}", f"outputs/{name}.ipynb"]
    words += ["-p", "SAVE_DIR", name, "-p", "CACHE_PATH", from_notebooks]
    return f"mkdir -p outputs && {shlex.join(words)}"


@contextmanager
def video_of(
    args: argparse.Namespace, config: RunConfig, path: str, watch: progress.Progress
) -> Iterator[None]:
    """Encode blocks to an mp4 while the run generates them."""
    with video.LiveVideo(config, path, args.vae_dtype, args.preview) as watch.video:
        try:
            yield
        finally:
            watch.video = None


def save(
    args: argparse.Namespace,
    result: Run,
    outputs: Mapping[str, PlannedCache],
    watch: progress.Progress,
) -> None:
    """Write a rollout's caches, and its video unless it was stopped.

    Save the finished blocks of a stopped rollout; never overwrite a complete cache with a partial one. Raises
    RunError if writing fails, and StoppedError after saving a stopped rollout.
    """
    caches, lines = dict[str, dict[str, Any]](), list[str]()
    try:
        for path, planned in outputs.items():
            try:
                cache = planned.build(result)
            except (RunError, IndexError):  # the blocks that it needs were not reached
                if not result.stopped:
                    raise
                continue
            place, replaced = place_of(path, cache, bool(args.overwrite))
            caches[place] = cache
            store.save_cache(place, cache, overwrite=True)
            line = (
                f"{place}: {cache['format']} cache of {cache['model']} ({cache['weights']} weights), "
                f"{cache['num_frames']} latent frames, "
                f"{seed_in_words(cache['seed'])}, {prompt_in_words(cache['prompt'])}"
            )
            if replaced is not None:
                line += f"; it replaced {replaced}"
            lines.append(line)
        if watch.video is not None and not result.stopped:
            replaced = video.require_free(watch.video.path, result.config, bool(args.overwrite))
            watch.video.save([result.latents], result.common["fingerprint"])
            line = f"{watch.video.path}: the generated video"
            if replaced is not None:
                line += f"; it replaced {replaced}"
            lines.append(line)
    except (CacheError, OSError) as error:  # after the rollout: no longer the fault of the input
        raise RunError(str(error)) from error
    watch.log("saved", paths=list(caches), partial="partial" in result.common)
    if not result.stopped:
        lines.append(f"next: {notebook_command(caches)}")
        if not args.quiet:
            print("\n".join(lines))
        return
    how = "as partial" if "partial" in result.common else "whole"
    outcome = f"saved {how}: {', '.join(caches)}" if caches else "none of what was asked for was captured yet"
    raise StoppedError(
        f"stopped after {result.stopped}; {outcome}; to make the rest, run the same command again"
    )
