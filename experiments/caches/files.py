"""Write whole files or none, one run per path; compare fingerprints; errors of runs; encode mp4s.

with replacing("cache/report.json") as file:      # the old file stays until the block has ended
    file.write(content)
"""

import errno
import json
import os
import platform
import re
import shutil
import signal
import struct
import tempfile
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from filelock import FileLock, Timeout

from wan.errors import UserError, library_writes, one_line, short_repr
from wan.seals import checksum

if TYPE_CHECKING:
    import numpy as np


SEAL_BYTES = 8 + 32  # of a box with a SHA-256, which players leave out
FPS = 16  # of Wan's videos
PARTIAL = ".partial.pt"  # of a stopped run's cache that must not replace a whole one
ONLY = "00000000"  # leads the fingerprint of a run that no other is known to be equal to


class CacheError(UserError, ValueError):
    """A cache or an output that cannot be read or written; one line that says what to do."""


class RunError(UserError, RuntimeError):
    """A run that started but cannot give a result, such as NaN in the latents."""


class StoppedError(UserError):
    """A run that was asked to stop, and has saved what it could; the message says how to go on."""


def interrupt(frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt, from a handler of signals; end the process at once where a module is imported.

    An exception within an import may pass through C++, which ends in terminate(), or through a callback that
    ignores it: the process would go on. Nothing is lost, for a run imports before it generates.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"error: stopped\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None], numbers: Iterable[int]) -> Iterator[None]:
    """Let a function handle these signals while the context lasts, but those that are ignored.

    Nothing changes outside the main thread, where no signals arrive.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file that becomes path, through links, when the block ends, and is removed if it fails."""
    path = target_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(path)
    try:
        with suppress(FileNotFoundError):
            part.unlink()  # of a killed process that had this number
        with open(part, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:  # after Ctrl-C too
        with suppress(OSError):
            part.unlink()  # is gone where it has become path


def save_report(report: Mapping[str, Any], path: str | Path) -> None:
    """Write a report as JSON, a list of numbers in a line."""
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    lists = r"\[\n\s+([^][{}]+)\n\s+\]"
    text = re.sub(lists, lambda one: "[" + re.sub(r"\n\s+", " ", one[1]) + "]", text)
    with replacing(path) as file:
        file.write(text.encode())


def target_of(path: str | Path) -> Path:
    """Follow links to the file that is written. OSError for a folder, device or pipe."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "Is a folder, device or pipe", str(path))
    return path


def part_of(path: Path) -> Path:
    """Return where a file is while it is being written by this thread of this process and host."""
    # Two hosts may write to one disk, and their processes may have one number
    writer = f"{platform.node()} {threading.get_ident()}".encode(errors="surrogateescape")
    return path.with_name(f".{path.name}.{os.getpid()}-{zlib.crc32(writer):08x}.part")


def require_writable(path: str | Path) -> None:
    """Raise CacheError, before hours of work, where path cannot become a file."""
    with library_writes(path, CacheError):
        target = target_of(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=target.parent).close()
        with suppress(FileNotFoundError):
            part_of(target).stat()  # its name may be too long where the output's own is not


def require_held(
    name: str, wanted: Any, there: Collection[Any], where: object = "this cache", error: Any = CacheError
) -> None:
    """Raise error where something that is chosen from what a file holds is not there."""
    if wanted not in there:
        raise error(f"{name} {short_repr(wanted)} is not in {where}; it has {in_words(there)}")


def in_words(allowed: Collection[Any]) -> str:
    """Return 0..11 for numbers from 0, else the values, of many the first."""
    values = list(allowed)
    if len(values) > 2 and values == [*range(len(values))]:
        return f"0..{values[-1]}"
    return ", ".join(map(str, values[:32])) + ", ..." * (len(values) > 32) or "none"


def require_suffix(path: str | Path, suffix: str) -> None:
    """Raise CacheError for a path that does not end as what is written there."""
    if Path(path).suffix != suffix:
        raise CacheError(f"{path} does not end in {suffix}, which is written there")


# --- Outputs of a run: never one of its inputs, one run per path, and room on the disk
def require_distinct(outputs: Iterable[str | Path], inputs: Iterable[str | Path | None]) -> None:
    """Raise CacheError where an output is an input or a file of an input folder, or is named twice."""
    # Resolved: a link to an input is that input
    read = [os.path.realpath(path) for path in inputs if path]
    folders = [path for path in read if os.path.isdir(path)]
    used = dict.fromkeys(read, "which this run reads")
    for path in map(os.path.realpath, outputs):
        in_folder = os.path.isfile(path) and any(Path(path).is_relative_to(folder) for folder in folders)
        if use := used.get(path, "which this run reads" if in_folder else None):
            raise CacheError(f"{path} is the same file as one {use}; give it another name")
        used[path] = "which this run writes too"


@contextmanager
def claimed(paths: Mapping[str, int], overwrite: bool = True) -> Iterator[None]:
    """Hold the locks of outputs, given with the bytes each will take, while a run makes them.

    Raises CacheError, before hours of work, where one cannot be written, is there and may not be replaced, is
    being made by another run, or does not fit on its disk.
    """
    for path in paths:
        require_writable(path)
        if not overwrite and Path(path).exists():
            raise CacheError(f"{path} is there already, and --no-overwrite keeps it; --overwrite replaces it")
    targets = {target_of(path): size for path, size in paths.items()}
    with ExitStack() as held:
        for target in sorted(targets):
            # The system frees the lock of a killed process, so a file that it left locks nobody out
            lock = FileLock(target.with_name(f".{target.name}.lock"), timeout=0)
            try:
                lock.acquire()
            except (Timeout, OSError):
                raise CacheError(
                    f"{target} is being made by another run; wait for it, or choose another --output_path"
                ) from None
            # Left in reverse order: the file goes while it is still locked, and who waits looks again
            held.callback(lock.release)
            held.callback(Path(lock.lock_file).unlink, missing_ok=True)
            remove_leftovers(target)
        for folder in {path.parent for path in targets}:
            require_space(folder, {str(path): n for path, n in targets.items() if path.parent == folder})
        yield


def require_space(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raise CacheError where a folder's disk has no room for files of these sizes."""
    needed, free = sum(sizes.values()), shutil.disk_usage(folder).free
    if needed > free:
        more = f" and {len(sizes) - 1} more" if len(sizes) > 1 else ""
        raise CacheError(
            f"{next(iter(sizes))}{more} cannot be written: it needs {needed} bytes, "
            f"{free} are free in {folder}"
        )


def remove_leftovers(path: Path) -> None:
    """Remove unfinished files of this name that killed runs left; the caller holds the path's lock."""
    for part in path.parent.glob(f".{escape(path.name)}.*.part"):
        if part.is_file() and not part.is_symlink():
            with suppress(OSError):
                part.unlink()


# --- What an output is of: its fingerprint (experiments/provenance.py), not its name or size
def require_same(path: str | Path, found: object, wanted: str, remedy: str) -> None:
    """Raise CacheError where a file's fingerprint differs from the run's."""
    if found != wanted or wanted.startswith(ONLY):
        said = f"fingerprint {short_repr(found)}" if found else "no fingerprint, or not the whole file"
        if str(found).startswith(ONLY) or wanted.startswith(ONLY):
            remedy = f"give your function a name, named(...), and {remedy}"
            said = f"{said} (a function without a name, so that no run equals another)"
        raise CacheError(f"{path} belongs to another run or code: it has {said}, not {wanted}; {remedy}")


def seal(content: bytes) -> bytes:
    """Return the box with the checksum of an mp4's content, or of a piece's, which stands behind it."""
    return SEAL_BYTES.to_bytes(4, "big") + b"free" + checksum(content)


def is_sealed(content: bytes) -> bool:
    """Return whether an mp4, or a piece, is as it was written; True where it has no checksum."""
    box = content[-SEAL_BYTES:]
    return box[:8] != seal(b"")[:8] or box == seal(content[:-SEAL_BYTES])


def mp4_tag(path: str | Path) -> str | None:
    """Return the text that encode_mp4 put into an mp4; None if it is missing, damaged, or has none."""
    # The boxes of a whole file reach to its end
    boxes = list(mp4_boxes(path)) if Path(path).is_file() else []
    if not boxes or boxes[-1][2] != Path(path).stat().st_size:
        return None
    # Each piece of one that grows has a checksum of its own
    content, kinds = Path(path).read_bytes(), [(kind, end - start) for kind, start, end in boxes]
    ends = [0, *(box[2] for box, kind in zip(boxes, kinds, strict=True) if kind == (b"free", SEAL_BYTES))]
    if not all(is_sealed(content[start:end]) for start, end in pairwise(ends)):
        return None
    return next((tag_in(path, start, end) for kind, start, end in boxes if kind == b"moov"), None)


def tag_in(path: str | Path, start: int, end: int) -> str | None:
    """Return the comment of an mp4 from its box of metadata, at start..end."""
    with open(path, "rb") as file:
        file.seek(start)
        box = file.read(end - start)
    _, found, content = box.partition(b"\xa9cmt")  # its content is a box: size, "data", kind, locale, text
    return content[16 : int.from_bytes(content[:4], "big")].decode(errors="replace") if found else None


def mp4_boxes(path: str | Path) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, start and end of the whole boxes of an mp4; what is torn off at the end is left out."""
    end, total = 0, Path(path).stat().st_size
    with open(path, "rb") as file:
        while end + 16 <= total:
            file.seek(start := end)
            # ISO 14496-12: 4 bytes of size, 4 of kind; size 1 means that 8 bytes of size follow
            size, kind, large = struct.unpack(">I4sQ", file.read(16))
            end += large if size == 1 else size
            if size in range(2, 8) or not size or end > total:
                return
            yield kind, start, end


# --- Videos
def require_ffmpeg(otherwise: str = "") -> str:
    """Return the path of ffmpeg. Raises CacheError, before anything is computed, where there is none."""
    try:
        import_module("imageio")  # both are needed only where a video is written
        return str(import_module("imageio_ffmpeg").get_ffmpeg_exe())
    except (ImportError, RuntimeError) as error:
        remedy = 'run: pip install "imageio[ffmpeg]"' + (f"; or {otherwise}" if otherwise else "")
        raise CacheError(
            f"videos are written by ffmpeg, which is not here ({one_line(error)}); {remedy}"
        ) from None


SHORTEST_SIDE = 256  # pixels; smaller videos are enlarged where people look at them


def encode_mp4(
    pixels: "np.ndarray",
    multiple: int = 8,
    options: Sequence[str] = (),
    tag: str = "",
    about: str = "",
    shortest: int = 1,
) -> bytes:
    """Encode uint8 pixels [frames, height, width, 3]; sides grow to a multiple, the shorter one to shortest.

    options are ffmpeg's. tag says what the video is of, and mp4_tag reads it; about describes it.
    """
    require_ffmpeg()
    import imageio.v3 as iio

    # Repeat pixels: interpolated ones would look like what the model made
    enlarge = -(-shortest // min(pixels.shape[1:3]))
    pixels = pixels.repeat(enlarge, 1).repeat(enlarge, 2)
    described = ["-metadata", f"description={about}"] if about else []
    # Players guess the matrix of a file that names none by its height, as it is chosen here.
    height, width = (-(-side // multiple) * multiple for side in pixels.shape[1:3])
    matrix = "bt709" if height >= 720 else "smpte170m"
    filters = f"scale={width}:{height}:out_color_matrix={matrix}:out_range=tv"
    colors = ["-vf", f"{filters},setparams=colorspace={matrix}:color_primaries={matrix}:color_trc=bt709"]
    return iio.imwrite(
        "<bytes>",
        pixels,
        extension=".mp4",
        fps=FPS,
        codec="libx264",
        macro_block_size=1,
        output_params=[*(("-metadata", f"comment={tag}") if tag else ()), *described, *colors, *options],
    )
