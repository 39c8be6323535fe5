"""The golden model as a diffusers folder, and a small text encoder."""

import json

from conftest import SIZES, golden_config
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from transformers import UMT5Config

from wan.config import ModelConfig

GOLDEN_MODEL = ModelConfig(**{name: golden_config()["model"][name] for name in SIZES})


SMALL_UMT5 = UMT5Config(
    vocab_size=50,
    d_model=24,
    d_kv=8,
    d_ff=40,
    num_layers=3,
    num_heads=2,
    relative_attention_num_buckets=32,
    dropout_rate=0.0,
)


def diffusers_model() -> WanTransformer3DModel:
    c = GOLDEN_MODEL
    return WanTransformer3DModel(
        num_attention_heads=c.num_heads,
        attention_head_dim=c.head_dim,
        ffn_dim=c.ffn_dim,
        num_layers=c.num_layers,
        freq_dim=c.freq_dim,
        text_dim=c.text_dim,
        in_channels=c.in_dim,
        out_channels=c.out_dim,
    )


def write_transformer(ckpt_dir, state, shards: int = 1) -> None:
    """A transformer/ folder as diffusers writes it."""
    folder = ckpt_dir / "transformer"
    folder.mkdir()
    c = GOLDEN_MODEL
    config = {
        "num_attention_heads": c.num_heads,
        "attention_head_dim": c.head_dim,
        "ffn_dim": c.ffn_dim,
        "eps": c.eps,
        "num_layers": c.num_layers,
        "freq_dim": c.freq_dim,
        "text_dim": c.text_dim,
        "in_channels": c.in_dim,
        "out_channels": c.out_dim,
        "patch_size": list(c.patch_size),
        "text_len": c.text_len,
    }
    (folder / "config.json").write_text(json.dumps(config))
    name = "diffusion_pytorch_model"
    if shards == 1:
        save_file(state, folder / f"{name}.safetensors")
        return
    parts = [dict(list(state.items())[i::shards]) for i in range(shards)]
    names = [f"{name}-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    for part, file in zip(parts, names, strict=True):
        save_file(part, folder / file)
    index = {"weight_map": {key: file for part, file in zip(parts, names, strict=True) for key in part}}
    (folder / f"{name}.safetensors.index.json").write_text(json.dumps(index))
