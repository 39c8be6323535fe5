"""Latents to video and back: weights of AutoencoderKLWan, with the transformer's normalisation.

diffusers' network encodes; wan/vae_decoder.py decodes with its weights.
"""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wan.checkpoint import (
    VAE_FILE,
    CheckpointError,
    assign,
    is_native,
    read_component_config,
    read_safetensors,
    read_torch_file,
    require_dir,
    require_file,
)
from wan.errors import library_reads
from wan.vae_decoder import Decoder, Past

if TYPE_CHECKING:  # takes a second to import: only where a video is decoded
    from diffusers import AutoencoderKLWan

DECODED_AT_ONCE = 20_000  # positions of latents in one call: three frames of 60 x 104, and any small video
POSITIONS_AT_ONCE = 1024  # of latents, encoded in one call: 16 latent frames of 8 x 8, one of 60 x 104


def load_native_vae(ckpt_dir: str | Path, dtype: torch.dtype, **sizes: object) -> "AutoencoderKLWan":
    """Load the VAE of a directory of the original release. Tests give other sizes than the real model's."""
    from diffusers import AutoencoderKLWan
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    path = require_file(Path(ckpt_dir) / VAE_FILE)
    vae = AutoencoderKLWan(**sizes)
    assign(vae, convert_wan_vae_to_diffusers(read_torch_file(path)), path, dtype, "cpu")
    return vae


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
        """Load a model directory of either layout. Raise CheckpointError for one that holds no such VAE."""
        from diffusers import AutoencoderKLWan

        with library_reads(f"the VAE of {ckpt_dir}", CheckpointError, "get it again"):
            if is_native(ckpt_dir):
                vae = load_native_vae(ckpt_dir, dtype)
            else:
                folder = require_dir(Path(ckpt_dir) / "vae")
                path = folder / "diffusion_pytorch_model.safetensors"
                with torch.device("meta"):
                    vae = AutoencoderKLWan.from_config(read_component_config(folder))
                assign(vae, read_safetensors(path), path, dtype, device)
            if torch.device(device).type == "cpu":
                channels_last(vae)
            return cls(vae).to(device)

    @cached_property
    def decoder(self) -> Decoder:
        """The weights that decode, as they are when this is first asked for."""
        return Decoder(self.vae)

    @property
    def made_by(self) -> str:
        """What an mp4 says of its decoder."""
        return f"VAE in {str(self.vae.dtype).removeprefix('torch.')}"

    def stream(self) -> "StreamedDecoder":
        return StreamedDecoder(self)

    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents [B, F, C, h, w] -> video [B, 1 + 4 (F − 1), 3, 8h, 8w] in 0..1."""
        return self.stream()(latents)

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        """Video [B, frames, 3, H, W] in 0..1 -> mean latents, normalised [B, F, C, h, w].

        Frames beyond the last whole 1 + 4 n are left out, as diffusers does.
        """
        whole = 1 + (video.shape[1] - 1) // 4 * 4
        x = (video[:, :whole].transpose(1, 2) * 2 - 1).to(self.vae.dtype)  # [B, 3, frames, H, W]
        features = [None] * self.vae._cached_conv_counts["encoder"]
        at_once = 4 * max(1, POSITIONS_AT_ONCE // (x.shape[3] * x.shape[4] // 64))
        z, _ = self.vae.quant_conv(
            torch.cat(
                [
                    self.vae.encoder(to_patches(self.vae, part), feat_cache=features, feat_idx=[0])
                    for part in (x[:, :, :1], *x[:, :, 1:].split(at_once, 2))
                    if part.shape[2]
                ],
                2,
            )
        ).chunk(2, 1)  # mean and log variance
        return ((z.float() - self.latents_mean) / self.latents_std).transpose(1, 2)


class StreamedDecoder:
    """Decodes one video piece by piece, of any numbers of latent frames, in constant memory.

    What the causal convolutions look back to is carried over.
    """

    def __init__(self, model: VAE):
        self.model = model
        self.past: Past = {}

    @torch.no_grad()
    def __call__(self, latents: Tensor) -> Tensor:
        """The next latents [B, F, C, h, w] -> their video [B, frames, 3, 8h, 8w] in 0..1.

        A latent frame is four video frames, the first of a video one.
        """
        z = latents.float() * self.model.latents_std[:, 0] + self.model.latents_mean[:, 0]
        at_once = max(1, DECODED_AT_ONCE // (z.shape[3] * z.shape[4]))
        pieces = z.split(at_once, 1) if self.past else (z[:, :1], *z[:, 1:].split(at_once, 1))
        parts = [
            part.float().div_(2).add_(0.5).clamp_(0, 1)
            for piece in pieces
            if piece.shape[1]
            for part in self.model.decoder.decode(piece, self.past, is_first=not self.past)
        ]
        return torch.cat(parts, 1)


def to_patches(vae: "AutoencoderKLWan", video: Tensor) -> Tensor:
    """Move patches of pixels of [B, 3, F, H, W] to channels where the VAE has patches (Wan2.2's)."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import patchify

    return video if vae.config.patch_size is None else patchify(video, vae.config.patch_size)


def from_patches(vae: "AutoencoderKLWan", x: Tensor) -> Tensor:
    """Undo to_patches() of what diffusers' decoder gives."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

    return x if vae.config.patch_size is None else unpatchify(x, vae.config.patch_size)


def channels_last(module: nn.Module) -> None:
    """Store the kernels of convolutions channels last: their outputs follow, and a CPU is a third faster."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for p in module.parameters():
        if p.ndim in formats:
            p.data = p.data.contiguous(memory_format=formats[p.ndim])
