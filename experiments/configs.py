"""Configs, policies and weights of the project, found by name from any folder."""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from os.path import exists, isdir, isfile
from pathlib import Path
from typing import Any

from experiments.caches import files
from wan import errors
from wan.config import MODELS, RunConfig, load_config
from wan.files import DOWNLOAD_HINT, DOWNLOADS, read_yaml

# Flags are read with this module, so that it imports no torch: a --help would wait for it.

HOME = files.ROOT.resolve()
PATHS = ("ckpt_dir", "checkpoint_path", "lora_path", "prompt_embeds", "first_frames")
POLICY_FOLDER = Path("configs/policies")  # the published settings of every policy
NAMES = ("self_forcing_dmd", "wan_14b", "longlive2", "wan_mini")  # a config for each size of model
CONFIGS = tuple(f"configs/{name}.yaml" for name in NAMES)


def config_for(ckpt_dir: str | Path, home: Path = Path()) -> str:
    """Return the config, below home, whose model has a directory's sizes. ConfigError where none has."""
    from wan.checkpoint import read_model_config

    sizes = read_model_config(ckpt_dir)
    for path in CONFIGS:
        config = load_config(home / path)
        if sizes == (MODELS.get(config.model) or read_model_config(home / config.ckpt_dir)):
            return path
    raise errors.ConfigError(
        f"{ckpt_dir}: no model of {sizes.num_layers} layers, {sizes.num_heads} heads and dim {sizes.dim} "
        f"is in {', '.join(CONFIGS)}; name its settings with --config_path"
    )


def find_config(source: str | Path, settings: Mapping[str, Any]) -> RunConfig:
    """Find settings by a config's name ("wan_mini") or path, or for the model in a directory of weights.

    settings win over the file. A path that a config names is taken below the project where it is not below
    the working folder. Raises ConfigError for a source that is none of them.
    """
    path, given = Path(source), dict(settings)
    if path.suffix in (".yaml", ".yml"):
        path = _below_home(path)
    elif isdir(_below_home(path)):
        given.setdefault("ckpt_dir", str(_below_home(path)))
        path = HOME / config_for(given["ckpt_dir"], HOME)
    elif str(path) in model_names():
        path = HOME / "configs" / f"{path}.yaml"
    else:
        hint = errors.did_you_mean(path.name, model_names())
        if "/" in str(source) and path.name not in model_names():
            hint = (
                "; bash experiments/download_weights.sh gets some weights, and a pipeline of diffusers is "
                "opened first: load(WanPipeline.from_pretrained(...))"
            )
        raise errors.ConfigError(f"{source} is no config, its path, or a directory of weights{hint}")
    return load_with_paths(path, given, lambda name: str(_below_home(Path(name))))


def model_names() -> list[str]:
    """Return the names of the project's configs that have a model; configs/ holds other settings too."""
    paths = sorted((HOME / "configs").glob("*.yaml"))
    return [path.stem for path in paths if "\nmodel:" in f"\n{path.read_text(encoding='utf-8')}"]


def load_with_paths(path: str | Path, values: Mapping[str, Any], find: Callable[[str], str]) -> RunConfig:
    """Load a config as with_paths() does; messages about missing weights name the command for this config."""
    config = with_paths(load_config(path, dict(values)), find)
    command = download_command(Path(path).stem, Path(config.ckpt_dir), config.release)
    for file in (config.ckpt_dir, config.checkpoint_path, *(each.path for each in config.loras)):
        if file:
            DOWNLOADS[str(Path(file))] = command
    return config


def with_paths(config: RunConfig, find: Callable[[str], str]) -> RunConfig:
    """Return a config whose files are where find() says: it names them relative to the project."""
    paths = {name: getattr(config, name) for name in PATHS}
    changes: dict[str, Any] = {name: find(path) for name, path in paths.items() if path is not None}
    if config.embeds_dir is not None:
        changes["embeds_dir"] = find(files.remembered_at(config.embeds_dir))
    if config.lora:
        changes["lora"] = [replace(lora, path=find(lora.path)) for lora in config.lora]
    return replace(config, **changes)


def download_command(name: str, model: Path, release: Mapping[str, object] | None) -> str:
    """Return the command that downloads the weights of a config, by its name and fields."""
    if release is None and model.name.endswith("-Diffusers"):  # base weights, in the layout of diffusers
        return shlex.join(["hf", "download", f"Wan-AI/{model.name}", "--local-dir", str(model)])
    words = [DOWNLOAD_HINT]
    if release and name != NAMES[0] and isfile(HOME / "configs" / f"{name}.yaml"):
        words.append(name)
    folder = model.parent.parent
    if model.is_absolute() and model.parent.name == "wan_models" and folder != HOME:
        words.append(shlex.quote(str(folder)))
    return " ".join(words)


def missing_files(config: RunConfig) -> list[str]:
    """List the missing ones of the weights that a config names."""
    named = [config.checkpoint_path or "", *(each.path for each in config.loras)]
    named = [path for path in named if path]
    return [path for path in named if not isfile(path)]


def _below_home(path: Path) -> Path:
    """The absolute path: below the working folder where it is there, else below the project."""
    return path.resolve() if exists(path) else HOME / path  # a name that is too long is not there


def policy_settings(source: Any) -> dict[Any, Any]:
    """Return the settings of a policy: a YAML file, one of configs/policies by its stem, or a policy's name.

    FIELD=VALUE may follow: window,window=9,sink=3. A file is looked for in the working folder, then in the
    project. A CachePolicy, also of one's own class, is known to configs by its name from here on.
    """
    from wan import policies  # with torch: a --help has none

    if not isinstance(source, str | Path):
        policies.register(type(source))
        return source.describe()
    name = str(source)
    folders = [home / POLICY_FOLDER for home in (Path(), HOME)]
    named = [folder / f"{name}.yaml" for folder in folders]
    for path in (Path(name), HOME / name, *named):
        if isfile(path):  # False for a name that is too long, where Path.is_file raises
            settings = read_yaml(path)
            for key, value in settings.items():  # files of heads, perhaps FILE:120f
                file = str(value).partition(":")[0]
                if not isfile(file) and isfile(HOME / file):
                    settings[key] = str(HOME / str(value))
            return settings
    first, *pairs = name.split(",")
    if "=" in first:
        raise errors.ConfigError(
            f"cache_policy {errors.short_repr(name)} begins with a field; the policy's name comes first, "
            "as in window,window=9"
        )
    if not pairs:
        if name in policies.POLICIES:
            return {"name": name}
        hint = errors.did_you_mean(
            name, {path.stem for f in folders for path in f.glob("*.yaml")} | {*policies.POLICIES}
        )
        raise errors.ConfigError(f"cache_policy {errors.short_repr(name)} is no file and no policy{hint}")
    settings, given = policy_settings(first), set[str]()
    for pair in pairs:
        key, equals, text = pair.partition("=")
        wrong = f"has {key} twice" if key in given else f"has {errors.short_repr(pair)}, no FIELD=VALUE"
        if key in given or not (key and equals and text):
            raise errors.ConfigError(f"cache_policy: {errors.short_repr(name)} {wrong}")
        given.add(key)
        try:
            settings[key] = json.loads(text)  # true, false, a number
        except ValueError:
            settings[key] = text
    return settings
