"""Make a video of any length: store, decode and write each block while the next ones are denoised.

A kill loses only the current block. The same call continues: finished blocks pass through the model again as
given frames, which restores the cache, and the decoder reads the last ones again. Policies that choose by
denoising passes generate their blocks again and must reproduce the same bits. Attention of each block is
written to its own small file, so memory is that of one block.
"""

import argparse
import json
import os
import struct
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor

from experiments.caches.blocks import BlockCapture, path_of
from experiments.caches.files import (
    CacheError,
    RunError,
    StoppedError,
    claimed,
    remove_leftovers,
    require_ffmpeg,
    require_space,
    require_writable,
)
from experiments.extraction.rollout import (
    Progress,
    capturing,
    check_numbers,
    memory,
    observed,
    out_of_memory,
)
from experiments.extraction.video import (
    GrowingVideo,
    frames_at_once,
    load_vae,
    stream_of,
    tag_of,
    to_pixels,
)
from experiments.memory import amount
from experiments.provenance import (
    check_outputs,
    choose_device,
    choose_dtype,
    decoding_threads,
    fingerprint,
    threads_for,
)
from experiments.session import Session, load
from wan.blocks import VIDEO_FRAMES_PER_LATENT, block_ranges
from wan.checkpoint import read_model_config
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.policies import policy_of
from wan.seals import checksum
from wan.vae import VAE, Preview
from wan.wings.seeded_noise import seeded_noise

SUM_BYTES = 32  # of a checksum
LOOKS_BACK = 48  # latent frames, at least as many as the decoder's convolutions see
SAFETENSORS_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class LongVideo:
    """Paths of a long video and what belongs to it."""

    path: Path

    latents = property(lambda self: self.path.with_suffix(".latents.safetensors"))
    attention = property(lambda self: self.path.with_suffix(".attention"))


# --- Latents on disk: a .safetensors that is filled from its beginning
class LatentFile:
    """Latents [F, C, h, w] of one video, each with its checksum; frames are those that are there, whole.

    damaged frames are there, too, and not as they were written.
    """

    def __init__(self, path: str | Path, shape: tuple[int, int, int, int], dtype: torch.dtype, made_of: str):
        """Open a file, or begin one. made_of names the run. Raises CacheError for any other file."""
        self.path, self.shape, self.dtype, self.made_of = Path(path), shape, dtype, made_of
        self.frame_bytes = shape[1] * shape[2] * shape[3] * dtype.itemsize
        sums, end = shape[0] * SUM_BYTES, shape[0] * (SUM_BYTES + self.frame_bytes)
        of_sums = {"dtype": "U8", "shape": [shape[0], SUM_BYTES], "data_offsets": [0, sums]}
        entry = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [sums, end]}
        entries = {"__metadata__": {"made_of": made_of}, "checksums": of_sums, "latents": entry}
        # The header says how long the file will be; frames are appended behind it, and behind the checksums,
        # as they come (https://github.com/huggingface/safetensors#format)
        head = json.dumps(entries).encode()
        head += b" " * (-len(head) % 8)
        head = struct.pack("<Q", len(head)) + head
        self.sums, self.start = len(head), len(head) + sums
        if not self.path.exists() or not self.path.stat().st_size:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(head + bytes(sums))
        with open(self.path, "rb") as file:
            if file.read(len(head)) != head or self.path.stat().st_size < self.start:
                raise CacheError(
                    f"{self.path} belongs to another run, or is no file of latents; choose another "
                    "--output_path, or --overwrite to make it again"
                )
            # Frames from the first one on that is not as it was written are made again
            written = file.read(sums)
            there = (self.path.stat().st_size - self.start) // self.frame_bytes
            known = (written[n * SUM_BYTES :][:SUM_BYTES] for n in range(there))
            whole = takewhile(lambda one: checksum(file.read(self.frame_bytes)) == one, known)
            self.frames = sum(1 for _ in whole)
        self.damaged = there - self.frames

    def append(self, first: int, latents: Tensor) -> None:
        """Write frames [n, C, h, w] from frame first on, and wait until the disk has them."""
        frames = latents.to("cpu", self.dtype).contiguous().flatten(1).view(torch.uint8).numpy()
        with open(self.path, "r+b") as file:
            # What a kill left half written is cut off first
            file.truncate(self.start + first * self.frame_bytes)
            file.seek(0, os.SEEK_END)
            file.write(frames.tobytes())
            file.seek(self.sums + first * SUM_BYTES)
            file.write(b"".join(map(checksum, frames)))
            file.flush()
            os.fsync(file.fileno())
        self.frames, self.damaged = first + len(frames), 0

    def read(self, frames: range) -> Tensor:
        """Read frames [n, C, h, w] that are there."""
        with open(self.path, "rb") as file:
            file.seek(self.start + frames.start * self.frame_bytes)
            content = bytearray(file.read(len(frames) * self.frame_bytes))
        return torch.frombuffer(content, dtype=self.dtype).view(len(frames), *self.shape[1:])


# --- The video
class VideoWriter:
    """Decode blocks from disk piece by piece and append them to the video."""

    def __init__(
        self,
        video: GrowingVideo,
        vae: VAE | Preview,
        latents: LatentFile,
        blocks: list[range],
        device: torch.device,
    ):
        self.video, self.decoder, self.latents, self.device = video, vae.stream(), latents, device
        self.stream = stream_of(device)
        self.pieces: list[range] = []  # whole blocks together, as many frames as are decoded at once
        for frames in blocks:
            if self.pieces and frames.stop - self.pieces[-1].start <= frames_at_once(*latents.shape[2:]):
                self.pieces[-1] = range(self.pieces[-1].start, frames.stop)
            else:
                self.pieces.append(frames)
        there = sum(frames.stop <= latents.frames for frames in self.pieces)
        if not video.is_finished and video.pieces > there:  # of latents that are gone: they come again
            video.keep(there)

    def catch_up(self) -> None:
        """Decode again what the decoder looks back on, then write the pieces that are on disk already."""
        written = self.pieces[: self.video.pieces]
        for i, frames in enumerate(written):
            if i + 1 == len(written) or written[-1].stop - written[i + 1].start < LOOKS_BACK:
                self._decoded(frames)
        self.write()

    def write(self) -> None:
        """Write the pieces whose blocks are on disk."""
        there = self.latents.frames
        while self.video.pieces < len(self.pieces) and self.pieces[self.video.pieces].stop <= there:
            frames = self.pieces[self.video.pieces]
            first = max(0, 1 + VIDEO_FRAMES_PER_LATENT * (frames.start - 1))
            self.video.append(self._decoded(frames), first)

    def _decoded(self, frames: range) -> Tensor:
        with torch.cuda.stream(self.stream):  # nothing on a CPU
            return to_pixels(self.decoder(self.latents.read(frames)[None].to(self.device)))[0].cpu()


# --- The rollout
def make_long_video(
    session: Session,
    config: RunConfig,
    place: LongVideo,
    latents: LatentFile,
    capture: BlockCapture,
    vae: VAE | Preview,
    watch: Progress,
) -> None:
    """Roll out what is not done yet. StoppedError where the observer asks to stop."""
    blocks = block_ranges(config.block_sizes)
    # 1. What an earlier call has done: attention, video and latents, each whole up to some block
    missing = capture.missing(place.attention, len(blocks), latents.made_of)
    video = GrowingVideo(place.path, tag_of(latents.made_of, config, vae), vae.made_by)
    writer, finished = VideoWriter(video, vae, latents, blocks, session.device), video.is_finished
    if finished and latents.frames < config.num_frames:
        raise CacheError(f"{place.path} is finished and its latents are not; --overwrite makes both again")
    if finished and not missing:
        return
    ends = [0, *(frames.stop for frames in blocks)]
    first = max(block for block, end in enumerate(ends) if end <= latents.frames)
    first = min([first, *missing])  # attention may be asked for afterwards
    # Clean passes alone bring back the cache, but where noisy queries choose keys, a release has its quirks,
    # an edit counts, or a window of blocks is denoised together:
    plain = config.sampler == "blocks" and not config.interventions
    policy = policy_of(config)
    given = 0
    if plain and not policy.chooses_by_layer and not policy.release:
        given = ends[first]
    # 2. Roll out; finished blocks are given, or made again and compared
    noise = seeded_noise([config], session.model_config, session.dtype, session.device)
    requests = capture.requests([block for block in capture.blocks(len(blocks)) if block >= first])
    at = 0
    watch.log("rollout", prompt=config.prompt, seed=config.seed, given_blocks=first)
    with (
        threads_for(torch.empty(1, *latents.shape), session.model_config),
        decoding_threads(session.device, *latents.shape[2:]),
        out_of_memory(lambda: f"rolling out block {at}", requests),
        capturing(requests) as calls,
        ThreadPoolExecutor(1) as beside,  # which decodes on a GPU while blocks are denoised
    ):
        written: list[Future] = []
        if not finished:
            writer.catch_up()
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
            check_numbers(session.pipeline.model, x0, f"block {block}", calls)
            if block < first:
                if not torch.equal(latents.read(frames), x0[0].to("cpu", latents.dtype)):
                    raise RunError(
                        f"{latents.path}: frames {frames.start}-{frames.stop - 1} come out differently now, "
                        "on another device or number of threads; go on where it was begun, or --overwrite"
                    )
                continue
            if calls:
                capture.save(place.attention, block, calls, latents.made_of)
                calls.clear()
            # Latents go to the disk before the video, which is decoded from them
            if frames.stop > latents.frames:
                latents.append(frames.start, x0[0])
            if not finished and session.device.type == "cpu":
                writer.write()
            elif not finished:
                written.append(beside.submit(writer.write))
            own = blocks[block]
            watch.advance("block", block, len(blocks), f"frames {own.start}-{own[-1]}")
            if watch.stopping and block + 1 < len(blocks):
                raise StoppedError(f"stopped after block {block + 1} of {len(blocks)}: run it again to go on")
        # 3. Wait for the decoder beside, and turn the pieces into an ordinary mp4
        for one in written:
            one.result()
        if not finished:
            writer.video.finish()


# --- The command: from flags to files
def make_from_flags(args: argparse.Namespace, config: RunConfig) -> None:
    """Make the video of run_rollout.py's flags, or continue it.

    Raises ConfigError and CacheError before anything is generated, and StoppedError after Ctrl-C.
    """
    place, capture = LongVideo(Path(args.output_path)), BlockCapture.read(args.capture, config.step)
    if config.sampler == "rolling_forcing" and capture.kind != "none":
        raise ConfigError("--capture knows no rolling_forcing; run_extraction_all.py captures it")
    attention = [path_of(place.attention, block) for block in capture.blocks(len(config.block_sizes))]
    check_outputs(args, config, [place.path, place.latents, *attention])
    require_writable(place.latents)
    with claimed({str(place.path): 0}), observed(args) as watch:
        require_ffmpeg()
        vae = load_vae(config, args.vae_dtype, args.preview)
        # 1. Sizes, before anything is loaded
        model = read_model_config(config.ckpt_dir)
        dtype = choose_dtype(config.dtype, choose_device(config.device, config.offload))
        shape = (config.num_frames, model.in_dim, config.height, config.width)
        latent_bytes = config.num_frames * model.in_dim * config.height * config.width * dtype.itemsize
        sizes = {str(place.latents): latent_bytes, str(place.attention): capture.bytes(config, model)}
        require_space(place.path.parent, sizes)
        session = load(config).prepare(observer=watch, replays=True, decodes=True)
        written = [f"{amount(size)} to {path}" for path, size in sizes.items() if size]
        watch.print(f"writes {', '.join(written)}")
        # 2. What an earlier run left
        for path in attention:
            remove_leftovers(path)
        if args.overwrite:
            for path in (place.path, place.latents, *place.attention.glob("block_*.pt")):
                path.unlink(missing_ok=True)
        if place.path.exists() and not place.latents.exists():
            raise CacheError(f"{place.path} is there without its latents; --overwrite makes it again")
        latents = LatentFile(place.latents, shape, session.dtype, fingerprint(session.identity(config)))
        if latents.damaged:
            watch.print(f"{place.latents}: frames from {latents.frames} on are damaged, and made again")
        # 3. The video
        start, before = time.monotonic(), latents.frames
        with session.edited(config):
            make_long_video(session, config, place, latents, capture, vae, watch)
        made, seconds = config.num_frames - before, time.monotonic() - start
        frames = f"{made} of {config.num_frames} frames made now"
        watch.print(f"{place.path}: {frames}, {seconds:.1f} s, {memory()}")
