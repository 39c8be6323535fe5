"""Latents -> pixels -> mp4."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from experiments.caches.files import encode_mp4, replacing, require_ffmpeg
from experiments.extraction.cache_builders import Extraction
from experiments.extraction.devices import decoding_threads
from experiments.extraction.provenance import video_tag
from wan.config import RunConfig
from wan.vae import POSITIONS_AT_ONCE, VAE, StreamedDecoder

FPS = 16
SHORTEST_SIDE = 256  # pixels; smaller videos are enlarged in a file


def decode(extraction: Extraction) -> Tensor:
    """Decode the generated video, uint8 [frames, height, width, 3] on the CPU."""
    latents = extraction.latents
    vae = VAE.from_pretrained(extraction.config.ckpt_dir, device=latents.device)
    with decoding_threads(latents.device, *latents.shape[-2:]):
        return to_pixels(vae.decode(latents))[0].cpu()


def to_pixels(video: Tensor) -> Tensor:
    """Video [B, frames, 3, H, W] in 0..1 -> uint8 [B, frames, H, W, 3]."""
    return (video.permute(0, 1, 3, 4, 2) * 255).round().byte()


def save_video(extraction: Extraction, path: str | Path) -> None:
    """Decode the latents and write an mp4 of 16 frames a second, or nothing; small videos are enlarged."""
    tag = video_tag(extraction.common["fingerprint"], extraction.config)
    write_mp4(decode(extraction), path, tag=tag)


def write_mp4(pixels: Tensor, path: str | Path, shortest: int = SHORTEST_SIDE, tag: str = "") -> None:
    """Write uint8 pixels [frames, height, width, 3] whole or not at all, with sides of shortest or more."""
    with replacing(path) as file:
        file.write(encoded(pixels, shortest, tag=tag))


def encoded(
    pixels: Tensor, shortest: int = SHORTEST_SIDE, options: Sequence[str] = (), tag: str = ""
) -> bytes:
    """Encode uint8 pixels [frames, height, width, 3] at 16 frames a second; options are ffmpeg's."""
    enlarge = -(-shortest // min(pixels.shape[1:3]))
    pixels = pixels.repeat_interleave(enlarge, 1).repeat_interleave(enlarge, 2)
    return encode_mp4(pixels.numpy(), FPS, options=options, tag=tag)


def check_video(config: RunConfig) -> None:
    """Raise CheckpointError for a VAE that cannot decode, CacheError where no mp4 can be written."""
    require_ffmpeg()
    VAE.from_pretrained(config.ckpt_dir)


def decoded_blocks(vae: VAE, blocks: Iterable[Tensor]) -> Iterator[Tensor]:
    """Decode blocks of latents [B, n, C, h, w] in order -> uint8 [B, frames, H, W, 3] on the CPU.

    Blocks of small frames wait until there are as many as the decoder takes in one call.
    """
    decoder, waiting = StreamedDecoder(vae), list[Tensor]()
    for latents in blocks:
        count = sum(one.shape[1] for one in waiting) + latents.shape[1]
        if waiting and count > frames_at_once(*latents.shape[-2:]):
            yield to_pixels(decoder(torch.cat(waiting, 1))).cpu()
            waiting = []
        waiting.append(latents)
    if waiting:
        yield to_pixels(decoder(torch.cat(waiting, 1))).cpu()


def frames_at_once(height: int, width: int) -> int:
    """Return how many latent frames of this size one call of the decoder takes."""
    return max(1, POSITIONS_AT_ONCE // (height * width))
