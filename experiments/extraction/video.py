"""Latents -> mp4."""

from pathlib import Path

from torch import Tensor

from experiments.caches.atomic_files import replacing
from experiments.extraction.result import Extraction
from wan.config import RunConfig

SHORTEST_SIDE = 256  # pixels; smaller videos are enlarged in a file


def decode(extraction: Extraction) -> Tensor:
    """The generated video, uint8 [frames, height, width, 3] on the CPU."""
    from wan.modules.vae import VAE  # diffusers is needed only here

    vae = VAE.from_pretrained(extraction.config.ckpt_dir, device=extraction.latents.device)
    video = vae.decode(extraction.latents)[0].permute(0, 2, 3, 1)
    return (video * 255).round().byte().cpu()


def save_video(extraction: Extraction, path: str | Path) -> None:
    """Decode the latents and write an mp4 of 16 frames a second, or nothing; small videos are enlarged."""
    import imageio.v3 as iio  # ffmpeg is needed only here

    pixels = decode(extraction)
    enlarge = -(-SHORTEST_SIDE // min(pixels.shape[1:3]))
    pixels = pixels.repeat_interleave(enlarge, 1).repeat_interleave(enlarge, 2)
    content = iio.imwrite(
        "<bytes>", pixels.numpy(), extension=".mp4", fps=16, codec="libx264", macro_block_size=8
    )
    with replacing(path) as file:
        file.write(content)


def check_video(config: RunConfig) -> None:
    """Read the VAE's files, by reference. CheckpointError for a VAE that could not decode the latents."""
    from wan.modules.vae import VAE

    VAE.from_pretrained(config.ckpt_dir)
