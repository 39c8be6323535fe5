"""Latents to video and back: diffusers' AutoencoderKLWan, with the transformer's normalisation."""

from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor, nn

from wan import native
from wan.checkpoint import (
    CheckpointError,
    is_native,
    read_component_config,
    read_safetensors,
    require_dir,
)
from wan.errors import library_reads


class VAE(nn.Module):
    """The model's latents are (z − mean) / std per channel, with mean and std from the VAE's config."""

    def __init__(self, vae: AutoencoderKLWan):
        super().__init__()
        self.vae = vae
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
        with library_reads(f"the VAE of {ckpt_dir}", CheckpointError, "get it again"):
            if is_native(ckpt_dir):
                return cls(native.load_vae(ckpt_dir, dtype)).to(device)
            folder = require_dir(Path(ckpt_dir) / "vae")
            config, path = read_component_config(folder), folder / "diffusion_pytorch_model.safetensors"
            with torch.device("meta"):
                vae = AutoencoderKLWan.from_config(config)
            native.assign(vae, read_safetensors(path), path, dtype, device)
            return cls(vae).to(device)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents [B, F, C, h, w] -> video [B, 1 + 4 (F − 1), 3, 8h, 8w] in 0..1."""
        z = latents.transpose(1, 2).float() * self.latents_std + self.latents_mean
        video = self.vae.decode(z.to(self.vae.dtype)).sample
        return (video.float() / 2 + 0.5).clamp(0, 1).transpose(1, 2)

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        """Video [B, frames, 3, H, W] in 0..1 -> mean latents, normalised [B, F, C, h, w]."""
        z = self.vae.encode((video.transpose(1, 2) * 2 - 1).to(self.vae.dtype)).latent_dist.mode()
        return ((z.float() - self.latents_mean) / self.latents_std).transpose(1, 2)
