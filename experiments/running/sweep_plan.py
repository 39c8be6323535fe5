"""Which runs a sweep has: prompts of a file, seeds of the command line, and the name of every cache. No model
is needed.
"""

import argparse
import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from wan.config import RunConfig
from wan.errors import ConfigError
from wan.limits import MAX_PROMPTS
from wan.text_files import read_text

SLUG_LENGTH = 60


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
    lines = [line.strip() for line in read_text(path).splitlines()]
    prompts = list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not prompts:
        raise ConfigError(f"{path} holds no prompt; write one per line")
    if len(prompts) > MAX_PROMPTS:
        raise ConfigError(f"{path} holds {len(prompts)} prompts, at most {MAX_PROMPTS} are read; split it")
    return prompts


def slugs_of(prompts: Sequence[str]) -> dict[str, str]:
    """Prompt -> name for files; where two would share one, or it is cut, a few digits of a hash tell them
    apart.
    """
    slugs: dict[str, str] = {}
    taken: set[str] = set()
    for prompt in prompts:
        slug = re.sub(r"[\W_]+", "-", prompt.lower()).strip("-") or "prompt"
        if len(slug.encode()) > SLUG_LENGTH or slug in taken:
            cut = slug.encode()[:SLUG_LENGTH].decode(errors="ignore").rstrip("-")
            digits = hashlib.sha256(prompt.encode()).hexdigest()
            slug = next(name for n in range(8, 65) if (name := f"{cut}-{digits[:n]}") not in taken)
        slugs[prompt] = slug
        taken.add(slug)
    return slugs
