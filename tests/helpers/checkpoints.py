"""The golden model as a diffusers folder, and a small WanPipeline of diffusers."""

import json

import torch
from conftest import ROOT, SIZES, golden_config
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from safetensors.torch import save_file
from transformers import AutoTokenizer, UMT5EncoderModel

from wan.checkpoint import to_diffusers_names
from wan.config import ModelConfig

MINI = ROOT / "checkpoints" / "wan-mini"
GOLDEN_MODEL = ModelConfig(**{name: golden_config()["model"][name] for name in SIZES})


def diffusers_model() -> WanTransformer3DModel:
    c = GOLDEN_MODEL
    same = {name: getattr(c, name) for name in ("ffn_dim", "num_layers", "freq_dim", "text_dim")}
    heads = {"num_attention_heads": c.num_heads, "attention_head_dim": c.head_dim}
    return WanTransformer3DModel(in_channels=c.in_dim, out_channels=c.out_dim, **heads, **same)


def native_config() -> dict:
    """config.json as the original release has it, with text_dim and without patch_size."""
    names = ("dim", "ffn_dim", "freq_dim", "in_dim", "num_heads", "num_layers", "out_dim", "text_len", "eps")
    sizes = {name: getattr(GOLDEN_MODEL, name) for name in (*names, "text_dim")}
    return {"_class_name": "WanModel", "model_type": "t2v"} | sizes


def write_transformer(ckpt_dir, native, shards: int = 1, layout: str = "diffusers", sizes=GOLDEN_MODEL):
    """Write weights of native names as diffusers or the original release does."""
    c, folder, config, state = sizes, ckpt_dir, native_config(), native
    if layout == "diffusers":
        folder, state = ckpt_dir / "transformer", to_diffusers_names(native)
        folder.mkdir()
        same = ("ffn_dim", "eps", "num_layers", "freq_dim", "text_dim", "text_len")
        config = {name: getattr(c, name) for name in same} | {"patch_size": list(c.patch_size)}
        config |= {"num_attention_heads": c.num_heads, "attention_head_dim": c.head_dim}
        config |= {"in_channels": c.in_dim, "out_channels": c.out_dim}
    (folder / "config.json").write_text(json.dumps(config))
    name = "diffusion_pytorch_model"
    if shards == 1:
        save_file(state, folder / f"{name}.safetensors")
        return
    parts = {f"{name}-{i + 1:05d}.safetensors": dict(list(state.items())[i::shards]) for i in range(shards)}
    for file, part in parts.items():
        save_file(part, folder / file)
    index = {"weight_map": {key: file for file, part in parts.items() for key in part}}
    (folder / f"{name}.safetensors.index.json").write_text(json.dumps(index))


def small_wan_pipeline(kind: type[WanPipeline] = WanPipeline, heads: int = 3) -> WanPipeline:
    """The miniature's text encoder and VAE, and a transformer of random weights."""
    torch.manual_seed(0)
    sizes = {"num_attention_heads": heads, "attention_head_dim": 16, "ffn_dim": 64, "num_layers": 2}
    transformer = WanTransformer3DModel(**sizes, freq_dim=32, text_dim=64).eval()
    parts = {"tokenizer": AutoTokenizer, "text_encoder": UMT5EncoderModel, "vae": AutoencoderKLWan}
    parts |= {"scheduler": UniPCMultistepScheduler}
    loaded = {name: part.from_pretrained(MINI / name) for name, part in parts.items()}
    pipeline = kind(transformer=transformer, **loaded)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample(pipeline: WanPipeline, **more) -> torch.Tensor:
    """Latents [1, C, 3, 8, 8] of three steps, unless more says otherwise."""
    sizes = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 3, "max_sequence_length": 16}
    generator = torch.Generator().manual_seed(1)
    return pipeline("a circle", output_type="latent", generator=generator, **sizes | more).frames
