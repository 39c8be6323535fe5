"""Write the files of a release with random weights: every name, key and layout, narrower layers."""

import json
import shutil
from pathlib import Path

import torch
import yaml
from diffusers import AutoencoderKLWan
from safetensors.torch import save_file

from wan import checkpoint
from wan.config import ModelConfig
from wan.model import CausalWanModel, WanModel

ROOT = Path(__file__).resolve().parents[2]
BASE, TUNED = "Wan-AI/Wan2.1-T2V-1.3B", "gdhe17/Self-Forcing"
# Layers and heads are the release's, since the check compares them; widths are not.
SIZES = {"dim": 192, "ffn_dim": 256, "freq_dim": 64, "num_heads": 12, "num_layers": 30, "text_dim": 64}
UMT5 = {"vocab_size": 768, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 24, "num_heads": 4}


def write_release(hub: Path) -> None:
    """Write both repositories of the release below a folder, with random weights of a fixed seed."""
    torch.manual_seed(0)
    base, tuned = hub / BASE, hub / TUNED / "checkpoints"
    base.mkdir(parents=True, exist_ok=True)
    tuned.mkdir(parents=True, exist_ok=True)
    # 1. The base transformer, and the few-step generator under the names of its training.
    sizes = ModelConfig(**SIZES)  # type: ignore[arg-type]
    native = {name: 0.05 * torch.randn_like(x) for name, x in WanModel(**vars(sizes)).state_dict().items()}
    save_file(native, base / "diffusion_pytorch_model.safetensors")
    about = {"_class_name": "WanModel", "model_type": "t2v", **vars(sizes)}
    (base / "config.json").write_text(json.dumps(about, default=list))
    generator = CausalWanModel(**vars(sizes)).state_dict()
    wrapped = {f"model.{name}": 0.05 * torch.randn_like(x) for name, x in generator.items()}
    torch.save({"generator": wrapped, "generator_ema": wrapped}, tuned / "self_forcing_dmd.pt")
    # 2. umT5 in bfloat16, with the tokenizer of the miniature; the config beside it tells the widths.
    torch.save(umt5_weights(), base / checkpoint.UMT5_FILE)
    tokenizer = base / checkpoint.TOKENIZER_DIR
    shutil.copytree(ROOT / "checkpoints/wan-mini/tokenizer", tokenizer, dirs_exist_ok=True)
    (tokenizer / "config.json").write_text(json.dumps(UMT5))
    # 3. The VAE at its real widths: the release has no config of it.
    with torch.device("meta"):
        vae = AutoencoderKLWan()
    state = {}
    for name, weight in vae_names(vae.state_dict()).items():
        state[name] = (0.02 * torch.randn(weight.shape)).bfloat16()
    torch.save(state, base / checkpoint.VAE_FILE)


def umt5_weights() -> dict:
    """Return umT5's weights under the names of the release, of the widths of UMT5."""
    dim, inner = UMT5["d_model"], UMT5["num_heads"] * UMT5["d_kv"]
    shapes = {"token_embedding.weight": (UMT5["vocab_size"], dim), "norm.weight": (dim,)}
    for layer in range(UMT5["num_layers"]):
        of_layer = {
            "norm1": (dim,),
            "norm2": (dim,),
            "attn.q": (inner, dim),
            "attn.k": (inner, dim),
            "attn.v": (inner, dim),
            "attn.o": (dim, inner),
            "ffn.gate.0": (UMT5["d_ff"], dim),
            "ffn.fc1": (UMT5["d_ff"], dim),
            "ffn.fc2": (dim, UMT5["d_ff"]),
            "pos_embedding.embedding": (32, UMT5["num_heads"]),
        }
        shapes |= {f"blocks.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return {name: (0.1 * torch.randn(shape)).bfloat16() for name, shape in shapes.items()}


# Parts of a residual block, and other parts, of diffusers' VAE -> of the release's.
VAE_PARTS = {
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}
VAE_NAMES = {
    "encoder.conv_in": "encoder.conv1",
    "decoder.conv_in": "decoder.conv1",
    "encoder.norm_out": "encoder.head.0",
    "decoder.norm_out": "decoder.head.0",
    "encoder.conv_out": "encoder.head.2",
    "decoder.conv_out": "decoder.head.2",
    "post_quant_conv": "conv2",
    "quant_conv": "conv1",
}
LAYERS_OF_BLOCK = 4  # of the decoder, in the release's count: three residual blocks and an upsampler


def vae_names(state: dict) -> dict:
    """Rename weights of diffusers' AutoencoderKLWan as Wan2.1_VAE.pth has them."""
    renamed = {}
    for name, value in state.items():
        parts = name.split(".")
        if parts[1] == "mid_block":  # encoder.mid_block.resnets.1.conv2.weight -> encoder.middle.2.residual.6
            number = int(parts[3]) * 2
            if parts[2] == "attentions":
                number = 1
            parts = [parts[0], "middle", str(number), *parts[4:]]
        elif parts[1] == "down_blocks":
            parts[1] = "downsamples"
        elif parts[1] == "up_blocks":  # decoder.up_blocks.1.resnets.2 -> decoder.upsamples.6
            number = LAYERS_OF_BLOCK * int(parts[2]) + LAYERS_OF_BLOCK - 1
            if parts[3] == "resnets":
                number = LAYERS_OF_BLOCK * int(parts[2]) + int(parts[4])
            parts = ["decoder", "upsamples", str(number), *parts[5:]]
        parts = [VAE_PARTS.get(part, part) for part in parts]
        new = ".".join(parts)
        for ours, theirs in VAE_NAMES.items():
            if new.startswith(f"{ours}."):
                new = theirs + new.removeprefix(ours)
                break
        renamed[new] = value
    return renamed


def write_config(folder: Path) -> None:
    """Write rehearsal.yaml, Self-Forcing's configuration with the folder's files and 8 x 8 latents."""
    text = (ROOT / "configs/self_forcing_dmd.yaml").read_text(encoding="utf-8")
    config = yaml.safe_load(text) | {
        "model": "rehearsal",
        "ckpt_dir": str(folder / "wan_models/Wan2.1-T2V-1.3B"),
        "checkpoint_path": str(folder / "checkpoints/self_forcing_dmd.pt"),
        "height": 8,
        "width": 8,
        "embeds_dir": None,
    }
    config.pop("release")
    path = folder / "rehearsal.yaml"
    path.write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
