"""Latents to video and back: weights of AutoencoderKLWan, with the transformer's normalisation.

diffusers' network encodes. Decoder decodes with its weights: channels last, and one pass over memory between
two convolutions. That pass is feed(): it adds bias and residual, normalises, applies
SiLU, and writes the next convolution's input, with the two frames that it looks back to in front. On a GPU it
is a Triton kernel (wan/kernels/vae.py). Upsampling writes nothing: a 3 x 3 convolution over pixels that are
there twice in each direction is four 2 x 2 convolutions, one for each of the four, and feed() reads their
outputs where they lie.

The decoder's activations are [B, T, H, W, C]. T counts latent frames at first, then two and four times as
many.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypedDict

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from wan import checkpoint, errors
from wan.files import read_json, read_weights_file, require_file
from wan.kernels import vae_kernels

if TYPE_CHECKING:  # takes a second to import: only where a video is decoded
    from diffusers import AutoencoderKLWan

DECODED_AT_ONCE = 20_000  # positions of latents in one call: three frames of 60 x 104, and any small video
POSITIONS_AT_ONCE = 1024  # of latents, encoded in one call: 16 latent frames of 8 x 8, one of 60 x 104
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


class Sizes(TypedDict):
    """Arguments of diffusers' AutoencoderKLWan in which Wan2.2's VAE differs from Wan2.1's."""

    base_dim: int
    decoder_base_dim: int
    z_dim: int
    is_residual: bool
    patch_size: int
    in_channels: int
    out_channels: int
    scale_factor_spatial: int
    latents_mean: list[float]
    latents_std: list[float]


# Sizes of Wan2.2's VAE as diffusers names them, and mean and std of its channels. The original release has no
# config: https://github.com/Wan-Video/Wan2.2 wan/modules/vae2_2.py.
# fmt: off
WIDE_SIZES: Sizes = {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "patch_size": 2,
    "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16,
    "latents_mean": [
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
        0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
        -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
        -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
    ],
    "latents_std": [
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
        0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
        0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
        0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
    ],
}
# fmt: on


class VAE(nn.Module):
    """The model's latents are (z − mean) / std per channel, with mean and std from the VAE's config."""

    def __init__(self, vae: "AutoencoderKLWan"):
        super().__init__()
        self.vae = vae
        self.latents_mean: Tensor  # [C, 1, 1, 1]
        self.latents_std: Tensor
        for name in ("latents_mean", "latents_std"):
            values = torch.tensor(getattr(vae.config, name), dtype=torch.float32)
            values = values.view(vae.config.z_dim, 1, 1, 1)  # for [B, C, F, h, w]
            self.register_buffer(name, values, persistent=False)

    @classmethod
    def from_pretrained(
        cls,
        ckpt_dir: str | Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        **sizes: Any,
    ) -> "VAE":
        """Load a model directory of either layout. Raise CheckpointError for one that holds no such VAE.

        The original release has no config of its VAE: sizes are the real model's, but for those that are
        given.
        """
        AutoencoderKLWan = diffusers_vae().AutoencoderKLWan
        with errors.library_reads(f"the VAE of {ckpt_dir}", errors.CheckpointError, "get it again"):
            path = checkpoint.part_file(ckpt_dir, "vae")
            with torch.device("meta"):
                if checkpoint.is_native(ckpt_dir):
                    if checkpoint.has_wide_vae(ckpt_dir):
                        sizes = {**WIDE_SIZES, **sizes}
                    vae = AutoencoderKLWan(**sizes)  # whose defaults are Wan2.1's
                else:
                    vae = AutoencoderKLWan.from_config(
                        read_json(path.with_name("config.json"), errors.CheckpointError)
                    )
            checkpoint.assign(vae, checkpoint.read_part(ckpt_dir, "vae"), path, dtype, device)
            if torch.device(device).type == "cpu":
                channels_last(vae)
            return cls(vae).to(device)

    files: list[checkpoint.FileRecord] | None = None  # that it was read from, where its videos say so

    @cached_property
    def decoder(self) -> "Decoder":
        """The weights that decode, as they are when this is first asked for."""
        return Decoder(self.vae)

    @property
    def pixels_per_latent(self) -> int:
        """Pixels of the video along a side of a latent."""
        config = self.vae.config
        return (config.patch_size or 1) * 2 ** len(config.temperal_downsample)

    @property
    def made_by(self) -> str:
        """What an mp4 says of its decoder."""
        return f"VAE in {str(self.vae.dtype).removeprefix('torch.')}"

    def stream(self) -> "StreamedDecoder":
        return StreamedDecoder(self)

    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents [B, F, C, h, w] -> video [B, 1 + 4 (F − 1), 3, H, W] in 0..1."""
        return self.stream()(latents)

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        """Video [B, frames, 3, H, W] in 0..1 -> mean latents, normalised [B, F, C, h, w].

        Frames beyond the last whole 1 + 4 n are left out, as diffusers does.
        """
        # 1. Whole groups of four frames behind the first one, in -1..1: [B, 3, frames, H, W].
        whole = 1 + (video.shape[1] - 1) // 4 * 4
        x = (video[:, :whole].transpose(1, 2) * 2 - 1).to(self.vae.dtype)
        # 2. The first frame alone, then groups; convolutions carry over what they look back to.
        at_once = 4 * max(1, POSITIONS_AT_ONCE // (x.shape[3] * x.shape[4] // 64))
        pieces = [x[:, :, :1]]
        if whole > 1:
            pieces += x[:, :, 1:].split(at_once, 2)
        past = [None] * self.vae._cached_conv_counts["encoder"]
        encoded = []
        for piece in pieces:
            encoded.append(self.vae.encoder(patched(self.vae, piece), feat_cache=past, feat_idx=[0]))
        # 3. The mean of the posterior; its log variance is not used.
        z, _ = self.vae.quant_conv(torch.cat(encoded, 2)).chunk(2, 1)
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
        """The next latents [B, F, C, h, w] -> their video [B, frames, 3, H, W] in 0..1.

        A latent frame is four video frames, the first of a video one.
        """
        # 1. As the VAE has them; the video's first latent frame is one video frame, and goes alone.
        z = latents.float() * self.model.latents_std[:, 0] + self.model.latents_mean[:, 0]
        at_once = max(1, DECODED_AT_ONCE // (z.shape[3] * z.shape[4]))
        pieces = list(z.split(at_once, 1))
        if not self.past:
            pieces = [z[:, :1], *z[:, 1:].split(at_once, 1)]
        # 2. Decode piece by piece, and bring pixels from about -1..1 to 0..1.
        parts = []
        for piece in pieces:
            if piece.shape[1] == 0:
                continue
            for part in self.model.decoder.decode(piece, self.past, is_first=not self.past):
                parts.append(part.float().div_(2).add_(0.5).clamp_(0, 1))
        return torch.cat(parts, 1)


def patched(vae: "AutoencoderKLWan", video: Tensor) -> Tensor:
    """Move patches of pixels of [B, 3, F, H, W] to channels where the VAE has patches (Wan2.2's)."""
    if vae.config.patch_size is None:
        return video
    return diffusers_vae().patchify(video, vae.config.patch_size)


def unpatched(vae: "AutoencoderKLWan", video: Tensor) -> Tensor:
    """Undo patched()."""
    if vae.config.patch_size is None:
        return video
    return diffusers_vae().unpatchify(video, vae.config.patch_size)


def diffusers_vae() -> ModuleType:
    """Return diffusers' module of this VAE, which takes a second to import: only where a video is decoded."""
    from diffusers.models.autoencoders import autoencoder_kl_wan

    return autoencoder_kl_wan


def channels_last(module: nn.Module) -> None:
    """Store the kernels of convolutions channels last: their outputs follow, and a CPU is a third faster."""
    for p in module.parameters():
        if p.ndim in LAYOUTS:
            p.data = p.data.contiguous(memory_format=LAYOUTS[p.ndim])


# --- The decoder
AT_ONCE = 320 << 20  # bytes of activations that a stage takes: 4 frames of 480 x 832 x 96 in bfloat16
STACKED_CHANNELS = 96  # of a convolution that is faster on stacks of three frames: see Conv
ROW = 8  # channels that cuDNN's fast kernels write at once


class Sum(NamedTuple):
    """A convolution's output, and what is still to be added to it."""

    y: Tensor  # [B, T, H, W, C], or shuffled [B, T, H/2 + 1, W/2 + 1, 2, 2, C]
    bias: Tensor | None = None  # [C]
    residual: Tensor | None = None  # [B, T, H, W, C]
    shuffled: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, T, H, W, C] of the sum."""
        B, T, H, W, *_, C = self.y.shape
        if self.shuffled:
            return B, T, 2 * H - 2, 2 * W - 2, C
        return B, T, H, W, C


def biased(s: Sum) -> Tensor:
    """Return a convolution's output with its bias."""
    if s.bias is None:
        return s.y
    return s.y + s.bias


Layer = Callable[[Sum, "Past", bool], Sum]
Past = dict["Conv", Tensor]  # the last two frames [B, 2, H, W, C] that a convolution read


def feed(
    s: Sum, gamma: Tensor | None = None, past: Tensor | None = None, stack: int = 0, keep: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the sum [B, T, H, W, C] (where kept), and what the next causal convolution reads of it.

    gamma [C] normalises it and asks for SiLU. stack 1: frames behind the past ones, [B, T + 2, H, W, C]; 3 (a
    kernel's): each frame with the two before it, [B, T, H, W, 3C]; 0: none. past becomes the last two.
    """
    kernels = vae_kernels(s.y)
    if kernels:
        return kernels.feed(
            s.y,
            bias=s.bias,
            residual=s.residual,
            shuffled=s.shuffled,
            gamma=gamma,
            past=past,
            stack=stack,
            keep=keep,
        )
    # 1. The sum: [B, T, H, W, C].
    x = s.y
    if s.shuffled:
        x = unshuffled(x)
    if s.bias is not None:
        x = x + s.bias
    if s.residual is not None:
        x = x + s.residual
    if past is None:
        return x, x
    # 2. What the next convolution reads: two frames of the past, then these, normalised over channels.
    fed = x.new_empty(x.shape[0], x.shape[1] + 2, *x.shape[2:])
    fed[:, :2] = past
    if gamma is None:
        fed[:, 2:] = x
    else:
        wide = x.float()
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp_min_(1e-12)
        fed[:, 2:] = F.silu((wide / size).mul_(gamma), inplace=True)
    # 3. The last two frames wait for the next piece of the video.
    past.copy_(fed[:, -2:])
    return x, fed


def unshuffled(y: Tensor) -> Tensor:
    """Take each pixel from its window: [B, T, h + 1, w + 1, 2, 2, C] -> [B, T, 2h, 2w, C]."""
    B, T, h, w, *_, C = y.shape
    pixels = y.new_empty(B, T, h - 1, 2, w - 1, 2, C)
    for a in range(2):
        for b in range(2):
            pixels[:, :, :, a, :, b] = y[:, :, a : a + h - 1, b : b + w - 1, a, b]
    return pixels.view(B, T, 2 * h - 2, 2 * w - 2, C)


def scaled_gamma(norm: Any) -> Tensor:
    """Return gamma [C] for numbers that are divided by their length, not by its mean over channels."""
    return norm.gamma.detach().flatten().float() * norm.scale


class Conv:
    """Norm, SiLU and a causal convolution; without a norm the convolution alone.

    On a GPU the next feed() adds the bias, and one of few channels at many pixels is a 2D convolution over
    stacks of three frames, for which cuDNN is faster.
    """

    def __init__(self, conv: Any, norm: Any = None, row: int = 1):
        """row: outputs are a multiple of it, and those too many are 0."""
        self.gamma: Tensor | None = None
        if norm is not None:
            self.gamma = scaled_gamma(norm)
        weight, bias = conv.weight.detach(), conv.bias.detach()
        on_gpu, self.padding = vae_kernels(weight) is not None, weight.shape[-1] // 2
        self.stack = 1
        if on_gpu and self.padding and weight.shape[1] <= STACKED_CHANNELS:
            self.stack = 3
        # cuDNN is slow at 3 output channels: rows of zeros make them a multiple of row.
        rows = -len(weight) % row
        weight, bias = F.pad(weight, (0, 0) * 4 + (0, rows)), F.pad(bias, (0, rows))
        if self.stack == 3:
            weight = weight.transpose(1, 2).flatten(1, 2)  # [O, 3C, 3, 3]
        self.weight = weight.contiguous(memory_format=LAYOUTS[weight.ndim])
        # What the convolution adds, and what the next feed() adds.
        self.bias: Tensor | None = bias
        self.later: Tensor | None = None
        if on_gpu:
            self.bias, self.later = None, bias

    def __call__(self, s: Sum, past: Past, is_first: bool = False) -> Sum:
        return self.read(s, past)[1]

    def read(self, s: Sum, past: Past, keep: bool = False) -> tuple[Tensor, Sum]:
        """Return what was given, as one tensor where kept, and the convolution's output."""
        if self not in past:
            B, _, H, W, C = s.shape
            past[self] = s.y.new_zeros(B, 2, H, W, C)
        x, fed = feed(s, gamma=self.gamma, past=past[self], stack=self.stack, keep=keep)
        if self.stack == 3:
            frames = fed.flatten(0, 1).permute(0, 3, 1, 2)  # [BT, 3C, H, W]
            y = F.conv2d(frames, self.weight, self.bias, padding=self.padding)
            y = y.permute(0, 2, 3, 1).unflatten(0, fed.shape[:2])
        else:
            frames, padding = fed.permute(0, 4, 1, 2, 3), (0, self.padding, self.padding)
            y = F.conv3d(frames, self.weight, self.bias, padding=padding).permute(0, 2, 3, 4, 1)
        return x, Sum(y.contiguous(), self.later)


class Residual:
    """x + two convolutions of x."""

    def __init__(self, block: Any):
        self.first, self.second = Conv(block.conv1, block.norm1), Conv(block.conv2, block.norm2)
        self.shortcut: tuple[Tensor, Tensor | None] | None = None
        if isinstance(block.conv_shortcut, nn.Conv3d):
            self.shortcut = block.conv_shortcut.weight.flatten(1), block.conv_shortcut.bias

    def __call__(self, s: Sum, past: Past, is_first: bool = False) -> Sum:
        x, hidden = self.first.read(s, past, keep=True)
        if self.shortcut:
            x = F.linear(x, *self.shortcut)
        return self.second(hidden, past)._replace(residual=x)


class Attention:
    """Self-attention within each frame, with one head."""

    def __init__(self, block: Any):
        self.gamma = scaled_gamma(block.norm)
        self.qkv, self.proj = ((conv.weight.flatten(1), conv.bias) for conv in (block.to_qkv, block.proj))

    def __call__(self, s: Sum, past: Past, is_first: bool = False) -> Sum:
        x, _ = feed(s, keep=True)
        normed = (F.normalize(x.float(), dim=-1) * self.gamma).to(x.dtype)
        # A 1 x 1 convolution over channels-last pixels is a product.
        qkv = F.linear(normed, *self.qkv).flatten(2, 3).flatten(0, 1)[:, None]  # [BT, 1, HW, 3C]
        q, k, v = qkv.chunk(3, -1)
        out = F.scaled_dot_product_attention(q, k, v).view(x.shape)
        return Sum(F.linear(out, *self.proj), residual=x)


class Upsample:
    """Twice as many pixels in each direction; with a convolution over time, twice as many frames too."""

    def __init__(self, block: Any):
        self.over_time: Conv | None = None
        if block.mode == "upsample3d":
            self.over_time = Conv(block.time_conv)
        conv = block.resample[1]
        weight, bias = conv.weight.detach(), conv.bias.detach()
        self.bias: Tensor | None = bias.repeat(4)  # what the convolution adds
        self.later: Tensor | None = None  # what the next feed() adds
        if vae_kernels(weight) is not None:
            self.bias, self.later = None, bias
        # Two of a kernel's three rows see the same one: the last two for even pixels, the first two for odd.
        rows = weight.new_tensor([[[1, 0, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 1]]], dtype=torch.float32)
        four = torch.einsum("apx,bqy,ocxy->abocpq", rows, rows, weight.float())  # [2, 2, O, C, 2, 2]
        self.weight = four.flatten(0, 2).to(weight.dtype).contiguous(memory_format=torch.channels_last)

    def __call__(self, s: Sum, past: Past, is_first: bool) -> Sum:
        if self.over_time is None or is_first:  # the first frame of a video stays one
            x, _ = feed(s, keep=True)
        else:
            x = biased(self.over_time(s, past))
            x = rearrange(x, "b f h w (two c) -> b (f two) h w c", two=2)
        frames = x.flatten(0, 1).permute(0, 3, 1, 2)
        y = F.conv2d(frames, self.weight, self.bias, padding=1).permute(0, 2, 3, 1)  # [BT, h + 1, w + 1, 4C]
        y = y.unflatten(-1, (2, 2, -1)).unflatten(0, x.shape[:2]).contiguous()
        return Sum(y, self.later, shuffled=True)


class Shortcut(Protocol):
    """diffusers' DupUp3D: each number goes to factor_t frames of factor_s x factor_s pixels."""

    factor_t: int
    factor_s: int
    repeats: int  # of each channel, before they are given away


class UpBlock:
    """Residual blocks, then more pixels; Wan2.2's adds what came in, each number at all its new places."""

    def __init__(self, block: Any):
        self.layers: list[Layer] = [Residual(resnet) for resnet in block.resnets]
        if hasattr(block, "upsamplers"):
            upsamplers = list(block.upsamplers or ())
        else:
            upsamplers = [block.upsampler]
        self.layers += [Upsample(upsampler) for upsampler in upsamplers if upsampler is not None]
        self.around: Shortcut | None = getattr(block, "avg_shortcut", None)

    def __call__(self, s: Sum, past: Past, is_first: bool = False) -> Sum:
        if self.around is None:
            return self.through_layers(s, past, is_first)
        x, _ = feed(s, keep=True)
        s = self.through_layers(Sum(x), past, is_first)
        return s._replace(residual=spread(x, self.around, is_first))

    def through_layers(self, s: Sum, past: Past, is_first: bool) -> Sum:
        for layer in self.layers:
            s = layer(s, past, is_first)
        return s


def spread(x: Tensor, shortcut: Shortcut, is_first: bool) -> Tensor:
    """Give channels to new frames and pixels: [B, T, H, W, C] -> [B, tT, sH, sW, O]."""
    t, s = shortcut.factor_t, shortcut.factor_s
    x = x.repeat_interleave(shortcut.repeats, -1)
    x = rearrange(x, "b f h w (c t p q) -> b (f t) (h p) (w q) c", t=t, p=s, q=s)
    if is_first:
        return x[:, t - 1 :]
    return x


class Decoder:
    """Weights of an AutoencoderKLWan's decoder, as they are now, for streams of latents."""

    def __init__(self, vae: "AutoencoderKLWan"):
        decoder, post = vae.decoder, vae.post_quant_conv
        self.post = post.weight.float().flatten(1), post.bias.float()
        self.dtype, self.channels, self.patch = vae.dtype, vae.config.out_channels, vae.config.patch_size or 1
        middle = decoder.mid_block
        inner: list[Layer] = [Residual(middle.resnets[0])]
        for attention, block in zip(middle.attentions, middle.resnets[1:], strict=True):
            inner += [Attention(attention), Residual(block)]
        first, *others = map(UpBlock, decoder.up_blocks)
        self.stages: list[list[Layer]] = [[Conv(decoder.conv_in), *inner, first]]
        for block in others:
            self.stages.append([block])
        row = 1
        if vae_kernels(post.weight):
            row = ROW
        self.stages[-1].append(Conv(decoder.conv_out, decoder.norm_out, row))

    def decode(self, z: Tensor, past: Past, is_first: bool) -> Iterator[Tensor]:
        """Yield pixels [B, frames, 3, H, W], about -1..1, of the next latents [B, F, C, h, w].

        The first frame of a video comes alone. past belongs to this video, and is empty at first.
        """
        # [B, F, C, h, w] -> [B, F, h, w, C], in float32 as diffusers' post_quant_conv of float32 latents.
        x = F.linear(z.movedim(2, -1).float(), *self.post).to(self.dtype)
        for s in self._through(0, Sum(x), past, is_first):
            y = biased(s)[..., : self.channels]
            pattern = "b f h w (c x y) -> b f c (h y) (w x)"
            yield rearrange(y, pattern, x=self.patch, y=self.patch)

    def _through(self, number: int, s: Sum, past: Past, is_first: bool) -> Iterator[Sum]:
        """Put frames through a stage, as many at once as fit, and each part through the stages behind it."""
        if number == len(self.stages):
            yield s
            return
        B, T, H, W, C = s.shape
        # Later stages have more pixels, and take fewer frames at once.
        frames = max(1, AT_ONCE // (B * H * W * C * s.y.element_size()))
        for start in range(0, T, frames):
            chunk = slice(start, start + frames)
            part = s._replace(y=s.y[:, chunk])
            if s.residual is not None:
                part = part._replace(residual=s.residual[:, chunk])
            for layer in self.stages[number]:
                part = layer(part, past, is_first)
            yield from self._through(number + 1, part, past, is_first)


# --- A small decoder for a first look: TAEHV's of Wan2.1 (github.com/madebyollin/taehv, taew2_1.pth)
# Its pictures resemble the VAE's: nothing is measured on them. A frame of latents, as the transformer gives
# them, becomes four frames in 0..1. A layer with a memory also sees the frame before.
WIDTHS, TIMES = (256, 128, 64, 64), (1, 2, 2)  # channels of each resolution, and frames that one becomes
# Where the small decoders are
TAEHV_HINT = "give a file of TAEHV's decoder, such as taew2_1.pth of https://github.com/madebyollin/taehv"
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
        require_file(path, hint=TAEHV_HINT)
        weights = checkpoint.state_dict_of(path, read_weights_file(path))[0]
        state = {name: tensor for name, tensor in weights.items() if name.startswith("decoder.")}
        with torch.device("meta"):
            model = cls(Path(path).name)
        checkpoint.assign(model, state, path, dtype, device)
        model.identity = f"{model.made_by} {checkpoint.sampled_sha256(path)} {dtype}"
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
        """The next latents [B, F, C, h, w] -> their video [B, frames, 3, H, W]; the first frame is one."""
        # TAEHV has no first frame of its own: of the four that it makes of the first latents, the last stays.
        batch, is_first = latents.shape[0], not self.before
        x = latents.to(next(self.model.parameters()).dtype)
        for number, layer in enumerate(self.model.decoder):
            if isinstance(layer, Memory):
                last = self.before.get(number, torch.zeros_like(x[:, :1]))
                self.before[number] = x[:, -1:].clone()
                y = layer(x.flatten(0, 1), torch.cat([last, x[:, :-1]], 1).flatten(0, 1))
            else:
                y = layer(x.flatten(0, 1))
            if isinstance(layer, Grow):
                x = rearrange(y, "(b f) (times c) h w -> b (f times) c h w", b=batch, times=layer.times)
            else:
                x = y.unflatten(0, (batch, -1))
        if is_first:
            x = x[:, 3:]
        return x.float().clamp(0, 1)


def _conv(inputs: int, outputs: int, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias)
