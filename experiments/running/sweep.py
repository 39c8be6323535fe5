"""Many prompts, seeds and checkpoints with each model loaded once: an atlas each, a manifest beside them.

No work is done twice. A sweep that was killed goes on when the same command runs again, and several
processes that run it share the work: each run is claimed before it is made (claims.py).
What was made with other settings is never mixed in (sweep_state.py).
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.caches.files import RunError, StoppedError, require_writable
from experiments.extraction import causal
from experiments.extraction.memory import estimate_bytes
from experiments.extraction.result import Extraction
from experiments.extraction.video import check_video
from experiments.running.cli import videos_of
from experiments.running.jobs import BuildCache, deterministic, name_files, save
from experiments.running.locks import claimed, require_space
from experiments.running.progress import Progress, stopping_when_asked
from experiments.running.ranks import Rank
from experiments.running.sweep_state import Sweep, plan, settings_of
from experiments.running.work_items import WorkItems
from wan.capture import CaptureRequest
from wan.config import RunConfig


def run_sweep(
    args: argparse.Namespace,
    config: RunConfig,
    requests: Sequence[CaptureRequest],
    build: BuildCache,
    quantities: Mapping[str, bool],
    rank: Rank | None = None,
) -> None:
    """Make every cache of a sweep that is not there yet, or is being made by another process.

    quantities says which optional fields each must (not) have. Raises CacheError where the folder holds
    caches of other settings, RunError at the end where runs failed, and StoppedError after Ctrl-C.
    """
    runs, rank = plan(args, config), rank or Rank()
    folder = Path(args.output_dir)
    args.files.writes("the manifest", folder / "manifest.json")
    checkpoints = dict.fromkeys(run.checkpoint_path for run in runs.values())
    args.files.reads("the checkpoint", *checkpoints)
    name_files(args, config, runs, [video for path in runs for video in videos_of(args, [path])])
    with (
        Progress(args.quiet, args.log_file) as watch,
        stopping_when_asked(watch),
        deterministic(args.deterministic),
    ):
        watch.prints_blocks = rank.count == 1
        require_writable(folder / "manifest.json")
        settings = {c: settings_of(replace(config, checkpoint_path=c), quantities) for c in checkpoints}
        sweep = Sweep(folder, settings, runs, args.save_video is not None)
        waiting = sweep.look(bool(args.overwrite))
        with WorkItems(sweep.items) as claims:
            claims.release_dead([sweep.names[path] for path in runs if path not in set(waiting)])
        sizes = dict.fromkeys(waiting, estimate_bytes(config, requests)) or {str(sweep.manifest): 0}
        require_space(folder, sizes)
        sweep.write()
        if len(waiting) < len(runs):
            watch.print(f"{sweep.done} of {len(runs)} runs are done already")
        if args.save_video is not None:
            check_video(config)
        failures = Making(args, sweep, waiting, requests, build, watch).run(rank) if waiting else []
    if failures:
        raise RunError(f"{len(failures)} of {len(runs)} runs failed; first {failures[0]}")


@dataclass
class Making:
    """Caches of a sweep being made by this process, and what it has loaded."""

    args: argparse.Namespace
    sweep: Sweep
    waiting: Sequence[str]
    requests: Sequence[CaptureRequest]
    build: BuildCache
    watch: Progress
    session: causal.Session | None = None
    loaded: str | None = None
    failures: list[str] = field(default_factory=list)

    def run(self, rank: Rank) -> list[str]:
        """Make what waits and nobody else makes -> what failed, a line each. StoppedError after Ctrl-C."""
        paths = {self.sweep.names[path]: path for path in self.waiting}
        finished: set[str] = set()

        def is_done(name: str) -> bool:
            if name not in finished and self.sweep.is_recorded(paths[name]):
                finished.add(name)
            return name in finished

        tried = 0
        try:
            with WorkItems(self.sweep.items, rank) as claims:
                for tried, name in enumerate(claims.claim(list(paths), is_done, self.watch), 1):
                    if rank.count == 1:
                        self.watch.print(f"run {tried}/{len(paths)}: {paths[name]}")
                    self._make(paths[name])
                    self.sweep.write(now_and_then=True)
                    if self.watch.stopping:
                        break
        finally:
            self.sweep.write()
        if self.watch.stopping and self.sweep.done + len(self.failures) < len(self.sweep.runs):
            raise StoppedError(
                f"stopped after {tried} of {len(self.waiting)} runs; to continue, run the same command again"
            )
        return self.failures

    def _make(self, path: str) -> None:
        sweep, watch = self.sweep, self.watch

        def build_marked(run: Extraction) -> dict[str, Any]:
            cache = self.build(run)
            cache = cache if isinstance(cache, dict) else cache.to_dict()
            return cache | {"fingerprint": sweep.fingerprints[path]}

        try:
            with claimed(dict.fromkeys((path, *videos_of(self.args, [path])), 0)):
                session = self._session(sweep.runs[path])
                made = causal.extract_next(session, sweep.runs[path], self.requests, watch)
                save(self.args, made, {path: build_marked}, watch)
            sweep.finish(path)
        except StoppedError as error:
            sweep.states[path] = "partial" if Path(path).exists() else "waiting"
            raise StoppedError(
                f"{error}; {sweep.done} of {len(sweep.runs)} runs are done and will not be made again"
            ) from None
        except RunError as error:
            sweep.states[path] = "failed"
            self.failures.append(f"{path}: {error}")
            watch.print(f"failed: {error}")

    def _session(self, run: RunConfig) -> causal.Session:
        """What is loaded, with the weights of a run."""
        if self.session is None or self.loaded != run.checkpoint_path:
            self.session = None  # its weights leave first
            mine = [
                r for p in self.waiting if (r := self.sweep.runs[p]).checkpoint_path == run.checkpoint_path
            ]
            prompts = list(dict.fromkeys(r.prompt for r in mine))
            self.session = causal.prepare(run, self.requests, prompts, self.watch, replays=True)
            self.loaded = run.checkpoint_path
        return self.session
