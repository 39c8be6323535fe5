"""Interventions from YAML and CSV files, and the files that they need."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wan import checkpoint
from wan.config import RunConfig
from wan.errors import ConfigError, reason_of, short_repr
from wan.files import load_yaml, read_text
from wan.interventions import Ablate, Edit, Source, edit_from_dict, fingerprint

MAX_BYTES = 1 << 20  # of a file of edits
MAX_EDITS = 1000


def edits_of(values: Any, where: str) -> list[Edit]:
    """Make edits of a list of mappings, as in a config. ConfigError names the first wrong one."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise ConfigError(f"{where}: interventions are a list: - {{edit: knockout, frames: first, ...}}")
    if len(values) > MAX_EDITS:
        raise ConfigError(f"{where}: {len(values)} interventions, at most {MAX_EDITS} are read")
    edits = []
    for number, each in enumerate(values, 1):
        try:
            edits.append(edit_from_dict(each))
        except ConfigError as error:
            raise ConfigError(f"{where}: intervention {number}: {error}") from None
    return edits


def read_edits(path: str | Path) -> list[Edit]:
    """Read edits from a YAML file: a list of them, or a mapping with the key interventions."""
    values = load_yaml(path, "interventions", MAX_BYTES)
    if isinstance(values, Mapping):
        if set(values) != {"interventions"}:
            raise ConfigError(f"{path}: it may hold the key interventions and nothing else")
        values = values["interventions"]
    if not (edits := edits_of(values, str(path))):
        raise ConfigError(f"{path} holds no intervention; write - {{edit: knockout, frames: first, ...}}")
    return edits


def read_ablated_heads(path: str | Path, num_layers: int, num_heads: int, passes: str) -> list[Edit]:
    """Read Ablate edits from a CSV of layers x heads, no headings: 1 drops a head, 0 keeps it."""
    try:
        lines = [line for line in read_text(path, MAX_BYTES).splitlines() if line.strip()] or ["no line"]
        drops = np.loadtxt(lines, int, delimiter=",", quotechar='"', ndmin=2)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{path} is not a CSV of layers x heads: {reason_of(error)}") from None
    if drops.shape != (num_layers, num_heads):
        raise ConfigError(f"{path} is {drops.shape}; this model has {num_layers} layers x {num_heads} heads")
    for layer, head in np.argwhere((drops != 0) & (drops != 1)).tolist():
        raise ConfigError(f"{path}: layer {layer}, head {head}: {drops[layer, head]} is not 0 or 1")
    if not drops.any():
        raise ConfigError(f"{path} drops no head: every value is 0")
    heads = {layer: tuple(np.flatnonzero(row).tolist()) for layer, row in enumerate(drops)}
    return [Ablate("zero", layers=(n,), heads=some, passes=passes) for n, some in heads.items() if some]


def record_of(edits: Sequence[Edit]) -> dict[str, Any]:
    """Return what caches say of edits: the values, in words, and the hash that tells them apart."""
    values = [edit.to_dict() for edit in edits]
    return {"edits": values, "words": "; ".join(map(str, edits)), "hash": fingerprint(edits)}


def source_of(edit: Edit) -> Any:
    """Return what an edit takes values from: a file of means, a Source, or None."""
    return getattr(edit, "source", None)


def check_sources(edits: Sequence[Edit], config: RunConfig) -> None:
    """Raise ConfigError, with the remedy, where an edit cannot have the file, prompt or run that it needs."""
    for edit in edits:
        source, needed = source_of(edit), ""
        if isinstance(edit, Ablate) and edit.how == "mean" and source is None:
            needed = "the reference prompts of a mean; name a file of means as its source"
        if isinstance(source, Source) and source.prompt not in (None, config.prompt):
            needed = f"the source's {short_repr(source.prompt)}; leave --prompt_embeds out"
        if needed and config.prompt_embeds:
            raise ConfigError(
                f"{config.prompt_embeds} holds the states of one prompt, and {edit} needs {needed}"
            )
        if isinstance(source, str):
            require_means(source)
        if not isinstance(source, Source):
            continue
        own = {"prompt": config.prompt, "seed": config.seed, "weights": config.checkpoint_path or "base"}
        if all(getattr(source, name) in (None, value) for name, value in own.items()):
            raise ConfigError(f"source: {source} is the run itself; name another prompt, seed or weights")
        if config.offload and source.weights is None:
            raise ConfigError(f"streamed layers cannot serve two runs in step; leave offload out for {edit}")
        if source.weights not in (None, "base") and not Path(str(source.weights)).is_file():
            raise ConfigError(
                f"source: weights {source.weights} not found; bash experiments/download_weights.sh gets some"
            )


def require_means(path: str | Path) -> None:
    """Raise ConfigError where a file of means is missing."""
    if not Path(path).is_file():
        raise ConfigError(f"{path} not found; leave source out: the run makes the means of reference_prompts")


def named_files(config: RunConfig) -> list[str]:
    """List what a config names beside its model: the LoRA, its policy's head classes, what its edits take."""
    classes = (config.cache_policy or {}).get("file")
    sources = [source_of(edit) for edit in edits_of(config.interventions, "config")]
    files = [source.weights if isinstance(source, Source) else source for source in sources]
    named = [checkpoint.transformer_file(config.ckpt_dir) if file == "base" else file for file in files]
    return [str(file) for file in (config.lora_path, classes, *named) if file]
