"""Measure what edits change: batches of rollouts, heads without a past, and the effects in one run.

Effects are root mean square changes of x0 per latent frame, in units of the distance between two seeds: a
rollout feeds on itself, so that any edit ends as far away as another seed would.
"""

import argparse
import warnings
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.analysis import stats
from experiments.caches.files import claimed, replacing, require_ffmpeg, require_same
from experiments.caches.formats import save_cache
from experiments.extraction.provenance import check_sources, fingerprint, threads_for, video_tag
from experiments.extraction.rollout import check_outputs, observed
from experiments.extraction.video import to_pixels, write_mp4
from experiments.miniature.tracking import answers
from experiments.running.cli import videos_of
from experiments.session import Session, edited, load
from wan.blocks import block_ranges
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.files import UnreadableError, load_tensors
from wan.interventions import (
    Bias,
    Edit,
    HeadOutputs,
    Jitter,
    Knockout,
    edits_of,
    record_head_outputs,
    record_of,
)
from wan.noise import draw_noise
from wan.vae import VAE

ANOTHER_SEED = 1_000_003  # added to a seed: the distance between two seeds is the unit of effects
FLOOR_NOISE = 1e-6  # added to the noise, in float32
FLOOR_BIAS = 1e-6  # in other dtypes: too small for a logit, but attention then runs by groups

Head = tuple[int, int]  # layer, head
Dropped = Callable[[range], Iterable[int]]  # the frames of a block -> frames of its past that are left out


@dataclass
class Batch:
    """Rollouts of one model that differ in prompt and seed, made together."""

    session: Session
    configs: Sequence[RunConfig]

    def __post_init__(self) -> None:
        s = self.session
        drawn = [draw_noise(config, s.model_config, s.dtype, s.device) for config in self.configs]
        noise, renoise = zip(*drawn, strict=True)
        self.noise = torch.cat(noise)  # [B, F, C, h, w]
        self.renoise = torch.cat(renoise, 1)  # [steps - 1, B, F, C, h, w]
        self.text = self.encoded([config.prompt for config in self.configs])
        self.ranges = block_ranges(self.configs[0].block_sizes)

    def encoded(self, prompts: Sequence[str]) -> Tensor:
        """Return the states of prompts [B, text_len, text_dim]."""
        return torch.cat([self.session.texts[prompt][0] for prompt in prompts])

    def rollout(self, text: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return latents [B, F, C, h, w], of the configs' prompts where no other states are given."""
        text = self.text if text is None else text
        with threads_for(self.noise[:1], self.session.model_config):
            inputs = {"prompt_embeds": text, "renoise": self.renoise, **kwargs}
            return self.session.pipeline.inference(self.noise, **inputs)[1]


@dataclass
class Runs(Batch):
    """A batch with its unedited latents, the outputs of heads, and the distance to another seed [B, F]."""

    sites: Sequence[str] = ()  # whose outputs are recorded, beside those of heads

    def __post_init__(self) -> None:
        super().__post_init__()
        with record_head_outputs(*dict.fromkeys((*HeadOutputs.sites, *self.sites))) as self.outputs:
            self.latents = self.rollout()
        # The unit of effects: the same prompts from other noise.
        others = [replace(config, seed=config.seed + ANOTHER_SEED) for config in self.configs]
        self.between_seeds = distance(self.latents, Batch(self.session, others).rollout())
        self.means: dict[object, object] = {}  # of reference sets, read once

    def of(self, rows: Sequence[int]) -> "Runs":
        """Return some of these runs, without the outputs of heads."""
        found, some = copy(self), list(rows)
        found.configs = [self.configs[row] for row in some]
        found.noise, found.renoise, found.text = self.noise[some], self.renoise[:, some], self.text[some]
        found.latents, found.between_seeds = self.latents[some], self.between_seeds[some]
        return found


def distance(one: Tensor, other: Tensor) -> Tensor:
    """Return the root mean square difference per frame, float64 [B, F] of [B, F, C, h, w], on the CPU."""
    return (one.double() - other.double()).square().mean((2, 3, 4)).sqrt().cpu()


# --- Heads that lose a part of their past: a window is made by knockouts of what it would drop
def outside(window: int, sink: int = 0) -> Dropped:
    """Return the frames that a window, of which the first `sink` frames are a sink, does not hold."""
    return lambda own: range(sink, max(sink, own.stop - (window - sink)))


def by_layer(heads: Iterable[Head]) -> dict[int, tuple[int, ...]]:
    """Return the heads of each layer."""
    found: dict[int, tuple[int, ...]] = {}
    for layer, head in sorted(heads):
        found[layer] = (*found.get(layer, ()), head)
    return found


def knockouts(
    heads: Iterable[Head],
    dropped: Dropped,
    block_sizes: Sequence[int],
    passes: str = "all",
    blocks: Iterable[int] | None = None,
) -> tuple[Knockout, ...]:
    """Leave frames of their past out of the view of heads, in some passes and blocks."""
    # A Knockout names whole heads of one layer, and what a block loses depends on the block.
    ranges, layers = block_ranges(list(block_sizes)), by_layer(heads)
    return tuple(
        Knockout(frames=tuple(frames), layers=(layer,), heads=some, blocks=(block,), passes=passes)
        for block in (range(len(ranges)) if blocks is None else blocks)
        if (frames := [*dropped(ranges[block])])
        for layer, some in layers.items()
    )


# --- What heads attend to
def frame_matrices(runs: Batch, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean logits and mass of a pass of unedited runs, float64 [R, layers, H, F, F]; NaN: not seen."""
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame", steps=[step]) as calls:
        runs.rollout()
    model, frames = runs.session.model_config, runs.configs[0].num_frames
    # [R, layers, H, F, F]
    shape = len(runs.configs), model.num_layers, model.num_heads, frames, frames
    logits, mass = (np.full(shape, np.nan) for _ in range(2))
    for call in calls:
        assert call.at is not None and call.layout is not None
        rows, columns = np.array(call.at.query_frames)[:, None], np.array(call.layout.frames)
        for matrix, name in ((logits, "frame_logits"), (mass, "frame_mass")):
            matrix[:, call.site.layer][:, :, rows, columns] = call.values[name].double().numpy()
    return logits, mass


# --- One run without and with its interventions
def make_effects(args: argparse.Namespace, config: RunConfig) -> None:
    """Roll out with and without config's interventions -> an effects cache, and an mp4 unless --no_video."""
    args.save_video = None if args.no_video else args.save_video or ""
    videos = videos_of(args, [args.output_path])
    written = [args.output_path, *videos]
    check_outputs(args, config, written)
    edits, plain = edits_of(config.interventions, args.config_path), replace(config, interventions=[])
    with claimed(dict.fromkeys(written, 0), args.overwrite is not False), observed(args, unit=None) as watch:
        if videos and not args.dry_run:
            require_ffmpeg("leave the video out by --no_video")
        check_sources(edits, config)
        session = load(plain).prepare(observer=watch, decodes="this script")
        plan = session.pipeline.plan(config.num_frames)
        plan.check(edits)
        for edit in edits:
            watch.print(f"{edit}: {plan.in_words(edit)}")
        if args.dry_run:
            return
        # 1. Roll out without and with the edits, and measure how far they are apart.
        run = fingerprint(session.identity(config))
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
            "interventions": record_of(edits),
            **measured,
            "psnr": torch.tensor(stats.psnr(without, changed)).float().clamp(max=100),
            "ssim": torch.tensor(stats.ssim(without, changed)).float(),
        }
        if told := answers(config.prompt, pixels):
            right = torch.tensor([*told.values()]).T  # [2 videos, questions]
            cache |= {"questions": list(told), "answers_base": right[0], "answers_edited": right[1]}
        # 3. Save the numbers, and both videos side by side.
        save_cache(args.output_path, cache)
        for video in videos:
            beside = to_pixels(torch.cat(pixels, 3)[None])[0]
            write_mp4(beside, video, tag=video_tag(run, config, "float32"))
            watch.print(f"{video}: without and with the edits")
        total = measured["total"] / measured["between_seeds"]
        watch.print(f"{args.output_path}: effects; total {total.nanmean():.3f} of the distance between seeds")


def base_runs(path: str | None, session: Session, config: RunConfig) -> tuple[Tensor, Tensor]:
    """Return latents of the unedited run and of another seed, kept in a file where path names one."""
    made_of = fingerprint(session.identity(config))
    if path and Path(path).exists():
        try:
            cached = load_tensors(path, mmap=False)
            found, latents = cached["fingerprint"], (cached["base"], cached["other"])
        except (UnreadableError, OSError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not what --save_base writes: {error}; remove it") from None
        require_same(path, found, made_of, "choose another --save_base, or remove it")
        return latents
    base, other = session.rollout(config), session.rollout(replace(config, seed=config.seed + ANOTHER_SEED))
    if path:
        with replacing(path) as file:
            torch.save({"fingerprint": made_of, "base": base.cpu(), "other": other.cpu()}, file)
    return base, other


def measure(
    session: Session, config: RunConfig, edits: Sequence[Edit], base: Tensor, other: Tensor
) -> dict[str, Tensor]:
    """Return the tensors of an effects cache: distances [F] to the base run, and both runs' latents."""
    plan, nothing = session.pipeline.plan(config.num_frames), torch.full((config.num_frames,), torch.nan)

    def rolled_out(some: Sequence[Edit], **how: Any) -> Tensor:
        with edited(session, config, some):
            return session.rollout(config, **how)

    def run_distance(latents: Tensor) -> Tensor:
        return distance(base, latents)[0].float()

    latents = rolled_out(edits)
    # The floor: what should change nothing.
    if session.dtype == torch.float32:
        unchanged = rolled_out([], shake=FLOOR_NOISE)
    else:  # attention by groups is another backend
        unchanged = rolled_out([Bias(FLOOR_BIAS, frames=("past",), passes="denoise")])
    found = {
        "latents_base": base[0].cpu(),
        "latents_edited": latents[0].cpu(),
        "between_seeds": run_distance(other),
        "total": run_distance(latents),
        "own_block": nothing.clone(),
        "floor": run_distance(unchanged),
    }
    # Jitter has no single block: it holds for a whole rollout.
    if not any(isinstance(edit, Jitter) for edit in edits):
        # The same edits in all passes of the first block that they edit, and nowhere else.
        first = min(block for edit in edits for block, _ in plan.calls(edit))
        there = [replace(edit, blocks=(first,), steps=None, passes="all") for edit in edits]
        found["own_block"] = run_distance(rolled_out([edit for edit in there if plan.calls(edit)]))
    if not any("source" in edit.needs for edit in edits):  # else each block again, over the base run's past
        # A source would have to be rolled out in step with each block: no direct effects then.
        found["direct"], frames = nothing.clone(), block_ranges(config.block_sizes)

        def probe(block: int, denoise: Callable[[], Tensor]) -> None:
            own = slice(frames[block].start, frames[block].stop)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # NaN where nothing is edited
                with edited(session, config, edits) as made:
                    x0 = denoise()
            if made is not None and any(made.changed):
                found["direct"][own] = distance(base[:, own], x0)[0].float()

        session.rollout(config, probe=probe)
    return found
