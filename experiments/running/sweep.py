"""Many prompts, seeds and checkpoints: an atlas each, each model loaded once, the work shared by processes.

OUTPUT_DIR/items/NAME.json is written after a run's cache and says that the cache is whole (work_items.py): a
sweep that was killed goes on where it was, and several processes share it. manifest.json lists all runs. The
fingerprint of a run, in its item, cache and video, keeps out those of other runs.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.caches import load_cache
from experiments.caches.files import (
    CacheError,
    RunError,
    StoppedError,
    mp4_tag,
    replacing,
    require_same,
    require_writable,
)
from experiments.caches.store import peek
from experiments.extraction import causal
from experiments.extraction.memory import SAVE_VIDEO, estimate_bytes
from experiments.extraction.provenance import fingerprint, identity, video_tag
from experiments.extraction.video import check_video
from experiments.running.cli import plan, videos_of
from experiments.running.locks import claimed, require_space
from experiments.running.progress import Progress, check_outputs, observed
from experiments.running.ranks import Rank
from experiments.running.run import BuildCache, save
from experiments.running.work_items import WorkItems
from wan.capture import CaptureRequest
from wan.config import RunConfig
from wan.errors import short_repr
from wan.files import read_json

MANIFEST_SECONDS = 5.0  # between two manifests: one of ten thousand runs takes its time
REMEDY = "choose another --output_dir, or make everything again with --overwrite"


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
    runs, rank, folder = plan(args, config), rank or Rank(), Path(args.output_dir)
    videos = [video for path in runs for video in videos_of(args, [path])]
    models = {
        run.checkpoint_path: replace(config, checkpoint_path=run.checkpoint_path) for run in runs.values()
    }
    for model in models.values():
        check_outputs(args, model, [folder / "manifest.json", *runs, *videos])
    with observed(args) as watch, WorkItems(folder / "items", rank) as items:
        watch.prints_blocks = rank.count == 1
        require_writable(folder / "manifest.json")
        shared = {path: identity(replace(model, prompt="", seed=0)) for path, model in models.items()}
        runner = SweepRunner(args, runs, shared, quantities, requests, build, items, watch)
        waiting = runner.scan()
        if waiting and videos:
            check_video(config)
        sizes = dict.fromkeys(waiting, estimate_bytes(config, requests))
        require_space(folder, sizes or {str(runner.manifest): 0})
        runner.write_manifest()
        if len(waiting) < len(runs):
            watch.print(f"{len(runs) - len(waiting)} of {len(runs)} runs are done already")
        runner.make(waiting)
    if failures := runner.failures:
        raise RunError(f"{len(failures)} of {len(runs)} runs failed; first {failures[0]}")


class SweepRunner:
    """The runs of a sweep by their paths, the state of each, and the model that is loaded for them."""

    def __init__(
        self,
        args: argparse.Namespace,
        runs: Mapping[str, RunConfig],
        shared: Mapping[str | None, dict[str, Any]],
        quantities: Mapping[str, bool],
        requests: Sequence[CaptureRequest],
        build: BuildCache,
        items: WorkItems,
        watch: Progress,
    ):
        """shared is what the runs of each checkpoint depend on (identity), but for prompt and seed."""
        self.quantities = quantities
        self.args, self.runs, self.requests, self.build = args, runs, requests, build
        self.items, self.watch, self.folder = items, watch, Path(args.output_dir)
        self.manifest, self.manifest_time = self.folder / "manifest.json", 0.0
        self.states = dict[str, str]()  # path -> waiting, partial, done or failed
        self.failures = list[str]()
        self.session: causal.LoadedModel | None = None
        self.loaded: str | None = None  # the checkpoint of the session
        self.has_folders = len(shared) > 1  # one for each checkpoint
        self.fingerprints = {
            path: fingerprint(shared[run.checkpoint_path], prompt=run.prompt, seed=run.seed)
            for path, run in runs.items()
        }
        self.names = {path: fingerprint(quantities, run=of_run) for path, of_run in self.fingerprints.items()}
        settings = {checkpoint: {**of_one, **quantities} for checkpoint, of_one in shared.items()}
        self.settings: dict[str, dict[str, Any]] = {  # by the folder of a checkpoint, "" where there is one
            Path(path).parent.name if self.has_folders else "": {
                "fingerprint": fingerprint(settings[run.checkpoint_path]),
                "settings": settings[run.checkpoint_path],
            }
            for path, run in runs.items()
        }

    def scan(self) -> list[str]:
        """Find the state of each run, return the paths to be made. CacheError for other settings."""
        if not self.args.overwrite and self.manifest.exists():
            self._require_same_settings()
        for path in self.runs:
            run, made_of = self.runs[path], self.fingerprints[path]
            videos = videos_of(self.args, [path])
            lacks_video = any(mp4_tag(video) != video_tag(made_of, run) for video in videos)
            if self.args.overwrite or lacks_video:
                self.items.path(self.names[path]).unlink(missing_ok=True)
            if self.is_done(path):
                self.states[path] = "done"
                continue
            self.states[path] = "waiting" if self.args.overwrite else self._state_of_cache(path)
            if self.states[path] == "done" and lacks_video:
                self.states[path] = "waiting"
            elif self.states[path] == "done":
                self._finish(path)
        return [path for path, state in self.states.items() if state != "done"]

    def _require_same_settings(self) -> None:
        """Raise CacheError where the folder's manifest is of a sweep with other settings."""
        found = read_json(self.manifest, CacheError)
        if not isinstance(found, dict) or not isinstance(found.get("runs"), list):
            raise CacheError(f"{self.manifest} is of no sweep, and this one would replace it; {REMEDY}")
        theirs = {"": found, **found.get("checkpoints", {})}
        for name, ours in self.settings.items():
            before, settings = theirs.get(name, {}).get("settings"), ours["settings"]
            if before is not None and theirs[name].get("fingerprint") != ours["fingerprint"]:
                which = next((n for n in settings if before.get(n) != settings[n]), "a setting")
                raise CacheError(
                    f"{self.manifest} is of a sweep with {which} {short_repr(before.get(which))}, this one "
                    f"has {short_repr(settings.get(which))}; {REMEDY}"
                )

    def is_done(self, path: str) -> bool:
        """Check that an item says that the cache at path is whole, and the cache is the same as then."""
        name = self.names[path]
        try:
            cache, made = Path(path).stat(), self.items.path(name).stat().st_mtime_ns
        except OSError:
            return False
        unchanged = (self.items.read(name) or {}).get("bytes") == cache.st_size and made >= cache.st_mtime_ns
        return unchanged and self._is_of_this_run(path, peek(path))

    def _is_of_this_run(self, path: str, cache: Mapping[str, Any]) -> bool:
        """Check that a cache is what this sweep makes at path."""
        captured = {name: name in cache for name in self.quantities}
        return cache.get("fingerprint") == self.fingerprints[path] and captured == self.quantities

    def _state_of_cache(self, path: str) -> str:
        """Return done, partial or waiting. CacheError for a cache that was made with other settings."""
        try:
            cache = load_cache(path, expect=("atlas",))
        except CacheError:  # not there, or damaged: to be made
            return "waiting"
        require_same(path, cache.get("fingerprint"), self.fingerprints[path], REMEDY)
        if not self._is_of_this_run(path, cache):
            raise CacheError(f"{path} is of a sweep that captured other quantities; {REMEDY}")
        return "partial" if cache.get("partial") else "done"

    def make(self, waiting: Sequence[str]) -> None:
        """Make what waits and no other process makes. Raises StoppedError after Ctrl-C."""
        paths, tried = {name: path for path, name in self.names.items()}, 0
        try:
            names = self.items.claim(list(paths), lambda name: self.is_done(paths[name]), self.watch)
            for tried, name in enumerate(names, 1):
                if self.items.rank.count == 1:
                    self.watch.print(f"run {tried}/{len(waiting)}: {paths[name]}")
                self._make_one(paths[name], waiting)
                if time.monotonic() - self.manifest_time > MANIFEST_SECONDS:
                    self.write_manifest()
                if self.watch.stopping:
                    break
        finally:
            self.write_manifest()
        if self.watch.stopping and self._num_done() + len(self.failures) < len(self.runs):
            raise StoppedError(
                f"stopped after {tried} of {len(waiting)} runs; to continue, run the same command again"
            )

    def _num_done(self) -> int:
        return sum(state == "done" for state in self.states.values())

    def _make_one(self, path: str, waiting: Sequence[str]) -> None:
        """Make one cache, and its video where it was asked for."""
        run = self.runs[path]

        try:
            with claimed(dict.fromkeys((path, *videos_of(self.args, [path])), 0)):
                if self.session is None or self.loaded != run.checkpoint_path:
                    self.session = None  # frees its weights first
                    mine = [self.runs[p] for p in waiting]
                    same = [r.prompt for r in mine if r.checkpoint_path == run.checkpoint_path]
                    prompts = list(dict.fromkeys(same))
                    decodes = "" if self.args.save_video is None else SAVE_VIDEO
                    self.session = causal.prepare(
                        run, self.requests, prompts, self.watch, replays=True, decodes=decodes
                    )
                    self.loaded = run.checkpoint_path
                made = causal.extract_next(self.session, run, self.requests, self.watch)
                save(self.args, made, {path: self.build}, self.watch)
            self._finish(path)
        except StoppedError as error:
            self.states[path] = "partial" if Path(path).exists() else "waiting"
            raise StoppedError(
                f"{error}; {self._num_done()} of {len(self.runs)} runs are done and will not be made again"
            ) from None
        except RunError as error:
            self.states[path] = "failed"
            self.failures.append(f"{path}: {error}")
            self.watch.print(f"failed: {error}")

    def _finish(self, path: str) -> None:
        """Record that the cache at path is whole."""
        self.states[path] = "done"
        whole = {"bytes": Path(path).stat().st_size, "fingerprint": self.fingerprints[path]}
        self.items.write(self.names[path], self._row(path) | whole)

    def _row(self, path: str) -> dict[str, Any]:
        """Return the row of a run in the manifest."""
        run, file = self.runs[path], Path(path).relative_to(self.folder)
        weights = {"checkpoint": file.parent.name} if self.has_folders else {}
        row = {"file": str(file), "prompt": run.prompt, "seed": run.seed}
        return row | weights | {"state": self.states[path]}

    def write_manifest(self) -> None:
        """Write the settings and a row for each run, with what other processes have finished."""
        self.manifest_time = time.monotonic()
        recorded = {file.stem for file in self.items.folder.glob("*.json")}
        self.states |= {path: "done" for path, name in self.names.items() if name in recorded}
        rows = [self._row(path) for path in self.runs]
        content = {**self.settings.get("", {"checkpoints": self.settings}), "runs": rows}
        with replacing(self.manifest) as file:
            file.write(json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n")
