"""Make a video of any length: store, decode and write each block while the next ones are denoised.

A kill loses only the current block. The same call continues at the first block whose latents are missing or
damaged: those before it pass through the model again as given frames, which restores the cache, and are
decoded again where the mp4 is not whole. Policies that choose by denoising passes generate their blocks again
and must reproduce the same bits. Attention of each block is written to its own small file, so memory is that
of one block.
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from experiments import progress, provenance
from experiments.caches import mp4
from experiments.caches.blocks import (
    BlockCapture,
    LatentBlocks,
    latents_path,
    path_of,
    require_same_settings,
)
from experiments.caches.files import (
    CacheError,
    RunError,
    StoppedError,
    claimed,
    require_same,
    require_space,
)
from experiments.extraction.video import LiveVideo
from experiments.memory import amount, out_of_memory
from experiments.runs import capturing
from experiments.session import Session, check_numbers, load
from wan.blocks import VIDEO_FRAMES_PER_LATENT, block_ranges
from wan.checkpoint import read_model_config
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.pipeline import RolloutInputs
from wan.policies import policy_of
from wan.wings.seeded_noise import seeded_noise

REMEDY = "choose another --output_path, or --overwrite to make it again"


@dataclass(frozen=True)
class LongVideo:
    """Paths of a long video and what belongs to it."""

    path: Path

    latents = property(lambda self: self.path.with_suffix(".latents"))
    attention = property(lambda self: self.path.with_suffix(".attention"))
    older_latents = property(lambda self: self.path.with_suffix(".latents.safetensors"))  # before 2.0

    def check_mp4(self, fingerprint: str) -> None:
        """Raise CacheError for a file at the mp4's path that this run has not written."""
        if not self.path.exists():
            return
        if not any(self.latents.glob("block_*.safetensors")):
            raise CacheError(f"{self.path} is there without its latents; {REMEDY}")
        tag = mp4.mp4_tag(self.path)
        if tag is not None:
            require_same(self.path, tag.partition(" ")[0], fingerprint, REMEDY)
            return
        # One of this run that was cut off has no tag, and shows nothing
        if not mp4.shows_nothing(self.path):
            raise CacheError(f"{self.path} is there and is no mp4 of this run; {REMEDY}")

    def is_whole(self, tag: str, num_frames: int) -> bool:
        """Return True where the mp4 names its run and decoder and has all frames."""
        expected = 1 + VIDEO_FRAMES_PER_LATENT * (num_frames - 1)
        return mp4.mp4_tag(self.path) == tag and mp4.count_frames(self.path) == expected

    def remove(self) -> None:
        """Remove the mp4, latents and attention of an earlier run."""
        for path in (self.path, self.older_latents):
            path.unlink(missing_ok=True)
        for path in (*self.latents.glob("block_*.safetensors"), *self.attention.glob("block_*.pt")):
            path.unlink()


# --- The rollout
def make_long_video(
    session: Session,
    config: RunConfig,
    place: LongVideo,
    latents: LatentBlocks,
    capture: BlockCapture,
    video: LiveVideo,
    watch: progress.Progress,
) -> int:
    """Roll out what is not done yet -> the number of blocks. StoppedError where the observer asks to stop."""
    num_blocks, run = len(config.block_sizes), latents.fingerprint
    # 1. Look at what an earlier call has done: latents up to some block, attention, and perhaps the mp4
    finished = latents.finished()
    if finished < num_blocks and latents.path(finished).exists():
        watch.print(f"{latents.path(finished)} is damaged: blocks from {finished} on are made again")
    missing = capture.missing(place.attention, num_blocks, run)
    place.check_mp4(run)
    has_mp4 = finished == num_blocks and place.is_whole(video.tag(run), config.num_frames)
    # 2. Begin the mp4 with the blocks that are there
    if not has_mp4:
        for block in range(finished):
            video.add(latents.take(block)[None])
    # 3. Roll out from the first block that lacks latents or attention
    first = min([finished, *missing])
    captured = [block for block in capture.blocks(num_blocks) if block >= first]
    requests, block = capture.requests(captured), 0
    watch.log("rollout", prompt=config.prompt, seed=config.seed, given_blocks=first)
    with (
        provenance.threads_for(torch.empty(1, config.num_frames, *latents.frame_shape), session.model_config),
        out_of_memory(lambda: f"rolling out block {block}", requests),
        capturing(requests) as calls,
    ):
        for block, (frames, x0) in enumerate(rollout_from(first, session, config, latents)):
            check_numbers(session.pipeline.model, x0, f"block {block}", calls)
            if block < finished and not torch.equal(latents.take(block), x0[0].to("cpu", latents.dtype)):
                raise RunError(
                    f"{latents.path(block)} comes out differently now, on another device or number of "
                    "threads; go on where it was begun, or --overwrite"
                )
            if block < first:
                continue
            if calls:
                capture.save(place.attention, block, calls, run)
                calls.clear()
            # Latents go to the disk before the video shows them
            if block >= finished:
                latents.write(block, x0[0])
                video.add(x0.clone())
            watch.advance("block", block, num_blocks, f"frames {frames.start}-{frames[-1]}")
            if watch.stopping and block + 1 < num_blocks:
                raise StoppedError(f"stopped after block {block + 1} of {num_blocks}: run it again to go on")
    # 4. Turn the mp4 into an ordinary one
    if not has_mp4:
        video.save((latents.take(block)[None] for block in range(num_blocks)), run)
    return num_blocks - finished


def rollout_from(
    first: int, session: Session, config: RunConfig, latents: LatentBlocks
) -> Iterator[tuple[range, Tensor]]:
    """Yield the frames and latents [1, n, C, h, w] of every block; finished ones are given if possible."""
    blocks = block_ranges(config.block_sizes)
    if first == len(blocks):
        return
    # Given frames get a clean pass, which brings back the cache. They are generated again where noisy queries
    # choose keys, a release has its quirks, an edit counts, or a window of blocks is denoised together.
    policy = policy_of(config)
    chooses = policy.chooses_by_layer or policy.release
    can_be_given = config.sampler == "blocks" and not config.interventions and not chooses
    num_given = 0
    if can_be_given:
        num_given = blocks[first].start
    block_at = {frames.start: block for block, frames in enumerate(blocks)}
    inputs = RolloutInputs(
        noise=seeded_noise([config], session.model_config, session.dtype, session.device),
        prompt_embeds=session.texts[config.prompt][0],
        num_frames=config.num_frames - num_given,
        num_given=num_given,
        given=lambda frames: latents.take(block_at[frames.start])[None].to(session.device),
        resumes=True,
        prompt_schedule=session.switches(config),
    )
    yield from session.pipeline.blocks(inputs)


# --- The command: from flags to files
def make_from_flags(args: argparse.Namespace, config: RunConfig) -> None:
    """Make the video of run_rollout.py's flags, or continue it.

    Raises ConfigError and CacheError before anything is generated, and StoppedError after Ctrl-C.
    """
    place, capture = LongVideo(Path(args.output_path)), BlockCapture.read(args.capture, config.step)
    if config.sampler == "rolling_forcing" and capture.kind != "none":
        raise ConfigError("--capture knows no rolling_forcing; run_extraction_all.py captures it")
    blocks = range(len(config.block_sizes))
    files = [place.path, *(latents_path(place.latents, block) for block in blocks)]
    files += [path_of(place.attention, block) for block in capture.blocks(len(blocks))]
    provenance.check_outputs(args, config, files)
    with claimed({str(place.path): 0}), progress.observed(args) as watch:
        # 1. Refuse what is there and is not this run's, and remove what kills left
        if args.overwrite:
            place.remove()
        if place.older_latents.exists():
            raise CacheError(f"{place.older_latents} is of version 1, and is not continued; {REMEDY}")
        for folder in (place.latents, place.attention):
            for part in folder.glob(".block_*.part"):
                part.unlink()
        settings = provenance.number_settings(config)
        require_same_settings(place.latents, settings, REMEDY)
        # 2. Sizes, before anything is loaded
        model = read_model_config(config.ckpt_dir)
        dtype = provenance.choose_dtype(config.dtype, provenance.choose_device(config.device, config.offload))
        frame_shape = (model.in_dim, config.height, config.width)
        latent_bytes = config.num_frames * math.prod(frame_shape) * dtype.itemsize
        sizes = {str(place.latents): latent_bytes, str(place.attention): capture.bytes(config, model)}
        require_space(place.path.parent, sizes)
        written = [f"{amount(size)} to {path}" for path, size in sizes.items() if size]
        watch.print(f"writes {', '.join(written)}")
        # 3. The model and the decoder
        with LiveVideo(config, place.path, args.vae_dtype, args.preview, growing=place.path) as video:
            video.ready()
            session = load(config).prepare(observer=watch, replays=True, decodes=True)
            run = provenance.fingerprint(session.identity(config))
            video.comment = f"{run} unfinished"
            latents = LatentBlocks(
                folder=place.latents,
                fingerprint=run,
                sizes=config.block_sizes,
                frame_shape=frame_shape,
                dtype=session.dtype,
                settings=settings,
            )
            # 4. The video
            start = time.monotonic()
            with session.edited(config):
                count = make_long_video(session, config, place, latents, capture, video, watch)
            seconds = time.monotonic() - start
            watch.print(
                f"{place.path}: {count} of {len(blocks)} blocks made now, {seconds:.1f} s, "
                f"{progress.memory()}"
            )
