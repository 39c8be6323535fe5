"""Make an atlas for each prompt, seed and checkpoint with the engine. manifest.json lists all runs.

A cache carries the fingerprint of everything it depends on: the same command makes missing ones, and never
uses or replaces caches of other settings.
"""

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.caches.files import (
    CacheError,
    claimed,
    remove_leftovers,
    replacing,
    require_same,
    require_space,
)
from experiments.caches.mp4 import mp4_tag
from experiments.caches.store import peek
from experiments.extraction.video import check_video
from experiments.memory import estimate_bytes
from experiments.progress import Progress, deterministic, observed
from experiments.prompts import encode_prompts, needs_encoder
from experiments.provenance import (
    check_outputs,
    choose_device,
    choose_dtype,
    fingerprint,
    identity,
    video_tag,
)
from experiments.running.cli import plan, videos_of
from experiments.running.engine import cached, called, dask_client, work_through
from experiments.running.run import BuildCache, cache_builders, make_caches, save, video_of
from experiments.session import load
from wan import checkpoint
from wan.capture import CaptureRequest
from wan.checkpoint import read_model_config
from wan.config import RunConfig
from wan.errors import ConfigError, short_repr
from wan.files import read_sealed
from wan.seals import sealed

MANIFEST_SECONDS = 5.0  # between two manifests: one of ten thousand runs takes its time
PROMPTS_AT_ONCE = 64  # that one worker encodes
REMEDY = "choose another --output_dir, or make everything again with --overwrite"


@dataclass(frozen=True)
class Run:
    """One run of a sweep: its cache, its settings, and the fingerprint that the cache has."""

    path: str
    config: RunConfig
    fingerprint: str
    model: str  # a fingerprint of all but prompt and seed

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class Sweep:
    """Makes a cache for each run (the engine's Work)."""

    args: argparse.Namespace
    requests: Sequence[CaptureRequest]
    build: BuildCache
    quantities: Mapping[str, bool]  # optional fields that caches (do not) have
    prompts: Sequence[str] = ()  # that this process will need, in their order
    begun: float = 0.0  # under --overwrite: older files stay until their run is made again

    def is_done(self, name: str, run: Run) -> bool:
        return self.scan(run) == "done"

    def scan(self, run: Run) -> str:
        """Return done, partial or waiting, by a run's cache and video. CacheError for other settings."""
        cache = peek(run.path)
        if not cache or os.path.getmtime(run.path) < self.begun:  # not there, damaged, or to be replaced
            return "waiting"
        require_same(run.path, cache.get("fingerprint"), run.fingerprint, REMEDY)
        if {name: name in cache for name in self.quantities} != self.quantities:
            raise CacheError(f"{run.path} belongs to a sweep that captured other quantities; {REMEDY}")
        if cache.get("partial"):
            return "partial"
        videos = videos_of(self.args, [run.path])
        tag = video_tag(run.fingerprint, run.config, self.args.vae_dtype)
        return "done" if not videos or mp4_tag(videos[0]) == tag else "waiting"

    def make(self, name: str, run: Run, watch: Progress) -> None:
        """Make one cache, after its video if one is wanted."""
        videos = videos_of(self.args, [run.path])
        for path in (run.path, *videos):  # of killed processes
            remove_leftovers(Path(path))
        # Prompt and seed are no part of the key: all runs of one checkpoint share a model
        key = fingerprint({"model": run.model, "requests": str(self.requests)})
        with deterministic() if self.args.deterministic else nullcontext():
            extract = cached("model", key, lambda: self._load(run.config, watch))
            with video_of(self.args, run.config, videos[0], watch) if videos else nullcontext():
                save(self.args, extract(run.config, watch), {run.path: self.build}, watch)

    def _load(self, config: RunConfig, watch: Progress) -> Any:
        """Return a function that rolls out a config: with a model of this process."""
        decodes = self.args.save_video is not None
        session = load(config)
        session.prepare(self.requests, self.prompts, watch, replays=True, decodes=decodes)
        return lambda config, watch: session.generate(config=config, requests=self.requests, observer=watch)


@dataclass(frozen=True)
class Encoding:
    """Makes the prompt embeddings that workers will read, for a list of prompts (the engine's Work)."""

    config: RunConfig

    def _where(self) -> tuple[Any, ...]:
        device = choose_device(self.config.device)
        return read_model_config(self.config.ckpt_dir), choose_dtype(self.config.dtype, device), device

    def is_done(self, name: str, prompts: Sequence[str]) -> bool:
        return not needs_encoder(self.config, prompts, *self._where())

    def make(self, name: str, prompts: Sequence[str], watch: Progress) -> None:
        encode_prompts(self.config, prompts, *self._where())


def make_atlases(args: argparse.Namespace, config: RunConfig) -> None:
    """Make the atlas of one run, or every missing one of a sweep, with the quantities of the flags.

    Raises CacheError where the folder holds caches of other settings, RunError at the end where runs failed,
    and StoppedError after Ctrl-C.
    """
    requests = cache_builders.atlas_requests(
        config, args.mass, args.key_curve, args.cross, args.rope_bands, args.query_key_means
    )
    build = cache_builders.atlas_cache
    if not (args.prompts or args.seeds or args.checkpoints or args.output_dir):
        make_caches(args, config, requests, {args.output_path: build})
        return
    quantities = {"frame_mass": args.mass, "key_curve": args.key_curve, "cross_mass": args.cross}
    quantities |= {"frame_logits_by_band": args.rope_bands, "query_means": args.query_key_means}
    if config.gpus > 1:
        raise ConfigError(
            f"--gpus {config.gpus} makes one rollout; a sweep takes --workers N, one for each GPU"
        )
    # 1. Which runs, and where their files go
    planned = plan(args, config)
    folder, manifest = Path(args.output_dir), Path(args.output_dir) / "manifest.json"
    videos = [video for path in planned for video in videos_of(args, [path])]
    models = {
        run.checkpoint_path: replace(config, checkpoint_path=run.checkpoint_path) for run in planned.values()
    }
    for model in models.values():
        check_outputs(args, model, [manifest, *planned, *videos])
    # Workers of this machine have its files, which are hashed while those processes start
    hashes = {
        path: checkpoint.file_sha256(checkpoint.weights_file(one.ckpt_dir, path))
        for path, one in models.items()
        if args.workers
    }
    with (
        claimed({str(manifest): 0}),
        observed(args) as watch,
        dask_client(args, config.device) as client,
    ):
        # 2. Fingerprints, by the weights and the device of whoever makes the caches
        settings_of = {}
        for path, one in models.items():
            known_hash = hashes[path].result() if path in hashes else None
            settings_of[path] = called(client, identity, one, known_hash)
        for settings in settings_of.values():
            del settings["prompt"], settings["seed"]
        runs = {}
        for path, one in planned.items():
            settings = settings_of[one.checkpoint_path]
            of_run = fingerprint(settings, prompt=one.prompt, seed=one.seed)
            name = str(Path(path).relative_to(folder).with_suffix(""))
            runs[name] = Run(path, one, of_run, fingerprint(settings))
        # 3. What is there already
        prompts = list(dict.fromkeys(run.prompt for run in planned.values()))
        quiet = argparse.Namespace(**{**vars(args), "quiet": True})  # of workers, which nobody watches
        begun = time.time() if args.overwrite else 0.0
        known = () if client else prompts
        work = Sweep(quiet if client else args, requests, build, quantities, known, begun)
        listing = Manifest(
            manifest, runs, {path: one | dict(quantities) for path, one in settings_of.items()}
        )
        if not args.overwrite:
            listing.require_same_settings()
            listing.states = {name: work.scan(one) for name, one in runs.items()}
        waiting = [one.path for name, one in runs.items() if listing.states[name] != "done"]
        if waiting and videos:
            check_video(config)
        require_space(folder, dict.fromkeys(waiting, estimate_bytes(config, requests)) or {str(manifest): 0})
        listing.write()
        # 4. What is missing
        try:
            if client and waiting and config.embeds_dir and not config.prompt_embeds:
                parts = range(0, len(prompts), PROMPTS_AT_ONCE)  # umT5 is large to load
                items = {f"prompts_{n}": prompts[n : n + PROMPTS_AT_ONCE] for n in parts}
                work_through(Encoding(config), items, folder, watch, client)
            work_through(work, runs, folder, watch, client, listing.ended)
        finally:
            listing.write()


class Manifest:
    """manifest.json: the settings of a sweep, and a row with the state of each run."""

    def __init__(self, path: Path, runs: Mapping[str, Run], shared: Mapping[str | None, dict[str, Any]]):
        self.path, self.runs, self.written = path, runs, 0.0
        self.states = dict.fromkeys(runs, "waiting")  # or partial, done, failed
        self.has_folders = len(shared) > 1  # one for each checkpoint
        self.settings: dict[str, Any] = {}
        for run in runs.values():
            settings = shared[run.config.checkpoint_path]
            name = Path(run.path).parent.name if self.has_folders else ""
            self.settings[name] = {"fingerprint": fingerprint(settings), "settings": settings}

    def require_same_settings(self) -> None:
        """Raise CacheError where the folder's manifest belongs to a sweep with other settings."""
        if not self.path.exists():
            return
        found = read_sealed(self.path, CacheError, "remove it: each cache says what it is of")
        theirs: dict[str, Any] = {"": found, **found.get("checkpoints", {})}
        other = "" if "runs" in found else "no sweep, and this one would replace it"
        for folder, ours in self.settings.items():
            before, settings = theirs.get(folder, {}).get("settings"), ours["settings"]
            if before is not None and before != settings:
                which = next((n for n in settings if before.get(n) != settings[n]), "a setting")
                other = f"a sweep with {which} {short_repr(before.get(which))}, "
                other += f"this one has {short_repr(settings.get(which))}"
        if other:
            raise CacheError(f"{self.path} belongs to {other}; {REMEDY}")

    def ended(self, name: str, state: str) -> None:
        """Record the state of a finished run; write the manifest every MANIFEST_SECONDS."""
        if state == "stopped":
            state = "partial" if Path(self.runs[name].path).exists() else "waiting"
        self.states[name] = state
        if time.monotonic() > self.written + MANIFEST_SECONDS:
            self.write()

    def write(self) -> None:
        rows = []
        for name, run in self.runs.items():
            at = Path(run.path).relative_to(self.path.parent)
            row = {"file": str(at), "prompt": run.config.prompt, "seed": run.config.seed}
            row |= {"checkpoint": at.parent.name} if self.has_folders else {}
            rows.append(row | {"state": self.states[name]})
        content = {**self.settings.get("", {"checkpoints": self.settings}), "runs": rows}
        with replacing(self.path) as file:
            file.write(sealed(content, indent=1))
        self.written = time.monotonic()
