"""Latents -> mp4."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from experiments.caches.atomic_files import replacing
from experiments.caches.mp4_files import encode_mp4, require_ffmpeg
from experiments.extraction.devices import decoding_threads
from experiments.extraction.result import Extraction
from wan.config import RunConfig

FPS = 16
SHORTEST_SIDE = 256  # pixels; smaller videos are enlarged in a file


def decode(extraction: Extraction) -> Tensor:
    """The generated video, uint8 [frames, height, width, 3] on the CPU."""
    from wan.modules.vae import VAE  # diffusers is needed only here

    vae = VAE.from_pretrained(extraction.config.ckpt_dir, device=extraction.latents.device)
    latents = extraction.latents
    with decoding_threads(latents.device, *latents.shape[-2:]):
        return to_pixels(vae.decode(latents))[0].cpu()


def to_pixels(video: Tensor) -> Tensor:
    """Video [B, frames, 3, H, W] in 0..1 -> uint8 [B, frames, H, W, 3]."""
    return (video.permute(0, 1, 3, 4, 2) * 255).round().byte()


def save_video(extraction: Extraction, path: str | Path) -> None:
    """Decode the latents and write an mp4 of 16 frames a second, or nothing; small videos are enlarged."""
    write_mp4(decode(extraction), path)


def write_mp4(pixels: Tensor, path: str | Path, shortest: int = SHORTEST_SIDE) -> None:
    """Write uint8 pixels [frames, height, width, 3] whole or not at all, with sides of shortest or more."""
    with replacing(path) as file:
        file.write(encoded(pixels, shortest))


def encoded(pixels: Tensor, shortest: int = SHORTEST_SIDE, options: Sequence[str] = ()) -> bytes:
    """An mp4 of 16 frames a second of uint8 pixels [frames, height, width, 3]; options are ffmpeg's."""
    enlarge = -(-shortest // min(pixels.shape[1:3]))
    pixels = pixels.repeat_interleave(enlarge, 1).repeat_interleave(enlarge, 2)
    return encode_mp4(pixels.numpy(), FPS, options=options)


def check_video(config: RunConfig) -> None:
    """Read the VAE's files, by reference. CheckpointError for a VAE that could not decode the latents,
    CacheError where no mp4 can be written."""
    require_ffmpeg()
    from wan.modules.vae import VAE

    VAE.from_pretrained(config.ckpt_dir)
