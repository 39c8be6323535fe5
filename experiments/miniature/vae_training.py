"""Stage 1: the VAE. Short clips first, which teach shapes and colours soonest; then clips longer than it
can see back."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from torch import Tensor

from experiments.miniature.autoencoder import (
    decode,
    encode,
    encode_scenes,
    psnr,
    receptive_field,
    set_layout,
    squared_errors,
    vae_quality,
)
from experiments.miniature.moving_shapes import FPS, render_table, sample_scenes, scene_table
from experiments.miniature.recipe import FRAMES, KL_WEIGHT, LONG_CLIPS, SHORT_CLIPS, SIDE, VAE, StageRun
from experiments.miniature.training import Schedule, Trainer

SHORT_SHARE = 0.4  # of the stage, with short clips
QUALITY_POINTS = 10  # of the PSNR curve
CHECKED_CLIPS, FINAL_CLIPS = 8, 32
LONG_SECONDS = 60
# A shape is its outline: pixels that differ from the mean of their 5 x 5 neighbours count more.
EDGE_CONTRAST, EDGE_WEIGHT = 0.1, 5.0


def pixel_weights(video: Tensor) -> Tensor:
    """Of each pixel in the loss [B, 1, F, H, W]: EDGE_WEIGHT within two pixels of an outline, else 1.

    video [B, 3, F, H, W] is in -1..1, and so is the contrast.
    """
    around = F.avg_pool3d(video, (1, 5, 5), stride=1, padding=(0, 2, 2), count_include_pad=False)
    near = (video - around).abs().amax(1, keepdim=True) > EDGE_CONTRAST
    return torch.where(near, EDGE_WEIGHT, 1.0)


def vae_loss(vae: AutoencoderKLWan, video: Tensor) -> Tensor:
    """Squared and absolute error of the reconstruction, outlines before areas, and a little KL."""
    mean, log_var = encode(vae, video.to(vae.dtype))
    log_var = log_var.float().clamp(-20, 10)
    z = mean + (torch.randn_like(mean) * (0.5 * log_var).exp()).to(mean.dtype)
    error = decode(vae, z).float() - video
    kl = 0.5 * (mean.float().square() + log_var.exp() - 1 - log_var).mean()
    return (pixel_weights(video) * (error.square() + 0.2 * error.abs())).mean() + KL_WEIGHT * kl


def clip_length(step: int, progress: float, short_share: float = SHORT_SHARE) -> int:
    """Video frames of a step's clips: each length in turn."""
    lengths = SHORT_CLIPS if progress < short_share else LONG_CLIPS
    return lengths[step % len(lengths)]


def train_vae(run: StageRun) -> dict:
    """Random or earlier weights -> vae/. Returns what the log keeps: losses, PSNR while training and of a
    minute of video."""
    recipe, device = run.recipe, run.device
    earlier = run.start_from and run.start_from / "vae"
    vae = AutoencoderKLWan.from_pretrained(earlier) if earlier else AutoencoderKLWan(**VAE)
    vae = vae.to(device, torch.float32)
    sees = receptive_field(vae.config)
    print(f"The decoder sees {sees} video frames back; the longest training clips have {max(LONG_CLIPS)}.")
    set_layout(vae, torch.channels_last, torch.channels_last_3d)
    scenes = list(itertools.islice(sample_scenes(run.seed, kinds=recipe.kinds), recipe.clips))
    table = scene_table(scenes).to(device)
    trainer = Trainer(
        [vae],
        recipe.lr,
        Schedule(recipe.steps, run.minutes, run.ranks),
        run.dtype,
        lambda _, p: recipe.optimizer == "muon" and p.ndim >= 4,
    )

    def loss(frames: int) -> Tensor:
        size = (max(1, round(run.batch * FRAMES / frames)),)
        chosen = table[torch.randint(len(table), size, device=device)]
        return vae_loss(vae, render_table(chosen, frames, SIDE))

    def save() -> None:
        averaged = trainer.averaged()[0]
        some = itertools.islice(sample_scenes(run.seed + 1, kinds=recipe.kinds), min(256, recipe.clips))
        std, mean = torch.std_mean(encode_scenes(averaged, list(some), device).float(), (0, 2, 3, 4))
        averaged.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
        set_layout(averaged, torch.contiguous_format, torch.contiguous_format)
        averaged.save_pretrained(run.output_dir / "vae")

    def one_step(step: int) -> None:
        if run.ranks.first and step % max(1, recipe.steps // QUALITY_POINTS) == 0:
            now = vae_quality(trainer.averaged()[0], device, min(CHECKED_CLIPS, recipe.clips))
            trainer.notes.setdefault("psnr_curve", []).append([step, *now.values()])
        frames = clip_length(step, trainer.schedule.progress, 0.0 if earlier else SHORT_SHARE)
        trainer.step(f"{frames} frames", lambda: loss(frames))

    trainer.train(run.state_file, run.resume, one_step, save)
    if not run.ranks.first:
        return {}
    return trainer.numbers() | {"receptive_field": sees} | final_quality(trainer, run)


def final_quality(trainer: Trainer, run: StageRun) -> dict[str, float]:
    """PSNR of held-out clips of 81 frames, and of the first and last second of a minute."""
    vae, clips = trainer.averaged()[0], min(FINAL_CLIPS, run.recipe.clips)
    frames = LONG_SECONDS * FPS + 1 if clips == FINAL_CLIPS else FRAMES  # a rehearsal is short
    minute = squared_errors(vae, run.device, max(1, clips // 8), frames, batch=1)
    return vae_quality(vae, run.device, clips) | {
        "minute_first_second": round(psnr(minute[:, :FPS]).mean().item(), 2),
        "minute_last_second": round(psnr(minute[:, -FPS:]).mean().item(), 2),
    }
