"""The real models' shapes from files: how long they load, what memory loading and rollouts take, and what was predicted.

    python experiments/dev/benchmark_memory.py --device cuda --output_path docs/benchmarks/memory_h200.json

Files of random weights are made on the spot, with the names, shapes and dtypes of the released ones (native layout). Each
measurement runs in a process of its own. Host memory is read every 5 ms from /proc/self/status: private is anonymous and
shared memory (page-locked memory included), resident also counts the pages of mapped files.
"""

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import save_file
from transformers import UMT5EncoderModel

from experiments.caches.atomic_files import require_writable
from experiments.caches.errors import RunError
from experiments.extraction import cache_builders, causal, devices
from experiments.extraction.memory_estimate import Memory
from experiments.extraction.observer import RunObserver
from experiments.extraction.prompt_embeds import encoding_device, needs_encoder, states_file
from experiments.extraction.provenance import environment
from experiments.running.cli import Parser, main
from wan import checkpoint, native
from wan.config import MODELS, ModelConfig, RunConfig, load_config
from wan.errors import ConfigError
from wan.modules.causal_model import CausalWanModel

SHARD_BYTES = 5 * 10**9

TOKENIZER = Path(
    "checkpoints/wan-mini/tokenizer"
)  # the real one cannot be made up; this one's ids are among its


# -- files of random weights -------------------------------------------------------------------------------------------
def random_tensors(
    module: torch.nn.Module, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor on the CPU for each parameter of a module on meta: normal, std 0.02; norms' weights around 1."""
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in module.named_parameters():
        values = torch.empty(parameter.shape, device=device).normal_(0, 0.02, generator=generator)
        yield name, (values + (1.0 if "norm" in name and name.endswith("weight") else 0.0)).to(dtype).cpu()


def make_transformer(folder: Path, sizes: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """config.json, shards and their index, as the original release has them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(vars(sizes)))
    with torch.device("meta"):
        model = CausalWanModel(**vars(sizes))
    parts: list[dict[str, torch.Tensor]] = [{}]
    weight_map: dict[str, str] = {}

    def write() -> None:
        name = f"diffusion_pytorch_model-{len(parts):05d}.safetensors"
        save_file(parts[-1], folder / name)
        weight_map.update(dict.fromkeys(parts[-1], name))
        parts[-1] = {}

    for name, tensor in random_tensors(model, dtype, device):
        parts[-1][name] = tensor
        if sum(t.nbytes for t in parts[-1].values()) > SHARD_BYTES:
            write()
            parts.append({})
    if parts[-1]:
        write()
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )


def make_checkpoint(path: Path, sizes: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """A Self-Forcing style .pt."""
    with torch.device("meta"):
        model = CausalWanModel(**vars(sizes))
    torch.save(
        {"generator_ema": {f"model.{name}": t for name, t in random_tensors(model, dtype, device)}}, path
    )


def make_text_encoder(folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    """umT5-XXL under its native names, and a tokenizer."""
    with torch.device("meta"):
        model = UMT5EncoderModel(native.UMT5_XXL)
    theirs = {value: name for name, value in native.UMT5_BLOCK_NAMES.items()}
    state = {}
    for name, tensor in random_tensors(model, dtype, device):
        start, _, rest = name.removeprefix("encoder.block.").partition(".layer.")
        old = next((old for old in theirs if rest.startswith(old)), None)
        state[
            f"blocks.{start}.{theirs[old]}{rest[len(old) :]}"
            if old
            else {
                "shared.weight": "token_embedding.weight",
                "encoder.final_layer_norm.weight": "norm.weight",
            }[name]
        ] = tensor
    torch.save(state, folder / native.UMT5_FILE)
    shutil.copytree(TOKENIZER, folder / native.TOKENIZER_DIR, dirs_exist_ok=True)


# -- measuring ---------------------------------------------------------------------------------------------------------
def status() -> dict[str, int]:
    """Bytes of this process: private, and resident with mapped files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous, shared, resident = (
        int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem", "VmRSS")
    )
    return {"private": anonymous + shared, "resident": resident}


@contextmanager
def host_peak() -> Iterator[dict[str, int]]:
    """A dict that gets, at the end, the peaks of private and resident memory over what they were, and page-locked bytes."""
    gc.collect()
    before, peak, done = status(), status(), threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            for name, now in status().items():
                peak[name] = max(peak[name], now)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    found: dict[str, int] = {}
    yield found
    done.set()
    watcher.join()
    found |= {f"host_{name}_bytes": peak[name] - before[name] for name in peak}
    if torch.cuda.is_initialized() and hasattr(torch.cuda, "host_memory_stats"):
        found["page_locked_bytes"] = int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))


def warm_up(device: torch.device) -> None:
    """The device's context and libraries, which every program has."""
    x = torch.ones(8, 8, device=device)
    (x @ x).sum().item()


def gpu_peak(device: torch.device) -> dict[str, int]:
    """Peaks of what tensors took and of what the allocator held for them; CUDA's context is not in them."""
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize(device)
    return {
        "gpu_peak_bytes": torch.cuda.max_memory_allocated(device),
        "gpu_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


class Clock(RunObserver):
    """When a rollout began and its last block ended, which has waited for the device."""

    def log(self, event: str, **values) -> None:
        self.begin = time.perf_counter()

    def block(self, block: int, frames: range, num_blocks: int) -> None:
        self.end = time.perf_counter()


def drop_from_page_cache(config: RunConfig) -> None:
    for path in checkpoint.shards(checkpoint.weights_file(config.ckpt_dir, config.checkpoint_path)):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(config: RunConfig, cold: bool = False) -> dict:
    """Seconds and memory from the files to a model on the device."""
    device = devices.choose_device(config.device, config.offload)
    sizes, dtype = (
        checkpoint.read_model_config(config.ckpt_dir),
        devices.choose_dtype(config.dtype, device),
    )
    paths = checkpoint.shards(checkpoint.weights_file(config.ckpt_dir, config.checkpoint_path))
    warm_up(device)
    if cold:
        drop_from_page_cache(config)
    with host_peak() as host:
        start = time.perf_counter()
        pipeline = causal.load_pipeline(config, sizes, dtype, device)
        used = gpu_peak(device)
        seconds = time.perf_counter() - start
    size = sum(path.stat().st_size for path in paths)
    parameters = sum(p.numel() * p.itemsize for p in pipeline.model.parameters())
    return {
        "seconds": seconds,
        "file_bytes": size,
        "parameter_bytes": parameters,
        "cold": cold,
        **host,
        **used,
        "private_of_file": host["host_private_bytes"] / size,
        "resident_of_file": host["host_resident_bytes"] / size,
    }


def roll_out(config: RunConfig) -> dict:
    """One causal of all layers, passes and blocks at frame level: seconds and memory of its parts, and its bits."""
    device = devices.choose_device(config.device, config.offload)
    sizes, dtype = (
        checkpoint.read_model_config(config.ckpt_dir),
        devices.choose_dtype(config.dtype, device),
    )
    requests = cache_builders.atlas_requests(config, mass=True, key_curve=False, cross=False)
    encodes = needs_encoder(config, [config.prompt], sizes, dtype, device)
    plan = Memory(config, sizes, requests, dtype, device, encodes).needs()
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
    predicted = {
        where: {need.phase: need.total for need in plan if need.where == where} for where in ("GPU", "host")
    }
    digest = hashlib.sha256()
    for tensor in (run.latents, *(r[name] for r in run.records for name in ("frame_logits", "frame_mass"))):
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    result = {
        "frames": config.num_frames,
        "offload": config.offload,
        "encoded_on": str(encoding_device(config, device)) if encodes else None,
        "prepare_seconds": prepare_seconds,
        "rollout_seconds": clock.end - clock.begin,
        "seconds": end - start,
        "waited_for_sha256_seconds": end - clock.end,
        "calls": len(run.records),
        "sha256_of_latents_and_capture": digest.hexdigest(),
        "predicted_bytes": predicted,
        **host,
    }
    if rolled:
        result |= {
            "prepare": prepared,
            "rollout": rolled,
            "gpu_peak_bytes": max(part["gpu_peak_bytes"] for part in (prepared, rolled)),
            "measured_of_predicted": rolled["gpu_peak_bytes"] / predicted["GPU"]["rolling out"],
        }
    return result


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


# -- what is measured --------------------------------------------------------------------------------------------------
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
    make_checkpoint(Path(tuned.checkpoint_path), sizes, torch.float32, device)
    streamed = replace(config, offload=True)
    with torch.device("meta"):
        vae_bytes = sum(
            p.numel() * 4 for p in AutoencoderKLWan().parameters()
        )  # released in float32; not made here
    found = {
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()},
        "vae_bytes": vae_bytes,
        "load": {
            "shards, from disk": apart(load, config, True),
            "shards": apart(load, config),
            "shards, --offload": apart(load, streamed),
            "self_forcing_dmd.pt": apart(load, tuned),
        },
    }
    found["extract"] = {"resident": apart(roll_out, config), "--offload": apart(roll_out, streamed)}
    states = states_file(streamed, config.prompt, sizes, torch.bfloat16, torch.device("cpu"))
    same = replace(
        config, prompt_embeds=str(states)
    )  # umT5 on the CPU and on the GPU differ in their last bits
    found["extract"]["resident, --prompt_embeds"] = apart(roll_out, same)
    found["extract"]["72 frames"] = apart(roll_out, replace(same, num_frames=72))
    bits = {
        found["extract"][name]["sha256_of_latents_and_capture"]
        for name in ("--offload", "resident, --prompt_embeds")
    }
    return found | {"offload_gives_the_same_bits": len(bits) == 1}


def large_model(folder: Path, device: torch.device, states: Path) -> dict:
    """The 14B: loading, and the first block, resident and streamed."""
    config = replace(
        load_config("configs/wan_14b.yaml"),
        ckpt_dir=str(folder),
        device=str(device),
        num_frames=3,
        prompt_embeds=str(states),
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


def run(argv=None):
    parser = Parser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="the GPU to measure")
    parser.add_argument(
        "--folder", help="where the files go, 55 GB at a time; a temporary folder where not given"
    )
    parser.add_argument("--output_path", help="write the numbers as JSON")
    args = parser.parse_args(argv)
    device = devices.choose_device(args.device)
    if device.type != "cuda":
        raise ConfigError(f"these are the sizes of a GPU, not of {device}; give --device cuda or cuda:N")
    if args.output_path:
        require_writable(args.output_path)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        report = {
            "environment": environment(device),
            "Wan2.1-T2V-1.3B": small_model(Path(folder) / "1.3B", device),
        }
        states = next((Path(folder) / "1.3B/prompt_embeds").iterdir()).rename(Path(folder) / "states.pt")
        save(report, args.output_path)
        shutil.rmtree(Path(folder) / "1.3B")
        report["Wan2.1-T2V-14B"] = large_model(Path(folder) / "14B", device, states)
    save(report, args.output_path)


def save(report: dict, path: str | None) -> None:
    text = json.dumps(report, indent=1)
    print(text, flush=True)
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text + "\n")


if __name__ == "__main__":
    main(run)
