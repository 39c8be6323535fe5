"""Latents to video and back: diffusers' AutoencoderKLWan, with the transformer's normalisation."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wan import checkpoint as native
from wan.checkpoint import (
    CheckpointError,
    is_native,
    read_component_config,
    read_safetensors,
    require_dir,
)
from wan.errors import library_reads

if TYPE_CHECKING:  # takes a second to import: only where a video is decoded
    from diffusers import AutoencoderKLWan

POSITIONS_AT_ONCE = 1024  # of latents, in one call of the decoder: 16 latent frames of 8 x 8, one of 60 x 104


class VAE(nn.Module):
    """The model's latents are (z − mean) / std per channel, with mean and std from the VAE's config."""

    def __init__(self, vae: "AutoencoderKLWan"):
        super().__init__()
        self.vae = vae
        self.latents_mean: Tensor  # [C, 1, 1, 1]
        self.latents_std: Tensor
        for name in ("latents_mean", "latents_std"):
            values = torch.tensor(getattr(vae.config, name), dtype=torch.float32)
            if values.shape != (vae.config.z_dim,) or not values.isfinite().all():
                raise CheckpointError(
                    f"the VAE's {name} are not {vae.config.z_dim} numbers; get its config again"
                )
            self.register_buffer(name, values[:, None, None, None], persistent=False)  # [C, 1, 1, 1]

    @classmethod
    def from_pretrained(
        cls, ckpt_dir: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> "VAE":
        """From a model directory of either layout. Raises CheckpointError for one that holds no such VAE."""
        from diffusers import AutoencoderKLWan

        with library_reads(f"the VAE of {ckpt_dir}", CheckpointError, "get it again"):
            if is_native(ckpt_dir):
                model = cls(native.load_vae(ckpt_dir, dtype))
            else:
                folder = require_dir(Path(ckpt_dir) / "vae")
                config, path = read_component_config(folder), folder / "diffusion_pytorch_model.safetensors"
                with torch.device("meta"):
                    vae = AutoencoderKLWan.from_config(config)
                native.assign(vae, read_safetensors(path), path, dtype, device)
                model = cls(vae)
            if torch.device(device).type == "cpu":
                channels_last(model.vae)
            return model.to(device)

    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents [B, F, C, h, w] -> video [B, 1 + 4 (F − 1), 3, 8h, 8w] in 0..1."""
        return StreamedDecoder(self)(latents)

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        """Video [B, frames, 3, H, W] in 0..1 -> mean latents, normalised [B, F, C, h, w].

        Frames beyond the last whole 1 + 4 n are left out, as diffusers does.
        """
        whole = 1 + (video.shape[1] - 1) // 4 * 4
        x = (video[:, :whole].transpose(1, 2) * 2 - 1).to(self.vae.dtype)
        features = [None] * self.vae._cached_conv_counts["encoder"]
        parts = [
            self.vae.encoder(to_patches(self.vae, part), feat_cache=features, feat_idx=[0])
            for part in _pieces(x, 1, 4 * _at_once(x.shape[3] // 8, x.shape[4] // 8))
        ]
        z, _ = self.vae.quant_conv(torch.cat(parts, 2)).chunk(2, 1)  # mean and log variance
        return ((z.float() - self.latents_mean) / self.latents_std).transpose(1, 2)


class StreamedDecoder:
    """Decodes one video piece by piece: what its causal convolutions look back to is carried over.

    Pieces may have any number of latent frames. Small frames go through the network together: at 8 x 8
    latents that is three times as fast on a CPU as one by one, and differs by rounding.
    """

    def __init__(self, model: VAE):
        self.model = model
        self.features: list[Tensor | str | None] = [None] * model.vae._cached_conv_counts["decoder"]
        self.started = False

    @torch.no_grad()
    def __call__(self, latents: Tensor) -> Tensor:
        """The next latents [B, F, C, h, w] -> their video [B, frames, 3, 8h, 8w] in 0..1.

        A latent frame is four video frames, the first of a video one.
        """
        z = latents.transpose(1, 2).float() * self.model.latents_std + self.model.latents_mean
        z = self.model.vae.post_quant_conv(z.to(self.model.vae.dtype))
        alone = 0 if self.started else 1  # the first latent frame is one video frame
        video = [self._next(part) for part in _pieces(z, alone, _at_once(*z.shape[3:]))]
        return (torch.cat(video, 2).float() / 2 + 0.5).clamp(0, 1).transpose(1, 2)

    def _next(self, z: Tensor) -> Tensor:
        """Pixels in -1..1 [B, 3, frames, H, W] of z [B, C, F, h, w]."""
        is_first, self.started = not self.started, True
        x = self.model.vae.decoder(z, feat_cache=self.features, feat_idx=[0], first_chunk=is_first)
        return from_patches(self.model.vae, x)


def to_patches(vae: "AutoencoderKLWan", video: Tensor) -> Tensor:
    """What the encoder takes: video [B, 3, F, H, W], its patches of pixels as channels where the VAE has
    patches (as Wan2.2's; Wan2.1's has none)."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import patchify

    return video if vae.config.patch_size is None else patchify(video, vae.config.patch_size)


def from_patches(vae: "AutoencoderKLWan", x: Tensor) -> Tensor:
    """to_patches() undone, of what the decoder gives."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

    return x if vae.config.patch_size is None else unpatchify(x, vae.config.patch_size)


def _at_once(height: int, width: int) -> int:
    """Latent frames of this size in one call."""
    return max(1, POSITIONS_AT_ONCE // (height * width))


def _pieces(x: Tensor, alone: int, size: int) -> list[Tensor]:
    """Parts of x [B, C, F, h, w] along its frames: the first `alone`, then at most `size` at a time."""
    rest = x[:, :, alone:]
    return ([x[:, :, :alone]] if alone else []) + (list(rest.split(size, 2)) if rest.shape[2] else [])


def channels_last(module: nn.Module) -> None:
    """Store the kernels of convolutions channels last: their outputs follow, and a CPU is a third faster."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for p in module.parameters():
        if p.ndim in formats:
            p.data = p.data.contiguous(memory_format=formats[p.ndim])
