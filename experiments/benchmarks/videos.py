"""Rows of what surrounds a rollout: the VAE's decoder, videos that are decoded meanwhile, smaller GPUs."""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from unittest import mock

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor
from torch.backends import cudnn
from transformers import UMT5Config, UMT5EncoderModel

import experiments.benchmarks.harness as bench
from experiments.extraction import video
from experiments.extraction.cache_builders import atlas_requests, figure4_requests
from experiments.extraction.devices import choose_device
from experiments.extraction.memory import GB, SAVE_VIDEO, Memory
from wan.checkpoint import VAE_FILE, build_model
from wan.config import MODELS, RunConfig
from wan.errors import ConfigError
from wan.model import CausalWanModel
from wan.text_encoder import UMT5_XXL
from wan.vae import VAE, StreamedDecoder
from wan.wings.graphs import apply_cuda_graphs

SPREAD = 0.5  # standard deviation of the random VAE's pictures, in -1..1
CARDS = {"16 GB": 16, "24 GB": 24, "80 GB": None}  # GiB; 1 is left to what else lies on it
VAE_BYTES, LONG = 507_609_880, 72  # the estimate takes the size of its file; latent frames of a long video


# --- The decoder alone
def decoder(args: argparse.Namespace, config: RunConfig) -> Iterator[bench.Part]:
    """Yield diffusers' decoder and ours, at once and in blocks, with dB to diffusers' in float32, no TF32.

    The pictures are those that a random VAE makes of a moving disc, its last layer scaled to SPREAD.
    """
    device = choose_device(config.device)
    vae = vae_of(args, config, device)
    latents = latents_of(vae, config, device)
    with cudnn.flags(enabled=True, allow_tf32=False):
        scale = SPREAD / 2 / by_diffusers(vae, latents[:, :3]).std()
        for parameter in vae.vae.decoder.conv_out.parameters():
            parameter.mul_(scale)
        reference = by_diffusers(vae, latents).cpu()
    half = VAE(deepcopy(vae.vae).to(torch.bfloat16)).to(device)
    made: dict[str, Tensor] = {}

    def timed(name: str, call: Callable[[], Tensor]) -> float:
        return bench.seconds_of(lambda: made.update({name: call()}))

    def in_blocks() -> Tensor:
        streamed = StreamedDecoder(half)
        parts = [video.to_pixels(streamed(block)).cpu() for block in latents.split(config.block_sizes, 1)]
        return torch.cat(parts, 1).movedim(-1, 2).float() / 255

    calls: dict[str, Callable[[], Tensor]] = {
        "diffusers float32": partial(by_diffusers, vae, latents),
        "diffusers bfloat16": partial(by_diffusers, half, latents),
        "ours bfloat16": partial(half.decode, latents),
        "ours bfloat16, block by block": in_blocks,
    }
    rows: bench.Timed = {name: partial(timed, name, call) for name, call in calls.items()}
    about = bench.warmed_up(rows)
    for name, pictures in made.items():
        error = (pictures.cpu().float() - reference).square().mean()
        about[name]["psnr"] = round(-10 * error.clamp_min(1e-12).log10().item(), 2)
    yield rows, about


def vae_of(args: argparse.Namespace, config: RunConfig, device: torch.device) -> VAE:
    """Return the config's VAE, or one of Wan2.1's sizes with random weights and norms that are not all 1."""
    if not args.random_weights:
        return VAE.from_pretrained(config.ckpt_dir, device=device)
    torch.manual_seed(0)
    vae = AutoencoderKLWan().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in vae.named_parameters():
        if name.endswith("gamma"):
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return VAE(vae).to(device)


def latents_of(vae: VAE, config: RunConfig, device: torch.device) -> Tensor:
    """Encode a moving picture, a disc over waves, and give its latents a standard deviation of 1."""
    height, width, frames = 8 * config.height, 8 * config.width, 4 * config.num_frames - 3
    y, x = torch.linspace(-1, 1, height, device=device)[:, None], torch.linspace(-1, 1, width, device=device)
    t = torch.linspace(0, 1, frames, device=device)[:, None, None]
    disc = torch.where((x - t + 0.5).square() + y.square() < 0.1, 1.0, -0.6)
    moving = torch.stack([torch.sin(9 * x + 12 * t + 3 * y * y), disc, torch.cos(20 * x * y + 6 * t)], 1)
    latents = vae.encode(moving[None] / 2 + 0.5)
    return latents / latents.std()


def by_diffusers(vae: VAE, latents: Tensor) -> Tensor:
    """Decode by AutoencoderKLWan, frame by frame -> [B, frames, 3, H, W] in 0..1."""
    z = latents.transpose(1, 2).float() * vae.latents_std + vae.latents_mean
    return vae.vae.decode(z.to(vae.vae.dtype)).sample.float().transpose(1, 2) / 2 + 0.5


# --- While the model runs
def beside(args: argparse.Namespace, config: RunConfig) -> Iterator[bench.Part]:
    """Yield noise to latents, to pictures on the host and to an mp4: one after the other, and at once."""
    require_gpu(config)
    rollout = bench.Rollout(config, args.random_weights)
    apply_cuda_graphs(rollout.model)
    vae = vae_of(args, config, rollout.device)
    vae.vae.to(torch.bfloat16)
    mass = bench.capturing(bench.capture_requests(config, rollout.sizes.num_layers)["mass"])
    mp4, append = Path(tempfile.mkdtemp()) / "video.mp4", video.GrowingVideo.append
    about: bench.Rows = {}

    def pictures() -> None:
        video.write_mp4(video.to_pixels(vae.decode(rollout.generate())).cpu()[0], mp4)

    def at_once(name: str, encodes: bool, active: bench.Active) -> float:
        start, arrived = time.perf_counter(), list[float]()

        def append_timed(self: video.GrowingVideo, pixels: Tensor, first: int) -> None:
            if encodes:
                append(self, pixels, first)
            arrived.append(time.perf_counter() - start)

        with (
            mock.patch.object(video, "load_vae", return_value=vae),
            mock.patch.object(video.GrowingVideo, "append", append_timed),
            video.LiveVideo(config, mp4) as live,
        ):
            with active():
                rollout.generate(lambda _, latents: live.add(latents.clone()))
            for piece in live.pieces:
                piece.result().result()
            if encodes and live.video:
                live.video.finish()
        about.setdefault(name, {})["first_pictures_s"] = round(arrived[0], 3) if arrived else None
        return time.perf_counter() - start

    rows: bench.Timed = {
        "rollout": rollout.seconds,
        "rollout, atlas": partial(rollout.seconds, mass),
        "rollout, then decoder, then mp4": partial(bench.seconds_of, pictures),
    }
    for said, encodes in {"decoded": False, "decoded, in an mp4": True}.items():
        for more, active in {"": nullcontext, ", atlas": mass}.items():
            name = f"blocks {said} beside{more}"
            rows[name] = partial(at_once, name, encodes, active)
    bench.warmed_up(rows)
    for name, known in bench.warmed_up(rows).items():  # graphs are recorded
        about[name] = about.get(name, {}) | known
    yield rows, about


# --- Smaller GPUs
def cards(args: argparse.Namespace, config: RunConfig) -> Iterator[bench.Part]:
    """Yield phases of four runs in the memory of smaller GPUs, by the flags that make each fit.

    torch.cuda.set_per_process_memory_fraction caps the allocator; seconds are of this GPU.
    """
    require_gpu(config)
    device, total = torch.device("cuda", 0), torch.cuda.get_device_properties(0).total_memory
    sizes = MODELS[config.model]
    with torch.device("meta"):
        model = CausalWanModel(**vars(sizes))
    state = bench.random_state(model, torch.bfloat16, device)
    atlas = partial(atlas_requests, mass=True, key_curve=False, cross=False)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(vars(sizes)))
        with Path(folder, VAE_FILE).open("wb") as file:
            file.truncate(VAE_BYTES)
        config = replace(config, ckpt_dir=folder, embeds_dir=None)
        long = replace(config, num_frames=LONG)
        runs: dict[str, tuple] = {  # configuration, requests, the flag that decodes a video
            "figure4": (config, figure4_requests(config, "token", True), ""),
            "atlas": (config, atlas(config), ""),
            f"{LONG} frames, atlas": (long, atlas(long), ""),
            "video": (config, [], SAVE_VIDEO),
        }
        for (card, size), (name, (own, requests, decodes)) in product(CARDS.items(), runs.items()):
            torch.cuda.set_per_process_memory_fraction(min(1.0, (size - 1) * 2**30 / total) if size else 1.0)
            gc.collect()
            torch.cuda.empty_cache()  # of the row before
            memory = Memory(own, sizes, requests, torch.bfloat16, device, True, decodes=decodes)
            flags, fitting = memory.fitting(memory.free())
            if fitting is None:
                print(f"{card}, {name}: does not fit")
                continue
            phases: bench.Timed = {"rolling out": partial(roll_out, fitting, state)}
            if name == "figure4" and not fitting.config.t5_cpu:
                phases["encoding the prompt"] = encode
            if decodes:
                phases["decoding the video"] = partial(decode, fitting)
            needs = {n.phase: round(n.total / GB, 1) for n in fitting.needs() if n.where == "GPU"}
            rows: bench.Timed = {f"{card}: {name}, {phase}": call for phase, call in phases.items()}
            about = bench.warmed_up(rows)
            for row, phase in zip(about.values(), phases, strict=True):
                row |= {"flags": flags, "estimate_gb": needs.get(phase), "frames": fitting.config.num_frames}
            yield rows, about


def roll_out(memory: Memory, state: dict[str, Tensor]) -> float:
    config, sizes, device = memory.config, memory.model_config, memory.device
    model = build_model(CausalWanModel, sizes, state, "random", memory.dtype, device, config.offload)
    return bench.Rollout(config, True, model).seconds(bench.capturing(memory.requests))


def encode() -> float:
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        encoder = UMT5EncoderModel(UMT5Config(**UMT5_XXL)).eval()
    torch.set_default_dtype(torch.float32)
    tokens = torch.ones(1, 512, dtype=torch.long, device="cuda")
    return bench.seconds_of(lambda: encoder(tokens, attention_mask=torch.ones_like(tokens)))


def decode(memory: Memory) -> float:
    config, device = memory.config, memory.device
    vae = VAE(AutoencoderKLWan().to(device, torch.bfloat16)).to(device)
    latents = torch.randn(1, config.num_frames, 16, config.height, config.width, device=device)
    return bench.seconds_of(lambda: vae.decode(latents))


def require_gpu(config: RunConfig) -> None:
    if not torch.cuda.is_available() or config.device == "cpu":
        raise ConfigError("these rows time a GPU, and none is used; leave them out of --what")
