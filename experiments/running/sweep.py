"""Many prompts and seeds with a model loaded once: an atlas each, a manifest beside them, and no work done twice.

A sweep that was killed goes on when the same command runs again: a file that is whole, and made with the same settings,
is left as it is. What was made with other settings is never mixed in.
"""

import argparse
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from experiments.caches import load_cache
from experiments.caches.atomic_files import replacing
from experiments.caches.errors import CacheError, RunError, StoppedError
from experiments.extraction import causal, devices
from experiments.extraction.memory_estimate import estimate_bytes
from experiments.running.cli import videos_of
from experiments.running.jobs import BuildCache, deterministic, save
from experiments.running.output_locks import claimed, require_space
from experiments.running.progress import Progress, stopping_when_asked
from wan import checkpoint
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.modules.capture import CaptureRequest

SLUG_LENGTH = 60

# These do not change an atlas, or only as another machine does.
NOT_SETTINGS = (
    "prompt",
    "seed",
    "device",
    "layer_indices",
    "layer_index",
    "step",
    "base",
    "offload",
    "t5_cpu",
    "embeds_dir",
)

NOT_COMPARED = ("device", "versions")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts", metavar="FILE", help="a sweep over the prompts in a file, one per line; # comments"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", help="a sweep over several seeds, in place of one --seed"
    )
    parser.add_argument("--output_dir", help="folder of a sweep: PROMPT_sSEED.pt each, and manifest.json")


def plan(args: argparse.Namespace, config: RunConfig) -> dict[str, RunConfig]:
    """Path -> settings of every run of a sweep. Raises ConfigError for flags and files that do not fit."""
    if not args.output_dir:
        raise ConfigError("--prompts and --seeds need --output_dir, a folder for the caches")
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
    return {
        str(Path(args.output_dir) / f"{slugs[prompt]}_s{seed}.pt"): replace(config, prompt=prompt, seed=seed)
        for prompt in prompts
        for seed in dict.fromkeys(args.seeds or [config.seed])
    }


def read_prompts(path: str | Path) -> list[str]:
    """The lines of a text file, without empty ones, comments (#) and repetitions."""
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as a file of prompts: {getattr(error, 'strerror', None) or error}"
        ) from None
    prompts = list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not prompts:
        raise ConfigError(f"{path} holds no prompt; write one per line")
    return prompts


def slugs_of(prompts: Sequence[str]) -> dict[str, str]:
    """Prompt -> name for files; where two would share one, or it is cut, a few digits of a hash tell them apart."""
    slugs: dict[str, str] = {}
    for prompt in prompts:
        slug = re.sub(r"[\W_]+", "-", prompt.lower()).strip("-") or "prompt"
        if len(slug.encode()) > SLUG_LENGTH or slug in slugs.values():
            cut = slug.encode()[:SLUG_LENGTH].decode(errors="ignore").rstrip("-")
            digits = hashlib.sha256(prompt.encode(errors="surrogateescape")).hexdigest()
            slug = next(name for n in range(8, 65) if (name := f"{cut}-{digits[:n]}") not in slugs.values())
        slugs[prompt] = slug
    return slugs


def run_sweep(
    args: argparse.Namespace,
    config: RunConfig,
    requests: Sequence[CaptureRequest],
    build_cache: BuildCache,
    quantities: Mapping[str, bool],
) -> None:
    """Make every cache of a sweep that is not there yet; quantities says which optional fields each must (not) have.

    Raises CacheError where the folder holds caches of other settings or another sweep is at it, RunError at the end
    where runs failed, and StoppedError after Ctrl-C.
    """
    runs = plan(args, config)
    manifest = Path(args.output_dir) / "manifest.json"
    settings = {name: value for name, value in asdict(config).items() if name not in NOT_SETTINGS} | dict(
        quantities
    )
    with (
        Progress(args.quiet, args.log_file) as watch,
        claimed({str(manifest): 0}),
        stopping_when_asked(watch),
        deterministic(args.deterministic),
    ):
        if not args.overwrite:
            _require_same_settings(manifest, settings)
        fields = _expected_fields(config)
        states = {
            path: "waiting"
            if args.overwrite
            else state_of(path, fields | {"prompt": run.prompt, "seed": run.seed}, quantities)
            for path, run in runs.items()
        }
        waiting = [path for path, state in states.items() if state != "done"]
        require_space(
            manifest.parent, dict.fromkeys(waiting, estimate_bytes(config, requests)) or {str(manifest): 0}
        )
        _write_manifest(manifest, settings, runs, states)
        if len(waiting) < len(runs):
            watch.print(f"{len(runs) - len(waiting)} of {len(runs)} runs are done already")
        prompts = list(dict.fromkeys(runs[path].prompt for path in waiting))
        session = causal.prepare(config, requests, prompts, watch) if waiting else None
        failures = []
        for number, path in enumerate(waiting, 1):
            watch.print(f"run {number}/{len(waiting)}: {path}")
            try:
                with claimed(dict.fromkeys((path, *videos_of(args, [path])), 0)):
                    save(
                        args,
                        causal.extract_next(session, runs[path], requests, watch),
                        {path: build_cache},
                        watch,
                    )
                states[path] = "done"
            except StoppedError as error:
                states[path] = "partial" if Path(path).exists() else "waiting"
                done = sum(state == "done" for state in states.values())
                raise StoppedError(
                    f"{error}; {done} of {len(runs)} runs are done and will not be made again"
                ) from None
            except RunError as error:
                states[path] = "failed"
                failures.append(f"{path}: {error}")
                watch.print(f"failed: {error}")
            finally:
                _write_manifest(manifest, settings, runs, states)
            if watch.stopping and number < len(waiting):
                raise StoppedError(
                    f"stopped after {number} of {len(waiting)} runs; to continue, run the same command again"
                )
    if failures:
        raise RunError(f"{len(failures)} of {len(runs)} runs failed; first {failures[0]}")


def state_of(path: str | Path, expected: Mapping[str, Any], quantities: Mapping[str, bool]) -> str:
    """done, partial or waiting. Raises CacheError for a cache that was made with other settings."""
    try:
        cache = load_cache(path, expect=("atlas",))
    except CacheError:  # not there, or damaged: to be made
        return "waiting"
    for name, value in expected.items():
        if cache.get(name) != value:
            raise CacheError(
                f"{path} has {name} {cache.get(name)!r}, this sweep {value!r}; choose another --output_dir, "
                "or make everything again with --overwrite"
            )
    if cache.get("partial"):
        return "partial"
    for name, wanted in quantities.items():
        if wanted != (name in cache):
            raise CacheError(
                f"{path} has {'no' if wanted else 'a'} {name}, unlike this sweep; choose another --output_dir, "
                "or make everything again with --overwrite"
            )
    return "done"


def _expected_fields(config: RunConfig) -> dict[str, Any]:
    """What the caches of a sweep have in common, without loading the model."""
    device = devices.choose_device(config.device, config.offload)
    model_config = checkpoint.read_model_config(config.ckpt_dir)
    weights_file = checkpoint.weights_file(config.ckpt_dir, config.checkpoint_path)
    fields = causal.common_fields(
        config, model_config, weights_file, devices.choose_dtype(config.dtype, device), device
    )
    fields |= {"weights_sha256": checkpoint.file_sha256(weights_file)}
    return {name: value for name, value in fields.items() if name not in NOT_COMPARED}


def _require_same_settings(manifest: Path, settings: Mapping[str, Any]) -> None:
    try:
        before = json.loads(manifest.read_text(encoding="utf-8"))["settings"]
        different = [name for name in settings if before.get(name) != settings[name]]
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ):  # none yet, or not ours: the caches decide
        return
    if different:
        name = different[0]
        raise CacheError(
            f"{manifest} is of a sweep with {name} {before.get(name)!r}, this one has {settings[name]!r}; choose "
            "another --output_dir, or make everything again with --overwrite"
        )


def _write_manifest(
    path: Path, settings: Mapping[str, Any], runs: Mapping[str, RunConfig], states: Mapping[str, str]
) -> None:
    table = [
        {"file": Path(p).name, "prompt": c.prompt, "seed": c.seed, "state": states[p]}
        for p, c in runs.items()
    ]
    with replacing(path) as file:
        file.write(
            json.dumps({"settings": settings, "runs": table}, indent=1, ensure_ascii=False).encode() + b"\n"
        )
