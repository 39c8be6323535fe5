"""Time the VAE's decoder beside diffusers' own, and a rollout whose blocks are decoded while the next come.

    python experiments/benchmarks/decode.py --random_weights --device cuda --repeats 5

Rows run in turn in one process. Decoding rows say their peak memory and, in dB, how far pictures are from
diffusers' in float32 (without TF32): of pictures that the random VAE encoded, its last layer scaled so that
their standard deviation is 0.5 of -1..1. With --mp4 the pictures are also encoded, as --save_video does.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor
from torch.backends import cudnn

from experiments.benchmarks.harness import (
    Active,
    Rollout,
    benchmark_parser,
    capture_requests,
    capturing,
    in_turn,
    new_report,
    print_rows,
    save_report,
    seconds_of,
)
from experiments.extraction.devices import choose_device
from experiments.extraction.video import LiveVideo, stream_of, to_pixels, write_mp4
from experiments.running.cli import config_from, main
from wan.config import RunConfig
from wan.kernels.graphs import apply_cuda_graphs
from wan.vae import VAE, StreamedDecoder

GIB = 2**30
SPREAD = 0.5  # standard deviation of the random VAE's pictures, in -1..1


def run(argv=None):
    parser = benchmark_parser(__doc__)
    parser.add_argument("--what", nargs="+", choices=PARTS, default=list(PARTS), help="which tables")
    parser.add_argument("--mp4", action="store_true", help="also rows with the mp4; needs ffmpeg")
    parser.add_argument("--float32", action="store_true", help="also diffusers' decode in float32")
    args = parser.parse_args(argv)
    config = config_from(args)
    report = new_report(config, args)
    for name in args.what:
        with torch.no_grad():
            PARTS[name](args, config, report)
        save_report(report, args.output_path)


# --- The decoder alone
def decoding(args: argparse.Namespace, config: RunConfig, report: dict[str, Any]) -> None:
    """Time the whole video by diffusers and by ours, at once and in blocks, with the memory that it takes."""
    device = choose_device(config.device)
    vae = random_vae(device) if args.random_weights else VAE.from_pretrained(config.ckpt_dir, device=device)
    latents = latents_of(vae, config, device)
    with cudnn.flags(enabled=True, allow_tf32=False):
        scale = SPREAD / 2 / by_diffusers(vae, latents[:, :3]).std()
        for parameter in vae.vae.decoder.conv_out.parameters():
            parameter.mul_(scale)
        reference = by_diffusers(vae, latents).cpu()
    report["pictures_std"] = reference.std().item() * 2
    if args.float32:
        exact = partial(by_diffusers, vae, latents)
        report["rows"]["diffusers float32"] = measured(exact, reference) | {"seconds": seconds_of(exact)}
    half = VAE(vae.vae.to(torch.bfloat16)).to(device)
    calls: dict[str, Callable[[], Tensor]] = {
        "diffusers bfloat16": partial(by_diffusers, half, latents),
        "ours bfloat16": partial(half.decode, latents),
        "ours bfloat16, block by block": partial(in_blocks, half, latents, config.block_sizes),
    }
    rows = {name: measured(call, reference) for name, call in calls.items()}
    found = in_turn({name: partial(seconds_of, call) for name, call in calls.items()}, args.repeats, rows)
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
    y, x = torch.linspace(-1, 1, height, device=device)[:, None], torch.linspace(-1, 1, width, device=device)
    t = torch.linspace(0, 1, frames, device=device)[:, None, None]
    disc = torch.where((x - t + 0.5).square() + y.square() < 0.1, 1.0, -0.6)
    video = torch.stack([torch.sin(9 * x + 12 * t + 3 * y * y), disc, torch.cos(20 * x * y + 6 * t)], 1)
    latents = vae.encode(video[None] / 2 + 0.5)
    return latents / latents.std()


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


def measured(call: Callable[[], Tensor], reference: Tensor) -> dict[str, Any]:
    """Call twice -> seconds of the first call, peak memory of the second in GiB, dB to the reference."""
    first = seconds_of(call)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    error = (call().cpu().float() - reference.float()).square().mean()
    return {
        "first_seconds": round(first, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        "psnr": round(-10 * error.log10().item(), 2),
    }


# --- While the model runs
class Pictures(LiveVideo):
    """A live video of a VAE that is there, with the seconds when pieces came; without a path to the host."""

    def __init__(self, vae: VAE, path: Path | None):
        self.decoding, self.encoding = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.vae, self.overlaps, self.frames = Future(), True, 0
        self.vae.set_result(vae)
        self.pieces, self.video, self.arrived, self.start = [], None, list[float](), time.perf_counter()
        self.growing = path  # type: ignore[assignment]  # none is kept

    def begin(self, device: torch.device) -> None:
        self.decoder, self.stream = self.vae.result().stream(), stream_of(device)
        if self.growing:
            super().begin(device)
        self.file, self.video = self.video, self

    def append(self, pixels: Tensor, first: int) -> None:
        if self.file:
            self.file.append(pixels, first)
        self.arrived.append(time.perf_counter() - self.start)

    def wait(self) -> None:
        for piece in self.pieces:
            piece.result().result()
        if self.file:
            self.file.finish()
        self.decoding.shutdown()
        self.encoding.shutdown()


def beside(args: argparse.Namespace, config: RunConfig, report: dict[str, Any]) -> None:
    """Time noise to pictures on the host, or in an mp4: rollout, then decoder; and blocks decoded beside."""
    rollout = Rollout(config, args.random_weights)
    apply_cuda_graphs(rollout.model)
    vae = random_vae(rollout.device) if args.random_weights else VAE.from_pretrained(config.ckpt_dir)
    vae = VAE(vae.vae.to(rollout.device, torch.bfloat16)).to(rollout.device)
    mass = capturing(capture_requests(config, rollout.sizes.num_layers)["mass"])
    mp4 = Path(tempfile.mkdtemp()) / "video.mp4"
    firsts: dict[str, float] = {}

    def then(path: Path | None) -> float:
        def pictures() -> None:
            pixels = to_pixels(vae.decode(rollout.generate())).cpu()
            if path:
                write_mp4(pixels[0], path)

        return seconds_of(pictures)

    def at_once(name: str, path: Path | None, active: Active = nullcontext) -> float:
        live = Pictures(vae, path)
        with active():
            rollout.generate(on_block=lambda _, latents: live.add(latents.clone()))
        live.wait()
        firsts[name] = min(firsts.get(name, math.inf), round(live.arrived[0], 3))
        return time.perf_counter() - live.start

    rows: dict[str, Callable[[], float]] = {
        "rollout": rollout.seconds,
        "rollout, atlas": partial(rollout.seconds, mass),
        "decoder": lambda: seconds_of(lambda: to_pixels(vae.decode(rollout.latents)).cpu()),
        "rollout, then decoder": partial(then, None),
    }
    made = {"decoded": None} | ({"decoded, in an mp4": mp4} if args.mp4 else {})
    if args.mp4:
        rows["rollout, then decoder, then mp4"] = partial(then, mp4)
    for said, path in made.items():
        for more, active in {"": nullcontext, ", atlas": mass}.items():
            name = f"blocks {said} beside{more}"
            rows[name] = partial(at_once, name, path, active)
    report["first_call_seconds"] = {name: round(row(), 2) for name, row in rows.items()}
    for row in rows.values():  # graphs are recorded
        row()
    firsts.clear()
    torch.cuda.reset_peak_memory_stats()
    report["beside"] = in_turn(rows, args.repeats)
    print_rows(report["beside"])
    report["beside_peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
    report["first_pictures_seconds"] = firsts
    print(firsts, report["beside_peak_gib"], flush=True)


PARTS = {"decoding": decoding, "beside": beside}

if __name__ == "__main__":
    main(run)
