"""The weights that a run uses, from all of its files: base or checkpoint, sizes checked, LoRA merged."""

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from wan.checkpoint import CheckpointError, read_transformer_state, transformer_file
from wan.checkpoint_layouts import LoadReport, read_checkpoint
from wan.config import MODELS, ModelConfig, RunConfig
from wan.lora import merge_lora, read_lora
from wan.weight_names import StateDict

# size -> the tensor that has it, and which of its axes
SHAPES = {
    "dim": ("patch_embedding.weight", 0),
    "in_dim": ("patch_embedding.weight", 1),
    "ffn_dim": ("blocks.0.ffn.0.weight", 0),
    "freq_dim": ("time_embedding.0.weight", 1),
    "text_dim": ("text_embedding.0.weight", 1),
}


def read_weights(config: RunConfig, model_config: ModelConfig) -> tuple[StateDict, LoadReport]:
    """State dict under native names of a config's checkpoint, or of its base, with its LoRA merged.

    Raises CheckpointError where a file does not hold what the config says, or a model of other sizes than
    model_config's.
    """
    if config.checkpoint_path:
        source = config.checkpoint_path
        state, report = read_checkpoint(source, config.use_ema)
    else:
        source, state = config.ckpt_dir, read_transformer_state(config.ckpt_dir)
        report = LoadReport(transformer_file(source).name, loaded=len(state))
    check_sizes(source, state, model_config)
    report.sizes = describe_sizes(sizes_of(state))
    if config.lora_path:
        lora = read_lora(config.lora_path, config.lora_rank, config.lora_alpha)
        state = merge_lora(state, lora, Path(source).name)
        report.merged = str(lora)
    return state, report


def sizes_of(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Sizes that a state dict under native names shows: those of SHAPES, num_layers, and num_heads where the
    dim is a released model's (shapes do not show it).
    """
    found = {
        size: state[name].shape[axis]
        for size, (name, axis) in SHAPES.items()
        if name in state and state[name].ndim > axis
    }
    layers = {int(match[1]) for name in state if (match := re.match(r"blocks\.(\d{1,6})\.", name))}
    if layers:
        found["num_layers"] = max(layers) + 1
    heads = {model.dim: model.num_heads for model in MODELS.values()}
    if found.get("dim") in heads:
        found["num_heads"] = heads[found["dim"]]
    return found


def describe_sizes(sizes: Mapping[str, int]) -> str:
    """Sizes in words, with the released model that has them: "dim 1536, 30 layers (Wan2.1-T2V-1.3B)"."""
    wanted = ("dim", "ffn_dim", "num_layers", "in_dim")
    words = ", ".join(
        f"{sizes[n]} layers" if n == "num_layers" else f"{n} {sizes[n]}" for n in wanted if n in sizes
    )
    known = [name for name, model in MODELS.items() if all(getattr(model, n) == sizes.get(n) for n in wanted)]
    return f"{words} ({known[0]})" if known else words


def check_sizes(source: str | Path, state: Mapping[str, Tensor], model_config: ModelConfig) -> None:
    """Raise CheckpointError where a state dict is of a model of other sizes."""
    found = sizes_of(state)
    other = [size for size, value in found.items() if getattr(model_config, size) != value]
    if not other:
        return
    hint = " (an image-to-video model)" if found.get("in_dim", 16) > 16 else ""
    wanted = describe_sizes({size: getattr(model_config, size) for size in found})
    raise CheckpointError(
        f"{source} holds a model of {describe_sizes(found)}{hint}, and ckpt_dir one of {wanted}: it has "
        f"{', '.join(f'{size} {found[size]}' for size in other[:3])}; take the config of this file"
    )
