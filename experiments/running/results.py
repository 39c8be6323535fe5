"""What a rollout leaves on disk: caches and the video, whole or as far as a stopped run came."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.caches import load_cache, save_cache
from experiments.caches.common import Cache
from experiments.caches.errors import CacheError, RunError, StoppedError
from experiments.extraction.observer import RunObserver
from experiments.extraction.result import Extraction
from experiments.extraction.video import save_video
from experiments.running.cli import videos_of

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
