"""Latents of a long video on disk, block by block: a .safetensors that is filled from its beginning.

Its head says at once how many frames there will be; the frames follow in order, so that a file which is cut
off holds its first blocks. When all are there any reader of safetensors opens it.
"""

import json
import os
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.caches.errors import CacheError

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
