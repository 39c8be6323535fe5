"""--cache_policy and --prompt_schedule: files and names turned into a config's settings."""

import argparse
from os.path import isfile
from pathlib import Path
from typing import Any

from wan.errors import ConfigError, named, quoted
from wan.text_files import read_yaml

FOLDER = Path("configs/policies")  # the published settings of every method


def add_policy_flags(parser: argparse.ArgumentParser) -> None:
    """What a block may look at, and which prompts follow the first one."""
    parser.add_argument(
        "--cache_policy",
        metavar="FILE_OR_NAME",
        help="what a block may look at: a YAML, one of configs/policies, or a policy by its name",
    )
    parser.add_argument(
        "--prompt_schedule", metavar="FILE", help="a YAML of the prompts that follow, and their first frames"
    )


def policy_overrides(args: argparse.Namespace) -> dict[str, Any]:
    """What the two flags set, where they were given."""
    chosen: dict[str, Any] = {}
    if name := getattr(args, "cache_policy", None):
        chosen |= {"cache_policy": policy_settings(name), "local_attn_size": -1, "sink_size": 0}
    if path := getattr(args, "prompt_schedule", None):
        chosen["prompt_schedule"] = schedule_settings(path)
    return chosen


def policy_settings(name: str, folder: Path = FOLDER) -> dict[Any, Any]:
    """Settings of a policy from a YAML file, from configs/policies by its stem, or by the policy's name
    alone. folder is configs/policies, where the working folder is not the project's.
    """
    for path in (Path(name), folder.parents[1] / name, folder / f"{name}.yaml"):
        if isfile(path):  # False for a name that is too long, where Path.is_file raises
            return read_yaml(path)
    from wan.modules.cache_policies import POLICIES  # here: a --help needs no torch

    if name in POLICIES:
        return {"name": name}
    published = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
    raise ConfigError(
        f"cache_policy {quoted(name)} is no file, none of {folder} ({published}) and no policy "
        f"({', '.join(POLICIES)})"
    )


def schedule_settings(path: str) -> list[Any]:
    """The list under `prompts` in a YAML file: frame, prompt and how of every switch."""
    if not isfile(path):
        raise ConfigError(f"prompt schedule {named(path)} not found; it is a YAML with a list `prompts`")
    settings = read_yaml(path)
    if unknown := [name for name in settings if name != "prompts"]:
        raise ConfigError(
            f"{path} has no {quoted(unknown[0])}; it has a list `prompts` of frame, prompt and how"
        )
    prompts = settings.get("prompts")
    if not isinstance(prompts, list) or not all(isinstance(entry, dict) for entry in prompts):
        raise ConfigError(f"{path}: needs a list `prompts`, each with frame, prompt and perhaps how")
    return prompts
