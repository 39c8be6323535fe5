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
    read_weights_file,
    require_dir,
    require_file,
    sampled_sha256,
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


# --- A small decoder for a first look: TAEHV's of Wan2.1 (github.com/madebyollin/taehv, taew2_1.pth)
# Its pictures resemble the VAE's: nothing is measured on them. A frame of latents, as the transformer gives
# them, becomes four frames in 0..1. A layer with a memory also sees the frame before.
WIDTHS, TIMES = (256, 128, 64, 64), (1, 2, 2)  # channels of each resolution, and frames that one becomes
LATENT_CHANNELS = 16


class Clamp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / 3) * 3


class Memory(nn.Module):
    """A residual block [N, C, H, W] that sees the frame before."""

    def __init__(self, width: int):
        super().__init__()
        inner = [nn.ReLU(), _conv(width, width), nn.ReLU(), _conv(width, width)]
        self.conv = nn.Sequential(_conv(2 * width, width), *inner)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        return torch.relu(self.conv(torch.cat([x, before], 1)) + x)


class Grow(nn.Module):
    """A frame becomes several: [N, C, H, W] -> [N, times C, H, W]."""

    def __init__(self, width: int, times: int):
        super().__init__()
        self.times, self.conv = times, nn.Conv2d(width, width * times, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Preview(nn.Module):
    """The decoder with its weights; a video is decoded by one stream()."""

    def __init__(self, source: str = ""):
        super().__init__()
        self.source = self.identity = source
        layers: list[nn.Module] = [Clamp(), _conv(LATENT_CHANNELS, WIDTHS[0]), nn.ReLU()]
        for width, following, times in zip(WIDTHS, WIDTHS[1:], TIMES, strict=False):
            layers += [*(Memory(width) for _ in range(3)), nn.Upsample(scale_factor=2)]
            layers += [Grow(width, times), _conv(width, following, bias=False)]
        self.decoder = nn.Sequential(*layers, nn.ReLU(), _conv(WIDTHS[-1], 3))

    @classmethod
    def from_file(cls, path: str | Path, dtype: torch.dtype, device: torch.device) -> "Preview":
        """Read a .pth or .safetensors of TAEHV. Raise CheckpointError for any other file."""
        state = {name: x for name, x in read_weights_file(path).items() if str(name).startswith("decoder.")}
        with torch.device("meta"):
            model = cls(Path(path).name)
        assign(model, state, path, dtype, device)
        model.identity = f"{model.made_by} {sampled_sha256(path)} {dtype}"
        return model

    @property
    def made_by(self) -> str:
        """What an mp4 says of its decoder."""
        return f"preview by {self.source}"

    def stream(self) -> "PreviewStream":
        return PreviewStream(self)


class PreviewStream:
    """Decodes one video piece by piece; layers remember the last frame that they saw."""

    def __init__(self, model: Preview):
        self.model = model
        self.before: dict[int, Tensor] = {}  # by layer [B, 1, C, H, W]

    @torch.no_grad()
    def __call__(self, latents: Tensor) -> Tensor:
        """The next latents [B, F, C, h, w] -> their video [B, frames, 3, 8h, 8w]; the first frame is one."""
        batch, is_first = latents.shape[0], not self.before
        x = latents.to(next(self.model.parameters()).dtype)
        for number, layer in enumerate(self.model.decoder):
            if isinstance(layer, Memory):
                last = self.before.get(number, torch.zeros_like(x[:, :1]))
                self.before[number] = x[:, -1:].clone()
                y = layer(x.flatten(0, 1), torch.cat([last, x[:, :-1]], 1).flatten(0, 1))
            else:
                y = layer(x.flatten(0, 1))
            times = layer.times if isinstance(layer, Grow) else 1
            x = y.unflatten(1, (times, -1)).flatten(0, 1).unflatten(0, (batch, -1))
        return x[:, 3 if is_first else 0 :].float().clamp(0, 1)


def _conv(inputs: int, outputs: int, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias)
