"""Stage 1: the VAE, on short clips first, then on clips longer than it can see back; its quality."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from torch import Tensor

from experiments.miniature import moving_shapes as shapes
from experiments.miniature.moving_shapes import FPS, Scene, render_batch, sample_scenes
from experiments.miniature.recipe import FRAMES, HELD_OUT_SEED, LONG_CLIPS, SHORT_CLIPS, SIDE, VAE, StageRun
from experiments.miniature.training import Trainer
from wan.vae import channels_last, from_patches, to_patches

SHORT_SHARE = 0.4  # of the stage, with short clips
QUALITY_POINTS = 10  # of the PSNR curve
CHECKED_CLIPS, FINAL_CLIPS = 8, 32
LONG_SECONDS = 60
KL_WEIGHT = 1e-4
# A shape is its outline: pixels that differ from the mean of their 5 x 5 neighbours count more.
EDGE_CONTRAST, EDGE_WEIGHT = 0.1, 5.0


def encode(vae: AutoencoderKLWan, video: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and log variance [B, z, f, h, w] of video [B, 3, F, H, W].

    As vae.encode, in two calls: frame 0 and the others.
    """
    cache = [None] * vae._cached_conv_counts["encoder"]
    parts = [
        vae.encoder(to_patches(vae, x), feat_cache=cache, feat_idx=[0])
        for x in (video[:, :, :1], video[:, :, 1:])
        if x.numel()
    ]
    return vae.quant_conv(torch.cat(parts, 2)).chunk(2, 1)


def decode(vae: AutoencoderKLWan, z: Tensor) -> Tensor:
    """Decode latents to video, not clamped. As vae.decode, in two calls: frame 0 and the others."""
    cache, z = [None] * vae._cached_conv_counts["decoder"], vae.post_quant_conv(z)
    first = vae.decoder(z[:, :, :1], feat_cache=cache, feat_idx=[0], first_chunk=True)
    rest = [vae.decoder(z[:, :, 1:], feat_cache=cache, feat_idx=[0])] if z.shape[2] > 1 else []
    return from_patches(vae, torch.cat([first, *rest], 2))


def receptive_field(config: Mapping) -> int:
    """Return how many video frames the decoder's last frame depends on, its own latent included.

    Read off the gradient of a decoder of the same layers with as few channels as it can have.
    """
    layers = ("num_res_blocks", "temperal_downsample", "dim_mult")
    sizes = {name: config[name] for name in layers if name in config}
    sizes["dim_mult"] = [1] * len(sizes["dim_mult"])
    small = AutoencoderKLWan(base_dim=4, decoder_base_dim=4, z_dim=2, **sizes).double()
    z = torch.linspace(-1, 1, 128, dtype=torch.float64).sin().view(1, 2, 64, 1, 1).requires_grad_()
    [gradient] = torch.autograd.grad(decode(small, z)[:, :, -1].square().sum(), z)
    return 1 + 4 * (int((gradient.abs().sum((0, 1, 3, 4)) > 0).sum()) - 1)


@torch.no_grad()
def encode_scenes(vae: AutoencoderKLWan, scenes: Sequence[Scene], device: torch.device) -> Tensor:
    """Render clips of 81 frames -> latent means [N, z, f, h, w]."""
    videos = (render_batch(batch, FRAMES, SIDE, device) for batch in batched(scenes, 32))
    return torch.cat([encode(vae, video.to(vae.dtype))[0] for video in videos])


def batched(scenes: Sequence[Scene], size: int) -> list[list[Scene]]:
    return [list(scenes[i : i + size]) for i in range(0, len(scenes), size)]


@torch.no_grad()
def squared_errors(
    vae: AutoencoderKLWan, device: torch.device, clips: int, frames: int, batch: int = 8
) -> Tensor:
    """Put held-out scenes through the VAE -> mean squared errors [clips, frames] of values in 0..1."""
    errors = []
    for scenes in batched([*itertools.islice(sample_scenes(HELD_OUT_SEED, held_out=True), clips)], batch):
        video = render_batch(scenes, frames, SIDE, device)
        error = decode(vae, encode(vae, video.to(vae.dtype))[0]).float().clamp(-1, 1) - video
        errors.append(error.square().mean((1, 3, 4)).cpu() / 4)
    return torch.cat(errors)


def psnr(squared: Tensor) -> float:
    """Return the mean dB of clips from their squared errors [clips, frames]."""
    return (-10 * squared.mean(1).log10()).mean().item()


def vae_quality(vae: AutoencoderKLWan, device: torch.device, clips: int) -> dict[str, float]:
    """Return the mean PSNR in dB of held-out clips of 81 frames: all frames, first second, last second."""
    squared = squared_errors(vae, device, clips, FRAMES)
    parts = {"psnr": squared, "psnr_first_second": squared[:, :FPS], "psnr_last_second": squared[:, -FPS:]}
    return {name: round(psnr(errors), 2) for name, errors in parts.items()}


def vae_loss(vae: AutoencoderKLWan, video: Tensor) -> Tensor:
    """Return the squared and absolute error of the reconstruction, more of it at outlines, and a little KL.

    video [B, 3, F, H, W] is in -1..1, and so is the contrast.
    """
    mean, log_var = encode(vae, video.to(vae.dtype))
    log_var = log_var.float().clamp(-20, 10)
    z = mean + (torch.randn_like(mean) * (0.5 * log_var).exp()).to(mean.dtype)
    error = decode(vae, z).float() - video
    kl = 0.5 * (mean.float().square() + log_var.exp() - 1 - log_var).mean()
    around = F.avg_pool3d(video, (1, 5, 5), stride=1, padding=(0, 2, 2), count_include_pad=False)
    is_edge = (video - around).abs().amax(1, keepdim=True) > EDGE_CONTRAST  # [B, 1, F, H, W]
    weights = torch.where(is_edge, EDGE_WEIGHT, 1.0)
    return (weights * (error.square() + 0.2 * error.abs())).mean() + KL_WEIGHT * kl


def train_vae(run: StageRun) -> dict:
    """Train random or earlier weights -> vae/. Return losses and PSNR, while training and of a minute."""
    recipe, device = run.recipe, run.device
    earlier = run.start_from and run.start_from / "vae"
    vae = AutoencoderKLWan.from_pretrained(earlier) if earlier else AutoencoderKLWan(**VAE)
    vae = vae.to(device, torch.float32)
    sees = receptive_field(vae.config)
    print(f"The decoder sees {sees} video frames back; the longest training clips have {max(LONG_CLIPS)}.")
    channels_last(vae)
    scenes = list(itertools.islice(sample_scenes(run.seed, kinds=recipe.kinds), recipe.clips))
    table = shapes.scene_table(scenes).to(device)
    trainer = Trainer(run, [vae], lambda _, p: recipe.optimizer == "muon" and p.ndim >= 4)

    def loss(frames: int) -> Tensor:
        size = (max(1, round(recipe.batch * FRAMES / frames)),)
        chosen = table[torch.randint(len(table), size, device=device)]
        return vae_loss(vae, shapes.render_table(chosen, frames, SIDE))

    def save() -> None:
        averaged = trainer.averaged()[0]
        some = itertools.islice(sample_scenes(run.seed + 1, kinds=recipe.kinds), min(256, recipe.clips))
        std, mean = torch.std_mean(encode_scenes(averaged, list(some), device).float(), (0, 2, 3, 4))
        averaged.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
        averaged.save_pretrained(run.output_dir / "vae")

    def one_step(step: int) -> None:
        if step % max(1, recipe.steps // QUALITY_POINTS) == 0:
            now = vae_quality(trainer.averaged()[0], device, min(CHECKED_CLIPS, recipe.clips))
            trainer.notes.setdefault("psnr_curve", []).append([step, *now.values()])
        lengths = SHORT_CLIPS if trainer.progress < SHORT_SHARE and not earlier else LONG_CLIPS
        frames = lengths[step % len(lengths)]
        trainer.update(f"{frames} frames", lambda: loss(frames))

    trainer.train(one_step, save)
    return trainer.numbers() | {"receptive_field": sees} | final_quality(trainer.averaged()[0], run)


def final_quality(vae: AutoencoderKLWan, run: StageRun) -> dict[str, float]:
    """Return PSNR of held-out clips of 81 frames, and of the first and last second of a minute."""
    clips = min(FINAL_CLIPS, run.recipe.clips)
    frames = LONG_SECONDS * FPS + 1 if clips == FINAL_CLIPS else FRAMES  # a rehearsal is short
    minute = squared_errors(vae, run.device, max(1, clips // 8), frames, batch=1)
    return vae_quality(vae, run.device, clips) | {
        "minute_first_second": round(psnr(minute[:, :FPS]), 2),
        "minute_last_second": round(psnr(minute[:, -FPS:]), 2),
    }
