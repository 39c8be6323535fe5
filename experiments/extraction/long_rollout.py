"""A video of any length: blocks are denoised, kept on disk, decoded and written while the next ones come.

A kill loses the block that was being made. The same call goes on: finished blocks pass through the model
once more, as given ones, so that the cache is what it was; the decoder looks back over the last ones.
Policies that choose by the denoising passes make their blocks again, and must find the same bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from experiments.caches.errors import CacheError, RunError, StoppedError
from experiments.extraction import checks
from experiments.extraction.block_capture import BlockCapture
from experiments.extraction.causal import Session, seeded_noise
from experiments.extraction.devices import decoding_threads, threads_for
from experiments.extraction.growing_video import GrowingVideo
from experiments.extraction.latent_file import LatentFile
from experiments.extraction.observer import RunObserver
from experiments.extraction.rollout import capturing, out_of_memory
from experiments.extraction.streaming import frames_at_once
from experiments.extraction.video import to_pixels
from wan.blocks import block_ranges
from wan.config import RunConfig
from wan.modules.vae import VAE, StreamedDecoder

LOOKS_BACK = 48  # latent frames, at least as many as the decoder's convolutions see


@dataclass(frozen=True)
class LongVideo:
    """Where a long video and what belongs to it lie."""

    path: Path

    @property
    def latents(self) -> Path:
        return self.path.with_suffix(".latents.safetensors")

    @property
    def attention(self) -> Path:
        return self.path.with_suffix(".attention")


def can_be_given(config: RunConfig) -> bool:
    """Whether clean passes alone bring back the cache: no choice by noisy queries, no quirk, no edit, and no
    window of blocks that are denoised together.
    """
    plain = config.sampler == "blocks" and not config.interventions
    return plain and not (config.policy.chooses_by_layer or config.policy.source)


def make_long_video(
    session: Session,
    config: RunConfig,
    place: LongVideo,
    latents: LatentFile,
    capture: BlockCapture,
    vae: VAE,
    watch: RunObserver,
) -> None:
    """Roll out what is not done yet. Raises StoppedError where the observer asks to stop, RunError for
    numbers that cannot be right.
    """
    blocks = block_ranges(config.block_sizes)
    writer = VideoWriter(GrowingVideo(place.path), vae, latents, blocks, session.device)
    if finished := writer.video.is_finished:
        if latents.frames < config.num_frames:
            raise CacheError(
                f"{place.path} is finished and its latents are not; --overwrite makes both again"
            )
        if not capture.missing(place.attention, len(blocks)):
            return
    with (
        threads_for(torch.empty(1, *latents.shape), session.model_config),
        decoding_threads(session.device, *latents.shape[2:]),
    ):
        if not finished:
            writer.catch_up()
        for block in new_blocks(session, config, place, latents, capture, watch):
            if not finished:
                writer.write()
            watch.block(block, blocks[block], len(blocks))
            if watch.stopping and block + 1 < len(blocks):
                raise StoppedError(f"stopped after block {block + 1} of {len(blocks)}: run it again to go on")
        if not finished:
            writer.video.finish()


def new_blocks(
    session: Session,
    config: RunConfig,
    place: LongVideo,
    latents: LatentFile,
    capture: BlockCapture,
    watch: RunObserver,
) -> Iterator[int]:
    """Make the blocks that are missing, and yield the number of each once it is on disk."""
    ends = [0, *(frames.stop for frames in block_ranges(config.block_sizes))]
    done = max(end for end in ends if end <= latents.frames)
    first = ends.index(done)
    wanted = capture.blocks(len(config.block_sizes))
    lost = [block for block in capture.missing(place.attention, len(config.block_sizes)) if block < first]
    if lost:  # asked for after they were made
        first, done = lost[0], ends[lost[0]]
    given = done if can_be_given(config) else 0
    noise = seeded_noise([config], session.model_config, session.dtype, session.device)
    requests = capture.requests([block for block in wanted if block >= first])
    model, at = session.pipeline.model, 0
    watch.log("rollout", prompt=config.prompt, seed=config.seed, given_blocks=first)
    with (
        out_of_memory(lambda: f"rolling out block {at}", requests),
        capturing(requests) as calls,
        checks.record_forwards(model) as forwards,
    ):
        rollout = session.pipeline.blocks(
            noise,
            session.texts[config.prompt][0],
            num_frames=config.num_frames - given,
            num_given=given,
            given=lambda frames: latents.read(frames)[None].to(session.device),
            prompt_schedule=session.switches(config),
        )
        for block, (frames, x0) in enumerate(rollout):
            at = block + 1
            checks.check_forwards(model, forwards, x0)
            if block < first:
                _same(latents, frames, x0)
                continue
            checks.check_values(calls)
            if calls:
                capture.save(place.attention, block, calls)
                calls.clear()
            if frames.stop > latents.frames:
                latents.append(frames.start, x0[0])
            yield block


def _same(latents: LatentFile, frames: range, x0: Tensor) -> None:
    """Raise RunError where a block that was made again is not what is on disk."""
    if not torch.equal(latents.read(frames), x0[0].to("cpu", latents.dtype)):
        raise RunError(
            f"{latents.path}: frames {frames.start}-{frames.stop - 1} come out differently now, on another "
            "device or number of threads; go on where it was begun, or --overwrite"
        )


class VideoWriter:
    """Decodes blocks that are on disk, a piece at a time, and appends them to the video."""

    def __init__(
        self, video: GrowingVideo, vae: VAE, latents: LatentFile, blocks: list[range], device: torch.device
    ):
        self.video, self.decoder, self.latents, self.device = video, StreamedDecoder(vae), latents, device
        self.pieces = _pieces(blocks, frames_at_once(*latents.shape[2:]))

    def catch_up(self) -> None:
        """Look back as far as the decoder sees, then write the pieces whose blocks are there already."""
        next_piece = self.video.pieces
        begin = next_piece
        while begin > 0 and self.pieces[next_piece - 1].stop - self.pieces[begin].start < LOOKS_BACK:
            begin -= 1
        for frames in self.pieces[begin:next_piece]:
            self._decoded(frames)
        self.write()

    def write(self) -> None:
        """Write the pieces whose blocks are on disk."""
        there = self.latents.frames
        while self.video.pieces < len(self.pieces) and self.pieces[self.video.pieces].stop <= there:
            self.video.append(self._decoded(self.pieces[self.video.pieces]))

    def _decoded(self, frames: range) -> Tensor:
        latents = self.latents.read(frames)[None].to(self.device)
        return to_pixels(self.decoder(latents))[0].cpu()


def _pieces(blocks: list[range], most: int) -> list[range]:
    """Whole blocks together, up to so many frames: what is decoded and encoded at once."""
    pieces: list[range] = []
    for frames in blocks:
        if pieces and frames.stop - pieces[-1].start <= most:
            pieces[-1] = range(pieces[-1].start, frames.stop)
        else:
            pieces.append(frames)
    return pieces
