"""The identity of a run, and where it computes.

Two runs are equal if their settings, the SHA-256 of their weights and files, the text of their edits and
policies, and NUMBERS (wan/identity.py) are equal. Every output carries one fingerprint of that. Whatever
resumes, skips what is done, pairs files or takes an older one compares it (require_same of
experiments/caches/files.py).
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, fields, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from experiments.caches.files import (
    NO_RESULT,
    ONLY,
    PARTIAL,
    remembered_at,
    require_distinct,
    settings_and_text,
)
from experiments.caches.frames import one_thread
from experiments.caches.outputs import facts_of_model
from wan import backends, checkpoint, errors, lora
from wan.config import DType, ModelConfig, RunConfig
from wan.config import device_name as device_setting
from wan.files import require_file
from wan.identity import NUMBERS, UNNAMED, identity_of_class
from wan.interventions import config_edits
from wan.policies import policy_classes

FRAMES_HINT = "give latents (.pt, .safetensors), an mp4 or a picture"
HASHES = "cache/weights_sha256.json"  # of files of weights that were hashed
PACKAGES = ("torch", "transformers", "diffusers", "safetensors", "wan-attention")
SMALL_LATENT = 1024  # positions of a frame of latents: one of 480 x 832 pixels has 6240


# --- Where a run computes
def choose_device(name: str, offload: bool = False) -> torch.device:
    """auto, cpu, cuda or cuda:N (which becomes the current GPU) -> a device that is there."""
    try:
        device_setting(name)  # of a flag: that of a config is checked already
    except ValueError as error:
        raise errors.ConfigError(f"device {errors.short_repr(name)} {error}") from None
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise errors.ConfigError(f"device {name} was asked for; CUDA devices here: {count}; use --device cpu")
    if offload and device.type != "cuda":
        raise errors.ConfigError(f"--offload serves a GPU, and the device is {device}; leave it out")
    # Triton launches a kernel on the current GPU, wherever its tensors are
    if device.index is not None:
        torch.cuda.set_device(device)
    backends.has_fa4(device)  # refuses now what the first call would
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto is bfloat16 on a GPU and float32 elsewhere."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16
    return torch.float32


def encoding_device(config: RunConfig, device: torch.device) -> torch.device:
    """Return where umT5 runs, which its bits depend on: t5_cpu alone says it, whatever else is offloaded."""
    if config.t5_cpu:
        return torch.device("cpu")
    return device


def threads_for(noise: Tensor, model_config: ModelConfig) -> AbstractContextManager[None]:
    """One CPU thread for the rollout of a small model: two were 80 times slower on a busy machine."""
    if noise.device.type == "cpu" and noise[0].numel() * model_config.dim < 1 << 24:
        return one_thread()
    return nullcontext()


def decoding_threads(device: torch.device, height: int, width: int) -> AbstractContextManager[None]:
    """One CPU thread for the decoder of small latents: two were seven times slower on a busy machine."""
    if device.type == "cpu" and height * width < SMALL_LATENT:
        return one_thread()
    return nullcontext()


# --- One identity
@cache
def versions() -> dict[str, str]:
    """Return the versions of the packages whose code computes."""
    by_package = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):  # a checkout that is on the path, but not installed
            by_package[name] = version(name)
    return by_package | {"torch": str(torch.__version__)}  # its build too, which PyPI's wheels do not name


def device_name(device: torch.device) -> str:
    """Return cpu, or the name of the GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def digest_of(values: Any) -> str:
    """Return the SHA-256 of plain values, in hex digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def fingerprint(values: Mapping[str, Any], **more: Any) -> str:
    """Return 32 hex digits that change with any of the values, such as identity's, and of those in more.

    With a function or class that has no name no other run counts as equal: ONLY leads the digits, 8 of the
    other values follow, 8 of the functions' texts ("f" each where Python finds none), and 8 of what came of
    the run (with_result), 0 before.
    """
    values, texts = {**values, **more}, list[str | None]()

    def without_text(part: dict[str, Any]) -> dict[str, Any]:
        if UNNAMED in part:
            texts.append(part.pop("text_sha256"))
        return part

    others = json.loads(json.dumps(values, sort_keys=True, default=str), object_hook=without_text)
    if not texts:
        return digest_of(values)[:32]
    of_texts = digest_of(texts)[:8]
    if None in texts:
        of_texts = "f" * 8
    return ONLY + digest_of(others)[:8] + of_texts + NO_RESULT


def with_result(run: str, latents: Tensor) -> str:
    """Return a run's fingerprint, with digits of its latents where a function has no name.

    Such a function may draw random numbers, or read what changes: what it made is another run each time.
    """
    if not run.startswith(ONLY):
        return run
    numbers = latents.float().cpu().contiguous().numpy().tobytes()
    return settings_and_text(run) + hashlib.sha256(numbers).hexdigest()[: len(NO_RESULT)]


def identity(
    config: RunConfig,
    weights_sha256: str | None = None,
    edits: Sequence[Any] | None = None,
    files: Sequence[checkpoint.FileRecord] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return all that makes two runs equal, as plain values by name.

    These are the settings that change numbers, the SHA-256 of the weights and of other files that are read,
    the edits, the text of policies, and NUMBERS. weights_sha256, edits, and files as they were when they were
    read (files_of) are the config's, and the disk's, where they are not given; more is what else a study's
    numbers depend on. Raises ConfigError for missing files.
    """
    device = choose_device(config.device, config.offload)
    dtype = choose_dtype(config.dtype, device)
    weights = checkpoint.weights_file(config.ckpt_dir, config.checkpoint_path)
    if edits is None:
        edits = config_edits(config)
    if files is None:
        files = files_of(config, weights, edits)
    policies = [identity_of_class(kind) for kind in policy_classes(config)]
    values = {
        **number_settings(config),
        "sizes": asdict(checkpoint.read_model_config(config.ckpt_dir)),
        "weights_sha256": weights_sha256 or weights_hash(weights).result(),
        "files": list(files),
        "edits": [edit.identity_values() for edit in edits],
        # What is merged in which order and how much; the files are among files
        "lora": [(Path(lora.path).name, lora.strength, lora.rank, lora.alpha) for lora in config.loras],
        "dtype": str(dtype).removeprefix("torch."),
        "policies": [policy for policy in policies if policy],
        "numbers": NUMBERS,
        **more,
    }
    if config.noise != "seeded":  # the card draws it
        values["card"] = device_name(device)
    return json.loads(json.dumps(values, default=str))


def of_any_prompt(config: RunConfig) -> RunConfig:
    """Return a config whose prompt and seed stand for any: what the runs of a study have in common."""
    return replace(config, prompt="any", seed=0)


def number_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that change numbers of a rollout, by name."""
    names = [item.name for item in fields(config) if item.metadata["changes_numbers"]]
    return {name: value for name, value in asdict(config).items() if name in names}


def weights_hash(path: Path) -> Future[str]:
    """Return a future of the SHA-256 of a file of weights, remembered by path, size and time of change."""
    return checkpoint.file_sha256(path, Path(remembered_at(HASHES)))


def model_facts(config: RunConfig) -> dict[str, str | None]:
    """Return what tells the model of a run: name, weights by their SHA-256, LoRAs. It hashes the weights."""
    weights = checkpoint.weights_file(config.ckpt_dir, config.checkpoint_path)
    for item in config.loras:
        lora.lora_files(item.path)  # refuses a missing one
    values = {"model": config.model, "weights": "base"}
    if config.checkpoint_path:
        values["weights"] = "checkpoint"
    values["weights_file"] = " + ".join([weights.name, *map(str, config.loras)])
    return facts_of_model(values | {"weights_sha256": weights_hash(weights).result()})


def model_title(config: RunConfig) -> str:
    """Return what the mp4 of a run says of its model."""
    return ", ".join(str(fact) for fact in model_facts(config).values())


def record_of(edits: Sequence[Any]) -> dict[str, Any]:
    """Return what caches keep of edits: their plain values, their reprs, and a hash that tells them apart."""
    values = [edit.identity_values() for edit in edits]
    return {"edits": values, "words": "; ".join(map(str, edits)), "hash": digest_of(values)[:16]}


def video_tag(
    run: str, config: RunConfig, decoder: str = "auto", files: Sequence[checkpoint.FileRecord] | None = None
) -> str:
    """Return what an mp4 carries: the fingerprint of its run, and one of the VAE's files and its decoder.

    decoder is a dtype of the VAE, or a Preview's identity; files are the VAE's as they were when it was read.
    """
    if decoder not in get_args(DType):  # a Preview's identity names its file
        return f"{run} {fingerprint({'vae': [], 'by': decoder})}"
    if files is None:
        files = vae_files(config)
    dtype = choose_dtype(decoder, choose_device(config.device))
    return f"{run} {fingerprint({'vae': files, 'by': str(dtype)})}"


# --- What caches say
def provenance(
    files: Sequence[checkpoint.FileRecord], dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Return files, versions, device, dtype and a GPU's attention kernel, as caches have them."""
    facts = {
        "files": files,
        "versions": versions(),
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
    }
    kernel = backends.kernel_name(device, dtype)
    if kernel:
        facts["attention"] = kernel
    return facts


def files_of(
    config: RunConfig,
    weights_file: Path,
    edits: Sequence[Any] | None = None,
    of_model: Sequence[checkpoint.FileRecord] | None = None,
) -> list[checkpoint.FileRecord]:
    """Describe the files of a run: its model's, and those that its edits take. ConfigError: missing.

    of_model are the model's as they were when it was loaded; edits read theirs anew for every rollout.
    """
    if edits is None:
        edits = config_edits(config)
    for edit in edits:
        edit.check_source(config)
    if config.first_frames:
        with errors.in_context("first_frames"):
            require_file(config.first_frames, FRAMES_HINT)
    if of_model is None:
        of_model = model_files(config, weights_file)
    files = list(of_model)
    for file in checkpoint.describe_files(edit_files(config, edits)):
        if file not in files:
            files.append(file)
    return sorted(files, key=lambda file: file["name"])


def model_files(config: RunConfig, weights_file: Path) -> list[checkpoint.FileRecord]:
    """Describe what is read once, with the model: weights, umT5 or its embeddings, LoRA, head classes."""
    classes = (config.cache_policy or {}).get("file")
    named: list[str | Path] = [file for item in config.loras for file in lora.lora_files(item.path)]
    if classes:
        named.append(str(classes))
    if config.prompt_embeds:
        named.append(config.prompt_embeds)
    else:
        named += checkpoint.encoder_files(config.ckpt_dir)
    return checkpoint.describe_files([weights_file, *named])


def edit_files(config: RunConfig, edits: Sequence[Any]) -> list[str]:
    """List what each rollout reads: of edits files of means and sources' weights, and the first frames."""
    files = []
    for edit in edits:
        for file in edit.files:
            if file == "base":
                file = checkpoint.part_file(config.ckpt_dir, "transformer")
            files.append(str(file))
    if config.first_frames:
        files.append(config.first_frames)
    return files


def check_outputs(args: argparse.Namespace, config: RunConfig, outputs: Iterable[str | Path]) -> None:
    """Raise CacheError where a run would write over a file that it reads, or two files to one path."""
    # A stopped run may write beside its output, and a whole cache there must not be an input either
    written = [str(path) for path in outputs]
    written += [str(Path(path).with_suffix(PARTIAL)) for path in written if path.endswith(".pt")]
    read = [config.ckpt_dir, config.checkpoint_path, config.prompt_embeds]
    read += [
        *(each.path for each in config.loras),
        *edit_files(config, config_edits(config)),
    ]
    classes = (config.cache_policy or {}).get("file")
    if classes:
        read.append(str(classes))
    flags = [getattr(args, name, None) for name in ("save_base", "log_file")]
    require_distinct([*written, *(path for path in flags if path)], [*args.inputs, *read])


def vae_files(config: RunConfig) -> list[checkpoint.FileRecord]:
    """Describe what a video's pixels depend on beside its latents."""
    folder = Path(config.ckpt_dir)
    names = ["vae/config.json", "vae/diffusion_pytorch_model.safetensors"]
    if checkpoint.is_native(folder):
        names = [checkpoint.part_file(folder, "vae").name]
    return checkpoint.describe_files(folder / name for name in names)


def environment(device: torch.device) -> dict:
    """Return what a number depends on besides the code."""
    git = os.environ.get("GIT_COMMIT")  # where the tree travelled without its history
    if git is None and shutil.which("git"):
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    name = f"{torch.get_num_threads()} CPU threads"
    if device.type == "cuda":
        name = device_name(device)
    return {
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "git": git or "unknown",
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
    }
