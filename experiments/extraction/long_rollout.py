"""A video of any length: blocks are denoised, kept on disk, decoded and written while the next ones come.

A kill loses the block that was being made. The same call goes on: finished blocks pass through the model
once more, as given ones, so that the cache is what it was; the decoder looks back over the last ones.
Policies that choose by the denoising passes make their blocks again, and must find the same bits.
"""

import json
import os
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.caches.files import CacheError, RunError, StoppedError, part_of, require_ffmpeg
from experiments.extraction import checks
from experiments.extraction.block_capture import BlockCapture
from experiments.extraction.causal import Session, seeded_noise
from experiments.extraction.devices import decoding_threads, threads_for
from experiments.extraction.observer import RunObserver
from experiments.extraction.rollout import capturing, out_of_memory
from experiments.extraction.video import SHORTEST_SIDE, encoded, frames_at_once, to_pixels
from wan.blocks import block_ranges
from wan.config import RunConfig
from wan.vae import VAE, StreamedDecoder

# --- An mp4 that grows while a rollout goes on, and plays at any moment: a kill loses no frame that is in it
FRAGMENTED = ("-movflags", "frag_keyframe+empty_moov+default_base_moof", "-bf", "0", "-g", "100000")
BOX = 8  # bytes of a box's head: its size and its type
TICKS = 1024  # of a frame, at ffmpeg's time scale for 16 frames a second

Box = tuple[bytes, int, int]  # type, first byte, byte after the last


class GrowingVideo:
    """Pieces of pixels, appended to a file; one that is there already goes on after its last whole piece."""

    def __init__(self, path: str | Path):
        """Raises CacheError for a file that is there and is no mp4 of this kind."""
        self.path = Path(path)
        self.pieces, self.frames, self.is_finished = 0, 0, False
        if self.path.exists():
            self._resume()

    def append(self, pixels: Tensor) -> None:
        """Encode uint8 pixels [frames, H, W, 3] and write them to the end of the file."""
        content = bytearray(encoded(pixels, SHORTEST_SIDE, FRAGMENTED))
        top = {kind: (start, stop) for kind, start, stop in _boxes(content)}
        self._number(content, *top[b"moof"])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        names = (b"moof", b"mdat") if self.pieces else (b"ftyp", b"moov", b"moof", b"mdat")
        with open(self.path, "ab" if self.pieces else "wb") as file:
            file.write(b"".join(content[slice(*top[name])] for name in names))
            file.flush()
            os.fsync(file.fileno())
        self.pieces, self.frames = self.pieces + 1, self.frames + len(pixels)

    def finish(self) -> None:
        """Turn the pieces into an ordinary mp4, with its length in its head; the pictures stay."""
        part = part_of(self.path)
        command = [require_ffmpeg(), "-v", "error", "-y", "-i", str(self.path)]
        command += ["-c", "copy", "-movflags", "+faststart", "-f", "mp4", str(part)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            part.unlink(missing_ok=True)
            raise RunError(f"{self.path} could not be finished: {done.stderr.strip()[-200:]}")
        os.replace(part, self.path)
        self.is_finished = True

    def _number(self, content: bytearray, start: int, stop: int) -> None:
        """Say in a fragment which one it is, and at which time it begins."""
        for kind, first, last in _boxes(content, start + BOX, stop):
            if kind == b"mfhd":
                content[first + 12 : first + 16] = struct.pack(">I", self.pieces + 1)
            if kind == b"traf":
                for inner, begin, end in _boxes(content, first + BOX, last):
                    if inner == b"tfdt":
                        time = TICKS * self.frames
                        content[begin + 12 : end] = time.to_bytes(end - begin - 12, "big")

    def _resume(self) -> None:
        content, end, waiting = self.path.read_bytes(), 0, 0
        kinds = [kind for kind, _, _ in _boxes(content)]
        if len(content) >= BOX and content[4:BOX] != b"ftyp":
            raise CacheError(f"{self.path} is there and is no mp4; choose another --output_path")
        self.is_finished = b"mdat" in kinds and b"moof" not in kinds
        if self.is_finished:
            return
        for kind, start, stop in _boxes(content):
            if kind == b"moof":
                waiting = _frames_of(content, start, stop)
            if kind == b"mdat" and waiting:
                self.pieces, self.frames = self.pieces + 1, self.frames + waiting
                end, waiting = stop, 0
        os.truncate(self.path, end)


def _boxes(content: bytes | bytearray, start: int = 0, stop: int | None = None) -> Iterator[Box]:
    """The whole boxes of a part of a file, one after the other; what is torn off at the end is left out."""
    stop = len(content) if stop is None else stop
    while start + BOX <= stop:
        (size,) = struct.unpack(">I", content[start : start + 4])
        if size < BOX or start + size > stop:
            return
        yield bytes(content[start + 4 : start + BOX]), start, start + size
        start += size


def _frames_of(content: bytes, start: int, stop: int) -> int:
    """Frames of a fragment."""
    for kind, first, last in _boxes(content, start + BOX, stop):
        for inner, begin, end in _boxes(content, first + BOX, last) if kind == b"traf" else ():
            if inner == b"trun" and end - begin >= 16:
                return int(struct.unpack(">I", content[begin + 12 : begin + 16])[0])
    return 0


# --- Latents of a long video on disk, block by block: a .safetensors that is filled from its beginning
NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
MAX_HEAD = 1 << 16  # bytes
LENGTH = struct.Struct("<Q")  # of the head, in front of it


class LatentFile:
    """Latents [F, C, h, w] of one video; frames are those that are there."""

    def __init__(self, path: str | Path, shape: tuple[int, int, int, int], dtype: torch.dtype, made_of: str):
        """Open a file, or begin one. made_of names the run.

        Raises CacheError for a file of another run, or of no run at all.
        """
        self.path, self.shape, self.dtype = Path(path), shape, dtype
        self.frame_bytes = shape[1] * shape[2] * shape[3] * dtype.itemsize
        entry = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [0, shape[0] * self.frame_bytes],
        }
        head = json.dumps({"__metadata__": {"made_of": made_of}, "latents": entry}).encode()
        head += b" " * (-len(head) % 8)
        self.start = LENGTH.size + len(head)
        if self.path.exists() and self.path.stat().st_size:
            self._check(head)
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(LENGTH.pack(len(head)) + head)

    @property
    def frames(self) -> int:
        """Whole frames that are there."""
        return max(0, self.path.stat().st_size - self.start) // self.frame_bytes

    @property
    def total_bytes(self) -> int:
        return self.start + self.shape[0] * self.frame_bytes

    def append(self, first: int, latents: Tensor) -> None:
        """Write frames [n, C, h, w] from frame first on, and wait until the disk has them."""
        content = latents.to("cpu", self.dtype).contiguous().view(torch.uint8).numpy().tobytes()
        with open(self.path, "r+b") as file:
            file.truncate(self.start + first * self.frame_bytes)
            file.seek(0, os.SEEK_END)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def read(self, frames: range) -> Tensor:
        """Frames [n, C, h, w] that are there."""
        with open(self.path, "rb") as file:
            file.seek(self.start + frames.start * self.frame_bytes)
            content = bytearray(file.read(len(frames) * self.frame_bytes))
        return torch.frombuffer(content, dtype=self.dtype).view(len(frames), *self.shape[1:])

    def _check(self, head: bytes) -> None:
        with open(self.path, "rb") as file:
            there = file.read(LENGTH.size + MAX_HEAD)
        if there[: self.start] == LENGTH.pack(len(head)) + head:
            return
        problem = "is no file of latents" if _made_of(there) is None else "is of another run"
        raise CacheError(
            f"{self.path} {problem}; choose another --output_path, or --overwrite to make it again"
        )


def _made_of(content: bytes) -> Any:
    """The run that the head of a file names, or None."""
    try:
        (size,) = LENGTH.unpack(content[: LENGTH.size])
        return json.loads(content[LENGTH.size : LENGTH.size + size])["__metadata__"]["made_of"]
    except (struct.error, ValueError, KeyError, TypeError, RecursionError):
        return None


# --- A video of any length: blocks are denoised, kept on disk, decoded and written while the next ones come
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
