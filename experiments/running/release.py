"""What a model's configuration says of its files, one "key value" a line, for download_weights.sh. No torch.

python -m experiments.running.release longlive
"""

import sys
from pathlib import Path

from wan.config import RunConfig, load_config
from wan.errors import ConfigError, short_repr

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FIELDS = {"source": str, "licence": str, "ask": bool, "repository": str, "files": list, "folder": str}
BASES = {"Wan2.1-T2V-1.3B": "everything", "Wan2.1-T2V-14B": "no transformer"}  # its own weights are not run


def released() -> list[str]:
    """Names of the configurations that download_weights.sh knows."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(CONFIGS.glob("*.yaml"))}
    return [name for name, text in texts.items() if "\nrelease:\n" in text]


def release_of(name: str) -> RunConfig:
    """The configuration of a name, whose release is complete. Raises ConfigError for any other."""
    if name not in released():
        raise ConfigError(f"{short_repr(name)} is not one of {', '.join(released())}")
    config = load_config(CONFIGS / f"{name}.yaml")
    release = config.release or {}
    for field, kind in FIELDS.items():
        value = release.get(field)
        if not isinstance(value, kind):
            raise ConfigError(
                f"configs/{name}.yaml: release.{field} is {short_repr(value)}, not a {kind.__name__}"
            )
        texts = value if isinstance(value, list) else [str(value)]
        if any(not isinstance(text, str) or "\n" in text for text in texts):
            raise ConfigError(f"configs/{name}.yaml: release.{field} is {short_repr(value)}, not plain text")
    return config


def lines(name: str) -> list[str]:
    """What the script reads: the release's fields, a line per file, and the base model."""
    config = release_of(name)
    release = config.release or {}
    base = Path(config.ckpt_dir).name
    return [
        *(f"{field} {release[field]}" for field in ("source", "licence", "repository", "folder")),
        f"ask {'yes' if release['ask'] else 'no'}",
        *(f"file {file}" for file in release["files"]),
        f"base {base}",
        f"base_files {BASES.get(base, 'everything')}",
    ]


if __name__ == "__main__":
    try:
        print("\n".join(lines(sys.argv[1])))
    except ConfigError as problem:
        sys.exit(f"error: {problem}")
