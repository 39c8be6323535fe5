"""From flags to a comparison of policies: videos until asked to stop, the table when all are there."""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

import torch

from experiments.analysis.drift import MEASURES, SUMMARIES
from experiments.caches.atomic_files import replacing, require_writable
from experiments.caches.errors import StoppedError
from experiments.extraction import causal
from experiments.extraction.block_capture import BlockCapture
from experiments.extraction.provenance import environment, vae_files
from experiments.miniature.frozen import SETS, held_out_scenes
from experiments.miniature.moving_shapes import Scene
from experiments.running.claims import Claims
from experiments.running.jobs import name_inputs
from experiments.running.progress import Progress, memory, stopping_when_asked
from experiments.running.ranks import Rank, on_own_device, this_rank
from experiments.running.workers import end_with, workers_of
from experiments.studies.policy_comparison import Comparison, Maker, merged
from experiments.studies.policy_grid import read_policies
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.modules.cache_policies import read_policy
from wan.modules.vae import VAE

TABLE = "comparison.json"
GPU_BATCH, CPU_BATCH = 64, 8
WAITING = 128  # videos that may wait to be measured: 12 MB each at 64 x 64 and 240 frames


def held_out(count: int) -> dict[str, Scene]:
    """Caption -> held-out scene of the miniature: one shape, two that cross, one behind a wall, in turn."""
    scenes: dict[str, Scene] = {}
    by_kind = [held_out_scenes(kinds, 2 * count) for kinds in SETS.values()]
    for row in zip(*by_kind, strict=True):
        for scene in row:
            if len(scenes) < count:
                scenes.setdefault(scene.caption, scene)
    return scenes


def compare(args: argparse.Namespace, runs: Sequence[RunConfig], scenes: dict[str, Scene]) -> None:
    """Make what is not done yet, and the table of what is. Raises StoppedError after Ctrl-C."""
    rank = this_rank()
    first = on_own_device(runs[0], rank)
    planned = _checked(args, runs, scenes)
    args.quiet |= not rank.is_first
    args.log_file = args.log_file if rank.is_first else None
    with Progress(args.quiet, args.log_file) as watch, stopping_when_asked(watch, "policy"):
        start = time.monotonic()
        session = causal.prepare(first, [], list(dict.fromkeys(run.prompt for run in runs)), watch)
        comparison = _comparison(args, session, planned)
        watch.log("rollout", videos=len(comparison.items()))
        vae = VAE.from_pretrained(first.ckpt_dir, getattr(torch, args.vae_dtype), session.device)
        _make(comparison, session, vae, args.workers, rank, watch)
        table = merged(comparison)
        if table["missing"]:
            left = f"{table['missing']} of {len(comparison.items())} videos are missing"
            raise StoppedError(f"{left}; what is done is not made again: run the same command to go on")
        if rank.is_first:
            seconds = round(time.monotonic() - start, 1)
            made = {"made": environment(session.device), "made_seconds": seconds}
            write_table(comparison.folder / TABLE, table | made)
            said = f"{len(table['videos'])} videos, {seconds} s, {memory()}"
            watch.print(f"{comparison.folder / TABLE}: {said}")


def _checked(args: argparse.Namespace, runs: Sequence[RunConfig], scenes: dict[str, Scene]) -> Comparison:
    """What the flags ask for, before a model is there.

    Raises ConfigError or CacheError for what cannot be compared or written.
    """
    first, policies = runs[0], read_policies(args.policies)
    if first.prompt_schedule or first.interventions:
        raise ConfigError("policies are compared on one prompt each, without interventions")
    for settings in policies.values():
        read_policy(settings).check(first.block_sizes)
        name_inputs(args, replace(first, cache_policy=dict(settings), local_attn_size=-1, sink_size=0))
    args.files.writes("the table", Path(args.output_dir) / TABLE)
    planned = Comparison(
        Path(args.output_dir),
        policies,
        runs,
        scenes,
        weights_sha256="",
        dtype="",
        batch=1,
        vbench=Path(args.vbench_dir) if args.vbench_dir else None,
        videos=args.videos,
        controls=args.controls,
        capture=BlockCapture.read(args.capture, first.step),
    )
    for place in (args.output_dir, *([args.vbench_dir] if args.vbench_dir else [])):
        require_writable(Path(place) / TABLE)
    videos = [path for item in planned.items() for path, _ in planned.mp4s(item)]
    if twins := [path for path, count in Counter(videos).items() if count > 1]:
        raise ConfigError(f"two of --policies would write {twins[0]}; rename a file of one")
    longest = {path.parent: path for path in sorted(videos, key=lambda path: len(os.fsencode(path)))}
    for path in longest.values():
        require_writable(path)
    return planned


def _comparison(args: argparse.Namespace, session: causal.Session, planned: Comparison) -> Comparison:
    """What was planned, with the weights that a session has."""
    return replace(
        planned,
        weights_sha256=session.sha256.result(),
        dtype=f"{session.dtype} {args.vae_dtype}",
        batch=args.batch or (GPU_BATCH if session.device.type == "cuda" else CPU_BATCH),
        files=[*session.common["files"], *vae_files(planned.runs[0])],
    )


def _make(
    comparison: Comparison,
    session: causal.Session,
    vae: VAE,
    workers: int | None,
    rank: Rank,
    watch: Progress,
) -> None:
    """Make all groups that are not done, until asked to stop."""
    on_gpu, groups = session.device.type == "cuda", comparison.groups()
    torch.backends.cudnn.benchmark = on_gpu  # the decoder's convolutions, always of one size

    def is_done(name: str) -> bool:
        return all(comparison.is_done(item) for item in groups[name])

    behind = 1 + WAITING // min(map(len, groups.values()))  # groups that videos which wait belong to
    with _pool(workers, on_gpu, rank) as pool, Claims(comparison.folder / "claims", rank) as claims:
        maker = Maker(comparison, session, vae, pool)
        for name in claims.to_make(list(groups), is_done, watch, behind):
            maker.make(groups[name], watch.print)
            maker.settle(WAITING)
            if watch.stopping:
                break
        maker.settle()


def write_table(path: Path, table: dict) -> None:
    """comparison.json, with what each measure is."""
    about = {name: asdict(one) for name, one in (MEASURES | SUMMARIES).items()}
    with replacing(path) as file:
        file.write(json.dumps({"measures": about} | table, ensure_ascii=False).encode() + b"\n")


@contextmanager
def _pool(workers: int | None, on_gpu: bool, rank: Rank) -> Iterator[ProcessPoolExecutor | None]:
    """Processes that measure videos while the next ones are made; on a CPU this one measures them itself."""
    count = workers_of(workers if workers is not None or on_gpu else 0, rank)
    if not count:
        yield None
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that are about to start
    with ProcessPoolExecutor(count, get_context("spawn"), end_with, (os.getpid(),)) as pool:
        yield pool
