"""Mp4s: frames go through one ffmpeg process into a file that plays while it grows.

with VideoWriter("outputs/a.mp4") as video:
    video.append(pixels)                 # uint8 [frames, height, width, 3], as often as wanted
    video.finish("of this run")          # an ordinary mp4; mp4_tag() reads the comment
"""

import os
import re
import subprocess
from collections.abc import Generator
from importlib import import_module
from pathlib import Path

import numpy as np

from experiments.caches import files, outputs
from wan.errors import one_line

FPS = 16  # of Wan2.1's videos
TAG_BEFORE_2_1 = re.compile("[0-9a-f]{32}( [0-9a-f]{32}| unfinished)?")  # a comment without our mark
SHORTEST_SIDE = 256  # pixels; smaller videos are enlarged where people look at them
# Fragments of half a second reach the disk at once, and the encoder looks 8 frames ahead instead of 40: what
# plays is about two seconds behind.
FRAGMENTS = ["-movflags", "frag_keyframe+empty_moov+default_base_moof", "-frag_duration", "500000"]
FRAGMENTS += ["-flush_packets", "1", "-rc-lookahead", "8"]


def require_ffmpeg(otherwise: str = "") -> str:
    """Return the path of ffmpeg. Raises CacheError, before anything is computed, where there is none."""
    try:
        # Here: it is needed only where a video is written or read
        return str(import_module("imageio_ffmpeg").get_ffmpeg_exe())
    except (ImportError, RuntimeError) as error:
        remedy = 'run: pip install "imageio[ffmpeg]"'
        if otherwise:
            remedy += f"; or {otherwise}"
        raise files.CacheError(
            f"videos are written by ffmpeg, which is not here ({one_line(error)}); {remedy}"
        ) from None


class VideoWriter:
    """Encode the frames of one video as they come, by one ffmpeg process.

    Until finish() they are in a file beside the path, which is removed, or in growing, which may be the path
    itself. The process has a process group of its own, which Ctrl-C does not reach; where this process is
    killed, it writes the frames that it has and ends.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        growing: str | Path | None = None,
        comment: str = "",
        about: str = "",
        shortest: int = 1,
        multiple: int = 8,
        fps: int = FPS,
    ):
        """Give the sizes: sides grow to a multiple, the shorter one to shortest pixels.

        comment is that of the growing file; about describes the video. CacheError where there is no ffmpeg.
        """
        require_ffmpeg()
        self.path = files.target_of(path)
        if growing is None:
            self.growing = files.part_of(self.path).with_suffix(".growing.part")
        else:
            self.growing = files.target_of(growing)
        self.comment, self.about = comment, about
        self.shortest, self.multiple, self.fps = shortest, multiple, fps
        self.frames = 0
        self.pipe: Generator[None, np.ndarray, None] | None = None

    def __enter__(self) -> "VideoWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        if self.growing != self.path:
            self.growing.unlink(missing_ok=True)

    def append(self, pixels: np.ndarray) -> None:
        """Send uint8 pixels [frames, height, width, 3], all of one size. RunError where ffmpeg has ended."""
        enlarge = -(-self.shortest // min(pixels.shape[1:3]))
        if enlarge > 1:
            # Repeat pixels: interpolated ones would look like what the model made
            pixels = pixels.repeat(enlarge, 1).repeat(enlarge, 2)
        if self.pipe is None:
            self.pipe = self._started(pixels.shape[1], pixels.shape[2])
        try:
            self.pipe.send(np.ascontiguousarray(pixels))
        except OSError as error:
            raise files.RunError(f"{self.growing}: ffmpeg has ended; is the disk full?") from error
        self.frames += len(pixels)

    def _started(self, height: int, width: int) -> Generator[None, np.ndarray, None]:
        """Start ffmpeg for frames of a size -> the pipe to it."""
        even_height, even_width = (-(-side // self.multiple) * self.multiple for side in (height, width))
        # Players guess the matrix of a file that names none by its height, as it is chosen here.
        matrix = "bt709" if even_height >= 720 else "smpte170m"
        scale = f"scale={even_width}:{even_height}:out_color_matrix={matrix}:out_range=tv"
        colors = f"setparams=colorspace={matrix}:color_primaries={matrix}:color_trc=bt709"
        options = ["-vf", f"{scale},{colors}", *FRAGMENTS, "-f", "mp4"]
        options += ["-metadata", f"comment={with_mark(self.comment)}"]
        if self.about:
            options += ["-metadata", f"description={self.about}"]
        # A process that outlived its run may still write to the file of that name: it keeps the old file
        self.growing.parent.mkdir(parents=True, exist_ok=True)
        self.growing.unlink(missing_ok=True)
        pipe: Generator[None, np.ndarray, None] = import_module("imageio_ffmpeg").write_frames(
            str(self.growing),
            (width, height),
            fps=self.fps,
            codec="libx264",
            macro_block_size=1,
            ffmpeg_log_level="quiet",
            output_params=options,
        )
        pipe.send(None)  # type: ignore[arg-type]  # starts the process
        return pipe

    def close(self) -> None:
        """End the process: all frames are in the growing file."""
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None

    def finish(self, comment: str = "", model: str = "") -> None:
        """Write an ordinary mp4 of all frames to the path, whole or not at all. RunError where some lack.

        comment says which run it is of, model which model and weights, as provenance.model_title.
        """
        self.close()
        with files.replacing(self.path) as file:
            # The index comes last: a file that was cut off has none, and nobody takes it for a whole one
            copy = ["-i", str(self.growing), "-c", "copy", "-metadata", f"comment={with_mark(comment)}"]
            copy += ["-metadata", f"title={model}", "-f", "mp4"]
            done = run_ffmpeg("-y", *copy, "-progress", "-", file.name)
            written = frames_in(done.stdout)
            if written != self.frames:
                reason = done.stderr.strip()[-200:] or "is the disk full?"
                raise files.RunError(f"{self.path}: {written} of {self.frames} frames were written; {reason}")
        if self.growing != self.path:
            self.growing.unlink(missing_ok=True)


def write_mp4(
    pixels: np.ndarray,
    path: str | Path,
    *,
    tag: str = "",
    about: str = "",
    model: str = "",
    shortest: int = SHORTEST_SIDE,
    multiple: int = 8,
    fps: int = FPS,
    overwrite: bool = False,
) -> None:
    """Write uint8 pixels [frames, height, width, 3] as an mp4, whole or not at all.

    tag says what the video is of, and mp4_tag reads it; about describes it, model is that of its run; sizes
    are VideoWriter's. CacheError, unless overwrite, for a file there that must stay (outputs.py).
    """
    if not overwrite:
        outputs.require_replaceable(path, contents_of_video(len(pixels), model), video_contents)
    with VideoWriter(path, about=about, shortest=shortest, multiple=multiple, fps=fps) as video:
        video.append(pixels)
        video.finish(tag, model)


# --- What an mp4 says, asked of ffmpeg
def mp4_tag(path: str | Path) -> str | None:
    """Return the comment of an mp4, which names its run; None without one, and where the file was cut off."""
    comment = metadata_of(path).get("comment", "")
    return comment.removeprefix(outputs.MARK).strip() or None


def with_mark(comment: str) -> str:
    """Return a comment that says which program wrote the mp4."""
    return f"{outputs.MARK} {comment}".strip()


def metadata_of(path: str | Path) -> dict[str, str]:
    """Return what an mp4 says of itself, by name; nothing of a file that is none."""
    if not Path(path).is_file():
        return {}
    text = run_ffmpeg("-i", os.path.realpath(path), "-f", "ffmetadata", "-").stdout
    return dict(re.findall("^([a-z_]+)=(.*)$", text, re.MULTILINE))


def contents_of_video(frames: int, model: str = "") -> outputs.Contents:
    """Return what a video holds: frames of a model's run."""
    return outputs.Contents("video", {"model": model or None}, {"frames": range(frames)})


def video_contents(path: Path) -> outputs.Contents | None:
    """Return what an mp4 holds; None for one that this program did not write."""
    metadata = metadata_of(path)
    comment = metadata.get("comment", "")
    if not comment.startswith(outputs.MARK) and not TAG_BEFORE_2_1.fullmatch(comment):
        return None
    count = ["-i", os.path.realpath(path), "-map", "0:v:0", "-c", "copy", "-f", "null"]
    frames = frames_in(run_ffmpeg(*count, "-progress", "-", os.devnull).stdout)
    return contents_of_video(frames, metadata.get("title", ""))


def shows_nothing(path: str | Path) -> bool:
    """Return True for an mp4 that was cut off: it has no frames, and says of no run."""
    with open(path, "rb") as file:
        kind = file.read(8)[4:]
    return kind in (b"", b"ftyp") and count_frames(path) == 0


def count_frames(path: str | Path) -> int:
    """Decode an mp4 and count its frames; 0 where one cannot be decoded."""
    decode = ["-i", os.path.realpath(path), "-map", "0:v:0", "-f", "null"]
    return frames_in(run_ffmpeg(*decode, "-progress", "-", os.devnull).stdout)


def run_ffmpeg(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ffmpeg in a process group of its own -> its outputs."""
    command = [require_ffmpeg(), "-nostdin", "-v", "error", *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", process_group=0)


def frames_in(progress: str) -> int:
    """Return the last number of frames that ffmpeg's -progress names."""
    counts = re.findall(r"^frame=(\d+)", progress, re.MULTILINE)
    return int(counts[-1]) if counts else 0
