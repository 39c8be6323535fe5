"""Mean outputs of heads over a reference set of unedited runs, made once, in cache/reference_means."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from experiments.caches.atomic_files import replacing
from wan.config import ModelConfig, RunConfig
from wan.errors import ConfigError
from wan.modules.head_outputs import Key, ReferenceMeans, record_head_outputs
from wan.safe_load import UnreadableError, load_tensors

if TYPE_CHECKING:
    from experiments.extraction.causal import Session

FOLDER = Path("cache/reference_means")
SEEDS = (0, 1)


def reference_means(session: "Session", config: RunConfig, path: object = None) -> ReferenceMeans:
    """The means of a config's model over its reference_prompts and two seeds, or those of a named file."""
    if isinstance(path, (str, Path)):
        return ReferenceMeans(_read(Path(path), session.model_config))
    kept = FOLDER / f"{_name(session, config)}.pt"
    if kept.is_file():
        return ReferenceMeans(_read(kept, session.model_config))
    runs = []
    for prompt in config.reference_prompts:
        for seed in SEEDS:
            one = replace(config, prompt=prompt, seed=seed)
            with record_head_outputs() as outputs:
                session.rollout(one)
            runs.append(outputs)
    means = ReferenceMeans.over(runs)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with replacing(kept) as file:
        torch.save({"|".join(map(str, key)): values for key, values in means.values.items()}, file)
    return means


def _name(session: "Session", config: RunConfig) -> str:
    """16 digits of the hash of what the means depend on."""
    said = {
        "weights": session.sha256.result(),
        "dtype": str(session.dtype),
        "prompts": list(config.reference_prompts),
        "seeds": SEEDS,
        "config": session.common["config"],
        "files": session.common["files"],  # also the LoRA and the text encoder
        "blocks": config.block_sizes,
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]


def require_means(path: str | Path) -> None:
    """Raise ConfigError where a file of means is not there."""
    if not Path(path).is_file():
        raise ConfigError(
            f"{path} not found; leave source out, and the run makes the means of its reference_prompts"
        )


def _read(path: Path, sizes: ModelConfig) -> Mapping[Key, Tensor]:
    require_means(path)
    try:
        values = load_tensors(path, False)
        keys = {name: name.split("|") for name in values}
        means = {
            (kind, int(layer), int(step), branch): values[name]
            for name, (kind, layer, step, branch) in keys.items()
        }
    except (OSError, UnreadableError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read as means of head outputs: {error}; remove it") from None
    wanted = (sizes.num_heads, sizes.head_dim)
    for values in means.values():
        if not isinstance(values, Tensor) or not values.is_floating_point() or values.ndim != 3:
            raise ConfigError(
                f"{path} holds no means of head outputs; leave source out, or name another file"
            )
        if tuple(values.shape[1:]) != wanted:
            raise ConfigError(
                f"{path} has means of {values.shape[1]} heads of {values.shape[2]} numbers, this model has "
                f"{wanted[0]} of {wanted[1]}; leave source out, or name a file of this model's"
            )
    return means
