"""Make the files of a released model with random weights: native names, shapes and dtypes of the release.

    python experiments/benchmarks/random_weights.py wan_models/random --text_encoder --checkpoint

What loads, streams and runs the real model can be tried with them where the weights cannot be had.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import UMT5Config, UMT5EncoderModel

from experiments.benchmarks.worker import fill_
from experiments.extraction.devices import choose_device
from experiments.running.cli import Parser, main
from wan import text_encoder as umt5
from wan.config import MODELS, ModelConfig
from wan.model import CausalWanModel

SHARD_BYTES = 5 * 10**9
TOKENIZER = Path("checkpoints/wan-mini/tokenizer")  # umT5's cannot be made up; this one's ids are among its


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("folder", type=Path, help="where the model goes; about 6 GB, and 11 GB more with umT5")
    flag("--model", choices=MODELS, default="Wan2.1-T2V-1.3B", help="whose shapes")
    flag("--text_encoder", action="store_true", help="also umT5-XXL")
    flag("--checkpoint", action="store_true", help="also a Self-Forcing style self_forcing_dmd.pt")
    flag("--device", default="auto", help="which draws the numbers")
    args = parser.parse_args(argv)
    device, sizes = choose_device(args.device), MODELS[args.model]
    released = torch.bfloat16 if args.model.endswith("14B") else torch.float32
    make_transformer(args.folder, sizes, released, device)
    if args.text_encoder:
        make_text_encoder(args.folder, torch.bfloat16, device)
    if args.checkpoint:
        make_checkpoint(args.folder / "self_forcing_dmd.pt", sizes, torch.float32, device)


def random_tensors(
    module: torch.nn.Module, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor on the CPU for each parameter of a module on meta, drawn in float32 on the device."""
    for name, parameter in module.named_parameters():
        yield name, fill_(torch.empty(parameter.shape, device=device), name).to(dtype).cpu()


def make_transformer(folder: Path, sizes: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Write config.json, shards and their index, as the original release has them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(vars(sizes)), encoding="utf-8")
    with torch.device("meta"):
        model = CausalWanModel(**vars(sizes))
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in random_tensors(model, dtype, device):
        if sum(t.nbytes for t in shards[-1].values()) > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"diffusion_pytorch_model-{number:05d}.safetensors"
        save_file(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    index = json.dumps({"weight_map": weight_map})
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(index, encoding="utf-8")


def make_checkpoint(path: Path, sizes: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Write a Self-Forcing style .pt."""
    with torch.device("meta"):
        model = CausalWanModel(**vars(sizes))
    tensors = {f"model.{name}": tensor for name, tensor in random_tensors(model, dtype, device)}
    torch.save({"generator_ema": tensors}, path)


def make_text_encoder(folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Write umT5-XXL under its native names, and a tokenizer."""
    with torch.device("meta"):
        model = UMT5EncoderModel(UMT5Config(**umt5.UMT5_XXL))
    state = {native_umt5_name(name): tensor for name, tensor in random_tensors(model, dtype, device)}
    torch.save(state, folder / umt5.UMT5_FILE)
    shutil.copytree(TOKENIZER, folder / umt5.TOKENIZER_DIR, dirs_exist_ok=True)


def native_umt5_name(name: str) -> str:
    """Return the release's name of a parameter of UMT5EncoderModel."""
    outside = {"shared.weight": "token_embedding.weight", "encoder.final_layer_norm.weight": "norm.weight"}
    if name in outside:
        return outside[name]
    block, _, rest = name.removeprefix("encoder.block.").partition(".layer.")
    ours, theirs = next(item for item in umt5.UMT5_BLOCK_NAMES.items() if rest.startswith(item[1]))
    return f"blocks.{block}.{ours}{rest.removeprefix(theirs)}"


if __name__ == "__main__":
    main(run)
