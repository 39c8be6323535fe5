"""Which runs a sweep has: prompts of a file, seeds of the command line, and the name of every cache. No model
is needed.
"""

import argparse
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from wan.config import RunConfig
from wan.errors import ConfigError
from wan.limits import MAX_PROMPTS
from wan.text_files import read_text

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
