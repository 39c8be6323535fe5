"""Time the VAE's decoder beside diffusers' own, and a rollout whose blocks are decoded while the next come.

    python experiments/benchmarks/decode.py --random_weights --device cuda --repeats 5

Rows run in turn in one process. Decoding rows say their peak memory and, in dB, how far pictures are from
diffusers' in float32 (without TF32): of pictures that the random VAE encoded, its last layer scaled so that
their standard deviation is 0.5 of -1..1, and of the miniature's held-out scenes through its own VAE.
Without --random_weights the config's files are used. Nothing is encoded to mp4: pictures come to the host.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from experiments.benchmarks.harness import benchmark_parser, in_turn, print_rows, save_report
from experiments.benchmarks.rollout import described, sizes_of
from experiments.benchmarks.worker import Rollout
from experiments.caches.files import require_writable
from experiments.extraction.video import LiveVideo, stream_of, to_pixels
from experiments.miniature.moving_shapes import render_batch, sample_scenes
from experiments.miniature.vae_training import decode as decode_by_diffusers
from experiments.running.cli import config_from, main
from wan.config import RunConfig
from wan.kernels.graphs import apply_cuda_graphs
from wan.vae import VAE, StreamedDecoder

GIB = 2**30
MINIATURE, SCENES = "checkpoints/wan-mini", 8
SPREAD = 0.5  # standard deviation of the random VAE's pictures, in -1..1


def run(argv=None):
    parser = benchmark_parser(__doc__, repeats=5)
    parser.add_argument("--what", nargs="+", choices=PARTS, default=list(PARTS), help="which tables")
    parser.add_argument("--float32", action="store_true", help="also diffusers' decode in float32")
    args = parser.parse_args(argv)
    if args.output_path:
        require_writable(args.output_path)
    config = config_from(args)
    report = described(config, args)
    for name in args.what:
        PARTS[name](args, config, report)
        save_report(report, args.output_path)


# --- The decoder alone
@torch.no_grad()
def decoding(args: argparse.Namespace, config: RunConfig, report: dict[str, Any]) -> None:
    """Time the whole video by diffusers and by ours, at once and in blocks, with the memory that it takes."""
    device = torch.device(config.device if config.device != "auto" else "cuda")
    vae = random_vae(device) if args.random_weights else VAE.from_pretrained(config.ckpt_dir, device=device)
    latents = latents_of(vae, config, device)
    with exact():
        scale_pictures(vae, latents)
        reference = by_diffusers(vae, latents).cpu()
    report["pictures_std"] = reference.std().item() * 2
    others: dict[str, Callable[[], Tensor]] = {}
    if args.float32:
        others["diffusers float32"] = partial(by_diffusers, vae, latents)
    rows = measured(others, reference, report)
    half = VAE(vae.vae.to(torch.bfloat16)).to(device)
    sizes = config.block_sizes
    calls: dict[str, Callable[[], Tensor]] = {
        "diffusers bfloat16": partial(by_diffusers, half, latents),
        "ours bfloat16": lambda: half.decode(latents),
        "ours bfloat16, block by block": lambda: in_blocks(half, latents, sizes),
    }
    rows |= measured(calls, reference, report)
    timed = {name: partial(seconds_of, call) for name, call in calls.items()}
    found = in_turn(timed, args.repeats, rows)
    print_rows(found)
    report["rows"] |= found


def random_vae(device: torch.device) -> VAE:
    """Return a VAE of Wan2.1's sizes with random weights, and norms that are not all ones."""
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
    y = torch.linspace(-1, 1, height, device=device)[:, None]
    x, t = (
        torch.linspace(-1, 1, width, device=device),
        torch.linspace(0, 1, frames, device=device)[:, None, None],
    )
    disc = torch.where((x - t + 0.5).square() + y.square() < 0.1, 1.0, -0.6)
    video = torch.stack([torch.sin(9 * x + 12 * t + 3 * y * y), disc, torch.cos(20 * x * y + 6 * t)], 1)
    latents = vae.encode(video[None] / 2 + 0.5)
    return latents / latents.std()


def scale_pictures(vae: VAE, latents: Tensor) -> None:
    """Scale the last layer of a random VAE, so that its pictures have SPREAD."""
    scale = SPREAD / 2 / by_diffusers(vae, latents[:, :3]).std()
    for parameter in vae.vae.decoder.conv_out.parameters():
        parameter.mul_(scale)


def by_diffusers(vae: VAE, latents: Tensor) -> Tensor:
    """Decode as AutoencoderKLWan.decode does, frame by frame -> [B, frames, 3, H, W] in 0..1."""
    z = latents.transpose(1, 2).float() * vae.latents_std + vae.latents_mean
    cache = [None] * vae.vae._cached_conv_counts["decoder"]
    z = vae.vae.post_quant_conv(z.to(vae.vae.dtype))
    parts = [
        vae.vae.decoder(z[:, :, i : i + 1], feat_cache=cache, feat_idx=[0], first_chunk=i == 0)
        for i in range(z.shape[2])
    ]
    return (torch.cat(parts, 2).float() / 2 + 0.5).clamp(0, 1).transpose(1, 2)


def in_blocks(vae: VAE, latents: Tensor, sizes: list[int]) -> Tensor:
    """Decode as a rollout's blocks come, to 8 bits on the host."""
    decoder = StreamedDecoder(vae)
    pixels = [to_pixels(decoder(block)).cpu() for block in latents.split(sizes, 1)]
    return torch.cat(pixels, 1).movedim(-1, 2).float() / 255


def measured(
    calls: dict[str, Callable[[], Tensor]], reference: Tensor, report: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Call each once -> seconds of a first call, peak memory of another in GiB, dB to the reference."""
    rows = {}
    for name, call in calls.items():
        first = seconds_of(call)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        found = call()
        peak = round(torch.cuda.max_memory_allocated() / GIB, 2)
        rows[name] = {
            "first_seconds": round(first, 2),
            "peak_gib": peak,
            "psnr": psnr(found.cpu(), reference),
        }
        report["rows"][name] = rows[name] | {"seconds": seconds_of(call)}
        print(name, report["rows"][name], flush=True)
    return rows


def psnr(found: Tensor, reference: Tensor) -> float:
    return round(-10 * (found.float() - reference.float()).square().mean().log10().item(), 2)


def seconds_of(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


@contextmanager
def exact() -> Iterator[None]:
    """Convolve float32 without TF32."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


# --- The miniature's pictures
@torch.no_grad()
def miniature(args: argparse.Namespace, config: RunConfig, report: dict[str, Any]) -> None:
    """Say how far bfloat16 is from float32 on held-out scenes that the miniature's VAE encoded."""
    device = torch.device(config.device if config.device != "auto" else "cuda")
    vae = VAE.from_pretrained(MINIATURE, device=device)
    scenes = list(itertools.islice(sample_scenes(0, held_out=True), SCENES))
    video = render_batch(scenes, 81, 64, device).transpose(1, 2) / 2 + 0.5
    with exact():
        latents = vae.encode(video)
        z = latents.transpose(1, 2) * vae.latents_std + vae.latents_mean
        reference = (decode_by_diffusers(vae.vae, z) / 2 + 0.5).clamp(0, 1).transpose(1, 2)
        found = {"float32": psnr(vae.decode(latents), reference)}
    half = VAE(vae.vae.to(torch.bfloat16)).to(device)
    found |= {"bfloat16": psnr(half.decode(latents), reference)}
    found |= {"diffusers_bfloat16": psnr(by_diffusers_patched(half, z), reference)}
    report["miniature_psnr"] = found
    print("miniature", json.dumps(found), flush=True)


def by_diffusers_patched(vae: VAE, z: Tensor) -> Tensor:
    return (decode_by_diffusers(vae.vae, z.to(vae.vae.dtype)).float() / 2 + 0.5).clamp(0, 1).transpose(1, 2)


# --- While the model runs
class Pictures(LiveVideo):
    """A live video whose pictures come to the host, and are not encoded."""

    def __init__(self, vae: VAE, device: torch.device):
        self.decoding, self.encoding = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.vae, self.overlaps, self.frames = Future(), True, 0
        self.vae.set_result(vae)
        self.pieces, self.video, self.arrived = [], None, list[float]()
        self.decoder, self.stream = StreamedDecoder(vae), stream_of(device)

    def begin(self, device: torch.device) -> None:
        self.video = SimpleNamespace(append=lambda pixels, first: self.arrived.append(time.perf_counter()))

    def wait(self) -> None:
        for piece in self.pieces:
            piece.result().result()
        self.decoding.shutdown()
        self.encoding.shutdown()


@torch.no_grad()
def beside(args: argparse.Namespace, config: RunConfig, report: dict[str, Any]) -> None:
    """Time noise to pictures on the host: rollout, then decoder; and each block decoded beside the next."""
    rollout = Rollout(config, sizes_of(config, args.random_weights), args.random_weights)
    apply_cuda_graphs(rollout.model)
    vae = random_vae(rollout.device) if args.random_weights else VAE.from_pretrained(config.ckpt_dir)
    vae = VAE(vae.vae.to(rollout.device, torch.bfloat16)).to(rollout.device)
    firsts: dict[str, list[float]] = {"then": [], "beside": []}

    def then() -> float:
        start = time.perf_counter()
        to_pixels(vae.decode(generate())).cpu()
        firsts["then"].append(time.perf_counter() - start)
        return time.perf_counter() - start

    def generate(**more: Any) -> Tensor:
        inputs = {"prompt_embeds": rollout.text, "renoise": rollout.renoise, **more}
        return rollout.pipeline.inference(rollout.noise, **inputs)[1]

    def at_once() -> float:
        start, live = time.perf_counter(), Pictures(vae, rollout.device)
        generate(on_block=lambda _, latents: live.add(latents.clone()))
        live.wait()
        firsts["beside"].append(live.arrived[0] - start)
        return time.perf_counter() - start

    rows = {
        "rollout": rollout.seconds,
        "decoder": lambda: seconds_of(lambda: to_pixels(vae.decode(rollout.latents)).cpu()),
        "rollout, then decoder": then,
        "blocks decoded beside": at_once,
    }
    for row in (*rows.values(), *rows.values()):  # graphs are recorded
        row()
    torch.cuda.reset_peak_memory_stats()
    found = in_turn(rows, args.repeats)
    print_rows(found)
    report["beside"] = found
    report["beside_peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
    report["first_pictures_seconds"] = {name: round(min(values[2:]), 3) for name, values in firsts.items()}
    print(report["first_pictures_seconds"], report["beside_peak_gib"], flush=True)


PARTS = {"decoding": decoding, "miniature": miniature, "beside": beside}

if __name__ == "__main__":
    main(run)
