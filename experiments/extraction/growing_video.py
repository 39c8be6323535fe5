"""An mp4 that grows while a rollout goes on, and plays at any moment: a kill loses no frame that is in it.

It is a fragmented mp4 (ISO/IEC 14496-12, movie fragments): a head, and then pairs of boxes moof and mdat, one
pair for each piece of video that was encoded by itself. A piece is appended, and a half of one is cut off.
"""

import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from experiments.caches.atomic_files import part_of
from experiments.caches.errors import CacheError, RunError
from experiments.caches.mp4_files import require_ffmpeg
from experiments.extraction.video import SHORTEST_SIDE, encoded

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
