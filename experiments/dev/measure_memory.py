"""Loading and rolling out the real models' shapes: seconds, memory, prediction, and the bits that come out.

Each measurement runs in a process of its own.
"""

import hashlib
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan

from experiments.caches.files import RunError
from experiments.dev.process_memory import gpu_peak, host_peak
from experiments.dev.random_weights import make_checkpoint, make_text_encoder, make_transformer
from experiments.extraction import cache_builders, causal, devices
from experiments.extraction.memory import Memory
from experiments.extraction.observer import RunObserver
from experiments.extraction.prompt_embeds import encoding_device, needs_encoder, states_file
from experiments.extraction.result import Extraction
from wan import checkpoint
from wan.config import MODELS, ModelConfig, RunConfig, load_config


def warm_up(device: torch.device) -> None:
    """The device's context and libraries, which every program has."""
    x = torch.ones(8, 8, device=device)
    (x @ x).sum().item()


class Clock(RunObserver):
    """When a rollout began and its last block ended, which has waited for the device."""

    def log(self, event: str, **values) -> None:
        self.begin = time.perf_counter()

    def block(self, block: int, frames: range, num_blocks: int) -> None:
        self.end = time.perf_counter()


def drop_from_page_cache(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(config: RunConfig, cold: bool = False) -> dict:
    """Seconds and memory from the files to a model on the device; cold: without the page cache."""
    device, sizes, dtype = choices(config)
    paths = checkpoint.shards(checkpoint.weights_file(config.ckpt_dir, config.checkpoint_path))
    warm_up(device)
    if cold:
        drop_from_page_cache(paths)
    with host_peak() as host:
        start = time.perf_counter()
        pipeline = causal.load_pipeline(config, sizes, dtype, device)
        used = gpu_peak(device)
        seconds = time.perf_counter() - start
    size = sum(path.stat().st_size for path in paths)
    return {
        "seconds": seconds,
        "file_bytes": size,
        "parameter_bytes": sum(p.numel() * p.itemsize for p in pipeline.model.parameters()),
        "cold": cold,
        **host,
        **used,
        "private_of_file": host["host_private_bytes"] / size,
        "resident_of_file": host["host_resident_bytes"] / size,
    }


def roll_out(config: RunConfig) -> dict:
    """One rollout that captures every layer, pass and block by frame: seconds, memory, and its bits."""
    device, sizes, dtype = choices(config)
    requests = cache_builders.atlas_requests(config, mass=True, key_curve=False, cross=False)
    encodes = needs_encoder(config, [config.prompt], sizes, dtype, device)
    needs = Memory(config, sizes, requests, dtype, device, encodes).needs()
    predicted: dict[str, dict[str, int]] = {"GPU": {}, "host": {}}
    for need in needs:
        predicted[need.where][need.phase] = need.total
    warm_up(device)
    with host_peak() as host:
        start = time.perf_counter()
        session = causal.prepare(config, requests)
        prepared = gpu_peak(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        prepare_seconds = time.perf_counter() - start
        run = causal.extract_next(session, config, requests, clock := Clock())
        rolled = gpu_peak(device)
        end = time.perf_counter()
    result = {
        "frames": config.num_frames,
        "offload": config.offload,
        "encoded_on": str(encoding_device(config, device)) if encodes else None,
        "prepare_seconds": prepare_seconds,
        "rollout_seconds": clock.end - clock.begin,
        "seconds": end - start,
        "waited_for_sha256_seconds": end - clock.end,
        "calls": len(run.records),
        "sha256_of_latents_and_capture": digest(run),
        "predicted_bytes": predicted,
        **host,
    }
    return result | (compared(prepared, rolled, predicted["GPU"]["rolling out"]) if rolled else {})


def choices(config: RunConfig) -> tuple[torch.device, ModelConfig, torch.dtype]:
    """Device, sizes and dtype that a run with this config has."""
    device = devices.choose_device(config.device, config.offload)
    return device, checkpoint.read_model_config(config.ckpt_dir), devices.choose_dtype(config.dtype, device)


def digest(run: Extraction) -> str:
    """SHA-256 of the latents' and the captured tensors' bytes."""
    captured = (call[name] for call in run.records for name in ("frame_logits", "frame_mass"))
    sha256 = hashlib.sha256()
    for tensor in (run.latents, *captured):
        sha256.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def compared(prepared: dict[str, int], rolled: dict[str, int], predicted: int) -> dict:
    """GPU peaks of both parts, and the rollout's over what was predicted."""
    return {
        "prepare": prepared,
        "rollout": rolled,
        "gpu_peak_bytes": max(part["gpu_peak_bytes"] for part in (prepared, rolled)),
        "measured_of_predicted": rolled["gpu_peak_bytes"] / predicted,
    }


def apart(function: Callable[..., dict], *args) -> dict:
    """The result of a function in a process of its own."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function, *args))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        raise RunError(f"{function.__name__} ended with exit code {process.exitcode}") from None
    finally:
        process.join()


def _send(connection, function: Callable[..., dict], *args) -> None:
    connection.send(function(*args))


def small_model(folder: Path, device: torch.device) -> dict:
    """The 1.3B: loading, 21 frames resident and streamed, 72 frames."""
    config = replace(
        load_config("configs/self_forcing_dmd.yaml"),
        ckpt_dir=str(folder),
        checkpoint_path=None,
        device=str(device),
        embeds_dir=str(folder / "prompt_embeds"),
    )
    sizes = MODELS[config.model]
    make_transformer(folder, sizes, torch.float32, device)
    make_text_encoder(folder, torch.bfloat16, device)
    tuned = replace(config, checkpoint_path=str(folder / "self_forcing_dmd.pt"))
    make_checkpoint(folder / "self_forcing_dmd.pt", sizes, torch.float32, device)
    streamed = replace(config, offload=True)
    with torch.device("meta"):
        vae = AutoencoderKLWan()  # released in float32; not made here
    found = {
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()},
        "vae_bytes": sum(p.numel() * 4 for p in vae.parameters()),
        "load": {
            "shards, from disk": apart(load, config, True),
            "shards": apart(load, config),
            "shards, --offload": apart(load, streamed),
            "self_forcing_dmd.pt": apart(load, tuned),
        },
    }
    found["extract"] = {"resident": apart(roll_out, config), "--offload": apart(roll_out, streamed)}
    embeds = states_file(streamed, config.prompt, sizes, torch.bfloat16, torch.device("cpu"))
    same = replace(config, prompt_embeds=str(embeds))  # umT5's last bits differ between the CPU and the GPU
    found["extract"]["resident, --prompt_embeds"] = apart(roll_out, same)
    found["extract"]["72 frames"] = apart(roll_out, replace(same, num_frames=72))
    bits = {
        found["extract"][name]["sha256_of_latents_and_capture"]
        for name in ("--offload", "resident, --prompt_embeds")
    }
    return found | {"offload_gives_the_same_bits": len(bits) == 1}


def large_model(folder: Path, device: torch.device, prompt_embeds: Path) -> dict:
    """The 14B: loading, and the first block, resident and streamed."""
    config = replace(
        load_config("configs/wan_14b.yaml"),
        ckpt_dir=str(folder),
        device=str(device),
        num_frames=3,
        prompt_embeds=str(prompt_embeds),
        layer_indices=[0],
        layer_index=0,
    )
    make_transformer(folder, MODELS[config.model], torch.bfloat16, device)
    return {
        "load": {"shards": apart(load, config)},
        "extract": {
            "one block": apart(roll_out, config),
            "one block, --offload": apart(roll_out, replace(config, offload=True)),
        },
    }
