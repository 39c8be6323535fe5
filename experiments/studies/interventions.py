"""Measure what edits change in one run: the effects cache, and both videos side by side.

Effects are root mean squares of x0 per latent frame, in units of the distance between two seeds: a rollout
feeds on itself, so that any edit ends as far away as another seed would.
"""

import argparse
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments import provenance
from experiments.analysis import stats
from experiments.caches import files, mp4, outputs
from experiments.caches.store import save_cache
from experiments.edits import edited
from experiments.extraction import cache_builders
from experiments.extraction.video import to_pixels
from experiments.miniature.tracking import judge_by_caption
from experiments.progress import observed
from experiments.running.cli import videos_of
from experiments.session import Session, load
from wan import blocks, interventions
from wan.checkpoint import read_model_config
from wan.config import RunConfig
from wan.errors import in_context, library_reads
from wan.files import load_tensors
from wan.sites import RolloutSizes
from wan.vae import VAE

ANOTHER_SEED = 1_000_003  # added to a seed: the distance between two seeds is the unit of effects
FLOOR_NOISE = 1e-6  # added to the noise, in float32
FLOOR_BIAS = 1e-6  # in other dtypes: too small for a logit, but attention then runs by groups


def distance(one: Tensor, other: Tensor) -> Tensor:
    """Return the root mean square difference per frame, float64 [B, F] of [B, F, C, h, w], on the CPU."""
    return (one.double() - other.double()).square().mean((2, 3, 4)).sqrt().cpu()


# --- One run without and with its interventions
def make_effects(args: argparse.Namespace, config: RunConfig) -> None:
    """Roll out with and without config's interventions -> an effects cache, and an mp4 unless --no_video."""
    if args.no_video:
        args.save_video = None
    elif args.save_video is None:
        args.save_video = ""  # beside the cache
    videos = videos_of(args, [args.output_path])
    written = [args.output_path, *videos]
    provenance.check_outputs(args, config, written)
    edits, plain = interventions.config_edits(config), replace(config, interventions=[])
    check_indices_of(edits, config, args.interventions or args.config_path)
    with files.claimed(dict.fromkeys(written, 0)), observed(args, unit=None) as watch:
        parts = {"frames": range(config.num_frames), "fields": ("psnr", "ssim")}
        cache_builders.require_free_cache(args.output_path, "effects", parts, config, args.overwrite)
        for video in videos:
            outputs.require_replaceable(video, side_by_side(config), mp4.video_contents, args.overwrite)
        if videos and not args.dry_run:
            mp4.require_ffmpeg("leave the video out by --no_video")
        for edit in edits:
            edit.check_source(config)
        session = load(plain).prepare(observer=watch, decodes=True)
        for edit in edits:
            edit.check(session.pipeline.sizes(config.num_frames))
            watch.print(f"edits: {edit}")
        if args.dry_run:
            return
        # 1. Roll out without and with the edits, and measure how far they are apart.
        run = provenance.fingerprint(session.identity(config))
        base, other = base_runs(args.save_base, session, plain)
        measured = measure(session, plain, edits, base, other)
        # 2. Decode both, compare their pixels, and ask the tracker what it sees in a caption of its own.
        vae = VAE.from_pretrained(config.ckpt_dir, device=session.device)
        both = torch.cat([base.to(session.device), measured["latents_edited"][None].to(session.device)])
        pixels = [vae.decode(latents[None])[0].float().cpu() for latents in both]  # [frames, 3, H, W] in 0..1
        without, changed = (video.numpy() for video in pixels)
        cache = {
            **session.common(plain),
            "format": "effects",
            "prompt": config.prompt,
            "seed": config.seed,
            "weights_sha256": session.weights_sha256,
            "fingerprint": run,
            "is_logits": False,
            "interventions": provenance.record_of(edits),
            **measured,
            "psnr": torch.tensor(stats.psnr(without, changed)).float().clamp(max=100),
            "ssim": torch.tensor(stats.ssim(without, changed)).float(),
        }
        of_base, of_edited = (judge_by_caption(video, config.prompt) for video in pixels)
        if of_base:  # a caption of the miniature
            cache["questions"] = list(of_base)
            cache["answers_base"] = torch.tensor([*of_base.values()])
            cache["answers_edited"] = torch.tensor([*of_edited.values()])
        # 3. Save the numbers, and both videos side by side.
        save_cache(args.output_path, cache, overwrite=True)
        for video in videos:
            beside = to_pixels(torch.cat(pixels, 3)[None])[0]
            tag, title = provenance.video_tag(run, config, "float32"), side_by_side(config).facts["model"]
            mp4.write_mp4(beside.numpy(), video, tag=tag, model=title or "", overwrite=True)
            watch.print(f"{video}: without and with the edits")
        total = measured["total"] / measured["between_seeds"]
        watch.print(f"{args.output_path}: effects; total {total.nanmean():.3f} of the distance between seeds")


def check_indices_of(edits: Sequence[interventions.Edit], config: RunConfig, path: str) -> None:
    """Raise ConfigError for a layer, head, block, step or frame that the run lacks; path holds the edits."""
    model, steps = read_model_config(config.ckpt_dir), config.num_passes - 1
    sizes = RolloutSizes(
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        text_len=model.text_len,
        num_steps=steps,
        last_steps=(steps - 1,) * len(config.block_sizes),
        num_frames=config.num_frames,
    )
    for number, edit in enumerate(edits, 1):
        with in_context(f"{path}: intervention {number}"):
            edit.check(sizes)


def side_by_side(config: RunConfig) -> outputs.Contents:
    """Return what the mp4 of both videos holds."""
    frames = 1 + blocks.VIDEO_FRAMES_PER_LATENT * (config.num_frames - 1)
    return mp4.contents_of_video(frames, f"with and without edits, {provenance.model_title(config)}")


def base_runs(path: str | None, session: Session, config: RunConfig) -> tuple[Tensor, Tensor]:
    """Return latents of the unedited run and of another seed, kept in a file where path names one."""
    made_of = provenance.fingerprint(session.identity(config))
    if path and Path(path).exists():
        with library_reads(f"{path}: what --save_base writes", remedy="choose another --save_base"):
            cached = load_tensors(path, mmap=False)
            run, base, other = (cached[name] for name in ("fingerprint", "base", "other"))
        files.require_same(path, run, made_of, "choose another --save_base")
        return base, other
    base, other = session.rollout(config), session.rollout(replace(config, seed=config.seed + ANOTHER_SEED))
    if path:
        with files.replacing(path) as file:
            torch.save({"fingerprint": made_of, "base": base.cpu(), "other": other.cpu()}, file)
    return base, other


def measure(
    session: Session, config: RunConfig, edits: Sequence[interventions.Edit], base: Tensor, other: Tensor
) -> dict[str, Tensor]:
    """Return the tensors of an effects cache: distances [F] to the base run, and both runs' latents."""
    nothing = torch.full((config.num_frames,), torch.nan)

    def rolled_out(applied: Sequence[interventions.Edit], **how: Any) -> Tensor:
        with edited(session, config, applied):
            return session.rollout(config, **how)

    def run_distance(latents: Tensor) -> Tensor:
        return distance(base, latents)[0].float()

    with edited(session, config, edits) as active:
        latents = session.rollout(config)
    # The floor: what should change nothing.
    if session.dtype == torch.float32:
        unchanged = rolled_out([], shake=FLOOR_NOISE)
    else:  # attention by groups is another backend
        unchanged = rolled_out([interventions.Bias(FLOOR_BIAS, frames=("past",), passes="denoise")])
    effects = {
        "latents_base": base[0].cpu(),
        "latents_edited": latents[0].cpu(),
        "between_seeds": run_distance(other),
        "total": run_distance(latents),
        "own_block": nothing.clone(),
        "floor": run_distance(unchanged),
    }
    # Jitter has no single block: it holds for a whole rollout.
    first = None if active is None else active.first_block
    if first is not None and not any(isinstance(edit, interventions.Jitter) for edit in edits):
        # The same edits in all passes of the first block that they edit, and nowhere else.
        of_block = [replace(edit, blocks=(first,), steps=None, passes="all") for edit in edits]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of an edit that edits later blocks alone
            effects["own_block"] = run_distance(rolled_out(of_block))
    if not any("source" in edit.needs for edit in edits):  # else each block again, over the base run's past
        # A source would have to be rolled out in step with each block: no direct effects then.
        effects["direct"], frames = nothing.clone(), blocks.block_ranges(config.block_sizes)

        def probe(block: int, denoise: Callable[[], Tensor]) -> None:
            frames_of_block = slice(frames[block].start, frames[block].stop)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # NaN where nothing is edited
                with edited(session, config, edits) as applied_edits:
                    x0 = denoise()
            if applied_edits is not None and any(applied_edits.changed):
                effects["direct"][frames_of_block] = distance(base[:, frames_of_block], x0)[0].float()

        session.rollout(config, probe=probe)
    return effects
