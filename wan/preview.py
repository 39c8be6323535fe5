"""A small decoder for a first look: TAEHV's of Wan2.1 (github.com/madebyollin/taehv, taew2_1.pth).

Its pictures resemble the VAE's: nothing is measured on them. A frame of latents, as the transformer gives
them, becomes four frames in 0..1. A layer with a memory also sees the frame before.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from wan.checkpoint import assign, read_weights_file

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
        self.source = source
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
