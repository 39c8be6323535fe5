"""The runs of a sweep on disk: which are done, of what settings, and the manifest that says so.

A record, items/NAME.json, is written after its cache, and says alone that it is whole: caches are not opened
for it. One fingerprint, which the manifest, the records and every cache carry, says what they were made with.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experiments.caches import load_cache
from experiments.caches.atomic_files import replacing
from experiments.caches.errors import CacheError
from experiments.extraction import devices
from experiments.extraction.provenance import files_of
from experiments.running.claims import item_name
from wan import checkpoint
from wan.config import RunConfig
from wan.errors import quoted
from wan.text_files import read_json

# These do not change an atlas, or only as another machine does; files stand in it with what they hold, not by
# their paths.
NOT_SETTINGS = (
    *("prompt", "seed", "device", "gpus", "layer_indices", "layer_index", "step", "base", "offload"),
    *("t5_cpu", "dtype", "embeds_dir", "ckpt_dir", "checkpoint_path", "prompt_embeds"),
)

WRITE_SECONDS = 5.0  # between two manifests: one of ten thousand runs takes its time
OTHERWISE = "choose another --output_dir, or make everything again with --overwrite"


def settings_of(config: RunConfig, quantities: Mapping[str, bool]) -> dict[str, Any]:
    """All that the caches of a sweep have in common: what the config says, what is captured, and what the
    files hold.
    """
    weights = checkpoint.weights_file(config.ckpt_dir, config.checkpoint_path)
    dtype = devices.choose_dtype(config.dtype, devices.choose_device(config.device, config.offload))
    settings = {name: value for name, value in asdict(config).items() if name not in NOT_SETTINGS}
    of_files = {
        "weights": "checkpoint" if config.checkpoint_path else "base",
        "weights_sha256": checkpoint.file_sha256(weights),
        "files": files_of(config, weights),
        "dtype": str(dtype).removeprefix("torch."),
    }
    return settings | dict(quantities) | of_files


def fingerprint(settings: Mapping[str, Any]) -> str:
    """One short text that differs where settings do."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


@dataclass
class Sweep:
    """The runs of a sweep by their paths, and how far each is: waiting, partial, done or failed."""

    folder: Path
    settings: dict[str | None, dict[str, Any]]  # by checkpoint
    runs: dict[str, RunConfig]
    with_videos: bool = False  # a run is done where its mp4 is there too
    states: dict[str, str] = field(default_factory=dict)
    written: float = -WRITE_SECONDS

    def __post_init__(self) -> None:
        prints = {checkpoint: fingerprint(settings) for checkpoint, settings in self.settings.items()}
        self.fingerprints = {path: prints[run.checkpoint_path] for path, run in self.runs.items()}
        self.names = {
            path: item_name(self.fingerprints[path], run.prompt, run.seed) for path, run in self.runs.items()
        }

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def items(self) -> Path:
        """The folder of records and claims."""
        return self.folder / "items"

    @property
    def done(self) -> int:
        return sum(state == "done" for state in self.states.values())

    def look(self, overwrite: bool) -> list[str]:
        """See what is there -> the paths to be made. Raises CacheError for caches of other settings."""
        if not overwrite:
            self._require_same_settings()
        for path, run in self.runs.items():
            lacks_video = self.with_videos and not Path(path).with_suffix(".mp4").is_file()
            if overwrite or lacks_video:
                self._record(path).unlink(missing_ok=True)
            if overwrite:
                self.states[path] = "waiting"
            elif self.is_recorded(path):
                self.states[path] = "done"
            else:
                self.states[path] = state_of(path, self.fingerprints[path], run)
                if self.states[path] == "done" and lacks_video:
                    self.states[path] = "waiting"
                elif self.states[path] == "done":
                    self.finish(path)
        return [path for path, state in self.states.items() if state != "done"]

    def is_recorded(self, path: str) -> bool:
        """Whether a record says that the cache at path is whole, and the cache is as it was then."""
        try:
            record, cache = self._record(path).stat(), Path(path).stat()
            said = json.loads(self._record(path).read_text(encoding="utf-8"))
            return said["bytes"] == cache.st_size and record.st_mtime_ns >= cache.st_mtime_ns
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def finish(self, path: str) -> None:
        """Record that the cache at path is whole."""
        self.states[path] = "done"
        said = self._row(path) | {"bytes": Path(path).stat().st_size, "fingerprint": self.fingerprints[path]}
        with replacing(self._record(path)) as file:
            file.write(json.dumps(said, indent=1, ensure_ascii=False).encode() + b"\n")

    def _record(self, path: str) -> Path:
        return self.items / f"{self.names[path]}.json"

    def _row(self, path: str) -> dict[str, Any]:
        run, file = self.runs[path], Path(path).relative_to(self.folder)
        weights = {"checkpoint": file.parent.name} if len(self.settings) > 1 else {}
        state = {"state": self.states[path]}
        return {"file": str(file), "prompt": run.prompt, "seed": run.seed} | weights | state

    @property
    def _content(self) -> dict[str, Any]:
        """What the manifest says beside its runs: settings and their fingerprint, of each checkpoint."""
        each = {
            Path(path).parent.name: {"fingerprint": self.fingerprints[path], "settings": settings}
            for path, run in self.runs.items()
            for settings in [self.settings[run.checkpoint_path]]
        }
        return next(iter(each.values())) if len(self.settings) == 1 else {"checkpoints": each}

    def _require_same_settings(self) -> None:
        if not self.manifest.exists():  # the caches decide
            return
        manifest = read_json(self.manifest, CacheError)
        if not isinstance(manifest, dict) or not isinstance(manifest.get("runs"), list):
            raise CacheError(f"{self.manifest} is of no sweep, and this one would replace it; {OTHERWISE}")
        mine = self._content
        pairs = [(manifest, mine)] if "settings" in mine else []
        before = manifest.get("checkpoints")
        if isinstance(before, dict) and not pairs:
            pairs = [(before[name], of) for name, of in mine["checkpoints"].items() if name in before]
        for theirs, ours in pairs:
            self._require_same(theirs, ours)

    def _require_same(self, theirs: Any, ours: dict[str, Any]) -> None:
        before = theirs.get("settings") if isinstance(theirs, dict) else None
        if not isinstance(before, dict) or theirs.get("fingerprint") == ours["fingerprint"]:
            return
        settings = ours["settings"]
        name = next((n for n in settings if before.get(n) != settings[n]), "a setting")
        raise CacheError(
            f"{self.manifest} is of a sweep with {name} {quoted(before.get(name))}, this one has "
            f"{quoted(settings.get(name))}; {OTHERWISE}"
        )

    def write(self, now_and_then: bool = False) -> None:
        """Write the manifest, whole or not at all, with what other processes have done."""
        if now_and_then and time.monotonic() - self.written < WRITE_SECONDS:
            return
        self.written = time.monotonic()
        recorded = {record.stem for record in self.items.glob("*.json")}
        for path, name in self.names.items():
            if name in recorded:
                self.states[path] = "done"
        content = self._content | {"runs": [self._row(path) for path in self.runs]}
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
