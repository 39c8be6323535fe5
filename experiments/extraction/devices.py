"""Choose a run's device, dtype and number of threads, and identify what computes."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wan
from experiments.caches import frames
from wan import backends
from wan.config import ModelConfig, RunConfig, check_device
from wan.errors import ConfigError

PACKAGES = ("torch", "transformers", "diffusers", "safetensors", "wan-attention")
SMALL_LATENT = 1024  # positions of a frame of latents: one of 480 x 832 pixels has 6240


def choose_device(name: str, offload: bool = False) -> torch.device:
    """auto, cpu, cuda or cuda:N (which becomes the current GPU) -> a device that is there."""
    if check_device(name) == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    there = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= there:
        raise ConfigError(f"device {name} was asked for; CUDA devices here: {there}; use --device cpu")
    if offload and device.type != "cuda":
        raise ConfigError(f"--offload serves a GPU, and the device is {device}; leave it out")
    if device.index is not None:
        torch.cuda.set_device(device)  # Triton launches a kernel on the current GPU, wherever its tensors are
    backends.check(device)
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto is bfloat16 on a GPU and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def encoding_device(config: RunConfig, device: torch.device) -> torch.device:
    """Return where umT5 runs, which its bits depend on: t5_cpu alone says it, whatever else is offloaded."""
    return torch.device("cpu") if config.t5_cpu else device


def threads_for(noise: Tensor, model_config: ModelConfig) -> AbstractContextManager[None]:
    """One CPU thread for the rollout of a small model: two were 80 times slower on a busy machine."""
    small = noise.device.type == "cpu" and noise[0].numel() * model_config.dim < 1 << 24
    return frames.one_thread() if small else nullcontext()


def decoding_threads(device: torch.device, height: int, width: int) -> AbstractContextManager[None]:
    """One CPU thread for the decoder of small latents: two were seven times slower on a busy machine."""
    small = device.type == "cpu" and height * width < SMALL_LATENT
    return frames.one_thread() if small else nullcontext()


@cache
def versions() -> dict[str, str]:
    """Return the versions of the packages whose code computes."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):  # a checkout that is on the path, but not installed
            found[name] = version(name)
    return found | {"torch": str(torch.__version__)}  # its build too, which PyPI's wheels do not name


def device_name(device: torch.device) -> str:
    """Return cpu, or the name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@cache
def code_version() -> str:
    """Return 16 hex digits that change with any source file of wan: the model and its samplers."""
    digest, folder = hashlib.sha256(), Path(wan.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder).as_posix()} {file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def fingerprint(values: Mapping[str, Any], **more: Any) -> str:
    """Return 32 hex digits that change with any of the values, such as identity's, and of those in more."""
    said = json.dumps({**values, **more}, sort_keys=True, default=str)
    return hashlib.sha256(said.encode()).hexdigest()[:32]
