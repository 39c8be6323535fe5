"""The runs of a sweep on disk: which are done, of what settings, and the manifest that says so.

A record, items/NAME.json, is written after its cache, and says alone that it is whole: caches are not opened
for it. One fingerprint, which the manifest, the records and every cache carry, says what they were made with.
"""

import argparse
import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.caches import load_cache
from experiments.caches.files import CacheError, replacing
from experiments.extraction import devices
from experiments.extraction.provenance import files_of
from experiments.running.work_items import item_name
from wan import checkpoint
from wan.config import RunConfig
from wan.errors import ConfigError, short_repr
from wan.files import MAX_PROMPTS, read_json, read_text

# --- The runs of a sweep on disk: which are done, of what settings, and the manifest that says so
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
            f"{self.manifest} is of a sweep with {name} {short_repr(before.get(name))}, this one has "
            f"{short_repr(settings.get(name))}; {OTHERWISE}"
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
            found = short_repr(cache.get(name))
            raise CacheError(f"{path} has {name} {found}, this sweep {short_repr(value)}; {OTHERWISE}")
    return "partial" if cache.get("partial") else "done"


# --- Which runs a sweep has: prompts of a file, seeds of the command line, and the name of every cache.
SLUG_LENGTH = 60
BASE = "base"  # in place of a checkpoint: the weights of ckpt_dir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts", metavar="FILE", help="a sweep over the prompts in a file, one per line; # comments"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", help="a sweep over several seeds, in place of one --seed"
    )
    parser.add_argument("--output_dir", help="folder of a sweep: PROMPT_sSEED.pt each, and manifest.json")


def add_checkpoints(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoints",
        nargs="+",
        metavar="FILE",
        help=f"a sweep over several weights, each in a folder of its name; {BASE} is those of --ckpt_dir",
    )


def plan(args: argparse.Namespace, config: RunConfig) -> dict[str, RunConfig]:
    """Path -> settings of every run of a sweep. Raises ConfigError for flags and files that do not fit.

    Runs of one checkpoint stand together.
    """
    checkpoints = getattr(args, "checkpoints", None)
    if not args.output_dir:
        raise ConfigError("--prompts, --seeds and --checkpoints need --output_dir, a folder for the caches")
    if checkpoints and (args.checkpoint_path or args.no_checkpoint):
        raise ConfigError("--checkpoints excludes --checkpoint_path and --no_checkpoint")
    for one, many in (("prompt", "prompts"), ("seed", "seeds")):
        if getattr(args, one) is not None and getattr(args, many):
            raise ConfigError(f"--{one} and --{many} exclude each other")
    if args.prompts and config.prompt_embeds:
        raise ConfigError(
            "--prompts and --prompt_embeds exclude each other: a file holds the states of one prompt"
        )
    if args.save_video:
        raise ConfigError("a sweep puts its videos beside its caches: give --save_video without a PATH")
    prompts = read_prompts(args.prompts) if args.prompts else [config.prompt]
    slugs = slugs_of(prompts)
    weights = (
        folders_of(checkpoints, Path(args.output_dir))
        if checkpoints
        else {config.checkpoint_path: Path(args.output_dir)}
    )
    return {
        str(folder / f"{slugs[prompt]}_s{seed}.pt"): replace(
            config, checkpoint_path=checkpoint, prompt=prompt, seed=seed
        )
        for checkpoint, folder in weights.items()
        for prompt in prompts
        for seed in dict.fromkeys(args.seeds or [config.seed])
    }


def folders_of(checkpoints: Sequence[str], folder: Path) -> dict[str | None, Path]:
    """Checkpoint -> its folder below a folder, named as its file. None are the base weights."""
    paths = {None if name == BASE else name: name for name in checkpoints}
    names = {path: name if path is None else Path(name).stem for path, name in paths.items()}
    for path, name in names.items():
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{path} not found; --checkpoints names files of weights, or {BASE}")
        if twin := next((p for p, n in names.items() if n == name and p != path), None):
            raise ConfigError(f"--checkpoints {path} and {twin} would share the folder {name}; rename one")
    return {path: folder / name for path, name in names.items()}


def read_prompts(path: str | Path) -> list[str]:
    """The lines of a text file, without empty ones, comments (#) and repetitions."""
    lines = [line.strip() for line in read_text(path).splitlines()]
    prompts = list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not prompts:
        raise ConfigError(f"{path} holds no prompt; write one per line")
    if len(prompts) > MAX_PROMPTS:
        raise ConfigError(f"{path} holds {len(prompts)} prompts, at most {MAX_PROMPTS} are read; split it")
    return prompts


def slugs_of(prompts: Sequence[str]) -> dict[str, str]:
    """Prompt -> name for files: its words in lower case, told apart."""
    words = {prompt: re.sub(r"[\W_]+", "-", prompt.lower()).strip("-") for prompt in prompts}
    return told_apart({prompt: slug or "prompt" for prompt, slug in words.items()}, SLUG_LENGTH)


def told_apart(names: Mapping[str, str], most: int) -> dict[str, str]:
    """Prompt -> name for files; where two would share one, or it is cut to so many bytes, a few digits of a
    hash tell them apart.
    """
    slugs: dict[str, str] = {}
    taken: set[str] = set()
    for prompt, slug in names.items():
        if len(slug.encode()) > most or slug in taken:
            cut = slug.encode()[:most].decode(errors="ignore").rstrip("-")
            digits = hashlib.sha256(prompt.encode()).hexdigest()
            slug = next(name for n in range(8, 65) if (name := f"{cut}-{digits[:n]}") not in taken)
        slugs[prompt] = slug
        taken.add(slug)
    return slugs
