"""The files of checkpoints/wan-mini: a diffusers WanPipeline, a Self-Forcing style checkpoint, the log of
the training."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import UniPCMultistepScheduler
from safetensors.torch import save_file
from torch import Tensor

from experiments.caches.atomic_files import replacing
from experiments.caches.errors import CacheError
from experiments.miniature.recipe import MODEL, SHIFT
from wan.weight_names import to_diffusers_names

WEIGHTS = "diffusion_pytorch_model.safetensors"
CAUSAL = "self_forcing_mini.pt"
TEACHER = "causal.pt"  # of the causal stage: the few-step stage starts from it; not shipped


def kept_steps(folder: Path) -> dict[int, Path]:
    """Step -> file of the weights that a training kept on its way, step_*.pt, in their order."""
    numbers = {path: path.stem.removeprefix("step_") for path in folder.glob("step_*.pt")}
    return dict(sorted((int(n), path) for path, n in numbers.items() if n.isascii() and n.isdigit()))


def save_transformer(native: dict[str, Tensor], folder: Path) -> None:
    """Weights under diffusers' names, and the config of its WanTransformer3DModel."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.cpu().contiguous() for k, v in to_diffusers_names(native).items()}, folder / WEIGHTS)
    config = {
        "_class_name": "WanTransformer3DModel",
        "num_attention_heads": MODEL.num_heads,
        "attention_head_dim": MODEL.head_dim,
        "in_channels": MODEL.in_dim,
        "out_channels": MODEL.out_dim,
        "patch_size": MODEL.patch_size,
        "text_dim": MODEL.text_dim,
        "freq_dim": MODEL.freq_dim,
        "ffn_dim": MODEL.ffn_dim,
        "num_layers": MODEL.num_layers,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": MODEL.eps,
        "rope_max_seq_len": 1024,
        "text_len": MODEL.text_len,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def save_index(folder: Path) -> None:
    """What makes the directory a diffusers WanPipeline: the scheduler and model_index.json."""
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT
    )
    scheduler.save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "WanPipeline",
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def save_causal(native: dict[str, Tensor], path: Path) -> None:
    """A Self-Forcing style checkpoint: generator_ema, with the prefix model."""
    weights = {f"model.{name}": tensor.cpu() for name, tensor in native.items()}
    with replacing(path) as file:
        torch.save({"generator_ema": weights}, file)


def log_stage(path: Path, stage: str, entry: dict) -> None:
    """Set one stage's entry of the log. Raises CacheError where the file is no log."""
    try:
        log = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        text = json.dumps(log | {stage: entry}, indent=1)
    except (ValueError, TypeError) as error:
        raise CacheError(f"{path} is no log of a training ({type(error).__name__}); remove it") from error
    with replacing(path) as file:
        file.write(text.encode() + b"\n")
