"""Latents -> pixels -> mp4, also while a rollout goes on that makes the latents; pictures -> latents."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from os.path import exists, isfile
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments import provenance
from experiments.caches import mp4, outputs
from experiments.caches.files import require_writable
from wan import errors
from wan.blocks import VIDEO_FRAMES_PER_LATENT
from wan.checkpoint import CheckpointError, read_model_config
from wan.config import RunConfig
from wan.files import read_tensors
from wan.vae import LATENT_CHANNELS, POSITIONS_AT_ONCE, VAE, Preview, diffusers_vae

ROOM = 1 << 20  # bytes of the GPU for each position of a frame of latents: what the decoder takes
AHEAD = 8  # blocks by which a rollout may be ahead of the decoder


def load_vae(config: RunConfig, dtype: str = "float32", preview: str | None = None) -> VAE | Preview:
    """Read the VAE of a config, or a preview's decoder, onto its device. auto is bfloat16 on a GPU alone.

    Raises CheckpointError for one of other latents than the model's.
    """
    device, channels = provenance.choose_device(config.device), read_model_config(config.ckpt_dir).in_dim
    if preview:
        if channels != LATENT_CHANNELS:
            raise CheckpointError(
                f"{preview} decodes latents of {LATENT_CHANNELS} channels, and the model's have {channels}; "
                "leave preview out"
            )
        return Preview.from_file(preview, provenance.choose_dtype(dtype, device), device)
    files = provenance.vae_files(config)
    vae = VAE.from_pretrained(config.ckpt_dir, provenance.choose_dtype(dtype, device), device)
    of_vae, pixels = (vae.vae.config.z_dim, vae.pixels_per_latent), config.pixels_per_latent
    if of_vae != (channels, pixels):
        raise CheckpointError(
            f"the VAE of {config.ckpt_dir} has latents of {of_vae[0]} channels, {of_vae[1]} pixels a side; "
            f"the model has {channels} channels, the config pixels_per_latent {pixels}: give the model's VAE"
        )
    vae.files = files  # as they were: the tags of its videos say so
    return vae


def check_video(config: RunConfig) -> None:
    """Raise CheckpointError for a VAE that cannot decode, CacheError where no mp4 can be written."""
    mp4.require_ffmpeg()
    load_vae(config)


# --- Latents to pixels
class BlockDecoder:
    """Decode the blocks of a video, or of a batch, in their order -> uint8 [B, frames, H, W, 3] on the CPU.

    A call of the decoder costs the same for one small frame as for several: blocks of small frames wait until
    there are as many as one call takes.
    """

    def __init__(self, vae: VAE | Preview):
        self.decoder = vae.stream()
        self.waiting: list[Tensor] = []

    def add(self, latents: Tensor) -> list[Tensor]:
        """Take the next block [B, n, C, h, w] -> the pieces of video that are ready: one, or none yet."""
        self.waiting.append(latents)
        frames = sum(block.shape[1] for block in self.waiting)
        if frames + latents.shape[1] > frames_at_once(*latents.shape[-2:]):
            return self.rest()
        return []

    def rest(self) -> list[Tensor]:
        """Decode the blocks that wait -> one piece of video, or none."""
        if not self.waiting:
            return []
        latents = torch.cat(self.waiting, 1)
        self.waiting = []
        return [to_pixels(self.decoder(latents)).cpu()]


def frames_at_once(height: int, width: int) -> int:
    """Return how many latent frames of this size one call of the decoder takes."""
    return max(1, POSITIONS_AT_ONCE // (height * width))


def to_pixels(video: Tensor) -> Tensor:
    """Video [B, frames, 3, H, W] in 0..1 -> uint8 [B, frames, H, W, 3]."""
    return (video.permute(0, 1, 3, 4, 2) * 255).round().byte()


def decoded_blocks(vae: VAE | Preview, blocks: Iterable[Tensor]) -> Iterator[Tensor]:
    """Decode blocks of latents [B, n, C, h, w] in order -> pieces of video uint8 [B, frames, H, W, 3]."""
    decoder = BlockDecoder(vae)
    for latents in blocks:
        yield from decoder.add(latents)
    yield from decoder.rest()


def decode(latents: Tensor, vae: VAE | Preview) -> Tensor:
    """Decode latents [1, F, C, h, w] -> uint8 [frames, height, width, 3] on the CPU."""
    with provenance.decoding_threads(latents.device, *latents.shape[-2:]):
        return torch.cat([*decoded_blocks(vae, [latents])], 1)[0]


# --- Latents to mp4s
def require_free(
    path: str | Path, config: RunConfig, overwrite: bool = False, num_frames: int | None = None
) -> outputs.Contents | None:
    """Return what the video of a run of a config will replace, which may have fewer latent frames.

    CacheError, unless overwrite, for a file that must stay (caches/outputs.py).
    """
    if not exists(path):  # False for a name that is too long
        return None  # and no weights need to be hashed
    frames = 1 + VIDEO_FRAMES_PER_LATENT * ((num_frames or config.num_frames) - 1)
    new = mp4.contents_of_video(frames, provenance.model_title(config))
    return outputs.require_replaceable(path, new, mp4.video_contents, overwrite)


def save_video(
    latents: Tensor, path: str | Path, vae: VAE | Preview, config: RunConfig, fingerprint: str
) -> None:
    """Decode latents and write an mp4, whole or not at all; small ones are enlarged.

    The mp4 carries the fingerprint of its run, and of the decoder.
    """
    require_writable(path)  # before the decoding
    mp4.write_mp4(
        decode(latents, vae).numpy(),
        path,
        tag=tag_of(fingerprint, config, vae),
        about=vae.made_by,
        model=provenance.model_title(config),
        fps=config.fps,
        overwrite=True,  # the caller has looked at what is there
    )


def tag_of(run: str, config: RunConfig, vae: VAE | Preview) -> str:
    """Return what an mp4 of a run carries that this decoder makes; its first word is the run."""
    if isinstance(vae, Preview):
        return provenance.video_tag(run, config, vae.identity)  # a preview is known by its weights
    return provenance.video_tag(run, config, str(vae.vae.dtype).removeprefix("torch."), vae.files)


class LiveVideo:
    """The mp4 of one run: blocks are decoded and encoded while the next ones are denoised.

    The decoder has a thread, on a GPU a CUDA stream of its own too, and a GPU where the rollout leaves one
    free. On a CPU the rollout waits for it after each block. Where a GPU has no room, and on the GPUs of a
    rollout of several, all is decoded at the end.
    """

    def __init__(
        self,
        config: RunConfig,
        path: str | Path,
        vae_dtype: str = "auto",
        preview: str | None = None,
        growing: str | Path | None = None,
    ):
        """Begin to read the VAE, or a preview's decoder. CacheError where no mp4 can be written.

        growing is the file that plays meanwhile: PATH.growing.mp4, which is removed, or the path itself,
        which keeps the finished blocks of a run that ends early.
        """
        mp4.require_ffmpeg()
        if not preview:
            # Here, not in the decoder's thread: Ctrl-C in the middle of an import there left its lock held
            diffusers_vae()
        self.config, self.path = config, Path(path)
        self.comment = ""  # of the growing file
        self.growing = Path(growing or self.path.with_suffix(".growing.mp4"))
        if self.growing != self.path:  # of a killed run, or somebody's own
            outputs.require_replaceable(self.growing, outputs.Contents("video"), mp4.video_contents)
        self.device = decoders_device(config)
        self.stream, self.ahead = None, 0
        if self.device.type == "cuda":
            self.stream, self.ahead = torch.cuda.Stream(self.device), AHEAD
        self.thread = ThreadPoolExecutor(1)
        on_device = replace(config, device=str(self.device))
        self.loading = self.thread.submit(load_vae, on_device, vae_dtype, preview)
        self.frames = 0  # latent frames that came
        self.jobs: deque[Future[None]] = deque()
        self.is_beside = True  # until the rollout is over
        self.file: mp4.VideoWriter | None = None  # and its decoder, once a block came
        self.decoder: BlockDecoder | None = None

    def __enter__(self) -> "LiveVideo":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if self.growing == self.path:
                self.wait()
        finally:
            self.thread.shutdown(cancel_futures=True)
            if self.file is not None:
                self.file.close()
            if self.growing != self.path:
                self.growing.unlink(missing_ok=True)

    @property
    def vae(self) -> VAE | Preview:
        """The decoder, once it is read."""
        return self.loading.result()

    def ready(self) -> None:
        """Wait for the VAE, before a rollout that may take hours. CheckpointError where there is none."""
        self.loading.result()

    def tag(self, fingerprint: str) -> str:
        """Return what the finished mp4 of a run carries."""
        return tag_of(fingerprint, self.config, self.vae)

    def add(self, latents: Tensor) -> None:
        """Take a block's latents [1, n, C, h, w], which nobody changes afterwards."""
        # Here: in the decoder's thread the copy would make the rollout's GPU wait for the decoder's.
        latents = latents.to(self.device)
        overlaps = self.config.gpus == 1 or self.device.index == self.config.gpus
        if not self.frames and overlaps and has_room(latents):
            self.begin()
        self.frames += latents.shape[1]
        self.submit(latents)

    def begin(self) -> None:
        """Begin an mp4 without frames."""
        self.decoder = BlockDecoder(self.vae)
        self.file = mp4.VideoWriter(
            self.path,
            growing=self.growing,
            comment=self.comment,
            about=self.vae.made_by,
            shortest=mp4.SHORTEST_SIDE,
            fps=self.config.fps,
        )

    def submit(self, latents: Tensor | None) -> None:
        """Let the thread decode a block once it is computed (None: what waits), where an mp4 was begun."""
        if self.file is None:
            return
        computed = None
        if self.stream is not None:
            computed = torch.cuda.current_stream(self.device).record_event()
        self.jobs.append(self.thread.submit(self._write, latents, computed))
        while len(self.jobs) > self.ahead:
            self.jobs.popleft().result()

    def _write(self, latents: Tensor | None, computed: "torch.cuda.Event | None") -> None:
        """Decode a block and send it to the encoder."""
        if self.file is None or self.decoder is None:
            return  # the memory did not suffice for an earlier one
        try:
            # On its own stream the decoder runs beside the next block's denoising; None changes no stream
            with (
                provenance.decoding_threads(self.device, self.config.height, self.config.width),
                torch.cuda.stream(self.stream),
            ):
                if computed is not None:
                    computed.wait()
                pieces = self.decoder.rest() if latents is None else self.decoder.add(latents)
        except torch.OutOfMemoryError:
            if not self.is_beside:
                raise
            self.file.close()
            self.file = self.decoder = None  # its memory is free
            return
        for pixels in pieces:
            self.file.append(pixels[0].numpy())

    def wait(self) -> None:
        """Wait until all blocks that came are sent to the encoder."""
        self.submit(None)
        while self.jobs:
            self.jobs.popleft().result()

    def save(self, blocks: Iterable[Tensor], fingerprint: str) -> None:
        """Write the mp4 of a finished run; its blocks are decoded now where that was not possible before."""
        self.wait()
        self.is_beside = False
        if self.file is None or self.frames != self.config.num_frames:
            self.begin()
            for latents in blocks:
                self.submit(latents.to(self.device))
            self.wait()
        assert self.file is not None
        self.file.finish(self.tag(fingerprint), provenance.model_title(self.config))


def decoders_device(config: RunConfig) -> torch.device:
    """Return a GPU that the rollout of a config leaves free, where one is visible, else its own device.

    A rollout has the first config.gpus of them, unless it names one.
    """
    device = provenance.choose_device(config.device)
    is_named = config.gpus == 1 and device.index is not None
    if device.type != "cuda" or is_named or config.gpus >= torch.cuda.device_count():
        return device
    return torch.device("cuda", config.gpus)


def has_room(latents: Tensor) -> bool:
    """Return True where the device of a rollout's first latents can hold the decoder beside it."""
    if not latents.is_cuda:
        return True
    # What torch's allocator holds unused counts as free, too
    free, _ = torch.cuda.mem_get_info(latents.device)
    unused = torch.cuda.memory_reserved(latents.device) - torch.cuda.memory_allocated(latents.device)
    return free + unused > ROOM * latents.shape[-2] * latents.shape[-1]


# --- Pictures to latents
def first_latents(source: Any, config: RunConfig, channels: int, vae: Callable[[], VAE]) -> Tensor:
    """Return the latents that a video begins with, float32 [1, G, C, h, w], of a tensor or a file.

    A tensor, .pt or .safetensors holds latents [G, C, h, w]; an mp4, or a picture (one latent frame), is
    encoded by the VAE. Raises ConfigError for other shapes, numbers that are not finite, and no whole blocks.
    """
    size = [channels, config.height, config.width]
    form = f"[frames, {', '.join(map(str, size))}]"
    name, latents = "first_frames", source
    # 1. Read a file: tensors, or pictures to encode.
    if isinstance(source, (str, Path)):
        name, path = f"first_frames {source}", Path(source)
        if not isfile(path):  # False for a name that is too long
            raise errors.ConfigError(f"{name} not found; {provenance.FRAMES_HINT}")
        if path.suffix in (".pt", ".pth", ".safetensors"):
            latents = read_latents(path, name, remedy=f"give latents {form}")
        else:
            sides = (config.pixels_per_latent * side for side in (config.height, config.width))
            latents = vae().encode(read_pixels(path, *sides))[0]
    # 2. Take latents of the model's sizes alone.
    if not has_numbers(latents) or not latents.is_floating_point():
        raise errors.ConfigError(
            f"{name} holds {errors.short_repr(latents)}, no finite latents of floating point {form}"
        )
    if latents.ndim == 5 and len(latents) == 1:
        latents = latents[0]
    if latents.ndim != 4 or list(latents.shape[1:]) != size or not latents.isfinite().all():
        raise errors.ConfigError(
            f"{name} holds {list(latents.shape)}, no finite latents of floating point {form}"
        )
    # 3. They fill whole blocks, and leave one; or block 0 holds one frame.
    ends = list(accumulate(config.block_sizes))[:-1]
    if config.held_first_frame:
        ends = sorted({1, *ends})
    if len(latents) not in ends:
        allowed = ", ".join(map(str, ends)) or "no"
        raise errors.ConfigError(
            f"{name} has {len(latents)} latent frames; a video of {config.num_frames} begins with whole "
            f"blocks, of {allowed} frames"
        )
    return latents[None].detach().float()


def has_numbers(x: Any) -> bool:
    """Return whether this is a tensor with a number in each place: not sparse, nested or of device meta."""
    return isinstance(x, Tensor) and x.layout == torch.strided and not (x.is_meta or x.is_nested)


def read_latents(path: Path, name: str, remedy: str) -> Any:
    """Read the tensor of a .pt or .safetensors, of several the one that is called latents; None without."""
    with errors.library_reads(name, remedy=remedy):
        content = read_tensors(path)
    if not isinstance(content, dict):
        return content
    if "latents" not in content and len(content) == 1:
        return next(iter(content.values()))
    return content.get("latents")


def read_pixels(path: Path, height: int, width: int) -> Tensor:
    """Read an mp4, or a picture as one frame -> float32 [1, frames, 3, height, width] in 0..1.

    A whole number of four frames a latent frame, and one, is taken from the start. Frames are scaled.
    """
    with errors.library_reads(path, remedy="give an mp4 or a picture that ffmpeg reads, of 8 bits a channel"):
        frames = [np.atleast_3d(frame) for frame in iio.imiter(path)]  # a grey one has no channels
        if not frames:
            raise ValueError("it has no frames")
        if any(frame.dtype != np.uint8 for frame in frames):
            raise ValueError(f"it has frames of {frames[0].dtype}")
        # Grey, perhaps with alpha, or colours, perhaps with alpha
        colours = [frame[..., : 1 if frame.shape[-1] < 3 else 3] for frame in frames]
        pixels = np.stack([np.broadcast_to(frame, (*frame.shape[:2], 3)) for frame in colours])
    video = torch.as_tensor(pixels).permute(0, 3, 1, 2).float() / 255
    if video.shape[2:] != (height, width):
        video = F.interpolate(video, (height, width), mode="area")
    return video[None]
