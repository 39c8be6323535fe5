"""The directory layout of the original release, https://huggingface.co/Wan-AI/Wan2.1-T2V-1.3B.

    config.json, diffusion_pytorch_model.safetensors (or shards and their index),
    models_t5_umt5-xxl-enc-bf16.pth, Wan2.1_VAE.pth, google/umt5-xxl/ (the tokenizer)

The transformer's names are ours. umT5 is renamed here, the VAE by diffusers' own conversion. These two files
carry no sizes, so they are the real model's unless the caller knows better.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from wan.checkpoint import DOWNLOAD_HINT, read_torch_file, report_keys, require_file
from wan.weight_names import StateDict

if TYPE_CHECKING:  # each takes a second to import, and is imported where it is made
    from diffusers import AutoencoderKLWan
    from transformers import UMT5Config, UMT5EncoderModel

UMT5_FILE, VAE_FILE, TOKENIZER_DIR = "models_t5_umt5-xxl-enc-bf16.pth", "Wan2.1_VAE.pth", "google/umt5-xxl"

UMT5_XXL = {
    "vocab_size": 256384,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "relative_attention_num_buckets": 32,
    "dropout_rate": 0.0,
}

# native -> transformers, inside blocks.N. of the one and encoder.block.N.layer. of the other
UMT5_BLOCK_NAMES = {
    "norm1.": "0.layer_norm.",
    "norm2.": "1.layer_norm.",
    "attn.q.": "0.SelfAttention.q.",
    "attn.k.": "0.SelfAttention.k.",
    "attn.v.": "0.SelfAttention.v.",
    "attn.o.": "0.SelfAttention.o.",
    "pos_embedding.embedding.": "0.SelfAttention.relative_attention_bias.",
    "ffn.gate.0.": "1.DenseReluDense.wi_0.",
    "ffn.fc1.": "1.DenseReluDense.wi_1.",
    "ffn.fc2.": "1.DenseReluDense.wo.",
}


def umt5_to_transformers(native: StateDict) -> StateDict:
    """Native umT5 encoder names -> those of UMT5EncoderModel, which names the token embedding twice."""
    state: StateDict = {}
    for name, tensor in native.items():
        in_block = re.match(r"blocks\.(\d+)\.", name)
        if name == "token_embedding.weight":
            state["shared.weight"] = state["encoder.embed_tokens.weight"] = tensor
        elif in_block:
            rest = name[in_block.end() :]
            old = next((old for old in UMT5_BLOCK_NAMES if rest.startswith(old)), None)
            new = rest if old is None else UMT5_BLOCK_NAMES[old] + rest[len(old) :]
            state[f"encoder.block.{in_block[1]}.layer.{new}"] = tensor
        else:
            state[name.replace("norm.", "encoder.final_layer_norm.", 1)] = tensor
    return state


def load_umt5(
    ckpt_dir: str | Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    config: "UMT5Config | None" = None,
) -> "UMT5EncoderModel":
    """The text encoder of a native directory; its weights are mapped, not read twice."""
    from transformers import UMT5Config

    path = require_file(Path(ckpt_dir) / UMT5_FILE, DOWNLOAD_HINT)
    state = umt5_to_transformers(read_torch_file(path))
    return build_umt5(state, config or UMT5Config(**UMT5_XXL), path, dtype, device)


def build_umt5(
    state: StateDict, config: "UMT5Config", path: Path, dtype: torch.dtype, device: torch.device | str
) -> "UMT5EncoderModel":
    """umT5 of the given sizes with weights under transformers' names; the embedding may lack one."""
    from transformers import UMT5EncoderModel

    with torch.device("meta"):
        model = UMT5EncoderModel(config)
    embedding = ("shared.weight", "encoder.embed_tokens.weight")
    tokens = next((state[name] for name in embedding if name in state), None)
    assign(model, state if tokens is None else state | dict.fromkeys(embedding, tokens), path, dtype, device)
    model.tie_weights()
    return model


def load_vae(ckpt_dir: str | Path, dtype: torch.dtype, **sizes) -> "AutoencoderKLWan":
    """The VAE of a native directory. sizes differ from the real model's in tests alone."""
    from diffusers import AutoencoderKLWan
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    path = require_file(Path(ckpt_dir) / VAE_FILE, DOWNLOAD_HINT)
    vae = AutoencoderKLWan(**sizes)
    assign(vae, convert_wan_vae_to_diffusers(read_torch_file(path)), path, dtype, "cpu")
    return vae


def assign(
    model: torch.nn.Module, state: StateDict, path: Path, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Strict loading with a report, by reference where it can be; a tensor of two names is moved once."""
    report_keys(path, state, model.state_dict())
    moved = {id(tensor): tensor.to(device, dtype) for tensor in {id(t): t for t in state.values()}.values()}
    model.load_state_dict({name: moved[id(tensor)] for name, tensor in state.items()}, assign=True)
    model.eval().requires_grad_(False)
