"""Latents -> pixels -> mp4, also while the rollout goes on that makes the latents."""

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.caches.files import (
    SHORTEST_SIDE,
    CacheError,
    RunError,
    encode_mp4,
    is_sealed,
    mp4_boxes,
    part_of,
    replacing,
    require_ffmpeg,
    require_same,
    seal,
    tag_in,
)
from experiments.provenance import (
    choose_device,
    choose_dtype,
    decoding_threads,
    vae_files,
    video_tag,
)
from wan.blocks import VIDEO_FRAMES_PER_LATENT
from wan.checkpoint import read_weights_file
from wan.config import RunConfig
from wan.errors import ConfigError, library_reads, short_repr
from wan.files import load_tensors
from wan.vae import POSITIONS_AT_ONCE, VAE, Preview, StreamedDecoder, diffusers_vae

FRAGMENTED = ["-movflags", "frag_keyframe+empty_moov+default_base_moof", "-bf", "0", "-g", "100000"]
FRAGMENTED += ["-sc_threshold", "0"]  # a piece is one fragment, also where its scene is cut
TICKS = 1024  # of a frame, at ffmpeg's time scale for 16 frames a second
ROOM = 1 << 20  # bytes of the GPU for each position of a frame of latents: what the decoder takes


def load_vae(config: RunConfig, dtype: str = "float32", preview: str | None = None) -> VAE | Preview:
    """Read the VAE of a config, or a preview's decoder, onto its device. auto is bfloat16 on a GPU alone."""
    device = choose_device(config.device)
    if preview:
        return Preview.from_file(preview, choose_dtype(dtype, device), device)
    files = vae_files(config)
    vae = VAE.from_pretrained(config.ckpt_dir, choose_dtype(dtype, device), device)
    vae.files = files  # as they were: the tags of its videos say so
    return vae


def check_video(config: RunConfig) -> None:
    """Raise CheckpointError for a VAE that cannot decode, CacheError where no mp4 can be written."""
    require_ffmpeg()
    load_vae(config)


def decode(latents: Tensor, vae: VAE | Preview) -> Tensor:
    """Decode latents [1, F, C, h, w] -> uint8 [frames, height, width, 3] on the CPU."""
    with decoding_threads(latents.device, *latents.shape[-2:]):
        return to_pixels(vae.stream()(latents))[0].cpu()


def first_latents(source: Any, config: RunConfig, channels: int, vae: Callable[[], VAE]) -> Tensor:
    """Return the latents that a video begins with, float32 [1, G, C, h, w], of a tensor or a file.

    A tensor, .pt or .safetensors holds latents [G, C, h, w]; an mp4, or a picture (one latent frame), is
    encoded by the VAE. Raises ConfigError for other shapes, numbers that are not finite, and no whole blocks.
    """
    named, wanted = "first_frames", [channels, config.height, config.width]
    form = f"[frames, {', '.join(map(str, wanted))}]"
    latents = source
    if isinstance(source, (str, Path)):
        named, path = f"first_frames {source}", Path(source)
        if not path.is_file():
            raise ConfigError(f"{named} not found; give latents (.pt, .safetensors), an mp4 or a picture")
        if path.suffix in (".pt", ".pth", ".safetensors"):
            with library_reads(named, remedy=f"give latents {form}"):
                held = read_weights_file(path) if path.suffix == ".safetensors" else load_tensors(path)
            latents = held
            if isinstance(held, dict):  # of several tensors, those of that name
                latents = held.get("latents", next(iter(held.values())) if len(held) == 1 else None)
        else:
            size = (8 * config.height, 8 * config.width)
            latents = vae().encode(read_pixels(path, *size))[0]
    fits = isinstance(latents, Tensor) and latents.is_floating_point()
    latents = latents[0] if fits and latents.ndim == 5 and len(latents) == 1 else latents
    if not fits or latents.ndim != 4 or [*latents.shape[1:]] != wanted or not latents.isfinite().all():
        shown = list(latents.shape) if fits else short_repr(latents)
        raise ConfigError(f"{named} holds {shown}, no finite latents of floating point {form}")
    ends = [*accumulate(config.block_sizes)][:-1]
    if len(latents) not in ends:
        raise ConfigError(
            f"{named} has {len(latents)} latent frames; a video of {config.num_frames} begins with whole "
            f"blocks, of {', '.join(map(str, ends)) or 'no'} frames"
        )
    return latents[None].detach().float()


def read_pixels(path: Path, height: int, width: int) -> Tensor:
    """Read an mp4, or a picture as one frame -> float32 [1, frames, 3, height, width] in 0..1.

    A whole number of four frames a latent frame, and one, is taken from the start. Frames are scaled.
    """
    with library_reads(path, remedy="give an mp4 or a picture that ffmpeg reads, of 8 bits a channel"):
        shown = [np.atleast_3d(frame) for frame in iio.imiter(path)]  # a grey one has no channels
        if not shown or any(frame.dtype != np.uint8 for frame in shown):
            raise ValueError(f"it has frames of {shown[0].dtype}" if shown else "it has no frames")
        # Grey, perhaps with alpha, or colours, perhaps with alpha
        colours = [frame[..., : 1 if frame.shape[-1] < 3 else 3] for frame in shown]
        pixels = torch.as_tensor(np.stack([np.broadcast_to(x, (*x.shape[:2], 3)) for x in colours]))
    x = pixels.permute(0, 3, 1, 2).float() / 255
    if x.shape[2:] != (height, width):
        x = F.interpolate(x, (height, width), mode="area")
    return x[None]


def to_pixels(video: Tensor) -> Tensor:
    """Video [B, frames, 3, H, W] in 0..1 -> uint8 [B, frames, H, W, 3]."""
    return (video.permute(0, 1, 3, 4, 2) * 255).round().byte()


def save_video(
    latents: Tensor, path: str | Path, vae: VAE | Preview, config: RunConfig, fingerprint: str
) -> None:
    """Decode latents and write an mp4 of 16 frames a second, whole or not at all; small ones are enlarged.

    The mp4 carries the fingerprint of its run, and of the decoder.
    """
    tag = tag_of(fingerprint, config, vae)
    write_mp4(decode(latents, vae), path, tag=tag, about=vae.made_by)


def tag_of(run: str, config: RunConfig, vae: VAE | Preview) -> str:
    """Return what an mp4 of a run carries that this decoder makes."""
    return video_tag(run, config, dtype_of(vae), None if isinstance(vae, Preview) else vae.files)


def dtype_of(vae: VAE | Preview) -> str:
    """Return the dtype of a decoder as flags name it; a preview is known by its weights."""
    return vae.identity if isinstance(vae, Preview) else str(vae.vae.dtype).removeprefix("torch.")


def write_mp4(pixels: Tensor, path: str | Path, shortest=SHORTEST_SIDE, tag="", about="") -> None:
    """Write uint8 pixels [frames, height, width, 3] whole or not at all."""
    with replacing(path) as file:
        content = encode_mp4(pixels.numpy(), tag=tag, about=about, shortest=shortest)
        file.write(content + seal(content))


def decoded_blocks(vae: VAE, blocks: Iterable[Tensor]) -> Iterator[Tensor]:
    """Decode blocks of latents [B, n, C, h, w] in order -> uint8 [B, frames, H, W, 3] on the CPU.

    Blocks of small frames wait until there are as many as the decoder takes in one call.
    """
    # A call of the decoder costs the same for one small frame as for several
    decoder, waiting = StreamedDecoder(vae), list[Tensor]()
    for latents in blocks:
        count = sum(one.shape[1] for one in waiting) + latents.shape[1]
        if waiting and count > frames_at_once(*latents.shape[-2:]):
            yield to_pixels(decoder(torch.cat(waiting, 1))).cpu()
            waiting = []
        waiting.append(latents)
    if waiting:
        yield to_pixels(decoder(torch.cat(waiting, 1))).cpu()


def frames_at_once(height: int, width: int) -> int:
    """Return how many latent frames of this size one call of the decoder takes."""
    return max(1, POSITIONS_AT_ONCE // (height * width))


# --- An mp4 that grows while a rollout goes on, and plays at any moment
class GrowingVideo:
    """Pieces of pixels as fragments of an mp4, each with its checksum in a box that players leave out.

    A file that is there goes on after its last piece that is as it was written.
    """

    def __init__(self, path: str | Path, tag: str, about: str = ""):
        """tag names the run, about the decoder. CacheError for a file of another run."""
        self.path, self.tag, self.about = Path(path), tag, about
        self.pieces, self.is_finished = 0, False
        if self.path.exists():
            with open(self.path, "rb") as file:
                head = file.read(8)
            if len(head) == 8 and not head.endswith(b"ftyp"):
                raise CacheError(f"{self.path} is there and is no mp4; choose another --output_path")
            boxes = list(mp4_boxes(self.path))
            for kind, start, end in boxes:
                if kind == b"moov":
                    remedy = "choose another --output_path, or --overwrite to make it again"
                    require_same(self.path, tag_in(self.path, start, end), tag, remedy)
            kinds = [kind for kind, _, _ in boxes]
            content, ends = self.path.read_bytes(), self.ends()
            is_whole = b"mdat" in kinds and b"moof" not in kinds
            self.is_finished = is_whole and is_sealed(content)
            if not self.is_finished:
                pieces = pairwise([0] if is_whole else ends)  # a damaged whole one is made again
                whole = takewhile(is_sealed, (content[start:end] for start, end in pieces))
                self.keep(sum(1 for _ in whole))

    def keep(self, pieces: int) -> None:
        """Cut the file off after so many pieces."""
        self.pieces = pieces
        os.truncate(self.path, self.ends()[pieces])

    def ends(self) -> list[int]:
        """Return where the pieces end, behind their checksums."""
        return [0, *(end for kind, _, end in mp4_boxes(self.path) if kind == b"free")]

    def append(self, pixels: Tensor, first: int) -> None:
        """Encode uint8 pixels [frames, H, W, 3], from video frame first on, and write them to the end."""
        options = (*FRAGMENTED, "-fragment_index", str(self.pieces + 1))
        said: dict[str, Any] = {"tag": self.tag, "about": self.about, "shortest": SHORTEST_SIDE}
        content = bytearray(encode_mp4(pixels.numpy(), options=options, **said))
        # ffmpeg writes each piece from time 0; its decode time is set to when it begins in the whole video.
        time = content.index(b"tfdt") + 8  # a box is its size, type and content
        content[time : time + 8] = (TICKS * first).to_bytes(8, "big")
        start = content.index(b"moof") - 4 if self.pieces else 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab" if self.pieces else "wb") as file:
            piece = bytes(content[start : content.rindex(b"mfra") - 4])
            file.write(piece + seal(piece))
            file.flush()
            os.fsync(file.fileno())
        self.pieces += 1

    def finish(self) -> None:
        """Turn the pieces into an ordinary mp4, with its length in its head; the pictures stay."""
        part = part_of(self.path)
        command = [require_ffmpeg(), "-v", "error", "-y", "-i", str(self.path)]
        # Copied, not encoded again: the pictures stay as they are
        command += ["-c", "copy", "-metadata", f"comment={self.tag}"]
        command += ["-movflags", "+faststart", "-f", "mp4", str(part)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            part.unlink(missing_ok=True)
            raise RunError(f"{self.path} could not be finished: {done.stderr.strip()[-200:]}")
        with open(part, "r+b") as file:
            file.write(seal(file.read()))
        os.replace(part, self.path)
        self.is_finished = True


# --- The video of a run that is still going on
class LiveVideo:
    """The mp4 of one run: on a GPU, blocks are decoded and encoded while the next ones are denoised.

    The decoder has a thread and a CUDA stream of its own, and a GPU where the rollout leaves one free; the
    encoder has a thread. PATH.growing.mp4 plays what is there already. On a CPU, where a GPU has no room, and
    on the GPUs of a rollout of several, all is decoded at the end.
    """

    def __init__(
        self, config: RunConfig, path: str | Path, vae_dtype: str = "auto", preview: str | None = None
    ):
        """Begin to read the VAE, or a preview's decoder. CacheError where no mp4 can be written."""
        require_ffmpeg()
        if not preview:
            # Here, not in the decoder's thread: Ctrl-C in the middle of an import there left its lock held
            diffusers_vae()
        self.config, self.path = config, Path(path)
        self.growing = self.path.with_suffix(".growing.mp4")
        self.decoding, self.encoding = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.device = decoders_device(config)
        on_device = replace(config, device=str(self.device))
        self.vae = self.decoding.submit(load_vae, on_device, vae_dtype, preview)
        self.frames = 0  # latent frames that came
        self.pieces: list[Future] = []  # of the decoder, each with one of the encoder
        self.video: Any = None  # a GrowingVideo, and its decoder, once a block came
        self.decoder: Any = None

    def __enter__(self) -> "LiveVideo":
        return self

    def __exit__(self, *error: object) -> None:
        for threads in (self.decoding, self.encoding):
            threads.shutdown(cancel_futures=True)
        self.growing.unlink(missing_ok=True)

    def ready(self) -> None:
        """Wait for the VAE, before a rollout that may take hours. CheckpointError where there is none."""
        self.vae.result()

    def add(self, latents: Tensor) -> None:
        """Take a block's latents [1, n, C, h, w], which nobody changes afterwards."""
        # Here: in the decoder's thread the copy would make the rollout's GPU wait for the decoder's.
        latents = latents.to(self.device)
        overlaps = self.config.gpus == 1 or self.device.index == self.config.gpus
        if not self.frames and overlaps and has_room(latents):
            self.begin(self.device)
        if self.video is not None:
            first = max(0, 1 + VIDEO_FRAMES_PER_LATENT * (self.frames - 1))
            made = None if self.stream is None else torch.cuda.current_stream(self.device).record_event()
            self.pieces.append(self.decoding.submit(self._decode, latents, made, first))
        self.frames += latents.shape[1]

    def begin(self, device: torch.device) -> None:
        self.growing.unlink(missing_ok=True)
        self.video = GrowingVideo(self.growing, "", self.vae.result().made_by)
        self.decoder, self.stream = self.vae.result().stream(), stream_of(device)

    def _decode(self, latents: Tensor, made: "torch.cuda.Event | None", first: int) -> Future:
        """Decode a block once it is made, and let it be encoded."""
        # On its own stream the decoder runs beside the next block's denoising; None changes no stream
        with torch.cuda.stream(self.stream):
            if made is not None:
                made.wait()
            pixels = to_pixels(self.decoder(latents))[0].cpu()
        assert self.video is not None
        return self.encoding.submit(self.video.append, pixels, first)

    def save(self, latents: Tensor, fingerprint: str) -> None:
        """Write the mp4 of a finished run whole, from the pieces that are there or from its latents."""
        vae = self.vae.result()
        try:
            whole = self.video is not None and self.frames == latents.shape[1]
            for piece in self.pieces if whole else ():
                piece.result().result()
        except torch.OutOfMemoryError:
            whole = False
        if self.video is None or not whole:
            vars(self).pop("decoder", None)  # its memory
            save_video(latents.to(self.device), self.path, vae, self.config, fingerprint)
            return
        self.video.tag = tag_of(fingerprint, self.config, vae)
        self.video.finish()
        with replacing(self.path) as file:
            file.write(self.growing.read_bytes())


def decoders_device(config: RunConfig) -> torch.device:
    """Return a GPU that the rollout of a config leaves free, where one is visible, else its own device.

    A rollout has the first config.gpus of them, unless it names one.
    """
    device = choose_device(config.device)
    is_named = config.gpus == 1 and device.index is not None
    if device.type != "cuda" or is_named or config.gpus >= torch.cuda.device_count():
        return device
    return torch.device("cuda", config.gpus)


def stream_of(device: torch.device) -> "torch.cuda.Stream | None":
    """Return a stream of one's own on a GPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def has_room(latents: Tensor) -> bool:
    """Return True where the GPU of a rollout's first latents can hold the decoder beside it."""
    if not latents.is_cuda:
        return False
    # What torch's allocator holds unused counts as free, too
    free, _ = torch.cuda.mem_get_info(latents.device)
    unused = torch.cuda.memory_reserved(latents.device) - torch.cuda.memory_allocated(latents.device)
    return free + unused > ROOM * latents.shape[-2] * latents.shape[-1]
