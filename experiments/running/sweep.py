"""Many prompts and seeds with a model loaded once: an atlas each, a manifest beside them, and no work done
twice.

A sweep that was killed goes on when the same command runs again: a file that is whole, and made with the same
settings,
is left as it is. What was made with other settings is never mixed in: one fingerprint, which the manifest and
every cache
carry, says which they are.
"""

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.caches import load_cache
from experiments.caches.atomic_files import replacing
from experiments.caches.errors import CacheError, RunError, StoppedError
from experiments.extraction import causal, devices
from experiments.extraction.memory_estimate import estimate_bytes
from experiments.extraction.provenance import files_of
from experiments.extraction.result import Extraction
from experiments.extraction.video import check_video
from experiments.running.cli import videos_of
from experiments.running.jobs import deterministic, name_files
from experiments.running.output_locks import claimed, require_space
from experiments.running.progress import Progress, stopping_when_asked
from experiments.running.results import BuildCache, save
from experiments.running.sweep_plan import plan
from wan import checkpoint
from wan.config import RunConfig
from wan.errors import quoted
from wan.modules.capture import CaptureRequest
from wan.text_files import read_json

# These do not change an atlas, or only as another machine does; files stand in it with what they hold, not by
# their paths.
NOT_SETTINGS = (
    "prompt", "seed", "device", "layer_indices", "layer_index", "step", "base", "offload", "t5_cpu", "dtype",
    "embeds_dir", "ckpt_dir", "checkpoint_path", "prompt_embeds",
)  # fmt: skip

OTHERWISE = "choose another --output_dir, or make everything again with --overwrite"


def settings_of(config: RunConfig, quantities: Mapping[str, bool]) -> dict[str, Any]:
    """All that the caches of a sweep have in common: what the config says, what is captured, and what the
    files hold.
    """
    weights = checkpoint.weights_file(config.ckpt_dir, config.checkpoint_path)
    dtype = devices.choose_dtype(config.dtype, devices.choose_device(config.device, config.offload))
    settings = {name: value for name, value in asdict(config).items() if name not in NOT_SETTINGS}
    return settings | dict(quantities) | {
        "weights": "checkpoint" if config.checkpoint_path else "base",
        "weights_sha256": checkpoint.file_sha256(weights),
        "files": files_of(config, weights),
        "dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip


def fingerprint(settings: Mapping[str, Any]) -> str:
    """One short text that differs where settings do."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


@dataclass
class Sweep:
    """The runs of a sweep by their paths, and how far each is: waiting, partial, done or failed."""

    manifest: Path
    settings: dict[str, Any]
    runs: dict[str, RunConfig]
    states: dict[str, str] = field(default_factory=dict)

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.settings)

    @property
    def done(self) -> int:
        return sum(state == "done" for state in self.states.values())

    def look(self, overwrite: bool) -> list[str]:
        """See what is there -> the paths to be made. Raises CacheError for caches of other settings."""
        if not overwrite:
            self._require_same_settings()
        for path, run in self.runs.items():
            self.states[path] = "waiting" if overwrite else state_of(path, self.fingerprint, run)
        return [path for path, state in self.states.items() if state != "done"]

    def _require_same_settings(self) -> None:
        try:
            manifest = read_json(self.manifest, CacheError)
        except CacheError:  # none yet, or not ours: the caches decide
            return
        before = manifest.get("settings")
        if not isinstance(before, dict) or manifest.get("fingerprint") == self.fingerprint:
            return
        name = next((n for n in self.settings if before.get(n) != self.settings[n]), "a setting")
        raise CacheError(
            f"{self.manifest} is of a sweep with {name} {quoted(before.get(name))}, this one has "
            f"{quoted(self.settings.get(name))}; {OTHERWISE}"
        )

    def write(self) -> None:
        """Write the manifest, whole or not at all."""
        table = [
            {"file": Path(path).name, "prompt": run.prompt, "seed": run.seed, "state": self.states[path]}
            for path, run in self.runs.items()
        ]
        content = {"fingerprint": self.fingerprint, "settings": self.settings, "runs": table}
        with replacing(self.manifest) as file:
            file.write(json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n")


def state_of(path: str | Path, expected: str, run: RunConfig) -> str:
    """done, partial or waiting. Raises CacheError for a cache that was made with other settings."""
    if not Path(path).exists():
        return "waiting"
    try:
        cache = load_cache(path, expect=("atlas",))
    except CacheError:  # damaged: to be made again
        return "waiting"
    wanted = {"prompt": run.prompt, "seed": run.seed, "fingerprint": expected}
    for name, value in wanted.items():
        if cache.get(name) != value:
            found = quoted(cache.get(name))
            raise CacheError(f"{path} has {name} {found}, this sweep {quoted(value)}; {OTHERWISE}")
    return "partial" if cache.get("partial") else "done"


def run_sweep(
    args: argparse.Namespace,
    config: RunConfig,
    requests: Sequence[CaptureRequest],
    build: BuildCache,
    quantities: Mapping[str, bool],
) -> None:
    """Make every cache of a sweep that is not there yet; quantities says which optional fields each must
    (not) have.

    Raises CacheError where the folder holds caches of other settings or another sweep is at it, RunError at
    the end
    where runs failed, and StoppedError after Ctrl-C.
    """
    runs = plan(args, config)
    manifest = Path(args.output_dir) / "manifest.json"
    args.files.writes("the manifest", manifest)
    name_files(args, config, runs, [video for path in runs for video in videos_of(args, [path])])
    with (
        Progress(args.quiet, args.log_file) as watch,
        claimed({str(manifest): 0}),
        stopping_when_asked(watch),
        deterministic(args.deterministic),
    ):
        sweep = Sweep(manifest, settings_of(config, quantities), runs)
        waiting = sweep.look(bool(args.overwrite))
        sizes = dict.fromkeys(waiting, estimate_bytes(config, requests)) or {str(manifest): 0}
        require_space(manifest.parent, sizes)
        sweep.write()
        if len(waiting) < len(runs):
            watch.print(f"{sweep.done} of {len(runs)} runs are done already")
        if args.save_video is not None:
            check_video(config)
        failures = _make(args, sweep, waiting, requests, build, watch) if waiting else []
    if failures:
        raise RunError(f"{len(failures)} of {len(runs)} runs failed; first {failures[0]}")


def _make(
    args: argparse.Namespace,
    sweep: Sweep,
    waiting: Sequence[str],
    requests: Sequence[CaptureRequest],
    build: BuildCache,
    watch: Progress,
) -> list[str]:
    """Make the caches of a sweep that wait -> what failed, a line each. Raises StoppedError after Ctrl-C."""
    prompts = list(dict.fromkeys(sweep.runs[path].prompt for path in waiting))
    session = causal.prepare(sweep.runs[waiting[0]], requests, prompts, watch)
    failures = []

    def build_marked(run: Extraction) -> dict[str, Any]:
        cache = build(run)
        return (cache if isinstance(cache, dict) else cache.to_dict()) | {"fingerprint": sweep.fingerprint}

    for number, path in enumerate(waiting, 1):
        watch.print(f"run {number}/{len(waiting)}: {path}")
        try:
            with claimed(dict.fromkeys((path, *videos_of(args, [path])), 0)):
                made = causal.extract_next(session, sweep.runs[path], requests, watch)
                save(args, made, {path: build_marked}, watch)
            sweep.states[path] = "done"
        except StoppedError as error:
            sweep.states[path] = "partial" if Path(path).exists() else "waiting"
            raise StoppedError(
                f"{error}; {sweep.done} of {len(sweep.runs)} runs are done and will not be made again"
            ) from None
        except RunError as error:
            sweep.states[path] = "failed"
            failures.append(f"{path}: {error}")
            watch.print(f"failed: {error}")
        finally:
            sweep.write()
        if watch.stopping and number < len(waiting):
            raise StoppedError(
                f"stopped after {number} of {len(waiting)} runs; to continue, run the same command again"
            )
    return failures
