"""Provenance of a run's numbers: files, settings, versions, device. No path, time or host."""

import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from experiments.extraction.devices import device_name, versions
from experiments.extraction.edits import check_sources, edits_of, sources_of
from wan import checkpoint
from wan.backends import kernel_name
from wan.checkpoint import VAE_FILE
from wan.config import RunConfig
from wan.text_encoder import encoder_files

# Settings that change a rollout's numbers and have no field of their own in caches.
SETTINGS = (
    *("use_ema", "height", "width", "independent_first_frame", "local_attn_size", "sink_size"),
    *("denoising_step_list", "warp_denoising_step", "timestep_shift", "context_noise"),
)
# Only where they are given.
OPTIONAL_SETTINGS = {
    "cache_policy": None,
    "prompt_schedule": None,
    "first_block_steps": None,
    "recompute_context": 0,
    "sampler": "blocks",
    "lora_rank": None,
    "lora_alpha": None,
}


def provenance(
    config: RunConfig, weights_file: Path, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Return files, config, versions, device, dtype and a GPU's attention kernel, as caches have them."""
    settings = asdict(config)
    return {
        "files": files_of(config, weights_file),
        "config": {name: settings[name] for name in SETTINGS}
        | {name: settings[name] for name, usual in OPTIONAL_SETTINGS.items() if settings[name] != usual},
        "versions": versions(),
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        **({"attention": kernel} if (kernel := kernel_name(device, dtype)) else {}),
    }


def files_of(config: RunConfig, weights_file: Path) -> list[dict[str, Any]]:
    """Describe what a run reads: weights, umT5 or the file in its place, named_files. ConfigError: absent."""
    check_sources(edits_of(config.interventions, "config"), config)
    text_files = [config.prompt_embeds] if config.prompt_embeds else encoder_files(config.ckpt_dir)
    return checkpoint.describe_files([weights_file, *named_files(config), *text_files])


def named_files(config: RunConfig) -> list[str]:
    """List what a config names beside its model: the LoRA, its policy's head classes, what its edits take."""
    classes = (config.cache_policy or {}).get("file")
    sources = [
        str(checkpoint.transformer_file(config.ckpt_dir)) if file == "base" else file
        for file in sources_of(edits_of(config.interventions, "config"))
    ]
    return [str(file) for file in (config.lora_path, classes, *sources) if file]


def vae_files(config: RunConfig) -> list[dict[str, Any]]:
    """Describe what a video's pixels depend on beside its latents."""
    folder = Path(config.ckpt_dir)
    if checkpoint.is_native(folder):
        return checkpoint.describe_files([folder / VAE_FILE])
    names = ("config.json", "diffusion_pytorch_model.safetensors")
    return checkpoint.describe_files(folder / "vae" / name for name in names)


def environment(device: torch.device) -> dict:
    """Return what a number depends on besides the code."""
    git = os.environ.get("GIT_COMMIT")  # where the tree travelled without its history
    if git is None and shutil.which("git"):
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    threads = f"{torch.get_num_threads()} CPU threads"
    return {
        "device": device_name(device) if device.type == "cuda" else threads,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "git": git or "unknown",
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
    }
