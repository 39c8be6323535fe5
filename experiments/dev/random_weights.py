"""Checkpoint files of random weights, with the names, shapes and dtypes of the release (native layout)."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import UMT5Config, UMT5EncoderModel

from wan import text_encoder as native
from wan.config import ModelConfig
from wan.model import CausalWanModel

SHARD_BYTES = 5 * 10**9
TOKENIZER = Path("checkpoints/wan-mini/tokenizer")  # umT5's cannot be made up; this one's ids are among its


def fill_(values: torch.Tensor, name: str, generator: torch.Generator) -> torch.Tensor:
    """Random values of a parameter, in place: normal, std 0.02; a norm's weights around 1."""
    return values.normal_(0, 0.02, generator=generator).add_(
        1.0 if "norm" in name and name.endswith("weight") else 0.0
    )


def random_tensors(
    module: torch.nn.Module, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor on the CPU for each parameter of a module on meta, drawn in float32 on the device."""
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in module.named_parameters():
        yield name, fill_(torch.empty(parameter.shape, device=device), name, generator).to(dtype).cpu()


def make_transformer(folder: Path, sizes: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """config.json, shards and their index, as the original release has them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(vars(sizes)), encoding="utf-8")
    with torch.device("meta"):
        model = CausalWanModel(**vars(sizes))
    parts: list[dict[str, torch.Tensor]] = [{}]
    weight_map: dict[str, str] = {}

    def write() -> None:
        name = f"diffusion_pytorch_model-{len(parts):05d}.safetensors"
        save_file(parts[-1], folder / name)
        weight_map.update(dict.fromkeys(parts[-1], name))
        parts[-1] = {}

    for name, tensor in random_tensors(model, dtype, device):
        parts[-1][name] = tensor
        if sum(t.nbytes for t in parts[-1].values()) > SHARD_BYTES:
            write()
            parts.append({})
    if parts[-1]:
        write()
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map}), encoding="utf-8"
    )


def make_checkpoint(path: Path, sizes: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """A Self-Forcing style .pt."""
    with torch.device("meta"):
        model = CausalWanModel(**vars(sizes))
    torch.save(
        {"generator_ema": {f"model.{name}": t for name, t in random_tensors(model, dtype, device)}}, path
    )


def make_text_encoder(folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    """umT5-XXL under its native names, and a tokenizer."""
    with torch.device("meta"):
        model = UMT5EncoderModel(UMT5Config(**native.UMT5_XXL))
    state = {native_umt5_name(name): tensor for name, tensor in random_tensors(model, dtype, device)}
    torch.save(state, folder / native.UMT5_FILE)
    shutil.copytree(TOKENIZER, folder / native.TOKENIZER_DIR, dirs_exist_ok=True)


def native_umt5_name(name: str) -> str:
    """A name of UMT5EncoderModel -> the release's."""
    outside = {"shared.weight": "token_embedding.weight", "encoder.final_layer_norm.weight": "norm.weight"}
    if name in outside:
        return outside[name]
    block, _, rest = name.removeprefix("encoder.block.").partition(".layer.")
    ours, theirs = next(item for item in native.UMT5_BLOCK_NAMES.items() if rest.startswith(item[1]))
    return f"blocks.{block}.{ours}{rest.removeprefix(theirs)}"
