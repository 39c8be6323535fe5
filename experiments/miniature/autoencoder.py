"""The miniature's VAE on whole clips: encode, decode, how far back it sees, and what it loses."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from experiments.miniature.moving_shapes import FPS, Scene, render_batch, sample_scenes
from experiments.miniature.recipe import FRAMES, HELD_OUT_SEED, SIDE
from wan.modules.vae import from_patches, to_patches


def encode(vae: AutoencoderKLWan, video: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log variance [B, z, f, h, w] of video [B, 3, F, H, W]; vae.encode in two calls, frame 0 and
    the others."""
    cache = [None] * vae._cached_conv_counts["encoder"]
    parts = [
        vae.encoder(to_patches(vae, x), feat_cache=cache, feat_idx=[0])
        for x in (video[:, :, :1], video[:, :, 1:])
        if x.numel()
    ]
    return vae.quant_conv(torch.cat(parts, 2)).chunk(2, 1)


def decode(vae: AutoencoderKLWan, z: Tensor) -> Tensor:
    """Latents to video, not clamped; vae.decode in two calls, frame 0 and the others."""
    cache, z = [None] * vae._cached_conv_counts["decoder"], vae.post_quant_conv(z)
    first = vae.decoder(z[:, :, :1], feat_cache=cache, feat_idx=[0], first_chunk=True)
    rest = [vae.decoder(z[:, :, 1:], feat_cache=cache, feat_idx=[0])] if z.shape[2] > 1 else []
    return from_patches(vae, torch.cat([first, *rest], 2))


def set_layout(vae: AutoencoderKLWan, planes: torch.memory_format, volumes: torch.memory_format) -> None:
    """Memory layout of the kernels of 2D and 3D convolutions, which their outputs take over."""
    for p in vae.parameters():
        p.data = p.data.contiguous(memory_format={4: planes, 5: volumes}.get(p.ndim, torch.contiguous_format))


def receptive_field(config: Mapping) -> int:
    """Video frames back to which the last frame of a long video sees through the decoder, its own latent
    included.

    Read off the gradient of a decoder of the same layers with as few channels as it can have.
    """
    layers = ("num_res_blocks", "temperal_downsample", "dim_mult")
    sizes = {name: config[name] for name in layers if name in config}
    small = AutoencoderKLWan(
        base_dim=4, decoder_base_dim=4, z_dim=2, **sizes | {"dim_mult": [1] * len(sizes["dim_mult"])}
    )
    small = small.double().requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        z = torch.randn(1, 2, 64, 1, 1, dtype=torch.float64, requires_grad=True)
    decode(small, z)[:, :, -1].square().sum().backward()
    assert z.grad is not None
    seen = int((z.grad.abs().sum((0, 1, 3, 4)) > 0).sum())
    return 1 + 4 * (seen - 1)


@torch.no_grad()
def encode_scenes(
    vae: AutoencoderKLWan, scenes: Sequence[Scene], device: torch.device, batch: int = 32
) -> Tensor:
    """Latent means [N, z, f, h, w] of rendered clips of 81 frames."""
    parts = (
        render_batch(list(scenes[i : i + batch]), FRAMES, SIDE, device) for i in range(0, len(scenes), batch)
    )
    return torch.cat([encode(vae, video.to(vae.dtype))[0] for video in parts])


@torch.no_grad()
def squared_errors(
    vae: AutoencoderKLWan, device: torch.device, clips: int, frames: int, batch: int = 8
) -> Tensor:
    """Mean squared error [clips, frames], for values in 0..1, of held-out scenes through the VAE."""
    scenes = list(itertools.islice(sample_scenes(HELD_OUT_SEED, held_out=True), clips))
    errors = []
    for i in range(0, clips, batch):
        video = render_batch(list(scenes[i : i + batch]), frames, SIDE, device)
        error = decode(vae, encode(vae, video.to(vae.dtype))[0]).float().clamp(-1, 1) - video
        errors.append(error.square().mean((1, 3, 4)).cpu() / 4)
    return torch.cat(errors)


def psnr(squared: Tensor) -> Tensor:
    """dB of each clip [clips] from its squared errors [clips, frames]."""
    return -10 * squared.mean(1).log10()


def vae_quality(vae: AutoencoderKLWan, device: torch.device, clips: int) -> dict[str, float]:
    """PSNR in dB of held-out clips of 81 frames, mean over clips: all frames, the first second, the last
    second."""
    squared = squared_errors(vae, device, clips, FRAMES)
    parts = {"psnr": squared, "psnr_first_second": squared[:, :FPS], "psnr_last_second": squared[:, -FPS:]}
    return {name: round(psnr(errors).mean().item(), 2) for name, errors in parts.items()}
